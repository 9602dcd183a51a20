//! Trackers, snapshots and deltas of a running process' memory.

pub mod area;
mod arena;
mod error;
mod hot_pages;
pub mod images;
pub mod layout;
pub mod pages;
pub mod ranges;
mod remap;
pub mod space;
pub mod tracker;

use allocator_api2::alloc::Allocator;
use allocator_api2::vec::Vec;

pub use arena::{Arena, Heap, HeapVec};
pub use error::{Error, Result};
pub use orrery_sys::{PAGE, PageRange};

/// Reserves room for `more` elements.
pub(crate) fn grow<T, A: Allocator>(vector: &mut Vec<T, A>, more: usize) -> Result<()> {
    vector.try_reserve(more).map_err(|_| Error::Memory {
        bytes: (vector.len() + more) * size_of::<T>(),
        errno: rustix::io::Errno::NOMEM,
    })
}
