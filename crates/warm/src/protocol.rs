//! What client and worker say to each other over the Unix stream socket.
//!
//! A conversation is short. The client sends one [`Request`] in one frame; with the frame's first byte travel
//! descriptors (`SCM_RIGHTS`): those of its own descriptors 0, 1, 2 that are open, its working directory
//! (`O_PATH`) and, where there is one, the opened script. The script therefore reads and writes the client's own
//! terminal, files and pipes: nothing is copied through the server, back pressure and `isatty` are the real ones,
//! and a script is read with the client's rights, not with the server's.
//!
//! While the script runs, every further byte from the client is the number of a signal to deliver to it, and the
//! end of the stream means that nobody waits any more. Last, the worker sends one [`Answer`] and closes.
//!
//! The second socket, `PATH.control`, is the master's: it takes a [`Question`] and gives a [`Reply`]. A client asks
//! there when its worker vanished without an answer, because only the master, the worker's parent, knows how a
//! process died.
//!
//! A frame is twelve bytes of header (magic, version, kind, length, little endian) and a body in
//! [postcard](https://postcard.jamesmunns.com/wire-format) encoding.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize};

/// Version of the conversation; both sides must speak the same.
pub const VERSION: u16 = 1;
/// Longest body of a frame in bytes: more than the kernel lets an argument list and environment hold together.
pub const MAX_BODY: usize = 16 << 20;

const MAGIC: [u8; 4] = *b"ORRY";
const HEADER: usize = 12;
/// Descriptors 0, 1, 2, the working directory and the script.
const MAX_DESCRIPTORS: usize = 5;

/// Names one request among all that the server has seen; drawn at random by the client, so that nobody else can
/// ask for its fate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RequestId(pub [u8; 16]);

impl RequestId {
    /// Draws a new id from the kernel's generator
    /// ([`getrandom(2)`](https://man7.org/linux/man-pages/man2/getrandom.2.html)).
    ///
    /// # Errors
    /// What `getrandom` answers; it does not fail on a running system.
    pub fn random() -> io::Result<Self> {
        let mut id = [0; 16];
        let mut filled = 0;
        while filled < id.len() {
            filled += rustix::rand::getrandom(&mut id[filled..], rustix::rand::GetRandomFlags::empty())?;
        }
        Ok(Self(id))
    }
}

/// What to run: the four ways in which `python3` takes a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Program<'a> {
    /// A file, opened by the client and passed as the last descriptor; `path` as it was written.
    Script {
        /// The path as the user wrote it.
        path: &'a [u8],
    },
    /// The text after `-c`.
    Command {
        /// The source text.
        text: &'a [u8],
    },
    /// The name after `-m`.
    Module {
        /// The dotted name of the module.
        name: &'a [u8],
    },
    /// The program is read from descriptor 0.
    Stdin {
        /// Whether it was asked for by a `-`, which then is `sys.argv[0]`.
        dash: bool,
    },
}

/// Options of `python3` itself that a warm interpreter can honour.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options<'a> {
    /// `-u`: standard output and error unbuffered.
    pub unbuffered: bool,
    /// `-B`: write no `.pyc` files.
    pub dont_write_bytecode: bool,
    /// `-P`: do not put the script's directory first in `sys.path`.
    pub safe_path: bool,
    /// The options `-W`, in their order.
    #[serde(borrow)]
    pub warnings: Vec<&'a [u8]>,
}

/// One request, borrowed from the bytes that carry it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request<'a> {
    /// Name of this request.
    pub id: RequestId,
    /// The program to run.
    #[serde(borrow)]
    pub program: Program<'a>,
    /// `sys.argv[1:]`.
    #[serde(borrow)]
    pub arguments: Vec<&'a [u8]>,
    /// `NAME=value` strings, each ended by a zero byte.
    pub environment: &'a [u8],
    /// Path of the client's working directory, for servers that see the file system through another mount.
    pub directory: &'a [u8],
    /// The client's file mode creation mask.
    pub umask: u32,
    /// Bit N is set where the client's descriptor N (0..3) is open and was passed.
    pub streams: u8,
    /// Bit N-1 is set where the client ignores signal N.
    pub ignored_signals: u64,
    /// The interpreter's options.
    #[serde(borrow)]
    pub options: Options<'a>,
}

