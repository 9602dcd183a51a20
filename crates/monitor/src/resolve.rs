//! From a path that the program gave to the file that it means, held fast.
//!
//! The answer is a descriptor (`O_PATH`), so that what is decided about and what is then opened are one file, whichever
//! is renamed meanwhile; and the file's own path, as the kernel spells it, which is what policies speak of. Usually the
//! kernel walks (openat2(2)). It walks as the monitor, though, for whom `/proc/self` is the monitor; so where a path
//! leads there, or through one of procfs' magic links, it is walked again step by step, as the program would (`walk`).

mod walk;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::file::{DirectoryEntry, Location, ResolvedFile, is_directory};
use crate::log::Event;
use crate::policy::Rights;
use crate::syscall::Syscall;

/// Where a path starts.
enum Base {
    Root,
    Directory(OwnedFd),
}

impl AsFd for Base {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Root => CWD,
            Self::Directory(directory) => directory.as_fd(),
        }
    }
}

impl Syscall<'_> {
    /// The file that is the program's descriptor `number`, or its current directory.
    pub(crate) fn directory(&self, number: i32) -> Result<OwnedFd, Errno> {
        if number == libc::AT_FDCWD {
            let path = format!("/proc/{}/cwd", self.notification.thread);
            return rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
                .map_err(|_| Errno::NOENT);
        }
        self.caller()?.descriptor(number)
    }

    fn base(&self, directory: i32, path: &[u8]) -> Result<Base, Errno> {
        if path.first() == Some(&b'/') {
            return Ok(Base::Root);
        }
        self.directory(directory).map(Base::Directory)
    }

    /// The file that `path` means, seen from `directory`.
    pub(crate) fn find(&self, directory: i32, path: &[u8], follow: bool) -> Result<ResolvedFile, Errno> {
        self.find_within(directory, path, follow, ResolveFlags::empty())
    }

    /// The same, with the restrictions of openat2(2).
    pub(crate) fn find_within(
        &self,
        directory: i32,
        path: &[u8],
        follow: bool,
        within: ResolveFlags,
    ) -> Result<ResolvedFile, Errno> {
        if path.is_empty() {
            return Err(Errno::NOENT);
        }
        match self.rewritten(path, || self.path_of_directory(directory))? {
            Some(new) => self.find_without_rules(libc::AT_FDCWD, &new, follow, ResolveFlags::empty()),
            None => self.find_without_rules(directory, path, follow, within),
        }
    }

    /// The path of a descriptor of the program's, or of its current directory.
    fn path_of_directory(&self, number: i32) -> Result<Vec<u8>, Errno> {
        self.state.identity.path_of(&self.directory(number)?)
    }

    /// The same as [`Syscall::find_within`], without asking rules about the path as it is written.
    fn find_without_rules(
        &self,
        directory: i32,
        path: &[u8],
        follow: bool,
        within: ResolveFlags,
    ) -> Result<ResolvedFile, Errno> {
        // Within a directory, an absolute path starts there (RESOLVE_IN_ROOT) or is refused.
        let base = if within.is_empty() {
            self.base(directory, path)?
        } else if within.intersects(ResolveFlags::IN_ROOT | ResolveFlags::BENEATH) {
            Base::Directory(self.directory(directory)?)
        } else {
            self.base(directory, path)?
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC | if follow { OFlags::empty() } else { OFlags::NOFOLLOW };
        let flag = within | ResolveFlags::NO_MAGICLINKS;
        let opened = again(|| rustix::fs::openat2(&base, path, flags, Mode::empty(), flag));
        match opened {
            Ok(file) => {
                let found = self.examine(file, None)?;
                match &found.location {
                    Location::Path(at) if self.state.identity.is_own_path(at) => {
                        if !within.is_empty() {
                            return Err(Errno::ACCESS);
                        }
                        self.found_by_walk(&base, path, follow)
                    }
                    _ => Ok(found),
                }
            }
            Err(Errno::LOOP) if within.is_empty() => self.found_by_walk(&base, path, follow),
            Err(Errno::NOENT | Errno::ACCESS | Errno::NOTDIR)
                if within.is_empty() && self.may_be_self(&base, path) =>
            {
                self.found_by_walk(&base, path, follow)
            }
            Err(errno) => Err(errno),
        }
    }

    /// Whether the path may have led the kernel to the monitor's own part of procfs, where other things exist.
    fn may_be_self(&self, base: &Base, path: &[u8]) -> bool {
        let mentions = path.windows(4).any(|part| part == b"self" || part == b"proc" || part == b"/fd/");
        mentions
            || match base {
                Base::Root => false,
                Base::Directory(directory) => {
                    rustix::fs::fstat(directory).is_ok_and(|stat| self.state.identity.is_proc(&stat))
                }
            }
    }

    fn found_by_walk(&self, base: &Base, path: &[u8], follow: bool) -> Result<ResolvedFile, Errno> {
        let walked = self.walk(base, path, follow)?;
        self.examine(walked.file?, walked.held)
    }

    /// The directory and the name in it that `path` means; what is there, if anything, is not looked at.
    pub(crate) fn entry(&self, directory: i32, path: &[u8]) -> Result<DirectoryEntry, Errno> {
        self.entry_within(directory, path, ResolveFlags::empty())
    }

    /// The same, with the restrictions of openat2(2).
    pub(crate) fn entry_within(
        &self,
        directory: i32,
        path: &[u8],
        within: ResolveFlags,
    ) -> Result<DirectoryEntry, Errno> {
        if path.is_empty() {
            return Err(Errno::NOENT);
        }
        match self.rewritten(path, || self.path_of_directory(directory))? {
            Some(new) => self.entry_without_rules(libc::AT_FDCWD, &new, ResolveFlags::empty()),
            None => self.entry_without_rules(directory, path, within),
        }
    }

    /// The same as [`Syscall::entry_within`], without asking rules about the path as it is written.
    fn entry_without_rules(
        &self,
        directory: i32,
        path: &[u8],
        within: ResolveFlags,
    ) -> Result<DirectoryEntry, Errno> {
        let end = path.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1);
        let start = path[..end].iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
        let before = match &path[..start] {
            b"" => b".".as_slice(),
            before => before,
        };
        let name = match &path[start..] {
            b"" => b".".as_slice(),
            name => name,
        };
        let parent = self.find_without_rules(directory, before, true, within)?;
        if !is_directory(&parent.stat) {
            return Err(Errno::NOTDIR);
        }
        let Location::Path(at) = parent.location else { return Err(Errno::NOTDIR) };
        Ok(DirectoryEntry { directory: parent.file, path: joined(&at, name), name: name.to_vec() })
    }

    /// Where a file would be made that `path` names through symbolic links which lead nowhere yet.
    pub(crate) fn entry_behind_links(&self, directory: i32, path: &[u8]) -> Result<DirectoryEntry, Errno> {
        let new = self.rewritten(path, || self.path_of_directory(directory))?;
        let path = new.as_deref().unwrap_or(path);
        let base = self.base(directory, path)?;
        let walked = self.walk(&base, path, true)?;
        if walked.name.is_empty() {
            return Err(Errno::ISDIR);
        }
        let Location::Path(at) =
            self.examine(walked.directory.try_clone().map_err(|_| Errno::MFILE)?, None)?.location
        else {
            return Err(Errno::NOTDIR);
        };
        Ok(DirectoryEntry { directory: walked.directory, path: joined(&at, &walked.name), name: walked.name })
    }

    /// What a descriptor stands for. `held`: the program reached it through a descriptor of its own, with which it can
    /// do this.
    pub(crate) fn examine(&self, file: OwnedFd, held: Option<Rights>) -> Result<ResolvedFile, Errno> {
        let stat = rustix::fs::fstat(&file)?;
        let mut path = self.state.identity.path_of(&file)?;
        let gone = stat.st_nlink == 0;
        let location = if path.first() != Some(&b'/') || gone && path.starts_with(b"/memfd:") {
            // `(unreachable)/...` lies outside of everything that paths can name.
            if held.is_none() || path.starts_with(b"(") {
                return Err(Errno::ACCESS);
            }
            Location::Anonymous
        } else {
            if gone && path.ends_with(b" (deleted)") {
                path.truncate(path.len() - b" (deleted)".len());
            }
            if self.leads_out(&file, &stat, &path) {
                if held.is_none() {
                    let reason = "it leads out of the program's view";
                    return Err(self.refuse(&Event::Call { reason }));
                }
                Location::Outside(path)
            } else {
                Location::Path(path)
            }
        };
        Ok(ResolvedFile { file, stat, location, granted: held.unwrap_or(Rights::empty()) })
    }
}

impl Syscall<'_> {
    /// Whether a file is not there in the program's view, because a descriptor from before its start led to it. What that view has at the same
    /// path is what counts.
    fn leads_out(&self, file: &OwnedFd, stat: &Stat, path: &[u8]) -> bool {
        let Some(mounts) = &self.state.mounts else { return false };
        let seen = || rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW);
        !mounts.have(file)
            && !seen().is_ok_and(|seen| (seen.st_dev, seen.st_ino) == (stat.st_dev, stat.st_ino))
    }
}

fn joined(directory: &[u8], name: &[u8]) -> Vec<u8> {
    let name = crate::policy::trees::trimmed(name);
    [crate::policy::trees::trimmed(directory), b"/", name].concat()
}

/// Repeats what a rename elsewhere disturbed (openat2(2), `EAGAIN`).
fn again<T>(mut open: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    for _ in 0..16 {
        match open() {
            Err(Errno::AGAIN | Errno::INTR) => (),
            other => return other,
        }
    }
    open()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_joined_with_one_slash() {
        assert_eq!(joined(b"/", b"x/"), b"/x");
        assert_eq!(joined(b"/a", b"x"), b"/a/x");
    }
}
