//! The program's registers, where a signal has interrupted the executive.
//!
//! A signal may interrupt a thread anywhere in the executive: in a trampoline, in a stub, in the handler of a dispatched call. What is found
//! here is the program at its own `syscall`: `rip` behind it, or at it where the call is to be made again, and `rsp` as it was there.

use core::mem::{offset_of, size_of};
use core::sync::atomic::Ordering::Relaxed;

use crate::executive::abi::signal_frame::{Context, Info, Progress, Registers, SYS_USER_DISPATCH};
use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::trampoline::{
    RED_ZONE, RETURN_ADDRESSES, STUB_FRAME_MARK, StubFrame, TRAMPOLINES, orrery_restorer, orrery_steps,
    orrery_steps_end, orrery_trampolines,
};
use crate::executive::abi::unwind_step::{Step, kind, number};
use crate::executive::memory::stub_pages;
use crate::executive::policy::handlers;

/// What was found out about registers. They are changed in their place: this runs on the program's stack, which may be small.
enum Found {
    /// They are the program's now.
    Program,
    /// They would be, but where the executive is interrupted there as well.
    Executive,
    /// They were not changed.
    Unknown,
}

/// Makes the program's registers of those that the executive was interrupted with. Otherwise, where the program itself was, or the
/// executive at a point that belongs to no call, gives that they are none.
#[inline(never)]
pub(super) fn to_program(registers: &mut Registers) -> bool {
    const DEEPEST: usize = 8;
    let mut changed = false;
    for _ in 0..DEEPEST {
        match step_out(registers) {
            Found::Program => return true,
            Found::Executive => changed = true,
            Found::Unknown => return changed,
        }
    }
    false
}

fn step_out(registers: &mut Registers) -> Found {
    let code = ORRERY_CONFIG.code.load(Relaxed);
    if handlers::contain(registers.rip) {
        return within(registers, registers.rbp, None);
    }
    if registers.rip.wrapping_sub(code) >= ORRERY_CONFIG.code_length.load(Relaxed) {
        return in_stub(registers).map_or(Found::Unknown, |()| Found::Program);
    }
    let offset = registers.rip.wrapping_sub((orrery_trampolines as *const ()).addr() as u64);
    if offset < 8 * TRAMPOLINES as u64 {
        in_trampoline(registers, offset);
        return Found::Program;
    }
    match step(offset) {
        Some(step) if step.stack != kind::END => in_assembly(registers, step),
        _ => within(registers, registers.rbp, None),
    }
}

pub(super) fn step(offset: u64) -> Option<&'static Step> {
    let (start, end) = (&raw const orrery_steps, &raw const orrery_steps_end);
    let count = (end.addr() - start.addr()) / size_of::<Step>();
    // SAFETY: the assembler has put so many there.
    let steps = unsafe { core::slice::from_raw_parts(start, count) };
    steps.iter().rev().find(|step| u64::from(step.offset) <= offset)
}

/// A call is to be made by the `syscall` that ends at `end`.
fn before(registers: &mut Registers, end: u64, number: u64) {
    (registers.rip, registers.rax) = (end.wrapping_sub(2), number);
}

/// It was made.
fn behind(registers: &mut Registers, end: u64, result: u64) {
    (registers.rip, registers.rcx, registers.rax) = (end, end, result);
}

fn in_trampoline(registers: &mut Registers, offset: u64) {
    let end = RETURN_ADDRESSES.get((offset / 8) as usize).map_or(0, |target| target.load(Relaxed));
    let rax = registers.rax;
    if offset.is_multiple_of(8) { before(registers, end, rax) } else { behind(registers, end, rax) }
}

/// In a stub: at one of the instructions that were moved there, or on the way from them to the call.
fn in_stub(registers: &mut Registers) -> Option<()> {
    let (trampoline, at, stub) = stub_pages::at(registers.rip)?;
    let end = RETURN_ADDRESSES.get(trampoline)?.load(Relaxed);
    match stub.original(at) {
        Some(back) => registers.rip = end - back,
        None => before(registers, end, stub.number().unwrap_or(registers.rax)),
    }
    Some(())
}

