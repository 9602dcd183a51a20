//! What clients and the store say to one another, byte by byte.
//!
//! The socket is a `SOCK_SEQPACKET` one: each message is one packet, with descriptors beside it. Numbers are
//! little-endian. Every message begins with the same sixteen bytes:
//!
//! ```text
//! 0        4       8                16
//! | "ORC1" | kind  | tag            | body ...
//! ```
//!
//! The tag is the client's; the answer bears the same one. [`Reply::Restarted`] comes unasked, with tag 0: the store was
//! replaced by a new process that took over the connection, and whatever was asked and not yet answered must be asked
//! again. All requests may be repeated without harm.
//!
//! The layout is fixed by hand, and not by a serialisation library, as `auditor/` speaks it from C without a C library.

use crate::object_id::ObjectId;

/// First bytes of every message; the digit is the version.
pub const MAGIC: [u8; 4] = *b"ORC1";
/// Bytes before the body.
pub const HEADER: usize = 16;
/// Longest message, in bytes.
pub const LONGEST: usize = 40 << 10;
/// Most bytes that [`Content::Inline`] carries; more come in a descriptor.
pub const INLINE: usize = 32 << 10;
/// Most pieces, and so descriptors, in one message.
pub const MOST_PIECES: usize = 64;
/// Bytes of an encoded [`Piece`] and of an encoded [`PieceAnswer`].
pub const PIECE: usize = 24;

/// Bytes of an encoded [`Relocated`].
pub const RELOCATED: usize = 32;

/// The object may be mapped executable.
pub const EXECUTABLE: u32 = 1;
/// The object is for everybody, whatever their trust domain.
pub const PUBLIC: u32 = 2;
/// The object is to have pages of its own, however small it is.
pub const ALONE: u32 = 4;
/// All flags there are.
pub const FLAGS: u32 = EXECUTABLE | PUBLIC | ALONE;

/// Where the bytes of a new object are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// In the message.
    Inline(&'a [u8]),
    /// In a memory file whose descriptor comes with the message: its first so many bytes.
    Descriptor {
        /// How many.
        length: u64,
    },
}

/// A part of a file, whose descriptor comes with the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// [`EXECUTABLE`] or nothing.
    pub flags: u32,
    /// Where it begins in the file: a multiple of 4,096.
    pub offset: u64,
    /// How long it is: a multiple of 4,096. What lies behind the end of the file is zeros, in the last page only.
    pub length: u64,
}

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Take these bytes, copy them into memory of the store's own, and hand that out.
    Register {
        /// [`EXECUTABLE`], [`PUBLIC`], [`ALONE`].
        flags: u32,
        /// What the client thinks that the hash is, to be held against what it is.
        expected: Option<ObjectId>,
        /// The bytes.
        content: Content<'a>,
    },
    /// Hand out the object of this name.
    Request(ObjectId),
    /// One hold less on this object.
    Release(ObjectId),
    /// Hand out the objects that have the bytes of these pieces of files; make them, where there are none. Each piece has a
    /// descriptor, open for reading, which shows that the client may see the bytes.
    Files(Vec<Piece>),
    /// Tell what there is, as far as the client may know.
    Report,
    /// Hand out the [book](Reply::Book) of places, after a place was found for this library.
    Book(Room),
    /// Hand out the objects that these relocated data were remembered as.
    Recall(Vec<Relocated>),
    /// Take these relocated data, in a memory file whose descriptor comes with the message, and remember them.
    Remember(Relocated),
}

/// What a library would like in the book.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// What it is known by; not 0.
    pub key: u64,
    /// Bytes from its first segment's beginning to its last one's end.
    pub length: u64,
    /// Where it begins: at multiples of this, [`PAGE`](orrery_sys::PAGE) or 2 MiB.
    pub alignment: u64,
}

/// A library's relocated data, as they are remembered: a hint by which they are found again, no promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Relocated {
    /// What the library is known by.
    pub key: u64,
    /// Where it lies.
    pub address: u64,
    /// Where in it the data begin.
    pub start: u64,
    /// How long they are.
    pub length: u64,
}

