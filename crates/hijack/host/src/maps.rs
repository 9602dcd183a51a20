//! What is mapped for a program: its code, its libraries', and the vDSO.
//!
//! Of a program that has just been executed, the kernel has mapped that. Queried one by one (`PROCMAP_QUERY`, Linux 6.11), mappings of code take two microseconds in all. The table of
//! proc_pid_maps(5), which has the same, takes twenty to be written by the kernel and read here.
//!
//! In a program that ran before, an executive may have been that has rewritten pages of code. They are code of their file still, though
//! the kernel does not know it: see [`rewritten_pages`].

use std::fs;
use std::io;

use orrery_sys::PageRange;
use orrery_sys::maps::{self, Access, Entry, Query};
use rustix::process::Pid;

use crate::rewritten_pages;

/// Code of a file, as it is mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CodeRange {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) file: String,
}

/// Mappings of a process.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Maps {
    /// Code of files, in the order of addresses.
    pub(crate) code: Vec<CodeRange>,
    /// Of a program that has just been executed: the start of the mappings that the last of its code is among, without a gap.
    pub(crate) last_begins: u64,
    /// The start of the vDSO.
    pub(crate) vdso: Option<u64>,
}

/// Longest name of a mapping, in bytes.
const PATH_MAX: usize = 4096;

impl Maps {
    /// Returns the mappings of code of a process that has just executed a program.
    pub(crate) fn of_new(pid: libc::pid_t) -> io::Result<Self> {
        let process = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        // Kernels before 6.11 have no query, and filters may forbid it.
        Self::queried(process).or_else(|_| Ok(Self::parsed(&fs::read(format!("/proc/{pid}/maps"))?)))
    }

    /// Returns the mappings of code of a process that ran before, and stands still.
    pub(crate) fn of_running(pid: libc::pid_t) -> io::Result<Self> {
        let text = fs::read(format!("/proc/{pid}/maps"))?;
        let is_in_file = |entry: &Entry<'_>| rewritten_pages::is_as_in_file(pid, entry);
        let table = rewritten_pages::as_of_files(maps::entries(&text), is_in_file);
        let mut found = Self::default();
        // Each rewritten page has made three mappings of one.
        let continues = |one: &Entry<'_>, next: &Entry<'_>| {
            let offset = one.offset.checked_add(one.range.len() as u64);
            one.range.end == next.range.start
                && one.access == next.access
                && (one.device, one.inode, offset) == (next.device, next.inode, Some(next.offset))
        };
        for parts in table.chunk_by(continues) {
            if let (Some(first), Some(last)) = (parts.first(), parts.last()) {
                let range = PageRange { start: first.range.start, end: last.range.end };
                found.add(&Entry { range, ..*first });
            }
        }
        Ok(found)
    }

    fn queried(process: Pid) -> io::Result<Self> {
        let table = maps::Maps::of_process(process).map_err(|error| io::Error::from(error.errno))?;
        let mut found = Self::default();
        let mut name = [0; PATH_MAX];
        let (mut next, mut begins) = (0, 0);
        while let Some(entry) = table.query(next, Query::EXECUTABLE | Query::COVERING_OR_NEXT, &mut name)? {
            next = entry.range.end;
            let start = entry.range.start;
            if found.add(&entry) {
                begins = start;
            }
        }
        while let Some(below) = begins.checked_sub(1)
            && let Some(entry) = table.query(below, Query::empty(), &mut name)?
        {
            begins = entry.range.start;
        }
        found.last_begins = begins as u64;
        Ok(found)
    }

    fn parsed(text: &[u8]) -> Self {
        let mut found = Self::default();
        let (mut begins, mut behind) = (0, 0);
        for entry in maps::entries(text) {
            if entry.range.start != behind {
                begins = entry.range.start;
            }
            behind = entry.range.end;
            if found.add(&entry) {
                found.last_begins = begins as u64;
            }
        }
        found
    }

