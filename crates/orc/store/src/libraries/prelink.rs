//! A library's read-only data as the dynamic loader will have made them, before any program loads it there.
//!
//! Most of what the loader writes into such data (RELRO) are addresses within the library itself (`R_*_RELATIVE` in elf(5)): known as
//! soon as the library has a place ([`book`](crate::libraries::placement_table)). The loader would write them page by page, each copied before the first
//! write, in every process anew. So the store writes them once. Linkers put these relocations first in their table, in the
//! order of addresses:
//!
//! ```text
//! RELRO    | prepared: .init_array .data.rel.ro ...       | .dynamic .got ... |
//! table    | relocations of prepared pages: already done  | others within the library | with symbols |
//!            `-- count --'
//! ```
//!
//! When the library has been mapped in its place the auditor puts the prepared pages over those of the file, and has the loader's
//! table begin behind the first `count` relocations. The pages are never written, so they stay what everybody has; the
//! loader has less to do than in a plain program. Relocations with symbols are done by the loader wherever they are, so nothing
//! here depends on what other libraries there are.
//!
//! Pages from the dynamic section on are left alone: the loader has read and changed that before an auditor hears of the library.

use std::os::fd::BorrowedFd;

use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::Room;
use orrery_sys::PAGE;

/// What of a file's beginning tells libraries apart, as in `auditor/place.c`, and so are the next three.
const KEY_BYTES: usize = 2048;
/// Bytes of relocated data from which on a library is worth a place.
pub(crate) const WORTH_A_PLACE: u64 = 32 << 10;
/// Smaller libraries have no places.
const LEFT_FREE: u64 = 256 << 10;
/// What is at least so long begins at a multiple of this.
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
/// An entry of the table: where, of what kind, and how far from the library's beginning it points.
const ENTRY: usize = 24;
/// More than any library has.
const MOST_ENTRIES: u64 = 4 << 20;
#[cfg(target_arch = "x86_64")]
const RELATIVE: u64 = 8;
#[cfg(target_arch = "aarch64")]
const RELATIVE: u64 = 1027;

/// A segment, as far as it is in the file.
#[derive(Clone, Copy, Debug)]
struct Segment {
    flags: u32,
    offset: u64,
    address: u64,
    size: u64,
}

impl Segment {
    /// Where in the file `length` bytes from `address` on are.
    fn find(&self, address: u64, length: u64) -> Option<u64> {
        let skip = address.checked_sub(self.address)?;
        (skip.checked_add(length)? <= self.size).then(|| self.offset.checked_add(skip)).flatten()
    }
}

