//! From a path that the program gave to the file that it means, held fast.
//!
//! The answer is a descriptor (`O_PATH`), so that what is decided about and what is then opened are one file, whatever
//! is renamed meanwhile; and the file's own path, as the kernel spells it, which is what policies speak of. Usually the
//! kernel walks (openat2(2)). It walks as the monitor, though, for whom `/proc/self` is the monitor; so where a path leads
//! there, or through one of procfs' magic links, it is walked again here, step by step, as the program would.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::job::Job;
use crate::policy::Rights;

/// As many symbolic links as the kernel follows (path_resolution(7)).
const MOST_LINKS: usize = 40;

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

/// How far a walk came.
struct Walked {
    directory: OwnedFd,
    /// The last name in the directory; empty where the path ended with the directory itself.
    name: Vec<u8>,
    /// What is there.
    file: Result<OwnedFd, Errno>,
    held: Option<Rights>,
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

    /// Walks as the program would, one name at a time.
    fn walk(&self, base: &Base, path: &[u8], follow: bool) -> Result<Walked, Errno> {
        let root = || rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let step = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let mut here = match base {
            Base::Root => root()?,
            Base::Directory(directory) => directory.try_clone().map_err(|_| Errno::MFILE)?,
        };
        let mut links = 0;
        let mut held = None;
        // Names still to walk, the next one last; an empty one stands for a slash at the end.
        let mut names = reversed(path);
        loop {
            let Some(name) = names.pop() else {
                let file = here.try_clone().map_err(|_| Errno::MFILE);
                return Ok(Walked { directory: here, name: Vec::new(), file, held });
            };
            let last = names.iter().all(Vec::is_empty);
            let must_be_directory = !names.is_empty();
            if name.is_empty() || name == b"." {
                if !is_directory(&rustix::fs::fstat(&here)?) {
                    return Err(Errno::NOTDIR);
                }
                continue;
            }
            let name = self.as_seen_by_caller(&here, name, &mut names)?;
            let file = match rustix::fs::openat(&here, name.as_slice(), step, Mode::empty()) {
                Ok(file) => file,
                Err(errno) if last => {
                    return Ok(Walked { directory: here, name, file: Err(errno), held });
                }
                Err(errno) => return Err(errno),
            };
            let stat = rustix::fs::fstat(&file)?;
            if is_link(&stat) && (!last || follow || must_be_directory) {
                links += 1;
                if links > MOST_LINKS {
                    return Err(Errno::LOOP);
                }
                if let Some(granted) = self.magic(&here, &name, &stat)? {
                    here = rustix::fs::openat(
                        &here,
                        name.as_slice(),
                        OFlags::PATH | OFlags::CLOEXEC,
                        Mode::empty(),
                    )?;
                    held = Some(granted);
                    continue;
                }
                let target = rustix::fs::readlinkat(&file, "", Vec::new())?.into_bytes();
                if target.is_empty() {
                    return Err(Errno::NOENT);
                }
                if target.first() == Some(&b'/') {
                    here = root()?;
                    held = None;
                }
                names.extend(reversed(&target));
                continue;
            }
            held = None;
            if names.is_empty() {
                return Ok(Walked { directory: here, name, file: Ok(file), held });
            }
            here = file;
        }
    }

    /// `self` and `thread-self` at the top of procfs are the caller's.
    fn as_seen_by_caller(
        &self,
        here: &OwnedFd,
        name: Vec<u8>,
        names: &mut Vec<Vec<u8>>,
    ) -> Result<Vec<u8>, Errno> {
        if !matches!(name.as_slice(), b"self" | b"thread-self")
            || !self.monitor.own.is_proc_root(&rustix::fs::fstat(here)?)
        {
            return Ok(name);
        }
        if name == b"thread-self" {
            names.push(self.call.thread.to_string().into_bytes());
            names.push(b"task".to_vec());
        }
        Ok(self.caller()?.process.to_string().into_bytes())
    }

    /// Whether a symbolic link leads to a file and not to a path, as those do that procfs has for each process, and what
    /// the program may do to that file anyway. Only those of guarded processes may be followed.
    fn magic(&self, directory: &OwnedFd, name: &[u8], link: &Stat) -> Result<Option<Rights>, Errno> {
        if !self.monitor.own.is_proc(link) {
            return Ok(None);
        }
        let path = self.monitor.own.path_of(directory)?;
        match process_in(&path) {
            // `/proc/mounts` and `/proc/net` are paths.
            None => Ok(None),
            Some((process, b"fd")) if process == self.process() => {
                let number = std::str::from_utf8(name).ok().and_then(|name| name.parse().ok());
                Ok(Some(
                    self.caller()?
                        .descriptor(number.ok_or(Errno::NOENT)?)
                        .map_or(Rights::empty(), |file| usable(&file)),
                ))
            }
            Some((process, _)) if self.is_guarded(process) => Ok(Some(Rights::empty())),
            Some(_) => Err(Errno::ACCESS),
        }
    }

