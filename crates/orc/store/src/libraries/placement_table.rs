//! Where libraries lie: one book for each realm.
//!
//! What the dynamic loader writes into a library's read-only data are addresses. In two processes they are equal, and can be
//! one object, where the libraries lie at equal addresses. So each library has a place, derived from what it is known by (its
//! headers and build ID) and from the host's [`secret`](crate::host_secret), as keyed BLAKE3 hashes: stores that share the
//! secret, one after the other or on several hosts, come to the same places without asking one another, and a stranger learns
//! nothing from knowing the library. A realm's places lie in a window of [`WINDOW`] bytes, as each library far from all
//! others costs page tables of its own, and where that window lies is derived from the secret, too. Two that would lie on one
//! another are told apart by order: the later one lies behind the earlier. That is what the book is needed for.
//!
//! Clients map the book and look places up without asking:
//!
//! ```text
//! 0       8     16      24     32                      64
//! | start | end | slots | 0    | key address end 0     | key address ...      64-bit words
//! ```
//!
//! A key is looked for from slot `key % slots` on until it, or an empty slot (key 0), is found. A slot is filled once: its
//! key last.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::host_secret::Secret;
use crate::trust_domain::Realm;
use orrery_orc_wire::protocol::Room;
use orrery_orc_wire::sealed_file::{Draft, Window};
use orrery_sys::PAGE;

/// How many slots there are; half of them are used.
const SLOTS: u64 = 8192;
/// Words before the slots, and words of a slot.
const HEAD: u64 = 4;
const SLOT: u64 = 4;
/// How large a book is.
pub(crate) const BYTES: u64 = (HEAD + SLOT * SLOTS) * 8;
/// Over how much of it places are spread.
const WINDOW: u64 = 16 << 30;
/// How much address space a book has.
const SPAN: u64 = 64 << 30;
/// Over how much address space its beginning is spread: 26 bits of pages.
const SPREAD: u64 = 1 << 38;
/// The longest library.
const LONGEST: u64 = 4 << 30;
/// What begins at multiples of this may be mapped by huge pages.
const HUGE: u64 = 2 << 20;

const START: u64 = 0;
const END: u64 = 1;

/// A realm's book.
#[derive(Debug)]
pub(crate) struct Book {
    fd: OwnedFd,
    window: Window,
    used: u64,
    /// What is taken, from here to there.
    taken: BTreeMap<u64, u64>,
    secret: Secret,
    realm: String,
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
    /// An empty one, where the secret has it for this realm.
    ///
    /// # Errors
    /// Out of memory or descriptors.
    pub(crate) fn new(secret: &Secret, realm: &Realm) -> io::Result<Self> {
        let realm = realm.to_string();
        let spread = secret.number(&[b"start", realm.as_bytes()]) % SPREAD;
        let start = lowest() + spread / PAGE as u64 * PAGE as u64;
        Self::with(&[start, start + SPAN, SLOTS], secret, realm)
    }

    /// One like another, in memory that this process can write.
    ///
    /// # Errors
    /// Where the other is none; out of memory or descriptors.
    pub(crate) fn copy(other: BorrowedFd<'_>, secret: &Secret, realm: &Realm) -> io::Result<Self> {
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
        Self::with(&words, secret, realm.to_string())
    }

    fn with(words: &[u64], secret: &Secret, realm: String) -> io::Result<Self> {
        let draft = Draft::new("orc:book", usize::try_from(BYTES).unwrap_or(0))?;
        let (fd, window) = draft.seal_for_others()?;
        let taken = BTreeMap::new();
        let mut book = Self { fd, window, used: 0, taken, secret: secret.clone(), realm };
        for (index, word) in (0..).zip(words).filter(|(_, word)| **word != 0) {
            book.word(index).store(*word, Ordering::Relaxed);
        }
        for slot in 0..SLOTS {
            let [key, address, end] =
                [0, 1, 2].map(|word| book.word(HEAD + SLOT * slot + word).load(Ordering::Relaxed));
            if key != 0 {
                book.used += 1;
                book.taken.insert(address, end);
            }
        }
        Ok(book)
    }

    /// Its memory, which whoever has this can read only.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// From where to where places are.
    pub(crate) fn span(&self) -> (u64, u64) {
        (self.word(START).load(Ordering::Relaxed), self.word(END).load(Ordering::Relaxed))
    }

    /// The place of a library, which is entered if there is room for it and it is not there.
    pub(crate) fn find_place(&mut self, room: &Room) -> Option<u64> {
        let fits = (1..=LONGEST).contains(&room.length) && [PAGE as u64, HUGE].contains(&room.alignment);
        if !fits || room.key == 0 {
            return None;
        }
        let slots = (0..SLOTS).map(|step| room.key.wrapping_add(step) % SLOTS);
        let found = slots.map(|slot| (slot, self.key(slot).load(Ordering::Relaxed)));
        let (slot, key) = found.into_iter().find(|(_, key)| [0, room.key].contains(key))?;
        if key == room.key {
            return Some(self.word(HEAD + SLOT * slot + 1).load(Ordering::Relaxed));
        }
        if self.used >= SLOTS / 2 {
            return None;
        }
        let (address, end) = self.free_place(room)?;
        self.taken.insert(address, end);
        self.word(HEAD + SLOT * slot + 1).store(address, Ordering::Relaxed);
        self.word(HEAD + SLOT * slot + 2).store(end, Ordering::Relaxed);
        self.key(slot).store(room.key, Ordering::Release);
        self.used += 1;
        Some(address)
    }

