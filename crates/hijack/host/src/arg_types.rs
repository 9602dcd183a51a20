//! The memory that arguments point to: how much of it executives capture ([`ArgCapture`]), and how it is decoded ([`ArgType`]).
//!
//! Most follows from an argument's type in the kernel: a `const struct` is read before the call, another one after it. What
//! does not follow is written here.

use orrery_hijack_image::capture::{
    ArgCapture, CAPTURES, CONTROL, NAME, NO_ARGUMENT, RESULT, WORKING_DIRECTORY, details, extent, when,
};
use orrery_hijack_image::nr::CALLS;

use crate::calls::{self, Argument, Signature};
use crate::structures;

/// How much of a buffer is captured, in bytes.
const BUFFER: u16 = 48;
/// How much of a path.
pub(crate) const PATH: u16 = 160;
/// How much of a path with details of what it leads to, or of what has a number instead of a path and an address as long as one.
const DETAILS: u16 = 176;
/// How much of another string.
const STRING: u16 = 64;
/// How much of a command line.
const STRINGS: u16 = 160;
/// How much of a set of descriptors: 768 of them.
const DESCRIPTORS: u16 = 96;
/// How much of a list of structures.
const LIST: u16 = 128;
/// How much of a message's control data.
const CONTROL_DATA: u16 = 64;
/// The longest address of a socket is that of `AF_UNIX`.
const ADDRESS: u16 = 110;

/// What a piece of memory means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ArgType {
    /// A string.
    Text,
    /// Bytes of a buffer; the number of the argument that says how many there are, where they are not the call's result.
    Bytes { of: Option<usize> },
    /// A path that the call writes, with its zero.
    Path,
    /// Strings, each with its zero.
    Strings,
    /// The bytes of a message, which has an address and control data, too: see [`more`].
    Message,
    /// The address of a socket.
    Address,
    /// One structure of a name.
    Structure(&'static str),
    /// So many as there are.
    Structures(&'static str),
    /// Integers of so many bytes.
    Integers(usize),
    /// A set of signals.
    Signals,
    /// A set of descriptors.
    Descriptors,
    /// How a process ended.
    Status,
    /// What a signal says.
    Signal,
    /// The value of a socket's option: an integer most often.
    Setting,
}

/// What is captured of one argument's memory, and how it is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ArgDecoder {
    /// The bytes that executives capture of the argument.
    pub(crate) capture: ArgCapture,
    /// The type, which says how the bytes are formatted.
    pub(crate) arg_type: ArgType,
}

