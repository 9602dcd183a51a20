//! Listings: the names of a tree with what they stand for, and the contents of its files, as JSON. A listing is the configuration of a
//! tree's manifest.
//!
//! ```json
//! {"schema": 1,
//!  "contents": [{"digest": "sha256:...", "blake3": "...", "size": 6}],
//!  "entries": [{"path": "", "type": "directory", "mode": "0755", "uid": 0, "gid": 0, "time": [1700000000, 0]},
//!              {"path": "hello", "type": "file", "mode": "0644", "uid": 0, "gid": 0, "time": [1700000000, 0], "content": 0}]}
//! ```
//!
//! Bytes that are no text are `base64:...`. Equal trees have equal listings, byte by byte.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use orrery_orc_rootfs::Attributes;
use orrery_orc_rootfs::tree::{Entry, Invalid, Kind, MAX_ENTRIES, Tree};
use orrery_orc_wire::ObjectId;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::text::Text;

/// Bytes of the largest listing that is read or written.
pub const MAX_LISTING: u64 = 64 << 20;

/// The version of the form.
const SCHEMA: u32 = 1;

/// A content of a tree's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    /// Its name in registries.
    pub digest: Digest,
    /// Its name in the store.
    pub id: ObjectId,
    /// The number of its bytes, which is not 0.
    pub size: u64,
}

/// A tree and its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    tree: Tree,
    contents: Vec<Content>,
}

