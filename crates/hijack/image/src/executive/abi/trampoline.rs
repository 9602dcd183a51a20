//! The assembly's functions as Rust calls them, and the trampolines through which rewritten sites make their calls.
//!
//! They are written in assembly because the stack is not the executive's there, or because control returns twice. The code is in
//! `dispatch/assembly`.

use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::executive::abi::signal_frame::{Progress, Registers};
use crate::executive::abi::unwind_step::Step;
use crate::executive::abi::vfork_slots::Slot;

/// How many sites can be rewritten in one process.
pub(crate) const TRAMPOLINES: usize = 4096;

/// Where each trampoline returns to.
pub(crate) static RETURN_ADDRESSES: [AtomicU64; TRAMPOLINES] = [const { AtomicU64::new(0) }; TRAMPOLINES];

unsafe extern "C" {
    /// Runs `process::boot::boot`, and sends SIGSYS to itself, with what that returned in rbx.
    pub(crate) fn orrery_boot(checked: u64, precise: u64, stack: u64) -> !;
    /// Makes the image's data where its code alone is attached, from a `config::Loading` at rbx, and goes on to `orrery_boot`.
    pub(crate) fn orrery_load() -> !;
    /// Handles SIGSYS: `dispatch::sigsys::on_sigsys`, with a frame of its own around that.
    pub(crate) fn orrery_sigsys();
    /// Returns from a signal handler.
    pub(crate) fn orrery_restorer() -> !;
    /// Returns from the signal frame whose context is at `rsp`.
    pub(crate) fn orrery_sigreturn_at(rsp: u64) -> !;
    /// The same, and gives the place back that the stack was on until then.
    pub(crate) fn orrery_sigreturn_releasing(rsp: u64, taker: *const AtomicU32) -> !;
    /// Unmaps the stack on which the thread runs, and ends the thread.
    pub(crate) fn orrery_unmap_and_exit(start: u64, length: u64) -> !;
    /// Goes on with these registers, without the kernel's help: everything but the mask and the alternate stack, which must
    /// be what they were. Loses r11, which a system call overwrites.
    pub(crate) fn orrery_resume(registers: *const Registers, extended: u64, features: u64) -> !;
    /// `clone` or `clone3` with a stack for the child, whose highest words are the address to go on at and, below, the
    /// mask to have. The child starts with the program's registers.
    pub(crate) fn orrery_clone(registers: *const Registers, extended: u64, features: u64) -> i64;
    /// `vfork`, or a `clone` that behaves like it (number and six arguments), on the stack of a slot.
    pub(crate) fn orrery_vfork(slot: *const Slot, call: *const [u64; 7], stack: u64) -> !;
    /// `sigaltstack`, with a stack pointer that is on no stack. Signals must be blocked.
    pub(crate) fn orrery_set_alternate_stack(new: u64) -> i64;
    /// Calls a function of the program with these arguments, on a stack that ends at `top`.
    pub(crate) fn orrery_call_on_stack(function: u64, number: i64, value: i64, user: u64, top: u64);
    /// Returns a call with `int $0x80`.
    pub(crate) fn orrery_compat(registers: *const Registers) -> u64;
    /// The trampolines: eight bytes each, `syscall` and a jump through [`RETURN_ADDRESSES`].
    pub(crate) fn orrery_trampolines();
    /// Performs the call in eax, counts it, and returns to rcx.
    pub(crate) fn orrery_counted();
    /// Performs the call in eax, times it, and returns to rcx.
    pub(crate) fn orrery_timed();
    /// Has the policy asked about the call in eax, and returns to rcx.
    pub(crate) fn orrery_stub_call();
    /// Performs a call of the program's, with these six arguments, and notes directly behind it that it was made.
    pub(crate) fn orrery_perform(number: u64, arguments: *const [u64; 6], progress: *mut Progress) -> i64;
    /// What the kernel is given for handlers of the program: eight bytes each, see `signals::handlers`.
    pub(crate) fn orrery_thunks();
    /// Goes on to a handler of SIGSYS, with the frame that the executive was called with.
    pub(crate) fn orrery_deliver(frame: u64, handler: u64) -> !;
    /// What is where in all of this, by the instruction.
    pub(crate) static orrery_steps: Step;
    pub(crate) static orrery_steps_end: Step;
    /// The same, but has the call performed by the trampoline in r11 if nothing is to be said about it: see `policy::path_filter`.
    pub(crate) fn orrery_stub_filter();
}

/// What `orrery_stub_call` and `orrery_stub_filter` push: on the program's stack, below its red zone.
#[repr(C)]
pub(crate) struct StubFrame {
    pub(crate) progress: Progress,
    /// r15, r14, r13, r12 and rbx.
    pub(crate) preserved: [u64; 5],
    pub(crate) number: u64,
    /// The six arguments of the call, the last one first.
    pub(crate) arguments: [u64; 6],
    /// Where the call returns to.
    pub(crate) site: u64,
    pub(crate) flags: u64,
}

impl StubFrame {
    /// Puts the call's arguments into the registers that they were in.
    pub(crate) fn arguments_to(&self, registers: &mut Registers) {
        let r = registers;
        [r.r9, r.r8, r.r10, r.rdx, r.rsi, r.rdi] = self.arguments;
    }
}

/// What is in place of a return address above the rbp that `orrery_stub_call` and `orrery_stub_filter` keep: nobody returns there.
pub(crate) const STUB_FRAME_MARK: u32 = 0x6f72_7265;

/// What a function may use below its stack pointer.
pub(crate) const RED_ZONE: u64 = 128;
