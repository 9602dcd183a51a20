//! `orrery doctor`, run as its users run it: whole, filtered, without privileges, and with facilities taken away.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::collections::HashMap;
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");
const NOBODY: u32 = 65534;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;

fn doctor() -> Command {
    let mut command = Command::new(ORRERY);
    command.args(["doctor", "--json"]).env_remove("ORRERY_TRACKER");
    command
}

/// Runs it and reads its report; it must have ended well and in silence.
fn report(mut command: Command) -> Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn rows(report: &Value) -> HashMap<&str, &Value> {
    report["facilities"].as_array().unwrap().iter().map(|row| (row["name"].as_str().unwrap(), row)).collect()
}

fn mechanism<'a>(report: &'a Value, system: &str, role: &str) -> &'a str {
    let mut all = report["mechanisms"].as_array().unwrap().iter();
    all.find(|row| row["system"] == system && row["role"] == role).unwrap()["mechanism"].as_str().unwrap()
}

/// Lets `action` answer the given system calls of the command, from its first instruction on.
fn filtered(mut command: Command, calls: &[libc::c_long], action: u32) -> Command {
    let (load, equal, give) = (0x20, 0x15, 0x06);
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = vec![step(load, 0, 0, 0)];
    for call in calls {
        program.push(step(equal, 0, 1, u32::try_from(*call).unwrap()));
        program.push(step(give, 0, 0, action));
    }
    program.push(step(give, 0, 0, libc::SECCOMP_RET_ALLOW));
    let install = move || {
        let program = libc::sock_fprog {
            len: u16::try_from(program.len()).unwrap_or(0),
            filter: program.as_ptr().cast_mut(),
        };
        // SAFETY: both calls concern the new process only; the kernel copies the program.
        let failed = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) != 0
        };
        if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(install) };
    command
}

fn answer(errno: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | errno.cast_unsigned()
}

#[test]
fn every_row_has_its_facts() {
    let report = report(doctor());
    let rows = rows(&report);
    assert!(rows.len() > 60, "{}", rows.len());
    for (name, row) in rows {
        for key in ["group", "purpose", "fallback"] {
            assert!(!row[key].as_str().unwrap().is_empty(), "{name} has no {key}");
        }
        assert!(!row["systems"].as_array().unwrap().is_empty(), "{name} is for nobody");
        let (state, detail) = (row["state"].as_str().unwrap(), row["detail"].as_str().unwrap());
        assert!(["available", "missing", "denied"].contains(&state), "{name} is {state}");
        assert!(state == "available" || !detail.is_empty(), "{name} gives no reason");
        assert!(row["errno"].is_null() || row["errno"].as_str().unwrap().starts_with('E'), "{name}: {row}");
    }
    for system in ["lwc-rollback", "lwc-contexts", "orbit", "hijack", "orc", "orthros"] {
        let used = report["mechanisms"].as_array().unwrap().iter().filter(|row| row["system"] == system);
        assert!(used.count() > 0, "nothing is said of {system}");
    }
    assert!(report["orrery_tracker"].is_null());
}

#[test]
fn without_userfaultfd_it_says_denied_and_goes_on() {
    let report = report(filtered(doctor(), &[libc::SYS_userfaultfd], answer(libc::EPERM)));
    let rows = rows(&report);
    for name in ["userfaultfd", "uffd_wp_async", "dontneed_page_reported", "dontneed_table_reported"] {
        assert_eq!(
            (&rows[name]["state"], &rows[name]["errno"]),
            (&"denied".into(), &"EPERM".into()),
            "{name}"
        );
    }
    assert!(mechanism(&report, "lwc-rollback", "tracker").starts_with("compare"));
    assert!(mechanism(&report, "orbit", "tracker").starts_with("compare"));
}

/// Facilities that are one system call, which nothing else in the program needs.
const ONE_CALL: &[(&str, libc::c_long)] = &[
    ("userfaultfd", libc::SYS_userfaultfd),
    ("perf_mmap_records", libc::SYS_perf_event_open),
    ("memfd_secret", libc::SYS_memfd_secret),
    ("mseal", libc::SYS_mseal),
    ("process_madvise", libc::SYS_process_madvise),
    ("pidfd_open", libc::SYS_pidfd_open),
    ("pidfd_getfd", libc::SYS_pidfd_getfd),
    ("kcmp", libc::SYS_kcmp),
    ("close_range", libc::SYS_close_range),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("ptrace", libc::SYS_ptrace),
    ("proc_timers", libc::SYS_timer_create),
    ("openat2_beneath", libc::SYS_openat2),
    ("user_namespace", libc::SYS_unshare),
    ("pid_namespace", libc::SYS_unshare),
    ("mount_namespace", libc::SYS_mount),
    ("seccomp_filter", libc::SYS_seccomp),
    ("seccomp_notify", libc::SYS_seccomp),
    ("landlock", libc::SYS_landlock_create_ruleset),
    ("io_uring", libc::SYS_io_uring_setup),
    ("sched_fifo", libc::SYS_sched_setscheduler),
    ("sched_deadline", libc::SYS_sched_setattr),
    ("membarrier", libc::SYS_membarrier),
    ("protection_keys", libc::SYS_pkey_alloc),
];

