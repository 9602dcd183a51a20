//! The engine: one per process, in the arena, out of reach of what it rolls back.
//!
//! It works on a stack of its own with signals blocked. Its phases are those of [`crate::run_state`], which signal handlers
//! use; when a closure has ended, the owner's thread crosses over to [`end_run`].
//!
//! The variables of the process say where the arena is, where the engine is, and whose: the C interface has no handle.

mod owner;
mod setup;

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use orrery_memory::space::{Config, Statistics};
use orrery_memory::{Arena, PageRange};
use orrery_sys::signals::{self, Mask};

pub use self::owner::EXIT_BROKEN;
use self::owner::{Inner, Snapshot, Sources};
pub(crate) use self::setup::set_up;
use crate::arch::{self, AGAIN, Crossing};
use crate::error::{Error, Result};
use crate::rseq_areas::RseqAreas;
use crate::run_state::{CONTROL_SIGNAL, Ending, Phase, RunState};
use crate::safe_point::{self, SafePointState};
use crate::undo::attributes::Status;
use crate::undo::children::Children;

static ARENA: AtomicPtr<Arena> = AtomicPtr::new(std::ptr::null_mut());
static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(std::ptr::null_mut());
/// Who makes or made the engine: its process in the upper half, its thread in the lower.
static CLAIM: AtomicU64 = AtomicU64::new(0);

const STACK: usize = 256 << 10;
const ALTERNATE_STACK: usize = 64 << 10;

/// How often a closure runs, and from when on limits apply to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunMode {
    /// Once, limited from the beginning.
    Once,
    /// Until [`stop_repeating`] was called or something cannot be undone, limited from the beginning of each round.
    Repeat,
    /// Likewise, limited in each round from [`apply_limits`] on.
    Serve,
}

/// What a caller wants of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    /// The limit of time in nanoseconds.
    pub(crate) time: Option<u64>,
    /// Bytes of private writable memory on top of what there is.
    pub(crate) memory: Option<u64>,
}

pub(crate) struct Engine {
    arena: &'static Arena,
    run: RunState,
    /// How the round before this one ended.
    last: UnsafeCell<Option<Ending>>,
    safe_point: SafePointState,
    rseq_areas: RseqAreas,
    inner: UnsafeCell<Inner>,
}

// SAFETY: `inner` and `last` are used by the owner's thread alone; the rest is shared safely.
unsafe impl Sync for Engine {}

/// Returns the process' arena.
pub(crate) fn arena() -> Result<&'static Arena> {
    let known = ARENA.load(Ordering::Acquire);
    // SAFETY: once set, it points to the arena, which is there for good.
    if let Some(arena) = unsafe { known.as_ref() } {
        return Ok(arena);
    }
    let fresh = Arena::reserve()?;
    let pointer = std::ptr::from_ref(fresh).cast_mut();
    match ARENA.compare_exchange(std::ptr::null_mut(), pointer, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(fresh),
        // Another thread was faster; ours is address space that nobody uses.
        // SAFETY: once set, it points to the arena, which is never unmapped.
        Err(other) => Ok(unsafe { &*other }),
    }
}

/// The engine of this process, if it was set up here: a forked child has none.
fn current() -> Option<&'static Engine> {
    // SAFETY: once set, it points to an engine, which is there for good.
    let engine = unsafe { ENGINE.load(Ordering::Acquire).as_ref() }?;
    (engine.run.owner_process() == rustix::process::getpid().as_raw_pid()).then_some(engine)
}

