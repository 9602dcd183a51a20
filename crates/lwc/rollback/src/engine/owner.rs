//! The owner's part of an engine: what is captured, and how it is restored.

use orrery_sys::rseq;
use std::mem::MaybeUninit;

use orrery_memory::space::{SnapshotId, Space};
use orrery_memory::{Arena, HeapVec, PAGE, PageRange};
use orrery_sys::signals::{self, AlternateStack, Mask};
use orrery_sys::timers::{self, PosixTimers, TimerId};

use super::{Engine, Limits};
use crate::arch::Crossing;
use crate::control;
use crate::error::{Error, Leftover, Result};
use crate::run_state::Ending;
use crate::undo::attributes::{self, Attributes, Files, Status};
use crate::undo::children::{Family, Nursery};
use crate::undo::descriptors::{Descriptors, Keepers};
use crate::undo::pending::Pending;
use crate::undo::signals::{Shown, Signals};
use crate::undo::threads::Threads;
use crate::undo::timers::Timers;
use crate::{hooks, interpose};

/// The state of the process beside its memory.
#[derive(Debug)]
pub(super) struct ProcessState {
    pub(super) mask: Mask,
    pub(super) pending: Pending,
    pub(super) signals: Signals,
    pub(super) timers: Timers,
    pub(super) attributes: Attributes,
    pub(super) family: Family,
    pub(super) descriptors: Descriptors,
}

impl ProcessState {
    pub(super) fn new(arena: &'static Arena) -> Self {
        Self {
            mask: 0,
            pending: Pending::default(),
            signals: Signals::NONE,
            timers: Timers::new(arena),
            attributes: Attributes::new(),
            family: Family::new(arena),
            descriptors: Descriptors::new(arena),
        }
    }

    pub(super) fn capture(&mut self, mask: Mask, sources: &mut Sources) -> Result<()> {
        self.mask = mask;
        self.pending.capture();
        let Sources { keepers, files, known, .. } = sources;
        let status = files.status();
        self.signals = Signals::now(known.signals.as_ref(), Shown::of(&status));
        known.signals = Some(self.signals);
        self.timers.capture(sources.timers.as_ref())?;
        self.attributes.capture(keepers, files, &mut known.limits, &status)?;
        self.descriptors.capture(&mut sources.keepers, self.attributes.directory())
    }

    /// Lets go of everything outside of the arena.
    pub(super) fn clear(&mut self, sources: &mut Sources) {
        self.descriptors.clear(&mut sources.keepers);
        self.attributes.clear(&mut sources.keepers);
    }
}

/// What was captured last, for any state. What is seen to be the same is not asked about again.
#[derive(Debug)]
pub(super) struct Known {
    signals: Option<Signals>,
    limits: attributes::Limits,
}

impl Known {
    /// Nothing was captured yet.
    pub(super) const NONE: Self = Self { signals: None, limits: attributes::Limits::UNKNOWN };
}

/// Where the state is found; one for all states.
#[derive(Debug)]
pub(super) struct Sources {
    pub(super) keepers: Keepers,
    pub(super) nursery: Nursery,
    pub(super) timers: Option<PosixTimers>,
    pub(super) files: Files,
    pub(super) known: Known,
    /// What the kernel showed of the thread in the last restore, when nobody else could change it any more.
    pub(super) status: Status,
}

/// A snapshot of the C interface. Its name holds its place (lower half) and its serial number (upper half).
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) serial: u32,
    pub(super) memory: SnapshotId,
    pub(super) stack_pointer: usize,
    pub(super) process: ProcessState,
}

/// What only the owner's thread touches.
pub(super) struct Inner {
    pub(super) crossing: Crossing,
    pub(super) space: Space,
    pub(super) threads: Threads,
    pub(super) sources: Sources,
    pub(super) process: ProcessState,
    pub(super) snapshots: HeapVec<Option<Snapshot>>,
    pub(super) alternate_stack: PageRange,
    pub(super) timer: Option<TimerId>,
    pub(super) limits: Limits,
    pub(super) data_limit: u64,
    /// Whether the body runs again when it ended, and the dispositions that it then finds.
    pub(super) repeats: bool,
    /// Whether limits apply from the beginning of a round, or from [`apply_limits`] on.
    pub(super) limits_at_once: bool,
    pub(super) running_signals: Signals,
    /// The serial number of the latest snapshot, from 1; no two have the same, so that a stale name is known as such.
    pub(super) serial: u32,
    /// Where the C caller's snapshot goes, or comes from.
    pub(super) wanted: usize,
    /// The C caller's variable for the name, and what was in it before.
    pub(super) name: (*mut MaybeUninit<u64>, MaybeUninit<u64>),
    pub(super) value: i32,
    pub(super) error: Option<Error>,
    pub(super) last_restore: orrery_memory::space::Restored,
}

