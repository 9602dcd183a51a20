//! userfaultfd for pages that are missing: another process waits at a fault until this one supplies the page.
//!
//! The waiting process opens the descriptor, registers its memory with `UFFDIO_REGISTER_MODE_MISSING` and passes the
//! descriptor to the process that has the pages. That one reads events and answers faults with [`MissingPages::copy`]
//! and [`MissingPages::zero`].

use std::os::fd::{AsFd, BorrowedFd, FromRawFd as _, OwnedFd};

use linux_raw_sys::general::{
    UFFD_EVENT_FORK, UFFD_EVENT_PAGEFAULT, UFFD_EVENT_REMAP, UFFD_EVENT_REMOVE, UFFD_EVENT_UNMAP,
    UFFD_FEATURE_EVENT_FORK, UFFD_FEATURE_EVENT_REMAP, UFFD_FEATURE_EVENT_REMOVE, UFFD_FEATURE_EVENT_UNMAP,
    uffd_msg, uffdio_copy, uffdio_zeropage,
};
use rustix::io::Errno;
use rustix::ioctl::ioctl;
use rustix::mm::{UserfaultfdFlags, userfaultfd};

use super::{Api, Range, ReadRequest, Request, UFFD_API};
use crate::{Error, PAGE, PageRange, Result};

/// What a process with missing pages did.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// It waits for the page at this address.
    Fault(u64),
    /// It forked a child, which lacks the same pages.
    Fork(MissingPages),
    /// It moved mappings (mremap(2)).
    Remap {
        /// The lowest address before the move.
        from: u64,
        /// The lowest address after the move.
        to: u64,
        /// The number of bytes.
        length: u64,
    },
    /// It dropped or unmapped pages (madvise(2), munmap(2)).
    Remove {
        /// The first address.
        start: u64,
        /// The address behind the last.
        end: u64,
    },
}

/// The result of an attempt to supply pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Supplied {
    /// So many bytes were supplied. The rest may be tried at once.
    Bytes(u64),
    /// The first page is present already.
    Present,
    /// The process is changing its mappings: its events must be read first.
    Changing,
    /// The process has ended.
    Exited,
}

/// A userfaultfd of a process whose pages are missing.
#[derive(Debug)]
pub struct MissingPages {
    fd: OwnedFd,
}

/// The events besides faults that are reported; criu(8) asks for the same.
const FEATURES: u32 =
    UFFD_FEATURE_EVENT_FORK | UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_REMOVE | UFFD_FEATURE_EVENT_UNMAP;

