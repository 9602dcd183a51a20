//! What of a thread must be right before any ordinary code can run on it.
//!
//! The C library finds its storage of the thread through FS, and reads the clock with RDTSC. A script can change either with
//! one system call, and the worker's own code would then fault in each round, before it could find out why. So these come
//! first, by system calls made directly.

use syscalls::{Sysno, syscall};

const ARCH_SET_GS: u64 = 0x1001;
const ARCH_SET_FS: u64 = 0x1002;
const ARCH_GET_FS: u64 = 0x1003;
const ARCH_GET_GS: u64 = 0x1004;

/// The registers, and whether the clock may be read without the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Registers {
    fs: u64,
    gs: u64,
    clock: i32,
    /// Whether the processor has instructions that tell FS and GS, and the kernel lets programs use them.
    is_told: bool,
}

impl Registers {
    /// Returns what the calling thread has.
    pub(super) fn capture() -> Self {
        /// Bit of the auxiliary vector's `AT_HWCAP2`.
        const FSGSBASE: u64 = 1 << 1;
        // SAFETY: returns a number.
        Self::of_now(unsafe { libc::getauxval(libc::AT_HWCAP2) } & FSGSBASE != 0)
    }

    fn of_now(is_told: bool) -> Self {
        let mut clock = 0;
        // SAFETY: the kernel writes one number.
        let _ = unsafe { syscall!(Sysno::prctl, libc::PR_GET_TSC, &raw mut clock) };
        let (fs, gs) = if is_told {
            // SAFETY: the kernel said that these instructions may be used.
            unsafe { bases() }
        } else {
            (base(ARCH_GET_FS), base(ARCH_GET_GS))
        };
        Self { fs, gs, clock, is_told }
    }

    /// Sets back what has changed.
    #[inline(never)]
    pub(super) fn restore(&self) {
        let now = Self::of_now(self.is_told);
        // SAFETY: the values are those that this thread had, and code runs with.
        unsafe {
            if now.fs != self.fs {
                let _ = syscall!(Sysno::arch_prctl, ARCH_SET_FS, self.fs);
            }
            if now.gs != self.gs {
                let _ = syscall!(Sysno::arch_prctl, ARCH_SET_GS, self.gs);
            }
            if now.clock != self.clock {
                let _ = syscall!(Sysno::prctl, libc::PR_SET_TSC, self.clock);
            }
        }
    }
}

/// Returns FS and GS, without a system call.
///
/// # Safety
/// Programs may use `rdfsbase` and `rdgsbase`.
unsafe fn bases() -> (u64, u64) {
    let (fs, gs): (u64, u64);
    // SAFETY: reads two registers; the caller's promise.
    unsafe {
        std::arch::asm!(
            "rdfsbase {fs}", "rdgsbase {gs}",
            fs = out(reg) fs, gs = out(reg) gs,
            options(nomem, nostack, preserves_flags),
        );
    }
    (fs, gs)
}

fn base(which: u64) -> u64 {
    let mut base = 0_u64;
    // SAFETY: the kernel writes one number.
    let _ = unsafe { syscall!(Sysno::arch_prctl, which, &raw mut base) };
    base
}

/// Ends the process at once, by the system call alone.
pub(super) fn exit(status: i32) -> ! {
    loop {
        // SAFETY: nothing of this process is used any more.
        let _ = unsafe { syscall!(Sysno::exit_group, status) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_script_changed_is_set_back() {
        let before = Registers::capture();
        // SAFETY: nothing uses GS here, and the clock is not read meanwhile.
        unsafe {
            syscall!(Sysno::arch_prctl, ARCH_SET_GS, 0x1234).unwrap();
            syscall!(Sysno::prctl, libc::PR_SET_TSC, libc::PR_TSC_SIGSEGV).unwrap();
        }
        let changed = Registers::capture();
        before.restore();
        assert_ne!((changed.gs, changed.clock), (before.gs, before.clock));
        assert_eq!(changed.gs, 0x1234);
        assert_eq!(Registers::capture(), before);
    }

    #[test]
    fn the_processor_and_the_kernel_tell_the_same() {
        let told = Registers::capture();
        let asked = Registers::of_now(false);
        assert_eq!((told.fs, told.gs, told.clock), (asked.fs, asked.gs, asked.clock));
        assert_ne!(told.fs, 0, "it is the thread's storage");
        if !told.is_told {
            orrery_testing::skipped!("neither does the processor tell");
        }
    }
}
