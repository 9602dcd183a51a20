//! What cannot be said in Rust: where the stack is not ours, or control comes back twice.
//!
//! Whatever follows a program's `syscall` must find the flags as they were, so code that returns to the program uses
//! `lea` and `mov` for arithmetic, and `jrcxz` to branch.

use core::arch::global_asm;
use core::sync::atomic::AtomicU64;

use super::frame::{Context, Registers};
use super::handlers::{HANDLERS, Progress, ROOM, Step, THUNKS, kind, number};
use super::slots::Slot;
use crate::board::{Board, CALLS, FIRST_BUCKET};
use crate::config::Config;

/// How many sites can be rewritten in one process.
pub(crate) const GATES: usize = 4096;

/// What the steward writes before the image runs.
#[cfg_attr(feature = "image", unsafe(no_mangle))]
pub(crate) static ORRERY_CONFIG: Config =
    // SAFETY: the structure consists of integers, for which zero is valid.
    unsafe { core::mem::zeroed() };

/// Where each gate returns to.
pub(crate) static TARGETS: [AtomicU64; GATES] = [const { AtomicU64::new(0) }; GATES];

unsafe extern "C" {
    /// Runs [`super::boot::boot`], and sends SIGSYS to itself, with what that returned in rbx.
    pub(crate) fn orrery_boot(segment: u64, precise: u64, stack: u64) -> !;
    /// Handles SIGSYS: [`super::serve::on_sigsys`], with a frame of its own around that.
    pub(crate) fn orrery_sigsys();
    /// Returns from a signal handler.
    pub(crate) fn orrery_restorer() -> !;
    /// Returns from the signal frame whose context is at `rsp`.
    pub(crate) fn orrery_sigreturn_at(rsp: u64) -> !;
    /// The same, and gives the place back that the stack was on until then.
    pub(crate) fn orrery_sigreturn_releasing(rsp: u64, busy: *const u8) -> !;
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
    /// A call with `int $0x80`.
    pub(crate) fn orrery_compat(registers: *const Registers) -> u64;
    /// The gates: eight bytes each, `syscall` and a jump through [`TARGETS`].
    pub(crate) fn orrery_gates();
    /// Performs the call in eax, counts it, and returns to rcx.
    pub(crate) fn orrery_counted();
    /// Performs the call in eax, times it, and returns to rcx.
    pub(crate) fn orrery_timed();
    /// Has the policy asked about the call in eax, and returns to rcx.
    pub(crate) fn orrery_judged();
    /// Performs a call of the program's, with these six arguments, and notes directly behind it that it was made.
    pub(crate) fn orrery_perform(number: u64, arguments: *const [u64; 6], progress: *mut Progress) -> i64;
    /// What the kernel is given for handlers of the program: eight bytes each, see `handlers`.
    pub(crate) fn orrery_thunks();
    /// Goes on to a handler of SIGSYS, with the frame that the executive was called with.
    pub(crate) fn orrery_deliver(frame: u64, handler: u64) -> !;
    /// What is where in all of this, by the instruction.
    pub(crate) static orrery_steps: Step;
    pub(crate) static orrery_steps_end: Step;
    /// The same, but has the call performed by the gate in r11 if nothing is to be said about it: see [`super::permits`].
    pub(crate) fn orrery_asked();
}

/// What `orrery_judged` and `orrery_asked` push: on the program's stack, below its red zone.
#[repr(C)]
pub(crate) struct Patched {
    pub(crate) progress: Progress,
    /// r15, r14, r13, r12 and rbx.
    pub(crate) preserved: [u64; 5],
    pub(crate) number: u64,
    /// Last to first.
    pub(crate) arguments: [u64; 6],
    /// Where the call returns to.
    pub(crate) site: u64,
    pub(crate) flags: u64,
}

impl Patched {
    /// Puts the call's arguments into the registers that they were in.
    pub(crate) fn arguments_to(&self, registers: &mut Registers) {
        let r = registers;
        [r.r9, r.r8, r.r10, r.rdx, r.rsi, r.rdi] = self.arguments;
    }
}

/// What is in place of a return address above the rbp that `orrery_judged` and `orrery_asked` keep: nobody returns there.
pub(crate) const KEPT: u32 = 0x6f72_7265;

/// What a function may use below its stack pointer.
pub(crate) const RED_ZONE: u64 = 128;

global_asm!(
    include_str!("gates/steps.s"),
    include_str!("gates/gates.s"),
    include_str!("gates/boot.s"),
    include_str!("gates/dispatch.s"),
    include_str!("gates/births.s"),
    include_str!("gates/performing.s"),
    include_str!("gates/counting.s"),
    include_str!("gates/asking.s"),
    include_str!("gates/thunks.s"),
    include_str!("gates/end.s"),
    gates = const GATES,
    targets = sym TARGETS,
    config = sym ORRERY_CONFIG,
    code = const core::mem::offset_of!(Config, code),
    code_length = const core::mem::offset_of!(Config, code_length),
    action = const core::mem::offset_of!(Config, action),
    unarmed = const core::mem::offset_of!(Board, unarmed),
    calls = const core::mem::offset_of!(Board, calls),
    blind = const core::mem::offset_of!(Config, blind),
    own_counters = const core::mem::offset_of!(Config, own_counters),
    owners = sym super::own::TABLE,
    other = const CALLS,
    first_bucket = const FIRST_BUCKET,
    last_bucket = const crate::board::BUCKETS - 1,
    vfork_child = sym super::threads::vfork_child,
    vfork_parent = sym super::threads::vfork_parent,
    on_sigsys = sym super::serve::on_sigsys,
    patched = sym super::serve::patched,
    mark = const KEPT,
    thunks = const THUNKS,
    handlers = sym HANDLERS,
    interrupted = const 8 + core::mem::offset_of!(Context, registers) + core::mem::offset_of!(Registers, rip),
    shown = const 8 + core::mem::offset_of!(Context, registers) + core::mem::offset_of!(Registers, mark),
    lowest_stub = sym super::stubs::LOWEST_STUB,
    highest_stub = sym super::stubs::HIGHEST_STUB,
    room = const ROOM,
    info = const 8 + size_of::<Context>(),
    present = sym super::handlers::present,
    kinds = const kind::FIRST,
    saved = const core::mem::offset_of!(Context, registers),
    nothing = const kind::NOTHING,
    judged = const kind::JUDGED,
    kept = const kind::KEPT,
    performs = const kind::PERFORMS,
    performed = const kind::PERFORMED,
    begins = const kind::BEGINS,
    progress = const core::mem::offset_of!(Context, registers)
        + core::mem::offset_of!(Registers, progress)
        + core::mem::offset_of!(Progress, done),
    entered = const kind::ENTERED,
    entered_further = const kind::ENTERED_FURTHER,
    at_rdi = const kind::AT_RDI,
    at_rcx = const kind::AT_RCX,
    loaded = const kind::LOADED,
    frame = const kind::FRAME,
    frame_at_rdi = const kind::FRAME_AT_RDI,
    compatible = const kind::COMPATIBLE,
    end = const kind::END,
    r11 = const number::R11,
    pops = const number::POPS,
    popped = const number::POPPED,
    done = const number::DONE,
    done_pushed = const number::DONE_PUSHED,
    asked = sym super::permits::asked,
    boot = sym super::boot::boot,
);

/// Rows are found by shifting.
const _: () = assert!(size_of::<crate::board::Calls>() == 1 << 8 && CALLS == 512);
