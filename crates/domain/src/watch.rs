//! The watcher: a thread of the domain that ends the domain when main dies, and makes the kernel notify main when the
//! domain dies.
//!
//! `PR_SET_PDEATHSIG` would follow the *thread* that forked, which may end long before the program does. So the watcher
//! polls main's pidfd, which main opened itself before the fork: there is no moment at which main could die unseen. The
//! domain may compute, hang or sleep meanwhile.
//!
//! It is a bare clone(2): libc knows nothing of it, so the domain stays single-threaded in libc's eyes. It shares the
//! creator's thread-local storage and hence **must not touch any**: no errno, no allocation, no panic, no std; only
//! system calls made directly. It blocks all signals, so that no handler ever runs on it.
//!
//! It needs no privileges, and gives up its own at once: the kernel keeps credentials per thread, so those of a domain
//! that turns into an ordinary user's would stay behind on the watcher, a memory write away.
//!
//! For the other direction it holds a robust futex (get_robust_list(2)): when its thread dies, as all threads do when a
//! process dies, the kernel flags the word and wakes a waiter.

use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::os::fd::{BorrowedFd, RawFd};

use orrery_sys::{PAGE, PageRange};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;
use syscalls::{Sysno, syscall};

use crate::{Error, Result};

const STACK: usize = 4 * PAGE;
/// A thread waits on the word: without it the kernel flags but does not wake (`FUTEX_WAITERS`).
const WAITERS: u32 = 0x8000_0000;

/// `struct robust_list_head` with one entry.
#[repr(C)]
struct RobustList {
    first: *const Entry,
    offset: isize,
    pending: *const Entry,
}

#[repr(C)]
struct Entry {
    next: *const c_void,
}

/// What the watcher needs; made before the fork.
#[derive(Debug)]
pub struct Watcher {
    stack: NonNull<u8>,
    main: RawFd,
    mark: *const AtomicU32,
    source: Option<EventSource>,
    /// 1 once its thread has given up its privileges, and has on its own stack all that it needs.
    settled: AtomicU32,
}

/// A descriptor that a watcher polls beside its own.
#[derive(Clone, Copy, Debug)]
pub struct EventSource {
    /// A descriptor of the domain's.
    pub fd: RawFd,
    /// Called on the watcher's thread, with `with`, whenever the descriptor is readable; it must see to it that the
    /// descriptor is not readable any more, and is bound by the rules at the top of this file.
    pub on_readable: unsafe extern "C" fn(with: *const c_void),
    /// What it is called with.
    pub with: *const c_void,
    /// Called on the watcher's thread, with `with`, when nothing has happened for as long as it said, in milliseconds;
    /// first at once. Bound by the same rules.
    pub on_idle: Option<unsafe extern "C" fn(with: *const c_void) -> i32>,
}

// SAFETY: the stack belongs to the watcher, which only runs in the child; the rest are plain values.
unsafe impl Send for Watcher {}
// SAFETY: no method changes the watcher through a shared reference.
unsafe impl Sync for Watcher {}

impl Watcher {
    /// Makes room for its stack. `main` is main's pidfd, which must stay open in the child; one that is closed there ends the domain.
    ///
    /// # Safety
    /// `mark` is null, or a word that stays mapped, in the child, for as long as the domain lives: the kernel writes to it.
    ///
    /// # Errors
    /// [`Error::System`]: out of memory or address space.
    pub unsafe fn prepare(main: RawFd, mark: *const AtomicU32) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping replaces no mapping.
        let stack = unsafe {
            rustix::mm::mmap_anonymous(core::ptr::null_mut(), STACK, protection, MapFlags::PRIVATE)
        }
        .map_err(|e| Error::system("mmap(a stack)", STACK, e))?;
        let stack = NonNull::new(stack.cast()).ok_or(Error::system("mmap(a stack)", STACK, Errno::NOMEM))?;
        Ok(Self { stack, main, mark, source: None, settled: AtomicU32::new(0) })
    }

    /// Lets it listen to something else, too.
    ///
    /// # Safety
    /// `source.on_readable` and `source.on_idle` keep to the rules at the top of this file, and may be called with
    /// `source.with` for as long as the domain lives.
    pub unsafe fn listen(&mut self, source: EventSource) {
        self.source = Some(source);
    }

    /// Returns its stack: its thread writes there whatever the domain does.
    pub fn stack(&self) -> PageRange {
        let start = self.stack.as_ptr().expose_provenance();
        PageRange { start, end: start + STACK }
    }

    /// Starts it in the calling process, the domain; gives its thread's number. Signals must be blocked. Once it has returned,
    /// the thread uses nothing but its stack and what its event source names: it blocks the signal of a fault, so memory that
    /// the domain takes away from itself, as the checking mode of orbits does, would end the domain. Async-signal-safe.
    ///
    /// # Errors
    /// Those of clone(2).
    pub fn start(&self) -> core::result::Result<i32, Errno> {
        // SAFETY: the top of our own stack area.
        let top = unsafe { self.stack.as_ptr().add(STACK) };
        let flags = libc::CLONE_VM
            | libc::CLONE_FS
            | libc::CLONE_FILES
            | libc::CLONE_SIGHAND
            | libc::CLONE_THREAD
            | libc::CLONE_SYSVSEM;
        let argument = core::ptr::from_ref(self).cast_mut().cast::<c_void>();
        // In a child of a domain it is as the domain's own thread left it.
        self.settled.store(0, Ordering::SeqCst);
        // SAFETY: the thread runs on a stack of its own, and on `self` until it says that it is settled, for
        // which this waits.
        let result = unsafe { libc::clone(watch, top.cast(), flags, argument) };
        // clone(3) sets errno on failure, which we read at once on our own thread.
        if result < 0 {
            return Err(last_errno());
        }
        let stack = self.stack();
        STACK_START.store(stack.start, Ordering::SeqCst);
        while self.settled.load(Ordering::SeqCst) == 0 {
            let _ = futex::wait(&self.settled, futex::Flags::PRIVATE, 0, None);
        }
        Ok(result)
    }
}

