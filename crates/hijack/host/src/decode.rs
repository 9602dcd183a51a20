//! Calls in words: names, arguments, results, as a program's source would have them.
//!
//! Which arguments there are and what they are called comes from the kernel (`calls/table`), the layouts of structures
//! from its types (`calls/structures`), the names of constants from the headers (`calls/constants`), for each argument those that it
//! takes (`calls/sets`).

use std::fmt::Write as _;

use orrery_hijack_image::capture::{CONTROL, NAME, RESULT, when};
use syscalls::Errno;

use crate::arg_names;
use crate::arg_types::{ArgDecoder, ArgType, decoders};
use crate::calls::{self, Argument, Signature};
use crate::constants::{Names, signals, signed};
use crate::descriptors::leading;
use crate::events::{Event, State};
pub use crate::form::{Form, Hexadecimal};
use crate::structures;

/// An argument in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// The argument's name; empty where the call is not known so well.
    pub name: &'static str,
    /// The text to print.
    pub text: String,
}

/// `struct sockaddr`.
fn socket_address(bytes: &[u8], form: Form) -> Option<String> {
    let (family, rest) = bytes.split_first_chunk::<2>()?;
    match i32::from(u16::from_ne_bytes(*family)) {
        libc::AF_UNIX => {
            let abstract_name = rest.first() == Some(&0);
            let end = rest.iter().skip(1).position(|byte| *byte == 0).map_or(rest.len(), |end| end + 1);
            let name = rest.get(usize::from(abstract_name)..end).unwrap_or_default();
            let shown = match form.hexadecimal {
                Hexadecimal::Bytes => String::from_utf8_lossy(name).into_owned(),
                _ => form.escaped(name),
            };
            Some(format!("unix:{}{shown}", if abstract_name { "@" } else { "" }))
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

/// Returns what a piece of memory holds.
fn memory(event: &Event, bytes: &[u8], decoder: ArgDecoder, form: Form) -> Option<String> {
    let ArgDecoder { capture, arg_type } = decoder;
    let most = usize::from(capture.most);
    let list = |each: Vec<String>| Some(format!("[{}]", each.join(", ")));
    Some(match arg_type {
        ArgType::Text => form.quoted(bytes, bytes.len() < most),
        ArgType::Bytes { of } => {
            let all = match of {
                Some(index) => {
                    event.arguments().get(index).copied().and_then(|all| usize::try_from(all).ok())
                }
                None => usize::try_from(event.result()).ok().filter(|_| event.state() != State::Entered),
            };
            form.quoted(bytes, all.is_none_or(|all| bytes.len() >= all))
        }
        ArgType::Strings => {
            let strings = bytes.split_inclusive(|byte| *byte == 0);
            return list(
                strings
                    .map(|string| form.quoted(string.strip_suffix(b"\0").unwrap_or(string), true))
                    .collect(),
            );
        }
        ArgType::Path => form.quoted(bytes.strip_suffix(b"\0").unwrap_or(bytes), true),
        ArgType::Message => message(event, bytes, form),
        ArgType::Address => return socket_address(bytes, form),
        ArgType::Structure(name) => structures::named(name)?.describe(name, bytes, form),
        ArgType::Structures(name) => {
            let structure = structures::named(name)?;
            let each = bytes.chunks_exact(structure.size);
            return list(each.map(|bytes| structure.describe(name, bytes, form)).collect());
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
            format!("[{}]", bits.collect::<Vec<_>>().join(" "))
        }
        ArgType::Status => status(i32::from_ne_bytes(*bytes.first_chunk()?)),
        ArgType::Signal => signal_information(bytes)?,
        ArgType::Setting => match (setting(event.arguments()), bytes.first_chunk()) {
            (Some(name), _) if structures::named(name).is_some_and(|of| of.size == bytes.len()) => {
                structures::named(name)?.describe(name, bytes, form)
            }
            (_, Some(value)) if bytes.len() == 4 => format!("[{}]", i32::from_ne_bytes(*value)),
            _ => form.quoted(bytes, true),
        },
    })
}

/// The structure that a socket's option has as value.
fn setting(arguments: [u64; 6]) -> Option<&'static str> {
    if Names::Of("sockopt.level").of(arguments[1]) != "SOL_SOCKET" {
        return None;
    }
    match Names::Of("sockopt.socket").of(arguments[2]).as_str() {
        "SO_LINGER" => Some("linger"),
        "SO_PEERCRED" => Some("ucred"),
        "SO_RCVTIMEO_OLD" | "SO_SNDTIMEO_OLD" => Some("__kernel_old_timeval"),
        _ => None,
    }
}

/// A message: its bytes, and if it has some, its address and control data.
fn message(event: &Event, bytes: &[u8], form: Form) -> String {
    let whole = usize::try_from(event.result()).ok().is_none_or(|all| bytes.len() >= all);
    let text = form.quoted(bytes, whole || event.state() == State::Entered);
    let name = event.memory(usize::from(NAME)).and_then(|bytes| socket_address(bytes, form));
    let control = event.memory(usize::from(CONTROL)).map(|bytes| control_data(bytes, form));
    if name.is_none() && control.is_none() {
        return text;
    }
    let name = name.map(|name| format!("msg_name={name}, ")).unwrap_or_default();
    let control = control.map(|control| format!(", msg_control={control}")).unwrap_or_default();
    format!("{{{name}msg_iov={text}{control}}}")
}

/// Returns the control data of a message, or its beginning: `struct cmsghdr`, one after the other.
fn control_data(bytes: &[u8], form: Form) -> String {
    const HEADER: usize = 16;
    let mut parts = Vec::new();
    let mut rest = bytes;
    while let Some((header, behind)) = rest.split_first_chunk::<HEADER>() {
        let word = |at: usize| {
            header.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, i32::from_ne_bytes)
        };
        let length = header.first_chunk().map_or(0, |length| u64::from_ne_bytes(*length));
        let Some(length) = usize::try_from(length).ok().and_then(|length| length.checked_sub(HEADER)) else {
            break;
        };
        let data = behind.get(..length.min(behind.len())).unwrap_or_default();
        let unsigned = |value: i32| u64::from(value.cast_unsigned());
        let level = Names::Of("sockopt.level").of(unsigned(word(8)));
        let (kind, data) = if level == "SOL_SOCKET" {
            let kind = Names::Of("cmsg.socket").of(unsigned(word(12)));
            let described = match kind.as_str() {
                "SCM_RIGHTS" | "SCM_PIDFD" => {
                    let each: Vec<_> = data.chunks_exact(4).map(integer).collect();
                    Some(format!("[{}]", each.join(", ")))
                }
                "SCM_CREDENTIALS" => structures::named("ucred")
                    .map(|of| of.describe("ucred", data, Form { whole: true, ..form })),
                _ => None,
            };
            (kind, described.unwrap_or_else(|| form.quoted(data, true)))
        } else {
            (word(12).to_string(), form.quoted(data, true))
        };
        let more = if data.is_empty() || length <= behind.len() { "" } else { "..." };
        parts.push(format!("{{cmsg_level={level}, cmsg_type={kind}, cmsg_data={data}{more}}}"));
        // Each begins at a multiple of eight bytes.
        rest = behind.get(length.next_multiple_of(8)..).unwrap_or_default();
    }
    format!("[{}]", parts.join(", "))
}

fn integer(bytes: &[u8]) -> String {
    match (bytes.first_chunk(), bytes.first_chunk()) {
        (Some(eight), _) => i64::from_ne_bytes(*eight).to_string(),
        (None, Some(four)) => i32::from_ne_bytes(*four).to_string(),
        (None, None) => String::new(),
    }
}

/// Returns what `wait4` says of a process's end.
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

/// Returns the beginning of a `siginfo_t`.
fn signal_information(bytes: &[u8]) -> Option<String> {
    let word = |place: usize| bytes.get(4 * place..)?.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes));
    let (signal, code) = (word(0)?, word(2)?);
    let unsigned = |value: i32| u64::from(value.cast_unsigned());
    let long = |place: usize| bytes.get(4 * place..)?.first_chunk().map(|bytes| i64::from_ne_bytes(*bytes));
    let codes = match signal {
        // What the kernel says for all signals.
        _ if code <= 0 || code == libc::SI_KERNEL => "si_code",
        libc::SIGCHLD => "si_code.child",
        libc::SIGSEGV => "si_code.segv",
        libc::SIGBUS => "si_code.bus",
        libc::SIGFPE => "si_code.fpe",
        libc::SIGILL => "si_code.ill",
        libc::SIGTRAP => "si_code.trap",
        libc::SIGSYS => "si_code.sys",
        // Any signal that F_SETSIG chooses.
        _ => "si_code.poll",
    };
    let code_name = Names::Of(codes).of(unsigned(code));
    let mut text = format!("{{si_signo={}, si_code={code_name}", Names::Signal.of(unsigned(signal)));
    let mut add = |member: &str, value: &dyn std::fmt::Display| {
        let _infallible = write!(text, ", {member}={value}");
    };
    let value = |add: &mut dyn FnMut(&str, &dyn std::fmt::Display)| {
        let (number, address) = (word(6)?, long(6)?.cast_unsigned());
        if address != 0 {
            add("si_int", &number);
            add("si_ptr", &pointer(address));
        }
        Some(())
    };
    match codes {
        "si_code" if code == libc::SI_KERNEL => {
            if matches!(signal, libc::SIGSEGV | libc::SIGBUS | libc::SIGFPE | libc::SIGILL | libc::SIGTRAP) {
                add("si_addr", &pointer(long(4)?.cast_unsigned()));
            }
        }
        "si_code" if code == libc::SI_TIMER => {
            add("si_timerid", &Names::Hexadecimal.of(unsigned(word(4)?)));
            add("si_overrun", &word(5)?);
            value(&mut add)?;
        }
        "si_code" => {
            // Who sent it.
            add("si_pid", &word(4)?);
            add("si_uid", &word(5)?.cast_unsigned());
            if !matches!(code, libc::SI_USER | libc::SI_TKILL) {
                value(&mut add)?;
            }
        }
        "si_code.child" => {
            let status = word(6)?;
            // What it exited with, or which signal ended or stopped it.
            let ended = code == libc::CLD_EXITED;
            let status = if ended { status.to_string() } else { Names::Signal.of(unsigned(status)) };
            add("si_pid", &word(4)?);
            add("si_uid", &word(5)?.cast_unsigned());
            add("si_status", &status);
            // A part of a structure has no times.
            if let (Some(user), Some(system)) = (long(8), long(10)) {
                add("si_utime", &user);
                add("si_stime", &system);
            }
        }
        "si_code.poll" => {
            add("si_band", &long(4)?);
            if let Some(descriptor) = word(6) {
                add("si_fd", &descriptor);
            }
        }
        "si_code.sys" => {
            add("si_call_addr", &pointer(long(4)?.cast_unsigned()));
            let name = calls::numbered(word(6)?.cast_unsigned()).map(|call| format!("__NR_{}", call.name));
            add("si_syscall", &name.unwrap_or_else(|| word(6).unwrap_or(0).to_string()));
            add("si_arch", &format!("{:#x}", word(7)?));
        }
        _ => add("si_addr", &pointer(long(4)?.cast_unsigned())),
    }
    Some(text + "}")
}

