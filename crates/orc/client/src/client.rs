//! A program's connection to the store.

use std::fs::File;
use std::io::{self, Seek as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use orrery_orc_wire::packet;
use orrery_orc_wire::protocol::{
    Content, EXECUTABLE, INLINE, LONGEST, Piece, PieceAnswer, Refusal, Reply, Request, decode_reply,
};
use orrery_orc_wire::report::Report;
use orrery_orc_wire::{ObjectId, SOCKET, default_directory, protocol, sealed_file};

use crate::error::{Error, Result};
use crate::object::{Hold, Object};

/// How long an answer may take. The largest objects need a second; a store that starts again needs less.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often one asks again where the store is busy, in pauses that grow from a millisecond.
const ATTEMPTS: u32 = 12;

/// What a new object is to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(u32);

impl Flags {
    /// It may be mapped executable; the store's policy has to allow it.
    pub const EXECUTABLE: Self = Self(EXECUTABLE);
    /// It is for everybody, whatever their trust domain; for the superuser and whom the store trusts.
    pub const PUBLIC: Self = Self(protocol::PUBLIC);
    /// It has pages of its own, however small it is.
    pub const ALONE: Self = Self(protocol::ALONE);

    /// None.
    pub const fn none() -> Self {
        Self(0)
    }

    /// Flags from their bits; `None` where there are others among them.
    pub fn from_bits(bits: u32) -> Option<Self> {
        (bits & !protocol::FLAGS == 0).then_some(Self(bits))
    }

    /// These and those.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A connection to the store. Clones share it; threads may use it at the same time, one after the other.
///
/// After a fork the child makes a connection of its own at its first request. Objects that it inherited stay held for as long as
/// it or its parent lives.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    line: Mutex<Line>,
}

#[derive(Debug)]
struct Line {
    socket: OwnedFd,
    /// The process that connected.
    process: u32,
    tag: u64,
    buffer: Vec<u8>,
    /// Which connection this is, counted from 0.
    generation: u64,
}

/// An answer with what came with it.
struct Answer {
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

    /// Connects to the store in `directory`, or at `directory` where that is a socket itself (a tenant's). The process at the
    /// other end must belong to the superuser or to this user.
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Owner`].
    pub fn connect_to(directory: &Path) -> Result<Self> {
        let path = if directory.is_dir() { directory.join(SOCKET) } else { directory.to_owned() };
        let line = Line {
            socket: dial(&path)?,
            process: std::process::id(),
            tag: 0,
            buffer: vec![0; LONGEST],
            generation: 0,
        };
        Ok(Self { shared: Arc::new(Shared { path, line: Mutex::new(line) }) })
    }

    /// Gives `bytes` to the store, which copies them, and has the object.
    ///
    /// # Errors
    /// [`Error::Refused`]: quota, size, policy. [`Error::Broken`].
    pub fn register(&self, bytes: &[u8], flags: Flags) -> Result<Object> {
        self.register_expecting(bytes, flags, None)
    }

    /// Like [`Client::register`], and has the store check the name.
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
        let carrier;
        let descriptors: &[BorrowedFd<'_>];
        let one;
        let content = if bytes.len() <= INLINE {
            descriptors = &[];
            Content::Inline(bytes)
        } else {
            carrier = carry(bytes)?;
            one = [carrier.as_fd()];
            descriptors = &one;
            Content::Descriptor { length: bytes.len() as u64 }
        };
        let request = Request::Register { flags: flags.0, expected, content };
        let answer = self.ask(operation, &request, descriptors)?;
        let object = self.take(operation, answer)?;
        // The name is what was asked for in effect: a store that mixed objects up is not to be believed.
        if expected.is_some_and(|expected| expected != object.id()) || object.len() != bytes.len() {
            return Err(Error::WrongBytes { id: object.id() });
        }
        Ok(object)
    }

    /// Gives the first `length` bytes of a memory file to the store, which copies them.
    ///
    /// # Errors
    /// Those of [`Client::register`]; [`Refusal::Descriptor`], [`Refusal::Changed`].
    pub fn register_file(&self, memory: BorrowedFd<'_>, length: u64, flags: Flags) -> Result<Object> {
        let operation = "register a memory file";
        let content = Content::Descriptor { length };
        let request = Request::Register { flags: flags.0, expected: None, content };
        let answer = self.ask(operation, &request, &[memory])?;
        self.take(operation, answer)
    }

    /// Has the object of the bytes that a file has now: one copy for all files that have the same ones. For models, dictionaries,
    /// tables, which programs map instead of reading them. What was cached of the file is given back to the kernel.
    ///
    /// # Errors
    /// [`Error::System`] where the file cannot be read; those of [`Client::register`].
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
                self.register_file(memory.as_fd(), length, Flags::ALONE)
            }
            other => other,
        }?;
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        Ok(object)
    }

    /// Has the object of this name, if this trust domain or the public has it.
    ///
    /// # Errors
    /// [`Refusal::NotFound`]; [`Error::NotSealed`], [`Error::Broken`].
    pub fn request(&self, id: ObjectId) -> Result<Object> {
        let operation = "request an object";
        let answer = self.ask(operation, &Request::Request(id), &[])?;
        let object = self.take(operation, answer)?;
        if object.id() == id { Ok(object) } else { Err(Error::WrongBytes { id }) }
    }

    /// Has the objects that have the bytes of these pieces of files, each with a descriptor that is open for reading; the store
    /// reads what it does not know. At most [`MOST_PIECES`](protocol::MOST_PIECES).
    ///
    /// Gives what was said of each piece, and the memory files of those that there are, in order.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Broken`], [`Error::NotSealed`].
    pub fn files(&self, pieces: &[(Piece, BorrowedFd<'_>)]) -> Result<(Vec<PieceAnswer>, Vec<OwnedFd>)> {
        let operation = "request pieces of files";
        let descriptors: Vec<BorrowedFd<'_>> = pieces.iter().map(|(_, fd)| *fd).collect();
        let request = Request::Files(pieces.iter().map(|(piece, _)| *piece).collect());
        let Answer { reply, descriptors, .. } = self.ask(operation, &request, &descriptors)?;
        let Reply::Pieces(answers) = reply else { return Err(nonsense(operation)) };
        let good = answers.iter().filter(|answer| answer.refusal.is_none()).count();
        if good != descriptors.len() || answers.len() != pieces.len() {
            return Err(nonsense(operation));
        }
        let served = answers.iter().zip(pieces).filter(|(answer, _)| answer.refusal.is_none());
        for ((answer, (piece, _)), fd) in served.zip(&descriptors) {
            let end = answer.offset.saturating_add(piece.length);
            if sealed_file::strength(fd.as_fd(), end).is_none() {
                return Err(Error::NotSealed { id: ObjectId([0; 32]) });
            }
        }
        Ok((answers, descriptors))
    }

    /// What the store tells of itself, as far as this process may know.
    ///
    /// # Errors
    /// [`Error::Broken`].
    pub fn report(&self) -> Result<Report> {
        let operation = "ask for a report";
        let Answer { reply, mut descriptors, .. } = self.ask(operation, &Request::Report, &[])?;
        let (Reply::Report { length }, Some(fd)) = (reply, descriptors.pop()) else {
            return Err(nonsense(operation));
        };
        let mut text = vec![0; usize::try_from(length).unwrap_or(0).min(1 << 30)];
        let mut filled = 0;
        while filled < text.len() {
            match rustix::io::retry_on_intr(|| rustix::io::pread(&fd, &mut text[filled..], filled as u64)) {
                Ok(0) | Err(_) => return Err(nonsense(operation)),
                Ok(count) => filled += count,
            }
        }
        serde_json::from_slice(&text).map_err(|error| Error::Broken { operation, source: error.into() })
    }

    /// One hold less. `generation` is the connection through which the hold was had: with that connection all its holds have
    /// gone.
    pub(crate) fn release(&self, id: ObjectId, generation: u64) -> Result<()> {
        let operation = "release an object";
        let mut line = self.line();
        if line.generation != generation || line.process != std::process::id() {
            return Ok(());
        }
        match line.exchange(operation, &Request::Release(id), &[])?.reply {
            Reply::Released => Ok(()),
            Reply::Refused(refusal) => Err(Error::Refused { operation, refusal }),
            _ => Err(nonsense(operation)),
        }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.shared.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(
        &self,
        operation: &'static str,
        request: &Request<'_>,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Answer> {
        let mut attempt = 0;
        loop {
            let mut line = self.line();
            if line.process != std::process::id() {
                self.redial(&mut line)?;
            }
            let answer = match line.exchange(operation, request, descriptors) {
                // The store ended and was started anew by hand.
                Err(Error::Broken { source, .. }) if source.kind() != io::ErrorKind::InvalidData => {
                    self.redial(&mut line)?;
                    line.exchange(operation, request, descriptors)?
                }
                other => other?,
            };
            drop(line);
            match answer.reply {
                Reply::Refused(Refusal::Busy) if attempt < ATTEMPTS => {
                    std::thread::sleep(Duration::from_millis(1 << attempt.min(8)));
                    attempt += 1;
                }
                Reply::Refused(refusal) => return Err(Error::Refused { operation, refusal }),
                _ => return Ok(answer),
            }
        }
    }

    fn redial(&self, line: &mut Line) -> Result<()> {
        // In a forked child this closes a duplicate: the parent's connection stays.
        line.socket = dial(&self.shared.path)?;
        line.process = std::process::id();
        line.generation += 1;
        Ok(())
    }

    fn take(&self, operation: &'static str, answer: Answer) -> Result<Object> {
        let Answer { reply: Reply::Handle(handle), mut descriptors, generation } = answer else {
            return Err(nonsense(operation));
        };
        let fd = descriptors.pop().ok_or_else(|| nonsense(operation))?;
        let held = Hold { client: self.clone(), generation, id: handle.id };
        Object::new(held, handle, fd)
    }
}

impl Line {
    /// Sends a request and waits for its answer; sends it again where the store was replaced meanwhile.
    fn exchange(
        &mut self,
        operation: &'static str,
        request: &Request<'_>,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Answer> {
        let broken = |errno: rustix::io::Errno| Error::Broken { operation, source: errno.into() };
        self.tag += 1;
        let message = request.encode(self.tag);
        let mut sent = false;
        loop {
            if !sent {
                packet::send(self.socket.as_fd(), &message, descriptors, SendFlags::empty())
                    .map_err(broken)?;
                sent = true;
            }
            let packet =
                packet::receive(self.socket.as_fd(), &mut self.buffer, RecvFlags::empty()).map_err(broken)?;
            if packet.length == 0 {
                let source = io::Error::new(io::ErrorKind::ConnectionReset, "it was closed");
                return Err(Error::Broken { operation, source });
            }
            let bytes = self.buffer.get(..packet.length).unwrap_or_default();
            match decode_reply(bytes) {
                _ if packet.cut => return Err(Error::System { operation, errno: rustix::io::Errno::MFILE }),
                Some((0, Reply::Restarted)) => sent = false,
                Some((tag, reply)) if tag == self.tag => {
                    return Ok(Answer {
                        reply,
                        descriptors: packet.descriptors,
                        generation: self.generation,
                    });
                }
                // A second answer to what was asked twice.
                Some(_) => {}
                None => return Err(nonsense(operation)),
            }
        }
    }
}

fn nonsense(operation: &'static str) -> Error {
    Error::Broken {
        operation,
        source: io::Error::new(io::ErrorKind::InvalidData, "the answer makes no sense"),
    }
}

/// Connects, and looks who is there.
fn dial(path: &Path) -> Result<OwnedFd> {
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
    // Connecting may take as long as sending: a store that hangs soon has more callers than it listens to.
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE)).map_err(failed)?;
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE)).map_err(failed)?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address)).map_err(failed)?;
    let uid = socket_peercred(&socket).map_err(failed)?.uid;
    if !uid.is_root() && uid != rustix::process::geteuid() {
        return Err(Error::Owner { path: path.to_owned(), uid: uid.as_raw() });
    }
    Ok(orrery_sys::descriptors::raise(socket))
}

/// A memory file with these bytes, for the journey to the store.
fn carry(bytes: &[u8]) -> Result<OwnedFd> {
    let failed = |errno| Error::System { operation: "carry an object to the store", errno };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("orc:new", flags).map_err(failed)?;
    let mut written = 0;
    while written < bytes.len() {
        written += rustix::io::retry_on_intr(|| rustix::io::write(&fd, &bytes[written..])).map_err(failed)?;
    }
    // Not needed, as the store copies: it only shows good will.
    let _ = rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE);
    Ok(fd)
}
