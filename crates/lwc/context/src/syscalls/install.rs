//! Takes system calls away from a new context, on all of its threads.

use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering::SeqCst};

use orrery_sys::seccomp::{self, Action, Scope};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::futex;

use crate::spawn::lifetime::Lifetime;
use crate::syscalls::filter::Calls;
use crate::syscalls::listener_transfer::{ListenerTransfer, Word};
use crate::threads::stop_threads::spread_filter;

/// In a new context, before it is closed to debuggers: what it will be looked into by.
pub(crate) fn open_memory() -> rustix::io::Result<OwnedFd> {
    rustix::fs::open("/proc/self/mem", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map(orrery_sys::descriptors::raise)
}

/// In a new context, whose watcher runs, and that gave up gaining privileges before (`no_new_privs` in prctl(2), which
/// is each thread's): takes calls away, on both threads, and on its `counterparts` of the creator's other threads. With
/// `memory` they are trapped: listener and memory go out over `socket`.
pub(crate) fn install_filter(
    lifetime: &'static Lifetime,
    calls: &Calls,
    socket: &OwnedFd,
    memory: Option<OwnedFd>,
    counterparts: bool,
) -> rustix::io::Result<()> {
    let own = rustix::process::getpid().as_raw_pid().unsigned_abs();
    let trapped = memory.is_some();
    let action = if trapped { Action::Notify } else { Action::Fail(Errno::PERM) };
    let starter = eventfd(1, EventfdFlags::CLOEXEC)?;
    let transfer: &'static ListenerTransfer = Box::leak(Box::new(ListenerTransfer {
        socket: socket.as_raw_fd(),
        memory: memory.map_or(-1, IntoRawFd::into_raw_fd),
        starter: starter.as_raw_fd(),
        filter: calls.filter(action, own),
        counterparts,
        listener: AtomicI32::new(-1),
        done: AtomicU32::new(0),
    }));
    lifetime.transfer_listener(transfer, &starter)?;
    let _ = starter.into_raw_fd();
    let scope = if trapped { Scope::ThreadWithListener } else { Scope::Thread };
    let (number, outcome) = match seccomp::install(&transfer.filter, scope) {
        Ok(listener) => (listener.map_or(-2, IntoRawFd::into_raw_fd), Ok(())),
        Err(errno) => (-2, Err(errno)),
    };
    transfer.listener.store(number, SeqCst);
    let word = AtomicU32::from_ptr_of(&transfer.listener);
    let _ = futex::wake(word, futex::Flags::empty(), 1);
    while transfer.done.load(SeqCst) == 0 {
        let _ = futex::wait(&transfer.done, futex::Flags::empty(), 0, None);
    }
    match transfer.done.load(SeqCst) {
        1 if counterparts => outcome.and_then(|()| spread_filter()),
        1 => outcome,
        errno => Err(Errno::from_raw_os_error(i32::try_from(errno & 0xfff).unwrap_or(libc::EIO))),
    }
}
