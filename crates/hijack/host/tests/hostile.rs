//! Programs that an executive has to bear: with filters of their own, that change their code, that are debugged, of other
//! architectures. They do what they do without; nothing gains by it.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/facility.rs"]
mod facility;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use facility::ORRERY;
use orrery_testing::Compiler;

const WAYS: [&[&str]; 3] = [&["run"], &["run", "--no-patch"], &["trace", "-c", "-o", "/dev/null"]];
/// The same, each call being told besides.
const ALL_WAYS: [&[&str]; 4] = [WAYS[0], WAYS[1], WAYS[2], &["trace", "-o", "/dev/null"]];

/// Returns the program of `hostile.c`, in a directory of its own.
fn hostile(directory: &Path) -> PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sources/hostile.c");
    let flags =
        ["-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-pthread", "-Wno-null-dereference"];
    Compiler::c().flags(flags).build(&[source], directory.join("hostile"))
}

fn with(way: &[&str], directory: &Path, words: &[&str]) -> Output {
    let words = if way.is_empty() { words.to_vec() } else { [&[*ORRERY], way, &["--"], words].concat() };
    // Whoever waits for a program is told whether that left a core dump, and `timeout` says so: here none is to.
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -S -c 0; exec timeout --signal=KILL 250 \"$@\"", "sh"]).args(&words);
    command.current_dir(directory).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn seen(output: &Output) -> (String, String, Option<i32>, Option<i32>) {
    (text(&output.stdout), text(&output.stderr), output.status.code(), output.status.signal())
}

/// Becomes a user without rights, which only the superuser does.
const NOBODY: [&str; 5] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"];

/// Checks that cases of the program are the same natively and in these ways, for whoever runs the tests and for an ordinary user.
fn assert_same(ways: &[&[&str]], cases: &[&str]) {
    assert_same_in(ways, cases, seen);
}

/// Returns the same, as far as `look` shows.
fn assert_same_in<T: PartialEq + std::fmt::Debug>(
    ways: &[&[&str]],
    cases: &[&str],
    look: impl Fn(&Output) -> T,
) {
    if facility::is_missing() {
        return;
    }
    let directory = orrery_testing::PublicDirectory::new();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let program = hostile(directory.path());
    // Others may not enter the checkout.
    let orrery = directory.copy(*ORRERY);
    let mut users: Vec<&[&str]> = vec![&[]];
    if rustix::process::geteuid().is_root() {
        users.push(&NOBODY);
    } else {
        orrery_testing::skipped!("an ordinary user beside another: only the superuser becomes one");
    }
    for user in users {
        for case in cases {
            let words = [program.to_str().unwrap(), case];
            let run = |way: &[&str]| {
                let executive = if way.is_empty() { None } else { Some(orrery.to_str().unwrap()) };
                let end = if way.is_empty() { None } else { Some("--") };
                let words =
                    user.iter().copied().chain(executive).chain(way.iter().copied()).chain(end).chain(words);
                look(&with(&[], directory.path(), &words.collect::<Vec<_>>()))
            };
            let expected = run(&[]);
            for way in ways {
                assert_eq!(run(way), expected, "{user:?}, {case}, {way:?}");
            }
        }
    }
}

#[test]
fn filters_of_the_programs_own_hold() {
    assert_same(&WAYS, &["denied", "denied-to-all", "trap", "trap-unhandled", "killed"]);
}

/// A child must make calls to become a tracee. Where a filter would end it for that, it is not followed, which is counted; and under
/// a policy that denies something, there is no child.
#[test]
fn filters_that_kill_are_not_provoked() {
    assert_same_in(&WAYS, &["killed-by-all"], |output| {
        (text(&output.stdout), output.status.code(), output.status.signal())
    });
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    let words = [program.to_str().unwrap(), "killed-by-all"];
    let report = directory.path().join("report");
    let way = ["trace", "-c", "--json", "-o", report.to_str().unwrap()];
    assert_eq!(with(&way, directory.path(), &words).status.code(), Some(6));
    let report: serde_json::Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    // Three children, a thread, those of vfork and system; the last program.
    assert_eq!(report["unarmed_threads"], 6, "{report}");
    assert_eq!(report["unfollowed"][0]["programs"], 1, "{report}");
    let policy = directory.path().join("policy");
    fs::write(&policy, "[[rule]]\ncall = '%file'\npath = '/nowhere'\ndeny = 'EACCES'\n").unwrap();
    let output = with(&["run", "--policy", policy.to_str().unwrap()], directory.path(), &words);
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(!out.contains("executed") && !out.contains("at last") && out.contains("thread 0"), "{out}");
    assert!(error.contains("a filter that it has installed") && error.contains("; refused"), "{error}");
}

