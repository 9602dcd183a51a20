//! File systems that programs see where the kernel has none: `--mount /opt/app=app.tar`.
//!
//! The file systems are real ones: the launcher has made a tmpfs from each archive, read-only, and attached nowhere. The
//! steward holds them open, so they can be reached by a path through its descriptors:
//!
//! ```text
//!  open("/opt/app/lib/x")  -->  open("/proc/STEWARD/fd/N/lib/x")  -->  a descriptor of the kernel's
//!  getcwd()                -->  "(unreachable)/lib"               -->  "/opt/app/lib"
//! ```
//!
//! So descriptors, directories, mappings, the working directory, forks and programs executed from there need nothing from the
//! executive, and last as long as any file system's: what is treated is paths that are given, and the few that are told
//! (`getcwd`, `readlink` below `/proc`). Writing fails with EROFS, which is the kernel's.
//!
//! Whether a path leads there is told by its names, as rules of a policy do: `..` takes a name away. A path that the kernel
//! does not find is followed through its links, since one of them may lead there ([`through_links`]).

mod scripts;

use core::mem::MaybeUninit;

use super::super::kernel::{ENAMETOOLONG, ERANGE, address_mut, call, failed};
use super::super::paths::{self, Room, normal};
use super::super::policy::{Policy, policy};
use super::super::user;
use super::{Call, unusable};
use crate::numbers;
use crate::policy::{Mount, NO_ARGUMENT};

/// Calls that take paths, or tell the working directory.
pub(crate) const CALLS: [u64; 53] = [
    numbers::open,
    numbers::stat,
    numbers::lstat,
    numbers::access,
    numbers::execve,
    numbers::truncate,
    numbers::getcwd,
    numbers::chdir,
    numbers::rename,
    numbers::mkdir,
    numbers::rmdir,
    numbers::creat,
    numbers::link,
    numbers::unlink,
    numbers::symlink,
    numbers::readlink,
    numbers::chmod,
    numbers::chown,
    numbers::lchown,
    numbers::utime,
    numbers::mknod,
    numbers::statfs,
    numbers::chroot,
    numbers::setxattr,
    numbers::lsetxattr,
    numbers::getxattr,
    numbers::lgetxattr,
    numbers::listxattr,
    numbers::llistxattr,
    numbers::removexattr,
    numbers::lremovexattr,
    numbers::utimes,
    numbers::inotify_add_watch,
    numbers::openat,
    numbers::mkdirat,
    numbers::mknodat,
    numbers::fchownat,
    numbers::futimesat,
    numbers::newfstatat,
    numbers::unlinkat,
    numbers::renameat,
    numbers::linkat,
    numbers::symlinkat,
    numbers::readlinkat,
    numbers::fchmodat,
    numbers::faccessat,
    numbers::utimensat,
    numbers::name_to_handle_at,
    numbers::renameat2,
    numbers::execveat,
    numbers::statx,
    numbers::openat2,
    numbers::faccessat2,
];

/// Room for the paths of a call: on the program's stack.
const ROOM: usize = 8 << 10;
const LONGEST: usize = 4096;
const AT_FDCWD: i32 = -100;
const ENOENT: i64 = 2;
/// What the kernel puts before a working directory that no path from the root leads to.
const UNREACHABLE: &[u8] = b"(unreachable)";
/// How many links the kernel follows, too.
const MOST_LINKS: u32 = 40;

/// Answers one of [`CALLS`].
pub(crate) fn answer(call: &mut Call<'_>) -> i64 {
    let Some(policy) = policy().filter(|policy| !policy.mounts().is_empty() && !unusable()) else {
        return call.pass_on();
    };
    if call.number == numbers::getcwd {
        return working_directory(call, policy.mounts());
    }
    with_paths(call, policy)
}

