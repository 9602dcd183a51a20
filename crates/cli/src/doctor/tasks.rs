//! What a user can do here: a verdict for each task, from the facilities that work and the programs that are installed.

use std::path::Path;

use orrery_probe::Facility;

use super::plan::TRACKER_VARIABLE;

/// A task, by the name of its command or chapter.
pub(super) struct Task {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    /// What the task cannot do without.
    needs: &'static [Need],
    /// What it is slower or weaker without.
    wants: &'static [Need],
}

/// One thing that a task uses, and what is printed where it is absent.
struct Need {
    check: Check,
    absent: &'static str,
}

enum Check {
    /// Every one of these facilities.
    All(&'static [&'static str]),
    /// All of one of these lists.
    Any(&'static [&'static [&'static str]]),
    /// A program in `PATH`, or in the directories of administrators.
    Program(&'static str),
    /// A program of Orrery's own that others start.
    Helper(&'static str),
    Root,
    /// Landlock of this version.
    Landlock(u32),
    /// Enough memory, in MiB.
    Memory(u64),
}

const fn need(check: Check, absent: &'static str) -> Need {
    Need { check, absent }
}

const TRACKER: Need = need(
    Check::All(&["userfaultfd", "uffd_wp_async", "pagemap_scan"]),
    "slower: written pages are found by comparing all memory (needs userfaultfd with UFFD_FEATURE_WP_ASYNC)",
);
const LIMITS: Need = need(
    Check::Any(&[
        &["cgroup_v2_memory", "cgroup_v2_cpu", "cgroup_v2_pids"],
        &["cgroup_v1_memory", "cgroup_v1_cpu", "cgroup_v1_pids"],
    ]),
    "limits hold for each process alone (needs a control group of its own)",
);
const NOTIFICATIONS: Need = need(
    Check::All(&["seccomp_notify", "seccomp_addfd"]),
    "seccomp user notifications that hand over descriptors",
);
const SECOND_WALL: Need = need(Check::All(&["landlock"]), "one wall of two (needs Landlock)");
const WAKE_UP: Need = need(
    Check::All(&["seccomp_sync_wake_up"]),
    "slower: 70 us, not 2 us for a mediated call (needs Linux 6.6's wake-up)",
);
const EXECUTIVE: Need = need(Check::All(&["syscall_user_dispatch"]), "syscall user dispatch");
const INJECTION: Need = need(Check::All(&["ptrace"]), "dynamic programs only, by LD_PRELOAD (needs ptrace)");
const ENFORCEMENT: Need =
    need(Check::All(&["seccomp_notify"]), "no --enforce (needs seccomp user notifications)");

/// In the order in which they are printed.
const TASKS: &[Task] = &[
    Task {
        name: "rollback",
        about: "undo what a function did to its process",
        needs: &[],
        wants: &[
            TRACKER,
            need(
                Check::All(&["perf_mmap_records"]),
                "slower: reads /proc/self/maps at each rollback (needs perf events)",
            ),
        ],
    },
    Task {
        name: "warm",
        about: "Python scripts without Python's start",
        needs: &[
            need(
                Check::Helper("orrery-warm-python"),
                "orrery-warm-python, beside orrery or in its libexec directory (package orrery-warm-python)",
            ),
            need(Check::Program("python3"), "python3 (package python3)"),
        ],
        wants: &[
            TRACKER,
            need(
                Check::All(&["seccomp_filter", "landlock"]),
                "a weaker --sandbox (needs seccomp and Landlock)",
            ),
            need(
                Check::Helper("orrery-warm-http"),
                "no orrery warm http (needs orrery-warm-http, beside orrery or in its libexec directory)",
            ),
        ],
    },
    Task {
        name: "contexts",
        about: "isolated contexts that a thread switches into; sessions",
        needs: &[NOTIFICATIONS],
        wants: &[
            need(
                Check::Landlock(6),
                "no isolation by default: Spec::isolate(false) (needs Landlock's scopes, Linux 6.12)",
            ),
            WAKE_UP,
            LIMITS,
        ],
    },
    Task {
        name: "vault",
        about: "private keys in a process of their own",
        needs: &[need(Check::Program("openssl"), "openssl, 3.0 or later (package openssl)")],
        wants: &[need(
            Check::All(&["memfd_secret"]),
            "keys in locked memory that the kernel maps (needs memfd_secret)",
        )],
    },
    Task {
        name: "guard",
        about: "files, programs and addresses of an untrusted program",
        needs: &[NOTIFICATIONS],
        wants: &[SECOND_WALL, WAKE_UP],
    },
    Task {
        name: "trace",
        about: "see a program's system calls (trace, faults)",
        needs: &[EXECUTIVE],
        wants: &[INJECTION],
    },
    Task {
        name: "run",
        about: "an executive under a program: policies, services",
        needs: &[EXECUTIVE],
        wants: &[
            INJECTION,
            ENFORCEMENT,
            need(
                Check::Helper("orrery-manager"),
                "no handlers in policies, no guaranteed shares (needs orrery-manager, beside orrery or in its libexec directory)",
            ),
            need(Check::All(&["sched_slice"]), "imprecise --sleep (needs custom slices, Linux 6.12)"),
        ],
    },
    Task {
        name: "manager",
        about: "guaranteed shares of CPU time and packets (run --cpu, --net); extensions",
        needs: &[need(
            Check::Helper("orrery-manager"),
            "orrery-manager, beside orrery or in its libexec directory",
        )],
        wants: &[
            need(
                Check::All(&["sched_fifo_99", "nice_below_zero"]),
                "no guarantee of CPU time (needs CAP_SYS_NICE, or RLIMIT_RTPRIO 99 and RLIMIT_NICE 40)",
            ),
            need(
                Check::All(&["cgroup_v2"]),
                "daemons of a program may go uncharged (needs a cgroup v2 to make groups in)",
            ),
            need(
                Check::All(&["pidfd_getfd", "cgroup_skb"]),
                "packets dropped by filters of sockets (needs cgroup v2, CAP_BPF and CAP_NET_ADMIN)",
            ),
            need(Check::All(&["pressure_stall"]), "no events of pressure (needs /proc/pressure, CONFIG_PSI)"),
        ],
    },
    Task {
        name: "orbit",
        about: "auxiliary tasks on a fresh copy of state",
        needs: &[],
        wants: &[TRACKER, LIMITS],
    },
    Task {
        name: "orc",
        about: "identical code and data once in memory",
        needs: &[need(Check::All(&["memfd_seals"]), "memfd_create with seals")],
        wants: &[need(
            Check::All(&["procmap_query"]),
            "slower: reads /proc/self/maps (needs PROCMAP_QUERY, Linux 6.11)",
        )],
    },
    Task {
        name: "orthros",
        about: "a service that survives its kernel",
        needs: &[
            need(Check::Root, "root"),
            need(Check::All(&["qemu"]), "qemu-system-x86_64 (package qemu-system-x86)"),
            need(Check::Program("criu"), "criu (package criu)"),
            need(Check::Program("busybox"), "busybox (package busybox-static)"),
            need(Check::Program("mkfs.ext4"), "mkfs.ext4 (package e2fsprogs)"),
            need(Check::Program("ip"), "ip (package iproute2)"),
            need(Check::All(&["tun", "bridge", "net_namespace"]), "tap interfaces and bridges"),
            need(
                Check::Helper("orrery-guest"),
                "orrery-guest, beside orrery or in its libexec directory (package orrery-orthros)",
            ),
            need(Check::Memory(700), "700 MiB of free memory for two virtual machines"),
        ],
        wants: &[need(Check::All(&["kvm"]), "slower: QEMU translates the kernels' code (needs /dev/kvm)")],
    },
];

/// Whether a task works here.
pub(super) struct Verdict {
    pub(super) task: &'static Task,
    pub(super) state: State,
    /// What is absent, one sentence each.
    pub(super) reasons: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// With all that it can use.
    Ready,
    /// It works, without something.
    Limited,
    /// It does not work.
    No,
}

impl State {
    /// Returns the word of the report.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Limited => "limited",
            Self::No => "needs",
        }
    }
}

/// Returns the names of all tasks.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    TASKS.iter().map(|task| task.name)
}

