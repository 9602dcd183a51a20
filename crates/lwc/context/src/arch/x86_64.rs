//! Where a thread can be gone on with by another thread, in a copy of its process.
//!
//! Both functions that stop a thread keep the registers that a function must preserve on its stack, and say where:
//!
//! ```text
//!     return address
//!     rbp rbx r12 r13 r14 r15      <- the stack pointer that is reported
//!     ...                          frames of what runs meanwhile
//! ```

use std::arch::naked_asm;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicUsize};

macro_rules! keep {
    () => {
        "push rbp
         push rbx
         push r12
         push r13
         push r14
         push r15"
    };
}

macro_rules! back {
    () => {
        "pop r15
         pop r14
         pop r13
         pop r12
         pop rbx
         pop rbp
         ret"
    };
}

/// Counts itself in `arrived`, and waits while `*round` is `current`; says in `stack` where it does. Returns 0, and 1
/// in a thread that [`start_at`] made of it.
///
/// # Safety
/// All three stay valid.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn hold_still(
    stack: *const AtomicUsize,
    round: *const AtomicU32,
    current: u32,
    arrived: *const AtomicU32,
) -> u32 {
    naked_asm!(
        keep!(),
        "mov [rdi], rsp",
        "mov r12, rsi",
        "mov r13d, edx",
        "mov rbx, rcx",
        "lock inc dword ptr [rbx]",
        "mov eax, 202", // futex(FUTEX_WAKE_PRIVATE)
        "mov rdi, rbx",
        "mov esi, 129",
        "mov edx, 0x7fffffff",
        "syscall",
        "2:",
        "cmp [r12], r13d",
        "jne 3f",
        "mov eax, 202", // futex(FUTEX_WAIT_PRIVATE)
        "mov rdi, r12",
        "mov esi, 128",
        "mov edx, r13d",
        "xor r10d, r10d",
        "syscall",
        "jmp 2b",
        "3:",
        "xor eax, eax",
        back!(),
    )
}

/// Makes a thread (clone(2)) that returns 1 from where `stack` was reported. Gives its number, or an error below 0.
///
/// # Safety
/// Nobody else uses that stack, and the flags and addresses make a thread of it.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn start_at(
    flags: usize,
    stack: usize,
    parent_number: *mut u32,
    child_number: usize,
    thread_pointer: usize,
) -> isize {
    naked_asm!(
        "mov r10, rcx",
        "mov eax, 56",
        "syscall",
        "test rax, rax",
        "jz 2f",
        "ret",
        "2:",
        "mov eax, 1",
        back!(),
    )
}

/// Calls `run(with)`, after saying in `landing` where to [`land`]. Returns 0, or 1 after a landing.
///
/// # Safety
/// A landing leaves out everything that `run` would have done.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn with_landing(
    run: unsafe extern "C" fn(*mut c_void),
    with: *mut c_void,
    landing: *mut usize,
) -> u32 {
    naked_asm!(
        keep!(),
        "mov [rdx], rsp",
        "mov rax, rdi",
        "mov rdi, rsi",
        "sub rsp, 8",
        "call rax",
        "add rsp, 8",
        "xor eax, eax",
        back!(),
    )
}

/// Leaves everything behind, and returns 1 from the [`with_landing`] that reported `stack`.
///
/// # Safety
/// That call is under way on this very stack.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn land(stack: usize) -> ! {
    naked_asm!("mov rsp, rdi", "mov eax, 1", "cld", back!(),)
}

/// Begins to fetch a line of the cache that will be written soon, from whichever CPU has it (PREFETCHW). The address
/// may be any.
#[inline(always)]
pub(crate) fn fetch_for_writing(address: *const u8) {
    // SAFETY: a hint, which neither faults nor changes anything; where the processor has none, it does nothing.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly))
    };
}
