//! Random operations on areas and orbits, compared with a model.
//!
//! The model of an area is a plain vector that gets the same writes. What a task must see is the model as it was when
//! the call was made; the task answers with a digest of what it saw, then scribbles over it, which must not show later.
//! `ORRERY_TEST_SEED` repeats a run.

#![expect(clippy::unwrap_used, reason = "tests")]

#[expect(dead_code, reason = "helpers of the other tests")]
mod common;

use std::alloc::Layout;
use std::time::{Duration, Instant};

use orrery_orbit::{
    Area, AreaOptions, BackPressure, Backoff, Call, Error, Flags, Future, Mode, Orbit, Restart, Task,
};
use rustix::process::{Pid, Signal, kill_process};

orrery_testing::cases![
    seconds = 120, trackers = orrery_testing::TRACKERS;
    one_thread_many_areas_and_orbits,
    orbits_die_at_random,
    many_threads_share_orbits,
    areas_come_and_go,
    copies_by_a_forked_copier,
];

/// A small generator (splitmix64): a run is its seed.
struct Random(u64);

impl Random {
    fn new(salt: u64) -> Self {
        let seed =
            std::env::var("ORRERY_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| {
                u64::from(std::process::id())
                    ^ u64::try_from(Instant::now().elapsed().as_nanos()).unwrap() << 20
            });
        println!("ORRERY_TEST_SEED={seed}");
        Self(seed.wrapping_add(salt))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }
}

/// An area with one block of words, and its model.
struct Modelled {
    area: Area,
    words: *mut u64,
    model: Vec<u64>,
}

// SAFETY: the words are the area's, which goes along.
unsafe impl Send for Modelled {}

impl Modelled {
    fn new(words: usize, mode: Mode) -> Self {
        let mut options = AreaOptions::default();
        options.mode = mode;
        options.capacity = 64 << 20;
        let area = Area::new(4096, &options).unwrap();
        let block = area.allocate(Layout::array::<u64>(words).unwrap()).unwrap();
        Self { area, words: block.cast().as_ptr(), model: vec![0; words] }
    }

    fn write(&mut self, random: &mut Random) {
        let len = self.model.len();
        let (first, count) = match random.below(10) {
            0 => (random.below(len), 2_000),
            1 => (random.below(len), 600),
            _ => (random.below(len), 1 + random.below(4)),
        };
        let zero = random.chance(5);
        for index in first..(first + count).min(len) {
            let value = if zero { 0 } else { random.next() };
            self.model[index] = value;
            // SAFETY: the block has as many words as the model; main alone writes to it.
            unsafe { self.words.add(index).write(value) };
        }
    }
}

/// What arguments say of one area: where its words are and how many.
#[repr(C)]
#[derive(Clone, Copy)]
struct View {
    words: *mut u64,
    len: usize,
}

