//! What the kernel puts on the stack for a signal handler: `struct rt_sigframe` of x86-64.
//!
//! From low to high addresses: the handler's return address (the restorer), [`Context`], `siginfo`, and on the next
//! multiple of 64 behind those the extended state of the processor.

use core::sync::atomic::{Ordering::SeqCst, compiler_fence};

use crate::executive::abi::syscall::address;

/// `struct ucontext`.
#[repr(C)]
pub(crate) struct Context {
    pub(crate) flags: u64,
    pub(crate) link: u64,
    pub(crate) stack: AlternateStack,
    pub(crate) registers: Registers,
    pub(crate) mask: u64,
}

/// `stack_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AlternateStack {
    pub(crate) start: u64,
    pub(crate) flags: i32,
    pub(crate) padding: i32,
    pub(crate) size: u64,
}

/// `struct sigcontext`: the program's registers. Offsets are used by the assembly.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Registers {
    pub(crate) r8: u64,
    pub(crate) r9: u64,
    pub(crate) r10: u64,
    pub(crate) r11: u64,
    pub(crate) r12: u64,
    pub(crate) r13: u64,
    pub(crate) r14: u64,
    pub(crate) r15: u64,
    pub(crate) rdi: u64,
    pub(crate) rsi: u64,
    pub(crate) rbp: u64,
    pub(crate) rbx: u64,
    pub(crate) rdx: u64,
    pub(crate) rax: u64,
    pub(crate) rcx: u64,
    pub(crate) rsp: u64,
    pub(crate) rip: u64,
    pub(crate) eflags: u64,
    pub(crate) segments: [u16; 4],
    pub(crate) error: u64,
    pub(crate) trap: u64,
    pub(crate) old_mask: u64,
    pub(crate) cr2: u64,
    pub(crate) extended: u64,
    /// The kernel leaves the rest alone: what `handlers` marks its copies with.
    pub(crate) mark: [u64; 2],
    /// In the frame of a dispatched call: how far that came.
    pub(crate) progress: Progress,
    pub(crate) reserved: [u64; 4],
}

impl Registers {
    /// Returns whether the general registers, `rip` and the flags are these.
    pub(crate) fn are(&self, other: &Self) -> bool {
        const GENERAL: usize = 18;
        const { assert!(core::mem::offset_of!(Self, segments) == 8 * GENERAL) };
        // SAFETY: the structure begins with so many words.
        let words = |of: *const Self| unsafe { &*of.cast::<[u64; GENERAL]>() };
        words(self) == words(other)
    }
}

/// How far the program's own call came: written directly behind it, by `orrery_perform`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Progress {
    /// Not zero: the call was made.
    pub(crate) done: u64,
    /// The result of the part that is done.
    pub(crate) result: u64,
}

impl Progress {
    /// The value before the first call.
    pub(crate) const NONE: Self = Self { done: 0, result: 0 };

    /// The call was made, or answered.
    pub(crate) fn made(&mut self, result: i64) {
        self.result = result.cast_unsigned();
        compiler_fence(SeqCst);
        self.done = 1;
        compiler_fence(SeqCst);
    }
}

/// The part of `siginfo` that SIGSYS uses.
#[repr(C)]
pub(crate) struct Info {
    pub(crate) signal: i32,
    pub(crate) error: i32,
    pub(crate) code: i32,
    pub(crate) padding: i32,
    pub(crate) call_address: u64,
    pub(crate) call: i32,
    pub(crate) architecture: u32,
}

/// `si_code` of a call that was dispatched.
pub(crate) const SYS_USER_DISPATCH: i32 = 2;
/// `si_arch` of a call made with `int $0x80`.
pub(crate) const AUDIT_ARCH_I386: u32 = 0x4000_0003;

/// The extended state says at this offset how it can be restored: `struct _fpx_sw_bytes`.
const SOFTWARE_BYTES: u64 = 464;
const MAGIC: u32 = 0x4650_5853;
/// Without that, it is what `fxsave` writes.
const LEGACY_SIZE: u64 = 512;

/// The extended state in a frame.
#[derive(Clone, Copy)]
pub(crate) struct Extended {
    /// Zero: there is none.
    pub(crate) address: u64,
    pub(crate) size: u64,
    /// What `xrstor` is to load; zero: use `fxrstor`.
    pub(crate) features: u64,
}

impl Context {
    /// Returns where the frame begins: at the return address below the context.
    pub(crate) fn frame(&self) -> u64 {
        address(self) - 8
    }

    /// The six arguments of the call that was dispatched.
    pub(crate) fn arguments(&self) -> [u64; 6] {
        let r = &self.registers;
        [r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9]
    }

    pub(crate) fn extended(&self) -> Extended {
        let address = self.registers.extended;
        if address == 0 {
            return Extended { address, size: 0, features: 0 };
        }
        let software = (address + SOFTWARE_BYTES) as usize;
        // SAFETY: the kernel has written at least the legacy area there, whose last bytes are `struct _fpx_sw_bytes`.
        let (magic, size, features) = unsafe {
            (
                core::ptr::with_exposed_provenance::<u32>(software).read_unaligned(),
                core::ptr::with_exposed_provenance::<u32>(software + 4).read_unaligned(),
                core::ptr::with_exposed_provenance::<u64>(software + 8).read_unaligned(),
            )
        };
        if magic == MAGIC {
            Extended { address, size: u64::from(size), features }
        } else {
            Extended { address, size: LEGACY_SIZE, features: 0 }
        }
    }
}

#[cfg(test)]
mod tests {
    use core::mem::offset_of;

    use super::*;

    #[test]
    fn the_layout_is_the_kernels() {
        assert_eq!(offset_of!(Context, registers), 40);
        assert_eq!(size_of::<Registers>(), 256);
        assert_eq!(offset_of!(Context, mask), 296);
        assert_eq!(size_of::<Context>(), 304);
        assert_eq!(offset_of!(Registers, rip), 128);
        assert_eq!(offset_of!(Registers, extended), 184);
        assert_eq!(offset_of!(Info, call_address), 16);
        assert_eq!(offset_of!(Info, architecture), 28);
    }
}