impl Engine {
    /// The engine, for its owner, between runs.
    pub(crate) fn for_owner(&'static self) -> Result<&'static Self> {
        let caller = rustix::process::getpid().as_raw_pid();
        if caller != self.run.owner_process() {
            return Err(Error::OtherProcess { owner: self.run.owner_process(), caller });
        }
        let caller = rustix::thread::gettid().as_raw_pid();
        if caller != self.run.owner_thread() {
            return Err(Error::WrongThread { owner: self.run.owner_thread(), caller });
        }
        if !self.run.is_in(Phase::Idle) {
            return Err(Error::Nested);
        }
        Ok(self)
    }

    /// Returns the owner's part.
    ///
    /// # Safety
    /// The calling thread is the owner's, and uses no other reference to it while it uses this one. A handler that
    /// interrupts it crosses over to the engine for good, or leaves the inner part alone.
    #[expect(clippy::mut_from_ref, reason = "the caller's promise")]
    unsafe fn inner(&self) -> &mut Inner {
        debug_assert!(self.run.is_owner());
        // SAFETY: the caller's promise.
        unsafe { &mut *self.inner.get() }
    }

    /// Runs `body` with `argument` and undoes what it did, once or again and again.
    pub(crate) fn run(
        &'static self,
        body: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
        limits: Limits,
        mode: RunMode,
    ) -> Result<Ending> {
        self.for_owner()?;
        if signals::alternate_stack().flags & libc::SS_ONSTACK != 0 {
            return Err(Error::SignalHandler);
        }
        // SAFETY: this is the owner's thread, and holds no other reference.
        let inner = unsafe { self.inner() };
        inner.limits = limits;
        inner.repeats = mode != RunMode::Once;
        inner.limits_at_once = mode != RunMode::Serve;
        inner.error = None;
        inner.crossing.begin = begin_run;
        inner.crossing.body = body;
        inner.crossing.argument = argument;
        inner.crossing.end = end_run;
        self.run.reset();
        // SAFETY: this is the owner's thread, and no closure runs.
        unsafe { *self.last.get() = None };
        let crossing = &raw mut inner.crossing;
        // SAFETY: the crossing is in the arena, which restoring leaves alone, and its functions abort rather than
        // unwind.
        unsafe { arch::run_crossing(crossing) };
        // The run is over, or never began: memory is that of its beginning, the arena's is that of now.
        // SAFETY: this is the owner's thread, and holds no other reference.
        match unsafe { self.inner() }.error {
            Some(error) => Err(error),
            None => Ok(self.run.ending()),
        }
    }

    /// Leaves descriptor `fd` alone.
    pub(crate) fn exempt_descriptor(&'static self, fd: i32) -> Result<()> {
        // SAFETY: this is the owner's thread, and holds no other reference.
        unsafe { self.for_owner()?.inner() }.sources.keepers.exempt(fd)
    }

    /// Lets go of the run's copy of the file table.
    pub(crate) fn release_files(&'static self) -> Result<()> {
        // SAFETY: this is the owner's thread, and holds no other reference.
        let Inner { process, sources, .. } = unsafe { self.for_owner()?.inner() };
        process.descriptors.clear(&mut sources.keepers);
        Ok(())
    }

    /// Leaves memory alone; `stack` is an address on the caller's stack.
    pub(crate) fn keep(&'static self, range: PageRange, stack: usize) -> Result<()> {
        // SAFETY: this is the owner's thread, and holds no other reference.
        Ok(unsafe { self.for_owner()?.inner() }.space.exclude(range, stack)?)
    }

    /// Returns what the space holds, and what the last run's restore did.
    pub(crate) fn statistics(&'static self) -> Result<(Statistics, orrery_memory::space::Restored)> {
        // SAFETY: this is the owner's thread, and holds no other reference.
        let inner = unsafe { self.for_owner()?.inner() };
        Ok((inner.space.statistics(), inner.last_restore))
    }

    /// The tracker's name, and whether the layout is watched.
    pub(crate) fn mechanisms(&'static self) -> Result<(&'static str, bool)> {
        // SAFETY: this is the owner's thread, and holds no other reference.
        let inner = unsafe { self.for_owner()?.inner() };
        Ok((inner.space.tracker_name(), inner.space.watches_layout()))
    }

    /// Prepares a snapshot of the C interface: its name is stored in `name` before memory is captured, because the
    /// caller's variable that receives it is part of that memory. Signals are blocked; `mask` was the mask before.
    ///
    /// # Safety
    /// `name` is valid for reads and writes until the snapshot is taken.
    pub(crate) unsafe fn prepare_snapshot(
        &'static self,
        name: *mut MaybeUninit<u64>,
        mask: Mask,
    ) -> Result<*mut Crossing> {
        // SAFETY: this is the owner's thread, and holds no other reference.
        let inner = unsafe { self.for_owner()?.inner() };
        if signals::alternate_stack().flags & libc::SS_ONSTACK != 0 {
            return Err(Error::SignalHandler);
        }
        let no_room =
            || orrery_memory::Error::Memory { bytes: size_of::<Snapshot>(), errno: rustix::io::Errno::NOMEM };
        let place = match inner.snapshots.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                inner.snapshots.try_reserve(1).map_err(|_| no_room())?;
                inner.snapshots.push(None);
                inner.snapshots.len() - 1
            }
        };
        let low = u32::try_from(place).map_err(|_| no_room())?;
        inner.serial = inner.serial.checked_add(1).unwrap_or(1);
        inner.wanted = place;
        inner.error = None;
        inner.crossing.begin = begin_snapshot;
        inner.crossing.mask = mask;
        // SAFETY: the caller's promise.
        unsafe {
            inner.name = (name, name.read());
            name.write(MaybeUninit::new(u64::from(inner.serial) << 32 | u64::from(low)));
        }
        Ok(&raw mut inner.crossing)
    }

    /// Goes back to snapshot `id`, whose `snapshot_crossing` returns `value`. It returns only if that cannot be.
    /// Signals are blocked.
    pub(crate) fn resume(&'static self, id: u64, value: i32) -> Error {
        let inner = match self.for_owner() {
            // SAFETY: this is the owner's thread, and holds no other reference.
            Ok(engine) => unsafe { engine.inner() },
            Err(error) => return error,
        };
        let Some(place) = inner.place_of(id) else {
            return Error::NoSnapshot { id };
        };
        inner.wanted = place;
        inner.value = value;
        inner.error = None;
        inner.crossing.end = end_resume;
        let crossing = &raw mut inner.crossing;
        // SAFETY: `end_resume` makes the stack pointer that of the snapshot, which was taken on this thread.
        unsafe { arch::finish(crossing) }
    }

    /// Forgets snapshot `id`.
    pub(crate) fn discard(&'static self, id: u64) -> Result<()> {
        // SAFETY: this is the owner's thread, and holds no other reference.
        let inner = unsafe { self.for_owner()?.inner() };
        let place = inner.place_of(id).ok_or(Error::NoSnapshot { id })?;
        let mut snapshot = inner.snapshots[place].take().ok_or(Error::NoSnapshot { id })?;
        snapshot.process.clear(&mut inner.sources);
        Ok(inner.space.discard(snapshot.memory)?)
    }
}

