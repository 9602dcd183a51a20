//! The state of a library as every instance begins with it: its bytes, and which of its words are addresses in it.

use std::os::fd::OwnedFd;

use orrery_sys::PAGE;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::pwrite;
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::error::{Error, Result};

/// The pristine state.
#[derive(Debug)]
pub(crate) struct Image {
    /// Where the library's own state is.
    pub(crate) start: usize,
    bytes: Vec<u8>,
    /// How many bytes there are before the zeros at the end.
    used: usize,
    /// The offsets of words that hold an address in the state, ascending.
    relocations: Vec<usize>,
    /// The bytes in whole pages, at the offset in a page that the state has.
    file: Option<OwnedFd>,
}

fn system(action: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
    move |errno| Error::System { action, errno }
}

impl Image {
    /// `places` are the addresses of words that the dynamic loader relocated.
    pub(crate) fn new(start: usize, bytes: Vec<u8>, places: impl Iterator<Item = usize>) -> Self {
        let end = start + bytes.len();
        let mut relocations: Vec<usize> = places
            .filter_map(|place| place.checked_sub(start))
            .filter(|offset| {
                let word = bytes.get(*offset..offset + 8).and_then(|bytes| bytes.try_into().ok());
                // One past the last variable is an address of the state as well.
                word.map(usize::from_ne_bytes).is_some_and(|word| (start..=end).contains(&word))
            })
            .collect();
        relocations.sort_unstable();
        relocations.dedup();
        let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        Self { start, bytes, used, relocations, file: None }
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn relocations(&self) -> usize {
        self.relocations.len()
    }

    /// From the beginning of its first page to the state.
    pub(crate) fn skew(&self) -> usize {
        self.start % PAGE
    }

    /// Returns how many bytes of whole pages it is in.
    pub(crate) fn pages_len(&self) -> usize {
        (self.skew() + self.len()).next_multiple_of(PAGE)
    }

    /// Puts the bytes into a memory file, from which instances are mapped.
    pub(crate) fn make_file(&mut self) -> Result<()> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create(c"orrery-instance", flags).map_err(system("create a memory file"))?;
        rustix::fs::ftruncate(&file, self.pages_len() as u64).map_err(system("resize a memory file"))?;
        let mut written = 0;
        while written < self.used {
            let at = (self.skew() + written) as u64;
            written +=
                pwrite(&file, &self.bytes[written..self.used], at).map_err(system("write a memory file"))?;
        }
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(system("seal a memory file"))?;
        self.file = Some(file);
        Ok(())
    }

    /// Writes the state at `place`.
    ///
    /// # Safety
    /// There are as many writable bytes, which nobody else uses; they are zero if `zero` says so.
    pub(crate) unsafe fn copy(&self, place: *mut u8, zero: bool) {
        // SAFETY: `place` has `len` writable bytes, which nobody else uses (# Safety), and `used` is no more
        // than `len`.
        unsafe {
            place.copy_from_nonoverlapping(self.bytes.as_ptr(), self.used);
            if !zero {
                place.add(self.used).write_bytes(0, self.len() - self.used);
            }
            self.relocate(place);
        }
    }

    /// Maps the state at `place`, over what is there: pages that the instance does not write stay those of the file.
    ///
    /// # Safety
    /// The pages around `place` belong to the caller alone, and `place` is where in its page the library's own state is.
    pub(crate) unsafe fn map(&self, place: *mut u8) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the caller's promise; the mapping is private.
        unsafe {
            let page = place.sub(self.skew());
            mmap(page.cast(), self.pages_len(), access, MapFlags::PRIVATE | MapFlags::FIXED, file, 0)
                .map_err(system("map the state of an instance"))?;
            self.relocate(place);
        }
        Ok(())
    }

    unsafe fn relocate(&self, place: *mut u8) {
        let delta = place.addr().wrapping_sub(self.start);
        for offset in &self.relocations {
            // SAFETY: offsets are in the state; what relocates a word need not be aligned.
            unsafe {
                let word = place.add(*offset).cast::<[u8; 8]>();
                word.write(usize::from_ne_bytes(word.read()).wrapping_add(delta).to_ne_bytes());
            }
        }
    }
}
