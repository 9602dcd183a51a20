//! Reading the journal: single calls, as executives have written them.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::time::{Duration, Instant};

use orrery_hijack_image::journal::{ANSWERED, CALLERS, ENTERED, ENTRIES, Entry, RESUMED, stamp_of};

use crate::shared_segment::SharedSegment;

/// A slot that stays unwritten so long, with others behind it, was given up by its writer.
const PATIENCE: Duration = Duration::from_secs(1);

/// One call.
#[derive(Debug, Clone)]
pub struct Event {
    entry: Entry,
}

/// What an event says of its call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It begins. It may never return: what it returns, if it does, is another event.
    Entered,
    /// It was performed.
    Done,
    /// A rule of the policy gave the result.
    Answered,
    /// A call of this thread that began before has returned: nothing but the result is known.
    Resumed,
}

impl Event {
    pub(crate) fn of(entry: Entry) -> Self {
        Self { entry }
    }

    /// Who called.
    pub fn thread(&self) -> u32 {
        self.entry.thread
    }

    /// What was called.
    pub fn number(&self) -> u32 {
        self.entry.number
    }

    /// What is known of it.
    pub fn state(&self) -> State {
        match self.entry.state {
            ENTERED => State::Entered,
            ANSWERED => State::Answered,
            RESUMED => State::Resumed,
            _ => State::Done,
        }
    }

    /// As the program gave them.
    pub fn arguments(&self) -> [u64; 6] {
        self.entry.arguments
    }

    /// What it returned.
    pub fn result(&self) -> i64 {
        self.entry.result
    }

    /// The time stamp counter when it began.
    pub fn start(&self) -> u64 {
        self.entry.start
    }

    /// Ticks that it took.
    pub fn ticks(&self) -> u64 {
        self.entry.ticks
    }

    /// Which of the policy's rules asked for it, from zero.
    pub fn rule(&self) -> u32 {
        self.entry.rule
    }

    /// Where it came from, as one number; zero where that was not asked for.
    pub fn site(&self) -> u64 {
        self.entry.site
    }

    /// The address behind the call instruction, and return addresses, nearest first; zeros where fewer were found.
    pub fn callers(&self) -> [u64; CALLERS] {
        self.entry.callers
    }

    /// The memory that an argument points to, or its beginning, if it was looked at: a path, an address, a buffer.
    pub fn memory(&self, argument: usize) -> Option<&[u8]> {
        self.entry.piece(argument)
    }
}

/// Reads events. While there is a reader, programs wait for it rather than have their calls untold.
#[derive(Debug)]
pub struct Events {
    segment: Arc<SharedSegment>,
    next: u64,
    /// Since when the next slot is not written.
    missing: Option<Instant>,
    given_up: u64,
}

impl Events {
    pub(crate) fn new(segment: Arc<SharedSegment>) -> Self {
        let journal = &segment.page().journal;
        journal.reader.store(std::process::id(), Relaxed);
        let next = journal.read.load(Relaxed);
        Self { segment, next, missing: None, given_up: 0 }
    }

    /// Events that were lost: their writers died, or found the journal full for too long.
    pub fn lost(&self) -> u64 {
        self.segment.page().journal.lost.load(Relaxed) + self.given_up
    }
}

impl Iterator for Events {
    type Item = Event;

    /// The next event, if there is one by now. There may be one later.
    fn next(&mut self) -> Option<Event> {
        let journal = &self.segment.page().journal;
        loop {
            let slot = &journal.slots[usize::try_from(self.next).unwrap_or(0) % ENTRIES];
            let turn = stamp_of(self.next);
            if slot.stamp.load(Acquire) == turn + 1 {
                let words = std::array::from_fn(|index| slot.words[index].load(Relaxed));
                slot.stamp.store(turn + 2, std::sync::atomic::Ordering::Release);
                self.missing = None;
                self.next += 1;
                journal.read.store(self.next, Relaxed);
                return Some(Event { entry: Entry::from_words(&words) });
            }
            if journal.next.load(Acquire) == self.next {
                self.missing = None;
                return None;
            }
            if self.missing.get_or_insert_with(Instant::now).elapsed() < PATIENCE {
                return None;
            }
            // Its writer may still be at it: then it finds out that nobody waits.
            if slot.stamp.compare_exchange(turn, turn + 2, AcqRel, Acquire).is_ok() {
                self.given_up += 1;
                self.missing = None;
                self.next += 1;
                journal.read.store(self.next, Relaxed);
            }
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.segment.page().journal.reader.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use orrery_hijack_image::journal::DONE;

    use super::*;

    fn write(segment: &SharedSegment, ticket: u64, number: u32) {
        let journal = &segment.page().journal;
        let slot = &journal.slots[usize::try_from(ticket).unwrap() % ENTRIES];
        assert_eq!(slot.stamp.load(Relaxed), stamp_of(ticket));
        let entry = Entry { number, state: DONE, ..Entry::EMPTY };
        for (place, word) in slot.words.iter().zip(entry.words()) {
            place.store(*word, Relaxed);
        }
        slot.stamp.store(stamp_of(ticket) + 1, Relaxed);
    }

    #[test]
    fn events_come_in_order_around_the_ring() {
        let segment = Arc::new(SharedSegment::new().unwrap());
        let mut events = Events::new(Arc::clone(&segment));
        assert!(events.next().is_none());
        for ticket in 0..3 * ENTRIES as u64 {
            write(&segment, ticket, u32::try_from(ticket).unwrap());
            segment.page().journal.next.store(ticket + 1, Relaxed);
            assert_eq!(events.next().map(|event| event.number()), u32::try_from(ticket).ok());
        }
        assert!(events.next().is_none());
        assert_eq!(events.lost(), 0);
    }

    #[test]
    fn a_slot_that_nobody_writes_is_passed_over() {
        let segment = Arc::new(SharedSegment::new().unwrap());
        let mut events = Events::new(Arc::clone(&segment));
        segment.page().journal.next.store(2, Relaxed);
        write(&segment, 1, 7);
        assert!(events.next().is_none());
        std::thread::sleep(PATIENCE + Duration::from_millis(10));
        assert_eq!(events.next().map(|event| event.number()), Some(7));
        assert_eq!(events.lost(), 1);
    }
}
