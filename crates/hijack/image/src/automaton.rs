//! One look at a path for all the patterns of a policy: an automaton that reads the path as the program wrote it.
//!
//! The supervisor compiles the patterns of all rules to the states of one automaton; each state says, by a bit for each list of
//! patterns, which of them a path that ends there fits. A [`Walk`] leads a path through it, byte by byte, in the place where
//! the program keeps it: nothing is copied. Names that only say "here" (`.`, an empty one) are left out on the way; at `..` a
//! walk gives up, since it cannot take back what it has read.
//!
//! Most paths have little to do with the rules, and leave the automaton after a few bytes. From there on a walk only looks
//! for the path's end, and for two dots.

use core::arch::x86_64::{__m128i, _mm_cmpeq_epi8, _mm_movemask_epi8, _mm_set1_epi8};

/// How many lists of patterns an automaton can distinguish.
pub const LISTS: usize = 64;
/// The most bytes that an automaton takes: it is copied into each process.
pub const LARGEST: usize = 32 << 10;
/// From here, nothing fits any more.
pub const DEAD: u16 = 0;
/// Before the first byte.
pub const START: u16 = 1;

/// What an automaton begins with. Behind it: for each state a word of bits, and then for each state, and each class, the
/// next state, in two bytes. It ends with a whole word.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Head {
    /// How many states there are.
    pub states: u32,
    /// How many classes of bytes: those of one class lead from each state to the same.
    pub classes: u32,
    /// To which class a byte belongs.
    pub class_of: [u8; 256],
}

/// An automaton, somewhere in memory.
#[derive(Debug, Clone, Copy)]
pub struct Automaton<'a> {
    head: &'a Head,
    fits: &'a [u64],
    next: &'a [u16],
}

impl<'a> Automaton<'a> {
    /// Returns the automaton in these words. `None` where there is none.
    pub fn new(words: &'a [u64]) -> Option<Self> {
        let (head, rest) = words.split_at_checked(size_of::<Head>() / 8)?;
        // SAFETY: a head is integers, and takes so many words.
        let head = unsafe { &*head.as_ptr().cast::<Head>() };
        let (fits, rest) = rest.split_at_checked(head.states as usize)?;
        // SAFETY: any bytes are valid `u16`s, and a `u64` is aligned for them.
        let next = unsafe { core::slice::from_raw_parts(rest.as_ptr().cast::<u16>(), 4 * rest.len()) };
        let steps = fits.len().checked_mul(head.classes as usize)?;
        Some(Self { head, fits, next: next.get(..steps)? })
    }

    #[inline(always)]
    fn step(&self, state: u16, byte: u8) -> u16 {
        let class = self.head.class_of[usize::from(byte)];
        let at = usize::from(state) * self.head.classes as usize + usize::from(class);
        self.next.get(at).copied().unwrap_or(DEAD)
    }

    /// Returns what fits a path that ends in this state.
    pub fn fits(&self, state: u16) -> u64 {
        self.fits.get(usize::from(state)).copied().unwrap_or(0)
    }
}

/// Where in a name a walk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NameState {
    /// The last byte was a slash.
    Start,
    /// Behind a slash and a dot.
    Dot,
    /// Behind a slash and two dots.
    Dots,
    /// The last byte belongs to another name.
    Within,
}

/// How a walk goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The path goes on behind these bytes.
    More,
    /// It has ended: this is what fits.
    Fits(u64),
    /// It goes upwards, which a walk cannot.
    Upwards,
}

/// A path on its way through an automaton.
#[derive(Debug, Clone, Copy)]
pub struct Walk<'a> {
    automaton: Automaton<'a>,
    state: u16,
    /// What the state was before the last slash; `None` where nothing was.
    before: Option<u16>,
    place: NameState,
}

impl<'a> Walk<'a> {
    /// The walk of a path that begins with a slash.
    pub fn from_root(automaton: Automaton<'a>) -> Self {
        Self::below(automaton, None)
    }

