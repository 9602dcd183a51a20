//! Memory that the program named in a system call. It may be unmapped: then the call fails with EFAULT, as always.

use core::mem::MaybeUninit;
use core::sync::atomic::Ordering::Relaxed;

use super::gates::ORRERY_CONFIG;
use super::kernel::{EFAULT, address, address_mut, call};
use crate::numbers;

/// `struct iovec`.
#[repr(C)]
struct Piece {
    start: u64,
    length: u64,
}

/// Copies between our memory and the program's by a call that reports faults. `None` where there is no such call.
fn transfer(number: u64, ours: u64, theirs: u64, length: u64) -> Option<Result<(), i64>> {
    if ORRERY_CONFIG.filtered.load(Relaxed) != 0 {
        return None;
    }
    let (local, remote) = (Piece { start: ours, length }, Piece { start: theirs, length });
    // SAFETY: `ours` is memory of that length, by the callers below.
    let result = unsafe {
        let own = call(numbers::getpid, [0; 6]).cast_unsigned();
        call(number, [own, address(&local), 1, address(&remote), 1, 0])
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

/// Reads plain data.
///
/// # Errors
/// `-EFAULT`.
///
/// # Safety
/// Any bytes must be a valid `T`.
pub(crate) unsafe fn read<T: Copy>(from: u64) -> Result<T, i64> {
    let mut value = MaybeUninit::<T>::uninit();
    match transfer(numbers::process_vm_readv, address_mut(&mut value), from, size_of::<T>() as u64) {
        Some(result) => result?,
        // SAFETY: the program vouches for the address; where it lies, it gets a SIGSEGV rather than EFAULT.
        None => unsafe {
            value.write(core::ptr::with_exposed_provenance::<T>(from as usize).read_unaligned());
        },
    }
    // SAFETY: written just now.
    Ok(unsafe { value.assume_init() })
}

/// Reads a word.
///
/// # Errors
/// `-EFAULT`.
pub(crate) fn read_word(from: u64) -> Result<u64, i64> {
    // SAFETY: a word is any eight bytes.
    unsafe { read(from) }
}

/// Writes plain data.
///
/// # Errors
/// `-EFAULT`.
///
/// # Safety
/// The program must have asked for this to be written there.
pub(crate) unsafe fn write<T: Copy>(to: u64, value: T) -> Result<(), i64> {
    match transfer(numbers::process_vm_writev, address(&value), to, size_of::<T>() as u64) {
        Some(result) => result,
        None => {
            // SAFETY: as above.
            unsafe { core::ptr::with_exposed_provenance_mut::<T>(to as usize).write_unaligned(value) };
            Ok(())
        }
    }
}
