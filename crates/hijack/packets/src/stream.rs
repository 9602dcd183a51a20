//! A stream: a socket that receives, of this process or another.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use orrery_sys::socket_filter::{self, Attached};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, ipproto, sockopt};
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
    /// The descriptor is no UDP socket.
    #[error("cannot steer descriptor {fd} of process {pid}: it is no UDP socket")]
    NoDatagrams {
        /// The process.
        pid: i32,
        /// The number of the file descriptor.
        fd: i32,
    },
    /// The program has attached a filter itself, which is not replaced.
    #[error("cannot steer a socket: the program has attached a filter of its own, which stays; detach it")]
    OwnFilter,
    /// The kernel refuses.
    #[error("cannot {operation}: {cause}")]
    Kernel {
        /// The operation that failed.
        operation: &'static str,
        /// The error of the kernel.
        cause: io::Error,
    },
}

/// A socket for datagrams, part of whose packets can be dropped early. The filter is removed with it, and a raised limit restored. A socket has one filter: one
/// that the program attached itself stays, and such a socket is refused, as is one whose filter the program has locked.
#[derive(Debug)]
pub struct Stream {
    socket: OwnedFd,
    /// Whether filter and limit outlive this.
    stays: bool,
    /// The limit that was raised, unless it outlives this.
    raised: Option<RaisedLimit>,
}

/// The limits of a socket's queue, in bytes: what it was, and what it was raised to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RaisedLimit {
    /// What the program has, or the kernel's own.
    pub before: u32,
    /// What it was raised to.
    pub now: u32,
}

impl Stream {
    /// Returns a stream of this process' own socket.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, stays: false, raised: None }
    }

    /// Returns a stream of another process' socket. As long as it is there, the socket is open.
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
        if is_udp(&socket) { Ok(Self::new(socket)) } else { Err(PacketsError::NoDatagrams { pid, fd }) }
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
        let memory = socket_filter::memory(self.socket.as_fd()).map_err(kernel("read a socket's memory"))?;
        // What is decided by the queue is decided as if the limit had stayed: by how long packets wait.
        let limit = self.raised.map_or(memory.limit, |raised| raised.before);
        Ok(Load { queued: memory.queued, limit, drops: memory.drops })
    }

    /// Has the kernel queue up to `bytes`, their overhead included, if it queues less so far; returns what it was, if it was raised. A queue
    /// takes memory only where packets wait in it. Above `net.core.rmem_max`, `CAP_NET_ADMIN` is needed; without it, that is the limit
    /// ([socket(7)](https://man7.org/linux/man-pages/man7/socket.7.html), `SO_RCVBUF`, `SO_RCVBUFFORCE`).
    ///
    /// # Errors
    /// Where the kernel refuses.
    pub fn raise_limit(&mut self, bytes: u32) -> Result<Option<RaisedLimit>, PacketsError> {
        let before = self.limit()?;
        if before >= bytes {
            return Ok(None);
        }
        set_limit(&self.socket, bytes)?;
        let now = self.limit()?;
        if now < before {
            // The kernel's greatest is less than the program had.
            set_limit(&self.socket, before)?;
            return Ok(None);
        }
        let raised = (now > before).then_some(RaisedLimit { before, now });
        if !self.stays {
            self.raised = raised;
        }
        Ok(raised)
    }

    /// Sets the limit of the queue back to what it was, unless the program has changed it since.
    ///
    /// # Errors
    /// Where the kernel refuses.
    pub fn restore_limit(&mut self, raised: RaisedLimit) -> Result<(), PacketsError> {
        self.raised = None;
        if self.limit()? == raised.now { set_limit(&self.socket, raised.before) } else { Ok(()) }
    }

    fn limit(&self) -> Result<u32, PacketsError> {
        let bytes = sockopt::socket_recv_buffer_size(&self.socket).map_err(|errno| PacketsError::Kernel {
            operation: "read the limit of a socket's queue",
            cause: errno.into(),
        })?;
        Ok(u32::try_from(bytes).unwrap_or(u32::MAX))
    }

    /// Returns whether the program has attached a filter of its own.
    ///
    /// # Errors
    /// Where the kernel does not say.
    pub fn has_own_filter(&self) -> Result<bool, PacketsError> {
        let found = socket_filter::attached(self.socket.as_fd()).map_err(kernel("read a socket's filter"))?;
        Ok(found == Attached::Other)
    }

    /// Has the kernel drop a part of what arrives, `rate` of 2^32, before it is queued. Zero removes the filter.
    ///
    /// The kernel has no call that replaces one certain filter: what the program attaches between this function's look at the
    /// filter and its change, within some microseconds, is replaced.
    ///
    /// # Errors
    /// [`PacketsError::OwnFilter`] where the program has attached one; where it has locked the socket's filter.
    pub fn drop_part(&mut self, rate: u32) -> Result<(), PacketsError> {
        let socket = self.socket.as_fd();
        let found = socket_filter::attached(socket).map_err(kernel("read a socket's filter"))?;
        let result = match (found, rate) {
            (Attached::Other, _) => return Err(PacketsError::OwnFilter),
            (Attached::None, 0) => Ok(()),
            (Attached::Dropping(_), 0) => socket_filter::remove(socket),
            (Attached::Dropping(before), rate) if before == rate => Ok(()),
            (_, rate) => socket_filter::drop_randomly(socket, rate),
        };
        result.map_err(kernel("set a socket's filter"))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.stays {
            // The socket may live on in its process.
            let _locked_or_closed = self.drop_part(0);
            if let Some(raised) = self.raised {
                let _closed = self.restore_limit(raised);
            }
        }
    }
}