/// Timing a call would read the time stamp counter, which such a program may not.
#[test]
fn strict_filters_hold() {
    assert_same(&WAYS, &["strict", "strict-and-forbidden"]);
}

/// Nor may one that has forbidden it to itself, its children, and what it executes.
#[test]
fn programs_may_forbid_the_time_stamp_counter() {
    assert_same(&ALL_WAYS, &["no-counter"]);
}

/// Whoever waits for a tracee is told that it left a core dump. Who waits for `orrery trace` is told of the signal alone: it ends as the
/// program ended, but leaves no second dump.
#[test]
fn whoever_waits_is_told_of_core_dumps() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    let status = |way: &[&str]| {
        let script = "ulimit -c unlimited; exec \"$@\"";
        let words = if way.is_empty() { vec![] } else { [&[*ORRERY], way, &["--"]].concat() };
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]).args(words).arg(&program).arg("killed");
        command.current_dir(directory.path()).output().unwrap().status
    };
    let expected = status(&[]);
    assert_eq!(expected.signal(), Some(libc::SIGSYS));
    for way in WAYS {
        let status = status(way);
        assert_eq!(status.signal(), expected.signal(), "{way:?}");
        let told = way[0] == "run" && expected.core_dumped();
        assert_eq!(status.core_dumped(), told, "{way:?}");
    }
}

#[test]
fn programs_may_change_their_code() {
    assert_same(&WAYS, &["rewrites", "replaces"]);
}

#[test]
fn null_faults_however_it_is_used() {
    assert_same(&WAYS, &["null-called"]);
}

/// What the supervisor says about code is for all tracees, and no tracee can change it: a child that has given up its privileges would
/// choose the code of its parent.
#[test]
fn verdicts_cannot_be_changed_by_those_without_privileges() {
    assert_same(&WAYS, &["verdicts"]);
}

/// Nor can it read what others log, or change what they count and ask for.
#[test]
fn memory_is_shared_only_by_those_who_could_trace_each_other() {
    // What is said about calls that were lost is of the nonsense that a child has written over its own.
    let look = |output: &Output| (text(&output.stdout), output.status.code());
    assert_same_in(&ALL_WAYS, &["journals"], look);
}

/// Memory that only counting and logging need is mapped only then: an ordinary user may lock 8 MiB.
#[test]
fn an_ordinary_users_program_locks_its_memory() {
    assert_same(&WAYS[..2], &["locks"]);
}

/// What a thread does before and after it becomes somebody else is in one trace, in its order; so are its counts.
#[test]
fn traces_and_counts_are_of_all_users() {
    if facility::is_missing() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only the superuser becomes somebody else");
        return;
    }
    let directory = orrery_testing::PublicDirectory::new();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let program = hostile(directory.path());
    let program = program.to_str().unwrap();
    let way = ["trace", "-e", "getpriority,setresuid,setresgid", "-o", "trace"];
    let output = with(&way, directory.path(), &[program, "becomes"]);
    assert_eq!((text(&output.stdout), output.status.code()), ("became\n".to_owned(), Some(0)), "{output:?}");
    let trace = fs::read_to_string(directory.path().join("trace")).unwrap();
    let expected: Vec<usize> = (0..300).collect();
    for thread in 0..3 {
        let of = format!("getpriority({},", 1000 + thread);
        let number = |line: &str| line.split_once(&of)?.1.trim_start().split(')').next()?.parse().ok();
        let seen: Vec<usize> = trace.lines().filter_map(number).collect();
        assert_eq!(seen, expected, "child {thread}: {trace}");
    }
    let way = ["trace", "-c", "--json", "-o", "report"];
    assert!(with(&way, directory.path(), &[program, "becomes"]).status.success());
    let report = fs::read(directory.path().join("report")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    let calls = report["calls"].as_array().unwrap().iter();
    let calls: u64 =
        calls.filter(|call| call["call"] == "getpriority").map(|call| call["calls"].as_u64().unwrap()).sum();
    assert_eq!(calls, 900);
}

/// There is no call that could be counted: nobody is between the program and the vDSO.
#[test]
fn time_is_read_without_a_call() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    let way = ["trace", "-c", "--json", "-o", "report"];
    let output = with(&way, directory.path(), &[program.to_str().unwrap(), "clock"]);
    assert_eq!(text(&output.stdout), "read\n");
    let report = fs::read(directory.path().join("report")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    let calls = report["calls"].as_array().unwrap().iter();
    let read: u64 = calls
        .filter(|call| call["call"] == "clock_gettime")
        .map(|call| call["calls"].as_u64().unwrap())
        .sum();
    assert!(read < 1000, "{read} of 100000 were calls");
}

