//! Handlers of the program's signals, which see the program where an executive is beneath it.
//!
//! A signal may interrupt a thread anywhere in the executive: in a gate, in a stub, in the handler of a dispatched call. Whoever
//! looks at the interrupted registers is to find those that it would find without executive: `rip` behind the program's own
//! `syscall`, or at it where the call is to be made again, and `rsp` as it was there. Unwinders go on from there (cancelled
//! threads, exceptions that handlers throw, `backtrace`, profilers); and C libraries tell by the address whether a thread that is
//! cancelled has made its call (musl, glibc from 2.41 on), and change the registers if not.
//!
//! So the kernel is given another function for each handler of the program, a *thunk* in `gates`. Where the executive was
//! interrupted, it puts a copy of the frame's context in front of the kernel's, with the program's registers, and goes on to
//! the handler:
//!
//! ```text
//!   | kernel's frame: interrupted registers, siginfo, extended state |   <- what the thunk finds at rsp
//!   | where that is                                                  |
//!   | copy of its context, with the program's registers              |   <- what the handler finds at rsp
//! ```
//!
//! The handler returns by `rt_sigreturn`, which is dispatched. If it has left the registers as they were presented, the thread
//! goes on from the kernel's frame, within the executive: nothing of a call is lost or done twice. If it has changed them, or never
//! returns, the executive is left for good, which it bears at any point. A program that keeps a copy of the frame for later
//! can go on from that as well.

use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst, compiler_fence};

use super::frame::{Context, Info, Registers, SYS_USER_DISPATCH};
use super::gates::{
    GATES, KEPT, ORRERY_CONFIG, Patched, RED_ZONE, TARGETS, orrery_gates, orrery_restorer, orrery_steps,
    orrery_steps_end, orrery_thunks,
};
use super::stubs;

mod wide;

/// How many different handlers a process can have. Further ones see the executive where that is interrupted.
pub(crate) const THUNKS: usize = 256;
/// Bytes of a thunk.
const THUNK: u64 = 8;
/// What the program's handlers are, by their thunks; zero where free. Never freed.
pub(crate) static HANDLERS: [AtomicU64; THUNKS] = [const { AtomicU64::new(0) }; THUNKS];

/// The largest value of `sa_handler` that is no function.
const SIG_IGN: u64 = 1;
const MARK: u64 = 0x6f72_7265_7279_2073;
/// `si_code` of a call that a filter of the program's trapped.
const SYS_SECCOMP: i32 = 1;
/// Frames of the executive's own functions are not further away from one another.
const FAR: u64 = 64 << 10;
const MOST_FRAMES: usize = 64;

fn thunks() -> u64 {
    (orrery_thunks as *const ()).addr() as u64
}

/// What to tell the kernel in place of a handler.
pub(crate) fn wrapped(handler: u64) -> u64 {
    if handler <= SIG_IGN {
        return handler;
    }
    let has = |place: &AtomicU64| {
        let there = place.load(Relaxed);
        there == handler
            || there == 0
                && place
                    .compare_exchange(0, handler, Relaxed, Relaxed)
                    .map_or_else(|now| now == handler, |_| true)
    };
    HANDLERS.iter().position(has).map_or(handler, |index| thunks() + THUNK * index as u64)
}

/// What the program gave to [`wrapped`].
pub(crate) fn unwrapped(handler: u64) -> u64 {
    let index = (handler.wrapping_sub(thunks()) / THUNK) as usize;
    HANDLERS.get(index).map_or(handler, |place| place.load(Relaxed))
}

/// Room in front of a signal frame.
#[repr(C)]
pub(crate) struct Room {
    restorer: u64,
    context: Context,
    /// The context that the kernel wrote.
    interrupted: u64,
}

/// What says that a frame was made here, and not by the kernel at a place where one had been made before: the kernel leaves these
/// words as they were, but writes a siginfo over what is behind the context.
fn mark(room: *const Room, interrupted: u64) -> [u64; 2] {
    [MARK ^ interrupted, room.addr() as u64]
}

/// How much a thunk leaves for that.
pub(crate) const ROOM: usize = size_of::<Room>();
const _: () = assert!(ROOM.is_multiple_of(16));

