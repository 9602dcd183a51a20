//! The children of this process, and how to be rid of all that a script left behind.
//!
//! A child that was orphaned by its parent's exit comes to the nearest ancestor that declared itself *subreaper*
//! (`PR_SET_CHILD_SUBREAPER`): worker and master do. So whatever a script starts, double-forked daemons included, is
//! found among the worker's children once its parent is dead.

use std::fs;
use std::io;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions};

/// Returns the direct children of this process, zombies included.
#[must_use]
pub fn children() -> Vec<Pid> {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    let mut pids = Vec::new();
    for task in tasks.flatten() {
        match fs::read_to_string(task.path().join("children")) {
            Ok(list) => pids.extend(list.split_ascii_whitespace().filter_map(parse)),
            // A kernel without CONFIG_PROC_CHILDREN, or the thread has just ended.
            Err(_) => return children_by_scan(),
        }
    }
    pids
}

fn parse(number: &str) -> Option<Pid> {
    number.parse().ok().and_then(Pid::from_raw)
}

fn children_by_scan() -> Vec<Pid> {
    let own = rustix::process::getpid();
    let Ok(processes) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let candidates = processes.flatten().filter_map(|entry| parse(entry.file_name().to_str()?));
    candidates.filter(|&pid| parent_of(pid) == Some(own)).collect()
}

fn parent_of(pid: Pid) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The command name, in parentheses, may hold anything; state and parent follow the last parenthesis.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1).and_then(parse)
}

/// Makes this process the one that orphaned descendants come to.
///
/// # Errors
/// Those of `prctl(2)`; none on Linux 3.4 and later.
pub fn adopt_orphans() -> io::Result<()> {
    Ok(rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?)
}

/// Returns whether this process has one thread and no children. In doubt it has.
///
/// Children that were made with another signal than `SIGCHLD` ([`clone(2)`]) are not looked for.
///
/// [`clone(2)`]: https://man7.org/linux/man-pages/man2/clone.2.html
#[must_use]
pub fn is_single_threaded_without_children() -> bool {
    // A directory with one entry for each thread, besides `.` and `..`.
    let threads = rustix::fs::stat(c"/proc/self/task").map_or(0, |stat| stat.st_nlink);
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    threads == 3 && matches!(rustix::process::waitid(WaitId::All, options), Err(rustix::io::Errno::CHILD))
}

/// Kills and reaps every descendant of this process, as often as new ones come to light.
pub fn kill_descendants() {
    loop {
        let found = children();
        if found.is_empty() {
            return;
        }
        for &pid in &found {
            // Either call fails only for a child that was reaped already.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        for &pid in &found {
            while matches!(
                rustix::process::waitpid(Some(pid), WaitOptions::empty()),
                Err(rustix::io::Errno::INTR)
            ) {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn children_are_found_either_way() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let pid = parse(&child.id().to_string()).unwrap();
        assert!(children().contains(&pid));
        assert!(children_by_scan().contains(&pid));
        assert!(!is_single_threaded_without_children());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!children().contains(&pid));
        assert!(!children_by_scan().contains(&pid));
    }
}
