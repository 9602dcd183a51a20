//! Staying with a program: its signals, its stops, its end.
//!
//! The program runs in the monitor's process group, so what the terminal sends reaches it by itself. What another
//! process sends to the monitor's process alone is passed on. When the program stops, so does the monitor, that the
//! shell may take over.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, waitpid};

use crate::run::{End, Guarded};
use crate::{Error, state::State};

/// What is passed on.
const PASSED_ON: [i32; 14] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGPIPE,
    libc::SIGALRM,
    libc::SIGTERM,
    libc::SIGCONT,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
    libc::SIGWINCH,
    libc::SIGURG,
];

/// How long to wait where the kernel is short of memory.
const SHORTAGE_PAUSE: std::time::Duration = std::time::Duration::from_millis(50);

fn watched() -> libc::sigset_t {
    // SAFETY: zero is a set of signals, which is then emptied and filled.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in PASSED_ON.iter().chain([&libc::SIGCHLD]) {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// Keeps the signals that are passed on for [`Guarded::supervise`]. To be called before
/// [`Run::start`](crate::Run::start), so that threads inherit it and nothing gets lost.
pub fn block_signals() {
    // SAFETY: the set is a static that was initialised, and the null pointer asks for no old mask.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const SET.0, std::ptr::null_mut()) };
}

struct Set(libc::sigset_t);
// SAFETY: never written after it is made.
unsafe impl Sync for Set {}
static SET: std::sync::LazyLock<Set> = std::sync::LazyLock::new(|| Set(watched()));

impl Guarded {
    /// The program's process.
    #[must_use]
    pub fn process(&self) -> i32 {
        self.process.as_raw_pid()
    }

    /// Passes signals on until the program and all that it started have ended, and tells how the program did. After
    /// [`block_signals`].
    ///
    /// # Errors
    /// Where the policy that was learnt cannot be written.
    pub fn supervise(self) -> Result<End, Error> {
        // The first process of a container ends with the program, and the kernel ends what is left.
        let is_first = rustix::process::getpid() == Pid::INIT;
        self.supervise_until(|| (), || is_first)
    }

    /// The same; calls `ended` when the program has ended, and waits for what it left behind no longer than until
    /// `enough`, which is asked every now and then.
    ///
    /// # Errors
    /// As of [`Guarded::supervise`].
    pub fn supervise_until(self, ended: impl FnOnce(), enough: impl Fn() -> bool) -> Result<End, Error> {
        let mut end = None;
        while end.is_none() {
            // SAFETY: a `siginfo_t` consists of integers and pointers, for which all-zero is a valid value.
            let mut information: libc::siginfo_t = unsafe { std::mem::zeroed() };
            // SAFETY: the set is a static, and the C library writes one `siginfo_t` to `information`, which
            // outlives the call.
            let signal = unsafe { libc::sigwaitinfo(&raw const SET.0, &raw mut information) };
            if signal == libc::SIGCHLD {
                end = self.reap();
            } else if signal > 0
                && information.si_code <= 0
                && let Some(signal) = Signal::from_named_raw(signal)
            {
                // Sent by a process, not by the terminal, which signals the whole group.
                let _ = rustix::process::kill_process(self.process, signal);
            } else if signal == libc::SIGCONT {
                let _ = rustix::process::kill_process(self.process, Signal::CONT);
            }
        }
        ended();
        self.wait_for_the_rest(enough);
        if let Some(learning) = self.learning {
            learning.finish(&self.state.recorder)?;
        }
        Ok(end.unwrap_or(End::Exited(0)))
    }

    /// Waits for processes that have ended or stopped.
    fn reap(&self) -> Option<End> {
        let mut end = None;
        let options = WaitOptions::NOHANG | WaitOptions::UNTRACED;
        while let Ok(Some((process, status))) = waitpid(None, options) {
            if process != self.process {
                continue;
            }
            if let Some(code) = status.exit_status() {
                end = Some(End::Exited(code));
            } else if let Some(signal) = status.terminating_signal() {
                end = Some(End::Killed(signal));
            } else if status.stopped() {
                let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::STOP);
            }
        }
        end
    }

    /// The program may have left others behind, which need the monitor still.
    fn wait_for_the_rest(&self, enough: impl Fn() -> bool) {
        // From here on signals end the monitor.
        // SAFETY: the set is a static that was initialised, and the null pointer asks for no old mask.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const SET.0, std::ptr::null_mut()) };
        while !enough() && !over(&self.state) {
            while matches!(waitpid(None::<Pid>, WaitOptions::NOHANG), Ok(Some(_))) {}
        }
    }
}

/// Whether nobody is guarded any more; waits a little for that.
fn over(state: &State) -> bool {
    let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    let mut waited = [PollFd::new(&state.listener, PollFlags::empty())];
    match poll(&mut waited, Some(&pause)) {
        Ok(0) | Err(Errno::INTR) => false,
        Ok(_) => true,
        // Short of memory: what runs still needs the monitor.
        Err(_) => {
            std::thread::sleep(SHORTAGE_PAUSE);
            false
        }
    }
}
