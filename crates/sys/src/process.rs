//! Facts about the calling process, found in a microsecond and without allocating (proc_pid_statm(5),
//! proc_pid_task(5), brk(2)).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use syscalls::{Sysno, syscall};

use crate::descriptors::raise;
use crate::{Error, Result, proc_self};

/// Opens `path` under `/proc/self` for repeated reading.
fn open(path: &core::ffi::CStr, flags: OFlags) -> Result<OwnedFd> {
    proc_self::open(path, flags).map_err(|e| Error::new("open /proc/self", 0, e))
}

/// Sizes of the calling process, in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// All mappings together (`VmSize`): exact, so that an equal number means that nothing was unmapped net of what was
    /// mapped.
    pub mapped: usize,
    /// Pages in memory (`VmRSS`); kernels may batch its updates.
    pub resident: usize,
    /// Private writable mappings (`VmData` and stack), which RLIMIT_DATA bounds.
    pub data: usize,
}

/// The open file `/proc/self/statm`.
#[derive(Debug)]
pub struct Statm {
    fd: OwnedFd,
}

impl Statm {
    /// Opens the calling process' file; a forked child must open its own.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn open() -> Result<Self> {
        Ok(Self { fd: raise(open(c"/proc/self/statm", OFlags::empty())?) })
    }

    /// Reads the sizes.
    ///
    /// # Errors
    /// Those of pread(2); `EBADMSG` where the text makes no sense.
    pub fn read(&self) -> Result<Sizes> {
        let mut buffer = [0_u8; 128];
        let read = rustix::io::retry_on_intr(|| rustix::io::pread(&self.fd, &mut buffer, 0))
            .map_err(|e| Error::new("pread /proc/self/statm", 0, e))?;
        let mut numbers = buffer[..read].split(|b| !b.is_ascii_digit()).map(|digits| {
            digits.iter().fold(0_usize, |n, d| n.wrapping_mul(10).wrapping_add(usize::from(d - b'0')))
        });
        let mut field = |skip| {
            numbers.nth(skip).ok_or(Error::new("parse /proc/self/statm", skip, rustix::io::Errno::BADMSG))
        };
        Ok(Sizes { mapped: field(0)?, resident: field(0)?, data: field(3)? })
    }
}

impl AsFd for Statm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// How a thread is (proc_pid_status(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    /// The signals that it blocks.
    pub blocked: crate::signals::Mask,
    /// Its state: `R` (runs, or waits for a processor), `S` (sleeps), `D` (sleeps and takes no signal), others.
    pub state: u8,
    /// How long it ran, in milliseconds, counted in ticks.
    pub processor_time: u64,
}

/// The open directory `/proc/self/task`.
#[derive(Debug)]
pub struct Threads {
    fd: OwnedFd,
}