#[test]
fn each_way_of_taking_a_call_away_is_told_apart() {
    let calls: Vec<_> = ONE_CALL.iter().map(|(_, call)| *call).collect();
    let ways = [
        (answer(libc::EPERM), "denied", Some("EPERM")),
        (answer(libc::ENOSYS), "missing", Some("ENOSYS")),
        (KILL, "denied", None),
    ];
    for (action, state, errno) in ways {
        let report = report(filtered(doctor(), &calls, action));
        let rows = rows(&report);
        for (name, _) in ONE_CALL {
            let row = rows[name];
            assert_eq!((row["state"].as_str(), row["errno"].as_str()), (Some(state), errno), "{name}: {row}");
        }
        // What needs none of these calls is found as ever.
        for name in ["memfd_seals", "clone3"] {
            assert_eq!(rows[name]["state"], "available", "{name}: {}", rows[name]);
        }
    }
}

/// Returns where an ordinary user can reach the program.
fn public_copy() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("orrery");
    orrery_testing::copy_program(ORRERY, &program);
    (folder, program)
}

/// The doctor as an ordinary user without groups, or nothing where we are none to become one.
fn unprivileged(program: &PathBuf) -> Option<Command> {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can become somebody else");
        return None;
    }
    let mut command = Command::new(program);
    command.args(["doctor", "--json"]).env_remove("ORRERY_TRACKER").uid(NOBODY).gid(NOBODY);
    // SAFETY: one system call. (Rust drops the groups by itself, but only where it may; this says so if it may not.)
    let drop_groups = || match unsafe { libc::setgroups(0, std::ptr::null()) } {
        0 => Ok(()),
        _ if std::io::Error::last_os_error().raw_os_error() == Some(libc::EPERM) => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    };
    // SAFETY: the closure makes one system call, setgroups(2), which is async-signal-safe.
    unsafe { command.pre_exec(drop_groups) };
    Some(command)
}

#[test]
fn an_ordinary_user_gets_a_report() {
    let (_folder, program) = public_copy();
    let Some(command) = unprivileged(&program) else {
        return;
    };
    let report = report(command);
    let rows = rows(&report);
    let state = |name: &str| rows[name]["state"].as_str().unwrap();
    // A user-mode userfaultfd, memfds, Landlock and its own seccomp filters are everybody's, where the kernel has them.
    let as_root = self::report(doctor());
    let as_root = self::rows(&as_root);
    for name in [
        "userfaultfd",
        "uffd_wp_async",
        "pagemap_scan",
        "memfd_seals",
        "landlock",
        "seccomp_notify",
        "clone3",
    ] {
        assert_eq!(state(name), as_root[name]["state"], "{name}: {}", rows[name]);
    }
    // The root of a hierarchy that root owns is not.
    for name in ["cgroup_v1_memory", "cgroup_v2"] {
        assert_ne!(state(name), "available", "{name}: {}", rows[name]);
    }
    for (name, device) in [("kvm", "/dev/kvm"), ("tun", "/dev/net/tun")] {
        if fs::metadata(device).is_ok_and(|found| found.permissions().mode() & 0o006 == 0) {
            assert_eq!((state(name), rows[name]["errno"].as_str()), ("denied", Some("EACCES")), "{name}");
        }
    }
    if fs::read_to_string("/proc/sys/vm/mmap_min_addr").is_ok_and(|lowest| lowest.trim() != "0") {
        assert_eq!(state("page_zero"), "denied", "{}", rows["page_zero"]);
    }
}