/// Called by thunks that have interrupted the executive, with the kernel's frame, and room below it: which frame the handler is
/// to get.
pub(crate) extern "C" fn present(signal: i32, frame: *mut u64, room: *mut Room) -> *mut u64 {
    // SAFETY: the kernel's frame, behind its return address; and room below it, from the thunk.
    unsafe {
        let context = frame.add(1).cast::<Context>();
        core::ptr::copy_nonoverlapping(frame, room.cast(), 1 + size_of::<Context>() / 8);
        let registers = &mut (*room).context.registers;
        if !become_programs(registers) {
            return frame;
        }
        registers.mark = mark(room, context.addr() as u64);
        (*room).interrupted = context.addr() as u64;
        let info = context.add(1).cast::<Info>();
        if signal == super::kernel::SIGSYS as i32 && (*info).code == SYS_SECCOMP {
            (*info).call_address = registers.rip;
        }
        room.cast()
    }
}

/// The program returns from a handler by this context: the one to go on from.
///
/// # Safety
/// There is a signal frame's context.
pub(crate) unsafe fn interrupted(context: u64) -> u64 {
    let room = (context as usize).wrapping_sub(8);
    let room = core::ptr::with_exposed_provenance_mut::<Room>(room);
    // SAFETY: by the caller; what is behind the frame is read only where that was made here.
    unsafe {
        let shown = &(*room).context;
        if shown.registers.mark != mark(room, (*room).interrupted) {
            return context;
        }
        let original = core::ptr::with_exposed_provenance_mut::<Context>((*room).interrupted as usize);
        if !is_shown_as(&(*original).registers, &shown.registers) {
            wide::give_back(&*original);
            return context;
        }
        (*original).mask = shown.mask;
        (*original).stack = shown.stack;
        (*original).flags = shown.flags;
        (*room).interrupted
    }
}

/// Whether the program's registers are these, where the executive was interrupted with those.
#[inline(never)]
fn is_shown_as(interrupted: &Registers, shown: &Registers) -> bool {
    let mut registers = *interrupted;
    become_programs(&mut registers) && registers.are(shown)
}

/// How far the program's own call came: written directly behind it, by `orrery_perform`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Progress {
    /// Not zero: the call was made.
    pub(crate) done: u64,
    /// What it returned.
    pub(crate) result: u64,
}

impl Progress {
    /// No call yet.
    pub(crate) const NONE: Self = Self { done: 0, result: 0 };

    /// The call was made, or answered.
    pub(crate) fn made(&mut self, result: i64) {
        self.result = result.cast_unsigned();
        compiler_fence(SeqCst);
        self.done = 1;
        compiler_fence(SeqCst);
    }
}

/// From which instruction on the program's registers are where, in the assembly of `gates`. Distances are in words.
#[repr(C)]
pub(crate) struct Step {
    /// The instruction's distance from the gates, in bytes.
    offset: u32,
    /// How much the program's stack pointer is above `rsp`; or one of [`kind`].
    stack: u8,
    /// How much the address to return to is below that pointer; zero: it is in rcx.
    back: u8,
    /// The same about the call's number; or one of [`number`].
    number: u8,
    /// And about rdx.
    rdx: u8,
    /// And about the flags.
    flags: u8,
    reserved: [u8; 3],
}

/// Other ways to find the registers.
pub(crate) mod kind {
    /// All of these are not below this: no call has so many words on the stack.
    pub(crate) const FIRST: u8 = 241;
    /// There is no call.
    pub(crate) const NOTHING: u8 = 255;
    /// What `orrery_judged` has pushed, by its rbp.
    pub(crate) const JUDGED: u8 = 254;
    /// The same, and xmm registers are kept below.
    pub(crate) const KEPT: u8 = 241;
    /// In `orrery_perform`, before the call.
    pub(crate) const PERFORMS: u8 = 253;
    /// Behind it.
    pub(crate) const PERFORMED: u8 = 252;
    /// Registers are to be loaded from where rdi points to.
    pub(crate) const AT_RDI: u8 = 251;
    /// Or rcx.
    pub(crate) const AT_RCX: u8 = 250;
    /// They are loaded, but for rsp, which is in r11, and rip, which is in rcx.
    pub(crate) const LOADED: u8 = 249;
    /// To be loaded by `rt_sigreturn` from a context at rsp.
    pub(crate) const FRAME: u8 = 248;
    /// Or at rdi.
    pub(crate) const FRAME_AT_RDI: u8 = 247;
    /// In a function that has pushed its caller's rbp and uses the register.
    pub(crate) const COMPATIBLE: u8 = 246;
    /// The assembly ends here.
    pub(crate) const END: u8 = 245;
    /// At the first instruction of the handler of SIGSYS: its frame begins at rsp.
    pub(crate) const BEGINS: u8 = 242;
    /// Further on.
    pub(crate) const ENTERED: u8 = 244;
    /// It begins a word further up.
    pub(crate) const ENTERED_FURTHER: u8 = 243;
}

