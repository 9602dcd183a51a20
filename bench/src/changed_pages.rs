//! What the benchmarks of calls have main write and a task examine: pages, some of which change before each call.
//!
//! `4` and `4 new` time everything from the first write to the task's answer, `pause 4 new` only how long main stands
//! still for the state to be held fast.
//!
//! The task adds up the pages that changed. So its answer shows that it saw main's state as of the call, and no contender
//! is paid for pages that nobody looks at.

use std::str::FromStr;

use anyhow::{Context, Result};

use crate::footprint::PAGE;

/// What changes before each call: `4` pages evenly spread, or `512 new`: so many behind those of the last call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    pages: usize,
    new: bool,
    /// Whether only main's pause is timed.
    pub pause: bool,
}

impl FromStr for Change {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (pause, text) = match text.strip_prefix("pause ") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (number, new) = match text.strip_suffix(" new") {
            Some(number) => (number, true),
            None => (text, false),
        };
        let pages = number.parse().with_context(|| format!("{text:?} is neither \"4\" nor \"4 new\""))?;
        Ok(Self { pages, new, pause })
    }
}

/// The pages of main that a task examines.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Pages {
    start: *mut u64,
    pages: usize,
}

// SAFETY: one thread at a time writes to the pages; they are read only after that.
unsafe impl Send for Pages {}

impl Pages {
    /// Describes the memory at `start`.
    ///
    /// # Safety
    /// There are so many pages, writable, that nobody else uses, for as long as this and its copies are used.
    pub unsafe fn new(start: *mut u64, pages: usize) -> Self {
        Self { start, pages }
    }

    /// Returns the same pages at another address.
    ///
    /// # Safety
    /// As for [`Pages::new`].
    pub unsafe fn moved(self, start: *mut u64) -> Self {
        Self { start, ..self }
    }

    fn page(self, change: Change, round: u64, index: usize) -> *mut u64 {
        #[expect(clippy::cast_possible_truncation, reason = "usize has 64 bits")]
        let round = round as usize;
        let page = if change.new {
            round.wrapping_mul(change.pages).wrapping_add(index) % self.pages
        } else {
            let stride = (self.pages / change.pages.max(1)).max(1);
            round.wrapping_add(index * stride) % self.pages
        };
        // SAFETY: `page` is below the number of pages.
        unsafe { self.start.byte_add(page * PAGE) }
    }

    /// Writes every page once, so that all are there.
    pub fn fill(self) {
        for page in 0..self.pages {
            // SAFETY: `page` is below the number of pages, which are writable and used by nobody else, as the
            // contract of `new` has it.
            unsafe { self.start.byte_add(page * PAGE).write(1) };
        }
    }

    /// Writes the pages of `round`; returns what the task must find.
    pub fn change(self, change: Change, round: u64) -> u64 {
        for index in 0..change.pages {
            // SAFETY: `page` gives the address of one of the pages, which are writable and used by nobody
            // else, as the contract of `new` has it.
            unsafe { self.page(change, round, index).write(round ^ index as u64) };
        }
        self.examine(change, round)
    }

    /// Adds up the pages of `round`.
    pub fn examine(self, change: Change, round: u64) -> u64 {
        (0..change.pages).fold(0, |sum, index| {
            // SAFETY: a page of ours, or of the snapshot at the same address.
            let word = unsafe { self.page(change, round, index).read_volatile() };
            sum.wrapping_mul(3).wrapping_add(word)
        })
    }
}

/// The arguments of a task.
#[derive(Debug, Clone, Copy)]
pub struct Task {
    /// The pages that the task examines.
    pub examined: Pages,
    /// Which of them changed.
    pub change: Change,
    /// The round in which they change.
    pub round: u64,
}

const SIZE: usize = 5 * size_of::<u64>();

impl Task {
    /// Encodes the task as arguments of a call.
    pub fn encode(self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        let words = [
            self.examined.start.expose_provenance() as u64,
            self.examined.pages as u64,
            self.change.pages as u64,
            u64::from(self.change.new),
            self.round,
        ];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Decodes a task from the arguments of a call.
    #[expect(clippy::cast_possible_truncation, reason = "usize has 64 bits")]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<8>();
        let [start, pages, changed, new, round] =
            words.try_into().ok().map(|w: [[u8; 8]; 5]| w.map(u64::from_ne_bytes))?;
        Some(Self {
            examined: Pages {
                start: std::ptr::with_exposed_provenance_mut(start as usize),
                pages: pages as usize,
            },
            change: Change { pages: changed as usize, new: new != 0, pause: false },
            round,
        })
    }

    /// Performs the task, and returns the sum of what it read.
    pub fn perform(self) -> u64 {
        self.examined.examine(self.change, self.round)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_finds_what_changed() {
        let mut memory = vec![0_u64; 64 * PAGE / 8];
        // SAFETY: the vector has 64 pages, outlives `examined`, and is used through it only.
        let examined = unsafe { Pages::new(memory.as_mut_ptr(), 64) };
        examined.fill();
        for (text, rounds) in [("4", 100), ("pause 7 new", 100), ("0", 2), ("64", 3)] {
            let change: Change = text.parse().unwrap();
            for round in 0..rounds {
                let expected = examined.change(change, round);
                let task = Task { examined, change, round };
                assert_eq!(Task::decode(&task.encode()).unwrap().perform(), expected);
            }
        }
        assert!("some".parse::<Change>().is_err());
        assert!(Task::decode(&[0; 39]).is_none());
    }
}
