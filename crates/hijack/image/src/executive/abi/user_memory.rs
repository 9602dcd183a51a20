//! Memory that the program named in a system call. It may be unmapped: then the call fails with EFAULT, as always.

use core::mem::MaybeUninit;
use core::sync::atomic::Ordering::Relaxed;

use crate::executive::abi::readable;
use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::syscall::{EFAULT, ENOSYS, address, call};
use crate::nr;

const PAGE: u64 = 4096;
/// How much of a string is read at a time.
const CHUNK: usize = 256;

/// `struct iovec`.
#[repr(C)]
struct Piece {
    start: u64,
    length: u64,
}

/// Copies between our memory and the program's by a call that reports faults. `None` where there is no such call.
///
/// # Safety
/// `ours` points to `length` bytes; `process_vm_readv` may write to them.
unsafe fn transfer(number: u64, ours: *const u8, theirs: u64, length: usize) -> Option<Result<(), i64>> {
    if ORRERY_CONFIG.filtered.load(Relaxed) != 0 {
        return None;
    }
    let length = length as u64;
    let (local, remote) = (Piece { start: ours.addr() as u64, length }, Piece { start: theirs, length });
    // SAFETY: `local` is memory of ours, by the caller; the kernel finds out whether `remote` is memory.
    let result = unsafe {
        let process = call(nr::getpid, [0; 6]).cast_unsigned();
        call(number, [process, address(&local), 1, address(&remote), 1, 0])
    };
    if result == length.cast_signed() {
        Some(Ok(()))
    } else if result >= 0 || result == -EFAULT {
        Some(Err(-EFAULT))
    } else {
        // Forbidden, or not compiled into this kernel.
        None
    }
}

/// Fills `to` from the program's memory.
fn fetch(to: &mut [MaybeUninit<u8>], theirs: u64) -> Result<(), i64> {
    let (ours, length) = (to.as_mut_ptr().cast::<u8>(), to.len());
    match readable::is_readable(theirs, length as u64) {
        Err(error) if error == -ENOSYS => {
            // SAFETY: the slice is ours to write to.
            if let Some(result) = unsafe { transfer(nr::process_vm_readv, ours, theirs, length) } {
                return result;
            }
        }
        result => result?,
    }
    let theirs = core::ptr::with_exposed_provenance::<u8>(theirs as usize);
    // SAFETY: the slice has that length, and theirs can be read. Where nobody could be asked, the program vouches for the
    // address: if nothing is there, it gets a SIGSEGV rather than EFAULT.
    unsafe { core::ptr::copy_nonoverlapping(theirs, ours, length) };
    Ok(())
}

/// Reads a plain value from the program's memory.
///
/// # Errors
/// `-EFAULT`: the program has no such memory.
///
/// # Safety
/// Any bytes must be a valid `T`.
pub(crate) unsafe fn read<T: Copy>(from: u64) -> Result<T, i64> {
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the bytes of `value`, which need not be initialized.
    let bytes = unsafe { core::slice::from_raw_parts_mut(value.as_mut_ptr().cast(), size_of::<T>()) };
    fetch(bytes, from)?;
    // SAFETY: written just now.
    Ok(unsafe { value.assume_init() })
}

/// Reads a word that may be gone at any moment, by a copy of the kernel's. `None` where there is no such call.
pub(crate) fn copy_word(from: u64) -> Option<Result<u64, i64>> {
    let mut word = 0_u64;
    // SAFETY: the word is ours to write to.
    let copied = unsafe { transfer(nr::process_vm_readv, (&raw mut word).cast(), from, size_of::<u64>()) };
    copied.map(|copied| copied.map(|()| word))
}

/// Reads plain data that may be just above the program's stack pointer: where we are on the same stack, the page below
/// that pointer is there, and nobody need be asked.
///
/// # Errors
/// `-EFAULT`: the program has no such memory.
///
/// # Safety
/// Any bytes must be a valid `T`.
pub(crate) unsafe fn read_beside<T: Copy>(stack: u64, from: u64) -> Result<T, i64> {
    if is_beside(stack, from, size_of::<T>()) {
        // SAFETY: the page is there, by that.
        return Ok(unsafe { core::ptr::with_exposed_provenance::<T>(from as usize).read_unaligned() });
    }
    // SAFETY: any bytes are a valid `T` (# Safety).
    unsafe { read(from) }
}

