//! Sockets that a service manager passed (`sd_listen_fds(3)`), and the queue from which workers take requests then.
//!
//! The passed sockets are the service manager's: the server neither removes nor replaces them, and a request that waits there
//! when it ends is the next server's. So no worker gets hold of them either: a script that looks through its worker's descriptors
//! could shut them down, which cannot be undone short of restarting the socket unit. The master accepts the connections and
//! passes them on, over a socket pair that all workers read. A worker that ends leaves the others' requests in it.
//!
//! A reload makes another pair for the new workers, and then fills that one. The former one gets an end, which its workers find
//! behind what is queued there.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix,
    SocketFlags, SocketType, sockopt,
};

use super::control_path;
use super::socket::{ClaimError, OwnControl};

/// After how long the master goes on that could not for want of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

/// Why passed sockets are of no use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PassedError {
    /// It is no socket to serve on.
    #[error(
        "cannot serve on descriptor {number} of those that the service manager passed: it is {kind}, not a listening Unix \
         stream socket with a path; set ListenStream= in the socket unit to a path"
    )]
    WrongKind {
        /// Its place among those passed, from 3 on, as in `sd_listen_fds(3)`.
        number: usize,
        /// What it is instead.
        kind: String,
    },
    /// There are too many.
    #[error(
        "cannot serve on the passed sockets {}: a server has one for requests, and a second only at its path with .control; \
         pass one, or start a server for each", .paths.join(", ")
    )]
    TooMany {
        /// The paths of the sockets.
        paths: Vec<String>,
    },
    /// The control socket beside the passed one cannot be made.
    #[error("cannot make the control socket {}; pass it as well, by a second ListenStream= in the socket unit", .path.display())]
    Control {
        /// The path of the socket.
        path: PathBuf,
        /// The error of the claim.
        source: ClaimError,
    },
    /// A setting of a socket was refused.
    #[error("cannot prepare the passed sockets")]
    Io(#[source] io::Error),
}

/// The master's control socket.
#[derive(Debug)]
enum Control {
    Passed(OwnedFd),
    Own(OwnControl),
}

/// The entrance of a server whose sockets were passed.
#[derive(Debug)]
pub struct Passed {
    listener: OwnedFd,
    path: PathBuf,
    control: Control,
    queue: Queue,
    /// A connection for which the queue had no room.
    held: Option<OwnedFd>,
    /// Until when nothing is accepted, for want of descriptors or memory.
    paused: Option<Instant>,
    /// Whether the queue is to be renewed.
    broken: bool,
    /// Whether the server takes no more requests.
    stopped: bool,
}

impl Passed {
    /// Takes the sockets, the one for requests with room for `backlog` waiting connections. Where the control socket is not
    /// among them, it is made beside the other.
    ///
    /// # Errors
    /// See [`PassedError`].
    pub fn new(sockets: Vec<OwnedFd>, backlog: u16) -> Result<Self, PassedError> {
        let numbered = sockets.into_iter().zip(3..);
        let mut sockets = numbered
            .map(|(fd, number)| match path_of(&fd) {
                Ok(path) => Ok((fd, path)),
                Err(kind) => Err(PassedError::WrongKind { number, kind }),
            })
            .collect::<Result<Vec<_>, _>>()?;
        sockets.sort_by_key(|(_, path)| path.as_os_str().len());
        let control_of = |path: &Path| control_path(path);
        let (listener, path, control) = match <[_; 2]>::try_from(sockets) {
            Ok([(listener, path), (control, beside)]) if beside == control_of(&path) => {
                (listener, path, Some(control))
            }
            Ok(two) => return Err(too_many(&two)),
            Err(sockets) => match <[_; 1]>::try_from(sockets) {
                Ok([(listener, path)]) => (listener, path, None),
                Err(sockets) => return Err(too_many(&sockets)),
            },
        };
        let io = |errno: Errno| PassedError::Io(errno.into());
        // An accept that finds nothing must not hold the master up.
        rustix::io::ioctl_fionbio(&listener, true).map_err(io)?;
        rustix::net::listen(&listener, i32::from(backlog)).map_err(io)?;
        let control = match control {
            Some(control) => {
                rustix::io::ioctl_fionbio(&control, true).map_err(io)?;
                Control::Passed(control)
            }
            None => {
                let own = OwnControl::take(&path);
                let error = |source| PassedError::Control { path: control_of(&path), source };
                Control::Own(own.map_err(error)?)
            }
        };
        let queue = Queue::new().map_err(PassedError::Io)?;
        Ok(Self { listener, path, control, queue, held: None, paused: None, broken: false, stopped: false })
    }

