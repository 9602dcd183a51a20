//! Changing what is known of files: length, mode, owner, times, extended attributes.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use super::look::{NAME, VALUE, by_number};
use crate::job::{Answer, Job, Outcome};
use crate::memory;
use crate::policy::Rights;
use crate::resolve::is_link;
use orrery_sys::errno;

const HERE: i32 = libc::AT_FDCWD;

fn done(result: Result<usize, syscalls::Errno>) -> Outcome {
    result.map(|_| Answer::Value(0)).map_err(errno)
}

/// The file at a path, if it may be changed.
fn changeable(job: &Job<'_>, directory: i32, path: &[u8], follow: bool) -> Result<OwnedFd, Errno> {
    let found = job.find(directory, path, follow)?;
    job.check(&found, Rights::WRITE)?;
    job.still_waits()?;
    Ok(found.file)
}

/// The program's descriptor, if what it stands for may be changed: it may have been opened for reading only.
fn changeable_held(job: &Job<'_>, number: i32) -> Result<OwnedFd, Errno> {
    let file = job.caller()?.descriptor(number)?;
    let found = job.examine(file, Some(Rights::empty()))?;
    job.check(&found, Rights::WRITE)?;
    job.still_waits()?;
    Ok(found.file)
}

pub(super) fn chmod(job: &Job<'_>) -> Outcome {
    mode(&changeable(job, HERE, &job.path(0)?, true)?, job.unsigned(1))
}

pub(super) fn fchmod(job: &Job<'_>) -> Outcome {
    mode(&changeable_held(job, job.int(0))?, job.unsigned(1))
}

pub(super) fn fchmodat(job: &Job<'_>) -> Outcome {
    mode(&changeable(job, job.int(0), &job.path(1)?, true)?, job.unsigned(2))
}

pub(super) fn fchmodat2(job: &Job<'_>) -> Outcome {
    let flags = job.int(3);
    if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
        return Err(Errno::INVAL);
    }
    let path = job.path(1)?;
    if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
        return mode(&changeable_held(job, job.int(0))?, job.unsigned(2));
    }
    let file = changeable(job, job.int(0), &path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?;
    if is_link(&rustix::fs::fstat(&file)?) {
        return Err(Errno::OPNOTSUPP);
    }
    mode(&file, job.unsigned(2))
}

fn mode(file: &OwnedFd, mode: u32) -> Outcome {
    let path = by_number(file);
    // SAFETY: the path ends with a zero.
    done(unsafe { syscall!(Sysno::fchmodat, HERE, path.as_ptr(), mode) })
}

pub(super) fn chown(job: &Job<'_>) -> Outcome {
    owner(job, &changeable(job, HERE, &job.path(0)?, true)?, 1)
}

pub(super) fn lchown(job: &Job<'_>) -> Outcome {
    owner(job, &changeable(job, HERE, &job.path(0)?, false)?, 1)
}

pub(super) fn fchown(job: &Job<'_>) -> Outcome {
    owner(job, &changeable_held(job, job.int(0))?, 1)
}

pub(super) fn fchownat(job: &Job<'_>) -> Outcome {
    let flags = job.int(4);
    if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
        return Err(Errno::INVAL);
    }
    let path = job.path(1)?;
    if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
        return owner(job, &changeable_held(job, job.int(0))?, 2);
    }
    owner(job, &changeable(job, job.int(0), &path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?, 2)
}

fn owner(job: &Job<'_>, file: &OwnedFd, ids: usize) -> Outcome {
    let (user, group) = (job.unsigned(ids), job.unsigned(ids + 1));
    // SAFETY: the path is empty and ends with a zero.
    done(unsafe {
        syscall!(Sysno::fchownat, file.as_raw_fd(), c"".as_ptr(), user, group, libc::AT_EMPTY_PATH)
    })
}

/// Two `struct timespec`.
type Times = [u8; 32];

fn set_times(file: &OwnedFd, times: Option<&Times>) -> Outcome {
    let times = times.map_or(core::ptr::null(), |times| times.as_ptr());
    // SAFETY: the path is empty, and the times are two `struct timespec` or null.
    let set =
        unsafe { syscall!(Sysno::utimensat, file.as_raw_fd(), c"".as_ptr(), times, libc::AT_EMPTY_PATH) };
    match set {
        // A file system that cannot do it without a path.
        Err(syscalls::Errno::EINVAL | syscalls::Errno::EBADF) => {
            let path = by_number(file);
            // SAFETY: the path ends with a zero; the times as above.
            done(unsafe { syscall!(Sysno::utimensat, HERE, path.as_ptr(), times, 0) })
        }
        other => done(other),
    }
}

fn spec(seconds: i64, nanoseconds: i64) -> [u8; 16] {
    let mut spec = [0; 16];
    spec[..8].copy_from_slice(&seconds.to_ne_bytes());
    spec[8..].copy_from_slice(&nanoseconds.to_ne_bytes());
    spec
}

fn number(bytes: &[u8], index: usize) -> i64 {
    i64::from_ne_bytes(std::array::from_fn(|byte| bytes[8 * index + byte]))
}

fn both(first: [u8; 16], second: [u8; 16]) -> Times {
    let mut times = [0; 32];
    times[..16].copy_from_slice(&first);
    times[16..].copy_from_slice(&second);
    times
}