/// Returns how the closure ended when it ran last; for a closure that repeats.
pub(crate) fn last_ending() -> Option<Ending> {
    // SAFETY: written by the owner's thread at the end of a run, and asked for by the closure on the same thread.
    current().and_then(|engine| unsafe { *engine.last.get() })
}

/// Returns whether the calling thread's process may be rolled back to a state before now: a closure runs, or there are
/// snapshots.
pub fn may_roll_back() -> bool {
    current().filter(|engine| engine.run.is_owner()).is_some_and(|engine| {
        // SAFETY: this is the owner's thread, and holds no other reference.
        engine.run.is_in(Phase::Running) || unsafe { engine.inner() }.snapshots.iter().any(Option::is_some)
    })
}

/// The running closure is not to run again.
pub(crate) fn stop_repeating() {
    if let Some(engine) = current().filter(|engine| engine.run.is_owner()) {
        // SAFETY: this is the owner's thread, and holds no other reference.
        unsafe { engine.inner() }.repeats = false;
    }
}

/// From now on the limits apply to the running closure.
pub(crate) fn apply_limits() {
    if let Some(engine) = current().filter(|engine| engine.run.is_owner() && engine.run.is_in(Phase::Running))
    {
        // SAFETY: this is the owner's thread, and holds no other reference.
        let inner = unsafe { engine.inner() };
        inner.limit_memory();
        inner.arm();
    }
}

/// Returns what `/proc/self/status` says of the engine's thread now: [`Status::UNKNOWN`] where there is no engine, or the
/// caller is not its thread.
pub fn status() -> Status {
    of_owner(|sources| sources.files.status())
}

/// Returns what it said in the last rollback, when the threads and children of the closure had ended: what the rollback
/// itself restored is in it as it was found, and all else is as it is since.
pub fn last_status() -> Status {
    of_owner(|sources| sources.status)
}

fn of_owner(read: impl FnOnce(&Sources) -> Status) -> Status {
    current().filter(|engine| engine.run.is_owner()).map_or(Status::UNKNOWN, |engine| {
        // SAFETY: this is the owner's thread, and holds no other reference.
        read(&unsafe { engine.inner() }.sources)
    })
}

/// Returns the engine with default settings, made if need be.
pub(crate) fn set_up_default() -> Result<&'static Engine> {
    set_up(Config::default(), Children::default())
}