    /// Whether a process is one that this monitor guards: all of them descend from it.
    pub(crate) fn is_guarded(&self, process: i32) -> bool {
        if process == self.process() {
            return true;
        }
        let mut process = process;
        for _ in 0..4096 {
            if process <= 1 || self.monitor.own.is_own_thread(process) {
                return false;
            }
            match crate::caller::Status::of(process) {
                Ok(status) if status.parent == self.monitor.own.process => {
                    return true;
                }
                Ok(status) => process = status.parent,
                Err(_) => return false,
            }
        }
        false
    }
}

/// What can be done with a descriptor.
fn usable(file: &OwnedFd) -> Rights {
    let Ok(flags) = rustix::fs::fcntl_getfl(file) else { return Rights::empty() };
    if flags.contains(OFlags::PATH) {
        return Rights::empty();
    }
    match flags.bits() & OFlags::ACCMODE.bits() {
        0 => Rights::READ | Rights::LIST | Rights::STAT,
        1 => Rights::WRITE | Rights::STAT,
        _ => Rights::READ | Rights::WRITE | Rights::STAT,
    }
}

/// The number in `/proc/NUMBER/rest`, and the rest.
pub(crate) fn process_in(path: &[u8]) -> Option<(i32, &[u8])> {
    let rest = path.strip_prefix(b"/proc/")?;
    let end = rest.iter().position(|&byte| byte == b'/').unwrap_or(rest.len());
    let number = std::str::from_utf8(&rest[..end]).ok()?.parse().ok()?;
    Some((number, rest.get(end + 1..).unwrap_or_default()))
}

fn reversed(path: &[u8]) -> Vec<Vec<u8>> {
    let mut names: Vec<Vec<u8>> = Vec::new();
    let mut parts = path.split(|&byte| byte == b'/').map(<[u8]>::to_vec).peekable();
    while let Some(name) = parts.next() {
        // A slash at the end asks for a directory; others say nothing.
        if !name.is_empty() || parts.peek().is_none() && !path.is_empty() {
            names.push(name);
        }
    }
    names.reverse();
    names
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

/// What the monitor knows of itself.
#[derive(Debug)]
pub(crate) struct Own {
    /// Its process.
    pub(crate) process: i32,
    descriptors: OwnedFd,
    proc: Stat,
}

impl Own {
    /// The calling process is the monitor.
    ///
    /// # Errors
    /// Where `/proc` is not there.
    pub(crate) fn new() -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            process: rustix::process::getpid().as_raw_pid(),
            descriptors: rustix::fs::open("/proc/self/fd", flags, Mode::empty())?,
            proc: rustix::fs::stat("/proc")?,
        })
    }

    /// `/proc/self/fd`.
    pub(crate) fn descriptors(&self) -> BorrowedFd<'_> {
        self.descriptors.as_fd()
    }

    /// Where the kernel says a file is.
    ///
    /// # Errors
    /// Those of readlink(2).
    pub(crate) fn path_of(&self, file: &impl AsRawFd) -> Result<Vec<u8>, Errno> {
        let mut number = [0; 16];
        let number = decimal(file.as_raw_fd(), &mut number);
        rustix::fs::readlinkat(&self.descriptors, number, Vec::with_capacity(128))
            .map(|path| path.into_bytes())
    }

    pub(crate) fn is_proc(&self, stat: &Stat) -> bool {
        stat.st_dev == self.proc.st_dev
    }

    fn is_proc_root(&self, stat: &Stat) -> bool {
        self.is_proc(stat) && stat.st_ino == self.proc.st_ino
    }

    fn is_own_path(&self, path: &[u8]) -> bool {
        process_in(path).is_some_and(|(process, _)| process == self.process)
    }

    /// Whether a number is one of the monitor's threads.
    pub(crate) fn is_own_thread(&self, number: i32) -> bool {
        number == self.process
            || rustix::fs::statat(CWD, format!("/proc/{}/task/{number}", self.process), AtFlags::empty())
                .is_ok()
    }
}

/// A descriptor's number as text.
pub(crate) fn decimal(number: i32, text: &mut [u8; 16]) -> &[u8] {
    let mut rest = number.unsigned_abs();
    let mut at = text.len();
    loop {
        at -= 1;
        text[at] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
        if rest == 0 {
            return &text[at..];
        }
    }
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
    fn numbers_and_names() {
        assert_eq!(decimal(0, &mut [0; 16]), b"0");
        assert_eq!(decimal(1234, &mut [0; 16]), b"1234");
        assert_eq!(process_in(b"/proc/12/fd/3"), Some((12, b"fd/3".as_slice())));
        assert_eq!(process_in(b"/proc/12"), Some((12, b"".as_slice())));
        assert_eq!(process_in(b"/proc/sys/x"), None);
        assert_eq!(reversed(b"/a//b/"), [b"".to_vec(), b"b".to_vec(), b"a".to_vec()]);
        assert_eq!(joined(b"/", b"x/"), b"/x");
        assert_eq!(joined(b"/a", b"x"), b"/a/x");
    }
}