fn limited(mut command: Command, resource: libc::__rlimit_resource_t, most: libc::rlim_t) -> Command {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    let set = move || {
        // SAFETY: it reads the limit.
        let failed = unsafe { libc::setrlimit(resource, &raw const limit) } != 0;
        if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: one system call.
    unsafe { command.pre_exec(set) };
    command
}

#[test]
fn no_more_processes_is_an_answer() {
    let (_folder, program) = public_copy();
    let Some(command) = unprivileged(&program) else {
        return;
    };
    let report = report(limited(command, libc::RLIMIT_NPROC, 0));
    let rows = rows(&report);
    assert_eq!((&rows["kcmp"]["state"], &rows["kcmp"]["errno"]), (&"denied".into(), &"EAGAIN".into()));
}

#[test]
fn no_more_descriptors_is_an_answer() {
    let report = report(limited(doctor(), libc::RLIMIT_NOFILE, 4));
    let rows = rows(&report);
    assert_eq!((&rows["kcmp"]["state"], &rows["kcmp"]["errno"]), (&"denied".into(), &"EMFILE".into()));
}

#[test]
fn a_caller_that_ignores_its_children_changes_nothing() {
    let mut command = doctor();
    // SAFETY: one system call.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            Ok(())
        });
    }
    let (ignoring, plain) = (report(command), report(doctor()));
    let (ignoring, plain) = (rows(&ignoring), rows(&plain));
    for (name, row) in plain {
        assert_eq!(row["state"], ignoring[name]["state"], "{name}: {}", ignoring[name]);
    }
}

#[test]
fn a_system_shows_what_it_uses() {
    let shown = |name: &str| {
        let mut command = doctor();
        command.args(["--system", name]);
        report(command)
    };
    for name in ["orc", "lwc-rollback", "lwc-contexts", "orbit", "hijack", "orthros"] {
        let report = shown(name);
        for (facility, row) in rows(&report) {
            assert!(
                row["systems"].as_array().unwrap().contains(&name.into()),
                "{facility} is not for {name}"
            );
        }
        assert!(report["mechanisms"].as_array().unwrap().iter().all(|row| row["system"] == name));
    }
    let (both, rollback) = (shown("lwc"), shown("lwc-rollback"));
    let both = rows(&both);
    assert!(rows(&rollback).keys().all(|name| both.contains_key(name)) && both.contains_key("memfd_secret"));
    assert!(!both.contains_key("qemu"));
}

#[test]
fn a_forced_tracker_is_shown() {
    let mut command = doctor();
    command.env("ORRERY_TRACKER", "compare");
    let report = report(command);
    assert_eq!(report["orrery_tracker"], "compare");
    assert_eq!(mechanism(&report, "lwc-rollback", "tracker"), "compare (forced by ORRERY_TRACKER)");
    let table = text(Command::new(ORRERY).args(["doctor", "--facts"]).env("ORRERY_TRACKER", "magic"));
    assert!(table.contains("ORRERY_TRACKER=magic is set."), "{table}");
    assert!(table.contains("ORRERY_TRACKER=magic names no tracker (wp_async or compare)"), "{table}");
}

fn text(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_table_fits_and_is_plain_in_a_pipe() {
    for columns in [70_usize, 80, 120, 200] {
        let mut command = Command::new(ORRERY);
        let table = text(
            command
                .args(["doctor", "--facts"])
                .env("COLUMNS", columns.to_string())
                .env_remove("ORRERY_TRACKER"),
        );
        assert!(!table.contains('\x1b'), "colours in a pipe");
        let widest = table.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= columns, "{widest} of {columns}");
        assert!(!table.contains(" \n"), "space at a line's end");
        for word in ["userfaultfd", "MEMORY", "MACHINE", "What each system will use here:", "tracker: "] {
            assert!(table.contains(word), "{word} is missing at {columns} columns");
        }
    }
}

#[test]
fn a_terminal_gets_colours_unless_it_objects() {
    let on_terminal = |no_color: Option<&str>| {
        let mut command = Command::new("script");
        command.args(["-qec", &format!("{ORRERY} doctor --facts"), "/dev/null"]).stdin(Stdio::null());
        command.env("TERM", "xterm").env_remove("NO_COLOR").env_remove("COLUMNS");
        if let Some(value) = no_color {
            command.env("NO_COLOR", value);
        }
        command.output().ok().map(|output| String::from_utf8(output.stdout).unwrap())
    };
    let (Some(coloured), Some(plain)) = (on_terminal(None), on_terminal(Some("1"))) else {
        orrery_testing::skipped!("script is not installed");
        return;
    };
    const GREEN: &str = "\x1b[38;5;10m";
    assert!(coloured.contains(GREEN), "{coloured:?}");
    assert!(plain.contains("available") && !plain.contains(GREEN), "{plain:?}");
}

fn outcome(arguments: &[&str]) -> Output {
    Command::new(ORRERY).args(arguments).output().unwrap()
}

