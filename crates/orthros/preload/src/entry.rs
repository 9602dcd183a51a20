//! Where a thread goes on that is to be asked.
//!
//! ```text
//!   before                       rsp ->  the thread's stack; 128 bytes below belong to it, too (the red zone)
//!   pushed, from there down              flags, the way back, rbp, rbx, r9, r8, r10, rdx, rsi, rdi, rax = the call
//!   below, at a multiple of 64           vector registers, as xsave or fxsave leaves them
//! ```
//!
//! A system call changes `rax`, `rcx` and `r11` only, and so does this.

use std::arch::naked_asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::atomic::{AtomicU64, Ordering};

/// How many bytes `xsave` writes here; 0 where there is no `xsave`, or nobody has looked yet.
static VECTORS: AtomicU64 = AtomicU64::new(0);

/// Finds out how the vector registers are to be kept.
pub(crate) fn prepare() {
    const OSXSAVE: u32 = 1 << 27;
    if __cpuid(1).ecx & OSXSAVE != 0 {
        VECTORS.store(u64::from(__cpuid_count(0xd, 0).ebx), Ordering::Relaxed);
    }
}

/// Asks the program about the call in `rax`, and goes on at `rcx` with the answer in `rax`.
///
/// # Safety
///
/// Only the rescue leads here, with the registers of a thread in a system call.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn entry() {
    naked_asm!(
        "lea rsp, [rsp - 128]",
        "pushfq",
        "push rcx",
        "push rbp",
        "push rbx",
        "mov rbp, rsp",
        "push r9",
        "push r8",
        "push r10",
        "push rdx",
        "push rsi",
        "push rdi",
        "push rax",
        "mov rbx, rsp",
        "cld",
        "mov rcx, qword ptr [rip + {vectors}]",
        "test rcx, rcx",
        "jz 2f",
        "sub rsp, rcx",
        "and rsp, -64",
        // The header of what xsave writes must be zero before.
        "xor ecx, ecx",
        "mov [rsp + 512], rcx",
        "mov [rsp + 520], rcx",
        "mov [rsp + 528], rcx",
        "mov [rsp + 536], rcx",
        "mov [rsp + 544], rcx",
        "mov [rsp + 552], rcx",
        "mov [rsp + 560], rcx",
        "mov [rsp + 568], rcx",
        "mov eax, -1",
        "mov edx, -1",
        "xsave64 [rsp]",
        "mov rdi, rbx",
        "call {ask}",
        "mov r11, rax",
        "mov eax, -1",
        "mov edx, -1",
        "xrstor64 [rsp]",
        "jmp 3f",
        "2:",
        "sub rsp, 512",
        "and rsp, -64",
        "fxsave64 [rsp]",
        "mov rdi, rbx",
        "call {ask}",
        "mov r11, rax",
        "fxrstor64 [rsp]",
        "3:",
        // Past the call's number.
        "lea rsp, [rbx + 8]",
        "mov rax, r11",
        "pop rdi",
        "pop rsi",
        "pop rdx",
        "pop r10",
        "pop r8",
        "pop r9",
        "pop rbx",
        "pop rbp",
        "pop rcx",
        "popfq",
        "lea rsp, [rsp + 128]",
        "jmp rcx",
        vectors = sym VECTORS,
        ask = sym super::ask,
    )
}