/// Where a call's number is, or that it was made.
pub(crate) mod number {
    pub(crate) const RAX: u8 = 0;
    pub(crate) const R11: u8 = 1;
    /// Made: its result is in rax, and rdi to r9 are as pushed by `orrery_judged`.
    pub(crate) const POPS: u8 = 2;
    /// Not made yet: it and rdi to r9 are as pushed by `orrery_asked`.
    pub(crate) const POPPED: u8 = 5;
    /// Made: its result is in rax.
    pub(crate) const DONE: u8 = 3;
    /// Made: its result is 22 words below the program's stack pointer.
    pub(crate) const DONE_PUSHED: u8 = 4;
}

/// What was found out about registers. They are changed in their place: this runs on the program's stack, which may be small.
enum Found {
    /// They are the program's now.
    These,
    /// They would be, but where the executive is interrupted there as well.
    Beneath,
    /// They were not changed.
    Nothing,
}

/// Makes the program's registers of those that the executive was interrupted with. Otherwise, where the program itself was, or the
/// executive at a point that belongs to no call, gives that they are none.
#[inline(never)]
fn become_programs(registers: &mut Registers) -> bool {
    const DEEPEST: usize = 8;
    let mut changed = false;
    for _ in 0..DEEPEST {
        match beneath(registers) {
            Found::These => return true,
            Found::Beneath => changed = true,
            Found::Nothing => return changed,
        }
    }
    false
}

fn beneath(registers: &mut Registers) -> Found {
    let code = ORRERY_CONFIG.code.load(Relaxed);
    if registers.rip.wrapping_sub(code) >= ORRERY_CONFIG.code_length.load(Relaxed) {
        return in_stub(registers).map_or(Found::Nothing, |()| Found::These);
    }
    let offset = registers.rip.wrapping_sub((orrery_gates as *const ()).addr() as u64);
    if offset < 8 * GATES as u64 {
        in_gate(registers, offset);
        return Found::These;
    }
    match step(offset) {
        Some(step) if step.stack != kind::END => in_assembly(registers, step),
        _ => within(registers, registers.rbp, None),
    }
}

fn step(offset: u64) -> Option<&'static Step> {
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

fn in_gate(registers: &mut Registers, offset: u64) {
    let end = TARGETS.get((offset / 8) as usize).map_or(0, |target| target.load(Relaxed));
    let rax = registers.rax;
    if offset.is_multiple_of(8) { before(registers, end, rax) } else { behind(registers, end, rax) }
}

