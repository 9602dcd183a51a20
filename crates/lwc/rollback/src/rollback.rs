//! Rollback of a closure: the Rust interface.

use std::ffi::c_void;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use orrery_memory::PageRange;
use orrery_memory::images::Visibility;
use orrery_memory::space::{Config, First, Restored, Statistics};
use orrery_memory::tracker::Choice;

use crate::engine::{self, Engine, Limits, RunMode};
use crate::error::Result;
use crate::run_state::{self, Ending};
use crate::undo::children::Children;

/// How a closure ended. However that was, what it did is undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The closure returned.
    Returned,
    /// The closure panicked.
    Panicked,
    /// It, or a thread of its, called `exit` or `_exit` with this status.
    Exited(i32),
    /// A signal that ends processes hit it: SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGSYS or SIGTRAP.
    Signaled {
        /// The signal's number.
        signal: i32,
        /// The address of the fault; 0 for a signal that was sent.
        address: usize,
    },
    /// Its time was up.
    TimedOut,
    /// It died at its memory limit.
    MemoryLimit,
    /// [`abandon`] was called with this code.
    Abandoned(u64),
}

impl From<Ending> for Outcome {
    fn from(ending: Ending) -> Self {
        match ending {
            Ending::Returned => Self::Returned,
            Ending::Panicked => Self::Panicked,
            Ending::Exited(status) => Self::Exited(status),
            Ending::Signaled { signal, address } => Self::Signaled { signal, address },
            Ending::TimedOut => Self::TimedOut,
            Ending::MemoryLimit => Self::MemoryLimit,
            Ending::Abandoned(code) => Self::Abandoned(code),
        }
    }
}

/// Settings of a [`Rollback`].
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "a builder does nothing until it builds"]
pub struct Builder {
    children: Children,
    tracker: Choice,
    visibility: Visibility,
    first: First,
    limits: Limits,
}

impl Builder {
    /// Sets what becomes of child processes; killed, unless configured otherwise. Counts when the process sets
    /// rollback up for the first time, as do all settings but the limits.
    pub fn children(mut self, policy: Children) -> Self {
        self.children = policy;
        self
    }

    /// The tracker; by default what `ORRERY_TRACKER` says, else the fastest that works here.
    pub fn tracker(mut self, tracker: Choice) -> Self {
        self.tracker = tracker;
        self
    }

    /// Sets whether page images are mapped while the program runs.
    pub fn visibility(mut self, visibility: Visibility) -> Self {
        self.visibility = visibility;
        self
    }

    /// Sets how the first capture of a process is made.
    pub fn first(mut self, first: First) -> Self {
        self.first = first;
        self
    }

    /// See [`Rollback::set_time_limit`].
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.limits.time = Some(nanoseconds(limit));
        self
    }

    /// See [`Rollback::set_memory_limit`].
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.limits.memory = Some(bytes);
        self
    }

    /// Sets rollback up for this process and thread.
    ///
    /// # Errors
    /// [`Error::WrongThread`](crate::Error::WrongThread) where another thread did so before;
    /// [`Error::Nested`](crate::Error::Nested) in a closure that is being rolled back;
    /// [`Error::ShadowStack`](crate::Error::ShadowStack); [`Error::Memory`](crate::Error::Memory) and
    /// [`Error::System`](crate::Error::System) where there is no address space, memory or tracker to be had.
    pub fn build(self) -> Result<Rollback> {
        let config =
            Config { scope: None, tracker: self.tracker, visibility: self.visibility, first: self.first };
        Ok(Rollback {
            engine: engine::set_up(config, self.children)?,
            limits: self.limits,
            not_send: std::marker::PhantomData,
        })
    }
}

/// Runs closures and undoes what they did. There is one engine in a process, whichever handle drives it.
pub struct Rollback {
    engine: &'static Engine,
    limits: Limits,
    not_send: std::marker::PhantomData<*mut ()>,
}

