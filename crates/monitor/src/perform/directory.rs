//! Making, removing and renaming.

use std::os::fd::AsRawFd;

use rustix::fs::{AtFlags, FileType, Mode, RenameFlags};
use rustix::io::Errno;

use crate::answer::{Answer, Outcome};
use crate::file::DirectoryEntry;
use crate::identity::decimal;
use crate::log::Event;
use crate::made_files::OWN;
use crate::policy::Rights;
use crate::syscall::{Syscall, exists};

const HERE: i32 = libc::AT_FDCWD;

/// The directory in which a path's last name is.
pub(super) fn parent(path: &[u8]) -> &[u8] {
    &path[..path.iter().rposition(|&byte| byte == b'/').unwrap_or(0)]
}

pub(super) fn mkdir(syscall: &Syscall<'_>) -> Outcome {
    make_directory(syscall, HERE, 0)
}

pub(super) fn mkdirat(syscall: &Syscall<'_>) -> Outcome {
    make_directory(syscall, syscall.int(0), 1)
}

/// The place for something new. That something is there already is reported before the refusal to make it: `mkdir -p`
/// and its like try every directory on the way.
fn new_place(syscall: &Syscall<'_>, directory: i32, path: &[u8]) -> Result<NewPlace, Errno> {
    let place = syscall.entry(directory, path)?;
    let visible = syscall.rights_at(&place.path).contains(Rights::STAT);
    if visible && exists(&place) {
        return Err(Errno::EXIST);
    }
    let own = syscall.check_new_entry(&place, Rights::CREATE)?;
    syscall.still_waits()?;
    Ok(NewPlace { place, own })
}

/// Where something new is made.
struct NewPlace {
    place: DirectoryEntry,
    /// It may be made because it becomes the program's own.
    own: bool,
}

impl NewPlace {
    /// The call's answer, after it was made or not.
    fn done(&self, syscall: &Syscall<'_>, result: Result<(), Errno>) -> Outcome {
        result?;
        syscall.made(&self.place.path, self.own);
        Ok(Answer::Value(0))
    }
}

fn make_directory(syscall: &Syscall<'_>, directory: i32, path: usize) -> Outcome {
    let new = new_place(syscall, directory, &syscall.path(path)?)?;
    let place = &new.place;
    syscall.assume_umask()?;
    let mode = Mode::from_raw_mode(syscall.unsigned(path + 1) & 0o7777);
    new.done(syscall, rustix::fs::mkdirat(&place.directory, place.name.as_slice(), mode))
}

pub(super) fn mknod(syscall: &Syscall<'_>) -> Outcome {
    make_node(syscall, HERE, 0)
}

pub(super) fn mknodat(syscall: &Syscall<'_>) -> Outcome {
    make_node(syscall, syscall.int(0), 1)
}

fn make_node(syscall: &Syscall<'_>, directory: i32, path: usize) -> Outcome {
    let new = new_place(syscall, directory, &syscall.path(path)?)?;
    let place = &new.place;
    let mode = syscall.unsigned(path + 1);
    let kind = match mode & libc::S_IFMT {
        0 => FileType::RegularFile,
        kind => FileType::from_raw_mode(kind),
    };
    // A device is a door to all that it stands for.
    if matches!(kind, FileType::CharacterDevice | FileType::BlockDevice) && syscall.argument(path + 2) != 0 {
        syscall.refuse(&Event::Call { reason: "device nodes reach around every path" });
        return Err(Errno::PERM);
    }
    syscall.assume_umask()?;
    let mode = Mode::from_raw_mode(mode & 0o7777);
    let device = syscall.argument(path + 2);
    new.done(syscall, rustix::fs::mknodat(&place.directory, place.name.as_slice(), kind, mode, device))
}

pub(super) fn unlink(syscall: &Syscall<'_>) -> Outcome {
    remove(syscall, HERE, &syscall.path(0)?, AtFlags::empty())
}

pub(super) fn rmdir(syscall: &Syscall<'_>) -> Outcome {
    remove(syscall, HERE, &syscall.path(0)?, AtFlags::REMOVEDIR)
}

pub(super) fn unlinkat(syscall: &Syscall<'_>) -> Outcome {
    let flags = AtFlags::from_bits_retain(syscall.unsigned(2));
    if !AtFlags::REMOVEDIR.contains(flags) {
        return Err(Errno::INVAL);
    }
    remove(syscall, syscall.int(0), &syscall.path(1)?, flags)
}

fn remove(syscall: &Syscall<'_>, directory: i32, path: &[u8], flags: AtFlags) -> Outcome {
    let place = syscall.entry(directory, path)?;
    rustix::fs::statat(&place.directory, place.name.as_slice(), AtFlags::SYMLINK_NOFOLLOW)?;
    syscall.check_entry(&place, Rights::CREATE)?;
    syscall.still_waits()?;
    rustix::fs::unlinkat(&place.directory, place.name.as_slice(), flags)?;
    syscall.state.made.remove(&place.path);
    Ok(Answer::Value(0))
}

pub(super) fn rename(syscall: &Syscall<'_>) -> Outcome {
    move_file(syscall, (HERE, 0), (HERE, 1), 0)
}

pub(super) fn renameat(syscall: &Syscall<'_>) -> Outcome {
    move_file(syscall, (syscall.int(0), 1), (syscall.int(2), 3), 0)
}

pub(super) fn renameat2(syscall: &Syscall<'_>) -> Outcome {
    move_file(syscall, (syscall.int(0), 1), (syscall.int(2), 3), syscall.unsigned(4))
}

