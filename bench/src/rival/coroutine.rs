//! Coroutines in one address space: swapcontext(3), which isolates nothing.

use std::mem::MaybeUninit;

use anyhow::{Result, ensure};

use super::hand_off::round_trips;
use crate::contender::{Contender, Sample};

const STACK: usize = 64 << 10;

/// Both sides, where neither moves.
struct Sides {
    here: libc::ucontext_t,
    there: libc::ucontext_t,
    rounds: u64,
}

/// A coroutine that swaps back at once.
pub struct Coroutine {
    sides: *mut Sides,
    _stack: Box<[u8]>,
}

extern "C" fn answer(low: u32, high: u32) {
    let sides = std::ptr::with_exposed_provenance_mut::<Sides>(low as usize | (high as usize) << 32);
    loop {
        // SAFETY: `Coroutine` never frees it while this runs, and both contexts were filled in.
        unsafe {
            (*sides).rounds += 1;
            libc::swapcontext(&raw mut (*sides).there, &raw const (*sides).here);
        }
    }
}

impl Coroutine {
    /// Makes it.
    pub fn new() -> Result<Self> {
        let mut stack = vec![0_u8; STACK].into_boxed_slice();
        // SAFETY: the structure consists of contexts of integers and pointers, for which all-zero is valid,
        // and a number.
        let sides = Box::new(unsafe { MaybeUninit::<Sides>::zeroed().assume_init() });
        let sides = Box::into_raw(sides);
        let address = sides.expose_provenance();
        let [low, high] = [0, 32].map(|shift| u32::try_from(address >> shift & 0xffff_ffff).unwrap_or(0));
        // SAFETY: fresh contexts and a stack that lives as long; makecontext(3) passes whole numbers.
        unsafe {
            ensure!(libc::getcontext(&raw mut (*sides).there) == 0, "getcontext failed");
            (*sides).there.uc_stack.ss_sp = stack.as_mut_ptr().cast();
            (*sides).there.uc_stack.ss_size = STACK;
            let entry: extern "C" fn(u32, u32) = answer;
            let entry = std::mem::transmute::<extern "C" fn(u32, u32), extern "C" fn()>(entry);
            libc::makecontext(&raw mut (*sides).there, entry, 2, low, high);
        }
        Ok(Self { sides, _stack: stack })
    }
}

impl Contender for Coroutine {
    fn measure(&mut self, _work: &str, iterations: u32) -> Result<Sample> {
        // SAFETY: made in `new`; the other side only runs within the swap.
        let before = unsafe { (*self.sides).rounds };
        let sample = round_trips(iterations, |_| {
            // SAFETY: both contexts were made in `new`; the other side only runs within the swap.
            let swapped =
                unsafe { libc::swapcontext(&raw mut (*self.sides).here, &raw const (*self.sides).there) };
            ensure!(swapped == 0, "swapcontext failed");
            Ok(())
        })?;
        // SAFETY: the sides were made in `new`; the other side only runs within the swap, which is over.
        let done = unsafe { (*self.sides).rounds } - before;
        ensure!(done == u64::from(iterations), "it answered {done} times, not {iterations}");
        Ok(sample)
    }
}

impl Drop for Coroutine {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw`; the coroutine never runs again.
        drop(unsafe { Box::from_raw(self.sides) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_swaps_there_and_back() {
        assert_eq!(Coroutine::new().unwrap().measure("switch", 20).unwrap().iterations, 40);
    }
}
