//! The parent's end of a context's filter, at which trapped system calls arrive (seccomp_unotify(2)).

use std::os::fd::OwnedFd;

use orrery_sys::notify;
use rustix::io::Errno;

use crate::rights::Rights;
use crate::types::Call;

/// What becomes of a call that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It returns this, or fails with it where it is -4095 to -1, as the kernel's own calls do.
    Returns(i64),
    /// It goes on, unchanged.
    GoesOn,
}

/// The parent's hold of a context whose calls it hears.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) calls: notify::Listener,
    /// Its memory, as long as the right to all of it was not given up.
    pub(crate) memory: Option<OwnedFd>,
    /// What of it is ours to use: the system calls that we may make for it.
    pub(crate) rights: Rights,
    /// The calls that wait for an answer, by logical thread, and their kernel's numbers.
    pub(crate) pending: Vec<(u32, u64, Call)>,
    /// Calls that are still to be reported to logical threads of ours.
    pub(crate) kept: Vec<(u32, u64, Call)>,
    /// Nobody is behind it any more.
    pub(crate) is_over: bool,
}

impl Listener {
    pub(crate) fn new(fd: OwnedFd, memory: OwnedFd) -> Self {
        Self {
            calls: notify::Listener::new(fd),
            memory: Some(memory),
            rights: Rights::all(),
            pending: Vec::new(),
            kept: Vec::new(),
            is_over: false,
        }
    }

    /// Answers a call, with the kernel's ID of the notification.
    pub(crate) fn answer(&self, id: u64, answer: Answer) {
        // It fails where the context is dead by now, as the context that waits for it will notice.
        let _ = match answer {
            Answer::Returns(error @ -4095..=-1) => {
                let errno = i32::try_from(-error).map_or(Errno::IO, Errno::from_raw_os_error);
                self.calls.answer(id, Err(errno))
            }
            Answer::Returns(value) => self.calls.answer(id, Ok(value)),
            Answer::GoesOn => self.calls.proceed(id),
        };
    }
}
