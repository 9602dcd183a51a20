//! The client: brings a program to the server and waits for how it ends.
//!
//! ```no_run
//! use orrery_warm::client::{Client, Job};
//!
//! let client = Client::new("/run/user/1000/orrery-warm.socket");
//! let job = Job::command("print(6 * 7)").standard_streams();
//! let answer = client.run(&job)?;
//! println!("{:?} after {} us", answer.outcome, answer.micros);
//! # Ok::<(), orrery_warm::client::Error>(())
//! ```
//!
//! [`run_as_python`] is all that and a whole process besides: it behaves as `python3` would behave in its place.

mod as_python;
mod job;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::protocol::{self, Answer, Fate, Health, Question, Reloaded, Reply, RequestId};
use crate::server::{control_path, is_claimed};

pub use as_python::{AsPython, become_python, exit_status, run_as_python};
pub use job::{Job, Source};

/// Why a program could not be brought to its end by the server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No server listens at the path.
    #[error("no server listens on {socket} (start one with `orrery warm serve --python --socket {socket}`)")]
    NoServer {
        /// The path.
        socket: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// All workers are busy and the queue is full.
    #[error("the server on {socket} is busy and its queue is full: try again later, or wait with --wait")]
    Busy {
        /// The path.
        socket: PathBuf,
    },
    /// The conversation failed.
    #[error(transparent)]
    Protocol(#[from] protocol::Error),
    /// The worker ended, and so did the server before it could tell how.
    #[error("the server ended while the program ran: how far it came is unknown")]
    ServerLost,
    /// The server ended, or the worker did, before anybody had read the request: nothing of the program ran.
    #[error("the server on {socket} ended before a worker took the program, which did not begin: try again")]
    NotBegun {
        /// The path.
        socket: PathBuf,
        /// The system's reason.
        source: protocol::Error,
    },
    /// The server has kept its workers.
    #[error("the server did not reload, and serves as before: {reason}")]
    NotReloaded {
        /// The server's reason.
        reason: String,
    },
    /// A system call of the client failed.
    #[error("{operation}")]
    Io {
        /// What was being done.
        operation: String,
        /// The system's reason.
        source: io::Error,
    },
}

/// How long a server that is there may be without its socket.
const HICCUP: Duration = Duration::from_secs(1);

/// How long a server has to say what became of a program, where nobody is there who could interrupt the question.
const FATE: Duration = Duration::from_secs(10);

/// Knows where a server is.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    patience: Option<Duration>,
}

/// A request on its way: every byte sent to its connection is a signal for the program.
#[derive(Debug)]
pub struct Running {
    connection: OwnedFd,
    id: RequestId,
}

