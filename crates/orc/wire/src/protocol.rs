//! The messages of clients and the store, byte by byte.
//!
//! The socket is of type `SOCK_SEQPACKET`: each message is one packet, with descriptors beside it. Integers are little-endian.
//! Every message begins with the same sixteen bytes:
//!
//! ```text
//! 0        4       8                16
//! | "ORC1" | kind  | tag            | body ...
//! ```
//!
//! The client chooses the tag; the reply has the same one. [`Reply::Restarted`] is sent without a request, with tag 0: a new
//! process of the store has taken the connection over, and the client must repeat the request that was not answered. All
//! requests can be repeated without harm.
//!
//! The layout is fixed by hand rather than by a serialisation library, because the auditor implements it in C without a C
//! library.

use crate::object_id::ObjectId;

/// The first bytes of every message; the digit is the version.
pub const MAGIC: [u8; 4] = *b"ORC1";
/// The size of the header.
pub const HEADER: usize = 16;
/// The longest message, in bytes.
pub const MAX_MESSAGE: usize = 40 << 10;
/// The most bytes that [`Content::Inline`] carries; more come in a memory file.
pub const MAX_INLINE: usize = 32 << 10;
/// The most descriptors, and so ranges, of one message.
pub const MAX_FDS: usize = 64;
/// The size of an encoded [`FileRange`] and of an encoded [`FileRangeReply`].
pub const FILE_RANGE_BYTES: usize = 24;

/// The size of an encoded [`RelocatedData`].
pub const RELOCATED_BYTES: usize = 32;

/// The object may be mapped executable.
pub const EXECUTABLE: u32 = 1;
/// The object is shared by all trust domains.
pub const PUBLIC: u32 = 2;
/// The object gets pages of its own, even if it is small.
pub const OWN_PAGES: u32 = 4;
/// All flags of a request.
pub const FLAGS: u32 = EXECUTABLE | PUBLIC | OWN_PAGES;

/// The bytes of a new object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// The content is in the message.
    Inline(&'a [u8]),
    /// The first bytes of a memory file, whose descriptor comes with the message.
    Descriptor {
        /// The number of bytes.
        length: u64,
    },
}

/// A range of a file, whose descriptor comes with the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRange {
    /// The flag [`EXECUTABLE`], or 0.
    pub flags: u32,
    /// Its offset in the file: a multiple of 4,096.
    pub offset: u64,
    /// Its length: a multiple of 4,096. In the last page of the file, the bytes behind its end are zeros.
    pub length: u64,
}

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Copies these bytes into a sealed file, and hands the object out.
    Register {
        /// A combination of [`EXECUTABLE`], [`PUBLIC`] and [`OWN_PAGES`].
        flags: u32,
        /// The hash that the client expects, which the store checks.
        expected: Option<ObjectId>,
        /// The bytes.
        content: Content<'a>,
    },
    /// Hands out the object of this name.
    Request(ObjectId),
    /// Drops one hold of the client on this object.
    Release(ObjectId),
    /// Hands out the objects with the bytes of these ranges of files, and registers those that are new. Each range has a
    /// descriptor that is open for reading, which shows that the client may read the bytes.
    Files(Vec<FileRange>),
    /// Reports the objects that the client may know of.
    Report,
    /// Places this library, and hands out the [table](Reply::PlacementTable).
    PlacementTable(PlacementRequest),
    /// Hands out the objects that were registered for these relocated data.
    FindRelocated(Vec<RelocatedData>),
    /// Registers relocated data, in a memory file whose descriptor comes with the message.
    RegisterRelocated(RelocatedData),
}

/// The address space that a library needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementRequest {
    /// The key of the library; not 0.
    pub key: u64,
    /// Bytes from its first segment's beginning to its last one's end.
    pub length: u64,
    /// It has to begin at a multiple of this: [`PAGE`](orrery_sys::PAGE) or 2 MiB.
    pub alignment: u64,
}

/// Identifies the relocated data of a library. It is a hint by which they are found, and promises nothing about the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RelocatedData {
    /// The key of the library.
    pub key: u64,
    /// The address of the library.
    pub address: u64,
    /// The offset of the data from there.
    pub start: u64,
    /// The length of the data.
    pub length: u64,
}

