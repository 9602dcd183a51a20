//! Where libraries lie: one book for each realm.
//!
//! What the dynamic loader writes into a library's read-only data are addresses. In two processes they are equal, and can be
//! one object, where the libraries lie at the same addresses. So whoever loads a library for the first time in a realm has a
//! place found for it, and the others find it there, by what its first bytes are. The places lie one behind the other, as the
//! kernel would put them: addresses derived from the content itself would be spread, and each library would cost page tables of
//! its own. What makes them unknown to strangers is where the book begins: at random, in each realm elsewhere, as
//! the kernel's own address space layout randomization does it, though not anew for each process.
//!
//! Clients map the book and look places up without asking:
//!
//! ```text
//! 0       8     16      24     32            48
//! | start | end | slots | next | key address | key address | ...      64-bit words
//! ```
//!
//! A key is looked for from slot `key % slots` on until it, or an empty slot (key 0), is found. A slot is filled once: first
//! its address, then its key.

use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::PAGE;
use crate::protocol::Room;
use crate::seal::{Draft, Window};

/// How many slots there are; half of them are used.
const SLOTS: u64 = 8192;
/// Words before the slots.
const HEAD: u64 = 4;
/// How large a book is.
pub(super) const BYTES: u64 = (HEAD + 2 * SLOTS) * 8;
/// How much address space a book has.
const SPAN: u64 = 64 << 30;
/// Over how much address space its beginning is spread: 26 bits of pages.
const SPREAD: u64 = 1 << 38;
/// The longest library.
const LONGEST: u64 = 4 << 30;
/// What begins at multiples of this may be mapped by huge pages.
const HUGE: u64 = 2 << 20;

#[cfg(test)]
const START: u64 = 0;
const END: u64 = 1;
const NEXT: u64 = 3;

/// A realm's book.
#[derive(Debug)]
pub(super) struct Book {
    fd: OwnedFd,
    window: Window,
    used: u64,
}

/// The lowest address that a book may begin at: below all that the kernel may choose by itself, and near, so that tools that know
/// where programs lie are not surprised.
fn lowest() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/mmap_rnd_bits").unwrap_or_default();
    let bits = text.trim().parse::<u32>().unwrap_or(28).clamp(8, 33);
    // The space of a program ends at 2^47; beyond the random part there are stacks.
    (1_u64 << 47) - (1 << (bits + 12)) - (64 << 30) - SPREAD - SPAN
}

impl Book {
    /// An empty one, somewhere.
    ///
    /// # Errors
    /// Out of memory, descriptors, random numbers.
    pub(super) fn new() -> io::Result<Self> {
        let mut random = [0; 8];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
        let start = lowest() + u64::from_le_bytes(random) % SPREAD / PAGE as u64 * PAGE as u64;
        let book = Self::with(&[start, start + SPAN, SLOTS, start + PAGE as u64])?;
        Ok(book)
    }

