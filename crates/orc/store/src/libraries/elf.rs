//! Examines ELF files (elf(5)): what programs need to know of an object before it is loaded in place of its file.

use std::os::fd::BorrowedFd;

use crate::libraries::prelink::{MIN_RELOCATED, RELRO};
use crate::named::index::{LOADABLE, UNPLACED};
use orrery_sys::PAGE;

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
/// A segment that the loader maps.
const LOAD: u32 = 1;
/// More than any library has.
const MAX_SEGMENTS: usize = 64;

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// Returns flags of the file `fd`: [`LOADABLE`] if its first `length` bytes have all that the dynamic loader maps of a
/// library (an object may have less, as programs show it), [`UNPLACED`] if it needs no address of its own.
pub(crate) fn flags(fd: BorrowedFd<'_>, length: u64) -> u64 {
    examine(fd, length).unwrap_or(0)
}

fn examine(fd: BorrowedFd<'_>, length: u64) -> Option<u64> {
    let mut header = [0; HEADER];
    let read =
        |bytes: &mut [u8], at: u64| (rustix::io::pread(fd, &mut *bytes, at) == Ok(bytes.len())).then_some(());
    read(&mut header, 0)?;
    // It is a 64-bit library, or a program that is loaded like one.
    if header[..5] != *b"\x7fELF\x02" || u16::from_ne_bytes(word(&header, 16)?) != 3 {
        return None;
    }
    let table = u64::from_ne_bytes(word(&header, 32)?);
    let count = usize::from(u16::from_ne_bytes(word(&header, 56)?));
    if usize::from(u16::from_ne_bytes(word(&header, 54)?)) != PROGRAM_HEADER || count > MAX_SEGMENTS {
        return None;
    }
    let mut headers = vec![0; count * PROGRAM_HEADER];
    read(&mut headers, table)?;
    let (mut segments, mut relocated) = (0, 0);
    for header in headers.chunks(PROGRAM_HEADER) {
        let kind = u32::from_ne_bytes(word(header, 0)?);
        let [offset, address, size, in_memory] =
            [8, 16, 32, 40].map(|at| word(header, at).map_or(u64::MAX, u64::from_ne_bytes));
        if kind == LOAD {
            if offset.checked_add(size).is_none_or(|end| end > length) {
                return None;
            }
            segments += 1;
        } else if kind == RELRO {
            // Whole pages, as in `auditor/c/place.c`.
            let page = PAGE as u64;
            relocated = (address.checked_add(in_memory)? / page * page).saturating_sub(address / page * page);
        }
    }
    let unplaced = if relocated < MIN_RELOCATED { UNPLACED } else { 0 };
    (segments > 0).then_some(LOADABLE | unplaced)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn an_object_must_have_all_segments() {
        fn is_loadable(fd: BorrowedFd<'_>, length: u64) -> bool {
            flags(fd, length) & LOADABLE != 0
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let library =
            maps.lines().find_map(|line| line.split_whitespace().nth(5).filter(|p| p.contains("libc.so")));
        let Some(library) = library else {
            orrery_testing::skipped!("this program has no C library of its own");
            return;
        };
        let file = File::open(library).unwrap();
        let length = file.metadata().unwrap().len();
        assert!(is_loadable(file.as_fd(), length));
        assert!(!is_loadable(file.as_fd(), length / 2), "the data are missing");
        assert!(!is_loadable(File::open("/etc/passwd").unwrap().as_fd(), 1 << 20));
        let short = tempfile::tempfile().unwrap();
        assert!(!is_loadable(short.as_fd(), 100));
    }

    #[test]
    fn few_relocated_data_need_no_address() {
        /// A library of one segment, of which so much is relocated.
        fn library(relocated: u64) -> File {
            let mut bytes = vec![0_u8; HEADER + 2 * PROGRAM_HEADER];
            bytes[..5].copy_from_slice(b"\x7fELF\x02");
            bytes[16] = 3;
            bytes[32] = HEADER.try_into().unwrap();
            bytes[54] = PROGRAM_HEADER.try_into().unwrap();
            bytes[56] = 2;
            // It begins within a page, and ends within one.
            for (number, kind, address, length) in [(0, LOAD, 0, 176), (1, RELRO, 4096 + 16, relocated)] {
                let header = &mut bytes[HEADER + number * PROGRAM_HEADER..][..PROGRAM_HEADER];
                header[..4].copy_from_slice(&kind.to_ne_bytes());
                header[16..24].copy_from_slice(&u64::to_ne_bytes(address));
                header[32..40].copy_from_slice(&u64::to_ne_bytes(176));
                header[40..48].copy_from_slice(&u64::to_ne_bytes(length));
            }
            let mut file = tempfile::tempfile().unwrap();
            std::io::Write::write_all(&mut file, &bytes).unwrap();
            file
        }
        let of = |relocated| flags(library(relocated).as_fd(), 176);
        assert_eq!(of(MIN_RELOCATED - 16), LOADABLE);
        assert_eq!(of(MIN_RELOCATED - 17), LOADABLE | UNPLACED, "the last page is not whole");
        assert_eq!(of(0), LOADABLE | UNPLACED);
        assert_eq!(of(u64::MAX), 0, "nobody can load that");
    }
}
