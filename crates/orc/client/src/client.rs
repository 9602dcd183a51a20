//! A program's connection to the store.

use std::fs::File;
use std::io::{self, IoSlice, Seek as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use orrery_sys::{peer, scm};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use orrery_orc_wire::protocol::{
    Content, EXECUTABLE, FileRange, FileRangeReply, MAX_INLINE, MAX_MESSAGE, Refusal, Reply, Request,
    decode_reply,
};
use orrery_orc_wire::report::Report;
use orrery_orc_wire::{ObjectId, SOCKET, default_directory, protocol, sealed_file};

use crate::error::{Error, Result};
use crate::object::{Hold, Object};

/// How long a reply may take. The largest objects need a second, a restart of the store less.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How often a request is repeated while the store is busy, in pauses that grow from a millisecond.
const ATTEMPTS: u32 = 12;

/// Properties of a new object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(u32);

impl Flags {
    /// It may be mapped executable; the store's policy has to allow it.
    pub const EXECUTABLE: Self = Self(EXECUTABLE);
    /// It is shared by all trust domains; for root, the store's user, and users that the store names.
    pub const PUBLIC: Self = Self(protocol::PUBLIC);
    /// It has pages of its own, even if it is small.
    pub const OWN_PAGES: Self = Self(protocol::OWN_PAGES);

    /// Returns no flags.
    pub const fn none() -> Self {
        Self(0)
    }

    /// Returns the flags of these bits; `None` if there are unknown ones.
    pub fn from_bits(bits: u32) -> Option<Self> {
        (bits & !protocol::FLAGS == 0).then_some(Self(bits))
    }

    /// Returns both sets of flags.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A connection to the store. Clones share it; threads may use it concurrently, one request at a time.
///
/// After fork(2) the child opens a connection of its own with its first request. Objects that it inherited stay held as long as
/// the child or its parent lives.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    connection: Mutex<Connection>,
}

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    /// The process that connected.
    process: u32,
    tag: u64,
    buffer: Vec<u8>,
    /// The number of this connection, counted from 0.
    generation: u64,
}

/// A reply with its descriptors.
struct Response {
    reply: Reply,
    descriptors: Vec<OwnedFd>,
    generation: u64,
}