/// A word of the stack, or of the executive's own.
///
/// # Safety
/// It is there.
pub(super) unsafe fn word(at: u64) -> u64 {
    // SAFETY: eight bytes can be read there (# Safety), aligned or not.
    unsafe { core::ptr::with_exposed_provenance::<u64>(at as usize).read_unaligned() }
}

fn in_assembly(registers: &mut Registers, step: &Step) -> Found {
    let (rsp, rbp) = (registers.rsp, registers.rbp);
    let load = |registers: &mut Registers, address: u64| {
        let place = core::ptr::with_exposed_provenance::<Registers>(address as usize);
        // SAFETY: the registers point to what the assembly has there, by its steps.
        unsafe { core::ptr::copy(place, registers, 1) };
        Found::Executive
    };
    let context = |address: u64| address + offset_of!(Context, registers) as u64;
    // SAFETY: the unwind table says what the assembly has pushed, so each address read here is on the stack.
    unsafe {
        match step.stack {
            kind::NOTHING => Found::Unknown,
            kind::STUB_CALL | kind::STUB_CALL_XMM => {
                in_stub_call(registers, rbp, None);
                Found::Program
            }
            kind::PERFORMS => within(registers, rbp, Some(Progress::NONE)),
            kind::PERFORMED => within(registers, rbp, Some(Progress { done: 1, result: registers.rax })),
            kind::COMPATIBLE => within(registers, word(rsp), None),
            kind::AT_RDI => load(registers, registers.rdi),
            kind::AT_RCX => load(registers, registers.rcx),
            kind::LOADED => {
                (registers.rip, registers.rsp) = (registers.rcx, registers.r11);
                Found::Executive
            }
            kind::FRAME => load(registers, context(rsp)),
            kind::FRAME_AT_RDI => load(registers, context(registers.rdi)),
            kind::BEGINS => dispatched(registers, rsp + 8, Some(Progress::NONE)),
            kind::ENTERED => dispatched(registers, rsp + 8, None),
            kind::ENTERED_FURTHER => dispatched(registers, rsp + 16, None),
            stack => {
                in_stub_function(registers, step, rsp + 8 * u64::from(stack));
                Found::Program
            }
        }
    }
}

/// In a function that a stub has jumped to, of which the program's stack pointer is known.
///
/// # Safety
/// The step is right.
unsafe fn in_stub_function(registers: &mut Registers, step: &Step, stack: u64) {
    // SAFETY: what was pushed is there until `rsp` is more than a red zone above it.
    let pushed = |words: u8| unsafe { word(stack - 8 * u64::from(words)) };
    registers.rsp = stack;
    let end = if step.back == 0 { registers.rcx } else { pushed(step.back) };
    if step.rdx != 0 {
        registers.rdx = pushed(step.rdx);
    }
    if step.flags != 0 {
        registers.eflags = pushed(step.flags);
    }
    let (rax, r11) = (registers.rax, registers.r11);
    match step.number {
        number::RAX => before(registers, end, rax),
        number::R11 => before(registers, end, r11),
        number::DONE => behind(registers, end, rax),
        number::DONE_PUSHED => behind(registers, end, pushed(22)),
        number::RESTORING_DONE | number::RESTORING_UNMADE => {
            // SAFETY: a whole `StubFrame` was pushed there: see `unwind_steps.s`.
            let saved =
                unsafe { &*core::ptr::with_exposed_provenance::<StubFrame>((stack - PATCHED) as usize) };
            saved.arguments_to(registers);
            if step.number == number::RESTORING_DONE {
                behind(registers, end, rax);
            } else {
                before(registers, end, saved.number);
            }
        }
        slot => before(registers, end, pushed(slot)),
    }
}

/// From the program's stack pointer down to [`StubFrame`].
const PATCHED: u64 = RED_ZONE + size_of::<StubFrame>() as u64;