/// Returns whether so much memory is above the stack pointer in the page that is just below it, on a stack that we
/// are on, too.
fn is_beside(stack: u64, at: u64, length: usize) -> bool {
    /// No frame of ours is larger.
    const NEAR: u64 = 16 * PAGE;
    let here = 0_u8;
    let on_it = stack.wrapping_sub(address(&here)) < NEAR;
    let last = at.wrapping_add(length as u64 - 1);
    on_it && at >= stack && last >= at && last / PAGE == (stack - 1) / PAGE
}

/// Writes plain data, as [`read_beside`] reads.
///
/// # Errors
/// `-EFAULT`: the program has no such memory.
///
/// # Safety
/// The program must have asked for this to be written there.
pub(crate) unsafe fn write_beside<T: Copy>(stack: u64, to: u64, value: T) -> Result<(), i64> {
    if is_beside(stack, to, size_of::<T>()) {
        // SAFETY: the page is there, by that, and what a stack is in can be written to.
        unsafe { core::ptr::with_exposed_provenance_mut::<T>(to as usize).write_unaligned(value) };
        return Ok(());
    }
    // SAFETY: the program has asked for this to be written there (# Safety).
    unsafe { write(to, value) }
}

/// Reads a word from the program's memory.
///
/// # Errors
/// `-EFAULT`: the program has no such memory.
pub(crate) fn read_word(from: u64) -> Result<u64, i64> {
    // SAFETY: any eight bytes are a valid word.
    unsafe { read(from) }
}

/// Writes a plain value to the program's memory.
///
/// # Errors
/// `-EFAULT`: the program has no such memory.
///
/// # Safety
/// The program must have asked for this to be written there.
pub(crate) unsafe fn write<T: Copy>(to: u64, value: T) -> Result<(), i64> {
    // SAFETY: `value` has that size, and is only read.
    match unsafe { transfer(nr::process_vm_writev, (&raw const value).cast(), to, size_of::<T>()) } {
        Some(result) => result,
        None => {
            // SAFETY: by the caller, the program wants this memory written to.
            unsafe { core::ptr::with_exposed_provenance_mut::<T>(to as usize).write_unaligned(value) };
            Ok(())
        }
    }
}

/// Writes bytes to the program's memory.
///
/// # Errors
/// `-EFAULT`: the program has no such memory.
///
/// # Safety
/// The program must have asked for so many bytes to be written there.
pub(crate) unsafe fn write_bytes(to: u64, bytes: &[u8]) -> Result<(), i64> {
    // SAFETY: the slice has that length, and is only read.
    match unsafe { transfer(nr::process_vm_writev, bytes.as_ptr(), to, bytes.len()) } {
        Some(result) => result,
        None => {
            let to = core::ptr::with_exposed_provenance_mut::<u8>(to as usize);
            // SAFETY: by the caller, the program wants this memory written to.
            unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            Ok(())
        }
    }
}

/// Reads as much as there is, up to the buffer's length.
///
/// # Errors
/// `-EFAULT`, where there is nothing.
pub(crate) fn read_some(from: u64, to: &mut [u8]) -> Result<usize, i64> {
    let mut done = 0;
    while done < to.len() {
        // A page is there as a whole, or not at all.
        let at = from.wrapping_add(done as u64);
        let length = (to.len() - done).min((PAGE - at % PAGE) as usize);
        let Some(place) = to.get_mut(done..done + length) else { break };
        // SAFETY: the same bytes; `fetch` writes initialized ones only.
        let place = unsafe { core::slice::from_raw_parts_mut(place.as_mut_ptr().cast(), length) };
        match fetch(place, at) {
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
            Ok(()) => done += length,
        }
    }
    Ok(done)
}

/// Reads a string: its bytes up to the zero, or as many as there is room for.
///
/// # Errors
/// `-EFAULT`, where there is no zero.
pub(crate) fn read_string(from: u64, to: &mut [u8]) -> Result<usize, i64> {
    let mut done = 0;
    while done < to.len() {
        let at = from.wrapping_add(done as u64);
        // Most are short, and few lie across the end of a page.
        let length = CHUNK.min(to.len() - done).min((PAGE - at % PAGE) as usize);
        let chunk = to.get_mut(done..done + length).unwrap_or(&mut []);
        read_some(at, chunk)?;
        if let Some(end) = chunk.iter().position(|byte| *byte == 0) {
            return Ok(done + end);
        }
        done += length;
    }
    Ok(done)
}
