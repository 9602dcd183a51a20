//! Signals that were sent but not delivered.
//!
//! A closure may block a signal and send it to itself; were it delivered when the old mask comes back, it would hit the
//! program. So what became pending meanwhile is dropped, unless another living process sent it: that is none of the
//! closure's doing and is sent again.

use orrery_sys::signals::Mask;
use rustix::process::Pid;
use syscalls::{Sysno, syscall};

/// The signals that were pending.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pending {
    before: Mask,
}

impl Pending {
    pub(crate) fn capture(&mut self) {
        self.before = pending();
    }

    /// Drops what became pending since.
    pub(crate) fn restore(&self) {
        let mut foreign: Mask = 0;
        loop {
            let fresh = pending() & !self.before;
            if fresh == 0 {
                break;
            }
            let Some((signal, sender)) = take(fresh) else {
                break;
            };
            let own = rustix::process::getpid();
            let alive =
                sender.is_some_and(|pid| pid != own && rustix::process::test_kill_process(pid).is_ok());
            if alive && signal != libc::SIGCHLD {
                foreign |= 1 << (signal - 1);
            }
        }
        if foreign == 0 {
            return;
        }
        let (process, thread) =
            (rustix::process::getpid().as_raw_pid(), rustix::thread::gettid().as_raw_pid());
        for signal in (1..=64).filter(|signal| foreign >> (signal - 1) & 1 == 1) {
            let _ = orrery_sys::signals::send_to_thread(process, thread, signal);
        }
    }
}

/// The signals that are pending for the process or this thread.
fn pending() -> Mask {
    let mut mask: Mask = 0;
    // SAFETY: the kernel writes one mask.
    let _ = unsafe { syscall!(Sysno::rt_sigpending, &raw mut mask, size_of::<Mask>()) };
    mask
}

/// Takes one signal of `mask` off the queue: its number, and the process that sent it if one did.
fn take(mask: Mask) -> Option<(i32, Option<Pid>)> {
    let mut info = [0_i32; 32];
    let at_once = [0_u64; 2];
    // SAFETY: the kernel reads a mask and a time and writes one `siginfo_t` of 128 bytes.
    let signal = unsafe {
        syscall!(
            Sysno::rt_sigtimedwait,
            &raw const mask,
            info.as_mut_ptr(),
            at_once.as_ptr(),
            size_of::<Mask>()
        )
    }
    .ok()?;
    // si_signo, si_errno, si_code, padding, then si_pid for signals that a process sent.
    let sent = matches!(info[2], libc::SI_USER | libc::SI_QUEUE | libc::SI_TKILL);
    Some((i32::try_from(signal).ok()?, Pid::from_raw(info[4].max(0)).filter(|_| sent)))
}
