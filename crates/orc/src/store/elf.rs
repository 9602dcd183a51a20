//! Whether an object can be loaded in the place of its file (elf(5)).

use std::os::fd::BorrowedFd;

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
/// A segment that the loader maps.
const LOAD: u32 = 1;
/// More than any library has.
const MOST: usize = 64;

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// Whether the first `length` bytes of the file behind `fd` have all that the dynamic loader maps of a library: an object is what
/// some program has shown of a file, which may be less.
pub(super) fn is_loadable(fd: BorrowedFd<'_>, length: u64) -> bool {
    loadable(fd, length).unwrap_or(false)
}

fn loadable(fd: BorrowedFd<'_>, length: u64) -> Option<bool> {
    let mut header = [0; HEADER];
    let read =
        |bytes: &mut [u8], at: u64| (rustix::io::pread(fd, &mut *bytes, at) == Ok(bytes.len())).then_some(());
    read(&mut header, 0)?;
    // 64 bits, and a library or a program that is loaded like one.
    if header[..5] != *b"\x7fELF\x02" || u16::from_ne_bytes(word(&header, 16)?) != 3 {
        return Some(false);
    }
    let table = u64::from_ne_bytes(word(&header, 32)?);
    let count = usize::from(u16::from_ne_bytes(word(&header, 56)?));
    if usize::from(u16::from_ne_bytes(word(&header, 54)?)) != PROGRAM_HEADER || count > MOST {
        return Some(false);
    }
    let mut headers = vec![0; count * PROGRAM_HEADER];
    read(&mut headers, table)?;
    let mut segments = 0;
    for header in headers.chunks(PROGRAM_HEADER) {
        if u32::from_ne_bytes(word(header, 0)?) == LOAD {
            let [offset, size] = [8, 32].map(|at| word(header, at).map_or(u64::MAX, u64::from_ne_bytes));
            if offset.checked_add(size).is_none_or(|end| end > length) {
                return Some(false);
            }
            segments += 1;
        }
    }
    Some(segments > 0)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn an_object_must_have_all_segments() {
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
}