impl Threads {
    /// Opens the calling process' directory of threads; a forked child must open its own.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn open() -> Result<Self> {
        Ok(Self { fd: raise(open(c"/proc/self/task", OFlags::DIRECTORY)?) })
    }

    /// Returns how many threads there are, the calling one included: one system call.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn count(&self) -> Result<usize> {
        let links =
            rustix::fs::fstat(&self.fd).map_err(|e| Error::new("fstat /proc/self/task", 0, e))?.st_nlink;
        // The directory has one link for itself, one in its parent, and one per thread.
        Ok(usize::try_from(links).unwrap_or(usize::MAX).saturating_sub(2))
    }

    /// Returns how thread `thread` is, from its `status` and `stat` files; `None` where it has ended.
    pub fn condition(&self, thread: i32) -> Option<Condition> {
        let mut condition = Condition { blocked: 0, state: b'?', processor_time: 0 };
        let mut line = Text::<64>::default();
        let mut known = false;
        self.read(thread, "status", |byte| {
            use core::fmt::Write;
            if byte != b'\n' {
                // What is longer is of no interest.
                let _ = line.write_char(char::from(byte));
                return;
            }
            let text = core::str::from_utf8(line.as_bytes()).unwrap_or_default();
            match text.split_once(':').map(|(name, value)| (name, value.trim())) {
                Some(("State", value)) => condition.state = value.as_bytes().first().copied().unwrap_or(b'?'),
                Some(("SigBlk", value)) => {
                    known = u64::from_str_radix(value, 16).map(|mask| condition.blocked = mask).is_ok();
                }
                _ => {}
            }
            line = Text::default();
        })?;
        // Field 2 is the name, in parentheses, and may hold any other byte; 14 and 15 are times, in USER_HZ.
        let (mut field, mut number) = (0, 0_u64);
        self.read(thread, "stat", |byte| match byte {
            b')' => (field, number) = (2, 0),
            b' ' => {
                if matches!(field, 14 | 15) {
                    condition.processor_time += number * 10;
                }
                (field, number) = (field + 1, 0);
            }
            digit => number = number.wrapping_mul(10).wrapping_add(u64::from(digit.wrapping_sub(b'0'))),
        })?;
        (known && !matches!(condition.state, b'Z' | b'X')).then_some(condition)
    }

    /// Calls `each` with every byte of a file of thread `thread`.
    fn read(&self, thread: i32, name: &str, each: impl FnMut(u8)) -> Option<()> {
        use core::fmt::Write;
        let mut path = Text::<32>::default();
        write!(path, "{thread}/{name}").ok()?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.fd, path.as_bytes(), flags, rustix::fs::Mode::empty()).ok()?;
        read_from_start(&file, "pread /proc/self/task", each).ok()
    }

    /// Calls `each` with every thread's number.
    ///
    /// # Errors
    /// Those of getdents64(2).
    pub fn for_each(&self, each: impl FnMut(i32)) -> Result<()> {
        for_each_number(self.fd.as_fd(), each)
    }
}

impl AsFd for Threads {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Calls `each` with every open descriptor of the calling process, from `/proc/self/fd`.
///
/// # Errors
/// Those of open(2) and getdents64(2).
pub fn for_each_descriptor(mut each: impl FnMut(i32)) -> Result<()> {
    use std::os::fd::AsRawFd;
    let directory = open(c"/proc/self/fd", OFlags::DIRECTORY)?;
    let own = directory.as_raw_fd();
    for_each_number(directory.as_fd(), |fd| {
        if fd != own {
            each(fd);
        }
    })
}

/// `/proc/self/fd`, kept open, which counts what it lists (Linux 6.2).
#[derive(Debug)]
pub struct Descriptors {
    fd: OwnedFd,
    /// The device and the inode.
    identity: (u64, u64),
    counts: bool,
}

impl Descriptors {
    /// Opens the calling process' directory of descriptors; a forked child must open its own.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn open() -> Result<Self> {
        let fd = raise(open(c"/proc/self/fd", OFlags::DIRECTORY)?);
        let found = rustix::fs::fstat(&fd).map_err(|e| Error::new("fstat /proc/self/fd", 0, e))?;
        let mut this = Self { fd, identity: (found.st_dev, found.st_ino), counts: true };
        // Other threads may come in between.
        this.counts = (0..8).any(|_| {
            let before = this.count();
            let _one_more = rustix::io::fcntl_dupfd_cloexec(&this.fd, 0);
            before.is_some_and(|before| this.count() == Some(before + 1))
        });
        Ok(this)
    }

    /// Returns how many descriptors are open, this one included: one system call. None where the kernel does not
    /// tell, or the descriptor was closed and its number is another file's.
    pub fn count(&self) -> Option<usize> {
        let found = rustix::fs::fstat(&self.fd).ok()?;
        let same = self.identity == (found.st_dev, found.st_ino);
        usize::try_from(found.st_size).ok().filter(|_| same && self.counts)
    }
}

/// `/proc/self/task/TID/children`, kept open: the child processes that one thread started or was given.
#[derive(Debug)]
pub struct Children {
    fd: OwnedFd,
}

impl Children {
    /// Opens the list of thread `thread` of the calling process.
    ///
    /// # Errors
    /// `ENOENT` on kernels built without that file.
    pub fn open(thread: i32) -> Result<Self> {
        use core::fmt::Write;
        let mut path = Text::<64>::default();
        let _ = write!(path, "/proc/self/task/{thread}/children");
        proc_self::open(path.as_bytes(), OFlags::empty())
            .map(|fd| Self { fd: raise(fd) })
            .map_err(|e| Error::new("open /proc/self/task/children", usize::try_from(thread).unwrap_or(0), e))
    }

