//! The interleaved A/B measurement of one case.
//!
//! A machine's speed drifts: it heats up, its neighbours come and go. Two contenders measured one after the
//! other would each meet another machine. So a case is measured in *rounds*: in each, every contender gets a
//! slice of equal length. Their order changes from round to round, such that each comes first as often as last,
//! and none more often than another right after itself, where it would find its data in the caches. Values are
//! compared only within a round (a [`Pair`]), and what is reported is the median of those comparisons.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::contender::{Contender, Sample, Skipped};
use crate::plan::{Case, Entry, Quantity};
use crate::runner::Absences;

/// Fewer rounds than this say nothing about the spread, whatever the time.
const FEWEST_ROUNDS: usize = 2;
/// More rounds than this add nothing to a median.
const MOST_ROUNDS: usize = 30;
/// Into how many rounds a case's time is cut, as far as its operations are short enough.
const WANTED_ROUNDS: u32 = 10;
const SHORTEST_SLICE: Duration = Duration::from_millis(2);
const LONGEST_SLICE: Duration = Duration::from_millis(100);
const MOST_ITERATIONS: f64 = 1e6;
/// The first operation may make what all later ones find: only one that takes longer than this is not done again before
/// it counts.
const LONGEST_WARM_UP: Duration = Duration::from_secs(2);

/// Our value and a rival's, from the same round.
pub(crate) type Pair = (f64, f64);

/// The contenders of a group that were started, ours first.
pub(crate) struct Field<'a> {
    group: &'a str,
    seats: Vec<Seat<'a>>,
}

struct Seat<'a> {
    name: &'a str,
    /// None where it did not start, or failed since: its state is unknown, so it does nothing more.
    contender: Option<Box<dyn Contender>>,
    /// Whether it can do the present case.
    able: bool,
    /// How many operations fill a slice of the present case.
    iterations: u32,
    /// Of the present case, one for each round.
    samples: Vec<Sample>,
}

impl<'a> Field<'a> {
    /// Starts the contenders of `lineup`, of which ours comes first, in that order or its reverse: who comes
    /// first finds other free memory than who comes last.
    pub(crate) fn start(
        group: &'a str,
        lineup: &[&'a Entry],
        reversed: bool,
        absences: &mut Absences,
    ) -> Self {
        let mut field = Self { group, seats: lineup.iter().map(|entry| Seat::new(&entry.name)).collect() };
        let mut starting: Vec<_> = field.seats.iter_mut().zip(lineup).collect();
        if reversed {
            starting.reverse();
        }
        for (seat, entry) in starting {
            match (entry.start)() {
                Ok(contender) => seat.contender = Some(contender),
                Err(error) => absences.note(group, &entry.name, &error),
            }
        }
        field
    }

    /// Whether a contender of this name was started.
    pub(crate) fn has_started(&self, name: &str) -> bool {
        self.seats.iter().any(|seat| seat.name == name && seat.contender.is_some())
    }

    /// Measures one case in about `time`, and in so many rounds at least. Gives for each of its quantities and each
    /// rival that took part the rival's name and the pairs.
    pub(crate) fn meet(
        &mut self,
        case: &Case,
        time: Duration,
        fewest_rounds: usize,
        absences: &mut Absences,
    ) -> Vec<Vec<(&'a str, Vec<Pair>)>> {
        let end = Instant::now() + time;
        let what = format!("{}, {}", self.group, case.work);
        let slots = WANTED_ROUNDS * u32::try_from(self.seats.len()).unwrap_or(u32::MAX).max(1);
        let slice = (time / slots).clamp(SHORTEST_SLICE, LONGEST_SLICE);
        for seat in &mut self.seats {
            seat.settle(&case.work, slice).unwrap_or_else(|error| seat.excuse(&what, &error, absences));
        }
        for round in 0..MOST_ROUNDS.max(fewest_rounds) {
            if self.decided() || (round >= fewest_rounds.max(FEWEST_ROUNDS) && Instant::now() >= end) {
                break;
            }
            for place in order(round, self.seats.len()) {
                let seat = &mut self.seats[place];
                seat.play(&case.work).unwrap_or_else(|error| seat.excuse(&what, &error, absences));
            }
        }
        case.quantities.iter().map(|(_, quantity)| self.compare(*quantity)).collect()
    }

    /// Whether there is nothing left to compare: ours or all rivals are out.
    fn decided(&self) -> bool {
        match self.seats.split_first() {
            Some((ours, rivals)) => !ours.plays() || !rivals.iter().any(Seat::plays),
            None => true,
        }
    }

    fn compare(&self, quantity: Quantity) -> Vec<(&'a str, Vec<Pair>)> {
        match self.seats.split_first() {
            Some((ours, rivals)) if ours.plays() => rivals
                .iter()
                .filter(|rival| rival.plays())
                .map(|rival| (rival.name, pairs(quantity, &ours.samples, &rival.samples)))
                .collect(),
            _ => Vec::new(),
        }
    }
}

impl<'a> Seat<'a> {
    fn new(name: &'a str) -> Self {
        Self { name, contender: None, able: true, iterations: 1, samples: Vec::new() }
    }

