//! `orrery run` with services: calls that the executive answers itself are answered as the kernel would.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/facility.rs"]
mod facility;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use facility::ORRERY;
use orrery_testing::Compiler;

const PYTHON: &str = "/usr/bin/python3";

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Compiles a program of `sources/`.
fn compile(directory: &Path, source: &str) -> PathBuf {
    let program = directory.join(Path::new(source).file_stem().unwrap());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sources").join(source);
    Compiler::c().flags(["-Wno-unused-result", "-pthread"]).build(&[source], program)
}

fn run(options: &[&str], words: &[&str]) -> Output {
    let mut command = Command::new(*ORRERY);
    command.arg("run").args(options).arg("--").args(words).stdin(Stdio::null()).output().unwrap()
}

/// Returns what others can see of a program.
fn seen(output: &Output) -> (String, String, Option<i32>) {
    (text(&output.stdout), text(&output.stderr), output.status.code())
}

/// Checks that a program is the same natively and with each of these options.
fn assert_same(ways: &[&[&str]], words: &[&str]) {
    let native = Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).output().unwrap();
    for way in ways {
        assert_eq!(seen(&run(way, words)), seen(&native), "{way:?} {words:?}");
    }
}

const SLEEPING: [&[&str]; 4] = [
    &["--sleep", "precise"],
    &["--sleep", "precise", "--no-patch"],
    &["--sleep", "realtime"],
    &["--sleep", "realtime", "--no-patch"],
];
const REMEMBERING: [&[&str]; 3] = [
    &["--remember", "process,user"],
    &["--remember", "process,user", "--no-patch"],
    &["--remember", "process,user", "--sleep", "precise"],
];

#[test]
fn sleeps_keep_the_kernels_promises() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let sleeper = compile(directory.path(), "sleeper.c");
    assert_same(&SLEEPING, &[sleeper.to_str().unwrap()]);
}

#[test]
fn without_privilege_sleepers_have_what_everybody_may() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = directory.path().join("orrery");
    orrery_testing::copy_program(*ORRERY, &program);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let script = "
import os, time
for _ in range(100): time.sleep(0.001)
print(os.sched_getscheduler(0), os.nice(0), os.getuid())";
    let as_nobody = |words: &[&str]| {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .args(words)
            .args([PYTHON, "-c", script]);
        seen(&command.current_dir("/").stdin(Stdio::null()).output().unwrap())
    };
    let native = as_nobody(&[]);
    if native.1.contains("setresuid failed") {
        orrery_testing::skipped!("{}", native.1.trim_end());
        return;
    }
    assert_eq!(as_nobody(&[program.to_str().unwrap(), "run", "--sleep", "realtime", "--"]), native);
}

const POLLING: [&[&str]; 3] = [
    &["--poll-receive", "10ms"],
    &["--poll-receive", "100us", "--no-patch"],
    &["--poll-receive", "10ms", "--sleep", "precise", "--remember", "process"],
];

#[test]
fn receive_calls_that_look_keep_the_kernels_promises() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let receiver = compile(directory.path(), "receiver.c");
    assert_same(&POLLING, &[receiver.to_str().unwrap(), "promises"]);
}

/// Returns in how many of 1,000 receive calls a thread of real-time priority was blocked; none without the right to that.
fn blocked(options: &[&str], receiver: &Path) -> Option<u32> {
    let output = run(options, &[receiver.to_str().unwrap(), "blocked"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).trim().parse().ok()
}

#[test]
fn threads_of_real_time_priority_look_before_they_block() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let receiver = compile(directory.path(), "receiver.c");
    let Some(natively) = blocked(&[], &receiver) else {
        orrery_testing::skipped!("threads may not have real-time priority");
        return;
    };
    assert!(natively > 900, "{natively}");
    for way in POLLING.into_iter().filter(|way| way.contains(&"10ms")) {
        let looking = blocked(way, &receiver).unwrap();
        assert!(looking < 300, "{way:?}: {looking}");
    }
}

