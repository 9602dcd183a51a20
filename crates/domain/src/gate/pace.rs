//! The pace: whether two who hand over to each other should share a CPU, or spin on two.
//!
//! On one CPU a hand-over costs about a microsecond, and nothing is wasted. On two CPUs, with the waiter spinning, it costs
//! a fraction of that, and a second CPU. A waiter that is asleep on the other CPU costs 30 times as much. So two go *apart*
//! only where
//!
//! - they hand over so often that no wait is longer than a spin: [`OFTEN`] there and back;
//! - the program may use two CPUs, and the kernel counts fewer runnable tasks than that (`/proc/loadavg`);
//! - it proved to be faster. Being apart is a trial: waits that end in sleep, a pace no better than together, or
//!   a machine that has become busy end it, and the next trial comes later, twice as late each time.
//!
//! So a busy machine costs a trial now and then, bounded by a dozen sleeps, and nobody is starved: a spinner gives up
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
const PATIENCE: Duration = Duration::from_millis(10);
/// ... and after this at last.
const LONGEST: Duration = Duration::from_secs(5);
/// How often the machine's load is looked at while apart.
const LOOK: Duration = Duration::from_millis(50);
/// How many waits of a batch apart may end in sleep: some do while one of the two moves to its CPU.
const NAPS: u32 = 12;

/// Where the two should run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On one CPU, taking turns.
    Together,
    /// On two, spinning.
    Apart,
}

/// What a pace is measured against; [`Machine`], but for tests.
pub trait Surroundings {
    /// The present.
    fn now(&self) -> Moment;
    /// Whether nobody but the two wants a CPU, of which there are two.
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

/// How many tasks the kernel would run now (proc_loadavg(5)).
fn runnable() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split_whitespace().nth(3)?.split('/').next()?.parse().ok()
}

/// The pace of two who hand over to each other, as one of them keeps it.
#[derive(Clone, Debug)]
pub struct Pace {
    rounds: u32,
    since: Moment,
    place: Place,
    /// What a round took when they were last together.
    usual: Duration,
    /// The naps of both when the batch began.
    naps: u32,
    patience: Duration,
    /// No trial before this.
    next: Moment,
    looked: Moment,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            rounds: 0,
            since: Moment(0),
            place: Place::Together,
            usual: Duration::MAX,
            naps: 0,
            patience: PATIENCE,
            next: Moment(0),
            looked: Moment(0),
        }
    }
}

impl Pace {
    /// Where the two are to be now.
    pub fn place(&self) -> Place {
        match forced() {
            Some(place) => place,
            None => self.place,
        }
    }

    /// Counts one round, there and back. `naps` is how often both have slept so far ([`super::Face::naps`]). True where
    /// they slept in most rounds of late, as if they were not where they should be.
    pub fn count(&mut self, naps: u32, around: &impl Surroundings) -> (Place, bool) {
        let astray = self.rounds + 1 >= BATCH && naps.wrapping_sub(self.naps) > BATCH / 2;
        match forced() {
            None => (self.step(naps, around), astray),
            Some(place) => {
                self.rounds += 1;
                if self.rounds >= BATCH {
                    self.begin(naps, Moment(0));
                }
                (place, astray)
            }
        }
    }

    fn step(&mut self, naps: u32, around: &impl Surroundings) -> Place {
        self.rounds += 1;
        let apart = self.place == Place::Apart;
        if apart && naps.wrapping_sub(self.naps) > NAPS {
            self.give_up(naps, around.now());
        } else if self.rounds >= BATCH {
            let now = around.now();
            let round = now.since(self.since) / self.rounds;
            if self.since == Moment(0) {
                // The first batch is not timed.
            } else if apart {
                let is_better = round < self.usual - self.usual / 8;
                let is_busy = now.since(self.looked) >= LOOK && {
                    self.looked = now;
                    !around.has_idle_cpu()
                };
                if is_better && !is_busy {
                    self.patience = PATIENCE;
                } else {
                    self.give_up(naps, now);
                }
            } else {
                self.usual = round;
                if round <= OFTEN && now >= self.next {
                    if around.has_idle_cpu() {
                        self.place = Place::Apart;
                        self.looked = now;
                        // What moving costs is not the pace's.
                        self.begin(naps, Moment(0));
                        return self.place;
                    }
                    self.wait_longer(now);
                }
            }
            self.begin(naps, now);
        }
        self.place
    }

    fn begin(&mut self, naps: u32, now: Moment) {
        (self.rounds, self.since, self.naps) = (0, now, naps);
    }

