//! The tree of processes.

use std::collections::HashMap;

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{Descriptor as KernelDescriptor, FileKind, IdKind, Kernel, OpenFile, State, Task};

use super::Exclusions;
use super::clocks::Clocks;
use super::cpu_registers::CpuRegisters;
use super::file_table::FileTable;
use super::seccomp::FilterTable;
use super::syscalls::Answers;
use super::{attributes, file_owner, locks, memory, open_file, restore_state, terminals, thread, unix};
use crate::model::{Descriptor, FileLock, Process, ProcessState, Running, Service};

/// What a service is read with, and what is known of it so far.
pub(super) struct Reader<'k> {
    kernel: &'k Kernel,
    cpus: &'k CpuRegisters,
    clocks: Clocks,
    lazy: bool,
    exclusions: &'k Exclusions,
    files: FileTable<'k>,
    filters: FilterTable,
    /// The namespaces of the service's own process.
    namespaces: Vec<u64>,
    /// What processes may share although they are no threads of one process, with the PID of the first that had it.
    shared: HashMap<u64, u32>,
}

impl<'k> Reader<'k> {
    pub(super) fn new(
        kernel: &'k Kernel,
        cpus: &'k CpuRegisters,
        clocks: Clocks,
        lazy: bool,
        exclusions: &'k Exclusions,
    ) -> Self {
        let (files, filters) = (FileTable::new(kernel, clocks), FilterTable::default());
        Self {
            kernel,
            cpus,
            clocks,
            lazy,
            exclusions,
            files,
            filters,
            namespaces: Vec::new(),
            shared: HashMap::new(),
        }
    }

    /// Reads the process `pid` and all its descendants.
    pub(super) fn read(mut self, pid: i32) -> Result<Service> {
        let root = self.kernel.process(pid)?;
        let ipc = restore_state::System5::read(&root).unwrap_or_else(|error| {
            self.files.remarks().add_loss(format!("System V objects are lost: {error:#}"));
            restore_state::System5::default()
        });
        let mut processes = Vec::new();
        let mut bereaved_parents = Vec::new();
        let mut pending = vec![root];
        while let Some(process) = pending.pop() {
            let number = process.pid()?;
            let name = || format!("process {number} ({})", process.name().unwrap_or_default());
            match self.process(&process, number == pid) {
                Ok((process, children)) => {
                    processes.push(process);
                    pending.extend(children);
                }
                Err(error) if number == pid => return Err(error.context(name())),
                Err(error) => {
                    let remark = format!("{} and its descendants count as killed: {error:#}", name());
                    self.files.remarks().add_loss(remark);
                    let killed = exited(&process, libc::SIGKILL.cast_unsigned()).with_context(name)?;
                    bereaved_parents.push(killed.ppid);
                    processes.push(killed);
                }
            }
        }
        self.hang_up_half_terminals();
        self.hang_up_unreachable_sockets(&processes);
        let mut contents = self.files.into_contents();
        for remark in unix::resolve_peers(&mut contents.files) {
            contents.remarks.add_loss(remark);
        }
        let names = names(&root);
        let init = self.kernel.process(root.parent()?)?;
        let mut restore_state =
            restore_state::collect(&processes, &mut contents, ipc, bereaved_parents, names);
        restore_state.output_pipe = restore_state::output_pipe(&init, &contents.files);
        let (remarks, losses) = contents.remarks.into_parts();
        Ok(Service {
            monotonic: self.clocks.monotonic,
            processes,
            files: contents.files,
            ghosts: contents.ghosts,
            shared_memory: contents.shared_memory,
            filters: self.filters.into_filters(),
            restore_state,
            remarks,
            losses,
        })
    }

    /// Hangs up the terminals of which the service has one side only.
    fn hang_up_half_terminals(&mut self) {
        for (id, flags, number) in terminals::half(self.files.files()) {
            let remark = format!("terminal {number} is hung up: its other side is not the service's");
            self.files.remarks().add_loss(remark);
            let gone = self.files.hung_up(flags);
            self.files.replace(id, gone);
        }
    }

    /// Hangs up the sockets that no process has open, but that are under way to one, and that something keeps packets away from:
    /// only through a process could that be set again.
    fn hang_up_unreachable_sockets(&mut self, processes: &[Process]) {
        let reachable = restore_state::holders(processes);
        for id in self.files.restricted_sockets() {
            if !reachable.contains_key(&id) {
                let remark =
                    "a socket with a filter, or bound to an interface, was being sent; it is hung up";
                self.files.remarks().add_loss(remark.to_owned());
                let gone = self.files.hung_up(0);
                self.files.replace(id, gone);
            }
        }
    }

