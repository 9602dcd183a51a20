//! Names of constants: for each argument or member those that it can be made of (`calls/sets`), with their values from the headers
//! (`calls/constants`).

use std::collections::HashMap;
use std::sync::OnceLock;

static CONSTANTS: &str = include_str!("../calls/constants");

/// What a number is named after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Names {
    /// The constants of a set.
    Of(&'static str),
    /// A signal.
    Signal,
    /// Flags of `clone`, with the signal that its child ends with in the lowest byte.
    Clone,
    /// Permission bits, in octal.
    Permissions,
    /// A file's type, and permissions.
    FileMode,
    /// What a signal handler is.
    Handler,
    /// A limit of a resource, where all ones are called so.
    Limit(&'static str),
    /// Flags of IPC objects, with permissions.
    Ipc(&'static str),
    /// A time slot for real-time or a key that is made for each: `IPC_PRIVATE` where it is zero.
    Key,
    /// A user or group, of which the largest number is none.
    Id,
    /// A device.
    Device,
    /// A number, in hexadecimal digits if it is not zero.
    Hexadecimal,
    /// A number without sign.
    Unsigned,
}

impl Names {
    /// Returns the number, in words.
    pub(crate) fn of(self, value: u64) -> String {
        let narrow = value & 0xffff_ffff;
        match self {
            Names::Of(name) => set(name).map_or_else(|| signed(value), |set| set.words(value)),
            Names::Signal => signal(narrow),
            Names::Clone => clone_flags(narrow),
            Names::Permissions => permissions(narrow),
            Names::FileMode => file_mode(narrow),
            Names::Handler => match value {
                0 => "SIG_DFL".to_owned(),
                1 => "SIG_IGN".to_owned(),
                _ => format!("{value:#x}"),
            },
            Names::Limit(none) => limit(value, none),
            Names::Ipc(name) => {
                let flags = Names::Of(name).of(narrow & !0o777);
                let permissions = permissions(narrow & 0o777);
                if narrow & !0o777 == 0 { permissions } else { format!("{flags}|{permissions}") }
            }
            Names::Key if narrow == 0 => "IPC_PRIVATE".to_owned(),
            Names::Key => format!("{narrow:#x}"),
            Names::Id => signed(narrow),
            Names::Device => device(value),
            Names::Hexadecimal if value == 0 => "0".to_owned(),
            Names::Hexadecimal => format!("{value:#x}"),
            Names::Unsigned => value.to_string(),
        }
    }
}

/// Constants that an argument can be made of.
struct Set {
    /// The bits in which a value is one of them; each of the others may be set or not.
    mask: u64,
    /// In the order in which they are printed; of several with one value, the first.
    constants: Vec<(&'static str, u64)>,
}

/// Returns the set of a name.
fn set(name: &str) -> Option<&'static Set> {
    static ALL: OnceLock<HashMap<&'static str, Set>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut all: HashMap<&'static str, Set> = HashMap::new();
        let mut last = "";
        for line in CONSTANTS.lines().filter(|line| !line.starts_with('#')) {
            let Some((name, value)) = line.split_once('\t') else { continue };
            let Ok(value) = u64::from_str_radix(value, 16) else { continue };
            match name.strip_prefix(':') {
                Some(name) => {
                    last = name;
                    all.insert(name, Set { mask: value, constants: Vec::new() });
                }
                None => {
                    if let Some(set) = all.get_mut(last) {
                        set.constants.push((name, value));
                    }
                }
            }
        }
        all
    })
    .get(name)
}

/// Returns the value of a constant of a set.
pub(crate) fn value(of: &str, name: &str) -> Option<u64> {
    set(of)?.constants.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
}

/// Returns the names of a set, with their values.
#[cfg(test)]
pub(crate) fn constants_of(name: &str) -> Option<&'static [(&'static str, u64)]> {
    set(name).map(|set| set.constants.as_slice())
}