/// Judges every task by what was found. `forced_tracker` is what [`TRACKER_VARIABLE`] holds.
pub(super) fn judge(tried: &[Facility], forced_tracker: Option<&str>) -> Vec<Verdict> {
    TASKS.iter().map(|task| verdict(task, &|check| is_met(check, tried), forced_tracker)).collect()
}

fn verdict(task: &'static Task, is_met: &dyn Fn(&Check) -> bool, forced_tracker: Option<&str>) -> Verdict {
    let absent = |needs: &'static [Need]| {
        needs
            .iter()
            .filter(|need| !is_met(&need.check))
            .map(|need| need.absent.to_owned())
            .collect::<Vec<_>>()
    };
    let missing = absent(task.needs);
    if !missing.is_empty() {
        return Verdict { task, state: State::No, reasons: missing };
    }
    let mut reasons = absent(task.wants);
    let tracks = task.wants.iter().any(|need| need.absent == TRACKER.absent);
    if let Some(forced) = forced_tracker.filter(|&forced| tracks && forced != "wp_async") {
        reasons.push(format!("{TRACKER_VARIABLE}={forced} is set"));
    }
    let state = if reasons.is_empty() { State::Ready } else { State::Limited };
    Verdict { task, state, reasons }
}

fn is_met(check: &Check, tried: &[Facility]) -> bool {
    let found =
        |name: &str| tried.iter().find(|facility| facility.name == name && facility.state.is_available());
    let all = |names: &[&str]| names.iter().all(|name| found(name).is_some());
    match check {
        Check::All(names) => all(names),
        Check::Any(lists) => lists.iter().any(|names| all(names)),
        Check::Program(name) => is_installed(name),
        Check::Helper(name) => orrery_sys::programs::find_helper(name).is_ok(),
        Check::Root => rustix::process::geteuid().is_root(),
        Check::Landlock(version) => {
            found("landlock").and_then(|facility| landlock_version(facility.state.detail())) >= Some(*version)
        }
        Check::Memory(mib) => available_memory().is_none_or(|available| available >= *mib),
    }
}