impl From<OwnedFd> for MissingPages {
    /// Wraps a userfaultfd that was received from another process.
    fn from(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

impl AsFd for MissingPages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl MissingPages {
    /// Opens one for the calling process that reports all events.
    ///
    /// # Errors
    /// `EPERM` without the privilege that the events and faults in kernel mode need, `ENOSYS`, `EINVAL`.
    pub fn open() -> Result<Self> {
        // SAFETY: a new descriptor without registrations affects no memory.
        let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }
            .map_err(|errno| Error::new("userfaultfd", 0, errno))?;
        let mut api = Api { api: UFFD_API, features: FEATURES.into(), ioctls: 0 };
        // SAFETY: UFFDIO_API is request 0x3f on `struct uffdio_api`, which `Api` mirrors.
        unsafe { ioctl(&fd, Request::<_, 0x3f>(&mut api)) }
            .map_err(|errno| Error::new("UFFDIO_API(EVENT_*)", 0, errno))?;
        Ok(Self { fd })
    }

    /// Supplies the missing pages at `to` with the `length` bytes at `from`, and wakes the threads that wait for them.
    ///
    /// # Errors
    /// `ENOENT` if nothing is registered at `to`, `ENOMEM`.
    ///
    /// # Safety
    /// `length` bytes must be readable at `from`. Others may write them at the same time.
    pub unsafe fn copy(&self, from: *const u8, to: u64, length: u64) -> Result<Supplied> {
        let src = from.expose_provenance() as u64;
        let mut request = uffdio_copy { dst: to, src, len: length, mode: 0, copy: 0 };
        // SAFETY: UFFDIO_COPY is request 3 on `struct uffdio_copy`. The kernel reads `length` bytes at `from`, which
        // the caller vouches for, and fills only pages that are missing.
        let result = unsafe { ioctl(&self.fd, Request::<_, 0x03>(&mut request)) };
        supplied(result, request.copy).map_err(|errno| Error::new("UFFDIO_COPY", address(to), errno))
    }

    /// Supplies the missing page at `page` with zeros, and wakes the threads that wait for it.
    ///
    /// # Errors
    /// Those of [`MissingPages::copy`].
    pub fn zero(&self, page: u64) -> Result<Supplied> {
        let range = linux_raw_sys::general::uffdio_range { start: page, len: PAGE as u64 };
        let mut request = uffdio_zeropage { range, mode: 0, zeropage: 0 };
        // SAFETY: UFFDIO_ZEROPAGE is request 4 on `struct uffdio_zeropage`; it fills only pages that are missing.
        let result = unsafe { ioctl(&self.fd, Request::<_, 0x04>(&mut request)) };
        supplied(result, request.zeropage)
            .map_err(|errno| Error::new("UFFDIO_ZEROPAGE", address(page), errno))
    }

    /// Wakes the threads that wait for a page that is present. A process that has ended needs no wake, so errors are
    /// ignored.
    pub fn wake(&self, page: u64) {
        let mut range = Range { start: page, len: PAGE as u64 };
        // SAFETY: UFFDIO_WAKE is the read-only request 2 on `struct uffdio_range`; it changes no memory.
        let _ = unsafe { ioctl(&self.fd, ReadRequest::<0x02>(&mut range)) };
    }

    /// Registers `range` of the calling process: accesses to missing pages wait from now on.
    ///
    /// # Errors
    /// `EINVAL` if the mapping cannot be registered, `EBUSY` if another userfaultfd has it, `ENOMEM`.
    ///
    /// # Safety
    /// Another thread or process must supply the pages, or the threads that touch them wait for ever.
    pub unsafe fn register(&self, range: PageRange) -> Result<()> {
        const MODE_MISSING: u64 = 1;
        super::register(&self.fd, range, MODE_MISSING)
    }

    /// Returns the next event if there is one; does not wait.
    ///
    /// # Errors
    /// `EBADMSG` for an event that is not known, and those of read(2).
    pub fn event(&self) -> Result<Option<Event>> {
        let mut bytes = [0_u8; size_of::<uffd_msg>()];
        let failed = |errno| Error::new("read userfaultfd", 0, errno);
        match rustix::io::retry_on_intr(|| rustix::io::read(&self.fd, &mut bytes)) {
            Ok(length) if length == bytes.len() => {}
            Ok(_) => return Err(failed(Errno::BADMSG)),
            Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(failed(errno)),
        }
        // SAFETY: the structure consists of integers, for which any bytes are valid, and `bytes` is as long.
        let message: uffd_msg = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
        let argument = message.arg;
        // SAFETY: the event says which field of the union the kernel filled in; all are integers. The descriptor of a
        // forked child is new and belongs to the reader of the event.
        let event = unsafe {
            match u32::from(message.event) {
                UFFD_EVENT_PAGEFAULT => Event::Fault(argument.pagefault.address & !(PAGE as u64 - 1)),
                UFFD_EVENT_FORK => {
                    let fd = i32::try_from(argument.fork.ufd).map_err(|_| failed(Errno::BADMSG))?;
                    Event::Fork(OwnedFd::from_raw_fd(fd).into())
                }
                UFFD_EVENT_REMAP => {
                    let remap = argument.remap;
                    Event::Remap { from: remap.from, to: remap.to, length: remap.len }
                }
                UFFD_EVENT_REMOVE | UFFD_EVENT_UNMAP => {
                    Event::Remove { start: argument.remove.start, end: argument.remove.end }
                }
                _ => return Err(failed(Errno::BADMSG)),
            }
        };
        Ok(Some(event))
    }
}

/// Interprets the result of a request that reports how many bytes it supplied.
fn supplied(result: rustix::io::Result<()>, done: i64) -> rustix::io::Result<Supplied> {
    match result {
        Ok(()) => Ok(Supplied::Bytes(done.unsigned_abs())),
        Err(Errno::AGAIN) if done > 0 => Ok(Supplied::Bytes(done.unsigned_abs())),
        Err(Errno::AGAIN) => Ok(Supplied::Changing),
        Err(Errno::EXIST) => Ok(Supplied::Present),
        Err(Errno::SRCH) => Ok(Supplied::Exited),
        Err(errno) => Err(errno),
    }
}

fn address(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

    #[test]
    fn a_fault_waits_for_its_page() {
        let Ok(missing) = MissingPages::open() else {
            orrery_testing::skipped!("userfaultfd with events needs privilege here");
            return;
        };
        let flags = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping replaces no mapping.
        let memory = unsafe { mmap_anonymous(std::ptr::null_mut(), 3 * PAGE, flags.0, flags.1) }.unwrap();
        let start = memory.expose_provenance();
        let range = PageRange::covering(start, 3 * PAGE);
        // SAFETY: the loop below supplies what is touched.
        unsafe { missing.register(range).unwrap() };
        let touched = std::thread::spawn(move || {
            let at = |page: usize| std::ptr::with_exposed_provenance::<u8>(start + page * PAGE + 5);
            // SAFETY: the mapping stays until the end of the process.
            unsafe { (at(0).read_volatile(), at(1).read_volatile()) }
        });
        let content = [7_u8; PAGE];
        let mut faults = Vec::new();
        orrery_testing::eventually("both faults", || {
            if let Some(Event::Fault(page)) = missing.event().unwrap() {
                let result = if faults.is_empty() {
                    // SAFETY: `content` has a page.
                    unsafe { missing.copy(content.as_ptr(), page, PAGE as u64) }
                } else {
                    missing.zero(page)
                };
                assert_eq!(result, Ok(Supplied::Bytes(PAGE as u64)));
                assert_eq!(missing.zero(page), Ok(Supplied::Present));
                missing.wake(page);
                faults.push(page);
            }
            faults.len() == 2
        });
        assert_eq!(faults, [start as u64, (start + PAGE) as u64]);
        assert_eq!(touched.join().unwrap(), (7, 0));
    }
}