/// How a script ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// It exited with this status (0..=255).
    Exited(u8),
    /// This signal killed it.
    Signaled(i32),
    /// It ran longer than the server allows.
    TimedOut {
        /// The server's limit.
        limit: Duration,
    },
    /// It needed more memory than the server allows.
    MemoryLimit {
        /// The server's limit in bytes.
        limit: u64,
    },
    /// The client had gone.
    Cancelled,
    /// It was not run, for this reason.
    Refused(String),
}

/// The worker's last word on a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// How the script ended.
    pub outcome: Outcome,
    /// From the moment the worker took the request until everything it did was undone, in microseconds.
    pub micros: u64,
}

/// What a client asks the master.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    /// What became of this request, whose worker closed the connection without an answer?
    Fate(RequestId),
    /// How is the server?
    Health,
    /// Replace the workers by new ones, which import everything again.
    Reload,
}

/// How a reload ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reloaded {
    /// So many new workers serve. Those before them finish what they have begun, and what was queued for them.
    Done {
        /// The number of workers.
        workers: u32,
    },
    /// For this reason the workers are those of before.
    Failed(String),
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fate {
    /// Its worker died with it, in this way.
    Died(Outcome),
    /// No worker had begun it: it may be sent again.
    NotBegun,
}

/// The state of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// Seconds since the server started.
    pub uptime: u64,
    /// Requests that workers have finished.
    pub served: u64,
    /// Workers started to replace ones that died or had to be ended.
    pub restarts: u64,
    /// The workers.
    pub workers: Vec<WorkerHealth>,
}

/// The state of one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerHealth {
    /// Process id.
    pub pid: i32,
    /// Whether its interpreter has started and its modules are imported.
    pub ready: bool,
    /// Whether it runs a request now.
    pub busy: bool,
    /// Requests finished by this process.
    pub served: u64,
}

/// The master's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The answer to [`Question::Fate`].
    Fate(Fate),
    /// The answer to [`Question::Health`].
    Health(Health),
    /// To [`Question::Reload`], when it has ended.
    Reload(Reloaded),
}

/// Why a frame could not be sent or received.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The socket failed.
    #[error("{operation}")]
    Io {
        /// What was being done.
        operation: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// The peer closed where a frame was due.
    #[error("the other side closed the connection without an answer")]
    Closed,
    /// The bytes are not a frame of this protocol.
    #[error("what came is not a frame of the warm protocol (it begins with {begin:02x?})")]
    NotAFrame {
        /// The first bytes.
        begin: [u8; 4],
    },
    /// The peer is of another build.
    #[error(
        "the other side speaks version {theirs} of the warm protocol, this one speaks {VERSION}: run both from one build"
    )]
    Version {
        /// The version of the other side.
        theirs: u16,
    },
    /// The frame is too long.
    #[error(
        "a message of {length} bytes is longer than the {MAX_BODY} allowed: pass large input through a file or stdin"
    )]
    TooLong {
        /// The length of the message.
        length: usize,
    },
    /// The body does not decode.
    #[error("the message cannot be decoded: {0}")]
    Malformed(postcard::Error),
    /// The kernel dropped descriptors, for want of free slots in this process.
    #[error("some of the passed descriptors were lost: this process has reached its limit of open files")]
    DescriptorsLost,
}

impl From<postcard::Error> for Error {
    fn from(error: postcard::Error) -> Self {
        Self::Malformed(error)
    }
}

fn io_error(operation: &'static str) -> impl FnOnce(rustix::io::Errno) -> Error {
    move |errno| Error::Io { operation, source: errno.into() }
}

