//! The memory that a restore takes, estimated before it has to be done.

use std::collections::HashSet;

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{Kernel, OpenFile, State, Task};

use super::memory;
use crate::model::{PAGE, PageRange};

/// The memory of criu itself, and of the kernel for processes, their tables and their files.
const OVERHEAD: u64 = 24 << 20;

/// Estimates the bytes of memory that a restore of the process `pid` and its descendants takes. Pages in images are there twice
/// during the restore, lazy ones once.
///
/// # Errors
///
/// The memory cannot be read; if the kernel is alive it may be changing.
pub fn estimate_memory(kernel: &Kernel, pid: i32) -> Result<u64> {
    let mut bytes = OVERHEAD;
    let mut shared = HashSet::new();
    let mut pending = vec![kernel.process(pid)?];
    let mut seen = HashSet::new();
    while let Some(process) = pending.pop() {
        if !seen.insert(process.object().address()) {
            bail!("its processes go round");
        }
        if matches!(process.state()?, State::Zombie | State::Dead) {
            continue;
        }
        bytes += of_process(kernel, &process, &mut shared)?;
        pending.extend(process.children().found);
    }
    Ok(bytes)
}

fn of_process(kernel: &Kernel, process: &Task<'_>, shared: &mut HashSet<u64>) -> Result<u64> {
    let space = process.address_space()?.context("it has no memory")?;
    let mappings = space.mappings();
    if let Some(problem) = mappings.problems.first() {
        bail!("its mappings: {problem}");
    }
    let mut bytes = page_bytes(&memory::own_pages(kernel, process, &space, &mappings.found)?);
    for mapping in mappings.found.iter().filter(|mapping| mapping.is_shared()) {
        let Some(file) = mapping.file()? else { continue };
        let file = OpenFile::check(file)?;
        let inode = file.inode()?;
        if file.file_system()? == "tmpfs" && shared.insert(inode.address()) {
            let pages = inode.required("i_mapping", "address_space")?.u64("nrpages")?;
            bytes = bytes.saturating_add(pages.saturating_mul(2 * PAGE));
        }
    }
    Ok(bytes)
}

/// Returns how much memory pages take while they are restored.
fn page_bytes(pages: &[PageRange]) -> u64 {
    let lazy = memory::lazy_bytes(pages);
    let bytes: u64 = pages.iter().map(|range| range.length).sum();
    2 * bytes - if memory::is_worth_being_lazy(lazy) { lazy } else { 0 }
}
