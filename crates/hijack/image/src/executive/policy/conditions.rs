//! What a rule asks about a call. Each fact is found out once, and only if some rule asks for it.

use crate::executive::abi::syscall::{ENAMETOOLONG, address_mut, call, failed};
use crate::executive::abi::user_memory;
use crate::executive::policy::call_stack::Callers;
use crate::executive::policy::paths::PathBuffer;
use crate::executive::policy::table::Policy;
use crate::executive::policy::{call_stack, paths};
use crate::policy::{Address, NO_ARGUMENT, Rule, Shape, kinds};
use crate::{glob, nr};

const AF_UNIX: u16 = 1;
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
/// `struct sockaddr_un` with a path of full length, and a little more.
const LONGEST_ADDRESS: usize = 128;

/// Room for the path of a Unix socket, with a zero behind it.
const UNIX_PATH: [u8; LONGEST_ADDRESS + 1] = [0; LONGEST_ADDRESS + 1];
/// `struct mmsghdr`.
const MESSAGE_BYTES: u64 = 64;
/// As many messages as the kernel sends at a time (UIO_MAXIOV).
const MOST_MESSAGES: u64 = 1024;

/// A call that the policy has rules about.
pub(crate) struct Call {
    pub(crate) policy: Policy,
    pub(crate) number: u64,
    /// As the program gave them.
    pub(crate) arguments: [u64; 6],
    /// The address behind the call instruction.
    pub(crate) site: u64,
    /// The program's stack pointer.
    pub(crate) stack: u64,
}

/// What is known of a call so far.
pub(crate) struct Facts<'a> {
    policy: Policy,
    shape: &'static Shape,
    number: u64,
    /// As the program gave them.
    arguments: [u64; 6],
    site: u64,
    stack: u64,
    /// Where paths are kept.
    pub(crate) room: PathBuffer<'a>,
    paths: Option<Result<[&'a [u8]; 2], i64>>,
    kind: Option<u32>,
    callers: Option<Callers>,
}

impl<'a> Facts<'a> {
    pub(crate) fn new(call: &Call, room: PathBuffer<'a>) -> Self {
        let Call { policy, number, arguments, site, stack } = *call;
        let shape = policy.shape(number);
        Self { policy, shape, number, arguments, site, stack, room, paths: None, kind: None, callers: None }
    }

    /// Returns whether all of a rule's conditions hold, and which of the call's paths fit, if the rule names some.
    ///
    /// # Errors
    /// What the call is to return because a path is too long to be judged.
    pub(crate) fn matches(&mut self, rule: &Rule) -> Result<Option<[bool; 2]>, i64> {
        if rule.kinds != 0 && self.kind() & rule.kinds == 0 {
            return Ok(None);
        }
        if rule.callers != 0 && call_stack::marks(self.callers()) & rule.callers == 0 {
            return Ok(None);
        }
        if rule.site != 0 && call_stack::hash(self.number, self.callers()) != rule.site {
            return Ok(None);
        }
        if rule.address.family != 0 && !self.goes_to(&rule.address) {
            return Ok(None);
        }
        if rule.path.length == 0 {
            return Ok(Some([false; 2]));
        }
        let patterns = self.policy.bytes(rule.path);
        let paths = self.paths()?;
        let mut fits = paths.map(|path| !path.is_empty() && glob::any_matches(patterns, path));
        if fits == [false; 2] && self.further_messages_fit(patterns)? {
            fits[1] = true;
        }
        Ok((fits != [false; 2]).then_some(fits))
    }

    fn argument(&self, index: u8) -> Option<u64> {
        self.arguments.get(usize::from(index)).copied()
    }

    /// Returns the call's paths; or where its descriptor leads, and the path of the Unix socket that it names. Empty
    /// ones are none, or are not known: then the kernel returns the error.
    ///
    /// # Errors
    /// `-ENAMETOOLONG`.
    pub(crate) fn paths(&mut self) -> Result<[&'a [u8]; 2], i64> {
        if let Some(paths) = self.paths {
            return paths;
        }
        let found = self.find_paths();
        self.paths = Some(found);
        found
    }

