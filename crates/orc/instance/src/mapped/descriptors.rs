//! TLS descriptors: the other way in which code finds a thread-local variable (`-mtls-dialect=gnu2`).
//!
//! A descriptor is two words: a function, and what is for that function. Code calls the function with the address of the descriptor in
//! rax, and gets in rax the distance of the variable from the thread pointer. All other registers stay as they are ("Thread-Local
//! Storage Descriptors for IA32 and AMD64/EM64T", Oliva and Araújo, 2.2), so that a function which may allocate memory saves
//! those of the vector units, too.

use std::arch::x86_64::__cpuid_count;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::mapped::threads::{self, Index};

/// How many bytes XSAVE writes at most, with room for alignment. Not 0 once a descriptor exists.
static SAVED: AtomicUsize = AtomicUsize::new(0);

/// Returns the two words of a descriptor; none where the processor does not save its state as is needed. `index` outlives the
/// descriptor.
pub(crate) fn descriptor(index: &Index) -> Option<[usize; 2]> {
    if !std::arch::is_x86_feature_detected!("xsave") {
        return None;
    }
    let enabled = __cpuid_count(0xd, 0).ebx;
    // The legacy area and the header are there in any case.
    SAVED.store((enabled as usize).max(576).next_multiple_of(64) + 64, Ordering::Relaxed);
    let function = find as *const ();
    Some([function.expose_provenance(), std::ptr::from_ref(index).expose_provenance()])
}

/// Has the convention above.
#[unsafe(naked)]
unsafe extern "C" fn find() {
    std::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "push r10",
        "push r11",
        "push rbx",
        "mov rdi, [rax + 8]",
        "sub rsp, [rip + {saved}]",
        "and rsp, -64",
        // The header of the area, which XRSTOR checks.
        "xor eax, eax",
        "mov [rsp + 512], rax",
        "mov [rsp + 520], rax",
        "mov [rsp + 528], rax",
        "mov [rsp + 536], rax",
        "mov [rsp + 544], rax",
        "mov [rsp + 552], rax",
        "mov [rsp + 560], rax",
        "mov [rsp + 568], rax",
        // x87, SSE, AVX, AVX-512.
        "mov eax, 0xe7",
        "xor edx, edx",
        "xsave64 [rsp]",
        "call {address_of}",
        "mov rbx, rax",
        "mov eax, 0xe7",
        "xor edx, edx",
        "xrstor64 [rsp]",
        "mov rax, rbx",
        "sub rax, fs:0",
        "lea rsp, [rbp - 72]",
        "pop rbx",
        "pop r11",
        "pop r10",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rbp",
        "ret",
        saved = sym SAVED,
        address_of = sym threads::address_of,
    )
}
