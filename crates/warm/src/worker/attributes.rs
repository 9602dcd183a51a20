//! What else a process is, that rollback does not put back: who it is, where it runs, what it has forsworn.
//!
//! Some of it can be set back. The rest (privileges given up, filters installed, another root) cannot, and a worker
//! that has changed so is replaced.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};

/// The attributes, as numbers to compare. No heap: what is written between requests has to be captured anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Attributes {
    users: [u32; 3],
    groups: [u32; 3],
    others: [u32; MOST_GROUPS],
    capabilities: [u32; 6],
    session: i32,
    process_group: i32,
    scheduler: (i32, i32),
    processors: [u8; 128],
    io_priority: i64,
    subreaper: i32,
    forsworn: [i32; 4],
    root: (u64, u64),
    namespaces: [(u64, u64); NAMESPACES.len()],
}

/// Supplementary groups that are compared; whoever is in more is told apart by the first ones.
const MOST_GROUPS: usize = 64;

const PR_GET_SECUREBITS: i32 = 27;
/// Kinds of namespaces that a privileged process can leave without a trace elsewhere.
const NAMESPACES: [&CStr; 7] =
    [c"cgroup", c"ipc", c"mnt", c"net", c"pid_for_children", c"time_for_children", c"uts"];

impl Attributes {
    /// What the process is now; `directory` is `/proc/self/ns`.
    pub(super) fn capture(directory: &OwnedFd) -> Self {
        let capabilities = capabilities();
        // Without privilege (effective capabilities) none of these can be left but together with the user namespace,
        // and then user ids change, too.
        let privileged = capabilities[0] != 0 || capabilities[3] != 0;
        let mut users = [0; 3];
        let mut groups = [0; 3];
        // SAFETY: plain system calls; every pointer is to a live local of the size that the call fills.
        unsafe {
            libc::getresuid(&raw mut users[0], &raw mut users[1], &raw mut users[2]);
            libc::getresgid(&raw mut groups[0], &raw mut groups[1], &raw mut groups[2]);
            let mut parameters = MaybeUninit::<libc::sched_param>::zeroed();
            libc::sched_getparam(0, parameters.as_mut_ptr());
            let mut subreaper = 0;
            libc::prctl(libc::PR_GET_CHILD_SUBREAPER, &raw mut subreaper);
            Self {
                users,
                groups,
                others: supplementary_groups(),
                capabilities,
                session: libc::getsid(0),
                process_group: libc::getpgrp(),
                scheduler: (libc::sched_getscheduler(0), parameters.assume_init().sched_priority),
                processors: processors(),
                io_priority: libc::syscall(libc::SYS_ioprio_get, 1, 0),
                subreaper,
                forsworn: [
                    libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0),
                    libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0),
                    libc::prctl(PR_GET_SECUREBITS, 0, 0, 0, 0),
                    libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0),
                ],
                root: identity(rustix::fs::CWD, c"/"),
                namespaces: if privileged {
                    NAMESPACES.map(|name| identity(directory, name))
                } else {
                    Default::default()
                },
            }
        }
    }

    /// Sets back what has changed.
    ///
    /// # Errors
    /// What cannot be set back.
    pub(super) fn restore(&self, directory: &OwnedFd) -> Result<(), String> {
        // Whether memory to come is to be locked (mlockall(2)) cannot be asked, but it can be said.
        // SAFETY: plain system call.
        unsafe { libc::munlockall() };
        let now = Self::capture(directory);
        if now == *self {
            return Ok(());
        }
        self.set_back(&now);
        let after = Self::capture(directory);
        let differences = [
            ("users", after.users != self.users),
            ("groups", after.groups != self.groups || after.others != self.others),
            ("capabilities", after.capabilities != self.capabilities),
            ("session", (after.session, after.process_group) != (self.session, self.process_group)),
            ("scheduling", after.scheduler != self.scheduler || after.processors != self.processors),
            ("input and output priority", after.io_priority != self.io_priority),
            ("subreaper", after.subreaper != self.subreaper),
            ("system call filter or the like", after.forsworn != self.forsworn),
            ("root directory", after.root != self.root),
            ("namespaces", after.namespaces != self.namespaces),
        ];
        let kept: Vec<_> =
            differences.iter().filter(|(_, differs)| *differs).map(|(name, _)| *name).collect();
        if kept.is_empty() { Ok(()) } else { Err(format!("changed for good: {}", kept.join(", "))) }
    }

    /// Tries; whether it helped, the connection sees.
    fn set_back(&self, now: &Self) {
        // SAFETY: plain system calls; every pointer is to a live local of the size that the call reads.
        unsafe {
            if now.processors != self.processors {
                libc::syscall(
                    libc::SYS_sched_setaffinity,
                    0,
                    self.processors.len(),
                    self.processors.as_ptr(),
                );
            }
            if now.scheduler != self.scheduler {
                let mut parameters = MaybeUninit::<libc::sched_param>::zeroed();
                parameters.assume_init_mut().sched_priority = self.scheduler.1;
                libc::sched_setscheduler(0, self.scheduler.0, parameters.as_ptr());
            }
            if now.io_priority != self.io_priority {
                libc::syscall(libc::SYS_ioprio_set, 1, 0, self.io_priority);
            }
            if now.subreaper != self.subreaper {
                libc::prctl(libc::PR_SET_CHILD_SUBREAPER, libc::c_long::from(self.subreaper));
            }
            if now.forsworn[3] != self.forsworn[3] {
                libc::prctl(libc::PR_SET_THP_DISABLE, libc::c_long::from(self.forsworn[3]), 0, 0, 0);
            }
            if now.users != self.users {
                libc::setresuid(self.users[0], self.users[1], self.users[2]);
            }
            if now.groups != self.groups {
                libc::setresgid(self.groups[0], self.groups[1], self.groups[2]);
            }
        }
    }
}