/// Returns whether the memory that was looked at for an argument is what it points to: for some calls that depends on
/// another argument.
fn is_pointer(call: &Signature, event: &Event, argument: &Argument) -> bool {
    match (call.name, argument.name) {
        ("fcntl", "arg") => {
            let command = Names::Of("fcntl.cmd").of(event.arguments()[1]);
            ["F_GETLK", "F_SETLK", "F_OFD_"].iter().any(|lock| command.starts_with(lock))
        }
        ("prctl", "arg2") => {
            let option = Names::Of("prctl.option").of(event.arguments()[0]);
            // What it was before the name was written is nobody's.
            option == "PR_SET_NAME" || option == "PR_GET_NAME" && event.result() == 0
        }
        _ => true,
    }
}

fn argument(call: &Signature, event: &Event, index: usize, argument: &Argument, form: Form) -> String {
    let value = event.arguments()[index];
    if let (Some(bytes), Some(decoder)) = (event.memory(index), decoders(call, index))
        && is_pointer(call, event, argument)
        && let Some(text) = memory(event, bytes, decoder, form)
    {
        return text;
    }
    if let Some(path) = event.memory(index)
        && (argument.is_descriptor() || argument.is_directory())
    {
        if argument.is_directory() && signed(value) == "-100" {
            return format!("AT_FDCWD<{}>", form.escaped(path));
        }
        return leading(value, path, form);
    }
    if argument.is_directory() && signed(value) == "-100" {
        return "AT_FDCWD".to_owned();
    }
    match arg_names::names(call.name, argument, &event.arguments()) {
        Some(names) => names.of(value),
        None if argument.kind.ends_with('*') => pointer(value),
        None if argument.is_descriptor() => signed(value & 0xffff_ffff),
        None => match argument.kind {
            "unsigned long"
                if argument.name.starts_with("arg")
                    || matches!(
                        argument.name,
                        "addr" | "start" | "brk" | "new_addr" | "newsp" | "tls" | "data"
                    ) =>
            {
                pointer(value)
            }
            "size_t" | "unsigned long" | "aio_context_t" => value.to_string(),
            "loff_t" | "off_t" | "long" => value.cast_signed().to_string(),
            _ => signed(value),
        },
    }
}

