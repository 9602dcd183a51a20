//! A file system in memory, made from an archive: what a mount of a policy leads to.
//!
//! ```text
//!  launcher                        a child                                                kernel
//!  --------                        -------                                                ------
//!  fork  ----------------------->  unshare, unless privileged: namespaces of its own
//!                                  fsopen("tmpfs"), fsmount  ------------------------->   a mount that is attached nowhere chroot into it, unpack,
//!                                  rewrite links mount_setattr: read-only
//!  takes the descriptor  <-------  sends it, ends
//! ```
//!
//! The mount lives as long as that descriptor is open: in the supervisor. No process can unmount it, write to it, or
//! see it in a table of mounts; nothing is left behind. Archives are unpacked by a process whose root directory is the
//! mount itself, so with any names and links, nothing else is written to. `fsmount(2)`, `user_namespaces(7)`.

use std::ffi::{OsStr, c_int};
use std::fs::{self, File};
use std::io::{self, IoSlice, IoSliceMut, Read, Seek};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Component, Path, PathBuf};

use crate::error::{Error, Result};
use crate::policy::Mount;

/// A file system that was made.
#[derive(Debug)]
pub(crate) struct Mounted {
    /// Where programs see it.
    pub(crate) prefix: Vec<u8>,
    /// Keeps it, and leads to it.
    pub(crate) root: OwnedFd,
    /// The device number of the mount.
    pub(crate) device: u64,
}

impl Mounted {
    /// Returns what of a path that programs name comes behind the prefix.
    pub(crate) fn rest<'a>(&self, path: &'a Path) -> Option<&'a Path> {
        path.strip_prefix(OsStr::from_bytes(&self.prefix)).ok()
    }

    /// Returns the path by which the kernel finds it, through a process that holds it.
    pub(crate) fn path(&self, holder: u32) -> PathBuf {
        format!("/proc/{holder}/fd/{}", self.root.as_raw_fd()).into()
    }
}

const FSOPEN_CLOEXEC: u32 = 1;
const FSMOUNT_CLOEXEC: u32 = 1;
const FSCONFIG_SET_STRING: u32 = 1;
const FSCONFIG_CMD_CREATE: u32 = 6;
const MOUNT_ATTR_RDONLY: u64 = 1;
/// The most bytes of an error message.
const LONGEST_MESSAGE: usize = 512;
/// What tar files consist of.
const BLOCK: usize = 512;
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Makes the file systems of all these mounts.
///
/// # Errors
/// Which archive could not be read, or why there can be no mount.
pub(crate) fn make_all(mounts: &[Mount]) -> Result<Vec<Mounted>> {
    mounts.iter().map(make).collect()
}

fn make(mount: &Mount) -> Result<Mounted> {
    let failed = |message: String| Error::Archive { archive: mount.archive.clone(), message };
    let failed_io = |error: io::Error| failed(error.to_string());
    let mut archive = File::open(&mount.archive).map_err(failed_io)?;
    let mut head = Vec::new();
    io::Read::by_ref(&mut archive).take(GZIP.len() as u64).read_to_end(&mut head).map_err(failed_io)?;
    archive.rewind().map_err(failed_io)?;
    if head == GZIP {
        return Err(failed("it is compressed: unpack it with gunzip first".to_owned()));
    }
    let (ours, theirs) = UnixStream::pair().map_err(failed_io)?;
    // SAFETY: the child runs nothing of this process but what follows; see `Hijack::start` for threads.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(ours);
        let status = match furnish(archive, &mount.prefix) {
            Ok(root) => send(&theirs, b"", Some(root.as_raw_fd())),
            Err(message) => send(&theirs, message.as_bytes(), None),
        };
        // SAFETY: ends the child; what its parent had to do at exit is not for the child to do.
        unsafe { libc::_exit(c_int::from(status.is_err())) }
    }
    drop(theirs);
    if child < 0 {
        return Err(Error::system("make a process that unpacks an archive"));
    }
    let received = receive(&ours);
    let _ = rustix::io::retry_on_intr(|| {
        rustix::process::waitpid(rustix::process::Pid::from_raw(child), rustix::process::WaitOptions::empty())
    });
    let root = match received.map_err(failed_io)? {
        (_, Some(root)) => root,
        (message, None) => return Err(failed(message)),
    };
    let device = fs::metadata(format!("/proc/self/fd/{}/.", root.as_raw_fd())).map_err(failed_io)?.dev();
    Ok(Mounted { prefix: mount.prefix.clone().into_bytes(), root, device })
}

