//! A working set of pages, as in "Hijack: Taking Control of COTS Systems" (West and Parmer), "Inter-protection domain communication
//! costs": data are read, or instructions executed, 4160 bytes apart, so that each takes an entry of the TLB and another line
//! of the cache.

use std::ffi::c_void;

use anyhow::{Result, bail};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// The distance in bytes.
const DISTANCE: usize = 4160;

/// Pages to refer to.
#[derive(Debug)]
pub struct WorkingSet {
    start: *mut c_void,
    length: usize,
    pages: usize,
    instructions: bool,
}

impl WorkingSet {
    /// Makes one of the kind that `work` says: `data PAGES` or `instructions PAGES`.
    ///
    /// # Errors
    /// Where it says something else, or there is no memory.
    pub fn new(work: &str) -> Result<Self> {
        let (instructions, pages) = match work.split_once(' ') {
            Some(("data", pages)) => (false, pages.parse()?),
            Some(("instructions", pages)) => (true, pages.parse()?),
            _ => bail!("there is no work {work:?}"),
        };
        let length = (pages + 1) * DISTANCE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping takes nothing from anybody.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), length, protection, MapFlags::PRIVATE) }?;
        let set = Self { start, length, pages, instructions };
        // SAFETY: the mapping is this long and nobody else's; it is executable only once it is written.
        unsafe {
            std::slice::from_raw_parts_mut(start.cast::<u8>(), length).copy_from_slice(&jumps(pages, length));
            if instructions {
                mprotect(start, length, MprotectFlags::READ | MprotectFlags::EXEC)?;
            }
        }
        Ok(set)
    }

    /// Refers to each page once.
    #[inline(never)]
    pub fn refer(&self) {
        if self.instructions {
            // SAFETY: jumps that end with a return, and touch nothing.
            unsafe { std::mem::transmute::<*mut c_void, extern "C" fn()>(self.start)() };
            return;
        }
        for page in 0..self.pages {
            // SAFETY: the offset is below the mapping's length, which is one distance more than the pages
            // take.
            unsafe { self.start.cast::<u8>().add(page * DISTANCE).read_volatile() };
        }
    }
}

impl Drop for WorkingSet {
    fn drop(&mut self) {
        // SAFETY: the mapping is this set's own, and nothing refers to it after this.
        let _unmapped = unsafe { munmap(self.start, self.length) };
    }
}

/// Returns code that jumps to so many places, one after the other, and returns.
fn jumps(pages: usize, length: usize) -> Vec<u8> {
    const JUMP: u8 = 0xe9;
    const RETURN: u8 = 0xc3;
    const SIZE: usize = 5;
    let mut code = vec![RETURN; length];
    for page in 0..pages {
        let at = page * DISTANCE;
        code[at] = JUMP;
        let distance = u32::try_from(DISTANCE - SIZE).unwrap_or(0);
        code[at + 1..at + SIZE].copy_from_slice(&distance.to_le_bytes());
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_referred_to_and_come_back() {
        for work in ["data 0", "data 7", "instructions 0", "instructions 1", "instructions 300"] {
            let set = WorkingSet::new(work).unwrap();
            set.refer();
            set.refer();
        }
        assert!(WorkingSet::new("data").is_err() && WorkingSet::new("stack 3").is_err());
    }
}
