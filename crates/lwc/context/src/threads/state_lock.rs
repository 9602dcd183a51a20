//! Turns: the threads of a context share what it knows ([`State`]), one at a time.
//!
//! A thread releases it while it waits for another context ([`Held::away`]). So a turn is short, and no
//! context waits for a turn at another one's state.
//!
//! Process-wide state, because fork(2) and signal handlers are: this file is where it lives.

use std::cell::UnsafeCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use orrery_domain::forked::Creator;

use crate::error::{Error, Result};
use crate::shared::link::Message;
use crate::shared::program::ROOT;
use crate::state::State;
use crate::threads::fork_lock::{Lock, NamedLock};
use crate::threads::logical;
use crate::types::Arrival;

struct StateCell(UnsafeCell<Option<State>>);

// SAFETY: what is there is touched under `TURN` only.
unsafe impl Sync for StateCell {}

static STATE: StateCell = StateCell(UnsafeCell::new(None));
/// Whether anything is there: a program without contexts, or a rollback in it, is to notice nothing of this file.
static ANY: AtomicBool = AtomicBool::new(false);
static TURN: Lock = Lock::new();
/// Has one thread at a time ask other contexts for what comes over sockets: answers would be mixed up there. Taken
/// before `TURN`, and kept while the asker waits.
static ASKING: NamedLock = NamedLock::new();

/// What the calling context does for others, and where it was forked.
#[derive(Debug)]
pub(crate) struct Handlers {
    /// In a forked copy of the root: makes a program of it and of copies of the contexts.
    pub(crate) adopt_copies: fn(&mut State) -> Result<()>,
    /// Makes a copy of this context for a forked copy of the root. Returns in the copy when control enters it.
    pub(crate) copy_for_fork: fn(&mut Held) -> Option<Arrival>,
    /// Makes a copy of this context to go on from when it is killed. Returns in the copy when control enters it.
    pub(crate) checkpoint: fn(&mut Held, usize) -> Option<Arrival>,
    /// Answers what a peer asks for.
    pub(crate) answer: fn(&mut Held, usize, Message),
}

static HANDLERS: OnceLock<&'static Handlers> = OnceLock::new();

/// Returns the functions that were given when the process became a root; a context inherits them.
pub(crate) fn handlers() -> &'static Handlers {
    match HANDLERS.get() {
        Some(handlers) => handlers,
        None => unreachable!("they are set before there is a state"),
    }
}

/// The calling context's state, from now to the end of the call.
#[derive(Debug)]
pub(crate) struct Held {
    asking: bool,
}

impl std::ops::Deref for Held {
    type Target = State;

    fn deref(&self) -> &State {
        // SAFETY: a `Held` exists only while this thread has the turn, and mutable references come from a
        // mutably borrowed one alone.
        match unsafe { &*STATE.0.get() } {
            Some(state) => state,
            None => unreachable!("`hold` saw to it"),
        }
    }
}

impl std::ops::DerefMut for Held {
    fn deref_mut(&mut self) -> &mut State {
        // SAFETY: the lock is held, so no other thread refers to the state.
        match unsafe { &mut *STATE.0.get() } {
            Some(state) => state,
            None => unreachable!("`hold` saw to it"),
        }
    }
}

impl Held {
    /// Lets other threads have their turns during `wait`. `None` in a counterpart of this thread, in a new context,
    /// where the state is that of the new context, and `wait` is nobody's business.
    ///
    /// The thread that copies the process has the turn. So the landing is there before it is released, and until it is
    /// ours again: a thread that is copied meanwhile was parked, even where it had been called already, and was only
    /// waiting for its turn.
    ///
    /// What `wait` owns is lost there: it must not matter.
    #[inline(always)]
    pub(crate) fn away<T>(&mut self, wait: impl FnOnce() -> T) -> Option<T> {
        let logical_thread = self.logical_thread;
        let waited = logical::away(|| {
            TURN.release();
            let waited = wait();
            TURN.take();
            waited
        });
        if waited.is_none() {
            self.land();
        }
        self.logical_thread = logical_thread;
        waited
    }

    /// In a counterpart, which has nothing of what its original held.
    #[cold]
    fn land(&mut self) {
        TURN.take();
        logical::arrive();
        self.asking = false;
    }

    /// In a new context: the calling thread, which made it, has the turn there, too.
    pub(crate) fn keep(&self) {
        TURN.keep();
        ASKING.adopt();
    }
}

/// Returns whether no other thread of the program uses contexts, nor waits to. For whose turn it is.
#[inline(always)]
pub(crate) fn is_alone(state: &State) -> bool {
    *state.program.logical_threads().end() == 0 && !TURN.is_wanted()
}

/// Says whether who has the turn leaves the state alone for a moment, to wait. To keep the turn checkpoints giving it
/// back and taking it again; by way of this library nobody can copy the context meanwhile. For one that [`is_alone`].
#[inline(always)]
pub(crate) fn set_at_rest(at_rest: bool) {
    TURN.set_at_rest(at_rest);
}

