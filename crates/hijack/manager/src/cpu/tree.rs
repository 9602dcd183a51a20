//! The processes and threads of a tracee, and the time that they used.
//!
//! The kernel has no clock for a tree of processes, and no notice of a fork without privilege. So the tree is read from
//! `/proc/PID/task/TID/children` every tenth tick, where a few reads of files that stay open show a change; what lives for less than that is not charged. A process whose parent has ended stays
//! in the tree for as long as its pidfd says that it lives.

use std::fs::{self, File};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

use orrery_sys::scheduling::process_cpu_time;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// How many processes and threads of a tracee are followed: a fork bomb is charged for so many.
const MOST_PROCESSES: usize = 512;
const MOST_THREADS: usize = 2048;

#[derive(Debug)]
struct Process {
    pid: i32,
    pidfd: Option<OwnedFd>,
    /// Its clock when it was read last.
    used: u64,
    threads: Vec<i32>,
    watch: Option<Watch>,
}

/// What shows at the price of a few reads that a process has the threads and children that it had. `None` where it has too many.
#[derive(Debug)]
struct Watch {
    /// `/proc/PID/task`, and how many links it had: two more than threads.
    task: File,
    links: u64,
    threads: Vec<i32>,
    /// The files of children, of each thread, and what they held.
    children: Vec<(File, Vec<u8>)>,
    /// The files of how long each thread waited; `None` where the kernel has none.
    waited: Option<Vec<File>>,
}

/// How many threads are watched.
const MOST_WATCHED: usize = 16;

impl Watch {
    /// Begins to watch. Links are counted before threads are listed, and what is known of children is what the files held: whatever
    /// happens in between shows as a change.
    fn new(pid: i32) -> Option<Self> {
        let task = File::open(format!("/proc/{pid}/task")).ok()?;
        let links = rustix::fs::fstat(&task).ok()?.st_nlink;
        let threads = threads(pid);
        if threads.len() > MOST_WATCHED {
            return None;
        }
        let file = |thread: &i32, name: &str| File::open(format!("/proc/{pid}/task/{thread}/{name}")).ok();
        let children = |thread: &i32| {
            let file = file(thread, "children")?;
            let text = Self::read(&file)?;
            Some((file, text))
        };
        let children = threads.iter().map(children).collect::<Option<_>>()?;
        let waited = threads.iter().map(|thread| file(thread, "schedstat")).collect();
        Some(Self { task, links, threads, children, waited })
    }

    /// Returns the children that there were.
    fn children(&self) -> Vec<i32> {
        self.children.iter().flat_map(|(_, text)| numbers(&String::from_utf8_lossy(text))).collect()
    }

    /// Returns how long the threads waited for a CPU so far; `None` where the kernel does not count that.
    fn waited(&self) -> Option<u64> {
        // A thread that has ended has no text any more.
        let of_thread = |file: &File| {
            let text = Self::read(file).unwrap_or_default();
            waited(&String::from_utf8_lossy(&text)).unwrap_or(0)
        };
        Some(self.waited.as_ref()?.iter().map(of_thread).fold(0, u64::saturating_add))
    }

    /// The text of a file; `None` where it is long.
    fn read(file: &File) -> Option<Vec<u8>> {
        let mut buffer = [0; 256];
        let length = file.read_at(&mut buffer, 0).ok()?;
        (length < buffer.len()).then(|| buffer.get(..length).unwrap_or_default().to_vec())
    }

    fn is_unchanged(&self) -> bool {
        let links = rustix::fs::fstat(&self.task).is_ok_and(|found| found.st_nlink == self.links);
        let mut buffer = [0; 256];
        let mut same = |(file, text): &(File, Vec<u8>)| {
            file.read_at(&mut buffer, 0).is_ok_and(|length| buffer.get(..length) == Some(text))
        };
        links && self.children.iter().all(&mut same)
    }
}

/// What a control group around the tracee shows: its processes, whoever their parents are, and the time of all that ever were.
#[derive(Debug)]
struct Members {
    processes: File,
    /// What that file held.
    text: Vec<u8>,
    used: File,
    /// What the tree had used when the group had used nothing.
    begin: i128,
}

/// How many bytes of a list of members are read.
const LONGEST: usize = 8192;

impl Members {
    fn read(file: &File) -> Option<Vec<u8>> {
        let mut buffer = [0; LONGEST];
        let length = file.read_at(&mut buffer, 0).ok()?;
        buffer.get(..length).map(<[u8]>::to_vec)
    }

