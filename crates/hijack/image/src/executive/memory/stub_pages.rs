//! Memory for stubs: pages within a jump's reach of the sites.
//!
//! Where a jump's bytes have to be a jump pad (see [`crate::rewrite_plan`]), its distance, and so the stub's address,
//! is given in part.

use core::sync::atomic::{
    AtomicU8, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use crate::executive::abi::syscall::{call, failed};
use crate::executive::abi::trampoline::TRAMPOLINES;
use crate::nr;
use crate::rewrite_plan::{INSTRUCTIONS, JUMP, RELOCATED, RewritePlan, SYSCALL};

const PAGE: u64 = 4096;
/// PathBuffer is given in units of this: 64 of them are a page, and a word has a bit for each.
const UNIT: u64 = 64;
/// The largest stub: what was moved, and what has the call performed.
pub(crate) const STUB: usize = RELOCATED + 128;
const PAGES: usize = 256;
/// How far a jump reaches, less a margin.
const REACH: u64 = (1 << 31) - (1 << 20);
/// Pages for stubs are looked for in steps of this, not to be in the way of a heap that grows.
const STEP: u64 = 1 << 20;
/// The first pages stay unmapped: a NULL pointer faults with any offset.
const LOWEST: u64 = 1 << 16;
/// How many addresses are tried for a stub whose distance is given in part.
const TRIES: usize = 1024;

const PROT_READ_EXEC: u64 = 5;
const MAP_PRIVATE_ANONYMOUS: u64 = 0x22;
const MAP_FIXED_NOREPLACE: u64 = 0x10_0000;

struct Page {
    start: AtomicU64,
    /// A bit for each unit that is taken.
    used: AtomicU64,
}

/// Changed under the lock of `code_ranges` only.
static PAGES_OF_STUBS: [Page; PAGES] =
    [const { Page { start: AtomicU64::new(0), used: AtomicU64::new(0) } }; PAGES];

/// What is in a stub.
pub(crate) struct Stub {
    /// Its address; zero where there is none.
    start: AtomicU64,
    length: AtomicU8,
    /// One more than the number of its call, or zero: not known beforehand.
    number_and_one: AtomicU32,
    /// For each instruction that was moved here: how far behind it the stub's ones begin, and how far before the end of
    /// the site it was.
    moved: [[AtomicU8; 2]; INSTRUCTIONS],
}

/// What is in the stub of each trampoline. All zero, as is everything large here: what is not would have to be written
/// into each program.
static STUBS: [Stub; TRAMPOLINES] = [const {
    Stub {
        start: AtomicU64::new(0),
        length: AtomicU8::new(0),
        number_and_one: AtomicU32::new(0),
        moved: [const { [AtomicU8::new(0), AtomicU8::new(0)] }; INSTRUCTIONS],
    }
}; TRAMPOLINES];

/// Addresses below and above all stubs.
pub(crate) static LOWEST_STUB: AtomicU64 = AtomicU64::new(u64::MAX);
pub(crate) static HIGHEST_STUB: AtomicU64 = AtomicU64::new(0);

/// Notes what is in the stub of a trampoline, before a thread can go there.
pub(crate) fn describe(
    trampoline: usize,
    start: u64,
    length: usize,
    plan: &RewritePlan,
    number: Option<u16>,
) {
    let Some(stub) = STUBS.get(trampoline) else { return };
    stub.length.store(length as u8, Relaxed);
    stub.number_and_one.store(number.map_or(0, |number| u32::from(number) + 1), Relaxed);
    let (mut here, mut back) = (0, plan.length() + SYSCALL);
    for (place, step) in stub.moved.iter().zip(plan.steps()) {
        here += step.moved();
        place[0].store(here as u8, Relaxed);
        place[1].store(back as u8, Relaxed);
        back -= usize::from(step.length);
    }
    stub.start.store(start, Release);
    LOWEST_STUB.fetch_min(start, Relaxed);
    HIGHEST_STUB.fetch_max(start + length as u64, Relaxed);
}

/// The stub that an address is in: its trampoline, and how far the address is behind its start.
pub(crate) fn at(address: u64) -> Option<(usize, u64, &'static Stub)> {
    if address < LOWEST_STUB.load(Relaxed) || address >= HIGHEST_STUB.load(Relaxed) {
        return None;
    }
    // Those that could not be put in place are zero.
    STUBS.iter().enumerate().find_map(|(trampoline, stub)| {
        let start = stub.start.load(Acquire);
        let at = address.wrapping_sub(start);
        (start != 0 && at < u64::from(stub.length.load(Relaxed))).then_some((trampoline, at, stub))
    })
}

impl Stub {
    /// Returns how far before the site's end the instruction was that is so far behind the stub's start. `None`: none
    /// was moved there.
    pub(crate) fn original(&self, at: u64) -> Option<u64> {
        let ends_behind = |place: &&[AtomicU8; 2]| at < u64::from(place[0].load(Relaxed));
        self.moved.iter().find(ends_behind).map(|place| u64::from(place[1].load(Relaxed)))
    }

    /// The number of its call, if it is always the same.
    pub(crate) fn number(&self) -> Option<u64> {
        u64::from(self.number_and_one.load(Relaxed)).checked_sub(1)
    }
}

/// Returns whether stubs are in `[start, end)`.
pub(crate) fn overlap(start: u64, end: u64) -> bool {
    PAGES_OF_STUBS
        .iter()
        .map(|page| page.start.load(Relaxed))
        // Filled from the first on, and never freed.
        .take_while(|page| *page != 0)
        .any(|page| page < end && start < page + PAGE)
}

/// The room for one stub.
pub(crate) struct StubSlot {
    /// The address of the stub.
    pub(crate) at: u64,
    page: &'static Page,
    units: u64,
}

impl StubSlot {
    fn new(page: &'static Page, at: u64) -> Option<Self> {
        let offset = at.checked_sub(page.start.load(Relaxed))?;
        if offset + STUB as u64 > PAGE {
            return None;
        }
        let (first, last) = (offset / UNIT, (offset + STUB as u64 - 1) / UNIT);
        let units = (!0 >> (63 - (last - first))) << first;
        (page.used.load(Relaxed) & units == 0).then_some(Self { at, page, units })
    }

    /// The page that it is in.
    pub(crate) fn page(&self) -> u64 {
        self.page.start.load(Relaxed)
    }

    /// Takes it: as much as the stub needs.
    pub(crate) fn take(self, length: usize) {
        let first = (self.at - self.page()) / UNIT;
        let last = (self.at - self.page() + length.max(1) as u64 - 1) / UNIT;
        let needed = self.units & (!0 >> (63 - last)) & (!0 << first);
        self.page.used.fetch_or(needed, Relaxed);
    }
}

/// A place for the stub of a jump at `window`, which is code of the range `[start, end)`; of the jump's distance, the
/// bits in `mask` must be those of `value`.
pub(crate) fn find(window: u64, (mask, value): (u32, u32), start: u64, end: u64) -> Option<StubSlot> {
    if mask == 0 { anywhere(window, start, end) } else { at_distance(window + JUMP as u64, mask, value) }
}

fn anywhere(window: u64, start: u64, end: u64) -> Option<StubSlot> {
    let near = |page: u64| page.abs_diff(window) < REACH;
    let in_page = |page: &'static Page| {
        let first = page.start.load(Relaxed);
        let places = (first..first + PAGE).step_by(UNIT as usize);
        (first != 0 && near(first))
            .then(|| places.into_iter().find_map(|at| StubSlot::new(page, at)))
            .flatten()
    };
    if let Some(place) = PAGES_OF_STUBS.iter().find_map(in_page) {
        return Some(place);
    }
    // Below first: above a program is its heap.
    let below = (1..).map(|k| start.saturating_sub(k * STEP)).take_while(|at| *at >= LOWEST && near(*at));
    let lowest = core::iter::once(LOWEST).filter(|at| near(*at));
    let above = (1..).map(|k| end + k * STEP).take_while(|at| near(*at));
    below.chain(lowest).chain(above).find_map(|at| in_page(map(at & !(PAGE - 1))?))
}

