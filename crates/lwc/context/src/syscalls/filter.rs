//! System calls that a context is not to make, and the filter that sees to it (seccomp(2)).
//!
//! The filter knows numbers, not memory: what a call's pointers point to is looked at by the parent, on a copy
//! ([`crate::syscalls::trap`]). Two things it decides itself: a context may always send signals to itself, and where
//! anything is withheld, io_uring(7) is refused, whose requests pass by every filter.

use std::fmt;

use orrery_sys::seccomp::{Action, Condition, Filter, sock_filter};
use rustix::io::Errno;

/// One more than the highest number that a set can hold.
const MOST: u32 = 1024;

/// A set of system calls, by their numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Calls([u64; MOST as usize / 64]);

/// Without these a context could not even wait for control, see its creator's end, or end itself.
const ESSENTIAL: [libc::c_long; 22] = [
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
    libc::SYS_sched_yield,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_set_robust_list,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // The library's own copies and mappings end with these; they name nothing beyond the context.
    libc::SYS_munmap,
    libc::SYS_close,
];

/// Calls that are allowed where an argument (its number first) says that they are about nobody else, but not otherwise.
fn harmless(own: u32) -> [(u32, u8, u64); 9] {
    const ADDRESS: u8 = 4;
    /// Another filter can only take more away.
    const SET_MODE_FILTER: u64 = 1;
    let own = u64::from(own);
    [
        (number_of(libc::SYS_kill), 0, own),
        (number_of(libc::SYS_tgkill), 0, own),
        (number_of(libc::SYS_sendto), ADDRESS, 0),
        (number_of(libc::SYS_prlimit64), 0, 0),
        (number_of(libc::SYS_sched_setaffinity), 0, 0),
        (number_of(libc::SYS_sched_setscheduler), 0, 0),
        (number_of(libc::SYS_sched_setparam), 0, 0),
        (number_of(libc::SYS_sched_setattr), 0, 0),
        (number_of(libc::SYS_seccomp), 0, SET_MODE_FILTER),
    ]
}

/// What reaches beyond what a context holds already: see [`Calls::global`].
const GLOBAL: &[libc::c_long] = &[
    // Files by name.
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_creat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_chdir,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_link,
    libc::SYS_linkat,
    libc::SYS_symlink,
    libc::SYS_symlinkat,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_rmdir,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_chmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_fchownat,
    libc::SYS_truncate,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_utimensat,
    libc::SYS_statfs,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_getxattr,
    libc::SYS_lgetxattr,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_inotify_add_watch,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    // Programs and other processes.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kcmp,
    libc::SYS_prlimit64,
    libc::SYS_setpriority,
    libc::SYS_ioprio_set,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setattr,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_setns,
    libc::SYS_unshare,
    // The network and other means of speaking to others by name.
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_bind,
    // To an address: what is sent to a connected socket passes. What sendmsg's address is, no filter sees.
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_semget,
    libc::SYS_semctl,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_msgget,
    libc::SYS_msgctl,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // The machine.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_reboot,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_syslog,
    libc::SYS_iopl,
    libc::SYS_ioperm,
];

/// Calls by which a process changes how others of its user run: whom they are about is said by this argument, which
/// must be 0 or the caller's number, if a kind that an argument before it tells is this.
const ABOUT_PROCESSES: [(libc::c_long, u8, Option<u32>); 7] = [
    (libc::SYS_prlimit64, 0, None),
    (libc::SYS_sched_setaffinity, 0, None),
    (libc::SYS_sched_setscheduler, 0, None),
    (libc::SYS_sched_setparam, 0, None),
    (libc::SYS_sched_setattr, 0, None),
    (libc::SYS_setpriority, 1, Some(libc::PRIO_PROCESS)),
    (libc::SYS_ioprio_set, 1, Some(WHO_PROCESS)),
];
/// `IOPRIO_WHO_PROCESS`.
const WHO_PROCESS: u32 = 1;

