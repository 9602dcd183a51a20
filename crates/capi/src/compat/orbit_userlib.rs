//! `orbit/orbit.h`: orbits under the names of their authors' user library, so that programs ported to that run unchanged.
//!
//! The header documents the functions; here is how they are made of [`orrery_orbit`]. Symbols carry the prefix
//! `orrery_authors_`, since `orrery/orbit.h` has some of the same names.

pub mod allocator;
pub mod call;
pub mod message;
pub mod pool;
pub mod records;
mod registry;
pub mod scratch;

use core::ffi::{c_char, c_int, c_ulong, c_void};

/// `orbit_entry`: store and arguments.
pub type Entry = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_ulong;

/// Mirrors `struct orbit_module` of the header.
#[repr(C)]
#[derive(Debug)]
pub struct Module {
    /// The process that made it.
    pub mpid: libc::pid_t,
    /// Its number among that process' orbits.
    pub lobid: c_int,
    /// The process ID of the orbit.
    pub gobid: libc::pid_t,
    /// The function that the orbit runs.
    pub entry: Option<Entry>,
    /// Its name, cut to fit.
    pub name: [c_char; 16],
}

/// Mirrors `struct orbit_pool` of the header.
#[repr(C)]
#[derive(Debug)]
pub struct Pool {
    /// The lowest address of the pool.
    pub start: *mut c_void,
    /// The size of the pool in bytes.
    pub length: usize,
    /// How much is in use.
    pub used: usize,
    /// Where what is in use starts.
    pub data_start: *mut c_void,
    /// How much is in use from there.
    pub data_length: usize,
    /// A mode, which has no effect.
    pub mode: c_int,
    /// The area behind it.
    pub area: *mut Backing,
}

/// Mirrors `struct orbit_task` of the header.
#[repr(C)]
#[derive(Debug)]
pub struct Task {
    /// Whose call it is.
    pub orbit: *mut Module,
    /// The call's number; 0 is none.
    pub number: c_ulong,
}

/// `struct orbit_update`, without its data.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Where the data is to go.
    pub address: *mut c_void,
    /// How many bytes follow.
    pub length: usize,
}

/// Mirrors `struct orbit_allocator` of the header.
#[repr(C)]
#[derive(Debug)]
pub struct Allocator {
    /// Where its memory is.
    pub start: *mut c_void,
    /// How much that is.
    pub length: usize,
    /// Where it tells how much is in use.
    pub allocated: *mut usize,
    /// Held while it works.
    pub lock: core::cell::UnsafeCell<libc::pthread_spinlock_t>,
    /// Whether sizes are noted.
    pub use_meta: bool,
    /// The functions of this allocator.
    pub functions: *const Functions,
    /// The pool whose area it uses, if any.
    pub pool: *mut Pool,
}

/// Mirrors `struct orbit_scratch` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    /// The lowest address of the scratch.
    pub start: *mut c_void,
    /// The current record, as an offset.
    pub cursor: usize,
    /// How much it may hold.
    pub limit: usize,
    /// How many records are left.
    pub count: usize,
    /// The allocator of a record in the making.
    pub open: *mut Allocator,
}

/// Mirrors `union orbit_result` of the header.
#[repr(C)]
pub union Outcome {
    /// What the task returned.
    pub value: c_ulong,
    /// The scratch that the orbit sent.
    pub scratch: Scratch,
}

/// Mirrors `struct orbit_allocator_vtable` of the header.
#[repr(C)]
#[derive(Debug)]
pub struct Functions {
    alloc: unsafe extern "C" fn(*mut Allocator, usize) -> *mut c_void,
    free: unsafe extern "C" fn(*mut Allocator, *mut c_void),
    realloc: unsafe extern "C" fn(*mut Allocator, *mut c_void, usize) -> *mut c_void,
    destroy: unsafe extern "C" fn(*mut Allocator),
}

/// What is behind a pool.
#[derive(Debug)]
pub struct Backing {
    /// None in an orbit, whose pools are memory of its own.
    area: Option<orrery_orbit::Area>,
}

/// Sets errno and a text, and returns -1.
fn fail(number: c_int, text: &str) -> c_int {
    crate::error::fail_with(number, text)
}

/// The same for an error of the crate beneath.
fn refuse(error: &orrery_orbit::Error) -> c_int {
    crate::error::fail(error)
}
