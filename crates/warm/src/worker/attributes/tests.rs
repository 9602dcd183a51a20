//! Each row is changed, and either set back or named; and whatever the kernel knows of a process is in a row, or somewhere
//! else that is written down here.

use std::collections::BTreeSet;

use syscalls::{Sysno, syscall};

use super::*;

/// Changes one attribute; false where that is not allowed here.
type Change = fn() -> bool;

fn prctl(option: i32, second: u64, third: u64) -> bool {
    // SAFETY: options that take numbers; the process is a test's child.
    unsafe { syscall!(Sysno::prctl, option, second, third, 0, 0) }.is_ok()
}

fn write(path: &str, text: &str) -> bool {
    use std::io::Write;
    let file = std::fs::OpenOptions::new().write(true).open(path);
    file.is_ok_and(|mut file| file.write_all(text.as_bytes()).is_ok())
}

/// A control group for a child, in whichever hierarchy there is.
fn cgroup_of(child: u32) -> Option<String> {
    let hierarchies = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/freezer"];
    let there = hierarchies.iter().find(|path| std::path::Path::new(path).join("cgroup.procs").exists())?;
    Some(format!("{there}/orrery-warm-test-{child}"))
}

fn keyctl(operation: u64, second: u64) -> bool {
    // SAFETY: operations that take numbers and a null.
    unsafe { syscall!(Sysno::keyctl, operation, second, 1, 0, 0) }.is_ok()
}

/// Returns a filter that allows all.
fn filter() -> bool {
    let filter = orrery_sys::seccomp::Filter::new(orrery_sys::seccomp::Action::Allow);
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0)
        && orrery_sys::seccomp::install(&filter.program(), orrery_sys::seccomp::Scope::Thread).is_ok()
}

const CHANGES: &[(&str, Change)] = &[
    // SAFETY: takes numbers; the process is a test's child, with one thread.
    ("users", || unsafe { libc::setresuid(65_534, 65_534, 0) } == 0),
    // SAFETY: takes numbers; the process is a test's child, with one thread.
    ("groups", || unsafe { libc::setresgid(65_534, 65_534, 0) } == 0),
    // SAFETY: the array has the one group, and lives during the call.
    ("supplementary groups", || unsafe { libc::setgroups(1, [65_533].as_ptr()) } == 0),
    ("capabilities", || {
        use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
        let none = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none }).is_ok()
    }),
    ("capability bounding set", || prctl(libc::PR_CAPBSET_DROP, 10, 0)),
    ("ambient capabilities", || {
        use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
        let mut sets = capabilities(None).unwrap();
        sets.inheritable |= CapabilitySet::CHOWN;
        // Its line changes with the inheritable set, too, which is another row.
        set_capabilities(None, sets).is_ok() && prctl(libc::PR_CAP_AMBIENT, 2, 0)
    }),
    ("secure bits", || prctl(libc::PR_SET_SECUREBITS, 1, 0)),
    ("no_new_privs", || prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0)),
    ("system call filter", filter),
    ("speculation control", || prctl(libc::PR_SET_SPECULATION_CTRL, 0, 4)),
    // arch_prctl(ARCH_SHSTK_ENABLE, ARCH_SHSTK_SHSTK), where processor and kernel have it.
    // SAFETY: takes numbers; a return that then faults ends the child of a test alone.
    ("shadow stack and the like", || unsafe { syscall!(Sysno::arch_prctl, 0x5001, 1) }.is_ok()),
    ("memory-deny-write-execute", || prctl(65, 1, 0)),
    ("merging of memory", || prctl(67, 1, 0)),
    ("machine check policy", || prctl(libc::PR_MCE_KILL, 1, 1)),
    ("transparent huge pages", || prctl(libc::PR_SET_THP_DISABLE, 1, 0)),
    ("writing back of memory", || prctl(57, 1, 0)),
    ("subreaper", || prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0)),
    // SAFETY: takes numbers; the process is a test's child, with one thread.
    ("session", || unsafe { libc::setsid() } != -1),
    ("scheduling", || {
        let parameter = libc::sched_param { sched_priority: 0 };
        // SAFETY: the parameter lives during the call.
        unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameter) == 0 }
    }),
    ("processors", || {
        let mut one = [0_u8; 128];
        one[0] = 1;
        // SAFETY: the mask lives during the call, and has that length.
        let done = unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, one.len(), one.as_ptr()) };
        done == 0
    }),
    ("memory nodes", || false),
    // SAFETY: the mask of 64 bits lives during the call.
    ("memory policy", || unsafe { syscall!(Sysno::set_mempolicy, 3, [1_u64].as_ptr(), 64) }.is_ok()),
    // SAFETY: takes numbers; the process is a test's child, with one thread.
    ("input and output priority", || unsafe { syscall!(Sysno::ioprio_set, 1, 0, 3 << 13) }.is_ok()),
    ("core scheduling", || prctl(62, 1, 0)),
    ("autogroup", || write("/proc/self/autogroup", "5")),
    ("control group", || {
        cgroup_of(std::process::id()).is_some_and(|directory| {
            std::fs::create_dir(&directory).is_ok() && write(&format!("{directory}/cgroup.procs"), "0")
        })
    }),
    ("oom_score_adj", || write("/proc/self/oom_score_adj", "100")),
    ("coredump_filter", || write("/proc/self/coredump_filter", "0x7")),
    ("thread keyring", || keyctl(0, u64::MAX)),
    ("process keyring", || keyctl(0, u64::MAX - 1)),
    ("session keyring", || keyctl(1, 0)),
    ("local descriptor table", || {
        // A 32-bit data segment of one page.
        let entry = [0_u32, 0x1000, 0xf, 0x51];
        // SAFETY: the entry has 16 bytes, and lives during the call; nobody loads its selector.
        unsafe { syscall!(Sysno::modify_ldt, 1, entry.as_ptr(), 16) }.is_ok()
    }),
    // SAFETY: takes a null for the list: the child has no robust futex.
    ("robust futexes", || unsafe { syscall!(Sysno::set_robust_list, 0, 24) }.is_ok()),
    ("restartable sequences", || {
        let Some(area) = orrery_sys::rseq::area() else { return false };
        let other = Box::leak(Box::new([[0_u64; 4]; 2])).as_ptr().addr().next_multiple_of(32);
        // SAFETY: the first area is the registered one, and the other is leaked: it lives as long as the process.
        unsafe {
            syscall!(Sysno::rseq, area, 32, 1, 0x5305_3053).is_ok()
                && syscall!(Sysno::rseq, other, 32, 0, 0x5305_3053).is_ok()
        }
    }),
    // SAFETY: the path is a string that ends with a zero.
    ("root directory", || unsafe { libc::chroot(c"/tmp".as_ptr()) } == 0),
    // SAFETY: takes numbers; the process is a test's child, with one thread.
    ("namespaces", || unsafe { libc::unshare(libc::CLONE_NEWUTS) } == 0),
];