    /// The place that the secret has for the library, or the first one behind it that is free.
    fn free_place(&self, room: &Room) -> Option<(u64, u64)> {
        let page = PAGE as u64;
        // With room behind it for the alignment: the kernel seeks a gap that much longer.
        let slack = if room.alignment == HUGE { HUGE } else { 0 };
        let length = room.length.next_multiple_of(page) + slack;
        let (start, last) = self.span();
        let wished = self.secret.number(&[b"place", self.realm.as_bytes(), &room.key.to_le_bytes()]) % WINDOW;
        let mut address = (start + page + wished).next_multiple_of(room.alignment);
        loop {
            let end = address.checked_add(length)?;
            if end > last {
                return None;
            }
            // A page apart from all others.
            let in_the_way =
                self.taken.range(..end + page).next_back().filter(|(_, end)| **end + page > address);
            match in_the_way {
                None => return Some((address, end)),
                Some((_, end)) => address = (*end + page).next_multiple_of(room.alignment),
            }
        }
    }

    fn key(&self, slot: u64) -> &AtomicU64 {
        self.word(HEAD + SLOT * slot)
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
            .map(|slot| book.word(HEAD + SLOT * slot + 1).load(Ordering::Relaxed))
    }

    const REALM: Realm = Realm::User(7);

    fn new() -> Book {
        Book::new(&Secret::passing().unwrap(), &REALM).unwrap()
    }

    fn room(number: u64) -> Room {
        let alignment = if number.is_multiple_of(2) { HUGE } else { 4096 };
        // The same slot for all of them.
        Room { key: 7 + number * SLOTS, length: 3 << 20, alignment }
    }

    #[test]
    fn places_are_free_and_stay() {
        let secret = Secret::passing().unwrap();
        let mut book = Book::new(&secret, &REALM).unwrap();
        let (start, end) = book.span();
        assert!(start.is_multiple_of(4096) && start >= lowest() && start < lowest() + SPREAD);
        let mut seen = Vec::new();
        for number in 1..=200 {
            let at = book.find_place(&room(number)).unwrap();
            assert!(at > start && at + (3 << 20) < end && at.is_multiple_of(room(number).alignment));
            assert_eq!(place(&book, room(number).key), Some(at));
            let longer = Room { length: 9 << 20, alignment: 4096, ..room(number) };
            assert_eq!(book.find_place(&longer), Some(at), "once and for all");
            seen.push(at);
        }
        let mut sorted = seen.clone();
        sorted.sort_unstable();
        assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] > 3 << 20), "one does not lie on another");
        // Whoever takes it over knows what is taken.
        let mut copy = Book::copy(book.fd(), &secret, &REALM).unwrap();
        assert!((1..=200).map(|number| place(&copy, room(number).key)).eq(seen.iter().copied().map(Some)));
        assert_eq!((copy.used, copy.span()), (200, book.span()));
        for number in 201..=300 {
            assert_eq!(copy.find_place(&room(number)), book.find_place(&room(number)));
        }
        assert_eq!(place(&book, 12), None);
        for bad in [(0, 4096, 4096), (1, 0, 4096), (1, u64::MAX, 4096), (1, 4096, 3), (1, 4096, 1 << 63)] {
            let bad = Room { key: bad.0, length: bad.1, alignment: bad.2 };
            assert_eq!(book.find_place(&bad), None);
        }
        assert_eq!(book.used, 300);
    }

    #[test]
    fn the_secret_and_the_realm_decide_and_the_order_does_not() {
        let secret = Secret::passing().unwrap();
        let places = |secret: &Secret, realm: &Realm, backwards: bool| {
            let mut book = Book::new(secret, realm).unwrap();
            // Few enough that hardly any two want the same place.
            let mut numbers: Vec<u64> = (1..=9).collect();
            if backwards {
                numbers.reverse();
            }
            for number in numbers {
                book.find_place(&room(number));
            }
            (1..=9).map(|number| place(&book, room(number).key).unwrap()).collect::<Vec<u64>>()
        };
        let first = places(&secret, &REALM, false);
        assert_eq!(first, places(&secret, &REALM, false), "a store that is started again");
        let turned = places(&secret, &REALM, true);
        let equal = first.iter().zip(&turned).filter(|(one, other)| one == other).count();
        assert!(equal >= 5, "{first:x?} {turned:x?}");
        // By how much they lie apart tells nothing, either.
        let apart = |places: &[u64]| places.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
        let of_realm: Vec<u64> = apart(&places(&secret, &Realm::User(8), false));
        let of_host: Vec<u64> = apart(&places(&Secret::passing().unwrap(), &REALM, false));
        let here: Vec<u64> = apart(&first);
        assert!(here != of_realm && here != of_host && of_realm != of_host);
    }

    #[test]
    fn a_full_book_takes_no_more() {
        let mut book = new();
        for key in 1..=SLOTS {
            book.find_place(&Room { key, length: 4096, alignment: 4096 });
        }
        assert_eq!(book.used, SLOTS / 2);
        assert_eq!(place(&book, SLOTS), None);
        let mut book = new();
        for key in 1..=100 {
            book.find_place(&Room { key, length: LONGEST, alignment: 4096 });
        }
        assert!(book.used >= (SPAN - WINDOW) / (LONGEST + 8192) - 1 && book.used < SPAN / LONGEST);
    }

    #[test]
    fn two_books_begin_elsewhere() {
        let starts: Vec<u64> = (0..4).map(|_| new().span().0).collect();
        assert!(starts.windows(2).any(|pair| pair[0] != pair[1]), "{starts:?}");
    }
}
