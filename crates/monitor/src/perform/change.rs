//! Making, removing and renaming.

use std::os::fd::AsRawFd;

use rustix::fs::{AtFlags, FileType, Mode, RenameFlags};
use rustix::io::Errno;

use crate::job::{Answer, Job, Outcome};
use crate::own::decimal;
use crate::policy::Rights;
use crate::resolve::Place;

const HERE: i32 = libc::AT_FDCWD;

fn done(result: Result<(), Errno>) -> Outcome {
    result.map(|()| Answer::Value(0))
}

pub(super) fn mkdir(job: &Job<'_>) -> Outcome {
    make_directory(job, HERE, 0)
}

pub(super) fn mkdirat(job: &Job<'_>) -> Outcome {
    make_directory(job, job.int(0), 1)
}

/// The place for something new. What is there already is told before it is refused to make it: `mkdir -p` and its like
/// try every directory on the way.
fn new_place(job: &Job<'_>, directory: i32, path: &[u8]) -> Result<Place, Errno> {
    let place = job.place(directory, path)?;
    let visible = job.monitor.policy.rights(&place.path).contains(Rights::STAT);
    if visible
        && rustix::fs::statat(&place.directory, place.name.as_slice(), AtFlags::SYMLINK_NOFOLLOW).is_ok()
    {
        return Err(Errno::EXIST);
    }
    job.check_place(&place, Rights::CREATE)?;
    job.still_waits()?;
    Ok(place)
}

fn make_directory(job: &Job<'_>, directory: i32, path: usize) -> Outcome {
    let place = new_place(job, directory, &job.path(path)?)?;
    job.assume_umask()?;
    let mode = Mode::from_raw_mode(job.unsigned(path + 1) & 0o7777);
    done(rustix::fs::mkdirat(&place.directory, place.name.as_slice(), mode))
}

pub(super) fn mknod(job: &Job<'_>) -> Outcome {
    make_node(job, HERE, 0)
}

pub(super) fn mknodat(job: &Job<'_>) -> Outcome {
    make_node(job, job.int(0), 1)
}

fn make_node(job: &Job<'_>, directory: i32, path: usize) -> Outcome {
    let place = new_place(job, directory, &job.path(path)?)?;
    let mode = job.unsigned(path + 1);
    let kind = match mode & libc::S_IFMT {
        0 => FileType::RegularFile,
        kind => FileType::from_raw_mode(kind),
    };
    // A device is a door to all that it stands for.
    if matches!(kind, FileType::CharacterDevice | FileType::BlockDevice) && job.argument(path + 2) != 0 {
        job.refuse(&crate::log::Event::Call { reason: "device nodes reach around every path" });
        return Err(Errno::PERM);
    }
    job.assume_umask()?;
    let mode = Mode::from_raw_mode(mode & 0o7777);
    done(rustix::fs::mknodat(&place.directory, place.name.as_slice(), kind, mode, job.argument(path + 2)))
}

pub(super) fn unlink(job: &Job<'_>) -> Outcome {
    remove(job, HERE, &job.path(0)?, AtFlags::empty())
}

pub(super) fn rmdir(job: &Job<'_>) -> Outcome {
    remove(job, HERE, &job.path(0)?, AtFlags::REMOVEDIR)
}

pub(super) fn unlinkat(job: &Job<'_>) -> Outcome {
    let flags = AtFlags::from_bits_retain(job.unsigned(2));
    if !AtFlags::REMOVEDIR.contains(flags) {
        return Err(Errno::INVAL);
    }
    remove(job, job.int(0), &job.path(1)?, flags)
}

fn remove(job: &Job<'_>, directory: i32, path: &[u8], flags: AtFlags) -> Outcome {
    let place = job.place(directory, path)?;
    rustix::fs::statat(&place.directory, place.name.as_slice(), AtFlags::SYMLINK_NOFOLLOW)?;
    job.check_place(&place, Rights::CREATE)?;
    job.still_waits()?;
    done(rustix::fs::unlinkat(&place.directory, place.name.as_slice(), flags))
}

