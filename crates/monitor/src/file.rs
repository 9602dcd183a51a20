//! What a path of the program means: an open file, or a directory and a name in it.

use std::os::fd::OwnedFd;

use rustix::fs::{FileType, Stat};

use crate::policy::Rights;

/// A file, held fast.
#[derive(Debug)]
pub(crate) struct ResolvedFile {
    /// The file, opened with `O_PATH`.
    pub(crate) file: OwnedFd,
    /// What is known of it.
    pub(crate) stat: Stat,
    /// Where it is.
    pub(crate) location: Location,
    /// What the program could do to it anyway, because it reached it through a descriptor that it has.
    pub(crate) granted: Rights,
}

/// Where a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// At this path, or last was before it was removed.
    Path(Vec<u8>),
    /// At this path outside of the program's view, by a descriptor from before its start: nothing can be done to it but what that descriptor
    /// can.
    Outside(Vec<u8>),
    /// Nowhere: a pipe, a socket or memory, that the program reached through a descriptor which it has.
    Anonymous,
}

/// A directory, held fast, and a name in it.
#[derive(Debug)]
pub(crate) struct DirectoryEntry {
    /// The directory.
    pub(crate) directory: OwnedFd,
    /// The name, with a slash at its end where the program wrote one.
    pub(crate) name: Vec<u8>,
    /// The path of both.
    pub(crate) path: Vec<u8>,
}

/// Whether a path means the same however it is read: absolute, without `.`, `..`, empty names or a slash at the end, and
/// not in procfs.
pub(crate) fn is_plain(path: &[u8]) -> bool {
    path.len() > 1
        && path[0] == b'/'
        && !path.starts_with(b"/proc/")
        && path[1..].split(|&byte| byte == b'/').all(|name| !matches!(name, b"" | b"." | b".."))
}

pub(crate) fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

pub(crate) fn is_link(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Symlink
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_paths_are_recognised() {
        for plain in ["/a", "/a/b.c/..d"] {
            assert!(is_plain(plain.as_bytes()), "{plain}");
        }
        for other in ["", "/", "a", "/a/", "/a//b", "/a/./b", "/a/..", "/proc/1", "/./a"] {
            assert!(!is_plain(other.as_bytes()), "{other}");
        }
    }
}