impl Inner {
    pub(super) fn begin_run(&mut self, engine: &Engine, mask: Mask) -> Result<()> {
        self.threads.capture()?;
        interpose::install_once();
        self.note_rseq(engine)?;
        self.process.capture(mask, &mut self.sources)?;
        // SAFETY: we are on the engine's stack, signals are blocked, and other threads are parked.
        unsafe { self.space.capture()? };
        // Last, since the sleepers that hold files and memory are children that are to stay.
        self.process.family.capture(&self.sources.nursery)?;
        // From here on nothing fails that matters, so that a refused run has changed nothing.
        self.limit_memory_at_once();
        let stack =
            AlternateStack { base: self.alternate_stack.start, flags: 0, size: self.alternate_stack.len() };
        // SAFETY: the stack is the engine's own and used for nothing else; the engine is set up.
        unsafe {
            signals::set_alternate_stack(&stack)?;
            control::install()?;
        }
        if self.repeats {
            self.running_signals = Signals::now(None, None);
        }
        Ok(())
    }

    pub(super) fn limit_memory_at_once(&mut self) {
        self.data_limit = u64::MAX;
        if self.limits_at_once {
            self.limit_memory();
        }
    }

    /// Bounds what the closure may allocate.
    pub(super) fn limit_memory(&mut self) {
        if let Some(bytes) = self.limits.memory {
            let data = self.space.statm().read().map_or(0, |sizes| sizes.data * PAGE);
            self.data_limit = (data as u64).saturating_add(bytes);
            Attributes::set_data_limit(self.data_limit);
        }
    }

    pub(super) fn note_rseq(&mut self, engine: &Engine) -> Result<()> {
        for address in engine.rseq_areas.addresses() {
            self.space.exclude_bytes(address, rseq::LENGTH)?;
        }
        Ok(())
    }

    pub(super) fn arm(&self) {
        if let (Some(timer), Some(time)) = (self.timer, self.limits.time) {
            // An unlimited run rather than none, where the timer is gone: the end will report it missing.
            let _ = timers::arm(timer, time.max(1));
        }
    }

    pub(super) fn disarm(&self) {
        if let (Some(timer), Some(_)) = (self.timer, self.limits.time) {
            let _ = timers::arm(timer, 0);
        }
    }

    /// Returns whether a closure that died did so because it was refused memory: it is within a sixteenth of its
    /// limit.
    pub(super) fn hit_memory_limit(&self, ending: Ending) -> bool {
        let Some(bytes) = self.limits.memory else {
            return false;
        };
        let died =
            matches!(ending, Ending::Signaled { signal: libc::SIGABRT | libc::SIGSEGV | libc::SIGBUS, .. });
        let used = self.space.statm().read().map_or(0, |sizes| (sizes.data * PAGE) as u64);
        died && used >= self.data_limit - bytes / 16
    }

    /// Returns the place of the snapshot with that name.
    pub(super) fn place_of(&self, id: u64) -> Option<usize> {
        let place = usize::try_from(id & u64::from(u32::MAX)).ok()?;
        let snapshot = self.snapshots.get(place)?.as_ref()?;
        (u64::from(snapshot.serial) == id >> 32).then_some(place)
    }

    pub(super) fn take_snapshot(&mut self, engine: &Engine) -> Result<()> {
        self.threads.capture_alone()?;
        interpose::install_once();
        self.note_rseq(engine)?;
        let mut process = ProcessState::new(engine.arena);
        match self.capture_snapshot(&mut process) {
            Ok(memory) => {
                let (serial, stack_pointer) = (self.serial, self.crossing.stack_pointer);
                self.snapshots[self.wanted] = Some(Snapshot { serial, memory, stack_pointer, process });
                Ok(())
            }
            Err(error) => {
                process.clear(&mut self.sources);
                Err(error)
            }
        }
    }

