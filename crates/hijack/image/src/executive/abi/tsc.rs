//! The time stamp counter, which a program may forbid itself.
//!
//! `PR_SET_TSC` and the strict mode of seccomp have the instruction that reads it end the program. That is a property of a thread,
//! handed on to those that it makes and to programs that it executes. As soon as one thread has it, nobody in the process reads the
//! counter any more: calls are counted, but not timed.

use core::sync::atomic::Ordering::Relaxed;

use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::syscall::{address_mut, call, failed};
use crate::nr;

const PR_SET_SECCOMP: u64 = 22;
const SECCOMP_MODE_STRICT: u64 = 1;
const SECCOMP_SET_MODE_STRICT: u64 = 0;
const PR_GET_TSC: u64 = 25;
const PR_SET_TSC: u64 = 26;
const PR_TSC_SIGSEGV: u64 = 2;

/// Returns what the counter shows; zero where it may not be read.
#[inline(always)]
pub(crate) fn ticks() -> u64 {
    if ORRERY_CONFIG.tsc_disabled.load(Relaxed) != 0 {
        return 0;
    }
    // SAFETY: reads a counter.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Returns how many ticks have passed since `start`; none where that is not known.
#[inline(always)]
pub(crate) fn since(start: u64) -> Option<u64> {
    let now = if start == 0 { 0 } else { ticks() };
    (now != 0).then(|| now.wrapping_sub(start))
}

fn forbids(number: u64, arguments: [u64; 6]) -> bool {
    // The kernel reads `int`s.
    let [what, how] = [arguments[0] & 0xffff_ffff, arguments[1]];
    match number {
        nr::prctl => {
            (what, how & 0xffff_ffff) == (PR_SET_TSC, PR_TSC_SIGSEGV)
                || (what, how) == (PR_SET_SECCOMP, SECCOMP_MODE_STRICT)
        }
        _ => what == SECCOMP_SET_MODE_STRICT,
    }
}

/// Has `perform` make a `prctl` or `seccomp` of the program's, and reads the counter no more if that forbids it.
pub(crate) fn perform_restriction(number: u64, arguments: [u64; 6], perform: impl FnOnce() -> i64) -> i64 {
    if !forbids(number, arguments) {
        return perform();
    }
    let before = ORRERY_CONFIG.tsc_disabled.swap(1, Relaxed);
    let result = perform();
    if failed(result) {
        ORRERY_CONFIG.tsc_disabled.store(before, Relaxed);
    }
    result
}

/// The program may have been executed by one that had forbidden it.
pub(crate) fn detect() {
    let mut state = 0_u32;
    // SAFETY: the kernel writes an `int`; where it does not know the question, nothing is forbidden.
    unsafe { call(nr::prctl, [PR_GET_TSC, address_mut(&mut state), 0, 0, 0, 0]) };
    if u64::from(state) == PR_TSC_SIGSEGV {
        ORRERY_CONFIG.tsc_disabled.store(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_forbids_the_counter_is_known() {
        let asked = |number, what, how| forbids(number, [what, how, 0, 0, 0, 0]);
        assert!(asked(nr::prctl, PR_SET_TSC, PR_TSC_SIGSEGV));
        assert!(asked(nr::prctl, 1 << 32 | PR_SET_TSC, 1 << 32 | PR_TSC_SIGSEGV));
        assert!(!asked(nr::prctl, PR_SET_TSC, 1));
        assert!(asked(nr::prctl, PR_SET_SECCOMP, SECCOMP_MODE_STRICT));
        assert!(!asked(nr::prctl, PR_SET_SECCOMP, 2));
        assert!(asked(nr::seccomp, SECCOMP_SET_MODE_STRICT, 0));
        assert!(!asked(nr::seccomp, 1, 0));
    }

    #[test]
    fn time_goes_on_until_it_is_forbidden() {
        let start = ticks();
        assert!(since(start).is_some());
        assert_eq!(perform_restriction(nr::prctl, [PR_SET_TSC, PR_TSC_SIGSEGV, 0, 0, 0, 0], || -1), -1);
        assert!(since(start).is_some());
        assert_eq!(perform_restriction(nr::prctl, [PR_SET_TSC, PR_TSC_SIGSEGV, 0, 0, 0, 0], || 0), 0);
        assert_eq!((ticks(), since(start)), (0, None));
        ORRERY_CONFIG.tsc_disabled.store(0, Relaxed);
    }
}