/// Returns the child's work: a mount with the archive's content.
fn furnish(archive: File, prefix: &str) -> Result<OwnedFd, String> {
    let context = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    let root = detached_tmpfs()?;
    rustix::process::fchdir(&root).map_err(|error| context("enter the mount")(error.into()))?;
    rustix::process::chroot(c".").map_err(|error| context("chroot into the mount")(error.into()))?;
    rustix::process::umask(rustix::fs::Mode::empty());
    let mut archive = tar::Archive::new(archive);
    archive.set_preserve_permissions(true);
    archive.set_preserve_mtime(true);
    archive.set_preserve_ownerships(rustix::process::geteuid().is_root() && is_privileged());
    let mut entries = 0;
    for entry in archive.entries().map_err(context("read the archive"))? {
        let mut entry = entry.map_err(context("read the archive: is it a tar file?"))?;
        let name = entry.path().map(|path| path.display().to_string()).unwrap_or_default();
        entry.unpack_in("/").map_err(|error| format!("unpack {name}: {}", root_cause(&error)))?;
        entries += 1;
    }
    if entries == 0 {
        return Err("it has no entries: is it a tar file?".to_owned());
    }
    if !is_whole(archive.into_inner()).map_err(context("read the archive's end"))? {
        return Err("it ends in the midst: the zeros that mark a tar file's end are missing".to_owned());
    }
    rewrite_links(Path::new("/"), Path::new(prefix)).map_err(context("rewrite links"))?;
    make_read_only(&root).map_err(context("make the mount read-only"))?;
    Ok(root)
}

/// Returns whether the file ends as a tar file does: one that was cut off between two entries has no other sign of
/// that.
fn is_whole(mut archive: File) -> io::Result<bool> {
    let mut last = [1; BLOCK];
    archive.seek(io::SeekFrom::End(-i64::try_from(BLOCK).unwrap_or(0)))?;
    archive.read_exact(&mut last)?;
    Ok(last == [0; BLOCK])
}

/// Returns what is behind a chain of errors that name the operation.
fn root_cause(error: &io::Error) -> String {
    let mut deepest: &dyn std::error::Error = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest.to_string()
}

fn checked(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn checked_call(result: libc::c_long) -> io::Result<c_int> {
    checked(c_int::try_from(result).unwrap_or(-1))
}

/// A tmpfs that is attached nowhere, by a right that this process has or can give itself.
fn detached_tmpfs() -> Result<OwnedFd, String> {
    let denied = match try_tmpfs() {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => error,
        other => return other.map_err(|error| format!("make a tmpfs: {error}")),
    };
    let way_out = |error: io::Error| {
        format!(
            "make a tmpfs: {denied}, and {error} in a user namespace of its own: \
             mounts need CAP_SYS_ADMIN, or user namespaces for everybody"
        )
    };
    enter_namespaces().and_then(|()| try_tmpfs()).map_err(way_out)
}

fn try_tmpfs() -> io::Result<OwnedFd> {
    // SAFETY: strings end with zero; what is returned is a new descriptor.
    unsafe {
        let context = checked_call(libc::syscall(libc::SYS_fsopen, c"tmpfs".as_ptr(), FSOPEN_CLOEXEC))?;
        let context = OwnedFd::from_raw_fd(context);
        let descriptor = context.as_raw_fd();
        let (key, value) = (c"mode".as_ptr(), c"0755".as_ptr());
        checked_call(libc::syscall(libc::SYS_fsconfig, descriptor, FSCONFIG_SET_STRING, key, value, 0))?;
        checked_call(libc::syscall(libc::SYS_fsconfig, descriptor, FSCONFIG_CMD_CREATE, 0, 0, 0))?;
        let mount = checked_call(libc::syscall(libc::SYS_fsmount, descriptor, FSMOUNT_CLOEXEC, 0))?;
        Ok(OwnedFd::from_raw_fd(mount))
    }
}

/// Gives this process namespaces in which it may mount, and in which its user is the same.
fn enter_namespaces() -> io::Result<()> {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    // SAFETY: a child without threads leaves its parent's namespaces.
    unsafe { checked(libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS))? };
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
    fs::write("/proc/self/gid_map", format!("{group} {group} 1"))
}

