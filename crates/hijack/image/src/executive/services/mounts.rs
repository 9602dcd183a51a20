//! File systems that programs see where the kernel has none: `--mount /opt/app=app.tar`.
//!
//! The file systems are real ones: the launcher has made a tmpfs from each archive, read-only, and attached nowhere. The
//! supervisor holds them open, so they can be reached by a path through its descriptors:
//!
//! ```text
//!  open("/opt/app/lib/x")  -->  open("/proc/SUPERVISOR/fd/N/lib/x")  -->  a descriptor of the kernel's
//!  getcwd()                -->  "(unreachable)/lib"               -->  "/opt/app/lib"
//! ```
//!
//! So descriptors, directories, mappings, the working directory, forks and programs executed from there need nothing from the
//! executive, and last as long as any file system's: what is treated is paths that programs give, and the few that calls return
//! (`getcwd`, `readlink` below `/proc`). Writing fails with EROFS, which is the kernel's.
//!
//! Whether a path leads there is decided by its names, as by rules of a policy: `..` takes a name away. A path that the kernel
//! does not find is followed through its links, since one of them may lead there ([`translate`]).

pub(crate) mod scripts;
mod translate;

use crate::executive::abi::syscall::{ENAMETOOLONG, ERANGE, failed};
use crate::executive::abi::{syscall, user_memory};
use crate::executive::policy::paths;
use crate::executive::policy::table::policy;
use crate::executive::services::call::{Next, ServiceCall, Stage, unusable};
use crate::nr;
use crate::policy::{Mount, NO_ARGUMENT};
use translate::{Base, ENOENT, base_of, getcwd, mount_of, prefixed, through_links, translate};

/// Calls that take paths, or return the working directory.
pub(crate) const CALLS: [u64; 53] = [
    nr::open,
    nr::stat,
    nr::lstat,
    nr::access,
    nr::execve,
    nr::truncate,
    nr::getcwd,
    nr::chdir,
    nr::rename,
    nr::mkdir,
    nr::rmdir,
    nr::creat,
    nr::link,
    nr::unlink,
    nr::symlink,
    nr::readlink,
    nr::chmod,
    nr::chown,
    nr::lchown,
    nr::utime,
    nr::mknod,
    nr::statfs,
    nr::chroot,
    nr::setxattr,
    nr::lsetxattr,
    nr::getxattr,
    nr::lgetxattr,
    nr::listxattr,
    nr::llistxattr,
    nr::removexattr,
    nr::lremovexattr,
    nr::utimes,
    nr::inotify_add_watch,
    nr::openat,
    nr::mkdirat,
    nr::mknodat,
    nr::fchownat,
    nr::futimesat,
    nr::newfstatat,
    nr::unlinkat,
    nr::renameat,
    nr::linkat,
    nr::symlinkat,
    nr::readlinkat,
    nr::fchmodat,
    nr::faccessat,
    nr::utimensat,
    nr::name_to_handle_at,
    nr::renameat2,
    nr::execveat,
    nr::statx,
    nr::openat2,
    nr::faccessat2,
];

const LONGEST: usize = 4096;
const AT_FDCWD: i32 = -100;

/// In [`ServiceCall::carried`]: what was done with the call's paths. Zero: the result is the kernel's.
mod state {
    /// No path leads to a mount, by its names.
    pub(super) const AS_GIVEN: u64 = 1;
    /// Some path does, and was changed.
    pub(super) const MOVED: u64 = 2;
    /// One of the path's links leads there.
    pub(super) const THROUGH_LINKS: u64 = 3;
}

/// Answers one of [`CALLS`].
pub(crate) fn step(call: &mut ServiceCall<'_>, stage: Stage) -> Next {
    match stage {
        Stage::Begin => begin(call),
        Stage::Performed(result) => performed(call, result),
    }
}