    pub(super) fn capture_snapshot(&mut self, process: &mut ProcessState) -> Result<SnapshotId> {
        process.capture(self.crossing.mask, &mut self.sources)?;
        // SAFETY: as in `begin_run`.
        let memory = unsafe { self.space.snapshot()? };
        if let Err(error) = process.family.capture(&self.sources.nursery) {
            self.space.discard(memory)?;
            return Err(error);
        }
        Ok(memory)
    }

    /// Puts everything back to the beginning of the run, or to snapshot `place`; returns what could not be undone.
    ///
    /// The engine's own descriptors first, without which it sees neither threads nor children; then threads, since they
    /// could interfere with all else; then children; then limits, which the rest may need.
    pub(super) fn put_back(&mut self, engine: &Engine, place: Option<usize>) -> Option<Leftover> {
        if place.is_some() {
            // Snapshots are taken when there is no other thread, and the program may have handled the signal itself.
            self.threads.forget_parked();
            // SAFETY: the engine is at work, and the snapshot has the disposition that comes back.
            let _ = unsafe { control::install_control() };
        }
        let bounded = self.data_limit != u64::MAX;
        let Self {
            threads, process, snapshots, sources, space, last_restore, repeats, running_signals, ..
        } = self;
        let mut leftover = None;
        let mut note = |result: std::result::Result<(), Leftover>| {
            if let Err(found) = result {
                leftover.get_or_insert(found);
            }
        };
        let snapshot = place.and_then(|at| snapshots[at].as_ref());
        let state = snapshot.map_or(&*process, |snapshot| &snapshot.process);
        let mut own = state.descriptors.restore_own(&sources.keepers);
        let mut threads_ended = threads.restore();
        if own != Ok(true) {
            // Threads may have undone that as long as they ran, and limits may stand in the way.
            note(state.attributes.restore_limits(None, bounded));
            own = state.descriptors.restore_own(&sources.keepers);
            threads_ended = threads.restore();
        }
        let own_are_there = own.is_ok();
        note(own.map(|_| ()));
        note(state.family.restore(&sources.nursery, |pid| sources.keepers.owns(pid)));
        // Threads and children have ended, and what is asked with is in place: nobody but this thread changes from here on
        // what it says, and this thread does so only where it finds a difference.
        note(state.attributes.restore_dumpable());
        let files = own_are_there.then_some(&sources.files);
        sources.status = files.map_or(Status::UNKNOWN, Files::status);
        note(state.attributes.restore_limits(files, bounded));
        note(state.descriptors.restore(&sources.keepers, own_are_there));
        note(state.attributes.restore(&sources.status));
        if let Err(thread) = threads_ended {
            // Memory cannot be restored under a thread that runs.
            die(&Error::NotUndone(thread));
        }
        if let Err(error) = engine.run.lazy_free.take(|range| space.assume_written(range)) {
            die(&Error::Memory(error));
        }
        // SAFETY: we are on the engine's stack, signals are blocked, other threads are parked or gone; the program's
        // thread is here, and goes on where the restored state left.
        match unsafe { space.restore(snapshot.map(|snapshot| snapshot.memory)) } {
            Ok(restored) => *last_restore = restored,
            Err(error) => die(&Error::Memory(error)),
        }
        let signals = if *repeats && place.is_none() { &*running_signals } else { &state.signals };
        note(signals.restore(Shown::of(&sources.status)));
        note(state.timers.restore(sources.timers.as_ref()));
        state.pending.restore();
        hooks::run();
        leftover
    }
}

/// Ends the process, whose memory is neither what it was nor what it became.
fn die(error: &Error) -> ! {
    use std::fmt::Write;

    /// Standard error, a piece at a time.
    struct Stderr;
    impl Write for Stderr {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            // SAFETY: descriptor 2 is used for one system call.
            let stderr = unsafe { std::os::fd::BorrowedFd::borrow_raw(2) };
            rustix::io::write(stderr, text.as_bytes()).map_or(Err(std::fmt::Error), |_| Ok(()))
        }
    }
    let _ = writeln!(Stderr, "orrery: a rollback failed half-way and the process cannot go on: {error}");
    loop {
        // SAFETY: the end of the process.
        let _ = unsafe { syscalls::syscall!(syscalls::Sysno::exit_group, EXIT_BROKEN) };
    }
}

/// The exit status of a process whose rollback failed half-way (`EX_SOFTWARE`).
pub const EXIT_BROKEN: i32 = 70;
