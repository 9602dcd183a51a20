//! What of the file system a program sees: the section `[view]`.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// What differs from the file system as it is.
#[derive(Clone, Debug)]
pub(crate) struct View {
    /// By path: a directory comes before what lies in it.
    pub(crate) changes: BTreeMap<PathBuf, Change>,
    /// Bytes that each private directory can hold.
    pub(crate) size: Option<u64>,
}

/// What becomes of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// An empty directory takes its place.
    Private,
    /// It stays, in a directory that does not.
    Shown,
}
