//! The listener of a seccomp filter, which answers the calls that the filter hands over
//! ([seccomp_unotify(2)](https://man7.org/linux/man-pages/man2/seccomp_unotify.2.html)).
//!
//! Nothing here allocates. The layout of the structures is that of Linux 5.5 and later.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use linux_raw_sys::ptrace::{
    SECCOMP_ADDFD_FLAG_SEND, SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP, SECCOMP_USER_NOTIF_FLAG_CONTINUE,
    seccomp_notif, seccomp_notif_addfd, seccomp_notif_resp,
};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use syscalls::{Sysno, syscall};

const RECEIVE: Opcode = opcode::read_write::<seccomp_notif>(b'!', 0);
const SEND: Opcode = opcode::read_write::<seccomp_notif_resp>(b'!', 1);
const ID_VALID: Opcode = opcode::write::<u64>(b'!', 2);
const ADD: Opcode = opcode::write::<seccomp_notif_addfd>(b'!', 3);
const SET_FLAGS: Opcode = opcode::write::<u64>(b'!', 4);

/// A system call whose caller waits for an answer.
#[derive(Clone, Copy, Debug)]
pub struct Notification {
    /// The kernel's cookie for this waiting call.
    pub id: u64,
    /// The thread ID of the caller, in the listener's PID namespace.
    pub thread: i32,
    /// The number of the call.
    pub number: i32,
    /// The six arguments of the call.
    pub arguments: [u64; 6],
}

/// A descriptor that receives calls and answers them.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Takes over a listener. Where the kernel can (Linux 6.6), it then switches straight to the thread that it wakes: else
    /// each call costs a wake-up on another CPU.
    #[must_use]
    pub fn new(descriptor: OwnedFd) -> Self {
        let listener = Self(descriptor);
        // SAFETY: the flags go by value. An error means an older kernel, where calls are slower.
        let _ = unsafe {
            syscall!(
                Sysno::ioctl,
                listener.0.as_raw_fd(),
                SET_FLAGS,
                u64::from(SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP)
            )
        };
        listener
    }

    fn ioctl<T>(&self, request: Opcode, argument: *mut T) -> Result<usize, Errno> {
        // SAFETY: the callers of this private function pass the structure whose size the request contains.
        let result = unsafe { syscall!(Sysno::ioctl, self.0.as_raw_fd(), request, argument) };
        result.map_err(crate::errno)
    }

    /// Waits for the next call.
    ///
    /// # Errors
    /// `ENOENT` if the caller has ended meanwhile or no process with the filter is left; `EINTR` upon a signal.
    pub fn receive(&self) -> Result<Notification, Errno> {
        // SAFETY: the structure consists of integers; the kernel requires it to be zero.
        let mut call: seccomp_notif = unsafe { std::mem::zeroed() };
        self.ioctl(RECEIVE, &raw mut call)?;
        Ok(Notification {
            id: call.id,
            thread: call.pid.cast_signed(),
            number: call.data.nr,
            arguments: call.data.args,
        })
    }

    /// Returns whether the caller still waits, so that its thread ID still means the thread that called.
    #[must_use]
    pub fn is_waiting(&self, mut id: u64) -> bool {
        self.ioctl(ID_VALID, &raw mut id).is_ok()
    }

    /// Makes the call return a value, or fail with an error.
    ///
    /// # Errors
    /// `ENOENT` if the caller has ended or was interrupted; no answer is needed then.
    pub fn answer(&self, id: u64, result: Result<i64, Errno>) -> Result<(), Errno> {
        let (val, error) = match result {
            Ok(value) => (value, 0),
            Err(errno) => (0, -errno.raw_os_error()),
        };
        self.respond(seccomp_notif_resp { id, val, error, flags: 0 })
    }

    /// Lets the kernel perform the call as it is. The program may have changed what its arguments point to since the call
    /// was received, so this is no way to allow what was checked there.
    ///
    /// # Errors
    /// As for [`answer`](Self::answer).
    pub fn proceed(&self, id: u64) -> Result<(), Errno> {
        let flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
        self.respond(seccomp_notif_resp { id, val: 0, error: 0, flags })
    }

    fn respond(&self, mut response: seccomp_notif_resp) -> Result<(), Errno> {
        loop {
            match self.ioctl(SEND, &raw mut response) {
                Err(Errno::INTR) => (),
                result => return result.map(drop),
            }
        }
    }

    /// Makes `file` a new descriptor of the caller, the lowest that is free there, and returns its number. The call still
    /// waits for an answer.
    ///
    /// # Errors
    /// `EMFILE` at the caller's limit; `ENOENT` if the caller has ended; others of the manual page.
    pub fn add_descriptor(&self, id: u64, file: BorrowedFd<'_>, close_on_exec: bool) -> Result<i32, Errno> {
        self.add(addition(id, file, close_on_exec))
    }

    /// Makes `file` a new descriptor of the caller and its number the result of the call, in one step where the kernel can
    /// (Linux 5.14).
    ///
    /// # Errors
    /// As for [`add_descriptor`](Self::add_descriptor); the call then still waits.
    pub fn answer_with_descriptor(
        &self,
        id: u64,
        file: BorrowedFd<'_>,
        close_on_exec: bool,
    ) -> Result<(), Errno> {
        let addition = addition(id, file, close_on_exec);
        match self.add(seccomp_notif_addfd { flags: SECCOMP_ADDFD_FLAG_SEND, ..addition }) {
            Ok(_) => Ok(()),
            Err(Errno::INVAL) => self.add(addition).and_then(|number| self.answer(id, Ok(number.into()))),
            Err(errno) => Err(errno),
        }
    }

    fn add(&self, mut addition: seccomp_notif_addfd) -> Result<i32, Errno> {
        loop {
            match self.ioctl(ADD, &raw mut addition) {
                Err(Errno::INTR) => (),
                result => return result.and_then(|number| i32::try_from(number).map_err(|_| Errno::BADF)),
            }
        }
    }
}

fn addition(id: u64, file: BorrowedFd<'_>, close_on_exec: bool) -> seccomp_notif_addfd {
    seccomp_notif_addfd {
        id,
        flags: 0,
        srcfd: file.as_raw_fd().unsigned_abs(),
        newfd: 0,
        newfd_flags: if close_on_exec { libc::O_CLOEXEC.unsigned_abs() } else { 0 },
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Listener> for OwnedFd {
    fn from(listener: Listener) -> Self {
        listener.0
    }
}