#[inline(never)]
fn with_paths(call: &mut Call<'_>, policy: Policy) -> i64 {
    let mut room = MaybeUninit::<[u8; ROOM]>::uninit();
    // SAFETY: bytes that are written before they are read: nothing that `Room` has not handed out is looked at.
    let mut room = Room::new(unsafe { &mut *room.as_mut_ptr() });
    let mounts = policy.mounts();
    let shape = policy.shape(call.number);
    let given = call.arguments;
    let argument = |index: u8| given.get(usize::from(index)).copied();
    let mut moved = false;
    for (path, directory) in shape.path.into_iter().zip(shape.directory) {
        let Some(path_given) = argument(path) else { continue };
        match room.take(|room| translate(mounts, argument(directory), path_given, room)) {
            Ok([]) => {}
            Ok(new) => {
                moved = true;
                if let Some(place) = call.arguments.get_mut(usize::from(path)) {
                    *place = new.as_ptr().addr() as u64;
                }
            }
            // The kernel finds out what is wrong with it.
            Err(_) => {}
        }
    }
    if call.number == numbers::execve
        && let Some(result) = scripts::execute(call, mounts, policy, given[0], moved, &mut room)
    {
        return result;
    }
    let mut result = call.pass_on();
    if result == -ENOENT && !moved && shape.path[0] != NO_ARGUMENT {
        let (path, directory) = (shape.path[0], shape.directory[0]);
        let found =
            room.take(|room| through_links(mounts, argument(directory), argument(path).unwrap_or(0), room));
        if let (Ok([_, ..]), Some(place)) = (&found, call.arguments.get_mut(usize::from(path))) {
            *place = found.as_ref().map_or(0, |new| new.as_ptr().addr() as u64);
            result = call.pass_on();
        }
    }
    if result > 0 && !moved && matches!(call.number, numbers::readlink | numbers::readlinkat) {
        return link_told(call, mounts, result);
    }
    result
}

/// The mount that a path leads to, or below, and the rest of it.
fn within<'a, 'b>(mounts: &'a [Mount], policy: Policy, path: &'b [u8]) -> Option<(&'a Mount, &'b [u8])> {
    mounts.iter().find_map(|mount| {
        let rest = path.strip_prefix(policy.bytes(mount.prefix))?;
        (rest.is_empty() || rest.first() == Some(&b'/')).then_some((mount, rest))
    })
}

fn append(to: &mut [u8], length: usize, bytes: &[u8]) -> Result<usize, i64> {
    let place = to.get_mut(length..length + bytes.len()).ok_or(-ENAMETOOLONG)?;
    place.copy_from_slice(bytes);
    Ok(length + bytes.len())
}

/// Writes the path by which the kernel finds what the program means, with a zero at its end. Nothing: as it was given.
fn translate(mounts: &[Mount], directory: Option<u64>, path: u64, to: &mut [u8]) -> Result<usize, i64> {
    let (result, room) = to.split_at_mut(to.len() / 2);
    let length = user::read_string(path, room)?;
    let raw = if length < room.len() { room.get(..length) } else { None }.ok_or(-ENAMETOOLONG)?;
    if raw.is_empty() {
        return Ok(0);
    }
    let upwards = raw.split(|byte| *byte == b'/').any(|name| name == b"..");
    let base =
        if raw.first() == Some(&b'/') { Base::Elsewhere(0) } else { base_of(mounts, directory, result)? };
    let start = match base {
        // The kernel finds its way, as long as it does not lead out.
        Base::Within(_) if !upwards => return Ok(0),
        Base::Within(start) | Base::Elsewhere(start) => start,
    };
    let Some(policy) = policy() else { return Ok(0) };
    // Up, out of a mount that the path led into.
    let mut out = matches!(base, Base::Within(_));
    let mut length = normal(result, start, b"")?;
    for name in raw.split(|byte| *byte == b'/') {
        length = normal(result, length, name)?;
        out = out || within(mounts, policy, result.get(..length).unwrap_or(&[])).is_some();
    }
    let as_directory = raw.ends_with(b"/") || raw.ends_with(b"/.");
    moved(mounts, to, length, as_directory, out)
}

/// What becomes of the path from the root that `to` begins with, and which room of half its length follows.
fn moved(
    mounts: &[Mount],
    to: &mut [u8],
    length: usize,
    as_directory: bool,
    out: bool,
) -> Result<usize, i64> {
    let Some(policy) = policy() else { return Ok(0) };
    let (path, room) = to.split_at_mut(to.len() / 2);
    let path = path.get(..length).unwrap_or(&[]);
    let mut end = match within(mounts, policy, path) {
        Some((mount, rest)) => {
            let end = append(room, 0, policy.bytes(mount.backing))?;
            // The path through a descriptor is itself a link: it is to be followed.
            append(room, end, if rest.is_empty() { b"/." } else { rest })?
        }
        None if out => append(room, 0, path)?,
        None => return Ok(0),
    };
    if as_directory {
        end = append(room, end, b"/")?;
    }
    end = append(room, end, b"\0")?;
    let from = to.len() / 2;
    to.copy_within(from..from + end, 0);
    Ok(end)
}

