//! Watching directories for changes of Python files (inotify(7)), after which the server reloads.
//!
//! What is watched are the directories that were named, and all below, except hidden ones and those of compiled files. A named
//! directory's parent is watched for its name, so that one that is removed, renamed, or reached by a symbolic link that changes is
//! found again.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;

/// For how long nothing changes at the end of a burst.
const QUIET: Duration = Duration::from_millis(200);
/// The ends of names of what an import loads.
const EXTENSIONS: [&str; 3] = ["py", "pyc", "so"];
/// Where Python writes what it compiled.
const CACHE: &str = "__pycache__";

/// Why a directory cannot be watched.
#[derive(Debug, thiserror::Error)]
#[error("cannot watch {}{hint}", .path.display())]
pub struct WatchError {
    path: PathBuf,
    hint: &'static str,
    source: io::Error,
}

impl WatchError {
    fn new(path: &Path, source: io::Error) -> Self {
        let hint = match source.raw_os_error() {
            Some(libc::ENOSPC) => {
                ": too many directories; raise the sysctl fs.inotify.max_user_watches, or name fewer"
            }
            Some(libc::EMFILE) => {
                ": too many inotify instances; raise the sysctl fs.inotify.max_user_instances"
            }
            Some(libc::ENOTDIR) => ": --watch wants a directory",
            _ => "",
        };
        Self { path: path.to_owned(), hint, source }
    }
}

/// What is watched about a directory.
#[derive(Debug, Default)]
struct Watched {
    /// Whether the files in it count.
    files: bool,
    /// Names in it that lead to a named directory.
    names: Vec<OsString>,
}

/// Changes of Python files below directories.
#[derive(Debug)]
pub(super) struct Watch {
    inotify: OwnedFd,
    roots: Vec<PathBuf>,
    watched: HashMap<i32, Watched>,
    /// When the last change was seen, until it is taken.
    changed: Option<Instant>,
}

impl Watch {
    /// Watches these directories; `None` where there are none.
    ///
    /// # Errors
    /// See [`WatchError`].
    pub(super) fn new(directories: &[PathBuf]) -> Result<Option<Self>, WatchError> {
        let Some(first) = directories.first() else { return Ok(None) };
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .map_err(|errno| WatchError::new(first, errno.into()))?;
        let roots = directories.to_vec();
        let mut watch = Self { inotify, roots, watched: HashMap::new(), changed: None };
        for root in directories {
            // Here it is an error that one is missing.
            let metadata = fs::metadata(root).map_err(|error| WatchError::new(root, error))?;
            if !metadata.is_dir() {
                return Err(WatchError::new(root, Errno::NOTDIR.into()));
            }
        }
        watch.scan()?;
        Ok(Some(watch))
    }

    /// Returns the descriptor that is readable when something has changed.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    /// Returns when a burst of changes will have ended, if one goes on.
    pub(super) fn due(&self) -> Option<Instant> {
        self.changed.map(|changed| changed + QUIET)
    }

    /// Takes note of what has changed; returns whether a burst of changes has ended.
    ///
    /// # Errors
    /// A directory cannot be watched; the others are.
    pub(super) fn look(&mut self) -> Result<bool, WatchError> {
        let (changed, moved) = self.read();
        let found = if moved { self.scan() } else { Ok(false) };
        if changed || *found.as_ref().unwrap_or(&true) {
            self.changed = Some(Instant::now());
        }
        found?;
        Ok(self.due().is_some_and(|due| due <= Instant::now()))
    }

    /// Forgets the changes so far: what was begun takes them into account.
    pub(super) fn forget(&mut self) {
        self.changed = None;
    }

