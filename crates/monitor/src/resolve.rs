//! From a path that the program gave to the file that it means, held fast.
//!
//! The answer is a descriptor (`O_PATH`), so that what is decided about and what is then opened are one file, whatever
//! is renamed meanwhile; and the file's own path, as the kernel spells it, which is what policies speak of. Usually the
//! kernel walks (openat2(2)). It walks as the monitor, though, for whom `/proc/self` is the monitor; so where a path leads
//! there, or through one of procfs' magic links, it is walked again step by step, as the program would (`walk`).

mod walk;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::job::Job;
use crate::policy::Rights;

/// A file, held fast.
#[derive(Debug)]
pub(crate) struct Found {
    /// The file, opened with `O_PATH`.
    pub(crate) file: OwnedFd,
    /// What is known of it.
    pub(crate) stat: Stat,
    /// Where it is.
    pub(crate) name: Name,
    /// What the program could do to it anyway, because it reached it through a descriptor that it has.
    pub(crate) granted: Rights,
}

/// Where a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    /// At this path, or last was before it was removed.
    Path(Vec<u8>),
    /// Nowhere: a pipe, a socket or memory, that the program reached through a descriptor which it has.
    Held,
}

/// A directory, held fast, and a name in it.
#[derive(Debug)]
pub(crate) struct Place {
    /// The directory.
    pub(crate) directory: OwnedFd,
    /// The name, with a slash at its end where the program wrote one.
    pub(crate) name: Vec<u8>,
    /// The path of both.
    pub(crate) path: Vec<u8>,
}

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

/// Whether a path means the same however it is read: absolute, without `.`, `..`, empty names or a slash at the end, and
/// not in procfs.
pub(crate) fn is_plain(path: &[u8]) -> bool {
    path.len() > 1
        && path[0] == b'/'
        && !path.starts_with(b"/proc/")
        && path[1..].split(|&byte| byte == b'/').all(|name| !matches!(name, b"" | b"." | b".."))
}

pub(crate) fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

pub(crate) fn is_link(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Symlink
}

impl Job<'_> {
    /// The file that is the program's descriptor `number`, or its current directory.
    pub(crate) fn directory(&self, number: i32) -> Result<OwnedFd, Errno> {
        if number == libc::AT_FDCWD {
            let path = format!("/proc/{}/cwd", self.call.thread);
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
    pub(crate) fn find(&self, directory: i32, path: &[u8], follow: bool) -> Result<Found, Errno> {
        self.find_within(directory, path, follow, ResolveFlags::empty())
    }

    /// The same, with the restrictions of openat2(2).
    pub(crate) fn find_within(
        &self,
        directory: i32,
        path: &[u8],
        follow: bool,
        within: ResolveFlags,
    ) -> Result<Found, Errno> {
        if path.is_empty() {
            return Err(Errno::NOENT);
        }
        match self.rewritten(path, || self.path_of_directory(directory))? {
            Some(new) => self.found(libc::AT_FDCWD, &new, follow, ResolveFlags::empty()),
            None => self.found(directory, path, follow, within),
        }
    }

    /// The path of a descriptor of the program's, or of its current directory.
    fn path_of_directory(&self, number: i32) -> Result<Vec<u8>, Errno> {
        self.monitor.own.path_of(&self.directory(number)?)
    }

    /// The same as [`Job::find_within`], without asking rules about the path as it is written.
    fn found(&self, directory: i32, path: &[u8], follow: bool, within: ResolveFlags) -> Result<Found, Errno> {
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
                match &found.name {
                    Name::Path(at) if self.monitor.own.is_own_path(at) => {
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
                    rustix::fs::fstat(directory).is_ok_and(|stat| self.monitor.own.is_proc(&stat))
                }
            }
    }

    fn found_by_walk(&self, base: &Base, path: &[u8], follow: bool) -> Result<Found, Errno> {
        let walked = self.walk(base, path, follow)?;
        self.examine(walked.file?, walked.held)
    }

    /// The directory and the name in it that `path` means; what is there, if anything, is not looked at.
    pub(crate) fn place(&self, directory: i32, path: &[u8]) -> Result<Place, Errno> {
        self.place_within(directory, path, ResolveFlags::empty())
    }

    /// The same, with the restrictions of openat2(2).
    pub(crate) fn place_within(
        &self,
        directory: i32,
        path: &[u8],
        within: ResolveFlags,
    ) -> Result<Place, Errno> {
        if path.is_empty() {
            return Err(Errno::NOENT);
        }
        match self.rewritten(path, || self.path_of_directory(directory))? {
            Some(new) => self.placed(libc::AT_FDCWD, &new, ResolveFlags::empty()),
            None => self.placed(directory, path, within),
        }
    }

    /// The same as [`Job::place_within`], without asking rules about the path as it is written.
    fn placed(&self, directory: i32, path: &[u8], within: ResolveFlags) -> Result<Place, Errno> {
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
        let parent = self.found(directory, before, true, within)?;
        if !is_directory(&parent.stat) {
            return Err(Errno::NOTDIR);
        }
        let Name::Path(at) = parent.name else { return Err(Errno::NOTDIR) };
        Ok(Place { directory: parent.file, path: joined(&at, name), name: name.to_vec() })
    }

    /// Where a file would be made that `path` names through symbolic links which lead nowhere yet.
    pub(crate) fn place_behind_links(&self, directory: i32, path: &[u8]) -> Result<Place, Errno> {
        let new = self.rewritten(path, || self.path_of_directory(directory))?;
        let path = new.as_deref().unwrap_or(path);
        let base = self.base(directory, path)?;
        let walked = self.walk(&base, path, true)?;
        if walked.name.is_empty() {
            return Err(Errno::ISDIR);
        }
        let Name::Path(at) =
            self.examine(walked.directory.try_clone().map_err(|_| Errno::MFILE)?, None)?.name
        else {
            return Err(Errno::NOTDIR);
        };
        Ok(Place { directory: walked.directory, path: joined(&at, &walked.name), name: walked.name })
    }

    /// What a descriptor stands for. `held`: the program reached it through a descriptor of its own, with which it can do
    /// this.
    pub(crate) fn examine(&self, file: OwnedFd, held: Option<Rights>) -> Result<Found, Errno> {
        let stat = rustix::fs::fstat(&file)?;
        let mut path = self.monitor.own.path_of(&file)?;
        let gone = stat.st_nlink == 0;
        let name = if path.first() != Some(&b'/') || gone && path.starts_with(b"/memfd:") {
            // `(unreachable)/...` lies outside of everything that paths can name.
            if held.is_none() || path.starts_with(b"(") {
                return Err(Errno::ACCESS);
            }
            Name::Held
        } else {
            if gone && path.ends_with(b" (deleted)") {
                path.truncate(path.len() - b" (deleted)".len());
            }
            Name::Path(path)
        };
        Ok(Found { file, stat, name, granted: held.unwrap_or(Rights::empty()) })
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
    fn plain_paths_are_told_apart() {
        for plain in ["/a", "/a/b.c/..d"] {
            assert!(is_plain(plain.as_bytes()), "{plain}");
        }
        for other in ["", "/", "a", "/a/", "/a//b", "/a/./b", "/a/..", "/proc/1", "/./a"] {
            assert!(!is_plain(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn names_are_joined_with_one_slash() {
        assert_eq!(joined(b"/", b"x/"), b"/x");
        assert_eq!(joined(b"/a", b"x"), b"/a/x");
    }
}
