//! Control groups for one domain: made below our own group, in the unified hierarchy (version 2) where it offers the
//! controller to us, else in the controller's own (version 1), and removed with the domain (cgroups(7)).

use std::fs;
use std::io;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use orrery_sys::cgroups::own_group;
use orrery_sys::descriptors::VerifiedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::enforcement::Means;
use crate::forked::Creator;

const PREFIX: &str = "orrery-";

/// The directories of one domain's groups.
#[derive(Debug)]
pub(crate) struct Group {
    name: String,
    made: Vec<Made>,
    creator: Creator,
}

#[derive(Debug)]
struct Made {
    directory: PathBuf,
    /// `None` for version 2.
    controller: Option<&'static str>,
    members: VerifiedFd,
}

impl Default for Group {
    fn default() -> Self {
        Self { name: String::new(), made: Vec::new(), creator: Creator::here() }
    }
}

impl Group {
    /// Groups for domain `name`; none exist yet.
    pub(crate) fn new(name: &str) -> Self {
        use core::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let plain: String =
            name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).take(40).collect();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{number}-{plain}", std::process::id());
        Self { name, made: Vec::new(), creator: Creator::here() }
    }

    /// Bounds memory; [`Means::None`] where that is not possible.
    pub(crate) fn limit_memory(&mut self, bytes: u64) -> Means {
        let v2 = [("memory.max", bytes.to_string()), ("memory.swap.max", "0".to_owned())];
        let v1 = [
            ("memory.limit_in_bytes", bytes.to_string()),
            // Where swap is accounted at all.
            ("memory.memsw.limit_in_bytes", bytes.to_string()),
        ];
        self.limit("memory", &v2, &v1)
    }

    /// Bounds the processor share. Within a group of its own a domain's niceness means nothing to processes outside, so the
    /// group gets it.
    pub(crate) fn limit_cpu(&mut self, percent: u32, nice: Option<i32>) -> Means {
        const PERIOD: u64 = 100_000;
        let quota = (u64::from(percent) * PERIOD / 100).max(1_000);
        let mut v2 = vec![("cpu.max", format!("{quota} {PERIOD}"))];
        let mut v1 = vec![("cpu.cfs_quota_us", quota.to_string())];
        if let Some(nice) = nice {
            v2.push(("cpu.weight.nice", nice.to_string()));
            v1.push(("cpu.shares", shares(nice).to_string()));
        }
        self.limit("cpu", &v2, &v1)
    }

    /// Bounds the number of processes and threads.
    pub(crate) fn limit_processes(&mut self, count: u32) -> Means {
        let setting = [("pids.max", count.to_string())];
        self.limit("pids", &setting, &setting)
    }

    /// Applies the first of `v2` or `v1` (the rest where they exist) in a group with `controller`.
    fn limit(&mut self, controller: &'static str, v2: &[(&str, String)], v1: &[(&str, String)]) -> Means {
        if let Some(own) = own_group(None)
            && offers(&own, controller)
            && self.apply(&own, None, v2)
        {
            return Means::Version2;
        }
        match own_group(Some(controller)) {
            Some(own) if self.apply(&own, Some(controller), v1) => Means::Version1,
            _ => Means::None,
        }
    }

    fn apply(&mut self, own: &Path, controller: Option<&'static str>, settings: &[(&str, String)]) -> bool {
        let made_before = self.made.iter().position(|made| made.controller == controller);
        if made_before.is_none() && self.make(own, controller).is_err() {
            return false;
        }
        let index = made_before.unwrap_or(self.made.len() - 1);
        let mut settings = settings
            .iter()
            .map(|(file, value)| fs::write(self.made[index].directory.join(file), value).is_ok());
        let first = settings.next().unwrap_or(false);
        let _ = settings.count();
        if !first && made_before.is_none() {
            let made = self.made.remove(index);
            remove(&made.directory);
        }
        first
    }

    fn make(&mut self, own: &Path, controller: Option<&'static str>) -> io::Result<()> {
        sweep(own);
        let directory = own.join(&self.name);
        fs::create_dir(&directory)?;
        let opened =
            rustix::fs::open(directory.join("cgroup.procs"), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
        match opened {
            Ok(members) => {
                let members = VerifiedFd::new(orrery_sys::descriptors::raise(members))?;
                self.made.push(Made { directory, controller, members });
                Ok(())
            }
            Err(errno) => {
                remove(&directory);
                Err(errno.into())
            }
        }
    }

    /// Puts the calling process into the groups. Async-signal-safe.
    pub(crate) fn join(&self) -> Result<(), Errno> {
        for made in &self.made {
            // "0" stands for the writer.
            rustix::io::write(made.members.verified()?, b"0")?;
        }
        Ok(())
    }

    /// Returns how often the kernel killed a member because the group's memory was used up.
    pub(crate) fn memory_kills(&self) -> u64 {
        let file = |made: &Made| match made.controller {
            None => Some("memory.events"),
            Some("memory") => Some("memory.oom_control"),
            Some(_) => None,
        };
        let count = |made: &Made| -> Option<u64> {
            let text = fs::read_to_string(made.directory.join(file(made)?)).ok()?;
            text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
        };
        self.made.iter().filter_map(count).sum()
    }

    /// Returns the bytes of memory that the members use, if a group reports it.
    pub(crate) fn memory_used(&self) -> Option<u64> {
        self.made.iter().find_map(|made| {
            let file = match made.controller {
                None => "memory.current",
                Some("memory") => "memory.usage_in_bytes",
                Some(_) => return None,
            };
            fs::read_to_string(made.directory.join(file)).ok()?.trim().parse().ok()
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.creator.is_here() {
            self.made.iter().for_each(|made| remove(&made.directory));
        }
    }
}

/// Returns what version 1 calls the weight of a process: 1,024, and a quarter more or less for each step of niceness
/// ([sched(7)](https://man7.org/linux/man-pages/man7/sched.7.html)).
fn shares(nice: i32) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "2 to 88,818")]
    let shares = (1024.0 * 1.25_f64.powi(-nice.clamp(-20, 19))).round() as u64;
    shares.max(2)
}