/// In what `orrery_stub_call` calls.
///
/// # Safety
/// `base` is its rbp.
unsafe fn in_stub_call(registers: &mut Registers, base: u64, progress: Option<Progress>) {
    // SAFETY: it has pushed a mark and rbp below the structure.
    let (saved, rbp) =
        unsafe { (&*core::ptr::with_exposed_provenance::<StubFrame>(base as usize + 16), word(base)) };
    let progress = progress.unwrap_or(saved.progress);
    [registers.r15, registers.r14, registers.r13, registers.r12, registers.rbx] = saved.preserved;
    (registers.rbp, registers.rsp, registers.eflags) = (rbp, base + 16 + PATCHED, saved.flags);
    saved.arguments_to(registers);
    if progress.done == 0 {
        before(registers, saved.site, saved.number);
    } else {
        behind(registers, saved.site, progress.result);
    }
}

/// In the handler of a dispatched call.
///
/// # Safety
/// There is the context of its frame.
unsafe fn dispatched(registers: &mut Registers, context: u64, progress: Option<Progress>) -> Found {
    let context = core::ptr::with_exposed_provenance::<Context>(context as usize);
    // SAFETY: by the caller; siginfo is behind the context.
    let code = unsafe {
        *registers = (*context).registers;
        (*context.add(1).cast::<Info>()).code
    };
    if code != SYS_USER_DISPATCH || stub_pages::at(registers.rip).is_some() {
        return Found::Executive;
    }
    let progress = progress.unwrap_or(registers.progress);
    let (end, number) = (registers.rip, registers.rax);
    if progress.done == 0 {
        before(registers, end, number);
    } else {
        behind(registers, end, progress.result);
    }
    Found::Program
}

/// What has called the executive's functions.
pub(super) enum Caller {
    /// The handler of SIGSYS: the context of its frame.
    Handler(u64),
    /// `orrery_stub_call` or `orrery_stub_filter`: their rbp.
    Stub(u64),
}

/// In the executive's functions: their frames lead to who has called them. They are compiled with frame pointers, and the assembly
/// that calls them has frames of its own, with something in place of the return address that is nowhere else. So it does not matter
/// whether a function has made its frame yet, and nothing has to be guessed.
pub(super) fn caller(rsp: u64, mut base: u64) -> Option<Caller> {
    let restorer = (orrery_restorer as *const ()).addr() as u64;
    for _ in 0..MOST_FRAMES {
        if base.wrapping_sub(rsp) > FAR || !base.is_multiple_of(8) {
            return None;
        }
        // SAFETY: the stack from `rsp` on is the executive's, up to a frame of the assembly's.
        let (next, returns) = unsafe { (word(base), word(base + 8)) };
        if returns == restorer {
            return Some(Caller::Handler(base + 16));
        }
        if returns == u64::from(STUB_FRAME_MARK) {
            return Some(Caller::Stub(base));
        }
        if next <= base {
            return None;
        }
        base = next;
    }
    None
}

fn within(registers: &mut Registers, base: u64, progress: Option<Progress>) -> Found {
    match caller(registers.rsp, base) {
        // SAFETY: what was found is there.
        Some(Caller::Handler(context)) => unsafe { dispatched(registers, context, progress) },
        Some(Caller::Stub(base)) => {
            // SAFETY: `base` is the rbp of a stub's frame, by `caller`.
            unsafe { in_stub_call(registers, base, progress) };
            Found::Program
        }
        None => Found::Unknown,
    }
}

/// Frames of the executive's own functions are not further away from one another.
const FAR: u64 = 64 << 10;

const MOST_FRAMES: usize = 64;

#[cfg(test)]
mod tests {
    use core::sync::atomic::AtomicU64;

    use super::*;
    use crate::executive::abi::syscall::address;

    fn registers() -> Registers {
        // SAFETY: any bytes are valid integers.
        unsafe { core::mem::zeroed() }
    }

