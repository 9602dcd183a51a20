//! Which mechanism each system will use, given what works here.
//!
//! Each role (the tracker, the watch over the layout ...) lists its mechanisms, best first, with the facilities that each
//! needs; the first whose needs are all met is used. The last one needs nothing.

use orrery_probe::{Facility, System};

/// The environment variable that forces a tracker.
pub(super) const TRACKER_VARIABLE: &str = "ORRERY_TRACKER";
/// The trackers that can be forced.
const TRACKERS: &[&str] = &["wp_async", "compare"];
const TRACKER: &str = "tracker";

/// The answer for some systems.
pub(super) struct Plan {
    /// The roles, ordered by system.
    pub(super) roles: Vec<Role>,
    /// What `ORRERY_TRACKER` holds, a tracker's name or not.
    pub(super) forced_tracker: Option<String>,
}

/// A role in a system and the mechanism that fills it.
pub(super) struct Role {
    pub(super) system: System,
    pub(super) name: &'static str,
    pub(super) mechanism: String,
}

struct Choices {
    system: System,
    role: &'static str,
    mechanisms: &'static [Mechanism],
}

struct Mechanism {
    needs: &'static [&'static str],
    name: &'static str,
}

const fn with(needs: &'static [&'static str], name: &'static str) -> Mechanism {
    Mechanism { needs, name }
}

const fn otherwise(name: &'static str) -> Mechanism {
    Mechanism { needs: &[], name }
}

const fn choices(system: System, role: &'static str, mechanisms: &'static [Mechanism]) -> Choices {
    Choices { system, role, mechanisms }
}

const TRACKING: &[Mechanism] =
    &[with(&["userfaultfd", "uffd_wp_async", "pagemap_scan"], "wp_async"), otherwise("compare")];

const MEDIATING: &[Mechanism] = &[
    with(
        &["seccomp_notify", "seccomp_addfd", "seccomp_sync_wake_up"],
        "seccomp notify with synchronous wake-up",
    ),
    with(&["seccomp_notify"], "seccomp notify"),
    with(&["ptrace"], "ptrace"),
    otherwise("none: refuses to start"),
];

const LIMITING: &[Mechanism] = &[
    with(&["cgroup_v2_memory", "cgroup_v2_cpu", "cgroup_v2_pids"], "cgroup v2"),
    with(&["cgroup_v1_memory", "cgroup_v1_cpu", "cgroup_v1_pids"], "cgroup v1"),
    otherwise("rlimits and nice"),
];

const SLICE: &str = "a slice of 0.1 ms";

