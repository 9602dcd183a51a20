use std::cell::{Cell, RefCell};
use std::rc::Rc;

use anyhow::bail;

use super::*;
use crate::contender::batched;
use crate::group::Unit;

const US: Quantity = Quantity::Mean(Unit::Microseconds);

/// A contender that takes a made-up time for each operation, and notes its turns.
struct Fake {
    name: &'static str,
    turns: Rc<RefCell<Vec<&'static str>>>,
    each: fn(usize) -> Result<Duration>,
}

impl Contender for Fake {
    fn measure(&mut self, _: &str, iterations: u32) -> Result<Sample> {
        let turn = self.turns.borrow().iter().filter(|name| **name == self.name).count();
        self.turns.borrow_mut().push(self.name);
        let each = (self.each)(turn)?;
        Ok(Sample { iterations, elapsed: each * iterations, latencies: Vec::new() })
    }
}

type Fakes = [(&'static str, fn(usize) -> Result<Duration>)];

type Found = Vec<(&'static str, Vec<Pair>)>;

fn meet(fakes: &Fakes, cases: &[&str]) -> (Vec<Found>, Vec<&'static str>, Report) {
    let turns = Rc::new(RefCell::new(Vec::new()));
    let entry = |&(name, each): &(&'static str, fn(usize) -> Result<Duration>)| {
        let turns = Rc::clone(&turns);
        Entry::new(name, move || Ok(Fake { name, turns: Rc::clone(&turns), each }))
    };
    let entries: Vec<_> = fakes.iter().map(entry).collect();
    let mut report = Report::default();
    let mut lineup = Lineup::start("group", &entries.iter().collect::<Vec<_>>(), false, &mut report);
    let mut found = Vec::new();
    for work in cases {
        let case = Case::new(*work).quantity(*work, US);
        for compared in lineup.meet(&case, Duration::ZERO, 0, &mut report) {
            let name = |rival| fakes.iter().map(|fake| fake.0).find(|name| *name == rival).unwrap();
            found.push(compared.into_iter().map(|(rival, pairs)| (name(rival), pairs)).collect());
        }
    }
    let turns = turns.borrow().clone();
    (found, turns, report)
}

#[test]
fn rounds_alternate_and_values_pair_up_within_a_round() {
    // Everybody slows down alike from turn to turn, so the ratio must not move at all.
    let (found, turns, _) = meet(
        &[
            ("ours", |turn| Ok(Duration::from_millis(5 << turn))),
            ("rival", |turn| Ok(Duration::from_millis(20 << turn))),
        ],
        &["w"],
    );
    assert_eq!(turns, ["ours", "ours", "rival", "rival", "ours", "rival", "rival", "ours"]);
    assert_eq!(found, [[("rival", vec![(20_000.0, 80_000.0), (40_000.0, 160_000.0)])]]);
}

#[test]
fn everybody_has_every_place_equally_often() {
    assert_eq!([0, 1, 2, 3].map(|round| order(round, 2)), [[0, 1], [1, 0], [1, 0], [0, 1]]);
    for count in 3..=4 {
        let rounds: Vec<_> = (0..2 * count).map(|round| order(round, count)).collect();
        for place in 0..count {
            let mut takers: Vec<_> = rounds.iter().map(|order| order[place]).collect();
            takers.sort_unstable();
            assert!(takers.iter().enumerate().all(|(turn, &taker)| taker == turn / 2), "{rounds:?}");
        }
    }
    assert!(order(5, 0).is_empty());
}

#[test]
fn slices_are_filled_with_operations() {
    let mut one = Participant::new("ours");
    one.contender = Some(Box::new(Fake {
        name: "ours",
        turns: Rc::default(),
        each: |turn| Ok(Duration::from_micros(if turn == 0 { 100 } else { 10 })),
    }));
    one.settle("w", Duration::from_millis(2)).unwrap();
    assert_eq!(one.iterations, 200);
}

#[test]
fn a_first_operation_that_fills_the_slice_by_itself_is_not_taken_for_typical() {
    let settle = |each: fn(usize) -> Result<Duration>| {
        let turns = Rc::default();
        let mut one = Participant::new("ours");
        one.contender = Some(Box::new(Fake { name: "ours", turns: Rc::clone(&turns), each }));
        one.settle("w", Duration::from_millis(2)).unwrap();
        (one.iterations, turns.borrow().len())
    };
    let cold_at_first = |turn| Ok(Duration::from_micros(if turn == 0 { 25_000 } else { 10 }));
    assert_eq!(settle(cold_at_first), (200, 3));
    assert_eq!(settle(|_| Ok(2 * LONGEST_WARM_UP)), (1, 1), "what takes so long is done once");
}

#[test]
fn a_rival_that_fails_is_left_out_for_good_and_one_that_skips_for_a_case() {
    let (found, _, report) = meet(
        &[
            ("ours", |_| Ok(Duration::from_millis(5))),
            ("fails", |turn| if turn < 2 { Ok(Duration::from_millis(5)) } else { bail!("broke") }),
            ("skips", |turn| match turn {
                0 => Err(Skipped("not this".into()).into()),
                _ => Ok(Duration::from_millis(10)),
            }),
        ],
        &["first", "second"],
    );
    assert_eq!(found, [vec![], vec![("skips", vec![(5_000.0, 10_000.0); 2])]]);
    let noted = format!("{report:?}");
    assert!(noted.contains("group, first, fails: broke") && !noted.contains("second, fails"), "{noted}");
    assert!(noted.contains("group, first, skips: not this"), "{noted}");
}

#[test]
fn without_ours_nothing_is_compared() {
    let (found, turns, report) = meet(
        &[("ours", |_| bail!("broke")), ("rival", |_| Ok(Duration::from_millis(5)))],
        &["first", "second"],
    );
    assert_eq!(found, [[], []]);
    assert_eq!(turns, ["ours", "rival", "rival", "rival", "rival"], "only to settle");
    assert!(format!("{report:?}").contains("group, first, ours: broke"));
}

#[test]
fn a_contender_that_does_not_start_is_noted() {
    let ours = Entry::new("ours", || Ok(crate::batched(|_| Ok(()))));
    let rival = Entry::new("rival", || -> Result<Fake> { bail!("no memory") });
    let mut report = Report::default();
    let mut lineup = Lineup::start("group", &[&ours, &rival], true, &mut report);
    let found = lineup.meet(&Case::new("w").quantity("w", US), Duration::ZERO, 0, &mut report);
    assert_eq!(found, [[]]);
    assert!(format!("{report:?}").contains("group, rival: no memory"), "{report:?}");
}

#[test]
fn percentiles_are_taken_over_enough_operations() {
    let sample = |us: u64| Sample {
        iterations: 40,
        elapsed: Duration::from_micros(40 * us),
        latencies: vec![Duration::from_micros(us); 40],
    };
    let (ours, rival): (Vec<_>, Vec<_>) = (1..=7).map(|us| (sample(us), sample(10 * us))).unzip();
    let p99 = Quantity::Percentile(99.0, Unit::Microseconds);
    // 100 operations take three rounds; the seventh round joins the second block.
    assert_eq!(pairs(p99, &ours, &rival), [(3.0, 30.0), (7.0, 70.0)]);
    assert_eq!(pairs(p99, &ours[..2], &rival[..2]), [(2.0, 20.0)]);
    assert_eq!(pairs(US, &ours, &rival).len(), 7);
    assert_eq!(pairs(US, &[], &[]), []);
}

fn entry(name: &str, memory: usize) -> Entry {
    Entry::new(name, || Ok(batched(|_| Ok(())))).memory(memory)
}

fn names(lineups: &[Vec<&Entry>]) -> Vec<Vec<String>> {
    lineups.iter().map(|lineup| lineup.iter().map(|entry| entry.name.clone()).collect()).collect()
}

#[test]
fn contenders_that_fit_into_memory_run_all_at_once_and_others_by_pairs() {
    let group = Group::new("g", entry("ours", 100), [entry("a", 100), entry("b", 300)]);
    let mut report = Report::default();
    assert_eq!(names(&lineups(&group, 1000, &mut report)), [["ours", "a", "b"]]);
    let group = group.by_pairs();
    assert_eq!(names(&lineups(&group, 1000, &mut report)), [["ours", "a"], ["ours", "b"]]);
    let group = Group { by_pairs: false, ..group };
    assert_eq!(names(&lineups(&group, 510, &mut report)), [["ours", "a"], ["ours", "b"]]);
    assert!(report.skipped.is_empty());
    assert_eq!(names(&lineups(&group, 300, &mut report)), [["ours", "a"]]);
    assert!(report.skipped.iter().any(|line| line.starts_with("g, b: needs")), "{report:?}");
    assert!(report.failed.is_empty());
}

#[test]
fn contenders_start_several_times_and_all_lineups_add_to_a_case() {
    let starts = Rc::new(Cell::new(0));
    let counting = |name: &str| {
        let starts = Rc::clone(&starts);
        Entry::new(name, move || {
            starts.set(starts.get() + 1);
            Ok(batched(|_| {
                std::thread::sleep(Duration::from_millis(2));
                Ok(())
            }))
        })
    };
    // Any two of these fit into memory, but not all three: there are two lineups.
    let third = usize::try_from(machine::available_memory().unwrap() / 3).unwrap();
    let [ours, one, other] = ["ours", "one", "other"].map(counting);
    let group = Group::new("g", ours.memory(third), [one.memory(third), other.memory(third)])
        // A case that needs its rounds: a busy machine does not make the starts fewer.
        .case(Case::mean("w", "c", Unit::Microseconds).rounds(4));
    let mut report = Report::default();
    let soon = Instant::now() + Duration::from_secs(2);
    let found = measure(&group, soon, &[], &|_| (), &mut report).unwrap();
    assert_eq!(starts.get(), 4 * STARTS);
    let rivals: Vec<_> = found.comparisons.iter().map(|found| found.rival).collect();
    assert_eq!(rivals, ["one", "other"]);
    assert!(found.comparisons.iter().all(|found| found.pairs.len() >= usize::try_from(STARTS).unwrap()));
    assert!(report.skipped.is_empty() && report.failed.is_empty(), "{report:?}");
}

#[test]
fn slow_operations_leave_fewer_starts() {
    let starts = Rc::new(Cell::new(0));
    let counter = Rc::clone(&starts);
    let slow = Entry::new("slow", move || {
        counter.set(counter.get() + 1);
        Ok(batched(|_| {
            std::thread::sleep(Duration::from_millis(100));
            Ok(())
        }))
    });
    let group = Group::new("g", slow, [entry("fast", 0)]).case(Case::mean("w", "c", Unit::Microseconds));
    let soon = Instant::now() + Duration::from_millis(100);
    measure(&group, soon, &[], &|_| (), &mut Report::default()).unwrap();
    assert_eq!(starts.get(), 1);
}

#[test]
fn a_case_gets_the_rounds_that_it_needs_though_time_is_up() {
    let slow = || {
        Entry::new("slow", || {
            Ok(batched(|_| {
                std::thread::sleep(Duration::from_millis(20));
                Ok(())
            }))
        })
    };
    let case = Case::mean("w", "c", Unit::Microseconds).rounds(9);
    let group = Group::new("g", slow(), [slow()]).case(case);
    let soon = Instant::now() + Duration::from_millis(10);
    let found = measure(&group, soon, &[], &|_| (), &mut Report::default()).unwrap();
    let pairs: Vec<_> = found.comparisons.iter().map(|found| found.pairs.len()).collect();
    assert_eq!(pairs.len(), 1);
    assert!(pairs[0] >= 9, "{pairs:?}");
}

#[test]
fn what_cannot_start_is_not_started_again() {
    let asked = Rc::new(Cell::new(0));
    let counter = Rc::clone(&asked);
    let unable = Entry::new("unable", move || {
        counter.set(counter.get() + 1);
        Err::<crate::process::Worker, _>(Skipped("not here".into()).into())
    });
    let group = Group::new("g", entry("ours", 0), [unable, entry("able", 0)]).case(Case::mean(
        "w",
        "c",
        Unit::Microseconds,
    ));
    let mut report = Report::default();
    let soon = Instant::now() + Duration::from_millis(50);
    let found = measure(&group, soon, &[], &|_| (), &mut report).unwrap();
    assert_eq!(asked.get(), 1);
    assert_eq!(found.comparisons.iter().map(|found| found.rival).collect::<Vec<_>>(), ["able"]);
    assert_eq!(report.skipped.len(), 1);
}

#[test]
fn events_are_counted_for_each_operation_in_one_start() {
    let events: Vec<_> = counts::available(&mut Report::default())
        .into_iter()
        .filter(|event| event.1 == "system calls")
        .collect();
    if events.is_empty() {
        orrery_testing::skipped!("perf cannot count system calls here");
        return;
    }
    let calls = |name, count: u32| {
        Entry::new(name, move || {
            Ok(batched(move |_| {
                (0..count).for_each(|_| _ = rustix::thread::gettid());
                Ok(())
            }))
        })
    };
    let case = Case::mean("w", "time", Unit::Microseconds).quantity("rate", Quantity::Rate);
    let group = Group::new("g", calls("few", 100), [calls("many", 1000), entry("none", 0)]).case(case);
    let soon = Instant::now() + Duration::from_millis(200);
    let found = measure(&group, soon, &events, &|_| (), &mut Report::default()).unwrap();
    let counted: Vec<_> = found.counted.iter().map(|one| (one.name, one.event.1, one.rival)).collect();
    assert_eq!(counted, [("time", "system calls", "many"), ("time", "system calls", "none")]);
    let (few, many) = found.counted[0].pair;
    // Other tests, beside this one, make calls in other threads of this process.
    assert!(few >= 100.0 && many >= 1000.0, "{few} {many}");
}

#[test]
fn slow_starts_leave_fewer_starts() {
    let affordable = |starting| affordable_starts(Duration::from_secs(8), Duration::from_millis(starting));
    assert_eq!([0, 1000, 1001, 2500, 9000].map(affordable), [4, 4, 3, 1, 1]);
}
