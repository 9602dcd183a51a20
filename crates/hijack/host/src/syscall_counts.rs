//! What executives have counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use orrery_hijack_image::nr::CALLS;
use orrery_hijack_image::shared_page::{BUCKETS, Calls, FIRST_BUCKET, SharedPage, Unfollowed};
use syscalls::Sysno;

use crate::shared_segment::UserMemory;

/// Everything that was counted, at one instant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counts {
    /// Each system call that was made, by number.
    pub calls: Vec<Call>,
    /// Programs that got an executive.
    pub followed: u64,
    /// Programs that did not: how many, and why.
    pub unfollowed: Vec<(u64, &'static str)>,
    /// Threads in which dispatch could not be armed: their calls were not seen.
    pub unarmed: u64,
    /// Sites that were rewritten.
    pub patched_sites: u64,
    /// Sites that were called often and are unfit to be rewritten.
    pub refused_sites: u64,
}

/// One system call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Its number; `None` stands for numbers that are not x86-64's, and calls made with `int $0x80`.
    pub number: Option<u32>,
    /// Calls that the kernel dispatched.
    pub dispatched: u64,
    /// Calls from rewritten sites.
    pub patched: u64,
    /// Calls that failed, if they were timed.
    pub errors: u64,
    /// Ticks of the time stamp counter in all, if they were timed.
    pub ticks: u64,
    /// Calls by duration, if they were timed: see [`bucket_end`].
    pub buckets: [u64; BUCKETS],
}

impl Call {
    /// Returns how often it was called.
    pub fn total(&self) -> u64 {
        self.dispatched.saturating_add(self.patched)
    }

    /// Returns how many of its calls were timed.
    pub fn timed(&self) -> u64 {
        self.buckets.iter().copied().fold(0, u64::saturating_add)
    }

    fn add(&mut self, row: &Calls) {
        // Programs can write anything there.
        let add = |sum: &mut u64, more: &AtomicU64| *sum = sum.saturating_add(more.load(Relaxed));
        add(&mut self.dispatched, &row.dispatched);
        add(&mut self.patched, &row.patched);
        add(&mut self.errors, &row.errors);
        add(&mut self.ticks, &row.ticks);
        for (sum, bucket) in self.buckets.iter_mut().zip(&row.buckets) {
            add(sum, bucket);
        }
    }

    /// Its name, or its number where it has none.
    pub fn name(&self) -> String {
        let Some(number) = self.number else { return "(other)".to_owned() };
        let known = usize::try_from(number).ok().and_then(Sysno::new);
        known.map_or_else(|| format!("syscall_{number}"), |known| known.name().to_owned())
    }

    /// The duration, in ticks, that this share of the timed calls did not exceed, as exactly as buckets show: at most
    /// twice the true one. `None` where none were timed.
    pub fn quantile(&self, share: f64) -> Option<u64> {
        let timed = self.timed();
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rank among calls: positive, and its last digits say nothing"
        )]
        let rank = (timed as f64 * share).ceil() as u64;
        let mut seen = 0;
        let found = self.buckets.iter().position(|calls| {
            seen = u64::saturating_add(seen, *calls);
            *calls > 0 && seen >= rank
        });
        found.map(bucket_end)
    }
}

/// The number of ticks that the durations in a bucket are below.
pub fn bucket_end(bucket: usize) -> u64 {
    1_u64 << (u32::try_from(bucket).unwrap_or(0) + FIRST_BUCKET)
}

impl Counts {
    pub(crate) fn of(users: &[Arc<UserMemory>]) -> Self {
        let rows: Vec<_> = users
            .iter()
            .flat_map(|user| std::iter::once(&user.page().calls).chain(user.counters().used()))
            .collect();
        let calls = (0..=CALLS).filter_map(|number| {
            let mut call = Call {
                number: u32::try_from(number).ok().filter(|_| number < CALLS),
                dispatched: 0,
                patched: 0,
                errors: 0,
                ticks: 0,
                buckets: [0; BUCKETS],
            };
            for row in rows.iter().map(|rows| &rows[number]) {
                call.add(row);
            }
            (call.total() > 0).then_some(call)
        });
        let sum = |counter: &dyn Fn(&SharedPage) -> &AtomicU64| {
            users.iter().map(|user| counter(user.page()).load(Relaxed)).fold(0, u64::saturating_add)
        };
        let unfollowed =
            |reason: Unfollowed| (sum(&|page| &page.unfollowed[reason as usize]), reason.reason());
        Self {
            calls: calls.collect(),
            followed: sum(&|page| &page.followed),
            unfollowed: Unfollowed::ALL.into_iter().map(unfollowed).filter(|(count, _)| *count > 0).collect(),
            unarmed: sum(&|page| &page.unarmed),
            patched_sites: sum(&|page| &page.patched_sites),
            refused_sites: sum(&|page| &page.refused_sites),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(buckets: &[(usize, u64)]) -> Call {
        let mut call =
            Call { number: Some(39), dispatched: 1, patched: 2, errors: 0, ticks: 0, buckets: [0; BUCKETS] };
        for (bucket, calls) in buckets {
            call.buckets[*bucket] = *calls;
        }
        call
    }

    #[test]
    fn quantiles_come_from_buckets() {
        assert_eq!(call(&[]).quantile(0.5), None);
        let call = call(&[(0, 90), (5, 10)]);
        assert_eq!(call.quantile(0.5), Some(64));
        assert_eq!(call.quantile(0.9), Some(64));
        assert_eq!(call.quantile(0.99), Some(2048));
    }

    #[test]
    fn calls_have_names() {
        assert_eq!(call(&[]).name(), "getpid");
        assert_eq!(call(&[]).total(), 3);
        assert_eq!(Call { number: None, ..call(&[]) }.name(), "(other)");
        assert_eq!(Call { number: Some(511), ..call(&[]) }.name(), "syscall_511");
    }
}
