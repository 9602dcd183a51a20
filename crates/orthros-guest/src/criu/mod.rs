//! CRIU's image files, written from a dead kernel's memory instead of from running processes.

mod connections;
mod descriptors;
mod files;
mod frozen;
mod memory;
mod messages;
mod shared;
mod task;
mod terminals;
mod writer;

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use orrery_kimage::{IdKind, Kernel, Task};

pub(crate) use connections::{Connection, connections};
use descriptors::Sockets;
use files::Files;
pub(crate) use frozen::Frozen;
use shared::SharedMemory;
use terminals::Terminals;

use messages::{Inventory, KobjIds, Pstree, Timens, Timespec};
use writer::{ImageFile, Kind};

/// What went into the images, for the report.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub(crate) struct Summary {
    /// Processes, and threads in them.
    pub(crate) processes: usize,
    /// Threads in them.
    pub(crate) threads: usize,
    /// Pages of memory.
    pub(crate) pages: u64,
    /// Descriptors.
    pub(crate) descriptors: usize,
    /// Established TCP connections.
    pub(crate) connections: usize,
    /// What the dead kernel had not written to its disk yet, and was written for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) written: Option<crate::writeback::Written>,
    /// What could not be carried over exactly, in words.
    pub(crate) remarks: Vec<String>,
}

/// What several parts of the writing share.
struct Context<'k> {
    kernel: &'k Kernel,
    /// The dead kernel's clock, in nanoseconds since it booted.
    monotonic: u64,
    frozen: &'k Frozen,
    /// What to add to it for the time of day.
    realtime: u64,
    files: Files,
    sockets: Sockets,
    terminals: Terminals,
    shared: SharedMemory<'k>,
    summary: Summary,
}

impl Context<'_> {
    /// What is left until a clock shows `expires`, in nanoseconds; never nothing, which would mean never.
    fn left(&self, clock: u32, expires: u64) -> u64 {
        let now = if clock == libc::CLOCK_REALTIME.cast_unsigned() {
            self.monotonic.wrapping_add(self.realtime)
        } else {
            self.monotonic
        };
        expires.saturating_sub(now).max(1000)
    }
}

/// Writes images of the process `pid` and all its descendants into `folder`, ready for `criu restore`.
///
/// # Errors
///
/// Whatever cannot be rebuilt ends it, with the process and the reason: half a service is none.
pub(crate) fn write(kernel: &Kernel, frozen: &Frozen, pid: i32, folder: &Path) -> Result<Summary> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let monotonic = monotonic(kernel).context("cannot read the dead kernel's clock")?;
    let mut context = Context {
        kernel,
        monotonic,
        frozen,
        realtime: kernel.object("timekeeper", keeper(kernel)?)?.u64("offs_real")?,
        files: Files::default(),
        sockets: Sockets::default(),
        terminals: Terminals::default(),
        shared: SharedMemory::default(),
        summary: Summary::default(),
    };
    let mut tree = Vec::new();
    let mut pending = vec![kernel.process(pid)?];
    while let Some(process) = pending.pop() {
        let children = process.children();
        if let Some(problem) = children.problems.first() {
            anyhow::bail!("the children of process {}: {problem}", process.pid()?);
        }
        pending.extend(children.found);
        tree.push(process);
    }
    let mut pstree = ImageFile::create(folder, "pstree", Kind::Pstree)?;
    for (index, process) in (1..).zip(&tree) {
        let number = process.pid()?;
        let own = write_process(&mut context, process, index, folder, &mut pstree, number == pid);
        own.with_context(|| format!("process {number} ({})", process.name().unwrap_or_default()))?;
    }
    pstree.finish()?;
    context.files.write(folder)?;
    context.sockets.write(folder)?;
    context.terminals.write(folder)?;
    context.summary.pages += context.shared.write(kernel, folder)?;
    let (seconds, nanoseconds) = (monotonic / 1_000_000_000, monotonic % 1_000_000_000);
    let now = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let mut clock = ImageFile::create(folder, &format!("timens-{OWN_CLOCK}"), Kind::Timens)?;
    clock.put(&Timens { monotonic: now, boottime: now })?;
    clock.finish()?;
    ImageFile::create(folder, "seccomp", Kind::Seccomp)?.finish()?;
    let mut inventory = ImageFile::create(folder, "inventory", Kind::Inventory)?;
    inventory.put(&Inventory {
        img_version: 2,
        fdinfo_per_id: Some(true),
        root_ids: Some(ids(0xfff0, false)),
        ns_per_id: Some(true),
        lsmtype: Some(0),
        dump_uptime: Some(monotonic / 1000),
    })?;
    inventory.finish()?;
    Ok(context.summary)
}

