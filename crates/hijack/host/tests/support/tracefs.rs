//! The numbers of the kernel's tracepoints, which tracefs tells, mounted somewhere or not.

use std::ffi::{CStr, CString, c_int};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Where tracefs is found if somebody has mounted it.
const PLACES: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// The number of a tracepoint, by its path below `events`: by a mount of our own that is attached nowhere, which changes nothing for
/// anybody, or else by one that is there.
///
/// # Errors
/// Why neither tells.
pub(crate) fn tracepoint(name: &str) -> Result<u64, String> {
    let path = format!("events/{name}/id");
    let own = detached(&path);
    let text = own.or_else(|own| {
        let found = PLACES.iter().find_map(|place| fs::read_to_string(format!("{place}/{path}")).ok());
        found.ok_or_else(|| {
            format!("tracefs cannot be mounted ({own}), and is not at {}", PLACES.join(" or "))
        })
    })?;
    text.trim().parse().map_err(|error| format!("tracefs, {path}: {error}"))
}

/// Reads a file of a tracefs that is mounted for that.
fn detached(path: &str) -> io::Result<String> {
    let mount = mount(c"tracefs")?;
    let path = CString::new(path)?;
    let mut text = String::new();
    // SAFETY: the string ends with zero; what is returned is a new descriptor.
    let mut file = unsafe {
        let opened = libc::openat(mount.as_raw_fd(), path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        File::from_raw_fd(checked(opened.into())?)
    };
    file.read_to_string(&mut text)?;
    Ok(text)
}

/// A file system that is attached nowhere: fsopen(2), fsconfig(2), fsmount(2).
fn mount(kind: &CStr) -> io::Result<OwnedFd> {
    const CLOEXEC: libc::c_uint = 1;
    const CREATE: libc::c_uint = 6;
    // SAFETY: the string ends with zero; what is returned are new descriptors.
    unsafe {
        let context = checked(libc::syscall(libc::SYS_fsopen, kind.as_ptr(), CLOEXEC))?;
        let context = OwnedFd::from_raw_fd(context);
        checked(libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), CREATE, 0, 0, 0))?;
        let mount = checked(libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), CLOEXEC, 0))?;
        Ok(OwnedFd::from_raw_fd(mount))
    }
}

fn checked(result: libc::c_long) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(c_int::try_from(result).unwrap_or(-1)) }
}
