//! `orrery run` and `orrery trace`: programs behave as they do without, and no call is missed.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/facility.rs"]
mod facility;
#[path = "support/losses.rs"]
mod losses;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use facility::ORRERY;
use losses::without_losses;
use orrery_testing::Compiler;

/// The ways to run a program with an executive.
const WAYS: [&[&str]; 3] = [&["run"], &["run", "--no-patch"], &["trace", "-c", "--output", "/dev/null"]];
/// The same, each call being told besides.
const ALL_WAYS: [&[&str]; 4] = [WAYS[0], WAYS[1], WAYS[2], &["trace", "--output", "/dev/null"]];

fn with(way: &[&str], words: &[&str]) -> Command {
    let mut command = Command::new(*ORRERY);
    command.args(way).arg("--").args(words).stdin(Stdio::null());
    command
}

fn without(words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns what others can see of a program: output, and how it ended.
fn seen(output: &Output) -> (String, String, Option<i32>, Option<i32>) {
    (
        text(&output.stdout),
        without_losses(&text(&output.stderr)),
        output.status.code(),
        output.status.signal(),
    )
}

/// Checks that a program is the same in all ways.
fn assert_same(words: &[&str]) {
    assert_same_in(&WAYS, words);
}

/// Checks that a program is the same in these ways, in a directory of its own.
fn assert_same_in(ways: &[&[&str]], words: &[&str]) {
    let run = |mut command: Command| {
        let directory = tempfile::tempdir().unwrap();
        command.current_dir(directory.path()).env("HOME", directory.path()).output().unwrap()
    };
    let expected = seen(&run(without(words)));
    for way in ways {
        assert_eq!(seen(&run(with(way, words))), expected, "{way:?} {words:?}");
    }
}

/// Returns whether a program is installed; says so if it is not.
fn installed(program: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|directory| directory.join(program).exists()));
    if !found {
        orrery_testing::skipped!("{program} is not installed");
    }
    found
}

fn compile(directory: &Path, name: &str, flags: &[&str]) -> PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sources/tracee.c");
    Compiler::c()
        .flags(["-Wno-unused-result", "-pthread"])
        .flags(flags)
        .build(&[source], directory.join(name))
}

const CASES: [&str; 18] = [
    "restart",
    "longjump",
    "alternate-small",
    "alternate-roomy",
    "masks",
    "sigsys",
    "sigsys-blocked",
    "storm",
    "children",
    "spawn",
    "half-stacks",
    "spawners",
    "thread-exec",
    "processor",
    "forks",
    "cancel",
    "compatible",
    "null",
];

#[test]
fn behaviours_are_the_same() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let tracee = compile(directory.path(), "tracee", &[]);
    for case in CASES {
        // An unbuffered printf leaves too little there for a second frame and an entry; and a million take long.
        let ways = if ["alternate-small", "storm"].contains(&case) { &WAYS[..] } else { &ALL_WAYS[..] };
        assert_same_in(ways, &[tracee.to_str().unwrap(), case]);
    }
}

#[test]
fn behaviours_of_static_programs_are_the_same() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (name, flag) in [("static", "-static"), ("static-pie", "-static-pie")] {
        let tracee = compile(directory.path(), name, &[flag]);
        for case in ["restart", "masks", "children", "spawn", "storm", "null"] {
            assert_same(&[tracee.to_str().unwrap(), case]);
        }
    }
}

#[test]
fn ordinary_programs_are_the_same() {
    if facility::is_missing() {
        return;
    }
    assert_same(&["/bin/true"]);
    assert_same(&["/bin/false"]);
    assert_same(&["ls", "-l", "/usr"]);
    assert_same(&[
        "sh",
        "-c",
        "cp -r /etc/apt copy && find copy | sort && cat copy/sources.list* | wc -l && rm -r copy",
    ]);
    assert_same(&["ls", "/nonexistent"]);
    assert_same(&["sh", "-c", "kill -TERM $$"]);
    assert_same(&["sh", "-c", "exit 77"]);
    // What is ignored stays so, and what the kernel forces on programs that the supervisor meets, too.
    for forced in ["TRAP", "SEGV"] {
        let ignored = format!(
            "trap '' {forced} USR1; grep SigIgn /proc/self/status; sh -c 'grep SigIgn /proc/self/status; kill -{forced} $$; echo here'"
        );
        assert_same(&["sh", "-c", &ignored]);
        let ignoring = format!("trap '' {forced}; exec \"$@\"");
        let status = ["grep", "SigIgn", "/proc/self/status"];
        let first = ["-c", &ignoring, "sh", *ORRERY, "run", "--"];
        let first = Command::new("sh").args(first).args(status).output().unwrap();
        let plain = Command::new("sh").args(["-c", &ignoring, "sh"]).args(status).output().unwrap();
        assert_eq!(seen(&first), seen(&plain));
    }
    assert_same(&["sh", "-c", "seq 5000 | sort -rn | head -3; ls /proc/self/fd | wc -l"]);
}

