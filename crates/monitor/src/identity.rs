//! What the monitor knows of itself and of `/proc`: its own part there, which is never a program's, and who descends from it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat};
use rustix::io::Errno;

/// What the monitor knows of itself.
#[derive(Debug)]
pub(crate) struct MonitorIdentity {
    /// Its process.
    pub(crate) process: i32,
    descriptors: OwnedFd,
    proc: Stat,
}

impl MonitorIdentity {
    /// The calling process is the monitor.
    ///
    /// # Errors
    /// Where `/proc` is not there.
    pub(crate) fn new() -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            process: rustix::process::getpid().as_raw_pid(),
            descriptors: rustix::fs::open("/proc/self/fd", flags, Mode::empty())?,
            proc: rustix::fs::stat("/proc")?,
        })
    }

    /// `/proc/self/fd`.
    pub(crate) fn descriptors(&self) -> BorrowedFd<'_> {
        self.descriptors.as_fd()
    }

    /// Where the kernel says a file is.
    ///
    /// # Errors
    /// Those of readlink(2).
    pub(crate) fn path_of(&self, file: &impl AsRawFd) -> Result<Vec<u8>, Errno> {
        let mut number = [0; 16];
        let number = decimal(file.as_raw_fd(), &mut number);
        rustix::fs::readlinkat(&self.descriptors, number, Vec::with_capacity(128))
            .map(|path| path.into_bytes())
    }

    pub(crate) fn is_proc(&self, stat: &Stat) -> bool {
        stat.st_dev == self.proc.st_dev
    }

    pub(crate) fn is_proc_root(&self, stat: &Stat) -> bool {
        self.is_proc(stat) && stat.st_ino == self.proc.st_ino
    }

    pub(crate) fn is_own_path(&self, path: &[u8]) -> bool {
        process_in(path).is_some_and(|(process, _)| process == self.process)
    }

    /// Whether a number is one of the monitor's threads.
    pub(crate) fn is_own_thread(&self, number: i32) -> bool {
        number == self.process
            || rustix::fs::statat(CWD, format!("/proc/{}/task/{number}", self.process), AtFlags::empty())
                .is_ok()
    }
}

/// A descriptor's number as text.
pub(crate) fn decimal(number: i32, text: &mut [u8; 16]) -> &[u8] {
    let mut rest = number.unsigned_abs();
    let mut at = text.len();
    loop {
        at -= 1;
        text[at] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
        if rest == 0 {
            return &text[at..];
        }
    }
}

/// The number in `/proc/NUMBER/rest`, and the rest.
pub(crate) fn process_in(path: &[u8]) -> Option<(i32, &[u8])> {
    let rest = path.strip_prefix(b"/proc/")?;
    let end = rest.iter().position(|&byte| byte == b'/').unwrap_or(rest.len());
    let number = std::str::from_utf8(&rest[..end]).ok()?.parse().ok()?;
    Some((number, rest.get(end + 1..).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names() {
        assert_eq!(decimal(0, &mut [0; 16]), b"0");
        assert_eq!(decimal(1234, &mut [0; 16]), b"1234");
        assert_eq!(process_in(b"/proc/12/fd/3"), Some((12, b"fd/3".as_slice())));
        assert_eq!(process_in(b"/proc/12"), Some((12, b"".as_slice())));
        assert_eq!(process_in(b"/proc/sys/x"), None);
    }
}
