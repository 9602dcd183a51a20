//! x86-64, System V.
//!
//! A crossing is an ordinary call for the compiler, so the callee-saved registers and the control words of the two
//! floating-point units are all that a caller may rely on; everything else is dead across a call. They are pushed onto
//! the stack that is left:
//!
//! ```text
//!   caller's frame
//!   return address
//!   rbp rbx r12 r13 r14 r15
//!   mxcsr, x87 control word      <- stack_pointer (16-byte aligned)
//!   ...                             the body's frames, while it runs
//! ```
//!
//! What was in the other registers goes, whatever held it: memory that is restored was compared and copied through vector registers,
//! and the body had its own data in them. From there they would come to memory again, as the dynamic loader saves all registers on the
//! stack when it binds a function at its first call.
//!
//! That memory is part of what is restored, so a restored state finds its registers where it left them: loading
//! `stack_pointer` and popping continues it. Which state that is, `end` decides by what it leaves in `stack_pointer`.

use std::arch::naked_asm;
use std::mem::offset_of;

use super::{AGAIN, Crossing};

/// Pushes what a caller relies on; `rsp` is then 16-byte aligned.
macro_rules! save {
    () => {
        "push rbp
         push rbx
         push r12
         push r13
         push r14
         push r15
         sub rsp, 8
         stmxcsr [rsp]
         fnstcw [rsp + 4]"
    };
}

/// Leaves the engine's stack for `stack_pointer` of the crossing in `rbx`, and sets its `mask`: not before, lest a
/// handler run on the engine's stack. Keeps `eax`.
macro_rules! leave_engine {
    () => {
        "mov rsp, [rbx + {stack_pointer}]
         mov r12d, eax
         mov edi, 2 /* SIG_SETMASK */
         lea rsi, [rbx + {mask}]
         xor edx, edx
         mov r10d, 8
         mov eax, 14 /* rt_sigprocmask */
         syscall
         mov eax, r12d"
    };
}

/// A state of `xrstor` with nothing in it (Intel SDM, volume 1, 13.4): each component that is asked for becomes as at reset. MXCSR is
/// taken from here in any case.
#[repr(C, align(64))]
struct Empty {
    before_mxcsr: [u32; 6],
    mxcsr: u32,
    rest: [u32; 121],
    header: [u64; 8],
}

static EMPTY: Empty = Empty { before_mxcsr: [0; 6], mxcsr: 0x1f80, rest: [0; 121], header: [0; 8] };

/// Clears the registers of both floating-point units, vectors and masks, what APX adds, and arguments that the engine has no use for; those that the processor or the kernel does
/// not have are left out by the processor. Loads the control words at `rsp`. Needs the crossing in `rbx`; keeps `eax`.
macro_rules! clear_registers {
    () => {
        "cmp dword ptr [rbx + {has_xsave}], 0
         je 8f
         mov r12d, eax
         lea rcx, [rip + {empty}]
         mov eax, 0x800e7 /* x87, SSE, AVX, three of AVX-512, APX */
         xor edx, edx
         xrstor [rcx]
         mov eax, r12d
         jmp 9f
         8:
         fninit
         xorps xmm0, xmm0
         xorps xmm1, xmm1
         xorps xmm2, xmm2
         xorps xmm3, xmm3
         xorps xmm4, xmm4
         xorps xmm5, xmm5
         xorps xmm6, xmm6
         xorps xmm7, xmm7
         xorps xmm8, xmm8
         xorps xmm9, xmm9
         xorps xmm10, xmm10
         xorps xmm11, xmm11
         xorps xmm12, xmm12
         xorps xmm13, xmm13
         xorps xmm14, xmm14
         xorps xmm15, xmm15
         9:
         xor r8d, r8d
         xor r9d, r9d
         fldcw [rsp + 4]
         ldmxcsr [rsp]"
    };
}

/// Continues the state whose stack pointer is in `rsp`: its call returns `eax`.
macro_rules! continue_state {
    () => {
        "add rsp, 8
         pop r15
         pop r14
         pop r13
         pop r12
         pop rbx
         pop rbp
         cld
         ret"
    };
}