/// A handle of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle {
    /// The ID of the object.
    pub id: ObjectId,
    /// Its offset in its file.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u64,
    /// A combination of [`EXECUTABLE`] and [`PUBLIC`].
    pub flags: u32,
}

/// The reply to one [`FileRange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRangeReply {
    /// Why there is no object; `None` if there is one, whose descriptor comes with the message, in order.
    pub refusal: Option<Refusal>,
    /// Whether the object is not mapped from this file, so that the file's own cached pages are useless.
    pub duplicate: bool,
    /// The offset of the object in its file.
    pub offset: u64,
}

/// A reply of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// An object; its descriptor comes with the message.
    Handle(Handle),
    /// The hold was dropped.
    Released,
    /// The replies to the ranges, in their order.
    FileRanges(Vec<FileRangeReply>),
    /// A report in JSON: a memory file of this length comes with the message.
    Report {
        /// The length in bytes.
        length: u64,
    },
    /// The placement table of the trust domain: a memory file of this length comes with the message.
    PlacementTable {
        /// The length in bytes.
        length: u64,
    },
    /// The request was refused.
    Refused(Refusal),
    /// The store has a new process: the client must repeat its request.
    Restarted,
}

/// Why the store refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u32)]
pub enum Refusal {
    /// There is no such object in the client's trust domain, nor a public one.
    #[error("no such object in this trust domain")]
    NotFound = 1,
    /// The policy forbids an executable or public object.
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
    /// The bytes have another hash than the client expects.
    #[error("the bytes do not have the hash that was named")]
    Mismatch = 5,
    /// The descriptor is not of the kind that is needed.
    #[error(
        "the descriptor is missing or of the wrong kind: objects come from memory files (memfd_create), ranges from regular files open for reading"
    )]
    Descriptor = 6,
    /// The message is malformed.
    #[error("the message is malformed")]
    Malformed = 7,
    /// Too many requests are under way.
    #[error("the store is busy: try again")]
    Busy = 8,
    /// The file changed, or shrank, while it was read.
    #[error("the content changed or ended while it was read")]
    Changed = 9,
    /// The file is on a file system that might never respond.
    #[error("the file lies on a file system that may never respond (FUSE, network)")]
    FileSystem = 10,
    /// Out of memory or descriptors.
    #[error("the store is out of memory or descriptors")]
    Exhausted = 11,
    /// The client holds no such object.
    #[error("this client does not hold that object")]
    NotHeld = 12,
}

impl Refusal {
    /// Returns the refusal with this code.
    pub fn from_code(number: u32) -> Option<Self> {
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
const PLACEMENT_TABLE: u32 = 6;
const FIND_RELOCATED: u32 = 7;
const REGISTER_RELOCATED: u32 = 8;
const HANDLE: u32 = 0x101;
const RELEASED: u32 = 0x102;
const FILE_RANGES: u32 = 0x103;
const REPORT_REPLY: u32 = 0x104;
const REFUSED: u32 = 0x105;
const RESTARTED: u32 = 0x106;
const PLACEMENT_TABLE_REPLY: u32 = 0x107;

const NONE: [u8; 32] = [0; 32];
const INLINE_CONTENT: u32 = 0;
const DESCRIPTOR_CONTENT: u32 = 1;

impl Request<'_> {
    /// Encodes the message.
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
            Self::Files(ranges) => {
                let mut out = begin(FILES, tag);
                for range in ranges {
                    out.extend(range.flags.to_le_bytes());
                    out.extend([0; 4]);
                    out.extend(range.offset.to_le_bytes());
                    out.extend(range.length.to_le_bytes());
                }
                out
            }
            Self::Report => begin(REPORT, tag),
            Self::PlacementTable(PlacementRequest { key, length, alignment }) => {
                let mut out = begin(PLACEMENT_TABLE, tag);
                out.extend([key, length, alignment].into_iter().flat_map(|word| word.to_le_bytes()));
                out
            }
            Self::FindRelocated(names) => {
                let mut out = begin(FIND_RELOCATED, tag);
                names.iter().for_each(|name| name.encode(&mut out));
                out
            }
            Self::RegisterRelocated(name) => {
                let mut out = begin(REGISTER_RELOCATED, tag);
                name.encode(&mut out);
                out
            }
        }
    }
}

