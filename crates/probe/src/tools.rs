//! What several probes need: fresh pages, a forked partner, small files. All of it fit for a forked child
//! (see the module `child`).

use std::ffi::{CStr, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, Ordering};

use linux_raw_sys::general::clone_args;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::ioctl::Opcode;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, waitpid};

use syscalls::{Sysno, syscall};

use crate::child::{exit, fork};

/// The size of a page that the probes count with.
pub(crate) const PAGE: usize = 4096;

/// Private anonymous pages of our own, readable and writable at first, gone when dropped.
pub(crate) struct Pages {
    start: NonNull<c_void>,
    len: usize,
}

impl Pages {
    /// Maps `count` fresh pages, none of them populated, that the kernel will not join into huge ones.
    pub(crate) fn small(count: usize) -> Result<Self, Errno> {
        let pages = Self::with(count * PAGE, MapFlags::PRIVATE)?;
        match pages.advise(0, count, Advice::LinuxNoHugepage) {
            // A kernel without huge pages does not know the advice against them.
            Ok(()) | Err(Errno::INVAL) => Ok(pages),
            Err(errno) => Err(errno),
        }
    }

    /// Maps `len` fresh bytes with more flags than [`MapFlags::PRIVATE`].
    pub(crate) fn with(len: usize, flags: MapFlags) -> Result<Self, Errno> {
        // SAFETY: without MAP_FIXED the kernel chooses a free place, so no other memory is affected.
        let start =
            unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        Ok(Self { start: NonNull::new(start).ok_or(Errno::FAULT)?, len })
    }

    /// Returns the address of a page.
    pub(crate) fn at(&self, page: usize) -> *mut c_void {
        self.start.as_ptr().wrapping_byte_add(page * PAGE)
    }

    /// Returns the address of a page as a number.
    pub(crate) fn address(&self, page: usize) -> u64 {
        self.at(page).expose_provenance() as u64
    }

    fn first_byte(&self, page: usize) -> &AtomicU8 {
        debug_assert!(page * PAGE < self.len);
        // SAFETY: the page is inside the mapping, which lives as long as `self`; an atomic byte may be shared. Probes
        // that take the access away again expect the fault.
        unsafe { AtomicU8::from_ptr(self.at(page).cast()) }
    }

    /// Writes to the first byte of a page.
    pub(crate) fn write(&self, page: usize, value: u8) {
        self.first_byte(page).store(value, Ordering::SeqCst);
    }

    /// Reads the first byte of a page.
    pub(crate) fn read(&self, page: usize) -> u8 {
        self.first_byte(page).load(Ordering::SeqCst)
    }

    /// madvise(2) of `count` pages from `page` on.
    pub(crate) fn advise(&self, page: usize, count: usize, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the pages are ours, and none of the advices that probes give makes an access unsound.
        unsafe { madvise(self.at(page), count * PAGE, advice) }
    }

    /// mprotect(2) of one page.
    pub(crate) fn protect(&self, page: usize, access: MprotectFlags) -> Result<(), Errno> {
        // SAFETY: the page is ours; who takes its access away expects the fault.
        unsafe { mprotect(self.at(page), PAGE, access) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing borrowed from `self` is left.
        let _ = unsafe { munmap(self.start.as_ptr(), self.len) };
    }
}

/// A child of the probe's own child, to be looked at, traced or answered; killed and reaped when dropped.
pub(crate) struct Partner {
    pid: Pid,
    reaped: bool,
}

impl Partner {
    /// Forks one that runs `life` and exits with its result.
    ///
    /// # Safety
    /// `life` keeps to async-signal-safe code.
    pub(crate) unsafe fn start(life: impl FnOnce() -> i32) -> Result<Self, Errno> {
        // SAFETY: the caller answers for `life`, and the child ends through `exit`.
        match unsafe { fork() }? {
            None => exit(life()),
            Some(pid) => Ok(Self { pid, reaped: false }),
        }
    }

    /// Forks one that sleeps until it is killed.
    pub(crate) fn asleep() -> Result<Self, Errno> {
        // SAFETY: the child calls pause(2) only, which is async-signal-safe.
        unsafe {
            Self::start(|| {
                loop {
                    libc::pause();
                }
            })
        }
    }

