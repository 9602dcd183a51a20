//! Threads: those that wait at a safe point meanwhile, and those that the closure started, which end with it.
//!
//! A thread cannot be ended from outside by anything but its own consent, and what stands for consent is that it does
//! not block the signal whose handler ([`crate::control`]) makes it exit. The C library blocks that for nobody: not for
//! libraries whose threads block all signals, nor for the thread behind `SIGEV_THREAD` timers (sigevent(3type)). A thread
//! that blocks it by rt_sigprocmask(2), and sleeps or runs with that, is given up after [`DEAF_TIME`].

use orrery_memory::{Arena, HeapVec};
use orrery_sys::process::{Condition, Threads as Directory};
use orrery_sys::signals;
use rustix::time::{ClockId, clock_gettime};

use crate::control;
use crate::error::{Error, Leftover, Result};
use crate::safe_point;
use crate::watcher;

/// How long a thread gets to end, in rounds of 50 us.
const ROUNDS: usize = 20_000;
/// How long a thread that is said to have ended gets to be gone, in the same rounds: some 50 ms.
const LEAVING_ROUNDS: usize = 1_000;

/// How long a thread that does nothing else may block what would end it, in milliseconds. The C library does so for
/// moments, while it makes and ends threads.
const DEAF_TIME: i64 = 50;
/// How long it must have run meanwhile, in milliseconds, where it does not sleep, but runs or waits for a processor.
const DEAF_WORK: u64 = 30;

/// The threads of the process.
#[derive(Debug)]
pub(crate) struct Threads {
    directory: Directory,
    own: i32,
    /// A context's watcher, which has no part in its state and is left alone.
    companion: Option<i32>,
    /// Threads that wait at a safe point while the closure runs.
    parked: HeapVec<i32>,
}

impl Threads {
    pub(crate) fn new(arena: &'static Arena) -> Result<Self> {
        Ok(Self {
            directory: Directory::open()?,
            own: rustix::thread::gettid().as_raw_pid(),
            companion: watcher::thread(),
            parked: arena.vec(),
        })
    }

    /// Waits until every other thread is parked, and remembers which they are.
    pub(crate) fn capture(&mut self) -> Result<()> {
        self.parked.clear();
        if self.others()? == 0 {
            return Ok(());
        }
        let parked = safe_point::gather(|| self.others().unwrap_or(usize::MAX));
        let others = self.others()?;
        if parked < others {
            safe_point::release();
            return Err(Error::Threads { running: others, parked });
        }
        let Self { directory, own, companion, parked, .. } = self;
        let mut room = true;
        directory.for_each(|thread| {
            room &= parked.try_reserve(1).is_ok();
            if room && thread != *own && Some(thread) != *companion {
                parked.push(thread);
            }
        })?;
        Ok(())
    }

    /// Makes sure that there is no other thread.
    pub(crate) fn capture_alone(&mut self) -> Result<()> {
        self.forget_parked();
        for round in 0..LEAVING_ROUNDS {
            if self.others()? == 0 {
                return Ok(());
            }
            // One that was joined may still be on its way out.
            pause_in(round);
        }
        Err(Error::NotAlone { others: self.others()? })
    }

    /// Returns how many threads there are beside the engine's, and a context's companion.
    fn others(&self) -> Result<usize> {
        Ok(self.directory.count()?.saturating_sub(1 + self.companions()))
    }

    fn companions(&self) -> usize {
        usize::from(self.companion.is_some())
    }

    /// Takes no thread for a parked one.
    pub(crate) fn forget_parked(&mut self) {
        self.parked.clear();
    }

    /// Ends every thread that was not there.
    pub(crate) fn restore(&self) -> std::result::Result<(), Leftover> {
        let mut stubborn = 0;
        let mut deaf = None;
        for round in 0..ROUNDS {
            // Who cannot count does not know that they are gone.
            if self.directory.count().is_ok_and(|count| count <= 1 + self.companions() + self.parked.len()) {
                return Ok(());
            }
            if round == 0 {
                // SAFETY: the engine is at work, and puts dispositions back after threads have ended.
                let _ = unsafe { control::install_end() };
            }
            let _ = self.directory.for_each(|thread| {
                let stays = thread == self.own || Some(thread) == self.companion;
                if !stays && !self.parked.contains(&thread) {
                    stubborn = thread;
                    if round % 64 == 0 {
                        control::send_end(thread);
                    }
                }
            });
            if round % 16 == 15 && self.stays_deaf(stubborn, &mut deaf) {
                return Err(Leftover::Thread(stubborn));
            }
            pause_in(round);
        }
        Err(Leftover::Thread(stubborn))
    }

    /// Returns whether the thread has been blocking the signal for [`DEAF_TIME`]; `since` is where that is noted.
    fn stays_deaf(&self, thread: i32, since: &mut Option<Deaf>) -> bool {
        let blocks = |condition: &Condition| condition.blocked & signals::mask_of(&[signals::INTERNAL]) != 0;
        let Some(condition) = self.directory.condition(thread).filter(blocks) else {
            *since = None;
            return false;
        };
        let now = milliseconds();
        match since {
            Some(noted) if noted.thread == thread => {
                let waited = now - noted.milliseconds >= DEAF_TIME;
                let ran = condition.processor_time >= noted.processor_time + DEAF_WORK;
                waited && (condition.state == b'S' || ran)
            }
            _ => {
                *since = Some(Deaf { thread, milliseconds: now, processor_time: condition.processor_time });
                false
            }
        }
    }
}

/// A thread that was seen to block the signal: since when, and how long it had run by then.
#[derive(Debug)]
struct Deaf {
    thread: i32,
    milliseconds: i64,
    processor_time: u64,
}

fn milliseconds() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1000 + now.tv_nsec / 1_000_000
}

/// Lets others run: for the first rounds only if they are ready, then for 50 us.
fn pause_in(round: usize) {
    if round > 10 {
        let _ = rustix::thread::nanosleep(&rustix::thread::Timespec { tv_sec: 0, tv_nsec: 50_000 });
    } else {
        rustix::thread::sched_yield();
    }
}