/// Decodes a request and its tag.
///
/// # Errors
/// The tag, or 0 if there is none: the bytes are no request, and the reply is [`Refusal::Malformed`].
pub fn decode_request(message: &[u8]) -> Result<(u64, Request<'_>), u64> {
    let (kind, tag, body) = open(message).ok_or(0_u64)?;
    let request = match kind {
        REGISTER => register(body),
        REQUEST => id(body).map(Request::Request),
        RELEASE => id(body).map(Request::Release),
        FILES => ranges(body).map(Request::Files),
        REPORT if body.is_empty() => Some(Request::Report),
        PLACEMENT_TABLE => placement_request(body).map(Request::PlacementTable),
        FIND_RELOCATED => relocated_list(body).map(Request::FindRelocated),
        REGISTER_RELOCATED => relocated(body).map(Request::RegisterRelocated),
        _ => None,
    };
    request.map(|request| (tag, request)).ok_or(tag)
}

fn register(mut body: &[u8]) -> Option<Request<'_>> {
    let flags = u32_from(&mut body)?;
    let kind = u32_from(&mut body)?;
    let expected = body.split_off(..32)?.try_into().ok()?;
    let expected = (expected != NONE).then_some(ObjectId(expected));
    let content = match kind {
        INLINE_CONTENT if body.len() <= MAX_INLINE => Content::Inline(body),
        DESCRIPTOR_CONTENT => Content::Descriptor { length: only_u64(body)? },
        _ => return None,
    };
    (flags & !FLAGS == 0).then_some(Request::Register { flags, expected, content })
}

fn ranges(body: &[u8]) -> Option<Vec<FileRange>> {
    let whole = body.len().is_multiple_of(FILE_RANGE_BYTES);
    if !whole || body.is_empty() || body.len() > MAX_FDS * FILE_RANGE_BYTES {
        return None;
    }
    body.chunks(FILE_RANGE_BYTES)
        .map(|mut chunk| {
            let flags = u32_from(&mut chunk)?;
            let _ = u32_from(&mut chunk)?;
            let range = FileRange { flags, offset: u64_from(&mut chunk)?, length: u64_from(&mut chunk)? };
            (flags & !EXECUTABLE == 0).then_some(range)
        })
        .collect()
}

fn placement_request(mut body: &[u8]) -> Option<PlacementRequest> {
    let (key, length) = (u64_from(&mut body)?, u64_from(&mut body)?);
    (key != 0).then_some(PlacementRequest { key, length, alignment: only_u64(body)? })
}

fn relocated(mut body: &[u8]) -> Option<RelocatedData> {
    let (key, address) = (u64_from(&mut body)?, u64_from(&mut body)?);
    Some(RelocatedData { key, address, start: u64_from(&mut body)?, length: only_u64(body)? })
}

fn relocated_list(body: &[u8]) -> Option<Vec<RelocatedData>> {
    let whole = body.len().is_multiple_of(RELOCATED_BYTES);
    if !whole || body.is_empty() || body.len() > MAX_FDS * RELOCATED_BYTES {
        return None;
    }
    body.chunks(RELOCATED_BYTES).map(relocated).collect()
}

impl RelocatedData {
    fn encode(&self, out: &mut Vec<u8>) {
        let words = [self.key, self.address, self.start, self.length];
        out.extend(words.into_iter().flat_map(u64::to_le_bytes));
    }
}

impl Reply {
    /// Encodes the message.
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
            Self::FileRanges(replies) => {
                let mut out = begin(FILE_RANGES, tag);
                for reply in replies {
                    out.extend(reply.refusal.map_or(0, |refusal| refusal as u32).to_le_bytes());
                    out.extend(u32::from(reply.duplicate).to_le_bytes());
                    out.extend(reply.offset.to_le_bytes());
                    out.extend([0; 8]);
                }
                out
            }
            Self::PlacementTable { length } => {
                [begin(PLACEMENT_TABLE_REPLY, tag).as_slice(), &length.to_le_bytes()].concat()
            }
            Self::Report { length } => [begin(REPORT_REPLY, tag).as_slice(), &length.to_le_bytes()].concat(),
            Self::Refused(refusal) => {
                [begin(REFUSED, tag).as_slice(), &(*refusal as u32).to_le_bytes()].concat()
            }
            Self::Restarted => begin(RESTARTED, tag),
        }
    }
}

