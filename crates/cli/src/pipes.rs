//! SIGPIPE, as it was before Rust's start-up code ignored it: programs that are started inherit it.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static IGNORED: AtomicBool = AtomicBool::new(false);

/// Runs before `main`, and before the start-up code of Rust.
#[used]
#[unsafe(link_section = ".init_array")]
static REMEMBER: extern "C" fn() = remember;

extern "C" fn remember() {
    // SAFETY: asks for an action; the structure is large enough, and only its handler is looked at.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action) == 0 {
            IGNORED.store(action.sa_sigaction == libc::SIG_IGN, Relaxed);
        }
    }
}

/// Puts it back, for a program that is about to be started.
pub(crate) fn restore() {
    let action = if IGNORED.load(Relaxed) { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: no handler of ours is involved.
    unsafe { libc::signal(libc::SIGPIPE, action) };
}
