//! Counters that a thread has for itself: it adds to them without locking the bus, which costs more than all the rest of a
//! rewritten call.
//!
//! A thread is known by its `fs` base, which its C library (or Go's runtime) keeps for it alone. The shared counters have a number of
//! [`Block`]s; a table here, found by a hash of `fs`, says which block a thread has. A stub, or `orrery_timed`, looks there,
//! and adds with one instruction, so that a signal falls before or after it. Who finds nothing adds to the counters that
//! all share, with a lock. A reader takes the sum. So no call is lost:
//!
//! - no two threads that run have the same `fs`; a thread that is made with its parent's ends all claims of the process;
//! - the child of a `vfork` has its parent's, which waits meanwhile;
//! - a forked child starts with an empty table;
//! - a block is released by a process of one thread when it ends or executes a program, after it was struck off the
//!   table. Others leave theirs behind: those blocks are not used again.

use core::arch::asm;
use core::sync::atomic::{
    AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use crate::executive::abi::state::{ORRERY_CONFIG, counted, counters, shared_page};
use crate::executive::abi::syscall::address;
use crate::nr::CALLS;
use crate::shared_page::{Block, CLAIMED_BLOCK, Calls, FRESH_BLOCK, USED_BLOCK};

/// How many there are; the hash's last byte.
const OWNERS: usize = 256;
/// What belongs to no `fs`: the sum with it must be zero, and this one's counterpart is no address.
const NOBODY: u64 = 1;

/// Who owns which block. The layout is known to the assembly and `rewriting::assembler`.
#[repr(C, align(16))]
pub(crate) struct Owner {
    /// The negative of `fs`.
    complement: AtomicU64,
    /// The block's rows.
    rows: AtomicU64,
}

/// The table of all owners.
pub(crate) static TABLE: [Owner; OWNERS] =
    [const { Owner { complement: AtomicU64::new(NOBODY), rows: AtomicU64::new(0) } }; OWNERS];

/// Threads may share an `fs`: nothing is claimed any more.
static FORBIDDEN: AtomicU32 = AtomicU32::new(0);
/// The process has, or had, several threads.
static THREADED: AtomicU32 = AtomicU32::new(0);

/// Returns whether the processor and the kernel let programs read `fs`, and calls are counted.
pub(crate) fn available() -> bool {
    counted() && ORRERY_CONFIG.thread_counters_enabled.load(Relaxed) != 0
}

/// Returns this thread's `fs` base; call it only where [`available`] is true.
fn current() -> u64 {
    let base: u64;
    // SAFETY: `rdfsbase %rcx`, which the supervisor has found to be allowed.
    unsafe {
        asm!(".byte 0xf3, 0x48, 0x0f, 0xae, 0xc1", out("rcx") base, options(nomem, nostack, preserves_flags));
    }
    base
}

fn owner(base: u64) -> Option<&'static Owner> {
    let mut hash = 0_u64;
    // SAFETY: `crc32 %rcx,%rax`, which the supervisor has found to be there.
    unsafe {
        asm!(
            ".byte 0xf2, 0x48, 0x0f, 0x38, 0xf1, 0xc1",
            inout("rax") hash, in("rcx") base,
            options(nomem, nostack, preserves_flags)
        );
    }
    TABLE.get(hash as usize % OWNERS)
}

/// This thread's own counters, if it has some. Only to be used before the thread does anything else: the child of a fork
/// has none of these.
fn rows() -> Option<&'static [Calls; CALLS + 1]> {
    let base = if available() { current() } else { return None };
    let owner = owner(base)?;
    if owner.complement.load(Acquire) != base.wrapping_neg() {
        return None;
    }
    let rows = owner.rows.load(Relaxed) as usize;
    // SAFETY: rows of a block of the page, which stays attached.
    Some(unsafe { &*core::ptr::with_exposed_provenance(rows) })
}

/// Adds to a call's counters: to this thread's own, or to those of all.
pub(crate) fn count(number: u64, counts: impl Fn(&Calls, &dyn Fn(&AtomicU64, u64))) {
    let index = (number as usize).min(CALLS);
    match rows().and_then(|rows| rows.get(index)) {
        Some(row) => counts(row, &|counter, more| {
            // SAFETY: one instruction, before or after which a signal may fall, on a counter that no other thread adds to.
            unsafe {
                asm!("add qword ptr [{0}], {1}", in(reg) counter.as_ptr(), in(reg) more, options(nostack))
            }
        }),
        None => counts(shared_page().row(number), &|counter, more| {
            counter.fetch_add(more, Relaxed);
        }),
    }
}

/// Claims a block for this thread, if it has none.
pub(crate) fn claim() {
    if available() {
        claim_for(current());
    }
}

fn claim_for(base: u64) {
    let Some(owner) = owner(base) else { return };
    if base == 0 || FORBIDDEN.load(Relaxed) != 0 || owner.complement.load(Relaxed) != NOBODY {
        return;
    }
    let free = |block: &&Block| {
        let state = block.state.load(Relaxed);
        state != CLAIMED_BLOCK && block.state.compare_exchange(state, CLAIMED_BLOCK, AcqRel, Relaxed).is_ok()
    };
    let Some(block) = counters().and_then(|counters| counters.blocks.iter().find(free)) else { return };
    // The first one here has the entry; the other one's block is free again.
    if owner.rows.compare_exchange(0, address(&block.calls), AcqRel, Relaxed).is_ok() {
        owner.complement.store(base.wrapping_neg(), Release);
    } else {
        block.state.store(USED_BLOCK, Release);
    }
}

/// A thread is about to be made that shares memory and runs beside its parent; with this `fs`, or with its parent's.
pub(crate) fn before_thread(base: Option<u64>) {
    if !available() {
        return;
    }
    THREADED.store(1, Relaxed);
    match base {
        Some(base) if base != current() => claim_for(base),
        _ => {
            FORBIDDEN.store(1, Relaxed);
            forget();
        }
    }
}

/// In a thread of a program that ran before it had the executive: there may be others.
pub(crate) fn adopt() {
    if available() {
        THREADED.store(1, Relaxed);
        claim_for(current());
    }
}

fn forget() {
    for owner in &TABLE {
        owner.complement.store(NOBODY, Relaxed);
    }
}

/// In a forked child: its parent's blocks are not its own.
pub(crate) fn reset_in_child() {
    if available() {
        forget();
        for owner in &TABLE {
            owner.rows.store(0, Relaxed);
        }
        THREADED.store(0, Relaxed);
        FORBIDDEN.store(0, Relaxed);
    }
}

/// The process is about to end, or to execute a program.
pub(crate) fn release() {
    if !available() || THREADED.load(Relaxed) != 0 {
        return;
    }
    forget();
    for owner in &TABLE {
        let rows = owner.rows.swap(0, AcqRel);
        let of = |block: &&Block| rows != 0 && address(&block.calls) == rows;
        if let Some(block) = counters().and_then(|counters| counters.blocks.iter().find(of)) {
            block.state.store(USED_BLOCK, Release);
        }
    }
}

/// Other counters are about to take the place of these: blocks of the process are none there.
pub(crate) fn leave() {
    release();
    if available() {
        forget();
        for owner in &TABLE {
            owner.rows.store(0, Relaxed);
        }
    }
}

const _: () = assert!(size_of::<Owner>() == 16 && FRESH_BLOCK == 0);
