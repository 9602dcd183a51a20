//! Pseudo-terminals of which the service has both sides: a program in its terminal, and who serves the terminal.

use std::collections::BTreeSet;

use anyhow::Result;
use orrery_kimage::OpenFile;

use super::file_table::FileTable;
use crate::model::{File, FileId, Terminal};

/// Adds a file that is one side of a pseudo-terminal.
pub(super) fn add(
    files: &mut FileTable<'_>,
    file: &OpenFile<'_>,
    state: orrery_kimage::Terminal,
) -> Result<FileId> {
    let flags = file.flags()?;
    let attributes = file.attributes()?;
    let path = files.add_path(flags, file.path()?.bytes);
    // The kernel packs 12 and 20 bits, programs 8 and 8 and the rest above.
    let device = u32::try_from(libc::makedev(attributes.device >> 20, attributes.device & 0xf_ffff))?;
    let terminal = Box::new(Terminal { state, device, uid: attributes.uid, gid: attributes.gid });
    let flags = flags & !(libc::O_CLOEXEC | libc::O_CREAT).cast_unsigned();
    Ok(files.add(file, File::Terminal { flags, path, terminal }))
}

/// Returns the terminals of which the service has one side only: their IDs, flags and numbers.
pub(super) fn half(files: &[File]) -> Vec<(FileId, u32, u32)> {
    let terminals = || {
        (1..).zip(files).filter_map(|(id, file)| match file {
            File::Terminal { flags, terminal, .. } => Some((FileId(id), *flags, terminal.side())),
            _ => None,
        })
    };
    let sides: BTreeSet<u32> = terminals().map(|(_, _, side)| side).collect();
    let half = terminals().filter(|(_, _, side)| !sides.contains(&(side ^ 1)));
    half.map(|(id, flags, side)| (id, flags, side / 2)).collect()
}