impl Rollback {
    /// Default settings, to be changed.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Runs `closure` on this thread and undoes all that it did to the process, however it ends.
    ///
    /// State is captured when this is called: what the program does between two runs stays. The process must have one
    /// thread, or the others must be at [`safe_point`](crate::safe_point)s. What the closure returns or drops goes with
    /// its memory: results leave through a [`KeptBuffer`](crate::KeptBuffer).
    ///
    /// What safe code may not rely on in a closure is in the crate's documentation: [What Rust code must not rely
    /// on](crate#what-rust-code-must-not-rely-on).
    ///
    /// # Errors
    /// Before anything ran: [`Nested`](crate::Error::Nested), [`WrongThread`](crate::Error::WrongThread),
    /// [`OtherProcess`](crate::Error::OtherProcess), [`SignalHandler`](crate::Error::SignalHandler),
    /// [`Threads`](crate::Error::Threads), [`Memory`](crate::Error::Memory), [`System`](crate::Error::System).
    /// Afterwards: [`NotUndone`](crate::Error::NotUndone), when memory is as it was but something else is not.
    ///
    /// If memory itself cannot be restored (a mapped file is gone, a thread will not end, memory is used up) there is
    /// no state to return to: the process says so on standard error and exits with [`EXIT_BROKEN`](crate::EXIT_BROKEN).
    pub fn run<F: FnOnce()>(&mut self, closure: F) -> Result<Outcome> {
        let mut body = Some(closure);
        let argument = (&raw mut body).cast::<c_void>();
        self.engine.run(call::<F>, argument, self.limits, RunMode::Once).map(Outcome::from)
    }

    /// Runs `closure` again and again, each time in the state in which it was called first, until it breaks. It gets
    /// the outcome of the round before. Returns the outcome of the last.
    ///
    /// State is captured once, so a round costs about half of a [`Rollback::run`]: this is for servers, whose closure
    /// waits for a request and answers it.
    ///
    /// ```standalone_crate
    /// # use std::ops::ControlFlow;
    /// # use orrery_rollback::{KeptBuffer, Outcome, Rollback};
    /// let rounds = KeptBuffer::with_capacity(100)?;
    /// let mut count = 0;
    /// Rollback::builder().build()?.repeat(|last| {
    ///     count += 1;
    ///     rounds.push(&[count]).unwrap();
    ///     match rounds.bytes().len() {
    ///         1 => assert_eq!(last, None),
    ///         2 => std::process::exit(7),
    ///         _ => assert_eq!(last, Some(Outcome::Exited(7))),
    ///     } if rounds.bytes().len() == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    /// })?;
    /// assert_eq!(rounds.bytes(), [1, 1, 1]);
    /// # Ok::<(), orrery_rollback::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Rollback::run`]; it stops at the first round that leaves something undone.
    pub fn repeat<F>(&mut self, mut closure: F) -> Result<Outcome>
    where
        F: FnMut(Option<Outcome>) -> ControlFlow<()>,
    {
        let mut round = || {
            if closure(engine::last_ending().map(Outcome::from)).is_break() {
                engine::stop_repeating();
            }
        };
        self.run_again_and_again(&mut round, RunMode::Repeat)
    }

    /// [`Rollback::repeat`] for servers: `wait` for something to do, then `work` on it, to which alone the limits
    /// apply.
    ///
    /// ```standalone_crate
    /// # use std::ops::ControlFlow;
    /// # use std::time::Duration;
    /// # use orrery_rollback::{KeptBuffer, Outcome, Rollback};
    /// let answers = KeptBuffer::with_capacity(100)?;
    /// let mut rollback = Rollback::builder().build()?;
    /// rollback.set_time_limit(Some(Duration::from_millis(20)));
    /// rollback.serve(
    ///     |last| {
    ///         if let Some(outcome) = last {
    ///             answers.push(&[if outcome == Outcome::TimedOut { b'T' } else { b'R' }]).unwrap();
    ///         } // A long wait is no fault.
    ///         std::thread::sleep(Duration::from_millis(40));
    ///         let count = answers.bytes().len();
    ///         if count == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(count) }
    ///     }, |request| while request == 1 {},
    /// )?;
    /// assert_eq!(answers.bytes(), b"RT");
    /// # Ok::<(), orrery_rollback::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Rollback::repeat`].
    pub fn serve<T, W, F>(&mut self, mut wait: W, mut work: F) -> Result<Outcome>
    where
        W: FnMut(Option<Outcome>) -> ControlFlow<(), T>,
        F: FnMut(T),
    {
        let mut round = || match wait(engine::last_ending().map(Outcome::from)) {
            ControlFlow::Continue(request) => {
                engine::apply_limits();
                work(request);
            }
            ControlFlow::Break(()) => engine::stop_repeating(),
        };
        self.run_again_and_again(&mut round, RunMode::Serve)
    }