#[test]
fn bash_is_the_same() {
    if facility::is_missing() {
        return;
    }
    assert_same_in(
        &ALL_WAYS,
        &[
            "bash",
            "-c",
            r#"trap 'echo trapped' USR1; trap 'echo left' EXIT
           for i in 1 2 3; do kill -USR1 $$; done
           x=$(echo substituted | tr a-z A-Z); echo "$x" "${PIPESTATUS[*]}"
           (exit 3); echo $?
           sleep 0.05 & wait $!; echo waited $?
           nonexistent-program; echo $?
           read -t 0.05 line < <(exec sleep 99 2>&-); echo $((  $? > 128 )); kill $!
           for i in {1..300}; do echo $i > file; done; cat file
           exec 7<file; cat <&7; ulimit -n 64; ulimit -n"#,
        ],
    );
}

#[test]
fn python_is_the_same() {
    if facility::is_missing() {
        return;
    }
    if !installed("python3") {
        return;
    }
    let script = r#"
import faulthandler, multiprocessing, os, select, signal, socket, subprocess, sys, threading, time
print(subprocess.run(["echo", "x"], capture_output=True), flush=True)
print(subprocess.run("exit 3", shell=True).returncode)
try: subprocess.run(["/nonexistent"])
except FileNotFoundError as error: print(error)
counts = [0] * 8
def work(i):
    for _ in range(2000): os.getppid(); counts[i] += 1
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]; print(counts)
hits = []
signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
while len(hits) < 20: os.getppid(); time.sleep(0.002)
signal.setitimer(signal.ITIMER_REAL, 0); print("alarms")
pid = os.fork()
if pid == 0: os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, -2]))
a, b = socket.socketpair(); b.send(b"hello"); print(select.select([a], [], [], 1)[0] == [a], a.recv(9))
os.posix_spawn("/bin/echo", ["echo", "spawned"], {}); os.wait()
faulthandler.enable()
subprocess.Popen(["echo", "beside an alternate stack"], close_fds=False).wait()
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.stdout.flush()
signal.raise_signal(signal.SIGINT)
"#;
    assert_same(&["/usr/bin/python3", "-c", script]);
}

#[test]
fn other_programs_are_the_same() {
    if facility::is_missing() {
        return;
    }
    if installed("git") {
        let script = "git init -q r && cd r && for i in $(seq 20); do echo $i > f$i; done && git add . &&
            git -c user.name=a -c user.email=a@b -c commit.gpgsign=false commit -qm x && git log --format=%s && git gc -q && git fsck";
        assert_same(&["sh", "-ec", script]);
    }
    if installed("sqlite3") {
        let statements = "create table t(a); insert into t values(1),(2); select sum(a) from t;";
        assert_same(&["sqlite3", "data", statements]);
    }
    if installed("busybox") {
        assert_same(&[
            "busybox",
            "sh",
            "-c",
            "for i in $(seq 100); do echo $i; done | busybox sort -n | busybox tail -2; (exit 4)",
        ]);
    }
    if installed("gcc") {
        let script = "echo 'int main(void) { return 42; }' > x.c && gcc -O2 x.c -o x && ./x";
        assert_same(&["sh", "-c", script]);
    }
}

fn trace(words: &[&str]) -> serde_json::Value {
    let directory = tempfile::tempdir().unwrap();
    let report = directory.path().join("report");
    let way = ["trace", "-c", "--json", "--output", report.to_str().unwrap()];
    with(&way, words).output().unwrap();
    serde_json::from_slice(&fs::read(report).unwrap()).unwrap()
}

fn counts(report: &serde_json::Value) -> BTreeMap<String, u64> {
    let calls = report["calls"].as_array().unwrap().iter();
    calls.map(|call| (call["call"].as_str().unwrap().to_owned(), call["calls"].as_u64().unwrap())).collect()
}