#[test]
fn usage_errors_say_what_would_be_right() {
    for (arguments, way_out) in [
        (&["doctor", "--system", "nonsense"][..], "lwc-rollback"),
        (&["doctor", "--jason"], "--json"),
        (&["doctr"], "doctor"),
        (&[], "Usage"),
    ] {
        let output = outcome(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty());
        assert!(String::from_utf8_lossy(&output.stderr).contains(way_out), "{arguments:?}: {output:?}");
    }
    assert!(outcome(&["--help"]).status.success() && outcome(&["--version"]).status.success());
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = Command::new(ORRERY)
        .args(["doctor", "--facts"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut complaint = String::new();
    child.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
    let status = child.wait().unwrap();
    assert_eq!((status.code(), status.signal(), complaint.as_str()), (Some(0), None, ""));
}

/// Returns the doctor with a `PATH` that holds one program, a script of this text.
fn with_program(name: &str, script: &str) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join(name);
    orrery_testing::write_program(&program, script);
    let mut command = doctor();
    command.env("PATH", folder.path());
    report(command)
}

#[test]
fn programs_are_tried_and_not_trusted() {
    let name = format!("qemu-system-{}", std::env::consts::ARCH);
    let works = with_program(&name, "#!/bin/sh\necho \"QEMU emulator version 7.2.1 ($1)\"\necho more\n");
    let row = rows(&works)["qemu"];
    assert_eq!(
        (&row["state"], &row["detail"]),
        (&"available".into(), &"QEMU emulator version 7.2.1 (--version)".into())
    );
    assert!(mechanism(&works, "orthros", "kernels run in").starts_with("QEMU"));
    for broken in ["#!/bin/sh\nexit 0\n", "#!/bin/sh\nexec /bin/sleep 5\n", "#!/no/such/interpreter\n"] {
        let report = with_program(&name, broken);
        assert_eq!(rows(&report)["qemu"]["state"], "missing", "{broken}");
        assert!(mechanism(&report, "orthros", "kernels run in").starts_with("none"));
    }
}

/// The state of a task, and what is absent for it.
fn task<'a>(report: &'a Value, name: &str) -> (&'a str, String) {
    let mut all = report["tasks"].as_array().unwrap().iter();
    let task = all.find(|task| task["name"] == name).unwrap();
    (task["state"].as_str().unwrap(), task["reasons"].to_string())
}

#[test]
fn the_verdicts_come_first_and_fit_a_screen() {
    let verdicts = text(Command::new(ORRERY).arg("doctor").env_remove("ORRERY_TRACKER"));
    assert!(verdicts.lines().count() <= 24, "{verdicts}");
    for name in [
        "rollback", "warm", "contexts", "vault", "guard", "trace", "run", "manager", "orbit", "orc",
        "orthros",
    ] {
        let line = verdicts.lines().find(|line| line.starts_with(&format!("{name}:"))).unwrap();
        assert!(["ready", "limited", "needs"].iter().any(|word| line.contains(word)), "{line}");
    }
    assert!(!verdicts.contains("userfaultfd ") && verdicts.contains("--facts"), "{verdicts}");
}

#[test]
fn a_check_has_the_verdict_in_its_exit_status() {
    let check = |name: &str, prepare: &dyn Fn(&mut Command)| {
        let mut command = doctor();
        command.args(["--check", name]);
        prepare(&mut command);
        let output = command.output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["tasks"].as_array().unwrap().len(), 1);
        let (state, reasons) = task(&report, name);
        assert_eq!(output.status.code(), Some(i32::from(state == "needs")), "{name}: {reasons}");
        (state.to_owned(), reasons)
    };
    let nothing = tempfile::tempdir().unwrap();
    let (state, reasons) = check("orthros", &|command| {
        command.env("PATH", nothing.path());
    });
    assert!(state == "needs" && reasons.contains("qemu-system-x86"), "{state}: {reasons}");
    let (state, reasons) = check("orbit", &|command| {
        command.env("ORRERY_TRACKER", "compare");
    });
    assert!(state == "limited" && reasons.contains("ORRERY_TRACKER=compare"), "{state}: {reasons}");
}

#[test]
fn a_facility_that_is_taken_away_is_in_the_verdict() {
    let all = [libc::SYS_seccomp, libc::SYS_landlock_create_ruleset, libc::SYS_userfaultfd];
    let report = report(filtered(doctor(), &all, answer(libc::EPERM)));
    let (state, reasons) = task(&report, "guard");
    assert!(state == "needs" && reasons.contains("seccomp"), "{state}: {reasons}");
    let (state, reasons) = task(&report, "rollback");
    assert!(state == "limited" && reasons.contains("userfaultfd"), "{state}: {reasons}");
}

