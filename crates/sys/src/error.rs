//! The error of this floor: which operation, on which value, with which errno.

use core::fmt;

/// A system call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error {
    /// What was tried, in the words of the manual page: `"UFFDIO_REGISTER"`.
    pub operation: &'static str,
    /// The address, descriptor or number that it was tried on.
    pub value: usize,
    /// The kernel's answer.
    pub errno: rustix::io::Errno,
}

/// What the functions of this crate return.
pub type Result<T> = core::result::Result<T, Error>;

impl Error {
    /// Creates an error of `operation` on `value`.
    pub fn new(operation: &'static str, value: usize, errno: rustix::io::Errno) -> Self {
        Self { operation, value, errno }
    }

    pub(crate) fn raw(operation: &'static str, value: usize, errno: syscalls::Errno) -> Self {
        Self { operation, value, errno: self::errno(errno) }
    }
}

/// Converts an error of the crate `syscalls`.
#[must_use]
pub fn errno(error: syscalls::Errno) -> rustix::io::Errno {
    rustix::io::Errno::from_raw_os_error(error.into_raw())
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({:#x}): {}", self.operation, self.value, self.errno)
    }
}

impl core::error::Error for Error {}
