//! The auxiliary vector: what the kernel passes to a program at its start, and an executive changes.
//!
//! A dispatched call is a signal: the handler of another one that makes calls, or returns by `rt_sigreturn`, needs room for a
//! second frame, and for the executive's functions. Programs that make alternate stacks no larger than what the kernel
//! says (`AT_MINSIGSTKSZ`, and `sysconf(_SC_MINSIGSTKSZ)` and `_SC_SIGSTKSZ` that the C library makes of it) get a larger size: else
//! these stacks overflow into what is below. See getauxval(3) and sysconf(3).

use core::sync::atomic::Ordering::Relaxed;

use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::trampoline;
use crate::executive::signals::handlers;
use crate::handler;

/// The least that a signal's delivery needs of an alternate stack, in bytes.
const AT_MINSIGSTKSZ: u64 = 51;
/// Ends the vector.
const AT_NULL: u64 = 0;
/// What the executive's functions use for a call, at most: the test `frames` has a stack with a guard page for that. What needs more is
/// in `work_areas`.
const FUNCTIONS: u64 = 3 << 10;
/// What the function that runs a handler has on the stack.
const HANDLER: u64 = 1 << 10;
/// Frames begin on such multiples, behind a red zone.
const ALIGNED: u64 = 64;

/// Raises `AT_MINSIGSTKSZ`, the least size of alternate signal stacks. Where the kernel does not pass it, nothing changes.
///
/// # Safety
/// `stack` is the stack pointer that the kernel has given to the program, which does not run yet.
pub(crate) unsafe fn raise_min_stack_size(stack: u64) {
    // SAFETY: from there on lie the number of arguments, these, a zero, the environment, a zero, and the vector.
    unsafe {
        let stack = core::ptr::with_exposed_provenance_mut::<u64>(stack as usize);
        let mut entry = stack.add(stack.read() as usize + 2);
        while entry.read() != 0 {
            entry = entry.add(1);
        }
        entry = entry.add(1);
        while entry.read() != AT_NULL {
            if entry.read() == AT_MINSIGSTKSZ {
                entry.add(1).write(needed(entry.add(1).read()));
            }
            entry = entry.add(2);
        }
    }
}

/// Returns how much a signal's delivery needs where the kernel's frame of one needs so much.
fn needed(frame: u64) -> u64 {
    let shown = handlers::ROOM as u64 + ALIGNED;
    let dispatched = trampoline::RED_ZONE + frame;
    // What a handler of the policy uses is above that of the functions.
    let handlers =
        if ORRERY_CONFIG.handlers_length.load(Relaxed) == 0 { 0 } else { handler::STACK + HANDLER };
    frame + shown + dispatched + FUNCTIONS + handlers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_size_of_stacks_is_changed() {
        const WORDS: [u64; 16] =
            [2, 100, 200, 0, 300, 400, 0, 6, 4096, AT_MINSIGSTKSZ, 3376, 25, 51, 33, 7, 0];
        let mut words = WORDS;
        // SAFETY: laid out like the stack of a program that starts.
        unsafe { raise_min_stack_size((&raw mut words).expose_provenance() as u64) };
        let raised = words[10];
        assert!(raised >= 2 * 3376 + handlers::ROOM as u64 + FUNCTIONS, "{raised}");
        words[10] = WORDS[10];
        assert_eq!(words, WORDS);
    }
}