/// Bytes are no listing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListingError {
    /// They are no JSON, lack fields or have others.
    #[error("it is no listing: {0}")]
    Json(#[from] serde_json::Error),
    /// They are more than 64 MiB.
    #[error("it has {0} bytes, more than 64 MiB")]
    TooLarge(u64),
    /// They are of another version.
    #[error("it has the schema {0}, which this version does not know; update orrery")]
    Schema(u32),
    /// An entry could not be made, or made elsewhere.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// An entry that is not as its type demands.
    #[error("the entry {path:?} {reason}")]
    Entry {
        /// Its path.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A content that is not as it should be.
    #[error("the content {digest} {reason}")]
    Content {
        /// Its digest.
        digest: Digest,
        /// What is wrong with it.
        reason: &'static str,
    },
}

impl Listing {
    /// Makes a listing of a tree and the contents that its files have; others are left out.
    ///
    /// # Errors
    /// [`ListingError::Entry`] if a content is missing; what [`parse`](Self::parse) reports of contents.
    pub fn new(tree: Tree, contents: &HashMap<ObjectId, Content>) -> Result<Self, ListingError> {
        let mut used = Vec::new();
        let mut seen = HashSet::new();
        for entry in tree.entries() {
            let Kind::File { id, length } = entry.kind else { continue };
            let content = contents.get(&id).filter(|content| content.size == length && content.id == id);
            let reason = "has a content that is not listed";
            let content = content.ok_or_else(|| ListingError::Entry { path: entry.path.clone(), reason })?;
            if seen.insert(id) {
                used.push(*content);
            }
        }
        check_contents(&used)?;
        Ok(Self { tree, contents: used })
    }

    /// Reads a listing.
    ///
    /// # Errors
    /// [`ListingError`]; a tree that is returned can be made, within its directory.
    pub fn parse(bytes: &[u8]) -> Result<Self, ListingError> {
        if bytes.len() as u64 > MAX_LISTING {
            return Err(ListingError::TooLarge(bytes.len() as u64));
        }
        let document: Document = serde_json::from_slice(bytes)?;
        if document.schema != SCHEMA {
            return Err(ListingError::Schema(document.schema));
        }
        let contents: Vec<Content> = document.contents.into_iter().map(Content::from).collect();
        check_contents(&contents)?;
        let mut used = vec![false; contents.len()];
        if document.entries.len() > MAX_ENTRIES {
            let reason = "has too many others";
            return Err(Invalid { path: PathBuf::new(), reason }.into());
        }
        let mut entries = Vec::with_capacity(document.entries.len());
        for entry in document.entries {
            let path = PathBuf::from(OsString::from_vec(entry.path.0.clone()));
            let bad = |reason| ListingError::Entry { path: path.clone(), reason };
            let content = match entry.content {
                None => None,
                Some(index) => {
                    let content =
                        contents.get(index).ok_or_else(|| bad("names a content that is not listed"))?;
                    used[index] = true;
                    Some((content.id, content.size))
                }
            };
            entries.push(entry.decode(content).map_err(bad)?);
        }
        if let Some(index) = used.iter().position(|used| !used) {
            let reason = "is no file's";
            return Err(ListingError::Content { digest: contents[index].digest, reason });
        }
        Ok(Self { tree: Tree::new(entries)?, contents })
    }

    /// Writes the listing, for [`parse`](Self::parse).
    ///
    /// # Errors
    /// [`ListingError::TooLarge`] if it has more than 64 MiB.
    pub fn encode(&self) -> Result<Vec<u8>, ListingError> {
        let indexes: HashMap<ObjectId, usize> =
            self.contents.iter().enumerate().map(|(index, content)| (content.id, index)).collect();
        let entries = self.tree.entries().iter().map(|entry| {
            let content = match entry.kind {
                Kind::File { id, .. } => indexes.get(&id).copied(),
                _ => None,
            };
            EntryDocument::encode(entry, content)
        });
        let contents = self.contents.iter().map(|content| ContentDocument {
            digest: content.digest,
            blake3: content.id.to_string(),
            size: content.size,
        });
        let document = Document { schema: SCHEMA, contents: contents.collect(), entries: entries.collect() };
        let bytes = serde_json::to_vec(&document)?;
        if bytes.len() as u64 > MAX_LISTING {
            return Err(ListingError::TooLarge(bytes.len() as u64));
        }
        Ok(bytes)
    }

    /// Returns the tree.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Returns the contents, each once, in the order in which files have them.
    pub fn contents(&self) -> &[Content] {
        &self.contents
    }
}

fn check_contents(contents: &[Content]) -> Result<(), ListingError> {
    let (mut digests, mut ids, mut sum) = (HashSet::new(), HashSet::new(), 0_u64);
    for Content { digest, id, size } in contents {
        let bad = |reason| Err(ListingError::Content { digest: *digest, reason });
        if *size == 0 {
            return bad("has no bytes");
        }
        sum = sum.saturating_add(*size);
        if i64::try_from(sum).is_err() {
            return bad("makes the tree larger than any file system");
        }
        if !digests.insert(digest) || !ids.insert(id) {
            return bad("is listed twice");
        }
    }
    Ok(())
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    schema: u32,
    contents: Vec<ContentDocument>,
    entries: Vec<EntryDocument>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ContentDocument {
    digest: Digest,
    #[serde(deserialize_with = "object_id")]
    blake3: String,
    size: u64,
}

/// Checks the name of an object.
fn object_id<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse::<ObjectId>().map_err(serde::de::Error::custom)?;
    Ok(text)
}

impl From<ContentDocument> for Content {
    fn from(read: ContentDocument) -> Self {
        // It was checked when it was read.
        let id = read.blake3.parse().unwrap_or(ObjectId([0; 32]));
        Self { digest: read.digest, id, size: read.size }
    }
}

/// What a name stands for, without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Type {
    Directory,
    File,
    Link,
    Symlink,
    Fifo,
    Block,
    Character,
}

/// A name in a tree, as it is written.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EntryDocument {
    path: Text,
    #[serde(rename = "type")]
    kind: Type,
    /// In octal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mode: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gid: Option<u32>,
    /// Seconds since 1970 and nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    time: Option<(i64, u32)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    xattrs: Vec<(Text, Text)>,
    /// The place of a file's content in the list of them; files without bytes have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    content: Option<usize>,
    /// The path of the file that a link is another name of; the target of a symbolic link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    target: Option<Text>,
    /// Major and minor number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    device: Option<(u32, u32)>,
}