fn kernel(operation: &'static str) -> impl Fn(orrery_sys::Error) -> PacketsError {
    move |error| PacketsError::Kernel { operation, cause: error.errno.into() }
}

/// Sets the limit of a socket's queue, as far as this process may. The kernel doubles what it is given.
fn set_limit(socket: &OwnedFd, bytes: u32) -> Result<(), PacketsError> {
    let half = bytes as usize / 2;
    sockopt::set_socket_recv_buffer_size_force(socket, half)
        .or_else(|_| sockopt::set_socket_recv_buffer_size(socket, half))
        .map_err(|errno| PacketsError::Kernel {
            operation: "set the limit of a socket's queue",
            cause: errno.into(),
        })
}

/// Returns whether it is a UDP socket. Dropping at any other kind loses what nobody sends again: Unix and netlink sockets have
/// datagrams, too.
fn is_udp(socket: &OwnedFd) -> bool {
    let inet = sockopt::socket_domain(socket)
        .is_ok_and(|domain| domain == AddressFamily::INET || domain == AddressFamily::INET6);
    inet && sockopt::socket_type(socket) == Ok(SocketType::DGRAM)
        && sockopt::socket_protocol(socket) == Ok(Some(ipproto::UDP))
}

/// A UDP socket of another process, of which a copy exists only while somebody looks: a copy that stayed would keep a port in use
/// that the program has closed.
#[derive(Debug, PartialEq, Eq)]
pub struct Remote {
    fd: i32,
    /// The kernel's number of the socket, which no other one ever gets.
    cookie: u64,
}

impl Remote {
    /// Returns the socket that a descriptor of a process is, and a stream of it; `None` where it is no UDP socket, or closed.
    ///
    /// # Errors
    /// Without the right to trace the process.
    pub fn find(process: BorrowedFd<'_>, fd: i32) -> Result<Option<(Self, Stream)>, PacketsError> {
        let Some(socket) = copy(process, fd)?.filter(is_udp) else { return Ok(None) };
        let cookie = sockopt::socket_cookie(&socket)
            .map_err(|errno| PacketsError::Kernel { operation: "identify a socket", cause: errno.into() })?;
        Ok(Some((Self { fd, cookie }, Stream { socket, stays: true, raised: None })))
    }

    /// Returns a stream of the socket, whose filter outlives it; `None` where the process has closed it, or ended.
    ///
    /// # Errors
    /// Without the right to trace the process, which it may have withdrawn.
    pub fn open(&self, process: BorrowedFd<'_>) -> Result<Option<Stream>, PacketsError> {
        let same = |socket: &OwnedFd| sockopt::socket_cookie(socket) == Ok(self.cookie);
        Ok(copy(process, self.fd)?.filter(same).map(|socket| Stream { socket, stays: true, raised: None }))
    }

    /// Returns the kernel's number of the socket: two descriptors with the same one are the same socket.
    #[must_use]
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    /// Returns the number of the descriptor.
    #[must_use]
    pub fn fd(&self) -> i32 {
        self.fd
    }
}

/// Copies a descriptor; `None` where there is none, or no process any more.
fn copy(process: BorrowedFd<'_>, fd: i32) -> Result<Option<OwnedFd>, PacketsError> {
    match socket_filter::of_process(process, fd) {
        Ok(copy) => Ok(Some(copy)),
        Err(error) if [Errno::BADF, Errno::SRCH].contains(&error.errno) => Ok(None),
        Err(error) => Err(PacketsError::Kernel {
            operation: "copy a descriptor of the process, which requires the right to trace it (ptrace(2))",
            cause: error.errno.into(),
        }),
    }
}

/// Returns whether this process has the right to steer the sockets of another one.
///
/// # Errors
/// The reason why not.
pub fn may_steer(process: BorrowedFd<'_>) -> Result<(), PacketsError> {
    // Which descriptor does not matter: the right is checked first.
    copy(process, 0).map(drop)
}

