//! Rules that come from elsewhere, asked beside the policy: what `orrery run --enforce` is made of.
//!
//! A [`Policy`](crate::Policy) lists what is allowed; rules rather say what becomes of certain calls, in their order, and let all others
//! pass. Here they are asked where the policy is asked: about the path as the program wrote it, before the file is looked for, and about
//! the path of the file that was found, as the kernel spells it. What a rule has denied of either is not done, whatever links lead there.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::Errno;
use syscalls::Sysno;

use crate::job::Job;
use crate::log::Event;
use crate::perform::{About, HANDLERS};
use crate::policy::network::Address;

/// What becomes of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ruling {
    /// It is performed.
    Pass,
    /// It fails with this error of errno(3).
    Fails(i32),
    /// It returns this.
    Returns(i64),
    /// It is performed on this path in place of that which was asked about.
    Path(Vec<u8>),
    /// It goes to this `struct sockaddr` in place of the address that was asked about.
    Address(Vec<u8>),
}

/// Where a call goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination<'a> {
    /// An internet address.
    Internet(SocketAddr),
    /// A Unix socket: its path, or a zero byte and its abstract name.
    Unix(&'a [u8]),
    /// Of another family.
    Other,
}

/// What may be executed: files, and directories with all that lies beneath.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Executions {
    /// All but these.
    AllBut(Vec<PathBuf>),
    /// Only these.
    Only(Vec<PathBuf>),
}

/// Rules about calls. They are asked by several threads at a time.
pub trait Rules: Send + Sync {
    /// What becomes of this call whatever its arguments are; `None` where it depends on them, or nothing is said.
    fn call(&self, call: &str) -> Option<Ruling>;

    /// Whether paths or addresses are to be asked about for this call.
    fn asks(&self, call: &str) -> bool;

    /// What becomes of a call with this path, which is absolute.
    fn path(&self, call: &str, path: &[u8]) -> Ruling;

    /// What becomes of a call that goes there.
    fn address(&self, call: &str, address: Destination<'_>) -> Ruling;

    /// Whether something is said of paths beneath this one, so that it must not be renamed.
    fn keeps_names(&self, path: &[u8]) -> bool;

    /// What may be executed. The second wall holds that, too.
    fn executions(&self) -> Executions;
}

/// Rules that were given.
#[derive(Clone)]
pub(crate) struct Given(pub(crate) Arc<dyn Rules>);

impl core::fmt::Debug for Given {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        out.write_str("Rules")
    }
}

/// Whether the monitor can hold a rule about this call's paths or addresses: those of the calls that it performs.
#[must_use]
pub fn holds(call: &str) -> bool {
    let held = |about: About| !matches!(about, About::Caller | About::Shared);
    HANDLERS.iter().any(|(name, about, _)| *name == call && held(*about))
}

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

impl Job<'_> {
    fn rules(&self) -> Option<&dyn Rules> {
        self.monitor.policy.rules.as_ref().map(|given| &*given.0).filter(|rules| rules.asks(self.name()))
    }

    /// Whether rules are about names beneath a path.
    pub(crate) fn keeps_names(&self, path: &[u8]) -> bool {
        self.monitor.policy.rules.as_ref().is_some_and(|given| given.0.keeps_names(path))
    }

    /// Whether rules have nothing to say about a path.
    pub(crate) fn passes(&self, path: &[u8]) -> bool {
        self.rules().is_none_or(|rules| rules.path(self.name(), path) == Ruling::Pass)
    }

    /// The path to use in place of one that the program wrote, seen from the directory whose path `base` tells.
    ///
    /// # Errors
    /// What the rules have the call fail with; see [`Job::ruled`].
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
            Ruling::Path(new) => {
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
    /// As of [`Job::rewritten`].
    pub(crate) fn ask_rules(&self, path: &[u8]) -> Result<(), Errno> {
        let Some(rules) = self.rules() else { return Ok(()) };
        match rules.path(self.name(), path) {
            Ruling::Path(_) if self.rewrote.borrow().iter().any(|new| new == path) => Ok(()),
            Ruling::Path(_) => self.obey(Ruling::Fails(libc::EACCES), path),
            ruling => self.obey(ruling, path),
        }
    }

    /// Asks about an address that is to be reached. What is to be redirected and was not is refused.
    ///
    /// # Errors
    /// As of [`Job::rewritten`].
    pub(crate) fn ask_rules_of_address(&self, address: &Address, redirected: bool) -> Result<(), Errno> {
        match self.redirection(address)? {
            Some(_) if !redirected => {
                self.obey(Ruling::Fails(libc::EACCES), super::perform::described(address).as_bytes())
            }
            _ => Ok(()),
        }
    }

    /// Asks about an address; tells by what to replace it.
    ///
    /// # Errors
    /// As of [`Job::rewritten`].
    pub(crate) fn redirection(&self, address: &Address) -> Result<Option<Vec<u8>>, Errno> {
        let Some(rules) = self.rules() else { return Ok(None) };
        let name;
        let mut candidates = Vec::new();
        match address {
            Address::Unspecified => return Ok(None),
            Address::Internet(_, ip, port) => {
                candidates.push(Destination::Internet(SocketAddr::new(*ip, *port)));
                // To connect to no address is to connect to oneself.
                if ip.is_unspecified() {
                    candidates.push(Destination::Internet(SocketAddr::from(([127, 0, 0, 1], *port))));
                    candidates.push(Destination::Internet(SocketAddr::from((
                        std::net::Ipv6Addr::LOCALHOST,
                        *port,
                    ))));
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
                Ruling::Address(new) => return Ok(Some(new)),
                ruling => self.obey(ruling, super::perform::described(address).as_bytes())?,
            }
        }
        Ok(None)
    }

    fn obey(&self, ruling: Ruling, about: &[u8]) -> Result<(), Errno> {
        match ruling {
            Ruling::Fails(error) => {
                self.note(&Event::Rule { about });
                Err(Errno::from_raw_os_error(error))
            }
            Ruling::Returns(value) => {
                self.note(&Event::Rule { about });
                self.returns.set(Some(value));
                Err(Errno::CANCELED)
            }
            Ruling::Pass | Ruling::Path(_) | Ruling::Address(_) => Ok(()),
        }
    }
}

/// What becomes of a call whatever its arguments are.
pub(crate) fn unconditional(rules: &dyn Rules, call: Sysno) -> Option<Ruling> {
    rules.call(call.name()).filter(|ruling| *ruling != Ruling::Pass)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_plain_by_the_letter() {
        assert_eq!(lexical(b"/a//b/./c/../d/"), b"/a/b/d");
        assert_eq!(lexical(b"/../.."), b"");
        assert_eq!(lexical(b"a"), b"/a");
    }

    #[test]
    fn what_is_performed_is_held() {
        assert!(holds("openat") && holds("connect") && holds("fchmod") && holds("execve"));
        assert!(!holds("read") && !holds("chdir") && !holds("setuid") && !holds("shmat"));
    }
}
