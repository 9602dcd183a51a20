//! The service's disk: the one virtio disk of the guest that has the service, with an ext4 file system.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
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
    let deadline = Instant::now() + timeout;
    while !fs::metadata(&device).is_ok_and(|metadata| metadata.file_type().is_block_device()) {
        if Instant::now() > deadline {
            bail!("no disk has appeared within {} s", timeout.as_secs());
        }
        sleep(POLL);
    }
    if is_mounted(place) {
        return Ok(device);
    }
    fs::create_dir_all(place).with_context(|| format!("cannot create {}", place.display()))?;
    rustix::mount::mount(&device, place, "ext4", MountFlags::empty(), None)
        .with_context(|| format!("cannot mount {DEVICE} on {}", place.display()))?;
    Ok(device)
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
