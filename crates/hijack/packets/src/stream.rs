//! A stream: a socket that receives, of this process or another.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use orrery_sys::socket_filter;
use rustix::net::SocketType;
use rustix::net::sockopt;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::steering::Load;

/// Why a socket cannot be steered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PacketsError {
    /// The process' sockets cannot be listed.
    #[error("cannot list the sockets of process {pid}: {cause}")]
    List {
        /// The process.
        pid: i32,
        /// The error of the kernel.
        cause: io::Error,
    },
    /// The process' descriptor cannot be copied.
    #[error(
        "cannot copy descriptor {fd} of process {pid}: {cause}; that needs the right to trace it (ptrace(2))"
    )]
    Copy {
        /// The process.
        pid: i32,
        /// The number of the file descriptor.
        fd: i32,
        /// The error of the kernel.
        cause: io::Error,
    },
    /// The descriptor is no datagram socket.
    #[error("cannot steer descriptor {fd} of process {pid}: it is no socket for datagrams")]
    NoDatagrams {
        /// The process.
        pid: i32,
        /// The number of the file descriptor.
        fd: i32,
    },
    /// The kernel refuses.
    #[error("cannot {operation}: {cause}")]
    Kernel {
        /// The operation that failed.
        operation: &'static str,
        /// The error of the kernel.
        cause: io::Error,
    },
}

/// A socket for datagrams, part of whose packets can be dropped early. The filter is removed with it: a socket has one
/// filter, so that a program's own would be lost, and a stream is refused where the program locked its filter.
#[derive(Debug)]
pub struct Stream {
    socket: OwnedFd,
    filtered: bool,
}

impl Stream {
    /// Returns a stream of this process' own socket.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, filtered: false }
    }

    /// Returns a stream of another process' socket.
    ///
    /// # Errors
    /// Why it cannot be had, or what it is instead.
    pub fn of_process(pid: i32, fd: i32) -> Result<Self, PacketsError> {
        let copy = |cause: io::Error| PacketsError::Copy { pid, fd, cause };
        let missing = || copy(io::Error::from_raw_os_error(3));
        let process = Pid::from_raw(pid).ok_or_else(missing)?;
        let pidfd = pidfd_open(process, PidfdFlags::empty()).map_err(|error| copy(error.into()))?;
        let socket =
            socket_filter::of_process(pidfd.as_fd(), fd).map_err(|error| copy(error.errno.into()))?;
        match sockopt::socket_type(&socket) {
            Ok(SocketType::DGRAM) => Ok(Self::new(socket)),
            _ => Err(PacketsError::NoDatagrams { pid, fd }),
        }
    }

    /// Returns the socket.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns what waits and what was dropped.
    ///
    /// # Errors
    /// Where the kernel does not count that.
    pub fn look(&self) -> Result<Load, PacketsError> {
        let memory = socket_filter::memory(self.socket.as_fd()).map_err(|error| PacketsError::Kernel {
            operation: "read a socket's memory",
            cause: error.errno.into(),
        })?;
        Ok(Load { queued: memory.queued, limit: memory.limit, drops: memory.drops })
    }

    /// Has the kernel drop a part of what arrives, `rate` of 2^32, before it is queued. Zero removes the filter.
    ///
    /// # Errors
    /// Where the program has locked the socket's filter.
    pub fn drop_part(&mut self, rate: u32) -> Result<(), PacketsError> {
        let result = match rate {
            0 if self.filtered => socket_filter::remove(self.socket.as_fd()),
            0 => Ok(()),
            rate => socket_filter::drop_randomly(self.socket.as_fd(), rate),
        };
        result.map_err(|error| PacketsError::Kernel {
            operation: "set a socket's filter",
            cause: error.errno.into(),
        })?;
        self.filtered = rate != 0;
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // The socket may live on in its process.
        let _locked_or_closed = self.drop_part(0);
    }
}

/// Returns the descriptors of a process that are sockets, in order.
///
/// # Errors
/// Where the process has ended, or its descriptors may not be listed.
pub fn sockets_of(pid: i32) -> Result<Vec<i32>, PacketsError> {
    let list = |cause| PacketsError::List { pid, cause };
    let mut sockets = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).map_err(list)? {
        let entry = entry.map_err(list)?;
        // One that was closed meanwhile is none.
        let socket = fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().starts_with("socket:"));
        if let Some(fd) = entry.file_name().to_str().and_then(|name| name.parse().ok()).filter(|_| socket) {
            sockets.push(fd);
        }
    }
    sockets.sort_unstable();
    Ok(sockets)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_socket_of_a_process_is_steered_and_left_as_it_was() {
        let (to, from) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        from.connect(to.local_addr().unwrap()).unwrap();
        to.set_nonblocking(true).unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        assert!(sockets_of(me).unwrap().contains(&to.as_raw_fd()));
        let arrives = || from.send(b"x").is_ok() && to.recv(&mut [0; 8]).is_ok();
        assert!(arrives());
        let mut stream = Stream::of_process(me, to.as_raw_fd()).unwrap();
        stream.drop_part(u32::MAX).unwrap();
        let before = stream.look().unwrap();
        assert!((0..50).filter(|_| arrives()).count() < 2);
        let after = stream.look().unwrap();
        assert!(after.drops - before.drops >= 49 && after.queued == 0 && after.limit > 0, "{after:?}");
        drop(stream);
        assert!((0..50).all(|_| arrives()));
    }

    #[test]
    fn what_is_no_stream_is_refused() {
        let me = i32::try_from(std::process::id()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = Stream::of_process(me, listener.as_raw_fd()).unwrap_err();
        assert!(error.to_string().ends_with("it is no socket for datagrams"), "{error}");
        let error = Stream::of_process(me, 98_765).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot copy descriptor 98765 of process {me}: ")), "{error}");
        assert!(Stream::of_process(0, 1).is_err() && Stream::of_process(i32::MAX, 1).is_err());
        assert!(sockets_of(i32::MAX).unwrap_err().to_string().starts_with("cannot list the sockets"));
    }
}
