//! `orrery/rollback.h`: snapshots of the process, and going back to them.

use core::ffi::{c_int, c_void};

use orrery_rollback::{Error, snapshot};

use crate::error;

/// Takes a snapshot; returns 0, and again whenever it is resumed.
///
/// It adds errno to [`snapshot::snapshot`]. Its own frame may return twice like its caller's: it is part of the stack that
/// is restored.
///
/// # Safety
/// `id` is null or valid for a write, and the caller is compiled to expect that the call returns more than once.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_rollback_snapshot(id: *mut u64) -> c_int {
    core::arch::naked_asm!(
        "sub rsp, 24",
        "mov [rsp + 8], rdi",
        "call {forget}",
        "mov rdi, [rsp + 8]",
        "test rdi, rdi",
        "jz 2f",
        "call {snapshot}",
        "cmp eax, -1",
        "je 2f",
        "add rsp, 24",
        "ret",
        "2:",
        "mov rdi, [rsp + 8]",
        "add rsp, 24",
        "jmp {refused}",
        forget = sym forget,
        snapshot = sym snapshot::snapshot,
        refused = sym refused,
    )
}

extern "C" fn forget() {
    error::clear();
}

/// Says why there is no snapshot.
extern "C" fn refused(id: *const u64) -> c_int {
    let null = || {
        Error::System(orrery_sys::Error::new("orrery_rollback_snapshot", id.addr(), rustix::io::Errno::INVAL))
    };
    error::fail(if id.is_null() { null() } else { snapshot::last_error().unwrap_or_else(null) })
}

/// Goes back to a snapshot; it returns only if that cannot be.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_rollback_resume(id: u64, value: c_int) -> c_int {
    error::fail(snapshot::resume(id, value))
}

/// Leaves memory alone from now on.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_rollback_exclude(address: *mut c_void, length: usize) -> c_int {
    result(snapshot::keep(address.addr(), length))
}

/// Forgets a snapshot.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_rollback_discard(id: u64) -> c_int {
    result(snapshot::discard(id))
}

fn result(outcome: orrery_rollback::Result<()>) -> c_int {
    outcome.map_or_else(error::fail, |()| 0)
}
