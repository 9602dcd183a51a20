//! Signals as the kernel knows them: dispositions, masks, alternate stacks, all 64 of them and none held back for the C
//! library (sigaction(2), sigprocmask(2), sigaltstack(2), tgkill(2)).

use std::os::fd::{FromRawFd as _, OwnedFd};

use syscalls::{Sysno, syscall};

use crate::{Error, Result};

/// The highest signal number.
pub const LAST: i32 = 64;

/// A set of signals; signal `n` is bit `n - 1`.
pub type Mask = u64;

/// Returns the set of `signals`.
pub const fn mask_of(signals: &[i32]) -> Mask {
    let mut mask = 0;
    let mut i = 0;
    while i < signals.len() {
        mask |= 1 << (signals[i] - 1);
        i += 1;
    }
    mask
}

/// `struct sigaction` as the system call has it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Action {
    /// The handler's address, `SIG_DFL` (0) or `SIG_IGN` (1).
    pub handler: usize,
    /// `SA_*`.
    pub flags: usize,
    /// Where the kernel returns to after the handler (`SA_RESTORER`).
    pub restorer: usize,
    /// What is blocked while the handler runs.
    pub mask: Mask,
}

/// `stack_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlternateStack {
    /// The lowest address of the stack.
    pub base: usize,
    /// `SS_DISABLE` (2), `SS_AUTODISARM`; `SS_ONSTACK` (1) when it is in use.
    pub flags: i32,
    /// Its size in bytes.
    pub size: usize,
}

impl AlternateStack {
    /// The value for no alternate stack.
    pub const NONE: Self = Self { base: 0, flags: 2, size: 0 };
}

/// Returns the disposition of `signal`.
///
/// # Errors
/// `EINVAL` for numbers outside 1..=64.
pub fn action(signal: i32) -> Result<Action> {
    let mut old = Action::default();
    // SAFETY: the kernel writes one `Action`.
    unsafe { syscall!(Sysno::rt_sigaction, signal, 0, &raw mut old, size_of::<Mask>()) }
        .map_err(|e| Error::raw("rt_sigaction", usize::try_from(signal).unwrap_or(0), e))?;
    Ok(old)
}

/// Sets the disposition of `signal`.
///
/// # Errors
/// `EINVAL` for SIGKILL, SIGSTOP and numbers outside 1..=64.
///
/// # Safety
/// The handler may be called at any instruction of any thread and must be fit for that, and so must the restorer.
pub unsafe fn set_action(signal: i32, action: &Action) -> Result<()> {
    // SAFETY: the kernel reads one `Action`; the caller vouches for the addresses in it.
    unsafe { syscall!(Sysno::rt_sigaction, signal, core::ptr::from_ref(action), 0, size_of::<Mask>()) }
        .map_err(|e| Error::raw("rt_sigaction", usize::try_from(signal).unwrap_or(0), e))?;
    Ok(())
}

/// Replaces the calling thread's set of blocked signals and returns the one before.
pub fn set_mask(mask: Mask) -> Mask {
    const SIG_SETMASK: usize = 2;
    let mut old: Mask = 0;
    // SAFETY: the kernel reads one mask and writes another. With valid arguments the call cannot fail.
    let _ = unsafe {
        syscall!(Sysno::rt_sigprocmask, SIG_SETMASK, &raw const mask, &raw mut old, size_of::<Mask>())
    };
    old
}

/// Blocks every signal that can be blocked and returns the set before.
pub fn block_all() -> Mask {
    set_mask(Mask::MAX)
}

