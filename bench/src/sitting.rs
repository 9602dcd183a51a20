//! The sittings of one group.
//!
//! Two processes that do the same differ by up to a fifth, for as long as they live: each got other pages of the
//! machine's memory. So every group is held in several *sittings*, with contenders started afresh, and what is
//! reported is the median over all of them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::ProgressBar;

use crate::contender::Skipped;
use crate::field::{Field, Pair};
use crate::machine;
use crate::plan::{Entry, Group, Quantity};
use crate::runner::Absences;

/// How often a group's contenders are started afresh, where that does not take most of the time.
const SITTINGS: u32 = 4;

/// Of the available memory, the part that contenders may fill.
const USABLE_MEMORY: f64 = 0.8;

/// What was found of one case: its name, the quantity, the rival's name, and the pairs of all sittings.
pub(crate) type Finding<'a> = (&'a str, Quantity, &'a str, Vec<Pair>);

/// Measures all cases of `group`, until `deadline`.
pub(crate) fn hold<'a>(
    group: &'a Group,
    deadline: Instant,
    bar: &ProgressBar,
    absences: &mut Absences,
) -> Result<Vec<Finding<'a>>> {
    let begin = Instant::now();
    let mut lineups = lineups(group, machine::available_memory()?, absences);
    // By case, quantity and rival, in the group's order of them.
    let mut found: BTreeMap<(usize, usize, usize), Vec<Pair>> = BTreeMap::new();
    let (mut sitting, mut sittings) = (0, SITTINGS);
    while sitting < sittings {
        let sat = Instant::now();
        let lineups_in_all = u32::try_from(lineups.len())?;
        for (place, lineup) in (0..).zip(&mut lineups) {
            bar.set_message(format!("{}: starting", group.name));
            let start = Instant::now();
            let mut field = Field::start(&group.name, lineup, sitting % 2 == 1, absences);
            let starting = start.elapsed();
            lineup.retain(|entry| field.has_started(&entry.name));
            if sitting == 0 && place == 0 {
                let time = deadline.saturating_duration_since(begin);
                sittings = affordable_sittings(time, starting * lineups_in_all);
            }
            let starts_left = (sittings - sitting) * lineups_in_all - place - 1;
            let time =
                deadline.saturating_duration_since(Instant::now()).saturating_sub(starting * starts_left);
            let end = Instant::now() + time / (starts_left + 1);
            for (number, (turns, case)) in
                (1..=u32::try_from(group.cases.len())?).rev().zip(&group.cases).enumerate()
            {
                bar.set_message(format!("{}: {}", group.name, case.work));
                let share = end.saturating_duration_since(Instant::now()) / turns;
                let rounds = case.fewest_rounds.div_ceil(usize::try_from(sittings)?);
                for (quantity, compared) in field.meet(case, share, rounds, absences).into_iter().enumerate()
                {
                    for (name, pairs) in compared {
                        let rival = group.rivals.iter().position(|rival| rival.name == name).unwrap_or(0);
                        found.entry((number, quantity, rival)).or_default().extend(pairs);
                    }
                }
            }
        }
        lineups.retain(|lineup| lineup.len() > 1 && lineup[0].name == group.ours.name);
        sitting += 1;
        // Where a few rounds of whole programs take longer than they should, fewer sittings have to do.
        let late = deadline.saturating_duration_since(Instant::now()) < sat.elapsed() / 2;
        if late && group.cases.iter().all(|case| case.fewest_rounds == 0) {
            break;
        }
    }
    let finding = |((case, quantity, rival), pairs): ((usize, usize, usize), _)| {
        let (name, quantity) = &group.cases[case].quantities[quantity];
        (name.as_str(), *quantity, group.rivals[rival].name.as_str(), pairs)
    };
    Ok(found.into_iter().map(finding).collect())
}

/// As many sittings as can be started in half of the time; one at least.
fn affordable_sittings(time: Duration, starting: Duration) -> u32 {
    (1..=SITTINGS).rev().find(|&sittings| starting * sittings <= time / 2).unwrap_or(1)
}

