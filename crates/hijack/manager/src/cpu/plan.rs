//! Who comes first.

use std::cmp::Reverse;

/// How a tracee is to run until the next tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// Before all others: of those below their target, its period ends first.
    First,
    /// Before all that have no reservation.
    Below,
    /// It has had its target: after all others, with what they leave.
    Above,
    /// It has no reservation: as anybody.
    Free,
}

/// What there is to know of a tracee.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    /// Whether it is below its target; `None` without reservation.
    pub(crate) below: Option<bool>,
    /// When its period ends.
    pub(crate) deadline: u64,
    /// The order that somebody decided for it in this period; 0 if nobody did.
    pub(crate) order: u32,
}

/// Returns who comes first of those below their targets: the highest order, and without one the earliest deadline. One is
/// first at most: should that one sleep, the others go in the order in which they came, which is all that two levels of priority can do.
#[must_use]
pub(crate) fn first(needs: impl Iterator<Item = Need>) -> Option<usize> {
    let below = needs.enumerate().filter(|(_, need)| need.below == Some(true));
    below.min_by_key(|(_, need)| (Reverse(need.order), need.deadline)).map(|(index, _)| index)
}

/// Who is before whom of those below their targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// It is the only one.
    Alone,
    /// It comes first of several.
    First,
    /// Another one comes first.
    Later,
}

/// Returns the level of a tracee with this need, which has the level `now`. A level that is as good stays: to change one interrupts the
/// CPU on which the tracee runs.
#[must_use]
pub(crate) fn level(need: Need, place: Place, now: Level) -> Level {
    match (need.below, place) {
        (None, _) => Level::Free,
        (Some(false), _) => Level::Above,
        (Some(true), Place::Alone) if now == Level::First => Level::First,
        (Some(true), Place::First) => Level::First,
        (Some(true), Place::Alone | Place::Later) => Level::Below,
    }
}

/// Returns the places of all: see [`first`].
pub(crate) fn places(needs: &[Need]) -> impl Iterator<Item = Place> {
    let first = first(needs.iter().copied());
    let alone = needs.iter().filter(|need| need.below == Some(true)).count() == 1;
    (0..needs.len()).map(move |index| match Some(index) == first {
        true if alone => Place::Alone,
        true => Place::First,
        false => Place::Later,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plan(needs: &[Need]) -> Vec<Level> {
        let places = places(needs);
        needs.iter().zip(places).map(|(need, place)| level(*need, place, Level::Above)).collect()
    }

    #[test]
    fn who_is_below_its_target_alone_keeps_its_level() {
        let need = |below| Need { below: Some(below), deadline: 5, order: 0 };
        for now in [Level::First, Level::Below] {
            assert_eq!(level(need(true), Place::Alone, now), now);
            assert_eq!(level(need(true), Place::Later, now), Level::Below);
            assert_eq!(level(need(true), Place::First, now), Level::First);
            assert_eq!(level(need(false), Place::Later, now), Level::Above);
        }
        assert_eq!(level(need(true), Place::Alone, Level::Above), Level::Below);
        assert_eq!(plan(&[need(false), need(true)]), [Level::Above, Level::Below]);
    }

    #[test]
    fn the_earliest_deadline_below_its_target_is_first() {
        let need = |below, deadline| Need { below, deadline, order: 0 };
        let needs = [need(Some(true), 9), need(Some(false), 1), need(Some(true), 5), need(None, 0)];
        assert_eq!(plan(&needs), [Level::Below, Level::Above, Level::First, Level::Free]);
        assert!(plan(&[]).is_empty());
    }

    #[test]
    fn the_highest_order_goes_before_an_earlier_deadline() {
        let need = |below, deadline, order| Need { below, deadline, order };
        let needs =
            [need(Some(true), 5, 0), need(Some(true), 9, 2), need(Some(false), 1, 7), need(Some(true), 8, 2)];
        assert_eq!(plan(&needs), [Level::Below, Level::Below, Level::Above, Level::First]);
    }

    proptest! {
        /// A model of the kernel on one CPU: the first one runs. What the guard admits is met in every period.
        #[test]
        fn what_is_admitted_is_met(shares in prop::collection::vec((1..30_u64, 2..50_u64), 1..6)) {
            use crate::cpu::account::{Account, Reservation};
            const TICK: u64 = 10_000_000;
            // Whole ticks, as this model of the CPU gives no less; 95 hundredths at most.
            let mut all: Vec<(Account, u64)> = Vec::new();
            let mut sum = 0.0;
            for (target, period) in shares {
                #[expect(clippy::cast_precision_loss, reason = "small")]
                let share = target as f64 / period as f64;
                if sum + share <= 0.95 {
                    sum += share;
                    all.push((Account::new(Reservation { target: target * TICK, period: period * TICK }, 0, 0, None), 0));
                }
            }
            for tick in 1..2000 {
                let needs: Vec<Need> = all.iter().map(|(account, used)| Need {
                    below: Some(account.is_below(*used)),
                    deadline: account.deadline(),
                    order: 0,
                }).collect();
                // The highest level runs, and there is one in it.
                let levels = plan(&needs);
                let highest = [Level::First, Level::Below].into_iter().find(|level| levels.contains(level));
                if let Some(running) = highest.and_then(|highest| levels.iter().position(|level| *level == highest)) {
                    prop_assert_eq!(levels.iter().filter(|level| Some(**level) == highest).count(), 1);
                    all[running].1 += TICK;
                }
                for (account, used) in &mut all {
                    account.advance(tick * TICK, *used, || None);
                }
            }
            for (account, _) in &all {
                prop_assert_eq!(account.counts().1, 0);
            }
        }
    }
}
