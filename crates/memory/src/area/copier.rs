//! A forked copy of main that copies pages in main's stead.
//!
//! Where very much was written, copying it would hold main up for longer than a fork does: a fork copies page tables, a
//! five-hundredth of the memory. So main forks a *copier* that has every page as it was at that instant, goes on, and
//! the copier writes the pages into the memory file at its leisure. The orbit waits for its end before it runs the task.
//!
//! The copier runs on its stack, a list of runs and system calls. It has no signals, no descriptors but the two files,
//! and dies with main. It is invisible to a plain `wait`. What it does not copy, be it in areas or elsewhere, is left out of
//! it as far as that is cheaper than to fork it: [`others`] finds it.

mod others;

use std::os::fd::{AsRawFd, BorrowedFd};

use orrery_sys::{PAGE, PageRange, signals};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::process::{Pid, Signal, WaitOptions};

use super::Error;
use super::lock::Lock;

/// One run of pages to copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    /// Where it is in memory.
    pub(super) address: usize,
    /// Its first page in the mirror.
    pub(super) page: u32,
    /// Where it goes in the file.
    pub(super) to: u32,
    /// How many pages it has.
    pub(super) count: u32,
}

/// Jobs on memory of their own, which the copier takes along.
pub(super) struct Jobs {
    start: *mut Job,
    len: usize,
    bytes: usize,
}

// SAFETY: the memory is the list's own.
unsafe impl Send for Jobs {}
// SAFETY: a shared reference only reads the list, whose memory is its own.
unsafe impl Sync for Jobs {}

impl Jobs {
    /// Takes over a list.
    pub(super) fn new(jobs: &[Job]) -> Result<Self, Error> {
        let bytes = size_of_val(jobs).next_multiple_of(PAGE);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice; it has room for the jobs.
        unsafe {
            let start = mmap_anonymous(core::ptr::null_mut(), bytes, access, MapFlags::PRIVATE)
                .map_err(|errno| Error::Memory { bytes, errno })?
                .cast::<Job>();
            start.copy_from_nonoverlapping(jobs.as_ptr(), jobs.len());
            Ok(Self { start, len: jobs.len(), bytes })
        }
    }

    pub(super) fn as_slice(&self) -> &[Job] {
        // SAFETY: `new` wrote `len` jobs to `start`, whose mapping lives as long as the list, and nobody
        // writes to them since.
        unsafe { core::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        // SAFETY: the memory is the list's own.
        let _ = unsafe { munmap(self.start.cast(), self.bytes) };
    }
}

/// Only one thread at a time may leave mappings out of a fork, and no other fork may happen meanwhile.
static FORKING: Lock<others::Others> = Lock::new(others::Others::new());

/// Returns the lock around forks with less memory, for the handlers of other forks.
pub(super) fn lock() -> &'static Lock<others::Others> {
    &FORKING
}

/// A copier at work. Dropping it ends it.
pub(super) struct Copier {
    pid: Pid,
    jobs: Jobs,
    reaped: bool,
}

impl Copier {
    /// Forks one that does `jobs` on areas, most of which are in `arena`, writing to `file`, and then a 1 at byte `sign` of `signs`.
    pub(super) fn spawn(
        jobs: Jobs,
        arena: PageRange,
        file: BorrowedFd<'_>,
        signs: BorrowedFd<'_>,
        sign: u64,
    ) -> Result<Self, Error> {
        let mut others = FORKING.lock();
        let main = rustix::process::getpid();
        let mask = signals::block_all();
        let left_out = others.leave_out(jobs.as_slice(), arena);
        // SAFETY: the child has a copy of this stack and does nothing but system calls before it ends.
        let forked = unsafe { libc::syscall(libc::SYS_clone, 0_usize, 0_usize, 0_usize, 0_usize, 0_usize) };
        if forked == 0 {
            let status = copy_all(main, jobs.as_slice(), file, signs, sign);
            // SAFETY: the call takes a number and ends this child at once, with nothing of it run.
            unsafe { libc::syscall(libc::SYS_exit_group, status) };
        }
        let errno = Errno::from_io_error(&std::io::Error::last_os_error());
        drop(left_out);
        signals::set_mask(mask);
        match i32::try_from(forked).ok().and_then(Pid::from_raw) {
            Some(pid) => Ok(Self { pid, jobs, reaped: false }),
            None => Err(orrery_sys::Error::new("clone", 0, errno.unwrap_or(Errno::AGAIN)).into()),
        }
    }

    /// Returns its process.
    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns what it copies.
    pub(super) fn jobs(&self) -> &[Job] {
        self.jobs.as_slice()
    }

    /// Returns whether it has done all its work. It has ended afterwards in any case.
    pub(super) fn finish(&mut self) -> bool {
        let ended = rustix::process::waitpid(Some(self.pid), options(WaitOptions::NOHANG));
        match ended {
            Ok(Some((_, status))) => {
                self.reaped = true;
                status.exit_status() == Some(0)
            }
            _ => {
                self.end();
                false
            }
        }
    }

    fn end(&mut self) {
        if !self.reaped {
            // Our unreaped child: the number is its own.
            let _ = rustix::process::kill_process(self.pid, Signal::KILL);
            let options = options(WaitOptions::empty());
            let _ = rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(self.pid), options));
            self.reaped = true;
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.end();
    }
}

impl core::fmt::Debug for Copier {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Copier").field("pid", &self.pid).finish_non_exhaustive()
    }
}

/// Adds the flag without which wait(2) does not see the copier: it sends no signal when it ends.
fn options(more: WaitOptions) -> WaitOptions {
    WaitOptions::from_bits_retain(libc::__WALL.cast_unsigned()) | more
}

/// Runs in the copier, and returns its exit status.
fn copy_all(main: Pid, jobs: &[Job], file: BorrowedFd<'_>, signs: BorrowedFd<'_>, sign: u64) -> usize {
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    if rustix::process::getppid() != Some(main) {
        return 1;
    }
    let _ = rustix::thread::set_name(c"orrery-copier");
    close_others(file.as_raw_fd(), signs.as_raw_fd());
    for job in jobs {
        let mut done = 0;
        while done < job.count as usize * PAGE {
            let from = core::ptr::with_exposed_provenance::<u8>(job.address + done);
            // SAFETY: the area's pages are there in this process too, and nobody writes to them here.
            let bytes = unsafe { core::slice::from_raw_parts(from, job.count as usize * PAGE - done) };
            match rustix::io::pwrite(file, bytes, (job.to as usize * PAGE + done) as u64) {
                Ok(0) => return 2,
                Ok(written) => done += written,
                Err(Errno::INTR) => {}
                Err(_) => return 3,
            }
        }
    }
    match rustix::io::pwrite(signs, &1_u32.to_ne_bytes(), sign) {
        Ok(4) => 0,
        _ => 4,
    }
}

/// Closes every descriptor but two: connections that main closes must not stay open here.
fn close_others(one: i32, other: i32) {
    let (low, high) = (one.min(other).cast_unsigned(), one.max(other).cast_unsigned());
    for range in [0..low, low + 1..high, high + 1..u32::MAX] {
        if !range.is_empty() {
            // SAFETY: the child's own descriptors, which nothing in it uses.
            unsafe { libc::syscall(libc::SYS_close_range, range.start, range.end - 1, 0) };
        }
    }
}
