//! The journal: a ring into which executives write single calls, and from which one reader takes them.
//!
//! Many write and one reads. A slot's stamp says whose turn it is: see [`stamp_of`]. A writer prepares its entry, takes
//! a ticket, copies, and stamps; one that dies or is left by a `longjmp` in between blocks the ring, so the reader
//! passes over a slot that stays unwritten while others behind it are, and counts it as lost. Writers that find the
//! ring full wait for the reader; where there is none, they count what is lost. A reader looks every few milliseconds,
//! or sleeps at [`Journal::waiting`] and is woken.

use core::sync::atomic::Ordering::{Relaxed, Release};
use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::users::USERS;

/// How many entries the ring holds.
pub const ENTRIES: usize = 8192;
/// How many bytes of memory that arguments point to an entry has room for.
pub const DATA: usize = 352;
/// How many pieces of memory an entry can have.
pub const PIECES: usize = 8;
/// How many return addresses an entry has.
pub const CALLERS: usize = 5;

/// The ring. All-zero bytes are a valid one, without reader.
#[repr(C)]
pub struct Journal {
    /// The next ticket to be taken.
    pub next: AtomicU64,
    /// The next ticket to be read.
    pub read: AtomicU64,
    /// Entries that were not written, because the ring was full and nobody read.
    pub lost: AtomicU64,
    /// Not zero while it is read.
    pub reader: AtomicU32,
    /// Not zero while a reader sleeps until there is an entry: a writer of one sets it to zero, and wakes the sleeper
    /// (futex(2)).
    pub waiting: AtomicU32,
    /// How many journals further identities of the run have. The supervisor stores it last, and wakes who waits for it (futex(2)). In the
    /// first program's journal only; who can write there can write anything here.
    pub further: AtomicU32,
    /// The segments of these journals.
    pub segments: [AtomicU32; USERS - 1],
    /// The slots.
    pub slots: [Slot; ENTRIES],
}

impl Journal {
    /// Notes the segment of a further journal, of which there are `index` already. In the supervisor only, in the first journal.
    pub fn announce(&self, index: usize, segment: u32) {
        if let (Some(place), Ok(count)) = (self.segments.get(index), u32::try_from(index + 1)) {
            place.store(segment, Relaxed);
            self.further.store(count, Release);
        }
    }
}

/// One place of the ring. Its stamps are [`stamp_of`]: all-zero slots are free.
#[repr(C)]
pub struct Slot {
    /// Whose turn it is.
    pub stamp: AtomicU64,
    /// The entry.
    pub words: [AtomicU64; WORDS],
}

/// How many words an entry has.
pub const WORDS: usize = size_of::<Entry>() / 8;

/// Returns what the stamp of a ticket's slot is when the ticket may write: twice its turn around the ring. One more:
/// written.
pub const fn stamp_of(ticket: u64) -> u64 {
    ticket / ENTRIES as u64 * 2
}

/// One call.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Ticks of the time stamp counter when it began.
    pub start: u64,
    /// How many it took.
    pub ticks: u64,
    /// The thread that made the call.
    pub thread: u32,
    /// The number.
    pub number: u32,
    /// [`ENTERED`], [`DONE`], [`ANSWERED`], [`RESUMED`], [`SIGNAL`] or [`EVENT`].
    pub state: u32,
    /// Which rule asked for this.
    pub rule: u32,
    /// A hash of where the call came from.
    pub site: u64,
    /// As the program gave them.
    pub arguments: [u64; 6],
    /// The result of the call.
    pub result: i64,
    /// The address behind the call instruction, then return addresses found on the stack; zero where none was.
    pub callers: [u64; CALLERS],
    /// Pieces of memory, one after the other in `data`: the argument's index in the upper four bits, and a length.
    pub pieces: [u16; PIECES],
    /// The captured bytes.
    pub data: [u8; DATA],
}

