//! System calls that a policy names, and those that are refused unless it does.

use std::collections::BTreeMap;

use rustix::io::Errno;
use syscalls::Sysno;

/// What a policy says of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// Let it pass, though it would be refused without this word.
    Allow,
    /// It fails with this.
    Deny(Errno),
    /// Let it pass, and write it down.
    Log,
}

/// What a policy says of calls.
#[derive(Clone, Debug, Default)]
pub(crate) struct Calls {
    pub(crate) words: BTreeMap<Sysno, Word>,
    /// What happens to calls that nothing is said about: they fail with this, or are allowed.
    pub(crate) otherwise: Option<Errno>,
}

/// Calls that reach around the monitor or beyond the program: refused unless the policy allows them by name. With why.
pub(crate) const REFUSED: &[(&str, &str)] = &[
    ("_sysctl", "changes the system"),
    ("acct", "changes the system"),
    ("add_key", "keys are shared with others"),
    ("bpf", "sees into other processes"),
    ("chroot", "changes what paths mean"),
    ("clock_settime", "changes the system"),
    ("create_module", "changes the kernel"),
    ("delete_module", "changes the kernel"),
    ("fanotify_init", "sees what others do to files"),
    ("fanotify_mark", "sees what others do to files"),
    ("finit_module", "changes the kernel"),
    ("fsconfig", "changes what paths mean"),
    ("fsmount", "changes what paths mean"),
    ("fsopen", "changes what paths mean"),
    ("fspick", "changes what paths mean"),
    ("init_module", "changes the kernel"),
    ("io_uring_enter", "its requests pass by every filter"),
    ("io_uring_register", "its requests pass by every filter"),
    ("io_uring_setup", "its requests pass by every filter"),
    ("ioperm", "reaches devices"),
    ("iopl", "reaches devices"),
    ("kexec_file_load", "changes the kernel"),
    ("kexec_load", "changes the kernel"),
    ("keyctl", "keys are shared with others"),
    ("lookup_dcookie", "tells paths"),
    ("mount", "changes what paths mean"),
    ("mount_setattr", "changes what paths mean"),
    ("move_mount", "changes what paths mean"),
    ("nfsservctl", "changes the system"),
    ("open_by_handle_at", "opens files without their paths"),
    ("open_tree", "changes what paths mean"),
    ("open_tree_attr", "changes what paths mean"),
    ("perf_event_open", "sees into other processes"),
    ("pivot_root", "changes what paths mean"),
    ("quotactl", "changes the system"),
    ("quotactl_fd", "changes the system"),
    ("reboot", "changes the system"),
    ("request_key", "keys are shared with others"),
    ("setdomainname", "changes the system"),
    ("sethostname", "changes the system"),
    ("setns", "changes what paths mean"),
    ("settimeofday", "changes the system"),
    ("swapoff", "changes the system"),
    ("swapon", "changes the system"),
    ("syslog", "tells what others do"),
    ("umount2", "changes what paths mean"),
    ("unshare", "changes what paths mean"),
    ("userfaultfd", "lets the monitor wait for memory that never comes"),
    ("uselib", "loads a file unasked"),
    ("vhangup", "changes the system"),
];

/// Calls whose refusal the monitor cannot do without: allowing them by name would let the program pass by it.
pub(crate) const ESSENTIAL: &[&str] = &[
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "mount",
    "move_mount",
    "open_by_handle_at",
    "open_tree",
    "open_tree_attr",
    "pivot_root",
    "setns",
    "unshare",
    "chroot",
    "uselib",
    "fsmount",
    "mount_setattr",
];

/// Finds a call by name.
///
/// # Errors
/// That there is none.
pub(crate) fn named(name: &str) -> Result<Sysno, String> {
    name.parse().map_err(|_| format!("no system call is named {name:?} here; `man 2 syscalls` lists them"))
}

/// Finds an error by name.
///
/// # Errors
/// That there is none.
pub(crate) fn error_named(name: &str) -> Result<Errno, String> {
    orrery_policy::values::errno(name).map(Errno::from_raw_os_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_errors_are_found() {
        assert_eq!(named("openat"), Ok(Sysno::openat));
        assert!(named("opneat").unwrap_err().contains("opneat"));
        assert_eq!(error_named("EPERM"), Ok(Errno::PERM));
        assert!(error_named("EWRONG").is_err());
    }
}