/// Two threads on one CPU have many datagrams each: their policy says who receives when.
#[test]
fn threads_that_look_take_turns_by_their_policy() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let receiver = compile(directory.path(), "receiver.c");
    let order = |options: &[&str], policy: &str| {
        let output = run(options, &[receiver.to_str().unwrap(), policy]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let order = text(&output.stdout);
        // Which of them begins is not said.
        let swap = |letter| match letter {
            'a' => 'b',
            'b' => 'a',
            other => other,
        };
        if order.starts_with('b') { order.chars().map(swap).collect() } else { order }
    };
    let all_of_one = format!("{}{}\n", "a".repeat(50), "b".repeat(50));
    let native = order(&[], "rr");
    if native.starts_with("no priority") {
        orrery_testing::skipped!("threads may not have real-time priority");
        return;
    }
    assert_eq!(native, all_of_one);
    for patching in [&[][..], &["--no-patch"]] {
        let options = [&["--poll-receive", "1ms"], patching].concat();
        assert_eq!(order(&options, "fifo"), all_of_one, "{options:?}");
        assert_eq!(order(&options, "rr"), format!("{}\n", "ab".repeat(50)), "{options:?}");
    }
}

#[test]
fn who_a_process_is_is_never_told_wrongly() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let identity = compile(directory.path(), "identity.c");
    for way in REMEMBERING {
        let output = run(way, &[identity.to_str().unwrap()]);
        assert_eq!(seen(&output), (String::new(), String::new(), Some(0)), "{way:?}");
    }
}

/// Returns how many `getpid` the kernel sees of a program that makes 1000.
fn performed(options: &[&str]) -> Option<usize> {
    let script = "import os\nos.getpid()\ninput()\nfor _ in range(1000): os.getpid()";
    let mut program = Command::new(*ORRERY);
    program.arg("run").args(options).args(["--", PYTHON, "-c", script]);
    let mut program = program.stdin(Stdio::piped()).spawn().unwrap();
    let pid = program.id().to_string();
    // Not before the executive is there: the supervisor has to trace the process for that.
    while !fs::read_to_string(format!("/proc/{pid}/syscall")).is_ok_and(|call| call.starts_with("0 0x0 ")) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut strace = Command::new("strace");
    strace.args(["-e", "trace=getpid", "-p", &pid]).stderr(Stdio::piped()).stdin(Stdio::null());
    let Ok(mut strace) = strace.spawn() else {
        program.kill().unwrap();
        program.wait().unwrap();
        return None;
    };
    let mut lines = BufReader::new(strace.stderr.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("attached"));
    program.stdin.take().unwrap().write_all(b"\n").unwrap();
    let calls = lines.filter(|line| line.as_ref().is_ok_and(|line| line.starts_with("getpid"))).count();
    assert!(program.wait().unwrap().success() && strace.wait().unwrap().success());
    Some(calls)
}

#[test]
fn what_is_remembered_is_not_asked_again() {
    if facility::is_missing() || !orrery_testing::is_there("strace") {
        return;
    }
    // One for each dispatched call: `user` reads the program's memory in the process's own name.
    let without = performed(&[]).unwrap();
    assert!(without >= 1000, "{without}");
    for way in REMEMBERING {
        let with = performed(way).unwrap();
        assert!(with < 100, "{way:?}: {with}");
    }
}

#[test]
fn ordinary_programs_are_the_same() {
    if facility::is_missing() {
        return;
    }
    let all: &[&[&str]] = &[
        &["--remember", "process,user", "--sleep", "precise"],
        &["--remember", "process,user", "--sleep", "realtime", "--no-patch"],
    ];
    let shell = "echo $$ >/dev/null; (sleep 0.01; exit 3); echo $?; id -u; sh -c 'exit 7' & wait $!; echo $?";
    assert_same(all, &["bash", "-c", shell]);
    let script = "
import os, signal, subprocess, threading, time, select
begin = time.monotonic()
threads = [threading.Thread(target=time.sleep, args=(0.05,)) for _ in range(20)]
[t.start() for t in threads]; [t.join() for t in threads]
print(0.05 <= time.monotonic() - begin < 20)
print(subprocess.run(['sleep', '0.01']).returncode, os.fork() and os.wait()[1])
signal.signal(signal.SIGALRM, lambda *_: print('alarm'))
signal.setitimer(signal.ITIMER_REAL, 0.02)
begin = time.monotonic(); time.sleep(0.1); print(time.monotonic() - begin >= 0.1)
print(select.select([], [], [], 0.01))
";
    assert_same(all, &[PYTHON, "-c", script]);
}