pub(super) fn rename(job: &Job<'_>) -> Outcome {
    move_file(job, (HERE, 0), (HERE, 1), 0)
}

pub(super) fn renameat(job: &Job<'_>) -> Outcome {
    move_file(job, (job.int(0), 1), (job.int(2), 3), 0)
}

pub(super) fn renameat2(job: &Job<'_>) -> Outcome {
    move_file(job, (job.int(0), 1), (job.int(2), 3), job.unsigned(4))
}

/// Whether what lies at `from` may go by the name `to`: its rights must not grow by that, nor those of what lies beneath.
/// Where they would, it is as between file systems, so that programs copy instead (as Landlock has it).
fn may_move(job: &Job<'_>, from: &Place, to: &Place) -> Result<(), Errno> {
    let policy = &job.monitor.policy;
    if !policy.rights(&from.path).contains(policy.rights(&to.path))
        || policy.trees.differ_beneath(&from.path)
        || policy.trees.differ_beneath(&to.path)
        || job.keeps_names(&from.path)
    {
        return Err(Errno::XDEV);
    }
    Ok(())
}

fn move_file(job: &Job<'_>, from: (i32, usize), to: (i32, usize), flags: u32) -> Outcome {
    let flags = RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
    let old = job.place(from.0, &job.path(from.1)?)?;
    let new = job.place(to.0, &job.path(to.1)?)?;
    rustix::fs::statat(&old.directory, old.name.as_slice(), AtFlags::SYMLINK_NOFOLLOW)?;
    job.check_place(&old, Rights::CREATE)?;
    job.check_place(&new, Rights::CREATE)?;
    may_move(job, &old, &new)?;
    if flags.contains(RenameFlags::EXCHANGE) {
        may_move(job, &new, &old)?;
    }
    job.still_waits()?;
    done(rustix::fs::renameat_with(
        &old.directory,
        old.name.as_slice(),
        &new.directory,
        new.name.as_slice(),
        flags,
    ))
}

pub(super) fn link(job: &Job<'_>) -> Outcome {
    hard_link(job, HERE, (HERE, 1), 0, 0)
}

pub(super) fn linkat(job: &Job<'_>) -> Outcome {
    hard_link(job, job.int(0), (job.int(2), 3), job.int(4), 1)
}

/// A second name must not give more than the first: its rights are part of those over the file.
fn hard_link(job: &Job<'_>, directory: i32, to: (i32, usize), flags: i32, path: usize) -> Outcome {
    if flags & !(libc::AT_EMPTY_PATH | libc::AT_SYMLINK_FOLLOW) != 0 {
        return Err(Errno::INVAL);
    }
    let path = job.path(path)?;
    let found = if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
        job.examine(job.directory(directory)?, Some(Rights::empty()))?
    } else {
        job.find(directory, &path, flags & libc::AT_SYMLINK_FOLLOW != 0)?
    };
    let place = new_place(job, to.0, &job.path(to.1)?)?;
    job.check(&found, Rights::STAT)?;
    let (rights, _) = job.rights(&found);
    if !rights.contains(job.monitor.policy.rights(&place.path)) {
        return Err(Errno::XDEV);
    }
    let mut number = [0; 16];
    let number = decimal(found.file.as_raw_fd(), &mut number);
    done(rustix::fs::linkat(
        job.monitor.own.descriptors(),
        number,
        &place.directory,
        place.name.as_slice(),
        AtFlags::SYMLINK_FOLLOW,
    ))
}

pub(super) fn symlink(job: &Job<'_>) -> Outcome {
    soft_link(job, HERE, 1)
}

pub(super) fn symlinkat(job: &Job<'_>) -> Outcome {
    soft_link(job, job.int(1), 2)
}

/// Where it leads is nobody's business until somebody follows it.
fn soft_link(job: &Job<'_>, directory: i32, path: usize) -> Outcome {
    let target = job.path(0)?;
    if target.is_empty() {
        return Err(Errno::NOENT);
    }
    let place = new_place(job, directory, &job.path(path)?)?;
    done(rustix::fs::symlinkat(target, &place.directory, place.name.as_slice()))
}