/// Returns what strace sees: one line for each call, after the number of the thread.
fn oracle(words: &[&str]) -> BTreeMap<String, u64> {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-o"]).arg(&log).args(words).stdin(Stdio::null()).output().unwrap();
    let mut counts = BTreeMap::new();
    for line in text(&fs::read(log).unwrap()).lines() {
        let call = line.split_once(' ').unwrap().1.trim_start();
        let Some((name, _)) = call.split_once('(') else { continue };
        if !name.starts_with(['<', '-', '+']) {
            *counts.entry(name.to_owned()).or_default() += 1;
        }
    }
    // The first program is executed by the tracer.
    *counts.get_mut("execve").unwrap() -= 1;
    counts.retain(|_, count| *count > 0);
    counts
}

/// Programs that call the same however fast they run. None asks whether SIGSYS is blocked: it never is (glibc's
/// `posix_spawn` asks, and then leaves two calls out).
#[test]
fn no_call_is_missed() {
    if facility::is_missing() {
        return;
    }
    if !installed("strace") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let tracee = compile(directory.path(), "tracee", &[]);
    let fixed = compile(directory.path(), "static", &["-static"]);
    let python = "import subprocess, os; subprocess.run(['/bin/true']); subprocess.run('exit 3', shell=True)
for i in range(500): os.getppid(); os.close(os.open('/dev/null', 0))";
    let programs: [&[&str]; 9] = [
        &["/bin/true"],
        &["ls", "-l", "/usr"],
        &["bash", "-c", "/bin/true; x=$(echo hi); (exit 2); for i in {1..200}; do echo $i >/dev/null; done"],
        &["sh", "-c", "ls / | sleep 0.3; cat /etc/passwd | (sleep 0.3; wc -l)"],
        &[tracee.to_str().unwrap(), "children"],
        &[tracee.to_str().unwrap(), "alternate-roomy"],
        &[tracee.to_str().unwrap(), "thread-exec"],
        &[fixed.to_str().unwrap(), "masks"],
        &["/usr/bin/python3", "-S", "-c", python],
    ];
    for words in programs {
        if !Path::new(words[0]).is_absolute() && !installed(words[0]) {
            continue;
        }
        let report = trace(words);
        assert_eq!(counts(&report), oracle(words), "{words:?}");
        assert_eq!(report["unfollowed"], serde_json::json!([]), "{words:?}");
        assert_eq!(report["unarmed_threads"], 0, "{words:?}");
    }
}

/// Nobody is there any more who could be told of as not followed.
#[test]
fn programs_killed_while_they_start_are_not_missed() {
    if facility::is_missing() {
        return;
    }
    // After a little longer each time.
    let script =
        "i=0; while [ $i -lt 200 ]; do sleep 9 & j=0; while [ $j -lt $((i * 20)) ]; do j=$((j + 1)); done
        kill -9 $!; i=$((i + 1)); done; wait";
    let report = trace(&["sh", "-c", script]);
    assert_eq!(report["unfollowed"], serde_json::json!([]));
}

#[test]
fn hot_sites_are_rewritten_and_still_counted() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let tracee = compile(directory.path(), "tracee", &[]);
    let report = trace(&[tracee.to_str().unwrap(), "storm"]);
    let call = report["calls"].as_array().unwrap().iter().find(|call| call["call"] == "getppid").unwrap();
    let patched = call["patched"].as_u64().unwrap();
    // Those of whoever asked the supervisor, at least: others go on by dispatch until it has answered.
    assert!(patched > 5_000, "{call}");
    assert!(counts(&report)["getppid"] >= 5 * 8 * 5_000, "{call}");
    let timed: u64 =
        call["histogram"].as_array().unwrap().iter().map(|bucket| bucket["calls"].as_u64().unwrap()).sum();
    assert_eq!(timed, call["calls"].as_u64().unwrap());
}

#[test]
fn the_executive_defends_itself() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let tracee = compile(directory.path(), "tracee", &[]);
    let output = with(&["run"], &[tracee.to_str().unwrap(), "refused"]).output().unwrap();
    let said = text(&output.stdout);
    let segments = said.strip_prefix("dispatch -1 Invalid argument\n").unwrap();
    let refused = "unmap -1 Invalid argument\nmap over 0 Invalid argument\n";
    let count = segments.len() / refused.len();
    // The board's, and the executive's own where that is shared.
    assert!(count >= 1 && segments == refused.repeat(count), "{said}");
}

