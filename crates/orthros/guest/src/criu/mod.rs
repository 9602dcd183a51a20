//! CRIU's image files, written from a dead kernel's memory instead of from running processes.

mod calls;
mod connections;
mod descriptors;
mod files;
mod filters;
mod frozen;
#[cfg(test)]
mod instants;
mod locks;
mod memfds;
mod memory;
mod messages;
mod movers;
mod object_messages;
mod shared;
mod task;
mod terminals;
mod transfer;
mod unix;
mod watches;
mod weight;
mod writer;

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{IdKind, Kernel, State, Task};
use orrery_orthros_wire::Summary;

use crate::after::{After, ThreadAfter};
use crate::datagrams::Datagrams;
use crate::ipc::Ipc;
use crate::later::Later;
use crate::resets::Resets;

use calls::Answers;
pub(crate) use connections::{Connection, connections, local_addresses};
use descriptors::{Sockets, Tables};
use files::Files;
pub(crate) use files::{MOST_CONTENT, Nameless};
use filters::Filters;
pub(crate) use frozen::Frozen;
use locks::Locks;
use memfds::Memfds;
pub(crate) use memory::PAGE;
use shared::SharedMemory;
use terminals::Terminals;
use unix::UnixSockets;
pub(crate) use weight::weigh;

use messages::{Inventory, KobjIds, Pstree, Timens, Timespec};
use writer::{ImageFile, Kind};

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
    unix: UnixSockets,
    memfds: Memfds,
    filters: Filters,
    locks: Locks,
    tables: Tables,
    shared: SharedMemory<'k>,
    datagrams: Datagrams,
    resets: Resets,
    after: After,
    /// Pages that need not be in the images, if some need not.
    later: Option<&'k mut Later>,
    /// What the process that is being written says of its calls.
    answers: Option<Answers>,
    /// The namespaces of the service.
    namespaces: Vec<u64>,
    summary: Summary,
    /// Remarks about what is hung up or counts as killed: with one of these, a service that could go on is not restored.
    losses: Vec<String>,
}

impl Context<'_> {
    /// Notes that something is hung up, or counts as killed.
    fn lose(&mut self, remark: String) {
        self.losses.push(remark.clone());
        self.summary.remarks.push(remark);
    }

    /// What a clock showed, in nanoseconds.
    fn now(&self, clock: u32) -> u64 {
        if clock == libc::CLOCK_REALTIME.cast_unsigned() {
            self.monotonic.wrapping_add(self.realtime)
        } else {
            self.monotonic
        }
    }

    /// What is left until a clock shows `expires`, in nanoseconds; never nothing, which would mean never.
    fn left(&self, clock: u32, expires: u64) -> u64 {
        expires.saturating_sub(self.now(clock)).max(1000)
    }
}

