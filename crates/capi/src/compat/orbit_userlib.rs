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

/// `struct orbit_module`.
#[repr(C)]
#[derive(Debug)]
pub struct Module {
    /// The process that made it.
    pub mpid: libc::pid_t,
    /// Its number among that process' orbits.
    pub lobid: c_int,
    /// Its process id.
    pub gobid: libc::pid_t,
    /// What it runs.
    pub entry: Option<Entry>,
    /// Its name, cut to fit.
    pub name: [c_char; 16],
}

/// `struct orbit_pool`.
#[repr(C)]
#[derive(Debug)]
pub struct Pool {
    /// Where it lies.
    pub start: *mut c_void,
    /// Its size.
    pub length: usize,
    /// How much is in use.
    pub used: usize,
    /// Where what is in use starts.
    pub data_start: *mut c_void,
    /// How much is in use from there.
    pub data_length: usize,
    /// Of no effect.
    pub mode: c_int,
    /// The area behind it.
    pub area: *mut Backing,
}

/// `struct orbit_task`.
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

/// `struct orbit_allocator`.
#[repr(C)]
#[derive(Debug)]
pub struct Allocator {
    /// Where its memory lies.
    pub start: *mut c_void,
    /// How much that is.
    pub length: usize,
    /// Where it tells how much is in use.
    pub allocated: *mut usize,
    /// Held while it works.
    pub lock: libc::pthread_spinlock_t,
    /// Whether sizes are noted.
    pub use_meta: bool,
    /// Its functions.
    pub functions: *const Functions,
    /// The pool whose area it uses, if any.
    pub pool: *mut Pool,
}

/// `struct orbit_scratch`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    /// Where it lies.
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

/// `union orbit_result`.
#[repr(C)]
pub union Outcome {
    /// What the task returned.
    pub value: c_ulong,
    /// What it sent.
    pub scratch: Scratch,
}

/// `struct orbit_allocator_vtable`.
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