    /// Adds what is of interest, and returns whether that is code of a file.
    fn add(&mut self, entry: &Entry<'_>) -> bool {
        let is_code = entry.access == Access::READ | Access::EXECUTE && entry.inode != 0;
        if is_code {
            self.code.push(CodeRange {
                start: entry.range.start as u64,
                end: entry.range.end as u64,
                file: String::from_utf8_lossy(entry.name).into_owned(),
            });
        } else if entry.name == b"[vdso]" {
            self.vdso = Some(entry.range.start as u64);
        }
        is_code
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use orrery_sys::PAGE;

    use super::*;

    /// Held by tests that look at this process's mappings, or change them.
    static OWN: Mutex<()> = Mutex::new(());

    #[test]
    fn code_is_distinguished_from_other_mappings() {
        let code = |line: &str| Maps::parsed(line.as_bytes()).code;
        let line = "7f12-7f34 r-xp 00001000 fe:00 1234                       /usr/bin/x y";
        let range = CodeRange { start: 0x7f12, end: 0x7f34, file: "/usr/bin/x y".to_owned() };
        assert_eq!(code(line), [range]);
        assert_eq!(code("7f12-7f34 r--p 00001000 fe:00 1234                       /usr/bin/x"), []);
        assert_eq!(code("7f12-7f34 r-xp 00000000 00:00 0                          [vdso]"), []);
        assert_eq!(code("7f12-7f34 rwxp 00001000 fe:00 1234                       /usr/bin/x"), []);
    }

    /// Another process is looked at, in which nobody maps anything meanwhile.
    #[test]
    fn the_query_returns_what_the_table_has() {
        use std::io::{Read as _, Write as _};
        use std::process::{Command, Stdio};
        let mut cat = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut input, mut output) = (cat.stdin.take().unwrap(), cat.stdout.take().unwrap());
        input.write_all(b"x").unwrap();
        output.read_exact(&mut [0]).unwrap();
        let text = fs::read(format!("/proc/{}/maps", cat.id())).unwrap();
        let queried = Maps::queried(Pid::from_child(&cat));
        drop(input);
        assert!(cat.wait().unwrap().success());
        let parsed = Maps::parsed(&text);
        assert!(parsed.code.len() >= 3 && parsed.vdso.is_some(), "{parsed:x?}");
        let last = parsed.code.last().unwrap();
        let is_there = |at: u64| {
            let at = usize::try_from(at).unwrap();
            maps::entries(&text).any(|entry| entry.range.contains(at))
        };
        assert!((parsed.last_begins..last.end).step_by(PAGE).all(is_there), "{parsed:x?}");
        assert!(!is_there(parsed.last_begins - 1), "{parsed:x?}");
        match queried {
            Ok(queried) => assert_eq!(queried, parsed),
            Err(error) => orrery_testing::skipped!("no PROCMAP_QUERY: {error}"),
        }
    }

    #[test]
    fn code_of_a_file_is_one_range_where_an_executive_has_been() {
        use std::os::fd::AsRawFd as _;
        const PAGES: usize = 5;
        let _alone = OWN.lock().unwrap_or_else(PoisonError::into_inner);
        let content: Vec<u8> = (0..PAGES * PAGE).map(|at| u8::try_from(at / PAGE).unwrap()).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), &content).unwrap();
        let executable = libc::PROT_READ | libc::PROT_EXEC;
        // SAFETY: maps the file at an address that the kernel chooses.
        let start = unsafe {
            let fd = file.as_file().as_raw_fd();
            libc::mmap(std::ptr::null_mut(), PAGES * PAGE, executable, libc::MAP_PRIVATE, fd, 0)
        };
        if start == libc::MAP_FAILED {
            orrery_testing::skipped!("no code may be mapped from {}", file.path().display());
            return;
        }
        let start = start.cast::<u8>();
        let replace = |page: usize, bytes: &[u8]| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: the page is one of those that were mapped, to which nobody else refers; `bytes` are a page.
            unsafe {
                let at = start.add(page * PAGE);
                assert_eq!(
                    libc::mmap(at.cast(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0),
                    at.cast()
                );
                at.copy_from_nonoverlapping(bytes.as_ptr(), PAGE);
                assert_eq!(libc::mprotect(at.cast(), PAGE, executable), 0);
            }
        };
        let found = || {
            let maps = Maps::of_running(std::process::id().cast_signed()).unwrap();
            let own = file.path().to_str().unwrap();
            let ranges = maps.code.iter().filter(|range| range.file == own);
            ranges.map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        let range = |first: usize, behind: usize| {
            let at = start.addr() as u64;
            (at + (first * PAGE) as u64, at + (behind * PAGE) as u64)
        };
        assert_eq!(found(), [range(0, PAGES)]);
        for page in [2, 0, PAGES - 1] {
            replace(page, &content[page * PAGE..(page + 1) * PAGE]);
            assert_eq!(found(), [range(0, PAGES)], "page {page}");
        }
        // What is at the edge and has other bytes may be anything.
        replace(0, &[0x90; PAGE]);
        assert_eq!(found(), [range(1, PAGES)]);
        // SAFETY: nothing refers to the pages any more.
        assert_eq!(unsafe { libc::munmap(start.cast(), PAGES * PAGE) }, 0);
    }
}