/// Returns what is captured of the memory that argument `index` of a call points to, if any.
pub(crate) fn decoders(call: &Signature, index: usize) -> Option<ArgDecoder> {
    let arguments = call.arguments.as_deref()?;
    let argument = arguments.get(index)?;
    let pointed = matches!((call.name, argument.name), ("fcntl", "arg") | ("prctl", "arg2"));
    if !argument.kind.ends_with('*') && !pointed {
        return None;
    }
    let own = u8::try_from(index).ok()?;
    let capture_of = |extent, by: usize, after: u8, size: usize, most: u16| ArgCapture {
        argument: own,
        extent,
        by: u8::try_from(by).unwrap_or(NO_ARGUMENT),
        after,
        size: u16::try_from(size).unwrap_or(0),
        most,
    };
    let before = |extent, by, size, most| capture_of(extent, by, when::BEFORE, size, most);
    let after = |extent, by, size, most| capture_of(extent, by, when::SUCCEEDED, size, most);
    let found = |extent, by, size, most| capture_of(extent, by, when::FOUND, size, most);
    let given_or_not = |given: bool| if given { when::BEFORE } else { when::SUCCEEDED };
    let (next, constant) = (index + 1, argument.kind.starts_with("const "));
    let (capture, arg_type) = match (call.name, argument.name) {
        ("read" | "pread64", "buf")
        | ("recvfrom" | "getrandom", "ubuf")
        | ("getxattr" | "lgetxattr" | "fgetxattr", "value")
        | ("listxattr" | "llistxattr" | "flistxattr" | "listxattrat", "list")
        | ("mq_timedreceive", "u_msg_ptr") => {
            (after(extent::RETURNED, next, 1, BUFFER), ArgType::Bytes { of: None })
        }
        ("getcwd", "buf") => (after(extent::RETURNED, next, 1, PATH), ArgType::Path),
        ("readlink" | "readlinkat", "buf") => {
            (after(extent::RETURNED, next, 1, PATH), ArgType::Bytes { of: None })
        }
        ("fcntl", "arg") => {
            let size = structures::named("flock")?.size;
            (before(extent::ONE, 0, size, u16::try_from(size).ok()?), ArgType::Structure("flock"))
        }
        // The name of a thread, of 16 bytes; for other options, it is no pointer, or is not shown.
        ("prctl", "arg2") => (before(extent::STRING, 0, 1, 16), ArgType::Text),
        ("sched_getaffinity", "user_mask_ptr") => {
            (after(extent::RETURNED, 1, 1, DESCRIPTORS), ArgType::Descriptors)
        }
        ("sched_setaffinity", "user_mask_ptr") => {
            (before(extent::COUNTED, 1, 1, DESCRIPTORS), ArgType::Descriptors)
        }
        ("write" | "pwrite64", "buf")
        | ("sendto", "buff")
        | ("setxattr" | "lsetxattr" | "fsetxattr", "value")
        | ("mq_timedsend", "u_msg_ptr") => {
            (before(extent::COUNTED, next, 1, BUFFER), ArgType::Bytes { of: Some(next) })
        }
        ("readv" | "preadv" | "preadv2", "vec") => {
            (after(extent::BUFFERS, next, 0, BUFFER), ArgType::Bytes { of: None })
        }
        // How much the buffers hold in all is not read: the result says how much was transferred.
        ("writev" | "pwritev" | "pwritev2", "vec") => {
            (before(extent::BUFFERS, next, 0, BUFFER), ArgType::Bytes { of: None })
        }
        ("sendmsg", "msg") => (before(extent::MESSAGE, 0, 0, BUFFER), ArgType::Message),
        ("recvmsg", "msg") => (after(extent::MESSAGE, 0, 0, BUFFER), ArgType::Message),
        ("connect" | "bind" | "sendto", "uservaddr" | "umyaddr" | "addr") => {
            (before(extent::COUNTED, next, 1, ADDRESS), ArgType::Address)
        }
        (
            "accept" | "accept4" | "getsockname" | "getpeername" | "recvfrom",
            "upeer_sockaddr" | "usockaddr" | "addr",
        ) => (after(extent::POINTED, next, 1, ADDRESS), ArgType::Address),
        ("setsockopt", "optval") => (before(extent::COUNTED, next, 1, STRING), ArgType::Setting),
        ("getsockopt", "optval") => (after(extent::POINTED, next, 1, STRING), ArgType::Setting),
        (_, "upeer_addrlen" | "usockaddr_len" | "addr_len" | "optlen") => {
            (after(extent::ONE, 0, 4, 4), ArgType::Integers(4))
        }
        ("pipe" | "pipe2", "fildes") | ("socketpair", "usockvec") => {
            (after(extent::ONE, 0, 8, 8), ArgType::Integers(4))
        }
        ("sendfile" | "splice" | "copy_file_range", _) => {
            (before(extent::ONE, 0, 8, 8), ArgType::Integers(8))
        }
        ("timer_create", "created_timer_id") => (after(extent::ONE, 0, 4, 4), ArgType::Integers(4)),
        ("getresuid" | "getresgid" | "getcpu", _) if !argument.kind.contains("struct") => {
            (after(extent::ONE, 0, 4, 4), ArgType::Integers(4))
        }
        // Nothing is written for who has not ended.
        ("wait4", "stat_addr") => (found(extent::ONE, 0, 4, 4), ArgType::Status),
        ("wait4", "ru") => {
            let size = structures::named("rusage")?.size;
            (found(extent::ONE, 0, size, u16::try_from(size).ok()?), ArgType::Structure("rusage"))
        }
        // What is left is written where there is some.
        ("nanosleep" | "clock_nanosleep", "rmtp") => {
            (capture_of(extent::ONE, 0, when::INTERRUPTED, 16, 16), ArgType::Structure("__kernel_timespec"))
        }
        ("waitid", "infop") | ("rt_sigtimedwait", "uinfo") => {
            (after(extent::ONE, 0, 32, 32), ArgType::Signal)
        }
        ("rt_sigqueueinfo" | "rt_tgsigqueueinfo" | "pidfd_send_signal", "uinfo" | "info") => {
            (before(extent::ONE, 0, 32, 32), ArgType::Signal)
        }
        ("execve" | "execveat", "argv") => (before(extent::STRINGS, 0, 0, STRINGS), ArgType::Strings),
        ("select" | "pselect6", "inp" | "outp" | "exp") => {
            (before(extent::BITS, 0, 0, DESCRIPTORS), ArgType::Descriptors)
        }
        ("poll" | "ppoll", "ufds") => (after(extent::COUNTED, 1, 8, LIST), ArgType::Structures("pollfd")),
        ("epoll_wait" | "epoll_pwait" | "epoll_pwait2", "events") => {
            (after(extent::RETURNED, next, 12, 120), ArgType::Structures("epoll_event"))
        }
        ("semop" | "semtimedop", "tsops") => {
            (before(extent::COUNTED, next, 6, LIST), ArgType::Structures("sembuf"))
        }
        ("utimensat", "utimes") => (before(extent::ONE, 0, 32, 32), ArgType::Structures("__kernel_timespec")),
        ("utimes" | "futimesat", "utimes") => {
            (before(extent::ONE, 0, 32, 32), ArgType::Structures("__kernel_old_timeval"))
        }
        ("recvmmsg" | "sendmmsg", "mmsg") | ("process_vm_readv" | "process_vm_writev" | "vmsplice", _) => {
            return None;
        }
        // Beside a path of full length, and the file system's type.
        ("mount", "dev_name") => (before(extent::STRING, 0, 1, STRING), ArgType::Text),
        _ if call.is_path(argument) => (before(extent::STRING, 0, 1, PATH), ArgType::Text),
        _ if is_string(argument) => (before(extent::STRING, 0, 1, STRING), ArgType::Text),
        _ if argument.kind.trim_start_matches("const ") == "sigset_t *" => {
            let given = constant || !["oset", "uset"].contains(&argument.name);
            (capture_of(extent::ONE, 0, given_or_not(given), 8, 8), ArgType::Signals)
        }
        _ => {
            let name = structure_of(argument.kind)?;
            let size = structures::named(name)?.size;
            // What is longer than an entry has room for is cut off.
            let most = u16::try_from(size).unwrap_or(u16::MAX);
            let given = constant || is_given(call.name, argument.name);
            (capture_of(extent::ONE, 0, given_or_not(given), size, most), ArgType::Structure(name))
        }
    };
    Some(ArgDecoder { capture, arg_type })
}

