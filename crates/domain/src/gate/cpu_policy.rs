//! The pace: whether two who hand over to each other should share a CPU, or spin on two.
//!
//! On one CPU a hand-over costs about a microsecond, and nothing is wasted. On two CPUs, with the waiter spinning, it
//! costs a fraction of that, and a second CPU. A waiter that is asleep on the other CPU costs 30 times as much. So two
//! go *apart* only where
//!
//! - they hand over so often that no wait is longer than a spin: [`OFTEN`] there and back;
//! - the program may use two CPUs, and the kernel counts fewer runnable tasks than that (`/proc/loadavg`);
//! - it proves to be faster.
//!
//! What a pace goes by are *batches* of rounds: how long a round took on average, and how often one of the two slept.
//!
//! ```text
//!              often, idle, not too soon               3 good
//!   together ───────────────────────────────▶ trial ─────────────▶ apart
//!       ▲                                       │                    │
//!       ├──── 2 bad, or busy: the next ───┘                    │
//!       │     trial comes twice as late                              │
//!       └──── 3 bad in a row, or so many more bad than good; busy ──────┘
//! ```
//!
//! A batch is good where a round took less than when they were last together, and hardly any ended in a sleep. One bad
//! batch says nothing: the program may have done something else for a while, and the kernel's count of runnable tasks
//! is that of a moment. After a stay that had proved itself the next trial comes soon; after one that failed at once it
//! comes later and later, up to [`LONGEST`].
//!
//! So a busy machine costs a trial now and then, bounded by two dozen sleeps, and nobody is starved: a spinner gives up
//! after [`super::SPIN`], whatever it waits for.
//!
//! `ORRERY_GATE` in the environment sets it down: `together`, `apart`, or `auto`, the default.

use core::time::Duration;
use std::sync::OnceLock;

use crate::time::Moment;

/// How many rounds are measured at a time. A clock is read once for all of them.
const BATCH: u32 = 64;
/// A round there and back that takes longer has work in it, for which a second CPU would only wait.
const OFTEN: Duration = Duration::from_micros(8);
/// After a failed trial the next one comes after this at first.
const TIMEOUT: Duration = Duration::from_millis(10);
/// The longest time between two trials.
const LONGEST: Duration = Duration::from_secs(5);
/// A stay apart that was this long has proved that the next one is worth a trial soon.
const PROVEN: Duration = Duration::from_millis(100);
/// How often the machine's load is looked at while apart, and how soon again where it seemed busy.
const LOOK: Duration = Duration::from_millis(50);
const NEXT_LOOK: Duration = Duration::from_millis(5);
/// How often in a row it must seem so.
const BUSY: u8 = 3;
/// How many waits of a batch apart may end in a sleep: some do while one of the two moves to its CPU.
const NAPS: u32 = 12;
/// How many good batches prove a trial, and how many bad ones end it.
const GOOD: u8 = 3;
const BAD: u8 = 2;
/// A stay apart ends with so many faults. A bad batch is two, a good one takes one back.
const FAULTS: u8 = 6;

/// Where the two should run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuPlacement {
    /// On one CPU, taking turns.
    Together,
    /// On two CPUs, spinning.
    Apart,
}

/// What a pace is measured against; [`Machine`], but for tests.
pub trait Surroundings {
    /// Returns the present.
    fn now(&self) -> Moment;
    /// Returns whether nobody but the two wants a CPU, of which there are two.
    fn has_idle_cpu(&self) -> bool;
}

/// The machine that this runs on.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// How many CPUs the program may use.
    pub cpus: usize,
}

impl Surroundings for Machine {
    fn now(&self) -> Moment {
        Moment::now()
    }

    fn has_idle_cpu(&self) -> bool {
        // Who asks is runnable, and so is a partner that spins or yields.
        self.cpus >= 2 && runnable().is_some_and(|runnable| runnable <= 2)
    }
}

/// Returns how many tasks the kernel would run now (proc_loadavg(5)).
fn runnable() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split_whitespace().nth(3)?.split('/').next()?.parse().ok()
}

/// How two are placed, and what speaks against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// As the environment has it.
    Fixed(CpuPlacement),
    /// Both on one CPU.
    Together,
    /// On two, to see what comes of it.
    Trial { good: u8, bad: u8 },
    /// On two, which proved to be better.
    Apart { faults: u8 },
}

/// The pace of two who hand over to each other, as one of them keeps it.
#[derive(Clone, Debug)]
pub struct CpuPolicy {
    stage: Stage,
    /// How many rounds of the batch there were.
    rounds: u32,
    /// When the batch began; 0 where it is not to be timed.
    since: Moment,
    /// The naps of both when it began.
    naps: u32,
    /// What a round takes when they are together. Pauses do not count: it grows by an eighth at a time, and falls at
    /// once.
    usual: Duration,
    /// When they went apart.
    apart: Moment,
    timeout: Duration,
    /// No trial before this.
    next: Moment,
    /// When the machine's load is to be looked at, and how often in a row it seemed busy.
    look: Moment,
    seemed_busy: u8,
}

impl Default for CpuPolicy {
    fn default() -> Self {
        Self {
            stage: forced().map_or(Stage::Together, Stage::Fixed),
            rounds: 0,
            since: Moment(0),
            naps: 0,
            usual: Duration::MAX,
            apart: Moment(0),
            timeout: TIMEOUT,
            next: Moment(0),
            look: Moment(0),
            seemed_busy: 0,
        }
    }
}

