//! The base of GS, which programs may use as they like: x86-64's C libraries use FS alone.

use syscalls::{Sysno, syscall};

const ARCH_SET_GS: usize = 0x1001;
const ARCH_GET_GS: usize = 0x1004;

/// How a thread reads and writes its base of GS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GsBase {
    /// Whether programs may use `rdgsbase` and `wrgsbase`.
    has_instructions: bool,
}

impl GsBase {
    /// Uses the instructions where the kernel allows them (`HWCAP2_FSGSBASE`, Linux 5.9), else arch_prctl(2).
    #[must_use]
    pub fn detect() -> Self {
        /// Bit of the auxiliary vector's `AT_HWCAP2`: `asm/hwcap2.h`.
        const FSGSBASE: u64 = 1 << 1;
        // SAFETY: it reads a table that the kernel handed to the process.
        Self { has_instructions: unsafe { libc::getauxval(libc::AT_HWCAP2) } & FSGSBASE != 0 }
    }

    /// Uses arch_prctl(2), which every kernel has.
    #[must_use]
    pub fn by_system_calls() -> Self {
        Self { has_instructions: false }
    }

    /// Returns whether no system call is made.
    #[must_use]
    pub fn has_instructions(self) -> bool {
        self.has_instructions
    }

    /// Returns the base of the calling thread.
    #[must_use]
    pub fn get(self) -> usize {
        let mut base = 0;
        if self.has_instructions {
            // SAFETY: the kernel allows the instruction, which changes nothing.
            unsafe {
                core::arch::asm!("rdgsbase {}", out(reg) base, options(nomem, nostack, preserves_flags))
            };
        } else {
            // SAFETY: the kernel writes one word to `base`, which outlives the call.
            let _ = unsafe { syscall!(Sysno::arch_prctl, ARCH_GET_GS, &raw mut base) };
        }
        base
    }

    /// Changes the base of the calling thread. It has to be an address that programs can have: arch_prctl(2) and
    /// ptrace(2) refuse others, though the instruction does not.
    ///
    /// # Safety
    /// Code of the thread that accesses memory relative to GS expects this base.
    #[inline]
    pub unsafe fn set(self, base: usize) {
        if self.has_instructions {
            // SAFETY: the kernel allows the instruction; the caller's promise. Other code may access memory by it, so the
            // compiler has written what comes before.
            unsafe { core::arch::asm!("wrgsbase {}", in(reg) base, options(nostack, preserves_flags)) };
        } else {
            // SAFETY: the call changes the base alone; the caller's promise.
            let _ = unsafe { syscall!(Sysno::arch_prctl, ARCH_SET_GS, base) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each way reads what the other wrote.
    #[test]
    fn instructions_and_system_calls_agree() {
        let (fast, slow) = (GsBase::detect(), GsBase::by_system_calls());
        assert_eq!(fast.get(), slow.get());
        for (base, way) in [(0x1234_5000, fast), (0x7fff_0000_0010, slow), (0, fast)] {
            // SAFETY: nothing in a test uses GS.
            unsafe { way.set(base) };
            assert_eq!((fast.get(), slow.get()), (base, base));
        }
    }
}
