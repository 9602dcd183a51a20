//! Upcalls: what a service manager, a program and the executive beneath the program share.
//!
//! A program registers a function (`orrery-upcall`, `orrery/hijack.h`). A manager puts a number and a value into the *queue*, and sends
//! [`SIGNAL`] to the process; the executive's handler takes them out and calls the function. The queue is memory that the program has
//! for reading only, so what the function is called with comes from the manager, even if another process sent the signal.
//!
//! ```text
//!  manager                              executive, in the program
//!  -------                              -------------------------
//!  sending = 1
//!  open?  ------------ reads ---------  open = 1 while a function is registered
//!  entries[head] = ...; head += 1
//!  was empty: sends the signal  ----->  entries[tail]; tail += 1; more there: sends the signal to itself; calls the function
//!  sending = 0                          before execve: open = 0; waits until sending = 0: no signal comes later
//! ```

use core::sync::atomic::{AtomicI64, AtomicU32, AtomicU64};

/// The signal that is the executive's own in a program that has registered a function: the last one, which Go and QEMU expect to be
/// somebody's, too.
pub const SIGNAL: u64 = 64;

/// How many upcalls may wait in one program.
pub const ENTRIES: usize = 64;

/// The option of prctl(2) by which a program speaks to its executive about upcalls. Kernels do not have it: EINVAL.
pub const OPTION: u64 = 0x6f72_7570;
/// Its second argument: returns [`VERSION`], and [`IS_REGISTERED`] where a function is registered.
pub const PROBE: u64 = 0;
/// Its second argument: has a function called; the third one leads to a [`Registration`].
pub const REGISTER: u64 = 1;
/// Its second argument: ends that. Returns 1 where the caller is on the stack of upcalls, and else 0.
pub const UNREGISTER: u64 = 2;
/// The version of all of this.
pub const VERSION: u64 = 1;
/// See [`PROBE`].
pub const IS_REGISTERED: u64 = 1 << 8;

/// What a program wants called.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Registration {
    /// `void function(int64_t number, int64_t value, void *user)`.
    pub function: u64,
    /// Its third argument.
    pub user: u64,
    /// Where the [`Queue`] is.
    pub queue: u64,
    /// Where the [`State`] is.
    pub state: u64,
    /// Where the function's stack begins, and how long it is.
    pub stack: u64,
    /// See `stack`.
    pub stack_length: u64,
    /// Where memory begins that is the thread's alternate stack while the function runs, where it has interrupted something on that
    /// one, and how long it is.
    pub alternate: u64,
    /// See `alternate`.
    pub alternate_length: u64,
}

/// An upcall.
#[repr(C)]
#[derive(Debug)]
pub struct Entry {
    /// The function's first argument.
    pub number: AtomicI64,
    /// The function's second argument.
    pub value: AtomicI64,
}

/// What the manager writes. All-zero bytes are a valid, empty queue.
#[repr(C)]
#[derive(Debug)]
pub struct Queue {
    /// How many upcalls were put in, ever.
    pub head: AtomicU64,
    /// How many found no room.
    pub dropped: AtomicU64,
    /// Not zero while the manager may be about to send the signal.
    pub sending: AtomicU32,
    /// The upcall of number `n` is at `n % ENTRIES`.
    pub entries: [Entry; ENTRIES],
}

/// What the program's executive writes. All-zero bytes are valid.
#[repr(C)]
#[derive(Debug)]
pub struct State {
    /// How many upcalls were taken out, ever.
    pub tail: AtomicU64,
    /// Not zero while the signal may be sent.
    pub open: AtomicU32,
}
