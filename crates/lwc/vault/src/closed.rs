//! Closing a process to all who could look into it.

use orrery_sys::seccomp::{self, Action, Condition, Filter, Scope};
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

/// How much heap there is before anything is loaded, in bytes: what [`lock_memory`] locks of a process that may not
/// lock what it allocates later.
const HEAP: usize = 8 << 20;

/// Extends the heap, which never shrinks again, so that what is allocated later is in memory that is locked. Address
/// space alone: pages exist when they are used.
pub(super) fn reserve_heap() {
    let threshold = libc::c_int::try_from(HEAP).unwrap_or(libc::c_int::MAX);
    // SAFETY: mallopt(3) and malloc(3) as their pages have it; what was allocated is freed, and nothing else.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, threshold);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        libc::free(libc::malloc(HEAP - 4096));
    }
}

/// Keeps the process's memory from being swapped out (mlockall(2)). Locks are not inherited by fork, so each process of
/// a vault calls it. Returns whether its memory is locked.
///
/// Whoever may lock as much as it likes locks what it allocates later, too. `later` is false where that would fail
/// later, because the capability that allows it is about to be dropped.
pub(super) fn lock_memory(later: bool) -> bool {
    let all = Rlimit { current: None, maximum: None };
    let _ = rustix::process::setrlimit(Resource::Memlock, all);
    let unlimited = rustix::process::getrlimit(Resource::Memlock).current.is_none();
    let capable =
        rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    let mut flags = MlockAllFlags::CURRENT | MlockAllFlags::ONFAULT;
    if unlimited || (capable && later) {
        flags |= MlockAllFlags::FUTURE;
    }
    rustix::mm::mlockall(flags).is_ok()
}

/// Gives up all capabilities of the calling thread, as far as the kernel lets it.
pub(super) fn drop_capabilities() {
    keep_capabilities(CapabilitySet::empty(), CapabilitySet::empty());
}

/// Gives up all capabilities but those that a keeper needs: to read key files of others while it loads
/// ([`with_all_files`]), and to lock its memory and that of its copies.
pub(super) fn drop_most_capabilities() {
    keep_capabilities(CapabilitySet::DAC_READ_SEARCH | CapabilitySet::IPC_LOCK, CapabilitySet::IPC_LOCK);
}

/// Reduces the permitted and the effective set of the calling thread to these; the others are emptied.
fn keep_capabilities(permitted: CapabilitySet, effective: CapabilitySet) {
    let _ = rustix::thread::clear_ambient_capability_set();
    let had = rustix::thread::capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.permitted);
    let sets = CapabilitySets {
        effective: had & effective,
        permitted: had & permitted,
        inheritable: CapabilitySet::empty(),
    };
    let _ = rustix::thread::set_capabilities(None, sets);
}

/// Runs `load` with all capabilities that the thread has; it has its effective ones again afterwards.
pub(super) fn with_all_files<T>(load: impl FnOnce() -> T) -> T {
    let Ok(before) = rustix::thread::capabilities(None) else { return load() };
    let raised = CapabilitySets { effective: before.permitted, ..before };
    let _ = rustix::thread::set_capabilities(None, raised);
    let loaded = load();
    let _ = rustix::thread::set_capabilities(None, before);
    loaded
}

/// How long the kernel may take to hand over and close descriptors that somebody sent.
const DESCRIPTORS_SECONDS: u32 = 5;

/// While this exists, the process has [`DESCRIPTORS_SECONDS`], or dies (SIGALRM).
///
/// The last close(2) of a descriptor can take for ever: a FUSE file asks a process of the sender's, a socket with
/// SO_LINGER waits for its peer. Whoever receives descriptors of strangers closes them.
#[derive(Debug)]
pub(super) struct DescriptorsDeadline(());

impl DescriptorsDeadline {
    /// Begins now. SIGALRM must have its default disposition and be unblocked.
    pub(super) fn begin() -> Self {
        // SAFETY: sets a timer of the process.
        unsafe { libc::alarm(DESCRIPTORS_SECONDS) };
        Self(())
    }
}

impl Drop for DescriptorsDeadline {
    fn drop(&mut self) {
        // SAFETY: alarm takes a number; it only clears the timer that `begin` set.
        unsafe { libc::alarm(0) };
    }
}

/// Forbids a keeper what an attacker would do who found a hole in what parses requests: all that a twin may not do, either
/// ([`FORBIDDEN`]), but for what a keeper is there for, which is to open files for reading, and to copy itself.
pub(super) fn confine_keeper() {
    let mut filter = Filter::new(Action::Allow).foreign(Action::KillProcess);
    FORBIDDEN.iter().for_each(|&call| filter.set(call, Action::Fail(Errno::PERM)));
    let writes = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | libc::O_APPEND | UNNAMED;
    let namespaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET;
    for (call, argument, bits) in
        [(libc::SYS_open, 1, writes), (libc::SYS_openat, 2, writes), (libc::SYS_clone, 0, namespaces)]
    {
        filter.clear(call);
        let condition = Condition::AnyBit { argument, bits: bits.cast_unsigned() };
        filter.add(call, condition, Action::Fail(Errno::PERM));
    }
    // Of itself, and of nobody else.
    for call in [libc::SYS_prlimit64, libc::SYS_sched_setaffinity] {
        filter.clear(call);
        filter.add(call, Condition::Differs { argument: 0, value: 0 }, Action::Fail(Errno::PERM));
    }
    // Their flags are in memory, where a filter cannot see them. Programs then use the older calls.
    for call in [libc::SYS_openat2, libc::SYS_clone3] {
        filter.set(call, Action::Fail(Errno::NOSYS));
    }
    for call in [libc::SYS_fork, libc::SYS_vfork, libc::SYS_setrlimit, libc::SYS_pidfd_open] {
        filter.clear(call);
    }
    // Where the kernel has no filters, the other restrictions remain.
    let _ = seccomp::install(&filter.program(), Scope::Process);
}

/// `__O_TMPFILE`: what O_TMPFILE has beside O_DIRECTORY.
const UNNAMED: i32 = libc::O_TMPFILE & !libc::O_DIRECTORY;

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
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_chown,
    libc::SYS_fchown,
    libc::SYS_lchown,
    libc::SYS_fchownat,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_utimensat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
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
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setattr,
    libc::SYS_ioprio_set,
    // Other ways to other processes and machines.
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
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