/// Returns the filter that refuses such calls about other processes than `own`, except those of `taken`, which another
/// filter decides.
pub(crate) fn about_others(own: u32, taken: &Calls) -> Vec<sock_filter> {
    let mut filter = own_interface(Filter::new(Action::Allow));
    let judged = ABOUT_PROCESSES.iter().filter(|(call, ..)| !taken.has(number_of(*call)));
    for (call, whom, kind) in judged {
        // The kernel takes the lower half of each argument.
        if let Some(kind) = kind {
            filter.add(*call, Condition::Differs { argument: 0, value: *kind }, REFUSED);
        }
        for value in [0, own] {
            filter.add(*call, Condition::Equals { argument: *whom, value }, Action::Allow);
        }
        filter.add(*call, Condition::Always, REFUSED);
    }
    filter.program()
}

const REFUSED: Action = Action::Fail(Errno::PERM);

/// Closes the other interfaces, under which every call exists a second time.
fn own_interface(filter: Filter) -> Filter {
    filter.foreign(Action::KillProcess).x32(REFUSED)
}

impl Calls {
    /// Returns the set of no calls.
    pub const fn none() -> Self {
        Self([0; MOST as usize / 64])
    }

    /// Returns the set of all calls.
    pub const fn all() -> Self {
        Self([u64::MAX; MOST as usize / 64])
    }

    /// Returns what reaches beyond the descriptors and the memory that a context holds: names of files, processes,
    /// sockets and machines. About what FreeBSD's capability mode takes away, on which the paper builds.
    pub fn global() -> Self {
        GLOBAL.iter().fold(Self::none(), |set, number| set.with(number_of(*number), number_of(*number)))
    }

    /// Returns the same set, with the numbers `first` to `last` in it.
    #[must_use]
    pub const fn with(mut self, first: u32, last: u32) -> Self {
        let mut number = first;
        while number <= last && number < MOST {
            self.0[(number / 64) as usize] |= 1 << (number % 64);
            number += 1;
        }
        self
    }

    /// Returns whether a number is in it.
    pub const fn has(&self, number: u32) -> bool {
        number < MOST && self.0[(number / 64) as usize] & 1 << (number % 64) != 0
    }

    /// Returns whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; MOST as usize / 64]
    }

    /// Returns what is in both.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let mut both = *self;
        both.0.iter_mut().zip(other.0).for_each(|(word, other)| *word &= other);
        both
    }

    /// Returns what is in either.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        let mut either = *self;
        either.0.iter_mut().zip(other.0).for_each(|(word, other)| *word |= other);
        either
    }

    /// Returns the words of the set, and the set of such words.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    pub(crate) fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let mut set = Self::none();
        if bytes.len() != size_of::<Self>() {
            return None;
        }
        for (word, chunk) in set.0.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_ne_bytes(<[u8; 8]>::try_from(chunk).ok()?);
        }
        Some(set)
    }

    /// Runs of numbers, first and last.
    fn runs(&self) -> Vec<(u32, u32)> {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for number in (0..MOST).filter(|number| self.has(*number)) {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == number => *last = number,
                _ => runs.push((number, number)),
            }
        }
        runs
    }

    /// Returns the filter that decides these calls by `action`, in process `own`.
    pub(crate) fn filter(&self, action: Action, own: u32) -> Vec<sock_filter> {
        let mut filter = own_interface(Filter::new(Action::Allow));
        let essential = ESSENTIAL.map(number_of);
        let withheld = |number: u32| self.has(number) && !essential.contains(&number);
        for (number, argument, value) in harmless(own) {
            if withheld(number) {
                filter.add(number, Condition::EqualsWide { argument, value }, Action::Allow);
            }
        }
        for number in (0..MOST).filter(|number| withheld(*number)) {
            filter.add(number, Condition::Always, action);
        }
        for number in number_of(libc::SYS_io_uring_setup)..=number_of(libc::SYS_io_uring_register) {
            filter.set(number, REFUSED);
        }
        filter.program()
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.runs()).finish()
    }
}

impl Default for Calls {
    fn default() -> Self {
        Self::none()
    }
}

const fn number_of(call: libc::c_long) -> u32 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "numbers of calls are small")]
    let number = call as u32;
    number
}

#[cfg(test)]
mod tests {
    use orrery_sys::seccomp::{NATIVE, simulate};

    use super::*;

    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const NOTIFY: u32 = libc::SECCOMP_RET_USER_NOTIF;
    const EPERM: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs();