/// In a stub: at one of the instructions that were moved there, or on the way from them to the call.
fn in_stub(registers: &mut Registers) -> Option<()> {
    let (gate, at, stub) = stubs::at(registers.rip)?;
    let end = TARGETS.get(gate)?.load(Relaxed);
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
unsafe fn word(at: u64) -> u64 {
    // SAFETY: by the caller.
    unsafe { core::ptr::with_exposed_provenance::<u64>(at as usize).read_unaligned() }
}

fn in_assembly(registers: &mut Registers, step: &Step) -> Found {
    let (rsp, rbp) = (registers.rsp, registers.rbp);
    let load = |registers: &mut Registers, address: u64| {
        let place = core::ptr::with_exposed_provenance::<Registers>(address as usize);
        // SAFETY: the registers point to what the assembly has there, by its steps.
        unsafe { core::ptr::copy(place, registers, 1) };
        Found::Beneath
    };
    let context = |address: u64| address + offset_of!(Context, registers) as u64;
    // SAFETY: as above.
    unsafe {
        match step.stack {
            kind::NOTHING => Found::Nothing,
            kind::JUDGED | kind::KEPT => {
                judged(registers, rbp, None);
                Found::These
            }
            kind::PERFORMS => within(registers, rbp, Some(Progress::NONE)),
            kind::PERFORMED => within(registers, rbp, Some(Progress { done: 1, result: registers.rax })),
            kind::COMPATIBLE => within(registers, word(rsp), None),
            kind::AT_RDI => load(registers, registers.rdi),
            kind::AT_RCX => load(registers, registers.rcx),
            kind::LOADED => {
                (registers.rip, registers.rsp) = (registers.rcx, registers.r11);
                Found::Beneath
            }
            kind::FRAME => load(registers, context(rsp)),
            kind::FRAME_AT_RDI => load(registers, context(registers.rdi)),
            kind::BEGINS => dispatched(registers, rsp + 8, Some(Progress::NONE)),
            kind::ENTERED => dispatched(registers, rsp + 8, None),
            kind::ENTERED_FURTHER => dispatched(registers, rsp + 16, None),
            stack => {
                on_the_way(registers, step, rsp + 8 * u64::from(stack));
                Found::These
            }
        }
    }
}

/// In a function that a stub has jumped to, of which the program's stack pointer is known.
///
/// # Safety
/// The step is right.
unsafe fn on_the_way(registers: &mut Registers, step: &Step, stack: u64) {
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
        number::POPS | number::POPPED => {
            // SAFETY: as above.
            let saved =
                unsafe { &*core::ptr::with_exposed_provenance::<Patched>((stack - PATCHED) as usize) };
            saved.arguments_to(registers);
            if step.number == number::POPS {
                behind(registers, end, rax);
            } else {
                before(registers, end, saved.number);
            }
        }
        slot => before(registers, end, pushed(slot)),
    }
}

/// From the program's stack pointer down to [`Patched`].
const PATCHED: u64 = RED_ZONE + size_of::<Patched>() as u64;

/// In what `orrery_judged` calls.
///
/// # Safety
/// `base` is its rbp.
unsafe fn judged(registers: &mut Registers, base: u64, progress: Option<Progress>) {
    // SAFETY: it has pushed a mark and rbp below the structure.
    let (saved, rbp) =
        unsafe { (&*core::ptr::with_exposed_provenance::<Patched>(base as usize + 16), word(base)) };
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
    if code != SYS_USER_DISPATCH || stubs::at(registers.rip).is_some() {
        return Found::Beneath;
    }
    let progress = progress.unwrap_or(registers.progress);
    let (end, number) = (registers.rip, registers.rax);
    if progress.done == 0 {
        before(registers, end, number);
    } else {
        behind(registers, end, progress.result);
    }
    Found::These
}

/// What has called the executive's functions.
enum Caller {
    /// The handler of SIGSYS: the context of its frame.
    Handler(u64),
    /// `orrery_judged` or `orrery_asked`: their rbp.
    Stub(u64),
}

