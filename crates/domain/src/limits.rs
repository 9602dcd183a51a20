//! What a domain may use: memory, processor time, processes, files.
//!
//! A control group bounds the domain with all its children and says when a bound was hit; where no group can be made
//! (no permission, a read-only `/sys/fs/cgroup`, no controller) the nearest process limit stands in, and
//! [`Enforcement`] says which it is.

use core::time::Duration;

use rustix::process::{Resource, Rlimit};

use crate::cgroup::Group;
use crate::enforcement::{Enforcement, Means};
use crate::{Error, Result};

/// Bounds on a domain. What is `None` is not bounded.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of memory that it may have of its own.
    pub memory: Option<u64>,
    /// Its share of the processors in percent of one: 50 is half a CPU, 200 are two.
    pub cpu_percent: Option<u32>,
    /// How many processes and threads it may have, itself included.
    pub processes: Option<u32>,
    /// Processor time that one instance may use up in total, after which it is killed (RLIMIT_CPU, whole seconds).
    pub cpu_time: Option<Duration>,
    /// The number of open files (`RLIMIT_NOFILE`).
    pub open_files: Option<u64>,
    /// The largest file that it may write (RLIMIT_FSIZE).
    pub file_size: Option<u64>,
    /// The largest core dump (RLIMIT_CORE); 0 for none.
    pub core_dump: Option<u64>,
}

/// Bounds made ready: groups exist, process limits are listed.
#[derive(Debug, Default)]
pub(crate) struct Bounds {
    pub(crate) group: Group,
    pub(crate) enforcement: Enforcement,
    rlimits: Vec<(Resource, u64)>,
    /// What stands in for a group's bound on memory.
    data: Option<Data>,
    nice: Option<i32>,
}

/// A bound on private writable address space (RLIMIT_DATA).
#[derive(Clone, Copy, Debug)]
struct Data {
    /// What the domain may have of its own.
    own: u64,
    /// What else its body maps: [`crate::Settings::viewed`].
    viewed: u64,
}

impl Limits {
    /// Makes the groups for domain `name`, of this niceness, and decides what stands in for those that cannot be made.
    /// `viewed` is [`crate::Settings::viewed`].
    pub(crate) fn prepare(&self, name: &str, nice: Option<i32>, viewed: u64) -> Result<Bounds> {
        self.check()?;
        let mut bounds = Bounds::default();
        let mut group = Group::new(name);
        let memory = self.memory.map(|bytes| {
            let means = group.limit_memory(bytes);
            if means == Means::None {
                bounds.data = Some(Data { own: bytes, viewed });
                return Means::ProcessLimit;
            }
            means
        });
        let cpu = self.cpu_percent.map(|percent| {
            let means = group.limit_cpu(percent, nice);
            if means == Means::None {
                bounds.nice = Some(19);
                return Means::Nice;
            }
            means
        });
        let processes = self.processes.map(|count| {
            // The watcher is a thread that the user need not know of.
            let means = group.limit_processes(count.saturating_add(1));
            if means == Means::None {
                bounds.rlimits.push((Resource::Nproc, u64::from(count) + 1));
                return Means::ProcessLimit;
            }
            means
        });
        bounds.enforcement = Enforcement {
            memory: memory.unwrap_or_default(),
            cpu: cpu.unwrap_or_default(),
            processes: processes.unwrap_or_default(),
        };
        let seconds = |time: Duration| time.as_secs() + u64::from(time.subsec_nanos() > 0);
        let plain = [
            (Resource::Cpu, self.cpu_time.map(seconds)),
            (Resource::Nofile, self.open_files),
            (Resource::Fsize, self.file_size),
            (Resource::Core, self.core_dump),
        ];
        bounds.rlimits.extend(plain.into_iter().filter_map(|(what, most)| Some((what, most?))));
        bounds.group = group;
        Ok(bounds)
    }

    fn check(&self) -> Result<()> {
        let refuse = |setting, value: String, advice| Err(Error::Setting { setting, value, advice });
        if self.memory.is_some_and(|bytes| bytes < 1 << 20) {
            let value = format!("{} bytes", self.memory.unwrap_or(0));
            return refuse("the memory limit", value, "give a domain 1 MiB or more");
        }
        if self.cpu_percent.is_some_and(|percent| percent == 0 || percent > 100_000) {
            let value = format!("{} %", self.cpu_percent.unwrap_or(0));
            return refuse("the processor share", value, "give 1 to 100000 percent of one processor");
        }
        if self.processes == Some(0) {
            return refuse("the process limit", "0".to_owned(), "the domain itself is one process");
        }
        if self.cpu_time == Some(Duration::ZERO) {
            return refuse("the processor time limit", "0".to_owned(), "give a second or more");
        }
        Ok(())
    }
}

impl Bounds {
    /// Sets the process limits of the calling process. Async-signal-safe.
    pub(crate) fn set_process_limits(&self) -> core::result::Result<(), rustix::io::Errno> {
        for &(resource, most) in &self.rlimits {
            // The soft limit of processor time warns with SIGXCPU, which ends a process as well.
            set(resource, most, most)?;
        }
        if let Some(Data { own, viewed }) = self.data {
            // What came along at the fork counts too, and is the program's own.
            let inherited = orrery_sys::process::Statm::open()
                .and_then(|statm| statm.read())
                .map_or(0, |sizes| (sizes.data * orrery_sys::PAGE) as u64);
            let most = inherited.saturating_add(viewed).saturating_add(own);
            set(Resource::Data, most, most.saturating_add(viewed))?;
        }
        Ok(())
    }

    /// Returns the priority that stands in for a processor share.
    pub(crate) fn nice(&self) -> Option<i32> {
        self.nice
    }
}

/// Sets a soft and a hard limit, or what the process' own hard limit allows of them.
fn set(resource: Resource, soft: u64, hard: u64) -> core::result::Result<(), rustix::io::Errno> {
    let maximum = rustix::process::getrlimit(resource).maximum;
    let allowed = |most: u64| Some(maximum.map_or(most, |maximum| most.min(maximum)));
    rustix::process::setrlimit(resource, Rlimit { current: allowed(soft), maximum: allowed(hard) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senseless_limits_are_refused() {
        for limits in [
            Limits { memory: Some(4096), ..Limits::default() },
            Limits { cpu_percent: Some(0), ..Limits::default() },
            Limits { processes: Some(0), ..Limits::default() },
            Limits { cpu_time: Some(Duration::ZERO), ..Limits::default() },
        ] {
            assert!(matches!(limits.prepare("x", None, 0), Err(Error::Setting { .. })), "{limits:?}");
        }
    }

    #[test]
    fn every_bound_is_held_by_something() {
        let limits =
            Limits { memory: Some(64 << 20), cpu_percent: Some(50), processes: Some(4), ..Limits::default() };
        let bounds = limits.prepare("unit", None, 0).unwrap();
        let held = bounds.enforcement;
        assert!(![held.memory, held.cpu, held.processes].contains(&Means::None), "{held:?}");
        assert_eq!(Limits::default().prepare("none", None, 0).unwrap().enforcement, Enforcement::default());
    }
}
