//! What can go wrong with a tree.

use std::io;
use std::path::{Path, PathBuf};

/// What functions of this crate return.
pub type Result<T> = std::result::Result<T, Error>;

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation on a file.
    #[error("cannot {operation} {}: {cause}", path.display())]
    File {
        /// The operation that failed.
        operation: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The kernel's answer.
        cause: io::Error,
    },
    /// A file of the tree changed while it was read.
    #[error("cannot share {}: it changes; stop what writes to it", .0.display())]
    Changes(PathBuf),
    /// A description of a tree that cannot be made.
    #[error("cannot make the tree: {0}")]
    Invalid(#[from] Invalid),
    /// Another process makes the same tree.
    #[error("cannot lock {}: another process makes this tree; wait until it has ended", .0.display())]
    Busy(PathBuf),
    /// A content that a tree names is not there.
    #[error("cannot make {}: its content {id} is not there; pull the tree again", path.display())]
    NoContent {
        /// The path of the file.
        path: PathBuf,
        /// The name of the content.
        id: orrery_orc_wire::ObjectId,
    },
    /// The program that writes images is not installed.
    #[error("cannot find {0} in $PATH: install the package erofs-utils")]
    NoProgram(&'static str),
    /// The program that writes images failed, or did not write an image.
    #[error("cannot write an image of the tree: {program}: {reason}")]
    Program {
        /// Its name.
        program: &'static str,
        /// What the program printed, or what is wrong with its output.
        reason: String,
    },
    /// An image may not fit into its file system.
    #[error(
        "cannot write an image to {}: {program}: {reason}; {available} MiB are free of up to {needed} MiB that it takes while it is made",
        path.display()
    )]
    NoSpace {
        /// The directory.
        path: PathBuf,
        /// The program that failed.
        program: &'static str,
        /// What the program printed, or what is wrong with its output.
        reason: String,
        /// The free space, in MiB.
        available: u64,
        /// The size of the tree's files, twice, in MiB.
        needed: u64,
    },
    /// A file that is no image.
    #[error("cannot remove {}: it is no image of a tree", .0.display())]
    NoImage(PathBuf),
    /// The kernel or the file system has no data-only layers.
    #[error("cannot mount an overlay with a data-only layer at {}: {cause}; use hard links", path.display())]
    NoDataOnlyLayers {
        /// Where it was to be mounted.
        path: PathBuf,
        /// The kernel's answer.
        cause: io::Error,
    },
    /// The content directory is on a file system whose files cannot be made immutable.
    #[error("cannot make files in {} immutable: {cause}; choose a directory on ext4, XFS, Btrfs or tmpfs, as root", path.display())]
    Immutable {
        /// The directory.
        path: PathBuf,
        /// The kernel's answer.
        cause: io::Error,
    },
}

/// An entry that no tree can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the entry {path:?} {reason}")]
pub struct Invalid {
    /// The path of the entry.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: &'static str,
}

impl Error {
    /// Returns a function that makes the error of an operation on a file.
    pub(crate) fn file<E: Into<io::Error>>(
        operation: &'static str,
        path: &Path,
    ) -> impl FnOnce(E) -> Self + use<E> {
        let path = path.to_owned();
        move |cause| Self::File { operation, path, cause: cause.into() }
    }
}
