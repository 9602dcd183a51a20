//! What the kernel has mapped for a program that has just been executed: its code, its loader's, and the vDSO.
//!
//! Asked for one by one (`PROCMAP_QUERY`, Linux 6.11), mappings of code take two microseconds in all. The table of
//! proc_pid_maps(5), which has the same, takes twenty to be written by the kernel and read here.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read};
use std::mem::size_of;
use std::os::fd::AsRawFd;

/// Mappings of a process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Maps {
    /// Code of files: start, end and file.
    pub(crate) code: Vec<(u64, u64, String)>,
    /// Where the vDSO begins.
    pub(crate) vdso: Option<u64>,
}

impl Maps {
    pub(crate) fn of(pid: libc::pid_t) -> io::Result<Self> {
        let mut file = File::open(format!("/proc/{pid}/maps"))?;
        // Kernels before that cannot be asked, and filters may forbid it.
        Self::asked_for(&file).or_else(|_| Self::read(&mut file))
    }

    fn asked_for(file: &File) -> io::Result<Self> {
        let mut maps = Self { code: Vec::new(), vdso: None };
        let mut name = [0; LONGEST_NAME as usize];
        let mut next = 0;
        loop {
            let mut query = Query {
                size: size_of::<Query>() as u64,
                flags: EXECUTABLE | COVERING_OR_NEXT,
                address: next,
                name_size: LONGEST_NAME,
                name_address: (&raw mut name).expose_provenance() as u64,
                ..Query::default()
            };
            // SAFETY: the structure is the one that the request takes, and names a buffer of that length.
            if unsafe { libc::ioctl(file.as_raw_fd(), PROCMAP_QUERY, &raw mut query) } != 0 {
                let error = io::Error::last_os_error();
                // Nothing follows.
                return if error.raw_os_error() == Some(libc::ENOENT) { Ok(maps) } else { Err(error) };
            }
            // With its final zero.
            let length = usize::try_from(query.name_size).unwrap_or(0).saturating_sub(1);
            let name = name.get(..length).unwrap_or_default();
            if query.access == READABLE | EXECUTABLE && query.inode != 0 {
                let name = String::from_utf8_lossy(name).into_owned();
                maps.code.push((query.start, query.end, name));
            } else if name == VDSO.as_bytes() {
                maps.vdso = Some(query.start);
            }
            next = query.end;
        }
    }

    fn read(file: &mut File) -> io::Result<Self> {
        /// More than the few mappings of a new program take.
        const MOST: usize = 16 << 10;
        let mut bytes = vec![0; MOST];
        let mut length = 0;
        loop {
            match file.read(bytes.get_mut(length..).unwrap_or(&mut []))? {
                0 => break,
                read => length += read,
            }
        }
        let text: Cow<'_, str> = String::from_utf8_lossy(bytes.get(..length).unwrap_or(&[]));
        let vdso = text.lines().find(|line| line.ends_with(VDSO)).and_then(|line| line.split_once('-'));
        let vdso = vdso.and_then(|(start, _)| u64::from_str_radix(start, 16).ok());
        Ok(Self { code: text.lines().filter_map(code_range).collect(), vdso })
    }
}

const VDSO: &str = "[vdso]";
const LONGEST_NAME: u32 = 4096;

/// `struct procmap_query` of linux/fs.h, as far as it was first published.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    access: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name_address: u64,
    build_id_address: u64,
}

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong = 0xc068_6611;
const _: () = assert!(size_of::<Query>() == 0x68);
const READABLE: u64 = 1;
const EXECUTABLE: u64 = 4;
/// The mapping at the address, or else the next one that is as was asked for.
const COVERING_OR_NEXT: u64 = 0x10;

/// Start, end and file of a mapping of code.
fn code_range(line: &str) -> Option<(u64, u64, String)> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let (permissions, inode) = (words.next()?, words.nth(2)?);
    let file = words.next().unwrap_or("").trim_start();
    let number = |text| u64::from_str_radix(text, 16).ok();
    (permissions == "r-xp" && inode != "0").then_some((number(start)?, number(end)?, file.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> File {
        File::open("/proc/self/maps").unwrap()
    }

    #[test]
    fn code_is_told_from_other_mappings() {
        let line = "7f12-7f34 r-xp 00001000 fe:00 1234                       /usr/bin/x y";
        assert_eq!(code_range(line), Some((0x7f12, 0x7f34, "/usr/bin/x y".to_owned())));
        assert_eq!(code_range(&line.replace("r-xp", "rwxp")), None);
        assert_eq!(code_range("7f12-7f34 r-xp 00000000 00:00 0    [vdso]"), None);
        assert_eq!(code_range(""), None);
    }

    #[test]
    fn this_processs_own_code_is_found() {
        let maps = Maps::read(&mut own()).unwrap();
        assert!(!maps.code.is_empty());
        // SAFETY: the call takes no pointer.
        assert_eq!(maps.vdso, Some(unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) }));
    }

    #[test]
    fn asking_tells_what_the_table_tells() {
        match Maps::asked_for(&own()) {
            Ok(asked) => assert_eq!(asked, Maps::read(&mut own()).unwrap()),
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                orrery_testing::skipped!("the kernel has no PROCMAP_QUERY");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
