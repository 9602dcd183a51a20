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

/// Continues the state whose stack pointer is in `rsp`: its call returns `eax`.
macro_rules! continue_state {
    () => {
        "fninit
         fldcw [rsp + 4]
         ldmxcsr [rsp]
         add rsp, 8
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
/// `crossing` and the stack that it names lie outside of everything that `end` puts back, and its functions do not
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
        continue_state!(),
        stack_pointer = const offset_of!(Crossing, stack_pointer),
        mask = const offset_of!(Crossing, mask),
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
        "fninit",
        "fldcw [rsp + 4]",
        "ldmxcsr [rsp]",
        "cld",
        "mov rdi, [rbx + {argument}]",
        "call [rbx + {body}]",
        "mov rdi, rbx",
        "jmp {finish}",
        "2:",
        continue_state!(),
        stack_pointer = const offset_of!(Crossing, stack_pointer),
        mask = const offset_of!(Crossing, mask),
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
        continue_state!(),
        "2:",
        "mov eax, -1",
        "ret",
        stack_pointer = const offset_of!(Crossing, stack_pointer),
        mask = const offset_of!(Crossing, mask),
        engine_stack = const offset_of!(Crossing, engine_stack),
        begin = const offset_of!(Crossing, begin),
    )
}

/// Machine code that jumps to `target` from anywhere: `movabs rax, target; jmp rax`. For the first bytes of a function
/// that takes no floating-point arguments and whose return register is free.
pub(crate) fn jump_code(target: usize) -> [u8; 12] {
    let mut code = [0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0];
    code[2..10].copy_from_slice(&target.to_le_bytes());
    code
}
