//! How much memory it takes to rebuild a service, told before it has to be done.

use std::collections::HashSet;

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{Kernel, OpenFile, State, Task};

use super::memory::{self, PAGE};

/// What criu itself takes, and the kernel for processes, their tables and their files.
const BESIDES: u64 = 24 << 20;

/// How many bytes it takes to rebuild the process `pid` and all its descendants. What comes later is there once, what lies in images
/// twice while it is restored.
///
/// # Errors
///
/// Where its memory cannot be read; of a kernel that lives it may be changing.
pub(crate) fn weigh(kernel: &Kernel, pid: i32) -> Result<u64> {
    let mut bytes = BESIDES;
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
    let mut bytes = memory::weigh(&memory::all_pages(kernel, process, &space, &mappings.found)?);
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
