//! Which system calls a script may make: two seccomp filters.
//!
//! The first knows what ordinary programs use and answers everything else with `ENOSYS`, as an older kernel would, so
//! that libraries take their usual fallbacks (`clone3`, whose flags a filter cannot see, becomes `clone`). The second
//! answers what is known and unwanted with `EPERM`. The kernel runs both and takes the stricter answer; for calls that
//! are always allowed it remembers that and runs neither.
//!
//! Rollback's own calls are among the allowed: it scans and protects memory through descriptors that it opened before
//! (`ioctl`), maps, copies (`preadv`), signals its own threads (`tgkill`), lowers limits (`prlimit64`), and starts
//! helpers that hold its files and memory (`clone`), with which it compares (`kcmp`) and from which it fetches
//! (`pidfd_getfd`, `process_vm_readv`). The last two reach no other process than the worker's children: Landlock and the
//! process id namespace see to that.

use orrery_sys::seccomp::{self, Action, Condition, Filter, Scope};
use rustix::io::Errno;

use super::error::{Protections, SandboxError, io_error};
use crate::config::Sandbox;

pub(super) fn restrict(sandbox: &Sandbox, protections: Protections) -> Result<(), SandboxError> {
    // The second filter judges what the first lets through, its own installation included.
    let mut known = Filter::new(Action::Fail(Errno::NOSYS)).foreign(Action::KillProcess);
    ORDINARY.iter().chain(LEGACY).chain(UNWANTED).for_each(|&call| known.set(call, Action::Allow));
    install(&known)?;
    install(&unwanted(sandbox, protections)?)
}

fn install(filter: &Filter) -> Result<(), SandboxError> {
    seccomp::install(&filter.program(), Scope::Thread).map(drop).map_err(io_error("seccomp"))
}

/// Returns the filter that makes calls fail with `EPERM`, always or with certain arguments.
fn unwanted(sandbox: &Sandbox, protections: Protections) -> Result<Filter, SandboxError> {
    let refuse = Action::Fail(Errno::PERM);
    let mut filter = Filter::new(Action::Allow).foreign(Action::KillProcess);
    UNWANTED.iter().for_each(|&call| filter.set(call, refuse));
    if !sandbox.net {
        filter.set(libc::SYS_socket, refuse);
    }
    if !protections.namespaces {
        // With read-only mounts the kernel refuses these where it should; Landlock does not know them.
        ATTRIBUTES.iter().chain(LEGACY_ATTRIBUTES).for_each(|&call| filter.set(call, refuse));
    }
    let namespaces = NEW_NAMESPACES.iter().fold(0, |bits, flag| bits | flag.unsigned_abs());
    filter.add(libc::SYS_clone, Condition::AnyBit { argument: 0, bits: namespaces }, refuse);
    // Another process' limits.
    filter.add(libc::SYS_prlimit64, Condition::Differs { argument: 0, value: 0 }, refuse);
    for option in [libc::PR_SET_SECCOMP, libc::PR_SET_MM] {
        let value = option.unsigned_abs();
        filter.add(libc::SYS_prctl, Condition::Equals { argument: 0, value }, refuse);
    }
    // Rollback's own descriptors are in reach of a script. With one call on them it could hide what it wrote.
    let engine = own_text().map_err(io_error("cannot read the process's mappings"))?;
    filter.add(libc::SYS_ioctl, Condition::CalledFrom { start: engine.0, end: engine.1 }, Action::Allow);
    for request in ENGINE_REQUESTS {
        filter.add(libc::SYS_ioctl, Condition::Equals { argument: 1, value: request }, refuse);
    }
    // Typing into the user's terminal.
    for request in [libc::TIOCSTI, libc::TIOCLINUX] {
        let value = u32::try_from(request).unwrap_or(u32::MAX);
        filter.add(libc::SYS_ioctl, Condition::Equals { argument: 1, value }, refuse);
    }
    Ok(filter)
}

/// What userfaultfd(2) and `/proc/PID/pagemap` are asked with ioctl(2): UFFDIO_REGISTER, UNREGISTER, WAKE, COPY, ZEROPAGE,
/// MOVE, WRITEPROTECT, CONTINUE, POISON, and PAGEMAP_SCAN, which can protect pages, too.
const ENGINE_REQUESTS: [u32; 10] = [
    0xc020_aa00,
    0x8010_aa01,
    0x8010_aa02,
    0xc028_aa03,
    0xc020_aa04,
    0xc028_aa05,
    0xc018_aa06,
    0xc020_aa07,
    0xc020_aa08,
    0xc060_6610,
];

/// Returns where the code of this program is, the engine's among it: libraries, the interpreter's and libffi's
/// included, are elsewhere.
fn own_text() -> rustix::io::Result<(u64, u64)> {
    let here = own_text as *const () as u64;
    let maps = std::fs::read("/proc/self/maps")
        .map_err(|error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))?;
    let entry = orrery_sys::maps::entries(&maps)
        .map(|entry| (entry.range.start as u64, entry.range.end as u64))
        .find(|(start, end)| (*start..*end).contains(&here));
    entry.ok_or(Errno::FAULT)
}

