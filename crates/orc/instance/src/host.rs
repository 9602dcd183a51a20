//! What a library calls: its allocations, and the beginning and end of threads.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use crate::abi::{Host, Words};
use crate::error::Result;
use crate::heap::Heap;
use crate::region::region;
use crate::resources::Resources;

/// Returns what libraries are given.
pub(crate) fn host() -> Result<&'static Host> {
    static HOST: OnceLock<Host> = OnceLock::new();
    let whole = region()?.whole;
    Ok(HOST.get_or_init(|| Host {
        heap_start: whole.start,
        heap_size: whole.len,
        allocate,
        release,
        resize,
        usable_size,
        thread_starts,
        thread_ends,
    }))
}

/// Runs `action` on the heap of an instance.
///
/// # Safety
/// `instance` is the word that an instance's state holds.
unsafe fn with<T>(instance: *mut c_void, action: impl FnOnce(&mut Heap) -> T) -> T {
    // SAFETY: the state of an instance ends before this does.
    let resources = unsafe { &*instance.cast::<Resources>() };
    action(&mut resources.heap())
}

fn address(memory: Option<NonNull<u8>>) -> *mut c_void {
    memory.map_or(std::ptr::null_mut(), |memory| memory.as_ptr().cast())
}

unsafe extern "C" fn allocate(instance: *mut c_void, size: usize, align: usize) -> *mut c_void {
    // SAFETY: the runtime of the library passes what its state holds.
    address(unsafe { with(instance, |heap| heap.allocate(size, align)) })
}

/// What free(3) of a wrong address does, too.
fn foreign(memory: *mut c_void) -> ! {
    eprintln!(
        "orrery: cannot release {memory:p}: another instance allocated it; a library passed memory from one instance \
         to another"
    );
    std::process::abort();
}

unsafe extern "C" fn release(instance: *mut c_void, memory: *mut c_void) {
    let Some(at) = NonNull::new(memory.cast::<u8>()).filter(|_| !instance.is_null()) else { foreign(memory) };
    // SAFETY: as in `allocate`; what the heap owns, it allocated, as far as the library releases what it allocated.
    let released = unsafe {
        with(instance, |heap| {
            let owned = heap.owns(at);
            if owned {
                heap.release(at);
            }
            owned
        })
    };
    if !released {
        foreign(memory);
    }
}

unsafe extern "C" fn resize(instance: *mut c_void, memory: *mut c_void, size: usize) -> *mut c_void {
    let Some(at) = NonNull::new(memory.cast::<u8>()).filter(|_| !instance.is_null()) else { foreign(memory) };
    // SAFETY: `instance` is the word of the instance's state, and what its heap owns it allocated, as far as
    // the library resizes what it allocated.
    let resized = unsafe { with(instance, |heap| heap.owns(at).then(|| heap.resize(at, size))) };
    resized.map_or_else(|| foreign(memory), address)
}

unsafe extern "C" fn usable_size(_instance: *mut c_void, memory: *mut c_void) -> usize {
    // SAFETY: the runtime asks only about memory in the region, where headers are before allocations.
    NonNull::new(memory.cast::<u8>()).map_or(0, |at| unsafe { Heap::size(at) })
}

unsafe extern "C" fn thread_starts(instance: *mut c_void) {
    // SAFETY: `instance` is the word of the state of an instance, whose resources stay as long as its state.
    unsafe { &*instance.cast::<Resources>() }.threads.fetch_add(1, Ordering::Relaxed);
}

unsafe extern "C" fn thread_ends(instance: *mut c_void, words: *mut Words) {
    // SAFETY: an instance with threads is not destroyed; the words are those of the ending thread.
    unsafe {
        if let Some(words) = words.as_mut() {
            // What runs in the thread after this runs in no instance.
            words.delta = 0;
        }
        (*instance.cast::<Resources>()).threads.fetch_sub(1, Ordering::Release);
    }
}
