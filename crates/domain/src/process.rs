//! A child process as a domain's owner sees it: is it alive, how did it end, end it.
//!
//! A process is known by its pidfd alone (pidfd_open(2)), never by its number, which may be another process's by the
//! time it is used. How it ended is *peeked* at (waitid(2), WNOWAIT): the program may want to reap its children itself,
//! and often does so with `waitpid(-1)`. Where it was faster than we, the pidfd still remembers the status on newer
//! kernels (PIDFD_GET_INFO with PIDFD_INFO_EXIT, Linux 6.15).
//!
//! Only where the program has closed the pidfd, as those do that close all descriptors, is the process ended by its number,
//! while the caller has a child of this number.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use orrery_sys::descriptors::{self, VerifiedFd};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use syscalls::{Sysno, syscall};

use crate::end::End;
use crate::gate::is_dead;
use crate::{Error, Result};

/// How long a killed process may take to end.
const DYING: Duration = Duration::from_secs(2);
/// How often it is asked whether it has, where that cannot be waited for.
const LOOK: Duration = Duration::from_millis(5);

/// A child of the calling process.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    pidfd: VerifiedFd,
    ours_to_reap: bool,
    leads_group: bool,
    creator: crate::forked::Creator,
}

impl Process {
    /// Takes hold of a child that cannot have ended unnoticed yet.
    pub(crate) fn hold(pid: Pid, ours_to_reap: bool) -> Result<Self> {
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())
            .map_err(|e| Error::system("pidfd_open", usize::try_from(pid.as_raw_pid()).unwrap_or(0), e))?;
        let pidfd = VerifiedFd::new(descriptors::raise(pidfd)).map_err(|e| Error::system("fstat", 0, e))?;
        let creator = crate::forked::Creator::here();
        Ok(Self { pid, pidfd, ours_to_reap, leads_group: false, creator })
    }

    /// Returns it as one that leads a process group of its own: what is left in the group ends with it.
    pub(crate) fn leading_group(self) -> Self {
        Self { leads_group: true, ..self }
    }

    /// Takes hold of a child like [`Process::hold`], where another process says which one it is.
    ///
    /// # Errors
    /// [`Error::System`]: `ECHILD` where the process is no child of the caller's.
    pub(crate) fn hold_child(pid: Pid, ours_to_reap: bool) -> Result<Self> {
        let process = Self::hold(pid, ours_to_reap)?;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        rustix::io::retry_on_intr(|| rustix::process::waitid(WaitId::PidFd(process.as_fd()), options))
            .map_err(|e| Error::system("waitid", usize::try_from(pid.as_raw_pid()).unwrap_or(0), e))?;
        Ok(process)
    }

    /// Returns its PID, for display.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns whether it still runs.
    pub fn is_alive(&self) -> bool {
        !is_dead(self.pidfd.unverified())
    }

    /// Returns how it ended; `None` while it runs. It is left for the program to reap.
    pub fn end(&self) -> Option<End> {
        if self.is_alive() {
            return None;
        }
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let peeked = rustix::io::retry_on_intr(|| {
            rustix::process::waitid(WaitId::PidFd(self.pidfd.unverified()), options)
        });
        Some(match peeked {
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (Some(status), _) => End::Exited { status },
                (None, Some(signal)) => End::Killed { signal },
                (None, None) => End::Unknown,
            },
            _ => remembered(self.pidfd.unverified()),
        })
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// [`Error::System`]: `ESRCH` where it is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.pidfd
            .verified()
            .and_then(|pidfd| rustix::process::pidfd_send_signal(pidfd, signal))
            .or_else(|errno| self.signal_by_number(signal, errno))
            .map_err(|e| Error::system("pidfd_send_signal", signal.as_raw().unsigned_abs() as usize, e))
    }

    /// Sends a signal where the program has closed the pidfd (`EBADF`): by number, as long as a child of ours has it.
    fn signal_by_number(&self, signal: Signal, errno: Errno) -> rustix::io::Result<()> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if errno != Errno::BADF || rustix::process::waitid(WaitId::Pid(self.pid), options).is_err() {
            return Err(errno);
        }
        rustix::process::kill_process(self.pid, signal)
    }

    /// Kills it, waits until it is dead, and reaps it where that is ours to do.
    pub fn kill(&self) {
        if !self.creator.is_here() {
            return;
        }
        let _ = self.signal(Signal::KILL);
        // Killing cannot be refused; only a process stuck inside the kernel takes its time, and we do not wait for
        // that.
        match self.pidfd.verified() {
            Ok(pidfd) => {
                let mut one = [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)];
                let timeout = rustix::time::Timespec::try_from(DYING).ok();
                let _ = rustix::io::retry_on_intr(|| rustix::event::poll(&mut one, timeout.as_ref()));
            }
            Err(_) => {
                let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
                let begin = std::time::Instant::now();
                while let Ok(None) = rustix::process::waitid(self.wait_id(), options)
                    && begin.elapsed() < DYING
                {
                    std::thread::sleep(LOOK);
                }
            }
        }
        self.reap();
    }

    fn wait_id(&self) -> WaitId<'_> {
        self.pidfd.verified().map_or(WaitId::Pid(self.pid), WaitId::PidFd)
    }

    /// Kills what the dead process forked and left in its process group. What moved to another group, or has other
    /// privileges than main, is out of reach.
    fn kill_group(&self) {
        /// `PIDFD_SIGNAL_PROCESS_GROUP` (linux/pidfd.h, Linux 6.9).
        const PROCESS_GROUP: usize = 1 << 2;
        let Ok(pidfd) = self.pidfd.verified() else { return };
        let (fd, signal) = (pidfd.as_raw_fd(), libc::SIGKILL);
        // SAFETY: sends a signal; no memory is passed.
        let sent = unsafe { syscall!(Sysno::pidfd_send_signal, fd, signal, 0, PROCESS_GROUP) };
        if !sent.is_err_and(|e| e.into_raw() == libc::EINVAL) {
            return;
        }
        // By number, on older kernels: it is nobody else's as long as the process has not been reaped.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if rustix::process::waitid(WaitId::PidFd(self.pidfd.unverified()), options).is_ok() {
            let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
        }
    }

    /// Reaps it where it is dead and that is ours to do. What is left of its process group is killed.
    pub fn reap(&self) {
        if self.leads_group && self.creator.is_here() && !self.is_alive() {
            self.kill_group();
        }
        if self.ours_to_reap && self.creator.is_here() {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            let _ = rustix::process::waitid(self.wait_id(), options);
        }
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.unverified()
    }
}