/// Returns whether a program is in `PATH`, or in the directories of administrators.
pub(crate) fn is_installed(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let administrators = ["/usr/local/sbin", "/usr/sbin", "/sbin"];
    std::env::split_paths(&path)
        .chain(administrators.map(|directory| Path::new(directory).to_owned()))
        .any(|directory| directory.join(name).is_file())
}

/// Returns the number in "ABI 7".
fn landlock_version(detail: &str) -> Option<u32> {
    detail.split("ABI ").nth(1)?.split(|character: char| !character.is_ascii_digit()).next()?.parse().ok()
}

/// MiB that can be had without swapping (proc_meminfo(5)).
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib >> 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks() -> impl Iterator<Item = &'static Check> {
        TASKS.iter().flat_map(|task| task.needs.iter().chain(task.wants)).map(|need| &need.check)
    }

    #[test]
    fn every_facility_that_a_task_names_is_probed() {
        let probed = orrery_probe::all();
        let lists = checks().flat_map(|check| match check {
            Check::All(names) => vec![*names],
            Check::Any(lists) => lists.to_vec(),
            Check::Landlock(_) => vec![&["landlock"][..]],
            _ => Vec::new(),
        });
        for name in lists.flatten() {
            assert!(probed.iter().any(|facility| facility.name == *name), "no row {name}");
        }
    }

    #[test]
    fn a_task_is_ready_with_everything_and_names_all_that_is_absent() {
        for task in TASKS {
            assert_eq!(verdict(task, &|_| true, None).state, State::Ready, "{}", task.name);
            let none = verdict(task, &|_| false, None);
            let (state, count) = match task.needs.len() {
                0 => (State::Limited, task.wants.len()),
                needs => (State::No, needs),
            };
            assert_eq!((none.state, none.reasons.len()), (state, count), "{}", task.name);
        }
    }

    #[test]
    fn a_forced_tracker_limits_the_tasks_that_track() {
        let state = |name: &str, forced| {
            let task = TASKS.iter().find(|task| task.name == name).unwrap();
            verdict(task, &|_| true, forced).state
        };
        assert_eq!(state("orbit", Some("compare")), State::Limited);
        assert_eq!(state("orbit", Some("wp_async")), State::Ready);
        assert_eq!(state("guard", Some("compare")), State::Ready);
    }

    #[test]
    fn the_version_of_landlock_is_read() {
        assert_eq!(landlock_version("ABI 7"), Some(7));
        assert_eq!(landlock_version("ABI 12, and more"), Some(12));
        assert_eq!(landlock_version(""), None);
    }
}
