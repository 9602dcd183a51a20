//! The signals that stop the server, as something to poll.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use orrery_sys::signals::{descriptor, mask_of};

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
        let stop = mask_of(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP]);
        Ok(Self(descriptor(stop).map_err(|error| error.errno)?))
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
