//! User namespaces, who made them (ioctl_nsfs(2)), and namespaces of one's own (unshare(2)).

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::{Error, Result};

/// `NS_GET_PARENT`.
const GET_PARENT: u64 = 0xb702;
/// `NS_GET_OWNER_UID`.
const GET_OWNER_UID: u64 = 0xb704;
/// How deep user namespaces can be nested.
const MAX_DEPTH: usize = 33;

/// Returns the user who owns the user namespace that is a child of this process' own and that the process `pid`, or a parent of its
/// user namespace, is in; `None` if the process is in this process' own.
///
/// A user who makes a user namespace may have further user IDs there. What all of these do is this user's.
///
/// # Errors
/// Those of opening `/proc/PID/ns/user`; `EPERM` if the process is in a user namespace that is no descendant of this one's.
pub fn owner_of_user_namespace(pid: i32) -> Result<Option<u32>> {
    let own = open("/proc/self/ns/user")?;
    let mut inner = open(&format!("/proc/{pid}/ns/user"))?;
    if is_same(own.as_fd(), inner.as_fd()) {
        return Ok(None);
    }
    for _ in 0..MAX_DEPTH {
        let parent = parent(inner.as_fd())?;
        if is_same(own.as_fd(), parent.as_fd()) {
            return owner(inner.as_fd()).map(Some);
        }
        inner = parent;
    }
    Err(Error::new("NS_GET_PARENT", MAX_DEPTH, Errno::LOOP))
}

/// A new user namespace in which the user and the group of this process have no IDs yet.
#[derive(Debug)]
#[must_use = "without IDs this process is nobody"]
pub struct Unmapped {
    user: u32,
    group: u32,
}

/// Moves this process, which should have one thread, to new namespaces (`CLONE_NEW...`): by itself, or where it may not, from inside of a new
/// user namespace, in which it has all capabilities. There [`Unmapped::map`] is to be called next.
///
/// # Errors
/// That of unshare(2) without a user namespace, if it fails with one, too. Then nothing has changed.
pub fn unshare(flags: i32) -> Result<Option<Unmapped>> {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    // SAFETY: new namespaces concern no memory of this process.
    let unshare = |flags: i32| unsafe { syscall!(Sysno::unshare, flags) };
    match unshare(flags) {
        Ok(_) => Ok(None),
        Err(errno) => match unshare(flags | libc::CLONE_NEWUSER) {
            Ok(_) => Ok(Some(Unmapped { user, group })),
            Err(_) => Err(Error::raw("unshare", usize::try_from(flags).unwrap_or(0), errno)),
        },
    }
}

impl Unmapped {
    /// Gives user and group the IDs that they have outside. Others' files belong to nobody there, and supplementary groups stay without being
    /// seen.
    ///
    /// # Errors
    /// Those of writing `/proc/self/setgroups`, `/proc/self/uid_map` and `/proc/self/gid_map`.
    pub fn map(self) -> Result<()> {
        let write = |operation, path: &str, text: &str| {
            let written = std::fs::write(path, text);
            written
                .map_err(|error| Error::new(operation, 0, Errno::from_io_error(&error).unwrap_or(Errno::IO)))
        };
        let same = |id: u32| format!("{id} {id} 1");
        write("/proc/self/setgroups", "/proc/self/setgroups", "deny")?;
        write("/proc/self/uid_map", "/proc/self/uid_map", &same(self.user))?;
        write("/proc/self/gid_map", "/proc/self/gid_map", &same(self.group))
    }
}

fn open(path: &str) -> Result<OwnedFd> {
    let opened = File::open(path).map(OwnedFd::from);
    opened.map_err(|error| Error::new("open", 0, Errno::from_io_error(&error).unwrap_or(Errno::NOENT)))
}

fn is_same(a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> bool {
    let name = |fd| rustix::fs::fstat(fd).ok().map(|found| (found.st_dev, found.st_ino));
    name(a).is_some_and(|name_a| Some(name_a) == name(b))
}

fn parent(namespace: BorrowedFd<'_>) -> Result<OwnedFd> {
    // SAFETY: the request takes no argument and touches no memory of this process.
    let fd = unsafe { syscall!(Sysno::ioctl, namespace.as_raw_fd(), GET_PARENT, 0) }
        .map_err(|errno| Error::raw("NS_GET_PARENT", 0, errno))?;
    // SAFETY: the call has succeeded, so the descriptor is new, and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).unwrap_or(-1)) })
}

fn owner(namespace: BorrowedFd<'_>) -> Result<u32> {
    let mut uid = 0_u32;
    // SAFETY: the kernel writes one user ID, to `uid`.
    unsafe { syscall!(Sysno::ioctl, namespace.as_raw_fd(), GET_OWNER_UID, &raw mut uid) }
        .map_err(|errno| Error::raw("NS_GET_OWNER_UID", 0, errno))?;
    Ok(uid)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_of_this_namespace_has_no_owner() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(owner_of_user_namespace(own).unwrap(), None);
        assert!(owner_of_user_namespace(-1).is_err());
    }

    #[test]
    fn nested_namespaces_belong_to_who_made_the_outermost() {
        let user = rustix::process::geteuid().as_raw();
        for script in ["exec sleep 100", "exec unshare --user --map-root-user sleep 100"] {
            let mut child = Command::new("unshare")
                .args(["--user", "--map-root-user", "sh", "-c", script])
                .stderr(std::process::Stdio::null())
                .spawn()
                .unwrap();
            let pid = i32::try_from(child.id()).unwrap();
            let mut found = Ok(None);
            for _ in 0..2000 {
                found = owner_of_user_namespace(pid);
                let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                if name == "sleep\n" || !matches!(child.try_wait(), Ok(None)) {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            if matches!(child.try_wait(), Ok(Some(_))) {
                orrery_testing::skipped!("no user namespace can be made here");
                return;
            }
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(found.unwrap(), Some(user), "{script}");
        }
    }
}