/// How a child fared that changed a row.
const RESTORED: i32 = 10;
const NAMED: i32 = 11;
const NOT_HERE: i32 = 12;

fn change_one(name: &str, change: Change) -> i32 {
    // So that there is something to leave.
    // SAFETY: plain system calls in a child.
    unsafe { libc::setsid() };
    if name == "session" {
        // A leader cannot leave its session; its child can.
        // SAFETY: the child makes plain system calls and ends in `change_one`'s caller.
        let child = unsafe { libc::fork() };
        if child != 0 {
            let mut status = 0;
            // SAFETY: waits for the child.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            return libc::WEXITSTATUS(status);
        }
    }
    // Of this process, which is not the one that the test began with.
    let files = Files::without_engine();
    let before = Attributes::capture(&files);
    let index = ROWS.iter().position(|row| row.name == name).unwrap();
    if !change() || (ROWS[index].read)(&View::new(&files)) == before.values[index] {
        return NOT_HERE;
    }
    match before.restore(&files) {
        Ok(()) if (ROWS[index].read)(&View::new(&files)) == before.values[index] => RESTORED,
        Err(message) if message.contains(name) => NAMED,
        _ => 1,
    }
}

#[test]
fn each_row_is_set_back_or_named() {
    for row in &ROWS {
        let (_, change) = CHANGES.iter().find(|(name, _)| *name == row.name).unwrap();
        // SAFETY: the child makes system calls, allocates, which glibc makes usable after fork, and ends by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let fared = std::panic::catch_unwind(|| change_one(row.name, *change)).unwrap_or(1);
            // SAFETY: ends the child.
            unsafe { libc::_exit(fared) };
        }
        let mut status = -1;
        // SAFETY: the pointer is to a live local.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        if let Some(directory) = cgroup_of(child.unsigned_abs()) {
            let _gone = std::fs::remove_dir(directory);
        }
        let fared = libc::WEXITSTATUS(status);
        assert!(libc::WIFEXITED(status), "{}: {status:#x}", row.name);
        match fared {
            NOT_HERE => orrery_testing::skipped!("{} cannot be changed here", row.name),
            RESTORED => assert!(row.set.is_some(), "{}", row.name),
            NAMED => assert!(row.set.is_none() || !rustix::process::geteuid().is_root(), "{}", row.name),
            _ => panic!("{}: neither set back nor named", row.name),
        }
    }
}

