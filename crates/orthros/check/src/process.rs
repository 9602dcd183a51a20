//! The processes of a service: who they are, and what about them as a whole cannot be carried over.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::report::{Findings, Verdict};

/// `SCHED_DEADLINE` of `sched(7)`.
const DEADLINE: u32 = 6;
/// The field of `/proc/PID/stat` that tells the scheduling class, counted after the name.
const POLICY: usize = 38;
/// The namespaces that a service shares with the machine, or all of its processes with one another.
const NAMESPACES: &[&str] = &["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"];

/// A process.
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) name: String,
    /// `/proc/PID/status`, by the names of its lines.
    status: BTreeMap<String, String>,
}

impl Process {
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        Path::new("/proc").join(self.pid.to_string()).join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    fn field(&self, name: &str) -> &str {
        self.status.get(name).map_or("", String::as_str)
    }

    fn number(&self, name: &str) -> u64 {
        self.field(name).split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0)
    }

    /// Returns the directory in `/proc` of the process that started a service and keeps its last output, as the guests of a pair do.
    pub(crate) fn keeper(&self) -> Option<PathBuf> {
        let directory = Path::new("/proc").join(self.field("PPid"));
        let program = |path: &Path| fs::read_link(path.join("exe")).ok();
        let is_of_guest = program(&directory)? == program(Path::new("/proc/self"))?;
        is_of_guest.then_some(directory)
    }

    /// Returns whether a process has its parent's memory only until it executes a program (vfork(2)); the parent waits for that.
    fn is_borrower(&self, parent: i32) -> bool {
        let waits = || Self::read(parent).is_some_and(|parent| parent.field("State").starts_with('D'));
        self.number("PPid") == u64::from(parent.cast_unsigned()) && waits()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.field("State").starts_with(['Z', 'X'])
    }

    fn read(pid: i32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let lines = text.lines().filter_map(|line| line.split_once(':'));
        let status: BTreeMap<String, String> =
            lines.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect();
        Some(Self { pid, name: status.get("Name").cloned().unwrap_or_default(), status })
    }
}

/// Returns a process and all its descendants.
pub(crate) fn tree(root: i32) -> Result<Vec<Process>> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    let path = PathBuf::from("/proc");
    let all = fs::read_dir(&path).map_err(|error| Error::Read { path, error })?;
    for entry in all.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Some(process) = Process::read(pid) {
            let parent = i32::try_from(process.number("PPid")).unwrap_or(0);
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = vec![Process::read(root).ok_or(Error::NoProcess(root))?];
    let mut pending = vec![root];
    while let Some(pid) = pending.pop() {
        for &child in children.get(&pid).map_or(&[][..], Vec::as_slice) {
            if let Some(process) = Process::read(child) {
                found.push(process);
                pending.push(child);
            }
        }
    }
    Ok(found)
}

fn namespace(process: &Process, name: &str) -> Option<PathBuf> {
    fs::read_link(process.path("ns").join(name)).ok()
}

/// What processes can share without being threads of one: types of kcmp(2), and what they are.
const SHARED: &[(i32, &str)] = &[(1, "memory"), (2, "file descriptors"), (3, "directories and umask")];

/// Checks what processes share although they are no threads of one process (`CLONE_VM`, `CLONE_FILES`, `CLONE_FS` of clone(2)).
pub(crate) fn check_sharing(processes: &[Process], findings: &mut Findings) {
    let mut owners: BTreeMap<(i32, String), Vec<i32>> = BTreeMap::new();
    for process in processes.iter().filter(|process| !process.has_ended()) {
        for &(kind, what) in SHARED {
            // Only those that look the same are compared.
            let looks = match kind {
                1 => process.text("maps"),
                2 => process.field("FDSize").to_owned(),
                _ => process.field("Umask").to_owned(),
            };
            let known = owners.entry((kind, looks)).or_default();
            match known.iter().find(|&&other| shares(process.pid, other, kind) && !process.is_borrower(other))
            {
                Some(other) => {
                    let (verdict, why) = if kind == 1 {
                        (
                            Verdict::Refused,
                            format!("it shares the memory of process {other}, of which it is no thread"),
                        )
                    } else {
                        (
                            Verdict::Lost,
                            format!("it shares them with process {other}, and does no more afterwards"),
                        )
                    };
                    findings.add(
                        process.pid,
                        what,
                        verdict,
                        why,
                        "use threads, or shared mappings and messages",
                    );
                }
                None => known.push(process.pid),
            }
        }
    }
}

/// Returns whether two processes share something, by a type of kcmp(2). Where the call is not allowed they do not.
fn shares(one: i32, other: i32, kind: i32) -> bool {
    // SAFETY: with these kinds the call takes numbers only.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, kind, 0, 0) == 0 }
}

