//! Limits, priorities and processors of processes: only of those that are guarded. Where Landlock does not keep signals
//! inside (before Linux 6.12, or `--no-landlock`), signals, too.
//!
//! Nearly all of these calls name processes by numbers in registers, so what is decided about is what the kernel then
//! does.

use std::os::fd::{AsRawFd, OwnedFd};

use orrery_sys::errno;
use rustix::io::Errno;
use rustix::process::Pid;
use syscalls::{Sysno, syscall};

use crate::answer::{Answer, Outcome};
use crate::identity::process_in;
use crate::log::Event;
use crate::syscall::Syscall;

/// Whom a number means, for setpriority(2) and ioprio_set(2).
enum Whom {
    Process,
    Group,
    User,
}

fn refused(syscall: &Syscall<'_>) -> Outcome {
    syscall.refuse(&Event::Call { reason: "it concerns a process that is not guarded" });
    Err(Errno::PERM)
}

fn only_if(syscall: &Syscall<'_>, fits: bool) -> Outcome {
    if fits { Ok(Answer::GoOn) } else { refused(syscall) }
}

/// sched_setaffinity(2) and its like: the first argument is a thread, zero being the caller.
pub(super) fn of_thread(syscall: &Syscall<'_>) -> Outcome {
    let thread = syscall.int(0);
    only_if(syscall, thread == 0 || syscall.is_guarded(thread))
}

/// kill(2). The program starts in the monitor's group, to which it may send what programs send to their own: all but
/// what would end or stop the monitor at once.
pub(super) fn kill(syscall: &Syscall<'_>) -> Outcome {
    let (target, signal) = (syscall.int(0), syscall.int(1));
    let fits = match target {
        0 => signal != libc::SIGKILL && signal != libc::SIGSTOP,
        -1 => false,
        target => syscall.is_guarded(target.saturating_abs()),
    };
    only_if(syscall, fits)
}

/// pidfd_send_signal(2), on the descriptor that was looked at. It may be a directory of `/proc`.
pub(super) fn pidfd_send_signal(syscall: &Syscall<'_>) -> Outcome {
    let file = syscall.caller()?.descriptor(syscall.int(0))?;
    let path = syscall.state.identity.path_of(&file)?;
    let process = match process_in(&path) {
        Some((process, _)) => process,
        None => described_process(&file)?,
    };
    if !syscall.is_guarded(process) {
        return refused(syscall);
    }
    if syscall.argument(2) != 0 {
        syscall.refuse(&Event::Call { reason: "without Landlock a signal carries no word of its own" });
        return Err(Errno::PERM);
    }
    syscall.still_waits()?;
    // SAFETY: the other arguments are numbers, and the pointer is null.
    unsafe { syscall!(Sysno::pidfd_send_signal, file.as_raw_fd(), syscall.int(1), 0, syscall.unsigned(3)) }
        .map_err(errno)?;
    Ok(Answer::Value(0))
}

/// The process that a pidfd is of (`/proc/self/fdinfo`).
fn described_process(file: &OwnedFd) -> Result<i32, Errno> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))
        .map_err(|_| Errno::BADF)?;
    let number = text.lines().find_map(|line| line.strip_prefix("Pid:")).map(str::trim);
    number.and_then(|number| number.parse().ok()).ok_or(Errno::BADF)
}

/// Commands of ioctl(2) that choose who is signalled about a file, as `F_SETOWN` does (fcntl(2)).
pub(crate) const FIOSETOWN: u32 = 0x8901;
pub(crate) const SIOCSPGRP: u32 = 0x8902;
/// The same of fcntl(2), with the number in memory.
pub(crate) const F_SETOWN_EX: i32 = 15;

/// fcntl(2) with a command that chooses who is signalled.
pub(super) fn fcntl(syscall: &Syscall<'_>) -> Outcome {
    match syscall.int(1) {
        libc::F_SETOWN => {
            let whom = syscall.int(2);
            only_if(syscall, whom == 0 || syscall.is_guarded(whom.saturating_abs()))
        }
        // What memory says may change until the kernel reads it.
        F_SETOWN_EX => refused(syscall),
        _ => Ok(Answer::GoOn),
    }
}

/// kcmp(2), tgkill(2): two processes or threads.
pub(super) fn of_two(syscall: &Syscall<'_>) -> Outcome {
    only_if(syscall, syscall.is_guarded(syscall.int(0)) && syscall.is_guarded(syscall.int(1)))
}

/// setpriority(2).
pub(super) fn setpriority(syscall: &Syscall<'_>) -> Outcome {
    of_some(
        syscall,
        match syscall.int(0) {
            0 => Whom::Process,
            1 => Whom::Group,
            2 => Whom::User,
            _ => return Err(Errno::INVAL),
        },
    )
}

/// ioprio_set(2).
pub(super) fn ioprio_set(syscall: &Syscall<'_>) -> Outcome {
    of_some(
        syscall,
        match syscall.int(0) {
            1 => Whom::Process,
            2 => Whom::Group,
            3 => Whom::User,
            _ => return Err(Errno::INVAL),
        },
    )
}

fn of_some(syscall: &Syscall<'_>, whom: Whom) -> Outcome {
    let number = syscall.int(1);
    let fits = match whom {
        Whom::Process => number == 0 || syscall.is_guarded(number),
        // The program starts in the monitor's group. In one that a guarded process leads nobody else is.
        Whom::Group => match number {
            0 => rustix::process::getpgid(Pid::from_raw(syscall.process()))
                .is_ok_and(|group| syscall.is_guarded(group.as_raw_pid())),
            group => syscall.is_guarded(group),
        },
        Whom::User => false,
    };
    only_if(syscall, fits)
}

/// prlimit64(2): reads the limits of any process, and changes those of guarded processes. That no core is dumped stays
/// so: the kernel writes one into the process's directory, which no policy prevents.
pub(super) fn prlimit64(syscall: &Syscall<'_>) -> Outcome {
    let process = syscall.int(0);
    if syscall.argument(2) == 0 {
        return Ok(Answer::GoOn);
    }
    if !(process == 0 || syscall.is_guarded(process)) {
        return refused(syscall);
    }
    if syscall.unsigned(1) != libc::RLIMIT_CORE {
        return Ok(Answer::GoOn);
    }
    no_cores(syscall, 2)?;
    if syscall.argument(3) != 0 {
        syscall.still_waits()?;
        syscall.write(3, &[0; 16])?;
    }
    Ok(Answer::Value(0))
}

/// setrlimit(2), which is asked about for the size of cores only.
pub(super) fn setrlimit(syscall: &Syscall<'_>) -> Outcome {
    if syscall.unsigned(0) != libc::RLIMIT_CORE {
        return Ok(Answer::GoOn);
    }
    no_cores(syscall, 1).map(|()| Answer::Value(0))
}

/// The limit is zero, and may be set to that.
fn no_cores(syscall: &Syscall<'_>, index: usize) -> Result<(), Errno> {
    let wanted: [u8; 16] = syscall.bytes(index)?;
    if wanted == [0; 16] {
        return Ok(());
    }
    syscall.refuse(&Event::Call { reason: "cores are written around the policy" });
    Err(Errno::PERM)
}