/// The directory that a relative path begins at, whose path is written in so many bytes.
enum Base {
    /// In one of the mounts.
    Within(usize),
    Elsewhere(usize),
}

/// Writes the path of the directory that relative paths begin at.
fn base_of(mounts: &[Mount], directory: Option<u64>, to: &mut [u8]) -> Result<Base, i64> {
    // The kernel reads an `int`.
    let descriptor = directory.map_or(AT_FDCWD, |directory| directory as i32);
    let mut mount = None;
    let length = if descriptor == AT_FDCWD {
        let length = getcwd(to)?;
        if to.starts_with(UNREACHABLE) {
            mount = mount_of(mounts, AT_FDCWD, c".".as_ptr().addr() as u64, 0);
            to.copy_within(UNREACHABLE.len()..length, 0);
            length - UNREACHABLE.len()
        } else {
            length
        }
    } else {
        mount = mount_of(mounts, descriptor, c"".as_ptr().addr() as u64, AT_EMPTY_PATH);
        paths::of_descriptor(descriptor, to)?
    };
    match mount {
        Some(mount) => Ok(Base::Within(prefixed(mount, to, length)?)),
        None => Ok(Base::Elsewhere(length)),
    }
}

/// Puts a mount's prefix before a path in it.
fn prefixed(mount: &Mount, to: &mut [u8], length: usize) -> Result<usize, i64> {
    let prefix = policy().map_or(&[][..], |policy| policy.bytes(mount.prefix));
    // The mount itself is called "/" there.
    let length = if to.get(..length) == Some(b"/") { 0 } else { length };
    if prefix.len() + length > to.len() {
        return Err(-ENAMETOOLONG);
    }
    to.copy_within(0..length, prefix.len());
    append(to, 0, prefix)?;
    Ok(prefix.len() + length)
}

const AT_EMPTY_PATH: u64 = 0x1000;

/// The mount that a file is in.
fn mount_of(mounts: &[Mount], directory: i32, path: u64, flags: u64) -> Option<&Mount> {
    let mut status = [0_u64; 18];
    let directory = i64::from(directory).cast_unsigned();
    // SAFETY: `struct stat` has 144 bytes.
    let result =
        unsafe { call(numbers::newfstatat, [directory, path, address_mut(&mut status), flags, 0, 0]) };
    if failed(result) {
        return None;
    }
    // `st_dev` comes first.
    mounts.iter().find(|mount| mount.device == status[0])
}

fn getcwd(to: &mut [u8]) -> Result<usize, i64> {
    let arguments = [to.as_mut_ptr().addr() as u64, to.len() as u64, 0, 0, 0, 0];
    // SAFETY: the kernel writes into the slice.
    let length = unsafe { call(numbers::getcwd, arguments) };
    // With its zero.
    if failed(length) { Err(length) } else { Ok((length as usize).saturating_sub(1)) }
}

/// `getcwd`.
#[inline(never)]
fn working_directory(call: &mut Call<'_>, mounts: &[Mount]) -> i64 {
    let mut room = [0_u8; LONGEST];
    let Ok(Base::Within(length)) = base_of(mounts, None, &mut room) else { return call.pass_on() };
    let [to, size, ..] = call.arguments;
    if length as u64 >= size {
        return -ERANGE;
    }
    // With its zero, which the room still holds behind paths that were moved towards its beginning or not.
    if let Some(end) = room.get_mut(length) {
        *end = 0;
    }
    let path = room.get(..=length).unwrap_or(&[]);
    // SAFETY: the program asked for its working directory there.
    match unsafe { user::write_bytes(to, path) } {
        Ok(()) => path.len().cast_signed() as i64,
        Err(error) => error,
    }
}