/// An object, as it is handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// Its name.
    pub id: ObjectId,
    /// Where it begins in the memory file.
    pub offset: u64,
    /// How long it is, in bytes.
    pub length: u64,
    /// [`EXECUTABLE`], [`PUBLIC`].
    pub flags: u32,
}

/// What became of one [`Piece`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceAnswer {
    /// Why there is no object, or `None` where there is one, whose descriptor comes with the message, in order.
    pub refusal: Option<Refusal>,
    /// Whether the bytes came from another file: this one's cached pages serve nobody.
    pub duplicate: bool,
    /// Where the object begins in its memory file.
    pub offset: u64,
}

/// What the store answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// An object; its descriptor comes with the message.
    Handle(Handle),
    /// The hold is gone.
    Released,
    /// The pieces, in the order in which they were asked for.
    Pieces(Vec<PieceAnswer>),
    /// A report in JSON: a memory file of this length comes with the message.
    Report {
        /// Bytes.
        length: u64,
    },
    /// The book of the trust domain's places: a memory file of this length comes with the message.
    Book {
        /// Bytes.
        length: u64,
    },
    /// No.
    Refused(Refusal),
    /// The store has a new process: ask again.
    Restarted,
}

/// Why the store says no.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u32)]
pub enum Refusal {
    /// Nothing of that name in the client's trust domain, nor among what is public.
    #[error("no such object in this trust domain")]
    NotFound = 1,
    /// The policy says no to executable or public objects.
    #[error("the store's policy does not allow this client to make such an object executable or public")]
    Denied = 2,
    /// The trust domain's quota is used up by objects that are held.
    #[error(
        "the quota of this trust domain is used up by objects that are held: release some, or raise --quota"
    )]
    Quota = 3,
    /// The object is larger than any may be, or empty.
    #[error("the object is empty, or larger than the store takes (--largest)")]
    Size = 4,
    /// The bytes have another hash.
    #[error("the bytes do not have the hash that was named")]
    Mismatch = 5,
    /// The descriptor is not of the kind that is needed.
    #[error(
        "the descriptor is missing or of the wrong kind: objects come from memory files (memfd_create), pieces from regular files open for reading"
    )]
    Descriptor = 6,
    /// The message makes no sense.
    #[error("the message makes no sense")]
    Malformed = 7,
    /// Too much is under way.
    #[error("the store is busy: try again")]
    Busy = 8,
    /// The file changed, or shrank, while it was read.
    #[error("the content changed or ended while it was read")]
    Changed = 9,
    /// The file lies on a file system that might let the store wait for ever.
    #[error("the file lies on a file system whose answers may never come (FUSE, network)")]
    FileSystem = 10,
    /// Out of memory or descriptors.
    #[error("the store is out of memory or descriptors")]
    Exhausted = 11,
    /// The client holds no such object.
    #[error("this client does not hold that object")]
    NotHeld = 12,
}

impl Refusal {
    /// The refusal of this number.
    pub fn from_number(number: u32) -> Option<Self> {
        use Refusal::{
            Busy, Changed, Denied, Descriptor, Exhausted, FileSystem, Malformed, Mismatch, NotFound, NotHeld,
            Quota, Size,
        };
        [
            NotFound, Denied, Quota, Size, Mismatch, Descriptor, Malformed, Busy, Changed, FileSystem,
            Exhausted, NotHeld,
        ]
        .into_iter()
        .find(|refusal| *refusal as u32 == number)
    }
}

const REGISTER: u32 = 1;
const REQUEST: u32 = 2;
const RELEASE: u32 = 3;
const FILES: u32 = 4;
const REPORT: u32 = 5;
const BOOK: u32 = 6;
const RECALL: u32 = 7;
const REMEMBER: u32 = 8;
const HANDLE: u32 = 0x101;
const RELEASED: u32 = 0x102;
const PIECES: u32 = 0x103;
const REPORTED: u32 = 0x104;
const REFUSED: u32 = 0x105;
const RESTARTED: u32 = 0x106;
const BOOKED: u32 = 0x107;

