//! Structures in words: `{tv_sec=1, tv_nsec=0}`.
//!
//! Their layouts come from the kernel's own types (`calls/structures`); what is written here is which members numbers
//! with names are, and which members say most.

use std::collections::HashMap;
use std::sync::OnceLock;

use crate::constants::{Names, signals};
use crate::form::{Form, Hexadecimal};

static STRUCTURES: &str = include_str!("../calls/structures");

/// A structure that a call takes.
pub(crate) struct Structure {
    /// How many bytes it has.
    pub(crate) size: usize,
    members: Vec<Member>,
}

struct Member {
    /// Empty: it has none.
    name: &'static str,
    offset: usize,
    size: usize,
    count: usize,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    Signed,
    Unsigned,
    Text,
    Signals,
    Pointer,
    Nested(&'static str),
    Other,
}

/// Returns the structure of a name.
pub(crate) fn named(name: &str) -> Option<&'static Structure> {
    static ALL: OnceLock<HashMap<&'static str, Structure>> = OnceLock::new();
    ALL.get_or_init(|| STRUCTURES.lines().filter(|line| !line.starts_with('#')).filter_map(parsed).collect())
        .get(name)
}

fn parsed(line: &'static str) -> Option<(&'static str, Structure)> {
    let mut fields = line.split('\t');
    let name = fields.next()?;
    let size = fields.next()?.parse().ok()?;
    Some((name, Structure { size, members: fields.map(member).collect::<Option<_>>()? }))
}

fn member(text: &'static str) -> Option<Member> {
    let mut fields = text.split(':');
    let name = fields.next()?;
    let mut number = || fields.next()?.parse().ok();
    let (offset, size, count) = (number()?, number()?, number()?);
    let kind = fields.next()?;
    let kind = match kind.split_at_checked(1)? {
        ("i", _) => Kind::Signed,
        ("u", _) => Kind::Unsigned,
        ("c", _) => Kind::Text,
        ("m", _) => Kind::Signals,
        ("p", _) => Kind::Pointer,
        ("s", nested) => Kind::Nested(nested),
        _ => Kind::Other,
    };
    Some(Member { name, offset, size, count, kind })
}

/// The members that say most, of structures that have many.
fn shown_members(structure: &str, bytes: &[u8]) -> &'static [&'static str] {
    let mode = |at: usize| bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes);
    let is_device =
        |at: usize| mode(at).is_some_and(|mode| matches!(mode & 0o170_000, 0o020_000 | 0o060_000));
    match structure {
        "stat" if is_device(24) => &["st_mode", "st_rdev"],
        "statx" if is_device(28) => &["stx_mode", "stx_rdev_major", "stx_rdev_minor"],
        "stat" => &["st_mode", "st_size"],
        "statx" => &["stx_mode", "stx_size"],
        "rusage" => &["ru_utime", "ru_stime", "ru_maxrss"],
        "new_utsname" => &["sysname", "nodename", "release"],
        "sysinfo" => &["uptime", "totalram", "freeram", "procs"],
        "perf_event_attr" => &["type", "size", "config"],
        "__kernel_timex" => &["modes", "offset", "freq", "status"],
        "clone_args" => &["flags", "exit_signal", "stack", "stack_size"],
        "io_uring_params" => &["sq_entries", "cq_entries", "flags", "features"],
        _ => &[],
    }
}

fn names(structure: &str, member: &str) -> Option<Names> {
    Some(match (structure, member) {
        (_, "st_mode" | "stx_mode") => Names::FileMode,
        ("stat", "st_dev" | "st_rdev") => Names::Device,
        ("statx", "stx_mask") => Names::Of("statx.mask"),
        ("statx", "stx_attributes" | "stx_attributes_mask") => Names::Of("statx.attributes"),
        ("statfs", "f_type") => Names::Of("statfs.type"),
        ("statfs", "f_flags") => Names::Of("statfs.flags"),
        ("pollfd", "events" | "revents") => Names::Of("poll.events"),
        ("epoll_event", "events") => Names::Of("epoll.events"),
        ("clone_args", "flags") => Names::Of("clone3.flags"),
        ("clone_args", "exit_signal") | (_, "sigev_signo") => Names::Signal,
        (_, "sigev_notify") => Names::Of("sigevent.notify"),
        ("open_how", "flags") => Names::Of("open.flags"),
        ("open_how", "mode") => Names::Permissions,
        ("open_how", "resolve") => Names::Of("open_how.resolve"),
        ("sigaltstack", "ss_flags") => Names::Of("sigaltstack.flags"),
        (_, "sa_handler") => Names::Handler,
        (_, "sa_flags") => Names::Of("sigaction.flags"),
        (_, "sched_policy") => Names::Of("sched.policy"),
        (_, "sched_flags") => Names::Of("sched_attr.flags"),
        ("rlimit", _) => Names::Limit("RLIM_INFINITY"),
        ("rlimit64", _) => Names::Limit("RLIM64_INFINITY"),
        ("flock", "l_type") => Names::Of("fcntl.lock"),
        ("flock", "l_whence") => Names::Of("lseek.whence"),
        ("mount_attr", "attr_set" | "attr_clr") => Names::Of("mount_attr"),
        ("mount_attr", "propagation") => Names::Of("mount.flags"),
        ("io_uring_params", "flags") => Names::Of("io_uring_params.flags"),
        ("file_handle", "handle_type") => Names::Of("handle.type"),
        ("ucred", "uid" | "gid") => Names::Id,
        _ => return None,
    })
}