    #[test]
    fn filters_withhold_what_is_in_the_set() {
        let set = Calls::none().with(2, 4).with(9, 9).with(62, 62).with(200, 230);
        let program = set.filter(Action::Notify, 1000);
        let publish = |number, first| simulate(&program, NATIVE, number, [first, 0, 0, 0, 7, 0]);
        for number in 0..500 {
            let essential = ESSENTIAL.iter().any(|call| number_of(*call) == number);
            let expected = if (425..=427).contains(&number) {
                EPERM
            } else if set.has(number) && !essential {
                NOTIFY
            } else {
                ALLOW
            };
            assert_eq!(publish(number, 5), expected, "{number}");
        }
        assert_eq!(publish(62, 1000), ALLOW, "a signal to itself");
        assert_eq!(publish(0x4000_0002, 0), EPERM, "by its other number");
        assert_eq!(simulate(&program, 0x4000_0003, 0, [0; 6]), libc::SECCOMP_RET_KILL_PROCESS, "by 32 bits");
    }

    #[test]
    fn what_concerns_nobody_else_passes() {
        let program = Calls::global().filter(Action::Notify, 1000);
        let publish = |call, arguments| simulate(&program, NATIVE, number_of(call), arguments);
        let send = |address| publish(libc::SYS_sendto, [3, 4, 5, 6, address, 0]);
        assert_eq!(send(0), ALLOW);
        assert_eq!((send(8), send(1 << 40)), (NOTIFY, NOTIFY));
        assert_eq!(publish(libc::SYS_prlimit64, [0; 6]), ALLOW);
        assert_eq!(publish(libc::SYS_prlimit64, [1, 0, 0, 0, 0, 0]), NOTIFY);
        assert_eq!(publish(libc::SYS_tgkill, [1000, 5, 6, 0, 0, 0]), ALLOW);
        assert_eq!(publish(libc::SYS_tgkill, [0, 5, 6, 0, 0, 0]), NOTIFY);
        assert_eq!(publish(libc::SYS_sendmsg, [0; 6]), NOTIFY);
    }

    #[test]
    fn how_others_run_is_left_alone() {
        let program = about_others(1000, &Calls::none());
        let publish = |call, arguments| simulate(&program, NATIVE, number_of(call), arguments);
        let allow = ALLOW;
        for (call, whom, kind) in ABOUT_PROCESSES {
            for (pid, expected) in [(0, allow), (1000, allow), (1 << 32, allow), (5, EPERM), (1, EPERM)] {
                let mut arguments = [u64::from(kind.unwrap_or(0)), 0, 0, 0, 0, 0];
                arguments[usize::from(whom)] = pid;
                assert_eq!(publish(call, arguments), expected, "{call} of {pid}");
            }
        }
        // Whole groups, and all of a user, even if named by 0.
        for kind in [libc::PRIO_PGRP, libc::PRIO_USER] {
            assert_eq!(publish(libc::SYS_setpriority, [kind.into(), 0, 0, 0, 0, 0]), EPERM);
        }
        assert_eq!(publish(libc::SYS_ioprio_set, [2, 0, 0, 0, 0, 0]), EPERM);
        assert_eq!(publish(libc::SYS_setrlimit, [5; 6]), allow);
        assert_eq!(publish(libc::SYS_read, [5; 6]), allow);
        assert_eq!(simulate(&program, NATIVE, 0x4000_0000, [0; 6]), EPERM, "by its other number");
        let left = about_others(1000, &Calls::all());
        assert_eq!(simulate(&left, NATIVE, number_of(libc::SYS_prlimit64), [5; 6]), allow);
    }

    #[test]
    fn sets_are_sets() {
        let set = Calls::none().with(60, 70).with(1023, 5000);
        assert!(set.has(60) && set.has(64) && set.has(70) && set.has(1023));
        assert!(!set.has(59) && !set.has(71) && !set.has(1024));
        assert_eq!(set.and(&Calls::none().with(64, 66)), Calls::none().with(64, 66));
        assert_eq!(Calls::of_bytes(&set.bytes()), Some(set));
        assert!(Calls::of_bytes(&[0; 5]).is_none());
        assert!(Calls::none().is_empty() && !Calls::all().is_empty());
        assert_eq!(format!("{set:?}"), "[(60, 70), (1023, 1023)]");
    }

    #[test]
    fn an_execve_is_global_and_a_read_is_not() {
        assert!(Calls::global().has(number_of(libc::SYS_execve)));
        assert!(!Calls::global().has(number_of(libc::SYS_read)));
    }
}