impl CpuPolicy {
    /// Returns where the two should run now.
    #[inline]
    pub fn place(&self) -> CpuPlacement {
        match self.stage {
            Stage::Fixed(place) => place,
            Stage::Together => CpuPlacement::Together,
            Stage::Trial { .. } | Stage::Apart { .. } => CpuPlacement::Apart,
        }
    }

    /// Counts one round in the midst of a batch, in which there is nothing to decide; false, with nothing counted,
    /// where it is not so: [`CpuPolicy::count`] it then.
    #[inline]
    pub fn goes_on(&mut self, naps: u32) -> bool {
        // As few as never end a batch.
        let goes_on = self.rounds + 1 < BATCH && naps.wrapping_sub(self.naps) <= NAPS;
        self.rounds += u32::from(goes_on);
        goes_on
    }

    /// Counts one round, there and back. `naps` is how often both have slept so far ([`super::Face::naps`]). True where
    /// they slept in most rounds of late, as if they were not where they should be.
    #[inline]
    pub fn count(&mut self, naps: u32, around: &impl Surroundings) -> (CpuPlacement, bool) {
        self.rounds += 1;
        let slept = naps.wrapping_sub(self.naps);
        let ends = self.rounds >= BATCH || slept > NAPS && self.stage != Stage::Together;
        let astray = self.rounds >= BATCH && slept > BATCH / 2;
        if ends {
            self.end_batch(naps, slept, around);
        }
        (self.place(), astray)
    }

    #[cold]
    fn end_batch(&mut self, naps: u32, slept: u32, around: &impl Surroundings) {
        self.judge(slept, around);
        self.rounds = 0;
        self.naps = naps;
    }

    /// Goes by what a batch showed, and begins the next one.
    fn judge(&mut self, slept: u32, around: &impl Surroundings) {
        if let Stage::Fixed(_) = self.stage {
            return;
        }
        let now = around.now();
        let began = core::mem::replace(&mut self.since, now);
        let round = (began != Moment(0)).then(|| now.since(began) / self.rounds);
        let is_good = round.map(|round| slept <= NAPS && round < self.usual - self.usual / 8);
        match (self.stage, is_good) {
            (Stage::Fixed(_), _) => {}
            (Stage::Together, _) => {
                if let Some(round) = round {
                    self.usual = round.min(self.usual.saturating_add(self.usual / 8));
                    // Not after a pause: a trial is judged by what is usual.
                    if round <= self.usual {
                        self.consider(now, around);
                    }
                }
            }
            (_, _) if self.is_busy(now, around) => self.go_together(now),
            // Not timed: one of the two moved. But if they do nothing but sleep, that is bad.
            (_, None) if slept <= NAPS => {}
            (Stage::Trial { good, bad }, Some(true)) => {
                let good = good + 1;
                self.stage =
                    if good < GOOD { Stage::Trial { good, bad } } else { Stage::Apart { faults: 0 } };
            }
            (Stage::Trial { good, bad }, _) => {
                if bad + 1 < BAD {
                    self.stage = Stage::Trial { good, bad: bad + 1 };
                } else {
                    self.go_together(now);
                }
            }
            (Stage::Apart { faults }, Some(true)) => {
                self.stage = Stage::Apart { faults: faults.saturating_sub(1) }
            }
            (Stage::Apart { faults }, _) => {
                if faults + 2 < FAULTS {
                    self.stage = Stage::Apart { faults: faults + 2 };
                } else {
                    self.go_together(now);
                }
            }
        }
    }

    /// Begins a trial where that makes sense.
    fn consider(&mut self, now: Moment, around: &impl Surroundings) {
        if self.usual > OFTEN || now < self.next {
            return;
        }
        if !around.has_idle_cpu() {
            // It may have been a thread that ran for a moment. To look costs little; what patience is for are trials.
            self.next = now.after(TIMEOUT);
            return;
        }
        self.stage = Stage::Trial { good: 0, bad: 0 };
        (self.apart, self.look, self.seemed_busy) = (now, now.after(LOOK), 0);
        // What moving costs is not the pace's.
        self.since = Moment(0);
    }

    /// Returns whether others want a CPU, when it is time to look: seen so often in a row.
    fn is_busy(&mut self, now: Moment, around: &impl Surroundings) -> bool {
        if now < self.look {
            return false;
        }
        if around.has_idle_cpu() {
            (self.seemed_busy, self.look) = (0, now.after(LOOK));
        } else {
            (self.seemed_busy, self.look) = (self.seemed_busy + 1, now.after(NEXT_LOOK));
        }
        self.seemed_busy >= BUSY
    }

    fn go_together(&mut self, now: Moment) {
        let proven = matches!(self.stage, Stage::Apart { .. }) && now.since(self.apart) >= PROVEN;
        self.stage = Stage::Together;
        self.since = Moment(0);
        if proven {
            self.timeout = TIMEOUT;
        }
        self.wait_longer(now);
    }

    fn wait_longer(&mut self, now: Moment) {
        self.next = now.after(self.timeout);
        self.timeout = (self.timeout * 2).min(LONGEST);
    }
}

/// Returns what the environment says, asked for once.
fn forced() -> Option<CpuPlacement> {
    static FORCED: OnceLock<Option<CpuPlacement>> = OnceLock::new();
    *FORCED.get_or_init(|| match std::env::var("ORRERY_GATE").as_deref() {
        Ok("together") => Some(CpuPlacement::Together),
        Ok("apart") => Some(CpuPlacement::Apart),
        _ => None,
    })
}

#[cfg(test)]
mod tests;