/// Leaves the user namespace for one in which users, groups and capabilities look as before.
fn leave_user_namespace() -> bool {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let before = capabilities(None).unwrap();
    let is_bounded = |capability: u64| !prctl_is_one(libc::PR_CAPBSET_READ, capability);
    let bounded: Vec<u64> = (0..64).filter(|&capability| is_bounded(capability)).collect();
    let (user, group) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    // SAFETY: takes numbers; the process is a test's child, with one thread.
    if unsafe { libc::unshare(libc::CLONE_NEWUSER) } != 0 {
        return false;
    }
    write("/proc/self/setgroups", "deny");
    assert!(write("/proc/self/uid_map", &format!("{user} {user} 1")));
    assert!(write("/proc/self/gid_map", &format!("{group} {group} 1")));
    for capability in bounded {
        prctl(libc::PR_CAPBSET_DROP, capability, 0);
    }
    let inheritable = CapabilitySet::empty();
    set_capabilities(None, rustix::thread::CapabilitySets { inheritable, ..before }).unwrap();
    true
}

/// Returns whether an option of prctl(2) that takes a number answers 1.
fn prctl_is_one(option: i32, second: u64) -> bool {
    // SAFETY: options that take numbers.
    unsafe { syscall!(Sysno::prctl, option, second, 0, 0, 0) == Ok(1) }
}

#[test]
fn another_user_namespace_is_named_though_ids_look_alike() {
    // SAFETY: the child makes system calls, allocates, which glibc makes usable after fork, and ends by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let fared = std::panic::catch_unwind(|| {
            let files = Files::without_engine();
            let before = Attributes::capture(&files);
            if !leave_user_namespace() {
                return NOT_HERE;
            }
            match before.restore(&files) {
                Err(message) if message.contains("namespaces") => NAMED,
                other => {
                    eprintln!("{other:?}");
                    1
                }
            }
        });
        // SAFETY: ends the child.
        unsafe { libc::_exit(fared.unwrap_or(1)) };
    }
    let mut status = -1;
    // SAFETY: the pointer is to a live local.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    match libc::WEXITSTATUS(status) {
        NOT_HERE => orrery_testing::skipped!("user namespaces cannot be made here"),
        fared => assert_eq!((libc::WIFEXITED(status), fared), (true, NAMED)),
    }
}

#[test]
fn an_unchanged_process_is_fit() {
    let files = Files::without_engine();
    let before = Attributes::capture(&files);
    assert_eq!(before.restore(&files), Ok(()));
    assert_eq!(before.restore(&files), Ok(()));
}

#[test]
fn what_the_status_file_shows_is_compared_where_it_is_all_there() {
    let files = Files::without_engine();
    let view = View::new(&files);
    let shown = view.shown().unwrap();
    let shown: Vec<_> = shown.bytes().split(|byte| *byte == b'\n').collect();
    let status = view.status.whole().unwrap().split(|byte| *byte == b'\n');
    for (start, row) in SHOWN {
        assert!(ROWS.iter().any(|known| known.name == row), "{row}");
        assert!(status.clone().filter(|line| line.starts_with(start)).all(|line| shown.contains(&line)));
    }
    // Capabilities are on all machines.
    assert!(shown.len() > 5, "{shown:?}");

    let none = View { files: &files, status: Status::UNKNOWN };
    assert!(none.shown().is_none());
    // Without it, all rows are read.
    let before = Attributes { shown: None, ..Attributes::capture(&files) };
    assert_eq!(before.restore(&files), Ok(()));
}

/// Fields of `/proc/self/status`, by who sees to them.
const STATUS: &[(&str, &str)] = &[
    (
        "a row",
        "Uid Gid Groups CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp Seccomp_filters \
      Speculation_Store_Bypass SpeculationIndirectBranch x86_Thread_features x86_Thread_features_locked \
      THP_enabled Cpus_allowed Cpus_allowed_list Mems_allowed Mems_allowed_list NSsid NSpgid",
    ),
    (
        "rollback",
        "Name Umask FDSize Threads VmPeak VmSize VmLck VmPin VmHWM VmRSS RssAnon RssFile RssShmem VmData \
      VmStk VmExe VmLib VmPTE VmSwap HugetlbPages SigQ SigPnd ShdPnd SigBlk SigIgn SigCgt",
    ),
    (
        "nobody: what the process is, or was, whatever a script does",
        "State Tgid Ngid Pid PPid TracerPid NStgid NSpid \
      Kthread CoreDumping untag_mask voluntary_ctxt_switches nonvoluntary_ctxt_switches",
    ),
];

