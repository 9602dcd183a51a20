//! Which memory the thread may access: the register PKRU (pkeys(7); Intel SDM, volume 1, 13.5.7).
//!
//! A signal handler runs with the kernel's own value, which denies every key but the first. The program's value is in the frame, and is
//! loaded again when the handler returns. A dispatched call has to be performed with the program's value, because the kernel checks
//! the memory that a call names against it; and what the call has changed (`pkey_alloc`) belongs into the frame.

use core::arch::asm;
use core::ptr;
use core::sync::atomic::Ordering::Relaxed;

use crate::executive::abi::signal_frame::Context;
use crate::executive::abi::state::ORRERY_CONFIG;

/// The register's place in `XSTATE_BV`, and in what `xrstor` is to load.
const COMPONENT: u64 = 1 << 9;
/// Where the extended state has `XSTATE_BV`: which components are not in their initial state.
const STATE_BV: u64 = 512;
/// The first key, which all memory has that was given no other: the executive's is of it.
const FIRST_KEY: u32 = 3;

/// What a frame says, and what was loaded.
#[derive(Clone, Copy)]
pub(crate) struct Keys {
    /// Where the frame has the register.
    place: u64,
    /// Where it says whether it is in its initial state.
    state: u64,
    /// The value of PKRU that was loaded.
    loaded: u32,
}

/// Gives the calling thread access as the program had it when the frame was made; the first key stays accessible, as the executive could
/// not go on without. Nothing where the processor or the frame has no such register.
pub(crate) fn enter(context: &Context) -> Option<Keys> {
    let offset = ORRERY_CONFIG.protection_keys.load(Relaxed);
    if offset == 0 {
        return None;
    }
    enter_at(context, u64::from(offset))
}

#[inline(never)]
fn enter_at(context: &Context, offset: u64) -> Option<Keys> {
    let extended = context.extended();
    if extended.features & COMPONENT == 0 || offset + 4 > extended.size {
        return None;
    }
    let (place, state) = (extended.address + offset, extended.address + STATE_BV);
    // SAFETY: the kernel has written the extended state, which has this component, and is as long as was checked.
    let found = unsafe {
        let states = ptr::with_exposed_provenance::<u64>(state as usize).read();
        if states & COMPONENT == 0 { 0 } else { ptr::with_exposed_provenance::<u32>(place as usize).read() }
    };
    let loaded = found & !FIRST_KEY;
    write(loaded);
    Some(Keys { place, state, loaded })
}

/// Puts what the call has changed into the frame. The thread keeps its access.
pub(crate) fn leave(keys: Option<Keys>) {
    let Some(Keys { place, state, loaded }) = keys else { return };
    let now = read();
    if now == loaded {
        return;
    }
    // SAFETY: as in `enter_at`: the frame is still the handler's.
    unsafe {
        let states = ptr::with_exposed_provenance_mut::<u64>(state as usize);
        let place = ptr::with_exposed_provenance_mut::<u32>(place as usize);
        let before = if *states & COMPONENT == 0 { 0 } else { place.read() };
        place.write(now & !FIRST_KEY | before & FIRST_KEY);
        *states |= COMPONENT;
    }
}

fn read() -> u32 {
    let value: u32;
    // SAFETY: reads a register that is there: the host has found it, and `enter` has written it.
    unsafe {
        asm!("rdpkru", in("ecx") 0, out("eax") value, out("edx") _, options(nomem, nostack, preserves_flags))
    };
    value
}

fn write(value: u32) {
    // SAFETY: the register is there, and memory of the first key, in which the executive is, stays accessible. What the compiler
    // has moved across this would be of that key, too; it moves nothing, as this may access memory.
    unsafe { asm!("wrpkru", in("ecx") 0, in("edx") 0, in("eax") value, options(nostack, preserves_flags)) };
}