impl Drop for Held {
    #[inline]
    fn drop(&mut self) {
        // While it is our turn, so that no copy of this thread releases what it does not have.
        if self.asking {
            ASKING.release();
        }
        TURN.release();
        logical::leave();
    }
}

/// The calling context's state, if it has any yet.
#[inline(always)]
pub(crate) fn hold() -> Result<Option<Held>> {
    take_turn(false)
}

/// The same, for asking another context for something that comes over a socket.
pub(crate) fn hold_to_ask() -> Result<Option<Held>> {
    take_turn(true)
}

#[inline(always)]
fn take_turn(asking: bool) -> Result<Option<Held>> {
    if !ANY.load(SeqCst) {
        return Ok(None);
    }
    if !logical::enter() {
        return Err(Error::Busy);
    }
    let (here, half_changed) = if asking { take_both() } else { take_in_this() };
    let held = Held { asking };
    // SAFETY: this thread has just taken the turn, so nobody else refers to the state, and `held` is not
    // dereferenced meanwhile.
    let state = unsafe { &mut *STATE.0.get() };
    match state {
        // Most are this: a thread that has been here before.
        Some(state)
            if !half_changed && state.creator == here && logical::is_known(here, state.logical_thread) =>
        {
            Ok(Some(held))
        }
        _ => identify_process(held, half_changed),
    }
}

/// Takes the turn: in which process, and whether what the state says is half changed.
#[inline(always)]
fn take_in_this() -> (Creator, bool) {
    let here = Creator::here();
    (here, TURN.take_in(here))
}

/// Takes `ASKING`, and the turn.
fn take_both() -> (Creator, bool) {
    let mut any_half_changed = false;
    loop {
        ASKING.take();
        let (here, half_changed) = take_in_this();
        any_half_changed |= half_changed;
        if ASKING.is_mine() {
            return (here, any_half_changed);
        }
        // Copied while it waited for its turn: the original is the one that asks.
        TURN.release();
    }
}

/// Whose the state is, where that is not as it was.
#[inline(never)]
fn identify_process(mut held: Held, half_changed: bool) -> Result<Option<Held>> {
    // SAFETY: this thread has the turn, as `held` shows, so nobody else refers to the state; `held` is not
    // dereferenced meanwhile.
    let state = unsafe { &mut *STATE.0.get() };
    if half_changed {
        // What another thread was changing when this process was forked is of no use here.
        std::mem::forget(state.take());
    }
    match state {
        None => Ok(None),
        Some(state) if !state.creator.is_here() => {
            if state.me != ROOT || state.rendezvous.is_none() {
                return Err(Error::OtherProcess);
            }
            // A copy of the root: it has copies of the contexts, from now on.
            (handlers().adopt_copies)(state)?;
            Ok(Some(held))
        }
        Some(state) => {
            let logical_thread = logical::own(state.program, state.me)?;
            held.logical_thread = logical_thread;
            Ok(Some(held))
        }
    }
}

/// In a counterpart, whose logical thread is known.
pub(crate) fn hold_as_counterpart() -> Option<Held> {
    TURN.take();
    logical::arrive();
    let mut held = Held { asking: false };
    // SAFETY: this thread has just taken the turn, so nobody else refers to the state mutably.
    unsafe { &*STATE.0.get() }.as_ref()?;
    let logical_thread = logical::own(held.program, held.me).ok()?;
    held.logical_thread = logical_thread;
    Some(held)
}

/// The same as [`hold`]; makes the process the root of a new program where it is no context yet.
pub(crate) fn hold_or_become_root(handlers: &'static Handlers) -> Result<Held> {
    match hold() {
        Ok(Some(held)) => return Ok(held),
        // A forked process may have contexts of its own; what it inherited is its parent's.
        Ok(None) | Err(Error::OtherProcess) => {}
        Err(error) => return Err(error),
    }
    let root = State::root()?;
    if !logical::enter() {
        return Err(Error::Busy);
    }
    TURN.take();
    let held = Held { asking: false };
    // SAFETY: this thread has just taken the turn, so nobody else refers to the state, and `held` is not
    // dereferenced meanwhile.
    let state = unsafe { &mut *STATE.0.get() };
    if state.as_ref().is_some_and(|state| state.creator.is_here()) {
        // Another thread was faster.
        drop(held);
        return hold()?.ok_or(Error::Busy);
    }
    // Dropping the parent's closes our copies of its descriptors.
    *state = Some(root);
    HANDLERS.get_or_init(|| handlers);
    orrery_rollback::after_rollback(after_rollback);
    ANY.store(true, SeqCst);
    logical::know(0);
    Ok(held)
}

/// After the context's memory was restored to what it was: what it received since, it has received. It has control, so
/// nothing is under way to it; but the links, which are shared, are further on than its own books.
fn after_rollback() {
    if let Ok(Some(mut state)) = hold() {
        state.set_looked(None);
        state.forget_callers();
        let logical_thread = state.logical_thread;
        for link in state.peers.iter_mut().flatten().filter_map(|peer| peer.link.as_mut()) {
            link.catch_up(logical_thread);
        }
    }
}

/// Lets other threads have their turns: the calling one, whose turn it is, ends.
pub(crate) fn release_state() {
    TURN.release();
}
