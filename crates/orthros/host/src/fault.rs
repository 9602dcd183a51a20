//! Ways to let the active's kernel die, for tests and for those who want to see it.
//!
//! A stock kernel offers few: a panic by `sysrq`, one for want of memory, one by a non-maskable interrupt. The faults
//! that matter most, a wild pointer in a driver or a processor that never comes back, are made here as they happen: a
//! word of the kernel's memory is overwritten. Each file in `/proc/sys/kernel` has a function that reads it; the one of
//! a file that nobody looks at is pointed to nowhere, or to a function of the kernel that never returns, and the file
//! is read.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use orrery_kimage::{Kernel, Layout, MappedMemory, PhysicalMemory as _};
use serde::Serialize;

use crate::error::{Error, Result, file};

/// Tables of files in `/proc/sys/kernel` that the kernel uses where they are, and a file in each.
const TRIGGERS: &[(&str, &str)] = &[
    ("kern_exit_table", "oops_limit"),
    ("kern_panic_table", "warn_limit"),
    ("hung_task_sysctls", "hung_task_check_count"),
];
/// Where a wild pointer points; the kernel itself looks out for 0.
const NOWHERE: u64 = 16;
/// No table of such files is longer.
const MOST_FILES: u64 = 1000;

/// A way for a kernel to die.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// The kernel is made to panic (`sysrq c`).
    Panic,
    /// It follows a wild pointer, and panics on the oops.
    Oops,
    /// It runs out of memory and panics on that.
    Oom,
    /// It gets a non-maskable interrupt and panics on that.
    Nmi,
    /// A processor halts with interrupts off. Nothing is said.
    Hang,
    /// A processor runs in circles within the kernel. Nothing is said for a long time.
    Spin,
    /// The same, and the kernel panics when it notices that a processor is locked up, which takes it two seconds: it
    /// says so first only where its silence is borne for longer.
    Lockup,
}

impl Fault {
    /// All kinds of faults.
    pub const ALL: [Self; 7] =
        [Self::Panic, Self::Oops, Self::Oom, Self::Nmi, Self::Hang, Self::Spin, Self::Lockup];

    /// Returns whether the kernel that dies says nothing of it.
    pub(crate) fn is_silent(self) -> bool {
        matches!(self, Self::Hang | Self::Spin)
    }

    /// Returns what it is called.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Panic => "panic",
            Self::Oops => "oops",
            Self::Oom => "oom",
            Self::Nmi => "nmi",
            Self::Hang => "hang",
            Self::Spin => "spin",
            Self::Lockup => "lockup",
        }
    }

    /// Returns the fault of this name.
    ///
    /// # Errors
    ///
    /// Which names there are.
    pub fn parse(name: &str) -> Result<Self, String> {
        let names: Vec<&str> = Self::ALL.iter().map(|fault| fault.name()).collect();
        let found = Self::ALL.into_iter().find(|fault| fault.name() == name);
        found.ok_or_else(|| format!("no way to die is called {name:?}; there are {}", names.join(", ")))
    }

    /// Returns where reading the file leads for this fault: to a function of the kernel, or nowhere.
    fn target(self) -> Option<Option<&'static str>> {
        match self {
            Self::Oops => Some(None),
            // What the kernel lets its other processors do when one panics: forbid interrupts and halt for ever.
            Self::Hang => Some(Some("stop_this_cpu")),
            // What it lets a second processor do that panics while the first is at it.
            Self::Spin | Self::Lockup => Some(Some("panic_smp_self_stop")),
            Self::Panic | Self::Oom | Self::Nmi => None,
        }
    }

    /// Spoils the memory of a machine for this fault, and gives the file to read that sets it off, if it takes one.
    pub(crate) fn prepare(self, machine: &str, memory: &Path) -> Result<Option<String>> {
        let Some(target) = self.target() else { return Ok(None) };
        let place = locate(memory, target);
        let (trigger, offset, value) = place.map_err(|error| Error::Guest {
            machine: machine.to_owned(),
            why: format!("its kernel cannot be spoiled: {error}"),
        })?;
        let opened = OpenOptions::new().write(true).open(memory).map_err(file("open", memory))?;
        opened.write_all_at(&value.to_le_bytes(), offset).map_err(file("write", memory))?;
        Ok(Some(format!("/proc/sys/kernel/{trigger}")))
    }
}

/// The file to read, where in the file of memory its pointer is, and what to put there.
fn locate(memory: &Path, target: Option<&str>) -> orrery_kimage::Result<(&'static str, u64, u64)> {
    let mapped = MappedMemory::open(memory, Layout::Q35)?;
    let segments = mapped.segments().to_vec();
    let kernel = Kernel::open(Box::new(mapped))?;
    let size = kernel.types().size("ctl_table")?;
    let mut found = None;
    for &(table, name) in TRIGGERS {
        let Some(table) = kernel.symbols().get(table) else { continue };
        for index in 0..MOST_FILES {
            let entry = kernel.object("ctl_table", table + index * size)?;
            if entry.u64("procname")? == 0 {
                break;
            }
            if entry.string("procname")? == name.as_bytes() {
                found = found.or(Some((name, kernel.physical(entry.address_of("proc_handler")?)?)));
                break;
            }
        }
    }
    let (trigger, place) = found.ok_or_else(|| orrery_kimage::Error::NoSymbol(TRIGGERS[0].0.to_owned()))?;
    let value = target.map_or(Ok(NOWHERE), |name| kernel.symbols().address(name))?;
    let segment = segments.iter().find(|s| (s.physical..s.physical + s.length).contains(&place));
    let segment = segment.ok_or(orrery_kimage::Error::NoMemory { physical: place })?;
    Ok((trigger, place - segment.physical + segment.offset, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_have_names() {
        for fault in Fault::ALL {
            assert_eq!(Fault::parse(fault.name()), Ok(fault));
        }
        assert!(Fault::parse("boredom").unwrap_err().contains("hang"));
    }
}