impl Structure {
    /// Its members' values, of `bytes` that may be fewer than it has.
    pub(crate) fn describe(&self, name: &str, bytes: &[u8], form: Form) -> String {
        let shown = if form.whole { &[] } else { shown_members(name, bytes) };
        let mut left_out = false;
        let mut parts = Vec::new();
        for member in &self.members {
            let filler = ["__", "pad", "_pad"].iter().any(|filler| member.name.starts_with(filler))
                || member.name.is_empty()
                || ["reserved", "spare", "unused", "resv"].iter().any(|filler| member.name.contains(filler));
            if filler {
                continue;
            }
            let value = bytes.get(member.offset..member.offset + member.size * member.count);
            match value {
                Some(value) if shown.is_empty() || shown.contains(&member.name) => {
                    let text = member.describe(name, value, form);
                    parts.push(format!("{}={text}", member.name));
                }
                _ => left_out = true,
            }
        }
        if left_out {
            parts.push("...".to_owned());
        }
        format!("{{{}}}", parts.join(", "))
    }
}

impl Member {
    fn describe(&self, structure: &str, value: &[u8], form: Form) -> String {
        if matches!(self.kind, Kind::Text) {
            let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
            let text = value.get(..end).unwrap_or_default();
            return match form.hexadecimal {
                Hexadecimal::Bytes => format!("\"{}\"", String::from_utf8_lossy(text)),
                _ => form.quoted(text, true),
            };
        }
        let mut each = value.chunks_exact(self.size.max(1)).map(|value| self.one(structure, value, form));
        if self.count == 1 {
            each.next().unwrap_or_default()
        } else {
            format!("[{}]", each.collect::<Vec<_>>().join(", "))
        }
    }

    fn one(&self, structure: &str, value: &[u8], form: Form) -> String {
        let mut word = [0; 8];
        if let Some(place) = word.get_mut(..value.len()) {
            place.copy_from_slice(value);
        }
        let number = u64::from_ne_bytes(word);
        if let Some(names) = names(structure, self.name) {
            return names.of(number);
        }
        match self.kind {
            Kind::Signed => {
                let shift = 64 - 8 * u32::try_from(self.size.clamp(1, 8)).unwrap_or(8);
                (number.cast_signed() << shift >> shift).to_string()
            }
            Kind::Unsigned if number == u64::MAX => "-1".to_owned(),
            Kind::Unsigned => number.to_string(),
            Kind::Signals => signals(number),
            Kind::Pointer if number == 0 => "NULL".to_owned(),
            Kind::Pointer => format!("{number:#x}"),
            Kind::Nested(name) => named(name).map_or_else(String::new, |of| of.describe(name, value, form)),
            Kind::Text | Kind::Other => "...".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn said(name: &str, bytes: &[u8]) -> String {
        named(name).unwrap().describe(name, bytes, Form::default())
    }

    #[test]
    fn layouts_are_those_of_the_c_library() {
        assert_eq!(named("stat").unwrap().size, size_of::<libc::stat>());
        assert_eq!(named("__kernel_timespec").unwrap().size, size_of::<libc::timespec>());
        assert_eq!(named("pollfd").unwrap().size, size_of::<libc::pollfd>());
        assert_eq!(named("epoll_event").unwrap().size, size_of::<libc::epoll_event>());
        assert_eq!(named("rusage").unwrap().size, size_of::<libc::rusage>());
        assert_eq!(named("statx").unwrap().size, size_of::<libc::statx>());
        for line in STRUCTURES.lines().filter(|line| !line.starts_with('#')) {
            let (name, structure) = parsed(line).unwrap();
            for member in structure.members {
                assert!(
                    member.offset + member.size * member.count <= structure.size,
                    "{name}.{}",
                    member.name
                );
                if let Kind::Nested(nested) = member.kind {
                    assert_eq!(named(nested).unwrap().size, member.size, "{name}.{}", member.name);
                }
            }
        }
    }

    #[test]
    fn members_are_told_with_their_values() {
        assert_eq!(said("__kernel_timespec", &words(&[1, 500])), "{tv_sec=1, tv_nsec=500}");
        assert_eq!(
            said("__kernel_itimerspec", &words(&[0, 0, 1, u64::MAX])),
            "{it_interval={tv_sec=0, tv_nsec=0}, it_value={tv_sec=1, tv_nsec=-1}}"
        );
        assert_eq!(
            said("pollfd", &words(&[0x0004_0001_ffff_ffff])),
            "{fd=-1, events=POLLIN, revents=POLLOUT}"
        );
        assert_eq!(
            said("sigaction", &words(&[1, 0x1000_0004, 0, 1 << 9])),
            "{sa_handler=SIG_IGN, sa_flags=SA_RESTART|SA_SIGINFO, sa_restorer=NULL, sa_mask=[USR1]}"
        );
        assert_eq!(
            said("rlimit64", &words(&[8 << 20, u64::MAX])),
            "{rlim_cur=8192*1024, rlim_max=RLIM64_INFINITY}"
        );
    }

    #[test]
    fn large_structures_are_told_in_part_unless_asked_for_as_a_whole() {
        let mut bytes = vec![0; 144];
        bytes[24..28].copy_from_slice(&0o100_600_u32.to_ne_bytes());
        bytes[48..56].copy_from_slice(&77_u64.to_ne_bytes());
        assert_eq!(said("stat", &bytes), "{st_mode=S_IFREG|0600, st_size=77, ...}");
        let whole = named("stat").unwrap().describe("stat", &bytes, Form { whole: true, ..Form::default() });
        assert!(whole.contains("st_nlink=0") && !whole.contains("..."), "{whole}");
    }

    #[test]
    fn what_is_cut_off_is_left_out() {
        assert_eq!(said("__kernel_timespec", &words(&[1])), "{tv_sec=1, ...}");
        let mut name = [0; 352];
        name[..5].copy_from_slice(b"Linux");
        assert!(said("new_utsname", &name).starts_with("{sysname=\"Linux\", nodename=\"\""));
    }
}