const NONE: [u8; 32] = [0; 32];
const INLINE_CONTENT: u32 = 0;
const DESCRIPTOR_CONTENT: u32 = 1;

impl Request<'_> {
    /// The message, ready to send.
    pub fn encode(&self, tag: u64) -> Vec<u8> {
        match self {
            Self::Register { flags, expected, content } => {
                let mut out = begin(REGISTER, tag);
                let kind = match content {
                    Content::Inline(_) => INLINE_CONTENT,
                    Content::Descriptor { .. } => DESCRIPTOR_CONTENT,
                };
                out.extend(flags.to_le_bytes());
                out.extend(kind.to_le_bytes());
                out.extend(expected.map_or(NONE, |id| id.0));
                match content {
                    Content::Inline(bytes) => out.extend(*bytes),
                    Content::Descriptor { length } => out.extend(length.to_le_bytes()),
                }
                out
            }
            Self::Request(id) => [begin(REQUEST, tag).as_slice(), &id.0].concat(),
            Self::Release(id) => [begin(RELEASE, tag).as_slice(), &id.0].concat(),
            Self::Files(pieces) => {
                let mut out = begin(FILES, tag);
                for piece in pieces {
                    out.extend(piece.flags.to_le_bytes());
                    out.extend([0; 4]);
                    out.extend(piece.offset.to_le_bytes());
                    out.extend(piece.length.to_le_bytes());
                }
                out
            }
            Self::Report => begin(REPORT, tag),
            Self::Book(Room { key, length, alignment }) => {
                let mut out = begin(BOOK, tag);
                out.extend([key, length, alignment].into_iter().flat_map(|word| word.to_le_bytes()));
                out
            }
            Self::Recall(names) => {
                let mut out = begin(RECALL, tag);
                names.iter().for_each(|name| name.encode(&mut out));
                out
            }
            Self::Remember(name) => {
                let mut out = begin(REMEMBER, tag);
                name.encode(&mut out);
                out
            }
        }
    }
}

/// Reads a request and its tag.
///
/// # Errors
/// The tag, as far as there is one, where the bytes are no request: the answer is [`Refusal::Malformed`].
pub fn decode_request(message: &[u8]) -> Result<(u64, Request<'_>), u64> {
    let (kind, tag, body) = open(message).ok_or(0_u64)?;
    let request = match kind {
        REGISTER => register(body),
        REQUEST => id(body).map(Request::Request),
        RELEASE => id(body).map(Request::Release),
        FILES => pieces(body).map(Request::Files),
        REPORT if body.is_empty() => Some(Request::Report),
        BOOK => room(body).map(Request::Book),
        RECALL => recall(body).map(Request::Recall),
        REMEMBER => relocated(body).map(Request::Remember),
        _ => None,
    };
    request.map(|request| (tag, request)).ok_or(tag)
}

fn register(mut body: &[u8]) -> Option<Request<'_>> {
    let flags = number32(&mut body)?;
    let kind = number32(&mut body)?;
    let expected = body.split_off(..32)?.try_into().ok()?;
    let expected = (expected != NONE).then_some(ObjectId(expected));
    let content = match kind {
        INLINE_CONTENT if body.len() <= INLINE => Content::Inline(body),
        DESCRIPTOR_CONTENT => Content::Descriptor { length: last(body)? },
        _ => return None,
    };
    (flags & !FLAGS == 0).then_some(Request::Register { flags, expected, content })
}

fn pieces(body: &[u8]) -> Option<Vec<Piece>> {
    let whole = body.len().is_multiple_of(PIECE);
    if !whole || body.is_empty() || body.len() > MOST_PIECES * PIECE {
        return None;
    }
    body.chunks(PIECE)
        .map(|mut chunk| {
            let flags = number32(&mut chunk)?;
            let _ = number32(&mut chunk)?;
            let piece = Piece { flags, offset: number64(&mut chunk)?, length: number64(&mut chunk)? };
            (flags & !EXECUTABLE == 0).then_some(piece)
        })
        .collect()
}

