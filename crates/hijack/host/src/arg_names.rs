//! Which names the number has that an argument is, by call and argument; sometimes by the values of others.

use crate::calls::Argument;
use crate::constants::{self, Names};

/// All arguments of a call.
type Values = [u64; 6];

/// The names of an argument's values; `None` where it is but a number.
pub(crate) fn names(call: &str, argument: &Argument, values: &Values) -> Option<Names> {
    let name = argument.name;
    if let Some(names) = by_others(call, name, values) {
        return names;
    }
    let set = set(call, name);
    if set.is_some() {
        return set.map(Names::Of);
    }
    Some(match (call, name) {
        ("mknod" | "mknodat", "mode") => Names::FileMode,
        (_, "mode") if argument.kind == "umode_t" => Names::Permissions,
        ("umask", "mask") => Names::Permissions,
        ("clone", "clone_flags") => Names::Clone,
        ("shmget", "shmflg") => Names::Ipc("shmget.flags"),
        ("semget", "semflg") | ("msgget", "msgflg") => Names::Ipc("ipc.flags"),
        ("shmget" | "semget" | "msgget", "key") => Names::Key,
        ("mknod" | "mknodat", "dev") => Names::Device,
        ("mmap", "off") => Names::Hexadecimal,
        (_, "sig") if !matches!(call, "rseq" | "pselect6") => Names::Signal,
        (_, "user" | "group" | "uid" | "gid" | "ruid" | "euid" | "suid" | "rgid" | "egid" | "sgid") => {
            Names::Id
        }
        _ => return None,
    })
}

/// Returns what the kernel reads of an `int`.
fn narrow(value: u64) -> u64 {
    value & u64::from(u32::MAX)
}

/// Returns whether an argument is this constant of a set.
fn is(values: &Values, index: usize, set: &str, constant: &str) -> bool {
    let value = values.get(index).copied().map(narrow);
    value.is_some() && value == constants::value(set, constant).map(narrow)
}

/// Returns what an argument means where that depends on another one: `Some(None)` where it is but a number then.
fn by_others(call: &str, name: &str, values: &Values) -> Option<Option<Names>> {
    let is = |index: usize, set: &str, constant: &str| is(values, index, set, constant);
    let option = |name: &str| is(0, "prctl.option", name);
    let command = |name: &str| is(1, "fcntl.cmd", name);
    Some(match (call, name) {
        ("setsockopt" | "getsockopt", "optname") => {
            let level = |name: &str| is(1, "sockopt.level", name);
            let sets = [
                ("SOL_IP", "sockopt.ip"),
                ("SOL_SOCKET", "sockopt.socket"),
                ("SOL_TCP", "sockopt.tcp"),
                ("SOL_UDP", "sockopt.udp"),
                ("SOL_IPV6", "sockopt.ipv6"),
                ("SOL_PACKET", "sockopt.packet"),
                ("SOL_NETLINK", "sockopt.netlink"),
            ];
            sets.into_iter().find(|(name, _)| level(name)).map(|(_, set)| Names::Of(set))
        }
        ("socket" | "socketpair", "protocol") => {
            let family = |name: &str| is(0, "socket.family", name);
            if family("AF_INET") || family("AF_INET6") {
                Some(Names::Of("socket.protocol"))
            } else {
                family("AF_NETLINK").then_some(Names::Of("netlink.family"))
            }
        }
        ("fcntl", "arg") => {
            let sets = [
                ("F_SETFD", "fcntl.fd"),
                ("F_SETFL", "open.flags"),
                ("F_SETLEASE", "fcntl.lease"),
                ("F_NOTIFY", "fcntl.notify"),
                ("F_ADD_SEALS", "fcntl.seals"),
            ];
            match sets.into_iter().find(|(name, _)| command(name)) {
                Some((_, set)) => Some(Names::Of(set)),
                None if command("F_SETSIG") => Some(Names::Signal),
                None if FCNTL_NUMBERS.iter().any(|name| command(name)) => Some(Names::Id),
                None => None,
            }
        }
        ("prctl", "arg2") => {
            if option("PR_SET_PDEATHSIG") {
                Some(Names::Signal)
            } else if option("PR_SET_DUMPABLE") {
                Some(Names::Of("dumpable"))
            } else if option("PR_SET_SECCOMP") {
                Some(Names::Of("seccomp.mode"))
            } else if option("PR_CAPBSET_READ") || option("PR_CAPBSET_DROP") {
                Some(Names::Of("capability"))
            } else if PRCTL_POINTERS.iter().any(|name| option(name)) {
                None
            } else {
                Some(Names::Unsigned)
            }
        }
        // Asks for the current one.
        ("personality", _) if narrow(values[0]) == u64::from(u32::MAX) => Some(Names::Hexadecimal),
        ("prctl", "arg3" | "arg4" | "arg5") => {
            if option("PR_SET_SECCOMP") {
                None
            } else {
                Some(Names::Hexadecimal)
            }
        }
        _ => return None,
    })
}