fn digest(words: &[u64], mut digest: u64) -> u64 {
    for (index, word) in (1..).zip(words) {
        digest = (digest ^ word.wrapping_mul(index)).rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    digest
}

/// Digests the areas that the arguments name, then scribbles over them.
fn look(task: &mut Task<'_>) -> i64 {
    let call = task.call();
    let views = task.arguments();
    let views: Vec<View> = views
        .chunks_exact(size_of::<View>())
        // SAFETY: as many bytes as it has; they are those of views, see `call`.
        .map(|chunk| unsafe { chunk.as_ptr().cast::<View>().read_unaligned() })
        .collect();
    let mut seen = 7;
    for view in &views {
        // SAFETY: the words of an area that the call names; the task's copy of them is the task's alone.
        let words = unsafe { std::slice::from_raw_parts(view.words, view.len) };
        seen = digest(words, seen);
    }
    let mut random = Random(call);
    for view in &views {
        for _ in 0..random.below(12) {
            // SAFETY: the words belong to an area that the call names, and the task's copy of them is the
            // task's alone.
            unsafe { view.words.add(random.below(view.len)).write(random.next()) };
        }
        if random.chance(3) {
            // SAFETY: the words belong to an area that the call names, and the task's copy of them is the
            // task's alone.
            unsafe { std::ptr::write_bytes(view.words, 0xaa, view.len) };
        }
    }
    seen.cast_signed()
}

struct Expectation {
    future: Future,
    value: i64,
}

impl Expectation {
    /// Returns whether it returned, and as expected.
    fn settle(self, may_die: bool) -> bool {
        match self.future.get() {
            Ok(seen) => {
                assert_eq!(seen, self.value, "call {} saw something else", self.future.call());
                true
            }
            Err(Error::Cancelled { .. }) => false,
            Err(Error::Fault { .. } | Error::NotRun { .. }) if may_die => false,
            Err(other) => panic!("{other}"),
        }
    }
}

/// Calls `orbit` with those `areas` that chance picks.
fn call(orbit: &Orbit, areas: &[&Modelled], random: &mut Random, may_die: bool) -> Option<Expectation> {
    let picked: Vec<&Modelled> = areas.iter().copied().filter(|_| random.chance(60)).collect();
    let mut value = 7;
    let mut arguments = Vec::new();
    for modelled in &picked {
        value = digest(&modelled.model, value);
        arguments.extend(modelled.words.expose_provenance().to_ne_bytes());
        arguments.extend(modelled.model.len().to_ne_bytes());
    }
    let value = value.cast_signed();
    let handles: Vec<&Area> = picked.iter().map(|modelled| &modelled.area).collect();
    let call = Call::new().areas(&handles).arguments(&arguments);
    if random.chance(40) {
        match orbit.call(&call) {
            Ok(seen) => assert_eq!(seen, value),
            Err(Error::Fault { .. } | Error::NotRun { .. }) if may_die => {}
            Err(other) => panic!("{other}"),
        }
        return None;
    }
    let flags = match random.below(10) {
        0 => Flags::CANCEL_ANY,
        1..=4 => Flags::CANCELLABLE,
        _ => Flags::NONE,
    };
    let future = orbit.call_async(&call.flags(flags)).unwrap();
    if random.chance(5) {
        let _ = future.cancel().unwrap();
    }
    Some(Expectation { future, value })
}

fn orbits(count: usize) -> Vec<Orbit> {
    let forever = Restart::Always(Backoff { limit: None, longest: Duration::ZERO, ..Backoff::default() });
    (0..count)
        .map(|index| {
            let bound = [4, 16, 64][index % 3];
            let policy = BackPressure::Wait;
            let builder =
                Orbit::builder(format!("model {index}")).queue(bound).back_pressure(policy).entry(look);
            builder.restart(forever).create().unwrap()
        })
        .collect()
}

fn work(time: Duration, may_die: bool, orbits: &[Orbit], areas: &mut [Modelled], random: &mut Random) -> u64 {
    let begin = Instant::now();
    let mut waiting: Vec<Expectation> = Vec::new();
    let mut returned = 0;
    while begin.elapsed() < time {
        for _ in 0..random.below(4) {
            let index = random.below(areas.len());
            areas[index].write(random);
        }
        let orbit = &orbits[random.below(orbits.len())];
        let borrowed: Vec<&Modelled> = areas.iter().collect();
        waiting.extend(call(orbit, &borrowed, random, may_die));
        if may_die && random.chance(4) {
            let pid = Pid::from_raw(i32::try_from(orbit.pid().unwrap()).unwrap()).unwrap();
            let _ = kill_process(pid, Signal::KILL);
        }
        while waiting.len() > 40 || !waiting.is_empty() && random.chance(30) {
            let index = random.below(waiting.len());
            let expectation = waiting.swap_remove(index);
            if random.chance(10) {
                drop(expectation);
            } else {
                returned += u64::from(expectation.settle(may_die));
            }
        }
    }
    for expectation in waiting {
        returned += u64::from(expectation.settle(may_die));
    }
    for modelled in areas {
        // SAFETY: as many words as the model has, and nobody writes to them now.
        let now = unsafe { std::slice::from_raw_parts(modelled.words, modelled.model.len()) };
        assert!(now == modelled.model, "no task changed main");
    }
    returned
}

const TIME: Duration = Duration::from_secs(4);

fn several_areas() -> Vec<Modelled> {
    [600, 5_000, 40_000, 3_000].map(|words| Modelled::new(words, Mode::Copy)).into()
}

fn one_thread_many_areas_and_orbits() {
    let mut random = Random::new(1);
    let mut areas = several_areas();
    let returned = work(TIME, false, &orbits(3), &mut areas, &mut random);
    println!("{returned} asynchronous calls returned");
    assert!(returned > 0);
}

fn orbits_die_at_random() {
    let mut random = Random::new(2);
    let mut areas = several_areas();
    let orbits = orbits(3);
    let returned = work(TIME, true, &orbits, &mut areas, &mut random);
    let restarts: u64 = orbits.iter().map(|orbit| orbit.restarts().unwrap()).sum();
    println!("{returned} asynchronous calls returned, {restarts} restarts");
    assert!(returned > 0 && restarts > 0);
}

fn many_threads_share_orbits() {
    let orbits = orbits(2);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let orbits = &orbits;
            scope.spawn(move || {
                let mut random = Random::new(100 + thread);
                let mut areas: Vec<_> = [500, 9_000].map(|words| Modelled::new(words, Mode::Copy)).into();
                assert!(work(TIME, false, orbits, &mut areas, &mut random) > 0);
            });
        }
    });
}

fn areas_come_and_go() {
    let mut random = Random::new(3);
    let orbits = orbits(2);
    let begin = Instant::now();
    while begin.elapsed() < TIME {
        let words = 200 + random.below(20_000);
        let mut areas: Vec<_> = (0..1 + random.below(3)).map(|_| Modelled::new(words, Mode::Copy)).collect();
        work(Duration::from_millis(60), false, &orbits, &mut areas, &mut random);
    }
}

fn copies_by_a_forked_copier() {
    let mut random = Random::new(4);
    let mut areas: Vec<_> = [(40_000, Mode::Cow), (3_000, Mode::Auto), (2_000, Mode::Cow)]
        .map(|(words, mode)| Modelled::new(words, mode))
        .into();
    let returned = work(TIME, false, &orbits(2), &mut areas, &mut random);
    assert!(returned > 0);
    let orbits = orbits(2);
    work(TIME, true, &orbits, &mut areas, &mut random);
}
