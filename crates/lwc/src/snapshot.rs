//! Snapshots that return twice, for the C interface (the paper's Algorithm 1).
//!
//! [`snapshot`] is like setjmp(3), but what comes back with a [`resume`] is the whole process state, and the function
//! that took the snapshot may have returned long since. A Rust program must not call it: the compiler does not expect
//! calls to return twice. Rust has [`crate::rollback`].

use orrery_memory::PageRange;
use rustix::io::Errno;

use crate::arch::{self, Crossing};
use crate::engine;
use crate::error::{Error, Result};
use crate::rollback::{Builder, aligned, stack_address};

/// Takes a snapshot, stores its number through `id`, and returns 0; each [`resume`] of it returns here again with its
/// value. -1 is an error, and [`last_error`] tells which.
///
/// # Safety
/// `id` is valid for a write. The caller is compiled to expect that the call returns more than once (C's
/// `returns_twice`).
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
pub unsafe extern "C" fn snapshot(id: *mut u32) -> i32 {
    core::arch::naked_asm!(
        "lea rsi, [rip + {prepare}]",
        "jmp {crossing}",
        prepare = sym prepare,
        crossing = sym arch::snapshot_crossing,
    )
}

/// Numbers the snapshot and says where to cross, or refuses with null.
unsafe extern "C" fn prepare(id: *mut u32) -> *mut Crossing {
    let prepared = engine::set_up_default().and_then(engine::Engine::prepare_snapshot);
    match prepared {
        Ok((place, crossing)) => {
            // Numbers begin at 1, so that 0 never names a snapshot.
            // SAFETY: the caller's pointer.
            unsafe { id.write(u32::try_from(place + 1).unwrap_or(0)) };
            crossing
        }
        Err(error) => {
            engine::remember_refusal(error);
            core::ptr::null_mut()
        }
    }
}

/// Goes back to snapshot `id`, whose [`snapshot`] then returns `value`, neither 0 nor `i32::MIN`. It returns only if that
/// cannot be.
pub fn resume(id: u32, value: i32) -> Error {
    let missing = Error::Memory(orrery_memory::Error::NoSnapshot { number: id });
    if value == 0 || value == arch::AGAIN {
        return Error::System(orrery_sys::Error::new("lw_resume with value 0 or INT_MIN", 0, Errno::INVAL));
    }
    match (engine::existing(), place(id)) {
        (Ok(engine), Some(place)) => engine.resume(place, value),
        (Ok(_), None) => missing,
        (Err(error), _) => error,
    }
}

/// Forgets snapshot `id`.
///
/// # Errors
/// [`Error::Memory`] where there is none, and those of a wrong place to call from.
pub fn discard(id: u32) -> Result<()> {
    let missing = Error::Memory(orrery_memory::Error::NoSnapshot { number: id });
    engine::existing()?.discard(place(id).ok_or(missing)?)
}

/// Leaves `length` bytes at `start` alone in every snapshot and rollback from now on.
///
/// # Errors
/// [`Error::Memory`] where the range is unaligned, holds the stack or is not mapped throughout.
pub fn keep(start: usize, length: usize) -> Result<()> {
    let range: PageRange = aligned(start, length)?;
    engine::set_up_default()?.keep(range, stack_address())
}

/// What the last snapshot or resume could not do or undo.
pub fn last_error() -> Option<Error> {
    engine::last_error()
}

/// Sets up the engine with other settings than the default ones; it must come before the first snapshot.
///
/// # Errors
/// Those of [`Builder::build`].
pub fn configure(settings: Builder) -> Result<()> {
    settings.build().map(|_| ())
}

fn place(id: u32) -> Option<usize> {
    (id as usize).checked_sub(1)
}