/// Options of `prctl` whose argument is a pointer.
const PRCTL_POINTERS: [&str; 6] = [
    "PR_SET_NAME",
    "PR_GET_NAME",
    "PR_GET_PDEATHSIG",
    "PR_GET_CHILD_SUBREAPER",
    "PR_GET_TSC",
    "PR_GET_UNALIGN",
];
/// Commands of `fcntl` whose argument is a number or descriptor.
const FCNTL_NUMBERS: [&str; 5] = ["F_DUPFD", "F_DUPFD_CLOEXEC", "F_SETOWN", "F_SETPIPE_SZ", "F_DUPFD_QUERY"];

/// The constants that an argument can be made of, with any other arguments.
fn set(call: &str, name: &str) -> Option<&'static str> {
    Some(match (call, name) {
        ("access" | "faccessat" | "faccessat2", "mode") => "access.mode",
        ("arch_prctl", "option") => "arch_prctl.option",
        ("faccessat2", "flags") => "at.access",
        ("linkat", "flags") => "linkat.flags",
        ("fchownat" | "newfstatat", "flag") | ("utimensat" | "fchmodat2" | "mount_setattr", "flags") => {
            "at.flags"
        }
        (
            "setxattrat" | "getxattrat" | "listxattrat" | "removexattrat" | "file_getattr" | "file_setattr",
            "at_flags",
        ) => "at.flags",
        ("name_to_handle_at", "flag") => "at.handle",
        ("statx", "flags") => "at.statx",
        ("statx", "mask") => "statx.mask",
        ("unlinkat", "flag") => "at.unlink",
        ("bpf", "cmd") => "bpf.cmd",
        (_, "which_clock") | ("timerfd_create" | "futex_waitv" | "futex_wait", "clockid") => "clock",
        ("unshare", "unshare_flags") => "clone3.flags",
        ("close_range", "flags") => "close_range.flags",
        ("delete_module", "flags") => "delete_module.flags",
        ("epoll_create1", "flags") => "epoll_create1.flags",
        ("epoll_ctl", "op") => "epoll_ctl.op",
        ("eventfd2", "flags") => "eventfd2.flags",
        ("execveat", "flags") => "execveat.flags",
        ("fadvise64", "advice") => "fadvise64.advice",
        ("fallocate", "mode") => "fallocate.mode",
        ("fanotify_init", "flags") => "fanotify_init.flags",
        ("fanotify_init", "event_f_flags") => "open.flags",
        ("fanotify_mark", "mask") => "fanotify_mark.mask",
        ("fanotify_mark", "flags") => "fanotify_mark.flags",
        ("fcntl", "cmd") => "fcntl.cmd",
        ("finit_module", "flags") => "finit_module.flags",
        ("flock", "cmd") => "flock.cmd",
        ("fsconfig", "cmd") => "fsconfig.cmd",
        ("fsmount", "flags") => "fsmount.flags",
        ("fsmount", "attr_flags") => "mount_attr",
        ("fsopen", "flags") => "fsopen.flags",
        ("fspick", "flags") => "fspick.flags",
        ("futex", "op") => "futex.op",
        ("futex", "val3") => "futex.bitset",
        ("futex_wait" | "futex_wake", "flags") => "futex2.flags",
        ("get_mempolicy", "flags") => "get_mempolicy.flags",
        ("getrandom", "flags") => "getrandom.flags",
        ("getrlimit" | "setrlimit" | "prlimit64", "resource") => "rlimit.resource",
        ("getrusage", "who") => "rusage.who",
        ("inotify_add_watch", "mask") => "inotify.mask",
        ("inotify_init1", "flags") => "inotify_init1.flags",
        ("io_uring_enter", "flags") => "io_uring_enter.flags",
        ("io_uring_register", "opcode") => "io_uring_register.op",
        ("ioctl", "cmd") => "ioctl.cmd",
        ("ioprio_get" | "ioprio_set", "which") => "ioprio.which",
        ("getitimer" | "setitimer", "which") => "itimer.which",
        ("kcmp", "type") => "kcmp.type",
        ("kexec_file_load", "flags") => "kexec.file",
        ("keyctl", "option") => "keyctl.option",
        ("landlock_add_rule", "rule_type") => "landlock_rule",
        ("landlock_create_ruleset", "flags") => "landlock_create_ruleset.flags",
        ("lseek", "whence") => "lseek.whence",
        ("madvise" | "process_madvise", "behavior") => "madvise.behavior",
        ("mbind", "flags") => "mbind.flags",
        ("mbind" | "set_mempolicy", "mode") => "mempolicy",
        ("move_pages", "flags") => "move_pages.flags",
        ("membarrier", "flags") => "membarrier.flags",
        ("membarrier", "cmd") => "membarrier.cmd",
        ("memfd_create", "flags") => "memfd_create.flags",
        ("memfd_secret", "flags") => "memfd_secret.flags",
        ("mlock2", "flags") => "mlock2.flags",
        ("mlockall", "flags") => "mlockall.flags",
        ("mmap" | "mprotect" | "pkey_mprotect" | "remap_file_pages", "prot") => "prot",
        ("mmap" | "remap_file_pages", "flags") => "mmap.flags",
        ("mount", "flags") => "mount.flags",
        ("move_mount", "flags") => "move_mount.flags",
        ("mq_open", "oflag") => "open.flags",
        ("mremap", "flags") => "mremap.flags",
        ("msgctl", "cmd") => "msgctl.cmd",
        ("msgsnd" | "msgrcv", "msgflg") => "ipc.flags",
        ("msync", "flags") => "msync.flags",
        ("open" | "openat" | "open_by_handle_at", "flags") => "open.flags",
        ("open_tree" | "open_tree_attr", "flags") => "open_tree.flags",
        ("perf_event_open", "flags") => "perf_event_open.flags",
        ("personality", "personality") => "personality",
        ("pidfd_open", "flags") => "pidfd_open.flags",
        ("pipe2" | "dup3", "flags") => "pipe2.flags",
        ("pkey_alloc", "init_val") => "pkey.access",
        ("prctl", "option") => "prctl.option",
        ("preadv2" | "pwritev2", "flags") => "pwritev2.flags",
        ("getpriority" | "setpriority", "which") => "priority.which",
        ("ptrace", "request") => "ptrace.request",
        ("reboot", "cmd") => "reboot.cmd",
        ("reboot", "magic1") => "reboot.magic1",
        ("reboot", "magic2") => "reboot.magic2",
        ("renameat2", "flags") => "renameat2.flags",
        ("rseq", "flags") => "rseq.flags",
        ("rt_sigprocmask", "how") => "sigprocmask.how",
        ("sched_setscheduler" | "sched_get_priority_max" | "sched_get_priority_min", "policy") => {
            "sched.policy"
        }
        ("seccomp", "flags") => "seccomp.flags",
        ("seccomp", "op") => "seccomp.op",
        ("semctl", "cmd") => "semctl.cmd",
        ("setns", "flags") => "setns.flags",
        ("setsockopt" | "getsockopt", "level") => "sockopt.level",
        ("setxattr" | "lsetxattr" | "fsetxattr", "flags") => "xattr.flags",
        ("shmat", "shmflg") => "shmat.flags",
        ("shmctl", "cmd") => "shmctl.cmd",
        ("shutdown", "how") => "shutdown.how",
        ("signalfd4", "flags") => "signalfd4.flags",
        ("accept4", "flags") => "sock.accept",
        ("socket" | "socketpair", "family") => "socket.family",
        ("socket" | "socketpair", "type") => "sock.type",
        ("sendto" | "recvfrom" | "sendmsg" | "recvmsg" | "sendmmsg" | "recvmmsg", "flags") => "msg.flags",
        ("splice" | "tee" | "vmsplice", "flags") => "splice.flags",
        ("swapon", "swap_flags") => "swapon.flags",
        ("sync_file_range", "flags") => "sync_file_range.flags",
        ("syslog", "type") => "syslog.type",
        ("clock_nanosleep" | "timer_settime", "flags") => "timer.flags",
        ("timerfd_create", "flags") => "timerfd_create.flags",
        ("timerfd_settime", "flags") => "timerfd_settime.flags",
        ("umount2", "flags") => "umount2.flags",
        ("userfaultfd", "flags") => "userfaultfd.flags",
        ("wait4", "options") => "wait.options",
        ("waitid", "options") => "waitid.options",
        ("waitid", "which") => "waitid.which",
        _ => return None,
    })
}