    fn find_paths(&mut self) -> Result<[&'a [u8]; 2], i64> {
        let mut found: [&'a [u8]; 2] = [&[], &[]];
        let shape = self.shape;
        for (place, (path, directory)) in found.iter_mut().zip(shape.path.into_iter().zip(shape.directory)) {
            let Some(path) = self.argument(path) else { continue };
            let directory = self.argument(directory);
            *place = known(self.room.take(|room| paths::absolute(directory, path, room)))?;
        }
        if shape.path[0] == NO_ARGUMENT
            && let Some(descriptor) = self.argument(shape.descriptor)
        {
            let path = self.room.take(|room| paths::of_fd(descriptor as i32, room));
            found[0] = known(path)?;
        }
        let mut bytes = UNIX_PATH;
        if shape.path[1] == NO_ARGUMENT
            && let Some(start) = self.unix_path(0, &mut bytes)
        {
            found[1] = known(self.room.take(|room| paths::absolute(None, start, room)))?;
        }
        Ok(found)
    }

    /// Returns whether the socket's path of a message behind the first fits one of these patterns.
    ///
    /// # Errors
    /// `-ENAMETOOLONG`.
    fn further_messages_fit(&mut self, patterns: &[u8]) -> Result<bool, i64> {
        for index in 1..self.messages() {
            let mut bytes = UNIX_PATH;
            let Some(start) = self.unix_path(index, &mut bytes) else { continue };
            let fits = self.room.lend(|room| {
                let length = paths::absolute(None, start, room)?;
                Ok(glob::any_matches(patterns, room.get(..length).unwrap_or(&[])))
            });
            match fits {
                Ok(true) => return Ok(true),
                Err(error) if error == -ENAMETOOLONG => return Err(error),
                _ => {}
            }
        }
        Ok(false)
    }

    /// Copies the path of the Unix socket that the call names, or one of its messages; where the copy begins.
    fn unix_path(&self, index: u64, bytes: &mut [u8; UNIX_PATH.len()]) -> Option<u64> {
        let (address, length) = self.socket_address(index)?;
        let length = (length as usize).min(LONGEST_ADDRESS);
        let read = user_memory::read_some(address, bytes.get_mut(..length)?).unwrap_or(0);
        let family = AF_UNIX.to_ne_bytes();
        // What begins with a zero is an abstract name, or none.
        let path = bytes.get(..read)?.strip_prefix(&family)?;
        path.first().filter(|first| **first != 0).map(|_| path.as_ptr().addr() as u64)
    }

    /// Returns how many messages the call sends: each may go to an address of its own.
    fn messages(&self) -> u64 {
        if self.number == nr::sendmmsg { self.argument(2).unwrap_or(0).min(MOST_MESSAGES) } else { 1 }
    }

    /// Returns where the address of a socket is that the call names, or one of its messages, and how long it is.
    fn socket_address(&self, index: u64) -> Option<(u64, u64)> {
        let first = self.argument(self.shape.address)?;
        if matches!(self.number, nr::sendmsg | nr::sendmmsg) {
            // `msg_name` and `msg_namelen` begin a `struct msghdr`; the length has four bytes.
            let header = first.wrapping_add(index.wrapping_mul(MESSAGE_BYTES));
            // SAFETY: any bytes are valid integers.
            let [name, length] = unsafe { user_memory::read::<[u64; 2]>(header) }.ok()?;
            return (name != 0).then_some((name, length & 0xffff_ffff));
        }
        Some((first, self.argument(self.shape.address.wrapping_add(1))?)).filter(|(address, _)| *address != 0)
    }

    /// Returns what kind of thing the call's descriptor leads to.
    fn kind(&mut self) -> u32 {
        if let Some(kind) = self.kind {
            return kind;
        }
        const MODE_AT: usize = 6;
        const FORMAT: u32 = 0o170_000;
        let mut status = [0_u32; 36];
        let kind = self.argument(self.shape.descriptor).map_or(0, |descriptor| {
            // SAFETY: `struct stat` has 144 bytes.
            let result = unsafe { call(nr::fstat, [descriptor, address_mut(&mut status), 0, 0, 0, 0]) };
            if failed(result) {
                return 0;
            }
            match status[MODE_AT] & FORMAT {
                0o100_000 => kinds::FILE,
                0o040_000 => kinds::DIRECTORY,
                0o140_000 => kinds::SOCKET,
                0o010_000 => kinds::PIPE,
                0o020_000 => kinds::CHARACTER,
                0o060_000 => kinds::BLOCK,
                _ => kinds::OTHER,
            }
        });
        self.kind = Some(kind);
        kind
    }

    /// Returns the attributes of the calling thread.
    pub(crate) fn callers(&mut self) -> &Callers {
        self.callers.get_or_insert_with(|| call_stack::capture(self.site, self.stack))
    }

    fn goes_to(&self, wanted: &Address) -> bool {
        (0..self.messages()).any(|index| {
            let Some((address, length)) = self.socket_address(index) else { return false };
            let mut bytes = [0; LONGEST_ADDRESS];
            let length = (length as usize).min(bytes.len());
            let read = user_memory::read_some(address, bytes.get_mut(..length).unwrap_or(&mut []));
            read.is_ok_and(|length| {
                fits(wanted, bytes.get(..length).unwrap_or(&[]), |path| {
                    wanted.path.length == 0 || glob::any_matches(self.policy.bytes(wanted.path), path)
                })
            })
        })
    }
}

/// A path that is none for any reason but its length is the kernel's to refuse.
fn known(path: Result<&mut [u8], i64>) -> Result<&[u8], i64> {
    match path {
        Ok(path) => Ok(path),
        Err(error) if error == -ENAMETOOLONG => Err(error),
        Err(_) => Ok(&[]),
    }
}

/// Returns whether the address of a socket is one that a rule means.
fn fits(wanted: &Address, given: &[u8], path_fits: impl FnOnce(&[u8]) -> bool) -> bool {
    const MAPPED: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    let Some((family, rest)) = given.split_first_chunk::<2>() else { return false };
    let family = u16::from_ne_bytes(*family);
    if family == AF_UNIX {
        let end = rest.iter().skip(1).position(|byte| *byte == 0).map_or(rest.len(), |end| end + 1);
        return wanted.family == AF_UNIX && path_fits(rest.get(..end).unwrap_or(&[]));
    }
    let Some((port, rest)) = rest.split_first_chunk::<2>() else { return false };
    let port = u16::from_be_bytes(*port);
    // An IPv6 address that stands for an IPv4 one is one.
    let (family, address) = match family {
        AF_INET => (AF_INET, rest.get(..4)),
        AF_INET6 => match rest.get(4..20) {
            Some(bytes) if bytes.starts_with(&MAPPED) => (AF_INET, bytes.get(12..)),
            bytes => (AF_INET6, bytes),
        },
        _ => return false,
    };
    let Some(address) = address else { return false };
    let bits = wanted.bits as usize;
    family == wanted.family
        && (wanted.port == 0 || wanted.port == port)
        && address.iter().zip(wanted.bytes).enumerate().all(|(index, (given, wanted))| {
            let significant = bits.saturating_sub(8 * index).min(8);
            let mask = !(0xff_u32 >> significant) as u8;
            given & mask == wanted & mask
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: [u8; 16] = [2, 0, 0x1f, 0x90, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];

    fn wanted(bits: u32, port: u16) -> Address {
        let mut bytes = [0; 16];
        bytes[0] = 127;
        Address { family: AF_INET, port, bits, bytes, ..Address::default() }
    }

    #[test]
    fn addresses_are_compared_by_their_first_bits() {
        let fits = |wanted| fits(&wanted, &LOCAL, |_| false);
        assert!(fits(wanted(8, 0)));
        assert!(fits(wanted(31, 8080)));
        assert!(!fits(wanted(32, 8080)));
        assert!(!fits(wanted(8, 80)));
        assert!(fits(wanted(0, 8080)));
    }

    #[test]
    fn mapped_addresses_are_what_they_stand_for() {
        let mut mapped = [0; 28];
        mapped[0] = 10;
        mapped[2..4].copy_from_slice(&LOCAL[2..4]);
        mapped[18..20].copy_from_slice(&[0xff, 0xff]);
        mapped[20..24].copy_from_slice(&LOCAL[4..8]);
        assert!(fits(&wanted(8, 8080), &mapped, |_| false));
        mapped[19] = 0;
        assert!(!fits(&wanted(8, 8080), &mapped, |_| false));
    }

    #[test]
    fn unix_addresses_have_paths() {
        let unix = Address { family: AF_UNIX, ..Address::default() };
        let given = b"\x01\0/run/x\0rest";
        assert!(fits(&unix, given, |path| path == b"/run/x"));
        assert!(!fits(&wanted(0, 0), given, |_| true));
        // An abstract one begins with a zero.
        assert!(fits(&unix, b"\x01\0\0abc", |path| path == b"\0abc"));
    }

    #[test]
    fn what_is_too_short_fits_nothing() {
        assert!(!fits(&wanted(0, 0), &LOCAL[..6], |_| true));
        assert!(!fits(&wanted(0, 0), &[2], |_| true));
        assert!(!fits(&wanted(0, 0), &[], |_| true));
    }
}
