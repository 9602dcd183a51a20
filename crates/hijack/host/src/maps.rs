//! What the kernel has mapped for a program that has just been executed: its code, its loader's, and the vDSO.
//!
//! Queried one by one (`PROCMAP_QUERY`, Linux 6.11), mappings of code take two microseconds in all. The table of
//! proc_pid_maps(5), which has the same, takes twenty to be written by the kernel and read here.

use std::fs;
use std::io;

use orrery_sys::maps::{self, Access, Entry, Query};
use rustix::process::Pid;

/// Mappings of a process.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Maps {
    /// Code of files: start, end and file.
    pub(crate) code: Vec<(u64, u64, String)>,
    /// The start of the vDSO.
    pub(crate) vdso: Option<u64>,
}

/// Longest name of a mapping, in bytes.
const PATH_MAX: usize = 4096;

impl Maps {
    /// Returns the mappings of code of a process.
    pub(crate) fn of(pid: libc::pid_t) -> io::Result<Self> {
        let process = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        // Kernels before 6.11 have no query, and filters may forbid it.
        Self::queried(process).or_else(|_| Ok(Self::parsed(&fs::read(format!("/proc/{pid}/maps"))?)))
    }

    fn queried(process: Pid) -> io::Result<Self> {
        let table = maps::Maps::of_process(process).map_err(|error| io::Error::from(error.errno))?;
        let mut found = Self::default();
        let mut name = [0; PATH_MAX];
        let mut next = 0;
        while let Some(entry) = table.query(next, Query::EXECUTABLE | Query::COVERING_OR_NEXT, &mut name)? {
            found.add(&entry);
            next = entry.range.end;
        }
        Ok(found)
    }

    fn parsed(text: &[u8]) -> Self {
        let mut found = Self::default();
        maps::entries(text).for_each(|entry| found.add(&entry));
        found
    }

    fn add(&mut self, entry: &Entry<'_>) {
        if entry.access == Access::READ | Access::EXECUTE && entry.inode != 0 {
            let name = String::from_utf8_lossy(entry.name).into_owned();
            self.code.push((entry.range.start as u64, entry.range.end as u64, name));
        } else if entry.name == b"[vdso]" {
            self.vdso = Some(entry.range.start as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_distinguished_from_other_mappings() {
        let code = |line: &str| Maps::parsed(line.as_bytes()).code;
        let line = "7f12-7f34 r-xp 00001000 fe:00 1234                       /usr/bin/x y";
        assert_eq!(code(line), [(0x7f12, 0x7f34, "/usr/bin/x y".to_owned())]);
        assert_eq!(code("7f12-7f34 r--p 00001000 fe:00 1234                       /usr/bin/x"), []);
        assert_eq!(code("7f12-7f34 r-xp 00000000 00:00 0                          [vdso]"), []);
        assert_eq!(code("7f12-7f34 rwxp 00001000 fe:00 1234                       /usr/bin/x"), []);
    }

    #[test]
    fn the_query_returns_what_the_table_has() {
        let pid = rustix::process::getpid();
        let text = fs::read("/proc/self/maps").unwrap();
        let parsed = Maps::parsed(&text);
        assert!(!parsed.code.is_empty());
        // SAFETY: the call takes no pointer.
        assert_eq!(parsed.vdso, Some(unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) }));
        match Maps::queried(pid) {
            Ok(queried) => assert_eq!(queried, parsed),
            Err(error) => orrery_testing::skipped!("no PROCMAP_QUERY: {error}"),
        }
    }
}