    /// Returns whether the group has the members that were read last.
    fn are_unchanged(&self) -> bool {
        // Most lists are short; a text that has grown fills the buffer, and differs.
        let mut short = [0; 256];
        if self.text.len() < short.len() {
            let length = self.processes.read_at(&mut short, 0);
            return length.is_ok_and(|length| short.get(..length) == Some(&self.text));
        }
        Self::read(&self.processes).as_ref() == Some(&self.text)
    }

    /// Returns the time that all members used, in nanoseconds; those that run now are charged up to their last tick.
    fn used(&self) -> Option<i128> {
        // It is the first line of a few.
        let mut buffer = [0; 128];
        let length = self.used.read_at(&mut buffer, 0).ok()?;
        let text = String::from_utf8_lossy(buffer.get(..length)?);
        let micros: i128 = text.lines().find_map(|line| line.strip_prefix("usage_usec "))?.parse().ok()?;
        Some(micros * 1000)
    }
}

/// A tracee's tree.
#[derive(Debug)]
pub(super) struct Tree {
    processes: Vec<Process>,
    members: Option<Members>,
    /// The time of those that have ended, less what the first process had used when it joined.
    ended: i128,
    /// What it had used when it was looked at last.
    looked: u64,
}

impl Tree {
    /// Makes the tree of a process, and reads it. `None` where that has ended.
    pub(super) fn new(root: i32) -> Option<Self> {
        let used = process_cpu_time(root).ok()?;
        let first = Process { pid: root, pidfd: None, used, threads: vec![root], watch: None };
        let mut tree = Self { processes: vec![first], members: None, ended: -i128::from(used), looked: 0 };
        tree.scan();
        Some(tree)
    }

    /// Returns the time that was used since the process joined, in nanoseconds.
    pub(super) fn used(&mut self) -> u64 {
        let mut sum = self.ended;
        for process in &mut self.processes {
            // A clock that goes back is another process'.
            process.used = process_cpu_time(process.pid).unwrap_or(0).max(process.used);
            sum += i128::from(process.used);
        }
        u64::try_from(sum.max(0)).unwrap_or(0)
    }

    /// Returns whether it may have other threads and processes than when this was asked last, where `used` is the time that it has used
    /// now: who did not run has started nobody.
    pub(super) fn has_run(&mut self, used: u64) -> bool {
        std::mem::replace(&mut self.looked, used) != used
    }

    /// Follows the members of a control group, in which all known processes are; these are its `cgroup.procs` and `cpu.stat`.
    pub(super) fn follow(&mut self, (processes, used): (File, File)) {
        let mut members = Members { processes, text: Vec::new(), used, begin: 0 };
        let so_far = members.used().unwrap_or(0);
        members.begin = i128::from(self.used()) - so_far;
        self.members = Some(members);
    }

    /// Returns whether a group shows all processes.
    pub(super) fn is_followed(&self) -> bool {
        self.members.is_some()
    }

    /// Charges what members used that were never found, since they lived for less than passes between two scans: after a scan, so that
    /// whoever lives is known.
    pub(super) fn settle(&mut self) {
        let Some(all) = self.members.as_ref().and_then(|members| Some(members.begin + members.used()?))
        else {
            return;
        };
        let known = i128::from(self.used());
        self.ended += (all - known).max(0);
    }

    /// Returns whether a scan would find what the last one found, as far as a few reads show.
    pub(super) fn is_unchanged(&self) -> bool {
        if !self.members.as_ref().is_none_or(Members::are_unchanged) {
            return false;
        }
        self.processes.iter().all(|process| process.watch.as_ref().is_some_and(Watch::is_unchanged))
    }

    /// Reads which processes and threads there are; returns the threads that are new.
    pub(super) fn scan(&mut self) -> Vec<i32> {
        let mut new = Vec::new();
        if let Some(members) = &mut self.members {
            members.text = Members::read(&members.processes).unwrap_or_default();
            for pid in numbers(&String::from_utf8_lossy(&members.text)) {
                self.add(pid, &mut new);
            }
        }
        let mut index = 0;
        while index < self.processes.len() {
            let pid = self.processes[index].pid;
            let watch = Watch::new(pid);
            let (threads, children) = match &watch {
                Some(watch) => (watch.threads.clone(), watch.children()),
                None => {
                    let threads = threads(pid);
                    let children = threads.iter().flat_map(|thread| children(pid, *thread)).collect();
                    (threads, children)
                }
            };
            let known = std::mem::take(&mut self.processes[index].threads);
            new.extend(threads.iter().filter(|thread| !known.contains(thread)));
            for child in children {
                self.add(child, &mut new);
            }
            self.processes[index].watch = watch;
            self.processes[index].threads = threads;
            index += 1;
        }
        // The first process' end is the tracee's, which the server finds out.
        let mut ended = self.ended;
        let mut first = true;
        self.processes.retain(|process| {
            let lives = std::mem::take(&mut first) || process.lives();
            if !lives {
                ended += i128::from(process.used);
            }
            lives
        });
        self.ended = ended;
        new
    }