    fn plays(&self) -> bool {
        self.able && self.contender.is_some()
    }

    /// Warms up for a new case, and finds how many operations fill a slice.
    fn settle(&mut self, work: &str, slice: Duration) -> Result<()> {
        self.samples.clear();
        self.able = true;
        self.iterations = 1;
        let Some(contender) = &mut self.contender else {
            return Ok(());
        };
        // The first operations are not typical: caches are cold. So the estimate is corrected a few times, and the very first
        // one in any case, however well it fills the slice.
        for attempt in 0..4 {
            let start = Instant::now();
            let sample = contender.measure(work, self.iterations)?;
            // What is not timed fills the slice as well.
            let elapsed = start.elapsed().max(sample.elapsed);
            let each = elapsed.as_secs_f64() / f64::from(self.iterations);
            let filled = elapsed >= slice / 2;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "1 <= fitting <= 1e6"
            )]
            let fitting = (slice.as_secs_f64() / each).round().clamp(1.0, MOST_ITERATIONS) as u32;
            self.iterations = fitting;
            if filled && (attempt > 0 || elapsed > LONGEST_WARM_UP) {
                break;
            }
        }
        Ok(())
    }

    fn play(&mut self, work: &str) -> Result<()> {
        match &mut self.contender {
            Some(contender) if self.able => self.samples.push(contender.measure(work, self.iterations)?),
            _ => {}
        }
        Ok(())
    }

    fn excuse(&mut self, what: &str, error: &anyhow::Error, absences: &mut Absences) {
        self.able = false;
        if !error.is::<Skipped>() {
            self.contender = None;
        }
        absences.note(what, self.name, error);
    }
}

/// The order of `count` seats in a round: rotated by one each time, and every other full turn backwards.
fn order(round: usize, count: usize) -> Vec<usize> {
    let mut order: Vec<_> = (0..count).collect();
    if count > 0 {
        order.rotate_left(round % count);
        if round / count % 2 == 1 {
            order.reverse();
        }
    }
    order
}