/// Returns the structure that an argument points to.
fn structure_of(kind: &'static str) -> Option<&'static str> {
    let kind = kind.strip_prefix("const ").unwrap_or(kind);
    match kind.strip_suffix(" *")? {
        "stack_t" => Some("sigaltstack"),
        name => name.strip_prefix("struct "),
    }
}

/// Strings that are no paths.
fn is_string(argument: &Argument) -> bool {
    const NAMES: [&str; 10] = [
        "name",
        "_type",
        "_description",
        "_callout_info",
        "uname",
        "u_name",
        "_fs_name",
        "_key",
        "type",
        "oldname",
    ];
    matches!(argument.kind, "const char *" | "char *") && NAMES.contains(&argument.name)
}

/// Returns whether a call reads a structure that its type would let it write.
fn is_given(call: &str, argument: &str) -> bool {
    matches!(
        (call, argument),
        ("nanosleep", "rqtp")
            | ("setitimer", "value")
            | ("epoll_ctl", "event")
            | (
                "setrlimit"
                    | "settimeofday"
                    | "utime"
                    | "openat2"
                    | "clone3"
                    | "mount_setattr"
                    | "futex_waitv",
                _
            )
            | ("sched_setparam" | "sched_setscheduler" | "sched_setattr" | "perf_event_open", _)
            | (
                "select" | "pselect6" | "ppoll" | "io_getevents" | "io_pgetevents" | "recvmmsg",
                "tvp" | "tsp" | "timeout"
            )
            | ("timer_create", "timer_event_spec")
            | ("mq_open", "u_attr")
    )
}

/// Returns what is captured beside what the arguments' own [`decoders`] say.
fn more(call: &Signature) -> Vec<ArgCapture> {
    let of_message = |argument: u8, extent: u8, after: u8, most: u16| ArgCapture {
        argument,
        extent,
        by: 1,
        after,
        size: 1,
        most,
    };
    let parts = |after: u8| {
        vec![
            of_message(NAME, extent::NAME, after, ADDRESS),
            of_message(CONTROL, extent::CONTROL, after, CONTROL_DATA),
        ]
    };
    match call.name {
        "sendmsg" => parts(when::BEFORE),
        "recvmsg" => parts(when::SUCCEEDED),
        // F_GETLK writes what it has found, PR_GET_NAME the name.
        "fcntl" | "prctl" => {
            let index = if call.name == "fcntl" { 2 } else { 1 };
            let given = decoders(call, index).map(|decoder| decoder.capture);
            given.into_iter().map(|capture| ArgCapture { after: when::SUCCEEDED, ..capture }).collect()
        }
        _ => Vec::new(),
    }
}

/// How much of each call is reported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Detail {
    /// How many bytes of a buffer: [`Detail::MOST`] at most; `None`: some fifty.
    pub buffers: Option<u16>,
    /// What is printed of descriptors beside their numbers.
    pub descriptors: Descriptors,
}

