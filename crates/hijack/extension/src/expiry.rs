//! The expiry of a run: a timer on the thread's CPU clock, as SafeX counts a reservation down at each timer interrupt.
//!
//! The timer's SIGVTALRM interrupts the very thread that runs the module, whatever its priority, and advances the engine's epoch.
//! Compiled code compares that at each loop and function. CPU time is what counts: on a busy machine, a run takes longer
//! and is not aborted for that.

use std::sync::OnceLock;
use std::time::Duration;

use orrery_sys::{Error, timers};
use rustix::thread::gettid;
use rustix::time::{ClockId, clock_gettime};

use crate::engine::tick;

/// How often the timer fires again once it is due: an epoch that ended no run of ours, another thread's, does no harm.
const SIGNAL: i32 = libc::SIGVTALRM;

/// The timer of a thread.
#[derive(Debug)]
pub(crate) struct Expiry {
    timer: timers::TimerId,
    thread: i32,
}

impl Expiry {
    /// Makes a timer for the calling thread, and unblocks SIGVTALRM in it.
    ///
    /// # Errors
    /// Those of timer_create(2), and `EBUSY` where the process handles SIGVTALRM itself.
    pub(crate) fn new() -> Result<Self, Error> {
        static HANDLED: OnceLock<Result<(), Error>> = OnceLock::new();
        (*HANDLED.get_or_init(handle_signal))?;
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the first call initializes the set that the others use; a null pointer asks for no old mask.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), SIGNAL);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
        }
        let thread = gettid().as_raw_nonzero().get();
        Ok(Self { timer: timers::create_for_cpu_time(SIGNAL, thread, 0)?, thread })
    }

    /// Returns whether this is the calling thread's.
    pub(crate) fn is_mine(&self) -> bool {
        self.thread == gettid().as_raw_nonzero().get()
    }

    /// Runs `call` with the timer armed.
    pub(crate) fn during<R>(&self, time: Duration, call: impl FnOnce() -> R) -> R {
        // Where the kernel refuses, fuel still bounds the run.
        let _fuel_bounds_it =
            timers::arm(self.timer, u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1));
        let result = call();
        let _was_armed = timers::arm(self.timer, 0);
        result
    }
}

impl Drop for Expiry {
    fn drop(&mut self) {
        let _only_ours = timers::delete(self.timer);
    }
}

/// Returns the CPU time of the calling thread, in nanoseconds.
pub(crate) fn cpu_time() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

extern "C" fn on_signal(_signal: i32) {
    tick();
}

fn handle_signal() -> Result<(), Error> {
    // SAFETY: an all-zero `sigaction` is valid: default action, empty mask.
    let (mut old, mut new): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
    new.sa_sigaction = on_signal as *const () as usize;
    new.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
    // SAFETY: the handler does one atomic addition, as any thread at any instruction can.
    unsafe {
        libc::sigaction(SIGNAL, std::ptr::null(), &raw mut old);
        if old.sa_sigaction > libc::SIG_IGN {
            return Err(Error::new("sigaction SIGVTALRM", 0, rustix::io::Errno::BUSY));
        }
        libc::sigaction(SIGNAL, &raw const new, std::ptr::null_mut());
    }
    Ok(())
}