/// Whether what lies at `from` may go by the name `to`: its rights must not grow by that, nor those of what lies
/// beneath. Where they would, it is as between file systems, so that programs copy instead (as Landlock has it).
fn may_move(
    syscall: &Syscall<'_>,
    from: &DirectoryEntry,
    to: &DirectoryEntry,
    own: bool,
) -> Result<(), Errno> {
    let policy = &syscall.state.policy;
    let gained = syscall.rights_at(&to.path) | if own { OWN } else { Rights::empty() };
    if !syscall.rights_at(&from.path).contains(gained)
        || policy.trees.differ_beneath(&from.path)
        || policy.trees.differ_beneath(&to.path)
        || syscall.keeps_names(&from.path)
    {
        return Err(Errno::XDEV);
    }
    Ok(())
}

fn move_file(syscall: &Syscall<'_>, from: (i32, usize), to: (i32, usize), flags: u32) -> Outcome {
    let mut flags = RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
    let old = syscall.entry(from.0, &syscall.path(from.1)?)?;
    let new = syscall.entry(to.0, &syscall.path(to.1)?)?;
    rustix::fs::statat(&old.directory, old.name.as_slice(), AtFlags::SYMLINK_NOFOLLOW)?;
    syscall.check_entry(&old, Rights::CREATE)?;
    let own = syscall.check_new_entry(&new, Rights::CREATE)?;
    may_move(syscall, &old, &new, own)?;
    if flags.contains(RenameFlags::EXCHANGE) {
        may_move(syscall, &new, &old, false)?;
    } else if own {
        // What is there by then was made by another process.
        flags |= RenameFlags::NOREPLACE;
    }
    let fresh = syscall.state.policy.learning && !exists(&new);
    syscall.still_waits()?;
    rustix::fs::renameat_with(
        &old.directory,
        old.name.as_slice(),
        &new.directory,
        new.name.as_slice(),
        flags,
    )?;
    if !flags.contains(RenameFlags::EXCHANGE) {
        syscall.state.made.remove(&old.path);
    }
    if own || fresh {
        syscall.made(&new.path, own);
    }
    if syscall.state.policy.learning {
        syscall.state.recorder.second_name(&old.path, &new.path);
    }
    Ok(Answer::Value(0))
}

pub(super) fn link(syscall: &Syscall<'_>) -> Outcome {
    hard_link(syscall, HERE, (HERE, 1), 0, 0)
}

pub(super) fn linkat(syscall: &Syscall<'_>) -> Outcome {
    hard_link(syscall, syscall.int(0), (syscall.int(2), 3), syscall.int(4), 1)
}

/// A second name must not give more than the first: its rights are part of those over the file.
fn hard_link(syscall: &Syscall<'_>, directory: i32, to: (i32, usize), flags: i32, path: usize) -> Outcome {
    if flags & !(libc::AT_EMPTY_PATH | libc::AT_SYMLINK_FOLLOW) != 0 {
        return Err(Errno::INVAL);
    }
    let path = syscall.path(path)?;
    let found = if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
        syscall.examine(syscall.directory(directory)?, Some(Rights::empty()))?
    } else {
        syscall.find(directory, &path, flags & libc::AT_SYMLINK_FOLLOW != 0)?
    };
    let new = new_place(syscall, to.0, &syscall.path(to.1)?)?;
    let place = &new.place;
    syscall.check(&found, Rights::STAT)?;
    let (rights, name) = syscall.rights(&found);
    let gained = syscall.rights_at(&place.path) | if new.own { OWN } else { Rights::empty() };
    let refused = if syscall.state.policy.learning {
        // What is learnt lists the two apart, unless the program made the first, or both lie in one directory.
        !name.is_empty() && !syscall.state.recorder.is_made(&name) && parent(&name) != parent(&place.path)
    } else {
        // The name of a symbolic link can lead as the link does.
        !rights.contains(gained) || syscall.state.policy.trees.denies_beneath(&place.path, Rights::all())
    };
    if refused {
        let reason = "a second name would have rights that the first has not; programs copy instead";
        syscall.note(&Event::Call { reason });
        return Err(Errno::XDEV);
    }
    let mut number = [0; 16];
    let number = decimal(found.file.as_raw_fd(), &mut number);
    let linked = rustix::fs::linkat(
        syscall.state.identity.descriptors(),
        number,
        &place.directory,
        place.name.as_slice(),
        AtFlags::SYMLINK_FOLLOW,
    );
    if linked.is_ok() && syscall.state.policy.learning && !name.is_empty() {
        syscall.state.recorder.second_name(&name, &place.path);
    }
    new.done(syscall, linked)
}

/// Why a symbolic link is refused.
const LINK_INSTEAD: &str =
    "the policy denies something beneath that name, which a symbolic link would lead elsewhere";

pub(super) fn symlink(syscall: &Syscall<'_>) -> Outcome {
    soft_link(syscall, HERE, 1)
}

pub(super) fn symlinkat(syscall: &Syscall<'_>) -> Outcome {
    soft_link(syscall, syscall.int(1), 2)
}

/// Where it leads does not matter until it is followed. But it cannot stand for a directory beneath which the policy
/// denies something, as that would then be elsewhere for everybody who looks for it by its name.
fn soft_link(syscall: &Syscall<'_>, directory: i32, path: usize) -> Outcome {
    let target = syscall.path(0)?;
    if target.is_empty() {
        return Err(Errno::NOENT);
    }
    let new = new_place(syscall, directory, &syscall.path(path)?)?;
    let place = &new.place;
    if syscall.state.policy.trees.denies_beneath(&place.path, Rights::all()) {
        return Err(syscall.refuse(&Event::Call { reason: LINK_INSTEAD }));
    }
    new.done(syscall, rustix::fs::symlinkat(target, &place.directory, place.name.as_slice()))
}
