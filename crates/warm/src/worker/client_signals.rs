//! The connection while a script runs in the worker itself: signals come in on it, and its end ends the script.
//!
//! The worker's one thread is busy with the script, so the kernel is asked to signal the thread when something arrives
//! (`O_ASYNC` with `F_SETSIG`, [`fcntl(2)`](https://man7.org/linux/man-pages/man2/fcntl.2.html)). The handler reads
//! what has come: a byte is the number of a signal for the script, the end of the stream means that the client has
//! gone. A signal is delivered as the script has it: its handler runs, ignored is ignored, and where the default would
//! end the process it ends the request instead, so that the worker lives.
//!
//! The signal is blocked but for the time that a script runs, so none reaches the wrong one.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use orrery_rollback::abandon;

/// The signal that says that something came; the engine's own is another.
const ARRIVAL: i32 = orrery_rollback::CONTROL_SIGNAL + 1;

/// What the script is abandoned for: the client has gone.
const GONE: u64 = 0;
/// What the script is abandoned for: a signal, whose number is added.
const SIGNALED: u64 = 1 << 32;

/// The connection's descriptor and inode, for the handler, which has no other way to learn them.
static DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);
static INODE: AtomicU64 = AtomicU64::new(0);

/// Why a script was abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// The client has gone.
    ClientGone,
    /// This signal would have ended it.
    Signal(i32),
}

impl Reason {
    pub(super) fn from_code(code: u64) -> Self {
        match code.checked_sub(SIGNALED).map(i32::try_from) {
            Some(Ok(signal)) => Self::Signal(signal),
            _ => Self::ClientGone,
        }
    }
}

/// Installs the handler and blocks its signal; once, when the worker starts.
pub(super) fn prepare() -> io::Result<()> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a zeroed sigaction is a valid one, with an empty mask; the handler is async-signal-safe.
    unsafe {
        let action = action.assume_init_mut();
        action.sa_sigaction = arrival as *const () as usize;
        // Without SA_RESTART, so that a system call that the script waits in is interrupted for its own handlers.
        action.sa_flags = libc::SA_SIGINFO;
        if libc::sigaction(ARRIVAL, action, std::ptr::null_mut()) == -1 {
            return Err(io::Error::last_os_error());
        }
    }
    mask(libc::SIG_BLOCK);
    Ok(())
}

/// Listens on `connection`, whose inode is given, from now on.
pub(super) fn open(connection: &OwnedFd, inode: u64) -> io::Result<()> {
    let fd = connection.as_raw_fd();
    DESCRIPTOR.store(fd, Ordering::Relaxed);
    INODE.store(inode, Ordering::Relaxed);
    let owner = Owner { kind: F_OWNER_TID, id: rustix::thread::gettid().as_raw_nonzero().get() };
    // SAFETY: plain system calls on an open descriptor; the pointer is to a live structure of the kernel's layout.
    unsafe {
        if libc::fcntl(fd, F_SETOWN_EX, &raw const owner) == -1
            || libc::fcntl(fd, F_SETSIG, ARRIVAL) == -1
            || libc::fcntl(fd, libc::F_SETFL, libc::O_RDWR | libc::O_ASYNC) == -1
        {
            return Err(io::Error::last_os_error());
        }
    }
    // What came before the kernel was asked is not signalled.
    mask(libc::SIG_UNBLOCK);
    take_arrivals(0);
    Ok(())
}

/// Listens no more.
pub(super) fn close() {
    mask(libc::SIG_BLOCK);
    DESCRIPTOR.store(-1, Ordering::Relaxed);
}

/// Forgets arrivals of connections that are over.
pub(super) fn forget_arrivals() {
    let mut set = MaybeUninit::uninit();
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the set is initialised before it is used; no information is asked for.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), ARRIVAL);
        while libc::sigtimedwait(set.as_ptr(), std::ptr::null_mut(), &raw const at_once) > 0 {}
    }
}

/// Returns whether descriptor `number` is still the socket that it was: a script may have put something else there.
pub(super) fn is_intact(number: RawFd, inode_before: u64) -> bool {
    inode_before != 0 && inode(number) == inode_before
}