/// Encodes `body` behind a header, ready to send.
///
/// # Errors
/// [`Error::TooLong`] beyond [`MAX_BODY`].
pub fn encode<T: Serialize>(body: &T) -> Result<Vec<u8>, Error> {
    let mut frame = postcard::to_extend(body, vec![0; HEADER])?;
    write_header(&mut frame)?;
    Ok(frame)
}

/// Like [`encode`], into a buffer; gives the part of it that is the frame.
///
/// # Errors
/// As for `encode`; [`Error::Malformed`] where the buffer is too small.
pub fn encode_into<'a, T: Serialize>(body: &T, buffer: &'a mut [u8]) -> Result<&'a [u8], Error> {
    let room = buffer.get_mut(HEADER..).ok_or(postcard::Error::SerializeBufferFull)?;
    let length = HEADER + postcard::to_slice(body, room)?.len();
    write_header(&mut buffer[..length])?;
    Ok(&buffer[..length])
}

/// Writes the header of a frame whose body is in place.
fn write_header(frame: &mut [u8]) -> Result<(), Error> {
    let length = frame.len() - HEADER;
    let wire_length = u32::try_from(length).ok().filter(|_| length <= MAX_BODY);
    let wire_length = wire_length.ok_or(Error::TooLong { length })?;
    frame[..4].copy_from_slice(&MAGIC);
    frame[4..6].copy_from_slice(&VERSION.to_le_bytes());
    frame[8..12].copy_from_slice(&wire_length.to_le_bytes());
    Ok(())
}

/// Sends a frame made by [`encode`], with `descriptors` on its first byte.
///
/// # Errors
/// [`Error::Io`]; a peer that has gone gives `EPIPE`, never a signal.
pub fn send(socket: BorrowedFd<'_>, frame: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let mut sent = 0;
    while sent < frame.len() {
        match rustix::net::sendmsg(
            socket,
            &[IoSlice::new(&frame[sent..])],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        ) {
            Ok(count) => {
                sent += count;
                ancillary.clear();
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(io_error("cannot send a message")(errno)),
        }
    }
    Ok(())
}

/// A frame's body as it came, and the descriptors that came with it.
#[derive(Debug)]
pub struct Received {
    /// The encoded body: see [`decode`].
    pub body: Vec<u8>,
    /// Descriptors, close-on-exec, in the order in which they were sent.
    pub descriptors: Vec<OwnedFd>,
}

/// Receives one frame.
///
/// Reads no byte beyond the frame, so that what follows can be distinguished: bytes after a request are signals.
///
/// # Errors
/// Every variant of [`Error`]; `EAGAIN` in [`Error::Io`] where the socket has a time-out and it passed.
pub fn receive(socket: BorrowedFd<'_>) -> Result<Received, Error> {
    let mut descriptors = Vec::new();
    let mut header = [0; HEADER];
    fill(socket, &mut header, Some(&mut descriptors))?;
    let length = parse_header(&header)?;
    let mut body = vec![0; length];
    fill(socket, &mut body, None)?;
    Ok(Received { body, descriptors })
}

/// Decodes the body of a received frame; borrowed parts borrow from `body`.
///
/// # Errors
/// [`Error::Malformed`].
pub fn decode<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Error> {
    Ok(postcard::from_bytes(body)?)
}

fn parse_header(header: &[u8; HEADER]) -> Result<usize, Error> {
    let [m0, m1, m2, m3, v0, v1, _, _, l0, l1, l2, l3] = *header;
    let begin = [m0, m1, m2, m3];
    if begin != MAGIC {
        return Err(Error::NotAFrame { begin });
    }
    let theirs = u16::from_le_bytes([v0, v1]);
    if theirs != VERSION {
        return Err(Error::Version { theirs });
    }
    let length = usize::try_from(u32::from_le_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
    if length > MAX_BODY {
        return Err(Error::TooLong { length });
    }
    Ok(length)
}

/// Fills `buffer` from the socket; collects descriptors where `descriptors` is given.
fn fill(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    mut descriptors: Option<&mut Vec<OwnedFd>>,
) -> Result<(), Error> {
    let mut filled = 0;
    while filled < buffer.len() {
        let rest = &mut buffer[filled..];
        let count = match &mut descriptors {
            None => rustix::net::recv(socket, rest, RecvFlags::empty()).map(|(_, count)| count),
            Some(descriptors) => receive_rights(socket, rest, descriptors)?,
        };
        match count {
            Ok(0) => return Err(Error::Closed),
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(io_error("cannot receive a message")(errno)),
        }
    }
    Ok(())
}

fn receive_rights(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> Result<rustix::io::Result<usize>, Error> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
    let received = match received {
        Ok(received) => received,
        Err(errno) => return Ok(Err(errno)),
    };
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Error::DescriptorsLost);
    }
    Ok(Ok(received.bytes))
}

