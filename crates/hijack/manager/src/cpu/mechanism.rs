//! How the kernel is made to do it.
//!
//! | mechanism | below the target | above it | needs |
//! |---|---|---|---|
//! | `realtime` | `SCHED_FIFO` 98 for the first, 97 for the others | `SCHED_OTHER`, nice 19 | `CAP_SYS_NICE`, or `RLIMIT_RTPRIO` and `RLIMIT_NICE` |
//! | `group` | the highest weight of a control group | the lowest one | a group that may be written, of version 1 or 2 |
//! | `nice` | nice -20 | nice 19 | `CAP_SYS_NICE` or `RLIMIT_NICE` |
//! | `measure` | nothing | nothing | nothing |
//!
//! `SCHED_FIFO` is given with reset-on-fork: what a tracee starts while it runs first does not, so that nothing stays at real-time
//! priority that the manager does not know.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use orrery_sys::cgroups::{group_of, own_group};
use orrery_sys::scheduling::{self, Policy, Scheduling};
use serde::{Deserialize, Serialize};

use super::plan::Level;

/// The mechanisms, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mechanism {
    /// Real-time priorities.
    Realtime,
    /// Weights of control groups.
    Group,
    /// Nice values.
    Nice,
    /// None: what happens is measured.
    Measure,
}

const HIGHEST: u32 = 98;
/// What groups are called, before the manager's PID and the tracee's number.
pub(super) const PREFIX: &str = "orrery-manager-";

impl Mechanism {
    /// All mechanisms, the best one first.
    pub const ALL: [Self; 4] = [Self::Realtime, Self::Group, Self::Nice, Self::Measure];

    /// Returns its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Realtime => "realtime",
            Self::Group => "group",
            Self::Nice => "nice",
            Self::Measure => "measure",
        }
    }

    /// Returns how a thread is scheduled at a level that has a reservation.
    fn scheduling(self, level: Level) -> Option<Scheduling> {
        let fifo = |priority| Scheduling { policy: Policy::Fifo { priority }, reset_on_fork: true };
        let other = |nice| Scheduling { policy: Policy::Other { nice }, reset_on_fork: false };
        match (self, level) {
            (_, Level::Free) | (Self::Group | Self::Measure, _) => None,
            (Self::Realtime, Level::First) => Some(fifo(HIGHEST)),
            (Self::Realtime, Level::Below) => Some(fifo(HIGHEST - 1)),
            (Self::Nice, Level::First | Level::Below) => Some(other(-20)),
            (Self::Realtime | Self::Nice, Level::Above) => Some(other(19)),
        }
    }

    /// Tries it on a thread that is left as it is. Nice 19 is not tried: without privilege it could not be undone, which is what the
    /// privilege for nice -20 shows.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub(crate) fn try_on(self, thread: i32, original: Scheduling) -> orrery_sys::Result<()> {
        let needed: &[Self] = match self {
            Self::Realtime => &[Self::Realtime, Self::Nice],
            Self::Nice => &[Self::Nice],
            Self::Group | Self::Measure => &[],
        };
        for scheduling in needed.iter().filter_map(|mechanism| mechanism.scheduling(Level::First)) {
            let done = scheduling::set(thread, scheduling);
            let back = scheduling::set(thread, original);
            done.and(back)?;
        }
        Ok(())
    }

    /// Applies a level to a thread.
    ///
    /// # Errors
    /// What the kernel refuses; `ESRCH` where the thread has ended.
    pub(crate) fn apply(self, thread: i32, level: Level, original: Scheduling) -> orrery_sys::Result<()> {
        match self {
            Self::Group | Self::Measure => Ok(()),
            Self::Realtime | Self::Nice => {
                scheduling::set(thread, self.scheduling(level).unwrap_or(original))
            }
        }
    }

    /// Returns whether a thread is scheduled as `level` says.
    #[must_use]
    pub(crate) fn is_applied(self, thread: i32, level: Level) -> bool {
        match self.scheduling(level) {
            Some(expected) => scheduling::get(thread).is_ok_and(|found| found == expected),
            None => true,
        }
    }
}

/// A control group of one tracee, removed with it; its members go to the group above it.
#[derive(Debug)]
pub(super) struct Group {
    directory: PathBuf,
    above: PathBuf,
    unified: bool,
}

