//! The memory that a contender is responsible for, and the work that all contenders do to it.

use std::fmt;
use std::fs;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::contender::Skipped;
use crate::machine::kibibytes;
use crate::work::Work;

/// Bytes in a page. Also with huge pages this is the unit of dirtying: one write, as programs write.
pub const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

/// What the kernel backs a footprint with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// Pages of 4 KiB only (MADV_NOHUGEPAGE).
    Small,
    /// Transparent huge pages of 2 MiB (MADV_HUGEPAGE).
    Huge,
}

impl fmt::Display for Backing {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Small => "4k",
            Self::Huge => "huge",
        })
    }
}

impl FromStr for Backing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "4k" => Ok(Self::Small),
            "huge" => Ok(Self::Huge),
            _ => Err(format!("{text:?} is neither \"4k\" nor \"huge\"")),
        }
    }
}

/// Private memory, all of it present, each page with a content of its own.
#[derive(Debug)]
pub struct Footprint {
    base: NonNull<u8>,
    bytes: usize,
    generation: u64,
}

impl Footprint {
    /// Anonymous memory.
    ///
    /// # Errors
    /// Fails where `bytes` is not a multiple of 2 MiB or cannot be mapped; [`Skipped`] where huge pages are wanted
    /// and not to be had.
    pub fn anonymous(bytes: usize, backing: Backing) -> Result<Self> {
        let footprint = Self::reserve(bytes)?;
        footprint.advise(backing)?;
        footprint.fill(backing, "AnonHugePages:", "enabled")?;
        Ok(footprint)
    }

    /// Makes a private mapping of a memfd that holds the content, to which MADV_DONTNEED returns.
    pub fn of_image(bytes: usize, backing: Backing) -> Result<Self> {
        let image = memfd_create("benchmark image", MemfdFlags::CLOEXEC).context("memfd_create")?;
        ftruncate(&image, u64::try_from(bytes)?)
            .with_context(|| format!("growing a memfd to {bytes} bytes"))?;

        let writer = Self::reserve(bytes)?;
        writer.map_over(&image, MapFlags::SHARED)?;
        writer.advise(backing)?;
        writer.fill(backing, "ShmemPmdMapped:", "shmem_enabled")?;
        drop(writer);

        let footprint = Self::reserve(bytes)?;
        footprint.map_over(&image, MapFlags::PRIVATE)?;
        footprint.advise(backing)?;
        Ok(footprint)
    }

    /// Maps untouched anonymous memory, aligned so that huge pages fit.
    fn reserve(bytes: usize) -> Result<Self> {
        ensure!(
            bytes > 0 && bytes.is_multiple_of(HUGE_PAGE),
            "a footprint of {bytes} bytes is no multiple of 2 MiB"
        );
        let roomy = bytes.checked_add(HUGE_PAGE).context("a footprint larger than the address space")?;
        // SAFETY: a new mapping at a place of the kernel's choice touches no memory that anyone uses.
        let start = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                roomy,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .with_context(|| format!("cannot map {bytes} bytes"))?;
        let before = start.addr().next_multiple_of(HUGE_PAGE) - start.addr();
        let base = start.wrapping_byte_add(before);
        for (edge, length) in [(start, before), (base.wrapping_byte_add(bytes), HUGE_PAGE - before)] {
            if length > 0 {
                // SAFETY: these edges belong to the mapping just made; nothing refers to them.
                unsafe { munmap(edge, length) }.context("cannot trim a mapping")?;
            }
        }
        let base = NonNull::new(base.cast()).context("mmap returned a null pointer")?;
        Ok(Self { base, bytes, generation: 0 })
    }

    fn map_over(&self, file: &OwnedFd, sharing: MapFlags) -> Result<()> {
        // SAFETY: the range is this footprint's own, and nothing has a reference into it.
        unsafe {
            mmap(
                self.base.as_ptr().cast(),
                self.bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                sharing | MapFlags::FIXED | MapFlags::NORESERVE,
                file,
                0,
            )
        }
        .with_context(|| format!("cannot map {} bytes of a memfd", self.bytes))?;
        Ok(())
    }