    fn run_again_and_again<F: FnMut()>(&mut self, round: &mut F, mode: RunMode) -> Result<Outcome> {
        let argument = std::ptr::from_mut(round).cast::<c_void>();
        self.engine.run(call_mut::<F>, argument, self.limits, mode).map(Outcome::from)
    }

    /// Bounds the time of each run from now on: the closure ends with [`Outcome::TimedOut`]. A closure that blocks
    /// signal [`CONTROL_SIGNAL`](crate::CONTROL_SIGNAL) is out of its reach.
    pub fn set_time_limit(&mut self, limit: Option<Duration>) {
        self.limits.time = limit.map(nanoseconds);
    }

    /// Bounds by how many bytes each run may grow the process' private writable memory (`RLIMIT_DATA`): beyond, it is
    /// refused memory, and if it dies of that, the outcome is [`Outcome::MemoryLimit`].
    pub fn set_memory_limit(&mut self, bytes: Option<u64>) {
        self.limits.memory = bytes;
    }

    /// Leaves descriptor `fd` alone in all runs from now on, open or not: neither closed nor brought back.
    ///
    /// # Errors
    /// Those that [`Rollback::run`] gives before it runs.
    pub fn exempt_descriptor(&mut self, fd: i32) -> Result<()> {
        self.engine.exempt_descriptor(fd)
    }

    /// Lets go of the copies of this process' files that are held so that a run can bring them back.
    ///
    /// They are held until the next run: a pipe or socket that the program closes in between is not closed for its
    /// other end before that. This closes it; the next run copies the table again, which costs some 60 us.
    ///
    /// # Errors
    /// Those that [`Rollback::run`] gives before it runs.
    pub fn release_files(&mut self) -> Result<()> {
        self.engine.release_files()
    }

    /// Leaves the pages of `start..start + length` alone in all runs from now on. Both must be multiples of 4096.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory) where the range is unaligned, holds the stack or is not mapped
    /// throughout.
    pub fn keep_memory(&mut self, start: usize, length: usize) -> Result<()> {
        self.engine.keep(aligned(start, length)?, stack_address())
    }

    /// Returns what the engine's store holds, and what the last run had to put back.
    ///
    /// # Errors
    /// Those that [`Rollback::run`] gives before it runs.
    pub fn statistics(&self) -> Result<(Statistics, Restored)> {
        self.engine.statistics()
    }

    /// The tracker's name, and whether changes of the layout are noticed without reading it.
    ///
    /// # Errors
    /// Those that [`Rollback::run`] gives before it runs.
    pub fn mechanisms(&self) -> Result<(&'static str, bool)> {
        self.engine.mechanisms()
    }
}

impl std::fmt::Debug for Rollback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rollback").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// Ends the closure that runs in this process, from any of its threads or from a signal handler, with
/// [`Outcome::Abandoned`]. It returns only if none runs. Async-signal-safe.
pub fn abandon(code: u64) {
    run_state::end_from_here(Ending::Abandoned(code));
}

/// The range, if it is one of whole pages.
pub(crate) fn aligned(start: usize, length: usize) -> Result<PageRange> {
    let range = PageRange::covering(start, length);
    if range.start == start && range.len() == length {
        Ok(range)
    } else {
        let reason = "its start and length must be multiples of 4096";
        Err(orrery_memory::Error::Keep { range, reason }.into())
    }
}

/// Returns an address on the present stack.
pub(crate) fn stack_address() -> usize {
    let here = 0_u8;
    std::ptr::from_ref(std::hint::black_box(&here)).addr()
}

fn nanoseconds(limit: Duration) -> u64 {
    u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)
}

/// Calls the closure behind `body`, an `Option<F>`, and notes how it ended. Nothing unwinds out of here.
unsafe extern "C" fn call<F: FnOnce()>(body: *mut c_void) {
    // SAFETY: `run` passes its `Option<F>`, which it does not use meanwhile.
    if let Some(closure) = unsafe { &mut *body.cast::<Option<F>>() }.take() {
        catch(closure);
    }
}

/// The same for a closure that is called more than once.
unsafe extern "C" fn call_mut<F: FnMut()>(body: *mut c_void) {
    // SAFETY: `repeat` passes its closure, which it does not use meanwhile.
    catch(unsafe { &mut *body.cast::<F>() });
}

fn catch(closure: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(closure)) {
        // Its memory is about to be what it was before; dropping it could panic again.
        std::mem::forget(payload);
        run_state::note_panic();
    }
}
