//! Who is at the other end of a Unix socket (unix(7)): rustix refuses a process that this one's PID namespace does not have.

use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use libc::{SO_PEERCRED, SO_PEERPIDFD, SOL_SOCKET};
use syscalls::{Sysno, syscall};

use crate::{Error, Result};

/// Who connected, listened, or made a pair of sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Its PID; 0 if this process' PID namespace does not have it.
    pub pid: i32,
    /// Its user ID, as this process' user namespace shows it.
    pub uid: u32,
    /// The group ID of the peer.
    pub gid: u32,
}

/// Returns who is at the other end (`SO_PEERCRED`).
///
/// # Errors
/// `ENOTSOCK`, `EBADF`; `ENODATA` if there is no other end.
pub fn credentials(socket: BorrowedFd<'_>) -> Result<Credentials> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let length = option(socket, SO_PEERCRED, "SO_PEERCRED", &mut found)?;
    if length < size_of_val(&found) {
        return Err(Error::new("SO_PEERCRED", length, rustix::io::Errno::NODATA));
    }
    Ok(Credentials { pid: found.pid, uid: found.uid, gid: found.gid })
}

/// Returns a descriptor of the process at the other end (`SO_PEERPIDFD`, since Linux 6.5).
///
/// # Errors
/// `ENOPROTOOPT` on older kernels; `ESRCH` or `EINVAL` if it is gone.
pub fn process(socket: BorrowedFd<'_>) -> Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    option(socket, SO_PEERPIDFD, "SO_PEERPIDFD", &mut fd)?;
    if fd < 0 {
        return Err(Error::new("SO_PEERPIDFD", 0, rustix::io::Errno::SRCH));
    }
    // SAFETY: the call has succeeded, so the descriptor is new, and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Reads an option into `value`, which is plain integers; returns how many bytes it has.
fn option<T: Copy>(
    socket: BorrowedFd<'_>,
    name: libc::c_int,
    operation: &'static str,
    value: &mut T,
) -> Result<usize> {
    let mut length = u32::try_from(size_of::<T>()).unwrap_or(0);
    let at = core::ptr::from_mut(value);
    // SAFETY: the kernel writes at most `length` bytes to `value`, and to `length`; any bytes are valid integers, of which `T` consists by
    // both callers.
    unsafe { syscall!(Sysno::getsockopt, socket.as_raw_fd(), SOL_SOCKET, name, at, &raw mut length) }
        .map_err(|errno| Error::raw(operation, socket.as_raw_fd().unsigned_abs() as usize, errno))?;
    Ok(length as usize)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_pair_is_of_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let found = credentials(one.as_fd()).unwrap();
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        let own = std::process::id().cast_signed();
        assert_eq!(found, Credentials { pid: own, uid: uid.as_raw(), gid: gid.as_raw() });
        if let Err(error) = process(one.as_fd()) {
            assert_eq!(error.errno, rustix::io::Errno::NOPROTOOPT, "{error}");
        }
    }

    #[test]
    fn a_file_has_no_peer() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(credentials(file.as_fd()).unwrap_err().errno, rustix::io::Errno::NOTSOCK);
        assert_eq!(process(file.as_fd()).unwrap_err().errno, rustix::io::Errno::NOTSOCK);
    }
}
