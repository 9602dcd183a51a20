//! Who is asking: main, a forked child of main, or a domain?
//!
//! Handles live in memory, and memory is copied by fork(2). A handle that is used in a forked child must notice, and
//! asking the kernel for the process id costs 90 ns each time. So a page that the kernel wipes in every child
//! (MADV_WIPEONFORK in madvise(2), Linux 4.14) holds a number that differs between generations: a read tells.
//!
//! Process-wide state, because fork(2) is: this file is where it lives.

use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use orrery_sys::PAGE;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// The wiped page; null until it is first needed.
static PAGE_OF_OURS: AtomicPtr<AtomicU64> = AtomicPtr::new(core::ptr::null_mut());
/// Whether this process is a domain.
static INSIDE: AtomicBool = AtomicBool::new(false);

/// The process that made something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Creator(u64);

impl Creator {
    /// The calling process.
    #[inline]
    pub fn here() -> Self {
        Self(generation())
    }

    /// Whether the calling process is the one that was meant. Async-signal-safe.
    #[inline]
    pub fn is_here(self) -> bool {
        self.0 == generation()
    }

    /// A number that no other living process among the caller's ancestors and descendants has; never 0.
    #[inline]
    pub fn number(self) -> u64 {
        self.0
    }
}

/// Whether the calling process is a domain or a child of one.
pub fn is_inside() -> bool {
    INSIDE.load(Ordering::Relaxed)
}

/// Says that the calling process is a domain. Async-signal-safe.
pub(crate) fn enter() {
    INSIDE.store(true, Ordering::Relaxed);
}

/// A number that is this process' own among its ancestors.
#[inline]
fn generation() -> u64 {
    let mut page = PAGE_OF_OURS.load(Ordering::Acquire);
    if page.is_null() {
        page = make_page();
        if page.is_null() {
            return pid();
        }
    }
    // SAFETY: the page is never unmapped.
    let word = unsafe { &*page };
    match word.load(Ordering::Relaxed) {
        // Fresh, or wiped by a fork.
        0 => note(word),
        own => own,
    }
}

#[cold]
fn note(word: &AtomicU64) -> u64 {
    let own = pid();
    word.store(own, Ordering::Relaxed);
    own
}

/// The process id. A child that gets the number of a dead ancestor cannot hold that ancestor's handles and see it.
fn pid() -> u64 {
    u64::from(rustix::process::getpid().as_raw_pid().unsigned_abs())
}

#[cold]
fn make_page() -> *mut AtomicU64 {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping takes nothing from anybody.
    let Ok(page) =
        (unsafe { rustix::mm::mmap_anonymous(core::ptr::null_mut(), PAGE, protection, MapFlags::PRIVATE) })
    else {
        return core::ptr::null_mut();
    };
    let drop = || {
        // SAFETY: our own fresh page, not published.
        let _ = unsafe { rustix::mm::munmap(page, PAGE) };
    };
    // SAFETY: our own fresh page.
    if unsafe { rustix::mm::madvise(page, PAGE, Advice::LinuxWipeOnFork) }.is_err() {
        // Without the advice a fork would go unnoticed; `generation` asks the kernel each time then.
        drop();
        return core::ptr::null_mut();
    }
    let made = page.cast::<AtomicU64>();
    match PAGE_OF_OURS.compare_exchange(core::ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => made,
        Err(other) => {
            drop();
            other
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_is_somebody_else() {
        let creator = Creator::here();
        assert!(creator.is_here() && Creator::here() == creator);
        // SAFETY: the child makes system calls only.
        match unsafe { libc::fork() } {
            0 => {
                let other = !creator.is_here() && Creator::here().is_here();
                // SAFETY: ends the child without running anything else.
                unsafe { libc::_exit(i32::from(!other)) }
            }
            pid => {
                let mut status = 0;
                // SAFETY: waits for our child.
                assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
                assert_eq!(status, 0);
            }
        }
        assert!(creator.is_here());
    }
}
