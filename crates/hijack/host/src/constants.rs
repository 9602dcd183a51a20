//! Names of constants, from the headers (`calls/constants`).

use std::sync::OnceLock;

static CONSTANTS: &str = include_str!("../calls/constants");

/// What a number is named after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Names {
    /// Any number of the constants that begin so, at a time.
    Flags(&'static [&'static str]),
    /// One of these.
    One(&'static [&'static str]),
    /// A signal.
    Signal,
    /// Permissions.
    Permissions,
    /// A file's type, and permissions.
    FileMode,
    /// What a signal handler is.
    Handler,
}

impl Names {
    /// The number, in words.
    pub(crate) fn of(self, value: u64) -> String {
        let narrow = value & 0xffff_ffff;
        match self {
            Names::Flags(prefixes) => flags(value, prefixes),
            Names::One(prefixes) => one(narrow, prefixes),
            Names::Signal => signal(narrow),
            Names::Permissions => permissions(narrow),
            Names::FileMode => file_mode(narrow),
            Names::Handler => match value {
                0 => "SIG_DFL".to_owned(),
                1 => "SIG_IGN".to_owned(),
                _ => format!("{value:#x}"),
            },
        }
    }
}

/// All constants, by name.
fn constants() -> &'static [(&'static str, u64)] {
    static ALL: OnceLock<Vec<(&'static str, u64)>> = OnceLock::new();
    ALL.get_or_init(|| {
        let lines = CONSTANTS.lines().filter(|line| !line.starts_with('#'));
        let mut all: Vec<_> = lines
            .filter_map(|line| line.split_once('\t'))
            .filter_map(|(name, value)| Some((name, value.parse::<i64>().ok()?.cast_unsigned())))
            .collect();
        all.sort_unstable();
        all
    })
}

/// The value of a constant.
pub(crate) fn value(name: &str) -> Option<u64> {
    let all = constants();
    let place = all.binary_search_by_key(&name, |(name, _)| name).ok()?;
    all.get(place).map(|(_, value)| *value)
}

fn candidates(prefixes: &'static [&'static str]) -> impl Iterator<Item = (&'static str, u64)> {
    prefixes.iter().flat_map(|prefix| {
        let all = constants();
        let start = all.partition_point(|(name, _)| name < prefix);
        all.iter().skip(start).copied().take_while(move |(name, _)| name.starts_with(prefix))
    })
}

fn one(value: u64, prefixes: &'static [&'static str]) -> String {
    // Of several names for a value, the shortest is the usual one.
    let found = candidates(prefixes)
        .filter(|(_, known)| known & 0xffff_ffff == value)
        .min_by_key(|(name, _)| name.len());
    found.map_or_else(|| signed(value), |(name, _)| name.to_owned())
}

/// `SIGTERM`; real-time signals, from 32 on, as `SIGRTMIN` and `SIGRT_1`.
fn signal(value: u64) -> String {
    const FIRST_REAL_TIME: u64 = 32;
    let found = candidates(&["SIG"]).find(|(name, known)| *known == value && !name.starts_with("SIG_"));
    match found {
        Some((name, _)) => name.to_owned(),
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

fn flags(value: u64, prefixes: &'static [&'static str]) -> String {
    let value = value & 0xffff_ffff;
    let low = match prefixes {
        // These begin with a number.
        ["O_"] => 3,
        ["SOCK_"] => 0xf,
        ["MAP_"] => 3,
        ["FUTEX_"] => 0x7f,
        ["CLONE_"] => return clone_flags(value),
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
        text = join(text, &if rest == 0 { "0".to_owned() } else { format!("{rest:#x}") });
    }
    text
}

/// Flags, and in the lowest byte the signal at the child's end.
fn clone_flags(value: u64) -> String {
    const SIGNAL: u64 = 0xff;
    let names = candidates(&["CLONE_"]).filter(|(_, bits)| bits & SIGNAL == 0 && value & bits == *bits);
    let mut known = 0;
    let mut text = String::new();
    for (name, bits) in names.filter(|(_, bits)| bits.count_ones() == 1) {
        known |= bits;
        text = join(text, name);
    }
    let rest = value & !known & !SIGNAL;
    if rest != 0 {
        text = join(text, &format!("{rest:#x}"));
    }
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

    #[test]
    fn flags_have_names() {
        assert_eq!(flags(0o2_000_000, &["O_"]), "O_RDONLY|O_CLOEXEC");
        assert_eq!(flags(0o1101, &["O_"]), "O_WRONLY|O_CREAT|O_TRUNC");
        assert_eq!(flags(0, &["PROT_"]), "0");
        assert_eq!(flags(3, &["PROT_"]), "PROT_READ|PROT_WRITE");
        assert_eq!(flags(0x22, &["MAP_"]), "MAP_PRIVATE|MAP_ANONYMOUS");
        assert_eq!(flags(0x80801, &["SOCK_"]), "SOCK_STREAM|SOCK_CLOEXEC|SOCK_NONBLOCK");
        assert_eq!(flags(1 << 31, &["GRND_"]), "0x80000000");
        assert_eq!(flags(0x0120_0011, &["CLONE_"]), "CLONE_CHILD_CLEARTID|CLONE_CHILD_SETTID|SIGCHLD");
        assert_eq!(flags(5, &["R_OK", "W_OK", "X_OK"]), "R_OK|X_OK");
    }

    #[test]
    fn values_have_names() {
        assert_eq!(signal(15), "SIGTERM");
        assert_eq!(signal(0), "0");
        assert_eq!(signal(34), "SIGRT_2");
        assert_eq!(one(2, &["AF_"]), "AF_INET");
        assert_eq!(one(1, &["CLOCK_"]), "CLOCK_MONOTONIC");
        assert_eq!(one(2, &["SIG_"]), "SIG_SETMASK");
        assert_eq!(one(21505, &["TC", "TIOC"]), "TCGETS");
        assert_eq!(one(9999, &["AF_"]), "9999");
        assert_eq!(value("O_CREAT"), Some(0o100));
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
