//! Where a thread goes on that came to stand within a jump: see [`crate::rewrite_plan`].
//!
//! A jump pad is found by the address behind its `syscall`. It holds only as long as the jump is there: other code may be
//! mapped at its place, with a `syscall` of its own.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

const JUMP_PADS: usize = 1024;
/// How many places a jump pad may have.
const PROBES: usize = 16;

struct JumpPad {
    /// Behind the `syscall`; zero where free. Never freed.
    address: AtomicU64,
    /// The jump.
    window: AtomicU64,
    /// The distance of the jump in bytes.
    distance: AtomicU32,
    /// Where to go on.
    target: AtomicU64,
}

static ALL: [JumpPad; JUMP_PADS] = [const {
    JumpPad {
        address: AtomicU64::new(0),
        window: AtomicU64::new(0),
        distance: AtomicU32::new(0),
        target: AtomicU64::new(0),
    }
}; JUMP_PADS];
static USED: AtomicU32 = AtomicU32::new(0);

fn places(address: u64) -> impl Iterator<Item = &'static JumpPad> {
    let hash = (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize;
    (0..PROBES).filter_map(move |probe| ALL.get((hash + probe) % JUMP_PADS))
}

/// Remembers a jump_pad, before its jump is there. Whether there was room. The lock of `code_ranges` must be held.
pub(crate) fn add(address: u64, window: u64, distance: i32, target: u64) -> bool {
    let fits = |jump_pad: &&JumpPad| [0, address].contains(&jump_pad.address.load(Relaxed));
    let Some(jump_pad) = places(address).find(fits) else { return false };
    jump_pad.window.store(window, Relaxed);
    jump_pad.distance.store(distance.cast_unsigned(), Relaxed);
    jump_pad.target.store(target, Relaxed);
    jump_pad.address.store(address, Release);
    USED.store(1, Release);
    true
}

/// Returns where a thread goes on whose `syscall` before this address is a jump_pad.
#[inline(always)]
pub(crate) fn target(address: u64) -> Option<u64> {
    if USED.load(Relaxed) == 0 { None } else { find(address) }
}

#[inline(never)]
fn find(address: u64) -> Option<u64> {
    let jump_pad = places(address)
        .take_while(|jump_pad| jump_pad.address.load(Acquire) != 0)
        .find(|jump_pad| jump_pad.address.load(Relaxed) == address)?;
    let window = jump_pad.window.load(Relaxed) as usize;
    // SAFETY: in the page of the `syscall` that was just executed, whose code was readable when the jump was made; and code
    // that is executed but not readable is not on the list of code that may be rewritten.
    let there = unsafe {
        let opcode = core::ptr::with_exposed_provenance::<u8>(window).read_volatile();
        let distance = core::ptr::with_exposed_provenance::<u32>(window + 1).read_unaligned();
        opcode == 0xe9 && distance == jump_pad.distance.load(Relaxed)
    };
    there.then(|| jump_pad.target.load(Relaxed))
}