/// What is printed of descriptors beside their numbers, as a set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Descriptors(u16);

impl Descriptors {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// Where they lead: paths, and for what has none its kind and inode.
    pub const PATHS: Self = Self(details::PATH);
    /// Protocols and addresses of sockets.
    pub const SOCKETS: Self = Self(details::SOCKET);
    /// Kinds and numbers of devices.
    pub const DEVICES: Self = Self(details::DEVICE);
    /// Processes of PID file descriptors.
    pub const PROCESSES: Self = Self(details::PROCESS);
    /// All of these.
    pub const ALL: Self = Self(details::ALL);

    /// Returns what is in one or the other.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Detail {
    /// The most bytes of a buffer that there is room for.
    pub const MOST: u16 = 200;

    /// Returns what to capture for a decoder.
    fn capture(self, decoder: ArgDecoder) -> ArgCapture {
        let adjustable = decoder.capture.most == BUFFER
            && matches!(decoder.arg_type, ArgType::Bytes { .. } | ArgType::Message);
        let buffers = self.buffers.filter(|_| adjustable).map(|buffers| buffers.min(Self::MOST));
        ArgCapture { most: buffers.unwrap_or(decoder.capture.most), ..decoder.capture }
    }
}

/// Returns whether a call returns a descriptor.
fn opens(call: &str) -> bool {
    const OTHERS: [&str; 15] = [
        "creat",
        "dup",
        "dup2",
        "dup3",
        "socket",
        "accept",
        "accept4",
        "memfd_create",
        "timerfd_create",
        "userfaultfd",
        "perf_event_open",
        "pidfd_open",
        "pidfd_getfd",
        "fsopen",
        "fsmount",
    ];
    const FAMILIES: [&str; 6] =
        ["open", "epoll_create", "eventfd", "signalfd", "inotify_init", "fanotify_init"];
    OTHERS.contains(&call) || FAMILIES.iter().any(|family| call.starts_with(family))
}

/// Returns where descriptors of a call lead: those that it is given as they are before, the one that it returns.
fn descriptors(call: &Signature, detail: Descriptors) -> Vec<ArgCapture> {
    if detail == Descriptors::NONE {
        return Vec::new();
    }
    let capture_of = |argument: u8, by: u8, after: bool| ArgCapture {
        argument,
        extent: extent::DESCRIPTOR,
        by,
        after: if after { when::SUCCEEDED } else { when::BEFORE },
        size: detail.0,
        most: if detail == Descriptors::PATHS { PATH } else { DETAILS },
    };
    let arguments = (0..).zip(call.arguments.as_deref().unwrap_or_default());
    let given = arguments.filter(|(_, argument)| argument.is_descriptor() || argument.is_directory());
    let mut captures: Vec<_> = given
        .map(|(index, argument)| {
            capture_of(index, if argument.is_directory() { WORKING_DIRECTORY } else { 0 }, false)
        })
        .collect();
    captures.extend(opens(call.name).then(|| capture_of(RESULT, 0, true)));
    captures
}

/// Returns what executives capture, for all calls by number; the last is for unknown ones.
pub(crate) fn captures(detail: Detail) -> [[ArgCapture; CAPTURES]; CALLS + 1] {
    let mut captures = [[ArgCapture::NONE; CAPTURES]; CALLS + 1];
    for call in calls::all() {
        let number = usize::try_from(call.number).unwrap_or(CALLS);
        if let Some(places) = captures.get_mut(number).filter(|_| number < CALLS) {
            let decoders =
                (0..call.arguments.as_ref().map_or(0, Vec::len)).filter_map(|index| decoders(call, index));
            let descriptors = descriptors(call, detail.descriptors);
            let captures =
                decoders.map(|decoder| detail.capture(decoder)).chain(more(call)).chain(descriptors);
            for (place, capture) in places.iter_mut().zip(captures) {
                *place = capture;
            }
        }
    }
    captures
}

#[cfg(test)]
mod tests {
    use orrery_hijack_image::journal::DATA;

    use super::*;

