//! Pressure on the machine's CPUs or memory as a descriptor: a trigger of the kernel's pressure stall information (its documentation,
//! `accounting/psi`).

use core::ffi::CStr;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, open};

use crate::{Error, Result};

/// Tasks stall for 15% of two seconds: the window that users without privilege may take, too.
const TRIGGER: &[u8] = b"some 300000 2000000\0";

/// The processors' file.
pub const CPU: &CStr = c"/proc/pressure/cpu";
/// The memory's file.
pub const MEMORY: &CStr = c"/proc/pressure/memory";

/// Opens a file that is readable with priority (`POLLPRI`) when tasks stall for 15% of two seconds for want of what `path` names:
/// [`CPU`] or [`MEMORY`].
///
/// # Errors
/// `ENOENT` where the kernel has no such files (`CONFIG_PSI`), `EOPNOTSUPP` where it was started without (`psi=0`), `EACCES` and
/// `EPERM` where it does not permit it, `EINVAL` for a trigger that it does not know.
pub fn watch(path: &CStr) -> Result<OwnedFd> {
    let file = open(path, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| Error::new("open a file of /proc/pressure", 0, errno))?;
    match rustix::io::write(&file, TRIGGER) {
        Ok(_) => Ok(file),
        Err(errno) => Err(Error::new("write a pressure trigger", 0, errno)),
    }
}

#[cfg(test)]
mod tests {
    use orrery_testing::skipped;
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_trigger_is_accepted_or_refused_by_name() {
        for path in [CPU, MEMORY] {
            match watch(path) {
                Ok(_) => {}
                Err(error) => {
                    skipped!("no pressure files: {error}");
                    let known = [Errno::NOENT, Errno::OPNOTSUPP, Errno::ACCESS, Errno::PERM, Errno::INVAL];
                    assert!(known.contains(&error.errno), "{error}");
                }
            }
        }
        // A file that is no pressure file takes no trigger.
        let error = watch(c"/dev/full").unwrap_err();
        assert_eq!((error.operation, error.errno), ("write a pressure trigger", Errno::NOSPC));
    }
}
