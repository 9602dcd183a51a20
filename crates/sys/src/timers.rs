//! Interval timers and POSIX timers (setitimer(2), timer_create(2)).

use rustix::fs::{CWD, Mode, OFlags};
use syscalls::{Sysno, syscall};

use std::os::fd::OwnedFd;

use crate::descriptors::raise;
use crate::process::read_from_start;
use crate::{Error, Result};

/// Microseconds until a timer fires, and from then on between firings; 0 is "not at all".
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interval {
    period_seconds: i64,
    period_microseconds: i64,
    rest_seconds: i64,
    rest_microseconds: i64,
}

impl Interval {
    /// Returns whether the timer is going to fire.
    pub fn is_armed(&self) -> bool {
        self.rest_seconds != 0 || self.rest_microseconds != 0
    }
}

/// The three interval timers of a process.
pub const WHICH: [i32; 3] = [libc::ITIMER_REAL, libc::ITIMER_VIRTUAL, libc::ITIMER_PROF];

/// Returns the state of interval timer `which`.
pub fn interval(which: i32) -> Interval {
    let mut value = Interval::default();
    // SAFETY: the kernel writes one `struct itimerval`; for the three valid numbers the call cannot fail.
    let _ = unsafe { syscall!(Sysno::getitimer, which, &raw mut value) };
    value
}

/// Sets interval timer `which`.
pub fn set_interval(which: i32, value: &Interval) {
    // SAFETY: the kernel reads one `struct itimerval`; what it got from `interval` it takes back.
    let _ = unsafe { syscall!(Sysno::setitimer, which, core::ptr::from_ref(value), 0) };
}

/// A POSIX timer's number in this process.
pub type TimerId = i32;

/// Makes a timer on the monotonic clock that sends `signal` to thread `thread` of this process, with `value` in
/// `si_value`.
///
/// # Errors
/// `EAGAIN` where no more timers may be made.
pub fn create(signal: i32, thread: i32, value: usize) -> Result<TimerId> {
    create_on(libc::CLOCK_MONOTONIC, signal, thread, value)
}

/// Makes a timer on the CPU time of the calling thread that sends `signal` to thread `thread` of this process, with `value`
/// in `si_value`. The kernel looks at such timers at its own tick, 1 to 10 ms.
///
/// # Errors
/// `EAGAIN` where no more timers may be made.
pub fn create_for_cpu_time(signal: i32, thread: i32, value: usize) -> Result<TimerId> {
    create_on(libc::CLOCK_THREAD_CPUTIME_ID, signal, thread, value)
}

fn create_on(clock: libc::clockid_t, signal: i32, thread: i32, value: usize) -> Result<TimerId> {
    /// `struct sigevent`, 64 bytes.
    #[repr(C)]
    struct Event {
        value: usize,
        signal: i32,
        notify: i32,
        thread: i32,
        rest: [i32; 11],
    }
    let event = Event { value, signal, notify: libc::SIGEV_THREAD_ID, thread, rest: [0; 11] };
    let mut id: TimerId = 0;
    // SAFETY: the kernel reads one event and writes one number.
    unsafe { syscall!(Sysno::timer_create, clock, &raw const event, &raw mut id) }
        .map_err(|e| Error::raw("timer_create", 0, e))?;
    Ok(id)
}

/// Arms timer `id` to fire once, `nanoseconds` from now; 0 disarms it.
///
/// # Errors
/// `EINVAL` where there is no such timer.
pub fn arm(id: TimerId, nanoseconds: u64) -> Result<()> {
    let wait = [0_u64, 0, nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000];
    // SAFETY: the kernel reads one `struct itimerspec`: period and rest, seconds and nanoseconds each.
    unsafe { syscall!(Sysno::timer_settime, id, 0, wait.as_ptr(), 0) }
        .map_err(|e| Error::raw("timer_settime", usize::try_from(id).unwrap_or(0), e))?;
    Ok(())
}

/// Deletes timer `id`.
///
/// # Errors
/// `EINVAL` where there is no such timer.
pub fn delete(id: TimerId) -> Result<()> {
    // SAFETY: deleting a kernel timer touches no memory.
    unsafe { syscall!(Sysno::timer_delete, id) }
        .map_err(|e| Error::raw("timer_delete", usize::try_from(id).unwrap_or(0), e))?;
    Ok(())
}

/// `/proc/self/timers`, kept open: the POSIX timers of this process.
#[derive(Debug)]
pub struct PosixTimers {
    fd: OwnedFd,
}

impl PosixTimers {
    /// Opens the calling process' list.
    ///
    /// # Errors
    /// `ENOENT` on kernels built without that file.
    pub fn open() -> Result<Self> {
        rustix::fs::openat(CWD, c"/proc/self/timers", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map(|fd| Self { fd: raise(fd) })
            .map_err(|e| Error::new("open /proc/self/timers", 0, e))
    }

    /// Calls `each` with the number of every timer.
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn for_each(&self, mut each: impl FnMut(TimerId)) -> Result<()> {
        // Each timer begins with a line "ID: number"; other lines have other words before the colon.
        let mut line = [0_u8; 32];
        let mut length = 0;
        read_from_start(&self.fd, "pread /proc/self/timers", |byte| {
            if byte != b'\n' {
                if length < line.len() {
                    line[length] = byte;
                    length += 1;
                }
                return;
            }
            let id =
                line[..length].strip_prefix(b"ID: ").and_then(|n| core::str::from_utf8(n).ok()?.parse().ok());
            id.into_iter().for_each(&mut each);
            length = 0;
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_is_listed_until_it_is_deleted() {
        let list = || {
            let mut ids = Vec::new();
            PosixTimers::open().unwrap().for_each(|id| ids.push(id)).unwrap();
            ids
        };
        let thread = rustix::thread::gettid().as_raw_pid();
        let id = create(libc::SIGURG, thread, 7).unwrap();
        arm(id, 3_600_000_000_000).unwrap();
        assert!(list().contains(&id));
        delete(id).unwrap();
        assert!(!list().contains(&id));
        assert_eq!(delete(id).unwrap_err().errno, rustix::io::Errno::INVAL);
    }
}