impl Set {
    /// Returns the value in words. The kernel reads an `int` of most; some flags have 64 bits.
    fn words(&self, value: u64) -> String {
        const WIDE: std::ops::Range<u64> = 1 << 32..1 << 63;
        let wide = self.constants.iter().any(|(_, value)| WIDE.contains(value));
        let value = if wide { value } else { value & 0xffff_ffff };
        let narrow = |known: u64| if wide { known } else { known & 0xffff_ffff };
        if self.mask == u64::MAX {
            return self.named(value, narrow).map_or_else(|| signed(value), str::to_owned);
        }
        let (one, mut rest) = (value & self.mask, value & !self.mask);
        let mut text = match self.named(one, narrow) {
            // What is none of the constants is a number, but nothing is where there are flags only.
            Some(name) if self.mask != 0 || value == 0 => name.to_owned(),
            None if one != 0 => format!("{one:#x}"),
            _ => String::new(),
        };
        for (name, bits) in self.constants.iter().filter(|(_, bits)| *bits != 0 && bits & self.mask == 0) {
            let bits = narrow(*bits);
            if rest & bits == bits {
                rest &= !bits;
                text = join(text, name);
            }
        }
        match rest {
            0 if text.is_empty() => "0".to_owned(),
            0 => text,
            rest => join(text, &format!("{rest:#x}")),
        }
    }

    /// The constant of this value, among those that are one of several.
    fn named(&self, value: u64, narrow: impl Fn(u64) -> u64) -> Option<&'static str> {
        let one = |known: u64| known & !self.mask == 0 || self.mask == 0;
        self.constants.iter().find(|(_, known)| one(*known) && narrow(*known) == value).map(|(name, _)| *name)
    }
}

/// `RLIM_INFINITY`, or `8192*1024`.
fn limit(value: u64, none: &'static str) -> String {
    match value {
        u64::MAX => none.to_owned(),
        value if value > 1024 && value.is_multiple_of(1024) => format!("{}*1024", value / 1024),
        value => value.to_string(),
    }
}

/// `makedev(0x1, 0x3)`, as programs have it.
fn device(value: u64) -> String {
    let (major, minor) = (libc::major(value), libc::minor(value));
    format!("makedev({major:#x}, {minor:#x})")
}

/// `SIGTERM`; real-time signals, from 32 on, as `SIGRTMIN` and `SIGRT_1`.
fn signal(value: u64) -> String {
    const FIRST_REAL_TIME: u64 = 32;
    let found = set("signal").and_then(|set| set.named(value, |known| known));
    match found {
        Some(name) => name.to_owned(),
        None if value == FIRST_REAL_TIME => "SIGRTMIN".to_owned(),
        None if (FIRST_REAL_TIME..=64).contains(&value) => format!("SIGRT_{}", value - FIRST_REAL_TIME),
        None => signed(value),
    }
}

/// A set of signals: `[INT TERM]`, or `~[KILL]` where most are in it.
pub(crate) fn signals(set: u64) -> String {
    let (sign, set) = if set.count_ones() > 32 { ("~", !set) } else { ("", set) };
    let names = (0..64).filter(|bit| set & 1 << bit != 0).map(|bit| signal(bit + 1));
    let names: Vec<_> =
        names.map(|name| name.strip_prefix("SIG").map_or(name.clone(), str::to_owned)).collect();
    format!("{sign}[{}]", names.join(" "))
}

/// Flags, and in the lowest byte the signal at the child's end.
fn clone_flags(value: u64) -> String {
    const SIGNAL: u64 = 0xff;
    let flags = value & !SIGNAL;
    let text = if flags == 0 { String::new() } else { Names::Of("clone.flags").of(flags) };
    match value & SIGNAL {
        0 if text.is_empty() => "0".to_owned(),
        0 => text,
        number => join(text, &signal(number)),
    }
}

fn join(text: String, name: &str) -> String {
    if text.is_empty() { name.to_owned() } else { format!("{text}|{name}") }
}

fn permissions(mode: u64) -> String {
    format!("0{mode:o}")
}

fn file_mode(mode: u64) -> String {
    const TYPE: u64 = 0o170_000;
    let kind = match mode & TYPE {
        0o010_000 => "S_IFIFO|",
        0o020_000 => "S_IFCHR|",
        0o040_000 => "S_IFDIR|",
        0o060_000 => "S_IFBLK|",
        0o100_000 => "S_IFREG|",
        0o120_000 => "S_IFLNK|",
        0o140_000 => "S_IFSOCK|",
        _ => return permissions(mode),
    };
    format!("{kind}{}", permissions(mode & !TYPE))
}