    #[test]
    fn a_gate_is_shown_as_the_site_it_returns_to() {
        const GATE: usize = TRAMPOLINES - 1;
        RETURN_ADDRESSES[GATE].store(0x40_1234, Relaxed);
        let trampoline = (orrery_trampolines as *const ()).addr() as u64 + 8 * GATE as u64;
        let offset = 8 * GATE as u64;
        let mut to_make = Registers { rip: trampoline, rax: 7, rsp: 64, ..registers() };
        in_trampoline(&mut to_make, offset);
        assert_eq!((to_make.rip, to_make.rax, to_make.rsp), (0x40_1232, 7, 64));
        let mut made = Registers { rip: trampoline + 2, rax: 9, rcx: trampoline + 2, ..registers() };
        in_trampoline(&mut made, offset + 2);
        assert_eq!((made.rip, made.rcx, made.rax), (0x40_1234, 0x40_1234, 9));
    }

    #[test]
    fn steps_are_in_the_order_of_the_code() {
        let first = step(8 * TRAMPOLINES as u64).unwrap();
        let mut last = 0;
        let mut count = 0;
        for offset in 8 * TRAMPOLINES as u64..8 * TRAMPOLINES as u64 + (8 << 10) {
            let step = step(offset).unwrap_or(first);
            assert!(step.offset >= last);
            count += u32::from(step.offset > last);
            last = step.offset;
            if step.stack == kind::END {
                break;
            }
        }
        assert!(count > 70, "{count}");
        assert!(step(0).is_none());
    }

    /// As `orrery_stub_call` lays the stack out.
    #[test]
    fn what_was_pushed_is_found() {
        let stack = [const { AtomicU64::new(0) }; 64];
        let program = address(&stack) + 8 * 60;
        let pushed: [u64; 34] = core::array::from_fn(|distance| 1000 + distance as u64);
        for (distance, value) in pushed.iter().enumerate() {
            stack[60 - distance].store(*value, Relaxed);
        }
        // rbp, the mark, progress, then what `StubFrame` names.
        let base = program - 8 * 34;
        stack[26].store(77, Relaxed);
        stack[28].store(0, Relaxed);
        let mut found = registers();
        // SAFETY: all of that is in the array.
        unsafe { in_stub_call(&mut found, base, None) };
        assert_eq!((found.rsp, found.rbp, found.rip, found.rax), (program, 77, 1018 - 2, 1025));
        assert_eq!(
            (found.rdi, found.rsi, found.rdx, found.r10, found.r8, found.r9),
            (1019, 1020, 1021, 1022, 1023, 1024)
        );
        assert_eq!((found.rbx, found.r12, found.r15, found.eflags), (1026, 1027, 1030, 1017));
        stack[28].store(1, Relaxed);
        let mut found = registers();
        // SAFETY: all of that is in the array.
        unsafe { in_stub_call(&mut found, base, None) };
        assert_eq!((found.rip, found.rcx, found.rax), (1018, 1018, 1031));
    }

    /// As `orrery_stub_filter` takes off what it has pushed.
    #[test]
    fn a_call_that_is_not_made_yet_keeps_its_number_and_arguments() {
        let stack = [const { AtomicU64::new(0) }; 64];
        let program = address(&stack) + 8 * 60;
        for distance in 0..33 {
            stack[60 - distance].store(1000 + distance as u64, Relaxed);
        }
        for number in [number::RESTORING_UNMADE, number::RESTORING_DONE] {
            let step = Step { offset: 0, stack: 32, back: 18, number, rdx: 0, flags: 0, reserved: [0; 3] };
            let mut found = Registers { rax: 7, ..registers() };
            // SAFETY: all of that is in the array.
            unsafe { in_stub_function(&mut found, &step, program) };
            let (rip, rax) = if number == number::RESTORING_UNMADE { (1018 - 2, 1025) } else { (1018, 7) };
            assert_eq!((found.rsp, found.rip, found.rax), (program, rip, rax));
            assert_eq!(
                (found.rdi, found.rsi, found.rdx, found.r10, found.r8, found.r9),
                (1019, 1020, 1021, 1022, 1023, 1024)
            );
        }
    }
}
