//! What cannot be said in Rust: where the stack is not ours, or control comes back twice.
//!
//! Whatever follows a program's `syscall` must find the flags as they were, so code that returns to the program uses
//! `lea` and `mov` for arithmetic, and `jrcxz` to branch.

use core::arch::global_asm;
use core::sync::atomic::AtomicU64;

use super::frame::Registers;
use super::slots::Slot;
use crate::board::{Board, CALLS, FIRST_BUCKET};
use crate::config::Config;

/// How many sites can be rewritten in one process.
pub(crate) const GATES: usize = 1024;

/// What the steward writes before the image runs.
#[cfg_attr(feature = "image", unsafe(no_mangle))]
pub(crate) static ORRERY_CONFIG: Config =
    // SAFETY: the structure consists of integers, for which zero is valid.
    unsafe { core::mem::zeroed() };

/// Where each gate returns to.
pub(crate) static TARGETS: [AtomicU64; GATES] = [const { AtomicU64::new(0) }; GATES];

unsafe extern "C" {
    /// Returns from a signal handler.
    pub(crate) fn orrery_restorer() -> !;
    /// Returns from the signal frame whose context is at `rsp`.
    pub(crate) fn orrery_sigreturn_at(rsp: u64) -> !;
    /// The same, and gives the place back that the stack was on until then.
    pub(crate) fn orrery_sigreturn_releasing(rsp: u64, busy: *const u8) -> !;
    /// Unmaps the stack on which the thread runs, and ends the thread.
    pub(crate) fn orrery_unmap_and_exit(start: u64, length: u64) -> !;
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
    /// Performs the call in eax, times it, and returns to rcx.
    pub(crate) fn orrery_timed();
    /// Has the policy asked about the call in eax, and returns to rcx.
    pub(crate) fn orrery_judged();
}

/// What `orrery_judged` pushes: on the program's stack, below its red zone.
#[repr(C)]
pub(crate) struct Patched {
    pub(crate) number: u64,
    /// Last to first.
    pub(crate) arguments: [u64; 6],
    /// Where the call returns to.
    pub(crate) site: u64,
    flags: u64,
}

/// What a function may use below its stack pointer.
pub(crate) const RED_ZONE: u64 = 128;