    fn advise(&self, backing: Backing) -> Result<()> {
        let advice = match backing {
            Backing::Small => Advice::LinuxNoHugepage,
            Backing::Huge => Advice::LinuxHugepage,
        };
        // SAFETY: the range is this footprint's own; neither advice changes what it holds.
        match unsafe { madvise(self.base.as_ptr().cast(), self.bytes, advice) } {
            Ok(()) => Ok(()),
            // A kernel built without transparent huge pages knows neither advice, and has small pages anyway.
            Err(rustix::io::Errno::INVAL) if backing == Backing::Small => Ok(()),
            Err(rustix::io::Errno::INVAL) => {
                Err(Skipped("this kernel has no transparent huge pages".into()).into())
            }
            Err(error) => Err(error).context("madvise"),
        }
    }

    /// Writes the content of each page. Where huge pages are required, checks that the kernel provides them, first of the first:
    /// `field` of /proc/self/smaps has how many bytes they back, `setting` is the kernel's setting of whether they do.
    fn fill(&self, backing: Backing, field: &str, setting: &str) -> Result<()> {
        for page in 0..self.pages() {
            self.write(page, original(page));
            if backing == Backing::Huge && page == 0 {
                self.require_huge(HUGE_PAGE, field, setting)?;
            }
        }
        match backing {
            Backing::Small => Ok(()),
            Backing::Huge => self.require_huge(self.bytes / 10 * 9, field, setting),
        }
    }

    fn require_huge(&self, wanted: usize, field: &str, setting: &str) -> Result<()> {
        let smaps = fs::read_to_string("/proc/self/smaps").context("cannot read /proc/self/smaps")?;
        let huge = huge_bytes(&smaps, self.base.addr().get(), field);
        if huge < wanted {
            let setting = format!("/sys/kernel/mm/transparent_hugepage/{setting}");
            let chosen = fs::read_to_string(&setting).unwrap_or_else(|_| "absent".to_owned());
            let [huge, wanted] = [huge >> 20, wanted >> 20];
            let reason =
                format!("{huge} MiB came as huge pages, not {wanted}; {setting}: {}", chosen.trim_end());
            return Err(Skipped(reason).into());
        }
        Ok(())
    }

    /// Returns the number of 4 KiB pages.
    pub fn pages(&self) -> usize {
        self.bytes / PAGE
    }

    /// Returns the start of the memory.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Does the work of every contender: reads one word from each of `work.read` pages, then writes one word
    /// to each of `work.dirty` pages, both spread evenly over the whole. Each call writes other values, and, if the work
    /// moves, to other pages.
    pub fn perform(&mut self, work: Work) {
        for page in self.chosen(work.read, false) {
            self.read(page);
        }
        self.generation += 1;
        for page in self.chosen(work.dirty, work.moving) {
            self.write(page, !original(page) ^ self.generation);
        }
    }

    /// Makes sure that what [`perform`](Self::perform) wrote is undone.
    pub fn check_pristine(&self, work: Work) -> Result<()> {
        for page in self.chosen(work.dirty, work.moving) {
            let found = self.read(page);
            ensure!(
                found == original(page),
                "page {page} was not restored: it holds {found:#x} where {:#x} was",
                original(page)
            );
        }
        Ok(())
    }

    fn chosen(&self, count: u32, moving: bool) -> impl Iterator<Item = usize> + use<> {
        let pages = self.pages();
        let count = usize::try_from(count).unwrap_or(pages).min(pages);
        // Eight sets in turn, so that soon all of them have been written once.
        let round = if moving { usize::try_from(self.generation % 8).unwrap_or(0) } else { 0 };
        (0..count).map(move |place| place * pages / count + round % (pages / count))
    }

    fn write(&self, page: usize, value: u64) {
        // SAFETY: `slot` is within the mapping and is aligned; the mapping is private to this object.
        // Volatile, so that the write happens although nobody may read it.
        unsafe { self.slot(page).write_volatile(value) }
    }

    fn read(&self, page: usize) -> u64 {
        // SAFETY: as in `write`; every bit pattern is a number.
        unsafe { self.slot(page).read_volatile() }
    }