/// Who runs beside whom: everybody at once where memory and the group allow it, else ours with one rival at a time.
fn lineups<'a>(group: &'a Group, available: u64, absences: &mut Absences) -> Vec<Vec<&'a Entry>> {
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
            absences.note(&group.name, &rival.name, &reason.into());
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contender::batched;
    use crate::plan::{Case, Unit};

    fn entry(name: &str, memory: u64) -> Entry {
        Entry::new(name, || Ok(batched(|_| Ok(())))).memory(memory)
    }

    fn names(lineups: &[Vec<&Entry>]) -> Vec<Vec<String>> {
        lineups.iter().map(|lineup| lineup.iter().map(|entry| entry.name.clone()).collect()).collect()
    }

    #[test]
    fn contenders_that_fit_into_memory_run_all_at_once_and_others_by_pairs() {
        let group = Group::new("g", entry("ours", 100)).against(entry("a", 100)).against(entry("b", 300));
        let mut absences = Absences::default();
        assert_eq!(names(&lineups(&group, 1000, &mut absences)), [["ours", "a", "b"]]);
        let group = group.by_pairs();
        assert_eq!(names(&lineups(&group, 1000, &mut absences)), [["ours", "a"], ["ours", "b"]]);
        let group = Group { by_pairs: false, ..group };
        assert_eq!(names(&lineups(&group, 510, &mut absences)), [["ours", "a"], ["ours", "b"]]);
        assert!(absences.skipped.is_empty());
        assert_eq!(names(&lineups(&group, 300, &mut absences)), [["ours", "a"]]);
        assert!(absences.skipped.iter().any(|line| line.starts_with("g, b: needs")), "{absences:?}");
        assert!(absences.failed.is_empty());
    }

    #[test]
    fn every_sitting_starts_afresh_and_all_lineups_add_to_a_case() {
        let starts = std::rc::Rc::new(std::cell::Cell::new(0));
        let counting = |name: &str| {
            let starts = std::rc::Rc::clone(&starts);
            Entry::new(name, move || {
                starts.set(starts.get() + 1);
                Ok(batched(|_| {
                    std::thread::sleep(Duration::from_millis(2));
                    Ok(())
                }))
            })
        };
        // Any two of these fit into memory, but not all three: there are two lineups.
        let third = machine::available_memory().unwrap() / 3;
        let group = Group::new("g", counting("ours").memory(third))
            .against(counting("one").memory(third))
            .against(counting("other").memory(third))
            // A case that needs its rounds: a busy machine does not make the sittings fewer.
            .case(Case::new("w").quantity("c", Quantity::Mean(Unit::Microseconds)).rounds(4));
        let mut absences = Absences::default();
        let soon = Instant::now() + Duration::from_secs(2);
        let found = hold(&group, soon, &ProgressBar::hidden(), &mut absences).unwrap();
        assert_eq!(starts.get(), 4 * SITTINGS);
        let rivals: Vec<_> = found.iter().map(|(.., rival, _)| *rival).collect();
        assert_eq!(rivals, ["one", "other"]);
        assert!(
            found.iter().all(|(.., pairs)| pairs.len() >= usize::try_from(SITTINGS).unwrap()),
            "{found:?}"
        );
        assert!(absences.skipped.is_empty() && absences.failed.is_empty(), "{absences:?}");
    }

    #[test]
    fn slow_operations_leave_fewer_sittings() {
        let sittings = std::rc::Rc::new(std::cell::Cell::new(0));
        let counter = std::rc::Rc::clone(&sittings);
        let slow = Entry::new("slow", move || {
            counter.set(counter.get() + 1);
            Ok(batched(|_| {
                std::thread::sleep(Duration::from_millis(100));
                Ok(())
            }))
        });
        let group = Group::new("g", slow)
            .against(entry("fast", 0))
            .case(Case::new("w").quantity("c", Quantity::Mean(Unit::Microseconds)));
        let soon = Instant::now() + Duration::from_millis(100);
        hold(&group, soon, &ProgressBar::hidden(), &mut Absences::default()).unwrap();
        assert_eq!(sittings.get(), 1);
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
        let case = Case::new("w").quantity("c", Quantity::Mean(Unit::Microseconds)).rounds(9);
        let group = Group::new("g", slow()).against(slow()).case(case);
        let soon = Instant::now() + Duration::from_millis(10);
        let found = hold(&group, soon, &ProgressBar::hidden(), &mut Absences::default()).unwrap();
        let pairs: Vec<_> = found.iter().map(|(.., pairs)| pairs.len()).collect();
        assert_eq!(pairs.len(), 1);
        assert!(pairs[0] >= 9, "{pairs:?}");
    }

    #[test]
    fn who_cannot_start_is_not_asked_again() {
        let asked = std::rc::Rc::new(std::cell::Cell::new(0));
        let counter = std::rc::Rc::clone(&asked);
        let unable = Entry::new("unable", move || {
            counter.set(counter.get() + 1);
            Err::<crate::Worker, _>(Skipped("not here".into()).into())
        });
        let group = Group::new("g", entry("ours", 0))
            .against(unable)
            .against(entry("able", 0))
            .case(Case::new("w").quantity("c", Quantity::Mean(Unit::Microseconds)));
        let mut absences = Absences::default();
        let soon = Instant::now() + Duration::from_millis(50);
        let found = hold(&group, soon, &ProgressBar::hidden(), &mut absences).unwrap();
        assert_eq!(asked.get(), 1);
        assert_eq!(found.iter().map(|(.., rival, _)| *rival).collect::<Vec<_>>(), ["able"]);
        assert_eq!(absences.skipped.len(), 1);
    }

    #[test]
    fn slow_starts_leave_fewer_sittings() {
        let affordable =
            |starting| affordable_sittings(Duration::from_secs(8), Duration::from_millis(starting));
        assert_eq!([0, 1000, 1001, 2500, 9000].map(affordable), [4, 4, 3, 1, 1]);
    }
}
