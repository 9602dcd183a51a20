//! How many events an extension handles in one period.

/// The allowance of one extension. Times are nanoseconds of one clock.
#[derive(Debug)]
pub(crate) struct Allowance {
    events: u32,
    period: u64,
    began: u64,
    left: u32,
}

impl Allowance {
    pub(crate) fn new(events: u32, period: u64, now: u64) -> Self {
        Self { events, period, began: now, left: events }
    }

    /// Uses up one event; returns when there will be one where there is none now.
    pub(crate) fn take(&mut self, now: u64) -> Result<(), u64> {
        // A clock that steps back begins a new period, or an extension might wait for ever.
        if now < self.began || now - self.began >= self.period {
            self.began = now;
            self.left = self.events;
        }
        if self.left == 0 {
            return Err(self.began.saturating_add(self.period));
        }
        self.left -= 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// In no two adjacent periods more than twice the events are allowed, and a wait until the given time ends with one.
        #[test]
        fn no_more_than_agreed(events in 1..5_u32, period in 1..50_u64, steps in prop::collection::vec(0..20_u64, 1..200)) {
            let mut allowance = Allowance::new(events, period, 0);
            let (mut now, mut allowed) = (0, Vec::new());
            for step in steps {
                now += step;
                match allowance.take(now) {
                    Ok(()) => allowed.push(now),
                    Err(again) => {
                        prop_assert!(again > now && again <= now + period);
                        prop_assert_eq!(allowance.take(again), Ok(()));
                        allowed.push(again);
                        now = again;
                    }
                }
            }
            for (index, time) in allowed.iter().enumerate() {
                let within = allowed[index..].iter().take_while(|later| **later - time < period).count();
                prop_assert!(within <= 2 * events as usize);
            }
        }
    }
}
