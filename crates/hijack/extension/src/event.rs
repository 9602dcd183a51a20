//! Events, and the queue in which they wait.

use std::collections::VecDeque;

/// What a module's `event` gets besides the subscription's number. What the numbers mean is the event source's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// When it happened: nanoseconds of the host's clock.
    pub time: u64,
    /// The first number of the event, whose meaning depends on its topic.
    pub value: i64,
    /// The second number of the event.
    pub detail: i64,
}

/// What became of an event that was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// It waits for its turn.
    Queued,
    /// The queue is full: it was dropped, and counted.
    Dropped,
    /// There is no such subscription any more.
    Unknown,
}

/// Events in order of arrival, up to a number. The newest is dropped: those that wait are what the receiver was notified of.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    waiting: VecDeque<T>,
    limit: usize,
    dropped: u64,
    /// Whether one was dropped since the queue was empty.
    overflowed: bool,
}

/// The result of [`Queue::push`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    Queued,
    /// Whether it is the first since the queue was empty.
    Dropped {
        first: bool,
    },
}

impl<T> Queue<T> {
    pub(crate) fn new(limit: usize) -> Self {
        Self { waiting: VecDeque::with_capacity(limit), limit, dropped: 0, overflowed: false }
    }

    pub(crate) fn push(&mut self, item: T) -> Pushed {
        if self.waiting.len() < self.limit {
            self.waiting.push_back(item);
            return Pushed::Queued;
        }
        self.dropped += 1;
        Pushed::Dropped { first: !std::mem::replace(&mut self.overflowed, true) }
    }

    pub(crate) fn pop(&mut self) -> Option<T> {
        let item = self.waiting.pop_front();
        if self.waiting.is_empty() {
            self.overflowed = false;
        }
        item
    }

    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
        self.overflowed = false;
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Nothing is reordered, and each event is either popped or counted as dropped.
        #[test]
        fn a_queue_loses_nothing_uncounted(limit in 1..8_usize, pushes in prop::collection::vec(any::<bool>(), 0..80)) {
            let mut queue = Queue::new(limit);
            let mut model = VecDeque::new();
            let (mut number, mut dropped, mut first_drops) = (0_u32, 0, 0);
            let mut overflowed = false;
            for push in pushes {
                if push {
                    let pushed = queue.push(number);
                    if model.len() < limit {
                        model.push_back(number);
                        prop_assert_eq!(pushed, Pushed::Queued);
                    } else {
                        dropped += 1;
                        prop_assert_eq!(pushed, Pushed::Dropped { first: !overflowed });
                        first_drops += u32::from(!overflowed);
                        overflowed = true;
                    }
                    number += 1;
                } else {
                    prop_assert_eq!(queue.pop(), model.pop_front());
                    overflowed &= !model.is_empty();
                }
                prop_assert_eq!((queue.len(), queue.dropped()), (model.len(), dropped));
            }
            prop_assert!(u64::from(first_drops) <= dropped);
        }
    }
}
