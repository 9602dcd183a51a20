//! What a library that was built with the pass shows, and what it is given: `passes/cls/runtime/cls.h`.

use std::ffi::c_void;

/// The version that this crate and the pass have in common.
pub(crate) const VERSION: u32 = 3;

/// `struct orrery_cls_thread`: what the loader uses of it, which is its beginning.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Words {
    pub(crate) delta: isize,
}

/// `struct orrery_cls_host`.
#[repr(C)]
pub(crate) struct Host {
    pub(crate) heap_start: usize,
    pub(crate) heap_size: usize,
    pub(crate) allocate: unsafe extern "C" fn(*mut c_void, usize, usize) -> *mut c_void,
    pub(crate) release: unsafe extern "C" fn(*mut c_void, *mut c_void),
    pub(crate) resize: unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> *mut c_void,
    pub(crate) usable_size: unsafe extern "C" fn(*mut c_void, *mut c_void) -> usize,
    pub(crate) thread_starts: unsafe extern "C" fn(*mut c_void),
    pub(crate) thread_ends: unsafe extern "C" fn(*mut c_void),
    pub(crate) set_base: Option<unsafe extern "C" fn(isize)>,
}

/// `struct orrery_cls_own`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Own {
    pub(crate) instance: *mut c_void,
    pub(crate) exits: *mut c_void,
    pub(crate) blocks: *mut c_void,
    pub(crate) keys: *mut c_void,
}

/// `struct orrery_cls_unit`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Unit {
    /// The highest bit is `uses_gs`.
    first: u32,
    distance: i32,
}

impl Unit {
    /// Returns the largest alignment of its variables.
    pub(crate) fn alignment(&self) -> usize {
        (self.first & !(1 << 31)) as usize
    }
}

/// `struct orrery_cls_descriptor`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Descriptor {
    pub(crate) version: u32,
    pub(crate) size: u32,
    pub(crate) extent: unsafe extern "C" fn(*mut *mut u8, *mut *mut u8),
    pub(crate) units: *const Unit,
    pub(crate) units_end: *const Unit,
    pub(crate) pristine: unsafe extern "C" fn(*mut usize) -> *const u8,
    pub(crate) thread: unsafe extern "C" fn() -> *mut Words,
    pub(crate) set_host: unsafe extern "C" fn(*const Host),
    pub(crate) construct: unsafe extern "C" fn(),
    pub(crate) destruct: unsafe extern "C" fn(),
    pub(crate) forget: unsafe extern "C" fn(),
    pub(crate) own: *mut Own,
}
