//! A pace on a stage: what a round costs together and apart, and what the kernel counts, are the play's.

use core::cell::Cell;

use proptest::prelude::*;

use super::*;

/// The machine for a while.
#[derive(Clone, Copy, Debug)]
struct Scene {
    /// Nanoseconds of a round.
    together: u64,
    apart: u64,
    /// Whether rounds apart end in sleep.
    sleeps: bool,
    /// What the kernel says, in hundredths of the looks.
    idle: u64,
}

/// No other thread runs.
const QUIET: Scene = Scene { together: 1_700, apart: 500, sleeps: false, idle: 95 };
/// A thread computes on each CPU.
const BUSY: Scene = Scene { together: 4_000, apart: 60_000, sleeps: true, idle: 5 };
/// The same, and the kernel's count does not show it (they are in another container, for instance).
const BUSY_UNSEEN: Scene = Scene { idle: 100, ..BUSY };
/// Two threads of one core: being apart is no better.
const NO_BETTER: Scene = Scene { apart: 1_650, ..QUIET };
/// Work of 20 us in each round.
const AT_WORK: Scene = Scene { together: 21_700, apart: 20_500, sleeps: true, idle: 100 };

struct Play {
    now: Cell<u64>,
    idle: Cell<u64>,
    dice: Cell<u64>,
    naps: u32,
    pace: CpuPolicy,
    /// Time that went by while they were apart, and all.
    apart: u64,
    all: u64,
    trials: u32,
}

/// The surroundings, without the pace in them.
struct Around<'a>(&'a Cell<u64>, &'a Cell<u64>, &'a Cell<u64>);

impl Surroundings for Around<'_> {
    fn now(&self) -> Moment {
        Moment(self.0.get())
    }

    fn has_idle_cpu(&self) -> bool {
        roll(self.2, 100) < self.1.get()
    }
}

fn roll(dice: &Cell<u64>, sides: u64) -> u64 {
    dice.set(dice.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
    (dice.get() >> 33) % sides
}

impl Play {
    fn new(seed: u64) -> Self {
        Self {
            now: Cell::new(1),
            idle: Cell::new(0),
            dice: Cell::new(seed),
            naps: 0,
            pace: CpuPolicy::default(),
            apart: 0,
            all: 0,
            trials: 0,
        }
    }

    fn roll(&self, sides: u64) -> u64 {
        roll(&self.dice, sides)
    }

    fn is_apart(&self) -> bool {
        self.pace.stage != Stage::Together
    }

    /// One round.
    fn round(&mut self, scene: Scene) {
        let apart = self.is_apart();
        let cost = if apart { scene.apart } else { scene.together };
        self.now.set(self.now.get() + cost);
        self.all += cost;
        if apart {
            self.apart += cost;
            self.naps = self.naps.wrapping_add(u32::from(scene.sleeps));
        }
        self.idle.set(scene.idle);
        self.pace.count(self.naps, &Around(&self.now, &self.idle, &self.dice));
        self.trials += u32::from(!apart && self.is_apart());
    }

    /// Goes on for so many milliseconds. Now and then the program does something else for a while, asleep at the end.
    fn go_on(&mut self, scene: Scene, milliseconds: u64) {
        (self.apart, self.all) = (0, 0);
        while self.all < milliseconds * 1_000_000 {
            self.round(scene);
            if self.roll(5_000) == 0 {
                self.now.set(self.now.get() + self.roll(50_000_000));
                self.naps = self.naps.wrapping_add(1);
            }
        }
    }

    /// On a quiet machine they are apart before long, and stay so.
    fn come_to_rest(&mut self) {
        let end = self.now.get() + 2 * u64::try_from(LONGEST.as_nanos()).unwrap();
        while !matches!(self.pace.stage, Stage::Apart { .. }) {
            self.round(QUIET);
            assert!(self.now.get() < end, "{:?}", self.pace);
        }
        self.go_on(QUIET, 300);
        assert!(self.share_apart() > 0.8, "{}", self.share_apart());
    }

    fn share_apart(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a minute")]
        let share = self.apart as f64 / self.all as f64;
        share
    }
}

#[test]
fn who_hands_over_often_goes_apart_and_stays_there() {
    let mut play = Play::new(1);
    play.go_on(QUIET, 100);
    play.go_on(QUIET, 5_000);
    assert!(play.share_apart() > 0.95, "{}", play.share_apart());
}

#[test]
fn others_that_come_end_it_and_when_they_go_it_comes_back() {
    let mut play = Play::new(2);
    play.go_on(QUIET, 1_000);
    assert!(play.is_apart());
    play.go_on(BUSY, 200);
    assert!(!play.is_apart());
    play.come_to_rest();
}

#[test]
fn who_works_between_stays_together() {
    let mut play = Play::new(3);
    play.go_on(AT_WORK, 5_000);
    assert_eq!(play.trials, 0);
}

#[test]
fn what_begins_to_take_long_ends_it() {
    let mut play = Play::new(4);
    play.go_on(QUIET, 1_000);
    assert!(play.is_apart());
    play.go_on(AT_WORK, 100);
    assert!(!play.is_apart());
}

#[test]
fn a_busy_machine_loses_little() {
    for scene in [BUSY, BUSY_UNSEEN, NO_BETTER] {
        let mut play = Play::new(5);
        play.go_on(scene, 20_000);
        assert!(play.share_apart() < 0.02, "{scene:?}: {}", play.share_apart());
        assert!(play.trials < 30, "{scene:?}: {} trials", play.trials);
    }
}

#[test]
fn later_trials_come_later() {
    let mut play = Play::new(6);
    let mut last = 0;
    let mut gaps = Vec::new();
    while gaps.len() < 8 {
        let before = play.trials;
        play.round(BUSY_UNSEEN);
        if play.trials > before {
            gaps.push(play.now.get() - last);
            last = play.now.get();
        }
    }
    assert!(gaps[2..].windows(2).all(|pair| pair[1] > pair[0] * 3 / 2), "{gaps:?}");
}

#[test]
fn the_kernel_counts_whoever_asks() {
    assert!(runnable().is_some_and(|count| count >= 1), "is /proc mounted?");
    assert!(!Machine { cpus: 1 }.has_idle_cpu());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Whatever happens, in whatever order: not much slower than where they would always be together, and where it
    /// stays quiet for long enough, apart.
    #[test]
    fn the_price_of_trying_is_bounded(
        seed in any::<u64>(),
        scenes in proptest::collection::vec((0..5_usize, 50..800_u64), 1..8),
    ) {
        let mut play = Play::new(seed);
        let (mut spent, mut together) = (0, 0);
        for (which, milliseconds) in &scenes {
            let scene = [QUIET, BUSY, BUSY_UNSEEN, NO_BETTER, AT_WORK][*which];
            let mut rounds = 0;
            let mut time = 0;
            while time < milliseconds * 1_000_000 {
                let before = play.now.get();
                play.round(scene);
                time += play.now.get() - before;
                rounds += 1;
            }
            spent += time;
            together += rounds * scene.together;
        }
        // Each change of scenes costs what it takes to notice it.
        let changes = scenes.len() as u64 * 20_000_000;
        prop_assert!(spent <= together + together / 20 + changes, "{spent} against {together}");
        play.come_to_rest();
    }
}
