//! Placement tables: the address at which each library is loaded, for each trust domain.
//!
//! What the dynamic loader writes into a library's read-only data are addresses. In two processes these are equal, and can
//! be one object, if the libraries are at equal addresses. So each library has an address, derived from its key (of its
//! headers and build ID) and from the [host's secret](crate::host_secret) by keyed BLAKE3 hashes. Stores that share the
//! secret, one after the other or on several hosts, derive the same addresses without asking one another, and a stranger who
//! knows the library does not learn its address. The addresses of a trust domain are in a window of [`WINDOW`] bytes, because
//! a library far from all others costs page tables of its own; the secret also decides where that window is. Of two
//! libraries that would overlap, the later one is behind the earlier. For that reason there is a table.
//!
//! Clients map the table and look addresses up without asking:
//!
//! ```text
//! 0       8     16      24     32                      64
//! | start | end | slots | 0    | key address end 0     | key address ...      64-bit words
//! ```
//!
//! A key is looked up from slot `key % slots` on, until it or an empty slot (key 0) is found. A slot is filled once, its key
//! last.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::host_secret::HostSecret;
use crate::trust_domain::TrustDomain;
use orrery_orc_wire::protocol::PlacementRequest;
use orrery_orc_wire::sealed_file::{FileMapping, UnsealedFile};
use orrery_sys::PAGE;

/// How many slots there are; half of them are used at most.
const SLOTS: u64 = 8192;
/// Words of the header, and of a slot.
const HEADER: u64 = 4;
const SLOT: u64 = 4;
/// The size of a table.
pub(crate) const BYTES: u64 = (HEADER + SLOT * SLOTS) * 8;
/// The size of the window over which addresses are spread.
const WINDOW: u64 = 16 << 30;
/// The size of the address space of a table.
const SPAN: u64 = 64 << 30;
/// The range over which the beginning of the address space is spread: 26 bits of pages.
const SPREAD: u64 = 1 << 38;
/// The longest library that is placed.
const MAX_LIBRARY: u64 = 4 << 30;
/// The size of a huge page.
const HUGE: u64 = 2 << 20;

const START: u64 = 0;
const END: u64 = 1;

/// The placement table of one trust domain.
#[derive(Debug)]
pub(crate) struct PlacementTable {
    fd: OwnedFd,
    mapping: FileMapping,
    used: u64,
    /// Occupied ranges: the end of each by its start.
    occupied: BTreeMap<u64, u64>,
    secret: HostSecret,
    domain: String,
}

/// Returns the lowest address at which a table's address space may begin: below all addresses that the kernel may choose by
/// itself, and close to them, because some tools expect programs there.
fn lowest() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/mmap_rnd_bits").unwrap_or_default();
    let bits = text.trim().parse::<u32>().unwrap_or(28).clamp(8, 33);
    // The address space of a program ends at 2^47; stacks are above the random part.
    (1_u64 << 47) - (1 << (bits + 12)) - (64 << 30) - SPREAD - SPAN
}

impl PlacementTable {
    /// Creates an empty table, at the address that the secret determines for this trust domain.
    ///
    /// # Errors
    /// If there is no memory or no descriptor left.
    pub(crate) fn new(secret: &HostSecret, domain: &TrustDomain) -> io::Result<Self> {
        let domain = domain.to_string();
        let spread = secret.keyed_hash(&[b"start", domain.as_bytes()]) % SPREAD;
        let start = lowest() + spread / PAGE as u64 * PAGE as u64;
        Self::with_words(&[start, start + SPAN, SLOTS], secret, domain)
    }

    /// Copies a table into memory that this process can write.
    ///
    /// # Errors
    /// If `other` is no table; if there is no memory or no descriptor left.
    pub(crate) fn copy(other: BorrowedFd<'_>, secret: &HostSecret, domain: &TrustDomain) -> io::Result<Self> {
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
        Self::with_words(&words, secret, domain.to_string())
    }

