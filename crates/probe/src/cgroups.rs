//! Control groups, both versions: which controllers there are, and whether we may make a group below our own, limit it
//! and put a process into it. The group is removed again.

use std::fs;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use linux_raw_sys::general::{CLONE_INTO_CGROUP, clone_args};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::process::{WaitOptions, waitpid};

use orrery_sys::cgroup_filter::CgroupFilter;
use orrery_sys::cgroups::own_group;

use crate::child::{self, During, Note, exit, expect};
use crate::facility::{Group, State, System};
use crate::row::{Family, Probe, Row};
use crate::tools::{clone3, read_file};

const LIMITED: &[System] = &[System::Orbit, System::LwcContexts];
const ENOUGH_MEMORY: &str = "67108864";
const PARENTS: &str = "(the parent's)";

/// The rows of one version would differ in two strings each.
macro_rules! controller {
    ($name:literal, $systems:expr, $purpose:literal, $fallback:literal, $probe:expr) => {
        Row {
            name: $name,
            systems: $systems,
            purpose: $purpose,
            fallback: $fallback,
            probe: Probe::Here($probe),
        }
    };
}

pub(crate) const FAMILY: Family = Family {
    group: Group::Resources,
    rows: &[
        controller!(
            "cgroup_v2",
            &[System::Orbit, System::LwcContexts, System::Hijack],
            "a group of one's own for each domain or tracee: its members are known, counted and ended together",
            "version 1 controllers, else rlimits and a subreaper; a tracee's children are found through their parents",
            |limit| version_2(None, &[], limit)
        ),
        controller!(
            "cgroup_v2_memory",
            LIMITED,
            "bounds a domain's memory",
            "version 1's controller, else RLIMIT_DATA per process",
            |limit| version_2(Some("memory"), &[("memory.max", ENOUGH_MEMORY)], limit)
        ),
        controller!(
            "cgroup_v2_cpu",
            LIMITED,
            "bounds a domain's share of the processors",
            "version 1's controller, else nice and RLIMIT_CPU",
            |limit| version_2(Some("cpu"), &[("cpu.max", "50000 100000")], limit)
        ),
        controller!(
            "cgroup_v2_weight",
            &[System::Hijack],
            "gives a program below its share of CPU time more weight than others where real-time priority is denied",
            "version 1's controller, else nice",
            |limit| version_2(Some("cpu"), &[("cpu.weight", "10000"), ("cpu.weight", "1")], limit)
        ),
        controller!(
            "cgroup_v2_pids",
            LIMITED,
            "bounds how many processes a domain has",
            "version 1's controller, else RLIMIT_NPROC per user",
            |limit| version_2(Some("pids"), &[("pids.max", "16")], limit)
        ),
        controller!(
            "cgroup_v2_freezer",
            &[System::Orbit, System::LwcContexts, System::Orthros],
            "stops a domain with all its processes at once",
            "version 1's controller, else SIGSTOP to each process",
            |limit| version_2(None, &[("cgroup.freeze", "1"), ("cgroup.freeze", "0")], limit)
        ),
        controller!(
            "cgroup_v2_cpuset",
            &[System::Orbit, System::LwcContexts],
            "keeps a domain on chosen processors",
            "version 1's controller, else sched_setaffinity",
            |limit| version_2(Some("cpuset"), &[("cpuset.cpus", "0")], limit)
        ),
        controller!(
            "clone_into_cgroup",
            &[System::Orbit, System::LwcContexts],
            "a domain is limited from its first instruction on",
            "the domain waits until it was moved into its group",
            clone_into_cgroup
        ),
        controller!(
            "cgroup_skb",
            &[System::Hijack],
            "drops part of the packets that arrive for a program with a low share (--net), for all its sockets and beside filters of its own",
            "a filter at each socket of the program's",
            cgroup_skb
        ),
        controller!(
            "cgroup_v1_memory",
            LIMITED,
            "bounds a domain's memory where version 2 cannot",
            "RLIMIT_DATA per process",
            |limit| version_1("memory", &[("memory.limit_in_bytes", ENOUGH_MEMORY)], limit)
        ),
        controller!(
            "cgroup_v1_cpu",
            LIMITED,
            "bounds a domain's share of the processors where version 2 cannot",
            "nice and RLIMIT_CPU",
            |limit| version_1("cpu", &[("cpu.cfs_quota_us", "50000")], limit)
        ),
        controller!(
            "cgroup_v1_shares",
            &[System::Hijack],
            "gives a program below its share of CPU time more weight than others where version 2 cannot",
            "nice",
            |limit| version_1("cpu", &[("cpu.shares", "262144"), ("cpu.shares", "2")], limit)
        ),
        controller!(
            "cgroup_v1_pids",
            LIMITED,
            "bounds how many processes a domain has where version 2 cannot",
            "RLIMIT_NPROC per user",
            |limit| version_1("pids", &[("pids.max", "16")], limit)
        ),
        controller!(
            "cgroup_v1_freezer",
            &[System::Orbit, System::LwcContexts, System::Orthros],
            "stops a domain with all its processes at once where version 2 cannot",
            "SIGSTOP to each process",
            |limit| version_1("freezer", &[("freezer.state", "FROZEN"), ("freezer.state", "THAWED")], limit)
        ),
        controller!(
            "cgroup_v1_cpuset",
            &[System::Orbit, System::LwcContexts],
            "keeps a domain on chosen processors where version 2 cannot",
            "sched_setaffinity",
            |limit| version_1("cpuset", &[("cpuset.cpus", PARENTS), ("cpuset.mems", PARENTS)], limit)
        ),
    ],
};

/// A file below a group and what is written to it, in order.
type Setting = (&'static str, &'static str);

