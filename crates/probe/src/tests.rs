//! Whole-table checks, and oracles: what others (the kernel's configuration, /proc, util-linux) say of a facility must
//! agree with what trying it showed.

use std::collections::HashSet;
use std::fs;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use super::*;
use rustix::io::Errno;

static FACILITIES: LazyLock<Vec<Facility>> = LazyLock::new(all);

fn state(name: &str) -> &'static State {
    &FACILITIES.iter().find(|facility| facility.name == name).unwrap_or_else(|| panic!("no row {name}")).state
}

/// Runs a program for its exit status; `None` where it is not installed.
fn succeeds(program: &str, arguments: &[&str]) -> Option<bool> {
    let mut command = Command::new(program);
    let status = command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.ok().map(|status| status.success())
}

#[test]
fn every_row_is_complete_and_named_once() {
    let mut names = HashSet::new();
    for facility in FACILITIES.iter() {
        let name = facility.name;
        assert!(names.insert(name), "{name} twice");
        assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'), "{name}");
        for text in [facility.purpose, facility.fallback] {
            assert!(!text.is_empty() && !text.ends_with('.') && text.is_ascii(), "{name}: {text}");
        }
        let systems: HashSet<_> = facility.systems.iter().collect();
        assert!(!systems.is_empty() && systems.len() == facility.systems.len(), "{name}: {systems:?}");
        assert!(
            facility.state.is_available() || !facility.state.detail().is_empty(),
            "{name} gives no reason"
        );
    }
}

#[test]
fn groups_come_in_order_and_every_system_has_rows() {
    assert!(FACILITIES.is_sorted_by_key(|facility| facility.group));
    for system in System::ALL {
        assert!(FACILITIES.iter().any(|facility| facility.systems.contains(system)), "{system}");
    }
}

#[test]
fn what_the_kernel_was_built_without_is_not_available() {
    const NEEDED: &[(&str, &str)] = &[
        ("userfaultfd", "USERFAULTFD"),
        ("uffd_wp_async", "USERFAULTFD"),
        ("pagemap_scan", "PROC_PAGE_MONITOR"),
        ("soft_dirty", "MEM_SOFT_DIRTY"),
        ("perf_mmap_records", "PERF_EVENTS"),
        ("memfd_seals", "MEMFD_CREATE"),
        ("memfd_secret", "SECRETMEM"),
        ("ksm", "KSM"),
        ("transparent_huge_pages", "TRANSPARENT_HUGEPAGE"),
        ("hugetlb", "HUGETLBFS"),
        ("kcmp", "KCMP"),
        ("process_vm_readv", "CROSS_MEMORY_ATTACH"),
        ("proc_children", "PROC_CHILDREN"),
        ("proc_timers", "CHECKPOINT_RESTORE"),
        ("user_namespace", "USER_NS"),
        ("pid_namespace", "PID_NS"),
        ("net_namespace", "NET_NS"),
        ("time_namespace", "TIME_NS"),
        ("seccomp_filter", "SECCOMP_FILTER"),
        ("seccomp_notify", "SECCOMP_FILTER"),
        ("landlock", "SECURITY_LANDLOCK"),
        ("io_uring", "IO_URING"),
        ("cgroup_v1_memory", "MEMCG_V1"),
        ("cgroup_v1_cpu", "CFS_BANDWIDTH"),
        ("cgroup_v1_shares", "FAIR_GROUP_SCHED"),
        ("cgroup_v2_weight", "FAIR_GROUP_SCHED"),
        ("cgroup_skb", "CGROUP_BPF"),
        ("pressure_stall", "PSI"),
        ("cgroup_v1_pids", "CGROUP_PIDS"),
        ("cgroup_v1_freezer", "CGROUP_FREEZER"),
        ("futex_pi", "FUTEX_PI"),
        ("rseq", "RSEQ"),
        ("membarrier", "MEMBARRIER"),
        ("user_shadow_stack", "X86_USER_SHADOW_STACK"),
        ("kvm", "KVM"),
        ("tun", "TUN"),
        ("bridge", "BRIDGE"),
    ];
    let Ok(output) = Command::new("zcat").arg("/proc/config.gz").output() else {
        orrery_testing::skipped!("no zcat to read /proc/config.gz with");
        return;
    };
    let config = String::from_utf8(output.stdout).unwrap();
    if config.is_empty() {
        orrery_testing::skipped!("the kernel does not tell its configuration in /proc/config.gz");
        return;
    }
    for (name, option) in NEEDED {
        if config.contains(&format!("# CONFIG_{option} is not set\n")) {
            assert!(!state(name).is_available(), "{name} without CONFIG_{option}");
        }
    }
    // Children lists and soft-dirty marks have no switch beside the configuration, and no privilege guards them.
    for (name, option) in [("proc_children", "PROC_CHILDREN"), ("soft_dirty", "MEM_SOFT_DIRTY")] {
        let built_in = config.contains(&format!("\nCONFIG_{option}=y\n"));
        assert_eq!(state(name).is_available(), built_in, "{name}: {:?}", state(name));
    }
}

