//! Mappings that cannot be carried over.

use crate::process::Process;
use crate::report::{Findings, Verdict};

/// How the names of System V shared memory begin.
const SYSTEM_V: &str = "/SYSV";

/// Checks the mappings of all processes.
pub(crate) fn check(processes: &[Process], findings: &mut Findings) {
    for process in processes.iter().filter(|process| !process.has_ended()) {
        let mut reported = Vec::new();
        for line in process.text("maps").lines() {
            let Some((range, flags, name)) = split(line) else { continue };
            let judged = if name.starts_with(SYSTEM_V) {
                Some((
                    Verdict::Lost,
                    "it survives without its number and key",
                    "use POSIX shared memory (shm_open) or mmap",
                ))
            } else {
                judge(flags, name).map(|(why, way_out)| (Verdict::Refused, why, way_out))
            };
            if let Some((verdict, why, way_out)) = judged
                && !reported.contains(&name.to_owned())
            {
                reported.push(name.to_owned());
                findings.add(process.pid, format!("memory at {range} ({name})"), verdict, why, way_out);
            }
        }
    }
}

/// A line's range, permissions and name.
fn split(line: &str) -> Option<(&str, &str, &str)> {
    let mut words = line.split_ascii_whitespace();
    let (range, flags) = (words.next()?, words.next()?);
    // After offset, device and inode stands the name, which may hold blanks.
    let inode = words.nth(2)?;
    let at = inode.as_ptr().addr() - line.as_ptr().addr() + inode.len();
    Some((range, flags, line.get(at..)?.trim()))
}

/// Why a mapping of this name could not be made again, and what to do about it.
fn judge(flags: &str, name: &str) -> Option<(&'static str, &'static str)> {
    let is_shared = flags.ends_with('s');
    if name.starts_with("/anon_hugepage") || name.starts_with("/memfd:hugepage") {
        Some(("large pages that are asked for by name are not carried over", "use transparent large pages"))
    } else if name.starts_with("/[aio]") || name.starts_with("anon_inode:") {
        Some(("it is shared with the kernel", "do without io_uring, aio and perf events"))
    } else if name.starts_with("socket:") {
        Some(("it is the memory of a socket", "do without packet rings"))
    } else if ["/dev/zero", "/dev/shm/", "/memfd:", SYSTEM_V].iter().any(|fine| name.starts_with(fine)) {
        None
    } else if name.starts_with("/dev/") {
        Some(("it is a device's memory", "keep devices out of the service"))
    } else if name.ends_with(" (deleted)") && (is_shared || name.starts_with('/')) {
        Some((
            "the file has no name any more, and cannot be opened again",
            "restart the service after updates, and keep mapped files",
        ))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_blanks_are_read_whole() {
        let line = "7f00-7f01 r--s 00000000 08:01 17                         /tmp/a file (deleted)";
        assert_eq!(split(line), Some(("7f00-7f01", "r--s", "/tmp/a file (deleted)")));
        assert_eq!(split("7f00-7f01 rw-p 00000000 00:00 0 "), Some(("7f00-7f01", "rw-p", "")));
        assert_eq!(split("nonsense"), None);
    }

    #[test]
    fn what_survives_is_passed_over_and_what_does_not_is_reported() {
        for fine in [
            "/SYSV00000000 (deleted)",
            "",
            "[heap]",
            "[vdso]",
            "/usr/lib/libc.so.6",
            "/dev/zero (deleted)",
            "/memfd:held (deleted)",
        ] {
            assert_eq!(judge("rw-s", fine), None, "{fine}");
        }
        for bad in ["/[aio] (deleted)", "anon_inode:[io_uring]", "/dev/mem", "/usr/bin/x (deleted)"] {
            assert!(judge("rw-p", bad).is_some(), "{bad}");
        }
    }
}