global_asm!(
    ".pushsection .text.orrery_gates,\"ax\",@progbits",
    ".balign 64",
    ".globl orrery_gates",
    ".hidden orrery_gates",
    "orrery_gates:",
    ".set orrery_gate, 0",
    ".rept {gates}",
    "syscall",
    "jmp qword ptr [rip + {targets} + orrery_gate]",
    ".set orrery_gate, orrery_gate + 8",
    ".endr",
    "",
    ".balign 16",
    ".globl orrery_restorer",
    ".hidden orrery_restorer",
    "orrery_restorer:",
    "mov eax, 15",
    "syscall",
    "ud2",
    "",
    ".globl orrery_sigreturn_at",
    ".hidden orrery_sigreturn_at",
    "orrery_sigreturn_at:",
    "mov rsp, rdi",
    "mov eax, 15",
    "syscall",
    "ud2",
    "",
    ".globl orrery_sigreturn_releasing",
    ".hidden orrery_sigreturn_releasing",
    "orrery_sigreturn_releasing:",
    "mov rsp, rdi",
    "mov byte ptr [rsi], 0",
    "mov eax, 15",
    "syscall",
    "ud2",
    "",
    ".globl orrery_unmap_and_exit",
    ".hidden orrery_unmap_and_exit",
    "orrery_unmap_and_exit:",
    "mov eax, 11",
    "syscall",
    "mov edi, 0",
    "mov eax, 60",
    "syscall",
    "ud2",
    "",
    // rdi: registers, rsi: extended state or 0, rdx: its features
    ".globl orrery_clone",
    ".hidden orrery_clone",
    "orrery_clone:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "pushfq",
    "test rsi, rsi",
    "jz 3f",
    "test rdx, rdx",
    "jz 2f",
    "mov rax, rdx",
    "shr rdx, 32",
    "xrstor64 [rsi]",
    "jmp 3f",
    "2:",
    "fxrstor64 [rsi]",
    "3:",
    "mov r8, [rdi]",
    "mov r9, [rdi + 8]",
    "mov r10, [rdi + 16]",
    "mov r12, [rdi + 32]",
    "mov r13, [rdi + 40]",
    "mov r14, [rdi + 48]",
    "mov r15, [rdi + 56]",
    "mov rsi, [rdi + 72]",
    "mov rbp, [rdi + 80]",
    "mov rbx, [rdi + 88]",
    "mov rdx, [rdi + 96]",
    "mov rax, [rdi + 104]",
    "push qword ptr [rdi + 136]",
    "mov rdi, [rdi + 64]",
    "popfq",
    "syscall",
    "mov rcx, rax",
    "jrcxz 4f",
    "popfq",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
    // The child: arms dispatch, sets the handler (it may have asked for none) and its mask, goes on.
    "4:",
    "lea rsp, [rsp - 16]",
    "push rdi",
    "push rsi",
    "push rdx",
    "push r10",
    "push r8",
    "mov edi, 59",
    "mov esi, 1",
    "mov rdx, [rip + {config} + {code}]",
    "mov r10, [rip + {config} + {code_length}]",
    "mov r8d, 0",
    "mov eax, 157",
    "syscall",
    "mov rcx, rax",
    "jrcxz 5f",
    "mov rcx, [rip + {config}]",
    "lock inc qword ptr [rcx + {unarmed}]",
    "5:",
    "mov edi, 31",
    "lea rsi, [rip + {config} + {action}]",
    "mov edx, 0",
    "mov r10d, 8",
    "mov eax, 13",
    "syscall",
    "mov edi, 2",
    "lea rsi, [rsp + 40]",
    "mov edx, 0",
    "mov r10d, 8",
    "mov eax, 14",
    "syscall",
    "pop r8",
    "pop r10",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "lea rsp, [rsp + 16]",
    "mov eax, 0",
    "jmp qword ptr [rsp - 8]",
    "",
    // rdi: slot, rsi: call, rdx: stack. What is needed afterwards is kept in registers: the child uses this stack.
    ".globl orrery_vfork",
    ".hidden orrery_vfork",
    "orrery_vfork:",
    "mov rsp, rdx",
    "mov rbx, rdi",
    "mov rbp, rdx",
    "mov rax, [rsi]",
    "mov rdi, [rsi + 8]",
    "mov rdx, [rsi + 24]",
    "mov r10, [rsi + 32]",
    "mov r8, [rsi + 40]",
    "mov r9, [rsi + 48]",
    "mov rsi, [rsi + 16]",
    "syscall",
    "mov rsp, rbp",
    "mov rdi, rbx",
    "test rax, rax",
    "jnz 6f",
    "call {vfork_child}",
    "ud2",
    "6:",
    "mov rsi, rax",
    "call {vfork_parent}",
    "ud2",
    "",
    ".globl orrery_set_alternate_stack",
    ".hidden orrery_set_alternate_stack",
    "orrery_set_alternate_stack:",
    "mov rdx, rsp",
    "mov esi, 0",
    "mov esp, 0",
    "mov eax, 131",
    "syscall",
    "mov rsp, rdx",
    "ret",
    "",
    ".globl orrery_compat",
    ".hidden orrery_compat",
    "orrery_compat:",
    "push rbx",
    "push rbp",
    "mov eax, [rdi + 104]",
    "mov ebx, [rdi + 88]",
    "mov ecx, [rdi + 112]",
    "mov edx, [rdi + 96]",
    "mov esi, [rdi + 72]",
    "mov ebp, [rdi + 80]",
    "mov edi, [rdi + 64]",
    "int 0x80",
    "pop rbp",
    "pop rbx",
    "ret",
    "",
    // eax: number, rcx: where to return to; rcx and r11 are ours, below the red zone is room
    ".globl orrery_timed",
    ".hidden orrery_timed",
    "orrery_timed:",
    "lea rsp, [rsp - 128]",
    "pushfq",
    "push rcx",
    "push rax",
    "push rdx",
    "rdtsc",
    "shl rdx, 32",
    "or rax, rdx",
    "push rax",
    "mov rdx, [rsp + 8]",
    "mov rax, [rsp + 16]",
    "syscall",
    "push rax",
    "rdtsc",
    "shl rdx, 32",
    "or rax, rdx",
    "sub rax, [rsp + 8]",
    "mov ecx, [rsp + 24]",
    "shl rcx, 8",
    "add rcx, [rip + {config}]",
    "lea r11, [rcx + {calls}]",
    "lock inc qword ptr [r11 + 8]",
    "lock add qword ptr [r11 + 24], rax",
    "shr rax, {first_bucket}",
    "lea rax, [rax + rax + 1]",
    "bsr rax, rax",
    "cmp eax, {last_bucket}",
    "jbe 7f",
    "mov eax, {last_bucket}",
    "7:",
    "lock inc qword ptr [r11 + rax * 8 + 32]",
    "pop rax",
    "cmp rax, -4095",
    "jb 8f",
    "lock inc qword ptr [r11 + 16]",
    "8:",
    "lea rsp, [rsp + 8]",
    "pop rdx",
    "lea rsp, [rsp + 8]",
    "pop rcx",
    "popfq",
    "lea rsp, [rsp + 128]",
    "jmp rcx",
    "",
    // The same registers. What functions may change, and the kernel would not, is kept: xmm, but nothing of ymm and
    // above, which no instruction of the image touches.
    ".globl orrery_judged",
    ".hidden orrery_judged",
    "orrery_judged:",
    "lea rsp, [rsp - 128]",
    "pushfq",
    "push rcx",
    "push rdi",
    "push rsi",
    "push rdx",
    "push r10",
    "push r8",
    "push r9",
    "push rax",
    "mov rdi, rsp",
    "push rbp",
    "mov rbp, rsp",
    "and rsp, -16",
    "lea rsp, [rsp - 256]",
    ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
    "movaps [rsp + 16 * \\n], xmm\\n",
    ".endr",
    "cld",
    "call {patched}",
    ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
    "movaps xmm\\n, [rsp + 16 * \\n]",
    ".endr",
    "mov rsp, rbp",
    "pop rbp",
    "lea rsp, [rsp + 8]",
    "pop r9",
    "pop r8",
    "pop r10",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "pop rcx",
    "popfq",
    "lea rsp, [rsp + 128]",
    "jmp rcx",
    ".popsection",
    gates = const GATES,
    targets = sym TARGETS,
    config = sym ORRERY_CONFIG,
    code = const core::mem::offset_of!(Config, code),
    code_length = const core::mem::offset_of!(Config, code_length),
    action = const core::mem::offset_of!(Config, action),
    unarmed = const core::mem::offset_of!(Board, unarmed),
    calls = const core::mem::offset_of!(Board, calls),
    first_bucket = const FIRST_BUCKET,
    last_bucket = const crate::board::BUCKETS - 1,
    vfork_child = sym super::threads::vfork_child,
    vfork_parent = sym super::threads::vfork_parent,
    patched = sym super::serve::patched,
);

/// Rows are found by shifting.
const _: () = assert!(size_of::<crate::board::Calls>() == 1 << 8 && CALLS == 512);