#[test]
fn seccomp_agrees_with_the_list_of_actions() {
    let Ok(actions) = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail") else {
        orrery_testing::skipped!("no list of seccomp's actions in /proc/sys");
        return;
    };
    for (name, action) in [("seccomp_filter", "errno"), ("seccomp_notify", "user_notif")] {
        let known = actions.split_whitespace().any(|word| word == action);
        assert_eq!(state(name).word() != "missing", known, "{name}: {:?}", state(name));
    }
}

#[test]
fn namespaces_agree_with_unshare() {
    const FLAGS: &[(&str, &str)] = &[
        ("user_namespace", "--user"),
        ("pid_namespace", "--pid"),
        ("mount_namespace", "--mount"),
        ("net_namespace", "--net"),
        ("time_namespace", "--time"),
    ];
    for (name, flag) in FLAGS {
        let Some(alone) = succeeds("unshare", &[flag, "--fork", "true"]) else {
            orrery_testing::skipped!("unshare is not installed");
            return;
        };
        let works = alone || succeeds("unshare", &["--map-root-user", flag, "--fork", "true"]) == Some(true);
        assert_eq!(state(name).is_available(), works, "{name}: {:?}", state(name));
    }
}

#[test]
fn scheduling_classes_agree_with_chrt() {
    const MILLISECOND: &[&str] = &[
        "-d",
        "--sched-runtime",
        "1000000",
        "--sched-deadline",
        "100000000",
        "--sched-period",
        "100000000",
        "0",
    ];
    for (name, class) in [
        ("sched_fifo", &["-f", "1"][..]),
        ("sched_fifo_99", &["-R", "-f", "99"]),
        ("sched_deadline", MILLISECOND),
    ] {
        let Some(works) = succeeds("chrt", &[class, &["true"]].concat()) else {
            orrery_testing::skipped!("chrt is not installed");
            return;
        };
        assert_eq!(state(name).is_available(), works, "{name}: {:?}", state(name));
    }
}

#[test]
fn huge_pages_agree_with_the_switches() {
    if let Ok(mode) = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled") {
        let never = mode.contains("[never]");
        assert!(!(never && state("transparent_huge_pages").is_available()), "{mode}");
    }
    let free = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free = free.map_or(0, |text| text.trim().parse::<u32>().unwrap());
    let overcommit = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages");
    if overcommit.map_or(0, |text| text.trim().parse::<u32>().unwrap()) == 0 {
        assert_eq!(state("hugetlb").is_available(), free > 0, "{:?}", state("hugetlb"));
    }
}

#[test]
fn page_zero_agrees_with_the_limit() {
    let Ok(lowest) = fs::read_to_string("/proc/sys/vm/mmap_min_addr") else {
        orrery_testing::skipped!("vm.mmap_min_addr cannot be read");
        return;
    };
    if lowest.trim() == "0" {
        assert!(state("page_zero").is_available());
    } else if !rustix::process::geteuid().is_root() {
        assert_eq!(state("page_zero").word(), "denied");
    }
}

#[test]
fn version_1_controllers_agree_with_proc_cgroups() {
    let Ok(table) = fs::read_to_string("/proc/cgroups") else {
        orrery_testing::skipped!("no /proc/cgroups");
        return;
    };
    for controller in ["memory", "cpu", "pids", "freezer", "cpuset"] {
        let row = table.lines().find(|line| line.split('\t').next() == Some(controller));
        let hierarchy = row.and_then(|row| row.split('\t').nth(1));
        if matches!(hierarchy, None | Some("0")) {
            assert_eq!(state(&format!("cgroup_v1_{controller}")).word(), "missing");
        }
    }
}

#[test]
fn programs_agree_with_the_shell() {
    for (name, program) in
        [("qemu", format!("qemu-system-{}", std::env::consts::ARCH)), ("criu", "criu".into())]
    {
        let installed = succeeds("sh", &["-c", &format!("command -v {program}")]).unwrap();
        assert_eq!(state(name).is_available(), installed, "{name}: {:?}", state(name));
    }
}

#[test]
fn errors_of_privilege_and_limits_are_denials() {
    for errno in [Errno::PERM, Errno::ACCESS, Errno::ROFS, Errno::MFILE, Errno::NOMEM] {
        assert_eq!(State::refused("step", errno).word(), "denied", "{errno:?}");
    }
    for errno in [Errno::NOSYS, Errno::INVAL, Errno::NOTTY, Errno::OPNOTSUPP, Errno::NOENT, Errno::NODEV] {
        assert_eq!(State::refused("step", errno).word(), "missing", "{errno:?}");
    }
}
