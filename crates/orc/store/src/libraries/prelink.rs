//! Prelinks libraries: relocates their read-only data once, before any program loads them.
//!
//! Most of what the loader writes into such data (RELRO) are addresses within the library itself (`R_*_RELATIVE` in
//! elf(5)), which are known as soon as the library has an address ([`placement_table`](super::placement_table)). The
//! loader would write them page by page, each copied before the first write, again in every process. So the store
//! writes them once. Linkers put these relocations first in their table, in the order of addresses:
//!
//! ```text
//! RELRO    | prelinked: .init_array .data.rel.ro ...      | .dynamic .got ... |
//! table    | relocations of prelinked pages: already done | others within the library | with symbols |
//!            `-- count --'
//! ```
//!
//! When the library has been mapped at its address, the auditor maps the prelinked pages over those of the file, and
//! makes the loader's table begin behind the first `count` relocations. The pages are never written, so all processes
//! share them, and the loader has less to do than in a plain program. Relocations with symbols are left to the loader,
//! so nothing here depends on other libraries.
//!
//! Pages from the dynamic section on are left alone: the loader has read and changed it before it calls the auditor.

use std::os::fd::BorrowedFd;

use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::PlacementRequest;
use orrery_sys::PAGE;

/// The first bytes of a file, of which its key is made. This and the next three are the same in `auditor/c/place.c`.
const KEY_BYTES: usize = 2048;
/// Libraries with fewer bytes of relocated data have no address of their own.
pub(crate) const MIN_RELOCATED: u64 = 32 << 10;
/// Smaller libraries have no address of their own.
const MIN_LENGTH: u64 = 256 << 10;
/// A library that is at least so long begins at a multiple of this.
const HUGE: u64 = 2 << 20;

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const LOAD: u32 = 1;
const DYNAMIC: u32 = 2;
pub(crate) const RELRO: u32 = 0x6474_e552;
const EXECUTABLE: u32 = 1;
const WRITABLE: u32 = 2;

const RELA: u64 = 7;
const RELA_SIZE: u64 = 8;
const RELA_ENTRY: u64 = 9;
const RELA_COUNT: u64 = 0x6fff_fff9;
/// The size of an entry of the table: address, kind, and target from the library's beginning.
const ENTRY: usize = 24;
/// More than any library has.
const MAX_ENTRIES: u64 = 4 << 20;
#[cfg(target_arch = "x86_64")]
const RELATIVE: u64 = 8;
#[cfg(target_arch = "aarch64")]
const RELATIVE: u64 = 1027;

/// The part of a segment that is in the file.
#[derive(Clone, Copy, Debug)]
struct Segment {
    flags: u32,
    offset: u64,
    address: u64,
    size: u64,
}

impl Segment {
    /// Returns the file offset of `length` bytes at `address`.
    fn find(&self, address: u64, length: u64) -> Option<u64> {
        let skip = address.checked_sub(self.address)?;
        (skip.checked_add(length)? <= self.size).then(|| self.offset.checked_add(skip)).flatten()
    }
}

/// A library whose data can be prelinked.
#[derive(Debug)]
pub(crate) struct Library {
    /// Its key, and the address space that it needs.
    pub(crate) placement: PlacementRequest,
    /// The beginning of its relocated data, from the library's, and how many bytes can be prelinked: whole pages.
    pub(crate) start: u64,
    pub(crate) length: u64,
    /// How many relocations at the beginning of the table that replaces.
    pub(crate) count: u64,
    offset: u64,
    table: Vec<u8>,
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

fn word64(bytes: &[u8], at: usize) -> Option<u64> {
    word(bytes, at).map(u64::from_ne_bytes)
}

fn read(fd: BorrowedFd<'_>, offset: u64, length: u64) -> Option<Vec<u8>> {
    let there = u64::try_from(rustix::fs::fstat(fd).ok()?.st_size).ok()?;
    if offset.checked_add(length)? > there {
        return None;
    }
    let mut bytes = vec![0; usize::try_from(length).ok()?];
    let mut filled = 0;
    while filled < bytes.len() {
        let at = offset + filled as u64;
        match rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut bytes[filled..], at)) {
            Ok(count) if count > 0 => filled += count,
            _ => return None,
        }
    }
    Some(bytes)
}

/// Computes the key like `key_of` in `auditor/c/place.c`.
fn key_of(bytes: &[u8], size: u64) -> u64 {
    let mix = |hash: u64, word: u64| {
        let hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash ^ hash >> 29
    };
    let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
    words.fold(mix(1, size), mix).max(1)
}

/// Returns the tag by which the index refers to a library's object. Libraries with the same headers may have other
/// data, and must not get these.
pub(crate) fn tag(id: ObjectId) -> u64 {
    word(&id.0, 0).map_or(0, u64::from_be_bytes)
}

