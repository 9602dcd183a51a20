//! Trying everything leaves the caller as it was. In a process of its own, since it looks at the whole process.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{WaitOptions, wait};

/// What the process holds and is: descriptors, mappings by name, and the lines of its status that a probe could change.
#[derive(Debug, PartialEq)]
struct Face {
    descriptors: Vec<String>,
    mappings: BTreeMap<String, usize>,
    status: Vec<String>,
    namespaces: Vec<String>,
    scheduling: i32,
    interfaces: usize,
}

fn names_in(folder: &str) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn face() -> Face {
    const KEPT: &[&str] = &[
        "Umask:",
        "Uid:",
        "Gid:",
        "SigBlk:",
        "SigIgn:",
        "SigCgt:",
        "CapEff:",
        "NoNewPrivs:",
        "Seccomp:",
        "Cpus_allowed:",
    ];
    let mut mappings = BTreeMap::new();
    for line in fs::read_to_string("/proc/self/maps").unwrap().lines() {
        // Nameless mappings come and go with this test's own allocator.
        if let Some(name) = line.split_whitespace().nth(5) {
            *mappings.entry(name.to_owned()).or_default() += 1;
        }
    }
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let links = names_in("/proc/self/ns").into_iter();
    Face {
        descriptors: names_in("/proc/self/fd"),
        mappings,
        status: status
            .lines()
            .filter(|line| KEPT.iter().any(|key| line.starts_with(key)))
            .map(str::to_owned)
            .collect(),
        namespaces: links
            .map(|name| fs::read_link(Path::new("/proc/self/ns").join(name)).unwrap().display().to_string())
            .collect(),
        // SAFETY: the call takes no pointer and changes nothing.
        scheduling: unsafe { libc::sched_getscheduler(0) },
        interfaces: fs::read_to_string("/proc/net/dev").unwrap().lines().count(),
    }
}

fn probe_groups_below(folder: &Path) -> usize {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    let folders = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders
        .map(|entry| {
            let ours = entry.file_name().to_string_lossy().starts_with("orrery-probe")
                && entry.file_name().to_string_lossy().ends_with(&std::process::id().to_string());
            usize::from(ours) + probe_groups_below(&entry.path())
        })
        .sum()
}

#[test]
fn nothing_is_left_behind() {
    let first = orrery_probe::all();
    let before = face();
    let second = orrery_probe::all();
    assert_eq!(face(), before);
    assert_eq!(wait(WaitOptions::NOHANG).err(), Some(Errno::CHILD), "a child is left");
    assert_eq!(probe_groups_below(Path::new("/sys/fs/cgroup")), 0, "a control group is left");
    let states = |all: &[orrery_probe::Facility]| -> Vec<_> {
        all.iter().map(|facility| (facility.name, facility.state.word())).collect()
    };
    assert_eq!(states(&first), states(&second), "asking twice gives the same answer");
}
