//! The state of a run that signal handlers and interposed functions use: whether one is under way, whose it is, and how
//! it ends.
//!
//! What ends a closure (its return, a signal, a limit, another thread) first claims the ending, so that there is one;
//! then the owner's thread crosses over to the engine. Everything here is async-signal-safe.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use orrery_sys::signals::{self, Mask};
use syscalls::{Sysno, syscall};

use crate::arch::{self, Crossing};
use crate::lazy_free::LazyFree;

/// The signal between the engine and the thread that runs a closure: a real-time signal that C libraries leave alone.
pub const CONTROL_SIGNAL: i32 = 60;

static STATE: AtomicPtr<RunState> = AtomicPtr::new(std::ptr::null_mut());

/// How a closure ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Returned,
    Panicked,
    Exited(i32),
    Signaled { signal: i32, address: usize },
    TimedOut,
    MemoryLimit,
    Abandoned(u64),
}

/// What the engine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Phase {
    /// It waits for its owner.
    Idle,
    /// A closure runs on the program's stack.
    Running,
    /// It works on its own stack.
    Busy,
}

/// What a thread is to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// It runs the closure.
    Owner,
    /// It was started by a closure that has ended.
    Doomed,
    /// It has no part in a run.
    Bystander,
}

/// The state of the process' runs. It is in the arena.
pub(crate) struct RunState {
    owner_process: i32,
    owner_thread: i32,
    phase: AtomicU32,
    /// 1 once an ending was claimed.
    claimed: AtomicU32,
    ending: UnsafeCell<Ending>,
    /// The engine's crossing, through which the owner's thread leaves the closure; null before [`publish`].
    crossing: AtomicPtr<Crossing>,
    pub(crate) lazy_free: LazyFree,
}

// SAFETY: `ending` is written by the thread that claimed it, and by the owner while no closure runs; the owner reads it
// after it learned of the claim. The rest is atomic or constant.
unsafe impl Sync for RunState {}

impl RunState {
    /// Returns the state before the first run, of which the calling thread is the owner.
    pub(crate) fn new() -> Self {
        Self {
            owner_process: rustix::process::getpid().as_raw_pid(),
            owner_thread: rustix::thread::gettid().as_raw_pid(),
            phase: AtomicU32::new(Phase::Idle as u32),
            claimed: AtomicU32::new(0),
            ending: UnsafeCell::new(Ending::Returned),
            crossing: AtomicPtr::new(std::ptr::null_mut()),
            lazy_free: LazyFree::new(),
        }
    }

    pub(crate) fn owner_process(&self) -> i32 {
        self.owner_process
    }

    pub(crate) fn owner_thread(&self) -> i32 {
        self.owner_thread
    }

    pub(crate) fn is_owner(&self) -> bool {
        rustix::thread::gettid().as_raw_pid() == self.owner_thread
    }

    pub(crate) fn is_in(&self, phase: Phase) -> bool {
        self.phase.load(Ordering::Acquire) == phase as u32
    }

    pub(crate) fn enter(&self, phase: Phase) {
        self.phase.store(phase as u32, Ordering::Release);
    }

    /// Returns how the closure ended. For the owner, while no closure runs.
    pub(crate) fn ending(&self) -> Ending {
        // SAFETY: the owner reads, and nobody claims an ending outside of phase `Running`.
        unsafe { *self.ending.get() }
    }

    /// Sets how the closure ended. For the owner, while no closure runs.
    pub(crate) fn set_ending(&self, ending: Ending) {
        // SAFETY: as in `ending`.
        unsafe { *self.ending.get() = ending };
    }

    /// Prepares for the next closure: none has ended, and one that returns has returned.
    pub(crate) fn reset(&self) {
        self.set_ending(Ending::Returned);
        self.claimed.store(0, Ordering::Release);
    }

    /// Makes `ending` the ending, unless there is one.
    fn claim(&self, ending: Ending) {
        if self.claimed.swap(1, Ordering::AcqRel) == 0 {
            // SAFETY: the claiming thread is alone in writing, and the owner reads after it learned of the claim.
            unsafe { *self.ending.get() = ending };
        }
    }

    fn cross_to_end(&self) -> ! {
        signals::block_all();
        // SAFETY: the phase says that the crossing's body runs, and this is its thread.
        unsafe { arch::finish(self.crossing.load(Ordering::Acquire)) }
    }
}

/// Makes `state` the one that handlers find, with the crossing by which its closures end.
pub(crate) fn publish(state: &'static RunState, crossing: *mut Crossing) {
    state.crossing.store(crossing, Ordering::Release);
    STATE.store(std::ptr::from_ref(state).cast_mut(), Ordering::Release);
}

/// Returns the state, if it was published in this process: a forked child has none.
fn current() -> Option<&'static RunState> {
    // SAFETY: once set, it points into the arena, to a state that is never freed.
    let state = unsafe { STATE.load(Ordering::Acquire).as_ref() }?;
    (state.owner_process == rustix::process::getpid().as_raw_pid()).then_some(state)
}

/// Returns what the calling thread is.
pub(crate) fn role() -> Role {
    match current() {
        Some(state) if state.is_owner() => Role::Owner,
        Some(state) if state.is_in(Phase::Busy) => Role::Doomed,
        _ => Role::Bystander,
    }
}

/// Ends the running closure, if one runs in this process. It does not return then: on the owner's thread the closure
/// ends, and another thread ends with it. It returns if nothing runs.
pub(crate) fn end_from_here(ending: Ending) {
    let Some(state) = current().filter(|state| state.is_in(Phase::Running)) else {
        return;
    };
    state.claim(ending);
    if state.is_owner() {
        state.cross_to_end();
    }
    let _ = signals::send_to_thread(state.owner_process, state.owner_thread, CONTROL_SIGNAL);
    wait_for_the_end();
}

/// On the owner's thread, ends the closure if another thread claimed an ending.
pub(crate) fn end_as_asked() {
    if let Some(state) = current()
        && state.is_in(Phase::Running)
        && state.claimed.load(Ordering::Acquire) == 1
    {
        state.cross_to_end();
    }
}

/// Notes that a closure marked memory as lazily freed.
pub(crate) fn note_lazy_free(start: usize, length: usize) {
    if let Some(state) = current().filter(|state| state.is_in(Phase::Running)) {
        state.lazy_free.note(start, length);
    }
}

/// Notes that the closure panicked; it is about to return.
pub(crate) fn note_panic() {
    if let Some(state) = current() {
        state.claim(Ending::Panicked);
    }
}

/// Waits for the end that the owner's thread brings.
fn wait_for_the_end() -> ! {
    // Only the signal that ends this thread may wake it.
    signals::set_mask(Mask::MAX & !signals::mask_of(&[signals::INTERNAL]));
    loop {
        // SAFETY: pause takes nothing.
        let _ = unsafe { syscall!(Sysno::pause) };
    }
}