/// Blocks `signals` in the calling thread, besides those that it blocks already, and returns a descriptor that is readable while one of
/// them is pending; it does not block, and is closed on execution (signalfd(2)).
///
/// # Errors
/// `EMFILE`, `ENFILE`, `ENOMEM`; nothing is blocked then.
pub fn descriptor(signals: Mask) -> Result<OwnedFd> {
    // SAFETY: the kernel reads one mask, and makes a descriptor.
    let fd = unsafe {
        syscall!(
            Sysno::signalfd4,
            usize::MAX,
            &raw const signals,
            size_of::<Mask>(),
            libc::SFD_CLOEXEC | libc::SFD_NONBLOCK
        )
    }
    .map_err(|e| Error::raw("signalfd4", 0, e))?;
    let before = block_all();
    set_mask(before | signals);
    let fd = i32::try_from(fd).map_err(|_| Error::raw("signalfd4", 0, syscalls::Errno::EBADF))?;
    // SAFETY: the kernel has just made it, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the calling thread's alternate stack.
pub fn alternate_stack() -> AlternateStack {
    let mut old = AlternateStack::NONE;
    // SAFETY: the kernel writes one `AlternateStack`; the call cannot fail.
    let _ = unsafe { syscall!(Sysno::sigaltstack, 0, &raw mut old) };
    old
}

/// Sets the calling thread's alternate stack.
///
/// # Errors
/// `EPERM` while the current one is in use, `ENOMEM` for one that is too small.
///
/// # Safety
/// The stack's memory stays valid, and unused by anything else, until another one is set.
pub unsafe fn set_alternate_stack(stack: &AlternateStack) -> Result<()> {
    let stack = AlternateStack { flags: stack.flags & !1, ..*stack };
    // SAFETY: the kernel reads one `AlternateStack`; the caller vouches for the memory.
    unsafe { syscall!(Sysno::sigaltstack, &raw const stack, 0) }
        .map_err(|e| Error::raw("sigaltstack", stack.base, e))?;
    Ok(())
}

/// Sends `signal` to thread `thread` of process `process`.
///
/// # Errors
/// `ESRCH` where it is gone, `EPERM`.
pub fn send_to_thread(process: i32, thread: i32, signal: i32) -> Result<()> {
    // SAFETY: a signal to another thread touches none of our memory by itself.
    unsafe { syscall!(Sysno::tgkill, process, thread, signal) }
        .map_err(|e| Error::raw("tgkill", usize::try_from(thread).unwrap_or(0), e))?;
    Ok(())
}

/// `SIGSETXID` of the GNU C library, with which setuid(2) and the like reach all threads of a program. signal(7) calls it
/// internal: pthread_sigmask(3) leaves it out of every mask, so that only a thread that calls rt_sigprocmask(2) itself
/// blocks it, and the C library ignores whatever was not sent by tgkill(2). A handler that is put before the C library's
/// tells its own signals by [`queued_value`], and passes others on ([`pass_on`]).
pub const INTERNAL: i32 = 33;

/// `SI_QUEUE`.
const QUEUED: i32 = -1;

/// `siginfo_t` of a queued signal.
#[repr(C)]
#[derive(Debug)]
pub struct QueuedInfo {
    signal: i32,
    errno: i32,
    code: i32,
    padding: i32,
    pid: i32,
    uid: u32,
    value: u64,
    rest: [u64; 12],
}

/// Queues `signal` with `value` to thread `thread` of the calling process (rt_tgsigqueueinfo(2)). Async-signal-safe.
///
/// # Errors
/// `ESRCH` where it is gone, `EAGAIN` where too many are queued.
pub fn queue_to_thread(thread: i32, signal: i32, value: u64) -> Result<()> {
    let pid = rustix::process::getpid().as_raw_pid();
    let info = QueuedInfo { signal, errno: 0, code: QUEUED, padding: 0, pid, uid: 0, value, rest: [0; 12] };
    // SAFETY: the kernel reads one siginfo of 128 bytes.
    unsafe { syscall!(Sysno::rt_tgsigqueueinfo, pid, thread, signal, &raw const info) }
        .map_err(|e| Error::raw("rt_tgsigqueueinfo", usize::try_from(thread).unwrap_or(0), e))?;
    Ok(())
}

/// Returns the value with which the calling process queued a signal; `None` where it was sent in another way.
pub fn queued_value(info: &QueuedInfo) -> Option<u64> {
    let own = rustix::process::getpid().as_raw_pid();
    (info.code == QUEUED && info.pid == own).then_some(info.value)
}

/// Returns the process that sent a signal; `None` where the kernel did.
pub fn sender(info: &QueuedInfo) -> Option<i32> {
    matches!(info.code, libc::SI_USER | libc::SI_TKILL | QUEUED).then_some(info.pid)
}

/// Calls the handler that was installed before, if there was one.
///
/// # Safety
/// `former` is [`Action::handler`] of the disposition that `signal` had; `info` and `context` are what the kernel passed
/// to the handler that calls this.
pub unsafe fn pass_on(former: usize, signal: i32, info: *const QueuedInfo, context: *mut core::ffi::c_void) {
    if former > 1 {
        type Handler = extern "C" fn(i32, *const QueuedInfo, *mut core::ffi::c_void);
        // SAFETY: it was installed for this signal.
        let handler =
            unsafe { core::mem::transmute::<*const (), Handler>(core::ptr::with_exposed_provenance(former)) };
        handler(signal, info, context);
    }
}

/// Returns from a signal handler (rt_sigreturn(2)). It is what [`Action::restorer`] points to; nothing calls it.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
pub extern "C" fn restorer() {
    core::arch::naked_asm!("mov eax, 15", "syscall") // rt_sigreturn
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_come_back() {
        let before = set_mask(mask_of(&[libc::SIGUSR1, 64]));
        assert_eq!(set_mask(before), mask_of(&[libc::SIGUSR1, 64]));
    }

    #[test]
    fn pending_signals_make_a_descriptor_readable() {
        // The mask is the thread's own, and nothing else of the test may see it.
        std::thread::spawn(|| {
            let before = set_mask(mask_of(&[libc::SIGUSR2]));
            let fd = descriptor(mask_of(&[libc::SIGUSR1])).unwrap();
            let mut record = [0; size_of::<libc::signalfd_siginfo>()];
            assert_eq!(rustix::io::read(&fd, &mut record), Err(rustix::io::Errno::AGAIN));
            let thread = rustix::thread::gettid().as_raw_nonzero().get();
            send_to_thread(std::process::id().cast_signed(), thread, libc::SIGUSR1).unwrap();
            assert_eq!(rustix::io::read(&fd, &mut record), Ok(record.len()));
            assert_eq!(record[0], u8::try_from(libc::SIGUSR1).unwrap());
            assert_eq!(set_mask(before), mask_of(&[libc::SIGUSR1, libc::SIGUSR2]));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn dispositions_are_read() {
        assert_eq!(action(libc::SIGKILL).unwrap().handler, libc::SIG_DFL);
        assert_eq!(action(0).unwrap_err().errno, rustix::io::Errno::INVAL);
        // Rust's runtime ignores SIGPIPE and has a handler for SIGSEGV on an alternate stack.
        assert_eq!(action(libc::SIGPIPE).unwrap().handler, libc::SIG_IGN);
        assert_ne!(action(libc::SIGSEGV).unwrap().handler, libc::SIG_DFL);
        assert_ne!(alternate_stack().size, 0);
    }
}
