//! Deltas: the pages of a queued call, kept until the orbit comes to it.
//!
//! Copies wait in *frames*, the pages of a second memory file that main writes and the orbit can only read. The list of
//! a delta (which page of the mirror gets which frame) is in frames as well, so that a queue slot carries two numbers
//! ([`DeltaRef`]) of what the call dirtied.
//!
//! Frame 0 is the *board*: what an orbit has to know beyond the pages of its calls, namely which areas are outside of
//! the arena.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::vec::Vec;

use orrery_sys::PAGE;
use rustix::io::Errno;

use super::Error;
use super::copier::{Copier, Job};
use super::file::PageFile;

/// One run of pages: `count` pages from `page` of the mirror on get the frames from `frame` on, or become zeros.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) page: u32,
    pub(super) count: u32,
    pub(super) frame: u32,
}

/// No frame: the pages become zeros.
pub(super) const ZEROS: u32 = 0;
/// No frame and no pages: process `page` is copying, and sets `count` to 1 when it is done.
pub(super) const WAIT: u32 = u32::MAX;

impl Entry {
    /// Returns the frames and pages that it stands for, if any.
    fn has_frames(&self) -> bool {
        self.frame != ZEROS && self.frame != WAIT
    }

    /// Returns where in the file of frames the `count` of the first entry of `list` is.
    pub(super) fn sign_of(list: DeltaRef) -> u64 {
        (list.list as usize * PAGE + core::mem::offset_of!(Self, count)) as u64
    }
}

/// Entries per frame of a list.
const PER_FRAME: usize = PAGE / size_of::<Entry>();
/// Free frames beyond which memory is returned when no delta is left.
const SPARE: u32 = 2_048;

/// The pages that a queued call owns. It must go back to its mirror: [`super::Mirror::release`] once it is applied,
/// [`super::Mirror::withdraw`] if it never will be.
#[must_use = "frames stay taken until the delta is released or given back"]
#[derive(Debug)]
pub struct Delta {
    pub(super) mirror: u64,
    pub(super) sequence: u64,
    pub(super) list: DeltaRef,
    pub(super) pages: usize,
    /// Whether it was captured, and not delivered at once.
    pub(super) queued: bool,
    /// Who copies the rest.
    pub(super) copier: Option<Copier>,
}

impl Delta {
    /// Returns what the orbit needs in order to apply it.
    pub fn reference(&self) -> DeltaRef {
        self.list
    }

    /// Returns the number of pages that were copied.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Returns whether there is nothing to apply.
    pub fn is_empty(&self) -> bool {
        self.list == DeltaRef::EMPTY
    }
}

/// A delta in a queue slot: plain numbers, to be checked by who applies them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeltaRef {
    pub(super) list: u32,
    pub(super) entries: u32,
}

impl DeltaRef {
    /// The delta that changes nothing.
    pub const EMPTY: Self = Self { list: 0, entries: 0 };

    /// Returns it as one number.
    pub fn to_bits(self) -> u64 {
        u64::from(self.list) << 32 | u64::from(self.entries)
    }

    /// Decodes the number that [`DeltaRef::to_bits`] returned.
    #[expect(clippy::cast_possible_truncation, reason = "each half is taken")]
    pub fn from_bits(bits: u64) -> Self {
        Self { list: (bits >> 32) as u32, entries: bits as u32 }
    }

    /// Returns how many frames its list takes.
    pub(super) fn frames(self) -> u32 {
        short((self.entries as usize).div_ceil(PER_FRAME))
    }

    /// Reads entry `index` of the list whose file is mapped at `frames`.
    ///
    /// # Safety
    /// The file is mapped there, and the reference is within it.
    pub(super) unsafe fn entry(self, frames: *const u8, index: u32) -> Entry {
        let (frame, slot) = (index as usize / PER_FRAME, index as usize % PER_FRAME);
        let at = (self.list as usize + frame) * PAGE + slot * size_of::<Entry>();
        // SAFETY: the caller's promise; any bits are an entry, and their place is a multiple of four.
        unsafe { frames.add(at).cast::<Entry>().read_unaligned() }
    }
}

/// The frames of one mirror.
pub(super) struct Frames {
    file: PageFile,
    /// Free runs below `top`, in order.
    free: Vec<(u32, u32)>,
    /// Frames from here on were never used, or were returned to the kernel.
    top: u32,
    taken: u32,
}

impl Frames {
    pub(super) fn new(pages: usize) -> Result<Self, Error> {
        let file = PageFile::new("orrery-frames", pages)?;
        file.punch(0, 1)?;
        Ok(Self { file, free: Vec::new(), top: 1, taken: 0 })
    }

    pub(super) fn file(&self) -> &PageFile {
        &self.file
    }