#[test]
fn what_cannot_be_a_tracee_is_refused_with_the_reason() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8], mode| {
        let path = directory.path().join(name);
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    };
    let mut foreign = b"\x7fELF\x01\x01".to_vec();
    foreign.resize(64, 0);
    foreign[18] = 3;
    let cases = [
        (PathBuf::from("no-such-program"), 127, "no such program in PATH"),
        (PathBuf::from("/"), 126, "Is a directory"),
        (file("plain", b"text", 0o644), 126, "Permission denied"),
        (file("text", b"text", 0o755), 126, "neither an ELF program nor a script"),
        (file("foreign", &foreign, 0o755), 126, "it is a program for i386"),
        // The kernel finds out when everything else is ready.
        (file("broken", &fs::read("/bin/true").unwrap()[..100], 0o755), 126, "(os error"),
    ];
    for (program, status, reason) in cases {
        let output = with(&["run"], &[program.to_str().unwrap()]).output().unwrap();
        assert!(text(&output.stderr).contains(reason), "{program:?}: {}", text(&output.stderr));
        assert_eq!(output.status.code(), Some(status), "{program:?}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_tracee_or_traced_process_cannot_start_another_executive() {
    if facility::is_missing() {
        return;
    }
    let output = with(&["run"], &[*ORRERY, "run", "--", "true"]).output().unwrap();
    assert!(text(&output.stderr).contains("syscall user dispatch"), "{}", text(&output.stderr));
    if installed("strace") {
        let mut strace = Command::new("strace");
        strace.args(["-qq", "-f", "-o", "/dev/null", *ORRERY, "run", "--", "true"]);
        let output = strace.output().unwrap();
        assert!(text(&output.stderr).contains("traces this one"), "{}", text(&output.stderr));
    }
}

/// Root can put executives under programs of all users; a user can under programs that gain nothing.
#[test]
fn privileges_are_not_gained() {
    if facility::is_missing() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can make a set-user-ID program");
        return;
    }
    const NOBODY: u32 = 65534;
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let copy = |from: &OsStr, name: &str, mode| {
        let path = directory.path().join(name);
        orrery_testing::copy_program(from, &path);
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    };
    let orrery = copy((*ORRERY).as_ref(), "orrery", 0o755);
    let privileged = copy("/usr/bin/id".as_ref(), "privileged", 0o4755);
    let nobody = |way: &[&str], words: &[&str]| {
        let mut command = Command::new(&orrery);
        command.args(way).arg("--").args(words).uid(NOBODY).gid(NOBODY).current_dir("/").output().unwrap()
    };
    let plain = nobody(&["run"], &["id", "-u"]);
    assert_eq!(seen(&plain), ("65534\n".to_owned(), String::new(), Some(0), None));
    let refused = nobody(&["run"], &[privileged.to_str().unwrap(), "-u"]);
    assert!(text(&refused.stderr).contains("it is set-user-ID"), "{}", text(&refused.stderr));
    // Started by a tracee, it gets its privileges, no executive, and is told of.
    let script = format!("{} -u; id -u", privileged.display());
    let left_alone = nobody(&["trace", "-c"], &["sh", "-c", &script]);
    assert_eq!(text(&left_alone.stdout), "0\n65534\n", "{}", text(&left_alone.stderr));
    assert!(text(&left_alone.stderr).contains("not followed: 1 "), "{}", text(&left_alone.stderr));
    // A tracee that root gives up its user is followed.
    if installed("setpriv") {
        let report = trace(&["setpriv", "--reuid", "65534", "--clear-groups", "id", "-u"]);
        assert_eq!((report["programs"].as_u64(), &report["unfollowed"]), (Some(2), &serde_json::json!([])));
    }
}

/// Goroutines have small stacks; the collector finds what was overwritten there.
#[test]
fn go_list_is_the_same() {
    if facility::is_missing() || !installed("go") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let policy = |name: &str, text: &str| {
        let file = directory.path().join(name);
        fs::write(&file, text).unwrap();
        file.into_os_string().into_string().unwrap()
    };
    let decides = policy("decides.toml", "[[rule]]\ncall = '%file'\npath = '/nowhere/**'\ndeny = 'EACCES'\n");
    let logs = policy("logs.toml", "[[rule]]\ncall = '*'\nlog = true\n");
    let ways = [
        &["trace", "-o", "/dev/null"][..],
        &["run", "--policy", &decides],
        &["run", "--policy", &logs, "--log", "/dev/null"],
    ];
    assert_same_in(&ways, &["go", "list", "-deps", "std"]);
}
