//! What root, template and sessions say to each other: one word with each switch.

use orrery_rollback::Outcome;

/// For what a session waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Something to read, or the end of it.
    Readable,
    /// The connection has room to write.
    Writable,
    /// Bytes to read or room to write.
    Both,
}

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// The session returned.
    Returned,
    /// The session panicked.
    Panicked,
    /// It called `exit` with this status. The program goes on.
    Exited(i32),
    /// It reached its memory limit, and died of that.
    MemoryLimit,
    /// [`Pool::end`](super::Pool::end) ended it.
    Abandoned,
    /// A signal hit it. It does not serve again.
    Signaled(i32),
    /// It kept control for too long, and was killed.
    TimedOut,
    /// It was killed, or broke the rules, or left something that cannot be undone. It does not serve again.
    Lost,
}

/// What the root says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// To the template: make a session.
    Make,
    /// To the template: you need not know the one that you made any more.
    Settle,
    /// To a clean session: here is your connection.
    Begin,
    /// To a session that waits: go on.
    Resume,
    /// To a dirty one: be as you were.
    Clean,
    /// To one that waits: be as you were.
    Abandon,
}

const ORDERS: [Order; 6] =
    [Order::Make, Order::Settle, Order::Begin, Order::Resume, Order::Clean, Order::Abandon];

impl Order {
    pub(crate) fn word(self) -> u64 {
        ORDERS.iter().position(|order| *order == self).map_or(0, |place| place as u64)
    }

    /// The root is trusted: a word that is none of its orders does not come.
    pub(crate) fn of(word: u64) -> Option<Self> {
        ORDERS.get(usize::try_from(word).ok()?).copied()
    }
}

/// What template and sessions say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// A session was made.
    Made,
    /// A session is as it was made. It tells how what it did before ended, if that did not let it say so.
    Clean(Option<Ended>),
    /// It has no connection: there was no number free for its descriptor.
    Unconnected,
    /// It waits for its connection.
    Waits(Interest),
    /// It is over, and dirty.
    Finished,
    /// It, or the template, cannot do its work, for a reason that follows in words.
    Failed,
    /// The template has settled.
    Settled,
}

const NONE: u64 = 0;
const CLEAN: u64 = 1;
const UNCONNECTED: u64 = 2;
const WAITS: u64 = 3;
const FINISHED: u64 = 4;
const FAILED: u64 = 5;
const SETTLED: u64 = 6;
const MADE: u64 = 7;

impl Report {
    /// Kind, detail and value in a byte, a byte and four bytes.
    pub(crate) fn word(self) -> u64 {
        let (kind, detail, value) = match self {
            Self::Made => (MADE, NONE, 0),
            Self::Clean(None) => (CLEAN, NONE, 0),
            Self::Clean(Some(ended)) => {
                let (detail, value) = match ended {
                    Ended::Returned => (1, 0),
                    Ended::Panicked => (2, 0),
                    Ended::Exited(status) => (3, status),
                    Ended::MemoryLimit => (4, 0),
                    Ended::Abandoned => (5, 0),
                    Ended::Signaled(signal) => (6, signal),
                    Ended::TimedOut => (7, 0),
                    Ended::Lost => (8, 0),
                };
                (CLEAN, detail, value)
            }
            Self::Unconnected => (UNCONNECTED, NONE, 0),
            Self::Waits(Interest::Readable) => (WAITS, 1, 0),
            Self::Waits(Interest::Writable) => (WAITS, 2, 0),
            Self::Waits(Interest::Both) => (WAITS, 3, 0),
            Self::Finished => (FINISHED, NONE, 0),
            Self::Failed => (FAILED, NONE, 0),
            Self::Settled => (SETTLED, NONE, 0),
        };
        kind | detail << 8 | u64::from(value.cast_unsigned()) << 32
    }

    /// Returns what a word means, which may come from a session that an attacker controls.
    pub(crate) fn of(word: u64) -> Option<Self> {
        let (kind, detail) = (word & 0xff, word >> 8 & 0xff);
        let value = u32::try_from(word >> 32).unwrap_or(0).cast_signed();
        Some(match (kind, detail) {
            (CLEAN, NONE) => Self::Clean(None),
            (CLEAN, detail) => Self::Clean(Some(match detail {
                1 => Ended::Returned,
                2 => Ended::Panicked,
                3 => Ended::Exited(value),
                4 => Ended::MemoryLimit,
                5 => Ended::Abandoned,
                6 => Ended::Signaled(value),
                7 => Ended::TimedOut,
                8 => Ended::Lost,
                _ => return None,
            })),
            (UNCONNECTED, _) => Self::Unconnected,
            (WAITS, 1) => Self::Waits(Interest::Readable),
            (WAITS, 2) => Self::Waits(Interest::Writable),
            (WAITS, 3) => Self::Waits(Interest::Both),
            (FINISHED, _) => Self::Finished,
            (FAILED, _) => Self::Failed,
            (SETTLED, _) => Self::Settled,
            (MADE, _) => Self::Made,
            _ => return None,
        })
    }
}

impl From<Outcome> for Ended {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Returned => Self::Returned,
            Outcome::Panicked => Self::Panicked,
            Outcome::Exited(status) => Self::Exited(status),
            Outcome::Signaled { signal, .. } => Self::Signaled(signal),
            Outcome::MemoryLimit => Self::MemoryLimit,
            Outcome::TimedOut => Self::TimedOut,
            Outcome::Abandoned(_) => Self::Abandoned,
            // An end that is not known here is one after which the context must not serve again.
            _ => Self::Lost,
        }
    }
}

impl Ended {
    /// Returns whether the context may serve again.
    pub(crate) fn is_harmless(self) -> bool {
        !matches!(self, Self::Signaled(_) | Self::TimedOut | Self::Lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_as_what_they_were() {
        let ends = [
            Ended::Returned,
            Ended::Panicked,
            Ended::Exited(-3),
            Ended::MemoryLimit,
            Ended::Abandoned,
            Ended::Signaled(11),
            Ended::TimedOut,
            Ended::Lost,
        ];
        let waits = [Interest::Readable, Interest::Writable, Interest::Both].map(Report::Waits);
        let others = [
            Report::Made,
            Report::Clean(None),
            Report::Unconnected,
            Report::Finished,
            Report::Failed,
            Report::Settled,
        ];
        let all = ends.map(|end| Report::Clean(Some(end)));
        for report in all.into_iter().chain(waits).chain(others) {
            assert_eq!(Report::of(report.word()), Some(report));
        }
        for order in ORDERS {
            assert_eq!(Order::of(order.word()), Some(order));
        }
    }

    #[test]
    fn nonsense_means_nothing() {
        for word in [0, 9, 0xff, WAITS, WAITS | 9 << 8, CLEAN | 99 << 8] {
            assert_eq!(Report::of(word), None);
        }
        assert_eq!(Order::of(u64::MAX), None);
    }
}
