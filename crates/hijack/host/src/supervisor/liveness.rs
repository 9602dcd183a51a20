//! How tracees know that their supervisor is gone: the kernel says so.
//!
//! A thread of the supervisor owns a word of each shared page as it would own a robust lock (get_robust_list(2)). When it dies, however
//! that comes, the kernel marks the word. So nobody has to guess from how long an answer takes, which a busy machine or a debugger would
//! make wrong, nor ask for a process by its number, which is another in another PID namespace.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Release;

/// `struct robust_list_head`, and its one entry.
#[repr(C)]
struct Robust {
    first: *const Entry,
    offset: isize,
    pending: *const Entry,
    entry: Entry,
}

#[repr(C)]
struct Entry {
    next: *const c_void,
}

const HEAD_BYTES: usize = std::mem::offset_of!(Robust, entry);

/// Makes a word of memory that stays the sign of this thread's life, which ends with its process and owns no other robust lock.
pub(super) fn mark_alive(word: &AtomicU32) {
    let list = Box::leak(Box::new(Robust {
        first: ptr::null(),
        offset: 0,
        pending: ptr::null(),
        entry: Entry { next: ptr::null() },
    }));
    list.first = &raw const list.entry;
    list.entry.next = ptr::from_ref(list).cast();
    list.offset = word.as_ptr().addr().wrapping_sub((&raw const list.entry).addr()).cast_signed();
    // SAFETY: the list stays, and so does the word.
    let set = unsafe { libc::syscall(libc::SYS_set_robust_list, ptr::from_ref(list), HEAD_BYTES) };
    if set == 0 {
        word.store(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned(), Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Acquire;

    use orrery_hijack_image::request_slots::DEAD;

    use super::*;

    #[test]
    fn the_word_tells_of_a_death() {
        // SAFETY: new memory, which is shared with a child that does nothing but wait for its end.
        unsafe {
            let (protection, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
            let shared = libc::mmap(ptr::null_mut(), size_of::<AtomicU32>(), protection, flags, -1, 0);
            assert_ne!(shared, libc::MAP_FAILED);
            let word = &*shared.cast::<AtomicU32>();
            let child = libc::fork();
            if child == 0 {
                mark_alive(word);
                loop {
                    libc::pause();
                }
            }
            while word.load(Acquire) != child.cast_unsigned() {
                std::thread::yield_now();
            }
            assert_eq!(libc::kill(child, libc::SIGKILL), 0);
            assert_eq!(libc::waitpid(child, ptr::null_mut(), 0), child);
            assert_eq!(word.load(Acquire) & DEAD, DEAD);
            libc::munmap(shared, size_of::<AtomicU32>());
        }
    }
}
