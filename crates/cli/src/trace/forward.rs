//! Forwards signals from `orrery trace` to the program.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::Relaxed};

/// The program. A signal handler has no other way to know it.
static PROGRAM: AtomicI32 = AtomicI32::new(0);

/// Whether somebody has interrupted since this was asked last.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// What is passed on when it was sent to us. What a terminal sends, it sends to the program as well.
const FORWARDED: [i32; 5] = [libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2, libc::SIGCONT];
const FROM_THE_TERMINAL: [i32; 2] = [libc::SIGINT, libc::SIGQUIT];

extern "C" fn forward(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    INTERRUPTED.store(true, Relaxed);
    // SAFETY: an SA_SIGINFO handler gets a valid siginfo; kill may be called in handlers.
    unsafe {
        // What the kernel sends comes from the terminal, and the program gets it by itself.
        if (*info).si_code <= 0 {
            libc::kill(PROGRAM.load(Relaxed), signal);
        }
    }
}

/// From now on this process outlives signals that mean the program, and passes on what was sent to it alone.
pub(super) fn to(program: i32) {
    PROGRAM.store(program, Relaxed);
    for signal in FORWARDED.into_iter().chain(FROM_THE_TERMINAL) {
        // SAFETY: the handler has the form that SA_SIGINFO asks for, and does only what handlers may do.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = forward as extern "C" fn(_, _, _) as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// Whether a signal has come since this was asked last: the user may want to know what the program does.
pub(super) fn was_interrupted() -> bool {
    INTERRUPTED.swap(false, Relaxed)
}

/// Dies of a signal, as the program did, without a core of our own.
pub(super) fn die_of(signal: i32) {
    // SAFETY: this process is about to end.
    unsafe {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        libc::signal(signal, libc::SIG_DFL);
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal);
        libc::sigprocmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        libc::raise(signal);
    }
}
