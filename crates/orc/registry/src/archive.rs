//! Layers of images: archives of tar, packed or not, whose entries change the tree of the layers before.
//!
//! Nothing is unpacked: an archive becomes a list of changes, the bytes of its files go to the store one by one, and a tree is made
//! when all layers are known ([`image`](crate::image)). So no entry can be written through a link that another entry has made.

use std::cell::Cell;
use std::io::{self, BufRead, BufReader, Read};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;
use orrery_orc_rootfs::Attributes;
use orrery_orc_rootfs::tree::{Kind, MAX_ENTRIES};
use orrery_orc_wire::ObjectId;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use tar::{Archive, EntryType};

/// Bytes of all paths of a layer.
const MAX_PATHS: usize = 64 << 20;

/// Bytes of headers before the bytes of one file: a name, a link's name and extended attributes.
const MAX_HEADERS: u64 = 8 << 20;

/// Bytes that a decompressor of zstd may look back.
const MAX_WINDOW: u64 = 128 << 20;

/// What begins the name of a file that removes another one of a layer before.
const REMOVED: &[u8] = b".wh.";

/// The name of a file that removes all that its directory has in layers before.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// The names of a path, without empty ones and `.`; none are `..`.
pub type Names = Vec<Vec<u8>>;

/// What one entry of a layer does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A name gets another meaning.
    Put {
        /// The path.
        path: Names,
        /// What it stands for; a link has its target in `first`.
        kind: Put,
        /// Owner, mode, time and extended attributes.
        attributes: Attributes,
    },
    /// A name of a layer before is removed.
    Remove(Names),
    /// All names in a directory of layers before are removed.
    Empty(Names),
}

/// What a name comes to stand for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Put {
    /// Anything but a link.
    Node(Kind),
    /// A further name of what has this path.
    Link(Names),
}

/// A layer that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// It is no archive, or could not be fetched.
    #[error("{0}")]
    Read(#[from] io::Error),
    /// An entry cannot be made.
    #[error("the entry {:?} {reason}", String::from_utf8_lossy(path))]
    Entry {
        /// Its path.
        path: Vec<u8>,
        /// What is wrong with it.
        reason: &'static str,
    },
}

/// Reads a layer, packed by gzip, zstd or not at all. `content` is called with the bytes of each file, in turn, and returns the name and
/// the number of them.
///
/// # Errors
/// [`ArchiveError`], also with the errors of `content`.
pub fn read(
    packed: impl Read,
    mut content: impl FnMut(&mut dyn Read) -> io::Result<(ObjectId, u64)>,
) -> Result<Vec<Change>, ArchiveError> {
    let left = Rc::new(Cell::new(MAX_HEADERS));
    let plain = Limited { from: unpacked(packed)?, left: Rc::clone(&left) };
    let mut archive = Archive::new(plain);
    let (mut changes, mut bytes) = (Vec::new(), 0);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path_bytes().into_owned();
        let bad = |reason| ArchiveError::Entry { path: path.clone(), reason };
        bytes += path.len() + entry.link_name_bytes().map_or(0, |target| target.len()) + 64;
        if bytes > MAX_PATHS || changes.len() >= MAX_ENTRIES {
            return Err(bad("is one too many: the layer has more names than a tree can have"));
        }
        let kind = entry.header().entry_type();
        if kind == EntryType::XGlobalHeader {
            continue;
        }
        let mut names = names(&path).map_err(bad)?;
        if let Some(last) = names.last().filter(|last| last.starts_with(REMOVED)) {
            let removed = last[REMOVED.len()..].to_vec();
            let is_opaque = last == OPAQUE;
            names.pop();
            if is_opaque {
                changes.push(Change::Empty(names));
            } else if removed.starts_with(REMOVED) || matches!(&removed[..], b"" | b"." | b"..") {
                // Marks of AUFS, which mean nothing here.
            } else {
                names.push(removed);
                changes.push(Change::Remove(names));
            }
            continue;
        }
        let attributes = attributes(&mut entry).map_err(bad)?;
        let put = match kind {
            EntryType::Directory => Put::Node(Kind::Directory),
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                // What is read of files is theirs to count.
                left.set(u64::MAX);
                let (id, length) = content(&mut entry)?;
                Put::Node(if length == 0 { Kind::Empty } else { Kind::File { id, length } })
            }
            EntryType::Link => {
                let target = entry.link_name_bytes().ok_or_else(|| bad("is a link without a target"))?;
                Put::Link(self::names(&target).map_err(bad)?)
            }
            EntryType::Symlink => {
                let target = entry.link_name_bytes().ok_or_else(|| bad("is a link without a target"))?;
                Put::Node(Kind::Symlink(target.into_owned()))
            }
            EntryType::Fifo => Put::Node(Kind::Fifo),
            EntryType::Char | EntryType::Block => {
                let (major, minor) = (entry.header().device_major()?, entry.header().device_minor()?);
                let (major, minor) = (major.unwrap_or(0), minor.unwrap_or(0));
                Put::Node(Kind::Device { is_block: kind == EntryType::Block, major, minor })
            }
            _ => return Err(bad("is of a type that is not known")),
        };
        left.set(MAX_HEADERS);
        changes.push(Change::Put { path: names, kind: put, attributes });
    }
    Ok(changes)
}