/// Where the stack of this process' watcher starts; 0 without one.
static STACK_START: AtomicUsize = AtomicUsize::new(0);

/// Returns the stack of the calling process' watcher, if it is a domain: its thread writes there whatever the domain
/// does.
pub fn watcher_stack() -> Option<PageRange> {
    let start = STACK_START.load(Ordering::SeqCst);
    (start != 0).then_some(PageRange { start, end: start + STACK })
}

/// Returns the errno of libc's last failed call.
pub fn last_errno() -> Errno {
    let raw = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    if raw > 0 { Errno::from_raw_os_error(raw) } else { Errno::AGAIN }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // SAFETY: our own mapping; in main nothing ever runs on it, and in a domain the watcher is never dropped.
        let _ = unsafe { rustix::mm::munmap(self.stack.as_ptr().cast(), STACK) };
    }
}

/// Who the watcher is instead of a privileged user: one that no system gives out, for a process that has the same may
/// signal it. The second one is for user namespaces (user_namespaces(7)) that have no such high numbers.
const NOBODY: [u32; 2] = [0xffff_fff0, 65533];

const VERSION: u32 = 0x2008_0522;

/// Returns whether the calling thread may do more than an ordinary user's.
fn is_privileged() -> bool {
    let header = [VERSION, 0];
    let mut sets = [[0_u32; 3]; 2];
    // SAFETY: the kernel reads the header and writes two sets of effective, permitted and inheritable capabilities.
    let known = unsafe { syscall!(Sysno::capget, header.as_ptr(), sets.as_mut_ptr()) };
    known.is_err()
        || sets != [[0; 3]; 2]
        || rustix::process::geteuid().is_root()
        || rustix::process::getuid().is_root()
}

/// Gives the calling thread that user, without any capability, where it is privileged.
fn give_up_privileges() {
    if !is_privileged() {
        return;
    }
    let header = [VERSION, 0];
    // A change of users closes the whole process to debuggers; that is not for us to decide.
    let dumpable = rustix::process::dumpable_behavior();
    // SAFETY: these change who the calling thread is; an empty list is read, and two empty sets.
    unsafe {
        let _ = syscall!(Sysno::setgroups, 0, 0);
        let _ = NOBODY.iter().any(|id| syscall!(Sysno::setresgid, *id, *id, *id).is_ok());
        let _ = NOBODY.iter().any(|id| syscall!(Sysno::setresuid, *id, *id, *id).is_ok());
        let _ = syscall!(Sysno::capset, header.as_ptr(), [[0_u32; 3]; 2].as_ptr());
    }
    if let Ok(dumpable) = dumpable
        && rustix::process::dumpable_behavior() != Ok(dumpable)
    {
        let _ = rustix::process::set_dumpable_behavior(dumpable);
    }
}

