//! Structures of which orbits see a part.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[expect(dead_code, reason = "helpers of the other tests")]
mod common;

use std::cell::Cell;
use std::rc::Rc;

use common::{address, area};
use orrery_orbit::{Area, AreaOptions, Call, Delegate, Orbit, Task};

orrery_testing::cases![
    seconds = 120, trackers = orrery_testing::TRACKERS;
    fields_are_used_as_before,
    tasks_see_the_watched_fields_as_of_the_call,
    what_is_not_watched_takes_no_room,
    parameters_are_passed_on,
    values_are_dropped_once_and_their_places_recycled,
    a_full_area_gives_the_value_back,
];

/// A transaction as Section 4.6.3 has it: large, and two fields matter to the detector.
#[derive(Delegate)]
struct Transaction {
    #[watched]
    version: u64,
    #[watched]
    locks: Vec<u64, Area>,
    name: String,
    undo: [u8; 9000],
}

fn transaction(area: &Area) -> DelegatedTransaction {
    let whole =
        Transaction { version: 1, locks: Vec::new_in(area.clone()), name: "one".to_owned(), undo: [3; 9000] };
    whole.delegate(area).map_err(|(error, _)| error).unwrap()
}

type Vec<T, A> = allocator_api2::vec::Vec<T, A>;

fn fields_are_used_as_before() {
    let area = area();
    let mut one = transaction(&area);
    one.version += 4;
    one.name.push_str(" more");
    one.undo[8999] = 7;
    one.locks.push(11);
    // Two watched fields at a time.
    let watched = &mut *one;
    let (version, locks) = (&mut watched.version, &mut watched.locks);
    locks.push(12);
    *version += locks.len() as u64;
    assert_eq!((one.version, one.name.as_str(), one.undo[8999]), (7, "one more", 7));
    assert!(area.contains(DelegatedTransaction::watched(&one)) && area.contains(&raw const one.locks[0]));
    assert!(!area.contains(&raw const one.undo));
    let whole = Transaction::join(one);
    assert_eq!((whole.version, &whole.locks[..], whole.name.as_str()), (7, &[11, 12][..], "one more"));
    assert_eq!((whole.undo[0], whole.undo[8999]), (3, 7));
}

fn sum(task: &mut Task<'_>) -> i64 {
    // SAFETY: its callers pass the address of the watched part, in an area that the call names.
    let seen = unsafe { &*task.pointer::<TransactionWatched>().unwrap() };
    (seen.version + seen.locks.iter().sum::<u64>()).cast_signed()
}

fn tasks_see_the_watched_fields_as_of_the_call() {
    let area = area();
    let mut one = transaction(&area);
    let orbit = Orbit::builder("detector").entry(sum).create().unwrap();
    let arguments = address(DelegatedTransaction::watched(&one));
    let areas = [&area];
    let mut expected = 0;
    for round in 0..300 {
        one.version = round;
        one.locks.push(round);
        expected += round.cast_signed();
        let future = orbit.call_async(&Call::new().areas(&areas).arguments(&arguments)).unwrap();
        one.version = 1 << 40;
        assert_eq!(future.get().unwrap(), expected + round.cast_signed());
    }
}

fn what_is_not_watched_takes_no_room() {
    let area = area();
    let many: std::vec::Vec<_> = (0..100).map(|_| transaction(&area)).collect();
    assert!(area.used() < many.len() * 200, "{}", area.used());
}

/// With everything that structures can have.
#[derive(Delegate)]
#[delegate(object = Pair, watched = PairSeen)]
struct Whole<'a, T: Copy, const N: usize>
where
    T: Default,
{
    /// The values that the transaction has seen.
    #[watched]
    seen: [T; N],
    #[cfg(not(all()))]
    #[watched]
    never: Missing,
    unseen: &'a str,
}

fn parameters_are_passed_on() {
    let (area, text) = (area(), "text".to_owned());
    let whole = Whole { seen: [5_u16; 3], unseen: &text };
    let mut pair: Pair<'_, u16, 3> = whole.delegate(&area).map_err(|(error, _)| error).unwrap();
    pair.seen[2] = 6;
    let seen: *const PairSeen<'_, u16, 3> = Pair::watched(&pair);
    // SAFETY: the pair lives, and nobody changes it meanwhile.
    let seen = unsafe { &(*seen).seen };
    assert_eq!((seen, pair.unseen), (&[5, 5, 6], "text"));
    assert_eq!(Whole::join(pair).seen, [5, 5, 6]);
}

#[derive(Delegate)]
struct Counted {
    #[watched]
    seen: Dropped,
    unseen: Dropped,
}

struct Dropped(Rc<Cell<u32>>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

fn values_are_dropped_once_and_their_places_recycled() {
    let area = area();
    let drops = Rc::new(Cell::new(0));
    let make = || {
        let (seen, unseen) = (Dropped(Rc::clone(&drops)), Dropped(Rc::clone(&drops)));
        Counted { seen, unseen }.delegate(&area).map_err(|(error, _)| error).unwrap()
    };
    let object = make();
    assert_eq!((drops.get(), area.blocks()), (0, 1));
    drop(object);
    assert_eq!((drops.get(), area.blocks()), (2, 0));
    let whole = Counted::join(make());
    assert_eq!((drops.get(), area.blocks()), (2, 0));
    drop((whole.seen, whole.unseen));
    assert_eq!(drops.get(), 4);
    (0..1000).for_each(|_| drop(make()));
    assert!(area.used() <= 4096, "{}", area.used());
}

#[derive(Delegate)]
struct Plain {
    #[watched]
    seen: [u64; 512],
    unseen: u8,
}

fn a_full_area_gives_the_value_back() {
    let mut options = AreaOptions::default();
    options.capacity = 16 << 10;
    let small = Area::new(0, &options).unwrap();
    while small.allocate(std::alloc::Layout::new::<PlainWatched>()).is_ok() {}
    let blocks = small.blocks();
    let (error, value) = Plain { seen: [8; 512], unseen: 2 }.delegate(&small).err().expect("no room");
    assert!(matches!(error, orrery_orbit::AreaError::AreaFull { .. }), "{error}");
    assert_eq!((value.seen[511], value.unseen, small.blocks()), (8, 2, blocks));
}