    /// Reads all events; returns whether Python files changed, and whether directories came or went.
    fn read(&self) -> (bool, bool) {
        let (mut changed, mut moved) = (false, false);
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&self.inotify, &mut buffer);
        loop {
            let event = match events.next() {
                Ok(event) => event,
                Err(Errno::INTR) => continue,
                // There are no more. What else may fail is tried again with the next event.
                Err(_) => return (changed, moved),
            };
            let flags = event.events();
            if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                (changed, moved) = (true, true);
            }
            let Some(watched) = self.watched.get(&event.wd()) else { continue };
            let Some(name) = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes())) else {
                // Of the directory itself: it was removed, renamed or unmounted.
                if watched.files && !flags.contains(ReadFlags::IGNORED) {
                    (changed, moved) = (true, true);
                }
                continue;
            };
            if watched.names.iter().any(|root| root == name) {
                moved = true;
            }
            if watched.files && flags.contains(ReadFlags::ISDIR) {
                moved |= is_searched(name);
                changed |= is_searched(name) && flags.intersects(ReadFlags::DELETE | ReadFlags::MOVED_FROM);
            } else if watched.files {
                changed |= is_python(name);
            }
        }
    }

    /// Watches what is there now, and nothing else. Returns whether Python files are in directories that were not watched
    /// before, or directories are gone.
    fn scan(&mut self) -> Result<bool, WatchError> {
        let former = std::mem::take(&mut self.watched);
        let mut scan =
            Scan { inotify: self.inotify.as_fd(), former: &former, found: false, now: HashMap::new() };
        let scanned = self.roots.iter().try_for_each(|root| scan.root(root));
        let Scan { found, mut now, .. } = scan;
        for (wd, watched) in former {
            if scanned.is_err() {
                now.entry(wd).or_insert(watched);
            } else if !now.contains_key(&wd) {
                // It fails where the directory is gone.
                let _ = inotify::remove_watch(&self.inotify, wd);
            }
        }
        self.watched = now;
        scanned.map(|()| found)
    }
}

/// One look at all directories.
struct Scan<'a> {
    inotify: BorrowedFd<'a>,
    former: &'a HashMap<i32, Watched>,
    /// Whether Python files were found that were not watched before.
    found: bool,
    now: HashMap<i32, Watched>,
}

impl Scan<'_> {
    fn root(&mut self, root: &Path) -> Result<(), WatchError> {
        if let (Some(parent), Some(name)) = (root.parent(), root.file_name())
            && let Some(wd) = self.add(parent, WatchFlags::empty())?
        {
            self.now.entry(wd).or_default().names.push(name.to_owned());
        }
        self.directory(root, WatchFlags::empty())
    }

    fn directory(&mut self, path: &Path, flags: WatchFlags) -> Result<(), WatchError> {
        let Some(wd) = self.add(path, flags)? else { return Ok(()) };
        let watched = self.now.entry(wd).or_default();
        if watched.files {
            // It is below two that were named.
            return Ok(());
        }
        watched.files = true;
        let is_new = self.former.get(&wd).is_none_or(|former| !former.files);
        // It may be gone again, of which there is an event then.
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            let (name, kind) = (entry.file_name(), entry.file_type());
            if kind.is_ok_and(|kind| kind.is_dir()) {
                if is_searched(&name) {
                    self.directory(&entry.path(), WatchFlags::DONT_FOLLOW)?;
                }
            } else if is_new && is_python(&name) {
                self.found = true;
            }
        }
        Ok(())
    }

    /// Adds a watch; `None` where there is no such directory any more, or it may not be read.
    fn add(&self, path: &Path, flags: WatchFlags) -> Result<Option<i32>, WatchError> {
        let events = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::DELETE
            | WatchFlags::MOVE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        match inotify::add_watch(self.inotify, path, events | flags) {
            Ok(wd) => Ok(Some(wd)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP) => Ok(None),
            Err(errno) => Err(WatchError::new(path, errno.into())),
        }
    }
}

fn is_hidden(name: &OsStr) -> bool {
    name.as_bytes().starts_with(b".")
}

/// Returns whether directories of this name are watched below those that were named.
fn is_searched(name: &OsStr) -> bool {
    !is_hidden(name) && name != CACHE
}