    /// Returns its process id.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Waits for its end and returns its exit status, if it ended by itself.
    pub(crate) fn exit_status(&mut self) -> Result<Option<i32>, Errno> {
        let ended = rustix::io::retry_on_intr(|| waitpid(Some(self.pid), WaitOptions::empty()))?;
        self.reaped = true;
        Ok(ended.map(|(_, status)| status).and_then(WaitStatus::exit_status))
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        if !self.reaped {
            let _ = kill_process(self.pid, Signal::KILL);
            let _ = self.exit_status();
        }
    }
}

/// Takes over the descriptor that a system call returned.
///
/// # Safety
/// Nobody else owns it.
pub(crate) unsafe fn owned(result: Result<usize, syscalls::Errno>) -> Result<OwnedFd, Errno> {
    let fd = result.map_err(|e| Errno::from_raw_os_error(e.into_raw()))?;
    let fd = i32::try_from(fd).map_err(|_| Errno::BADF)?;
    // SAFETY: the kernel just made the descriptor, and nobody else owns it (# Safety).
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// clone3(2) into a process with a copy of everything: `None` in the child, the child's id in the parent.
///
/// # Safety
/// As for [`fork`]; `args` ask for nothing that is shared with the child.
pub(crate) unsafe fn clone3(args: &mut clone_args) -> Result<Option<Pid>, Errno> {
    args.exit_signal = u64::from(libc::SIGCHLD.unsigned_abs());
    // SAFETY: the caller's promise; the kernel reads as much as is stated.
    let pid = unsafe { syscall!(Sysno::clone3, ptr::from_mut(args), size_of::<clone_args>()) };
    let pid = pid.map_err(|e| Errno::from_raw_os_error(e.into_raw()))?;
    Ok(i32::try_from(pid).ok().and_then(Pid::from_raw))
}

/// ioctl(2) with an argument that the kernel may change.
///
/// # Safety
/// `request` must read and write a `T` and nothing beyond, and its effect must be sound for the memory it names.
pub(crate) unsafe fn request<T>(
    fd: &OwnedFd,
    request: Opcode,
    argument: &mut T,
) -> Result<usize, syscalls::Errno> {
    // SAFETY: the caller's promise; the borrow keeps the argument valid.
    unsafe { syscall!(Sysno::ioctl, fd.as_raw_fd(), request, ptr::from_mut(argument)) }
}

/// Reads the start of a small file into `buffer`.
pub(crate) fn read_file<'b>(path: &CStr, buffer: &'b mut [u8]) -> Result<&'b [u8], Errno> {
    let file = openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match rustix::io::read(&file, rest) {
            Ok(0) => break,
            Ok(len) => filled += len,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(buffer.get(..filled).unwrap_or_default())
}

/// Writes `text` to an existing file in one go.
pub(crate) fn write_file(path: &CStr, text: &[u8]) -> Result<(), Errno> {
    let file = openat(CWD, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, text).map(drop)
}

/// Returns the number that follows `label` in `text`.
pub(crate) fn number_after(text: &[u8], label: &[u8]) -> Option<u64> {
    let mut rest = text;
    while !rest.starts_with(label) {
        rest = rest.get(1..)?;
    }
    leading_number(rest.get(label.len()..)?.trim_ascii_start())
}

/// Returns the number at the start of `text`.
pub(crate) fn leading_number(text: &[u8]) -> Option<u64> {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    std::str::from_utf8(text.get(..end)?).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_behind_their_label() {
        let text = b"Rss:   12 kB\nAnonHugePages:      2048 kB\nempty:\n";
        assert_eq!(number_after(text, b"AnonHugePages:"), Some(2048));
        assert_eq!(number_after(text, b"Rss:"), Some(12));
        assert_eq!(number_after(text, b"empty:"), None);
        assert_eq!(number_after(text, b"Swap:"), None);
        assert_eq!(leading_number(b"12 34"), Some(12));
        assert_eq!(leading_number(b""), None);
    }

    #[test]
    fn small_files_are_read_whole_or_cut() {
        let mut buffer = [0; 64];
        let text = read_file(c"/proc/self/comm", &mut buffer).unwrap();
        assert_eq!(text, std::fs::read("/proc/self/comm").unwrap());
        assert_eq!(read_file(c"/proc/self/status", &mut [0; 4]).unwrap(), b"Name");
        assert_eq!(read_file(c"/nowhere", &mut buffer), Err(Errno::NOENT));
    }

    #[test]
    fn a_partner_is_reaped_whatever_happens() {
        let sleeper = Partner::asleep().unwrap();
        let pid = sleeper.pid();
        drop(sleeper);
        assert_eq!(waitpid(Some(pid), WaitOptions::NOHANG).err(), Some(Errno::CHILD));
        // SAFETY: the child returns a number, and so runs async-signal-safe code only.
        let mut worker = unsafe { Partner::start(|| 7) }.unwrap();
        assert_eq!(worker.exit_status(), Ok(Some(7)));
    }
}