    /// Returns the board in frame 0.
    pub(super) fn board(&self) -> &Board {
        // SAFETY: the first frame stays mapped with the file, and the board is made of atomic numbers.
        unsafe { &*self.file.at(0).cast::<c_void>().cast::<Board>() }
    }

    /// Takes a run of at most `count` frames: its first and its length.
    fn take(&mut self, count: u32) -> Result<(u32, u32), Error> {
        if let Some((first, len)) = self.free.last_mut() {
            let taken = count.min(*len);
            let run = (*first + *len - taken, taken);
            *len -= taken;
            if *len == 0 {
                self.free.pop();
            }
            self.taken += taken;
            return Ok(run);
        }
        self.extend(count)
    }

    /// Takes a run of exactly `count` frames.
    fn take_joined(&mut self, count: u32) -> Result<u32, Error> {
        let Some(index) = self.free.iter().position(|(_, len)| *len >= count) else {
            return self.extend(count).map(|run| run.0);
        };
        let (first, len) = self.free[index];
        if len == count {
            self.free.remove(index);
        } else {
            self.free[index].1 -= count;
        }
        self.taken += count;
        Ok(first + len - count)
    }

    fn extend(&mut self, count: u32) -> Result<(u32, u32), Error> {
        let first = self.top;
        let end = first.checked_add(count).filter(|end| *end as usize <= self.file.pages());
        self.top = end.ok_or(Error::Store { pages: count as usize, errno: Errno::NOSPC })?;
        self.taken += count;
        Ok((first, count))
    }

    fn give(&mut self, first: u32, count: u32) {
        let index = self.free.partition_point(|run| run.0 < first);
        self.free.insert(index, (first, count));
        if index + 1 < self.free.len() && first + count == self.free[index + 1].0 {
            self.free[index].1 += self.free.remove(index + 1).1;
        }
        if index > 0 && self.free[index - 1].0 + self.free[index - 1].1 == first {
            self.free[index - 1].1 += self.free.remove(index).1;
        }
        self.taken -= count;
        if self.taken == 0 && self.top > SPARE {
            // Best effort: frames that stay are used again.
            let _ = self.file.punch(SPARE as usize, (self.top - SPARE) as usize);
            self.top = SPARE;
            self.free.clear();
            self.free.push((1, SPARE - 1));
        }
    }

    /// Copies `count` pages from `address` on into frames and lists them for the mirror's pages from `page` on.
    ///
    /// # Errors
    /// [`Error::Store`]; what was listed before stays listed.
    ///
    /// # Safety
    /// The memory is mapped and readable.
    pub(super) unsafe fn copy(
        &mut self,
        page: usize,
        address: usize,
        count: usize,
        list: &mut Vec<Entry>,
    ) -> Result<(), Error> {
        let mut done = 0;
        while done < count {
            let fresh = self.top;
            let (frame, taken) = self.take(short(count - done))?;
            let (at, from) = (frame as usize, address + done * PAGE);
            // SAFETY: the caller's promise. Frames below the old top have been written before.
            if let Err(error) = unsafe { self.file.put(at, from, taken as usize, frame < fresh) } {
                self.give(frame, taken);
                return Err(error);
            }
            list.push(Entry { page: short(page + done), count: taken, frame });
            done += taken as usize;
        }
        Ok(())
    }

    /// Takes frames for `count` pages from `address` on, which the caller fills, and lists them.
    pub(super) fn reserve(
        &mut self,
        page: usize,
        address: usize,
        count: usize,
        list: &mut Vec<Entry>,
        jobs: &mut Vec<Job>,
    ) -> Result<(), Error> {
        let mut done = 0;
        while done < count {
            let (frame, taken) = self.take(short(count - done))?;
            let page = short(page + done);
            list.push(Entry { page, count: taken, frame });
            jobs.push(Job { address: address + done * PAGE, page, to: frame, count: taken });
            done += taken as usize;
        }
        Ok(())
    }

    /// Tells the orbit which process to wait for.
    pub(super) fn name_copier(&self, list: DeltaRef, pid: u32) {
        // SAFETY: the list was stored there, and its first entry begins with the number.
        unsafe { self.file.at(list.list as usize).cast::<c_void>().cast::<u32>().write(pid) };
    }

    /// Tells the orbit that there is nobody to wait for.
    pub(super) fn sign(&self, list: DeltaRef) {
        // SAFETY: the list was stored there, and its first entry's second number is the sign.
        unsafe { self.file.at(list.list as usize).cast::<c_void>().cast::<u32>().add(1).write(1) };
    }

    /// Frees a stored list, but not what it lists.
    pub(super) fn free_list(&mut self, list: DeltaRef) {
        self.give(list.list, list.frames());
    }

