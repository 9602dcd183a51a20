//! The mappings of a process: `/proc/PID/maps` (proc_pid_maps(5)) and `PROCMAP_QUERY` (Linux 6.11).
//!
//! - [`Maps::for_each`] reads the whole table into a caller's buffer, without allocating: it is fit for a process whose
//!   own memory is being restored.
//! - [`Maps::query`] asks the kernel for a single mapping. That takes under a microsecond, where the table of a new
//!   program takes twenty to be written by the kernel and read here. [`Maps::for_each_in`] uses it where it can.
//! - [`entries`] parses a table, or the headers in `/proc/PID/smaps`, that the caller has read as a whole.

use std::ffi::CStr;
use std::io::Write as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bitflags::bitflags;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use rustix::process::Pid;

use crate::descriptors::raise;
use crate::{Error, PageRange, Result, proc_self};

bitflags! {
    /// The protection of a mapping, and whether it is shared.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Access: u8 {
        /// The mapping is readable.
        const READ = 1;
        /// The mapping is writable.
        const WRITE = 2;
        /// The mapping is executable.
        const EXECUTE = 4;
        /// Shared: writes go to the object behind the mapping.
        const SHARED = 8;
    }
}

bitflags! {
    /// Which mappings [`Maps::query`] returns. Without flags: only one that covers the address, whatever it is.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Query: u64 {
        /// The mapping is readable.
        const READABLE = 0x01;
        /// The mapping is writable.
        const WRITABLE = 0x02;
        /// The mapping is executable.
        const EXECUTABLE = 0x04;
        /// The mapping is shared.
        const SHARED = 0x08;
        /// If no such mapping covers the address, the next one behind it.
        const COVERING_OR_NEXT = 0x10;
        /// The mapping shows a file.
        const FILE_BACKED = 0x20;
    }
}

/// One mapping, as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The addresses that it covers.
    pub range: PageRange,
    /// Its protection and sharing.
    pub access: Access,
    /// The offset in the file, in bytes; 0 for anonymous memory.
    pub offset: u64,
    /// The device of the file, `major << 32 | minor`; 0 for anonymous memory.
    pub device: u64,
    /// The inode of the file; 0 for anonymous memory.
    pub inode: u64,
    /// The file's path, a name in brackets, or nothing.
    pub name: &'a [u8],
}

impl<'a> Entry<'a> {
    /// Parses a line `start-end rwxp offset major:minor inode   name`, without its line feed; `None` if it is no such line.
    pub fn parse(line: &'a [u8]) -> Option<Self> {
        let mut rest = line;
        let start = hex(&mut rest)?;
        let end = hex(after(&mut rest, b'-')?)?;
        let flags = after(&mut rest, b' ')?.split_off(..4)?;
        let mut access = Access::empty();
        access.set(Access::READ, flags[0] == b'r');
        access.set(Access::WRITE, flags[1] == b'w');
        access.set(Access::EXECUTE, flags[2] == b'x');
        access.set(Access::SHARED, flags[3] == b's');
        let offset = hex(after(&mut rest, b' ')?)?;
        let major = hex(after(&mut rest, b' ')?)?;
        let minor = hex(after(&mut rest, b':')?)?;
        let inode = decimal(after(&mut rest, b' ')?)?;
        Some(Self {
            range: PageRange { start: usize::try_from(start).ok()?, end: usize::try_from(end).ok()? },
            access,
            offset,
            device: major << 32 | minor,
            inode,
            name: rest.trim_ascii_start(),
        })
    }

    /// Returns the offset in the file of the byte at `address`; `None` if the mapping does not cover the address, or the offset is none
    /// that a file can have.
    pub fn offset_of(&self, address: usize) -> Option<u64> {
        let within = self.range.contains(address).then(|| address - self.range.start)?;
        self.offset.checked_add(within as u64)
    }
}

/// Parses the text of `/proc/PID/maps`, or the header lines in that of `/proc/PID/smaps`. Lines that describe no mapping
/// are skipped.
pub fn entries(text: &[u8]) -> impl Iterator<Item = Entry<'_>> {
    text.split(|&byte| byte == b'\n').filter_map(Entry::parse)
}

/// The opened table of a process' mappings.
#[derive(Debug)]
pub struct Maps {
    fd: OwnedFd,
}