    fn of(call: &str, argument: &str) -> ArgDecoder {
        let call = calls::named(call).unwrap();
        let index = call.arguments.as_ref().unwrap().iter().position(|each| each.name == argument).unwrap();
        decoders(call, index).unwrap()
    }

    #[test]
    fn what_calls_are_given_is_read_before_and_what_they_give_after() {
        for (call, argument) in [
            ("rt_sigaction", "act"),
            ("clock_nanosleep", "rqtp"),
            ("nanosleep", "rqtp"),
            ("rt_sigprocmask", "nset"),
            ("write", "buf"),
            ("connect", "uservaddr"),
            ("epoll_ctl", "event"),
            ("openat", "filename"),
            ("clone3", "uargs"),
            ("sigaltstack", "uss"),
        ] {
            assert_eq!(of(call, argument).capture.after, when::BEFORE, "{call} {argument}");
        }
        for (call, argument) in [
            ("rt_sigaction", "oact"),
            ("nanosleep", "rmtp"),
            ("rt_sigprocmask", "oset"),
            ("read", "buf"),
            ("accept4", "upeer_sockaddr"),
            ("newfstatat", "statbuf"),
            ("pipe2", "fildes"),
            ("wait4", "stat_addr"),
            ("uname", "name"),
        ] {
            assert_ne!(of(call, argument).capture.after, when::BEFORE, "{call} {argument}");
        }
    }

    #[test]
    fn types_tell_what_there_is() {
        assert_eq!(of("newfstatat", "statbuf").arg_type, ArgType::Structure("stat"));
        assert_eq!(of("prlimit64", "old_rlim").arg_type, ArgType::Structure("rlimit64"));
        assert_eq!(of("sigaltstack", "uoss").arg_type, ArgType::Structure("sigaltstack"));
        assert_eq!(of("uname", "name").arg_type, ArgType::Structure("new_utsname"));
        assert_eq!(of("memfd_create", "uname").arg_type, ArgType::Text);
        assert_eq!(of("futex", "utime").arg_type, ArgType::Structure("__kernel_timespec"));
        assert!(decoders(calls::named("mmap").unwrap(), 0).is_none());
    }

    #[test]
    fn details_are_told_on_request() {
        let number = |call| usize::try_from(calls::named(call).unwrap().number).unwrap();
        let plain = captures(Detail::default());
        let more = captures(Detail { buffers: Some(u16::MAX), descriptors: Descriptors::PATHS });
        let of = |captures: &[[ArgCapture; CAPTURES]; CALLS + 1], call| {
            let captures = captures[number(call)].into_iter().filter(|capture| *capture != ArgCapture::NONE);
            captures.map(|capture| (capture.argument, capture.extent, capture.most)).collect::<Vec<_>>()
        };
        assert_eq!(of(&plain, "read"), [(1, extent::RETURNED, BUFFER)]);
        assert_eq!(of(&more, "read"), [(1, extent::RETURNED, Detail::MOST), (0, extent::DESCRIPTOR, PATH)]);
        let openat =
            [(1, extent::STRING, PATH), (0, extent::DESCRIPTOR, PATH), (RESULT, extent::DESCRIPTOR, PATH)];
        assert_eq!(of(&more, "openat"), openat);
        assert_eq!(of(&plain, "openat"), openat[..1]);
        let all = captures(Detail { buffers: None, descriptors: Descriptors::ALL });
        assert_eq!(of(&all, "close"), [(0, extent::DESCRIPTOR, DETAILS)]);
        assert_eq!(all[number("close")][0].size, details::ALL);
        assert_eq!(more[number("close")][0].size, details::PATH);
    }

    #[test]
    fn nothing_is_looked_at_that_finds_no_place() {
        for call in calls::all() {
            let arguments = call.arguments.as_ref().map_or(0, Vec::len);
            let all: Vec<_> = (0..arguments).filter_map(|index| decoders(call, index)).collect();
            assert!(
                all.len() + more(call).len() + descriptors(call, Descriptors::ALL).len() <= CAPTURES,
                "{}",
                call.name
            );
            let captures = all.iter().map(|decoder| decoder.capture).chain(more(call));
            let most: usize = captures.map(|capture| usize::from(capture.most)).sum();
            // The last of the system's names are cut off, and what a long path leaves no room for.
            assert!(
                most <= DATA || ["uname", "statx", "statmount"].contains(&call.name),
                "{}: {most}",
                call.name
            );
            assert!(all.iter().all(|decoder| usize::from(decoder.capture.argument) < arguments));
        }
    }
}