/// Effective, permitted and inheritable capabilities, lower halves first.
fn capabilities() -> [u32; 6] {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    let mut data = [0_u32; 6];
    // SAFETY: the kernel reads a header of two words and fills two structures of three words.
    unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), data.as_mut_ptr()) };
    data
}

fn supplementary_groups() -> [u32; MOST_GROUPS] {
    let mut groups = [0_u32; MOST_GROUPS];
    // SAFETY: pointer and length are an array's. With more groups than fit the array stays as it is, every time.
    unsafe { libc::getgroups(64, groups.as_mut_ptr()) };
    groups
}

/// The mask of processors; with more than 1,024 of them, zeros every time.
fn processors() -> [u8; 128] {
    let mut mask = [0_u8; 128];
    // SAFETY: pointer and length are an array's.
    unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, mask.len(), mask.as_mut_ptr()) };
    mask
}

fn identity(directory: impl AsFd, path: &CStr) -> (u64, u64) {
    rustix::fs::statat(directory, path, AtFlags::empty()).map_or((0, 0), |found| (found.st_dev, found.st_ino))
}

/// Opens the directory for [`Attributes::capture`].
pub(super) fn open_namespaces() -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(c"/proc/self/ns", flags, Mode::empty())?;
    rustix::io::fcntl_dupfd_cloexec(&directory, crate::descriptors::first_reserved())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_set_back_is_and_what_cannot_is_named() {
        // In a child, since some of it stays.
        // SAFETY: the child ends by `_exit` and takes no locks of other threads but the allocator's, which glibc
        // makes usable after fork.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let directory = open_namespaces().unwrap();
            let before = Attributes::capture(&directory);
            let unchanged = before.restore(&directory).is_ok();
            // SAFETY: plain system calls.
            let (restored, refused) = unsafe {
                let mut one = [0; 128];
                one[0] = 1;
                libc::syscall(libc::SYS_sched_setaffinity, 0, one.len(), one.as_ptr());
                libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1);
                let restored =
                    before.restore(&directory).is_ok() && Attributes::capture(&directory) == before;
                libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
                (restored, before.restore(&directory))
            };
            let named = refused.is_err_and(|message| message.contains("filter"));
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!(unchanged && restored && named))) };
        }
        let mut status = -1;
        // SAFETY: the pointer is to a live local.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
    }
}