fn version_1(controller: &str, settings: &[Setting], limit: Duration) -> State {
    let Some(own) = own_group(Some(controller)) else {
        return State::missing("no version 1 hierarchy has this controller");
    };
    try_group(&own, controller, settings, limit).unwrap_or_else(|state| state)
}

fn version_2(controller: Option<&str>, settings: &[Setting], limit: Duration) -> State {
    let Some(own) = own_group(None) else {
        return State::missing("no version 2 hierarchy is mounted");
    };
    if let Some(controller) = controller {
        let lists = |file| {
            let text = fs::read_to_string(own.join(file)).unwrap_or_default();
            text.split_whitespace().any(|word| word == controller)
        };
        if !lists("cgroup.controllers") {
            return State::missing(format!("{} does not offer this controller", own.display()));
        }
        if !lists("cgroup.subtree_control") {
            return State::denied(format!("not enabled in {}/cgroup.subtree_control", own.display()));
        }
    }
    try_group(&own, controller.unwrap_or("v2"), settings, limit).unwrap_or_else(|state| state)
}

/// Makes a group below `own`, applies the settings, moves a child into it.
fn try_group(own: &Path, name: &str, settings: &[Setting], limit: Duration) -> Result<State, State> {
    let group = ProbeGroup::below(own, name)?;
    for &(file, value) in settings {
        group.set(own, file, value)?;
    }
    let members = group.0.join("cgroup.procs");
    let members = open(&members, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| State::refused(format!("open {}", members.display()), errno))?;
    // "0" stands for the writer.
    let moved =
        child::run(limit, |_| rustix::io::write(&members, b"0").during("write 0 to cgroup.procs").map(drop));
    if moved.is_available() { Ok(State::available(format!("in {}", own.display()))) } else { Err(moved) }
}

fn clone_into_cgroup(limit: Duration) -> State {
    let tried = || -> Result<State, State> {
        let own = own_group(None).ok_or_else(|| State::missing("no version 2 hierarchy is mounted"))?;
        let group = ProbeGroup::below(&own, "clone")?;
        let directory = open(&group.0, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| State::refused("open the group", errno))?;
        Ok(child::run(limit, |_: &mut Note| {
            // SAFETY: all-zero arguments are valid: a plain fork.
            let mut args: clone_args = unsafe { zeroed() };
            args.flags = CLONE_INTO_CGROUP;
            args.cgroup = u64::from(directory.as_raw_fd().unsigned_abs());
            // SAFETY: the child ends after it has looked around, which is async-signal-safe.
            let forked = unsafe { clone3(&mut args) }.during("clone3(CLONE_INTO_CGROUP)")?;
            let Some(pid) = forked else { exit(i32::from(is_inside())) };
            let status = waitpid(Some(pid), WaitOptions::empty()).during("waitpid")?;
            expect(status.and_then(|(_, s)| s.exit_status()) == Some(1), "the child is not in the group")
        }))
    };
    tried().unwrap_or_else(|state| state)
}

/// The program ends with the child.
fn cgroup_skb(limit: Duration) -> State {
    let tried = || -> Result<State, State> {
        let own = own_group(None).ok_or_else(|| State::missing("no version 2 hierarchy is mounted"))?;
        let group = ProbeGroup::below(&own, "skb")?;
        let directory = open(&group.0, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| State::refused("open the group", errno))?;
        Ok(child::run(limit, |_: &mut Note| {
            let attached = CgroupFilter::attach(directory.as_fd(), None);
            attached
                .map_err(|error| error.errno)
                .during("a program of the kernel's at a group, by bpf(2)")
                .map(drop)
        }))
    };
    tried().unwrap_or_else(|state| state)
}

const NAME: &str = "orrery-probe";

/// Returns whether the calling process is in a group that a probe made.
fn is_inside() -> bool {
    let mut text = [0; 4096];
    let text = read_file(c"/proc/self/cgroup", &mut text).unwrap_or_default();
    text.windows(NAME.len()).any(|window| window == NAME.as_bytes())
}

/// A group made for trying, removed when dropped.
struct ProbeGroup(PathBuf);

impl ProbeGroup {
    fn below(own: &Path, name: &str) -> Result<Self, State> {
        let path = own.join(format!("{NAME}-{name}-{}", std::process::id()));
        match fs::create_dir(&path) {
            Ok(()) => Ok(Self(path)),
            Err(error) => Err(refused(format!("mkdir in {}", own.display()), &error)),
        }
    }

    /// Writes a setting and checks that it reads back.
    fn set(&self, own: &Path, file: &str, value: &str) -> Result<(), State> {
        let value = match value {
            PARENTS => fs::read_to_string(own.join(file))
                .map_err(|e| refused(format!("read the parent's {file}"), &e))?,
            value => value.to_owned(),
        };
        fs::write(self.0.join(file), value.trim()).map_err(|e| refused(format!("write {file}"), &e))?;
        let now = fs::read_to_string(self.0.join(file)).map_err(|e| refused(format!("read {file}"), &e))?;
        if now.trim() == value.trim() {
            Ok(())
        } else {
            Err(State::missing(format!("{file} does not keep its value")))
        }
    }
}

impl Drop for ProbeGroup {
    fn drop(&mut self) {
        // A process that has just died may keep its group busy for a moment.
        let deadline = Instant::now() + Duration::from_millis(50);
        while let Err(error) = fs::remove_dir(&self.0) {
            if error.raw_os_error() != Some(libc::EBUSY) || Instant::now() > deadline {
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

fn refused(step: String, error: &io::Error) -> State {
    match error.raw_os_error() {
        Some(errno) => State::refused(step, Errno::from_raw_os_error(errno)),
        None => State::missing(format!("{step}: {error}")),
    }
}