#[test]
fn a_policy_turns_services_on() {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let policy = directory.path().join("policy.toml");
    let policy = policy.to_str().unwrap();
    let script = "
import ctypes, time
time.sleep(0.001)
print(ctypes.CDLL(None).prctl(30, 0, 0, 0, 0))";
    for (services, slack) in [("", "50000"), ("[services]\nsleep = 'precise'\nremember = ['process']", "1")] {
        // Rules about the same calls go on to hold.
        fs::write(policy, format!("{services}\n[[rule]]\ncall = 'getpid'\ntimes = 1\nreturn = 4711\n"))
            .unwrap();
        assert_eq!(text(&run(&["--policy", policy], &[PYTHON, "-c", script]).stdout), format!("{slack}\n"));
        let asked = "import os; print([os.getpid() == 4711 for _ in range(100)].count(True))";
        assert_eq!(text(&run(&["--policy", policy], &[PYTHON, "-c", asked]).stdout), "1\n");
    }
    for (wrong, message) in [
        (
            "[services]\npoll-receive = '11ms'",
            "policy.toml:2:16: cannot poll for 11ms: choose a time above 0 and of 10ms",
        ),
        ("[services]\npoll-receive = '0us'", "policy.toml:2:16: cannot poll for 0us"),
        ("[services]\npoll-receive = 'soon'", "policy.toml:2:16: \"soon\" is no duration"),
        ("[services]\nsleep = 'long'", "policy.toml:2:9: unknown variant `long`"),
        ("[services]\nremember = ['user', 'uname']", "policy.toml:2:21: unknown variant `uname`"),
        ("[services]\nslumber = true", "policy.toml:2:1: unknown field `slumber`"),
    ] {
        fs::write(policy, wrong).unwrap();
        let output = run(&["--policy", policy], &["true"]);
        assert!(
            !output.status.success() && text(&output.stderr).contains(message),
            "{}",
            text(&output.stderr)
        );
    }
}

#[test]
fn behaviours_are_the_same_with_all_services() {
    if facility::is_missing() {
        return;
    }
    let archive = Archive::new();
    let tracee = compile(archive.directory.path(), "tracee.c");
    let tracee = tracee.to_str().unwrap();
    let cases =
        ["longjump", "masks", "storm", "children", "spawn", "thread-exec", "processor", "forks", "cancel"];
    for case in cases {
        let mut native = Command::new(tracee);
        let native =
            native.arg(case).current_dir(archive.directory.path()).stdin(Stdio::null()).output().unwrap();
        assert!(native.status.success(), "{case}");
        for patching in [&[][..], &["--no-patch"]] {
            let options =
                [&["--remember", "process,user", "--sleep", "realtime", "--poll-receive", "1ms"], patching]
                    .concat();
            let output = archive.command(&options, &[tracee, case]).output().unwrap();
            assert_eq!(seen(&output), seen(&native), "{options:?} {case}");
        }
    }
}

/// A directory with what archives hold, an archive of that, and a path at which it is to be seen, where nothing is.
struct Archive {
    directory: tempfile::TempDir,
}

