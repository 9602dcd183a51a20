//! The executive's first act: what a process must do itself to become a tracee.
//!
//! The supervisor has written the image, and has the thread begin here, before the program's first instruction; it learns the
//! outcome at the signal with which this ends (see `orrery_boot`), and gives the thread its registers back. One stop for all of
//! these calls: made one by one from outside, each of them would cost two.

use core::sync::atomic::Ordering::Relaxed;

use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::syscall::{SET_BYTES, SIGSYS, address, call, failed};
use crate::executive::abi::tsc;
use crate::executive::process::{auxv, users};
use crate::executive::signals::held_sigsys;
use crate::nr;

const PROT_READ: u64 = 1;
const PR_SET_TIMERSLACK: u64 = 29;
/// Nanoseconds by which timers may be late on purpose.
const SHORTEST_SLACK: u64 = 1;
const PR_SET_SYSCALL_USER_DISPATCH: u64 = 59;
const ON: u64 = 1;

/// Attaches the shared memory, protects the image, takes SIGSYS, and arms dispatch: zero, or the error of what failed, which is undone
/// then. `checked` says that the supervisor has looked as whom the program acts, else EACCES asks for that. `precise` says whether timers
/// are to be; `stack` is the stack pointer that the program has.
pub(crate) extern "C" fn boot(checked: u64, precise: u64, stack: u64) -> i64 {
    let config = &ORRERY_CONFIG;
    let attached = users::attach(checked != 0);
    if failed(attached) {
        return attached;
    }
    // SAFETY: memory that nobody uses yet; the calls change nothing of the program's.
    unsafe {
        tsc::detect();
        let (image, length) = (config.image.load(Relaxed), config.image_length.load(Relaxed));
        let (code, code_length) = (config.code.load(Relaxed), config.code_length.load(Relaxed));
        let table = config.policy.load(Relaxed);
        let read_only = [(image, code - image), (table, if table == 0 { 0 } else { image + length - table })];
        let mut result = 0;
        for (start, length) in read_only {
            if length != 0 && !failed(result) {
                result = call(nr::mprotect, [start, length, PROT_READ, 0, 0, 0]);
            }
        }
        if precise != 0 && !failed(result) {
            result = call(nr::prctl, [PR_SET_TIMERSLACK, SHORTEST_SLACK, 0, 0, 0, 0]);
        }
        if !failed(result) {
            result = call(nr::rt_sigaction, [SIGSYS, address(&config.action), 0, SET_BYTES, 0, 0]);
        }
        if !failed(result) {
            // Memory cannot be freed from here on. Kernels before 6.10 cannot seal: then the executive alone keeps the
            // program from changing these mappings.
            call(nr::mseal, [image, length, 0, 0, 0, 0]);
            result = call(nr::prctl, [PR_SET_SYSCALL_USER_DISPATCH, ON, code, code_length, 0, 0]);
        }
        if failed(result) {
            users::detach();
            return result;
        }
        held_sigsys::set_blocked(config.sigsys_blocked.load(Relaxed) != 0);
        auxv::raise_min_stack_size(stack);
        0
    }
}
