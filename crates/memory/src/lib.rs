//! Trackers, snapshots and deltas of a running process' memory.

pub mod area;
mod arena;
mod error;
mod hot;
pub mod images;
pub mod layout;
pub mod pages;
pub mod ranges;
mod remap;
pub mod space;
pub mod tracker;

pub use arena::{Arena, Heap, HeapVec};
pub use error::{Error, Result};
pub use orrery_sys::{PAGE, PageRange};

/// Makes room for `more` elements, or says that there is none.
pub(crate) fn grow<T>(vector: &mut HeapVec<T>, more: usize) -> Result<()> {
    vector.try_reserve(more).map_err(|_| Error::Memory {
        bytes: (vector.len() + more) * size_of::<T>(),
        errno: rustix::io::Errno::NOMEM,
    })
}