/// The call begins, and may never return.
pub const ENTERED: u32 = 1;
/// The call was performed.
pub const DONE: u32 = 2;
/// A rule gave the result.
pub const ANSWERED: u32 = 3;

/// A call that began before has ended, of which the entry has nothing but the result.
pub const RESUMED: u32 = 4;

/// No call: a handler of the program's gets a signal, of which the entry has the number, and [`INFORMATION`] bytes of its `siginfo_t` as the
/// memory of the first argument.
pub const SIGNAL: u32 = 5;
/// How many bytes of a `siginfo_t` are told: what signals of any kind have there.
pub const INFORMATION: usize = 48;

/// No result: a handler reports something while it decides about the call. The entry has that as the memory of the first argument.
pub const EVENT: u32 = 6;

/// The bits of a piece that are its length.
pub const PIECE_LENGTH: u16 = 0xfff;
/// How far above those its argument's index is.
pub const PIECE_SHIFT: u32 = 12;

impl Entry {
    /// An entry that says nothing.
    pub const EMPTY: Self = Self {
        start: 0,
        ticks: 0,
        thread: 0,
        number: 0,
        state: 0,
        rule: 0,
        site: 0,
        arguments: [0; 6],
        result: 0,
        callers: [0; CALLERS],
        pieces: [0; PIECES],
        data: [0; DATA],
    };

    /// Returns the entry as words.
    pub fn words(&self) -> &[u64; WORDS] {
        // SAFETY: a structure of integers without padding, aligned for words and as large as so many.
        unsafe { &*core::ptr::from_ref(self).cast() }
    }

    /// Words as an entry.
    pub fn from_words(words: &[u64; WORDS]) -> Self {
        // SAFETY: any integers are an entry.
        unsafe { core::mem::transmute_copy(words) }
    }

    /// The memory that an argument pointed to, if it was looked at: as it was after the call, if it was looked at
    /// twice.
    pub fn piece(&self, argument: usize) -> Option<&[u8]> {
        let (mut start, mut found) = (0, None);
        for piece in self.pieces {
            let length = usize::from(piece & PIECE_LENGTH);
            if piece != 0 && usize::from(piece >> PIECE_SHIFT) == argument + 1 {
                found = self.data.get(start..start + length);
            }
            start += length;
        }
        found
    }
}

const _: () = assert!(size_of::<Entry>() == 504 && size_of::<Slot>() == 512);
const _: () = assert!(crate::capture::CAPTURES <= PIECES && DATA <= PIECE_LENGTH as usize);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_survive_being_words() {
        let mut entry = Entry { number: 7, result: -2, ..Entry::EMPTY };
        entry.data[DATA - 1] = 9;
        let back = Entry::from_words(entry.words());
        assert_eq!((back.number, back.result, back.data[DATA - 1]), (7, -2, 9));
    }

    #[test]
    fn pieces_belong_to_arguments() {
        let mut entry = Entry::EMPTY;
        entry.pieces = [2 << PIECE_SHIFT | 3, 1 << PIECE_SHIFT, 4 << PIECE_SHIFT | 2, 0, 0, 0, 0, 0];
        entry.data[..5].copy_from_slice(b"abcde");
        assert_eq!(entry.piece(1), Some(&b"abc"[..]));
        assert_eq!(entry.piece(0), Some(&b""[..]));
        assert_eq!(entry.piece(3), Some(&b"de"[..]));
        assert_eq!(entry.piece(2), None);
        entry.pieces[3] = 2 << PIECE_SHIFT | 1;
        entry.data[5] = b'f';
        assert_eq!(entry.piece(1), Some(&b"f"[..]));
    }

    #[test]
    fn stamps_begin_with_zero_and_change_with_each_turn() {
        assert_eq!(stamp_of(0), 0);
        assert_eq!(stamp_of(ENTRIES as u64 - 1), 0);
        assert_eq!(stamp_of(ENTRIES as u64), 2);
    }
}