/// In the executive's functions: their frames lead to who has called them. They are compiled with frame pointers, and the assembly
/// that calls them has frames of its own, with something in place of the return address that is nowhere else. So it does not matter
/// whether a function has made its frame yet, and nothing has to be guessed.
fn caller(rsp: u64, mut base: u64) -> Option<Caller> {
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
        if returns == u64::from(KEPT) {
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
            // SAFETY: likewise.
            unsafe { judged(registers, base, progress) };
            Found::These
        }
        None => Found::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernel::address;
    use super::*;

    fn registers() -> Registers {
        // SAFETY: integers.
        unsafe { core::mem::zeroed() }
    }

    #[test]
    fn handlers_have_thunks_as_long_as_there_are_some() {
        assert_eq!((wrapped(0), wrapped(1)), (0, 1));
        let first = wrapped(0x1000);
        assert_ne!(first, 0x1000);
        assert_eq!((wrapped(0x1000), unwrapped(first), unwrapped(0x1000)), (first, 0x1000, 0x1000));
        let others: Vec<_> = (0..2 * THUNKS as u64).map(|index| 0x2000 + index).collect();
        let different = others.iter().filter(|handler| wrapped(**handler) != **handler).count();
        assert_eq!(different, THUNKS - 1);
        assert!(others.iter().all(|handler| unwrapped(wrapped(*handler)) == *handler));
    }

    /// The kernel may put a frame exactly where one was shown before.
    #[test]
    fn frames_are_not_taken_for_those_that_lay_there_before() {
        let words = [const { AtomicU64::new(0) }; ROOM / 8];
        let room = address(&words);
        let interrupted = room + ROOM as u64;
        let at = 1 + (offset_of!(Context, registers) + offset_of!(Registers, mark)) / 8;
        let marks = mark(core::ptr::with_exposed_provenance(room as usize), interrupted);
        words[at].store(marks[0], Relaxed);
        words[at + 1].store(marks[1], Relaxed);
        // A signal's number and code.
        words[1 + size_of::<Context>() / 8].store(0xffff_ff86, Relaxed);
        // SAFETY: as much as is looked at of a frame.
        assert_eq!(unsafe { super::interrupted(room + 8) }, room + 8);
    }

    #[test]
    fn a_gate_is_shown_as_the_site_it_returns_to() {
        const GATE: usize = GATES - 1;
        TARGETS[GATE].store(0x40_1234, Relaxed);
        let gate = (orrery_gates as *const ()).addr() as u64 + 8 * GATE as u64;
        let offset = 8 * GATE as u64;
        let mut to_make = Registers { rip: gate, rax: 7, rsp: 64, ..registers() };
        in_gate(&mut to_make, offset);
        assert_eq!((to_make.rip, to_make.rax, to_make.rsp), (0x40_1232, 7, 64));
        let mut made = Registers { rip: gate + 2, rax: 9, rcx: gate + 2, ..registers() };
        in_gate(&mut made, offset + 2);
        assert_eq!((made.rip, made.rcx, made.rax), (0x40_1234, 0x40_1234, 9));
    }

    #[test]
    fn steps_are_in_the_order_of_the_code() {
        let first = step(8 * GATES as u64).unwrap();
        let mut last = 0;
        let mut count = 0;
        for offset in 8 * GATES as u64..8 * GATES as u64 + (8 << 10) {
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

    /// As `orrery_judged` lays the stack out.
    #[test]
    fn what_was_pushed_is_found() {
        let stack = [const { AtomicU64::new(0) }; 64];
        let program = address(&stack) + 8 * 60;
        let pushed: [u64; 34] = core::array::from_fn(|distance| 1000 + distance as u64);
        for (distance, value) in pushed.iter().enumerate() {
            stack[60 - distance].store(*value, Relaxed);
        }
        // rbp, the mark, progress, then what `Patched` names.
        let base = program - 8 * 34;
        stack[26].store(77, Relaxed);
        stack[28].store(0, Relaxed);
        let mut found = registers();
        // SAFETY: all of that is in the array.
        unsafe { judged(&mut found, base, None) };
        assert_eq!((found.rsp, found.rbp, found.rip, found.rax), (program, 77, 1018 - 2, 1025));
        assert_eq!(
            (found.rdi, found.rsi, found.rdx, found.r10, found.r8, found.r9),
            (1019, 1020, 1021, 1022, 1023, 1024)
        );
        assert_eq!((found.rbx, found.r12, found.r15, found.eflags), (1026, 1027, 1030, 1017));
        stack[28].store(1, Relaxed);
        let mut found = registers();
        // SAFETY: all of that is in the array.
        unsafe { judged(&mut found, base, None) };
        assert_eq!((found.rip, found.rcx, found.rax), (1018, 1018, 1031));
    }

    /// As `orrery_asked` takes off what it has pushed.
    #[test]
    fn a_call_that_is_not_made_yet_keeps_its_number_and_arguments() {
        let stack = [const { AtomicU64::new(0) }; 64];
        let program = address(&stack) + 8 * 60;
        for distance in 0..33 {
            stack[60 - distance].store(1000 + distance as u64, Relaxed);
        }
        for number in [number::POPPED, number::POPS] {
            let step = Step { offset: 0, stack: 32, back: 18, number, rdx: 0, flags: 0, reserved: [0; 3] };
            let mut found = Registers { rax: 7, ..registers() };
            // SAFETY: all of that is in the array.
            unsafe { on_the_way(&mut found, &step, program) };
            let (rip, rax) = if number == number::POPPED { (1018 - 2, 1025) } else { (1018, 7) };
            assert_eq!((found.rsp, found.rip, found.rax), (program, rip, rax));
            assert_eq!(
                (found.rdi, found.rsi, found.rdx, found.r10, found.r8, found.r9),
                (1019, 1020, 1021, 1022, 1023, 1024)
            );
        }
    }
}