    /// Returns the word of a page that is written. Its offset differs from page to page: the same offset in all would fill
    /// one set of the processor's caches.
    fn slot(&self, page: usize) -> *mut u64 {
        assert!(page < self.pages());
        self.base.as_ptr().wrapping_add(page * PAGE + page % 64 * 64).cast()
    }
}

impl Drop for Footprint {
    fn drop(&mut self) {
        // SAFETY: the range is this object's own, and nothing outlives it that refers to it.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

/// Returns the original content of a page: never zero, and another value for each page.
fn original(page: usize) -> u64 {
    page as u64 + 1
}

/// Adds up `field` over the mapping that begins at `start` in the text of an smaps file.
fn huge_bytes(smaps: &str, start: usize, field: &str) -> usize {
    let heading = format!("{start:x}-");
    let Some(at) =
        smaps.find(&format!("\n{heading}")).map(|at| at + 1).or(smaps.starts_with(&heading).then_some(0))
    else {
        return 0;
    };
    let entry = &smaps[at..];
    let end = entry.find("\nVmFlags:").unwrap_or(entry.len());
    kibibytes(&entry[..end], field).and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 2 * HUGE_PAGE;

    fn dirty(dirty: u32) -> Work {
        Work { dirty, read: 1, moving: false }
    }

    #[test]
    fn dirtying_changes_as_many_pages_as_asked() {
        let mut footprint = Footprint::anonymous(SIZE, Backing::Small).unwrap();
        for count in [0, 1, 100, 1024] {
            let before: Vec<_> = (0..footprint.pages()).map(|page| footprint.read(page)).collect();
            footprint.perform(dirty(count));
            let changed =
                before.iter().enumerate().filter(|&(page, &old)| footprint.read(page) != old).count();
            assert_eq!(changed, usize::try_from(count).unwrap());
        }
        footprint.perform(dirty(3));
        assert!(
            footprint.check_pristine(dirty(3)).unwrap_err().to_string().contains("page 0 was not restored")
        );
    }

    #[test]
    fn an_image_comes_back_by_dontneed() {
        let mut footprint = Footprint::of_image(SIZE, Backing::Small).unwrap();
        footprint.check_pristine(dirty(1024)).unwrap();
        footprint.perform(dirty(1024));
        footprint.check_pristine(dirty(1024)).unwrap_err();
        // SAFETY: dropping private pages of the footprint leaves the image's content, which is as valid.
        unsafe { madvise(footprint.base.as_ptr().cast(), SIZE, Advice::LinuxDontNeed) }.unwrap();
        footprint.check_pristine(dirty(1024)).unwrap();
    }

    #[test]
    fn huge_pages_are_had_or_skipped() {
        for make in [Footprint::anonymous, Footprint::of_image] {
            match make(SIZE, Backing::Huge) {
                Ok(footprint) => footprint.check_pristine(dirty(1024)).unwrap(),
                Err(error) => {
                    assert!(error.is::<Skipped>(), "{error:#}");
                    println!("{error}");
                }
            }
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        for bytes in [0, PAGE, usize::MAX & !(HUGE_PAGE - 1)] {
            assert!(Footprint::anonymous(bytes, Backing::Small).is_err(), "{bytes}");
        }
    }

    #[test]
    fn smaps_are_read_by_mapping() {
        let smaps = "1000-2000 rw-p\nAnonHugePages: 4 kB\nVmFlags: rd\n\
                     2000-3000 rw-p\nAnonHugePages: 8 kB\nVmFlags: rd\n3000-4000 rw-p\nVmFlags: rd\n";
        assert_eq!(huge_bytes(smaps, 0x1000, "AnonHugePages:"), 4096);
        assert_eq!(huge_bytes(smaps, 0x2000, "AnonHugePages:"), 8192);
        assert_eq!(huge_bytes(smaps, 0x3000, "AnonHugePages:"), 0);
        assert_eq!(huge_bytes(smaps, 0x9000, "AnonHugePages:"), 0);
    }

    #[test]
    fn backings_are_named() {
        for backing in [Backing::Small, Backing::Huge] {
            assert_eq!(backing.to_string().parse(), Ok(backing));
        }
        assert!("2M".parse::<Backing>().is_err());
    }
}