    /// Stores a list.
    pub(super) fn store(&mut self, list: &[Entry]) -> Result<DeltaRef, Error> {
        if list.is_empty() {
            return Ok(DeltaRef::EMPTY);
        }
        let fresh = self.top;
        let reference = DeltaRef { list: 0, entries: short(list.len()) };
        let frames = reference.frames();
        let first = self.take_joined(frames)?;
        for (number, part) in list.chunks(PER_FRAME).enumerate() {
            let mut page = [Entry { page: 0, count: 0, frame: 0 }; PER_FRAME + 1];
            page[..part.len()].copy_from_slice(part);
            let at = first as usize + number;
            // SAFETY: the array has at least a page's bytes.
            let put = unsafe { self.file.put(at, page.as_ptr().expose_provenance(), 1, first < fresh) };
            if let Err(error) = put {
                self.give(first, frames);
                return Err(error);
            }
        }
        Ok(DeltaRef { list: first, ..reference })
    }

    /// Frees the frames of `list`.
    pub(super) fn free_all(&mut self, list: impl Iterator<Item = Entry>) {
        list.filter(Entry::has_frames).for_each(|entry| self.give(entry.frame, entry.count));
    }

    /// Frees a stored list with all its frames, feeding its entries to `each`.
    pub(super) fn free(&mut self, list: DeltaRef, mut each: impl FnMut(Entry)) {
        for index in 0..list.entries {
            // SAFETY: only main writes lists, and this one came from `store`.
            let entry = unsafe { list.entry(self.file.at(0), index) };
            if entry.frame != WAIT {
                each(entry);
            }
            if entry.has_frames() {
                self.give(entry.frame, entry.count);
            }
        }
        if list.entries > 0 {
            self.give(list.list, list.frames());
        }
    }

    /// Returns how many frames are in use.
    pub(super) fn taken(&self) -> usize {
        self.taken as usize
    }
}

/// How many areas outside of the arena an orbit can see.
pub(super) const OUTSIDERS: usize = 120;

/// What main tells an orbit beside its calls.
#[repr(C)]
pub(super) struct Board {
    /// How many of `outsiders` are filled in.
    count: AtomicU32,
    /// How often a line was written.
    changes: AtomicU32,
    outsiders: [[AtomicU64; 3]; OUTSIDERS],
}

/// An area outside of the arena: where it is, its place in the mirror, its size; all in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outsider {
    pub(super) start: usize,
    pub(super) offset: usize,
    pub(super) len: usize,
}

impl Board {
    /// Returns how many areas are outside.
    pub(super) fn count(&self) -> usize {
        (self.count.load(Ordering::Acquire) as usize).min(OUTSIDERS)
    }

    /// Returns a number that grows with every change.
    pub(super) fn changes(&self) -> u32 {
        self.changes.load(Ordering::Acquire)
    }

    /// Returns the area at `index`.
    pub(super) fn outsider(&self, index: usize) -> Outsider {
        let number = |n: &AtomicU64| usize::try_from(n.load(Ordering::Acquire)).unwrap_or(0);
        let [start, offset, len] = self.outsiders[index].each_ref().map(number);
        Outsider { start, offset, len }
    }

    /// Takes the line of an area back that is gone.
    pub(super) fn retract(&self, offset: usize) {
        for line in (0..self.count()).filter(|index| self.outsider(*index).offset == offset) {
            self.outsiders[line][2].store(0, Ordering::Release);
        }
    }

    /// Announces an area; false where the board is full. Main alone writes it, under the mirror's lock.
    pub(super) fn announce(&self, outsider: Outsider) -> bool {
        let count = self.count();
        if (0..count).any(|index| self.outsider(index) == outsider) {
            return true;
        }
        // A place in the mirror belongs to one area; one that is gone leaves its line to the next.
        let free = |known: Outsider| known.len == 0 || known.offset == outsider.offset;
        let line = (0..count).find(|index| free(self.outsider(*index))).unwrap_or(count);
        if line == OUTSIDERS {
            return false;
        }
        for (slot, value) in self.outsiders[line].iter().zip([outsider.start, outsider.offset, outsider.len])
        {
            slot.store(value as u64, Ordering::Release);
        }
        self.count.store(short(count.max(line + 1)), Ordering::Release);
        self.changes.fetch_add(1, Ordering::Release);
        true
    }
}

/// A number of pages, entries or frames of the arena, which has fewer than 2^32.
#[expect(clippy::cast_possible_truncation, reason = "the largest arena has 2^26 pages")]
pub(super) fn short(pages: usize) -> u32 {
    debug_assert!(u32::try_from(pages).is_ok());
    pages as u32
}
