//! Changing what is known of files: length, mode, owner, times, extended attributes.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use super::stat::{NAME, VALUE, by_number};
use crate::answer::{Answer, Outcome};
use crate::file::is_link;
use crate::memory;
use crate::policy::Rights;
use crate::syscall::Syscall;
use orrery_sys::errno;

const HERE: i32 = libc::AT_FDCWD;

fn done(result: Result<usize, syscalls::Errno>) -> Outcome {
    result.map(|_| Answer::Value(0)).map_err(errno)
}

/// The file at a path, if it may be changed.
fn changeable(syscall: &Syscall<'_>, directory: i32, path: &[u8], follow: bool) -> Result<OwnedFd, Errno> {
    let found = syscall.find(directory, path, follow)?;
    syscall.check(&found, Rights::WRITE)?;
    syscall.still_waits()?;
    Ok(found.file)
}

/// The program's descriptor, if what it stands for may be changed, for a call that takes no descriptor with `O_PATH`.
fn changeable_open(syscall: &Syscall<'_>, number: i32) -> Result<OwnedFd, Errno> {
    let file = changeable_held(syscall, number)?;
    if rustix::fs::fcntl_getfl(&file)?.contains(rustix::fs::OFlags::PATH) {
        return Err(Errno::BADF);
    }
    Ok(file)
}

/// The program's descriptor, if what it stands for may be changed: it may have been opened for reading only.
fn changeable_held(syscall: &Syscall<'_>, number: i32) -> Result<OwnedFd, Errno> {
    let file = syscall.caller()?.descriptor(number)?;
    let found = syscall.examine(file, Some(Rights::empty()))?;
    syscall.check(&found, Rights::WRITE)?;
    syscall.still_waits()?;
    Ok(found.file)
}

pub(super) fn chmod(syscall: &Syscall<'_>) -> Outcome {
    mode(&changeable(syscall, HERE, &syscall.path(0)?, true)?, syscall.unsigned(1))
}

pub(super) fn fchmod(syscall: &Syscall<'_>) -> Outcome {
    mode(&changeable_open(syscall, syscall.int(0))?, syscall.unsigned(1))
}

pub(super) fn fchmodat(syscall: &Syscall<'_>) -> Outcome {
    mode(&changeable(syscall, syscall.int(0), &syscall.path(1)?, true)?, syscall.unsigned(2))
}

pub(super) fn fchmodat2(syscall: &Syscall<'_>) -> Outcome {
    let flags = syscall.int(3);
    if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
        return Err(Errno::INVAL);
    }
    let path = syscall.path(1)?;
    if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
        return mode(&changeable_held(syscall, syscall.int(0))?, syscall.unsigned(2));
    }
    let file = changeable(syscall, syscall.int(0), &path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?;
    if is_link(&rustix::fs::fstat(&file)?) {
        return Err(Errno::OPNOTSUPP);
    }
    mode(&file, syscall.unsigned(2))
}

fn mode(file: &OwnedFd, mode: u32) -> Outcome {
    let path = by_number(file);
    // SAFETY: the path ends with a zero.
    done(unsafe { syscall!(Sysno::fchmodat, HERE, path.as_ptr(), mode) })
}

pub(super) fn chown(syscall: &Syscall<'_>) -> Outcome {
    owner(syscall, &changeable(syscall, HERE, &syscall.path(0)?, true)?, 1)
}

pub(super) fn lchown(syscall: &Syscall<'_>) -> Outcome {
    owner(syscall, &changeable(syscall, HERE, &syscall.path(0)?, false)?, 1)
}

pub(super) fn fchown(syscall: &Syscall<'_>) -> Outcome {
    owner(syscall, &changeable_open(syscall, syscall.int(0))?, 1)
}

pub(super) fn fchownat(syscall: &Syscall<'_>) -> Outcome {
    let flags = syscall.int(4);
    if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
        return Err(Errno::INVAL);
    }
    let path = syscall.path(1)?;
    if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
        return owner(syscall, &changeable_held(syscall, syscall.int(0))?, 2);
    }
    owner(syscall, &changeable(syscall, syscall.int(0), &path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?, 2)
}

fn owner(syscall: &Syscall<'_>, file: &OwnedFd, ids: usize) -> Outcome {
    let (user, group) = (syscall.unsigned(ids), syscall.unsigned(ids + 1));
    // SAFETY: the path is empty and ends with a zero.
    done(unsafe {
        syscall!(Sysno::fchownat, file.as_raw_fd(), c"".as_ptr(), user, group, libc::AT_EMPTY_PATH)
    })
}

/// Two `struct timespec`.
type Times = [u8; 32];