/// An `int` as it was meant.
pub(crate) fn signed(value: u64) -> String {
    let narrow = value & 0xffff_ffff;
    let int = narrow as u32;
    if value == narrow || value >> 32 == 0xffff_ffff {
        int.cast_signed().to_string()
    } else {
        value.cast_signed().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &'static str, value: u64) -> String {
        Names::Of(name).of(value)
    }

    #[test]
    fn flags_have_names() {
        assert_eq!(of("open.flags", 0o2_000_000), "O_RDONLY|O_CLOEXEC");
        assert_eq!(of("open.flags", 0o1101), "O_WRONLY|O_CREAT|O_TRUNC");
        assert_eq!(of("open.flags", 0o20_200_002), "O_RDWR|O_TMPFILE");
        assert_eq!(of("prot", 0), "PROT_NONE");
        assert_eq!(of("prot", 3), "PROT_READ|PROT_WRITE");
        assert_eq!(of("mmap.flags", 0x22), "MAP_PRIVATE|MAP_ANONYMOUS");
        assert_eq!(of("sock.type", 0x80801), "SOCK_STREAM|SOCK_CLOEXEC|SOCK_NONBLOCK");
        assert_eq!(of("getrandom.flags", 1 << 31), "0x80000000");
        assert_eq!(of("access.mode", 0), "F_OK");
        assert_eq!(of("access.mode", 5), "R_OK|X_OK");
        assert_eq!(of("mount.flags", 6), "MS_NOSUID|MS_NODEV");
        assert_eq!(of("statx.mask", 0x7ff), "STATX_BASIC_STATS");
        assert_eq!(of("clone3.flags", 1 << 33 | 0x100), "CLONE_VM|CLONE_INTO_CGROUP");
        assert_eq!(Names::Clone.of(0x0120_0011), "CLONE_CHILD_CLEARTID|CLONE_CHILD_SETTID|SIGCHLD");
        assert_eq!(Names::Ipc("ipc.flags").of(0o1600), "IPC_CREAT|0600");
    }

    #[test]
    fn values_have_names() {
        assert_eq!(signal(15), "SIGTERM");
        assert_eq!(signal(0), "0");
        assert_eq!(signal(34), "SIGRT_2");
        assert_eq!(of("socket.family", 2), "AF_INET");
        assert_eq!(of("socket.family", 9999), "9999");
        assert_eq!(of("clock", 1), "CLOCK_MONOTONIC");
        assert_eq!(of("sigprocmask.how", 2), "SIG_SETMASK");
        assert_eq!(of("ioctl.cmd", 21505), "TCGETS");
        assert_eq!(of("rusage.who", u64::MAX), "RUSAGE_CHILDREN");
        assert_eq!(of("rlimit.resource", 7), "RLIMIT_NOFILE");
        assert_eq!(of("futex.op", 129), "FUTEX_WAKE_PRIVATE");
        for (value, name) in [(0, "F_DUPFD"), (1, "F_GETFD"), (3, "F_GETFL"), (4, "F_SETFL"), (8, "F_SETOWN")]
        {
            assert_eq!(of("fcntl.cmd", value), name);
        }
        assert_eq!(value("open.flags", "O_CREAT"), Some(0o100));
        assert_eq!(Names::Limit("RLIM_INFINITY").of(u64::MAX), "RLIM_INFINITY");
        assert_eq!(Names::Limit("RLIM_INFINITY").of(8 << 20), "8192*1024");
        assert_eq!(Names::Device.of(0x103), "makedev(0x1, 0x3)");
    }

    #[test]
    fn every_set_has_constants_within_its_mask_or_outside() {
        for line in CONSTANTS.lines().filter_map(|line| line.strip_prefix(':')) {
            let name = line.split('\t').next().unwrap();
            let set = set(name).unwrap();
            assert!(!set.constants.is_empty(), "{name}");
            let mixed = |value: u64| value & set.mask != 0 && value & !set.mask != 0;
            assert!(set.constants.iter().all(|(_, value)| !mixed(*value)), "{name}");
        }
    }

    #[test]
    fn sets_of_signals_are_the_shorter_of_both() {
        assert_eq!(signals(0), "[]");
        assert_eq!(signals(1 << 1 | 1 << 14), "[INT TERM]");
        assert_eq!(signals(!(1 << 8)), "~[KILL]");
    }

    #[test]
    fn modes_of_files_tell_what_these_are() {
        assert_eq!(Names::FileMode.of(0o100_644), "S_IFREG|0644");
        assert_eq!(Names::FileMode.of(0o041_777), "S_IFDIR|01777");
        assert_eq!(Names::Permissions.of(0), "00");
    }

    #[test]
    fn numbers_have_signs() {
        assert_eq!(
            (signed(u64::MAX), signed(0xffff_ff9c), signed(7)),
            ("-1".into(), "-100".into(), "7".into())
        );
        assert_eq!(signed(1 << 40), (1_u64 << 40).to_string());
    }
}
