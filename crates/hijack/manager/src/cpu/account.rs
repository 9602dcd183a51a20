//! What a tracee had in its period, and how often that was too little.

/// CPU time that is guaranteed in each period, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reservation {
    /// The time.
    pub target: u64,
    /// The period; not 0.
    pub period: u64,
}

/// A period that ends before the next tick has ended: ticks are that precise.
const SLACK: u64 = 1_000_000;
/// What is below so many hundredths of the target is a miss: a process is charged at the ends of its slices.
const ENOUGH: u64 = 98;

/// The account of one reservation.
#[derive(Debug, Clone)]
pub(crate) struct Account {
    reservation: Reservation,
    /// When the current period began, and what had been used and waited until then.
    begin: u64,
    used: u64,
    waited: Option<u64>,
    periods: u64,
    missed: u64,
}

/// Periods that have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended {
    /// How many of them were missed.
    pub(crate) missed: u64,
    /// The time that they lack together.
    pub(crate) lack: u64,
}

impl Account {
    /// Begins the first period. `used` and `waited` are what the tracee has used of, and waited for, a CPU so far.
    #[must_use]
    pub(crate) fn new(reservation: Reservation, now: u64, used: u64, waited: Option<u64>) -> Self {
        let reservation = Reservation { period: reservation.period.max(1), ..reservation };
        Self { reservation, begin: now, used, waited, periods: 0, missed: 0 }
    }

    /// Returns the reservation.
    #[must_use]
    pub(crate) fn reservation(&self) -> Reservation {
        self.reservation
    }

    /// Returns when the period ends.
    #[must_use]
    pub(crate) fn deadline(&self) -> u64 {
        self.begin.saturating_add(self.reservation.period)
    }

    /// Returns what was used in this period.
    #[must_use]
    pub(crate) fn used(&self, used: u64) -> u64 {
        used.saturating_sub(self.used)
    }

    /// Returns whether the target is not reached yet.
    #[must_use]
    pub(crate) fn is_below(&self, used: u64) -> bool {
        self.used(used) < self.reservation.target
    }

    /// Returns how many periods have ended, and how many of these were missed.
    #[must_use]
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.periods, self.missed)
    }

    /// Carries the counts of an earlier reservation on.
    #[must_use]
    pub(crate) fn after(mut self, former: &Self) -> Self {
        (self.periods, self.missed) = (former.periods, former.missed);
        self
    }

    /// Returns whether the period is over.
    #[must_use]
    pub(crate) fn is_over(&self, now: u64) -> bool {
        now.saturating_add(SLACK) >= self.deadline()
    }

    /// Ends the period if it is over. `waited` is asked only then; without it every period counts in which the target was not reached,
    /// with it only those in which the tracee also waited for a CPU for as long as it lacks: one that sleeps misses nothing.
    pub(crate) fn advance(
        &mut self,
        now: u64,
        used: u64,
        waited: impl FnOnce() -> Option<u64>,
    ) -> Option<Ended> {
        if !self.is_over(now) {
            return None;
        }
        let Reservation { target, period } = self.reservation;
        // Several, where the manager itself was held up.
        let periods = ((now + SLACK - self.begin) / period).max(1);
        let lack = target.saturating_mul(periods).saturating_sub(self.used(used));
        let waited = waited();
        let wanted = match (self.waited, waited) {
            // The wait that has not ended yet is charged later.
            (Some(before), Some(after)) => after.saturating_sub(before).saturating_mul(100) >= lack * ENOUGH,
            _ => true,
        };
        let enough = target.saturating_mul(100 - ENOUGH) / 100;
        let missed = if lack > enough && wanted { lack.div_ceil(target.max(1)).min(periods) } else { 0 };
        self.periods += periods;
        self.missed += missed;
        self.begin += periods * period;
        (self.used, self.waited) = (used, waited);
        Some(Ended { missed, lack: if missed > 0 { lack } else { 0 } })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;
    const HALF: Reservation = Reservation { target: 40 * MS, period: 400 * MS };

    #[test]
    fn a_period_is_met_or_missed() {
        let mut account = Account::new(HALF, 0, 5 * MS, None);
        assert_eq!(account.advance(390 * MS, 6 * MS, || None), None);
        assert!(account.is_below(44 * MS) && !account.is_below(45 * MS));
        let met = Ended { missed: 0, lack: 0 };
        assert_eq!(account.advance(400 * MS, 45 * MS, || None), Some(met));
        assert_eq!((account.deadline(), account.used(55 * MS)), (800 * MS, 10 * MS));
        // Two hundredths are within what clocks show.
        assert_eq!(account.advance(800 * MS, 84 * MS + 300_000, || None), Some(met));
        let missed = Ended { missed: 1, lack: 20 * MS };
        assert_eq!(account.advance(1200 * MS, 104 * MS + 300_000, || None), Some(missed));
        assert_eq!(account.counts(), (3, 1));
    }

    #[test]
    fn who_sleeps_misses_nothing() {
        let mut account = Account::new(HALF, 0, 0, Some(0));
        assert_eq!(account.advance(400 * MS, 0, || Some(39 * MS)).map(|ended| ended.missed), Some(0));
        assert_eq!(account.advance(800 * MS, 0, || Some(79 * MS)).map(|ended| ended.missed), Some(1));
        assert_eq!(account.advance(1200 * MS, 0, || None).map(|ended| ended.missed), Some(1));
    }

    #[test]
    fn periods_that_the_manager_slept_through_count() {
        let mut account = Account::new(HALF, 0, 0, None);
        assert_eq!(account.advance(2000 * MS, 100 * MS, || None).map(|ended| ended.missed), Some(3));
        assert_eq!((account.counts(), account.deadline()), ((5, 3), 2400 * MS));
    }

    proptest! {
        #[test]
        fn periods_never_drift(target in 0..100_u64, period in 20..500_u64, steps in prop::collection::vec(1..700_u64, 1..50)) {
            let reservation = Reservation { target: target * MS, period: period * MS };
            let mut account = Account::new(reservation, 0, 0, None);
            let (mut now, mut used) = (0, 0);
            for step in steps {
                now += step * MS;
                used += step * MS / 2;
                account.advance(now, used, || None);
                prop_assert_eq!(account.deadline() % (period * MS), 0);
                prop_assert!(account.deadline() > now && account.deadline() <= now + SLACK + period * MS);
                let (periods, missed) = account.counts();
                prop_assert!(missed <= periods);
            }
        }
    }
}
