//! What inotifies watch.

use anyhow::{Context as _, Result, bail};
use orrery_kimage::OpenFile;

use super::Context;
use super::files::nobody;
use super::messages::File;
use super::object_messages::{FileHandle, InotifyFile, InotifyWatch};

const INOTIFY: u32 = 8;
/// `FH_ENTRY_SIZES__min_entries`: a handle is not needed beside a path, but must have its length.
const HANDLE: usize = 16;

/// Adds an inotify; events that were not read are lost, which is remarked.
pub(super) fn add(context: &mut Context<'_>, file: &OpenFile<'_>, id: u32, flags: u32) -> Result<File> {
    let inotify = file.inotify()?;
    let mut wd = Vec::new();
    for watch in &inotify.watches {
        let path = watch.path.as_ref().with_context(|| format!("nothing leads to file {}", watch.inode))?;
        let Ok(path) = String::from_utf8(path.bytes.clone()) else { bail!("a watched path is no UTF-8") };
        wd.push(InotifyWatch {
            id,
            i_ino: watch.inode,
            mask: watch.mask,
            ignored_mask: 0,
            s_dev: watch.device,
            wd: watch.number,
            f_handle: FileHandle { bytes: 0, kind: 0, handle: vec![0; HANDLE], path: Some(path) },
        });
    }
    if inotify.waiting > 0 {
        context.summary.remarks.push(format!("{} events of an inotify are lost", inotify.waiting));
    }
    let ify = InotifyFile { id, flags, fown: nobody(), wd };
    Ok(File { kind: INOTIFY, id, ify: Some(ify), ..File::default() })
}
