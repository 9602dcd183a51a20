//! Replacing bytes of code that other threads may be executing.
//!
//! The page is not written to: a copy with the new bytes in it, already executable, is moved over it in one `mremap`. Threads see
//! the old page or the new one; one that fetches in between faults and waits in the kernel. No page is writable and executable at
//! any time.

use crate::executive::abi::syscall::{call, failed};
use crate::nr;

pub(crate) const PAGE: u64 = 4096;

const PROT_READ_WRITE: u64 = 3;

const PROT_READ_EXEC: u64 = 5;

const MAP_PRIVATE_ANONYMOUS: u64 = 0x22;

const MREMAP_MAYMOVE_FIXED: u64 = 3;

/// Replaces a page of code by a copy in which other bytes are at `at`.
///
/// # Safety
/// The page is readable and executable, nobody changes it, and `at..` is in it.
pub(crate) unsafe fn with_bytes(page: u64, at: u64, bytes: &[u8]) -> bool {
    // SAFETY: the scratch page is ours until it is moved; the move replaces a mapping of the same kind. `mremap` looks
    // for its limits before it unmaps anything.
    unsafe {
        let flags = MAP_PRIVATE_ANONYMOUS;
        let scratch = call(nr::mmap, [0, PAGE, PROT_READ_WRITE, flags, u64::MAX, 0]);
        if failed(scratch) {
            return false;
        }
        let scratch = scratch.cast_unsigned();
        let from = core::ptr::with_exposed_provenance::<u8>(page as usize);
        let to = core::ptr::with_exposed_provenance_mut::<u8>(scratch as usize);
        core::ptr::copy_nonoverlapping(from, to, PAGE as usize);
        core::ptr::copy_nonoverlapping(bytes.as_ptr(), to.add((at - page) as usize), bytes.len());
        let protected = call(nr::mprotect, [scratch, PAGE, PROT_READ_EXEC, 0, 0, 0]);
        let moved = if failed(protected) {
            protected
        } else {
            call(nr::mremap, [scratch, PAGE, PAGE, MREMAP_MAYMOVE_FIXED, page, 0])
        };
        if failed(moved) {
            call(nr::munmap, [scratch, PAGE, 0, 0, 0, 0]);
        }
        !failed(moved)
    }
}
