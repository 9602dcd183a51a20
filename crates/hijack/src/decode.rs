//! Calls in words: names, arguments, results, as a program's source would have them.
//!
//! Which arguments there are and what they are called comes from the kernel, the names of constants from the headers
//! (`calls/`); what is written here is only which constants an argument takes.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::OnceLock;

use syscalls::Errno;

use crate::calls::{self, Argument, Signature};
use crate::events::{Event, State};

static CONSTANTS: &str = include_str!("../calls/constants");

/// What an argument's bits or value are named after.
#[derive(Clone, Copy)]
enum Names {
    /// Any number of these at a time.
    Flags(&'static [&'static str]),
    /// One of these.
    One(&'static [&'static str]),
    Octal,
}

/// An argument in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// The argument's name; empty where the call is not known so well.
    pub name: &'static str,
    /// What it is.
    pub text: String,
}

/// The names of constants, by what they begin with.
fn constants() -> &'static HashMap<&'static str, Vec<(&'static str, u64)>> {
    static ALL: OnceLock<HashMap<&'static str, Vec<(&'static str, u64)>>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut all: HashMap<_, Vec<_>> = HashMap::new();
        for line in CONSTANTS.lines().filter(|line| !line.starts_with('#')) {
            let Some((name, value)) = line.split_once('\t') else { continue };
            let Ok(value) = value.parse::<i64>() else { continue };
            let prefix = if name.starts_with("SIG") { "SIG" } else { name.split('_').next().unwrap_or(name) };
            all.entry(prefix).or_default().push((name, value.cast_unsigned()));
        }
        all
    })
}

fn names_of(call: &str, argument: &Argument) -> Option<Names> {
    use Names::{Flags, Octal, One};
    Some(match (call, argument.name) {
        (_, "mode") if argument.kind == "umode_t" => Octal,
        ("open" | "openat", "flags") => Flags(&["O_"]),
        ("access" | "faccessat" | "faccessat2", "mode") => Octal,
        ("mmap" | "mprotect" | "pkey_mprotect", "prot") => Flags(&["PROT_"]),
        ("mmap", "flags") => Flags(&["MAP_"]),
        ("mremap", "flags") => Flags(&["MREMAP_"]),
        ("madvise", "behavior") => One(&["MADV_"]),
        ("lseek", "whence") => One(&["SEEK_"]),
        ("socket" | "socketpair", "family") => One(&["AF_"]),
        ("socket" | "socketpair", "type") => Flags(&["SOCK_"]),
        ("accept4", "flags") => Flags(&["SOCK_"]),
        ("sendto" | "recvfrom" | "sendmsg" | "recvmsg" | "sendmmsg" | "recvmmsg", "flags") => {
            Flags(&["MSG_"])
        }
        ("setsockopt" | "getsockopt", "level") => One(&["SOL_"]),
        ("setsockopt" | "getsockopt", "optname") => One(&["SO_"]),
        ("shutdown", "how") => One(&["SHUT_"]),
        ("clone", "clone_flags") => Flags(&["CLONE_"]),
        ("unshare", "unshare_flags") => Flags(&["CLONE_"]),
        ("futex", "op") => Flags(&["FUTEX_"]),
        ("fcntl", "cmd") => One(&["F_"]),
        ("epoll_ctl", "op") => One(&["EPOLL_CTL_"]),
        ("epoll_create1", "flags") => Flags(&["EPOLL_CLOEXEC"]),
        ("eventfd2", "flags") => Flags(&["EFD_"]),
        ("getrandom", "flags") => Flags(&["GRND_"]),
        ("renameat2", "flags") => Flags(&["RENAME_"]),
        ("memfd_create", "flags") => Flags(&["MFD_"]),
        ("pipe2" | "dup3", "flags") => Flags(&["O_CLOEXEC", "O_NONBLOCK", "O_DIRECT"]),
        ("prlimit64" | "getrlimit" | "setrlimit", "resource") => One(&["RLIMIT_"]),
        ("prctl", "option") => One(&["PR_SET_", "PR_GET_", "PR_"]),
        ("wait4" | "waitid", "options") => {
            Flags(&["WNOHANG", "WUNTRACED", "WEXITED", "WSTOPPED", "WCONTINUED", "WNOWAIT"])
        }
        ("flock", "cmd") => Flags(&["LOCK_"]),
        ("rt_sigprocmask", "how") => One(&["SIG_"]),
        (_, "sig") => One(&["SIG"]),
        (_, "which_clock") => One(&["CLOCK_"]),
        (
            "newfstatat" | "unlinkat" | "fchownat" | "linkat" | "statx" | "execveat" | "utimensat"
            | "name_to_handle_at",
            "flag" | "flags",
        ) => Flags(&[
            "AT_EMPTY_PATH",
            "AT_SYMLINK_NOFOLLOW",
            "AT_SYMLINK_FOLLOW",
            "AT_REMOVEDIR",
            "AT_NO_AUTOMOUNT",
            "AT_STATX_",
        ]),
        _ => return None,
    })
}