/// Returns what a call returned that has succeeded: for some, flags or permissions.
fn returned(call: &str, arguments: [u64; 6], result: i64) -> String {
    let value = result.cast_unsigned();
    let flags = |set| format!("{value:#x} (flags {})", Names::Of(set).of(value));
    match (call, Names::Of("fcntl.cmd").of(arguments[1]).as_str()) {
        ("fcntl", "F_GETFD") if result != 0 => flags("fcntl.fd"),
        ("fcntl", "F_GETFL") => flags("open.flags"),
        ("umask", _) => Names::Permissions.of(value),
        _ => result.to_string(),
    }
}

fn pointer(value: u64) -> String {
    if value == 0 { "NULL".to_owned() } else { format!("{value:#x}") }
}

/// Returns the name of an error.
pub fn error_name(number: i32) -> String {
    Errno::new(number).name().map_or_else(|| format!("error {number}"), str::to_owned)
}

/// Returns the number of an error's name.
pub fn error_number(name: &str) -> Option<i32> {
    crate::policy::errno(name).ok()
}

/// Returns the name of a signal.
pub fn signal_name(number: i32) -> String {
    Names::Signal.of(u64::from(number.cast_unsigned()))
}

/// The number of a signal's name, which may lack its beginning.
pub fn signal_number(name: &str) -> Option<i32> {
    const SIGNALS: i32 = 64;
    let matches = |number: &i32| {
        let known = signal_name(*number);
        known == name || known.strip_prefix("SIG") == Some(name) || number.to_string() == name
    };
    (1..=SIGNALS).find(matches)
}