/// Returns which arguments count, by those before them: the others are left over from calls before.
pub(crate) fn counting(call: &str, values: &Values, all: usize) -> Vec<usize> {
    let is = |index: usize, set: &str, constant: &str| is(values, index, set, constant);
    let makes = |flags: u64| {
        // O_TMPFILE contains O_DIRECTORY, which alone makes no file.
        let makes = [libc::O_CREAT, libc::O_TMPFILE].map(|flag| u64::from(flag.cast_unsigned()));
        makes.iter().any(|flag| flags & flag == *flag)
    };
    let is_device = |mode: u64| matches!(mode & 0o170_000, 0o020_000 | 0o060_000);
    let first = |count: usize| (0..all.min(count)).collect();
    let any = |index: usize, set: &str, names: &[&str]| names.iter().any(|name| is(index, set, name));
    match call {
        "open" if !makes(values[1]) => first(all - 1),
        "openat" if !makes(values[2]) => first(all - 1),
        "mq_open" if !makes(values[1]) => first(2),
        "mknod" if !is_device(values[1]) => first(2),
        "mknodat" if !is_device(values[2]) => first(3),
        // MREMAP_FIXED, MREMAP_DONTUNMAP.
        "mremap" if values[3] & 6 == 0 => first(4),
        // The upper half of a position counts where words have 32 bits.
        "preadv" | "pwritev" => first(4),
        "preadv2" | "pwritev2" => vec![0, 1, 2, 3, 5],
        "kcmp" if !any(2, "kcmp.type", &["KCMP_FILE", "KCMP_EPOLL_TFD"]) => first(3),
        "membarrier" if values[1] == 0 => first(2),
        "fcntl" if any(1, "fcntl.cmd", &FCNTL_ALONE) => first(2),
        "prctl" if any(0, "prctl.option", &PRCTL_ALONE) => first(1),
        "prctl" if any(0, "prctl.option", &PRCTL_TWO) || any(0, "prctl.option", &PRCTL_POINTERS) => first(2),
        "prctl" if is(0, "prctl.option", "PR_SET_SECCOMP") => first(3),
        "futex" => {
            // FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME change nothing about them.
            match values[1] & 0x7f {
                0 | 13 => first(4),
                1 | 2 => first(3),
                6 => vec![0, 1, 3],
                7 | 8 => first(2),
                9 => vec![0, 1, 2, 3, 5],
                10 => vec![0, 1, 2, 5],
                3 | 11 => first(5),
                _ => first(all),
            }
        }
        _ => first(all),
    }
}

