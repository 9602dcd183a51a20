//! Looking at files without opening them.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::answer::{Answer, Outcome};
use crate::file::{ResolvedFile, is_link, is_plain};
use crate::identity::decimal;
use crate::memory;
use crate::policy::Rights;
use crate::syscall::Syscall;
use orrery_sys::errno;

const EMPTY_PATH: i32 = libc::AT_EMPTY_PATH;
const NO_FOLLOW: i32 = libc::AT_SYMLINK_NOFOLLOW;
/// `struct stat` and `struct statx`, as the kernel writes them.
const STAT: usize = size_of::<libc::stat>();
const STATX: usize = 256;
const STATFS: usize = size_of::<libc::statfs>();

/// A file that the policy lets be looked at, in as few calls as possible.
fn seen(syscall: &Syscall<'_>, directory: i32, path: &[u8], follow: bool) -> Result<OwnedFd, Errno> {
    if let Some(file) = seen_at_once(syscall, path)? {
        // The file itself may still be a link.
        if !follow || !is_link(&rustix::fs::fstat(&file)?) {
            return Ok(file);
        }
    }
    seen_by_walk(syscall, directory, path, follow)
}

/// What a plain path means where the policy lets it be looked at: no link lies on the way, but the file may be one.
fn seen_at_once(syscall: &Syscall<'_>, path: &[u8]) -> Result<Option<OwnedFd>, Errno> {
    if is_plain(path)
        && !syscall.state.policy.is_recorded()
        && syscall.state.policy.rights(path).contains(Rights::STAT)
        && syscall.passes(path)
    {
        let within = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::openat2(CWD, path, flags, Mode::empty(), within) {
            Err(Errno::LOOP | Errno::AGAIN) => (),
            other => return other.map(Some),
        }
    }
    Ok(None)
}

fn seen_by_walk(syscall: &Syscall<'_>, directory: i32, path: &[u8], follow: bool) -> Result<OwnedFd, Errno> {
    let found = syscall.find(directory, path, follow)?;
    syscall.check(&found, Rights::STAT)?;
    Ok(found.file)
}

/// The file that a path means, or, where that is empty and may be, the program's descriptor `directory`.
fn seen_or_held(syscall: &Syscall<'_>, directory: i32, path: &[u8], flags: i32) -> Result<OwnedFd, Errno> {
    if path.is_empty() && flags & EMPTY_PATH != 0 {
        return syscall.directory(directory);
    }
    seen(syscall, directory, path, flags & NO_FOLLOW == 0)
}

/// The path, which may be a null pointer where it may be empty (Linux 6.11).
fn path_or_null(syscall: &Syscall<'_>, index: usize, flags: i32) -> Result<Vec<u8>, Errno> {
    if syscall.argument(index) == 0 && flags & EMPTY_PATH != 0 {
        return Ok(Vec::new());
    }
    syscall.path(index)
}

/// `struct stat` of a file.
fn status(file: &OwnedFd) -> Result<[u8; STAT], Errno> {
    let mut found = [0_u8; STAT];
    // SAFETY: the kernel writes a `struct stat`, for which there is room.
    unsafe { syscall!(Sysno::fstat, file.as_raw_fd(), found.as_mut_ptr()) }.map_err(errno)?;
    Ok(found)
}

/// Whether such a structure is about a symbolic link.
fn says_link(found: &[u8; STAT]) -> bool {
    const MODE: usize = std::mem::offset_of!(libc::stat, st_mode);
    let mode = u32::from_ne_bytes(std::array::from_fn(|byte| found[MODE + byte]));
    mode & libc::S_IFMT == libc::S_IFLNK
}

fn give_stat(syscall: &Syscall<'_>, file: &OwnedFd, to: usize) -> Outcome {
    syscall.write(to, &status(file)?)?;
    Ok(Answer::Value(0))
}