/// The numbers of two contenders, side by side: one pair for each round, or for as many rounds together as
/// hold enough operations for the quantity.
fn pairs(quantity: Quantity, ours: &[Sample], rival: &[Sample]) -> Vec<Pair> {
    let rounds = ours.len().min(rival.len());
    let fewest =
        |samples: &[Sample]| samples.iter().map(|sample| sample.iterations).min().unwrap_or(0).max(1);
    let per_round = usize::try_from(fewest(ours).min(fewest(rival))).unwrap_or(usize::MAX);
    let block = quantity.operations_needed().div_ceil(per_round).min(rounds).max(1);
    let blocks = rounds / block;
    (0..blocks)
        .map(|number| {
            let first = number * block;
            // Rounds that fill no further block belong to the last.
            let last = if number + 1 == blocks { rounds } else { first + block };
            (quantity.of(ours[first..last].iter()), quantity.of(rival[first..last].iter()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use anyhow::bail;

    use super::*;
    use crate::plan::Unit;

    const US: Quantity = Quantity::Mean(Unit::Microseconds);

    /// A contender that takes a made-up time for each operation, and notes its turns.
    struct Puppet {
        name: &'static str,
        turns: Rc<RefCell<Vec<&'static str>>>,
        each: fn(usize) -> Result<Duration>,
    }

    impl Contender for Puppet {
        fn measure(&mut self, _: &str, iterations: u32) -> Result<Sample> {
            let turn = self.turns.borrow().iter().filter(|name| **name == self.name).count();
            self.turns.borrow_mut().push(self.name);
            let each = (self.each)(turn)?;
            Ok(Sample { iterations, elapsed: each * iterations, latencies: Vec::new() })
        }
    }

    type Puppets = [(&'static str, fn(usize) -> Result<Duration>)];

    type Found = Vec<(&'static str, Vec<Pair>)>;

    fn hold(puppets: &Puppets, cases: &[&str]) -> (Vec<Found>, Vec<&'static str>, Absences) {
        let turns = Rc::new(RefCell::new(Vec::new()));
        let entry = |&(name, each): &(&'static str, fn(usize) -> Result<Duration>)| {
            let turns = Rc::clone(&turns);
            Entry::new(name, move || Ok(Puppet { name, turns: Rc::clone(&turns), each }))
        };
        let entries: Vec<_> = puppets.iter().map(entry).collect();
        let mut absences = Absences::default();
        let mut field = Field::start("group", &entries.iter().collect::<Vec<_>>(), false, &mut absences);
        let mut found = Vec::new();
        for work in cases {
            let case = Case::new(*work).quantity(*work, US);
            for compared in field.meet(&case, Duration::ZERO, 0, &mut absences) {
                let name = |rival| puppets.iter().map(|puppet| puppet.0).find(|name| *name == rival).unwrap();
                found.push(compared.into_iter().map(|(rival, pairs)| (name(rival), pairs)).collect());
            }
        }
        let turns = turns.borrow().clone();
        (found, turns, absences)
    }

    #[test]
    fn rounds_alternate_and_values_pair_up_within_a_round() {
        // Everybody slows down alike from turn to turn, so the ratio must not move at all.
        let (found, turns, _) = hold(
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
    fn every_seat_has_every_place_equally_often() {
        assert_eq!([0, 1, 2, 3].map(|round| order(round, 2)), [[0, 1], [1, 0], [1, 0], [0, 1]]);
        for count in 3..=4 {
            let rounds: Vec<_> = (0..2 * count).map(|round| order(round, count)).collect();
            for place in 0..count {
                let mut seats: Vec<_> = rounds.iter().map(|order| order[place]).collect();
                seats.sort_unstable();
                assert!(seats.iter().enumerate().all(|(turn, &seat)| seat == turn / 2), "{rounds:?}");
            }
        }
        assert!(order(5, 0).is_empty());
    }

    #[test]
    fn slices_are_filled_with_operations() {
        let mut seat = Seat::new("ours");
        seat.contender = Some(Box::new(Puppet {
            name: "ours",
            turns: Rc::default(),
            each: |turn| Ok(Duration::from_micros(if turn == 0 { 100 } else { 10 })),
        }));
        seat.settle("w", Duration::from_millis(2)).unwrap();
        assert_eq!(seat.iterations, 200);
    }

    #[test]
    fn a_first_operation_that_fills_the_slice_by_itself_is_not_taken_for_typical() {
        let settle = |each: fn(usize) -> Result<Duration>| {
            let turns = Rc::default();
            let mut seat = Seat::new("ours");
            seat.contender = Some(Box::new(Puppet { name: "ours", turns: Rc::clone(&turns), each }));
            seat.settle("w", Duration::from_millis(2)).unwrap();
            (seat.iterations, turns.borrow().len())
        };
        let cold_at_first = |turn| Ok(Duration::from_micros(if turn == 0 { 25_000 } else { 10 }));
        assert_eq!(settle(cold_at_first), (200, 3));
        assert_eq!(settle(|_| Ok(2 * LONGEST_WARM_UP)), (1, 1), "what takes so long is done once");
    }

    #[test]
    fn a_rival_that_fails_is_left_out_for_good_and_one_that_skips_for_a_case() {
        let (found, _, absences) = hold(
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
        let said = format!("{absences:?}");
        assert!(said.contains("group, first, fails: broke") && !said.contains("second, fails"), "{said}");
        assert!(said.contains("group, first, skips: not this"), "{said}");
    }

    #[test]
    fn without_ours_nothing_is_compared() {
        let (found, turns, absences) = hold(
            &[("ours", |_| bail!("broke")), ("rival", |_| Ok(Duration::from_millis(5)))],
            &["first", "second"],
        );
        assert_eq!(found, [[], []]);
        assert_eq!(turns, ["ours", "rival", "rival", "rival", "rival"], "only to settle");
        assert!(format!("{absences:?}").contains("group, first, ours: broke"));
    }

    #[test]
    fn a_contender_that_does_not_start_is_noted() {
        let ours = Entry::new("ours", || Ok(crate::batched(|_| Ok(()))));
        let rival = Entry::new("rival", || -> Result<Puppet> { bail!("no memory") });
        let mut absences = Absences::default();
        let mut field = Field::start("group", &[&ours, &rival], true, &mut absences);
        let found = field.meet(&Case::new("w").quantity("w", US), Duration::ZERO, 0, &mut absences);
        assert_eq!(found, [[]]);
        assert!(format!("{absences:?}").contains("group, rival: no memory"), "{absences:?}");
    }

    #[test]
    fn percentiles_are_taken_over_enough_operations() {
        let sample = |us: u64| Sample {
            iterations: 40,
            elapsed: Duration::from_micros(40 * us),
            latencies: vec![Duration::from_micros(us); 40],
        };
        let (ours, rival): (Vec<_>, Vec<_>) = (1..=7).map(|us| (sample(us), sample(10 * us))).unzip();
        let p99 = Quantity::Percentile(99, Unit::Microseconds);
        // 100 operations take three rounds; the seventh round joins the second block.
        assert_eq!(pairs(p99, &ours, &rival), [(3.0, 30.0), (7.0, 70.0)]);
        assert_eq!(pairs(p99, &ours[..2], &rival[..2]), [(2.0, 20.0)]);
        assert_eq!(pairs(US, &ours, &rival).len(), 7);
        assert_eq!(pairs(US, &[], &[]), []);
    }
}
