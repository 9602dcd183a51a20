//! Wide registers of a program whose handler leaves the executive for good, by returning to other registers than it was shown.
//!
//! The kernel then loads what was in the processor when the signal arrived. The executive's functions use xmm registers, and nothing
//! above; the program's are where the assembly that called them has put them, or in the frame of a dispatched call.

use crate::executive::abi::signal_frame::{Context, Registers};
use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::trampoline::orrery_trampolines;
use crate::executive::abi::unwind_step::kind;
use crate::executive::policy::handlers;
use crate::executive::signals::registers::{Caller, caller, step, word};
use core::sync::atomic::Ordering::Relaxed;

/// Where xmm registers are in extended state.
const XMM: u64 = 160;
const XMM_BYTES: usize = 256;
/// Which features are not as they are after a reset, behind the legacy area.
const PRESENT: u64 = 512;
const SSE: u64 = 2;

/// Puts the program's xmm registers into the frame of a signal that interrupted the executive, if they are not there.
///
/// # Safety
/// The frame is whole, and what it interrupted is still on the stack.
pub(super) unsafe fn restore_xmm(interrupted: &Context) {
    let to = interrupted.extended();
    let Some(from) = saved_xmm(&interrupted.registers).filter(|_| to.address != 0) else { return };
    // SAFETY: both have room for the registers.
    unsafe {
        let place = core::ptr::with_exposed_provenance_mut::<u8>((to.address + XMM) as usize);
        match from {
            Saved::At(from) => {
                let from = core::ptr::with_exposed_provenance::<u8>(from as usize);
                core::ptr::copy_nonoverlapping(from, place, XMM_BYTES);
            }
            Saved::Zero => core::ptr::write_bytes(place, 0, XMM_BYTES),
        }
        if to.features != 0 {
            let present = core::ptr::with_exposed_provenance_mut::<u64>((to.address + PRESENT) as usize);
            present.write_unaligned(present.read_unaligned() | SSE);
        }
    }
}

/// Where the program's xmm registers are.
enum Saved {
    At(u64),
    /// As after a reset.
    Zero,
}

/// `None`: in the processor.
fn saved_xmm(found: &Registers) -> Option<Saved> {
    let code = ORRERY_CONFIG.code.load(Relaxed);
    let in_handler = handlers::contain(found.rip);
    if !in_handler && found.rip.wrapping_sub(code) >= ORRERY_CONFIG.code_length.load(Relaxed) {
        return None;
    }
    let offset = found.rip.wrapping_sub((orrery_trampolines as *const ()).addr() as u64);
    let kind = if in_handler { kind::END } else { step(offset)?.stack };
    let caller = match kind {
        kind::END | kind::PERFORMS | kind::PERFORMED => caller(found.rsp, found.rbp)?,
        // SAFETY: its caller's rbp is on the stack.
        kind::COMPATIBLE => caller(found.rsp, unsafe { word(found.rsp) })?,
        kind::STUB_CALL_XMM => Caller::Stub(found.rbp),
        kind::ENTERED => Caller::Handler(found.rsp + 8),
        kind::ENTERED_FURTHER => Caller::Handler(found.rsp + 16),
        _ => return None,
    };
    match caller {
        Caller::Stub(base) => Some(Saved::At((base & !15) - XMM_BYTES as u64)),
        Caller::Handler(context) => {
            let context = core::ptr::with_exposed_provenance::<Context>(context as usize);
            // SAFETY: the frame of a dispatched call, whose handler was interrupted.
            let extended = unsafe { (*context).extended() };
            if extended.address == 0 {
                return None;
            }
            // SAFETY: as the kernel has written it.
            let there = extended.features == 0 || unsafe { word(extended.address + PRESENT) } & SSE != 0;
            Some(if there { Saved::At(extended.address + XMM) } else { Saved::Zero })
        }
    }
}
