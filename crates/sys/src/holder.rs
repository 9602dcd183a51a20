//! A copy-on-write copy of our memory, asleep.
//!
//! Forking a process costs a page-table copy, not a copy of the pages: a holder keeps what every page was at the instant
//! of the fork, and the kernel copies a page when we first write to it. Contents are read back from it page by page
//! (process_vm_readv(2)).

use core::ffi::c_void;

use syscalls::{Sysno, syscall};

use crate::sleeper::{Having, Sleeper};
use crate::{Error, Result};

/// A sleeping process whose memory is what ours was.
#[derive(Debug)]
pub struct Holder {
    sleeper: Sleeper,
}

impl Holder {
    /// Makes one. Signals must be blocked by the caller: the holder inherits the mask and has to stay deaf.
    ///
    /// Memory marked `MADV_DONTFORK` is missing in it, and memory marked `MADV_WIPEONFORK` is zero.
    ///
    /// # Errors
    /// `EAGAIN` where no more processes may be made, `ENOMEM`.
    pub fn spawn() -> Result<Self> {
        Ok(Self { sleeper: Sleeper::spawn(Having::Memory)? })
    }

    /// Reads the holder's bytes at `address` into `into`.
    ///
    /// # Errors
    /// `EFAULT` where the holder has nothing there, `ESRCH` where it is dead, `EPERM` where a security policy forbids it.
    pub fn read(&self, address: usize, into: &mut [u8]) -> Result<()> {
        #[repr(C)]
        struct Vector {
            base: *mut c_void,
            length: usize,
        }
        let local = Vector { base: into.as_mut_ptr().cast(), length: into.len() };
        let remote = Vector { base: core::ptr::without_provenance_mut(address), length: into.len() };
        let pid = self.sleeper.pid().as_raw_pid();
        // SAFETY: the kernel writes at most `into.len()` bytes to `into`, which is borrowed exclusively.
        let read =
            unsafe { syscall!(Sysno::process_vm_readv, pid, &raw const local, 1, &raw const remote, 1, 0) }
                .map_err(|e| Error::raw("process_vm_readv(holder)", address, e))?;
        if read == into.len() {
            Ok(())
        } else {
            Err(Error::new("process_vm_readv(holder)", address, rustix::io::Errno::FAULT))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_remembers() {
        let mut memory = vec![7_u8; 10_000];
        let holder = Holder::spawn().unwrap();
        memory.fill(9);
        let mut old = [0_u8; 100];
        holder.read(memory[5_000..].as_ptr().addr(), &mut old).unwrap();
        assert_eq!(old, [7; 100]);
        assert_eq!(memory[5_000], 9);
        assert_eq!(holder.read(4096, &mut old).unwrap_err().errno, rustix::io::Errno::FAULT);
    }
}
