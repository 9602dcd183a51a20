//! Calls that wait: each gets a thread, so that the others are answered meanwhile.
//!
//! Once the monitor has taken a call up, only a deadly signal ends the caller's waiting. So a thread looks every now
//! and then whether the caller is still there and has no signal that it handles, and else interrupts the thread that
//! waits.

use std::os::unix::thread::JoinHandleExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::io::Errno;

use crate::answer::Outcome;
use crate::credentials::AssumedCredentials;
use crate::state::State;
use crate::syscall::Syscall;

/// As many calls may wait at one time; further ones fail with an error that asks to try again.
const MOST: usize = 512;
/// How often a waiting call is looked at.
const PACE: Duration = Duration::from_millis(20);

/// The signal that interrupts: one that nobody sends to a monitor.
fn interrupt() -> i32 {
    libc::SIGRTMAX() - 3
}

static WAITING: AtomicUsize = AtomicUsize::new(0);

extern "C" fn nothing(_: i32) {}

/// Lets a signal interrupt system calls of this process, and do nothing else.
pub(crate) fn prepare() -> Result<(), Errno> {
    // SAFETY: zero is an empty set of signals and no flags: system calls are not restarted.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as *const () as usize;
    // SAFETY: the handler does nothing, so it can do so at any time.
    match unsafe { libc::sigaction(interrupt(), &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(Errno::INVAL),
    }
}

/// Starts `work` and answers the call with what comes of it.
///
/// # Errors
/// `EAGAIN` where too many wait already.
pub(crate) fn start(syscall: &Syscall<'_>, work: Box<dyn FnOnce() -> Outcome + Send>) -> Result<(), Errno> {
    let (state, call, caller) =
        (Arc::clone(syscall.state), syscall.notification, Arc::clone(syscall.caller()?));
    if WAITING.fetch_add(1, Ordering::Relaxed) >= MOST {
        WAITING.fetch_sub(1, Ordering::Relaxed);
        return Err(Errno::AGAIN);
    }
    let watch = move || {
        let done = Arc::new(AtomicBool::new(false));
        let finished = Arc::clone(&done);
        let (answering, other) = (Arc::clone(&state), caller.other.clone());
        let answer = move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                let assumed = other.as_ref().map(|other| AssumedCredentials::new(other, false)).transpose();
                assumed.and_then(|_assumed| work())
            }));
            finished.store(true, Ordering::SeqCst);
            answering.give(call.id, outcome.unwrap_or(Err(Errno::IO)));
        };
        match std::thread::Builder::new().spawn(answer) {
            Ok(worker) => {
                watch(&state, &worker, &done, call.id, call.thread);
                let _ = worker.join();
            }
            Err(_) => state.give(call.id, Err(Errno::AGAIN)),
        }
        WAITING.fetch_sub(1, Ordering::Relaxed);
    };
    match std::thread::Builder::new().stack_size(128 << 10).spawn(watch) {
        Ok(_) => Ok(()),
        Err(_) => {
            WAITING.fetch_sub(1, Ordering::Relaxed);
            Err(Errno::AGAIN)
        }
    }
}

fn watch(state: &State, worker: &std::thread::JoinHandle<()>, done: &AtomicBool, call: u64, thread: i32) {
    while !worker.is_finished() {
        std::thread::park_timeout(PACE);
        let unwanted = !state.listener.is_waiting(call)
            || crate::caller::Status::of(thread).is_ok_and(|status| status.interrupting != 0);
        if unwanted && !done.load(Ordering::SeqCst) {
            // SAFETY: the thread is not joined yet; the signal's handler does nothing.
            unsafe { libc::pthread_kill(worker.as_pthread_t(), interrupt()) };
        }
    }
}