    fn give_up(&mut self, naps: u32, now: Moment) {
        self.place = Place::Together;
        self.wait_longer(now);
        self.begin(naps, now);
    }

    fn wait_longer(&mut self, now: Moment) {
        self.next = now.after(self.patience);
        self.patience = (self.patience * 2).min(LONGEST);
    }
}

/// What the environment says, asked for once.
fn forced() -> Option<Place> {
    static FORCED: OnceLock<Option<Place>> = OnceLock::new();
    *FORCED.get_or_init(|| match std::env::var("ORRERY_GATE").as_deref() {
        Ok("together") => Some(Place::Together),
        Ok("apart") => Some(Place::Apart),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::*;

    struct Staged {
        now: Cell<u64>,
        idle: Cell<bool>,
    }

    impl Surroundings for Staged {
        fn now(&self) -> Moment {
            Moment(self.now.get())
        }

        fn has_idle_cpu(&self) -> bool {
            self.idle.get()
        }
    }

    fn stage(idle: bool) -> Staged {
        Staged { now: Cell::new(1), idle: Cell::new(idle) }
    }

    /// So many rounds of `nanoseconds` each, of which every one has `naps`; where they end.
    fn rounds(
        pace: &mut Pace,
        around: &Staged,
        count: u32,
        nanoseconds: u64,
        naps: &mut u32,
        each: u32,
    ) -> Place {
        let mut place = pace.place;
        for _ in 0..count {
            around.now.set(around.now.get() + nanoseconds);
            *naps = naps.wrapping_add(each);
            place = pace.step(*naps, around);
        }
        place
    }

    #[test]
    fn who_hands_over_often_goes_apart_and_stays_where_that_is_faster() {
        let (mut pace, around, mut naps) = (Pace::default(), stage(true), 0);
        assert_eq!(
            rounds(&mut pace, &around, BATCH, 2_000, &mut naps, 1),
            Place::Together,
            "not measured yet"
        );
        assert_eq!(rounds(&mut pace, &around, BATCH, 2_000, &mut naps, 1), Place::Apart);
        assert_eq!(rounds(&mut pace, &around, 1000 * BATCH, 500, &mut naps, 0), Place::Apart);
        around.idle.set(false);
        assert_eq!(
            rounds(&mut pace, &around, 2000 * BATCH, 500, &mut naps, 0),
            Place::Together,
            "others came"
        );
    }

    #[test]
    fn who_works_between_stays_together() {
        let (mut pace, around, mut naps) = (Pace::default(), stage(true), 0);
        assert_eq!(rounds(&mut pace, &around, 100 * BATCH, 20_000, &mut naps, 1), Place::Together);
    }

    #[test]
    fn a_busy_machine_sees_no_trial() {
        let (mut pace, around, mut naps) = (Pace::default(), stage(false), 0);
        assert_eq!(rounds(&mut pace, &around, 100 * BATCH, 2_000, &mut naps, 0), Place::Together);
    }

    #[test]
    fn a_trial_in_which_they_sleep_ends_at_once_and_later_ones_come_later() {
        let (mut pace, around, mut naps) = (Pace::default(), stage(true), 0);
        rounds(&mut pace, &around, 2 * BATCH, 2_000, &mut naps, 0);
        assert_eq!(pace.place, Place::Apart);
        assert_eq!(rounds(&mut pace, &around, NAPS + 1, 40_000, &mut naps, 1), Place::Together);
        let mut trials = Vec::new();
        let start = around.now.get();
        while around.now.get() < start + 200_000_000 {
            if rounds(&mut pace, &around, 1, 2_000, &mut naps, 0) == Place::Apart {
                trials.push(around.now.get() - start);
                rounds(&mut pace, &around, NAPS + 1, 40_000, &mut naps, 1);
            }
        }
        // After 10, 20, 40, 80 ms.
        assert_eq!(trials.len(), 4, "{trials:?}");
    }

    #[test]
    fn a_trial_that_is_no_faster_ends() {
        let (mut pace, around, mut naps) = (Pace::default(), stage(true), 0);
        rounds(&mut pace, &around, 2 * BATCH, 2_000, &mut naps, 0);
        assert_eq!(rounds(&mut pace, &around, 2 * BATCH, 1_900, &mut naps, 0), Place::Together);
    }

    #[test]
    fn the_kernel_counts_whoever_asks() {
        assert!(runnable().is_some_and(|count| count >= 1), "is /proc mounted?");
        assert!(!Machine { cpus: 1 }.has_idle_cpu());
    }
}