fn candidates(prefixes: &'static [&'static str]) -> impl Iterator<Item = (&'static str, u64)> {
    prefixes.iter().flat_map(|prefix| {
        let group =
            if prefix.starts_with("SIG") { "SIG" } else { prefix.split('_').next().unwrap_or(prefix) };
        let all = constants().get(group).map(Vec::as_slice).unwrap_or_default();
        all.iter().copied().filter(move |(name, _)| name.starts_with(prefix))
    })
}

fn one(value: u64, prefixes: &'static [&'static str]) -> String {
    // Of several names for a value, the shortest is the usual one.
    let found = candidates(prefixes).filter(|(_, known)| *known == value).min_by_key(|(name, _)| name.len());
    found.map_or_else(|| signed(value), |(name, _)| name.to_owned())
}

fn flags(value: u64, prefixes: &'static [&'static str]) -> String {
    let value = value & 0xffff_ffff;
    let low = match prefixes {
        // These begin with a number.
        ["O_"] => 3,
        ["SOCK_"] => 0xf,
        ["MAP_"] => 3,
        ["FUTEX_"] => 0x7f,
        _ => 0,
    };
    let mut text = if low != 0 { one(value & low, prefixes) } else { String::new() };
    let mut rest = value & !low;
    let mut names: Vec<_> = candidates(prefixes).filter(|(_, bits)| *bits != 0 && bits & low == 0).collect();
    // What is made of several comes before its parts.
    names.sort_by_key(|(name, bits)| (std::cmp::Reverse(bits.count_ones()), name.len()));
    for (name, bits) in names {
        if rest & bits == bits {
            rest &= !bits;
            text = join(text, name);
        }
    }
    if rest != 0 || text.is_empty() {
        text = join(text, &format!("{rest:#x}").replace("0x0", "0"));
    }
    text
}

fn join(text: String, name: &str) -> String {
    if text.is_empty() { name.to_owned() } else { format!("{text}|{name}") }
}

/// An `int` as it was meant.
fn signed(value: u64) -> String {
    let narrow = value & 0xffff_ffff;
    let int = narrow as u32;
    if value == narrow || value >> 32 == 0xffff_ffff {
        int.cast_signed().to_string()
    } else {
        value.cast_signed().to_string()
    }
}

/// Bytes as a string of C; `whole` is how many there were.
fn quoted(bytes: &[u8], whole: bool) -> String {
    let mut text = String::from("\"");
    for byte in bytes {
        match byte {
            b'\n' => text.push_str("\\n"),
            b'\t' => text.push_str("\\t"),
            b'\r' => text.push_str("\\r"),
            b'"' => text.push_str("\\\""),
            b'\\' => text.push_str("\\\\"),
            0x20..0x7f => text.push(char::from(*byte)),
            byte => {
                let _infallible = write!(text, "\\x{byte:02x}");
            }
        }
    }
    text.push('"');
    if !whole {
        text.push_str("...");
    }
    text
}

/// `struct sockaddr`.
fn socket_address(bytes: &[u8]) -> Option<String> {
    let (family, rest) = bytes.split_first_chunk::<2>()?;
    match i32::from(u16::from_ne_bytes(*family)) {
        libc::AF_UNIX => {
            let abstract_name = rest.first() == Some(&0);
            let end = rest.iter().skip(1).position(|byte| *byte == 0).map_or(rest.len(), |end| end + 1);
            let name = rest.get(usize::from(abstract_name)..end).unwrap_or_default();
            Some(format!("unix:{}{}", if abstract_name { "@" } else { "" }, String::from_utf8_lossy(name)))
        }
        libc::AF_INET => {
            let (port, address) = (rest.first_chunk::<2>()?, rest.get(2..)?.first_chunk::<4>()?);
            Some(format!("{}:{}", std::net::Ipv4Addr::from(*address), u16::from_be_bytes(*port)))
        }
        libc::AF_INET6 => {
            let (port, address) = (rest.first_chunk::<2>()?, rest.get(6..)?.first_chunk::<16>()?);
            Some(format!("[{}]:{}", std::net::Ipv6Addr::from(*address), u16::from_be_bytes(*port)))
        }
        family => Some(format!("{{family {family}}}")),
    }
}

