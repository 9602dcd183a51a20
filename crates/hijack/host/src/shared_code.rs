//! The executive's code: once in memory, for all tracees of a run.
//!
//! Nothing in an image's first pages depends on where it is. Copied into each program they would be the most expensive part of
//! executing one: thirty pages to allocate, fill, hand on to each child of a fork, and free. So they are a System V segment that
//! programs attach: like the shared page (see `orrery_hijack_image::shared_page`) it takes one system call, no descriptor and no path. It may be
//! attached by everybody, and written to by nobody: who may change that (its owner, by `shmctl`) could as well trace the tracees.

use std::env;
use std::ffi::c_int;
use std::io;
use std::ptr::{self, NonNull};
use std::slice;

use crate::image::Image;

/// Set to `copied`, has each program get a copy of its own, as on a kernel that does not let segments be executed.
const VARIABLE: &str = "ORRERY_EXECUTIVE";
/// Read and execute, for all.
const MODE: u16 = 0o555;
const SHM_EXEC: c_int = 0o100_000;
/// How tracees attach it where nothing is mapped.
pub(crate) const ATTACH: c_int = SHM_EXEC | libc::SHM_RDONLY;
/// How they attach it in place of what is mapped there.
pub(crate) const REPLACE: c_int = libc::SHM_REMAP | ATTACH;

/// SharedCode in a segment, which is freed when nobody is attached any more.
#[derive(Debug)]
pub(crate) struct SharedCode {
    id: c_int,
    at: NonNull<u8>,
}

// SAFETY: nobody reads or writes through the address.
unsafe impl Send for SharedCode {}
// SAFETY: nobody reads or writes through the address, so threads may share it.
unsafe impl Sync for SharedCode {}

impl SharedCode {
    /// Shares the code of an image. `None` where this kernel or user does not allow that: it is copied then.
    pub(crate) fn share(image: &Image) -> Option<Self> {
        if env::var_os(VARIABLE).is_some_and(|value| value == "copied") {
            return None;
        }
        Self::try_share(image.shared_length(), |pages| image.copy_shared(pages)).ok()
    }

    /// Shares so many bytes, in whole pages, which a function fills that are zero.
    fn try_share(length: usize, fill: impl FnOnce(&mut [u8])) -> io::Result<Self> {
        // SAFETY: the segment is new, as long as the slice, and marked for removal as soon as it is attached for good.
        unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, length, libc::IPC_CREAT | 0o700);
            if id < 0 {
                return Err(io::Error::last_os_error());
            }
            let code = attach(id, 0).and_then(|written| {
                // All of them at once; where the kernel cannot, each at its first use.
                libc::madvise(written.as_ptr().cast(), length, libc::MADV_POPULATE_WRITE);
                fill(slice::from_raw_parts_mut(written.as_ptr(), length));
                libc::shmdt(written.as_ptr().cast());
                let mut status: libc::shmid_ds = std::mem::zeroed();
                libc::shmctl(id, libc::IPC_STAT, &raw mut status);
                status.shm_perm.mode = MODE;
                if libc::shmctl(id, libc::IPC_SET, &raw mut status) != 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(Self { id, at: attach(id, ATTACH)? })
            });
            libc::shmctl(id, libc::IPC_RMID, ptr::null_mut());
            code
        }
    }

    /// Returns the segment's number, as an argument of shmat(2).
    pub(crate) fn id(&self) -> u64 {
        u64::try_from(self.id).unwrap_or(0)
    }
}

impl Drop for SharedCode {
    fn drop(&mut self) {
        // SAFETY: attached since this was made; nobody knows the address.
        unsafe { libc::shmdt(self.at.as_ptr().cast()) };
    }
}

/// Attaches a segment somewhere.
///
/// # Safety
/// There is nothing that the caller would have to see to: memory is only added.
unsafe fn attach(id: c_int, flags: c_int) -> io::Result<NonNull<u8>> {
    // SAFETY: memory is only added, at an address that the kernel chooses.
    let at = unsafe { libc::shmat(id, ptr::null(), flags) };
    // A failing shmat gives an address of -1.
    NonNull::new(at.cast()).filter(|at| at.addr().get() != usize::MAX).ok_or_else(io::Error::last_os_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_code_is_executed_and_not_written_to() {
        // mov $7,%eax; ret
        let fill = |page: &mut [u8]| page[..6].copy_from_slice(&[0xb8, 7, 0, 0, 0, 0xc3]);
        let code = SharedCode::try_share(4096, fill).unwrap();
        // SAFETY: that is a function.
        let function: extern "C" fn() -> i32 = unsafe { std::mem::transmute(code.at) };
        assert_eq!(function(), 7);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let start = format!("{:x}-", code.at.addr());
        let line = maps.lines().find(|line| line.trim_start_matches('0').starts_with(&start)).unwrap();
        assert!(line.contains("r-xs"), "{line}");
        // SAFETY: asks, and looks at what is returned. A process with CAP_IPC_OWNER may do anything.
        let status = unsafe {
            let mut status: libc::shmid_ds = std::mem::zeroed();
            assert_eq!(libc::shmctl(code.id, libc::IPC_STAT, &raw mut status), 0);
            status
        };
        assert_eq!(status.shm_perm.mode & 0o777, MODE);
        let id = code.id;
        drop(code);
        // SAFETY: the structure was filled by the kernel, and is as large as it wants.
        let gone = unsafe { libc::shmat(id, ptr::null(), ATTACH) };
        assert_eq!(gone.addr(), usize::MAX, "it is gone with the last who had it");
    }
}