fn room(mut body: &[u8]) -> Option<Room> {
    let (key, length) = (number64(&mut body)?, number64(&mut body)?);
    (key != 0).then_some(Room { key, length, alignment: last(body)? })
}

fn relocated(mut body: &[u8]) -> Option<Relocated> {
    let (key, address) = (number64(&mut body)?, number64(&mut body)?);
    Some(Relocated { key, address, start: number64(&mut body)?, length: last(body)? })
}

fn recall(body: &[u8]) -> Option<Vec<Relocated>> {
    let whole = body.len().is_multiple_of(RELOCATED);
    if !whole || body.is_empty() || body.len() > MOST_PIECES * RELOCATED {
        return None;
    }
    body.chunks(RELOCATED).map(relocated).collect()
}

impl Relocated {
    fn encode(&self, out: &mut Vec<u8>) {
        let words = [self.key, self.address, self.start, self.length];
        out.extend(words.into_iter().flat_map(u64::to_le_bytes));
    }
}

impl Reply {
    /// The message, ready to send.
    pub fn encode(&self, tag: u64) -> Vec<u8> {
        match self {
            Self::Handle(handle) => {
                let mut out = begin(HANDLE, tag);
                out.extend(handle.id.0);
                out.extend(handle.offset.to_le_bytes());
                out.extend(handle.length.to_le_bytes());
                out.extend(handle.flags.to_le_bytes());
                out
            }
            Self::Released => begin(RELEASED, tag),
            Self::Pieces(answers) => {
                let mut out = begin(PIECES, tag);
                for answer in answers {
                    out.extend(answer.refusal.map_or(0, |refusal| refusal as u32).to_le_bytes());
                    out.extend(u32::from(answer.duplicate).to_le_bytes());
                    out.extend(answer.offset.to_le_bytes());
                    out.extend([0; 8]);
                }
                out
            }
            Self::Book { length } => [begin(BOOKED, tag).as_slice(), &length.to_le_bytes()].concat(),
            Self::Report { length } => [begin(REPORTED, tag).as_slice(), &length.to_le_bytes()].concat(),
            Self::Refused(refusal) => {
                [begin(REFUSED, tag).as_slice(), &(*refusal as u32).to_le_bytes()].concat()
            }
            Self::Restarted => begin(RESTARTED, tag),
        }
    }
}

/// Reads a reply and its tag; `None` where the bytes are none.
pub fn decode_reply(message: &[u8]) -> Option<(u64, Reply)> {
    let (kind, tag, mut body) = open(message)?;
    let reply = match kind {
        HANDLE => {
            let id = ObjectId(body.split_off(..32)?.try_into().ok()?);
            let (offset, length) = (number64(&mut body)?, number64(&mut body)?);
            Reply::Handle(Handle { id, offset, length, flags: number32(&mut body)? })
        }
        RELEASED => Reply::Released,
        PIECES if body.len().is_multiple_of(PIECE) => Reply::Pieces(
            body.chunks(PIECE)
                .map(|mut chunk| {
                    let refusal = match number32(&mut chunk)? {
                        0 => None,
                        number => Some(Refusal::from_number(number)?),
                    };
                    let duplicate = number32(&mut chunk)? != 0;
                    Some(PieceAnswer { refusal, duplicate, offset: number64(&mut chunk)? })
                })
                .collect::<Option<_>>()?,
        ),
        REPORTED => Reply::Report { length: last(body)? },
        BOOKED => Reply::Book { length: last(body)? },
        REFUSED => Reply::Refused(Refusal::from_number(number32(&mut body)?)?),
        RESTARTED => Reply::Restarted,
        _ => return None,
    };
    Some((tag, reply))
}

fn begin(kind: u32, tag: u64) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(kind.to_le_bytes());
    out.extend(tag.to_le_bytes());
    out
}

