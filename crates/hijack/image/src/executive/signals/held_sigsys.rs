//! SIGSYS that the program has blocked: in which threads, and what was sent to them meanwhile.
//!
//! The kernel's masks never hold SIGSYS (see `sigmask`), so one that a process sends arrives at once. Where the thread
//! has blocked it, it is kept here until the thread unblocks it, and then sends it to itself.
//!
//! A thread is known by its ID. It has a place in a table while it has SIGSYS blocked; where all places that it may
//! have are taken, the signal is delivered as if it were not blocked. Programs with filters of their own are left
//! alone: what is blocked there is not known.

use core::sync::atomic::{
    AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use super::sigaction;
use crate::executive::abi::signal_frame::Info;
use crate::executive::abi::syscall::{
    SIGSYS, address, block_all_signals, block_signals, call, failed, set_mask,
};
use crate::executive::services::call::unusable;
use crate::nr;

/// Threads that have it blocked.
const PLACES: usize = 1024;
/// Where a thread may be, from the place that its ID says.
const PROBES: usize = 8;
/// Signals that are kept.
const SIGNALS: usize = 16;
/// `siginfo`.
const WORDS: usize = 16;
const FREE: u32 = 0;
/// The place of a signal that is being written or read.
const BUSY: u32 = u32::MAX;
/// A signal for any thread of the process.
const PROCESS: u32 = u32::MAX - 1;
/// `si_code` of a signal sent to one thread, by `tgkill`.
const SI_TKILL: i32 = -6;

struct Kept {
    /// For whom it is: a thread's ID, or one of those above.
    receiver: AtomicU32,
    info: [AtomicU64; WORDS],
}

static THREADS: [AtomicU32; PLACES] = [const { AtomicU32::new(FREE) }; PLACES];
/// How many places are taken.
pub(crate) static COUNT: AtomicU32 = AtomicU32::new(0);
static KEPT: [Kept; SIGNALS] =
    [const { Kept { receiver: AtomicU32::new(FREE), info: [const { AtomicU64::new(0) }; WORDS] } }; SIGNALS];

/// Whether some thread has it blocked.
pub(crate) fn is_blocked_somewhere() -> bool {
    COUNT.load(Relaxed) != 0
}

/// Whether the calling thread has it blocked.
pub(crate) fn is_blocked() -> bool {
    is_blocked_somewhere() && !unusable() && place_of(own_id()).is_some()
}

/// Has the calling thread block or unblock it. Who unblocks it is to [`release`] what was kept.
pub(crate) fn set_blocked(blocked: bool) {
    if unusable() || !(blocked || is_blocked_somewhere()) {
        return;
    }
    let thread = own_id();
    match (blocked, place_of(thread)) {
        (true, None) => take_place(thread),
        (false, Some(_)) => forget(thread),
        _ => {}
    }
}

/// The thread ends: another one may have its ID.
pub(crate) fn forget_this_thread() {
    if is_blocked_somewhere() && !unusable() {
        forget(own_id());
    }
}

/// The same, of a thread that shares the memory and is gone.
pub(crate) fn forget(thread: u32) {
    for place in places(thread) {
        if place.load(Relaxed) == thread && place.compare_exchange(thread, FREE, AcqRel, Relaxed).is_ok() {
            count(-1);
        }
    }
}

/// In a forked child: its one thread has it blocked, or not; what was sent to its parent is not pending.
pub(crate) fn begin_in_child(blocked: bool) {
    for place in &THREADS {
        // Most pages of it were never written to.
        if place.load(Relaxed) != FREE {
            place.store(FREE, Relaxed);
        }
    }
    COUNT.store(0, Relaxed);
    discard();
    set_blocked(blocked);
}

/// Keeps a signal that has arrived, where the calling thread has it blocked. As for any standard signal, one is kept;
/// where there is no room, none.
///
/// # Safety
/// The kernel has written the `siginfo`, for a signal that was sent.
pub(crate) unsafe fn keep(info: *const Info) -> bool {
    if !is_blocked() {
        return false;
    }
    // SAFETY: by the caller; it has so many words.
    let (code, words) = unsafe { ((*info).code, info.cast::<[u64; WORDS]>().read()) };
    let receiver = if code == SI_TKILL { own_id() } else { PROCESS };
    let is_there = |kept: &Kept| kept.receiver.load(Relaxed) == receiver;
    if KEPT.iter().any(is_there) {
        return true;
    }
    // A handler that leaves for good would leave the place as it is.
    let mask = block_signals();
    let free = |kept: &&Kept| kept.receiver.compare_exchange(FREE, BUSY, AcqRel, Relaxed).is_ok();
    if let Some(kept) = KEPT.iter().find(free) {
        for (place, word) in kept.info.iter().zip(words) {
            place.store(word, Relaxed);
        }
        kept.receiver.store(receiver, Release);
    }
    set_mask(mask);
    true
}

/// Whether a signal was kept that the calling thread would get.
pub(crate) fn is_pending() -> bool {
    let any = |kept: &Kept| kept.receiver.load(Relaxed) != FREE;
    if !KEPT.iter().any(any) || unusable() {
        return false;
    }
    let thread = own_id();
    KEPT.iter().any(|kept| [PROCESS, thread].contains(&kept.receiver.load(Relaxed)))
}

/// Forgets what was kept for the calling thread, or for any of the process, and returns whether there was something.
pub(crate) fn take_pending() -> bool {
    let thread = own_id();
    let take = |kept: &&Kept| {
        let receiver = kept.receiver.load(Relaxed);
        [PROCESS, thread].contains(&receiver)
            && kept.receiver.compare_exchange(receiver, FREE, AcqRel, Relaxed).is_ok()
    };
    KEPT.iter().filter(take).count() != 0
}

/// The calling thread gets at once what was kept for it.
pub(crate) fn release() {
    if is_pending() {
        send();
    }
}

/// The calling thread gets what was kept for it when the kernel puts another mask in force, until when all signals are
/// blocked. Gives the mask that was in force, where there is something.
///
/// No call may be dispatched before that.
pub(crate) fn release_with_next_mask() -> Option<u64> {
    if !is_pending() {
        return None;
    }
    let mask = block_all_signals();
    send();
    Some(mask)
}

/// Forgets all signals, as the kernel does with those that a program begins to ignore.
pub(crate) fn discard() {
    for kept in &KEPT {
        let receiver = kept.receiver.load(Relaxed);
        if receiver != FREE && receiver != BUSY {
            let _gone = kept.receiver.compare_exchange(receiver, FREE, AcqRel, Relaxed);
        }
    }
}

fn send() {
    let thread = own_id();
    for kept in &KEPT {
        let receiver = kept.receiver.load(Acquire);
        if ![PROCESS, thread].contains(&receiver)
            || kept.receiver.compare_exchange(receiver, BUSY, AcqRel, Relaxed).is_err()
        {
            continue;
        }
        let mut words = [0_u64; WORDS];
        for (word, place) in words.iter_mut().zip(&kept.info) {
            *word = place.load(Relaxed);
        }
        kept.receiver.store(FREE, Release);
        // SAFETY: a signal of this thread to itself, as it was sent; the kernel reads a `siginfo`.
        unsafe {
            let process = call(nr::getpid, [0; 6]).cast_unsigned();
            call(nr::rt_tgsigqueueinfo, [process, u64::from(thread), SIGSYS, address(&words), 0, 0]);
        }
        core::hint::black_box(&words);
    }
}

pub(crate) fn own_id() -> u32 {
    // SAFETY: the call takes no pointer.
    unsafe { call(nr::gettid, [0; 6]) as u32 }
}

fn places(thread: u32) -> impl Iterator<Item = &'static AtomicU32> {
    (0..PROBES).filter_map(move |probe| THREADS.get((thread as usize + probe) % PLACES))
}

fn place_of(thread: u32) -> Option<&'static AtomicU32> {
    places(thread).find(|place| place.load(Relaxed) == thread)
}

fn take_place(thread: u32) {
    for sweep in [false, true] {
        for place in places(thread) {
            let there = place.load(Relaxed);
            if sweep && there != FREE && is_gone(there) {
                forget(there);
            }
            if place.compare_exchange(FREE, thread, AcqRel, Relaxed).is_ok() {
                count(1);
                return;
            }
        }
    }
}

/// Whether no thread of the process has this ID any more.
fn is_gone(thread: u32) -> bool {
    // SAFETY: sends nothing.
    unsafe {
        let process = call(nr::getpid, [0; 6]).cast_unsigned();
        failed(call(nr::tgkill, [process, u64::from(thread), 0, 0, 0, 0]))
    }
}

fn count(change: i32) {
    let before = COUNT.fetch_add(change.cast_unsigned(), Relaxed);
    if before == 0 || before.wrapping_add_signed(change) == 0 {
        sigaction::blocked_somewhere_has_changed();
    }
}