fn set_times(file: &OwnedFd, times: Option<&Times>) -> Outcome {
    let times = times.map_or(std::ptr::null(), |times| times.as_ptr());
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

pub(super) fn utime(syscall: &Syscall<'_>) -> Outcome {
    let times = match syscall.argument(1) {
        0 => None,
        _ => {
            let given: [u8; 16] = syscall.bytes(1)?;
            Some(both(spec(number(&given, 0), 0), spec(number(&given, 1), 0)))
        }
    };
    set_times(&changeable(syscall, HERE, &syscall.path(0)?, true)?, times.as_ref())
}

/// Two `struct timeval`, in microseconds.
fn microseconds(syscall: &Syscall<'_>, index: usize) -> Result<Option<Times>, Errno> {
    if syscall.argument(index) == 0 {
        return Ok(None);
    }
    let given: [u8; 32] = syscall.bytes(index)?;
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

pub(super) fn utimes(syscall: &Syscall<'_>) -> Outcome {
    let times = microseconds(syscall, 1)?;
    set_times(&changeable(syscall, HERE, &syscall.path(0)?, true)?, times.as_ref())
}

pub(super) fn futimesat(syscall: &Syscall<'_>) -> Outcome {
    let times = microseconds(syscall, 2)?;
    let file = match syscall.argument(1) {
        0 => changeable_open(syscall, syscall.int(0))?,
        _ => changeable(syscall, syscall.int(0), &syscall.path(1)?, true)?,
    };
    set_times(&file, times.as_ref())
}

pub(super) fn utimensat(syscall: &Syscall<'_>) -> Outcome {
    let flags = syscall.int(3);
    if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
        return Err(Errno::INVAL);
    }
    let times: Option<Times> = match syscall.argument(2) {
        0 => None,
        _ => Some(syscall.bytes(2)?),
    };
    if syscall.argument(1) == 0 {
        // futimens(3).
        return match flags {
            0 => set_times(&changeable_open(syscall, syscall.int(0))?, times.as_ref()),
            _ => Err(Errno::INVAL),
        };
    }
    let path = syscall.path(1)?;
    let file = if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
        changeable_held(syscall, syscall.int(0))?
    } else {
        changeable(syscall, syscall.int(0), &path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?
    };
    set_times(&file, times.as_ref())
}

pub(super) fn truncate(syscall: &Syscall<'_>) -> Outcome {
    let length = syscall.argument(1);
    let file = changeable(syscall, HERE, &syscall.path(0)?, true)?;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit has room; nothing is set.
    let known = unsafe {
        libc::prlimit(syscall.notification.thread, libc::RLIMIT_FSIZE, std::ptr::null(), &raw mut limit)
    } == 0;
    if known
        && let most = limit.rlim_cur
        && length > most
        && i64::try_from(length).is_ok()
        && length > rustix::fs::fstat(&file)?.st_size.unsigned_abs()
    {
        // As the kernel would (truncate(2)).
        let _ = rustix::process::pidfd_send_signal(syscall.caller()?, rustix::process::Signal::XFSZ);
        return Err(Errno::FBIG);
    }
    let path = by_number(&file);
    // SAFETY: the path ends with a zero.
    done(unsafe { syscall!(Sysno::truncate, path.as_ptr(), length) })
}

pub(super) fn setxattr(syscall: &Syscall<'_>) -> Outcome {
    set(syscall, &changeable(syscall, HERE, &syscall.path(0)?, true)?)
}

pub(super) fn lsetxattr(syscall: &Syscall<'_>) -> Outcome {
    set(syscall, &changeable(syscall, HERE, &syscall.path(0)?, false)?)
}

pub(super) fn fsetxattr(syscall: &Syscall<'_>) -> Outcome {
    set(syscall, &changeable_open(syscall, syscall.int(0))?)
}

fn name(syscall: &Syscall<'_>) -> Result<Vec<u8>, Errno> {
    let mut name = memory::read_text(syscall.notification.thread, syscall.argument(1), NAME).map_err(
        |error| match error {
            Errno::NAMETOOLONG => Errno::RANGE,
            other => other,
        },
    )?;
    name.push(0);
    Ok(name)
}

fn set(syscall: &Syscall<'_>, file: &OwnedFd) -> Outcome {
    let length =
        usize::try_from(syscall.argument(3)).ok().filter(|length| *length <= VALUE).ok_or(Errno::TOOBIG)?;
    let mut value = vec![0; length];
    memory::read(syscall.notification.thread, syscall.argument(2), &mut value)?;
    let (path, name) = (by_number(file), name(syscall)?);
    syscall.still_waits()?;
    // SAFETY: both texts end with a zero, and the value is as long as stated.
    done(unsafe {
        syscall!(Sysno::setxattr, path.as_ptr(), name.as_ptr(), value.as_ptr(), length, syscall.int(4))
    })
}

pub(super) fn removexattr(syscall: &Syscall<'_>) -> Outcome {
    unset(syscall, &changeable(syscall, HERE, &syscall.path(0)?, true)?)
}

pub(super) fn lremovexattr(syscall: &Syscall<'_>) -> Outcome {
    unset(syscall, &changeable(syscall, HERE, &syscall.path(0)?, false)?)
}

pub(super) fn fremovexattr(syscall: &Syscall<'_>) -> Outcome {
    unset(syscall, &changeable_open(syscall, syscall.int(0))?)
}

fn unset(syscall: &Syscall<'_>, file: &OwnedFd) -> Outcome {
    let (path, name) = (by_number(file), name(syscall)?);
    syscall.still_waits()?;
    // SAFETY: both texts end with a zero.
    done(unsafe { syscall!(Sysno::removexattr, path.as_ptr(), name.as_ptr()) })
}
