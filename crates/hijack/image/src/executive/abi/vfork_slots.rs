//! Where a signal frame waits while the child of a `vfork` runs on the stack that it lay on.
//!
//! A slot is taken for as long as a thread waits in `vfork`.

use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use crate::config::Action;
use crate::executive::abi::pool::{Item, Pool};
use crate::executive::abi::signal_frame::Context;
use crate::executive::abi::syscall::ENOMEM;

/// The taker of a slot whose child does not run yet, or makes no calls of its own accord: no thread has this ID. A child that runs is the
/// taker itself. The takers of all slots are in one page, so that looking for a child, or at a fork for any, touches no other.
const PARENT: u32 = u32::MAX;
/// A frame with AMX state has some 11 KiB.
const FRAME: usize = 12 << 10;
const STACK: usize = 8128;
/// `struct clone_args`: as far as it is defined today, in words.
pub(crate) const CLONE_ARGUMENTS: usize = 11;
/// Extended state must be so aligned, and is in the frame that is copied.
const ALIGNMENT: u64 = 64;

/// One frame, and the stack on which its thread waits.
#[repr(C, align(64))]
pub(crate) struct Slot {
    /// First, for its alignment.
    frame: [u8; FRAME + ALIGNMENT as usize],
    /// What says that the slot is taken.
    taker: *const AtomicU32,
    /// Where the frame was, and will be again.
    home: u64,
    /// The length of the saved stack in bytes.
    length: u64,
    /// What is to be called.
    call: Vfork,
    stack: [u8; STACK],
}

/// The call that makes the child: it starts on the slot's stack, on which stack it is to run then.
#[repr(C)]
pub(crate) struct Vfork {
    /// The number and the arguments of the call.
    pub(crate) call: [u64; 7],
    /// Arguments of `clone3`, if that is what is called.
    pub(crate) clone3: [u64; CLONE_ARGUMENTS],
    /// The child's stack pointer; zero: its parent's.
    pub(crate) stack: u64,
    /// The parent's.
    pub(crate) own: u64,
    /// Whether the parent has SIGSYS blocked.
    pub(crate) sigsys_blocked: bool,
    /// What the child wants done with SIGSYS, which is its own from the call on.
    pub(crate) sigsys_action: Action,
}

// SAFETY: integers, and a pointer that nobody follows before it was set.
unsafe impl Item for Slot {
    const ZERO: Self = Self {
        frame: [0; FRAME + ALIGNMENT as usize],
        taker: ptr::null(),
        home: 0,
        length: 0,
        call: Vfork {
            call: [0; 7],
            clone3: [0; CLONE_ARGUMENTS],
            stack: 0,
            own: 0,
            sigsys_blocked: false,
            sigsys_action: Action {
                handler: AtomicU64::new(0),
                flags: AtomicU64::new(0),
                restorer: AtomicU64::new(0),
                mask: AtomicU64::new(0),
            },
        },
        stack: [0; STACK],
    };
}

static SLOTS: Pool<Slot> = Pool::new();
/// How many children there are that share the memory while their parents wait.
static CHILDREN: AtomicU32 = AtomicU32::new(0);

/// Notes that the calling thread is the child of this slot.
///
/// # Safety
/// The slot is one of those that [`take`] gave, and this thread's, or its parent's, which waits.
pub(crate) unsafe fn begin_child(slot: *mut Slot, thread: u32) {
    CHILDREN.fetch_add(1, Relaxed);
    // SAFETY: the slot was taken (# Safety), so its taker is in the pool, which stays mapped.
    unsafe { (*(*slot).taker).store(thread, Release) };
}

/// Notes that the child of this slot does not share the memory any more.
///
/// # Safety
/// The slot is one of those that [`take`] gave, and this thread's, or its parent's, which waits.
pub(crate) unsafe fn end_child(slot: *mut Slot) {
    // SAFETY: the slot was taken (# Safety), so its taker is in the pool, which stays mapped.
    if unsafe { (*(*slot).taker).swap(PARENT, Relaxed) } != PARENT {
        CHILDREN.fetch_sub(1, Relaxed);
    }
}

/// Returns what a child that shares the memory wants done with SIGSYS, if the thread that `own_id` returns is one.
pub(crate) fn action_of_child(own_id: impl Fn() -> u32) -> Option<&'static Action> {
    if CHILDREN.load(Relaxed) == 0 {
        return None;
    }
    let thread = own_id();
    let slot = SLOTS.all().find(|slot| slot.taker.load(Acquire) == thread)?;
    // SAFETY: slots stay, and this field of them consists of atomics.
    Some(unsafe { &(*call(slot.item)).sigsys_action })
}