/// The inode behind a descriptor; 0 where there is none.
pub(super) fn inode(fd: i32) -> u64 {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the pointer is to a live local, which the call fills when it answers 0.
    unsafe { if libc::fstat(fd, stat.as_mut_ptr()) == 0 { stat.assume_init().st_ino } else { 0 } }
}

const F_SETSIG: i32 = 10;
const F_SETOWN_EX: i32 = 15;
const F_OWNER_TID: i32 = 0;

/// `struct f_owner_ex`.
#[repr(C)]
struct Owner {
    kind: i32,
    id: i32,
}

fn mask(how: i32) {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the set is initialised before it is used.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), ARRIVAL);
        libc::sigprocmask(how, set.as_ptr(), std::ptr::null_mut());
    }
}

extern "C" fn arrival(_: i32, _: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
    // SAFETY: the kernel passes the interrupted context, whose mask begins with the 64 bits that it uses.
    let blocked = unsafe { (&raw const (*context).uc_sigmask).cast::<u64>().read() };
    // SAFETY: errno belongs to this thread.
    unsafe {
        let errno = *libc::__errno_location();
        take_arrivals(blocked);
        *libc::__errno_location() = errno;
    }
}

/// Does what the bytes that have come ask for. Async-signal-safe.
fn take_arrivals(blocked: u64) {
    loop {
        let mut signal = 0_u8;
        match read_one(&mut signal, libc::MSG_DONTWAIT) {
            Arrived::Byte => deliver(i32::from(signal), blocked),
            Arrived::End => abandon(GONE),
            Arrived::Nothing => return,
        }
    }
}

enum Arrived {
    Byte,
    End,
    Nothing,
}

fn read_one(byte: &mut u8, flags: i32) -> Arrived {
    let fd = DESCRIPTOR.load(Ordering::Relaxed);
    if fd == -1 || inode(fd) != INODE.load(Ordering::Relaxed) {
        return Arrived::Nothing;
    }
    // SAFETY: the pointer is to a live byte.
    match unsafe { libc::recv(fd, (&raw mut *byte).cast(), 1, flags) } {
        1 => Arrived::Byte,
        0 => Arrived::End,
        // SAFETY: errno belongs to this thread.
        _ => match unsafe { *libc::__errno_location() } {
            libc::ECONNRESET => Arrived::End,
            _ => Arrived::Nothing,
        },
    }
}

/// What a signal does by default.
enum Default {
    End,
    Stop,
    Nothing,
}

fn default_of(signal: i32) -> Default {
    match signal {
        libc::SIGCHLD | libc::SIGCONT | libc::SIGURG | libc::SIGWINCH => Default::Nothing,
        libc::SIGSTOP | libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU => Default::Stop,
        _ => Default::End,
    }
}

fn deliver(signal: i32, blocked: u64) {
    if !(1..=64).contains(&signal) || signal == ARRIVAL || signal == orrery_rollback::CONTROL_SIGNAL {
        return;
    }
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the pointer is to a live local, zeroed and so valid even if the call fails.
    let handler = unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init().sa_sigaction
    };
    let is_blocked = blocked & (1 << (signal - 1)) != 0;
    match default_of(signal) {
        _ if handler == libc::SIG_IGN => {}
        _ if handler != libc::SIG_DFL || is_blocked => {
            // SAFETY: plain system call; the signal goes to this very thread.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::gettid(), signal) };
        }
        Default::Nothing => {}
        Default::Stop => stop(),
        Default::End => abandon(SIGNALED + u64::from(signal.unsigned_abs())),
    }
}

/// Stands still until the client says `SIGCONT`, or has gone, or sends a signal that ends the script.
fn stop() {
    loop {
        let mut signal = 0_u8;
        match read_one(&mut signal, 0) {
            Arrived::Byte if i32::from(signal) == libc::SIGCONT => return,
            Arrived::Byte => {
                if !matches!(default_of(i32::from(signal)), Default::Stop) {
                    deliver(i32::from(signal), 0);
                }
            }
            Arrived::End => abandon(GONE),
            // SAFETY: errno belongs to this thread.
            Arrived::Nothing if unsafe { *libc::__errno_location() } == libc::EINTR => {}
            Arrived::Nothing => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_tell_why() {
        assert_eq!(Reason::from_code(GONE), Reason::ClientGone);
        assert_eq!(Reason::from_code(SIGNALED + 15), Reason::Signal(15));
    }
}