const ROLES: &[Choices] = &[
    choices(System::LwcRollback, TRACKER, TRACKING),
    choices(
        System::LwcRollback,
        "layout watch",
        &[with(&["perf_mmap_records"], "perf"), otherwise("/proc/self/maps at every rollback")],
    ),
    choices(
        System::LwcRollback,
        "open files",
        &[
            with(&["kcmp", "pidfd_open", "pidfd_getfd"], "kcmp, lost ones fetched from a keeper"),
            otherwise("device and inode, lost ones stay lost"),
        ],
    ),
    choices(
        System::LwcRollback,
        "children left behind",
        &[with(&["proc_children"], "killed"), otherwise("not found, live on")],
    ),
    choices(
        System::LwcRollback,
        "POSIX timers",
        &[with(&["proc_timers"], "new ones deleted"), otherwise("stay as they are")],
    ),
    choices(
        System::LwcRollback,
        "sandbox",
        &[
            with(&["seccomp_filter", "landlock"], "seccomp and Landlock"),
            with(&["seccomp_filter"], "seccomp"),
            with(&["landlock"], "Landlock"),
            otherwise("none: rollback is the only wall"),
        ],
    ),
    choices(System::Orbit, TRACKER, TRACKING),
    choices(
        System::Orbit,
        "death notice",
        &[with(&["pidfd_open"], "pidfd"), otherwise("a pipe that the domain keeps open")],
    ),
    choices(System::Orbit, "limits", LIMITING),
    choices(
        System::Orbit,
        "large areas",
        &[with(&["transparent_huge_pages"], "huge pages"), otherwise("4 KiB pages")],
    ),
    choices(System::LwcContexts, "gate's CPU", &[with(&["rseq"], "rseq"), otherwise("getcpu")]),
    choices(System::LwcContexts, "system-call traps", MEDIATING),
    choices(
        System::LwcContexts,
        "second wall",
        &[with(&["landlock"], "Landlock"), with(&["mount_namespace"], "mount namespace"), otherwise("none")],
    ),
    choices(
        System::LwcContexts,
        "vault",
        &[with(&["memfd_secret"], "memfd_secret"), otherwise("locked, undumpable memory")],
    ),
    choices(System::LwcContexts, "limits", LIMITING),
    choices(
        System::Hijack,
        "way in",
        &[with(&["ptrace"], "ptrace at exec"), otherwise("LD_PRELOAD, dynamic programs only")],
    ),
    choices(
        System::Hijack,
        "first call of a site",
        &[
            with(&["syscall_user_dispatch"], "syscall user dispatch"),
            with(&["ptrace"], "ptrace"),
            otherwise("none: refuses to start"),
        ],
    ),
    choices(
        System::Hijack,
        "wake-up, --sleep precise",
        &[with(&["sched_slice"], SLICE), otherwise("timers without slack, read clock")],
    ),
    choices(
        System::Hijack,
        "wake-up, --sleep realtime",
        &[
            with(&["sched_fifo"], "SCHED_FIFO"),
            with(&["nice_below_zero"], "nice -20"),
            with(&["sched_slice"], SLICE),
            otherwise("timers without slack, read clock"),
        ],
    ),
    choices(
        System::Hijack,
        "archives as directories",
        &[with(&["detached_mount"], "a tmpfs attached nowhere"), otherwise("none: refuses to start")],
    ),
    choices(System::Hijack, "boundary (--enforce)", MEDIATING),
    choices(
        System::Hijack,
        "shares of CPU time (--cpu)",
        &[
            with(&["sched_fifo_99", "nice_below_zero"], "realtime: SCHED_FIFO"),
            with(&["cgroup_v2_weight"], "group: weights of cgroup v2"),
            with(&["cgroup_v1_shares"], "group: weights of cgroup v1"),
            with(&["nice_below_zero"], "nice: nice values"),
            otherwise("measure: nothing is guaranteed"),
        ],
    ),
    choices(
        System::Hijack,
        "children of who has a share",
        &[with(&["cgroup_v2"], "a cgroup v2 around the program"), otherwise("found through their parents")],
    ),
    choices(
        System::Hijack,
        "shares of packets (--net)",
        &[
            with(&["pidfd_getfd", "cgroup_skb"], "a program at the cgroup v2, else filters of sockets"),
            with(&["pidfd_getfd"], "filters of sockets"),
            otherwise("none: nothing is dropped early"),
        ],
    ),
    choices(
        System::Hijack,
        "events of pressure",
        &[with(&["pressure_stall"], "triggers at /proc/pressure"), otherwise("none")],
    ),
    choices(
        System::Orc,
        "objects",
        &[
            with(&["memfd_seals", "seal_future_write", "seal_exec"], "memfd, every seal"),
            with(&["memfd_seals"], "memfd, sealed against writing"),
            otherwise("none: refuses to start"),
        ],
    ),
    choices(
        System::Orc,
        "large code (--huge-pages)",
        &[with(&["madvise_collapse"], "huge pages, by MADV_COLLAPSE"), otherwise("small pages")],
    ),
    choices(
        System::Orc,
        "mapping look-up",
        &[with(&["procmap_query"], "PROCMAP_QUERY"), otherwise("/proc/self/maps")],
    ),
    choices(
        System::Orthros,
        "kernels run in",
        &[
            with(&["qemu", "kvm"], "QEMU with KVM"),
            with(&["qemu"], "QEMU, translating (TCG)"),
            otherwise("none: QEMU must be installed"),
        ],
    ),
    choices(
        System::Orthros,
        "network",
        &[
            with(&["tun", "bridge", "net_namespace"], "tap interfaces on a bridge in a namespace"),
            with(&["tun"], "tap interfaces on a given bridge"),
            otherwise("QEMU's user-mode network"),
        ],
    ),
];

impl Plan {
    /// Returns what `systems` will use where `tried` is what was found; `forced` is what [`TRACKER_VARIABLE`] holds.
    pub(super) fn of(tried: &[Facility], systems: &[System], forced_tracker: Option<String>) -> Self {
        let works =
            |name: &str| tried.iter().any(|facility| facility.name == name && facility.state.is_available());
        let wanted = ROLES.iter().filter(|choices| systems.contains(&choices.system));
        let roles = wanted.filter_map(|&Choices { system, role, mechanisms }| {
            let mut fitting =
                mechanisms.iter().filter(|mechanism| mechanism.needs.iter().all(|need| works(need)));
            let mechanism = match forced_tracker.as_deref() {
                Some(name) if role == TRACKER => {
                    forced(name, fitting.any(|mechanism| mechanism.name == name))
                }
                _ => fitting.next()?.name.to_owned(),
            };
            Some(Role { system, name: role, mechanism })
        });
        Self { roles: roles.collect(), forced_tracker: forced_tracker.clone() }
    }

