//! The program's own view of the file system: a mount namespace that it shares with the monitor.
//!
//! The monitor performs calls by path, but not all of them: it cannot change another process's current directory, nor execute in its place, nor
//! tell the kernel what getcwd(2) is to say. So paths are not translated. Instead the monitor enters a mount namespace before anything is made of
//! the policy, and the program is its child: for both, and for the kernel, a path means the same.
//!
//! Descriptors from before lead into the namespace that was left. So whatever a path leads to is compared with the mounts of this one.

use std::collections::HashSet;
use std::ffi::CString;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use orrery_sys::{mounts, namespaces};
use rustix::fs::{Mode, OFlags};

use crate::Error;
use crate::policy::view::{Change, View};

/// The mounts of the namespace that the monitor and the program are in. They stay: nobody who could change them is in it.
#[derive(Debug)]
pub(crate) struct OwnMounts(HashSet<u64>);

impl OwnMounts {
    fn new() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/self/mountinfo")?;
        let numbers = text.lines().filter_map(|line| line.split(' ').next()?.parse().ok());
        Ok(Self(numbers.collect()))
    }

    /// Whether a file was reached through one of them.
    pub(crate) fn have(&self, file: impl AsFd) -> bool {
        matches!(mounts::of_descriptor(file), Ok(Some(number)) if self.0.contains(&number))
    }
}

/// Why there may be no mount namespace.
const FORBIDDEN: &str = "; a view takes a mount namespace, and so CAP_SYS_ADMIN or user namespaces, which this system or a container forbids: \
    leave out [view], and have [files] list and deny";

fn failed<E: Into<io::Error>>(operation: impl Into<String>, hint: &'static str) -> impl FnOnce(E) -> Error {
    let operation = operation.into();
    move |source| Error::View { operation, source: source.into(), hint }
}

/// Moves this process, which must have one thread, to a mount namespace with this view, for good. It has the capabilities that it had.
///
/// # Errors
/// Where there may be no mount namespace, and where what the policy names is not there any more.
pub(crate) fn enter(view: &View) -> Result<OwnMounts, Error> {
    let directory = std::env::current_dir().map_err(failed("finding the current directory", ""))?;
    let capabilities =
        rustix::thread::capabilities(None).map_err(failed("reading the capabilities (capget)", ""))?;
    let forbidden = |error: orrery_sys::Error| failed(error.operation, FORBIDDEN)(error.errno);
    if let Some(unmapped) = namespaces::unshare(libc::CLONE_NEWNS).map_err(forbidden)? {
        unmapped.map().map_err(forbidden)?;
    }
    // What is mounted here stays here, and what is mounted elsewhere does not come.
    mount(Path::new("none"), Path::new("/"), c"", libc::MS_REC | libc::MS_PRIVATE, "")
        .map_err(failed("making the mounts private (mount)", FORBIDDEN))?;
    // What is shown is held before it is covered.
    let mut shown: Vec<OwnedFd> = Vec::new();
    for (path, _) in view.changes.iter().filter(|(_, change)| **change == Change::Shown) {
        let held = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        shown.push(held.map_err(failed(format!("opening {}", path.display()), ""))?);
    }
    let mut shown = shown.into_iter();
    for (path, change) in &view.changes {
        let made = match change {
            Change::Private => cover(path, view.size),
            Change::Shown => shown.next().map_or(Ok(()), |held| show(path, &held)),
        };
        let what = match change {
            Change::Private => "mounting an empty directory on",
            Change::Shown => "showing",
        };
        made.map_err(failed(format!("{what} {}", path.display()), ""))?;
    }
    rustix::process::chdir(&directory).map_err(failed(
        format!("the current directory {}", directory.display()),
        "; list it under show, or start in a directory that the program sees",
    ))?;
    rustix::thread::set_capabilities(None, capabilities)
        .map_err(failed("giving up the capabilities of the user namespace (capset)", ""))?;
    let own = OwnMounts::new().map_err(failed("reading /proc/self/mountinfo", ""))?;
    close_directories(&own).map_err(failed("looking at the open directories", ""))?;
    Ok(own)
}

/// Has the program not inherit directories that lead out of the view: it could list them.
fn close_directories(own: &OwnMounts) -> io::Result<()> {
    for entry in fs::read_dir("/proc/self/fd")? {
        let Some(number) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // SAFETY: the list is of this process's descriptors, which has one thread, so none is closed meanwhile but the list's own, and that
        // only afterwards.
        let open = unsafe { BorrowedFd::borrow_raw(number) };
        let is_directory = rustix::fs::fstat(open).is_ok_and(|found| crate::file::is_directory(&found));
        if is_directory && !own.have(open) {
            rustix::io::fcntl_setfd(open, rustix::io::FdFlags::CLOEXEC)?;
        }
    }
    Ok(())
}

/// Puts an empty directory, in memory, in place of one that is there: with its mode, and this user's.
fn cover(path: &Path, size: Option<u64>) -> io::Result<()> {
    let found = match rustix::fs::stat(path) {
        Ok(found) => found,
        // It lay in a directory that is private, too.
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(errno.into()),
    };
    let mut options = format!("mode={:o}", found.st_mode & 0o7777);
    if let Some(size) = size {
        let _ = write!(options, ",size={size}");
    }
    mount(Path::new("tmpfs"), path, c"tmpfs", libc::MS_NOSUID | libc::MS_NODEV, &options)
}

/// Puts a file or directory where it was, with what is mounted in it.
fn show(path: &Path, held: &OwnedFd) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let made = if crate::file::is_directory(&rustix::fs::fstat(held)?) {
        fs::create_dir(path)
    } else {
        fs::File::create_new(path).map(drop)
    };
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => (),
    }
    let source = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
    mount(&source, path, c"", libc::MS_BIND | libc::MS_REC, "")
}

fn mount(source: &Path, target: &Path, kind: &std::ffi::CStr, flags: u64, options: &str) -> io::Result<()> {
    let path = |path: &Path| CString::new(path.as_os_str().as_bytes());
    let (source, target, options) = (path(source)?, path(target)?, CString::new(options)?);
    mounts::mount(&source, &target, kind, flags, &options).map_err(|error| error.errno.into())
}
