//! Handlers of the program's signals, which see the program where an executive is beneath it.
//!
//! A signal may interrupt a thread anywhere in the executive: in a trampoline, in a stub, in the handler of a dispatched call. Whoever
//! looks at the interrupted registers is to find those that it would find without executive: `rip` behind the program's own
//! `syscall`, or at it where the call is to be made again, and `rsp` as it was there. Unwinders go on from there (cancelled
//! threads, exceptions that handlers throw, `backtrace`, profilers); and C libraries see by the address whether a thread that is
//! cancelled has made its call (musl, glibc from 2.41 on), and change the registers if not.
//!
//! So the kernel is given another function for each handler of the program, a *thunk* in the assembly. Where the executive was
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

use core::mem::size_of;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::registers::to_program;
use super::xsave;
use crate::config::SA_SIGINFO;
use crate::executive::abi::signal_frame::{Context, Info, Registers};
use crate::executive::abi::syscall::SIGSYS;
use crate::executive::abi::trampoline::orrery_thunks;
use crate::executive::policy::journal_writer::write_signal;
use crate::executive::policy::table::{Policy, policy};

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

fn thunks() -> u64 {
    (orrery_thunks as *const ()).addr() as u64
}

/// Returns the function that the kernel is given in place of a handler.
pub(crate) fn thunk_for(handler: u64) -> u64 {
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

/// What the program gave to [`thunk_for`].
pub(crate) fn handler_of(handler: u64) -> u64 {
    let index = (handler.wrapping_sub(thunks()) / THUNK) as usize;
    HANDLERS.get(index).map_or(handler, |place| place.load(Relaxed))
}

/// In an entry of [`HANDLERS`], a bit that no function's address has: the program did not ask for a siginfo, which signals are told by.
const ADDED: u64 = 1 << 63;

/// Puts a thunk in the place of an action's handler. Where signals are told of, the kernel writes a siginfo for each.
pub(crate) fn wrap(action: &mut [u64; 4]) {
    let [handler, flags, ..] = action;
    if *handler & ADDED != 0 {
        // No function of the program's.
        return;
    }
    let adds =
        *handler > SIG_IGN && *flags & SA_SIGINFO == 0 && policy().is_some_and(Policy::reports_signals);
    let thunk = thunk_for(if adds { *handler | ADDED } else { *handler });
    if adds && thunk & ADDED == 0 {
        *flags |= SA_SIGINFO;
    }
    *handler = thunk & !ADDED;
}

/// Restores an action that [`wrap`] has changed.
pub(crate) fn unwrap(action: &mut [u64; 4]) {
    let [handler, flags, ..] = action;
    let own = handler_of(*handler);
    if own != *handler && own & ADDED != 0 {
        *flags &= !SA_SIGINFO;
        *handler = own & !ADDED;
    } else {
        *handler = own;
    }
}

/// ShownFrame in front of a signal frame.
#[repr(C)]
pub(crate) struct ShownFrame {
    restorer: u64,
    context: Context,
    /// The context that the kernel wrote.
    interrupted: u64,
}

/// What says that a frame was made here, and not by the kernel at a place where one had been made before: the kernel leaves these
/// words as they were, but writes a siginfo over what is behind the context.
fn mark(room: *const ShownFrame, interrupted: u64) -> [u64; 2] {
    [MARK ^ interrupted, room.addr() as u64]
}

/// How much a thunk leaves for that.
pub(crate) const ROOM: usize = size_of::<ShownFrame>();
const _: () = assert!(ROOM.is_multiple_of(16));

/// Called by thunks that have interrupted the executive, with the kernel's frame, and room below it: which frame the handler is
/// to get.
pub(crate) extern "C" fn present(signal: i32, frame: *mut u64, room: *mut ShownFrame) -> *mut u64 {
    // SAFETY: the kernel's frame, behind its return address; and room below it, from the thunk.
    unsafe {
        let context = frame.add(1).cast::<Context>();
        note(signal, (*context).registers.rsp);
        core::ptr::copy_nonoverlapping(frame, room.cast(), 1 + size_of::<Context>() / 8);
        let registers = &mut (*room).context.registers;
        if !to_program(registers) {
            return frame;
        }
        registers.mark = mark(room, context.addr() as u64);
        (*room).interrupted = context.addr() as u64;
        let info = context.add(1).cast::<Info>();
        if signal == SIGSYS as i32 && (*info).code == SYS_SECCOMP {
            (*info).call_address = registers.rip;
        }
        room.cast()
    }
}

/// The last handler that interrupted the executive: the interrupted stack pointer, and below it in [`SIGNAL_BITS`] the signal's number.
static LAST: AtomicU64 = AtomicU64::new(0);
const SIGNAL_BITS: u32 = 7;

fn note(signal: i32, stack: u64) {
    LAST.store(stack << SIGNAL_BITS | u64::from(signal.cast_unsigned()) & ((1 << SIGNAL_BITS) - 1), Relaxed);
}

/// A view of whether a handler has interrupted the executive in this thread since [`Interruption::watch`].
///
/// Of handlers that interrupt the executive in several threads at the same time, the last one alone is known: the others have run
/// as if just before the call. A handler that has no thunk is not known either.
pub(crate) struct Interruption {
    /// The stack pointer of the function that watches.
    top: u64,
}

impl Interruption {
    /// How much stack the functions use that it calls.
    const STACK: u64 = 4096;

    /// Watches from now on, in the function that calls this one.
    #[inline(always)]
    pub(crate) fn watch() -> Self {
        let top: u64;
        // SAFETY: reads a register.
        unsafe { core::arch::asm!("mov {}, rsp", out(reg) top, options(nomem, nostack, preserves_flags)) };
        let it = Self { top };
        // One that was here before.
        it.signal();
        it
    }

    /// Returns the signal whose handler has interrupted the thread, once.
    pub(crate) fn signal(&self) -> Option<u64> {
        let last = LAST.load(Relaxed);
        let below = self.top.wrapping_sub(last >> SIGNAL_BITS);
        let found = below < Self::STACK && LAST.compare_exchange(last, 0, Relaxed, Relaxed).is_ok();
        found.then_some(last & ((1 << SIGNAL_BITS) - 1))
    }
}

/// Called by thunks while calls are logged, with the kernel's frame: tells that a handler gets a signal.
pub(crate) extern "C" fn tell(signal: i32, frame: *const u64) {
    // SAFETY: in the kernel's frame a siginfo follows the context, which follows the return address.
    unsafe {
        let context = frame.add(1).cast::<Context>();
        write_signal(signal, context.add(1).cast());
    }
}

/// The program returns from a handler by this context: the one to go on from.
///
/// # Safety
/// There is a signal frame's context.
pub(crate) unsafe fn interrupted(context: u64) -> u64 {
    let room = (context as usize).wrapping_sub(8);
    let room = core::ptr::with_exposed_provenance_mut::<ShownFrame>(room);
    // SAFETY: by the caller; what is behind the frame is read only where that was made here.
    unsafe {
        let shown = &(*room).context;
        if shown.registers.mark != mark(room, (*room).interrupted) {
            return context;
        }
        let original = core::ptr::with_exposed_provenance_mut::<Context>((*room).interrupted as usize);
        if !is_shown_as(&(*original).registers, &shown.registers) {
            xsave::restore_xmm(&*original);
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
    to_program(&mut registers) && registers.are(shown)
}

#[cfg(test)]
mod tests {
    use core::mem::offset_of;

    use super::*;
    use crate::executive::abi::syscall::address;

    #[test]
    fn handlers_have_thunks_as_long_as_there_are_some() {
        assert_eq!((thunk_for(0), thunk_for(1)), (0, 1));
        let first = thunk_for(0x1000);
        assert_ne!(first, 0x1000);
        assert_eq!((thunk_for(0x1000), handler_of(first), handler_of(0x1000)), (first, 0x1000, 0x1000));
        let others: Vec<_> = (0..2 * THUNKS as u64).map(|index| 0x2000 + index).collect();
        let different = others.iter().filter(|handler| thunk_for(**handler) != **handler).count();
        assert_eq!(different, THUNKS - 1);
        assert!(others.iter().all(|handler| handler_of(thunk_for(*handler)) == *handler));
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
}