    /// Calls `each` with every child's process id, zombies included.
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn for_each(&self, mut each: impl FnMut(i32)) -> Result<()> {
        let mut number = 0;
        read_from_start(&self.fd, "pread /proc/self/task/children", |byte| {
            if byte.is_ascii_digit() {
                number = number * 10 + i32::from(byte - b'0');
            } else if number != 0 {
                each(number);
                number = 0;
            }
        })
    }
}

/// Calls `each` with every byte of a file of `/proc`, one of those that the kernel writes record by record (`seq_file`).
///
/// Such a file fills what it is given: it goes on until that is full or there is no more, and has a page for that, into which
/// these files' records fit many times. So a short answer is the last one.
pub(crate) fn read_from_start(fd: &OwnedFd, operation: &'static str, mut each: impl FnMut(u8)) -> Result<()> {
    let mut buffer = [0_u8; 512];
    let mut offset = 0;
    loop {
        let read = rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut buffer, offset))
            .map_err(|e| Error::new(operation, 0, e))?;
        buffer[..read].iter().copied().for_each(&mut each);
        offset += read as u64;
        if read < buffer.len() {
            return Ok(());
        }
    }
}

/// What a file of `/proc` said, if that was less than `N` bytes.
#[derive(Clone, Copy)]
pub struct Contents<const N: usize> {
    bytes: [u8; N],
    length: usize,
}

impl<const N: usize> Contents<N> {
    /// Those of a file that was not read.
    pub const UNKNOWN: Self = Self { bytes: [0; N], length: 0 };

    /// Returns the text; none where it was not read, or there is more of it.
    pub fn whole(&self) -> Option<&[u8]> {
        self.bytes.get(..self.length).filter(|text| !text.is_empty() && text.len() < N)
    }

    /// Returns as much of the text as there is room for.
    pub fn beginning(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// Returns what stands after `name` (`Umask:`, say) in the line that begins so.
    pub fn after(&self, name: &[u8]) -> Option<&[u8]> {
        let mut lines = self.whole()?.split(|&byte| byte == b'\n');
        lines.find_map(|line| line.strip_prefix(name))
    }

    /// Likewise, without the spaces around it.
    pub fn value(&self, name: &[u8]) -> Option<&[u8]> {
        self.after(name).map(<[u8]>::trim_ascii)
    }

    /// Returns the set of signals in the line that begins with `name`.
    pub fn signals(&self, name: &[u8]) -> Option<crate::signals::Mask> {
        let digits = core::str::from_utf8(self.value(name)?).ok()?;
        u64::from_str_radix(digits, 16).ok()
    }
}

impl<const N: usize> core::fmt::Debug for Contents<N> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        String::from_utf8_lossy(self.whole().unwrap_or_default()).fmt(f)
    }
}

/// A file of `/proc` about the calling process, kept open, which one system call reads as a whole: the kernel writes it
/// as one record (`seq_file`).
#[derive(Debug)]
pub struct WholeFile {
    fd: OwnedFd,
}

impl WholeFile {
    /// Opens `status` of thread `thread`: names, credentials, signals, and more (proc_pid_status(5)).
    ///
    /// # Errors
    /// Those of open(2).
    pub fn status(thread: i32) -> Result<Self> {
        use core::fmt::Write;
        let mut path = Text::<64>::default();
        let _ = write!(path, "/proc/self/task/{thread}/status");
        let fd = proc_self::open(path.as_bytes(), OFlags::empty());
        fd.map(|fd| Self { fd: raise(fd) }).map_err(|e| Error::new("open /proc/self/task/status", 0, e))
    }

    /// Opens `limits`: the resource limits, all of them (proc_pid_limits(5)).
    ///
    /// # Errors
    /// Those of open(2).
    pub fn limits() -> Result<Self> {
        Ok(Self { fd: raise(open(c"/proc/self/limits", OFlags::empty())?) })
    }

