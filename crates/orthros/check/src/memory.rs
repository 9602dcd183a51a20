//! Mappings that cannot be carried over.

use std::fs;

use crate::descriptors::MOST_NAMELESS;
use crate::process::Process;
use crate::report::{Findings, Verdict};

/// What is said of a file that [`is_too_large`].
const TOO_LARGE: (&str, &str) = (
    "its file has no name any more, and is too large to be put beside the images",
    "keep its name while it is mapped",
);
/// How the names of System V shared memory begin.
const SYSTEM_V: &str = "/SYSV";

/// Checks the mappings of all processes.
pub(crate) fn check(processes: &[Process], findings: &mut Findings) {
    for process in processes.iter().filter(|process| !process.has_ended()) {
        let mut reported = Vec::new();
        for line in process.text("maps").lines() {
            let Some((range, name)) = split(line) else { continue };
            let judged = if name.starts_with(SYSTEM_V) {
                Some((
                    Verdict::Lost,
                    "it survives without its number and key",
                    "use POSIX shared memory (shm_open) or mmap",
                ))
            } else {
                let judged = judge(name).or_else(|| is_too_large(process, range, name).then_some(TOO_LARGE));
                judged.map(|(why, way_out)| (Verdict::Refused, why, way_out))
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

/// Returns a line's range and name.
fn split(line: &str) -> Option<(&str, &str)> {
    let mut words = line.split_ascii_whitespace();
    let range = words.next()?;
    // After permissions, offset, device and inode stands the name, which may hold blanks.
    let inode = words.nth(3)?;
    let at = inode.as_ptr().addr() - line.as_ptr().addr() + inode.len();
    Some((range, line.get(at..)?.trim()))
}

/// Returns whether a mapping is of a file without a name that holds too much.
fn is_too_large(process: &Process, range: &str, name: &str) -> bool {
    let is_file =
        name.ends_with(" (deleted)") && !["/memfd:", "/dev/zero"].iter().any(|held| name.starts_with(held));
    // The numbers have no zeros before them there.
    let place = range.split('-').map(|number| number.trim_start_matches('0')).collect::<Vec<_>>().join("-");
    let file =
        || fs::metadata(process.path("map_files").join(place)).is_ok_and(|file| file.len() > MOST_NAMELESS);
    is_file && file()
}

/// Returns why a mapping of this name could not be made again, and what to do about it.
fn judge(name: &str) -> Option<(&'static str, &'static str)> {
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
        assert_eq!(split(line), Some(("7f00-7f01", "/tmp/a file (deleted)")));
        assert_eq!(split("7f00-7f01 rw-p 00000000 00:00 0 "), Some(("7f00-7f01", "")));
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
            "/usr/bin/x (deleted)",
        ] {
            assert_eq!(judge(fine), None, "{fine}");
        }
        for bad in ["/[aio] (deleted)", "anon_inode:[io_uring]", "/dev/mem"] {
            assert!(judge(bad).is_some(), "{bad}");
        }
    }
}
