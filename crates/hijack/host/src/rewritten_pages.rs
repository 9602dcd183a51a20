//! Pages of code that an executive has rewritten, among the mappings of a process.
//!
//! A rewritten page is anonymous memory, and stays that when the executive has left and the code in it is the file's again. It stands
//! where a page of the file was, between others of the file, and so has its place in the file by its neighbours'. Where it has the file
//! on one side only, as at the beginning of a program's code, or where segments are not in the file as they are in memory, its bytes
//! decide.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use orrery_sys::maps::{Access, Entry};
use orrery_sys::{PAGE, process_memory};

/// Returns mappings, given in the order of their addresses, in which rewritten pages are such of their file, at their place in it. Where
/// the neighbours of a page do not agree about that, `confirm` says whether it is at the place that one of them tells.
pub(crate) fn as_of_files<'a>(
    entries: impl Iterator<Item = Entry<'a>>,
    confirm: impl Fn(&Entry<'a>) -> bool,
) -> Vec<Entry<'a>> {
    let mut table: Vec<_> = entries.collect();
    let is_file = |entry: &Entry<'_>| entry.inode != 0 && !entry.access.contains(Access::SHARED);
    // For each, the file that follows it and other such pages, without a gap.
    let mut following = vec![None; table.len()];
    let (mut file, mut start) = (None, 0);
    for (entry, follows) in table.iter().zip(&mut following).rev() {
        file = file.filter(|_| entry.range.end == start);
        if is_rewritten(entry) {
            *follows = file;
        } else {
            file = Some(*entry).filter(is_file);
        }
        start = entry.range.start;
    }
    let mut before: Option<Entry<'a>> = None;
    for (entry, follows) in table.iter_mut().zip(following) {
        before = before.filter(|before| before.range.end == entry.range.start);
        if is_rewritten(entry) {
            let page = *entry;
            let place =
                |file: Entry<'a>, offset| Entry { range: page.range, access: page.access, offset, ..file };
            let one = before.and_then(|file| {
                let distance = page.range.start - file.range.start;
                Some(place(file, file.offset.checked_add(distance as u64)?))
            });
            let other = follows.and_then(|file| {
                let distance = file.range.start - page.range.start;
                Some(place(file, file.offset.checked_sub(distance as u64)?))
            });
            let found = match (one, other) {
                (Some(one), Some(other)) if one == other => Some(one),
                _ => one.into_iter().chain(other).find(&confirm),
            };
            *entry = found.unwrap_or(page);
        }
        before = Some(*entry).filter(is_file);
    }
    table
}

/// Returns whether a mapping may be pages of code that were rewritten.
fn is_rewritten(entry: &Entry<'_>) -> bool {
    entry.name.is_empty() && entry.inode == 0 && entry.access == Access::READ | Access::EXECUTE
}

/// Returns whether a process's memory has the same bytes as the file of a mapping, where the mapping says.
pub(crate) fn is_as_in_file(process: libc::pid_t, entry: &Entry<'_>) -> bool {
    let Some(path) = entry.name.strip_prefix(b"/") else { return false };
    // As the process sees it.
    let path = Path::new(&format!("/proc/{process}/root")).join(OsStr::from_bytes(path));
    // What has taken the file's place may be anything, such as a pipe that nobody writes to.
    let is_file = fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_file());
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW);
    let Some(file) = is_file.then(|| options.open(path)).and_then(Result::ok) else { return false };
    let (mut memory, mut content) = ([0; PAGE], [0; PAGE]);
    entry.range.addresses().all(|at| {
        let offset = entry.offset + (at - entry.range.start) as u64;
        process_memory::read(process, at as u64, &mut memory).is_ok()
            && file.read_exact_at(&mut content, offset).is_ok()
            && memory == content
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::process;

    use orrery_sys::maps;

    use super::*;

    const TABLE: &[u8] = b"1000-2000 r--p 00000000 fe:00 1  /n/x\n2000-3000 r-xp 00000000 00:00 0\n\
        3000-4000 r-xp 00000000 00:00 0\n4000-5000 r-xp 00003000 fe:00 1  /n/x\n\
        6000-7000 r-xp 00000000 00:00 0\n7000-8000 r-xp 00005000 fe:00 2  /n/y\n8000-9000 r-xp 00000000 00:00 0\n\
        a000-b000 r-xp 00000000 00:00 0\nc000-d000 r-xs 00003000 00:01 7  /SYSV00000000\nd000-e000 r-xp 00000000 00:00 0\n\
        e000-f000 r--p 00000000 fe:00 3  /n/z\nf000-10000 rwxp 00000000 00:00 0\n";

    fn places(confirm: impl Fn(&Entry<'_>) -> bool) -> Vec<(usize, &'static [u8], u64)> {
        let table = as_of_files(maps::entries(TABLE), confirm);
        table.into_iter().map(|entry| (entry.range.start, entry.name, entry.offset)).collect()
    }

    #[test]
    fn pages_have_the_place_of_which_their_neighbours_agree() {
        let x: &[u8] = b"/n/x";
        let found = places(|_| false);
        assert_eq!(
            &found[..4],
            [(0x1000, x, 0), (0x2000, x, 0x1000), (0x3000, x, 0x2000), (0x4000, x, 0x3000)]
        );
        // Alone beside a file, it takes more than that.
        for index in [4, 6, 7, 9, 11] {
            assert!(found[index].1.is_empty(), "{found:?}");
        }
    }

    #[test]
    fn one_neighbour_is_enough_where_the_bytes_are_the_file_s() {
        let y: &[u8] = b"/n/y";
        let found = places(|entry| entry.inode == 2);
        assert_eq!(&found[4..7], [(0x6000, y, 0x4000), (0x7000, y, 0x5000), (0x8000, y, 0x6000)]);
        // Shared memory is no file, and what may be written to is no page that was rewritten.
        let asked = Cell::new(0);
        places(|entry| {
            asked.set(asked.get().max(entry.range.start));
            false
        });
        assert_eq!(asked.get(), 0x8000);
    }

    #[test]
    fn bytes_are_compared_with_those_of_the_file() {
        let own = i32::try_from(process::id()).unwrap();
        let text = fs::read("/proc/self/maps").unwrap();
        let is_code = |entry: &Entry<'_>| entry.access == Access::READ | Access::EXECUTE && entry.inode != 0;
        let code = maps::entries(&text).find(is_code).unwrap();
        assert!(is_as_in_file(own, &code), "{code:?}");
        let page = code.range.start..code.range.start + PAGE;
        let one = Entry { range: orrery_sys::PageRange { start: page.start, end: page.end }, ..code };
        assert!(!is_as_in_file(own, &Entry { offset: one.offset + 1, ..one }));
        assert!(!is_as_in_file(own, &Entry { name: b"/dev/zero", ..one }));
        assert!(!is_as_in_file(own, &Entry { name: b"/nonexistent", ..one }));
        assert!(!is_as_in_file(own, &Entry { name: b"[vdso]", ..one }));
    }
}