    /// Reads one process, running or exited, and returns its children, too.
    fn process(&mut self, process: &Task<'k>, is_root: bool) -> Result<(Process, Vec<Task<'k>>)> {
        let has_exited = matches!(process.state()?, State::Zombie | State::Dead);
        if has_exited && !is_root && process.threads().found.len() <= 1 {
            return Ok((exited(process, thread::exit_status(process)?)?, Vec::new()));
        }
        let children = process.children();
        if let Some(problem) = children.problems.first() {
            bail!("its children: {problem}");
        }
        let pid = innermost(process, IdKind::Process)?;
        if let Some(why) = self.exclusions.processes.get(&pid) {
            bail!("{why}");
        }
        let namespaces = namespaces(process)?;
        if is_root {
            self.namespaces = namespaces;
        } else if self.namespaces != namespaces {
            bail!("it is in a namespace other than the service's");
        }
        let running = self.running(process, pid)?;
        let process = Process {
            pid,
            ppid: if is_root { 0 } else { parent(process)? },
            pgid: innermost(process, IdKind::Group)?,
            sid: innermost(process, IdKind::Session)?,
            state: ProcessState::Running(Box::new(running)),
        };
        Ok((process, children.found))
    }

    fn running(&mut self, process: &Task<'k>, pid: u32) -> Result<Running> {
        let threads = process.threads();
        if let Some(problem) = threads.problems.first() {
            bail!("its threads: {problem}");
        }
        self.refuse_shared_memory(process, pid)?;
        self.remark_on_limits(process, pid)?;
        let answers = Answers::of(process)?;
        let reading = thread::Reading { kernel: self.kernel, cpus: self.cpus, answers: answers.as_ref() };
        let mut found = Vec::new();
        for thread in &threads.found {
            let tid = innermost(thread, IdKind::Thread)?;
            let read = reading.thread(thread, tid, &mut self.filters, self.files.remarks());
            found.push(read.with_context(|| format!("thread {tid}"))?);
        }
        let task = process.object();
        let memory = memory::read(self.kernel, &mut self.files, process, self.lazy)?;
        for thread in &mut found {
            thread.attributes.pid = pid;
        }
        if let Some(leader) = found.iter_mut().find(|thread| thread.tid == pid) {
            attributes::add_of_process(process, &memory.mappings, &mut leader.attributes)?;
        }
        attributes::remark_on_process(task, pid, self.files.remarks())?;
        let directories = self.files.add_directories(process)?;
        let (timers, rlimits) = (thread::timers(self.clocks, process)?, thread::rlimits(process)?);
        let (pending_signals, actions) = (process.pending_signals(true)?, thread::actions(task)?);
        // Last, as what is in its descriptors concerns others.
        let (descriptors, locks) = self.descriptors(process, pid)?;
        Ok(Running {
            stopped: process.state()? == State::Stopped,
            personality: task.u32("personality")?,
            flags: task.u32("flags")?,
            threads: found,
            timers,
            rlimits,
            pending_signals,
            actions,
            memory,
            directories,
            descriptors,
            locks,
        })
    }

    /// Refuses a process that shares the memory of another one without being its thread (`CLONE_VM` of clone(2)): with memory of its own it
    /// would go wrong silently. Shared tables of descriptors and directories are separate afterwards, with a remark.
    fn refuse_shared_memory(&mut self, process: &Task<'_>, pid: u32) -> Result<()> {
        let task = process.object();
        // A child of vfork(2) only executes another program.
        let is_borrowed = task.u64("vfork_done")? != 0;
        if let Some(space) = process.address_space()?
            && let Some(other) = self.first_owner(space.object().address(), pid)
            && !is_borrowed
        {
            bail!("it shares the memory of process {other}, of which it is no thread");
        }
        for (path, what) in [("files", "file descriptors"), ("fs", "directories and umask")] {
            if let Some(other) = self.first_owner(task.u64(path)?, pid) {
                let remark = format!("process {pid} shares its {what} with process {other} no more");
                self.files.remarks().add_loss(remark);
            }
        }
        Ok(())
    }

    /// Notes that a process has something, and returns the other one that had it first.
    fn first_owner(&mut self, address: u64, pid: u32) -> Option<u32> {
        Some(*self.shared.entry(address).or_insert(pid)).filter(|&first| first != pid && address != 0)
    }

    /// Adds remarks about limits and duties that a restored process does not have.
    fn remark_on_limits(&mut self, process: &Task<'_>, pid: u32) -> Result<()> {
        let remarks = self.files.remarks();
        if process.undoes_semaphores()? {
            remarks.add_loss(format!("process {pid}: its semaphore adjustments (SEM_UNDO) are lost"));
        }
        for group in process.control_groups().found.iter().filter(|group| group.path != b"/") {
            let path = String::from_utf8_lossy(&group.path);
            remarks.add_loss(format!(
                "process {pid} is in the control group {path} no more, and its limits hold no more"
            ));
        }
        Ok(())
    }

