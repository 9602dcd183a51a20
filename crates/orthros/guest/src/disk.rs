//! The service's disk: the one virtio disk of the guest that has the service, with an ext4 file system.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

const DEVICE: &str = "/dev/vda";
const POLL: Duration = Duration::from_millis(2);

/// Returns where the service expects its disk, if it has one.
pub(crate) fn mount_point() -> Option<PathBuf> {
    crate::kernel_parameters::parameter("orrery.disk").map(PathBuf::from)
}

/// Mounts the disk where the service expects it, if it has one.
pub(crate) fn mount_own(timeout: Duration) -> Result<()> {
    mount_point().map_or(Ok(()), |place| mount(&place, timeout).map(drop))
}

/// Waits for the disk and mounts it, which replays its journal, unless it is mounted already.
pub(crate) fn mount(place: &Path, timeout: Duration) -> Result<PathBuf> {
    let device = PathBuf::from(DEVICE);
    if is_mounted(place) {
        return Ok(device);
    }
    fs::create_dir_all(place).with_context(|| format!("cannot create {}", place.display()))?;
    until_there(timeout, || rustix::mount::mount(&device, place, "ext4", MountFlags::empty(), None))
        .with_context(|| {
            format!("cannot mount {DEVICE} on {} within {} s", place.display(), timeout.as_secs())
        })?;
    Ok(device)
}

/// Attempts something with the disk, again and again while that is not there. The kernel makes its node in `/dev` a moment
/// before the disk can be opened (`ENXIO`).
fn until_there(
    timeout: Duration,
    mut attempt: impl FnMut() -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    let deadline = Instant::now() + timeout;
    loop {
        match attempt() {
            Err(Errno::NOENT | Errno::NXIO) if Instant::now() < deadline => sleep(POLL),
            done => return done,
        }
    }
}

fn is_mounted(place: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').nth(1).is_some_and(|at| Path::new(at) == place))
}

/// Unmounts the disk, so that its journal need not be replayed.
pub(crate) fn unmount() -> Result<()> {
    match mount_point() {
        Some(place) if is_mounted(&place) => rustix::mount::unmount(&place, UnmountFlags::empty())
            .with_context(|| format!("cannot unmount {}", place.display())),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_waited_for_until_it_can_be_opened() {
        let mut outcomes = [Err(Errno::NOENT), Err(Errno::NXIO), Err(Errno::NXIO), Ok(())].into_iter();
        assert_eq!(until_there(Duration::from_secs(600), || outcomes.next().unwrap()), Ok(()));
        assert_eq!(outcomes.next(), None);
    }

    #[test]
    fn a_disk_that_does_not_come_is_an_error_and_so_is_another_failure() {
        assert_eq!(until_there(Duration::ZERO, || Err(Errno::NXIO)), Err(Errno::NXIO));
        assert_eq!(until_there(Duration::from_secs(600), || Err(Errno::INVAL)), Err(Errno::INVAL));
    }
}