    fn with_words(words: &[u64], secret: &HostSecret, domain: String) -> io::Result<Self> {
        let file = UnsealedFile::new("orc:placement-table", usize::try_from(BYTES).unwrap_or(0))?;
        let (fd, mapping) = file.seal_future_writes()?;
        let occupied = BTreeMap::new();
        let mut book = Self { fd, mapping, used: 0, occupied, secret: secret.clone(), domain };
        for (index, word) in (0..).zip(words).filter(|(_, word)| **word != 0) {
            book.word(index).store(*word, Ordering::Relaxed);
        }
        for slot in 0..SLOTS {
            let [key, address, end] =
                [0, 1, 2].map(|word| book.word(HEADER + SLOT * slot + word).load(Ordering::Relaxed));
            if key != 0 {
                book.used += 1;
                book.occupied.insert(address, end);
            }
        }
        Ok(book)
    }

    /// Returns its memory, which can only be read through this descriptor.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the start and the end of its address space.
    pub(crate) fn span(&self) -> (u64, u64) {
        (self.word(START).load(Ordering::Relaxed), self.word(END).load(Ordering::Relaxed))
    }

    /// Returns the address of a library, which is entered first if it is new and there is room for it.
    pub(crate) fn place(&mut self, library: &PlacementRequest) -> Option<u64> {
        let fits =
            (1..=MAX_LIBRARY).contains(&library.length) && [PAGE as u64, HUGE].contains(&library.alignment);
        if !fits || library.key == 0 {
            return None;
        }
        let slots = (0..SLOTS).map(|step| library.key.wrapping_add(step) % SLOTS);
        let found = slots.map(|slot| (slot, self.key(slot).load(Ordering::Relaxed)));
        let (slot, key) = found.into_iter().find(|(_, key)| [0, library.key].contains(key))?;
        if key == library.key {
            return Some(self.word(HEADER + SLOT * slot + 1).load(Ordering::Relaxed));
        }
        if self.used >= SLOTS / 2 {
            return None;
        }
        let (address, end) = self.free_address(library)?;
        self.occupied.insert(address, end);
        self.word(HEADER + SLOT * slot + 1).store(address, Ordering::Relaxed);
        self.word(HEADER + SLOT * slot + 2).store(end, Ordering::Relaxed);
        self.key(slot).store(library.key, Ordering::Release);
        self.used += 1;
        Some(address)
    }

    /// Returns the range that the secret determines for the library, or the first free one behind it.
    fn free_address(&self, library: &PlacementRequest) -> Option<(u64, u64)> {
        let page = PAGE as u64;
        // The kernel looks for a gap that is longer by the alignment.
        let slack = if library.alignment == HUGE { HUGE } else { 0 };
        let length = library.length.next_multiple_of(page) + slack;
        let (start, last) = self.span();
        let preferred =
            self.secret.keyed_hash(&[b"place", self.domain.as_bytes(), &library.key.to_le_bytes()]) % WINDOW;
        let mut address = (start + page + preferred).next_multiple_of(library.alignment);
        loop {
            let end = address.checked_add(length)?;
            if end > last {
                return None;
            }
            // There is a page between two libraries.
            let in_the_way =
                self.occupied.range(..end + page).next_back().filter(|(_, end)| **end + page > address);
            match in_the_way {
                None => return Some((address, end)),
                Some((_, end)) => address = (*end + page).next_multiple_of(library.alignment),
            }
        }
    }

    fn key(&self, slot: u64) -> &AtomicU64 {
        self.word(HEADER + SLOT * slot)
    }