/// What a link below `/proc` leads to: `result` bytes of it were told, from the root of its file system.
#[inline(never)]
fn link_told(call: &mut Call<'_>, mounts: &[Mount], result: i64) -> i64 {
    let [directory, path, to, size] = match (call.number, call.arguments) {
        (numbers::readlink, [path, to, size, ..]) => [AT_FDCWD as u64, path, to, size],
        (_, [directory, path, to, size, ..]) => [directory, path, to, size],
    };
    let mut room = [0_u8; LONGEST];
    let Ok(length) = user::read_string(path, &mut room) else { return result };
    let named = room.get(..length).unwrap_or(&[]);
    // Others are told as they are written.
    if !(named.starts_with(b"/proc/") || named.starts_with(b"/dev/fd/") || named.first() != Some(&b'/')) {
        return result;
    }
    let Some(mount) = mount_of(mounts, directory as i32, path, 0) else { return result };
    let magic = [b"/proc/self/".as_slice(), b"/proc/", b"/dev/fd/"];
    let by_name = magic.iter().any(|start| named.starts_with(start));
    if !by_name && !is_below_proc(directory as i32) {
        return result;
    }
    let whole = room.as_mut_ptr().addr() as u64;
    let again = match call.number {
        numbers::readlink => [path, whole, LONGEST as u64, 0, 0, 0],
        _ => [directory, path, whole, LONGEST as u64, 0, 0],
    };
    // SAFETY: the kernel writes into the room.
    let length = unsafe { self::call(call.number, again) };
    if failed(length) || room.first() != Some(&b'/') {
        return result;
    }
    let Ok(length) = prefixed(mount, &mut room, length as usize) else { return -ENAMETOOLONG };
    let told = room.get(..length.min(size as usize)).unwrap_or(&[]);
    // SAFETY: the program asked for the link there.
    match unsafe { user::write_bytes(to, told) } {
        Ok(()) => told.len().cast_signed() as i64,
        Err(error) => error,
    }
}

fn is_below_proc(directory: i32) -> bool {
    let mut room = [0_u8; 64];
    if directory == AT_FDCWD {
        return getcwd(&mut room).is_ok() && room.starts_with(b"/proc");
    }
    paths::of_descriptor(directory, &mut room).is_ok() && room.starts_with(b"/proc")
}

/// The same as [`translate`] for a path that the kernel did not find: one of its names may be a link into a mount.
fn through_links(mounts: &[Mount], directory: Option<u64>, path: u64, to: &mut [u8]) -> Result<usize, i64> {
    let Some(policy) = policy() else { return Ok(0) };
    let half = to.len() / 2;
    let (whole, room) = to.split_at_mut(half);
    let mut length = paths::absolute(directory, path, whole)?;
    if whole.first() != Some(&b'/') {
        return Ok(0);
    }
    for _ in 0..MOST_LINKS {
        // The first name that is a link, or is not there.
        let mut found = None;
        let mut end = 0;
        while end < length && found.is_none() {
            let next = whole.get(end + 1..length).unwrap_or(&[]).iter().position(|byte| *byte == b'/');
            let name_end = next.map_or(length, |next| end + 1 + next);
            let after = whole.get(name_end).copied().unwrap_or(0);
            *whole.get_mut(name_end).ok_or(-ENAMETOOLONG)? = 0;
            let arguments =
                [whole.as_ptr().addr() as u64, room.as_mut_ptr().addr() as u64, room.len() as u64, 0, 0, 0];
            // SAFETY: a string that ends with zero, and a slice to write to.
            let result = unsafe { call(numbers::readlink, arguments) };
            *whole.get_mut(name_end).ok_or(-ENAMETOOLONG)? = after;
            if result == -ENOENT {
                return Ok(0);
            }
            if !failed(result) {
                found = Some((end, name_end, result as usize));
            }
            end = name_end;
        }
        let Some((start, name_end, link)) = found else { return Ok(0) };
        // The link's content, and what comes behind its name.
        let rest = length - name_end;
        let tail = room.get_mut(link..link + rest).ok_or(-ENAMETOOLONG)?;
        tail.copy_from_slice(whole.get(name_end..length).unwrap_or(&[]));
        let content = room.get(..link + rest).unwrap_or(&[]);
        let from = if content.first() == Some(&b'/') { 0 } else { start };
        length = normal(whole, from, content)?;
        if within(mounts, policy, whole.get(..length).unwrap_or(&[])).is_some() {
            return moved(mounts, to, length, false, false);
        }
    }
    Ok(0)
}
