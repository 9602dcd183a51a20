//! What the dead kernel had not written to the service's disk yet, written on its behalf.
//!
//! When the disk is mounted here, its journal is replayed: it is then as the dead kernel had last committed it, up to five
//! seconds ago. What came after that is in the dead kernel's memory only: contents in dirty pages, names and attributes in
//! blocks of a transaction that was never committed. It is carried over *through* the file system that is mounted
//! here, by ordinary system calls, and never as blocks: whatever the dead kernel's memory holds, the file system stays sound.
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

use anyhow::{Context as _, Result};
use orrery_kimage::Kernel;
use orrery_orthros_wire::WrittenBack;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::criu::Nameless;

use handle::Mounted;
use plan::Plan;

/// What was written.
#[derive(Debug, Default)]
pub(crate) struct Written {
    pub(crate) counts: WrittenBack,
    /// What could not be carried over exactly.
    pub(crate) remarks: Vec<String>,
}

/// Brings the file system that is mounted at `place`, from `device`, to the state that the dead kernel left it in, and puts
/// into the images what only its disk had.
///
/// # Errors
///
/// What cannot be read in the dead kernel's memory, before anything is changed; what the file system here refuses.
pub(crate) fn write_back(kernel: &Kernel, device: &Path, place: &Path, images: &Path) -> Result<Written> {
    let _many = ManyFiles::allow();
    let mounted = Mounted::open(place)?;
    let death = crate::criu::last_moment(kernel).context("cannot read the dead kernel's clock")?;
    let nameless = Nameless::read(images)?;
    let plan = Plan::make(kernel, device, &mounted, &nameless, death)
        .context("what the dead kernel had not written yet")?;
    for (nameless, content) in &plan.nameless {
        nameless.fill(images, content)?;
    }
    apply::apply(&plan, &mounted).context("cannot write what the dead kernel had not")
}

/// Tidies up when no other try can follow.
pub(crate) fn finish(place: &Path) -> Result<()> {
    apply::finish(&Mounted::open(place)?)
}

/// One descriptor for each file that changed: more than a process may have by default.
struct ManyFiles(Rlimit);

impl ManyFiles {
    const MOST: u64 = 1 << 20;

    fn allow() -> Self {
        let before = getrlimit(Resource::Nofile);
        let most = Rlimit { current: Some(Self::MOST), maximum: Some(Self::MOST) };
        // Where it is refused, opening a file will be, and say so.
        let _ = setrlimit(Resource::Nofile, most);
        Self(before)
    }
}

impl Drop for ManyFiles {
    fn drop(&mut self) {
        let _ = setrlimit(Resource::Nofile, self.0);
    }
}

/// Looks at everything once, while the active lives, so that all types are known when they are needed.
pub(crate) fn rehearse(kernel: &Kernel) {
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
