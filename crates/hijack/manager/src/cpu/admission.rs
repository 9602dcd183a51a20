//! The guard: which reservations can be met together.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::attributes::{Admission, Classes, Guard, Proposal, TraceeId};

/// How much of the CPUs may be reserved, in hundredths: the rest is the kernel's, the manager's, and everybody else's.
const BOUND: u64 = 95;

/// The CPUs that each tracee may run on, as a set of bits: the service writes it, the guard reads it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Masks(Arc<Mutex<BTreeMap<TraceeId, u128>>>);

impl Masks {
    /// Sets a tracee's.
    pub(crate) fn set(&self, tracee: TraceeId, mask: u128) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(tracee, mask);
    }

    /// Forgets a tracee's.
    pub(crate) fn remove(&self, tracee: TraceeId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&tracee);
    }

    /// Returns a tracee's; all where that is not known.
    pub(crate) fn get(&self, tracee: TraceeId) -> u128 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&tracee).copied().unwrap_or(u128::MAX)
    }
}

/// The guard of `cpu.target` and `cpu.period`.
#[derive(Debug)]
pub(crate) struct Admit {
    target: usize,
    period: usize,
    masks: Masks,
    online: u128,
}

/// A share of one CPU, in millionths.
#[derive(Debug, Clone, Copy)]
struct Share {
    millionths: u64,
    mask: u128,
}

impl Admit {
    /// Makes the guard; `online` are the CPUs there are.
    ///
    /// # Errors
    /// [`crate::AttributeError::UnknownClass`] where these classes are not declared.
    pub(crate) fn new(classes: &Classes, masks: Masks, online: u128) -> Result<Self, crate::AttributeError> {
        let (target, period) = (classes.named("cpu.target")?.0, classes.named("cpu.period")?.0);
        Ok(Self { target, period, masks, online: online.max(1) })
    }
}

impl Guard for Admit {
    fn classes(&self) -> Vec<usize> {
        vec![self.target, self.period]
    }

    fn admit(&self, proposal: &Proposal<'_>) -> Admission {
        let (target, period) = (proposal.own(self.target), proposal.own(self.period));
        if target == 0 {
            return Ok(());
        }
        if period == 0 {
            return Err("a target needs a period: set both in one request".to_owned());
        }
        if target > period {
            return Err(
                "the target is longer than the period, and one CPU has no more time than passes".to_owned()
            );
        }
        let share = |(tracee, values): &(TraceeId, &[i64])| {
            let value = |class: usize| values.get(class).and_then(|value| u64::try_from(*value).ok());
            let (target, period) = (value(self.target)?, value(self.period).filter(|period| *period > 0)?);
            let millionths = u64::try_from(u128::from(target) * 1_000_000 / u128::from(period)).ok()?;
            let mask = match self.masks.get(*tracee) & self.online {
                0 => self.online,
                mask => mask,
            };
            (target > 0).then_some(Share { millionths, mask })
        };
        let shares: Vec<Share> = proposal.values.iter().filter_map(share).collect();
        feasible(&shares)
    }
}

/// Decides by the bound for global scheduling by deadline (Goossens, Funk and Baruah, 2003): on `m` CPUs a set of shares can be met if
/// its sum is at most `m - (m - 1) * largest`. For each set of CPUs that some tracee is bound to, that must hold of those which are
/// bound to it or to a part of it.
fn feasible(shares: &[Share]) -> Admission {
    for Share { mask, .. } in shares {
        let within = || shares.iter().filter(|share| share.mask & !mask == 0).map(|share| share.millionths);
        let (sum, largest) = (within().sum::<u64>(), within().max().unwrap_or(0).min(1_000_000));
        let cpus = u64::from(mask.count_ones());
        let most = (cpus * 1_000_000 - (cpus - 1) * largest) * BOUND / 100;
        if sum > most {
            let percent = |millionths: u64| format!("{}.{}%", millionths / 10_000, millionths / 1000 % 10);
            let of = if cpus == 1 { "one CPU".to_owned() } else { format!("{cpus} CPUs") };
            return Err(format!(
                "all reservations on {of} would be {} of one CPU's time; the bound is {}",
                percent(sum),
                percent(most)
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::attributes::{Rights, Table};

    const MS: i64 = 1_000_000;

    #[test]
    fn reservations_over_the_sum_are_refused() {
        let classes = Classes::own().unwrap();
        let mut table = Table::new(classes);
        let masks = Masks::default();
        table.add_guard(Box::new(Admit::new(table.classes(), masks.clone(), 0b11).unwrap()));
        let all = table.grant(Rights::ALL).unwrap();
        let tracees: Vec<_> = (0..4).map(|_| table.add_tracee().unwrap()).collect();
        for tracee in &tracees {
            masks.set(*tracee, 0b10);
        }
        let mut reserve = |tracee: usize, target: i64, period: i64| {
            table.set(&all, tracees[tracee], &[("cpu.target", target * MS), ("cpu.period", period * MS)])
        };
        // The experiment of the slides.
        for (tracee, target, period) in [(0, 40, 400), (1, 100, 500), (2, 60, 200)] {
            reserve(tracee, target, period).unwrap();
        }
        let error = reserve(3, 40, 100).unwrap_err().to_string();
        assert!(error.contains("all reservations on one CPU would be 100.0% of one CPU's time"), "{error}");
        assert!(error.starts_with("cannot reserve cpu.target = 40ms, cpu.period = 100ms: "), "{error}");
        reserve(3, 35, 100).unwrap();
        assert!(reserve(3, 30, 0).unwrap_err().to_string().contains("needs a period"));
        assert!(reserve(3, 300, 200).unwrap_err().to_string().contains("longer than the period"));
        reserve(3, 0, 0).unwrap();
        masks.set(tracees[3], 0b01);
        // The other CPU is free, but the manager leaves where on both CPUs who runs to the kernel.
        reserve(3, 90, 100).unwrap();
    }

    proptest! {
        #[test]
        fn what_is_removed_leaves_the_rest_feasible(
            shares in prop::collection::vec((1..900_000_u64, 1..16_u128), 1..8),
        ) {
            let shares: Vec<_> = shares.iter().map(|(millionths, mask)| Share { millionths: *millionths, mask: *mask }).collect();
            if feasible(&shares).is_ok() {
                for index in 0..shares.len() {
                    let mut fewer = shares.clone();
                    fewer.remove(index);
                    prop_assert!(feasible(&fewer).is_ok());
                }
            }
        }
    }
}