/// A program for another architecture that a tracee executes runs as it does without, and is told of.
#[test]
fn a_tracee_executes_a_program_of_another_architecture() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = ".globl _start\n_start: movl $4, %eax\nmovl $1, %ebx\nmovl $text, %ecx\nmovl $6, %edx\nint $0x80\n\
        movl $1, %eax\nmovl $7, %ebx\nint $0x80\ntext: .ascii \"small\\n\"\n";
    fs::write(directory.path().join("small.s"), source).unwrap();
    let script = "as --32 small.s -o small.o && ld -m elf_i386 small.o -o small";
    assert!(with(&[], directory.path(), &["sh", "-c", script]).status.success());
    let run = ["sh", "-c", "./small; echo $?"];
    let expected = seen(&with(&[], directory.path(), &run));
    if !expected.0.starts_with("small") {
        orrery_testing::skipped!("this kernel runs no programs for i386: {expected:?}");
        return;
    }
    let way = ["trace", "-c", "--json", "-o", "report"];
    assert_eq!(seen(&with(&way, directory.path(), &run)), expected);
    let report = fs::read_to_string(directory.path().join("report")).unwrap();
    assert!(report.contains("it is no x86-64 program"), "{report}");
}

/// Returns whether the debugger is installed; says so if not.
fn no_debugger() -> bool {
    facility::is_missing() || !orrery_testing::is_there("gdb")
}

/// A debugger is a tracee as others are; what it debugs has no executive, and is told of.
#[test]
fn a_tracee_may_debug() {
    if no_debugger() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    let words =
        ["gdb", "-nx", "-batch", "-ex", "run", "-ex", "bt", "--args", program.to_str().unwrap(), "crash"];
    for way in [&["run"][..], &["trace", "-c", "-o", "report"]] {
        let output = with(way, directory.path(), &words);
        let said = text(&output.stdout);
        for function in ["innermost", "middle", "main"] {
            assert!(said.contains(function), "{way:?}: {output:?}");
        }
    }
    let report = fs::read_to_string(directory.path().join("report")).unwrap();
    assert!(report.contains("traced"), "{report}");
}

/// The debugger finds the program's frames in a tracee that runs, and stops it at a breakpoint.
#[test]
fn tracees_can_be_debugged() {
    if no_debugger() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    let mut tracee = Command::new(*ORRERY);
    tracee.args(["run", "--"]).arg(&program).arg("spins").stdout(Stdio::piped());
    let mut tracee = tracee.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(tracee.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "spins\n");
    let mut debugger = Command::new("timeout");
    debugger.args(["--signal=KILL", "250", "gdb", "-nx", "-batch", "-p", &tracee.id().to_string()]);
    for command in
        ["handle SIGSYS nostop noprint pass", "break turn", "continue", "bt", "print turns > 0", "kill"]
    {
        debugger.args(["-ex", command]);
    }
    let output = debugger.stdin(Stdio::null()).output().unwrap();
    let _gone = tracee.kill();
    tracee.wait().unwrap();
    let said = text(&output.stdout);
    for part in ["Breakpoint 1, turn", "in spin", "in main", "= 1"] {
        assert!(said.contains(part), "{part}: {output:?}");
    }
}

/// A thread that sleeps in a call from a rewritten place is in a trampoline: the program's frames are found from there, in the tracee
/// itself and in what is left of it.
#[test]
fn frames_are_found_from_within_a_call() {
    if no_debugger() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    let tracee = Standing::start(directory.path(), &program, &["run"], "blocks");
    let debugged = |words: &[&str]| {
        let words = [&["gdb", "-nx", "-batch", "-ex", "bt"], words].concat();
        let said = text(&with(&[], directory.path(), &words).stdout);
        for part in ["in blocked", "in calls_blocked", "in main"] {
            assert!(said.contains(part), "{words:?}: {said}");
        }
    };
    debugged(&["-p", &tracee.process.id().to_string()]);
    if let Some(core) = tracee.dump(directory.path()) {
        debugged(&[program.to_str().unwrap(), core.to_str().unwrap()]);
    }
}

/// A tracee that stands in its calls.
struct Standing {
    process: std::process::Child,
    _output: BufReader<std::process::ChildStdout>,
}