/// The same for a path: what the kernel tells of a file says if it is a link, too.
fn stat_path(syscall: &Syscall<'_>, directory: i32, path: &[u8], follow: bool, to: usize) -> Outcome {
    if let Some(file) = seen_at_once(syscall, path)? {
        let found = status(&file)?;
        if !follow || !says_link(&found) {
            syscall.write(to, &found)?;
            return Ok(Answer::Value(0));
        }
    }
    give_stat(syscall, &seen_by_walk(syscall, directory, path, follow)?, to)
}

pub(super) fn stat(syscall: &Syscall<'_>) -> Outcome {
    stat_path(syscall, libc::AT_FDCWD, &syscall.path(0)?, true, 1)
}

pub(super) fn lstat(syscall: &Syscall<'_>) -> Outcome {
    stat_path(syscall, libc::AT_FDCWD, &syscall.path(0)?, false, 1)
}

pub(super) fn newfstatat(syscall: &Syscall<'_>) -> Outcome {
    let flags = syscall.int(3);
    if flags & !(EMPTY_PATH | NO_FOLLOW | libc::AT_NO_AUTOMOUNT) != 0 {
        return Err(Errno::INVAL);
    }
    let path = path_or_null(syscall, 1, flags)?;
    if path.is_empty() && flags & EMPTY_PATH != 0 {
        return give_stat(syscall, &syscall.directory(syscall.int(0))?, 2);
    }
    stat_path(syscall, syscall.int(0), &path, flags & NO_FOLLOW == 0, 2)
}

pub(super) fn statx(syscall: &Syscall<'_>) -> Outcome {
    let flags = syscall.int(2);
    let sync = libc::AT_STATX_SYNC_TYPE;
    if flags & !(EMPTY_PATH | NO_FOLLOW | libc::AT_NO_AUTOMOUNT | sync) != 0 {
        return Err(Errno::INVAL);
    }
    let file = seen_or_held(syscall, syscall.int(0), &path_or_null(syscall, 1, flags)?, flags)?;
    let mut found = [0_u8; STATX];
    // SAFETY: the kernel writes a `struct statx`, for which there is room.
    unsafe {
        syscall!(
            Sysno::statx,
            file.as_raw_fd(),
            c"".as_ptr(),
            flags & sync | EMPTY_PATH,
            syscall.unsigned(3),
            found.as_mut_ptr()
        )
    }
    .map_err(errno)?;
    syscall.write(4, &found)?;
    Ok(Answer::Value(0))
}

pub(super) fn access(syscall: &Syscall<'_>) -> Outcome {
    may(syscall, libc::AT_FDCWD, &syscall.path(0)?, syscall.int(1), 0)
}

pub(super) fn faccessat(syscall: &Syscall<'_>) -> Outcome {
    may(syscall, syscall.int(0), &syscall.path(1)?, syscall.int(2), 0)
}

pub(super) fn faccessat2(syscall: &Syscall<'_>) -> Outcome {
    let flags = syscall.int(3);
    if flags & !(EMPTY_PATH | NO_FOLLOW | libc::AT_EACCESS) != 0 {
        return Err(Errno::INVAL);
    }
    may(syscall, syscall.int(0), &path_or_null(syscall, 1, flags)?, syscall.int(2), flags)
}

