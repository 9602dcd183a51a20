//! What a library calls: its allocations, and the beginning and end of threads.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use orrery_sys::gs_base::GsBase;

use crate::abi::Host;
use crate::error::Result;
use crate::heap::Heap;
use crate::region::region;
use crate::resources::Resources;

/// Returns what libraries are given, by whether they use GS.
pub(crate) fn host(base: Option<GsBase>) -> Result<&'static Host> {
    static HOSTS: [OnceLock<Host>; 3] = [const { OnceLock::new() }; 3];
    type SetBase = unsafe extern "C" fn(isize);
    let (host, set_base): (_, Option<SetBase>) = match base {
        None => (&HOSTS[0], None),
        Some(base) if base.has_instructions() => (&HOSTS[1], Some(set_base)),
        Some(_) => (&HOSTS[2], Some(set_base_by_system_call)),
    };
    let whole = region()?.whole;
    Ok(host.get_or_init(|| Host {
        heap_start: whole.start,
        heap_size: whole.len,
        allocate,
        release,
        resize,
        usable_size,
        thread_starts,
        thread_ends,
        set_base,
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

unsafe extern "C" fn thread_ends(instance: *mut c_void) {
    // SAFETY: an instance with threads is not destroyed.
    unsafe { &*instance.cast::<Resources>() }.threads.fetch_sub(1, Ordering::Release);
}

unsafe extern "C" fn set_base(delta: isize) {
    // SAFETY: the runtime of the library that uses GS has the thread use the instance at this distance.
    unsafe { GsBase::detect().set(delta.cast_unsigned()) };
}

unsafe extern "C" fn set_base_by_system_call(delta: isize) {
    // SAFETY: as in `set_base`.
    unsafe { GsBase::by_system_calls().set(delta.cast_unsigned()) };
}
