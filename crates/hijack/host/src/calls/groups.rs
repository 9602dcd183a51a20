//! Groups of calls: one word for many.
//!
//! Which calls take paths or descriptors follows from their arguments; the other groups are those of strace, by its names.

use orrery_hijack_image::glob;
use orrery_hijack_image::policy::NO_ARGUMENT;

use super::{Signature, all, named};

/// Groups that are lists.
const LISTS: [(&str, &[&str]); 13] = [
    (
        "%network",
        &[
            "socket",
            "socketpair",
            "connect",
            "accept",
            "accept4",
            "bind",
            "listen",
            "sendto",
            "recvfrom",
            "sendmsg",
            "recvmsg",
            "sendmmsg",
            "recvmmsg",
            "shutdown",
            "getsockname",
            "getpeername",
            "setsockopt",
            "getsockopt",
            "sendfile",
            "splice",
        ],
    ),
    (
        "%process",
        &[
            "fork",
            "vfork",
            "clone",
            "clone3",
            "execve",
            "execveat",
            "exit",
            "exit_group",
            "wait4",
            "waitid",
            "kill",
            "tkill",
            "tgkill",
            "rt_sigqueueinfo",
            "rt_tgsigqueueinfo",
            "pidfd_open",
            "pidfd_send_signal",
            "unshare",
        ],
    ),
    (
        "%signal",
        &[
            "rt_sigaction",
            "rt_sigprocmask",
            "rt_sigreturn",
            "rt_sigpending",
            "rt_sigsuspend",
            "rt_sigtimedwait",
            "rt_sigqueueinfo",
            "rt_tgsigqueueinfo",
            "sigaltstack",
            "kill",
            "tkill",
            "tgkill",
            "pause",
            "signalfd",
            "signalfd4",
            "pidfd_send_signal",
        ],
    ),
    (
        "%ipc",
        &[
            "shmget",
            "shmat",
            "shmctl",
            "shmdt",
            "semget",
            "semop",
            "semctl",
            "semtimedop",
            "msgget",
            "msgsnd",
            "msgrcv",
            "msgctl",
        ],
    ),
    (
        "%memory",
        &[
            "mmap",
            "munmap",
            "mprotect",
            "mremap",
            "brk",
            "madvise",
            "process_madvise",
            "msync",
            "mincore",
            "mlock",
            "mlock2",
            "munlock",
            "mlockall",
            "munlockall",
            "mbind",
            "get_mempolicy",
            "set_mempolicy",
            "migrate_pages",
            "move_pages",
            "remap_file_pages",
            "pkey_mprotect",
            "pkey_alloc",
            "pkey_free",
            "shmat",
            "shmdt",
            "mseal",
        ],
    ),
    (
        "%creds",
        &[
            "getuid",
            "geteuid",
            "getgid",
            "getegid",
            "setuid",
            "setgid",
            "setreuid",
            "setregid",
            "setresuid",
            "setresgid",
            "getresuid",
            "getresgid",
            "setfsuid",
            "setfsgid",
            "getgroups",
            "setgroups",
            "capget",
            "capset",
        ],
    ),
    (
        "%clock",
        &[
            "time",
            "gettimeofday",
            "settimeofday",
            "adjtimex",
            "clock_gettime",
            "clock_settime",
            "clock_getres",
            "clock_adjtime",
        ],
    ),
    (
        "%pure",
        &[
            "getpid",
            "getppid",
            "gettid",
            "getuid",
            "geteuid",
            "getgid",
            "getegid",
            "getpgrp",
            "sched_yield",
            "sched_get_priority_max",
            "sched_get_priority_min",
        ],
    ),
    ("%stat", &["stat"]),
    ("%lstat", &["lstat"]),
    ("%fstat", &["fstat", "newfstatat"]),
    ("%%stat", &["stat", "lstat", "fstat", "newfstatat", "statx"]),
    ("%%statfs", &["statfs", "fstatfs", "ustat"]),
];

/// Other names of groups.
const ALSO: [(&str, &str); 4] =
    [("%net", "%network"), ("%desc", "%descriptor"), ("%cred", "%creds"), ("all", "*")];

/// The calls that a word means: a name, one with stars in it, a group, or `*` for all. `None` where it means nothing.
pub fn group(word: &str) -> Option<Vec<&'static Signature>> {
    let word = ALSO.iter().find(|(other, _)| *other == word).map_or(word, |(_, word)| *word);
    let fits: &dyn Fn(&Signature) -> bool = match word {
        "*" => &|_| true,
        "%file" => &|signature| signature.shape().path[0] != NO_ARGUMENT,
        "%descriptor" => &|signature| signature.shape().descriptor != NO_ARGUMENT,
        word if word.starts_with('%') => {
            let (_, names) = LISTS.iter().find(|(name, _)| *name == word)?;
            &|signature| names.contains(&signature.name)
        }
        pattern if pattern.contains('*') => {
            &|signature| glob::any_matches(pattern.as_bytes(), signature.name.as_bytes())
        }
        name => return Some(vec![named(name)?]),
    };
    let found: Vec<_> = all().iter().filter(|signature| fits(signature)).collect();
    (!found.is_empty()).then_some(found)
}

/// Returns what to say of a word that means no call.
pub fn no_such_call(word: &str) -> String {
    let lists: Vec<_> = LISTS.iter().map(|(name, _)| *name).collect();
    format!(
        "no system call is called {word:?}; groups are %file, %descriptor, {}, and * for all",
        lists.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_name_calls_that_there_are() {
        for (list, names) in LISTS {
            for name in names {
                assert!(named(name).is_some(), "{list} {name}");
            }
            assert_eq!(group(list).unwrap().len(), names.len(), "{list}");
        }
    }

    #[test]
    fn words_mean_calls() {
        let names =
            |word: &str| group(word).unwrap().iter().map(|signature| signature.name).collect::<Vec<_>>();
        assert_eq!(names("read"), ["read"]);
        assert_eq!(names("recv*"), ["recvfrom", "recvmsg", "recvmmsg"]);
        assert_eq!(names("%net"), names("%network"));
        assert_eq!(names("all").len(), all().len());
        assert!(names("%file").contains(&"openat") && !names("%file").contains(&"read"));
        for word in ["%", "%nonsense", "nonsense*", "nonsense", ""] {
            assert_eq!(group(word), None, "{word}");
        }
    }
}
