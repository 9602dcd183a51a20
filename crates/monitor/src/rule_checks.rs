//! What the rules of a policy say of one call: asked about each path as the program wrote it, about each file that was
//! found, and about each address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::io::Errno;

use crate::log::Event;
use crate::policy::network::{Address, described};
use crate::policy::rules::{Destination, Rules, Verdict};
use crate::syscall::Syscall;

/// The path without `.`, `..` and doubled slashes, by the letter.
fn lexical(path: &[u8]) -> Vec<u8> {
    let mut names: Vec<&[u8]> = Vec::new();
    for name in path.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => (),
            b".." => {
                names.pop();
            }
            name => names.push(name),
        }
    }
    names.iter().fold(Vec::new(), |path, name| [path.as_slice(), b"/", name].concat())
}

/// The addresses of this machine, the loopback addresses first.
fn own_addresses() -> Result<Vec<IpAddr>, Errno> {
    let mut all = vec![IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the call sets the pointer to a list, which is given back below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(Errno::NOBUFS);
    }
    let mut at = list;
    // SAFETY: each entry lives until the list is given back, and the last one's successor is null.
    while let Some(entry) = unsafe { at.as_ref() } {
        // SAFETY: an address is null or begins with its family, which tells how long it is; IPv4's is 16
        // bytes, IPv6's is 28.
        let found =
            unsafe { entry.ifa_addr.as_ref() }.and_then(|address| match i32::from(address.sa_family) {
                libc::AF_INET => {
                    // SAFETY: an address of family AF_INET has the 16 bytes of a `sockaddr_in`, and is read
                    // unaligned.
                    let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                    Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr))))
                }
                libc::AF_INET6 => {
                    // SAFETY: an address of family AF_INET6 has the 28 bytes of a `sockaddr_in6`, and is read
                    // unaligned.
                    let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                    Some(IpAddr::V6(Ipv6Addr::from(address.sin6_addr.s6_addr)))
                }
                _ => None,
            });
        all.extend(found.filter(|found| !all.contains(found)));
        at = entry.ifa_next;
    }
    // SAFETY: the list came from getifaddrs(3), and nothing of it is used any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(all)
}

impl Syscall<'_> {
    fn rules(&self) -> Option<&dyn Rules> {
        self.state.policy.rules.as_ref().map(|given| &*given.0).filter(|rules| rules.asks(self.name()))
    }

    /// Whether rules are about names beneath a path.
    pub(crate) fn keeps_names(&self, path: &[u8]) -> bool {
        self.state.policy.rules.as_ref().is_some_and(|given| given.0.keeps_names(path))
    }

    /// Whether rules have nothing to say about a path.
    pub(crate) fn passes(&self, path: &[u8]) -> bool {
        self.rules().is_none_or(|rules| rules.path(self.name(), path) == Verdict::Pass)
    }

    /// The path to use in place of one that the program wrote, seen from the directory whose path `base` tells.
    ///
    /// # Errors
    /// What the rules have the call fail with; see [`Syscall::ruled`].
    pub(crate) fn rewritten(
        &self,
        path: &[u8],
        base: impl FnOnce() -> Result<Vec<u8>, Errno>,
    ) -> Result<Option<Vec<u8>>, Errno> {
        let Some(rules) = self.rules() else { return Ok(None) };
        let whole = if path.first() == Some(&b'/') {
            lexical(path)
        } else {
            lexical(&[base()?.as_slice(), b"/", path].concat())
        };
        let whole = if whole.is_empty() { b"/".to_vec() } else { whole };
        match rules.path(self.name(), &self.known_as(&whole)) {
            Verdict::Path(new) => {
                self.rewrote.borrow_mut().push(new.clone());
                Ok(Some(new))
            }
            ruling => self.obey(ruling, &whole).map(|()| None),
        }
    }

    /// Asks about the path of a file that was found. What was rewritten is not rewritten again; what leads through a link to a
    /// path that is to be rewritten is refused.
    ///
    /// # Errors
    /// As of [`Syscall::rewritten`].
    pub(crate) fn ask_rules(&self, path: &[u8]) -> Result<(), Errno> {
        let Some(rules) = self.rules() else { return Ok(()) };
        match rules.path(self.name(), path) {
            Verdict::Path(_) if self.rewrote.borrow().iter().any(|new| new == path) => Ok(()),
            Verdict::Path(_) => self.obey(Verdict::Fails(libc::EACCES), path),
            ruling => self.obey(ruling, path),
        }
    }

    /// Asks about an address that is to be reached. What is to be redirected and was not is refused.
    ///
    /// # Errors
    /// As of [`Syscall::rewritten`].
    pub(crate) fn ask_rules_of_address(&self, address: &Address, redirected: bool) -> Result<(), Errno> {
        match self.redirection(address)? {
            Some(_) if !redirected => self.obey(Verdict::Fails(libc::EACCES), described(address).as_bytes()),
            _ => Ok(()),
        }
    }

    /// Asks about an address; tells by what to replace it.
    ///
    /// # Errors
    /// As of [`Syscall::rewritten`].
    pub(crate) fn redirection(&self, address: &Address) -> Result<Option<Vec<u8>>, Errno> {
        let Some(rules) = self.rules() else { return Ok(None) };
        let name;
        let mut candidates = Vec::new();
        match address {
            Address::Unspecified => return Ok(None),
            Address::Internet(_, ip, port) => {
                candidates.push(Destination::Internet(SocketAddr::new(*ip, *port)));
                // Who is reached at every address is reached at each. (Where no address is a destination, it has been replaced
                // by the one that the kernel uses.)
                if ip.to_canonical().is_unspecified() {
                    let both = ip.to_canonical().is_ipv6();
                    let reached = own_addresses()?.into_iter().filter(|own| both || own.is_ipv4());
                    let all = reached.chain(both.then_some(Ipv4Addr::UNSPECIFIED.into()));
                    candidates.extend(all.map(|own| Destination::Internet(SocketAddr::new(own, *port))));
                }
            }
            Address::Path(path) => candidates.push(Destination::Unix(path)),
            Address::Abstract(text) => {
                name = [b"\0", text.as_slice()].concat();
                candidates.push(Destination::Unix(&name));
            }
            Address::Other(_) => candidates.push(Destination::Other),
        }
        for candidate in candidates {
            match rules.address(self.name(), candidate) {
                Verdict::Address(new) => return Ok(Some(new)),
                ruling => self.obey(ruling, described(address).as_bytes())?,
            }
        }
        Ok(None)
    }

    fn obey(&self, ruling: Verdict, about: &[u8]) -> Result<(), Errno> {
        match ruling {
            Verdict::Fails(error) => {
                self.note(&Event::Rule { about });
                Err(Errno::from_raw_os_error(error))
            }
            Verdict::Returns(value) => {
                self.note(&Event::Rule { about });
                self.returns.set(Some(value));
                Err(Errno::CANCELED)
            }
            Verdict::Pass | Verdict::Path(_) | Verdict::Address(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_its_loopback_addresses_once() {
        let all = own_addresses().unwrap();
        assert!(all.starts_with(&[Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]));
        let different: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len(), "{all:?}");
    }

    #[test]
    fn paths_are_plain_by_the_letter() {
        assert_eq!(lexical(b"/a//b/./c/../d/"), b"/a/b/d");
        assert_eq!(lexical(b"/../.."), b"");
        assert_eq!(lexical(b"a"), b"/a");
    }
}
