//! io_uring: one request that does nothing, submitted and completed.

use std::mem::zeroed;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use linux_raw_sys::io_uring::{
    IORING_ENTER_GETEVENTS, IORING_OFF_CQ_RING, IORING_OFF_SQ_RING, IORING_OFF_SQES, io_uring_params,
};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use syscalls::{Sysno, syscall};

use crate::child::{During, Note, Trouble, Verdict, expect};
use crate::tools::{PAGE, owned};

/// A part of the ring, mapped; it stays until the probe's child ends.
fn part(ring: &OwnedFd, offset: u32) -> Result<*mut u32, Trouble> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at a place that the kernel chooses. A ring of one entry fits a page in each part.
    unsafe { mmap(ptr::null_mut(), PAGE, access, MapFlags::SHARED, ring, u64::from(offset)) }
        .map(<*mut std::ffi::c_void>::cast)
        .during("mmap of an io_uring")
}

/// Returns the 32-bit word at an offset that the kernel named.
fn word<'a>(part: *mut u32, offset: u32) -> &'a AtomicU32 {
    let word = part.wrapping_add(offset as usize % PAGE / size_of::<u32>());
    // SAFETY: aligned, inside the mapped page, and shared with the kernel only.
    unsafe { AtomicU32::from_ptr(word) }
}

pub(crate) fn no_operation(_: &mut Note) -> Verdict {
    /// Where an entry keeps the value that comes back with its completion, counted in words: io_uring(7).
    const SQE_USER_DATA: u32 = 32;
    const VALUE: u32 = 4242;
    // SAFETY: all-zero parameters ask for the defaults.
    let mut params: io_uring_params = unsafe { zeroed() };
    // SAFETY: the kernel fills in the parameters; the descriptor is ours alone.
    let ring =
        unsafe { owned(syscall!(Sysno::io_uring_setup, 1, &raw mut params)) }.during("io_uring_setup")?;
    let (submissions, completions, entries) =
        (part(&ring, IORING_OFF_SQ_RING)?, part(&ring, IORING_OFF_CQ_RING)?, part(&ring, IORING_OFF_SQES)?);
    // An entry of zeros is IORING_OP_NOP.
    word(entries, SQE_USER_DATA).store(VALUE, Ordering::Relaxed);
    word(submissions, params.sq_off.array).store(0, Ordering::Relaxed);
    word(submissions, params.sq_off.tail).store(1, Ordering::Release);
    // SAFETY: the ring holds one request, which does nothing.
    unsafe { syscall!(Sysno::io_uring_enter, ring.as_raw_fd(), 1, 1, IORING_ENTER_GETEVENTS, 0, 0) }
        .during("io_uring_enter")?;
    let completed = word(completions, params.cq_off.tail).load(Ordering::Acquire) == 1;
    let value = word(completions, params.cq_off.cqes).load(Ordering::Relaxed);
    expect(completed && value == VALUE, "the request did not complete")
}
