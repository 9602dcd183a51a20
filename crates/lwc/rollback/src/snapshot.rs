//! Snapshots that return twice, for the C interface (the paper's Algorithm 1).
//!
//! [`snapshot`] is like setjmp(3), but what comes back with a [`resume`] is the whole process state, and the function
//! that took the snapshot may have returned long since. A Rust program must not call it: the compiler does not expect
//! calls to return twice. Rust has [`Rollback`](crate::Rollback).

use std::cell::Cell;

use orrery_memory::PageRange;
use orrery_sys::signals::{self, Mask};

use crate::arch::{self, Crossing};
use crate::engine;
use crate::error::{Error, Result};
use crate::rollback::{Builder, aligned, stack_address};

thread_local! {
    /// Why this thread's last snapshot was refused before it began.
    static REFUSAL: Cell<Option<Error>> = const { Cell::new(None) };
}

/// Takes a snapshot, stores its name through `id`, and returns 0; each [`resume`] of it returns here again with its
/// value. -1 is an error, and [`last_error`] tells which.
///
/// # Safety
/// `id` is valid for a write. The caller is compiled to expect that the call returns more than once (C's
/// `returns_twice`).
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
pub unsafe extern "C" fn snapshot(id: *mut u64) -> i32 {
    std::arch::naked_asm!(
        "lea rsi, [rip + {prepare}]",
        "jmp {crossing}",
        prepare = sym prepare,
        crossing = sym arch::snapshot_crossing,
    )
}

/// Names the snapshot and says where to cross, or refuses with null.
unsafe extern "C" fn prepare(id: *mut u64) -> *mut Crossing {
    REFUSAL.set(None);
    let quiet = Quiet::begin();
    // SAFETY: the caller's pointer.
    let prepared = engine::set_up_default()
        .and_then(|engine| unsafe { engine.prepare_snapshot(id.cast(), quiet.mask()) });
    match prepared {
        Ok(crossing) => {
            // The crossing ends it.
            std::mem::forget(quiet);
            crossing
        }
        Err(error) => {
            REFUSAL.set(Some(error));
            std::ptr::null_mut()
        }
    }
}

/// Goes back to snapshot `id`, whose [`snapshot`] then returns `value`, which must be none of 0, -1 and
/// `i32::MIN`: those have a meaning of their own. It returns only if that cannot be.
pub fn resume(id: u64, value: i32) -> Error {
    if matches!(value, 0 | -1 | arch::AGAIN) {
        return Error::Value { value };
    }
    let _quiet = Quiet::begin();
    match engine::existing(id) {
        Ok(engine) => engine.resume(id, value),
        Err(error) => error,
    }
}

/// Forgets snapshot `id`.
///
/// # Errors
/// [`Error::NoSnapshot`], and those of a wrong place to call from.
pub fn discard(id: u64) -> Result<()> {
    let _quiet = Quiet::begin();
    engine::existing(id)?.discard(id)
}

/// Leaves `length` bytes at `start` alone in every snapshot and rollback from now on.
///
/// # Errors
/// [`Error::Memory`] where the range is unaligned, holds the stack or is not mapped throughout.
pub fn keep(start: usize, length: usize) -> Result<()> {
    let range: PageRange = aligned(start, length)?;
    let _quiet = Quiet::begin();
    engine::set_up_default()?.keep(range, stack_address())
}

/// Returns what the last snapshot or resume could not do or undo.
pub fn last_error() -> Option<Error> {
    REFUSAL.get().or_else(engine::last_error)
}

/// Sets up the engine with other settings than the default ones; it must come before the first snapshot.
///
/// # Errors
/// Those of [`Builder::build`].
pub fn configure(settings: Builder) -> Result<()> {
    settings.build().map(|_| ())
}

/// While it lives, no signal is handled: a handler may call what it interrupts.
struct Quiet(Mask);

impl Quiet {
    fn begin() -> Self {
        Self(signals::block_all())
    }

    /// Returns the mask before.
    fn mask(&self) -> Mask {
        self.0
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        signals::set_mask(self.0);
    }
}