impl Archive {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let script = r#"
            mkdir -p real/package real/bin real/links real/deep/er real/empty outside && cd real
            echo 'from . import other' > package/__init__.py
            echo 'import sys; VALUE = 42' > package/other.py
            printf '#!/bin/sh\nexec cat "${0%%/*}/../deep/er/file"\n' > bin/script
            printf '#!%s/../mounted/bin/sh -u\nprintf "%%s," "$0" "$@"; echo\n' "$PWD" > bin/named
            printf '#! /bin/sh -u\nprintf "%%s," "$0" "$@"; echo\n' > bin/system
            cp bin/named ../outside/named
            cp /bin/cat bin/cat && cp /bin/dash bin/sh
            chmod 755 bin/script bin/cat bin/sh bin/named bin/system ../outside/named && chmod 640 deep/er/file 2>/dev/null
            echo content > deep/er/file && ln deep/er/file deep/hard
            i=0; while [ $i -lt 300 ]; do echo $i > deep/file$i; i=$((i+1)); done
            ln -s ../deep/er/file links/relative
            ln -s ../../outside/file links/leaves
            ln -s nothing links/dangling
            ln -s "$PWD/../mounted/deep" links/absolute
            ln -s .. links/up
            touch -d 2001-02-03T04:05:06 deep/er/file
            echo 'from outside' > ../outside/file
            ln -s ../mounted/deep ../outside/into
            ln -s "$PWD/../mounted/bin/cat" ../outside/cat
            tar --sort=name -cf ../archive.tar .
        "#;
        let script = script.replace("$PWD/..", directory.path().to_str().unwrap());
        let status =
            Command::new("bash").args(["-c", &script]).current_dir(directory.path()).status().unwrap();
        assert!(status.success());
        Self { directory }
    }

    fn command(&self, options: &[&str], words: &[&str]) -> Command {
        let mut command = Command::new(*ORRERY);
        let mount = format!("{0}/mounted={0}/archive.tar", self.directory.path().display());
        command.args(["run", "--mount", &mount]).args(options).arg("--").args(words);
        command.current_dir(self.directory.path()).stdin(Stdio::null()).env("LC_ALL", "C");
        command
    }

    /// Checks that a shell's script is the same about the archive that is mounted and the directory that it was made from.
    fn assert_same(&self, script: &str) {
        let mut native = Command::new("bash");
        native.args(["-c", &script.replace("ROOT", "real")]).current_dir(self.directory.path());
        let native = native.stdin(Stdio::null()).env("LC_ALL", "C").output().unwrap();
        for options in [&[][..], &["--no-patch"]] {
            let output =
                self.command(options, &["bash", "-c", &script.replace("ROOT", "mounted")]).output().unwrap();
            let seen = seen(&output);
            let told = |text: String| text.replace("mounted", "real");
            let expected = self::seen(&native);
            let expected = (told(expected.0), told(expected.1), expected.2);
            assert_eq!((told(seen.0), told(seen.1), seen.2), expected, "{options:?} {script}");
        }
    }
}

#[test]
fn an_archive_is_a_directory() {
    if facility::is_missing() {
        return;
    }
    let archive = Archive::new();
    for script in [
        // Names, kinds, sizes, times.
        "cd ROOT && find . -printf '%p %y %m %s %TY-%Tm-%Td %l %n\\n' | grep -v 'absolute\\|leaves\\| d ' | sort",
        "ls -A ROOT/deep | sort | sha256sum; ls -lL --time-style=+%s ROOT/deep/er ROOT/bin | grep -v total",
        "stat -c '%n %F %a %Y' ROOT/deep/er/file ROOT/links/relative; test -d ROOT/empty",
        "cat ROOT/deep/er/file ROOT/links/relative ROOT/links/leaves ROOT/links/up/deep/hard ROOT//bin/./../deep/er/file",
        "cat ROOT/links/dangling ROOT/nothing ROOT/deep/er/file/x; ls ROOT/deep/er/file/; cat ROOT/deep",
        // Working directories.
        "cd ROOT/deep/er && pwd && /bin/pwd && cat file ../file7 && cd .. && /bin/pwd && cd ../.. && /bin/pwd && ls",
        "cd -P ROOT/links/up && /bin/pwd; cd ROOT/bin; ls -d ../../outside; cat ../../outside/file; ls -a .. | sort",
        // From outside into it, and out again.
        "cat outside/../ROOT/deep/file5 outside/../outside/./../ROOT/../outside/file; cd outside; cat ../ROOT/deep/file6",
        // Descriptors of it, in other processes.
        "exec 5<ROOT/deep/er/file; head -c 3 <&5; (cat <&5); readlink /proc/self/fd/5; cat /proc/self/fd/5 <&-",
        "grep -r 17 ROOT/deep | sort; tar -cf - -C ROOT deep links/relative | tar -tf - | sort | sha256sum",
        // Programs of it.
        "ROOT/bin/cat outside/file; ROOT/bin/script; cd ROOT/bin; ./script; PATH=$PWD:$PATH; script; type -p script",
        "ROOT/bin/system; ROOT/bin/system 1 '2  3' 4; cd ROOT/bin; ./system x; PATH=.:$PATH; system y; (exec -a z ./system)",
        "(exec -a x ROOT/bin/cat /proc/self/comm); env -i ROOT/bin/cat outside/file; nice ROOT/bin/script | tr a-z A-Z",
    ] {
        archive.assert_same(script);
    }
    let links =
        "cat outside/into/er/file; outside/cat outside/file; ls -d outside/into/; readlink outside/into";
    let output = archive.command(&[], &["sh", "-c", links]).output().unwrap();
    assert_eq!(
        seen(&output),
        ("content\nfrom outside\noutside/into/\n../mounted/deep\n".to_owned(), String::new(), Some(0))
    );
    // Scripts whose interpreter is in it.
    let scripts = "mounted/bin/named a 'b c'; outside/named d; cd outside; ./named";
    let output = archive.command(&[], &["sh", "-c", scripts]).output().unwrap();
    let told = "mounted/bin/named,a,b c,\noutside/named,d,\n./named,\n";
    assert_eq!(seen(&output), (told.to_owned(), String::new(), Some(0)));
    for first in ["mounted/bin/named", "mounted/bin/system", "outside/named"] {
        let path = archive.directory.path().join(first);
        let output = archive.command(&[], &[path.to_str().unwrap(), "x"]).output().unwrap();
        assert_eq!(seen(&output), (format!("{},x,\n", path.display()), String::new(), Some(0)));
        let output = archive.command(&[], &[first, "x"]).output().unwrap();
        assert_eq!(seen(&output), (format!("{first},x,\n"), String::new(), Some(0)));
    }
    // Its content can be taken out.
    archive.assert_same("cp -a ROOT copy && diff -r --no-dereference -x absolute -x leaves copy real && rm -r copy; du -s copy");
    archive.assert_same(&format!(
        "PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$PWD/ROOT {PYTHON} -c 'import package.other as other, os; print(other.VALUE, other.__file__, len(os.listdir(\"ROOT/deep\")), list(os.walk(\"ROOT/deep/er\")), sorted(os.listdir(\"ROOT\")))'"
    ));
}

