//! Signal handlers of the engine. Everything here is async-signal-safe: system calls, atomics, and memory of the arena.
//!
//! While a closure runs, fatal signals end it rather than the process, and the *control signal* reaches the thread that
//! runs it: a time limit has run out, or another thread asked for the end. Threads that must end get a signal that the C
//! library lets nobody block ([`signals::INTERNAL`]).

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use orrery_sys::signals::{self, Action, Mask, QueuedInfo};
use orrery_sys::thread;

use crate::run_state::{self, CONTROL_SIGNAL, Ending, Role};

/// Signals that would end the process and end the closure instead.
pub(crate) const FATAL: [i32; 7] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT, libc::SIGSYS, libc::SIGTRAP];

/// Installs the handlers. The dispositions before must have been captured: the end of the run puts them back.
///
/// # Errors
/// None in practice: the numbers are valid.
///
/// # Safety
/// The engine is initialised, and the calling thread has its alternate stack.
pub(crate) unsafe fn install() -> orrery_sys::Result<()> {
    for signal in FATAL {
        // On the alternate stack, since the fault may be that of an exhausted stack; further faults stay fatal.
        let action = action(on_fatal as *const () as usize, signals::Mask::MAX & !fatal_mask());
        // SAFETY: the handler is async-signal-safe.
        unsafe { signals::set_action(signal, &action)? };
    }
    // SAFETY: the caller's promise.
    unsafe { install_control() }
}

/// Installs the handler of the control signal alone, without which that signal would end the process.
///
/// # Errors
/// As for [`install`].
///
/// # Safety
/// The engine is initialised, and the disposition before was captured.
pub(crate) unsafe fn install_control() -> orrery_sys::Result<()> {
    // SAFETY: the handler is async-signal-safe.
    unsafe { signals::set_action(CONTROL_SIGNAL, &action(on_control as *const () as usize, Mask::MAX)) }
}

/// What a thread that must end is sent, beside [`signals::INTERNAL`].
const END: u64 = u64::MAX;
/// What handled that signal before: the C library, in programs that had other threads.
static FORMER: AtomicUsize = AtomicUsize::new(0);

/// Installs the handler by which threads end.
///
/// # Errors
/// As for [`install`].
///
/// # Safety
/// The engine is at work, and puts back the disposition that was captured before any thread goes on.
pub(crate) unsafe fn install_end() -> orrery_sys::Result<()> {
    let handler = on_end as *const () as usize;
    let former = signals::action(signals::INTERNAL)?;
    if former.handler != handler {
        FORMER.store(former.handler, Ordering::Release);
    }
    // SAFETY: the handler is async-signal-safe.
    unsafe { signals::set_action(signals::INTERNAL, &action(handler, Mask::MAX)) }
}

/// Asks a thread to end.
pub(crate) fn send_end(thread: i32) {
    let _ = signals::queue_to_thread(thread, signals::INTERNAL, END);
}

extern "C" fn on_end(signal: i32, info: *const QueuedInfo, context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo.
    if signals::queued_value(unsafe { &*info }) != Some(END) {
        // SAFETY: the disposition before ours, and what the kernel passed.
        unsafe { signals::pass_on(FORMER.load(Ordering::Acquire), signal, info, context) };
    } else if run_state::role() == Role::Doomed {
        thread::exit()
    }
}

const fn fatal_mask() -> Mask {
    signals::mask_of(&FATAL)
}

fn action(handler: usize, mask: Mask) -> Action {
    const SA_SIGINFO: usize = 4;
    const SA_RESTORER: usize = 0x0400_0000;
    const SA_ONSTACK: usize = 0x0800_0000;
    const SA_RESTART: usize = 0x1000_0000;
    Action {
        handler,
        flags: SA_SIGINFO | SA_RESTORER | SA_ONSTACK | SA_RESTART,
        restorer: signals::restorer as *const () as usize,
        mask,
    }
}

/// `siginfo_t`, as far as it is looked at.
#[repr(C)]
struct Info {
    signal: i32,
    errno: i32,
    code: i32,
    padding: i32,
    /// The address of a fault, or the sender.
    address: usize,
}

extern "C" fn on_fatal(signal: i32, info: *const Info, _: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo.
    let info = unsafe { &*info };
    // A signal that was sent has no address.
    let address = if info.code > 0 { info.address } else { 0 };
    run_state::end_from_here(Ending::Signaled { signal, address });
    // Not ours to handle: a forked child, or nothing running. What the signal does without us, it does now.
    let default = Action::default();
    // SAFETY: the default disposition has no handler.
    let _ = unsafe { signals::set_action(signal, &default) };
    if info.code <= 0 {
        let (process, thread) =
            (rustix::process::getpid().as_raw_pid(), rustix::thread::gettid().as_raw_pid());
        let _ = signals::send_to_thread(process, thread, signal);
    }
}

extern "C" fn on_control(_: i32, info: *const Info, _: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo.
    let from_timer = unsafe { (*info).code } == libc::SI_TIMER;
    match run_state::role() {
        Role::Owner if from_timer => run_state::end_from_here(Ending::TimedOut),
        Role::Owner => run_state::end_as_asked(),
        Role::Doomed | Role::Bystander => {}
    }
}
