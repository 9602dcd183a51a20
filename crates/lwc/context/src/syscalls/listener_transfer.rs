//! How a filter's listener leaves a new context: its watcher sends it to the parent, and then filters itself.
//! [`crate::syscalls::trap`] says why.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::SeqCst};

use orrery_sys::seccomp::{self, Scope, sock_filter};
use rustix::thread::futex;

use crate::peers::socket::send_files;

/// What a new context's thread and its watcher do together to hand the listener out.
#[derive(Debug)]
pub(crate) struct ListenerTransfer {
    pub(super) socket: RawFd,
    pub(super) memory: RawFd,
    pub(super) starter: RawFd,
    pub(super) filter: Vec<sock_filter>,
    /// There are other threads, and the filter is spread to them and to the watcher once the listener is out.
    pub(super) counterparts: bool,
    /// The listener's number; -1 before there is one; -2 where there will be none.
    pub(super) listener: AtomicI32,
    /// 0 until it is done, then 1, or an errno and 2^16.
    pub(super) done: AtomicU32,
}

/// A view of a signed word, for futex(2), which knows unsigned ones.
pub(super) trait Word {
    fn from_ptr_of(signed: &AtomicI32) -> &AtomicU32;
}

impl Word for AtomicU32 {
    fn from_ptr_of(signed: &AtomicI32) -> &AtomicU32 {
        // SAFETY: same size and alignment, and both are atomic.
        unsafe { AtomicU32::from_ptr(signed.as_ptr().cast()) }
    }
}

/// On the watcher's thread, bound by its rules: hands out what there is, then filters itself.
fn send_listener(transfer: &ListenerTransfer) {
    let word = AtomicU32::from_ptr_of(&transfer.listener);
    while transfer.listener.load(SeqCst) == -1 {
        let _ = futex::wait(word, futex::Flags::empty(), u32::MAX, None);
    }
    let listener = transfer.listener.load(SeqCst);
    let mut outcome = Ok(());
    if listener >= 0 {
        // SAFETY: both are open, in a table that only this context has, whose other thread waits for us.
        let (listener, memory, socket) = unsafe {
            (
                OwnedFd::from_raw_fd(listener),
                BorrowedFd::borrow_raw(transfer.memory),
                BorrowedFd::borrow_raw(transfer.socket),
            )
        };
        outcome = send_files(socket, &[listener.as_fd(), memory]);
    }
    for number in [transfer.memory, transfer.starter] {
        if number >= 0 {
            // SAFETY: the numbers are open and were left to this thread, so that nobody else closes them.
            unsafe { rustix::io::close(number) };
        }
    }
    // Without a listener of its own, what is trapped elsewhere fails here.
    let outcome = match outcome {
        Ok(()) if !transfer.counterparts => seccomp::install(&transfer.filter, Scope::Thread).map(drop),
        other => other,
    };
    let done = match outcome {
        Ok(()) => 1,
        Err(errno) => 1 << 16 | errno.raw_os_error().unsigned_abs(),
    };
    transfer.done.store(done, SeqCst);
    let _ = futex::wake(&transfer.done, futex::Flags::empty(), 1);
}

/// Called by [`Lifetime`](crate::spawn::lifetime::Leash) with what
/// [`install_filter`](crate::syscalls::install::install_filter) gave it.
///
/// # Safety
/// `with` is a [`ListenerTransfer`] that is never freed.
pub(crate) unsafe fn on_event(with: *const c_void) {
    // SAFETY: `with` leads to a transfer that is never freed (# Safety), and whose members that change are
    // atomics.
    send_listener(unsafe { &*with.cast::<ListenerTransfer>() });
}
