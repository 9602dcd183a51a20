//! Walking a path as the program would: one name at a time, with `/proc/self` the program's, and magic links looked through.

use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;

use super::Base;
use crate::file::{is_directory, is_link};
use crate::identity::process_in;
use crate::policy::Rights;
use crate::syscall::Syscall;

/// As many symbolic links as the kernel follows (path_resolution(7)).
const MOST_LINKS: usize = 40;

/// How far a walk came.
pub(super) struct Walked {
    pub(super) directory: OwnedFd,
    /// The last name in the directory; empty where the path ended with the directory itself.
    pub(super) name: Vec<u8>,
    /// What is there.
    pub(super) file: Result<OwnedFd, Errno>,
    pub(super) held: Option<Rights>,
}

impl Syscall<'_> {
    /// Walks as the program would, one name at a time.
    pub(super) fn walk(&self, base: &Base, path: &[u8], follow: bool) -> Result<Walked, Errno> {
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
            || !self.state.identity.is_proc_root(&rustix::fs::fstat(here)?)
        {
            return Ok(name);
        }
        if name == b"thread-self" {
            names.push(self.notification.thread.to_string().into_bytes());
            names.push(b"task".to_vec());
        }
        Ok(self.caller()?.process.to_string().into_bytes())
    }

    /// Whether a symbolic link leads to a file and not to a path, as those do that procfs has for each process, and what
    /// the program may do to that file anyway. Only those of guarded processes may be followed.
    fn magic(&self, directory: &OwnedFd, name: &[u8], link: &Stat) -> Result<Option<Rights>, Errno> {
        if !self.state.identity.is_proc(link) {
            return Ok(None);
        }
        let path = self.state.identity.path_of(directory)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_name_is_the_last() {
        assert_eq!(reversed(b"/a//b/"), [b"".to_vec(), b"b".to_vec(), b"a".to_vec()]);
    }
}
