//! Which logical thread a thread is: the program's number for it, the same in all contexts.
//!
//! Thread-local state, because threads are: this file is where it lives, and so are the marks by which a thread is
//! found in a copy of its process ([`crate::threads::stop_threads`]).

use std::cell::Cell;
use std::ffi::c_void;
use std::mem::MaybeUninit;

use orrery_domain::forked::Creator;

use crate::arch;
use crate::error::{Error, Result};
use crate::shared::program::{MAX_THREADS, Program, own_thread};

thread_local! {
    /// The process for which it was found out, and the logical thread.
    static KNOWN: Cell<(u64, u32)> = const { Cell::new((0, 0)) };
    /// Whether the thread is in a call about contexts.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// Where the thread can be gone on with in a copy of the process, if it waits ([`away`]).
    static LANDING: Cell<usize> = const { Cell::new(0) };
    /// Whether the thread is a counterpart on its way to where it waits for control: see [`set_out`].
    static UNDER_WAY: Cell<bool> = const { Cell::new(false) };
}

/// The logical thread of the calling thread, which is in the context of a slot; a new one where it had none.
pub(crate) fn own(program: &Program, context_slot: u32) -> Result<u32> {
    let here = Creator::here().number();
    let (process, logical_thread) = KNOWN.get();
    if process == here {
        return Ok(logical_thread);
    }
    let thread = own_thread();
    let logical_thread = program
        .thread_with_tid(context_slot, thread)
        .or_else(|| program.add_thread(context_slot, thread))
        .ok_or(Error::TooManyThreads { most: MAX_THREADS })?;
    know(logical_thread);
    Ok(logical_thread)
}

/// Returns whether the calling thread is known to be that logical thread, in this process.
#[inline]
pub(crate) fn is_known(here: Creator, logical_thread: u32) -> bool {
    KNOWN.get() == (here.number(), logical_thread)
}

/// Returns which logical thread the thread was of which the calling one is a copy, if that was known.
pub(crate) fn inherited() -> Option<u32> {
    let (process, logical_thread) = KNOWN.get();
    (process != 0).then_some(logical_thread)
}

/// Notes which logical thread the calling thread is.
pub(crate) fn know(logical_thread: u32) {
    KNOWN.set((Creator::here().number(), logical_thread));
}

/// Begins a call about contexts; false where one is under way on this thread.
#[inline]
pub(crate) fn enter() -> bool {
    !INSIDE.replace(true)
}

/// Ends it.
#[inline]
pub(crate) fn leave() {
    INSIDE.set(false);
}

/// Notes whether a call is under way; gives what was noted.
pub(crate) fn set_inside(inside: bool) -> bool {
    INSIDE.replace(inside)
}

/// In a counterpart that has just been made: sets out for where it waits for control. Gives where that is.
///
/// Before it has come there ([`arrive`]), it may be copied in turn. A copy of it goes on as it does.
pub(crate) fn set_out() -> Course {
    let landing = LANDING.replace(0);
    if UNDER_WAY.replace(true) && landing == 0 {
        return Course::GoOn;
    }
    if landing == 0 { Course::Wait } else { Course::Land(landing) }
}

/// The calling counterpart, whose turn it is, has come to where it waits for control.
pub(crate) fn arrive() {
    UNDER_WAY.set(false);
}

/// What a counterpart does first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Course {
    /// Its original waited for control in a call, which is gone on with there ([`arch::land`]).
    Land(usize),
    /// Its original did something else: it waits for control, and then does that.
    Wait,
    /// Its original was a counterpart that had set out: it goes on with that.
    GoOn,
}

/// Waits, in a way that can be broken off in a copy of the process: there it is `None`, and the rest of `wait` does not
/// happen. So `wait` must own nothing whose loss matters, and hold no lock.
#[inline(always)]
pub(crate) fn away<W, T>(wait: W) -> Option<T>
where
    W: FnOnce() -> T,
{
    struct Errand<W, T> {
        wait: Option<W>,
        done: MaybeUninit<T>,
    }
    unsafe extern "C" fn run<W: FnOnce() -> T, T>(errand: *mut c_void) {
        // SAFETY: passed by `away`, which waits for us.
        let errand = unsafe { &mut *errand.cast::<Errand<W, T>>() };
        if let Some(wait) = errand.wait.take() {
            errand.done.write(wait());
        }
    }
    let mut errand = Errand { wait: Some(wait), done: MaybeUninit::uninit() };
    let errand_pointer = (&raw mut errand).cast::<c_void>();
    // SAFETY: `run` gets what it expects, and callers leave nothing behind that must be undone. The thread's own mark
    // stays where it is for as long as the thread.
    let landed = unsafe { arch::with_landing(run::<W, T>, errand_pointer, LANDING.with(Cell::as_ptr)) };
    LANDING.set(0);
    // SAFETY: `run` has returned, and so has written it.
    (landed == 0).then(|| unsafe { errand.done.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_return_what_they_found() {
        assert_eq!(away(|| vec![1, 2]), Some(vec![1, 2]));
        assert_eq!(set_out(), Course::Wait);
        arrive();
    }

    #[test]
    fn a_wait_can_be_broken_off() {
        let broken: Option<u32> = away(|| {
            let Course::Land(landing) = set_out() else { panic!("nowhere to land") };
            // SAFETY: it is that of the call that is under way.
            unsafe { arch::land(landing) }
        });
        assert_eq!(broken, None);
        // A copy of one that has set out goes on as it does; of one that has arrived, it does not.
        assert_eq!(set_out(), Course::GoOn);
        arrive();
        assert_eq!(set_out(), Course::Wait);
        arrive();
    }

    #[test]
    fn calls_do_not_nest() {
        assert!(enter() && !enter());
        leave();
        assert!(enter());
        leave();
    }
}
