//! Mounts, and which of them a file lies on (mount(2), statx(2)).

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd as _};

use rustix::fs::{AtFlags, StatxFlags};
use syscalls::{Sysno, syscall};

use crate::{Error, Result};

/// Mounts what `source` and `kind` mean at `target`, with `MS_...` flags and the file system's own options; or changes a mount, where the
/// flags say so.
///
/// # Errors
/// Those of mount(2).
pub fn mount(source: &CStr, target: &CStr, kind: &CStr, flags: u64, options: &CStr) -> Result<()> {
    // SAFETY: four C strings that live, and a number. The kernel writes to none of them.
    unsafe {
        syscall!(Sysno::mount, source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, options.as_ptr())
    }
    .map(drop)
    .map_err(|errno| Error::raw("mount", usize::try_from(flags).unwrap_or(0), errno))
}

/// Returns the number of the mount that a descriptor's file was reached through: the first field of its line in
/// `/proc/PID/mountinfo`; `None` before Linux 5.8.
///
/// # Errors
/// Those of statx(2).
pub fn of_descriptor(fd: impl AsFd) -> Result<Option<u64>> {
    let fd = fd.as_fd();
    let found = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)
        .map_err(|errno| Error::new("statx", usize::try_from(fd.as_raw_fd()).unwrap_or(0), errno))?;
    Ok((found.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(found.stx_mnt_id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_lies_on_a_mount_of_this_process() {
        let root = std::fs::File::open("/").unwrap();
        let Some(number) = of_descriptor(&root).unwrap() else {
            orrery_testing::skipped!("statx reports no mounts");
            return;
        };
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = mounts.lines().find(|line| line.split(' ').next() == Some(&number.to_string())).unwrap();
        assert_eq!(line.split(' ').nth(4), Some("/"), "{line}");
    }

    #[test]
    fn what_cannot_be_mounted_is_an_error() {
        let error = mount(c"none", c"/no/such/place", c"no-such-kind", 0, c"").unwrap_err();
        assert_eq!(error.operation, "mount");
    }
}
