//! What main keeps of calls: a record until its outcome has been taken, in slots that are used again.

use std::collections::VecDeque;

use crate::error::{Error, Result};
use crate::update::Update;

/// What an update takes besides its bytes, as the bound on kept updates counts it.
pub(crate) const UPDATE_OVERHEAD: usize = 128;

/// An update that waits to be received.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) update: Result<Update>,
    /// What the bound counts for it.
    pub(crate) bytes: usize,
}

/// How far a call came.
#[derive(Debug, Default)]
pub(crate) enum Progress {
    /// Nothing is in this slot.
    #[default]
    Free,
    /// It waits or runs.
    UnderWay,
    /// The call is over.
    Over(Result<i64>),
}

/// One call.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub(crate) call: u64,
    pub(crate) progress: Progress,
    pub(crate) updates: VecDeque<Kept>,
    /// The bytes of `updates`.
    pub(crate) kept: usize,
    /// An update was dropped since the last one was received.
    pub(crate) overflowed: bool,
    /// Nobody will ask for it.
    pub(crate) abandoned: bool,
}

impl Record {
    /// Takes the oldest update.
    pub(crate) fn next(&mut self) -> Option<Result<Update>> {
        let Kept { update, bytes } = self.updates.pop_front()?;
        self.kept = self.kept.saturating_sub(bytes);
        self.overflowed = false;
        Some(update)
    }
}

/// The records of all calls.
#[derive(Debug, Default)]
pub(crate) struct Records {
    slots: Vec<Record>,
    free: Vec<usize>,
}

impl Records {
    /// Room for `count` without allocating.
    pub(crate) fn with_room(count: usize) -> Self {
        Self { slots: Vec::with_capacity(count), free: Vec::with_capacity(count) }
    }

    /// Returns a slot for a new call.
    pub(crate) fn open(&mut self, call: u64, abandoned: bool) -> usize {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Record::default());
            self.slots.len() - 1
        });
        let record = &mut self.slots[index];
        record.call = call;
        record.progress = Progress::UnderWay;
        record.abandoned = abandoned;
        (record.kept, record.overflowed) = (0, false);
        index
    }

    /// Returns the record of `call` in slot `index`.
    pub(crate) fn get(&mut self, index: usize, call: u64) -> Option<&mut Record> {
        self.slots.get_mut(index).filter(|r| r.call == call && !matches!(r.progress, Progress::Free))
    }

    /// The call is over.
    pub(crate) fn close(&mut self, index: usize, call: u64, outcome: Result<i64>) {
        if let Some(record) = self.get(index, call) {
            record.progress = Progress::Over(outcome);
            if record.abandoned {
                self.free(index);
            }
        }
    }

    /// Nobody will ask for it any more.
    pub(crate) fn abandon(&mut self, index: usize, call: u64) {
        if let Some(record) = self.get(index, call) {
            record.abandoned = true;
            record.updates.clear();
            if matches!(record.progress, Progress::Over(_)) {
                self.free(index);
            }
        }
    }

    /// Returns the outcome, if it is over. The record stays for its updates.
    pub(crate) fn outcome(&mut self, index: usize, call: u64) -> Option<Result<i64>> {
        match &self.get(index, call)?.progress {
            Progress::Over(outcome) => Some(outcome.clone()),
            _ => None,
        }
    }

    /// Returns the outcome and all updates, if it is over; the record goes.
    pub(crate) fn finish(
        &mut self,
        index: usize,
        call: u64,
    ) -> Option<(Result<i64>, VecDeque<Result<Update>>)> {
        let record = self.get(index, call)?;
        let Progress::Over(_) = record.progress else { return None };
        let Progress::Over(outcome) = core::mem::take(&mut record.progress) else { return None };
        let updates = core::mem::take(&mut record.updates).into_iter().map(|kept| kept.update).collect();
        self.free.push(index);
        Some((outcome, updates))
    }

    fn free(&mut self, index: usize) {
        self.slots[index].progress = Progress::Free;
        self.slots[index].updates.clear();
        self.free.push(index);
    }

    /// Ends everything that is under way.
    pub(crate) fn close_all(&mut self, outcome: impl Fn(u64) -> Error) {
        for index in 0..self.slots.len() {
            if matches!(self.slots[index].progress, Progress::UnderWay) {
                let call = self.slots[index].call;
                self.close(index, call, Err(outcome(call)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_used_again_and_never_mistaken() {
        let mut records = Records::with_room(2);
        let first = records.open(1, false);
        assert!(records.outcome(first, 1).is_none());
        records.close(first, 1, Ok(5));
        assert_eq!(records.outcome(first, 1), Some(Ok(5)));
        assert_eq!(records.finish(first, 1).unwrap().0, Ok(5));
        assert!(records.finish(first, 1).is_none());
        let second = records.open(2, true);
        assert_eq!(second, first);
        assert!(records.get(first, 1).is_none(), "the old call's name opens nothing");
        records.close(second, 2, Ok(6));
        assert!(records.get(second, 2).is_none(), "nobody asked for it");
        assert_eq!(records.open(3, false), first);
    }
}