impl Client {
    /// Returns a client of the server on `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), patience: None }
    }

    /// Waits so long for a place in a full queue, instead of failing with [`Error::Busy`].
    #[must_use]
    pub fn wait(mut self, patience: Option<Duration>) -> Self {
        self.patience = patience;
        self
    }

    /// Runs a program to its end.
    ///
    /// A request whose worker died before it had read it (it was killed, say) is sent once more.
    ///
    /// # Errors
    /// See [`Error`]. That the program failed is no error but an [`Answer`].
    pub fn run(&self, job: &Job<'_>) -> Result<Answer, Error> {
        self.run_with(job, |_| {}, |_| {})
    }

    /// Like [`run`](Self::run); calls `connected` before the request is sent, and `started` as soon as it was.
    ///
    /// # Errors
    /// As for `run`.
    pub fn run_with(
        &self,
        job: &Job<'_>,
        mut connected: impl FnMut(BorrowedFd<'_>),
        mut started: impl FnMut(&Running),
    ) -> Result<Answer, Error> {
        let mut second = false;
        loop {
            let connection = self.connect()?;
            connected(connection.as_fd());
            let running = Running::start(connection, job)?;
            started(&running);
            match running.wait() {
                Err(Error::Protocol(error)) if is_loss(&error) => match self.fate(running.id, None)? {
                    Fate::Died(outcome) => return Ok(Answer { outcome, micros: 0 }),
                    // An end of file, and no reset, says that a worker had read the request: it may have run, whatever
                    // the server knows of it.
                    Fate::NotBegun if matches!(error, protocol::Error::Closed) => {
                        return Err(Error::ServerLost);
                    }
                    Fate::NotBegun if second => return Err(error.into()),
                    Fate::NotBegun => second = true,
                },
                other => return other,
            }
        }
    }

    /// Runs a program to its end, and never sends it twice: a program of which it cannot be known how far it came must not
    /// begin again.
    ///
    /// Calls `connected` before the request is sent, for a caller who may want to end the program: `shutdown(2)` of the
    /// connection, or of a duplicate, does. No signals may be sent on it, as bytes that a worker has not read look like a
    /// request that no worker has read.
    ///
    /// # Errors
    /// [`Error::NoServer`], [`Error::Busy`] and [`Error::NotBegun`] where nothing of the program ran; after
    /// [`Error::ServerLost`], and what can go wrong in the conversation, it may have run.
    pub fn run_once(&self, job: &Job<'_>, connected: impl FnOnce(BorrowedFd<'_>)) -> Result<Answer, Error> {
        let connection = self.connect()?;
        connected(connection.as_fd());
        // A request is read as a whole before anything of it runs, and a reset says that something was not read.
        let not_begun = |error| match error {
            Error::Protocol(source) if is_loss(&source) && !matches!(source, protocol::Error::Closed) => {
                Error::NotBegun { socket: self.socket.clone(), source }
            }
            other => other,
        };
        let running = Running::start(connection, job).map_err(not_begun)?;
        match running.wait() {
            Err(Error::Protocol(protocol::Error::Closed)) => match self.fate(running.id, Some(FATE))? {
                Fate::Died(outcome) => Ok(Answer { outcome, micros: 0 }),
                Fate::NotBegun => Err(Error::ServerLost),
            },
            other => other.map_err(not_begun),
        }
    }

    /// Sends a program without waiting for it.
    ///
    /// # Errors
    /// [`Error::NoServer`], [`Error::Busy`], and what can go wrong in the conversation.
    pub fn send(&self, job: &Job<'_>) -> Result<Running, Error> {
        Running::start(self.connect()?, job)
    }

    /// Returns how the server is.
    ///
    /// # Errors
    /// [`Error::NoServer`], and what can go wrong in the conversation.
    pub fn health(&self) -> Result<Health, Error> {
        self.health_within(None)
    }

    /// Returns how the server is, if it says so within the limit: a server that is stopped or stuck never does.
    ///
    /// # Errors
    /// As for [`health`](Self::health); `EAGAIN` in [`protocol::Error::Io`] after the limit.
    pub fn health_within(&self, limit: Option<Duration>) -> Result<Health, Error> {
        match self.ask_within(&Question::Health, limit)? {
            Reply::Health(health) => Ok(health),
            Reply::Fate(_) | Reply::Reload(_) => Err(Error::ServerLost),
        }
    }

    /// Has the server replace its workers by new ones, which import everything again, and waits until they are ready.
    /// What has begun, and what is queued, is finished by the former workers; no request is refused for a reload.
    ///
    /// # Errors
    /// [`Error::NotReloaded`], with the workers of before; [`Error::NoServer`], and what can go wrong in the
    /// conversation.
    pub fn reload(&self) -> Result<u32, Error> {
        match self.ask(&Question::Reload)? {
            Reply::Reload(Reloaded::Done { workers }) => Ok(workers),
            Reply::Reload(Reloaded::Failed(reason)) => Err(Error::NotReloaded { reason }),
            Reply::Fate(_) | Reply::Health(_) => Err(Error::ServerLost),
        }
    }

    fn fate(&self, id: RequestId, limit: Option<Duration>) -> Result<Fate, Error> {
        match self.ask_within(&Question::Fate(id), limit) {
            Ok(Reply::Fate(fate)) => Ok(fate),
            Ok(Reply::Health(_) | Reply::Reload(_)) | Err(Error::NoServer { .. } | Error::Protocol(_)) => {
                Err(Error::ServerLost)
            }
            Err(error) => Err(error),
        }
    }

    fn ask(&self, question: &Question) -> Result<Reply, Error> {
        self.ask_within(question, None)
    }

    fn ask_within(&self, question: &Question, limit: Option<Duration>) -> Result<Reply, Error> {
        let path = control_path(&self.socket);
        let no_server =
            |errno: rustix::io::Errno| Error::NoServer { socket: self.socket.clone(), source: errno.into() };
        let connection = open_socket(SocketFlags::CLOEXEC)?;
        if limit.is_some() {
            // The time-out for sending bounds connect(2) too.
            for option in [rustix::net::sockopt::Timeout::Recv, rustix::net::sockopt::Timeout::Send] {
                rustix::net::sockopt::set_socket_timeout(&connection, option, limit)
                    .map_err(io_error("cannot set a time-out of a socket"))?;
            }
        }
        let address = SocketAddrUnix::new(&path).map_err(no_server)?;
        rustix::net::connect(&connection, &address).map_err(no_server)?;
        Ok(protocol::ask(connection.as_fd(), question)?)
    }

    /// Connects without waiting, so that a full queue shows; then makes the connection a waiting one.
    fn connect(&self) -> Result<OwnedFd, Error> {
        let begun = Instant::now();
        loop {
            match self.connect_once() {
                // A server that is there, but whose socket is just being put up.
                Err(Error::NoServer { .. }) if begun.elapsed() < HICCUP && is_claimed(&self.socket) => {
                    std::thread::sleep(HICCUP / 100);
                }
                other => return other,
            }
        }
    }

    fn connect_once(&self) -> Result<OwnedFd, Error> {
        let no_server =
            |errno: rustix::io::Errno| Error::NoServer { socket: self.socket.clone(), source: errno.into() };
        let connection = open_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        let address = SocketAddrUnix::new(&self.socket).map_err(no_server)?;
        match rustix::net::connect(&connection, &address) {
            Ok(()) => {}
            Err(rustix::io::Errno::AGAIN) => self.connect_patiently(&connection, &address)?,
            Err(errno) => return Err(no_server(errno)),
        }
        rustix::io::ioctl_fionbio(&connection, false).map_err(io_error("FIONBIO"))?;
        Ok(connection)
    }

    fn connect_patiently(&self, connection: &OwnedFd, address: &SocketAddrUnix) -> Result<(), Error> {
        let busy = || Error::Busy { socket: self.socket.clone() };
        let patience = self.patience.ok_or_else(busy)?;
        rustix::io::ioctl_fionbio(connection, false).map_err(io_error("FIONBIO"))?;
        // For Unix sockets the time-out for sending bounds connect(2) too.
        let timeout = Some(patience.max(Duration::from_millis(1)));
        let set = |timeout| {
            let option = rustix::net::sockopt::Timeout::Send;
            rustix::net::sockopt::set_socket_timeout(connection, option, timeout)
                .map_err(io_error("SO_SNDTIMEO"))
        };
        set(timeout)?;
        loop {
            match rustix::net::connect(connection, address) {
                Ok(()) => return set(None),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Err(busy()),
                Err(errno) => {
                    return Err(Error::NoServer { socket: self.socket.clone(), source: errno.into() });
                }
            }
        }
    }
}