    /// Returns what it says now: [`Contents::UNKNOWN`] where it cannot be read.
    pub fn read<const N: usize>(&self) -> Contents<N> {
        let mut contents = Contents::UNKNOWN;
        let read = rustix::io::retry_on_intr(|| rustix::io::pread(&self.fd, &mut contents.bytes, 0));
        contents.length = read.unwrap_or(0);
        contents
    }
}

impl AsFd for WholeFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Calls `each` with every name in `directory` that is a number.
fn for_each_number(directory: BorrowedFd<'_>, mut each: impl FnMut(i32)) -> Result<()> {
    rustix::fs::seek(directory, rustix::fs::SeekFrom::Start(0))
        .map_err(|e| Error::new("lseek /proc/self", 0, e))?;
    let mut buffer = [core::mem::MaybeUninit::<u8>::uninit(); 2048];
    let mut entries = rustix::fs::RawDir::new(directory, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry.map_err(|e| Error::new("getdents64 /proc/self", 0, e))?;
        if let Some(number) = entry.file_name().to_str().ok().and_then(|name| name.parse().ok()) {
            each(number);
        }
    }
    Ok(())
}

/// Returns the end of the heap that brk(2) manages.
pub fn program_break() -> usize {
    set_program_break(0)
}

/// Asks the kernel to move the end of the heap to `address` and returns where it is then: unchanged if the kernel
/// would not.
///
/// Moving it down unmaps memory: the caller puts the program's own memory back.
pub(crate) fn set_program_break(address: usize) -> usize {
    // SAFETY: 0 changes nothing; for anything else the public wrapper's contract holds.
    unsafe { syscall!(Sysno::brk, address) }.unwrap_or(0)
}

/// Moves the end of the heap to `address`.
///
/// # Errors
/// `ENOMEM` where the kernel would not.
///
/// # Safety
/// Where this shrinks the heap, nothing may use the memory behind `address` any more.
pub unsafe fn move_program_break(address: usize) -> Result<()> {
    if set_program_break(address) == address {
        Ok(())
    } else {
        Err(Error::new("brk", address, rustix::io::Errno::NOMEM))
    }
}

/// A short text on the stack.
struct Text<const N: usize> {
    bytes: [u8; N],
    length: usize,
}

impl<const N: usize> Default for Text<N> {
    fn default() -> Self {
        Self { bytes: [0; N], length: 0 }
    }
}