const NEW_NAMESPACES: [i32; 7] = [
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWUTS,
];

/// What ordinary programs use, on every architecture.
const ORDINARY: &[i64] = &[
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_arch_prctl,
    libc::SYS_bind,
    libc::SYS_brk,
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_chdir,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_clone,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_connect,
    libc::SYS_copy_file_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fchdir,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_fgetxattr,
    libc::SYS_flistxattr,
    libc::SYS_flock,
    libc::SYS_fremovexattr,
    libc::SYS_fsetxattr,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_get_robust_list,
    libc::SYS_getcpu,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getgroups,
    libc::SYS_getitimer,
    libc::SYS_getpeername,
    libc::SYS_getpgid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getpriority,
    libc::SYS_getrandom,
    libc::SYS_getresgid,
    libc::SYS_getresuid,
    libc::SYS_getrlimit,
    libc::SYS_getrusage,
    libc::SYS_getsid,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_getxattr,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_rm_watch,
    libc::SYS_ioctl,
    libc::SYS_ioprio_get,
    libc::SYS_ioprio_set,
    libc::SYS_kcmp,
    libc::SYS_kill,
    libc::SYS_lgetxattr,
    libc::SYS_linkat,
    libc::SYS_listen,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_lremovexattr,
    libc::SYS_lseek,
    libc::SYS_lsetxattr,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mlockall,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_msync,
    libc::SYS_munlock,
    libc::SYS_munlockall,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_personality,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_pipe2,
    libc::SYS_pkey_alloc,
    libc::SYS_pkey_free,
    libc::SYS_pkey_mprotect,
    libc::SYS_ppoll,
    libc::SYS_prctl,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_prlimit64,
    libc::SYS_process_vm_readv,
    libc::SYS_pselect6,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readahead,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_removexattr,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getattr,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_rr_get_interval,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_yield,
    libc::SYS_sendfile,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_setfsgid,
    libc::SYS_setfsuid,
    libc::SYS_setgid,
    libc::SYS_setgroups,
    libc::SYS_setitimer,
    libc::SYS_setpgid,
    libc::SYS_setpriority,
    libc::SYS_setregid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setreuid,
    libc::SYS_setrlimit,
    libc::SYS_setsid,
    libc::SYS_setsockopt,
    libc::SYS_setuid,
    libc::SYS_setxattr,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_signalfd4,
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_splice,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_sync,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_sysinfo,
    libc::SYS_tee,
    libc::SYS_tgkill,
    libc::SYS_timer_create,
    libc::SYS_timer_delete,
    libc::SYS_timer_getoverrun,
    libc::SYS_timer_gettime,
    libc::SYS_timer_settime,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
    libc::SYS_times,
    libc::SYS_tkill,
    libc::SYS_truncate,
    libc::SYS_umask,
    libc::SYS_uname,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    libc::SYS_vmsplice,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_write,
    libc::SYS_writev,
];

#[cfg(target_arch = "x86_64")]
/// Older forms of the same, which not every architecture has.
const LEGACY: &[i64] = &[
    libc::SYS_access,
    libc::SYS_alarm,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_creat,
    libc::SYS_dup2,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_fork,
    libc::SYS_futimesat,
    libc::SYS_getdents,
    libc::SYS_getpgrp,
    libc::SYS_inotify_init,
    libc::SYS_lchown,
    libc::SYS_link,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_mknod,
    libc::SYS_open,
    libc::SYS_pause,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_rmdir,
    libc::SYS_select,
    libc::SYS_signalfd,
    libc::SYS_stat,
    libc::SYS_symlink,
    libc::SYS_time,
    libc::SYS_unlink,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_vfork,
];

/// Older forms of the same: none here.
#[cfg(not(target_arch = "x86_64"))]
const LEGACY: &[i64] = &[];

/// What no script needs, and some could abuse.
const UNWANTED: &[i64] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_adjtimex,
    libc::SYS_bpf,
    libc::SYS_chroot,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_restrict_self,
    libc::SYS_lookup_dcookie,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pivot_root,
    libc::SYS_process_madvise,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_seccomp,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
    libc::SYS_vhangup,
];

/// Changes to files that are not made through an open file, in the forms that every architecture has.
const ATTRIBUTES: &[i64] = &[
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fremovexattr,
    libc::SYS_fsetxattr,
    libc::SYS_lremovexattr,
    libc::SYS_lsetxattr,
    libc::SYS_removexattr,
    libc::SYS_setxattr,
    libc::SYS_utimensat,
];

/// Older forms of the same.
#[cfg(target_arch = "x86_64")]
const LEGACY_ATTRIBUTES: &[i64] = &[
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_futimesat,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
];

/// Older forms of the same: none here.
#[cfg(not(target_arch = "x86_64"))]
const LEGACY_ATTRIBUTES: &[i64] = &[];
