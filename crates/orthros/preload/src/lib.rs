//! liborthros: lets a program say what becomes of a system call that its kernel's death interrupts.
//!
//! Whether such a call had an effect, nobody knows. The rescue begins again what had only been waiting and what may be
//! done twice, and lets all else fail with `EINTR`. A program that knows better says so, for each call: begin it again,
//! fail with another error, or ask a function of the program.
//!
//! The library takes no part in any call. It holds a [`Block`]: a page of memory with a mark by which the rescue finds
//! it in the dead kernel's memory, and with an answer for each call. Where a function is to be asked, the rescue lets
//! the thread go on in `entry` as if the call had led there: the call's number in `rax`, its arguments where they are,
//! and the way back in `rcx`, which a system call overwrites anyway. No stack is written to before the thread lives.
//!
//! The C interface is `include/orrery/failover.h`. After section IV-E-2 of the paper.

mod entry;
mod environment;

use std::ffi::{c_int, c_long};
use std::sync::atomic::{AtomicPtr, AtomicU16, Ordering};

/// The mark of a [`Block`], and the version of what follows.
pub const MARK: [u8; 16] = *b"orthros calls 1\0";
/// Calls from here on have no answer.
pub const CALLS: usize = 512;
/// The answer that leaves it to the rescue.
pub const DEFAULT: u16 = 0;
/// The call is to be begun again.
pub const AGAIN: u16 = 1;
/// Go on at the block's entry.
pub const ASK: u16 = 2;
/// Fail, with the error in the other bits.
pub const FAIL: u16 = 0x8000;

/// What the rescue reads: at an address that is a multiple of 64, in a writable mapping of this library.
#[repr(C, align(64))]
pub struct Block {
    /// [`MARK`].
    pub mark: [u8; 16],
    /// Where a thread goes on that is to be asked.
    pub entry: unsafe extern "C" fn(),
    /// The answer for each call, by its number.
    pub answers: [AtomicU16; CALLS],
}

/// A call as it was made.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// The number of the system call.
    pub number: c_long,
    /// What it was given.
    pub arguments: [c_long; 6],
}

/// A program's function that settles a call: gives what the kernel would, an error as its negative number.
pub type Handler = unsafe extern "C" fn(*const Call) -> c_long;

/// The block of this process.
///
/// Nothing in this library reads the answers, so the compiler might leave out the stores to them. `used` has it
/// assume references to the block that it cannot see.
#[used]
static BLOCK: Block =
    Block { mark: MARK, entry: entry::entry, answers: [const { AtomicU16::new(DEFAULT) }; CALLS] };
static HANDLERS: [AtomicPtr<()>; CALLS] = [const { AtomicPtr::new(std::ptr::null_mut()) }; CALLS];

fn fail(error: c_int) -> c_int {
    // SAFETY: the C library's errno is a place of this thread's own, which is valid as long as the thread.
    unsafe { *libc::__errno_location() = error };
    -1
}

fn place(call: c_long) -> Option<usize> {
    usize::try_from(call).ok().filter(|&call| call < CALLS)
}

/// Says what becomes of a call: 0 leaves it to the rescue, 1 begins it again, a negative error number fails with it.
///
/// Gives 0, or -1 with `EINVAL` where there is no such call or answer; then nothing has changed. May be called from any
/// thread, and from signal handlers.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_failover_set_result(call: c_long, answer: c_int) -> c_int {
    let encoded = match answer {
        0 => Some(DEFAULT),
        1 => Some(AGAIN),
        _ => {
            u16::try_from(-i64::from(answer)).ok().filter(|error| (1..4096).contains(error)).map(|e| FAIL | e)
        }
    };
    let (Some(place), Some(encoded)) = (place(call), encoded) else { return fail(libc::EINVAL) };
    BLOCK.answers[place].store(encoded, Ordering::Release);
    0
}

/// Lets a function of the program settle a call; null leaves it to the rescue.
///
/// The function runs in the thread that made the call, where it made it, after the rescue: it may do what a signal
/// handler may. Gives 0, or -1 with `EINVAL` where there is no such call.
///
/// # Safety
/// The function stays loaded, and does only what a signal handler may (signal-safety(7)).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_failover_set_handler(call: c_long, handler: Option<Handler>) -> c_int {
    let Some(place) = place(call) else { return fail(libc::EINVAL) };
    let pointer = handler.map_or(std::ptr::null_mut(), |handler| handler as *mut ());
    let answer = if pointer.is_null() { DEFAULT } else { ASK };
    if answer == DEFAULT {
        // In this order, so that nobody is asked for what has gone.
        BLOCK.answers[place].store(answer, Ordering::Release);
        HANDLERS[place].store(pointer, Ordering::Release);
    } else {
        HANDLERS[place].store(pointer, Ordering::Release);
        BLOCK.answers[place].store(answer, Ordering::Release);
    }
    0
}

/// Makes a call again, and gives what the kernel does, an error as its negative number: for handlers.
///
/// # Safety
///
/// `call` leads to a call, whose arguments must be what that system call wants.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_failover_retry(call: *const Call) -> c_long {
    // SAFETY: `call` leads to a call that stays for this one (# Safety).
    let call = unsafe { *call };
    let result: c_long;
    let [first, second, third, fourth, fifth, sixth] = call.arguments;
    // SAFETY: as the caller says; `syscall` overwrites `rcx` and `r11`.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") call.number => result,
            in("rdi") first, in("rsi") second, in("rdx") third,
            in("r10") fourth, in("r8") fifth, in("r9") sixth,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// Asks the program; [`entry`] comes here.
unsafe extern "C" fn ask(call: *const Call) -> c_long {
    // SAFETY: the entry has put the call together.
    let number = unsafe { (*call).number };
    let handler = place(number).map_or(std::ptr::null_mut(), |place| HANDLERS[place].load(Ordering::Acquire));
    if handler.is_null() {
        return c_long::from(-libc::EINTR);
    }
    // SAFETY: the pointer is not null, and `orrery_failover_set_handler` alone stores others, all of them of
    // type `Handler`.
    let handler = unsafe { std::mem::transmute::<*mut (), Handler>(handler) };
    // SAFETY: the program's own function, with a call that lives.
    unsafe { handler(call) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_kept_and_nonsense_changes_nothing() {
        assert_eq!(orrery_failover_set_result(82, -libc::EIO), 0);
        assert_eq!(BLOCK.answers[82].load(Ordering::Relaxed), FAIL | 5);
        for (call, answer) in [(-1, 1), (512, 1), (c_long::MAX, 0), (82, 2), (82, -5000), (82, c_int::MIN)] {
            assert_eq!(orrery_failover_set_result(call, answer), -1, "{call} {answer}");
        }
        assert_eq!(BLOCK.answers[82].load(Ordering::Relaxed), FAIL | 5);
        assert_eq!(orrery_failover_set_result(82, 0), 0);
        assert_eq!(BLOCK.answers[82].load(Ordering::Relaxed), DEFAULT);
        // SAFETY: there is no function.
        assert_eq!(unsafe { orrery_failover_set_handler(-3, None) }, -1);
    }

    #[test]
    fn a_call_is_made_again_as_it_was() {
        let call = Call { number: libc::SYS_close, arguments: [-1, 0, 0, 0, 0, 0] };
        // SAFETY: closing what is not open does nothing.
        assert_eq!(unsafe { orrery_failover_retry(&raw const call) }, c_long::from(-libc::EBADF));
    }
}