#[inline(never)]
fn begin(call: &mut ServiceCall<'_>) -> Next {
    let Some(policy) = policy().filter(|policy| !policy.mounts().is_empty() && !unusable()) else {
        return Next::Perform;
    };
    let mounts = policy.mounts();
    if call.number == nr::getcwd {
        return working_directory(call, mounts);
    }
    let shape = policy.shape(call.number);
    let given = call.given;
    let argument = |index: u8| given.get(usize::from(index)).copied();
    let mut moved = false;
    for (path, directory) in shape.path.into_iter().zip(shape.directory) {
        let Some(path_given) = argument(path) else { continue };
        match call.room.take(|room| translate(mounts, argument(directory), path_given, room)) {
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
    if call.number == nr::execve && scripts::prepare(call, mounts, policy, moved).is_some() {
        return Next::Perform;
    }
    call.carried[0] = if moved { state::MOVED } else { state::AS_GIVEN };
    Next::Perform
}

fn performed(call: &mut ServiceCall<'_>, result: i64) -> Next {
    let [state, _] = call.carried;
    let Some(policy) = policy().filter(|_| matches!(state, state::AS_GIVEN | state::THROUGH_LINKS)) else {
        return Next::Return(result);
    };
    let mounts = policy.mounts();
    if result == -ENOENT && state == state::AS_GIVEN {
        let shape = policy.shape(call.number);
        let given = call.given;
        let argument = |index: u8| given.get(usize::from(index)).copied();
        let (path, directory) = (shape.path[0], shape.directory[0]);
        if path != NO_ARGUMENT
            && let Ok(new @ [_, ..]) = call
                .room
                .take(|room| through_links(mounts, argument(directory), argument(path).unwrap_or(0), room))
            && let Some(place) = call.arguments.get_mut(usize::from(path))
        {
            *place = new.as_ptr().addr() as u64;
            call.carried[0] = state::THROUGH_LINKS;
            return Next::Perform;
        }
    }
    if result > 0 && matches!(call.number, nr::readlink | nr::readlinkat) {
        return Next::Return(link_told(call, mounts, result));
    }
    Next::Return(result)
}

/// Handles getcwd(2) with the mounts of the policy.
#[inline(never)]
fn working_directory(call: &ServiceCall<'_>, mounts: &[Mount]) -> Next {
    let mut room = [0_u8; LONGEST];
    let Ok(Base::Within(length)) = base_of(mounts, None, &mut room) else { return Next::Perform };
    let [to, size, ..] = call.arguments;
    if length as u64 >= size {
        return Next::Return(-ERANGE);
    }
    // With its zero, which the room still holds behind paths that were moved towards its beginning or not.
    if let Some(end) = room.get_mut(length) {
        *end = 0;
    }
    let path = room.get(..=length).unwrap_or(&[]);
    // SAFETY: the program asked for its working directory there.
    Next::Return(match unsafe { user_memory::write_bytes(to, path) } {
        Ok(()) => path.len().cast_signed() as i64,
        Err(error) => error,
    })
}

/// Returns the target of a link below `/proc`, of which the kernel has returned `result` bytes, from the root of its file system.
#[inline(never)]
fn link_told(call: &ServiceCall<'_>, mounts: &[Mount], result: i64) -> i64 {
    let [directory, path, to, size] = match (call.number, call.arguments) {
        (nr::readlink, [path, to, size, ..]) => [AT_FDCWD as u64, path, to, size],
        (_, [directory, path, to, size, ..]) => [directory, path, to, size],
    };
    let mut room = [0_u8; LONGEST];
    let Ok(length) = user_memory::read_string(path, &mut room) else { return result };
    let named = room.get(..length).unwrap_or(&[]);
    // Other links are returned as they are.
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
        nr::readlink => [path, whole, LONGEST as u64, 0, 0, 0],
        _ => [directory, path, whole, LONGEST as u64, 0, 0],
    };
    // SAFETY: the kernel writes into the room.
    let length = unsafe { syscall::call(call.number, again) };
    if failed(length) || room.first() != Some(&b'/') {
        return result;
    }
    let Ok(length) = prefixed(mount, &mut room, length as usize) else { return -ENAMETOOLONG };
    let target = room.get(..length.min(size as usize)).unwrap_or(&[]);
    // SAFETY: the program asked for the link there.
    match unsafe { user_memory::write_bytes(to, target) } {
        Ok(()) => target.len().cast_signed() as i64,
        Err(error) => error,
    }
}

fn is_below_proc(directory: i32) -> bool {
    let mut room = [0_u8; 64];
    if directory == AT_FDCWD {
        return getcwd(&mut room).is_ok() && room.starts_with(b"/proc");
    }
    paths::of_fd(directory, &mut room).is_ok() && room.starts_with(b"/proc")
}