/// Returns whether files can be given to others here.
fn is_privileged() -> bool {
    fs::read_to_string("/proc/self/uid_map")
        .is_ok_and(|map| map.split_ascii_whitespace().nth(2) == Some("4294967295"))
}

fn make_read_only(root: &OwnedFd) -> io::Result<()> {
    /// `struct mount_attr`.
    #[repr(C)]
    struct Attributes {
        set: u64,
        clear: u64,
        propagation: u64,
        namespace: u64,
    }
    let attributes = Attributes { set: MOUNT_ATTR_RDONLY, clear: 0, propagation: 0, namespace: 0 };
    let size = size_of::<Attributes>();
    let (descriptor, place) = (root.as_raw_fd(), &raw const attributes);
    // SAFETY: the string ends with zero; the structure is read.
    let result = unsafe {
        libc::syscall(libc::SYS_mount_setattr, descriptor, c"".as_ptr(), libc::AT_EMPTY_PATH, place, size)
    };
    checked_call(result).map(drop)
}

/// Has links lead where they would if the mount was at its prefix: the kernel resolves those that begin at the root,
/// and those that leave the mount, without knowing of it.
fn rewrite_links(directory: &Path, prefix: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let (kind, path) = (entry.file_type()?, entry.path());
        if kind.is_dir() {
            rewrite_links(&path, prefix)?;
        } else if kind.is_symlink()
            && let Some(target) = rewritten(directory, &fs::read_link(&path)?, prefix)
        {
            fs::remove_file(&path)?;
            symlink(target, &path)?;
        }
    }
    Ok(())
}

/// Returns what a link in a directory (from the mount's root) is to lead to; `None`: what it does.
pub(crate) fn rewritten(directory: &Path, target: &Path, prefix: &Path) -> Option<PathBuf> {
    let inside = directory.strip_prefix("/").unwrap_or(directory);
    let whole = joined(&prefix.join(inside), target);
    let depth = inside.components().count();
    match whole.strip_prefix(prefix) {
        // From the root into the mount: up to its root, and down again.
        Ok(rest) if target.is_absolute() || leaves(inside, target) => {
            let mut new: PathBuf = std::iter::repeat_n("..", depth).collect();
            new.push(rest);
            Some(if new.as_os_str().is_empty() { PathBuf::from(".") } else { new })
        }
        Ok(_) => None,
        Err(_) if target.is_absolute() => None,
        Err(_) => Some(whole),
    }
}

/// Returns whether a relative path goes above the mount's root on its way.
fn leaves(inside: &Path, target: &Path) -> bool {
    let mut depth = inside.components().count();
    target.components().any(|component| {
        match component {
            Component::ParentDir if depth == 0 => return true,
            Component::ParentDir => depth -= 1,
            Component::Normal(_) => depth += 1,
            _ => {}
        }
        false
    })
}