impl Event {
    /// What is known of a signal that arrived ([`State::Signal`]): its name, and the members of its `siginfo_t`.
    pub fn signal(&self) -> Option<(String, String)> {
        if self.state() != State::Signal {
            return None;
        }
        let name = signal_name(i32::try_from(self.number()).ok()?);
        Some((name, signal_information(self.memory(0)?)?))
    }

    /// The call's name, or its number where it has none.
    pub fn name(&self) -> String {
        let known = calls::numbered(self.number());
        known.map_or_else(|| format!("syscall_{}", self.number()), |known| known.name.to_owned())
    }

    /// Returns its arguments, in words.
    pub fn describe(&self, form: Form) -> Vec<Described> {
        let known = calls::numbered(self.number());
        match known.and_then(|known| Some((known, known.arguments.as_ref()?))) {
            Some((known, arguments)) => {
                let each = |(index, of): (usize, &Argument)| Described {
                    name: of.name,
                    text: argument(known, self, index, of, form),
                };
                let counting = arg_names::counting(known.name, &self.arguments(), arguments.len().min(6));
                let of = |index: usize| arguments.get(index).map(|argument| (index, argument));
                counting.into_iter().filter_map(of).map(each).collect()
            }
            None => self.arguments().map(|value| Described { name: "", text: pointer(value) }).to_vec(),
        }
    }