impl Library {
    /// Examines the library in the object `fd`, whose file has `size` bytes. Returns `None` if it is no library, has
    /// too few relocated data, or has a layout that is not supported.
    pub(crate) fn examine(fd: BorrowedFd<'_>, size: u64) -> Option<Self> {
        let page = PAGE as u64;
        let bytes = read(fd, 0, KEY_BYTES as u64)?;
        let table = usize::try_from(word64(&bytes, 32)?).ok()?;
        let count = usize::from(u16::from_ne_bytes(word(&bytes, 56)?));
        let is_known = bytes[..5] == *b"\x7fELF\x02"
            && u16::from_ne_bytes(word(&bytes, 16)?) == 3
            && usize::from(u16::from_ne_bytes(word(&bytes, 54)?)) == PROGRAM_HEADER
            && table >= HEADER
            && table.is_multiple_of(8);
        if !is_known {
            return None;
        }
        let headers = bytes.get(table..table.checked_add(count * PROGRAM_HEADER)?)?;
        let (mut segments, mut dynamic, mut relocated, mut end) = (Vec::new(), None, (0, 0), 0);
        for header in headers.chunks(PROGRAM_HEADER) {
            let [kind, flags] = [word(header, 0)?, word(header, 4)?].map(u32::from_ne_bytes);
            let [offset, address, size, in_memory, alignment] =
                [8, 16, 32, 40, 48].map(|at| word64(header, at).unwrap_or(u64::MAX));
            let until = address.checked_add(in_memory)?;
            match kind {
                // It has a fixed address, or needs a larger alignment.
                LOAD if segments.is_empty() && address >= page || alignment > page => return None,
                LOAD => {
                    segments.push(Segment { flags, offset, address, size });
                    end = until;
                }
                DYNAMIC => dynamic = Some((address, in_memory)),
                RELRO => relocated = (address / page * page, until / page * page),
                _ => {}
            }
        }
        let length = end.checked_next_multiple_of(page)?;
        let (start, end) = relocated;
        if length <= MIN_LENGTH || end.checked_sub(start)? < MIN_RELOCATED {
            return None;
        }
        let alignment = if length >= HUGE { HUGE } else { page };
        let placement = PlacementRequest { key: key_of(&bytes, size), length, alignment };
        Self::with_table(fd, placement, &segments, dynamic?, (start, end))
    }

    fn with_table(
        fd: BorrowedFd<'_>,
        placement: PlacementRequest,
        segments: &[Segment],
        dynamic: (u64, u64),
        (start, end): (u64, u64),
    ) -> Option<Self> {
        let find = |address, length| segments.iter().find_map(|segment| segment.find(address, length));
        let section = read(fd, find(dynamic.0, dynamic.1)?, dynamic.1.min(1 << 16))?;
        let entry = |tag| {
            let mut entries = section.as_chunks::<16>().0.iter();
            entries.find(|entry| word64(*entry, 0) == Some(tag)).and_then(|entry| word64(entry, 8))
        };
        let (size, known) = (entry(RELA_SIZE)?, entry(RELA_COUNT)?);
        if entry(RELA_ENTRY)? != ENTRY as u64 || known > MAX_ENTRIES || known * ENTRY as u64 > size {
            return None;
        }
        let mut table = read(fd, find(entry(RELA)?, size)?, known * ENTRY as u64)?;
        let page = PAGE as u64;
        let until = (dynamic.0 / page * page).min(end);
        let length = until.checked_sub(start).filter(|length| *length >= MIN_RELOCATED / 2)?;
        // The first page also shows what is before the segment in the file.
        let data = segments.iter().find(|data| data.find(until - 1, 1).is_some())?;
        let before = data.address.saturating_sub(start);
        if data.flags & (WRITABLE | EXECUTABLE) != WRITABLE || before >= page || data.offset < before {
            return None;
        }
        let offset = if before > 0 { data.offset - before } else { data.find(start, length)? };
        let mut count = 0;
        let mut last = start.max(data.address);
        for entry in table.as_chunks::<ENTRY>().0 {
            let (address, kind) = (word64(entry, 0)?, word64(entry, 8)?);
            if address >= until {
                break;
            }
            if kind != RELATIVE || address < last || !address.is_multiple_of(8) {
                return None;
            }
            last = address;
            count += 1;
        }
        let rest = table.split_off(count * ENTRY);
        if rest
            .as_chunks::<ENTRY>()
            .0
            .iter()
            .any(|entry| word64(entry, 0).is_none_or(|address| address < until))
        {
            return None;
        }
        (count > 0).then_some(Self { placement, start, length, count: count as u64, offset, table })
    }