fn is_python(name: &OsStr) -> bool {
    let extension = Path::new(name).extension();
    !is_hidden(name) && extension.is_some_and(|extension| EXTENSIONS.iter().any(|known| extension == *known))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether something has changed since the last look. The kernel reports a change before the call that
    /// makes it returns.
    fn changes(watch: &mut Watch) -> bool {
        watch.look().unwrap();
        let changed = watch.changed.is_some();
        watch.forget();
        changed
    }

    #[test]
    fn changes_of_python_files_are_seen_wherever_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        let path = |name: &str| root.join(name);
        fs::create_dir_all(path("package")).unwrap();
        let mut watch = Watch::new(&[root.clone(), path("package")]).unwrap().unwrap();
        let write = |name: &str| fs::write(path(name), name).unwrap();
        assert!(!changes(&mut watch));
        for name in ["a.py", "a.py", "package/b.py", "c.so", "d.pyc"] {
            write(name);
            assert!(changes(&mut watch), "{name}");
        }
        fs::create_dir_all(path("package/__pycache__")).unwrap();
        fs::create_dir_all(path(".git")).unwrap();
        for name in ["notes.txt", ".#a.py", "package/__pycache__/b.cpython.pyc", ".git/hook.py", "py"] {
            write(name);
            assert!(!changes(&mut watch), "{name}");
        }
        // Directories that come with files in them, and by and by.
        fs::create_dir_all(path("new/deep")).unwrap();
        write("new/deep/e.py");
        assert!(changes(&mut watch));
        fs::create_dir(path("new/empty")).unwrap();
        assert!(!changes(&mut watch));
        write("new/empty/f.py");
        assert!(changes(&mut watch));
        fs::rename(path("new"), directory.path().join("elsewhere")).unwrap();
        assert!(changes(&mut watch));
        fs::write(directory.path().join("elsewhere/deep/e.py"), "no longer below").unwrap();
        fs::write(directory.path().join("beside.py"), "").unwrap();
        assert!(!changes(&mut watch));
        fs::rename(directory.path().join("elsewhere"), path("again")).unwrap();
        assert!(changes(&mut watch));
        write("again/deep/e.py");
        assert!(changes(&mut watch));
        fs::remove_file(path("again/deep/e.py")).unwrap();
        assert!(changes(&mut watch));
        // An editor that writes a new file and renames it.
        write("a.py~new");
        assert!(!changes(&mut watch));
        fs::rename(path("a.py~new"), path("a.py")).unwrap();
        assert!(changes(&mut watch));
    }

    #[test]
    fn a_directory_that_is_replaced_is_found_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["one", "two"] {
            fs::create_dir(path(name)).unwrap();
            fs::write(path(name).join("a.py"), name).unwrap();
        }
        std::os::unix::fs::symlink(path("one"), path("current")).unwrap();
        let mut watch = Watch::new(&[path("current")]).unwrap().unwrap();
        fs::write(path("two/a.py"), "not yet").unwrap();
        assert!(!changes(&mut watch));
        std::os::unix::fs::symlink(path("two"), path("next")).unwrap();
        fs::rename(path("next"), path("current")).unwrap();
        assert!(changes(&mut watch));
        fs::write(path("one/a.py"), "no longer").unwrap();
        assert!(!changes(&mut watch));
        fs::write(path("two/a.py"), "now").unwrap();
        assert!(changes(&mut watch));
        fs::remove_dir_all(path("two")).unwrap();
        assert!(changes(&mut watch));
        fs::create_dir(path("two")).unwrap();
        fs::remove_file(path("current")).unwrap();
        changes(&mut watch);
        fs::rename(path("two"), path("current")).unwrap();
        changes(&mut watch);
        fs::write(path("current/a.py"), "back").unwrap();
        assert!(changes(&mut watch));
    }

    #[test]
    fn what_cannot_be_watched_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let message = |path: &Path| Watch::new(&[path.to_owned()]).unwrap_err().to_string();
        assert!(message(&file).contains("--watch wants a directory"));
        assert!(message(&directory.path().join("none")).ends_with("/none"));
        assert!(Watch::new(&[]).unwrap().is_none());
    }
}