impl Maps {
    /// Opens the calling process' table. A forked child must open its own.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn open() -> Result<Self> {
        let fd = proc_self::open(c"/proc/self/maps", OFlags::empty())
            .map_err(|e| Error::new("open /proc/self/maps", 0, e))?;
        Ok(Self { fd: raise(fd) })
    }

    /// Opens the table of another process or thread.
    ///
    /// # Errors
    /// `ENOENT` if there is no such process, `EACCES` if it may not be inspected, and those of open(2).
    pub fn of_process(pid: Pid) -> Result<Self> {
        let mut path = [0_u8; "/proc/-2147483648/maps\0".len()];
        // The buffer has room for any number, so this cannot fail.
        let _ = write!(&mut path[..], "/proc/{}/maps\0", pid.as_raw_pid());
        let failed =
            |errno| Error::new("open /proc/PID/maps", pid.as_raw_pid().unsigned_abs() as usize, errno);
        let path = CStr::from_bytes_until_nul(&path).map_err(|_| failed(Errno::INVAL))?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).map(|fd| Self { fd }).map_err(failed)
    }

    /// Calls `each` with every mapping in address order. `buffer` must hold the longest line (a path of 4,096 bytes and
    /// 100 more); the larger it is, the fewer system calls.
    ///
    /// # Errors
    /// Those of read(2) and of `each`; `E2BIG` if a line does not fit `buffer`, `EBADMSG` if it is no mapping.
    pub fn for_each(&self, buffer: &mut [u8], mut each: impl FnMut(Entry<'_>) -> Result<()>) -> Result<()> {
        rustix::fs::seek(&self.fd, rustix::fs::SeekFrom::Start(0))
            .map_err(|e| Error::new("lseek /proc/self/maps", 0, e))?;
        for_each_text_line(self.fd.as_fd(), buffer, |text| {
            each(Entry::parse(text).ok_or(Error::new("parse /proc/self/maps", text.len(), Errno::BADMSG))?)
        })
    }
}

impl Maps {
    /// Calls `each` with every mapping that overlaps `range`, in address order. With `PROCMAP_QUERY` only these are read;
    /// without it, the whole table. `buffer` is as for [`Maps::for_each`].
    ///
    /// # Errors
    /// Those of [`Maps::for_each`].
    pub fn for_each_in(
        &self,
        range: PageRange,
        buffer: &mut [u8],
        mut each: impl FnMut(Entry<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut next = range.start;
        while next < range.end {
            match self.query(next, Query::COVERING_OR_NEXT, buffer) {
                Ok(Some(line)) if line.range.start < range.end => {
                    next = line.range.end;
                    each(line)?;
                }
                Ok(_) => return Ok(()),
                Err(Errno::NOTTY | Errno::INVAL) if next == range.start => {
                    return self.for_each(buffer, |line| {
                        if line.range.overlaps(range) { each(line) } else { Ok(()) }
                    });
                }
                Err(errno) => return Err(Error::new("PROCMAP_QUERY", next, errno)),
            }
        }
        Ok(())
    }

    /// Asks the kernel for the mapping that covers `address` and is as `query` demands (`PROCMAP_QUERY`). The name goes
    /// into `buffer`. Returns `None` if there is no such mapping.
    ///
    /// # Errors
    /// `ENOTTY` on kernels before 6.11, `ENAMETOOLONG` if `buffer` is too short for the name.
    pub fn query<'a>(
        &self,
        address: usize,
        query: Query,
        buffer: &'a mut [u8],
    ) -> rustix::io::Result<Option<Entry<'a>>> {
        let mut request = MappingQuery {
            size: size_of::<MappingQuery>() as u64,
            flags: query.bits(),
            address: address as u64,
            name_size: u32::try_from(buffer.len().min(PATH_MAX)).unwrap_or(0),
            name_address: buffer.as_mut_ptr().addr() as u64,
            ..MappingQuery::default()
        };
        // SAFETY: the request takes this structure, and the kernel writes at most `name_size` bytes to `buffer`.
        match unsafe { ioctl(&self.fd, QueryRequest(&mut request)) } {
            Err(Errno::NOENT) => return Ok(None),
            result => result?,
        }
        let number = |value: u64| usize::try_from(value).map_err(|_| Errno::OVERFLOW);
        // The kernel counts the terminating zero; without a name it returns 0.
        let length = usize::try_from(request.name_size).unwrap_or(0).saturating_sub(1);
        Ok(Some(Entry {
            range: PageRange { start: number(request.start)?, end: number(request.end)? },
            // The kernel's bits have the values of `Access`.
            access: Access::from_bits_truncate(u8::try_from(request.access & 0xf).unwrap_or(0)),
            offset: if request.inode == 0 { 0 } else { request.offset },
            device: u64::from(request.device_major) << 32 | u64::from(request.device_minor),
            inode: request.inode,
            name: buffer.get(..length).unwrap_or_default(),
        }))
    }
}

