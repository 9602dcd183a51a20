//! Files by which the kernel itself is controlled: settings below `/proc` and `/sys`, and devices.
//!
//! A policy that lists `/dev` or `/` means files. What a write to `/proc/sys/kernel/core_pattern` or to a disk does is
//! not held by any policy: the first has the kernel start a program outside of the guard, the second changes files that
//! no path names. So entries above are not about these; one that names the file, or a directory among them, is.

use rustix::fs::{FileType, Stat, major, minor};

use crate::identity::process_in;
use crate::policy::Rights;

/// What rights an entry must give that is about the file itself, and how long the path of such an entry is at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    /// The rights.
    pub(crate) rights: Rights,
    /// The length of the shortest path that is an entry about the file.
    pub(crate) least: usize,
}

/// Which rights over a file at `path` only an entry about it gives; `None`: it is a file like others.
pub(crate) fn named(path: &[u8], stat: &Stat) -> Option<Named> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::CharacterDevice if is_harmless(stat) => None,
        FileType::CharacterDevice | FileType::BlockDevice => {
            let least = if path.starts_with(b"/dev/") { b"/dev/".len() + 1 } else { path.len() };
            Some(Named { rights: Rights::READ | Rights::WRITE | Rights::CREATE, least })
        }
        _ => setting(path),
    }
}

/// The same for what the path alone decides.
pub(crate) fn setting(path: &[u8]) -> Option<Named> {
    let rights = Rights::WRITE | Rights::CREATE;
    let of_processes = path.starts_with(b"/proc/self")
        || path.starts_with(b"/proc/thread-self")
        || process_in(path).is_some();
    if path.starts_with(b"/proc/") && !of_processes {
        Some(Named { rights, least: b"/proc/".len() + 1 })
    } else if path.starts_with(b"/sys/") {
        Some(Named { rights, least: b"/sys".len() })
    } else {
        None
    }
}

/// Devices that stand for nothing but themselves or a terminal of the caller: `null`, `zero`, `full`, `random`,
/// `urandom`, `tty`, `ptmx`, and pseudo-terminals.
pub(crate) fn is_harmless(stat: &Stat) -> bool {
    matches!((major(stat.st_rdev), minor(stat.st_rdev)), (1, 3 | 5 | 7..=9) | (5, 0 | 2) | (136..=143, _))
}

/// Whether a device leads around every path: disks, and the kernel's memory, ports and log.
pub(crate) fn leads_around(stat: &Stat) -> bool {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => true,
        FileType::CharacterDevice => {
            matches!((major(stat.st_rdev), minor(stat.st_rdev)), (1, 1 | 2 | 4 | 11))
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_told_from_files() {
        for setting_of_all in
            ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper"]
        {
            assert!(setting(setting_of_all.as_bytes()).is_some(), "{setting_of_all}");
        }
        for other in ["/proc/self/oom_score_adj", "/proc/12/comm", "/etc/passwd", "/system", "/proc"] {
            assert_eq!(setting(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn devices_are_told_from_files() {
        let of = |path: &str| named(path.as_bytes(), &rustix::fs::stat(path).unwrap());
        assert_eq!(of("/dev/null"), None);
        assert_eq!(of("/etc"), None);
        if std::path::Path::new("/dev/kmsg").exists() {
            let kmsg = of("/dev/kmsg").unwrap();
            assert!(kmsg.rights.contains(Rights::READ) && kmsg.least == 6);
        }
    }
}
