//! File trees whose files' contents are objects: immutable files, named by the hash of their bytes, that all trees share.
//!
//! Two trees with equal files are two files in the page cache for each of them. The auditor of the dynamic loader shares what it maps, of
//! programs that it starts. A tree of this crate shares everything that is read or mapped, by any program: archives, data,
//! interpreted code, programs without a loader.
//!
//! ```text
//!   tree one    names one ---+                        tree: an overlay, read-only or with an upper layer
//!                            +---> content/ab/cdef..  names: files without bytes, with the owner, mode and times of the tree's
//!   tree two    names two ---+                        content: immutable files, a data-only lower layer
//! ```
//!
//! On kernels without data-only layers (before Linux 6.5) a tree consists of [hard links](links) instead: of immutable files, one for
//! each content with the same owner, mode and time.
//!
//! What is done: [`Content`] adds the bytes of a file, [`names::write`] makes the names of a tree, [`overlay::mount`] shows it. What comes
//! from another machine is a description ([`Tree`]), whose contents arrive one by one ([`Incoming`]); a [`Layout`] is where all of it lies.
//! Virtual machines share a tree as an [`image`] that all of them map.

mod attributes;
pub mod content;
mod draft;
mod error;
pub mod image;
mod incoming;
mod layout;
pub mod links;
pub mod names;
pub mod overlay;
pub mod tree;
mod walk;

pub use attributes::Attributes;
pub use content::Content;
pub use error::{Error, Result};
pub use incoming::Incoming;
pub use layout::{Layout, Options};
pub use tree::Tree;

/// What became of the files of a tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Regular files with bytes.
    pub files: u64,
    /// The size of these files in bytes.
    pub bytes: u64,
    /// Of these, the bytes that no other tree had brought before.
    pub new_bytes: u64,
}