    /// Returns the path of the socket for requests.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn requests(&self) -> BorrowedFd<'_> {
        self.queue.requests()
    }

    pub(super) fn control(&self) -> BorrowedFd<'_> {
        match &self.control {
            Control::Passed(control) => control.as_fd(),
            Control::Own(control) => control.socket.as_fd(),
        }
    }

    pub(super) fn poll_fd(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        if self.broken || self.deadline().is_some() {
            None
        } else if self.held.is_some() {
            Some((self.queue.master.as_fd(), PollFlags::OUT))
        } else {
            (!self.stopped).then_some((self.listener.as_fd(), PollFlags::IN))
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.paused.filter(|until| *until > Instant::now())
    }

    /// See [`Entrance::relay`](super::entrance::Entrance::relay).
    pub(super) fn relay(&mut self) -> io::Result<bool> {
        while !self.broken && self.deadline().is_none() {
            let connection = match self.held.take() {
                Some(connection) => connection,
                None if self.stopped => {
                    self.queue.end();
                    break;
                }
                None => match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) {
                    Ok(connection) => connection,
                    Err(Errno::AGAIN) => break,
                    Err(Errno::INTR | Errno::CONNABORTED) => continue,
                    Err(Errno::INVAL) => return Err(Errno::INVAL.into()),
                    // It stays in the queue, and would be announced again at once.
                    Err(_) => {
                        self.paused = Some(Instant::now() + PAUSE);
                        break;
                    }
                },
            };
            let Err(errno) = self.queue.pass(&connection) else { continue };
            self.held = Some(connection);
            match errno {
                Errno::INTR => {}
                Errno::AGAIN => break,
                Errno::NOMEM | Errno::NOBUFS | Errno::TOOMANYREFS => {
                    self.paused = Some(Instant::now() + PAUSE);
                }
                // A script has shut the workers' end, or has set it to take no descriptors.
                _ => self.broken = true,
            }
        }
        Ok(self.broken)
    }

    /// Fills `next` from now on instead of the present queue, which gets an end. What is held goes into `next`.
    pub(super) fn replace(&mut self, next: &mut Queue) {
        std::mem::swap(&mut self.queue, next);
        next.end();
        self.broken = false;
    }

    /// Makes another queue if the workers' end of the present one was shut: by a script, say, that looked for it among its
    /// worker's descriptors. Returns whether that was so.
    pub(super) fn renew(&mut self) -> io::Result<bool> {
        if !self.broken && !self.queue.is_shut() {
            return Ok(false);
        }
        self.replace(&mut Queue::new()?);
        Ok(true)
    }

    /// Accepts nothing more. What waits at the passed socket is for the server that the service manager starts next.
    pub(super) fn stop(&mut self) {
        self.stopped = true;
        if self.held.is_none() {
            self.queue.end();
        }
    }
}

/// A queue of connections for workers. The kernel bounds it to a few.
#[derive(Debug)]
pub(super) struct Queue {
    master: OwnedFd,
    /// What all workers read. The master has it, too, so that what is queued outlives a worker that ends.
    workers: OwnedFd,
}

impl Queue {
    pub(super) fn new() -> io::Result<Self> {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (master, workers) = rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
        // As little as the kernel allows, since requests are to wait where clients can be refused as busy.
        sockopt::set_socket_send_buffer_size(&master, 1)?;
        // Nothing that a script writes arrives; unread, it would be an error to the workers when the master closes its end.
        rustix::net::shutdown(&master, Shutdown::Read)?;
        forbid_filters(workers.as_fd())?;
        Ok(Self { master, workers })
    }

    pub(super) fn requests(&self) -> BorrowedFd<'_> {
        self.workers.as_fd()
    }

    /// Queues a connection, without blocking.
    fn pass(&self, connection: &OwnedFd) -> rustix::io::Result<()> {
        let connection = [connection.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&connection));
        self.send(&mut ancillary)
    }

    /// Sends one byte: an empty message would be an end.
    fn send(&self, ancillary: &mut SendAncillaryBuffer<'_, '_, '_>) -> rustix::io::Result<()> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::sendmsg(&self.master, &[IoSlice::new(&[0])], ancillary, flags).map(drop)
    }

    /// Tries the queue by a message without a connection, which workers ignore.
    fn is_shut(&self) -> bool {
        let tried = self.send(&mut SendAncillaryBuffer::default());
        !matches!(tried, Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::NOMEM | Errno::NOBUFS))
    }

    /// Lets the workers find an end behind what is queued.
    fn end(&self) {
        // It can fail only where it was shut before.
        let _ = rustix::net::shutdown(&self.master, Shutdown::Both);
    }
}

/// Forbids filters on a socket from now on (`SO_LOCK_FILTER`, socket(7)): one that a script attached would drop requests.
fn forbid_filters(socket: BorrowedFd<'_>) -> io::Result<()> {
    let on: libc::c_int = 1;
    let size = libc::socklen_t::try_from(size_of_val(&on)).unwrap_or(0);
    // SAFETY: the descriptor is borrowed for the call, and the value is a live local of the given size.
    let set = unsafe {
        let value = (&raw const on).cast();
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LOCK_FILTER, value, size)
    };
    if set == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the path of a listening Unix stream socket, or what a descriptor is instead.
fn path_of(fd: &OwnedFd) -> Result<PathBuf, String> {
    let Ok(domain) = sockopt::socket_domain(fd) else { return Err("not a socket".to_owned()) };
    if domain != AddressFamily::UNIX {
        return Err("not a Unix socket".to_owned());
    }
    match sockopt::socket_type(fd) {
        Ok(SocketType::STREAM) => {}
        Ok(SocketType::SEQPACKET) => return Err("a socket of type SOCK_SEQPACKET".to_owned()),
        Ok(SocketType::DGRAM) => return Err("a socket of type SOCK_DGRAM".to_owned()),
        _ => return Err("a socket of another type".to_owned()),
    }
    if !matches!(sockopt::socket_acceptconn(fd), Ok(true)) {
        return Err("a connected or unbound socket".to_owned());
    }
    let address =
        rustix::net::getsockname(fd).ok().and_then(|address| SocketAddrUnix::try_from(address).ok());
    let path = address.as_ref().and_then(SocketAddrUnix::path_bytes);
    let path = path.ok_or_else(|| "a socket without a path".to_owned())?;
    Ok(PathBuf::from(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(path)))
}

fn too_many(sockets: &[(OwnedFd, PathBuf)]) -> PassedError {
    PassedError::TooMany { paths: sockets.iter().map(|(_, path)| path.display().to_string()).collect() }
}