#[test]
fn pairs_need_root() {
    let (_folder, program) = public_copy();
    let Some(command) = unprivileged(&program) else {
        return;
    };
    let report = report(command);
    let (state, reasons) = task(&report, "orthros");
    assert!(state == "needs" && reasons.contains("\"root\""), "{state}: {reasons}");
}

const SHARES: &str = "shares of CPU time (--cpu)";
const PACKETS: &str = "shares of packets (--net)";

#[test]
fn what_a_manager_does_without_is_in_its_verdict() {
    let _built = orrery_testing::built("orrery-manager");
    let whole = report(doctor());
    let taken = [libc::SYS_sched_setattr, libc::SYS_setpriority, libc::SYS_bpf, libc::SYS_pidfd_getfd];
    let report = report(filtered(doctor(), &taken, answer(libc::EPERM)));
    let (as_ever, rows) = (rows(&whole), rows(&report));
    for name in ["sched_fifo_99", "nice_below_zero", "cgroup_skb", "pidfd_getfd"] {
        // A group that cannot be made needs no call to be refused.
        if as_ever[name]["state"] == "available" || name == "sched_fifo_99" {
            let found = (rows[name]["state"].as_str(), rows[name]["errno"].as_str());
            assert_eq!(found, (Some("denied"), Some("EPERM")), "{name}: {}", rows[name]);
        }
    }
    for name in ["cgroup_v2", "cgroup_v2_weight", "cgroup_v1_shares", "pressure_stall"] {
        assert_eq!(rows[name]["state"], as_ever[name]["state"], "{name}: {}", rows[name]);
    }
    let shares = mechanism(&report, "hijack", SHARES);
    assert!(shares.starts_with("group: ") || shares == "measure: nothing is guaranteed", "{shares}");
    assert!(mechanism(&report, "hijack", PACKETS).starts_with("none: "));
    let (state, reasons) = task(&report, "manager");
    assert_eq!(state, "limited", "{reasons}");
    for absent in ["CAP_SYS_NICE", "CAP_BPF"] {
        assert!(reasons.contains(absent), "{reasons}");
    }
}

#[test]
fn without_pressure_files_there_are_no_events_of_pressure() {
    let hidden = "mount -t tmpfs none /proc/pressure 2>/dev/null || exit 77; exec \"$0\" doctor --json";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", hidden, ORRERY]).env_remove("ORRERY_TRACKER");
    let Ok(output) = command.stderr(Stdio::null()).output() else {
        return orrery_testing::skipped!("unshare is not installed");
    };
    let Ok(report) = serde_json::from_slice::<Value>(&output.stdout) else {
        return orrery_testing::skipped!("no mounts can be made here, or there is no /proc/pressure");
    };
    let row = rows(&report)["pressure_stall"];
    assert_eq!((&row["state"], &row["errno"]), (&"missing".into(), &"ENOENT".into()), "{row}");
    assert_eq!(mechanism(&report, "hijack", "events of pressure"), "none");
    assert!(task(&report, "manager").1.contains("/proc/pressure"));
}

/// What a manager serves by is what the doctor says, for root and for an ordinary user.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_manager_serves_by_what_the_verdict_says() {
    if orrery_testing::executives_are_missing(ORRERY) {
        return;
    }
    let (folder, program) = public_copy();
    orrery_testing::copy_program(
        orrery_testing::built("orrery-manager"),
        folder.path().join("orrery-manager"),
    );
    let socket = |name: &str| {
        let directory = folder.path().join(name);
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
        directory.join("socket")
    };
    let serves = |mut command: Command, socket: PathBuf| {
        command.args(["run", "--cpu", "1ms/100ms", "--", "true"]).env("ORRERY_MANAGER", socket);
        let output = command.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        let by =
            errors.lines().find_map(|line| line.split_once("CPU time of process ")?.1.split_once(" by "));
        by.map_or("realtime".to_owned(), |(_, rest)| rest.split(':').next().unwrap().to_owned())
    };
    let says = |command: Command| {
        let report = report(command);
        mechanism(&report, "hijack", SHARES).split(':').next().unwrap().to_owned()
    };
    let own = says(doctor());
    assert_eq!(serves(Command::new(&program), socket("own")), own);
    let Some(command) = unprivileged(&program) else { return };
    let theirs = says(command);
    let mut command = Command::new(&program);
    command.uid(NOBODY).gid(NOBODY);
    assert_eq!(serves(command, socket("theirs")), theirs);
}
