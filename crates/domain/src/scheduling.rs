//! When and where a domain runs (sched(7)): its scheduling class, its priority, its CPUs.

use rustix::io::Errno;
use rustix::thread::CpuSet;
use syscalls::{Sysno, syscall};

use crate::{Error, Result};

/// A scheduling class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Class {
    /// As main (whatever class that has).
    #[default]
    Inherited,
    /// SCHED_OTHER.
    Other,
    /// SCHED_BATCH: for work that nobody waits for.
    Batch,
    /// SCHED_IDLE: only when nobody else wants the processor.
    Idle,
    /// SCHED_FIFO: before all others; needs privilege.
    Fifo {
        /// The static priority, 1 to 99.
        priority: u8,
    },
}

/// When and where a domain runs.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Scheduling {
    /// The scheduling class.
    pub class: Class,
    /// Its niceness, -20 to 19; `None` for main's.
    pub nice: Option<i32>,
    /// The CPUs it may run on; `None` for main's.
    pub cpus: Option<Vec<usize>>,
}

/// Scheduling made ready for the child.
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    policy: Option<(i32, i32)>,
    nice: Option<i32>,
    cpus: Option<CpuSet>,
}

impl Scheduling {
    /// Checks the settings; `nice` applies where none was set.
    pub(crate) fn prepare(&self, nice: Option<i32>) -> Result<Prepared> {
        let policy = match self.class {
            Class::Inherited => None,
            Class::Other => Some((libc::SCHED_OTHER, 0)),
            Class::Batch => Some((libc::SCHED_BATCH, 0)),
            Class::Idle => Some((libc::SCHED_IDLE, 0)),
            Class::Fifo { priority: priority @ 1..=99 } => Some((libc::SCHED_FIFO, i32::from(priority))),
            Class::Fifo { priority } => {
                return Err(Error::Setting {
                    setting: "the priority of SCHED_FIFO",
                    value: priority.to_string(),
                    advice: "take 1 (lowest) to 99",
                });
            }
        };
        if let Some(nice) = self.nice
            && !(-20..=19).contains(&nice)
        {
            return Err(Error::Setting {
                setting: "niceness",
                value: nice.to_string(),
                advice: "take -20 to 19",
            });
        }
        let cpus = match &self.cpus {
            None => None,
            Some(list) => Some(set_of(list)?),
        };
        Ok(Prepared { policy, nice: self.nice.or(nice), cpus })
    }
}

/// Returns the set of the CPUs in `list`.
fn set_of(list: &[usize]) -> Result<CpuSet> {
    let mut set = CpuSet::new();
    for &cpu in list {
        if cpu >= CpuSet::MAX_CPU {
            return Err(Error::Setting {
                setting: "a CPU",
                value: cpu.to_string(),
                advice: "CPUs are numbered from 0 to 1023",
            });
        }
        set.set(cpu);
    }
    if set.count() == 0 {
        return Err(Error::Setting {
            setting: "the set of CPUs",
            value: "empty".to_owned(),
            advice: "name at least one CPU",
        });
    }
    Ok(set)
}

impl Prepared {
    /// Applies class, then niceness. Async-signal-safe.
    pub(crate) fn set_class(&self) -> core::result::Result<(), Errno> {
        if let Some((policy, priority)) = self.policy {
            // SAFETY: the kernel reads one `sched_param`, which is one int.
            unsafe { syscall!(Sysno::sched_setscheduler, 0, policy, &raw const priority) }
                .map_err(|e| Errno::from_raw_os_error(e.into_raw()))?;
        }
        match self.nice {
            Some(nice) => rustix::process::setpriority_process(None, nice),
            None => Ok(()),
        }
    }

    /// Applies the set of CPUs. Async-signal-safe.
    pub(crate) fn set_cpus(&self) -> core::result::Result<(), Errno> {
        match &self.cpus {
            Some(cpus) => rustix::thread::sched_setaffinity(None, cpus),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senseless_settings_are_refused() {
        for scheduling in [
            Scheduling { class: Class::Fifo { priority: 0 }, ..Scheduling::default() },
            Scheduling { nice: Some(50), ..Scheduling::default() },
            Scheduling { cpus: Some(vec![]), ..Scheduling::default() },
            Scheduling { cpus: Some(vec![99_999]), ..Scheduling::default() },
        ] {
            assert!(matches!(scheduling.prepare(None), Err(Error::Setting { .. })), "{scheduling:?}");
        }
    }
}
