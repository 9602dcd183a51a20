//! Closing a process to all who could look into it.

use orrery_sys::seccomp::{self, Action, Filter, Scope};
use rustix::io::Errno;
use rustix::mm::MlockAllFlags;
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// Closes the calling process to debuggers and other processes of its user, for good, before it learns any secret:
///
/// - `PR_SET_DUMPABLE` 0: no ptrace(2), process_vm_readv(2), `/proc/PID/mem`, pidfd_getfd(2) but with CAP_SYS_PTRACE,
///   and no core. Forked twins inherit it.
/// - RLIMIT_CORE 0, should anything make it dumpable again.
/// - `PR_SET_NO_NEW_PRIVS`: no program that it could start has more rights than it.
///
/// # Errors
/// Those of prctl(2): then it must not load anything.
pub(super) fn close() -> Result<(), Errno> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    rustix::thread::set_no_new_privs(true)?;
    limit(Resource::Core, 0)
}

/// Keeps its memory from being swapped out, where the system allows to lock as much as it likes (mlockall(2)); locks
/// are not inherited by fork.
pub(super) fn lock_memory() {
    let all = Rlimit { current: None, maximum: None };
    let _ = rustix::process::setrlimit(Resource::Memlock, all);
    // Under a limit, what is allocated later would fail.
    if rustix::process::getrlimit(Resource::Memlock).current.is_none() {
        let _ = rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT);
    }
}

/// Gives up all capabilities of the calling thread, as far as the kernel lets it.
pub(super) fn drop_capabilities() {
    let none = CapabilitySet::empty();
    let _ = rustix::thread::clear_ambient_capability_set();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    let _ = rustix::thread::set_capabilities(None, sets);
}

/// Gives up what a twin has no use for, should a client find a hole in what serves it: writing to files, new processes
/// and threads, and the system calls that lead to other files, processes or machines ([`FORBIDDEN`]), which say `EPERM`
/// from now on. A twin works on memory and answers; that is all.
pub(super) fn give_up() {
    let _ = limit(Resource::Fsize, 0);
    let _ = limit(Resource::Nproc, 0);
    let mut filter = Filter::new(Action::Allow).foreign(Action::KillProcess);
    FORBIDDEN.iter().for_each(|&call| filter.set(call, Action::Fail(Errno::PERM)));
    // Where the kernel has no filters, the other restrictions remain.
    if rustix::thread::set_no_new_privs(true).is_ok() {
        let _ = seccomp::install(&filter.program(), Scope::Process);
    }
}

/// What a twin may not do.
const FORBIDDEN: &[i64] = &[
    // Files by their names, and what they are.
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_creat,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_rmdir,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_link,
    libc::SYS_linkat,
    libc::SYS_symlink,
    libc::SYS_symlinkat,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_chmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_fchownat,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_utimensat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_truncate,
    // File systems and namespaces.
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_umount2,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_quotactl,
    libc::SYS_acct,
    // Programs, processes and threads.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_move_pages,
    libc::SYS_migrate_pages,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_prlimit64,
    libc::SYS_setrlimit,
    libc::SYS_setpriority,
    libc::SYS_ioprio_set,
    // Other ways to other processes and machines.
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_shmget,
    libc::SYS_semget,
    libc::SYS_msgget,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    // Doors to the kernel that no answer needs.
    libc::SYS_bpf,
    libc::SYS_io_uring_setup,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
];

fn limit(resource: Resource, value: u64) -> Result<(), Errno> {
    rustix::process::setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) })
}