#[test]
fn whole_programs_work_on_an_archive() {
    if facility::is_missing() {
        return;
    }
    let archive = Archive::new();
    let prepare = "
        mkdir repository && cd repository && git init -q . && git config user.email a@b && git config user.name a
        for i in $(seq 100); do mkdir -p d$((i % 9)) && echo $i > d$((i % 9))/f$i; done
        git add . && git commit -qm message && echo untracked > new && cd ..
        mkdir headers && echo '#define VALUE 42' > headers/value.h && mv repository headers real
        printf '#include <value.h>\\nint main(void) { return VALUE; }\\n' > main.c
        /usr/bin/python3 -c 'import sqlite3; c = sqlite3.connect(\"real/data\"); c.execute(\"create table t(a)\"); c.executemany(\"insert into t values (?)\", [(i,) for i in range(1000)]); c.commit()'
        tar -cf archive.tar -C real .";
    let mut shell = Command::new("bash");
    let status = shell.args(["-ec", prepare]).current_dir(archive.directory.path()).status().unwrap();
    assert!(status.success());
    let script = "
        cd mounted/repository && git -c safe.directory='*' status --short && git -c safe.directory='*' log --format=%s && cd ../..
        cc -Imounted/headers main.c -o main && ./main; echo $?
        /usr/bin/python3 -c 'import sqlite3; print(sqlite3.connect(\"file:mounted/data?immutable=1\", uri=True).execute(\"select sum(a) from t\").fetchone())'";
    for options in [&[][..], &["--no-patch"]] {
        let output = archive.command(options, &["bash", "-c", script]).output().unwrap();
        assert_eq!(seen(&output), ("?? new\nmessage\n42\n(499500,)\n".to_owned(), String::new(), Some(0)));
    }
}