/// The number of the service's time namespace, other than that of whoever runs criu.
const OWN_CLOCK: u32 = 9;

/// The identities of a process' shared parts. Namespaces are those of whoever runs criu; only the clock is its own.
fn ids(number: u32, own_clock: bool) -> KobjIds {
    KobjIds {
        vm_id: number,
        files_id: number,
        fs_id: number,
        sighand_id: number,
        pid_ns_id: Some(1),
        net_ns_id: Some(2),
        ipc_ns_id: Some(3),
        uts_ns_id: Some(4),
        mnt_ns_id: Some(5),
        user_ns_id: Some(6),
        cgroup_ns_id: Some(7),
        time_ns_id: Some(if own_clock { OWN_CLOCK } else { OWN_CLOCK - 1 }),
    }
}

fn write_process<'k>(
    context: &mut Context<'k>,
    process: &Task<'k>,
    index: u32,
    folder: &Path,
    pstree: &mut ImageFile,
    is_root: bool,
) -> Result<()> {
    let number = |kind| -> Result<u32> {
        let ids = process.ids(kind)?;
        Ok(ids.last().copied().context("it has no number")?.cast_unsigned())
    };
    let pid = number(IdKind::Process)?;
    let threads = process.threads();
    if let Some(problem) = threads.problems.first() {
        anyhow::bail!("its threads: {problem}");
    }
    let mut tids = Vec::new();
    for thread in &threads.found {
        let tid = thread.ids(IdKind::Thread)?.last().copied().context("it has no number")?.cast_unsigned();
        tids.push(tid);
        let core = task::core(context, thread, tid == pid).with_context(|| format!("thread {tid}"))?;
        let mut file = ImageFile::create(folder, &format!("core-{tid}"), Kind::Core)?;
        file.put(&core)?;
        file.finish()?;
    }
    pstree.put(&Pstree {
        pid,
        ppid: if is_root { 0 } else { parent(process)? },
        pgid: number(IdKind::Group)?,
        sid: number(IdKind::Session)?,
        threads: tids,
    })?;
    let mut file = ImageFile::create(folder, &format!("ids-{pid}"), Kind::Ids)?;
    file.put(&ids(index, true))?;
    file.finish()?;
    memory::write(context, process, pid, index, folder)?;
    descriptors::write(context, process, index, folder)?;
    let fs = context.files.directories(process)?;
    let mut file = ImageFile::create(folder, &format!("fs-{pid}"), Kind::Fs)?;
    file.put(&fs)?;
    file.finish()?;
    context.summary.processes += 1;
    context.summary.threads += threads.found.len();
    Ok(())
}

/// The number that a process' parent has where the process lives.
fn parent(process: &Task<'_>) -> Result<u32> {
    let parent = process.object().kernel().process(process.parent()?)?;
    Ok(parent.ids(IdKind::Process)?.last().copied().context("its parent has no number")?.cast_unsigned())
}

/// The dead kernel's monotonic clock when it last ticked: what its clocks will go on from.
fn monotonic(kernel: &Kernel) -> Result<u64> {
    let keeper = kernel.object("timekeeper", keeper(kernel)?)?;
    let base = keeper.u64("tkr_mono.base")?;
    let fraction = keeper.u64("tkr_mono.xtime_nsec")? >> keeper.u32("tkr_mono.shift")?.min(63);
    Ok(base + fraction)
}

/// Where the kernel keeps its time: `tk_core` is a sequence counter and the timekeeper, which is aligned to 8.
fn keeper(kernel: &Kernel) -> Result<u64> {
    Ok(kernel.symbols().address("tk_core")? + 8)
}