pub(super) fn utime(job: &Job<'_>) -> Outcome {
    let times = match job.argument(1) {
        0 => None,
        _ => {
            let given: [u8; 16] = job.bytes(1)?;
            Some(both(spec(number(&given, 0), 0), spec(number(&given, 1), 0)))
        }
    };
    set_times(&changeable(job, HERE, &job.path(0)?, true)?, times.as_ref())
}

/// Two `struct timeval`, in microseconds.
fn microseconds(job: &Job<'_>, index: usize) -> Result<Option<Times>, Errno> {
    if job.argument(index) == 0 {
        return Ok(None);
    }
    let given: [u8; 32] = job.bytes(index)?;
    let half = |at: usize| {
        let micro = number(&given, at + 1);
        if (0..1_000_000).contains(&micro) {
            Ok(spec(number(&given, at), micro * 1000))
        } else {
            Err(Errno::INVAL)
        }
    };
    Ok(Some(both(half(0)?, half(2)?)))
}

pub(super) fn utimes(job: &Job<'_>) -> Outcome {
    let times = microseconds(job, 1)?;
    set_times(&changeable(job, HERE, &job.path(0)?, true)?, times.as_ref())
}

pub(super) fn futimesat(job: &Job<'_>) -> Outcome {
    let times = microseconds(job, 2)?;
    let file = match job.argument(1) {
        0 => changeable_held(job, job.int(0))?,
        _ => changeable(job, job.int(0), &job.path(1)?, true)?,
    };
    set_times(&file, times.as_ref())
}

pub(super) fn utimensat(job: &Job<'_>) -> Outcome {
    let flags = job.int(3);
    if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
        return Err(Errno::INVAL);
    }
    let times: Option<Times> = match job.argument(2) {
        0 => None,
        _ => Some(job.bytes(2)?),
    };
    let path = match job.argument(1) {
        0 => None,
        _ => Some(job.path(1)?).filter(|path| !(path.is_empty() && flags & libc::AT_EMPTY_PATH != 0)),
    };
    let file = match path {
        None => changeable_held(job, job.int(0))?,
        Some(path) => changeable(job, job.int(0), &path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?,
    };
    set_times(&file, times.as_ref())
}

pub(super) fn truncate(job: &Job<'_>) -> Outcome {
    let length = job.argument(1);
    let file = changeable(job, HERE, &job.path(0)?, true)?;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit has room; nothing is set.
    let known =
        unsafe { libc::prlimit(job.call.thread, libc::RLIMIT_FSIZE, core::ptr::null(), &raw mut limit) } == 0;
    if known
        && let most = limit.rlim_cur
        && length > most
        && i64::try_from(length).is_ok()
        && length > rustix::fs::fstat(&file)?.st_size.unsigned_abs()
    {
        // As the kernel would (truncate(2)).
        let _ = rustix::process::pidfd_send_signal(job.caller()?, rustix::process::Signal::XFSZ);
        return Err(Errno::FBIG);
    }
    let path = by_number(&file);
    // SAFETY: the path ends with a zero.
    done(unsafe { syscall!(Sysno::truncate, path.as_ptr(), length) })
}

pub(super) fn setxattr(job: &Job<'_>) -> Outcome {
    set(job, &changeable(job, HERE, &job.path(0)?, true)?)
}

pub(super) fn lsetxattr(job: &Job<'_>) -> Outcome {
    set(job, &changeable(job, HERE, &job.path(0)?, false)?)
}

pub(super) fn fsetxattr(job: &Job<'_>) -> Outcome {
    set(job, &changeable_held(job, job.int(0))?)
}

fn name(job: &Job<'_>) -> Result<Vec<u8>, Errno> {
    let mut name =
        memory::read_text(job.call.thread, job.argument(1), NAME).map_err(|error| match error {
            Errno::NAMETOOLONG => Errno::RANGE,
            other => other,
        })?;
    name.push(0);
    Ok(name)
}

fn set(job: &Job<'_>, file: &OwnedFd) -> Outcome {
    let length =
        usize::try_from(job.argument(3)).ok().filter(|length| *length <= VALUE).ok_or(Errno::TOOBIG)?;
    let mut value = vec![0; length];
    memory::read(job.call.thread, job.argument(2), &mut value)?;
    let (path, name) = (by_number(file), name(job)?);
    job.still_waits()?;
    // SAFETY: both texts end with a zero, and the value is as long as stated.
    done(unsafe {
        syscall!(Sysno::setxattr, path.as_ptr(), name.as_ptr(), value.as_ptr(), length, job.int(4))
    })
}

pub(super) fn removexattr(job: &Job<'_>) -> Outcome {
    unset(job, &changeable(job, HERE, &job.path(0)?, true)?)
}

pub(super) fn lremovexattr(job: &Job<'_>) -> Outcome {
    unset(job, &changeable(job, HERE, &job.path(0)?, false)?)
}

pub(super) fn fremovexattr(job: &Job<'_>) -> Outcome {
    unset(job, &changeable_held(job, job.int(0))?)
}

fn unset(job: &Job<'_>, file: &OwnedFd) -> Outcome {
    let (path, name) = (by_number(file), name(job)?);
    job.still_waits()?;
    // SAFETY: both texts end with a zero.
    done(unsafe { syscall!(Sysno::removexattr, path.as_ptr(), name.as_ptr()) })
}
