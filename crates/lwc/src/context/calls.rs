//! System calls that a context is not to make, and the filter that sees to it (seccomp(2)).
//!
//! The filter knows numbers, not memory: what a call's pointers point to is looked at by the parent, on a copy
//! ([`super::trap`]). Two things it decides itself: a context may always send signals to itself, and where anything is
//! withheld, io_uring(7) is refused, whose requests pass by every filter.

use core::fmt;

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
fn harmless(own: u32) -> [(u32, u32, u32); 9] {
    const ADDRESS: u32 = 4;
    /// Another filter can only take more away.
    const SET_MODE_FILTER: u32 = 1;
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

/// Calls by which a process changes how others of its user run: whom they are about is said by this argument, which must be
/// 0 or the caller's number, if a kind that an argument before it tells is this.
const ABOUT_PROCESSES: [(libc::c_long, u32, Option<u32>); 7] = [
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

/// The filter that refuses such calls about other processes than `own`, but for those `taken` by another filter.
pub(crate) fn about_others(own: u32, taken: &Calls) -> Vec<libc::sock_filter> {
    let mut program = preamble();
    let judged = ABOUT_PROCESSES.iter().filter(|(call, ..)| !taken.has(number_of(*call)));
    for (call, whom, kind) in judged {
        let test =
            |argument: u32, value| [step(LOAD, 0, 0, ARGUMENTS + 8 * argument), step(EQUAL, 0, 0, value)];
        // The kernel takes the lower half of each.
        let mut body = Vec::new();
        if let Some(kind) = kind {
            let [load, mut is] = test(0, *kind);
            (is.jt, is.jf) = (0, 4);
            body.extend([load, is]);
        }
        let [load, mut nobody] = test(*whom, 0);
        nobody.jt = 1;
        let mut us = nobody;
        (us.k, us.jt, us.jf) = (own, 0, 1);
        body.extend([
            load,
            nobody,
            us,
            step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
            step(RETURN, 0, 0, REFUSED),
        ]);
        let length = u8::try_from(body.len()).unwrap_or(u8::MAX);
        program.push(step(EQUAL, 0, length, number_of(*call)));
        program.extend(body);
    }
    program.push(step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
    program
}

// What filters are made of (seccomp(2)).
const LOAD: u16 = 0x20;
const EQUAL: u16 = 0x15;
const ABOVE: u16 = 0x25;
const FROM: u16 = 0x35;
const RETURN: u16 = 0x06;
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;
/// Numbers of the x32 interface, under which every call exists a second time.
const X32: u32 = 0x4000_0000;
const REFUSED: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs();

const fn step(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// What all filters begin with: calls by other interfaces are refused, and the number is loaded.
fn preamble() -> Vec<libc::sock_filter> {
    vec![
        step(LOAD, 0, 0, ARCHITECTURE),
        step(EQUAL, 1, 0, ARCHITECTURE_HERE),
        step(RETURN, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
        step(LOAD, 0, 0, NUMBER),
        step(FROM, 0, 1, X32),
        step(RETURN, 0, 0, REFUSED),
    ]
}

impl Calls {
    /// No call.
    pub const fn none() -> Self {
        Self([0; MOST as usize / 64])
    }

    /// Every call.
    pub const fn all() -> Self {
        Self([u64::MAX; MOST as usize / 64])
    }

    /// What reaches beyond the descriptors and the memory that a context holds: names of files, processes, sockets and
    /// machines. About what FreeBSD's capability mode takes away, on which the paper builds.
    pub fn global() -> Self {
        GLOBAL.iter().fold(Self::none(), |set, number| set.with(number_of(*number), number_of(*number)))
    }

    /// The same set, with the numbers `first` to `last` in it.
    #[must_use]
    pub const fn with(mut self, first: u32, last: u32) -> Self {
        let mut number = first;
        while number <= last && number < MOST {
            self.0[(number / 64) as usize] |= 1 << (number % 64);
            number += 1;
        }
        self
    }

    /// Whether a number is in it.
    pub const fn has(&self, number: u32) -> bool {
        number < MOST && self.0[(number / 64) as usize] & 1 << (number % 64) != 0
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; MOST as usize / 64]
    }

    /// What is in both.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let mut both = *self;
        both.0.iter_mut().zip(other.0).for_each(|(word, other)| *word &= other);
        both
    }

    /// What is in either.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        let mut either = *self;
        either.0.iter_mut().zip(other.0).for_each(|(word, other)| *word |= other);
        either
    }

    /// The words of the set, and the set of such words.
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

    /// The filter that answers these calls with `action`, in process `own`.
    pub(crate) fn filter(&self, action: u32, own: u32) -> Vec<libc::sock_filter> {
        let mut program = preamble();
        for (number, argument, value) in harmless(own) {
            program.extend([
                step(EQUAL, 0, 6, number),
                step(LOAD, 0, 0, ARGUMENTS + 8 * argument),
                step(EQUAL, 0, 3, value),
                step(LOAD, 0, 0, ARGUMENTS + 8 * argument + 4),
                step(EQUAL, 0, 1, 0),
                step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
                step(LOAD, 0, 0, NUMBER),
            ]);
        }
        let mut one = |first, last, action| {
            program.extend([step(FROM, 0, 2, first), step(ABOVE, 1, 0, last), step(RETURN, 0, 0, action)]);
        };
        one(number_of(libc::SYS_io_uring_setup), number_of(libc::SYS_io_uring_register), REFUSED);
        let mut withheld = *self;
        for number in ESSENTIAL.map(number_of) {
            withheld.0[(number / 64) as usize] &= !(1 << (number % 64));
        }
        for (first, last) in withheld.runs() {
            one(first, last, action);
        }
        program.push(step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
        program
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

/// The machine's number, as filters see it (`AUDIT_ARCH_X86_64`).
const ARCHITECTURE_HERE: u32 = 0xc000_003e;

const fn number_of(call: libc::c_long) -> u32 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "numbers of calls are small")]
    let number = call as u32;
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a filter says to a call: the kernel's interpreter, as far as our filters use it.
    fn run(program: &[libc::sock_filter], number: u32, architecture: u32, arguments: [u64; 6]) -> u32 {
        let (mut at, mut loaded) = (0, 0);
        loop {
            let step = &program[at];
            at += 1;
            let jump = |yes: bool| usize::from(if yes { step.jt } else { step.jf });
            match step.code {
                0x20 => {
                    loaded = match step.k {
                        0 => number,
                        4 => architecture,
                        at @ 16..64 if at % 4 == 0 => {
                            let word = arguments[(at as usize - 16) / 8];
                            u32::try_from(word >> (8 * (at % 8)) & 0xffff_ffff).unwrap()
                        }
                        odd => panic!("loads {odd}"),
                    }
                }
                0x15 => at += jump(loaded == step.k),
                0x25 => at += jump(loaded > step.k),
                0x35 => at += jump(loaded >= step.k),
                0x06 => return step.k,
                odd => panic!("code {odd:#x}"),
            }
        }
    }

    #[test]
    fn filters_withhold_what_is_in_the_set() {
        let set = Calls::none().with(2, 4).with(9, 9).with(62, 62).with(200, 230);
        let program = set.filter(77, 1000);
        let say = |number, first| run(&program, number, ARCHITECTURE_HERE, [first, 0, 0, 0, 7, 0]);
        for number in 0..500 {
            let essential = ESSENTIAL.iter().any(|call| number_of(*call) == number);
            let expected = if (425..=427).contains(&number) {
                libc::SECCOMP_RET_ERRNO | 1
            } else if set.has(number) && !essential {
                77
            } else {
                libc::SECCOMP_RET_ALLOW
            };
            assert_eq!(say(number, 5), expected, "{number}");
        }
        assert_eq!(say(62, 1000), libc::SECCOMP_RET_ALLOW, "a signal to itself");
        assert_eq!(say(0x4000_0002, 0), libc::SECCOMP_RET_ERRNO | 1, "by its other number");
        assert_eq!(run(&program, 0, 0x4000_0003, [0; 6]), libc::SECCOMP_RET_KILL_PROCESS, "by 32 bits");
    }

    #[test]
    fn what_concerns_nobody_else_passes() {
        let program = Calls::global().filter(77, 1000);
        let say = |call, arguments| run(&program, number_of(call), ARCHITECTURE_HERE, arguments);
        let send = |address| say(libc::SYS_sendto, [3, 4, 5, 6, address, 0]);
        assert_eq!(send(0), libc::SECCOMP_RET_ALLOW);
        assert_eq!((send(8), send(1 << 40)), (77, 77));
        assert_eq!(say(libc::SYS_prlimit64, [0; 6]), libc::SECCOMP_RET_ALLOW);
        assert_eq!(say(libc::SYS_prlimit64, [1, 0, 0, 0, 0, 0]), 77);
        assert_eq!(say(libc::SYS_tgkill, [1000, 5, 6, 0, 0, 0]), libc::SECCOMP_RET_ALLOW);
        assert_eq!(say(libc::SYS_tgkill, [0, 5, 6, 0, 0, 0]), 77);
        assert_eq!(say(libc::SYS_sendmsg, [0; 6]), 77);
    }

    #[test]
    fn how_others_run_is_left_alone() {
        let program = about_others(1000, &Calls::none());
        let say = |call, arguments| run(&program, number_of(call), ARCHITECTURE_HERE, arguments);
        let allow = libc::SECCOMP_RET_ALLOW;
        for (call, whom, kind) in ABOUT_PROCESSES {
            for (pid, expected) in [(0, allow), (1000, allow), (1 << 32, allow), (5, REFUSED), (1, REFUSED)] {
                let mut arguments = [u64::from(kind.unwrap_or(0)), 0, 0, 0, 0, 0];
                arguments[whom as usize] = pid;
                assert_eq!(say(call, arguments), expected, "{call} of {pid}");
            }
        }
        // Whole groups, and all of a user, even if named by 0.
        for kind in [libc::PRIO_PGRP, libc::PRIO_USER] {
            assert_eq!(say(libc::SYS_setpriority, [kind.into(), 0, 0, 0, 0, 0]), REFUSED);
        }
        assert_eq!(say(libc::SYS_ioprio_set, [2, 0, 0, 0, 0, 0]), REFUSED);
        assert_eq!(say(libc::SYS_setrlimit, [5; 6]), allow);
        assert_eq!(say(libc::SYS_read, [5; 6]), allow);
        assert_eq!(run(&program, 0x4000_0000, ARCHITECTURE_HERE, [0; 6]), REFUSED, "by its other number");
        let left = about_others(1000, &Calls::all());
        assert_eq!(run(&left, number_of(libc::SYS_prlimit64), ARCHITECTURE_HERE, [5; 6]), allow);
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