/// Runs in the watcher's thread. It shares our thread-local storage: see the top of this file.
extern "C" fn watch(argument: *mut c_void) -> c_int {
    // SAFETY: `start` passes itself, which is there until this is settled.
    let watcher = unsafe { &*argument.cast::<Watcher>() };
    let (main, mark, mut source) = (watcher.main, watcher.mark, watcher.source);
    // Asked now, not when the descriptor is found closed: that may be found at main's death, by who was orphaned
    // before.
    let parent = rustix::process::getppid();
    give_up_privileges();
    let settled = &raw const watcher.settled;
    watcher.settled.store(1, Ordering::SeqCst);
    // SAFETY: wakes who waits at an address. Nothing is read there, and memory that is gone by now is no failure.
    let _ = unsafe { syscall!(Sysno::futex, settled, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1) };
    let mut list = RobustList { first: core::ptr::null(), offset: 0, pending: core::ptr::null() };
    let mut entry = Entry { next: core::ptr::null() };
    if !mark.is_null() {
        entry.next = (&raw const list).cast();
        list.first = &raw const entry;
        list.offset = mark.addr().wrapping_sub((&raw const entry).addr()).cast_signed();
        // SAFETY: the list lives on this stack for as long as the thread.
        let set = unsafe { syscall!(Sysno::set_robust_list, &raw const list, size_of::<RobustList>()) };
        if set.is_ok() {
            let own = rustix::thread::gettid().as_raw_pid().unsigned_abs();
            // SAFETY: the word is in memory shared with main, mapped for good in this process.
            unsafe { &*mark }.store(own | WAITERS, Ordering::SeqCst);
        }
    }
    // SAFETY: main's pidfd was open at the fork. Should the program close it, poll says so below.
    let main = unsafe { BorrowedFd::borrow_raw(main) };
    let mut idle = None;
    loop {
        // SAFETY: the source's descriptor was open at the fork. If the program closes it, poll reports that
        // below.
        let other = source.map_or(main, |source| unsafe { BorrowedFd::borrow_raw(source.fd) });
        let mut both =
            [PollFd::from_borrowed_fd(main, PollFlags::IN), PollFd::from_borrowed_fd(other, PollFlags::IN)];
        let on_idle = source.and_then(|source| Some((source.on_idle?, source.with)));
        if on_idle.is_some() && idle.is_none() {
            idle = Some(rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 });
        }
        let Ok(found) = rustix::event::poll(&mut both, idle.as_ref().filter(|_| on_idle.is_some())) else {
            continue;
        };
        if found == 0 {
            if let Some((on_idle, with)) = on_idle {
                // SAFETY: whoever called `listen` promised that the function may be called with `with` in
                // this thread (# Safety there).
                let milliseconds = i64::from(unsafe { on_idle(with) }.max(1));
                let (tv_sec, tv_nsec) = (milliseconds / 1000, milliseconds % 1000 * 1_000_000);
                idle = Some(rustix::time::Timespec { tv_sec, tv_nsec });
            }
            continue;
        }
        // The program closed or replaced our descriptor: then the only sign left is our parent's death.
        if both[0].revents().contains(PollFlags::NVAL) {
            break;
        }
        if both[0].revents().contains(PollFlags::IN) {
            // SAFETY: ends the whole process, which is what this thread is for.
            let _ = unsafe { syscall!(Sysno::exit_group, 0) };
        }
        match source {
            Some(_) if both[1].revents().contains(PollFlags::NVAL) => source = None,
            Some(source) if !both[1].revents().is_empty() => {
                // SAFETY: whoever called `listen` promised that the function may be called with `with` in
                // this thread (# Safety there).
                unsafe { (source.on_readable)(source.with) };
            }
            _ => {}
        }
    }
    let mut sleep = rustix::time::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    while rustix::process::getppid() == parent {
        // SAFETY: sleeps; the kernel reads one timespec.
        let _ = unsafe { syscall!(Sysno::nanosleep, &raw mut sleep, 0) };
    }
    // SAFETY: ends this process, which is the watcher's own.
    let _ = unsafe { syscall!(Sysno::exit_group, 0) };
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a child: starts a watcher and takes the memory away in which it was prepared, a page. On one CPU, on which the
    /// watcher's thread has not run yet.
    fn start_and_take_away(page: *mut Watcher) -> ! {
        // SAFETY: a child with one thread; the CPU set and the mapping are its own.
        unsafe {
            let mut one: libc::cpu_set_t = core::mem::zeroed();
            libc::CPU_SET(usize::try_from(libc::sched_getcpu()).unwrap_or(0), &mut one);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const one);
            // No privileges, and so none for which to wait until they are given up.
            if rustix::process::geteuid().is_root() {
                libc::setresuid(65534, 65534, 65534);
            }
            let started = (*page).start();
            let taken = libc::mprotect(page.cast(), PAGE, libc::PROT_NONE);
            let mut sleep = libc::timespec { tv_sec: 0, tv_nsec: 2_000_000 };
            libc::nanosleep(&raw const sleep, &raw mut sleep);
            libc::_exit(i32::from(started.is_err() || taken != 0))
        }
    }

    #[test]
    fn a_watcher_that_has_started_needs_no_memory_but_its_stack() {
        let main =
            rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty());
        let main = main.unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping replaces no mapping.
        let page = unsafe {
            rustix::mm::mmap_anonymous(core::ptr::null_mut(), PAGE, protection, MapFlags::PRIVATE).unwrap()
        };
        // SAFETY: a null mark stands for none, so that nothing has to outlive the watcher.
        let watcher =
            unsafe { Watcher::prepare(std::os::fd::AsRawFd::as_raw_fd(&main), core::ptr::null()) }.unwrap();
        // SAFETY: fresh memory with room for it, which is page-aligned.
        unsafe { page.cast::<Watcher>().write(watcher) };
        for round in 0..200 {
            let mask = orrery_sys::signals::block_all();
            // SAFETY: the child makes system calls only.
            let pid = match unsafe { libc::fork() } {
                0 => start_and_take_away(page.cast()),
                pid => pid,
            };
            orrery_sys::signals::set_mask(mask);
            let mut status = 0;
            // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            assert_eq!(status, 0, "round {round}: by signal {}", libc::WTERMSIG(status));
        }
        // SAFETY: written above, and used nowhere else.
        drop(unsafe { page.cast::<Watcher>().read() });
        // SAFETY: the test mapped the page itself, and nothing refers to it any more.
        unsafe { rustix::mm::munmap(page, PAGE).unwrap() };
    }
}