impl Standing {
    /// Starts a case, and waits until its first thread sleeps.
    fn start(directory: &Path, program: &Path, way: &[&str], case: &str) -> Self {
        let script = "ulimit -c unlimited; exec \"$@\"";
        let mut tracee = Command::new("sh");
        tracee.args(["-c", script, "sh", *ORRERY]).args(way).arg("--").arg(program).arg(case);
        let mut process = tracee.current_dir(directory).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(line, "blocks\n");
        let standing = Self { process, _output: output };
        let thread = format!("/proc/{0}/task/{0}/stat", standing.process.id());
        while !fs::read_to_string(&thread).unwrap().contains(") S ") {
            std::thread::yield_now();
        }
        standing
    }

    /// Ends it with a core dump, if one is written where it is looked for.
    fn dump(mut self, directory: &Path) -> Option<PathBuf> {
        let process = libc::pid_t::try_from(self.process.id()).unwrap();
        // SAFETY: a signal to a child that was not waited for yet.
        unsafe { libc::kill(process, libc::SIGABRT) };
        assert_eq!(self.process.wait().unwrap().signal(), Some(libc::SIGABRT));
        let named = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("core");
        let core = fs::read_dir(directory).unwrap().flatten().find(named);
        if core.is_none() {
            orrery_testing::skipped!("no core dump was written where it is looked for");
        }
        core.map(|core| core.path())
    }
}

/// Told what frames of the executive look like, the debugger finds those of the program from within calls of all kinds: from the first
/// one at a place, which was dispatched; from rewritten places, whatever their function has on the stack; in all threads.
#[test]
fn the_debugger_is_told_of_the_executive() {
    if no_debugger() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    let name = program.to_str().unwrap();
    let debugged = |of: &[&str], case: &str| {
        let words =
            [&[*ORRERY, "debug"], of, &["--", "-nx", "-batch", "-ex", "thread apply all bt"]].concat();
        let output = with(&[], directory.path(), &words);
        let said = text(&output.stdout);
        let parts: &[&str] = match case {
            "blocks-first" => &["in blocked_first", "in calls_blocked_first", "main ("],
            _ => &[
                "in waits",
                "in waiting",
                "in sleeps",
                "in sleeping",
                "in blocked",
                "in calls_blocked",
                "main (",
            ],
        };
        for part in parts {
            assert!(said.contains(part), "{part}, {words:?}: {output:?}");
        }
    };
    let cases: [(&[&str], &str); 4] = [
        (&["run"], "blocks-first"),
        (&["run"], "blocks-threads"),
        (&["run", "--no-patch"], "blocks-threads"),
        (&["run", "--sleep", "precise"], "blocks-threads"),
    ];
    for (way, case) in cases {
        let tracee = Standing::start(directory.path(), &program, way, case);
        debugged(&["-p", &tracee.process.id().to_string()], case);
        if let Some(core) = tracee.dump(directory.path()) {
            debugged(&[name, core.to_str().unwrap()], case);
            fs::remove_file(core).unwrap();
        }
    }
}

/// Where there is no executive, that is said, and no debugger started.
#[test]
fn the_debugger_is_told_of_no_executive_where_there_is_none() {
    let directory = tempfile::tempdir().unwrap();
    let own = std::process::id().to_string();
    for (words, reason) in [
        (&["-p", &own][..], "has no executive"),
        (&["-p", "2147483647"], "cannot read process 2147483647: No such file"),
        (&["/bin/true", "/bin/true"], "no core dump"),
        (&["/bin/true", "/nonexistent"], "cannot read /nonexistent: No such file"),
    ] {
        let output = with(&[], directory.path(), &[&[*ORRERY, "debug"], words].concat());
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output.stderr).contains(reason), "{reason}: {output:?}");
    }
}

/// What is left of a tracee that crashed says where.
#[test]
fn core_dumps_of_tracees_can_be_read() {
    if no_debugger() {
        return;
    }
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if pattern.trim() != "core" {
        orrery_testing::skipped!("core dumps do not go to where they are looked for: {pattern}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = hostile(directory.path());
    let program = program.to_str().unwrap();
    let orrery = *ORRERY;
    let script = format!("ulimit -c unlimited; exec '{orrery}' run -- '{program}' crash");
    let output = with(&[], directory.path(), &["sh", "-c", &script]);
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
    let named = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("core");
    let core = fs::read_dir(directory.path()).unwrap().flatten().find(named);
    let Some(core) = core else {
        orrery_testing::skipped!("no core dump was written: {output:?}");
        return;
    };
    let core = core.path();
    let words = ["gdb", "-nx", "-batch", "-ex", "bt", program, core.to_str().unwrap()];
    let said = text(&with(&[], directory.path(), &words).stdout);
    for function in ["innermost", "middle", "main"] {
        assert!(said.contains(function), "{said}");
    }
}
