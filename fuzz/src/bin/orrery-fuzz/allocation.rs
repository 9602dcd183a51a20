//! An allocator with a bound: a parser must not allocate by a length that it reads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most bytes that may be allocated at a time, corpus included.
pub(crate) const MOST: usize = 256 << 20;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static BOUNDED: Bounded = Bounded;

/// The system's allocator, which fails above [`MOST`]: the process ends, unless the parser is prepared for it (`try_reserve`).
struct Bounded;

fn take(bytes: usize) -> bool {
    let before = ALLOCATED.fetch_add(bytes, Ordering::Relaxed);
    let taken = before.checked_add(bytes).is_some_and(|sum| sum <= MOST);
    if !taken {
        ALLOCATED.fetch_sub(bytes, Ordering::Relaxed);
    }
    taken
}

// SAFETY: all memory comes from `System`, by layouts that are passed on as they came; null says that there is none.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise about the layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !take(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise about the layout.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `memory` came from `System` with this layout, as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let more = size.saturating_sub(layout.size());
        if !take(more) {
            return std::ptr::null_mut();
        }
        // SAFETY: `memory` came from `System` with this layout, as the caller promises.
        let moved = unsafe { System.realloc(memory, layout, size) };
        if moved.is_null() {
            ALLOCATED.fetch_sub(more, Ordering::Relaxed);
        } else {
            ALLOCATED.fetch_sub(layout.size().saturating_sub(size), Ordering::Relaxed);
        }
        moved
    }
}
