//! Which path the kernel has to be given for a path that the program gave.

use crate::executive::abi::syscall::{ENAMETOOLONG, address_mut, call, failed};
use crate::executive::abi::user_memory;
use crate::executive::policy::paths::{self, normal};
use crate::executive::policy::table::{Policy, policy};
use crate::nr;
use crate::policy::Mount;

const AT_FDCWD: i32 = -100;
pub(super) const ENOENT: i64 = 2;

/// What the kernel puts before a working directory that no path from the root leads to.
const UNREACHABLE: &[u8] = b"(unreachable)";

/// How many links the kernel follows, too.
const MOST_LINKS: u32 = 40;

const AT_EMPTY_PATH: u64 = 0x1000;

/// Returns the mount that a path leads to, or below, and the rest of it.
pub(super) fn within<'a, 'b>(
    mounts: &'a [Mount],
    policy: Policy,
    path: &'b [u8],
) -> Option<(&'a Mount, &'b [u8])> {
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
pub(super) fn translate(
    mounts: &[Mount],
    directory: Option<u64>,
    path: u64,
    to: &mut [u8],
) -> Result<usize, i64> {
    let (result, room) = to.split_at_mut(to.len() / 2);
    let length = user_memory::read_string(path, room)?;
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

/// Returns what becomes of the path from the root that `to` begins with, and which room of half its length follows.
pub(super) fn moved(
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
pub(super) enum Base {
    /// In one of the mounts.
    Within(usize),
    Elsewhere(usize),
}

/// Writes the path of the directory that relative paths begin at.
pub(super) fn base_of(mounts: &[Mount], directory: Option<u64>, to: &mut [u8]) -> Result<Base, i64> {
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
        paths::of_fd(descriptor, to)?
    };
    match mount {
        Some(mount) => Ok(Base::Within(prefixed(mount, to, length)?)),
        None => Ok(Base::Elsewhere(length)),
    }
}

/// Puts a mount's prefix before a path in it.
pub(super) fn prefixed(mount: &Mount, to: &mut [u8], length: usize) -> Result<usize, i64> {
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

/// The mount that a file is in.
pub(super) fn mount_of(mounts: &[Mount], directory: i32, path: u64, flags: u64) -> Option<&Mount> {
    let mut status = [0_u64; 18];
    let directory = i64::from(directory).cast_unsigned();
    // SAFETY: `struct stat` has 144 bytes.
    let result = unsafe { call(nr::newfstatat, [directory, path, address_mut(&mut status), flags, 0, 0]) };
    if failed(result) {
        return None;
    }
    // `st_dev` comes first.
    mounts.iter().find(|mount| mount.device == status[0])
}

pub(super) fn getcwd(to: &mut [u8]) -> Result<usize, i64> {
    let arguments = [to.as_mut_ptr().addr() as u64, to.len() as u64, 0, 0, 0, 0];
    // SAFETY: the kernel writes into the slice.
    let length = unsafe { call(nr::getcwd, arguments) };
    // With its zero.
    if failed(length) { Err(length) } else { Ok((length as usize).saturating_sub(1)) }
}

/// The same as [`translate`] for a path that the kernel did not find: one of its names may be a link into a mount.
pub(super) fn through_links(
    mounts: &[Mount],
    directory: Option<u64>,
    path: u64,
    to: &mut [u8],
) -> Result<usize, i64> {
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
            let result = unsafe { call(nr::readlink, arguments) };
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