    /// One like another, in memory that this process can write.
    ///
    /// # Errors
    /// Where the other is none; out of memory or descriptors.
    pub(super) fn copy(other: BorrowedFd<'_>) -> io::Result<Self> {
        let mut bytes = vec![0; usize::try_from(BYTES).unwrap_or(0)];
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::io::retry_on_intr(|| rustix::io::pread(other, &mut bytes[filled..], filled as u64))?
            {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => filled += count,
            }
        }
        let words: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        Self::with(&words)
    }

    fn with(words: &[u64]) -> io::Result<Self> {
        let draft = Draft::new("orc:book", usize::try_from(BYTES).unwrap_or(0))?;
        let (fd, window) = draft.seal_for_others()?;
        let mut book = Self { fd, window, used: 0 };
        for (index, word) in (0..).zip(words).filter(|(_, word)| **word != 0) {
            book.word(index).store(*word, Ordering::Relaxed);
        }
        book.used = (0..SLOTS).map(|slot| u64::from(book.key(slot).load(Ordering::Relaxed) != 0)).sum();
        Ok(book)
    }

    /// Its memory, which whoever has this can read only.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Enters a library, if there is room for it and it is not there.
    pub(super) fn find_place(&mut self, room: &Room) {
        let fits = (1..=LONGEST).contains(&room.length) && [PAGE as u64, HUGE].contains(&room.alignment);
        if !fits || room.key == 0 || self.used >= SLOTS / 2 {
            return;
        }
        let slots = (0..SLOTS).map(|step| room.key.wrapping_add(step) % SLOTS);
        let found = slots.map(|slot| (slot, self.key(slot).load(Ordering::Relaxed)));
        let Some((slot, key)) = found.into_iter().find(|(_, key)| [0, room.key].contains(key)) else {
            return;
        };
        if key == room.key {
            return;
        }
        // A page apart, and with room behind it for the alignment: the kernel seeks a gap that much longer.
        let next = self.word(NEXT).load(Ordering::Relaxed) + PAGE as u64;
        let address = next.next_multiple_of(room.alignment);
        let slack = if room.alignment == HUGE { HUGE } else { 0 };
        let end = address + room.length.next_multiple_of(PAGE as u64) + slack;
        if end > self.word(END).load(Ordering::Relaxed) {
            return;
        }
        self.word(NEXT).store(end, Ordering::Relaxed);
        self.word(HEAD + 2 * slot + 1).store(address, Ordering::Relaxed);
        self.key(slot).store(room.key, Ordering::Release);
        self.used += 1;
    }

    fn key(&self, slot: u64) -> &AtomicU64 {
        self.word(HEAD + 2 * slot)
    }

    fn word(&self, index: u64) -> &AtomicU64 {
        assert!(index < BYTES / 8, "there is no word {index}");
        let place = self.window.start().cast::<u64>().as_ptr();
        // SAFETY: within the mapping, which is as long as `BYTES`, is aligned to pages, and lives as long as `self`; others
        // read it only, and by atomic loads.
        unsafe { AtomicU64::from_ptr(place.add(usize::try_from(index).unwrap_or(0))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(book: &Book, key: u64) -> Option<u64> {
        (0..SLOTS)
            .map(|step| key.wrapping_add(step) % SLOTS)
            .take_while(|slot| book.key(*slot).load(Ordering::Acquire) != 0)
            .find(|slot| book.key(*slot).load(Ordering::Relaxed) == key)
            .map(|slot| book.word(HEAD + 2 * slot + 1).load(Ordering::Relaxed))
    }

    #[test]
    fn places_lie_one_behind_the_other_and_stay() {
        let mut book = Book::new().unwrap();
        let start = book.word(START).load(Ordering::Relaxed);
        assert!(start.is_multiple_of(4096) && start >= lowest() && start < lowest() + SPREAD);
        let mut last = start;
        // The same slot for all of them.
        for number in 1..=20 {
            let key = 7 + number * SLOTS;
            let alignment = if number % 2 == 0 { HUGE } else { 4096 };
            book.find_place(&Room { key, length: 3 << 20, alignment });
            let at = place(&book, key).unwrap();
            assert!(at > last && at.is_multiple_of(alignment));
            last = at + (3 << 20);
            book.find_place(&Room { key, length: 9 << 20, alignment: 4096 });
            assert_eq!(place(&book, key), Some(at), "once and for all");
        }
        let copy = Book::copy(book.fd()).unwrap();
        for number in 1..=20 {
            assert_eq!(place(&copy, 7 + number * SLOTS), place(&book, 7 + number * SLOTS));
        }
        assert_eq!(copy.used, 20);
        assert_eq!(place(&book, 12), None);
        for bad in [(0, 4096, 4096), (1, 0, 4096), (1, u64::MAX, 4096), (1, 4096, 3), (1, 4096, 1 << 63)] {
            book.find_place(&Room { key: bad.0, length: bad.1, alignment: bad.2 });
        }
        assert_eq!(book.used, 20);
    }

    #[test]
    fn a_full_book_takes_no_more() {
        let mut book = Book::new().unwrap();
        for key in 1..=SLOTS {
            book.find_place(&Room { key, length: 4096, alignment: 4096 });
        }
        assert_eq!(book.used, SLOTS / 2);
        assert_eq!(place(&book, SLOTS), None);
        let mut book = Book::new().unwrap();
        for key in 1..=100 {
            book.find_place(&Room { key, length: LONGEST, alignment: 4096 });
        }
        assert_eq!(book.used, SPAN / LONGEST - 1);
    }

    #[test]
    fn two_books_begin_elsewhere() {
        let starts: Vec<u64> =
            (0..4).map(|_| Book::new().unwrap().word(START).load(Ordering::Relaxed)).collect();
        assert!(starts.windows(2).any(|pair| pair[0] != pair[1]), "{starts:?}");
    }
}