/// Returns the names of a path.
fn names(path: &[u8]) -> Result<Names, &'static str> {
    let names = path.split(|byte| *byte == b'/').filter(|name| !matches!(*name, b"" | b"."));
    let names: Names = names.map(<[u8]>::to_vec).collect();
    match names.iter().any(|name| name == b"..") {
        true => Err("has a path with `..`"),
        false => Ok(names),
    }
}

/// Returns the attributes of an entry, with what its extended header has in place of the header's.
fn attributes<R: Read>(entry: &mut tar::Entry<'_, R>) -> Result<Attributes, &'static str> {
    const XATTR: &[u8] = b"SCHILY.xattr.";
    let header = entry.header();
    let number = |read: io::Result<u64>| read.ok().and_then(|number| u32::try_from(number).ok());
    let bad = "has an owner, a mode or a time that is no number";
    let mut found = Attributes {
        mode: header.mode().map_err(|_| bad)? & 0o7777,
        uid: number(header.uid()).ok_or(bad)?,
        gid: number(header.gid()).ok_or(bad)?,
        modified: (i64::try_from(header.mtime().map_err(|_| bad)?).map_err(|_| bad)?, 0),
        extended: Vec::new(),
    };
    let extensions = entry.pax_extensions().map_err(|_| "has a bad extended header")?;
    for extension in extensions.into_iter().flatten() {
        let extension = extension.map_err(|_| "has a bad extended header")?;
        let value = extension.value_bytes();
        let text = std::str::from_utf8(value);
        match extension.key_bytes() {
            b"uid" => found.uid = text.ok().and_then(|text| text.parse().ok()).ok_or(bad)?,
            b"gid" => found.gid = text.ok().and_then(|text| text.parse().ok()).ok_or(bad)?,
            b"mtime" => found.modified = text.ok().and_then(time).ok_or(bad)?,
            key => {
                let name = key.strip_prefix(XATTR);
                // Those of overlays say where layers of another machine were.
                if let Some(name) = name.filter(|name| !name.starts_with(b"trusted.overlay.")) {
                    found.extended.retain(|(other, _)| other != name);
                    found.extended.push((name.to_vec(), value.to_vec()));
                }
            }
        }
    }
    found.extended.sort();
    Ok(found)
}

/// Reads seconds with a fraction, such as `-1.25`.
fn time(text: &str) -> Option<(i64, u32)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanoseconds: u32 = digits.parse().ok()?;
    if whole.starts_with('-') && nanoseconds > 0 {
        return Some((seconds.checked_sub(1)?, 1_000_000_000 - nanoseconds));
    }
    Some((seconds, nanoseconds))
}

/// A reader that may be read so much further: what names are made of is in memory.
struct Limited<R> {
    from: R,
    left: Rc<Cell<u64>>,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.left.get()).unwrap_or(usize::MAX);
        if left == 0 && !buffer.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "an entry has more than 8 MiB of headers",
            ));
        }
        let take = buffer.len().min(left);
        let count = self.from.read(&mut buffer[..take])?;
        self.left.set(self.left.get().saturating_sub(count as u64));
        Ok(count)
    }
}

/// Returns the bytes of a file that is packed by gzip or zstd, or not, as its first bytes say.
fn unpacked<'a>(packed: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut packed = BufReader::with_capacity(64 << 10, packed);
    let first = packed.fill_buf()?;
    Ok(match first {
        [0x1f, 0x8b, ..] => Box::new(MultiGzDecoder::new(packed)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
            let mut decoder = FrameDecoder::new();
            decoder.set_max_window_size(MAX_WINDOW);
            Box::new(Frames { packed, decoder, is_within: false })
        }
        _ => Box::new(packed),
    })
}

/// The frames of a file of zstd, one after another; those without content are skipped.
struct Frames<R> {
    packed: BufReader<R>,
    decoder: FrameDecoder,
    is_within: bool,
}

impl<R: Read> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let damaged =
            |error: FrameDecoderError| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
        loop {
            if self.is_within {
                if self.decoder.can_collect() > 0 {
                    return self.decoder.read(buffer);
                }
                if self.decoder.is_finished() {
                    self.is_within = false;
                    continue;
                }
                let step = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.packed, step).map_err(damaged)?;
                continue;
            }
            if self.packed.fill_buf()?.is_empty() {
                return Ok(0);
            }
            match self.decoder.init(&mut self.packed) {
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    if io::copy(&mut (&mut self.packed).take(length), &mut io::sink())? < length {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                other => {
                    other.map_err(damaged)?;
                    self.is_within = true;
                }
            }
        }
    }
}