/// Writes images of the process `pid` and all its descendants into `folder`, ready for `criu restore`: with all their memory, or,
/// where there is someone who will bring what goes into `later`, without that.
///
/// What cannot be rebuilt costs what it is: a descriptor is hung up, a process counts as killed, with its descendants, and
/// its parent is told. Each is remarked.
///
/// # Errors
///
/// Where the process `pid` itself cannot be rebuilt, with the reason; where the images cannot be written.
pub(crate) fn write<'k>(
    kernel: &'k Kernel,
    frozen: &'k Frozen,
    pid: i32,
    folder: &Path,
    later: Option<&'k mut Later>,
) -> Result<(Summary, Vec<String>)> {
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
        unix: UnixSockets::default(),
        memfds: Memfds::default(),
        filters: Filters::default(),
        locks: Locks::default(),
        tables: Tables::default(),
        shared: SharedMemory::default(),
        datagrams: Datagrams::default(),
        resets: Resets::default(),
        after: After::default(),
        later,
        answers: None,
        namespaces: Vec::new(),
        summary: Summary::default(),
        losses: Vec::new(),
    };
    match Ipc::of(&kernel.process(pid)?) {
        Ok(ipc) => ipc.write(folder)?,
        Err(error) => {
            context.lose(format!("System V objects are lost: {error:#}"));
            Ipc::default().write(folder)?;
        }
    }
    let mut pstree = ImageFile::create(folder, "pstree", Kind::Pstree)?;
    let mut pending = vec![kernel.process(pid)?];
    let mut index = 0;
    while let Some(process) = pending.pop() {
        index += 1;
        let number = process.pid()?;
        let told = || format!("process {number} ({})", process.name().unwrap_or_default());
        let (entry, children) = match one(&mut context, &process, index, folder, number == pid) {
            Ok(found) => found,
            Err(error) if number == pid => return Err(error.context(told())),
            Err(error) => {
                let remark = format!("{} and its descendants count as killed: {error:#}", told());
                context.lose(remark);
                (killed(&mut context, &process, folder).with_context(told)?, Vec::new())
            }
        };
        pstree.put(&entry)?;
        pending.extend(children);
    }
    pstree.finish()?;
    let remarks = context.unix.write(&mut context.files, folder)?;
    remarks.into_iter().for_each(|remark| context.lose(remark));
    terminals::hang_up(&mut context);
    context.tables.write(&context.files, folder)?;
    context.memfds.write(folder)?;
    context.locks.write(folder)?;
    context.filters.write(folder)?;
    context.after.write(folder)?;
    context.datagrams.write(folder)?;
    context.resets.write(folder)?;
    context.files.write(folder)?;
    context.sockets.write(folder)?;
    context.terminals.write(folder)?;
    context.summary.pages += context.shared.write(kernel, folder)?;
    context.summary.lazy_pages = context.later.as_ref().map_or(0, |later| later.pages());
    let (seconds, nanoseconds) = (monotonic / 1_000_000_000, monotonic % 1_000_000_000);
    let now = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let mut clock = ImageFile::create(folder, &format!("timens-{OWN_CLOCK}"), Kind::Timens)?;
    clock.put(&Timens { monotonic: now, boottime: now })?;
    clock.finish()?;
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
    Ok((context.summary, context.losses))
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

/// The namespaces that a process is in, by their addresses, and how deep its numbers are nested.
fn namespaces(process: &Task<'_>) -> Result<Vec<u64>> {
    let proxy = process.object().required("nsproxy", "nsproxy")?;
    let mut found = vec![process.ids(IdKind::Process)?.len() as u64];
    for path in ["uts_ns", "ipc_ns", "mnt_ns", "net_ns"] {
        found.push(proxy.u64(path)?);
    }
    found.push(process.object().required("cred", "cred")?.u64("user_ns")?);
    Ok(found)
}

/// The innermost of a process' numbers.
fn number(process: &Task<'_>, kind: IdKind) -> Result<u32> {
    Ok(process.ids(kind)?.last().copied().context("it has no number")?.cast_unsigned())
}

/// Writes one process, alive or ended, and gives its children.
fn one<'k>(
    context: &mut Context<'k>,
    process: &Task<'k>,
    index: u32,
    folder: &Path,
    is_root: bool,
) -> Result<(Pstree, Vec<Task<'k>>)> {
    let threads = process.threads();
    let ended = matches!(process.state()?, State::Zombie | State::Dead);
    if ended && !is_root && threads.found.len() <= 1 {
        return Ok((write_ended(process, task::exit_code(process)?, folder)?, Vec::new()));
    }
    let children = process.children();
    if let Some(problem) = children.problems.first() {
        bail!("its children: {problem}");
    }
    let entry = write_process(context, process, index, folder, is_root)?;
    Ok((entry, children.found))
}

/// Writes a process that cannot be rebuilt as one that was killed, and leaves word for its parent.
fn killed(context: &mut Context<'_>, process: &Task<'_>, folder: &Path) -> Result<Pstree> {
    let entry = write_ended(process, libc::SIGKILL.cast_unsigned(), folder)?;
    if let Some(later) = &mut context.later {
        later.remove(entry.pid.cast_signed());
    }
    context.after.bereaved.push(entry.ppid);
    Ok(entry)
}