/// Returns how a dead process ended that the caller does not reap, as far as its pidfd remembers (Linux 6.15).
pub fn end_of(pidfd: BorrowedFd<'_>) -> End {
    remembered(pidfd)
}

/// Returns what the pidfd of a reaped process remembers of its end.
fn remembered(pidfd: BorrowedFd<'_>) -> End {
    /// `struct pidfd_info` (linux/pidfd.h) in its first published size, 64 bytes.
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        mask: u64,
        cgroup: u64,
        ids: [u32; 11],
        exit_code: i32,
    }
    const INFO_EXIT: u64 = 1 << 3;
    let mut info = Info { mask: INFO_EXIT, ..Info::default() };
    // _IOWR(0xFF, 11, struct pidfd_info)
    let request = 3_usize << 30 | size_of::<Info>() << 16 | 0xff << 8 | 11;
    // SAFETY: the kernel reads and writes as many bytes behind the pointer as the request's size field states.
    let asked = unsafe { syscall!(Sysno::ioctl, pidfd.as_raw_fd(), request, &raw mut info) };
    if asked.is_err() || info.mask & INFO_EXIT == 0 {
        return End::Unknown;
    }
    match info.exit_code & 0x7f {
        0 => End::Exited { status: info.exit_code >> 8 & 0xff },
        signal => End::Killed { signal },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(command: &str) -> (std::process::Child, Process) {
        let child = std::process::Command::new("sh").args(["-c", command]).spawn().unwrap();
        let process = Process::hold(Pid::from_child(&child), false).unwrap();
        (child, process)
    }

    fn ended(process: &Process) -> End {
        loop {
            if let Some(end) = process.end() {
                return end;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn ends_are_told_apart_and_left_to_the_program() {
        let (mut child, process) = hold("exit 7");
        assert_eq!(ended(&process), End::Exited { status: 7 });
        assert_eq!(child.wait().unwrap().code(), Some(7), "the status is still there");
        let after = process.end().unwrap();
        assert!(matches!(after, End::Exited { status: 7 } | End::Unknown), "{after}");

        let (mut child, process) = hold("kill -SEGV $$");
        assert_eq!(ended(&process), End::Killed { signal: 11 });
        assert_eq!(End::Killed { signal: 11 }.to_string(), "it was killed by SIGSEGV");
        child.wait().unwrap();
    }

    #[test]
    fn killing_ends_it() {
        let (mut child, process) = hold("sleep 100");
        assert_eq!(process.end(), None);
        process.kill();
        assert_eq!(process.end(), Some(End::Killed { signal: 9 }));
        child.wait().unwrap();
    }
}
