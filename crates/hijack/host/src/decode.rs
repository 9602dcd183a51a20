//! Calls in words: names, arguments, results, as a program's source would have them.
//!
//! Which arguments there are and what they are called comes from the kernel (`calls/table`), the layouts of structures
//! from its types (`calls/structures`), the names of constants from the headers (`calls/constants`). What is written here
//! is only which constants an argument takes.

use std::fmt::Write as _;

use orrery_hijack_image::capture::RESULT;
use syscalls::Errno;

use crate::arg_types::{ArgDecoder, ArgType, decoders};
use crate::calls::{self, Argument, Signature};
use crate::constants::{self, Names, signals, signed};
use crate::events::{Event, State};
use crate::structures;

/// An argument in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// The argument's name; empty where the call is not known so well.
    pub name: &'static str,
    /// What it is.
    pub text: String,
}

fn names_of(call: &str, argument: &Argument) -> Option<Names> {
    use Names::{Flags, One, Permissions, Signal};
    Some(match (call, argument.name) {
        (_, "mode") if argument.kind == "umode_t" => Permissions,
        ("open" | "openat", "flags") => Flags(&["O_"]),
        ("access" | "faccessat" | "faccessat2", "mode") => Flags(&["R_OK", "W_OK", "X_OK", "F_OK"]),
        ("mmap" | "mprotect" | "pkey_mprotect", "prot") => Flags(&["PROT_"]),
        ("mmap", "flags") => Flags(&["MAP_"]),
        ("mremap", "flags") => Flags(&["MREMAP_"]),
        ("madvise", "behavior") => One(&["MADV_"]),
        ("lseek", "whence") => One(&["SEEK_"]),
        ("socket" | "socketpair", "family") => One(&["AF_"]),
        ("socket" | "socketpair", "type") => Flags(&["SOCK_"]),
        ("accept4", "flags") => Flags(&["SOCK_CLOEXEC", "SOCK_NONBLOCK"]),
        ("clock_nanosleep" | "timer_settime", "flags") => Flags(&["TIMER_ABSTIME"]),
        ("sendto" | "recvfrom" | "sendmsg" | "recvmsg" | "sendmmsg" | "recvmmsg", "flags") => {
            Flags(&["MSG_"])
        }
        ("setsockopt" | "getsockopt", "level") => One(&["SOL_"]),
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
        ("ioctl", "cmd") => One(&["TC", "TIOC", "FIO", "SIOC"]),
        ("arch_prctl", "option") => One(&["ARCH_"]),
        ("fadvise64", "advice") => One(&["POSIX_FADV_"]),
        ("sched_setscheduler", "policy") => One(&["SCHED_"]),
        ("timerfd_create" | "timerfd_settime", "flags") => Flags(&["TFD_"]),
        ("setpriority" | "getpriority", "which") => One(&["PRIO_"]),
        ("fallocate", "mode") => Flags(&["FALLOC_FL_"]),
        ("mount", "flags") => Flags(&["MS_"]),
        ("umount2", "flags") => Flags(&["MNT_"]),
        ("inotify_add_watch", "mask") => Flags(&["IN_"]),
        ("inotify_init1", "flags") => Flags(&["IN_CLOEXEC", "IN_NONBLOCK"]),
        (_, "sig") => Signal,
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

/// Bytes as a string of C; `whole`: there are no more.
fn quoted(bytes: &[u8], whole: bool) -> String {
    format!("\"{}\"{}", escaped(bytes), if whole { "" } else { "..." })
}

/// Bytes as between the quotes of C.
fn escaped(bytes: &[u8]) -> String {
    let mut text = String::new();
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
    text
}

/// A descriptor, and where it leads.
fn leading(descriptor: u64, path: &[u8]) -> String {
    format!("{}<{}>", signed(descriptor & 0xffff_ffff), escaped(path))
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

/// What a piece of memory holds.
fn memory(event: &Event, bytes: &[u8], decoder: ArgDecoder, whole: bool) -> Option<String> {
    let ArgDecoder { capture, arg_type } = decoder;
    let most = usize::from(capture.most);
    let list = |each: Vec<String>| Some(format!("[{}]", each.join(", ")));
    Some(match arg_type {
        ArgType::Text => quoted(bytes, bytes.len() < most),
        ArgType::Bytes { of } => {
            let all = match of {
                Some(index) => {
                    event.arguments().get(index).copied().and_then(|all| usize::try_from(all).ok())
                }
                None => usize::try_from(event.result()).ok().filter(|_| event.state() != State::Entered),
            };
            quoted(bytes, all.is_none_or(|all| bytes.len() >= all))
        }
        ArgType::Strings => {
            let strings = bytes.split_inclusive(|byte| *byte == 0);
            return list(
                strings.map(|string| quoted(string.strip_suffix(b"\0").unwrap_or(string), true)).collect(),
            );
        }
        ArgType::Address => return socket_address(bytes),
        ArgType::Structure(name) => structures::named(name)?.describe(name, bytes, whole),
        ArgType::Structures(name) => {
            let structure = structures::named(name)?;
            let each = bytes.chunks_exact(structure.size);
            return list(each.map(|bytes| structure.describe(name, bytes, whole)).collect());
        }
        ArgType::Integers(size) => {
            let each: Vec<_> = bytes.chunks_exact(size).map(integer).collect();
            return list(each);
        }
        ArgType::Signals => signals(u64::from_ne_bytes(*bytes.first_chunk()?)),
        ArgType::Descriptors => {
            let bits = bytes.iter().enumerate().flat_map(|(place, byte)| {
                (0..8).filter(move |bit| byte & 1 << bit != 0).map(move |bit| (place * 8 + bit).to_string())
            });
            return list(bits.collect());
        }
        ArgType::Status => status(i32::from_ne_bytes(*bytes.first_chunk()?)),
        ArgType::Signal => signal_information(bytes)?,
        ArgType::Setting => match bytes.first_chunk() {
            Some(value) if bytes.len() == 4 => format!("[{}]", i32::from_ne_bytes(*value)),
            _ => quoted(bytes, true),
        },
    })
}

fn integer(bytes: &[u8]) -> String {
    match (bytes.first_chunk(), bytes.first_chunk()) {
        (Some(eight), _) => i64::from_ne_bytes(*eight).to_string(),
        (None, Some(four)) => i32::from_ne_bytes(*four).to_string(),
        (None, None) => String::new(),
    }
}

/// What `wait4` says of a process's end.
fn status(status: i32) -> String {
    if libc::WIFEXITED(status) {
        format!("[exited with {}]", libc::WEXITSTATUS(status))
    } else if libc::WIFSIGNALED(status) {
        let signal = Names::Signal.of(u64::from(libc::WTERMSIG(status).cast_unsigned()));
        format!("[killed by {signal}{}]", if libc::WCOREDUMP(status) { ", core dumped" } else { "" })
    } else if libc::WIFSTOPPED(status) {
        format!("[stopped by {}]", Names::Signal.of(u64::from(libc::WSTOPSIG(status).cast_unsigned())))
    } else {
        "[continued]".to_owned()
    }
}

/// The beginning of a `siginfo_t`.
fn signal_information(bytes: &[u8]) -> Option<String> {
    let word = |place: usize| bytes.get(4 * place..)?.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes));
    let (signal, code) = (word(0)?, word(2)?);
    let mut text =
        format!("{{si_signo={}, si_code={code}", Names::Signal.of(u64::from(signal.cast_unsigned())));
    // Who sent it, or which child has ended.
    if code <= 0 || signal == libc::SIGCHLD {
        let _infallible = write!(text, ", si_pid={}, si_uid={}", word(4)?, word(5)?);
    }
    if signal == libc::SIGCHLD && code > 0 {
        let _infallible = write!(text, ", si_status={}", word(6)?);
    }
    Some(text + "}")
}

/// What names the name of a socket's option is one of, by the option's level.
fn option_names(level: u64) -> Option<Names> {
    const TCP: u64 = libc::IPPROTO_TCP as u64;
    match level {
        1 => Some(Names::One(&["SO_"])),
        TCP => Some(Names::One(&["TCP_"])),
        _ => None,
    }
}

fn argument(call: &Signature, event: &Event, index: usize, argument: &Argument, whole: bool) -> String {
    let value = event.arguments()[index];
    if let (Some(bytes), Some(decoder)) = (event.memory(index), decoders(call, index))
        && let Some(text) = memory(event, bytes, decoder, whole)
    {
        return text;
    }
    if let Some(path) = event.memory(index)
        && (argument.is_descriptor() || argument.is_directory())
    {
        return leading(value, path);
    }
    if argument.is_directory() && signed(value) == "-100" {
        return "AT_FDCWD".to_owned();
    }
    let names = match (call.name, argument.name) {
        ("setsockopt" | "getsockopt", "optname") => option_names(event.arguments()[1]),
        ("socket", "protocol")
            if ["AF_INET", "AF_INET6"]
                .iter()
                .any(|name| constants::value(name) == Some(event.arguments()[0])) =>
        {
            Some(Names::One(&["IPPROTO_"]))
        }
        ("fcntl", "arg") => match event.arguments()[1] {
            command if Some(command) == constants::value("F_SETFL") => Some(Names::Flags(&["O_"])),
            command if Some(command) == constants::value("F_SETFD") => Some(Names::Flags(&["FD_CLOEXEC"])),
            _ => None,
        },
        _ => names_of(call.name, argument),
    };
    match names {
        Some(names) => names.of(value),
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

/// How many of a call's arguments count: whether there is a mode depends on the flags.
fn arguments_that_count(call: &Signature, event: &Event, all: usize) -> usize {
    let flags = match call.name {
        "open" => event.arguments()[1],
        "openat" => event.arguments()[2],
        _ => return all,
    };
    // O_TMPFILE contains O_DIRECTORY, which alone makes no file.
    let makes = [libc::O_CREAT, libc::O_TMPFILE].map(|flag| u64::from(flag.cast_unsigned()));
    if makes.iter().any(|flag| flags & flag == *flag) { all } else { all - 1 }
}

fn pointer(value: u64) -> String {
    if value == 0 { "NULL".to_owned() } else { format!("{value:#x}") }
}

/// The name of an error.
pub fn error_name(number: i32) -> String {
    Errno::new(number).name().map_or_else(|| format!("error {number}"), str::to_owned)
}

/// The number of an error's name.
pub fn error_number(name: &str) -> Option<i32> {
    crate::policy::errno(name).ok()
}

/// The name of a signal.
pub fn signal_name(number: i32) -> String {
    Names::Signal.of(u64::from(number.cast_unsigned()))
}

impl Event {
    /// The call's name, or its number where it has none.
    pub fn name(&self) -> String {
        let known = calls::numbered(self.number());
        known.map_or_else(|| format!("syscall_{}", self.number()), |known| known.name.to_owned())
    }

    /// Its arguments, in words. `whole`: all members of large structures, instead of those that say most.
    pub fn describe(&self, whole: bool) -> Vec<Described> {
        let known = calls::numbered(self.number());
        match known.and_then(|known| Some((known, known.arguments.as_ref()?))) {
            Some((known, arguments)) => {
                let each = |(index, of): (usize, &Argument)| Described {
                    name: of.name,
                    text: argument(known, self, index, of, whole),
                };
                let count = arguments_that_count(known, self, arguments.len());
                arguments.iter().enumerate().take(count.min(6)).map(each).collect()
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
            None => match self.memory(usize::from(RESULT)) {
                Some(path) => leading(self.result().cast_unsigned(), path),
                None => self.result().to_string(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn ends_of_processes_are_told() {
        assert_eq!(status(7 << 8), "[exited with 7]");
        assert_eq!(status(9), "[killed by SIGKILL]");
        assert_eq!(status(11 | 0x80), "[killed by SIGSEGV, core dumped]");
        assert_eq!(status(0x137f), "[stopped by SIGSTOP]");
        assert_eq!(status(0xffff), "[continued]");
    }

    #[test]
    fn signals_tell_who_sent_them() {
        let bytes = |words: [i32; 8]| words.map(i32::to_ne_bytes).concat();
        assert_eq!(
            signal_information(&bytes([10, 0, 0, 0, 55, 1000, 0, 0])).unwrap(),
            "{si_signo=SIGUSR1, si_code=0, si_pid=55, si_uid=1000}"
        );
        assert_eq!(
            signal_information(&bytes([17, 0, 1, 0, 55, 0, 3, 0])).unwrap(),
            "{si_signo=SIGCHLD, si_code=1, si_pid=55, si_uid=0, si_status=3}"
        );
        assert_eq!(signal_information(&[0; 8]), None);
    }
}
