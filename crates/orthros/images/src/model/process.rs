//! Processes and threads.

use orrery_kimage::{Credentials, PosixTimer, Registers};

use super::file::FileId;
use super::memory::AddressSpace;
use super::settings::ThreadAttributes;

/// The place of `RLIMIT_FSIZE` among the limits of a process.
pub(crate) const FILE_SIZE: usize = libc::RLIMIT_FSIZE as usize;

/// A process, under the PIDs of its innermost namespace.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// The parent's PID; 0 for the service's own process.
    pub(crate) ppid: u32,
    pub(crate) pgid: u32,
    pub(crate) sid: u32,
    pub(crate) state: ProcessState,
}

#[derive(Debug)]
pub(crate) enum ProcessState {
    /// It has exited, or counts as killed, and its parent has not waited for it.
    Exited {
        name: String,
        status: u32,
    },
    Running(Box<Running>),
}

/// A process that has not exited.
#[derive(Debug)]
pub(crate) struct Running {
    /// Whether it is stopped by a signal.
    pub(crate) stopped: bool,
    pub(crate) personality: u32,
    /// `task_struct.flags`.
    pub(crate) flags: u32,
    pub(crate) threads: Vec<Thread>,
    pub(crate) timers: Timers,
    /// The soft and hard limits, by their `RLIMIT_*` numbers.
    pub(crate) rlimits: Vec<(u64, u64)>,
    /// `siginfo_t` of each signal that is pending for the process.
    pub(crate) pending_signals: Vec<Vec<u8>>,
    /// The actions of all signals but `SIGKILL` and `SIGSTOP`, in order.
    pub(crate) actions: Vec<SignalAction>,
    pub(crate) memory: AddressSpace,
    pub(crate) directories: Directories,
    pub(crate) descriptors: Vec<Descriptor>,
    pub(crate) locks: Vec<FileLock>,
}

#[derive(Debug)]
pub(crate) struct Thread {
    pub(crate) tid: u32,
    pub(crate) name: String,
    pub(crate) registers: Registers,
    /// The floating-point and vector registers, as `fxsave` lays them out.
    pub(crate) float_state: Vec<u8>,
    pub(crate) clear_tid_address: u64,
    pub(crate) robust_list: u64,
    pub(crate) nice: i32,
    pub(crate) policy: u32,
    pub(crate) rt_priority: u32,
    pub(crate) blocked_signals: u64,
    /// The alternate signal stack: address, size and flags.
    pub(crate) signal_stack: (u64, u64, u32),
    pub(crate) parent_death_signal: Option<u32>,
    /// `siginfo_t` of each signal that is pending for the thread.
    pub(crate) pending_signals: Vec<Vec<u8>>,
    pub(crate) credentials: Credentials,
    /// What CRIU does not restore of it.
    pub(crate) attributes: ThreadAttributes,
    pub(crate) seccomp_mode: u32,
    /// The index of its newest filter.
    pub(crate) seccomp_filter: Option<u32>,
    pub(crate) rseq: Option<Rseq>,
}

/// A registered restartable sequence area.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rseq {
    pub(crate) address: u64,
    pub(crate) size: u32,
    pub(crate) signature: u32,
}

#[derive(Debug)]
pub(crate) struct Timers {
    pub(crate) real: TimerLeft,
    pub(crate) virt: TimerLeft,
    pub(crate) prof: TimerLeft,
    /// Each with the nanoseconds that are left of it; 0 if it is not set.
    pub(crate) posix: Vec<(PosixTimer, u64)>,
}

/// An interval timer, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimerLeft {
    pub(crate) interval: u64,
    /// The time until it expires; 0 if it is not set.
    pub(crate) left: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SignalAction {
    pub(crate) handler: u64,
    pub(crate) flags: u64,
    pub(crate) restorer: u64,
    pub(crate) mask: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Directories {
    pub(crate) working: FileId,
    pub(crate) root: FileId,
    pub(crate) umask: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Descriptor {
    pub(crate) fd: u32,
    pub(crate) file: FileId,
    pub(crate) closes_on_exec: bool,
}

/// A lock on a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileLock {
    pub(crate) kind: LockKind,
    /// The address of what owns it in the kernel: the inode of a process's lock, otherwise the open file description. With
    /// the kind, the owner's PID and the start it identifies the lock.
    pub(crate) owner: u64,
    /// `F_RDLCK` or `F_WRLCK`.
    pub(crate) mode: u32,
    pub(crate) fd: u32,
    pub(crate) start: u64,
    /// The number of bytes; 0 up to the end of the file.
    pub(crate) length: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockKind {
    /// `fcntl(F_SETLK)`: of the process.
    Posix,
    /// `flock`.
    Flock,
    /// `fcntl(F_OFD_SETLK)`: of the open file description.
    OpenFileDescription,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SeccompFilter {
    /// The program: `struct sock_filter`s.
    pub(crate) program: Vec<u8>,
    /// The index of the filter that was installed before it.
    pub(crate) previous: Option<u32>,
    /// `SECCOMP_FILTER_FLAG_LOG`.
    pub(crate) logs: bool,
}
