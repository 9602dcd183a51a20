//! What a program without C library must bring along, and what the supervisor looks for in the image.

use core::arch::asm;
use core::panic::PanicInfo;

use crate::executive::abi::syscall::call;
use crate::executive::abi::trampoline::{orrery_boot, orrery_load, orrery_restorer, orrery_sigsys};
use crate::nr;

/// The functions that the kernel calls, and those that the supervisor has run first.
#[repr(C)]
pub(crate) struct Entries {
    handler: unsafe extern "C" fn(),
    restorer: unsafe extern "C" fn() -> !,
    boot: unsafe extern "C" fn(u64, u64, u64) -> !,
    load: unsafe extern "C" fn() -> !,
}

/// Read by the supervisor.
#[unsafe(no_mangle)]
pub(crate) static ORRERY_ENTRIES: Entries =
    Entries { handler: orrery_sigsys, restorer: orrery_restorer, boot: orrery_boot, load: orrery_load };

const ABORTED: u64 = 134;

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    const MESSAGE: &str = "orrery: the executive failed; this is a bug of Orrery\n";
    loop {
        // SAFETY: says why, and ends the program: what it relied on is gone.
        unsafe {
            call(1, [2, MESSAGE.as_ptr().addr() as u64, MESSAGE.len() as u64, 0, 0, 0]);
            call(nr::exit_group, [ABORTED, 0, 0, 0, 0, 0]);
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    // SAFETY: so many bytes can be read and written at the caller's pointers, and do not overlap: see memcpy(3).
    unsafe {
        asm!("rep movsb", inout("rdi") to => _, inout("rsi") from => _, inout("rcx") length => _,
            options(nostack, preserves_flags));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    if to.addr().wrapping_sub(from.addr()) >= length {
        // SAFETY: copying upwards does not overwrite what is still to be read.
        return unsafe { memcpy(to, from, length) };
    }
    // SAFETY: downwards, then; the direction is restored.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rdi") to.add(length).sub(1) => _,
            inout("rsi") from.add(length).sub(1) => _, inout("rcx") length => _, options(nostack));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, length: usize) -> *mut u8 {
    // SAFETY: so many bytes can be written at the caller's pointer: see memset(3).
    unsafe {
        asm!("rep stosb", inout("rdi") to => _, inout("rcx") length => _, in("al") byte as u8,
            options(nostack, preserves_flags));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, length: usize) -> i32 {
    for index in 0..length {
        // SAFETY: so many bytes can be read at the caller's pointers: see memcmp(3).
        let (a, b) = unsafe { (a.add(index).read_volatile(), b.add(index).read_volatile()) };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, length: usize) -> i32 {
    // SAFETY: so many bytes can be read at the caller's pointers: see bcmp(3).
    unsafe { memcmp(a, b, length) }
}

/// Named by parts of `core` that were compiled to unwind: nothing here unwinds, since panics abort.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}
