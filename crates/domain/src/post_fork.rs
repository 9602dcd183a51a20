//! What a new process does before it may run the program's code.
//!
//! **Everything here runs between fork(2) and the hand-over, so it is async-signal-safe**: main may have had other
//! threads, and whatever lock they held stays held for ever in the child. System calls are made directly, on data that
//! was laid out before the fork; nothing allocates, locks, panics or touches libc's state.

use std::os::fd::RawFd;

use orrery_sys::signals::{self, Action};
use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::limits::Bounds;
use crate::scheduling;
use crate::setup_step::SetupStep;

/// Which of main's open files a domain keeps.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Descriptors {
    /// All descriptors stay open.
    #[default]
    Keep,
    /// These; the rest is closed.
    Only(Vec<RawFd>),
}

/// What becomes of main's signal dispositions in a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Signals {
    /// Handlers of main's do not run in the domain: what was caught gets its default disposition, and what the keyboard
    /// sends (SIGINT, SIGQUIT, SIGTSTP, SIGHUP) is ignored, since it is meant for main, with which the domain ends
    /// anyway. So is what a terminal sends to background process groups (SIGTTIN, SIGTTOU): the domain leads a group of
    /// its own, may write to the terminal, and reads EIO from it. Nothing is blocked.
    #[default]
    Fresh,
    /// Everything stays as main had it.
    Keep,
}

/// The choices, laid out for the child.
#[derive(Debug)]
pub(crate) struct PostForkSetup {
    pub(crate) bounds: Bounds,
    pub(crate) scheduling: scheduling::Prepared,
    pub(crate) signals: Signals,
    /// Sorted descriptors to keep; `None` for all.
    pub(crate) keep: Option<Vec<RawFd>>,
    /// The process' name, at most 15 bytes and a zero.
    pub(crate) name: [u8; 16],
}

impl PostForkSetup {
    /// Makes the calling process what it should be. Signals are blocked and stay so.
    pub(crate) fn apply(&self) -> Result<(), (SetupStep, Errno)> {
        let at = |step: SetupStep| move |errno: Errno| (step, errno);
        // A group of its own, so that main can end what the domain forks. A fresh child leads no session, so this
        // holds.
        let _ = rustix::process::setpgid(None, None);
        self.bounds.group.join().map_err(at(SetupStep::JoinGroup))?;
        self.bounds.set_process_limits().map_err(at(SetupStep::Limit))?;
        self.scheduling.set_class().map_err(at(SetupStep::Schedule))?;
        self.scheduling.set_cpus().map_err(at(SetupStep::ChooseCpus))?;
        self.close_files().map_err(at(SetupStep::CloseFiles))?;
        if self.signals == Signals::Fresh {
            reset_signals().map_err(at(SetupStep::SetSignals))?;
        }
        set_name(&self.name);
        Ok(())
    }

    fn close_files(&self) -> Result<(), Errno> {
        let Some(keep) = &self.keep else { return Ok(()) };
        let mut from = 0_u32;
        for &fd in keep {
            let fd = fd.unsigned_abs();
            if fd > from {
                close_range(from, fd - 1)?;
            }
            from = from.max(fd.saturating_add(1));
        }
        close_range(from, u32::MAX)
    }
}

/// Names the calling process; at most 15 bytes and a zero.
pub(crate) fn set_name(name: &[u8; 16]) {
    const PR_SET_NAME: usize = 15;
    // SAFETY: the kernel reads up to 16 bytes.
    let _ = unsafe { syscall!(Sysno::prctl, PR_SET_NAME, name.as_ptr()) };
}

fn close_range(first: u32, last: u32) -> Result<(), Errno> {
    // SAFETY: closes descriptors that this process is not to keep; their owners' handles live in main.
    match unsafe { syscall!(Sysno::close_range, first, last, 0) } {
        Ok(_) => Ok(()),
        Err(e) if e.into_raw() == libc::ENOSYS => {
            // Before Linux 5.9: one by one, up to the limit.
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
            let limit = u32::try_from(limit.unwrap_or(65_536)).unwrap_or(65_536);
            for fd in first..last.min(limit) {
                // SAFETY: closes a descriptor of this process' own table, whose owners' handles live in main.
                let _ = unsafe { syscall!(Sysno::close, fd) };
            }
            Ok(())
        }
        Err(e) => Err(Errno::from_raw_os_error(e.into_raw())),
    }
}

fn reset_signals() -> Result<(), Errno> {
    for signal in 1..=signals::LAST {
        if signal == libc::SIGKILL || signal == libc::SIGSTOP {
            continue;
        }
        let keyboard = [libc::SIGINT, libc::SIGQUIT, libc::SIGTSTP, libc::SIGHUP].contains(&signal);
        let terminal = [libc::SIGTTIN, libc::SIGTTOU].contains(&signal);
        let now = signals::action(signal).map_err(|e| e.errno)?;
        let wanted = match now.handler {
            _ if keyboard || terminal => libc::SIG_IGN,
            libc::SIG_IGN => libc::SIG_IGN,
            _ => libc::SIG_DFL,
        };
        if now.handler != wanted {
            let action = Action { handler: wanted, ..Action::default() };
            // SAFETY: the action is SIG_IGN or SIG_DFL, so that no function is installed as a handler.
            unsafe { signals::set_action(signal, &action) }.map_err(|e| e.errno)?;
        }
    }
    Ok(())
}