impl Client {
    /// Connects to the store in [`default_directory`].
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Owner`].
    pub fn connect() -> Result<Self> {
        Self::connect_to(&default_directory())
    }

    /// Connects to the store in `directory`, or at `directory` if that is a socket itself. The process at the other end must
    /// belong to root or to this user.
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Owner`].
    pub fn connect_to(directory: &Path) -> Result<Self> {
        let path = if directory.is_dir() { directory.join(SOCKET) } else { directory.to_owned() };
        let connection = Connection {
            socket: connect_socket(&path)?,
            process: std::process::id(),
            tag: 0,
            buffer: vec![0; MAX_MESSAGE],
            generation: 0,
        };
        Ok(Self { shared: Arc::new(Shared { path, connection: Mutex::new(connection) }) })
    }

    /// Registers `bytes`, which the store copies, and returns the object.
    ///
    /// # Errors
    /// [`Error::Refused`]: quota, size, policy. [`Error::Broken`].
    pub fn register(&self, bytes: &[u8], flags: Flags) -> Result<Object> {
        self.register_expecting(bytes, flags, None)
    }

    /// Like [`Client::register`]; the store also checks the name.
    ///
    /// # Errors
    /// Those of `register`; [`Refusal::Mismatch`].
    pub fn register_expecting(
        &self,
        bytes: &[u8],
        flags: Flags,
        expected: Option<ObjectId>,
    ) -> Result<Object> {
        let operation = "register an object";
        let memory;
        let descriptors: &[BorrowedFd<'_>];
        let one;
        let content = if bytes.len() <= MAX_INLINE {
            descriptors = &[];
            Content::Inline(bytes)
        } else {
            memory = memory_file(bytes)?;
            one = [memory.as_fd()];
            descriptors = &one;
            Content::Descriptor { length: bytes.len() as u64 }
        };
        let request = Request::Register { flags: flags.0, expected, content };
        let response = self.request_reply(operation, &request, descriptors)?;
        let object = self.object_from(operation, response)?;
        // A store that mixes objects up is not believed.
        if expected.is_some_and(|expected| expected != object.id()) || object.len() != bytes.len() {
            return Err(Error::WrongBytes { id: object.id() });
        }
        Ok(object)
    }

    /// Registers the first `length` bytes of a memory file, which the store copies.
    ///
    /// # Errors
    /// Those of [`Client::register`]; [`Refusal::Descriptor`], [`Refusal::Changed`].
    pub fn register_file(&self, memory: BorrowedFd<'_>, length: u64, flags: Flags) -> Result<Object> {
        let operation = "register a memory file";
        let content = Content::Descriptor { length };
        let request = Request::Register { flags: flags.0, expected: None, content };
        let response = self.request_reply(operation, &request, &[memory])?;
        self.object_from(operation, response)
    }

    /// Returns the object of the bytes that a file has now: one copy for all files with the same bytes. This is for models,
    /// dictionaries and tables, which programs map instead of reading them. The cached pages of the file are dropped.
    ///
    /// # Errors
    /// [`Error::System`] if the file cannot be read; those of [`Client::register`].
    pub fn open(&self, path: &Path) -> Result<Object> {
        fn failed(operation: &'static str) -> impl Fn(io::Error) -> Error {
            move |error| Error::System {
                operation,
                errno: rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO),
            }
        }
        let mut file = File::open(path).map_err(failed("open a file to be shared"))?;
        let mut hash = blake3::Hasher::new();
        hash.update_reader(&file).map_err(failed("read a file to be shared"))?;
        let id = ObjectId(*hash.finalize().as_bytes());
        let object = match self.request(id) {
            Err(Error::Refused { refusal: Refusal::NotFound, .. }) => {
                let memory = rustix::fs::memfd_create("orc:draft", MemfdFlags::CLOEXEC)
                    .map_err(Error::system("make a memory file"))?;
                let mut memory = File::from(memory);
                file.rewind().map_err(failed("read a file to be shared"))?;
                let length = io::copy(&mut file, &mut memory).map_err(failed("copy a file to be shared"))?;
                self.register_file(memory.as_fd(), length, Flags::OWN_PAGES)
            }
            other => other,
        }?;
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        Ok(object)
    }

    /// Returns the object of this name, if it is public or this trust domain has it.
    ///
    /// # Errors
    /// [`Refusal::NotFound`]; [`Error::NotSealed`], [`Error::Broken`].
    pub fn request(&self, id: ObjectId) -> Result<Object> {
        let operation = "request an object";
        let response = self.request_reply(operation, &Request::Request(id), &[])?;
        let object = self.object_from(operation, response)?;
        if object.id() == id { Ok(object) } else { Err(Error::WrongBytes { id }) }
    }

    /// Returns the objects with the bytes of these ranges of files, each with a descriptor that is open for reading; the store
    /// reads what it does not know. There may be at most [`MAX_FDS`](protocol::MAX_FDS) ranges.
    ///
    /// The result is a reply to each range, and the files of those that have an object, in order.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Broken`], [`Error::NotSealed`].
    pub fn files(
        &self,
        ranges: &[(FileRange, BorrowedFd<'_>)],
    ) -> Result<(Vec<FileRangeReply>, Vec<OwnedFd>)> {
        let operation = "request ranges of files";
        let descriptors: Vec<BorrowedFd<'_>> = ranges.iter().map(|(_, fd)| *fd).collect();
        let request = Request::Files(ranges.iter().map(|(range, _)| *range).collect());
        let Response { reply, descriptors, .. } = self.request_reply(operation, &request, &descriptors)?;
        let Reply::FileRanges(replies) = reply else { return Err(malformed(operation)) };
        let good = replies.iter().filter(|response| response.refusal.is_none()).count();
        if good != descriptors.len() || replies.len() != ranges.len() {
            return Err(malformed(operation));
        }
        let served = replies.iter().zip(ranges).filter(|(response, _)| response.refusal.is_none());
        for ((response, (range, _)), fd) in served.zip(&descriptors) {
            let end = response.offset.saturating_add(range.length);
            if sealed_file::immutability(fd.as_fd(), end).is_none() {
                return Err(Error::NotSealed { id: ObjectId([0; 32]) });
            }
        }
        Ok((replies, descriptors))
    }

    /// Returns the store's report, as far as this process may know it.
    ///
    /// # Errors
    /// [`Error::Broken`].
    pub fn report(&self) -> Result<Report> {
        let operation = "ask for a report";
        let Response { reply, mut descriptors, .. } = self.request_reply(operation, &Request::Report, &[])?;
        let (Reply::Report { length }, Some(fd)) = (reply, descriptors.pop()) else {
            return Err(malformed(operation));
        };
        let mut text = vec![0; usize::try_from(length).unwrap_or(0).min(1 << 30)];
        let mut filled = 0;
        while filled < text.len() {
            match rustix::io::retry_on_intr(|| rustix::io::pread(&fd, &mut text[filled..], filled as u64)) {
                Ok(0) | Err(_) => return Err(malformed(operation)),
                Ok(count) => filled += count,
            }
        }
        serde_json::from_slice(&text).map_err(|error| Error::Broken { operation, source: error.into() })
    }

    /// Drops a hold that was given through the connection `generation`. If there is a new connection, the hold has gone with the
    /// old one.
    pub(crate) fn release(&self, id: ObjectId, generation: u64) -> Result<()> {
        let operation = "release an object";
        let mut connection = self.connection();
        if connection.generation != generation || connection.process != std::process::id() {
            return Ok(());
        }
        match connection.exchange(operation, &Request::Release(id), &[])?.reply {
            Reply::Released => Ok(()),
            Reply::Refused(refusal) => Err(Error::Refused { operation, refusal }),
            _ => Err(malformed(operation)),
        }
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.shared.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn request_reply(
        &self,
        operation: &'static str,
        request: &Request<'_>,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Response> {
        let mut attempt = 0;
        loop {
            let mut connection = self.connection();
            if connection.process != std::process::id() {
                self.reconnect(&mut connection)?;
            }
            let response = match connection.exchange(operation, request, descriptors) {
                // The store has ended, and a new one may have been started.
                Err(Error::Broken { source, .. }) if source.kind() != io::ErrorKind::InvalidData => {
                    self.reconnect(&mut connection)?;
                    connection.exchange(operation, request, descriptors)?
                }
                other => other?,
            };
            drop(connection);
            match response.reply {
                Reply::Refused(Refusal::Busy) if attempt < ATTEMPTS => {
                    std::thread::sleep(Duration::from_millis(1 << attempt.min(8)));
                    attempt += 1;
                }
                Reply::Refused(refusal) => return Err(Error::Refused { operation, refusal }),
                _ => return Ok(response),
            }
        }
    }

    fn reconnect(&self, connection: &mut Connection) -> Result<()> {
        // In a forked child this closes a duplicate: the parent keeps its connection.
        connection.socket = connect_socket(&self.shared.path)?;
        connection.process = std::process::id();
        connection.generation += 1;
        Ok(())
    }

    fn object_from(&self, operation: &'static str, response: Response) -> Result<Object> {
        let Response { reply: Reply::Handle(handle), mut descriptors, generation } = response else {
            return Err(malformed(operation));
        };
        let fd = descriptors.pop().ok_or_else(|| malformed(operation))?;
        let held = Hold { client: self.clone(), generation, id: handle.id };
        Object::new(held, handle, fd)
    }
}

impl Connection {
    /// Sends a request and waits for the reply; repeats it if the store was restarted meanwhile.
    fn exchange(
        &mut self,
        operation: &'static str,
        request: &Request<'_>,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Response> {
        let broken = |errno: rustix::io::Errno| Error::Broken { operation, source: errno.into() };
        self.tag += 1;
        let message = request.encode(self.tag);
        let mut sent = false;
        loop {
            if !sent {
                scm::send(self.socket.as_fd(), &[IoSlice::new(&message)], descriptors, SendFlags::empty())
                    .map_err(broken)?;
                sent = true;
            }
            let packet =
                scm::receive(self.socket.as_fd(), &mut self.buffer, protocol::MAX_FDS, RecvFlags::empty())
                    .map_err(broken)?;
            if packet.length == 0 {
                let source = io::Error::new(io::ErrorKind::ConnectionReset, "it was closed");
                return Err(Error::Broken { operation, source });
            }
            let bytes = self.buffer.get(..packet.length).unwrap_or_default();
            match decode_reply(bytes) {
                _ if packet.truncated => {
                    return Err(Error::System { operation, errno: rustix::io::Errno::MFILE });
                }
                Some((0, Reply::Restarted)) => sent = false,
                Some((tag, reply)) if tag == self.tag => {
                    return Ok(Response { reply, descriptors: packet.fds, generation: self.generation });
                }
                // This is a second reply to a request that was repeated.
                Some(_) => {}
                None => return Err(malformed(operation)),
            }
        }
    }
}

fn malformed(operation: &'static str) -> Error {
    Error::Broken { operation, source: io::Error::new(io::ErrorKind::InvalidData, "the reply is malformed") }
}

/// Connects to a socket, and checks whose process listens there.
fn connect_socket(path: &Path) -> Result<OwnedFd> {
    let failed = |errno: rustix::io::Errno| Error::Connect { path: path.to_owned(), source: errno.into() };
    let address = if path.as_os_str().as_bytes().is_empty() {
        Err(rustix::io::Errno::NOENT)
    } else {
        SocketAddrUnix::new(path)
    }
    .map_err(failed)?;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(failed)?;
    // The timeout of sending also bounds connecting: the queue of a store that hangs fills up.
    set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT)).map_err(failed)?;
    set_socket_timeout(&socket, Timeout::Send, Some(TIMEOUT)).map_err(failed)?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address)).map_err(failed)?;
    let uid = peer::credentials(socket.as_fd()).map_err(|error| failed(error.errno))?.uid;
    if uid != 0 && uid != rustix::process::geteuid().as_raw() {
        return Err(Error::Owner { path: path.to_owned(), uid });
    }
    Ok(orrery_sys::descriptors::raise(socket))
}

/// Creates a memory file with these bytes, to be sent to the store.
fn memory_file(bytes: &[u8]) -> Result<OwnedFd> {
    let failed = |errno| Error::System { operation: "copy an object for the store", errno };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("orc:new", flags).map_err(failed)?;
    let mut written = 0;
    while written < bytes.len() {
        written += rustix::io::retry_on_intr(|| rustix::io::write(&fd, &bytes[written..])).map_err(failed)?;
    }
    // The store copies the bytes, so this is not necessary.
    let _ = rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE);
    Ok(fd)
}