    /// Returns the roles of one system.
    pub(super) fn roles_of(&self, system: System) -> impl Iterator<Item = &Role> {
        self.roles.iter().filter(move |role| role.system == system)
    }
}

/// Returns what becomes of a tracker that the environment asks for.
fn forced(name: &str, works: bool) -> String {
    if !TRACKERS.contains(&name) {
        format!("none: {TRACKER_VARIABLE}={name} names no tracker ({} or {})", TRACKERS[0], TRACKERS[1])
    } else if works {
        format!("{name} (forced by {TRACKER_VARIABLE})")
    } else {
        format!("none: {TRACKER_VARIABLE} forces {name}, which does not work here")
    }
}

#[cfg(test)]
mod tests {
    use orrery_probe::{Group, State};

    use super::*;

    fn facility(name: &'static str, works: bool) -> Facility {
        let state = if works {
            State::Available { detail: String::new() }
        } else {
            State::Missing { reason: "test".into(), errno: None }
        };
        Facility { name, group: Group::Memory, state, purpose: "", systems: &[], fallback: "" }
    }

    fn needed() -> impl Iterator<Item = &'static str> {
        ROLES.iter().flat_map(|choices| choices.mechanisms).flat_map(|mechanism| mechanism.needs).copied()
    }

    fn mechanism(plan: &Plan, system: System, role: &str) -> String {
        plan.roles_of(system).find(|found| found.name == role).unwrap().mechanism.clone()
    }

    #[test]
    fn every_need_is_probed_for_a_system_that_has_it() {
        let probed = orrery_probe::all();
        for choices in ROLES {
            for need in choices.mechanisms.iter().flat_map(|mechanism| mechanism.needs) {
                let row = probed.iter().find(|facility| facility.name == *need);
                let systems = row.unwrap_or_else(|| panic!("no row {need}")).systems;
                assert!(systems.contains(&choices.system), "{need} does not name {}", choices.system);
            }
        }
    }

    #[test]
    fn the_last_resort_needs_nothing_and_only_it() {
        for choices in ROLES {
            let (last, better) = choices.mechanisms.split_last().unwrap();
            assert!(last.needs.is_empty() && better.iter().all(|mechanism| !mechanism.needs.is_empty()));
        }
    }

    #[test]
    fn every_system_has_roles_with_everything_and_with_nothing() {
        let everything: Vec<_> = needed().map(|name| facility(name, true)).collect();
        let nothing: Vec<_> = needed().map(|name| facility(name, false)).collect();
        for (tried, pick) in [(everything, 0), (nothing, usize::MAX)] {
            let plan = Plan::of(&tried, System::ALL, None);
            assert_eq!(plan.roles.len(), ROLES.len());
            for (role, choices) in plan.roles.iter().zip(ROLES) {
                assert_eq!(role.mechanism, choices.mechanisms[pick.min(choices.mechanisms.len() - 1)].name);
            }
            assert!(System::ALL.iter().all(|&system| plan.roles_of(system).next().is_some()));
        }
    }

    #[test]
    fn one_missing_need_is_enough_for_the_next_best() {
        let tried: Vec<_> = needed().map(|name| facility(name, name != "seccomp_sync_wake_up")).collect();
        let plan = Plan::of(&tried, &[System::LwcContexts], None);
        assert_eq!(mechanism(&plan, System::LwcContexts, "system-call traps"), "seccomp notify");
        assert!(plan.roles_of(System::Orbit).next().is_none(), "not asked for");
    }

    #[test]
    fn the_environment_forces_the_tracker_and_nothing_else() {
        let all: Vec<_> = needed().map(|name| facility(name, true)).collect();
        let tracker = |tried: &[Facility], forced: &str| {
            let plan = Plan::of(tried, System::ALL, Some(forced.to_owned()));
            assert_eq!(mechanism(&plan, System::LwcRollback, "layout watch"), "perf");
            mechanism(&plan, System::Orbit, TRACKER)
        };
        assert_eq!(tracker(&all, "compare"), "compare (forced by ORRERY_TRACKER)");
        assert_eq!(tracker(&all, "wp_async"), "wp_async (forced by ORRERY_TRACKER)");
        assert!(tracker(&all, "magic").starts_with("none: ORRERY_TRACKER=magic names no tracker"));
        let without: Vec<_> = needed().map(|name| facility(name, name != "uffd_wp_async")).collect();
        assert!(tracker(&without, "wp_async").ends_with("does not work here"));
        assert_eq!(tracker(&without, "compare"), "compare (forced by ORRERY_TRACKER)");
    }
}