#[test]
fn every_field_of_status_is_accounted_for() {
    let known: BTreeSet<&str> = STATUS.iter().flat_map(|(_, names)| names.split_whitespace()).collect();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let fields: BTreeSet<&str> = status.lines().filter_map(|line| Some(line.split_once(':')?.0)).collect();
    let unknown: Vec<_> = fields.difference(&known).collect();
    assert!(unknown.is_empty(), "a script may change them, and nobody sees to it: {unknown:?}");
}

/// Options of prctl(2) that set something, by who sees to it.
const OPTIONS: &[(&str, &str)] = &[
    (
        "a row",
        "PR_SET_SECUREBITS PR_SET_KEEPCAPS PR_SET_NO_NEW_PRIVS PR_SET_SECCOMP PR_SET_SPECULATION_CTRL PR_SET_MDWE \
      PR_SET_MEMORY_MERGE PR_SET_THP_DISABLE PR_SET_IO_FLUSHER PR_SET_CHILD_SUBREAPER PR_SET_TSC PR_SET_PTRACER \
      PR_SET_SYSCALL_USER_DISPATCH PR_SET_SHADOW_STACK_STATUS",
    ),
    (
        "rollback",
        "PR_SET_PDEATHSIG PR_SET_DUMPABLE PR_SET_NAME PR_SET_TIMERSLACK PR_SET_VMA PR_SET_TIMERSLACK",
    ),
    ("nobody: PR_SET_MM needs CAP_SYS_RESOURCE and says where things are, not what they are", "PR_SET_MM"),
    (
        "nobody: of other processors",
        "PR_SET_UNALIGN PR_SET_FPEMU PR_SET_FPEXC PR_SET_ENDIAN PR_SET_FP_MODE \
      PR_SET_TAGGED_ADDR_CTRL",
    ),
    ("nobody: without effect (timing), or for programs to come (auxiliary vectors)", "PR_SET_TIMING"),
];

#[test]
fn every_option_of_prctl_is_accounted_for() {
    let Ok(header) = std::fs::read_to_string("/usr/include/linux/prctl.h") else {
        orrery_testing::skipped!("the kernel's headers are not installed");
        return;
    };
    let known: BTreeSet<&str> = OPTIONS.iter().flat_map(|(_, names)| names.split_whitespace()).collect();
    let names = header.lines().filter_map(|line| line.strip_prefix("#define ")?.split_whitespace().next());
    let unknown: Vec<_> = names
        .filter(|name| name.starts_with("PR_SET_"))
        // What PR_SET_MM, PR_SET_VMA and PR_SET_PTRACER take.
        .filter(|name| {
            !["PR_SET_MM_", "PR_SET_VMA_", "PR_SET_PTRACER_"].iter().any(|start| name.starts_with(start))
        })
        .filter(|name| !known.contains(name))
        .collect();
    assert!(unknown.is_empty(), "a script may change them, and nobody sees to it: {unknown:?}");
}

/// Files of `/proc/self` that can be written, by who sees to them.
const FILES: &[(&str, &str)] = &[
    ("a row", "autogroup oom_adj oom_score_adj coredump_filter"),
    ("rollback", "comm mem timerslack_ns"),
    (
        "nobody: once, and together with the user namespace, which is a row",
        "uid_map gid_map projid_map setgroups",
    ),
    (
        "nobody: counters, faults for tests, and what only a time namespace without processes takes",
        "sched clear_refs make-it-fail fail-nth timens_offsets latency patch_state",
    ),
    ("nobody: the login's user, which needs CAP_AUDIT_CONTROL", "loginuid"),
];

#[test]
fn every_file_that_can_be_written_is_accounted_for() {
    use std::os::unix::fs::PermissionsExt;
    let known: BTreeSet<&str> = FILES.iter().flat_map(|(_, names)| names.split_whitespace()).collect();
    let entries = std::fs::read_dir("/proc/self").unwrap().flatten();
    let writable = entries.filter(|entry| {
        entry.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o200 != 0)
    });
    let names: Vec<_> = writable.map(|entry| entry.file_name().into_string().unwrap()).collect();
    let unknown: Vec<_> = names.iter().filter(|name| !known.contains(name.as_str())).collect();
    assert!(unknown.is_empty(), "a script may write to them, and nobody sees to it: {unknown:?}");
}