    /// Returns the data as they are when the library is loaded at `address_of_library`.
    pub(crate) fn relocate(&self, fd: BorrowedFd<'_>, address_of_library: u64) -> Option<Vec<u8>> {
        let mut bytes = read(fd, self.offset, self.length)?;
        for entry in self.table.as_chunks::<ENTRY>().0 {
            let at = usize::try_from(word64(entry, 0)? - self.start).ok()?;
            let address = address_of_library.wrapping_add(word64(entry, 16)?);
            bytes.get_mut(at..at + 8)?.copy_from_slice(&address.to_ne_bytes());
        }
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::fd::AsFd as _;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use super::*;

    /// Returns a library with pointers to its own numbers, the largest first, in read-only data.
    fn library(directory: &Path, options: &[&str]) -> PathBuf {
        let pointers: String = (0..8000).map(|number| format!("&numbers[{}],", 7999 - number)).collect();
        let source = format!(
            "static const int numbers[8000] = {{1}}; static char much[400000] = {{1}};
             const int *const pointers[] = {{{pointers}}}; char *some(void) {{ return much; }}"
        );
        let (from, to) = (directory.join("library.c"), directory.join("library.so"));
        fs::write(&from, source).unwrap();
        let mut command = Command::new("cc");
        command.args(["-shared", "-fPIC", "-w", "-Wl,-z,relro", "-o"]).arg(&to).arg(&from).args(options);
        assert!(command.status().unwrap().success());
        to
    }

    #[test]
    fn pointers_into_the_library_are_as_the_loader_would_make_them() {
        let directory = tempfile::tempdir().unwrap();
        let path = library(directory.path(), &[]);
        let file = File::open(&path).unwrap();
        let size = file.metadata().unwrap().len();
        let library = Library::examine(file.as_fd(), size).unwrap();
        assert!(
            library.placement.length > 400_000 && library.placement.alignment == 4096,
            "{:?}",
            library.placement
        );
        assert!((7500..=8010).contains(&library.count), "{}", library.count);
        let words = |place: u64| {
            let bytes = library.relocate(file.as_fd(), place).unwrap();
            assert_eq!(bytes.len() as u64, library.length);
            let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
            words.collect::<Vec<u64>>()
        };
        const PLACE: u64 = 0x7e12_3456_7000;
        let (here, there) = (words(PLACE), words(PLACE + 0x10_0000));
        let moved: Vec<u64> =
            here.iter().zip(&there).filter(|(a, b)| **b == **a + 0x10_0000).map(|(a, _)| *a).collect();
        assert_eq!(moved.len() as u64, library.count, "they move with the library");
        assert!(
            here.iter().zip(&there).all(|(a, b)| a == b || *b == *a + 0x10_0000),
            "and nothing else does"
        );
        let within = moved.iter().filter(|word| (PLACE..PLACE + library.placement.length).contains(word));
        assert_eq!(within.count(), moved.len());
        let steps = moved.windows(2).filter(|pair| pair[0] == pair[1] + 4).count();
        assert!(steps > 7400, "pointers to one number after the other: {steps}");
    }

    #[test]
    fn what_is_made_in_other_ways_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let examine = |path: &Path| {
            let file = File::open(path).unwrap();
            Library::examine(file.as_fd(), file.metadata().unwrap().len())
        };
        assert!(examine(Path::new("/etc/passwd")).is_none());
        let path = library(directory.path(), &["-Wl,-z,norelro"]);
        assert!(examine(&path).is_none(), "nothing is read-only");
        let path = library(directory.path(), &["-Wl,-z,nocombreloc"]);
        assert!(examine(&path).is_none(), "the table is in no order");
        // Whatever byte is wrong, nothing worse comes of it than nothing.
        let path = library(directory.path(), &[]);
        let good = fs::read(&path).unwrap();
        let broken = directory.path().join("broken");
        for at in (0..800).chain((0..good.len()).step_by(4099)) {
            for value in [0, 0x7f, 0xff] {
                let mut bytes = good.clone();
                bytes[at] = value;
                fs::write(&broken, bytes).unwrap();
                if let Some(library) = examine(&broken) {
                    let _ = library.relocate(File::open(&broken).unwrap().as_fd(), 1 << 40);
                }
            }
        }
    }

    #[test]
    fn libraries_of_this_machine_can_be_prepared() {
        let path = Path::new("/usr/lib/x86_64-linux-gnu/libcrypto.so.3");
        let Ok(file) = File::open(path) else {
            orrery_testing::skipped!("there is no {}", path.display());
            return;
        };
        let library = Library::examine(file.as_fd(), file.metadata().unwrap().len()).unwrap();
        assert!(library.count > 10_000 && library.length > 300_000, "{} {}", library.count, library.length);
    }
}