    /// Reads the file descriptors of a process, and the locks that it has on files.
    fn descriptors(&mut self, process: &Task<'k>, pid: u32) -> Result<(Vec<Descriptor>, Vec<FileLock>)> {
        let descriptors = process.descriptors();
        if let Some(problem) = descriptors.problems.first() {
            bail!("its descriptors: {problem}");
        }
        let is_stored = |descriptor: &&KernelDescriptor<'_>| is_stored(&descriptor.file);
        let (mut table, mut all_locks) = (Vec::new(), Vec::new());
        let entry = |descriptor: &KernelDescriptor<'_>, file| Descriptor {
            fd: descriptor.number,
            file,
            closes_on_exec: descriptor.closes_on_exec,
        };
        // Without a file that it reads or writes, a process would go wrong silently: that refuses it, before anything else
        // has been added for it.
        for descriptor in descriptors.found.iter().filter(is_stored) {
            let file =
                open_file::add(&mut self.files, &descriptor.file).with_context(|| describe(descriptor))?;
            all_locks.extend(locks::read(process, descriptor).with_context(|| describe(descriptor))?);
            if locks::is_leased(&descriptor.file)? {
                let remark = format!("process {pid}: the lease on {} is lost", describe(descriptor));
                self.files.remarks().add_once(remark);
            }
            table.push(entry(descriptor, file));
        }
        for descriptor in descriptors.found.iter().filter(|descriptor| !is_stored(descriptor)) {
            let excluded = self.exclusions.descriptors.get(&(pid, descriptor.number));
            let read = match excluded {
                Some(why) => Err(anyhow::anyhow!("{why}")),
                None => open_file::add(&mut self.files, &descriptor.file),
            };
            let file = match read {
                Ok(file) => file,
                Err(error) => {
                    let remark = format!("process {pid}: {} is hung up: {error:#}", describe(descriptor));
                    self.files.remarks().add_loss(remark);
                    let gone = self.files.hung_up(descriptor.file.flags().unwrap_or(0));
                    self.files.add(&descriptor.file, gone)
                }
            };
            table.push(entry(descriptor, file));
        }
        for (descriptor, file) in descriptors
            .found
            .iter()
            .filter_map(|descriptor| {
                let file = self.files.known(&descriptor.file)?;
                Some((descriptor, file))
            })
            .collect::<Vec<_>>()
        {
            if let Some(owner) = file_owner::read(&descriptor.file).with_context(|| describe(descriptor))? {
                self.files.add_owner(file, owner);
            }
        }
        table.sort_unstable();
        Ok((table, all_locks))
    }
}

/// Returns whether a file holds what a process has stored, or finds where it was told to look. What the kernel makes up when it is read
/// (`/proc`, `/sys`), and what has no place in the tree of names, is none: a process that finds it hung up can open it again.
fn is_stored(file: &OpenFile<'_>) -> bool {
    /// File systems whose files are made up.
    const MADE_UP: [&str; 9] =
        ["proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "nsfs", "mqueue"];
    match file.kind() {
        Ok(FileKind::Regular | FileKind::Directory) => {
            let made_up = file.file_system().is_ok_and(|name| MADE_UP.contains(&&*name));
            let has_place = file.path().is_ok_and(|path| path.deleted) || file.is_in_tree().unwrap_or(true);
            !made_up && has_place
        }
        Ok(_) => false,
        Err(_) => true,
    }
}

/// Returns a process that has exited with this status, or counts as having done so.
fn exited(process: &Task<'_>, status: u32) -> Result<Process> {
    Ok(Process {
        pid: innermost(process, IdKind::Process)?,
        ppid: parent(process)?,
        pgid: innermost(process, IdKind::Group)?,
        sid: innermost(process, IdKind::Session)?,
        state: ProcessState::Exited { name: process.name()?, status },
    })
}

fn describe(descriptor: &KernelDescriptor<'_>) -> String {
    let path = descriptor.file.path().map(|path| path.display()).unwrap_or_default();
    format!("its descriptor {} ({path})", descriptor.number)
}

/// Returns the host and domain name of a process.
fn names(process: &Task<'_>) -> Option<(String, String)> {
    let space =
        process.object().required("nsproxy", "nsproxy").ok()?.required("uts_ns", "uts_namespace").ok()?;
    let names = space.embedded("name", "new_utsname").ok()?;
    Some((names.text("nodename").ok()?, names.text("domainname").ok()?))
}

/// Returns the addresses of the namespaces that a process is in, and how deep its PIDs are nested.
fn namespaces(process: &Task<'_>) -> Result<Vec<u64>> {
    let proxy = process.object().required("nsproxy", "nsproxy")?;
    let mut found = vec![process.ids(IdKind::Process)?.len() as u64];
    for path in ["uts_ns", "ipc_ns", "mnt_ns", "net_ns"] {
        found.push(proxy.u64(path)?);
    }
    found.push(process.object().required("cred", "cred")?.u64("user_ns")?);
    Ok(found)
}

/// Returns an ID of a process in its innermost PID namespace.
fn innermost(process: &Task<'_>, kind: IdKind) -> Result<u32> {
    Ok(process.ids(kind)?.last().copied().context("it has no PID")?.cast_unsigned())
}

/// Returns the PID of a process's parent in the parent's innermost PID namespace.
fn parent(process: &Task<'_>) -> Result<u32> {
    let parent = process.object().kernel().process(process.parent()?)?;
    innermost(&parent, IdKind::Process).context("its parent")
}