/// A library whose data can be prepared.
#[derive(Debug)]
pub(crate) struct Library {
    /// What it is known by, and the place it wants.
    pub(crate) room: Room,
    /// Where its relocated data begin, and how much of them can be prepared: whole pages, from the library's beginning.
    pub(crate) start: u64,
    pub(crate) length: u64,
    /// How many relocations at the beginning of the table are done by that.
    pub(crate) count: u64,
    offset: u64,
    table: Vec<u8>,
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
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

/// As `key_of` in `auditor/place.c`.
fn key_of(bytes: &[u8], size: u64) -> u64 {
    let mix = |hash: u64, word: u64| {
        let hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash ^ hash >> 29
    };
    let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
    words.fold(mix(1, size), mix).max(1)
}

/// What the index has of the object that a library is loaded from, so that only its own data are put into it: libraries with the same
/// headers may have other data.
pub(crate) fn tag(id: ObjectId) -> u64 {
    word(&id.0, 0).map_or(0, u64::from_be_bytes)
}

impl Library {
    /// Looks at the library in the object behind `fd`, whose file has `size` bytes; nothing where it is none, has too little to be
    /// worth a place, or is made in a way that is not known here.
    pub(crate) fn examine(fd: BorrowedFd<'_>, size: u64) -> Option<Self> {
        let page = PAGE as u64;
        let bytes = read(fd, 0, KEY_BYTES as u64)?;
        let table = usize::try_from(long(&bytes, 32)?).ok()?;
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
                [8, 16, 32, 40, 48].map(|at| long(header, at).unwrap_or(u64::MAX));
            let until = address.checked_add(in_memory)?;
            match kind {
                // One that wants an address of its own, or more room than it needs, has no place.
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
        if length <= LEFT_FREE || end.checked_sub(start)? < WORTH_A_PLACE {
            return None;
        }
        let alignment = if length >= HUGE { HUGE } else { page };
        let room = Room { key: key_of(&bytes, size), length, alignment };
        Self::with(fd, room, &segments, dynamic?, (start, end))
    }

    fn with(
        fd: BorrowedFd<'_>,
        room: Room,
        segments: &[Segment],
        dynamic: (u64, u64),
        (start, end): (u64, u64),
    ) -> Option<Self> {
        let find = |address, length| segments.iter().find_map(|segment| segment.find(address, length));
        let section = read(fd, find(dynamic.0, dynamic.1)?, dynamic.1.min(1 << 16))?;
        let entry = |tag| {
            let mut entries = section.as_chunks::<16>().0.iter();
            entries.find(|entry| long(*entry, 0) == Some(tag)).and_then(|entry| long(entry, 8))
        };
        let (size, known) = (entry(RELA_SIZE)?, entry(RELA_COUNT)?);
        if entry(RELA_ENTRY)? != ENTRY as u64 || known > MOST_ENTRIES || known * ENTRY as u64 > size {
            return None;
        }
        let mut table = read(fd, find(entry(RELA)?, size)?, known * ENTRY as u64)?;
        let page = PAGE as u64;
        let until = (dynamic.0 / page * page).min(end);
        let length = until.checked_sub(start).filter(|length| *length >= WORTH_A_PLACE / 2)?;
        // The first page shows what lies before the segment in the file, too.
        let data = segments.iter().find(|data| data.find(until - 1, 1).is_some())?;
        let before = data.address.saturating_sub(start);
        if data.flags & (WRITABLE | EXECUTABLE) != WRITABLE || before >= page || data.offset < before {
            return None;
        }
        let offset = if before > 0 { data.offset - before } else { data.find(start, length)? };
        let mut count = 0;
        let mut last = start.max(data.address);
        for entry in table.as_chunks::<ENTRY>().0 {
            let (address, kind) = (long(entry, 0)?, long(entry, 8)?);
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
            .any(|entry| long(entry, 0).is_none_or(|address| address < until))
        {
            return None;
        }
        (count > 0).then_some(Self { room, start, length, count: count as u64, offset, table })
    }

    /// The data as they are when the library is loaded at `place`.
    pub(crate) fn prepare(&self, fd: BorrowedFd<'_>, place: u64) -> Option<Vec<u8>> {
        let mut bytes = read(fd, self.offset, self.length)?;
        for entry in self.table.as_chunks::<ENTRY>().0 {
            let at = usize::try_from(long(entry, 0)? - self.start).ok()?;
            let address = place.wrapping_add(long(entry, 16)?);
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

    /// A library with pointers to its own numbers, the largest first, in read-only data.
    fn library(folder: &Path, options: &[&str]) -> PathBuf {
        let pointers: String = (0..8000).map(|number| format!("&numbers[{}],", 7999 - number)).collect();
        let source = format!(
            "static const int numbers[8000] = {{1}}; static char much[400000] = {{1}};
             const int *const pointers[] = {{{pointers}}}; char *some(void) {{ return much; }}"
        );
        let (from, to) = (folder.join("library.c"), folder.join("library.so"));
        fs::write(&from, source).unwrap();
        let mut command = Command::new("cc");
        command.args(["-shared", "-fPIC", "-w", "-Wl,-z,relro", "-o"]).arg(&to).arg(&from).args(options);
        assert!(command.status().unwrap().success());
        to
    }

    #[test]
    fn pointers_into_the_library_are_as_the_loader_would_make_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = library(folder.path(), &[]);
        let file = File::open(&path).unwrap();
        let size = file.metadata().unwrap().len();
        let library = Library::examine(file.as_fd(), size).unwrap();
        assert!(library.room.length > 400_000 && library.room.alignment == 4096, "{:?}", library.room);
        assert!((7500..=8010).contains(&library.count), "{}", library.count);
        let words = |place: u64| {
            let bytes = library.prepare(file.as_fd(), place).unwrap();
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
        let within = moved.iter().filter(|word| (PLACE..PLACE + library.room.length).contains(word));
        assert_eq!(within.count(), moved.len());
        let steps = moved.windows(2).filter(|pair| pair[0] == pair[1] + 4).count();
        assert!(steps > 7400, "pointers to one number after the other: {steps}");
    }

    #[test]
    fn what_is_made_in_other_ways_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let examine = |path: &Path| {
            let file = File::open(path).unwrap();
            Library::examine(file.as_fd(), file.metadata().unwrap().len())
        };
        assert!(examine(Path::new("/etc/passwd")).is_none());
        let path = library(folder.path(), &["-Wl,-z,norelro"]);
        assert!(examine(&path).is_none(), "nothing is read-only");
        let path = library(folder.path(), &["-Wl,-z,nocombreloc"]);
        assert!(examine(&path).is_none(), "the table is in no order");
        // Whatever byte is wrong, nothing worse comes of it than nothing.
        let path = library(folder.path(), &[]);
        let good = fs::read(&path).unwrap();
        let broken = folder.path().join("broken");
        for at in (0..800).chain((0..good.len()).step_by(4099)) {
            for value in [0, 0x7f, 0xff] {
                let mut bytes = good.clone();
                bytes[at] = value;
                fs::write(&broken, bytes).unwrap();
                if let Some(library) = examine(&broken) {
                    let _ = library.prepare(File::open(&broken).unwrap().as_fd(), 1 << 40);
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
