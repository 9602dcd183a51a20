//! Memory that survives a rollback.

use std::cell::Cell;

use orrery_memory::{PAGE, PageRange};

use crate::engine;
use crate::error::Result;

/// A buffer of bytes that no rollback touches: what a closure has to tell, it pushes here.
///
/// It is written through a shared reference, so that the closure can have it while the caller keeps it.
#[derive(Debug)]
pub struct KeptBuffer {
    memory: PageRange,
    /// The length is in kept memory as well: in its first word.
    length: *const Cell<usize>,
}

/// The buffer has no room for that many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a kept buffer of {capacity} bytes has no room for {needed}: make it larger")]
pub struct Full {
    /// Its size in bytes.
    pub capacity: usize,
    /// What would have been its length.
    pub needed: usize,
}

/// Bytes before the contents, for the length.
const HEADER: usize = 64;

impl KeptBuffer {
    /// An empty buffer for up to `capacity` bytes; memory is used as it fills.
    ///
    /// # Errors
    /// [`crate::Error::Memory`] where there is none.
    pub fn with_capacity(capacity: usize) -> Result<Self> {
        let arena = engine::arena()?;
        let memory = arena.stack((capacity + HEADER).next_multiple_of(PAGE))?;
        Ok(Self { memory, length: std::ptr::with_exposed_provenance(memory.start) })
    }

    /// Appends `bytes`.
    ///
    /// # Errors
    /// [`Full`], with nothing appended.
    pub fn push(&self, bytes: &[u8]) -> std::result::Result<(), Full> {
        let length = self.length().get();
        let capacity = self.capacity();
        match length.checked_add(bytes.len()) {
            Some(needed) if needed <= capacity => {
                let end = std::ptr::with_exposed_provenance_mut::<u8>(self.memory.start + HEADER + length);
                // SAFETY: the room behind the contents is ours, and `bytes` is not in it: contents are only lent out up
                // to `length`.
                unsafe { end.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
                self.length().set(needed);
                Ok(())
            }
            needed => Err(Full { capacity, needed: needed.unwrap_or(usize::MAX) }),
        }
    }

    /// Returns the bytes that were pushed.
    pub fn bytes(&self) -> &[u8] {
        let start = std::ptr::with_exposed_provenance::<u8>(self.memory.start + HEADER);
        // SAFETY: `push` initialised that many bytes, and nothing before `length` changes while `self` is borrowed:
        // clearing needs it exclusively.
        unsafe { std::slice::from_raw_parts(start, self.length().get()) }
    }

    /// Empties it.
    pub fn clear(&mut self) {
        self.length().set(0);
    }

    /// Returns how many bytes it can hold.
    pub fn capacity(&self) -> usize {
        self.memory.len() - HEADER
    }

    fn length(&self) -> &Cell<usize> {
        // SAFETY: the first word of the buffer, zero at first, is nothing but this cell.
        unsafe { &*self.length }
    }
}

impl Drop for KeptBuffer {
    fn drop(&mut self) {
        if let Ok(arena) = engine::arena() {
            arena.close_window(PageRange::new(self.memory.start - PAGE, self.memory.end));
        }
    }
}
