//! Records of layers: what a layer of an image changes, kept in the store's directory, so that the layer is not fetched again as long as
//! the contents of its files are there. Images share layers, and a pull that was interrupted goes on with the layers that are left.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use orrery_orc_rootfs::tree::{Entry, Kind};
use orrery_orc_rootfs::{Attributes, Content as Store, Error};
use serde::{Deserialize, Serialize};

use crate::archive::{Change, Names, Put};
use crate::digest::Digest;
use crate::listing::EntryDocument;
use crate::text::Text;

/// The directory of the records.
const DIRECTORY: &str = "layers";

fn path(store: &Store, layer: Digest) -> PathBuf {
    store.directory().join(DIRECTORY).join(layer.hex())
}

/// Returns what a layer changes, if that is known and the contents of its files are all there.
pub fn load(store: &Store, layer: Digest) -> Option<Vec<Change>> {
    let bytes = fs::read(path(store, layer)).ok()?;
    let changes = decode(&bytes)?;
    let is_there = |change: &Change| match change {
        Change::Put { kind: Put::Node(Kind::File { id, length }), .. } => store.contains(*id, *length),
        _ => true,
    };
    changes.iter().all(is_there).then_some(changes)
}

/// Keeps what a layer changes.
///
/// # Errors
/// [`Error::File`].
pub fn save(store: &Store, layer: Digest, changes: &[Change]) -> Result<(), Error> {
    let to = path(store, layer);
    let failed = |cause| Error::File { operation: "write", path: to.clone(), cause };
    let directory = store.directory().join(DIRECTORY);
    match DirBuilder::new().mode(0o700).create(&directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    let bytes = encode(changes).map_err(failed)?;
    let draft = directory.join(format!("draft-{}", std::process::id()));
    let _ = fs::remove_file(&draft);
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&draft)
        .and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_data()))
        .and_then(|()| fs::rename(&draft, &to));
    if written.is_err() {
        let _ = fs::remove_file(&draft);
    }
    written.map_err(failed)
}

fn encode(changes: &[Change]) -> io::Result<Vec<u8>> {
    let record = Record { schema: 1, changes: changes.iter().map(RecordedChange::from).collect() };
    Ok(serde_json::to_vec(&record)?)
}

fn decode(bytes: &[u8]) -> Option<Vec<Change>> {
    let record: Record = serde_json::from_slice(bytes).ok()?;
    let changes = record.changes.into_iter().map(RecordedChange::into_change).collect::<Option<_>>()?;
    (record.schema == 1).then_some(changes)
}

/// What a layer changes, as it is kept.
#[derive(Serialize, Deserialize)]
struct Record {
    schema: u32,
    changes: Vec<RecordedChange>,
}

/// One change. A hard link has its attributes as those of a file without bytes.
#[derive(Serialize, Deserialize)]
enum RecordedChange {
    Put(EntryDocument, Option<(String, u64)>),
    Link(EntryDocument, Text),
    Remove(Text),
    Empty(Text),
}

impl From<&Change> for RecordedChange {
    fn from(change: &Change) -> Self {
        let joined = |names: &Names| names.join(&b"/"[..]);
        let entry = |path: &Names, kind: &Kind, attributes: &Attributes| {
            let path = PathBuf::from(OsString::from_vec(joined(path)));
            let entry = Entry { path, kind: kind.clone(), attributes: attributes.clone() };
            EntryDocument::encode(&entry, None)
        };
        match change {
            Change::Put { path, kind: Put::Node(kind), attributes } => {
                let content = match kind {
                    Kind::File { id, length } => Some((id.to_string(), *length)),
                    _ => None,
                };
                Self::Put(entry(path, kind, attributes), content)
            }
            Change::Put { path, kind: Put::Link(target), attributes } => {
                Self::Link(entry(path, &Kind::Empty, attributes), Text(joined(target)))
            }
            Change::Remove(path) => Self::Remove(Text(joined(path))),
            Change::Empty(path) => Self::Empty(Text(joined(path))),
        }
    }
}

impl RecordedChange {
    /// Returns the change; `None` if it was not written by this program.
    fn into_change(self) -> Option<Change> {
        let names = |path: &[u8]| -> Names {
            path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect()
        };
        let put = |entry: EntryDocument, content| {
            let entry = entry.decode(content).ok()?;
            Some((names(entry.path.as_os_str().as_bytes()), entry.kind, entry.attributes))
        };
        Some(match self {
            Self::Put(entry, content) => {
                let content = match content {
                    Some((id, length)) => Some((id.parse().ok()?, length)),
                    None => None,
                };
                let (path, kind, attributes) = put(entry, content)?;
                Change::Put { path, kind: Put::Node(kind), attributes }
            }
            Self::Link(entry, target) => {
                let (path, _, attributes) = put(entry, None)?;
                Change::Put { path, kind: Put::Link(names(&target.0)), attributes }
            }
            Self::Remove(path) => Change::Remove(names(&path.0)),
            Self::Empty(path) => Change::Empty(names(&path.0)),
        })
    }
}

#[cfg(test)]
mod tests {
    use orrery_orc_wire::ObjectId;

    use super::*;

    #[test]
    fn records_are_read_as_they_are_written() {
        let path = |text: &str| text.split('/').map(|name| name.as_bytes().to_vec()).collect::<Vec<_>>();
        let attributes = Attributes {
            mode: 0o4755,
            uid: 1,
            gid: 2,
            modified: (-3, 4),
            extended: vec![(b"user.x".to_vec(), vec![0xff])],
        };
        let put = |name: &str, kind| Change::Put { path: path(name), kind, attributes: attributes.clone() };
        let changes = vec![
            put("a/b", Put::Node(Kind::File { id: ObjectId([7; 32]), length: 9 })),
            put("a/c", Put::Node(Kind::Empty)),
            put("d", Put::Node(Kind::Directory)),
            put("e", Put::Node(Kind::Symlink(vec![0xfe]))),
            put("f", Put::Node(Kind::Device { is_block: true, major: 1, minor: 2 })),
            put("g", Put::Link(path("a/b"))),
            Change::Remove(path("x/y")),
            Change::Empty(Vec::new()),
        ];
        assert_eq!(decode(&encode(&changes).unwrap()), Some(changes));
        assert_eq!(decode(b"{}"), None);
    }
}
