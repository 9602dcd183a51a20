//! What the dead kernel had not written to the service's disk yet, written on its behalf.
//!
//! When the disk is mounted here, its journal is replayed: it is then as the dead kernel had last committed it, up to
//! five seconds ago. What came after that is in the dead kernel's memory only: contents in dirty pages, names and
//! attributes in blocks of a transaction that was never committed. It is carried over *through* the file system that is
//! mounted here, by ordinary system calls, and never as blocks: whichever bytes the dead kernel's memory holds, the
//! file system stays sound.
//!
//! 1. [`Plan`]: which files and directories the disk lacks something of, and what. Nothing is written yet, so that what
//!    cannot be understood refuses the rescue and leaves the disk as it is.
//! 2. [`apply`]: first the names (everything that is not where it belongs goes aside, then everything to its place),
//!    then contents, then attributes; then all of it is forced to the disk.
//!
//! A file is recognized on the disk by its number and generation (`open_by_handle_at`), not by its path, which may have
//! changed. Doing all of it twice does no harm: the second time there is nothing left to do, or the rest of it.

mod apply;
mod extents;
mod handle;
mod plan;

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use orrery_kimage::Kernel;
use orrery_orthros_images::{UnnamedFile, fill_unnamed_file};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use handle::Mounted;
use plan::Plan;

pub(crate) use apply::Written;

/// Brings the file system that is mounted at `mount_point`, from `device`, to the state that the dead kernel left it
/// in, and puts into the images what only its disk had.
///
/// # Errors
///
/// What cannot be read in the dead kernel's memory, before anything is changed; what the file system here refuses.
pub(crate) fn write_back(
    kernel: &Kernel,
    device: &Path,
    mount_point: &Path,
    unnamed: &[UnnamedFile],
    images: &Path,
) -> Result<Written> {
    let _limit = RaisedFileLimit::raise();
    let mounted = Mounted::open(mount_point)?;
    let death =
        orrery_orthros_images::time_of_death(kernel).context("cannot read the dead kernel's clock")?;
    let plan = Plan::make(kernel, device, &mounted, unnamed, death)
        .context("what the dead kernel had not written yet")?;
    ensure!(
        !(plan.reads_free_blocks() && apply::has_begun(&mounted, death)),
        "parts of it are only where a try before this one may have overwritten them"
    );
    for (file, content) in &plan.unnamed {
        fill_unnamed_file(*file, images, content)?;
    }
    apply::apply(&plan, &mounted).context("cannot write what the dead kernel had not")
}

/// Removes the traces of the write-back when no other try can follow.
pub(crate) fn finish(mount_point: &Path) -> Result<()> {
    apply::finish(&Mounted::open(mount_point)?)
}

/// A higher limit of file descriptors until this is dropped: the write-back needs one for each file that changed.
struct RaisedFileLimit(Rlimit);

impl RaisedFileLimit {
    const LIMIT: u64 = 1 << 20;

    fn raise() -> Self {
        let before = getrlimit(Resource::Nofile);
        let most = Rlimit { current: Some(Self::LIMIT), maximum: Some(Self::LIMIT) };
        // Where it is refused, opening a file will be, and say so.
        let _ = setrlimit(Resource::Nofile, most);
        Self(before)
    }
}

impl Drop for RaisedFileLimit {
    fn drop(&mut self) {
        let _ = setrlimit(Resource::Nofile, self.0);
    }
}

/// Reads everything once while the active is alive, so that all types are known when they are needed.
pub(crate) fn preload_types(kernel: &Kernel) {
    let unread = |_: u64, _: &mut [u8]| Err(std::io::Error::from(std::io::ErrorKind::Unsupported));
    for volume in kernel.volumes().found {
        if !volume.kind().is_ok_and(|kind| kind == "ext4") {
            continue;
        }
        let Ok(ext4) = orrery_kimage::Ext4::open(volume, &unread) else { continue };
        for file in ext4.files().found {
            let _ = (file.pages(orrery_kimage::Pages::Unwritten), ext4.extents(&file));
        }
        let _ = (ext4.file_on_disk(2).map(|top| ext4.extended_attributes(&top)), ext4.dropped(|_| false));
    }
}
