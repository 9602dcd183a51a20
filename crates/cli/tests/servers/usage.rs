//! What a process holds: memory, descriptors, threads, children.

use std::fs;

/// What a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) pid: i32,
    kibibytes: u64,
    descriptors: usize,
    threads: usize,
}

impl Usage {
    pub(crate) fn of(pid: i32) -> Self {
        let count = |what| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        // Pages of files count as private once other processes with them have ended.
        let anonymous = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
        let kibibytes = anonymous.trim().trim_end_matches(" kB").parse().unwrap();
        Self { pid, kibibytes, descriptors: count("fd"), threads: count("task") }
    }

    /// Allows for so many threads more, which a pool makes when it first needs them, and for as many descriptors as a cache has at most.
    pub(crate) fn with(self, threads: usize, descriptors: usize) -> Self {
        Self { threads: self.threads + threads, descriptors: self.descriptors + descriptors, ..self }
    }

    /// Panics where a process holds more than it did, but for some memory, which allocators are slow to release.
    pub(crate) fn assert_flat(self, after: &str) {
        const SLACK: u64 = 4096;
        orrery_testing::eventually(&format!("{self:?} after {after}: {:?}", Self::of(self.pid)), || {
            let now = Self::of(self.pid);
            now.descriptors <= self.descriptors
                && now.threads <= self.threads
                && now.kibibytes <= self.kibibytes + SLACK
        });
    }
}