impl Running {
    fn start(connection: OwnedFd, job: &Job<'_>) -> Result<Self, Error> {
        let id = RequestId::random().map_err(io_error("getrandom"))?;
        job.send(connection.as_fd(), id)?;
        Ok(Self { connection, id })
    }

    /// The connection: for a signal handler, which may send a signal's number on it.
    #[must_use]
    pub fn connection(&self) -> &OwnedFd {
        &self.connection
    }

    /// Sends the program a signal.
    ///
    /// # Errors
    /// `EPIPE` where it has ended.
    pub fn signal(&self, signal: u8) -> io::Result<()> {
        rustix::net::send(&self.connection, &[signal], rustix::net::SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Waits for the program's end.
    ///
    /// # Errors
    /// [`Error::Protocol`] where the connection ends without an answer.
    pub fn wait(&self) -> Result<Answer, Error> {
        Ok(protocol::decode(&protocol::receive(self.connection.as_fd())?.body)?)
    }
}

/// Returns whether the connection ended, which says nothing about how the program did.
fn is_loss(error: &protocol::Error) -> bool {
    match error {
        protocol::Error::Closed => true,
        protocol::Error::Io { source, .. } => {
            matches!(source.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
        }
        _ => false,
    }
}

fn open_socket(flags: SocketFlags) -> Result<OwnedFd, Error> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(io_error("cannot open a socket"))
}

fn io_error<E: Into<io::Error>>(operation: &str) -> impl FnOnce(E) -> Error {
    move |source| Error::Io { operation: operation.to_owned(), source: source.into() }
}
