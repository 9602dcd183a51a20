//! What differs between processors: leaving one stack for another with the caller's registers saved.
//!
//! One file per architecture, all with the same functions.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{finish, has_xsave, jump_code, run_crossing, snapshot_crossing};

#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "orrery-rollback: only x86_64 has its registers and stacks described so far (src/arch/x86_64.rs)"
);

use std::ffi::c_void;

use orrery_sys::signals::Mask;

/// What `end` says when the body is to run once more, in the state that it found at first. No snapshot can be resumed
/// with this value.
pub(crate) const AGAIN: i32 = i32::MIN;

/// The meeting point of the assembly and the engine. It is in the arena, out of reach of any rollback.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Crossing {
    /// The stack pointer below the registers that were saved on the stack that was left. A restore changes it to where
    /// the restored state left.
    pub(crate) stack_pointer: usize,
    /// The top of the engine's stack.
    pub(crate) engine_stack: usize,
    /// The signal mask that is set on leaving the engine's stack, where no handler may run.
    pub(crate) mask: Mask,
    /// Whether registers are cleared by `xrstor`: 0 or 1.
    pub(crate) has_xsave: u32,
    /// Runs on the engine's stack before the body; anything but 0 is returned at once, without running it.
    pub(crate) begin: unsafe extern "C" fn(*mut Crossing) -> i32,
    /// Runs on the caller's stack.
    pub(crate) body: unsafe extern "C" fn(*mut c_void),
    /// What the body gets.
    pub(crate) argument: *mut c_void,
    /// Runs on the engine's stack behind the body; its result is returned.
    pub(crate) end: unsafe extern "C" fn(*mut Crossing) -> i32,
}