impl EntryDocument {
    pub(crate) fn encode(entry: &Entry, content: Option<usize>) -> Self {
        let bytes = |bytes: &[u8]| Text(bytes.to_vec());
        let (kind, target, device) = match &entry.kind {
            Kind::Directory => (Type::Directory, None, None),
            Kind::File { .. } | Kind::Empty => (Type::File, None, None),
            Kind::Link(first) => (Type::Link, Some(bytes(first.as_os_str().as_bytes())), None),
            Kind::Symlink(target) => (Type::Symlink, Some(bytes(target)), None),
            Kind::Fifo => (Type::Fifo, None, None),
            Kind::Device { is_block, major, minor } => {
                (if *is_block { Type::Block } else { Type::Character }, None, Some((*major, *minor)))
            }
        };
        let Attributes { mode, uid, gid, modified, extended } = &entry.attributes;
        let has = kind != Type::Link;
        Self {
            path: bytes(entry.path.as_os_str().as_bytes()),
            kind,
            mode: has.then(|| format!("{mode:04o}")),
            uid: has.then_some(*uid),
            gid: has.then_some(*gid),
            time: has.then_some(*modified),
            xattrs: extended.iter().map(|(name, value)| (bytes(name), bytes(value))).collect(),
            content,
            target,
            device,
        }
    }