#[test]
fn nobody_writes_to_an_archive() {
    if facility::is_missing() {
        return;
    }
    let archive = Archive::new();
    for (script, call) in [
        ("echo x > mounted/new", "cannot create"),
        ("echo x >> mounted/deep/er/file", "cannot create"),
        ("rm -f mounted/deep/er/file", "cannot remove"),
        ("mkdir mounted/x", "cannot create directory"),
        ("mv mounted/deep mounted/x", "cannot move"),
        ("chmod 777 mounted/bin/cat", "changing permissions"),
        ("touch mounted/deep/er/file", "cannot touch"),
        ("ln -s x mounted/x", "failed to create symbolic link"),
        ("cd mounted/deep && truncate -s 0 file1", "cannot open"),
    ] {
        let output = archive.command(&[], &["sh", "-c", script]).output().unwrap();
        let error = text(&output.stderr);
        assert!(error.contains(call) && error.contains("Read-only file system"), "{script}: {error}");
    }
    let mut whole = Command::new("diff");
    let output =
        whole.args(["-r", "--no-dereference", "real", "mounted"]).current_dir(archive.directory.path());
    assert!(!output.output().unwrap().status.success(), "it is seen by tracees only");
}

#[test]
fn mounts_need_no_privilege() {
    if facility::is_missing() {
        return;
    }
    let archive = Archive::new();
    let program = archive.directory.path().join("orrery");
    orrery_testing::copy_program(*ORRERY, &program);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(archive.directory.path().join("archive.tar"), fs::Permissions::from_mode(0o644))
        .unwrap();
    let mount = format!("{0}/mounted={0}/archive.tar", archive.directory.path().display());
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program);
    command.args([
        "run",
        "--mount",
        &mount,
        "--",
        "sh",
        "-c",
        "cat mounted/deep/er/file; id -u; echo x > mounted/x",
    ]);
    let output =
        command.current_dir(archive.directory.path()).stdin(Stdio::null()).env("LC_ALL", "C").output();
    let (told, error, _) = seen(&output.unwrap());
    if error.contains("setresuid failed") || error.contains("make a tmpfs") {
        orrery_testing::skipped!("{}", error.trim_end());
        return;
    }
    assert_eq!(told, "content\n65534\n", "{error}");
    assert!(error.contains("Read-only file system"), "{error}");
}

#[test]
fn what_cannot_be_mounted_is_refused() {
    if facility::is_missing() {
        return;
    }
    let archive = Archive::new();
    let directory = archive.directory.path();
    fs::write(directory.join("text"), "no archive\n".repeat(100)).unwrap();
    fs::write(directory.join("archive.tar.gz"), [0x1f, 0x8b, 8, 0]).unwrap();
    fs::write(directory.join("empty"), "").unwrap();
    let whole = fs::read(directory.join("archive.tar")).unwrap();
    // Cut off between two entries, and within one.
    let entries = whole.chunks(512).rposition(|block| block.iter().any(|byte| *byte != 0)).unwrap() + 1;
    fs::write(directory.join("unmarked"), &whole[..entries * 512]).unwrap();
    fs::write(directory.join("half"), &whole[..whole.len() / 2 - 100]).unwrap();
    for (mount, message) in [
        ("/m=nothing", "cannot mount nothing: No such file or directory"),
        ("/m=text", "cannot mount text: read the archive: is it a tar file?"),
        ("/m=archive.tar.gz", "cannot mount archive.tar.gz: it is compressed: unpack it with gunzip first"),
        ("/m=empty", "cannot mount empty: it has no entries"),
        ("/m=unmarked", "cannot mount unmarked: it ends in the midst"),
        ("/m=half", "cannot mount half: "),
        ("m=archive.tar", "\"m\" is no path from the root"),
        ("/m/../x=archive.tar", "no path from the root without .."),
        ("/=archive.tar", "stays the kernel's"),
        ("/proc/x=archive.tar", "stays the kernel's"),
        ("/m", "a mount is written PATH=ARCHIVE"),
    ] {
        let mut command = Command::new(*ORRERY);
        command.args(["run", "--mount", mount, "--", "sh", "-c", "echo started"]).current_dir(directory);
        let (told, error, code) = seen(&command.stdin(Stdio::null()).output().unwrap());
        assert!(told.is_empty() && code != Some(0) && error.contains(message), "{mount}: {told} {error}");
    }
    let policy = directory.join("policy.toml");
    fs::write(&policy, "[[mount]]\nprefix = '/m'\narchive = 'a'\n[[mount]]\nprefix = '/m/n'\narchive = 'b'")
        .unwrap();
    let output = run(&["--check", "--policy", policy.to_str().unwrap()], &["true"]);
    assert!(text(&output.stderr).contains("policy.toml:5:10: /m/n is within /m"), "{}", text(&output.stderr));
}