    fn word(&self, index: u64) -> &AtomicU64 {
        assert!(index < BYTES / 8, "there is no word {index}");
        let place = self.mapping.start().cast::<u64>().as_ptr();
        // SAFETY: `index` is within the table, whose mapping is aligned to pages and lives as long as `self`. Clients only read
        // it, by atomic loads.
        unsafe { AtomicU64::from_ptr(place.add(usize::try_from(index).unwrap_or(0))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(book: &PlacementTable, key: u64) -> Option<u64> {
        (0..SLOTS)
            .map(|step| key.wrapping_add(step) % SLOTS)
            .take_while(|slot| book.key(*slot).load(Ordering::Acquire) != 0)
            .find(|slot| book.key(*slot).load(Ordering::Relaxed) == key)
            .map(|slot| book.word(HEADER + SLOT * slot + 1).load(Ordering::Relaxed))
    }

    const DOMAIN: TrustDomain = TrustDomain::User(7);

    fn new() -> PlacementTable {
        PlacementTable::new(&HostSecret::ephemeral().unwrap(), &DOMAIN).unwrap()
    }

    fn library(number: u64) -> PlacementRequest {
        let alignment = if number.is_multiple_of(2) { HUGE } else { 4096 };
        // The same slot for all of them.
        PlacementRequest { key: 7 + number * SLOTS, length: 3 << 20, alignment }
    }

    #[test]
    fn places_are_free_and_stay() {
        let secret = HostSecret::ephemeral().unwrap();
        let mut book = PlacementTable::new(&secret, &DOMAIN).unwrap();
        let (start, end) = book.span();
        assert!(start.is_multiple_of(4096) && start >= lowest() && start < lowest() + SPREAD);
        let mut seen = Vec::new();
        for number in 1..=200 {
            let at = book.place(&library(number)).unwrap();
            assert!(at > start && at + (3 << 20) < end && at.is_multiple_of(library(number).alignment));
            assert_eq!(place(&book, library(number).key), Some(at));
            let longer = PlacementRequest { length: 9 << 20, alignment: 4096, ..library(number) };
            assert_eq!(book.place(&longer), Some(at), "once and for all");
            seen.push(at);
        }
        let mut sorted = seen.clone();
        sorted.sort_unstable();
        assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] > 3 << 20), "one does not lie on another");
        // Whoever takes it over knows what is occupied.
        let mut copy = PlacementTable::copy(book.fd(), &secret, &DOMAIN).unwrap();
        assert!((1..=200).map(|number| place(&copy, library(number).key)).eq(seen.iter().copied().map(Some)));
        assert_eq!((copy.used, copy.span()), (200, book.span()));
        for number in 201..=300 {
            assert_eq!(copy.place(&library(number)), book.place(&library(number)));
        }
        assert_eq!(place(&book, 12), None);
        for bad in [(0, 4096, 4096), (1, 0, 4096), (1, u64::MAX, 4096), (1, 4096, 3), (1, 4096, 1 << 63)] {
            let bad = PlacementRequest { key: bad.0, length: bad.1, alignment: bad.2 };
            assert_eq!(book.place(&bad), None);
        }
        assert_eq!(book.used, 300);
    }

    #[test]
    fn the_secret_and_the_realm_decide_and_the_order_does_not() {
        let secret = HostSecret::ephemeral().unwrap();
        let places = |secret: &HostSecret, domain: &TrustDomain, backwards: bool| {
            let mut book = PlacementTable::new(secret, domain).unwrap();
            // Few enough that hardly any two want the same place.
            let mut numbers: Vec<u64> = (1..=9).collect();
            if backwards {
                numbers.reverse();
            }
            for number in numbers {
                book.place(&library(number));
            }
            (1..=9).map(|number| place(&book, library(number).key).unwrap()).collect::<Vec<u64>>()
        };
        let first = places(&secret, &DOMAIN, false);
        assert_eq!(first, places(&secret, &DOMAIN, false), "a store that is started again");
        let turned = places(&secret, &DOMAIN, true);
        let equal = first.iter().zip(&turned).filter(|(one, other)| one == other).count();
        assert!(equal >= 5, "{first:x?} {turned:x?}");
        // By how much they are apart tells nothing, either.
        let apart = |places: &[u64]| places.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
        let of_domain: Vec<u64> = apart(&places(&secret, &TrustDomain::User(8), false));
        let of_host: Vec<u64> = apart(&places(&HostSecret::ephemeral().unwrap(), &DOMAIN, false));
        let here: Vec<u64> = apart(&first);
        assert!(here != of_domain && here != of_host && of_domain != of_host);
    }

    #[test]
    fn a_full_book_takes_no_more() {
        let mut book = new();
        for key in 1..=SLOTS {
            book.place(&PlacementRequest { key, length: 4096, alignment: 4096 });
        }
        assert_eq!(book.used, SLOTS / 2);
        assert_eq!(place(&book, SLOTS), None);
        let mut book = new();
        for key in 1..=100 {
            book.place(&PlacementRequest { key, length: MAX_LIBRARY, alignment: 4096 });
        }
        assert!(book.used >= (SPAN - WINDOW) / (MAX_LIBRARY + 8192) - 1 && book.used < SPAN / MAX_LIBRARY);
    }

    #[test]
    fn two_books_begin_elsewhere() {
        let starts: Vec<u64> = (0..4).map(|_| new().span().0).collect();
        assert!(starts.windows(2).any(|pair| pair[0] != pair[1]), "{starts:?}");
    }
}