fn argument(call: &Signature, event: &Event, index: usize, argument: &Argument) -> String {
    let value = event.arguments()[index];
    let shape = call.shape();
    if let Some(bytes) = event.memory(index) {
        let path = shape.path.iter().any(|path| usize::from(*path) == index);
        if usize::from(shape.address) == index {
            return socket_address(bytes).unwrap_or_else(|| format!("{value:#x}"));
        }
        let length = if shape.fills != 0 {
            usize::try_from(event.result()).unwrap_or(0)
        } else {
            event
                .arguments()
                .get(usize::from(shape.count))
                .map_or(0, |count| usize::try_from(*count).unwrap_or(0))
        };
        return quoted(bytes, if path { bytes.len() < 160 } else { bytes.len() >= length });
    }
    if argument.is_directory() && signed(value) == "-100" {
        return "AT_FDCWD".to_owned();
    }
    match names_of(call.name, argument) {
        Some(Names::Flags(prefixes)) => flags(value, prefixes),
        Some(Names::One(prefixes)) => one(value & 0xffff_ffff, prefixes),
        Some(Names::Octal) => format!("{:#o}", value & 0xffff_ffff).replace("0o", "0"),
        None if argument.kind.ends_with('*') => pointer(value),
        None if argument.is_descriptor() => signed(value & 0xffff_ffff),
        None => match argument.kind {
            "unsigned long" if matches!(argument.name, "addr" | "start" | "brk" | "new_addr" | "arg") => {
                pointer(value)
            }
            "size_t" | "unsigned long" | "loff_t" | "off_t" => value.cast_signed().to_string(),
            _ => signed(value),
        },
    }
}

fn pointer(value: u64) -> String {
    if value == 0 { "NULL".to_owned() } else { format!("{value:#x}") }
}

/// The name of an error.
pub fn error_name(number: i32) -> String {
    Errno::new(number).name().map_or_else(|| format!("error {number}"), str::to_owned)
}

impl Event {
    /// The call's name, or its number where it has none.
    pub fn name(&self) -> String {
        let known = calls::numbered(self.number());
        known.map_or_else(|| format!("syscall_{}", self.number()), |known| known.name.to_owned())
    }

    /// Its arguments, in words.
    pub fn describe(&self) -> Vec<Described> {
        let known = calls::numbered(self.number());
        match known.and_then(|known| Some((known, known.arguments.as_ref()?))) {
            Some((known, arguments)) => {
                let each = |(index, of): (usize, &Argument)| Described {
                    name: of.name,
                    text: argument(known, self, index, of),
                };
                arguments.iter().enumerate().take(6).map(each).collect()
            }
            None => self.arguments().map(|value| Described { name: "", text: pointer(value) }).to_vec(),
        }
    }

    /// The error that it returned.
    pub fn error(&self) -> Option<i32> {
        let failed = self.state() != State::Entered && (-4095..0).contains(&self.result());
        failed.then(|| i32::try_from(-self.result()).unwrap_or(0))
    }

    /// What it returned, in words.
    pub fn outcome(&self) -> String {
        const ADDRESSES: [&str; 4] = ["mmap", "brk", "mremap", "shmat"];
        match self.error() {
            _ if self.state() == State::Entered => "?".to_owned(),
            Some(error) => {
                let text = std::io::Error::from_raw_os_error(error).to_string();
                let text = text.split(" (os error").next().unwrap_or_default().to_owned();
                format!("-1 {} ({text})", error_name(error))
            }
            None if ADDRESSES.contains(&self.name().as_str()) => format!("{:#x}", self.result()),
            None => self.result().to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_have_names() {
        assert_eq!(flags(0o2_000_000, &["O_"]), "O_RDONLY|O_CLOEXEC");
        assert_eq!(flags(0o1101, &["O_"]), "O_WRONLY|O_CREAT|O_TRUNC");
        assert_eq!(flags(0, &["PROT_"]), "0");
        assert_eq!(flags(3, &["PROT_"]), "PROT_READ|PROT_WRITE");
        assert_eq!(flags(0x22, &["MAP_"]), "MAP_PRIVATE|MAP_ANONYMOUS");
        assert_eq!(flags(0x80801, &["SOCK_"]), "SOCK_STREAM|SOCK_CLOEXEC|SOCK_NONBLOCK");
        assert_eq!(flags(1 << 31, &["GRND_"]), "0x80000000");
    }

    #[test]
    fn values_have_names() {
        assert_eq!(one(15, &["SIG"]), "SIGTERM");
        assert_eq!(one(2, &["AF_"]), "AF_INET");
        assert_eq!(one(1, &["CLOCK_"]), "CLOCK_MONOTONIC");
        assert_eq!(one(9999, &["AF_"]), "9999");
    }

    #[test]
    fn numbers_have_signs() {
        assert_eq!(
            (signed(u64::MAX), signed(0xffff_ff9c), signed(7)),
            ("-1".into(), "-100".into(), "7".into())
        );
        assert_eq!(signed(1 << 40), (1_u64 << 40).to_string());
    }

    #[test]
    fn strings_are_quoted() {
        assert_eq!(quoted(b"a\"\n\x01", true), "\"a\\\"\\n\\x01\"");
        assert_eq!(quoted(b"a", false), "\"a\"...");
    }

    #[test]
    fn addresses_of_sockets_are_read() {
        assert_eq!(socket_address(&[2, 0, 0x1f, 0x90, 127, 0, 0, 1]).unwrap(), "127.0.0.1:8080");
        assert_eq!(socket_address(b"\x01\0/run/x\0").unwrap(), "unix:/run/x");
        assert_eq!(socket_address(b"\x01\0\0x").unwrap(), "unix:@x");
        assert_eq!(socket_address(&[2, 0]), None);
    }
}