    fn add(&mut self, pid: i32, new: &mut Vec<i32>) {
        let known = self.processes.iter().any(|process| process.pid == pid);
        if known || self.processes.len() >= MOST_PROCESSES {
            return;
        }
        let pidfd = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        if pidfd.is_some() {
            new.push(pid);
            self.processes.push(Process { pid, pidfd, used: 0, threads: vec![pid], watch: None });
        }
    }

    /// Returns all threads that are known.
    pub(super) fn threads(&self) -> impl Iterator<Item = i32> {
        self.processes.iter().flat_map(|process| process.threads.iter().copied()).take(MOST_THREADS)
    }

    /// Returns all processes that are known.
    pub(super) fn processes(&self) -> impl Iterator<Item = i32> {
        self.processes.iter().map(|process| process.pid)
    }

    /// Returns how long the threads waited for a CPU so far, in nanoseconds; `None` where the kernel does not count that. Those of
    /// ended threads are missing, so that the sum may go back.
    pub(super) fn waited(&self) -> Option<u64> {
        let mut sum = 0_u64;
        for process in &self.processes {
            if let Some(waited) = process.watch.as_ref().and_then(Watch::waited) {
                sum = sum.saturating_add(waited);
                continue;
            }
            for thread in &process.threads {
                let path = format!("/proc/{}/task/{thread}/schedstat", process.pid);
                match fs::read_to_string(path) {
                    Ok(text) => sum = sum.saturating_add(waited(&text)?),
                    Err(error)
                        if self.processes.len() == 1 && error.kind() == std::io::ErrorKind::NotFound =>
                    {
                        return None;
                    }
                    Err(_) => {}
                }
            }
        }
        Some(sum)
    }
}

impl Process {
    fn lives(&self) -> bool {
        self.pidfd.as_ref().is_none_or(|process| lives(process.as_fd()))
    }
}

/// Returns whether the process of a pidfd has not ended.
pub(crate) fn lives(process: BorrowedFd<'_>) -> bool {
    let mut poll = [rustix::event::PollFd::from_borrowed_fd(process, rustix::event::PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut poll, Some(&now)) == Ok(0)
}

fn threads(pid: i32) -> Vec<i32> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else { return vec![pid] };
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    entries.flatten().filter_map(number).take(MOST_THREADS).collect()
}

/// Returns the children that a thread started; none on kernels without this file.
fn children(pid: i32, thread: i32) -> Vec<i32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/children")).unwrap_or_default();
    numbers(&text)
}

fn numbers(text: &str) -> Vec<i32> {
    text.split_whitespace().filter_map(|child| child.parse().ok()).take(MOST_PROCESSES).collect()
}

/// Returns how long a thread waited for a CPU, which is the second number of its `schedstat`.
fn waited(schedstat: &str) -> Option<u64> {
    schedstat.split(' ').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_the_time_of_children_and_of_those_that_ended() {
        let script = "i=0; while [ $i -lt 40000 ]; do i=$((i+1)); done & wait; read x";
        let mut shell = std::process::Command::new("sh")
            .args(["-c", script])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let pid = shell.id().cast_signed();
        let mut tree = Tree::new(pid).unwrap();
        orrery_testing::eventually("the child is found", || {
            tree.scan();
            tree.processes().count() == 2 && tree.used() > 1_000_000
        });
        let before = tree.used();
        orrery_testing::eventually("the child ends", || {
            tree.scan();
            tree.processes().count() == 1
        });
        assert!(tree.used() >= before, "{} {before}", tree.used());
        assert!(tree.threads().eq([pid]) && tree.is_unchanged());
        drop(shell.stdin.take());
        shell.wait().unwrap();
        assert!(Tree::new(pid).is_none());
    }
}
