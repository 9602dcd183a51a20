//! Signals as something to poll ([`signalfd(2)`](https://man7.org/linux/man-pages/man2/signalfd.2.html)).

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// What a signal asks of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopSignal {
    /// `SIGTERM`, `SIGINT` or `SIGHUP`.
    Stop,
}

/// Delivers the server's signals.
#[derive(Debug)]
pub(super) struct SignalFd(OwnedFd);

impl SignalFd {
    /// Blocks the signals in this thread and opens a descriptor for them.
    pub(super) fn new() -> io::Result<Self> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: `sigemptyset` initialises the set before anything reads it; all pointers are to live locals.
        let fd = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            if libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) == -1 {
                return Err(io::Error::last_os_error());
            }
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if fd == -1 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, owned by nobody else.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Takes the next pending signal, if any.
    pub(super) fn take(&self) -> io::Result<Option<StopSignal>> {
        let mut record = [0_u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.0, &mut record) {
            Ok(_) => Ok(Some(StopSignal::Stop)),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for SignalFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
