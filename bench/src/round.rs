//! The interleaved measurement of one group.
//!
//! A machine's speed drifts: it heats up, other programs come and go. Two contenders measured one after the other would
//! each meet another machine. So a case is measured in *rounds*: in each, every contender gets a slice of equal length.
//! Their order changes from round to round, such that each comes first as often as last, and none more often than
//! another right after itself, where it would find its data in the caches. Values are compared only within a round (a
//! [`Pair`]), and what is reported is the median of those comparisons.
//!
//! Two processes that do the same differ by up to a fifth for as long as they live, because each got other pages of the
//! machine's memory. So the contenders of a group are started several times, and the median is over all rounds.
//!
//! No library that we know does this. criterion and divan measure one function after the other. tango-bench pairs two
//! builds of one function within one process; our contenders are processes, there are more than two of them, and what one
//! does to its process must not change what is measured of another. What a library could give is the statistics, which
//! are forty lines.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::contender::{Contender, Sample, Skipped};
use crate::counts::{self, Event};
use crate::group::{Case, Entry, Group, Quantity};
use crate::machine;
use crate::report::Report;

/// How often a group's contenders are started, where that does not take most of the time.
const STARTS: u32 = 4;
/// The part of the available memory that contenders may fill.
const USABLE_MEMORY: f64 = 0.8;
/// Fewer rounds than this show no spread, whatever the time.
const FEWEST_ROUNDS: usize = 2;
/// More rounds than this add nothing to a median.
const MOST_ROUNDS: usize = 30;
/// The number of rounds that a case's time is divided into, as far as its operations are short enough.
const ROUNDS: u32 = 10;
const SHORTEST_SLICE: Duration = Duration::from_millis(2);
const LONGEST_SLICE: Duration = Duration::from_millis(100);
const MOST_ITERATIONS: f64 = 1e6;
/// A round that takes longer than this is not done once more for the sake of counts.
const LONGEST_COUNTED: Duration = Duration::from_secs(1);
/// The first operation may set up what all later ones find: only one that takes longer than this is not repeated before
/// it counts.
const LONGEST_WARM_UP: Duration = Duration::from_secs(2);

/// Our value and a rival's, from the same round.
pub(crate) type Pair = (f64, f64);

/// The pairs of one quantity of a case and one rival, over all starts.
pub(crate) struct Comparison<'g> {
    pub(crate) name: &'g str,
    pub(crate) quantity: Quantity,
    pub(crate) rival: &'g str,
    pub(crate) pairs: Vec<Pair>,
}

/// How often an event happened in one operation of a case, of ours and of a rival.
pub(crate) struct Counted<'g> {
    /// The name of the case's first quantity.
    pub(crate) name: &'g str,
    pub(crate) event: Event,
    pub(crate) rival: &'g str,
    pub(crate) pair: Pair,
}

/// What was found of a group.
pub(crate) struct Found<'g> {
    pub(crate) comparisons: Vec<Comparison<'g>>,
    pub(crate) counted: Vec<Counted<'g>>,
}

/// Measures all cases of `group` until `deadline`, and counts `events` once in each.
pub(crate) fn measure<'g>(
    group: &'g Group,
    deadline: Instant,
    events: &[Event],
    progress: &dyn Fn(String),
    report: &mut Report,
) -> Result<Found<'g>> {
    let begin = Instant::now();
    let left = || deadline.saturating_duration_since(Instant::now());
    let mut lineups = lineups(group, machine::available_memory()?, report);
    // By case, quantity and rival, in the group's order of them.
    let mut found: BTreeMap<(usize, usize, usize), Vec<Pair>> = BTreeMap::new();
    let mut counted = Vec::new();
    let (mut start, mut starts) = (0, STARTS);
    while start < starts {
        let started = Instant::now();
        let lineup_count = u32::try_from(lineups.len())?;
        for (index, lineup) in (0..).zip(&mut lineups) {
            progress(format!("{}: starting", group.name));
            let before = Instant::now();
            let mut running = Lineup::start(&group.name, lineup, start % 2 == 1, report);
            let starting = before.elapsed();
            lineup.retain(|entry| running.has_started(&entry.name));
            if start == 0 && index == 0 {
                let time = deadline.saturating_duration_since(begin);
                starts = affordable_starts(time, starting * lineup_count);
            }
            let starts_left = (starts - start) * lineup_count - index - 1;
            let end = Instant::now() + left().saturating_sub(starting * starts_left) / (starts_left + 1);
            for (number, (cases_left, case)) in
                (1..=u32::try_from(group.cases.len())?).rev().zip(&group.cases).enumerate()
            {
                progress(format!("{}: {}", group.name, case.work));
                let share = end.saturating_duration_since(Instant::now()) / cases_left;
                let rounds = case.fewest_rounds.div_ceil(usize::try_from(starts)?);
                for (quantity, compared) in running.meet(case, share, rounds, report).into_iter().enumerate()
                {
                    for (name, pairs) in compared {
                        let rival = group.rivals.iter().position(|rival| rival.name == name).unwrap_or(0);
                        found.entry((number, quantity, rival)).or_default().extend(pairs);
                    }
                }
                if start == 0 && !events.is_empty() && running.is_short() {
                    counted.extend(running.count(case, events, report));
                }
            }
        }
        lineups.retain(|lineup| lineup.len() > 1 && lineup[0].name == group.ours.name);
        start += 1;
        // Where a few rounds of whole programs take longer than they should, fewer starts have to do.
        if left() < started.elapsed() / 2 && group.cases.iter().all(|case| case.fewest_rounds == 0) {
            break;
        }
    }
    let comparison = |((case, quantity, rival), pairs): ((usize, usize, usize), _)| {
        let (name, quantity) = &group.cases[case].quantities[quantity];
        Comparison { name, quantity: *quantity, rival: &group.rivals[rival].name, pairs }
    };
    Ok(Found { comparisons: found.into_iter().map(comparison).collect(), counted })
}

