//! What trees have, as it is seen without reading files: whether it has changed, its newest time, and a UUID derived from it.

use std::collections::BTreeMap;
use std::collections::HashSet;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::tree;

/// What shows that a file has become another one, or has changed: device, inode, time of change, size.
type State = (u64, u64, i64, i64, u64);

/// All names of some trees at one instant.
#[derive(Debug)]
pub(super) struct Scan {
    states: BTreeMap<PathBuf, State>,
    identity: blake3::Hash,
    /// The newest time of modification, in seconds since 1970.
    pub(super) newest: i64,
    /// Sockets, by their paths in the image.
    pub(super) sockets: Vec<PathBuf>,
    /// Regular files with bytes.
    pub(super) files: u64,
    /// The size of these files in bytes.
    pub(super) bytes: u64,
    /// An upper bound of the bytes of the image's data: those of files, each inode once, in whole blocks.
    pub(super) room: u64,
}

impl Scan {
    /// Looks at all names of the trees.
    pub(super) fn of(trees: &[(String, PathBuf)]) -> Result<Self> {
        let mut states = BTreeMap::new();
        let mut rows = BTreeMap::new();
        let mut inodes = HashSet::new();
        let (mut newest, mut sockets, mut files, mut bytes, mut room) = (0, Vec::new(), 0, 0, 0);
        for (name, tree) in trees {
            for (path, found) in tree::find(tree)? {
                let inside = if trees.len() == 1 { path.clone() } else { Path::new(name).join(&path) };
                let kind = found.file_type();
                if kind.is_socket() {
                    sockets.push(inside);
                    continue;
                }
                // The size of a directory is the file system's affair.
                let size = if kind.is_file() || kind.is_symlink() { found.len() } else { 0 };
                if kind.is_file() && size > 0 {
                    files += 1;
                    bytes += size;
                    if inodes.insert((found.dev(), found.ino())) {
                        room += size.next_multiple_of(4096);
                    }
                }
                newest = newest.max(found.mtime());
                let row = format!(
                    "{:o} {} {} {size} {} {} {}",
                    found.mode(),
                    found.uid(),
                    found.gid(),
                    found.mtime(),
                    found.mtime_nsec(),
                    found.rdev(),
                );
                rows.insert(inside, row);
                let state = (found.dev(), found.ino(), found.ctime(), found.ctime_nsec(), found.len());
                states.insert(tree.join(path), state);
            }
        }
        let mut hash = blake3::Hasher::new();
        for (path, row) in rows {
            hash.update(path.as_os_str().as_bytes()).update(&[0]).update(row.as_bytes()).update(&[0]);
        }
        Ok(Self { states, identity: hash.finalize(), newest, sockets, files, bytes, room })
    }

    /// Returns the path of a file that has changed between this scan and a later one, has come or has gone.
    pub(super) fn difference(&self, later: &Self) -> Option<PathBuf> {
        let differs = |one: &Self, other: &Self| {
            one.states
                .iter()
                .find(|(path, state)| other.states.get(*path) != Some(state))
                .map(|(path, _)| path.clone())
        };
        differs(self, later).or_else(|| differs(later, self))
    }

    /// Returns a UUID (RFC 9562, version 8) derived from names, owners, modes, sizes and times.
    pub(super) fn uuid(&self) -> String {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&self.identity.as_bytes()[..16]);
        bytes[6] = bytes[6] & 0x0f | 0x80;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let text: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        [&text[..4], &text[4..6], &text[6..8], &text[8..10], &text[10..]].map(<[String]>::concat).join("-")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(tree: &Path) -> Scan {
        Scan::of(&[("tree".to_owned(), tree.to_owned())]).unwrap()
    }

    #[test]
    fn each_change_of_a_tree_is_seen() {
        let tree = tempfile::tempdir().unwrap();
        let path = |name: &str| tree.path().join(name);
        std::fs::write(path("file"), "bytes").unwrap();
        let before = scan(tree.path());
        assert_eq!(before.difference(&scan(tree.path())), None);
        std::fs::write(path("new"), "").unwrap();
        let with_new = scan(tree.path());
        assert!(before.difference(&with_new).is_some());
        std::fs::remove_file(path("new")).unwrap();
        assert!(with_new.difference(&scan(tree.path())).is_some());
        let again = scan(tree.path());
        std::fs::write(path("file"), "more bytes").unwrap();
        assert_eq!(again.difference(&scan(tree.path())), Some(path("file")));
    }

    #[test]
    fn equal_trees_have_equal_uuids() {
        let [one, two] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
        for tree in [&one, &two] {
            std::fs::write(tree.path().join("file"), "bytes").unwrap();
            for path in [tree.path().join("file"), tree.path().to_owned()] {
                std::fs::File::open(path).unwrap().set_modified(time).unwrap();
            }
        }
        let uuid = scan(one.path()).uuid();
        assert_eq!(uuid, scan(two.path()).uuid());
        assert_eq!(uuid.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
        assert_eq!(&uuid[14..15], "8");
        std::fs::write(two.path().join("file"), "other").unwrap();
        assert_ne!(uuid, scan(two.path()).uuid());
    }
}