/// What the policy refuses is not accessible, so that programs that ask first get an honest answer.
fn may(syscall: &Syscall<'_>, directory: i32, path: &[u8], mode: i32, flags: i32) -> Outcome {
    if mode & !(libc::R_OK | libc::W_OK | libc::X_OK) != 0 {
        return Err(Errno::INVAL);
    }
    let file = seen_or_held(syscall, directory, path, flags)?;
    if !path.is_empty() && mode != libc::F_OK && !syscall.state.policy.learning {
        let found = syscall.examine(file.try_clone().map_err(|_| Errno::MFILE)?, Some(Rights::empty()))?;
        let (rights, name) = syscall.rights(&found);
        let any = |wanted: Rights| rights.intersects(wanted);
        let directory = crate::file::is_directory(&found.stat);
        if mode & libc::R_OK != 0 && !any(Rights::READ | Rights::LIST)
            || mode & libc::W_OK != 0 && !any(Rights::WRITE | Rights::CREATE)
            || mode & libc::X_OK != 0 && !directory && !any(Rights::EXECUTE)
        {
            return Err(Errno::ACCESS);
        }
        let asked = [
            (libc::R_OK, Rights::READ | Rights::LIST),
            (libc::W_OK, Rights::WRITE | Rights::CREATE),
            (libc::X_OK, Rights::EXECUTE),
        ];
        let asked = asked.into_iter().filter(|(bit, _)| mode & bit != 0).map(|(_, rights)| rights);
        syscall.record_use(asked.fold(Rights::empty(), |all, right| all | right) & rights, &name);
    }
    // The monitor has become the caller with its real ids where those differ: so as whom it is effectively.
    // SAFETY: the kernel reads an empty text.
    unsafe {
        syscall!(
            Sysno::faccessat2,
            file.as_raw_fd(),
            c"".as_ptr(),
            mode,
            EMPTY_PATH | flags & NO_FOLLOW | libc::AT_EACCESS
        )
    }
    .map_err(errno)?;
    Ok(Answer::Value(0))
}

pub(super) fn readlink(syscall: &Syscall<'_>) -> Outcome {
    link_target(syscall, libc::AT_FDCWD, &syscall.path(0)?, 1)
}

pub(super) fn readlinkat(syscall: &Syscall<'_>) -> Outcome {
    link_target(syscall, syscall.int(0), &syscall.path(1)?, 2)
}

fn link_target(syscall: &Syscall<'_>, directory: i32, path: &[u8], to: usize) -> Outcome {
    let room = usize::try_from(syscall.int(to + 1)).ok().filter(|room| *room > 0).ok_or(Errno::INVAL)?;
    let found = if path.is_empty() {
        syscall.examine(syscall.directory(directory)?, Some(Rights::empty()))?
    } else {
        let found = syscall.find(directory, path, false)?;
        syscall.check(&found, Rights::STAT)?;
        found
    };
    if !is_link(&found.stat) {
        return Err(if path.is_empty() { Errno::NOENT } else { Errno::INVAL });
    }
    let target = own_link(syscall, &found)?;
    let length = target.len().min(room);
    syscall.write(to, &target[..length])?;
    Ok(Answer::Value(i64::try_from(length).unwrap_or(0)))
}

/// What a link says to the caller: `/proc/self` names the process that reads it.
fn own_link(syscall: &Syscall<'_>, found: &ResolvedFile) -> Result<Vec<u8>, Errno> {
    let path = match &found.location {
        crate::file::Location::Path(path) => path.as_slice(),
        crate::file::Location::Outside(_) | crate::file::Location::Anonymous => b"",
    };
    let (process, thread) = (syscall.caller()?.process, syscall.notification.thread);
    match path {
        b"/proc/self" => Ok(process.to_string().into_bytes()),
        b"/proc/thread-self" => Ok(format!("{process}/task/{thread}").into_bytes()),
        _ => Ok(rustix::fs::readlinkat(&found.file, "", Vec::new())?.into_bytes()),
    }
}

pub(super) fn statfs(syscall: &Syscall<'_>) -> Outcome {
    let file = seen(syscall, libc::AT_FDCWD, &syscall.path(0)?, true)?;
    let mut found = [0_u8; STATFS];
    // SAFETY: the kernel writes a `struct statfs`, for which there is room.
    unsafe { syscall!(Sysno::fstatfs, file.as_raw_fd(), found.as_mut_ptr()) }.map_err(errno)?;
    syscall.write(1, &found)?;
    Ok(Answer::Value(0))
}

/// A path by which the monitor reaches a file that it holds.
pub(super) fn by_number(file: &impl AsRawFd) -> Vec<u8> {
    let mut number = [0; 16];
    let number = decimal(file.as_raw_fd(), &mut number);
    [b"/proc/self/fd/", number, b"\0"].concat()
}