    /// Those of its arguments, in words, that it was given: up to the first that the kernel writes what it points to, which is not known
    /// before the call has returned.
    pub fn describe_given(&self, form: Form) -> Vec<Described> {
        let mut described = self.describe(form);
        let known = calls::numbered(self.number());
        if let Some((call, arguments)) = known.and_then(|known| Some((known, known.arguments.as_ref()?))) {
            let counting = arg_names::counting(call.name, &self.arguments(), arguments.len().min(6));
            let written = |index: &usize| {
                decoders(call, *index).is_some_and(|decoder| decoder.capture.after != when::BEFORE)
            };
            described.truncate(counting.iter().position(written).unwrap_or(counting.len()));
        }
        described
    }

    /// Returns the error that it returned.
    pub fn error(&self) -> Option<i32> {
        let failed = self.state() != State::Entered && (-4095..0).contains(&self.result());
        failed.then(|| i32::try_from(-self.result()).unwrap_or(0))
    }

    /// Returns what it returned, in words.
    pub fn outcome(&self, form: Form) -> String {
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
                Some(path) => leading(self.result().cast_unsigned(), path, form),
                None => returned(&self.name(), self.arguments(), self.result()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_sockets_are_read() {
        assert_eq!(
            socket_address(&[2, 0, 0x1f, 0x90, 127, 0, 0, 1], Form::default()).unwrap(),
            "127.0.0.1:8080"
        );
        assert_eq!(socket_address(b"\x01\0/run/x\0", Form::default()).unwrap(), "unix:/run/x");
        assert_eq!(socket_address(b"\x01\0\0x", Form::default()).unwrap(), "unix:@x");
        assert_eq!(socket_address(&[2, 0], Form::default()), None);
    }

    #[test]
    fn descriptors_in_messages_are_shown() {
        let mut bytes = [0; 40];
        bytes[0] = 20;
        (bytes[8], bytes[12], bytes[16]) = (1, 1, 7);
        bytes[24] = 16;
        (bytes[32], bytes[36]) = (0, 8);
        assert_eq!(
            control_data(&bytes, Form::default()),
            "[{cmsg_level=SOL_SOCKET, cmsg_type=SCM_RIGHTS, cmsg_data=[7]}, {cmsg_level=SOL_IP, cmsg_type=8, cmsg_data=\"\"}]"
        );
        // What a program has made up.
        assert_eq!(control_data(&[0; 16], Form::default()), "[]");
        assert_eq!(
            control_data(&[0xff; 24], Form::default()),
            "[]".replace(
                "[]",
                "[{cmsg_level=-1, cmsg_type=-1, cmsg_data=\"\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\"...}]"
            )
        );
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
            "{si_signo=SIGUSR1, si_code=SI_USER, si_pid=55, si_uid=1000}"
        );
        assert_eq!(
            signal_information(&bytes([17, 0, 1, 0, 55, 0, 3, 0])).unwrap(),
            "{si_signo=SIGCHLD, si_code=CLD_EXITED, si_pid=55, si_uid=0, si_status=3}"
        );
        assert_eq!(signal_information(&[0; 8]), None);
    }
}