/// Returns whether some of a range is a block of slots that was mapped.
pub(crate) fn overlap(start: u64, end: u64) -> bool {
    SLOTS.overlaps(start, end)
}

/// Frees all slots, in a forked child: the threads that took them are not in it.
pub(crate) fn free_in_child() {
    CHILDREN.store(0, Relaxed);
    SLOTS.free_in_child();
}

/// Returns the slot's call.
///
/// # Safety
/// The slot is one of the pool's.
pub(crate) unsafe fn call(slot: *mut Slot) -> *mut Vfork {
    // SAFETY: slots of the pool stay mapped (# Safety), so the field's address is in the same allocation.
    unsafe { &raw mut (*slot).call }
}

/// Takes a slot and copies a frame to it.
///
/// # Errors
/// ENOMEM, negative: there is no memory for more slots, or the frame is too large.
pub(crate) fn take(context: &Context) -> Result<*mut Slot, i64> {
    let home = context.frame();
    let extended = context.extended();
    let end = if extended.address == 0 {
        // The context, and siginfo.
        home + 8 + size_of::<Context>() as u64 + 128
    } else {
        extended.address + extended.size
    };
    let length = end.checked_sub(home).filter(|length| *length <= FRAME as u64).ok_or(-ENOMEM)?;
    let taken = loop {
        if let Some(taken) = SLOTS.take(PARENT) {
            break taken;
        }
        SLOTS.grow()?;
    };
    let slot = taken.item;
    // SAFETY: the slot is ours, and has room for as much as the frame has.
    unsafe {
        (*slot).taker = taken.taker;
        (*slot).home = home;
        (*slot).length = length;
        ptr::copy_nonoverlapping(
            ptr::with_exposed_provenance::<u8>(home as usize),
            copy_of(slot),
            length as usize,
        );
        shift(slot, copy_of(slot).addr() as u64, home);
    }
    Ok(slot)
}

/// Returns where the frame's copy begins: aligned as the frame is.
///
/// # Safety
/// As for [`context`].
unsafe fn copy_of(slot: *mut Slot) -> *mut u8 {
    // SAFETY: nobody else writes to the slot (# Safety); the offset is below the alignment, for which there is room.
    unsafe { (&raw mut (*slot).frame).cast::<u8>().add(((*slot).home % ALIGNMENT) as usize) }
}

/// Has the copy say that its extended state is in the frame at `to` rather than at `from`.
///
/// # Safety
/// As for [`context`], and the slot holds a frame.
unsafe fn shift(slot: *mut Slot, to: u64, from: u64) {
    // SAFETY: the slot holds a frame, which nobody else uses (# Safety).
    unsafe {
        let registers = &mut (*context(slot)).registers;
        if registers.extended != 0 {
            registers.extended = registers.extended.wrapping_add(to).wrapping_sub(from);
        }
    }
}

/// Returns the context in the copy.
///
/// # Safety
/// The slot is one of those that [`take`] gave, and this thread's, or its parent's, which waits.
pub(crate) unsafe fn context(slot: *mut Slot) -> *mut Context {
    // SAFETY: as for this function; the context is behind the return address, in the room for a frame.
    unsafe { copy_of(slot).add(8).cast() }
}

/// Returns the upper end of the slot's stack, aligned as a call wants it.
///
/// # Safety
/// The slot is one of the pool's.
pub(crate) unsafe fn stack(slot: *mut Slot) -> u64 {
    // SAFETY: slots of the pool stay mapped (# Safety), so the field's address is in the same allocation.
    unsafe { ((&raw const (*slot).stack).addr() as u64 + STACK as u64) & !15 }
}

/// Puts the frame back where it was: where its context is, and what is to be zeroed to give the slot back.
///
/// # Safety
/// The slot was taken by this thread, and the stack it belongs to is unused.
pub(crate) unsafe fn put_back(slot: *mut Slot) -> (u64, *const AtomicU32) {
    // SAFETY: the slot is this thread's, and the memory that the frame was in is unused (# Safety).
    unsafe {
        shift(slot, (*slot).home, copy_of(slot).addr() as u64);
        ptr::copy_nonoverlapping(
            copy_of(slot),
            ptr::with_exposed_provenance_mut::<u8>((*slot).home as usize),
            (*slot).length as usize,
        );
        ((*slot).home + 8, (*slot).taker)
    }
}

/// Gives a slot back that was not used after all.
///
/// # Safety
/// This thread took the slot, and does not use it any more.
pub(crate) unsafe fn release(slot: *mut Slot) {
    // SAFETY: `take` set the pointer to the pool's word, which stays mapped.
    unsafe { (*(*slot).taker).store(0, Release) };
}

const _: () = assert!((size_of::<Slot>() & 63) == 0);