/// Attribute names end here (xattr(7)).
pub(super) const NAME: usize = 256;
/// The kernel knows no longer values or lists.
pub(super) const VALUE: usize = 65536;

pub(super) fn getxattr(syscall: &Syscall<'_>) -> Outcome {
    attribute(syscall, true)
}

pub(super) fn lgetxattr(syscall: &Syscall<'_>) -> Outcome {
    attribute(syscall, false)
}

fn attribute(syscall: &Syscall<'_>, follow: bool) -> Outcome {
    let file = readable(syscall, follow)?;
    let mut name = memory::read_text(syscall.notification.thread, syscall.argument(1), NAME)?;
    name.push(0);
    let path = by_number(&file);
    sized(syscall, 2, |value, room| {
        // SAFETY: both texts end with a zero, and the value has room for as much as is stated.
        unsafe { syscall!(Sysno::getxattr, path.as_ptr(), name.as_ptr(), value, room) }
    })
}

pub(super) fn listxattr(syscall: &Syscall<'_>) -> Outcome {
    attributes(syscall, true)
}

pub(super) fn llistxattr(syscall: &Syscall<'_>) -> Outcome {
    attributes(syscall, false)
}

fn attributes(syscall: &Syscall<'_>, follow: bool) -> Outcome {
    let file = readable(syscall, follow)?;
    let path = by_number(&file);
    sized(syscall, 1, |list, room| {
        // SAFETY: the path ends with a zero, and the list has room for as much as is stated.
        unsafe { syscall!(Sysno::listxattr, path.as_ptr(), list, room) }
    })
}

fn readable(syscall: &Syscall<'_>, follow: bool) -> Result<OwnedFd, Errno> {
    let found = syscall.find(libc::AT_FDCWD, &syscall.path(0)?, follow)?;
    syscall.check(&found, Rights::STAT)?;
    Ok(found.file)
}

/// A call that fills a buffer of the program's, or, where that has no room, tells how much it takes.
fn sized(
    syscall: &Syscall<'_>,
    to: usize,
    fill: impl FnOnce(*mut u8, usize) -> Result<usize, syscalls::Errno>,
) -> Outcome {
    let room = usize::try_from(syscall.argument(to + 1)).unwrap_or(VALUE).min(VALUE);
    let mut value = vec![0; room];
    let length = fill(value.as_mut_ptr(), room).map_err(errno)?;
    if room != 0 {
        syscall.write(to, value.get(..length).ok_or(Errno::RANGE)?)?;
    }
    Ok(Answer::Value(i64::try_from(length).unwrap_or(0)))
}

/// Newer twins of calls that are performed: programs fall back to those.
pub(super) fn not_here(_: &Syscall<'_>) -> Outcome {
    Err(Errno::NOSYS)
}

/// Handles open files without their paths.
pub(super) fn no_handles(_: &Syscall<'_>) -> Outcome {
    Err(Errno::OPNOTSUPP)
}

pub(super) fn inotify_add_watch(syscall: &Syscall<'_>) -> Outcome {
    let mask = syscall.unsigned(2);
    let found = syscall.find(libc::AT_FDCWD, &syscall.path(1)?, mask & libc::IN_DONT_FOLLOW == 0)?;
    syscall.check(&found, Rights::READ)?;
    let watcher = syscall.directory(syscall.int(0))?;
    syscall.still_waits()?;
    let path = by_number(&found.file);
    let descriptor: BorrowedFd<'_> = watcher.as_fd();
    // SAFETY: the path ends with a zero.
    let watch = unsafe {
        syscall!(
            Sysno::inotify_add_watch,
            descriptor.as_raw_fd(),
            path.as_ptr(),
            mask & !libc::IN_DONT_FOLLOW
        )
    };
    Ok(Answer::Value(i64::try_from(watch.map_err(errno)?).unwrap_or(-1)))
}