/// Returns how many starts take half of the time at most; at least one.
fn affordable_starts(time: Duration, starting: Duration) -> u32 {
    (1..=STARTS).rev().find(|&starts| starting * starts <= time / 2).unwrap_or(1)
}

/// Returns who runs beside whom: everybody at once where memory and the group allow it, else ours with one rival at a
/// time.
fn lineups<'g>(group: &'g Group, available: u64, report: &mut Report) -> Vec<Vec<&'g Entry>> {
    let fits = |entries: &[&Entry]| {
        let needed: u64 = entries.iter().map(|entry| entry.memory).sum();
        needed as f64 <= available as f64 * USABLE_MEMORY
    };
    let everybody: Vec<_> = [&group.ours].into_iter().chain(&group.rivals).collect();
    if fits(&everybody) && !group.by_pairs {
        return vec![everybody];
    }
    let mut pairs = Vec::new();
    for rival in &group.rivals {
        let pair = vec![&group.ours, rival];
        if fits(&pair) {
            pairs.push(pair);
        } else {
            let needed = (group.ours.memory + rival.memory) >> 20;
            let reason = Skipped(format!("needs {needed} MiB, {} MiB are available", available >> 20));
            report.absent(&format!("{}, {}", group.name, rival.name), &reason.into());
        }
    }
    pairs
}

/// The contenders of a group that were started together, ours first.
struct Lineup<'g> {
    group: &'g str,
    participants: Vec<Participant<'g>>,
}

struct Participant<'g> {
    name: &'g str,
    /// None where it did not start, or failed since: its state is unknown, so it does nothing more.
    contender: Option<Box<dyn Contender>>,
    /// Whether it can do the present case.
    able: bool,
    /// How many operations fill a slice of the present case.
    iterations: u32,
    /// The samples of the present case, one for each round.
    samples: Vec<Sample>,
}

impl<'g> Lineup<'g> {
    /// Starts the contenders, in this order or its reverse: who comes first finds other free memory than who comes last.
    fn start(group: &'g str, entries: &[&'g Entry], reversed: bool, report: &mut Report) -> Self {
        let participants = entries.iter().map(|entry| Participant::new(&entry.name)).collect();
        let mut lineup = Self { group, participants };
        let mut starting: Vec<_> = lineup.participants.iter_mut().zip(entries).collect();
        if reversed {
            starting.reverse();
        }
        for (participant, entry) in starting {
            participant.contender = report.present(&format!("{group}, {}", entry.name), entry.start());
        }
        lineup
    }

    fn has_started(&self, name: &str) -> bool {
        self.participants.iter().any(|one| one.name == name && one.contender.is_some())
    }

    /// Measures one case in about `time`, and in `fewest_rounds` at least. Returns the pairs for each of its quantities and
    /// each rival that took part.
    fn meet(
        &mut self,
        case: &Case,
        time: Duration,
        fewest_rounds: usize,
        report: &mut Report,
    ) -> Vec<Vec<(&'g str, Vec<Pair>)>> {
        let end = Instant::now() + time;
        let what = format!("{}, {}", self.group, case.work);
        let slots = ROUNDS * u32::try_from(self.participants.len()).unwrap_or(u32::MAX).max(1);
        let slice = (time / slots).clamp(SHORTEST_SLICE, LONGEST_SLICE);
        for one in &mut self.participants {
            one.settle(&case.work, slice).unwrap_or_else(|error| one.withdraw(&what, &error, report));
        }
        for round in 0..MOST_ROUNDS.max(fewest_rounds) {
            if self.ours_and_rivals().is_none()
                || (round >= fewest_rounds.max(FEWEST_ROUNDS) && Instant::now() >= end)
            {
                break;
            }
            for place in order(round, self.participants.len()) {
                let one = &mut self.participants[place];
                one.play(&case.work).unwrap_or_else(|error| one.withdraw(&what, &error, report));
            }
        }
        let compare = |quantity: Quantity| {
            let Some((ours, rivals)) = self.ours_and_rivals() else { return Vec::new() };
            rivals.iter().map(|rival| (rival.name, pairs(quantity, &ours.samples, &rival.samples))).collect()
        };
        case.quantities.iter().map(|(_, quantity)| compare(*quantity)).collect()
    }

    /// Returns whether all rounds of the present case were short.
    fn is_short(&self) -> bool {
        let samples = self.participants.iter().flat_map(|one| &one.samples);
        samples.map(|sample| sample.elapsed).max().is_some_and(|longest| longest <= LONGEST_COUNTED)
    }

    /// Counts `events` in one more round of a case that was measured. Returns what was counted, for each event and each rival that
    /// took part.
    fn count<'c>(&mut self, case: &'c Case, events: &[Event], report: &mut Report) -> Vec<Counted<'c>>
    where
        'g: 'c,
    {
        let what = format!("{}, {}, counted", self.group, case.work);
        let mut all = Vec::new();
        for one in &mut self.participants {
            let counts = one.count(&case.work, events);
            let counts = counts.unwrap_or_else(|error| {
                one.withdraw(&what, &error, report);
                None
            });
            all.push((one.name, counts));
        }
        let Some(((_, Some(ours)), rivals)) = all.split_first() else { return Vec::new() };
        let name = case.quantities.first().map_or("", |(name, _)| name);
        let mut counted = Vec::new();
        for (rival, counts) in rivals {
            for (at, theirs) in counts.iter().flatten().enumerate() {
                counted.push(Counted { name, event: events[at], rival, pair: (ours[at], *theirs) });
            }
        }
        counted
    }

    /// Returns ours and the rivals that still take part; None where there is nothing left to compare.
    fn ours_and_rivals(&self) -> Option<(&Participant<'g>, Vec<&Participant<'g>>)> {
        let (ours, rivals) = self.participants.split_first()?;
        let rivals: Vec<_> = rivals.iter().filter(|rival| rival.plays()).collect();
        (ours.plays() && !rivals.is_empty()).then_some((ours, rivals))
    }
}