/// Writes a process that has ended, for its parent to find.
fn write_ended(process: &Task<'_>, exit_code: u32, folder: &Path) -> Result<Pstree> {
    let pid = number(process, IdKind::Process)?;
    let mut file = ImageFile::create(folder, &format!("core-{pid}"), Kind::Core)?;
    file.put(&task::ended(process.name()?, exit_code))?;
    file.finish()?;
    for part in ["ids", "mm", "pagemap", "fs"] {
        // Of an attempt to write it as one that lives.
        let _ = fs::remove_file(folder.join(format!("{part}-{pid}.img")));
    }
    Ok(Pstree {
        pid,
        ppid: parent(process)?,
        pgid: number(process, IdKind::Group)?,
        sid: number(process, IdKind::Session)?,
        threads: vec![pid],
    })
}

fn write_process<'k>(
    context: &mut Context<'k>,
    process: &Task<'k>,
    index: u32,
    folder: &Path,
    is_root: bool,
) -> Result<Pstree> {
    let pid = number(process, IdKind::Process)?;
    let own = namespaces(process)?;
    if is_root {
        context.namespaces = own;
    } else if context.namespaces != own {
        bail!("it is in a namespace other than the service's");
    }
    let threads = process.threads();
    if let Some(problem) = threads.problems.first() {
        bail!("its threads: {problem}");
    }
    if process.undoes_semaphores()? {
        context.lose(format!("process {pid}: what it would give back to semaphores at its end is not"));
    }
    for group in process.control_groups().found.iter().filter(|group| group.path != b"/") {
        let path = String::from_utf8_lossy(&group.path);
        let remark =
            format!("process {pid} is in the control group {path} no more, and its limits hold no more");
        context.lose(remark);
    }
    context.answers = Answers::of(process)?;
    let mut tids = Vec::new();
    let mut after = Vec::new();
    for thread in &threads.found {
        let tid = number(thread, IdKind::Thread)?;
        tids.push(tid);
        let core = task::core(context, thread, tid == pid).with_context(|| format!("thread {tid}"))?;
        let mut file = ImageFile::create(folder, &format!("core-{tid}"), Kind::Core)?;
        file.put(&core)?;
        file.finish()?;
        after.push(ThreadAfter {
            thread: tid,
            processors: thread.affinity()?,
            no_new_privileges: thread.no_new_privileges()?,
            ambient: thread.credentials()?.ambient,
        });
    }
    let mut file = ImageFile::create(folder, &format!("ids-{pid}"), Kind::Ids)?;
    file.put(&ids(index, true))?;
    file.finish()?;
    memory::write(context, process, pid, index, folder)?;
    let fs = context.files.directories(process)?;
    let mut file = ImageFile::create(folder, &format!("fs-{pid}"), Kind::Fs)?;
    file.put(&fs)?;
    file.finish()?;
    // Last, as what is in its descriptors concerns others.
    descriptors::write(context, process, index)?;
    context.after.threads.extend(after);
    if process.state()? != State::Stopped {
        context.after.running.push(pid);
    }
    context.summary.processes += 1;
    context.summary.threads += threads.found.len();
    Ok(Pstree {
        pid,
        ppid: if is_root { 0 } else { parent(process)? },
        pgid: number(process, IdKind::Group)?,
        sid: number(process, IdKind::Session)?,
        threads: tids,
    })
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

/// The time of day at that moment, in nanoseconds: no other death has the same.
pub(crate) fn last_moment(kernel: &Kernel) -> Result<u64> {
    let offset = kernel.object("timekeeper", keeper(kernel)?)?.u64("offs_real")?;
    Ok(monotonic(kernel)?.wrapping_add(offset))
}

/// Where the kernel keeps its time: `tk_core` is a sequence counter and the timekeeper, which is aligned to 8.
fn keeper(kernel: &Kernel) -> Result<u64> {
    Ok(kernel.symbols().address("tk_core")? + 8)
}