/// A path from a directory, without dots: names are taken away as they are written.
pub(crate) fn joined(directory: &Path, target: &Path) -> PathBuf {
    let mut whole = PathBuf::new();
    for component in directory.join(target).components() {
        match component {
            Component::ParentDir => drop(whole.pop()),
            Component::CurDir => {}
            other => whole.push(other),
        }
    }
    whole
}

/// Sends a message and a descriptor.
fn send(to: &UnixStream, message: &[u8], descriptor: Option<RawFd>) -> io::Result<()> {
    let message = if message.is_empty() { b"done" } else { message };
    let slices = [IoSlice::new(&message[..message.len().min(LONGEST_MESSAGE)])];
    let mut control = Control::default();
    // SAFETY: the structures are what the kernel expects, and outlive the call.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = slices.as_ptr().cast_mut().cast();
        header.msg_iovlen = 1;
        if let Some(descriptor) = descriptor {
            header.msg_control = (&raw mut control).cast();
            header.msg_controllen = size_of::<Control>();
            let first = libc::CMSG_FIRSTHDR(&raw const header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = usize::try_from(libc::CMSG_LEN(4)).unwrap_or(0);
            libc::CMSG_DATA(first).cast::<c_int>().write_unaligned(descriptor);
        }
        if libc::sendmsg(to.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Room for one descriptor beside a message: `CMSG_SPACE(4)` bytes.
#[repr(C, align(8))]
#[derive(Default)]
struct Control([u64; 3]);

/// Receives a message, and a descriptor if one came with it.
fn receive(from: &UnixStream) -> io::Result<(String, Option<OwnedFd>)> {
    let mut bytes = [0; LONGEST_MESSAGE];
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let mut control = Control::default();
    // SAFETY: as in `send`; a descriptor that came is ours.
    let (length, descriptor) = unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = slices.as_mut_ptr().cast();
        header.msg_iovlen = 1;
        header.msg_control = (&raw mut control).cast();
        header.msg_controllen = size_of::<Control>();
        let length = libc::recvmsg(from.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC);
        if length < 0 {
            return Err(io::Error::last_os_error());
        }
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        let came = !first.is_null() && (*first).cmsg_type == libc::SCM_RIGHTS;
        let descriptor =
            came.then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(first).cast::<c_int>().read_unaligned()));
        (usize::try_from(length).unwrap_or(0), descriptor)
    };
    if length == 0 {
        return Err(io::Error::other("the process that unpacks it has died"));
    }
    Ok((String::from_utf8_lossy(&bytes[..length]).into_owned(), descriptor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_where_they_would() {
        let rewritten = |directory, target| {
            let new = rewritten(Path::new(directory), Path::new(target), Path::new("/opt/app"));
            new.map(|new| new.display().to_string())
        };
        for (directory, target, expected) in [
            ("/", "lib/x", None),
            ("/bin", "../lib/x", None),
            ("/bin", "/etc/passwd", None),
            ("/bin", "/opt/application", None),
            ("/bin", "/opt/app/lib/x", Some("../lib/x")),
            ("/a/b", "/opt/app", Some("../../")),
            ("/", "/opt/app", Some(".")),
            ("/bin", "../../other/x", Some("/opt/other/x")),
            ("/", "../../etc", Some("/etc")),
            ("/bin", "../../app/lib", Some("../lib")),
        ] {
            assert_eq!(rewritten(directory, target), expected.map(str::to_owned), "{directory} {target}");
        }
    }

    #[test]
    fn descriptors_travel() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = File::open("/proc/self/exe").unwrap();
        send(&a, b"", Some(file.as_raw_fd())).unwrap();
        let (_, descriptor) = receive(&b).unwrap();
        let (own, came) = (file.metadata().unwrap(), File::from(descriptor.unwrap()).metadata().unwrap());
        assert_eq!((own.dev(), own.ino()), (came.dev(), came.ino()));
        send(&a, b"why not", None).unwrap();
        assert!(matches!(receive(&b).unwrap(), (message, None) if message == "why not"));
        drop(a);
        assert!(receive(&b).is_err());
    }
}
