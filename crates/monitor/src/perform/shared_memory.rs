//! Memory that is shared by number: System V segments (shmget(2), shmat(2), shmctl(2)).
//!
//! Numbers are the whole system's, and any process of a user may attach what another program of that user made. So the
//! monitor makes segments in the program's place: then the kernel itself has down who made which, and others are
//! refused. Numbers stand in registers, and the kernel does not give one a second time for long; so what is about a
//! number may go on by itself.

use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::answer::{Answer, Outcome};
use crate::log::Event;
use crate::syscall::Syscall;
use orrery_sys::errno;

/// How much memory is shared in all (shmctl(2)).
const SHM_INFO: i32 = 14;

/// Whether a segment was made by this monitor.
fn is_own(syscall: &Syscall<'_>, number: i32) -> Result<bool, Errno> {
    // SAFETY: the structure is numbers, which the kernel fills in.
    let mut status: libc::shmid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is as large as the kernel's.
    unsafe { syscall!(Sysno::shmctl, number, libc::IPC_STAT, &raw mut status) }.map_err(errno)?;
    Ok(status.shm_cpid == syscall.state.identity.process)
}

pub(super) fn shmget(syscall: &Syscall<'_>) -> Outcome {
    let arguments = syscall.notification.arguments;
    // SAFETY: the call takes numbers only, by value.
    let made = unsafe { syscall!(Sysno::shmget, arguments[0], arguments[1], arguments[2]) }.map_err(errno)?;
    let number = i32::try_from(made).map_err(|_| Errno::INVAL)?;
    let other = if syscall.state.callers.alike() { None } else { syscall.caller()?.other.as_ref() };
    if let Some(other) = other
        && is_own(syscall, number)?
    {
        give(number, other.user, other.group)?;
    }
    Ok(Answer::Value(i64::from(number)))
}

/// A segment belongs to who asked for it.
fn give(number: i32, user: u32, group: u32) -> Result<(), Errno> {
    // SAFETY: the structure is numbers, which the kernel fills in.
    let mut status: libc::shmid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is as large as the kernel's.
    unsafe { syscall!(Sysno::shmctl, number, libc::IPC_STAT, &raw mut status) }.map_err(errno)?;
    // Who came to a segment by its key, and not by making it, does not become its owner.
    if status.shm_perm.uid != status.shm_perm.cuid || status.shm_nattch != 0 {
        return Ok(());
    }
    (status.shm_perm.uid, status.shm_perm.gid) = (user, group);
    // SAFETY: as above; it is only read.
    unsafe { syscall!(Sysno::shmctl, number, libc::IPC_SET, &raw const status) }.map(drop).map_err(errno)
}

/// `shmat` and `shmctl`, whose first argument is the number.
pub(super) fn by_number(syscall: &Syscall<'_>) -> Outcome {
    // Not about a segment: about all of them.
    let general = syscall.name() == "shmctl" && matches!(syscall.int(1), libc::IPC_INFO | SHM_INFO);
    if general || is_own(syscall, syscall.int(0))? {
        return Ok(Answer::GoOn);
    }
    syscall.refuse(&Event::Call { reason: "it is about memory that no guarded program made" });
    Err(Errno::ACCESS)
}
