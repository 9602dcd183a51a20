//! What a library takes on behalf of an instance: memory and threads.

use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::heap::Heap;

/// The heap of an instance and the number of its threads. The state of the instance has the address of this.
pub(crate) struct Resources {
    heap: Mutex<Heap>,
    /// The library's own threads in it, and attached ones.
    pub(crate) threads: AtomicUsize,
}

impl Resources {
    pub(crate) fn new(heap: Heap) -> Self {
        Self { heap: Mutex::new(heap), threads: AtomicUsize::new(0) }
    }

    pub(crate) fn heap(&self) -> MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