/// Returns the descriptors of a process that are sockets, in order; of all of its descriptors, `most` are looked at.
///
/// # Errors
/// Where the process has ended, or its descriptors may not be listed.
pub fn sockets_of(pid: i32, most: usize) -> Result<Vec<i32>, PacketsError> {
    let list = |cause| PacketsError::List { pid, cause };
    let mut sockets = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).map_err(list)?.take(most) {
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
        assert!(sockets_of(me, 1024).unwrap().contains(&to.as_raw_fd()));
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
    fn a_queue_holds_more_and_has_its_own_limit_again() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let limit = || sockopt::socket_recv_buffer_size(&socket).unwrap();
        let own = limit();
        let wanted = u32::try_from(own).unwrap() + 65_536;
        let mut stream = Stream::new(OwnedFd::from(socket.try_clone().unwrap()));
        let raised = stream.raise_limit(wanted).unwrap().unwrap();
        assert!(
            limit() > own
                && raised == RaisedLimit { before: wanted - 65_536, now: u32::try_from(limit()).unwrap() }
        );
        // What is decided by the queue does not change.
        assert_eq!(stream.look().unwrap().limit, raised.before);
        assert_eq!(stream.raise_limit(wanted / 2).unwrap(), None);
        drop(stream);
        assert_eq!(limit(), own);
        // What the program sets meanwhile stays.
        let mut stream = Stream::new(OwnedFd::from(socket.try_clone().unwrap()));
        stream.raise_limit(wanted).unwrap().unwrap();
        sockopt::set_socket_recv_buffer_size(&socket, 8192).unwrap();
        drop(stream);
        assert_eq!(limit(), 16384);
    }

    fn own_pidfd() -> OwnedFd {
        pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap()
    }

    #[test]
    fn a_filter_of_the_program_stays() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        // Python's way to attach `ret 65535`; here through the system call that the standard library has not.
        let program = [libc::sock_filter { code: 6, jt: 0, jf: 0, k: 65535 }];
        let filter = libc::sock_fprog { len: 1, filter: program.as_ptr().cast_mut() };
        // SAFETY: the kernel reads the description and the program that it points to, which both live here.
        let done = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const filter).cast(),
                libc::socklen_t::try_from(size_of_val(&filter)).unwrap(),
            )
        };
        assert_eq!(done, 0);
        let mut stream = Stream::new(OwnedFd::from(socket.try_clone().unwrap()));
        assert!(stream.has_own_filter().unwrap());
        for rate in [0, 1, u32::MAX] {
            assert!(matches!(stream.drop_part(rate), Err(PacketsError::OwnFilter)));
        }
        drop(stream);
        assert_eq!(socket_filter::attached(socket.as_fd()).unwrap(), Attached::Other);
    }

    #[test]
    fn a_remote_socket_is_held_by_nobody_and_known_again() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (fd, address) = (socket.as_raw_fd(), socket.local_addr().unwrap());
        let (remote, mut stream) = Remote::find(own_pidfd().as_fd(), fd).unwrap().unwrap();
        stream.drop_part(7).unwrap();
        drop(stream);
        assert_eq!(socket_filter::attached(socket.as_fd()).unwrap(), Attached::Dropping(7));
        assert!(remote.open(own_pidfd().as_fd()).unwrap().is_some());
        drop(socket);
        assert!(remote.open(own_pidfd().as_fd()).unwrap().is_none());
        // Nothing keeps its port, and what has it now, under whatever number, is another one.
        let again = UdpSocket::bind(address).unwrap();
        let (other, _) = Remote::find(own_pidfd().as_fd(), again.as_raw_fd()).unwrap().unwrap();
        assert_ne!(other.cookie(), remote.cookie());
        assert!(remote.open(own_pidfd().as_fd()).unwrap().is_none());
        may_steer(own_pidfd().as_fd()).unwrap();
    }

    #[test]
    fn what_is_no_stream_is_refused() {
        let me = i32::try_from(std::process::id()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = Stream::of_process(me, listener.as_raw_fd()).unwrap_err();
        assert!(error.to_string().ends_with("it is no UDP socket"), "{error}");
        // Datagrams of other families are not dropped: nobody would send them again.
        let (unix, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
        assert!(matches!(Stream::of_process(me, unix.as_raw_fd()), Err(PacketsError::NoDatagrams { .. })));
        assert_eq!(Remote::find(own_pidfd().as_fd(), unix.as_raw_fd()).unwrap().map(|(it, _)| it), None);
        let error = Stream::of_process(me, 98_765).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot copy descriptor 98765 of process {me}: ")), "{error}");
        assert!(Stream::of_process(0, 1).is_err() && Stream::of_process(i32::MAX, 1).is_err());
        assert!(sockets_of(i32::MAX, 1).unwrap_err().to_string().starts_with("cannot list the sockets"));
    }
}