/// Saves the caller's registers, calls `begin` on the engine's stack, `body` on this one, `end` on the engine's stack,
/// and returns what `end` (or a `begin` that refused) said, with the registers of the state that `end` left in place.
///
/// # Safety
/// `crossing` and the stack that it names are outside of everything that `end` puts back, and its functions do not
/// unwind.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn run_crossing(crossing: *mut Crossing) -> i32 {
    naked_asm!(
        save!(),
        "mov [rdi + {stack_pointer}], rsp",
        "mov rbx, rdi",
        "mov rsp, [rdi + {engine_stack}]",
        "xor ebp, ebp",
        "call [rdi + {begin}]",
        leave_engine!(),
        "test eax, eax",
        "jnz 2f",
        "mov rdi, [rbx + {argument}]",
        "call [rbx + {body}]",
        "mov rdi, rbx",
        "jmp {finish}",
        "2:",
        clear_registers!(),
        continue_state!(),
        stack_pointer = const offset_of!(Crossing, stack_pointer),
        mask = const offset_of!(Crossing, mask),
        has_xsave = const offset_of!(Crossing, has_xsave),
        empty = sym EMPTY,
        engine_stack = const offset_of!(Crossing, engine_stack),
        begin = const offset_of!(Crossing, begin),
        argument = const offset_of!(Crossing, argument),
        body = const offset_of!(Crossing, body),
        finish = sym finish,
    )
}

/// Ends the body of a crossing from anywhere on its thread, be it a signal handler on another stack: goes on with
/// `end`. Where that says [`AGAIN`], the body runs once more.
///
/// # Safety
/// The crossing's `stack_pointer` is, or `end` makes it, that of a state that was saved on this thread.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn finish(crossing: *mut Crossing) -> ! {
    naked_asm!(
        "cld",
        "mov rbx, rdi",
        "mov rsp, [rdi + {engine_stack}]",
        "xor ebp, ebp",
        "call [rdi + {end}]",
        leave_engine!(),
        "cmp eax, {again}",
        "jne 2f",
        clear_registers!(),
        // The body's callers do not count on these, but what ended the round left its own in them.
        "xor r12d, r12d",
        "xor r13d, r13d",
        "xor r14d, r14d",
        "xor r15d, r15d",
        "cld",
        "mov rdi, [rbx + {argument}]",
        "call [rbx + {body}]",
        "mov rdi, rbx",
        "jmp {finish}",
        "2:",
        clear_registers!(),
        continue_state!(),
        stack_pointer = const offset_of!(Crossing, stack_pointer),
        mask = const offset_of!(Crossing, mask),
        has_xsave = const offset_of!(Crossing, has_xsave),
        empty = sym EMPTY,
        engine_stack = const offset_of!(Crossing, engine_stack),
        end = const offset_of!(Crossing, end),
        argument = const offset_of!(Crossing, argument),
        body = const offset_of!(Crossing, body),
        again = const AGAIN,
        finish = sym finish,
    )
}

/// The crossing of the C interface, which returns twice: `prepare(id)` names it (or refuses with null, for -1), `begin`
/// runs on the engine's stack, and its result is returned; a later [`finish`] may return here again.
///
/// # Safety
/// For callers that expect it to return more than once, which Rust code never does.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn snapshot_crossing(
    id: *mut u64,
    prepare: unsafe extern "C" fn(*mut u64) -> *mut Crossing,
) -> i32 {
    naked_asm!(
        "sub rsp, 8",
        "call rsi",
        "add rsp, 8",
        "test rax, rax",
        "jz 2f",
        "mov rdi, rax",
        save!(),
        "mov [rdi + {stack_pointer}], rsp",
        "mov rbx, rdi",
        "mov rsp, [rdi + {engine_stack}]",
        "xor ebp, ebp",
        "call [rdi + {begin}]",
        leave_engine!(),
        clear_registers!(),
        continue_state!(),
        "2:",
        "mov eax, -1",
        "ret",
        stack_pointer = const offset_of!(Crossing, stack_pointer),
        mask = const offset_of!(Crossing, mask),
        has_xsave = const offset_of!(Crossing, has_xsave),
        empty = sym EMPTY,
        engine_stack = const offset_of!(Crossing, engine_stack),
        begin = const offset_of!(Crossing, begin),
    )
}

/// Returns whether the kernel lets programs use `xrstor`; every processor of the last ten years has it.
pub(crate) fn has_xsave() -> bool {
    std::arch::is_x86_feature_detected!("xsave")
}

/// Machine code that jumps to `target` from anywhere: `movabs rax, target; jmp rax`. For the first bytes of a function
/// that takes no floating-point arguments and whose return register is free.
pub(crate) fn jump_code(target: usize) -> [u8; 12] {
    let mut code = [0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0];
    code[2..10].copy_from_slice(&target.to_le_bytes());
    code
}