impl<const N: usize> Text<N> {
    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl<const N: usize> core::fmt::Write for Text<N> {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let end = self.length + text.len();
        self.bytes.get_mut(self.length..end).ok_or(core::fmt::Error)?.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}

/// Asks before a file is made so long, or written up to there: who goes beyond `RLIMIT_FSIZE` is not only refused but
/// also sent `SIGXFSZ` (setrlimit(2)), which ends a program that did not expect it.
///
/// # Errors
/// `EFBIG` where the limit is lower.
pub fn file_may_end_at(end: u64) -> rustix::io::Result<()> {
    match rustix::process::getrlimit(rustix::process::Resource::Fsize).current {
        Some(most) if most < end => Err(rustix::io::Errno::FBIG),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_seen_to_block_signals() {
        let threads = Threads::open().unwrap();
        let own = rustix::thread::gettid().as_raw_pid();
        let before = crate::signals::set_mask(crate::signals::mask_of(&[libc::SIGUSR2, 64]));
        let condition = threads.condition(own).unwrap();
        crate::signals::set_mask(before);
        assert_eq!(condition.blocked, crate::signals::mask_of(&[libc::SIGUSR2, 64]));
        assert_eq!(condition.state, b'R');
        while threads.condition(own).unwrap().processor_time < condition.processor_time + 30 {
            std::hint::spin_loop();
        }
        let ended = std::thread::spawn(|| rustix::thread::gettid().as_raw_pid()).join().unwrap();
        while threads.condition(ended).is_some() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn status_and_limits_are_read_as_a_whole() {
        let thread = std::thread::Builder::new().name("its name".to_owned());
        let thread = thread.spawn(|| {
            let status = WholeFile::status(rustix::thread::gettid().as_raw_pid()).unwrap();
            let before = crate::signals::set_mask(crate::signals::mask_of(&[libc::SIGUSR2, 64]));
            let contents = status.read::<4096>();
            crate::signals::set_mask(before);
            assert_eq!(contents.signals(b"SigBlk:"), Some(crate::signals::mask_of(&[libc::SIGUSR2, 64])));
            assert_eq!(contents.value(b"Name:"), Some(&b"its name"[..]));
            assert_eq!(contents.value(b"Nothing:"), None);
            // What is cut off is not known.
            let part = status.read::<64>();
            assert_eq!((part.whole(), part.value(b"Name:")), (None, None));
            assert_eq!(part.beginning(), &contents.beginning()[..64]);
        });
        thread.unwrap().join().unwrap();
        let limits = WholeFile::limits().unwrap();
        let limits = limits.read::<2048>();
        let text = core::str::from_utf8(limits.whole().unwrap()).unwrap();
        // A heading, and a line for each limit.
        assert_eq!(text.lines().count(), 17, "{text}");
        assert_eq!(Contents::<64>::UNKNOWN.whole(), None);
    }

    #[test]
    fn threads_are_counted() {
        let threads = Threads::open().unwrap();
        let before = threads.count().unwrap();
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || receiver.recv());
        let mut listed = Vec::new();
        threads.for_each(|id| listed.push(id)).unwrap();
        assert!(threads.count().unwrap() > before.min(listed.len() - 1));
        assert!(listed.contains(&rustix::thread::gettid().as_raw_pid()));
        drop(sender);
        let _ = thread.join();
    }

    #[test]
    fn descriptors_are_listed() {
        use std::os::fd::AsRawFd;
        let file = std::fs::File::open("/dev/null").unwrap();
        let mut listed = Vec::new();
        for_each_descriptor(|fd| listed.push(fd)).unwrap();
        assert!(listed.contains(&file.as_raw_fd()) && listed.contains(&0));
    }

    #[test]
    fn descriptors_are_counted() {
        use std::os::fd::AsRawFd;
        const WRONG: i32 = 1;
        const NOT_TOLD: i32 = 2;
        // In a process that has no other thread.
        // SAFETY: the child ends without running anything of the test's process.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let right = || {
                let descriptors = Descriptors::open().ok()?;
                if !descriptors.counts {
                    return Some(NOT_TOLD);
                }
                let mut listed = 0;
                for_each_descriptor(|_| listed += 1).ok()?;
                let before = descriptors.count()?;
                let more = [0; 3].map(|_| rustix::io::dup(&descriptors.fd));
                let after = descriptors.count()?;
                drop(more);
                let other = open(c"/proc", OFlags::DIRECTORY).ok()?;
                // SAFETY: the number is this process' alone, and stays open.
                let number = unsafe { libc::dup2(other.as_raw_fd(), descriptors.fd.as_raw_fd()) };
                let replaced = number >= 0 && descriptors.count().is_none();
                Some(if before == listed && after == listed + 3 && replaced { 0 } else { WRONG })
            };
            let status = right().unwrap_or(WRONG);
            // SAFETY: ends the child at once; exit handlers of the parent do not run.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: a plain wait for our own child.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert!(libc::WIFEXITED(status), "{status:#x}");
        if libc::WEXITSTATUS(status) == NOT_TOLD {
            return orrery_testing::skipped!("the kernel does not count descriptors");
        }
        assert_eq!(status, 0);
    }

    #[test]
    fn children_are_listed() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let id = i32::try_from(child.id()).unwrap();
        let mut listed = Vec::new();
        let children = Children::open(rustix::thread::gettid().as_raw_pid()).unwrap();
        children.for_each(|pid| listed.push(pid)).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(listed.contains(&id), "{id} in {listed:?}");
    }

    #[test]
    fn sizes_grow_with_a_mapping() {
        let statm = Statm::open().unwrap();
        let before = statm.read().unwrap();
        let memory = vec![1_u8; 64 << 20];
        let after = statm.read().unwrap();
        assert!(after.mapped >= before.mapped + (60 << 20) / crate::PAGE, "{before:?} {after:?}");
        assert!(after.data > before.data && after.resident > before.resident);
        drop(memory);
    }
}