impl Group {
    /// Makes a group below the manager's own: of version 2 where that has the CPU controller, else of version 1.
    pub(super) fn new(name: &str) -> io::Result<Self> {
        let mut last =
            io::Error::new(io::ErrorKind::NotFound, "no control group hierarchy has the CPU controller");
        for (above, unified) in [(own_group(None), true), (own_group(Some("cpu")), false)] {
            let Some(above) = above else { continue };
            sweep(&above);
            let directory = above.join(name);
            let made = fs::create_dir(&directory).and_then(|()| {
                let group = Self { directory, above, unified };
                group.set(Level::Free)?;
                Ok(group)
            });
            match made {
                Ok(group) => return Ok(group),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Makes a group around a process, below the one that it is in, in which nothing is limited: whatever it starts is a member, whoever
    /// its parent is. Of version 2 only: version 1 shows members with a delay.
    pub(super) fn around(pid: i32, name: &str) -> io::Result<Self> {
        let absent = || io::Error::new(io::ErrorKind::NotFound, "no control group hierarchy of version 2");
        let mut above = group_of(pid, None).ok_or_else(absent)?;
        // One that a manager has left which was killed.
        while is_of_manager(&above) && above.pop() {}
        sweep(&above);
        let directory = above.join(name);
        fs::create_dir(&directory)?;
        let group = Self { directory, above, unified: true };
        group.add(pid)?;
        Ok(group)
    }

    /// Returns the files that show the members, and the time that they used; `None` where version 2 does not have it.
    pub(super) fn files(&self) -> Option<(fs::File, fs::File)> {
        let open = |name: &str| fs::File::open(self.directory.join(name)).ok().filter(|_| self.unified);
        Some((open("cgroup.procs")?, open("cpu.stat")?))
    }

    /// Returns its directory, if it is of version 2.
    pub(super) fn directory(&self) -> Option<&Path> {
        self.unified.then_some(self.directory.as_path())
    }

    /// Adds a process, whose children will be members from the start.
    pub(super) fn add(&self, pid: i32) -> io::Result<()> {
        write(&self.directory.join("cgroup.procs"), &pid.to_string())
    }

    /// Sets the weight of a level.
    pub(super) fn set(&self, level: Level) -> io::Result<()> {
        let (file, weights) =
            if self.unified { ("cpu.weight", [10_000, 100, 1]) } else { ("cpu.shares", [262_144, 1024, 2]) };
        let weight = match level {
            Level::First | Level::Below => weights[0],
            Level::Free => weights[1],
            Level::Above => weights[2],
        };
        write(&self.directory.join(file), &weight.to_string())
    }
}

/// Removes the group that a manager which was killed has left around a process.
pub(super) fn dissolve(pid: i32) {
    while let Some(directory) = group_of(pid, None).filter(|group| is_of_manager(group)) {
        let Some(above) = directory.parent().map(Path::to_owned) else { return };
        drop(Group { directory: directory.clone(), above, unified: true });
        if directory.exists() {
            // It may not be removed.
            return;
        }
    }
}

/// Returns whether a manager has made this group.
fn is_of_manager(group: &Path) -> bool {
    group.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX))
}

/// Removes the groups of managers that were killed: their members go to the group above.
fn sweep(above: &Path) {
    let Ok(entries) = fs::read_dir(above) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let manager =
            name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok());
        let Some(manager) = manager.and_then(rustix::process::Pid::from_raw) else { continue };
        if rustix::process::test_kill_process(manager) == Err(rustix::io::Errno::SRCH) {
            drop(Group { directory: entry.path(), above: above.to_owned(), unified: false });
        }
    }
}

/// Writes to a file that is there: control groups make their own.
fn write(path: &Path, text: &str) -> io::Result<()> {
    fs::File::options().write(true).open(path)?.write_all(text.as_bytes())
}

impl Drop for Group {
    fn drop(&mut self) {
        // Members have to go first; those that fork meanwhile are found in the next round.
        for _ in 0..8 {
            let members = fs::read_to_string(self.directory.join("cgroup.procs")).unwrap_or_default();
            for member in members.lines() {
                let _ended = write(&self.above.join("cgroup.procs"), member);
            }
            if fs::remove_dir(&self.directory).is_ok() {
                break;
            }
        }
    }
}