impl<'g> Participant<'g> {
    fn new(name: &'g str) -> Self {
        Self { name, contender: None, able: true, iterations: 1, samples: Vec::new() }
    }

    fn plays(&self) -> bool {
        self.able && self.contender.is_some()
    }

    /// Warms up for a new case, and finds how many operations fill a slice.
    fn settle(&mut self, work: &str, slice: Duration) -> Result<()> {
        self.samples.clear();
        (self.able, self.iterations) = (true, 1);
        let Some(contender) = &mut self.contender else { return Ok(()) };
        // The first operations are not typical: caches are cold. So the estimate is corrected a few times, and the very first
        // one in any case, however well it fills the slice.
        for attempt in 0..4 {
            let start = Instant::now();
            let sample = contender.measure(work, self.iterations)?;
            // What is not timed fills the slice as well.
            let elapsed = start.elapsed().max(sample.elapsed);
            let each = elapsed.as_secs_f64() / f64::from(self.iterations);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 1 to 1e6")]
            let fitting = (slice.as_secs_f64() / each).round().clamp(1.0, MOST_ITERATIONS) as u32;
            self.iterations = fitting;
            if elapsed >= slice / 2 && (attempt > 0 || elapsed > LONGEST_WARM_UP) {
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

    /// Returns how often each event happens in an operation; None where it does not take part.
    fn count(&mut self, work: &str, events: &[Event]) -> Result<Option<Vec<f64>>> {
        let iterations = self.iterations;
        let Some(contender) = self.contender.as_mut().filter(|_| self.able) else { return Ok(None) };
        let (counts, sample) =
            counts::count(events, &contender.processes(), || contender.measure(work, iterations))?;
        let operations = f64::from(sample.iterations.max(1));
        Ok(Some(counts.into_iter().map(|count| count / operations).collect()))
    }

    /// Leaves it out of this case; for good, unless it was skipped.
    fn withdraw(&mut self, what: &str, error: &anyhow::Error, report: &mut Report) {
        self.able = false;
        if !error.is::<Skipped>() {
            self.contender = None;
        }
        report.absent(&format!("{what}, {}", self.name), error);
    }
}

/// Returns the order of `count` participants in a round: rotated by one each time, and every other full turn backwards.
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

/// Pairs the numbers of two contenders: one pair for each round, or for as many rounds together as hold enough operations
/// for the quantity.
fn pairs(quantity: Quantity, ours: &[Sample], rival: &[Sample]) -> Vec<Pair> {
    let rounds = ours.len().min(rival.len());
    let fewest = ours.iter().chain(rival).map(|sample| sample.iterations).min().unwrap_or(0).max(1);
    let per_round = usize::try_from(fewest).unwrap_or(usize::MAX);
    let block = quantity.operations_needed().div_ceil(per_round).min(rounds).max(1);
    let blocks = rounds / block;
    (0..blocks)
        .map(|number| {
            let first = number * block;
            // Rounds that fill no further block belong to the last.
            let last = if number + 1 == blocks { rounds } else { first + block };
            (quantity.of(&ours[first..last]), quantity.of(&rival[first..last]))
        })
        .collect()
}

#[cfg(test)]
mod tests;