/// Longest name of a mapping that the kernel gives, in bytes.
const PATH_MAX: usize = 4096;

/// `struct procmap_query` of linux/fs.h, as far as it was first published.
#[repr(C)]
#[derive(Default)]
struct MappingQuery {
    size: u64,
    flags: u64,
    address: u64,
    start: u64,
    end: u64,
    access: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device_major: u32,
    device_minor: u32,
    name_size: u32,
    build_id_size: u32,
    name_address: u64,
    build_id_address: u64,
}

const PROCMAP_QUERY: Opcode = opcode::read_write::<MappingQuery>(b'f', 17);

struct QueryRequest<'a>(&'a mut MappingQuery);

// SAFETY: the request takes a `struct procmap_query`, which the borrow keeps valid. Its one user fills in the address and
// the length of the buffer for the name.
unsafe impl Ioctl for QueryRequest<'_> {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        PROCMAP_QUERY
    }

    fn as_ptr(&mut self) -> *mut core::ffi::c_void {
        core::ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut core::ffi::c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// Reads `fd` to its end and calls `each` with every line.
fn for_each_text_line(
    fd: BorrowedFd<'_>,
    buffer: &mut [u8],
    mut each: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let mut held = 0;
    loop {
        if held == buffer.len() {
            return Err(Error::new("read a line of /proc/self/maps", held, Errno::TOOBIG));
        }
        let read = rustix::io::retry_on_intr(|| rustix::io::read(fd, &mut buffer[held..]))
            .map_err(|e| Error::new("read /proc/self/maps", held, e))?;
        if read == 0 {
            return Ok(());
        }
        held += read;
        let mut parsed = 0;
        while let Some(length) = buffer[parsed..held].iter().position(|&b| b == b'\n') {
            each(&buffer[parsed..parsed + length])?;
            parsed += length + 1;
        }
        buffer.copy_within(parsed..held, 0);
        held -= parsed;
    }
}

/// Calls `each` with every mapping that a forked child does not inherit as it is: `MADV_DONTFORK` and `MADV_WIPEONFORK`.
///
/// Reads `/proc/self/smaps`, for which the kernel walks all page tables: milliseconds per GiB.
///
/// # Errors
/// Those of open(2) and read(2); see [`Maps::for_each`] for `buffer`.
pub fn for_each_not_forked(buffer: &mut [u8], mut each: impl FnMut(PageRange) -> Result<()>) -> Result<()> {
    let fd = proc_self::open(c"/proc/self/smaps", OFlags::empty())
        .map_err(|e| Error::new("open /proc/self/smaps", 0, e))?;
    let mut current = PageRange::default();
    for_each_text_line(fd.as_fd(), buffer, |text| {
        if let Some(line) = Entry::parse(text) {
            current = line.range;
        } else if let Some(flags) = text.strip_prefix(b"VmFlags:")
            && flags.split(|&b| b == b' ').any(|flag| flag == b"dc" || flag == b"wf")
        {
            each(current)?;
        }
        Ok(())
    })
}

impl AsFd for Maps {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Steps over `separator`, which must come next.
fn after<'a, 'b>(rest: &'a mut &'b [u8], separator: u8) -> Option<&'a mut &'b [u8]> {
    (rest.split_off_first()? == &separator).then_some(rest)
}

fn hex(rest: &mut &[u8]) -> Option<u64> {
    number(rest, 16)
}

fn decimal(rest: &mut &[u8]) -> Option<u64> {
    number(rest, 10)
}

fn number(rest: &mut &[u8], radix: u32) -> Option<u64> {
    let mut value: Option<u64> = None;
    while let Some(digit) = rest.first().and_then(|&b| char::from(b).to_digit(radix)) {
        value = Some(value.unwrap_or(0).checked_mul(radix.into())?.checked_add(digit.into())?);
        *rest = &rest[1..];
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_line() {
        let line =
            Entry::parse(b"7f82c000-7f83d000 r-xp 0001a000 fe:0a 9977946                    /usr/lib/a b.so")
                .unwrap();
        assert_eq!(line.range, PageRange::new(0x7f82_c000, 0x7f83_d000));
        assert_eq!(line.access, Access::READ | Access::EXECUTE);
        assert_eq!((line.offset, line.device, line.inode), (0x1a000, 0xfe << 32 | 0xa, 9_977_946));
        assert_eq!(line.name, b"/usr/lib/a b.so");
    }

    #[test]
    fn an_anonymous_shared_line() {
        let line = Entry::parse(b"1000-2000 rw-s 00000000 00:00 0 ").unwrap();
        assert_eq!(line.access, Access::READ | Access::WRITE | Access::SHARED);
        assert!(line.name.is_empty() && line.inode == 0);
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in ["", "1000", "1000-2000", "1000-2000 rw", "x-2000 rwxp 0 0:0 0", "1000-2000 rwxp 0 00 0"] {
            assert_eq!(Entry::parse(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn reads_its_own_stack_through_any_buffer() {
        let local = 0_u8;
        let address = core::ptr::from_ref(&local).addr();
        for size in [4_300, 10_000, 1 << 20] {
            let mut found = false;
            let mut last = 0;
            Maps::open()
                .unwrap()
                .for_each(&mut vec![0; size], |line| {
                    assert!(line.range.start >= last, "in address order");
                    last = line.range.end;
                    found |= line.range.contains(address) && line.access == Access::READ | Access::WRITE;
                    Ok(())
                })
                .unwrap();
            assert!(found);
        }
    }

    #[test]
    fn queries_agree_with_the_table() {
        let maps = Maps::open().unwrap();
        let mut buffer = vec![0; 10_000];
        let mut lines = Vec::new();
        let copy = |line: Entry<'_>| {
            (line.range, line.access, line.offset, line.device, line.inode, line.name.to_vec())
        };
        maps.for_each(&mut buffer, |line| {
            lines.push(copy(line));
            Ok(())
        })
        .unwrap();
        // The heap may grow meanwhile.
        lines.retain(|line| line.4 != 0);
        assert!(lines.len() > 3);
        for line in &lines {
            for range in [line.0, PageRange::new(line.0.end - crate::PAGE, line.0.end)] {
                let mut asked = Vec::new();
                maps.for_each_in(range, &mut buffer, |line| {
                    asked.push(copy(line));
                    Ok(())
                })
                .unwrap();
                assert_eq!(asked, std::slice::from_ref(line));
            }
        }
        maps.for_each_in(PageRange::new(0, 0x1000), &mut buffer, |line| panic!("{line:?}")).unwrap();
    }

    #[test]
    fn mappings_that_are_not_forked_are_found() {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
        // SAFETY: a fresh mapping of our own.
        let address = unsafe {
            let fresh =
                mmap_anonymous(core::ptr::null_mut(), 8192, ProtFlags::READ, MapFlags::PRIVATE).unwrap();
            madvise(fresh, 4096, Advice::LinuxDontFork).unwrap();
            fresh.addr()
        };
        let mut found = Vec::new();
        for_each_not_forked(&mut vec![0; 8192], |range| {
            found.push(range);
            Ok(())
        })
        .unwrap();
        assert!(found.contains(&PageRange::new(address, address + 4096)), "{found:?}");
    }

    #[test]
    fn another_process_is_read_like_this_one() {
        let maps = Maps::of_process(rustix::process::getpid()).unwrap();
        let mut code = false;
        let address = a_function as *const () as usize;
        maps.for_each_in(PageRange::covering(address, 1), &mut [0; 8192], |entry| {
            code |= entry.access.contains(Access::EXECUTE) && entry.offset_of(address).is_some();
            Ok(())
        })
        .unwrap();
        assert!(code);
        let nobody = Pid::from_raw(i32::MAX).unwrap();
        assert_eq!(Maps::of_process(nobody).unwrap_err().errno, Errno::NOENT);
    }

    fn a_function() {}

    #[test]
    fn a_whole_text_is_parsed_and_fields_of_smaps_are_skipped() {
        let text =
            b"1000-3000 r-xp 00001000 fe:00 7  /usr/bin/x\nSize:   8 kB\n4000-5000 rw-p 00000000 00:00 0 \n";
        let found: Vec<_> = entries(text).collect();
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].offset_of(0x2010), found[0].offset_of(0x3000)), (Some(0x2010), None));
        // A file may call itself anything, also the end of such a line.
        let odd = Entry::parse(b"1000-2000 r--p fffffffffffffff0 00:00 1 /x").unwrap();
        assert_eq!((odd.offset_of(0x100f), odd.offset_of(0x1010)), (Some(u64::MAX), None));
        assert_eq!(found[1].name, b"");
    }

    #[test]
    fn a_short_buffer_is_an_error() {
        let error = Maps::open().unwrap().for_each(&mut [0; 20], |_| Ok(())).unwrap_err();
        assert_eq!(error.errno, Errno::TOOBIG);
    }
}