    /// Returns the entry, with the content that its number stands for.
    pub(crate) fn decode(self, content: Option<(ObjectId, u64)>) -> Result<Entry, &'static str> {
        let path = PathBuf::from(OsString::from_vec(self.path.0));
        let kind = match (self.kind, content, self.target, self.device) {
            (Type::Directory, None, None, None) => Kind::Directory,
            (Type::File, Some((id, length)), None, None) => Kind::File { id, length },
            (Type::File, None, None, None) => Kind::Empty,
            (Type::Link, None, Some(first), None) => Kind::Link(OsString::from_vec(first.0).into()),
            (Type::Symlink, None, Some(target), None) => Kind::Symlink(target.0),
            (Type::Fifo, None, None, None) => Kind::Fifo,
            (Type::Block | Type::Character, None, None, Some((major, minor))) => {
                Kind::Device { is_block: self.kind == Type::Block, major, minor }
            }
            _ => return Err("lacks the field content, target or device of its type, or has another's"),
        };
        let attributes = match (self.kind, self.mode, self.uid, self.gid, self.time) {
            (Type::Link, None, None, None, None) if self.xattrs.is_empty() => Attributes::default(),
            (Type::Link, ..) => return Err("is a link, whose attributes are those of the file"),
            (_, Some(mode), Some(uid), Some(gid), Some(modified)) => {
                let is_octal = mode.len() <= 6 && mode.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
                let mode = u32::from_str_radix(&mode, 8).ok().filter(|_| is_octal);
                Attributes {
                    mode: mode.ok_or("has a mode that is no octal number")?,
                    uid,
                    gid,
                    modified,
                    extended: self.xattrs.into_iter().map(|(name, value)| (name.0, value.0)).collect(),
                }
            }
            _ => return Err("lacks mode, uid, gid or time"),
        };
        Ok(Entry { path, kind, attributes })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            3 => "[a-z]{1,3}".prop_map(String::into_bytes),
            1 => prop::collection::vec(1..=255_u8, 1..9).prop_filter("no name", |name| {
                !name.contains(&b'/') && name != b"." && name != b".."
            }),
            1 => Just(b"base64:x".to_vec()),
        ]
    }

    fn attributes() -> impl Strategy<Value = Attributes> {
        let extended = prop::collection::btree_map(name(), name(), 0..3);
        (0..=0o7777_u32, 0..u32::MAX, 0..u32::MAX, any::<i64>(), 0..1_000_000_000_u32, extended).prop_map(
            |(mode, uid, gid, seconds, nanoseconds, extended)| Attributes {
                mode,
                uid,
                gid,
                modified: (seconds, nanoseconds),
                extended: extended
                    .into_iter()
                    .map(|(name, value)| ([b"user.", &name[..]].concat(), value))
                    .collect(),
            },
        )
    }

    fn kind() -> impl Strategy<Value = Kind> {
        prop_oneof![
            3 => Just(Kind::Directory),
            3 => (any::<u8>(), 1..9_u64).prop_map(|(byte, length)| Kind::File {
                // The length belongs to the content.
                id: ObjectId([byte; 32]), length: length.min(1) + u64::from(byte),
            }),
            1 => Just(Kind::Empty),
            1 => Just(Kind::Fifo),
            1 => name().prop_map(Kind::Symlink),
            1 => (any::<bool>(), 1..9_u32, 0..9_u32)
                .prop_map(|(is_block, major, minor)| Kind::Device { is_block, major, minor }),
            2 => Just(Kind::Link(PathBuf::new())),
        ]
    }

    /// Trees: each name is put below one of the directories before it, each link is of one of the files.
    fn tree() -> impl Strategy<Value = Tree> {
        prop::collection::vec((name(), kind(), attributes(), any::<prop::sample::Index>()), 0..40).prop_map(
            |drawn| {
                let top = Attributes::default();
                let mut entries =
                    vec![Entry { path: PathBuf::new(), kind: Kind::Directory, attributes: top }];
                for (name, mut kind, mut attributes, index) in drawn {
                    let paths = |directories: bool| -> Vec<PathBuf> {
                        let fits = |kind: &Kind| match kind {
                            Kind::Directory => directories,
                            Kind::Link(_) => false,
                            _ => !directories,
                        };
                        let fitting = entries.iter().filter(|entry| fits(&entry.kind));
                        fitting.map(|entry| entry.path.clone()).collect()
                    };
                    let path = index.get(&paths(true)).join(OsString::from_vec(name));
                    if let Kind::Link(first) = &mut kind {
                        let files = paths(false);
                        if files.is_empty() {
                            continue;
                        }
                        *first = index.get(&files).clone();
                        attributes = Attributes::default();
                    }
                    if entries.iter().all(|entry| entry.path != path) {
                        entries.push(Entry { path, kind, attributes });
                    }
                }
                Tree::new(entries).unwrap()
            },
        )
    }

    proptest! {
        #[test]
        fn listings_are_read_as_they_are_written(tree in tree()) {
            let mut contents = HashMap::new();
            for entry in tree.entries() {
                if let Kind::File { id, length } = entry.kind {
                    contents.insert(id, Content { digest: Digest(id.0), id, size: length });
                }
            }
            let listing = Listing::new(tree, &contents).unwrap();
            let bytes = listing.encode().unwrap();
            let read = Listing::parse(&bytes).unwrap();
            prop_assert_eq!(&read, &listing);
            prop_assert_eq!(read.encode().unwrap(), bytes);
        }
    }

    const TOP: &str = r#"{"path":"","type":"directory","mode":"0755","uid":0,"gid":0,"time":[1,2]}"#;

    /// A listing with one content and these entries below the top.
    fn document(entries: &[&str]) -> String {
        let content = format!(r#"{{"digest":"sha256:{0}","blake3":"{0}","size":6}}"#, "ab".repeat(32));
        let file = r#"{"path":"f","type":"file","mode":"0644","uid":0,"gid":0,"time":[1,2],"content":0}"#;
        let all: Vec<&str> = [TOP, file].iter().chain(entries).copied().collect();
        format!(r#"{{"schema":1,"contents":[{content}],"entries":[{}]}}"#, all.join(","))
    }

    fn entry(path: &str, rest: &str) -> String {
        format!(r#"{{"path":"{path}",{rest},"mode":"0644","uid":0,"gid":0,"time":[1,2]}}"#)
    }

    #[test]
    fn what_would_lie_outside_or_cannot_be_made_is_refused() {
        assert!(Listing::parse(document(&[]).as_bytes()).is_ok());
        let empty = r#""type":"file""#;
        let link =
            |path: &str, target: &str| format!(r#"{{"path":"{path}","type":"link","target":"{target}"}}"#);
        let long = "n".repeat(256);
        let deep = "d/".repeat(1200);
        for (entries, wanted) in [
            (vec![entry("../x", empty)], "`..`"),
            (vec![entry("..", empty)], "`..`"),
            (vec![entry("/etc/x", empty)], "empty name"),
            (vec![entry("./x", empty)], "`.`"),
            (vec![entry("a//b", empty)], "empty name"),
            (vec![entry("x/", empty)], "empty name"),
            (vec![entry("a\\u0000b", empty)], "zero byte"),
            (vec![entry(&long, empty)], "more than 255 bytes"),
            (vec![entry(&deep, empty)], "longer than 2048"),
            (vec![entry("f", empty)], "twice"),
            (vec![entry("", r#""type":"directory""#)], "twice"),
            (vec![entry("f/x", empty)], "no directory"),
            (vec![entry("d/x", empty)], "does not stand before"),
            (vec![entry("s", r#""type":"symlink","target":"/etc""#), entry("s/x", empty)], "no directory"),
            (vec![entry("s", r#""type":"symlink","target":"""#)], "whose target is empty"),
            (vec![entry("s", r#""type":"symlink""#)], "lacks"),
            (vec![link("l", "missing")], "does not stand before"),
            (vec![link("l", "../f")], "does not stand before"),
            (vec![link("l", "")], "link to a directory"),
            (vec![link("l", "f"), link("m", "l")], "another link"),
            (vec![entry("l", r#""type":"link","target":"f""#)], "attributes are those of the file"),
            (vec![entry("c", r#""type":"character","device":[0,0]"#)], "0:0"),
            (vec![entry("c", r#""type":"character""#)], "lacks"),
            (vec![entry("x", r#""type":"file","content":1"#)], "not listed"),
            (vec![entry("x", r#""type":"fifo","content":0"#)], "lacks"),
            (vec![entry("x", r#""type":"socket""#)], "unknown variant"),
            (vec![entry("x", r#""type":"file","xattrs":[["trusted.overlay.redirect","/x"]]"#)], "overlays"),
            (vec![entry("x", r#""type":"file","xattrs":[["user.a",""],["user.a",""]]"#)], "twice"),
            (vec![entry("x", r#""type":"file","xattrs":[["a",""]]"#)], "bad name"),
            (vec![entry("x", empty).replace("0644", "17777")], "no file can have"),
            (vec![entry("x", empty).replace("0644", "+644")], "octal"),
            (vec![entry("x", empty).replace("\"uid\":0", "\"uid\":4294967295")], "no file can have"),
            (vec![entry("x", empty).replace("[1,2]", "[1,1000000000]")], "nanoseconds"),
            (vec![entry("x", empty).replace("\"uid\":0,", "")], "lacks mode"),
            (vec![entry("x", r#""type":"file","more":1"#)], "unknown field"),
            (vec![entry("base64:!", empty)], "Invalid"),
        ] {
            let entries: Vec<&str> = entries.iter().map(String::as_str).collect();
            let error = Listing::parse(document(&entries).as_bytes()).unwrap_err().to_string();
            assert!(error.contains(wanted), "{entries:?}: {error}");
        }
    }

    #[test]
    fn contents_that_cannot_be_are_refused() {
        let good = document(&[]);
        for (from, to, wanted) in [
            ("\"size\":6", "\"size\":0", "no bytes"),
            ("\"size\":6", "\"size\":18446744073709551615", "larger than any"),
            ("\"size\":6", "\"size\":18446744073709551616", "it is no listing"),
            ("\"size\":6", "\"size\":-6", "it is no listing"),
            ("\"schema\":1", "\"schema\":2", "schema 2"),
            ("sha256:ab", "sha256:AB", "digest"),
            ("\"blake3\":\"ab", "\"blake3\":\"g", "64 hexadecimal"),
            (",\"content\":0", "", "is no file's"),
        ] {
            let bad = good.replacen(from, to, 1);
            assert_ne!(bad, good, "{from}");
            let error = Listing::parse(bad.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(wanted), "{to}: {error}");
        }
        let other =
            format!("}},{{\"digest\":\"sha256:{0}\",\"blake3\":\"{0}\",\"size\":6}}]", "ab".repeat(32));
        let error = Listing::parse(good.replacen("}]", &other, 1).as_bytes()).unwrap_err().to_string();
        assert!(error.contains("twice"), "{error}");
    }
}
