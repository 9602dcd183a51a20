//! Ending a process as another one ended.

/// Kills this process by `signal`, without a core file, as if its default action had been taken; exits with status
/// `128 + signal`, as a shell would report it, where the signal does not kill.
pub fn die_by_signal(signal: i32) -> ! {
    // SAFETY: plain system calls; every pointer is to a live local that the call only reads or fills.
    unsafe {
        let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core);
        libc::signal(signal, libc::SIG_DFL);
        let mut set = std::mem::MaybeUninit::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal);
        libc::sigprocmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut());
        libc::kill(libc::getpid(), signal);
        libc::_exit(128_i32.wrapping_add(signal));
    }
}