/// Sends one question over a stream, and returns the reply.
///
/// # Errors
/// See [`Error`].
pub fn ask(stream: BorrowedFd<'_>, question: &Question) -> Result<Reply, Error> {
    send(stream, &encode(question)?, &[])?;
    decode(&receive(stream)?.body)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn example(environment: &[u8]) -> Request<'_> {
        Request {
            id: RequestId([7; 16]),
            program: Program::Script { path: b"dir/script.py" },
            arguments: vec![b"one", b"", b"\xff not UTF-8"],
            environment,
            directory: b"/somewhere",
            umask: 0o027,
            streams: 0b101,
            ignored_signals: 1 << (libc::SIGHUP - 1),
            options: Options { unbuffered: true, warnings: vec![b"error"], ..Options::default() },
        }
    }

    #[test]
    fn a_request_arrives_with_its_descriptors_and_what_follows_stays_in_the_socket() {
        let (client, worker) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let environment = vec![b'x'; 300_000];
        let sender = std::thread::spawn({
            let environment = environment.clone();
            move || {
                let frame = encode(&example(&environment)).unwrap();
                send(client.as_fd(), &frame, &[file.as_fd(), file.as_fd()]).unwrap();
                (&client).write_all(&[2]).unwrap();
                client
            }
        });
        let received = receive(worker.as_fd()).unwrap();
        assert_eq!(decode::<Request<'_>>(&received.body).unwrap(), example(&environment));
        assert_eq!(received.descriptors.len(), 2);
        let mut signal = [0; 8];
        let client = sender.join().unwrap();
        assert_eq!((&worker).read(&mut signal).unwrap(), 1);
        assert_eq!(signal[0], 2);
        drop(client);
    }

    #[test]
    fn what_is_not_a_frame_is_refused_by_name() {
        let refused = |bytes: &[u8]| {
            let (client, worker) = UnixStream::pair().unwrap();
            (&client).write_all(bytes).unwrap();
            drop(client);
            receive(worker.as_fd()).map(|_| ()).unwrap_err()
        };
        assert!(
            matches!(refused(b"GET / HTTP/1.1\r\n\r\n"), Error::NotAFrame { begin } if &begin == b"GET ")
        );
        assert!(matches!(refused(b"ORRY\x09\x00\0\0\0\0\0\0"), Error::Version { theirs: 9 }));
        assert!(matches!(refused(b"ORRY\x01\x00\0\0\xff\xff\xff\xff"), Error::TooLong { .. }));
        assert!(matches!(refused(b"ORRY\x01\x00\0\0\x05\0\0\0ab"), Error::Closed));
        assert!(matches!(refused(b""), Error::Closed));
        assert!(decode::<Answer>(b"\xff\xff\xff").is_err());
    }

    #[test]
    fn a_message_beyond_the_limit_is_not_sent() {
        let environment = vec![b'x'; MAX_BODY + 1];
        assert!(matches!(encode(&example(&environment)), Err(Error::TooLong { .. })));
    }
}