/// Checks what concerns a process as a whole.
pub(crate) fn check(processes: &[Process], findings: &mut Findings) {
    let root: Vec<Option<PathBuf>> = NAMESPACES
        .iter()
        .map(|name| processes.first().and_then(|process| namespace(process, name)))
        .collect();
    let given = given_groups(processes.first());
    for process in processes {
        let mut add = |object: &str, verdict, why: String, way_out: &str| {
            findings.add(process.pid, object, verdict, why, way_out);
        };
        let is_root = processes.first().is_some_and(|root| root.pid == process.pid);
        if process.has_ended() {
            let threads = process.number("Threads");
            if is_root || threads > 1 {
                let why = "its first thread has ended".to_owned();
                add("process", Verdict::Refused, why, "let the first thread outlive the others");
            }
            continue;
        }
        if fs::read_link(process.path("exe")).is_err() && process.text("maps").is_empty() {
            add(
                "process",
                Verdict::Refused,
                "it is a thread of the kernel, or another user's".to_owned(),
                "run the check as root, on a program",
            );
            continue;
        }
        if is_narrow(process) {
            let why = "its program is for 32 bits".to_owned();
            add("program", Verdict::Refused, why, "use a build for x86-64");
        }
        for (name, root) in NAMESPACES.iter().zip(&root) {
            let own = namespace(process, name);
            if own.is_some() && root.is_some() && own != *root {
                let why = format!("it is in a {name} namespace other than the service's");
                add("namespaces", Verdict::Refused, why, "run it without a sandbox or container of its own");
            }
        }
        if process.number("TracerPid") != 0 {
            let why = format!("process {} traces it", process.number("TracerPid"));
            add("debugger", Verdict::Lost, why, "detach the debugger");
        }
        if process.number("VmSwap") > 0 {
            let why = format!("{} of its memory are in swap", process.field("VmSwap"));
            add(
                "memory",
                Verdict::Refused,
                why,
                "run the service without swap, or lock its memory (mlockall)",
            );
        }
        for group in groups(process).iter().filter(|group| !given.contains(group)) {
            let path = group.splitn(3, ':').last().unwrap_or_default();
            let why = format!("it is in the control group {path}");
            add("control group", Verdict::Lost, why, "limit it by setrlimit(2)");
        }
        if policy(process) == Some(DEADLINE) {
            let why = "a deadline is its scheduling class".to_owned();
            add("scheduling", Verdict::Lost, why, "use SCHED_FIFO or SCHED_RR");
        }
        for clock in clocks(process) {
            if clock > i64::from(libc::CLOCK_BOOTTIME) || !is_own(process, clock) {
                let why = format!(
                    "a timer goes by clock {clock}, of another process, or one that wakes the machine up"
                );
                let way_out = "use CLOCK_MONOTONIC, or processor time of the process itself";
                add("timers", Verdict::Refused, why, way_out);
            }
        }
    }
}

/// Returns the lines of `/proc/PID/cgroup`, cgroups(7).
fn groups(process: &Process) -> Vec<String> {
    process.text("cgroup").lines().map(str::to_owned).collect()
}

/// The groups that a service has not chosen itself: the machine's own where process 1 is in no other, as in a guest;
/// else those of its first process, which the process that started it has put it into.
fn given_groups(first: Option<&Process>) -> Vec<String> {
    let machine = Process::read(1).map(|init| groups(&init)).unwrap_or_default();
    if !machine.is_empty() && machine.iter().all(|line| line.ends_with(":/")) {
        return machine;
    }
    first.map(groups).unwrap_or_default()
}

/// Returns whether its program is an ELF file of class 32.
fn is_narrow(process: &Process) -> bool {
    let mut head = [0; 5];
    fs::File::open(process.path("exe")).and_then(|mut file| file.read_exact(&mut head)).is_ok()
        && head.starts_with(b"\x7fELF")
        && head[4] == 1
}

fn policy(process: &Process) -> Option<u32> {
    let stat = process.text("stat");
    // The name, in parentheses, may hold anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(POLICY)?.parse().ok()
}

/// Returns whether a clock is nobody's, or counts the processor time of the process or of one of its threads. Such
/// clocks are numbers below zero: the complement of a PID or TID, in which 0 is one's own, and three bits, of which
/// one says that it is a thread's.
fn is_own(process: &Process, clock: i64) -> bool {
    const OF_THREAD: i64 = 4;
    let owner = !(clock >> 3);
    if clock >= 0 || owner == 0 {
        return true;
    }
    let innermost = |status: &str| -> Option<i64> {
        let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        line.split_whitespace().last()?.parse().ok()
    };
    if clock & OF_THREAD == 0 {
        return innermost(&process.text("status")) == Some(owner);
    }
    let threads = fs::read_dir(process.path("task")).into_iter().flatten().flatten();
    let mut statuses = threads.filter_map(|thread| fs::read_to_string(thread.path().join("status")).ok());
    statuses.any(|status| innermost(&status) == Some(owner))
}

/// Returns the clocks of its POSIX timers.
fn clocks(process: &Process) -> Vec<i64> {
    let text = process.text("timers");
    text.lines().filter_map(|line| line.strip_prefix("ClockID:")?.trim().parse().ok()).collect()
}
