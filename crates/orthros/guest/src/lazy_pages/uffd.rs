//! A userfaultfd(2) that a restored process waits on for its pages.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use anyhow::{Context as _, Result, bail};
use linux_raw_sys::general::{
    UFFD_EVENT_FORK, UFFD_EVENT_PAGEFAULT, UFFD_EVENT_REMAP, UFFD_EVENT_REMOVE, UFFD_EVENT_UNMAP,
    UFFD_FEATURE_EVENT_FORK, UFFD_FEATURE_EVENT_REMAP, UFFD_FEATURE_EVENT_REMOVE, UFFD_FEATURE_EVENT_UNMAP,
    uffd_msg, uffdio_api, uffdio_copy, uffdio_range, uffdio_zeropage,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_COPY, UFFDIO_WAKE, UFFDIO_ZEROPAGE};
use orrery_orthros_images::PAGE;
use rustix::io::Errno;

/// What a process does that concerns its pages.
#[derive(Debug)]
pub(crate) enum Event {
    /// It waits for the page at this address.
    Fault(u64),
    /// It has made a child, which waits for the same pages.
    Forked(Userfaultfd),
    /// It has moved so many bytes.
    Moved { from: u64, to: u64, length: u64 },
    /// It has given back what lay from here to there.
    Dropped { start: u64, end: u64 },
}

/// What became of pages that were brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copied {
    /// So many bytes are there; the rest may be tried at once.
    Bytes(u64),
    /// The first page was there already.
    There,
    /// The process is changing its mappings: first its events are to be read.
    Changing,
    /// The process has ended.
    Ended,
}

/// Where a process waits for pages.
#[derive(Debug)]
pub(crate) struct Userfaultfd(File);

/// What it must tell besides pages that are waited for: what criu asks for as well.
const FEATURES: u32 =
    UFFD_FEATURE_EVENT_FORK | UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_REMOVE | UFFD_FEATURE_EVENT_UNMAP;
/// `UFFD_API`.
const VERSION: u64 = 0xaa;

impl From<OwnedFd> for Userfaultfd {
    fn from(descriptor: OwnedFd) -> Self {
        Self(File::from(descriptor))
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Userfaultfd {
    /// One for this process; nothing where this kernel, or this user's rights, give none that tells all that is needed.
    pub(crate) fn open() -> Option<Self> {
        // SAFETY: no pointers are involved.
        let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        let descriptor = i32::try_from(descriptor).ok().filter(|&descriptor| descriptor >= 0)?;
        // SAFETY: it is new, and nobody else's.
        let made = Self::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
        let mut api = uffdio_api { api: VERSION, features: FEATURES.into(), ioctls: 0 };
        made.call(UFFDIO_API, &mut api).ok()?;
        Some(made)
    }

    /// One ioctl(2) of `linux/userfaultfd.h`.
    fn call<T>(&self, request: u32, argument: &mut T) -> Result<(), Errno> {
        // SAFETY: each request is passed the structure that its number stands for, which is readable and writable; what the
        // structures tell of is memory of another process, and for a copy memory that the caller knows to be there.
        let result = unsafe {
            libc::ioctl(self.0.as_raw_fd(), libc::Ioctl::from(request), std::ptr::from_mut(argument))
        };
        if result == 0 {
            return Ok(());
        }
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
    }

    /// What came of a call that tells how many bytes it got done.
    fn copied(result: Result<(), Errno>, done: i64) -> Result<Copied> {
        Ok(match result {
            Ok(()) => Copied::Bytes(done.unsigned_abs()),
            Err(Errno::AGAIN) if done > 0 => Copied::Bytes(done.unsigned_abs()),
            Err(Errno::AGAIN) => Copied::Changing,
            Err(Errno::EXIST) => Copied::There,
            Err(Errno::SRCH) => Copied::Ended,
            Err(error) => bail!("{error}"),
        })
    }

    /// Puts bytes into pages that are not there, and wakes who waits for them.
    ///
    /// # Errors
    ///
    /// What the kernel says: there is no such mapping, or no memory.
    ///
    /// # Safety
    ///
    /// `length` bytes can be read at `from`, whoever else may write them.
    pub(crate) unsafe fn copy(&self, from: *const u8, to: u64, length: u64) -> Result<Copied> {
        let src = from.expose_provenance() as u64;
        let mut request = uffdio_copy { dst: to, src, len: length, mode: 0, copy: 0 };
        let result = self.call(UFFDIO_COPY, &mut request);
        Self::copied(result, request.copy).with_context(|| format!("cannot bring {length} bytes to {to:#x}"))
    }

    /// Puts zeros into a page that is not there, and wakes who waits for it.
    ///
    /// # Errors
    ///
    /// As [`copy`](Self::copy).
    pub(crate) fn zero(&self, page: u64) -> Result<Copied> {
        let range = uffdio_range { start: page, len: PAGE };
        let mut request = uffdio_zeropage { range, mode: 0, zeropage: 0 };
        let result = self.call(UFFDIO_ZEROPAGE, &mut request);
        Self::copied(result, request.zeropage).with_context(|| format!("cannot bring zeros to {page:#x}"))
    }

    /// Wakes who waits for a page that is there.
    pub(crate) fn wake(&self, page: u64) {
        let _ = self.call(UFFDIO_WAKE, &mut uffdio_range { start: page, len: PAGE });
    }

    /// What has happened since it was last asked, if anything; it is not waited for.
    ///
    /// # Errors
    ///
    /// Where it cannot be read, or tells of something unknown.
    pub(crate) fn event(&mut self) -> Result<Option<Event>> {
        let mut bytes = [0_u8; size_of::<uffd_msg>()];
        match self.0.read(&mut bytes) {
            Ok(length) if length == bytes.len() => {}
            Ok(length) => bail!("an event of {length} bytes"),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error).context("cannot read what a process waits for"),
        }
        // SAFETY: it is plain numbers, of which any bytes are some, and as long.
        let message: uffd_msg = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
        let argument = message.arg;
        // SAFETY: each event tells by its number which of the arguments it has; all of them are numbers.
        Ok(Some(unsafe {
            match u32::from(message.event) {
                UFFD_EVENT_PAGEFAULT => Event::Fault(argument.pagefault.address & !(PAGE - 1)),
                UFFD_EVENT_FORK => {
                    let descriptor = i32::try_from(argument.fork.ufd).context("no descriptor of a child")?;
                    Event::Forked(OwnedFd::from_raw_fd(descriptor).into())
                }
                UFFD_EVENT_REMAP => {
                    let it = argument.remap;
                    Event::Moved { from: it.from, to: it.to, length: it.len }
                }
                UFFD_EVENT_REMOVE | UFFD_EVENT_UNMAP => {
                    Event::Dropped { start: argument.remove.start, end: argument.remove.end }
                }
                other => bail!("an event of number {other}"),
            }
        }))
    }
}
