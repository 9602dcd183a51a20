//! Timers and pressure as file descriptors.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use rustix::time::{timerfd_create, timerfd_settime};

/// A periodic timer that can be stopped.
#[derive(Debug)]
pub(super) struct Ticker {
    pub(super) fd: OwnedFd,
    length: Duration,
    runs: bool,
}

impl Ticker {
    pub(super) fn new(length: Duration) -> Result<Self, Errno> {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        Ok(Self { fd, length, runs: false })
    }

    /// Starts or stops it: no tracee, no tick.
    pub(super) fn run(&mut self, runs: bool) {
        if runs == self.runs {
            return;
        }
        let length = if runs { self.length } else { Duration::ZERO };
        let time = Timespec {
            tv_sec: i64::try_from(length.as_secs()).unwrap_or(1),
            tv_nsec: length.subsec_nanos().into(),
        };
        let setting = Itimerspec { it_interval: time, it_value: time };
        if timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &setting).is_ok() {
            self.runs = runs;
        }
    }

    /// Returns whether it has fired since this was asked last.
    pub(super) fn has_fired(&self) -> bool {
        let mut count = [0; 8];
        rustix::io::read(&self.fd, &mut count).is_ok()
    }
}

/// Opens a file that is readable with priority when tasks stall for 15% of two seconds (the kernel's documentation, accounting/psi): the
/// window that users without privilege may take, too. `None` where the kernel has no such file, or does not permit it.
pub(super) fn pressure(resource: &str) -> Option<File> {
    let mut file = File::options().read(true).write(true).open(format!("/proc/pressure/{resource}")).ok()?;
    file.write_all(b"some 300000 2000000\0").ok()?;
    Some(file)
}