    /// The walk of a path that begins in a directory, whose own path has led to this state; `None` for the root.
    fn below(automaton: Automaton<'a>, directory: Option<u16>) -> Self {
        let state = automaton.step(directory.unwrap_or(START), b'/');
        Self { automaton, state, before: directory, place: NameState::Start }
    }

    /// The walk of a path that begins in the directory of this path: from the root, without dots, with no zero behind it.
    pub fn from(automaton: Automaton<'a>, directory: &[u8]) -> Self {
        if directory == b"/" {
            return Self::from_root(automaton);
        }
        let end = directory.iter().fold(START, |state, byte| automaton.step(state, *byte));
        Self::below(automaton, Some(end))
    }

    /// Reads on. Bytes behind the zero that ends the path are not looked at, but must be readable.
    pub fn feed(&mut self, bytes: &[u8]) -> Progress {
        for (at, byte) in bytes.iter().enumerate() {
            if self.state == DEAD && self.place == NameState::Within {
                return self.dead(bytes.get(at..).unwrap_or(&[]));
            }
            match (*byte, self.place) {
                (0, NameState::Dots) | (b'/', NameState::Dots) => return Progress::Upwards,
                (0, _) => return Progress::Fits(self.end()),
                (b'/', NameState::Start) => {}
                (b'/', NameState::Dot) => {
                    self.state = self.automaton.step(self.before.unwrap_or(START), b'/');
                    self.place = NameState::Start;
                }
                (b'/', NameState::Within) => {
                    self.before = Some(self.state);
                    self.state = self.automaton.step(self.state, b'/');
                    self.place = NameState::Start;
                }
                (byte, place) => {
                    self.state = self.automaton.step(self.state, byte);
                    self.place = match (byte, place) {
                        (b'.', NameState::Start) => NameState::Dot,
                        (b'.', NameState::Dot) => NameState::Dots,
                        _ => NameState::Within,
                    };
                }
            }
        }
        Progress::More
    }

    /// Reads on where nothing can fit any more, unless the path turns round.
    fn dead(&mut self, bytes: &[u8]) -> Progress {
        let (blocks, rest) = bytes.as_chunks::<16>();
        // Whether the last byte was a dot: two of them in a row are taken for a way upwards.
        let mut dot = 0;
        for block in blocks {
            // SAFETY: any sixteen bytes are such a value; the instructions are part of every x86-64.
            let (zeros, dots) = unsafe {
                let block = core::mem::transmute::<[u8; 16], __m128i>(*block);
                let of = |byte: u8| {
                    _mm_movemask_epi8(_mm_cmpeq_epi8(block, _mm_set1_epi8(byte.cast_signed())))
                        .cast_unsigned()
                };
                (of(0), of(b'.'))
            };
            let before_end = zeros.wrapping_sub(1) & !zeros;
            let dots = if zeros == 0 { dots } else { dots & before_end };
            if dots & (dots << 1 | dot) != 0 {
                return Progress::Upwards;
            }
            if zeros != 0 {
                return Progress::Fits(0);
            }
            dot = dots >> 15;
        }
        for byte in rest {
            match byte {
                0 => return Progress::Fits(0),
                b'.' if dot != 0 => return Progress::Upwards,
                byte => dot = u32::from(*byte == b'.'),
            }
        }
        // A dot at the end may be the first of two: as if it were the first of a name.
        self.place = if dot != 0 { NameState::Dot } else { NameState::Within };
        if dot != 0 {
            self.before = Some(DEAD);
        }
        Progress::More
    }

    fn end(&self) -> u64 {
        let state = match (self.place, self.before) {
            (NameState::Within | NameState::Dots, _) => self.state,
            (NameState::Start | NameState::Dot, Some(before)) => before,
            // The root itself.
            (NameState::Start | NameState::Dot, None) => self.automaton.step(START, b'/'),
        };
        self.automaton.fits(state)
    }
}

const _: () = assert!(size_of::<Head>().is_multiple_of(8));