fn at_distance(origin: u64, mask: u32, value: u32) -> Option<StubSlot> {
    // The lowest bits that are free make a span of addresses; those between and above are tried out, from the top: that
    // is below the site, and next to it.
    let span = (1_u32 << mask.trailing_zeros().min(31)) - 1;
    let free = !mask & !span;
    let mut tries = TRIES;
    let mut upper = free;
    loop {
        let distance = i64::from((value | upper).cast_signed());
        let first = origin.wrapping_add_signed(distance);
        if (LOWEST..1 << 47).contains(&first)
            && let Some(place) = within(first, first + u64::from(span), &mut tries)
        {
            return Some(place);
        }
        if upper == 0 || tries == 0 {
            return None;
        }
        upper = (upper - 1) & free;
    }
}

/// A place whose address is one of these.
fn within(first: u64, last: u64, tries: &mut usize) -> Option<StubSlot> {
    let in_page = |page: &'static Page| {
        let start = page.start.load(Relaxed);
        if start == 0 || start > last || start + PAGE <= first {
            return None;
        }
        let from = first.max(start);
        let places = (from..=last.min(start + PAGE - 1)).step_by(UNIT as usize);
        places.into_iter().find_map(|at| StubSlot::new(page, at))
    };
    if let Some(place) = PAGES_OF_STUBS.iter().find_map(in_page) {
        return Some(place);
    }
    let (lowest, highest) = (first & !(PAGE - 1), last & !(PAGE - 1));
    // In a large span, not all of it.
    let step = ((highest - lowest) / 64).next_multiple_of(PAGE).max(PAGE);
    let mut page = lowest;
    while page <= highest && *tries > 0 {
        let room = last.min(page + PAGE - 1).min(page + PAGE - STUB as u64);
        if first.max(page) <= room {
            *tries -= 1;
            if let Some(place) = map(page).and_then(in_page) {
                return Some(place);
            }
        }
        page += step;
    }
    None
}

/// Maps a page exactly there, if nothing is there.
fn map(at: u64) -> Option<&'static Page> {
    let page = PAGES_OF_STUBS.iter().find(|page| page.start.load(Relaxed) == 0)?;
    let flags = MAP_PRIVATE_ANONYMOUS | MAP_FIXED_NOREPLACE;
    // SAFETY: replaces nothing; a kernel that does not know the flag may map elsewhere, which is undone.
    unsafe {
        let result = call(nr::mmap, [at, PAGE, PROT_READ_EXEC, flags, u64::MAX, 0]);
        if result == at.cast_signed() {
            page.used.store(0, Relaxed);
            page.start.store(at, Relaxed);
            return Some(page);
        }
        if !failed(result) {
            call(nr::munmap, [result.cast_unsigned(), PAGE, 0, 0, 0, 0]);
        }
    }
    None
}