/// Returns whether a group below `own` would have `controller`.
fn offers(own: &Path, controller: &str) -> bool {
    let text = fs::read_to_string(own.join("cgroup.subtree_control")).unwrap_or_default();
    text.split_whitespace().any(|word| word == controller)
}

/// Removes a group. One whose last member has just died may stay busy for a moment.
fn remove(directory: &Path) {
    let deadline = Instant::now() + Duration::from_millis(100);
    while let Err(error) = fs::remove_dir(directory) {
        if error.raw_os_error() != Some(libc::EBUSY) || Instant::now() > deadline {
            break;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Removes groups that programs left which were killed.
fn sweep(own: &Path) {
    let Ok(entries) = fs::read_dir(own) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok())
            .and_then(rustix::process::Pid::from_raw);
        if pid.is_some_and(|pid| rustix::process::test_kill_process(pid) == Err(Errno::SRCH)) {
            // A group with members refuses to go.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn niceness_goes_to_the_group() {
        assert_eq!([0, 10, 19, -20].map(shares), [1024, 110, 15, 88818]);
        let mut group = Group::new("nice");
        let file = match group.limit_cpu(50, Some(10)) {
            Means::Version2 => "cpu.weight.nice",
            Means::Version1 => "cpu.shares",
            _ => {
                orrery_testing::skipped!("no group for processor time can be made here");
                return;
            }
        };
        let text = fs::read_to_string(group.made[0].directory.join(file)).unwrap();
        assert!(["10", "110"].contains(&text.trim()), "{text}");
    }

    #[test]
    fn groups_come_and_go() {
        let mut group = Group::new("unit test");
        let means = group.limit_processes(5);
        if means == Means::None {
            orrery_testing::skipped!("no group can be made here");
            return;
        }
        let directory = group.made[0].directory.clone();
        assert_eq!(fs::read_to_string(directory.join("pids.max")).unwrap().trim(), "5");
        drop(group);
        assert!(!directory.exists());
    }
}