fn open(mut message: &[u8]) -> Option<(u32, u64, &[u8])> {
    let magic = message.split_off(..4)?;
    let kind = number32(&mut message)?;
    let tag = number64(&mut message)?;
    (magic == MAGIC).then_some((kind, tag, message))
}

fn number32(from: &mut &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(from.split_off(..4)?.try_into().ok()?))
}

fn number64(from: &mut &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(from.split_off(..8)?.try_into().ok()?))
}

/// The number that is all there is.
fn last(mut from: &[u8]) -> Option<u64> {
    number64(&mut from).filter(|_| from.is_empty())
}

fn id(body: &[u8]) -> Option<ObjectId> {
    Some(ObjectId(body.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn requests() -> Vec<Request<'static>> {
        let expected = Some(ObjectId([7; 32]));
        let piece = Piece { flags: EXECUTABLE, offset: 4096, length: 8192 };
        vec![
            Request::Register { flags: PUBLIC | ALONE, expected, content: Content::Inline(b"bytes") },
            Request::Register { flags: 0, expected: None, content: Content::Descriptor { length: 1 << 40 } },
            Request::Request(ObjectId([1; 32])),
            Request::Release(ObjectId([2; 32])),
            Request::Files(vec![piece; MOST_PIECES]),
            Request::Report,
            Request::Book(Room { key: 1, length: 1 << 22, alignment: 1 << 21 }),
            Request::Recall(vec![Relocated { key: 1, address: 2, start: 3, length: 4 }; MOST_PIECES]),
            Request::Remember(Relocated { key: 5, address: 6, start: 7, length: 8 }),
        ]
    }

    #[test]
    fn messages_are_read_as_they_are_written() {
        for request in requests() {
            let message = request.encode(9);
            assert!(message.len() <= LONGEST);
            assert_eq!(decode_request(&message), Ok((9, request)));
        }
        let handle = Handle { id: ObjectId([3; 32]), offset: 16, length: 5, flags: EXECUTABLE };
        let answer = PieceAnswer { refusal: Some(Refusal::FileSystem), duplicate: true, offset: 4096 };
        for reply in [
            Reply::Handle(handle),
            Reply::Released,
            Reply::Pieces(vec![answer, PieceAnswer { refusal: None, duplicate: false, offset: 0 }]),
            Reply::Report { length: 77 },
            Reply::Refused(Refusal::NotHeld),
            Reply::Restarted,
        ] {
            assert_eq!(decode_reply(&reply.encode(3)), Some((3, reply)));
        }
    }

    #[test]
    fn what_is_cut_off_or_too_long_is_refused() {
        for request in requests() {
            let message = request.encode(5);
            // Bytes in the message may be of any number.
            if let Request::Register { content: Content::Inline(_), .. } = request {
                continue;
            }
            assert_eq!(
                decode_request(&message[..message.len() - 1]),
                Err(if message.len() > HEADER { 5 } else { 0 })
            );
            assert!(decode_request(&[message.as_slice(), &[0]].concat()).is_err());
        }
        let piece = Piece { flags: 0, offset: 0, length: 4096 };
        assert!(decode_request(&Request::Files(vec![piece; MOST_PIECES + 1]).encode(1)).is_err());
        assert!(decode_request(&Request::Files(Vec::new()).encode(1)).is_err());
        let odd = Request::Register { flags: 8, expected: None, content: Content::Inline(b"") };
        assert!(decode_request(&odd.encode(1)).is_err());
    }

    proptest! {
        #[test]
        fn noise_is_read_without_harm(mut noise in proptest::collection::vec(any::<u8>(), 0..200), kind in 0_u32..0x110) {
            let _ = decode_request(&noise);
            let _ = decode_reply(&noise);
            if noise.len() >= 8 {
                noise[..4].copy_from_slice(&MAGIC);
                noise[4..8].copy_from_slice(&kind.to_le_bytes());
            }
            let _ = decode_request(&noise);
            let _ = decode_reply(&noise);
        }
    }
}