const FCNTL_ALONE: [&str; 8] = [
    "F_GETFD",
    "F_GETFL",
    "F_GETOWN",
    "F_GETSIG",
    "F_GETLEASE",
    "F_GETPIPE_SZ",
    "F_GET_SEALS",
    "F_CREATED_QUERY",
];
const PRCTL_ALONE: [&str; 6] = [
    "PR_GET_DUMPABLE",
    "PR_GET_KEEPCAPS",
    "PR_GET_SECCOMP",
    "PR_GET_SECUREBITS",
    "PR_GET_TIMERSLACK",
    "PR_GET_TIMING",
];
const PRCTL_TWO: [&str; 9] = [
    "PR_CAPBSET_DROP",
    "PR_CAPBSET_READ",
    "PR_SET_CHILD_SUBREAPER",
    "PR_SET_DUMPABLE",
    "PR_SET_KEEPCAPS",
    "PR_SET_PDEATHSIG",
    "PR_SET_PTRACER",
    "PR_SET_SECUREBITS",
    "PR_SET_TIMERSLACK",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls;

    #[test]
    fn every_set_that_is_named_is_there_and_every_option_in_it() {
        for call in calls::all() {
            for argument in call.arguments.iter().flatten() {
                if let Some(set) = set(call.name, argument.name) {
                    assert!(constants::constants_of(set).is_some(), "{} {}: {set}", call.name, argument.name);
                }
            }
        }
        let lists: [(&str, &[&str]); 5] = [
            ("prctl.option", &PRCTL_POINTERS),
            ("prctl.option", &PRCTL_ALONE),
            ("prctl.option", &PRCTL_TWO),
            ("fcntl.cmd", &FCNTL_ALONE),
            ("fcntl.cmd", &FCNTL_NUMBERS),
        ];
        for (set, names) in lists {
            for name in names {
                assert!(constants::value(set, name).is_some(), "{name}");
            }
        }
    }
}
