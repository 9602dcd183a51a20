//! A copy-on-write copy of this process' memory, in a paused child.
//!
//! A fork copies page tables, not pages. The paused child has every page as it was at the instant of the fork, and the
//! kernel copies a page when this process first writes to it. Contents are read back from the child page by page
//! (process_vm_readv(2)).

use core::ffi::c_void;

use syscalls::{Sysno, syscall};

use crate::paused_child::{Copied, PausedChild};
use crate::{Error, Result};

/// A paused child process that has the memory of this process as it was when the copy was made.
#[derive(Debug)]
pub struct MemoryCopy {
    child: PausedChild,
}

impl MemoryCopy {
    /// Forks the child. The caller must have blocked all signals, because the child inherits the mask and may not run a
    /// handler.
    ///
    /// The copy lacks memory marked `MADV_DONTFORK`, and has zeros for memory marked `MADV_WIPEONFORK`.
    ///
    /// # Errors
    /// `EAGAIN` if no more processes may be created, `ENOMEM`.
    pub fn spawn() -> Result<Self> {
        Ok(Self { child: PausedChild::spawn(Copied::Memory)? })
    }

    /// Reads what was at `address` into `into`.
    ///
    /// # Errors
    /// `EFAULT` if the copy has no memory there, `ESRCH` if the child was killed, `EPERM` if a security policy forbids it.
    pub fn read(&self, address: usize, into: &mut [u8]) -> Result<()> {
        #[repr(C)]
        struct Vector {
            base: *mut c_void,
            length: usize,
        }
        let local = Vector { base: into.as_mut_ptr().cast(), length: into.len() };
        let remote = Vector { base: core::ptr::without_provenance_mut(address), length: into.len() };
        let pid = self.child.pid().as_raw_pid();
        // SAFETY: the kernel writes at most `into.len()` bytes to `into`, which is borrowed exclusively.
        let read =
            unsafe { syscall!(Sysno::process_vm_readv, pid, &raw const local, 1, &raw const remote, 1, 0) }
                .map_err(|e| Error::raw("process_vm_readv", address, e))?;
        if read == into.len() {
            Ok(())
        } else {
            Err(Error::new("process_vm_readv", address, rustix::io::Errno::FAULT))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_as_it_was() {
        let mut memory = vec![7_u8; 10_000];
        let copy = MemoryCopy::spawn().unwrap();
        memory.fill(9);
        let mut old = [0_u8; 100];
        copy.read(memory[5_000..].as_ptr().addr(), &mut old).unwrap();
        assert_eq!(old, [7; 100]);
        assert_eq!(memory[5_000], 9);
        assert_eq!(copy.read(4096, &mut old).unwrap_err().errno, rustix::io::Errno::FAULT);
    }
}