/// The engine that may have snapshot `id`, if one was set up.
pub(crate) fn existing(id: u64) -> Result<&'static Engine> {
    // SAFETY: as in `current`.
    match unsafe { ENGINE.load(Ordering::Acquire).as_ref() } {
        Some(engine) => engine.for_owner(),
        None => Err(Error::NoSnapshot { id }),
    }
}

/// Returns what the last operation of the C interface could not do.
pub(crate) fn last_error() -> Option<Error> {
    // SAFETY: this is the owner's thread, and holds no other reference.
    current().filter(|engine| engine.run.is_owner()).and_then(|engine| unsafe { engine.inner() }.error)
}

/// The engine behind a crossing that is under way.
fn engine_at_work() -> &'static Engine {
    // SAFETY: crossings are made by an engine, so there is one.
    unsafe { &*ENGINE.load(Ordering::Acquire) }
}

/// Begins a run, on the engine's stack.
unsafe extern "C" fn begin_run(_: *mut Crossing) -> i32 {
    let engine = engine_at_work();
    let mask = signals::block_all();
    engine.run.enter(Phase::Busy);
    // SAFETY: this is the owner's thread, and holds no other reference.
    let inner = unsafe { engine.inner() };
    match inner.begin_run(engine, mask) {
        Ok(()) => {
            engine.run.enter(Phase::Running);
            if inner.limits_at_once {
                inner.arm();
            }
            inner.crossing.mask = mask & !signals::mask_of(&[CONTROL_SIGNAL]);
            0
        }
        Err(error) => {
            inner.error = Some(error);
            safe_point::release();
            engine.run.enter(Phase::Idle);
            inner.crossing.mask = mask;
            1
        }
    }
}

/// Ends a run, on the engine's stack: everything is restored to what [`begin_run`] saw, or, if the closure repeats, to
/// what the closure saw.
unsafe extern "C" fn end_run(_: *mut Crossing) -> i32 {
    let engine = engine_at_work();
    signals::block_all();
    engine.run.enter(Phase::Busy);
    // SAFETY: this is the owner's thread, and holds no other reference.
    let inner = unsafe { engine.inner() };
    inner.disarm();
    if inner.hit_memory_limit(engine.run.ending()) {
        engine.run.set_ending(Ending::MemoryLimit);
    }
    inner.error = inner.put_back(engine, None).map(Error::NotUndone);
    if inner.repeats && inner.error.is_none() {
        // SAFETY: the closure, which reads it, does not run.
        unsafe { *engine.last.get() = Some(engine.run.ending()) };
        engine.run.reset();
        inner.limit_memory_at_once();
        engine.run.enter(Phase::Running);
        if inner.limits_at_once {
            inner.arm();
        }
        inner.crossing.mask = inner.process.mask & !signals::mask_of(&[CONTROL_SIGNAL]);
        return AGAIN;
    }
    safe_point::release();
    inner.crossing.mask = inner.process.mask;
    engine.run.enter(Phase::Idle);
    0
}

/// Takes a snapshot of the C interface, on the engine's stack.
unsafe extern "C" fn begin_snapshot(_: *mut Crossing) -> i32 {
    let engine = engine_at_work();
    engine.run.enter(Phase::Busy);
    // SAFETY: this is the owner's thread, and holds no other reference.
    let inner = unsafe { engine.inner() };
    inner.error = inner.take_snapshot(engine).err();
    if inner.error.is_some() {
        let (name, before) = inner.name;
        // SAFETY: the caller of `prepare_snapshot` waits for us.
        unsafe { name.write(before) };
    }
    engine.run.enter(Phase::Idle);
    if inner.error.is_some() { -1 } else { 0 }
}

/// Goes back to a snapshot, on the engine's stack.
unsafe extern "C" fn end_resume(_: *mut Crossing) -> i32 {
    let engine = engine_at_work();
    engine.run.enter(Phase::Busy);
    // SAFETY: this is the owner's thread, and holds no other reference.
    let inner = unsafe { engine.inner() };
    let place = inner.wanted;
    inner.error = inner.put_back(engine, Some(place)).map(Error::NotUndone);
    let (stack_pointer, mask) = inner.snapshots[place]
        .as_ref()
        .map_or((0, 0), |snapshot| (snapshot.stack_pointer, snapshot.process.mask));
    inner.crossing.stack_pointer = stack_pointer;
    inner.crossing.mask = mask;
    engine.run.enter(Phase::Idle);
    inner.value
}