/// Decodes a reply and its tag; returns `None` if the bytes are no reply.
pub fn decode_reply(message: &[u8]) -> Option<(u64, Reply)> {
    let (kind, tag, mut body) = open(message)?;
    let reply = match kind {
        HANDLE => {
            let id = ObjectId(body.split_off(..32)?.try_into().ok()?);
            let (offset, length) = (u64_from(&mut body)?, u64_from(&mut body)?);
            Reply::Handle(Handle { id, offset, length, flags: u32_from(&mut body)? })
        }
        RELEASED => Reply::Released,
        FILE_RANGES if body.len().is_multiple_of(FILE_RANGE_BYTES) => Reply::FileRanges(
            body.chunks(FILE_RANGE_BYTES)
                .map(|mut chunk| {
                    let refusal = match u32_from(&mut chunk)? {
                        0 => None,
                        number => Some(Refusal::from_code(number)?),
                    };
                    let duplicate = u32_from(&mut chunk)? != 0;
                    Some(FileRangeReply { refusal, duplicate, offset: u64_from(&mut chunk)? })
                })
                .collect::<Option<_>>()?,
        ),
        REPORT_REPLY => Reply::Report { length: only_u64(body)? },
        PLACEMENT_TABLE_REPLY => Reply::PlacementTable { length: only_u64(body)? },
        REFUSED => Reply::Refused(Refusal::from_code(u32_from(&mut body)?)?),
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
    let kind = u32_from(&mut message)?;
    let tag = u64_from(&mut message)?;
    (magic == MAGIC).then_some((kind, tag, message))
}

fn u32_from(from: &mut &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(from.split_off(..4)?.try_into().ok()?))
}

fn u64_from(from: &mut &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(from.split_off(..8)?.try_into().ok()?))
}

fn only_u64(mut from: &[u8]) -> Option<u64> {
    u64_from(&mut from).filter(|_| from.is_empty())
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
        let range = FileRange { flags: EXECUTABLE, offset: 4096, length: 8192 };
        vec![
            Request::Register { flags: PUBLIC | OWN_PAGES, expected, content: Content::Inline(b"bytes") },
            Request::Register { flags: 0, expected: None, content: Content::Descriptor { length: 1 << 40 } },
            Request::Request(ObjectId([1; 32])),
            Request::Release(ObjectId([2; 32])),
            Request::Files(vec![range; MAX_FDS]),
            Request::Report,
            Request::PlacementTable(PlacementRequest { key: 1, length: 1 << 22, alignment: 1 << 21 }),
            Request::FindRelocated(vec![RelocatedData { key: 1, address: 2, start: 3, length: 4 }; MAX_FDS]),
            Request::RegisterRelocated(RelocatedData { key: 5, address: 6, start: 7, length: 8 }),
        ]
    }

    #[test]
    fn messages_are_decoded_as_they_were_encoded() {
        for request in requests() {
            let message = request.encode(9);
            assert!(message.len() <= MAX_MESSAGE);
            assert_eq!(decode_request(&message), Ok((9, request)));
        }
        let handle = Handle { id: ObjectId([3; 32]), offset: 16, length: 5, flags: EXECUTABLE };
        let reply = FileRangeReply { refusal: Some(Refusal::FileSystem), duplicate: true, offset: 4096 };
        for reply in [
            Reply::Handle(handle),
            Reply::Released,
            Reply::FileRanges(vec![reply, FileRangeReply { refusal: None, duplicate: false, offset: 0 }]),
            Reply::Report { length: 77 },
            Reply::Refused(Refusal::NotHeld),
            Reply::Restarted,
        ] {
            assert_eq!(decode_reply(&reply.encode(3)), Some((3, reply)));
        }
    }

    #[test]
    fn truncated_and_overlong_messages_are_refused() {
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
        let range = FileRange { flags: 0, offset: 0, length: 4096 };
        assert!(decode_request(&Request::Files(vec![range; MAX_FDS + 1]).encode(1)).is_err());
        assert!(decode_request(&Request::Files(Vec::new()).encode(1)).is_err());
        let odd = Request::Register { flags: 8, expected: None, content: Content::Inline(b"") };
        assert!(decode_request(&odd.encode(1)).is_err());
    }

    proptest! {
        #[test]
        fn random_bytes_do_no_harm(mut noise in proptest::collection::vec(any::<u8>(), 0..200), kind in 0_u32..0x110) {
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
