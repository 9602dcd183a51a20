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

/// Set to `copied`, has each program get a copy of its own, as on a kernel that does not let segments be executed.
const VARIABLE: &str = "ORRERY_EXECUTIVE";
/// Read and execute, for all.
const MODE: u16 = 0o555;
const SHM_EXEC: c_int = 0o100_000;
/// How tracees attach it, in place of what is mapped there.
pub(crate) const ATTACH: c_int = libc::SHM_REMAP | SHM_EXEC | libc::SHM_RDONLY;

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
    /// Shares whole pages of code. `None` where this kernel or user does not allow that: they are copied then.
    pub(crate) fn share(pages: &[u8]) -> Option<Self> {
        if env::var_os(VARIABLE).is_some_and(|value| value == "copied") {
            return None;
        }
        Self::try_share(pages).ok()
    }

    fn try_share(pages: &[u8]) -> io::Result<Self> {
        // SAFETY: the segment is new, as long as what is copied there, and marked for removal as soon as it is attached for good.
        unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, pages.len(), libc::IPC_CREAT | 0o700);
            if id < 0 {
                return Err(io::Error::last_os_error());
            }
            let code = attach(id, 0).and_then(|written| {
                ptr::copy_nonoverlapping(pages.as_ptr(), written.as_ptr(), pages.len());
                libc::shmdt(written.as_ptr().cast());
                let mut status: libc::shmid_ds = std::mem::zeroed();
                libc::shmctl(id, libc::IPC_STAT, &raw mut status);
                status.shm_perm.mode = MODE;
                if libc::shmctl(id, libc::IPC_SET, &raw mut status) != 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(Self { id, at: attach(id, SHM_EXEC | libc::SHM_RDONLY)? })
            });
            libc::shmctl(id, libc::IPC_RMID, ptr::null_mut());
            code
        }
    }

    /// The segment's number.
    pub(crate) fn id(&self) -> c_int {
        self.id
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
        let mut page = vec![0_u8; 4096];
        page[..6].copy_from_slice(&[0xb8, 7, 0, 0, 0, 0xc3]);
        let code = SharedCode::try_share(&page).unwrap();
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
            assert_eq!(libc::shmctl(code.id(), libc::IPC_STAT, &raw mut status), 0);
            status
        };
        assert_eq!(status.shm_perm.mode & 0o777, MODE);
        let id = code.id();
        drop(code);
        // SAFETY: the structure was filled by the kernel, and is as large as it wants.
        let gone = unsafe { libc::shmat(id, ptr::null(), SHM_EXEC | libc::SHM_RDONLY) };
        assert_eq!(gone.addr(), usize::MAX, "it is gone with the last who had it");
    }
}
