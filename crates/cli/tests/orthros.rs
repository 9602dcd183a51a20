//! `orrery orthros` with real kernels that really panic. SKIPPED where QEMU, criu, redis, a kernel or root are absent.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "orthros/pairs.rs"]
mod pairs;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pairs::{Client, ONE_PAIR, Up, connect, events, missing, orthros};
use serde_json::Value;

#[test]
fn redis_and_its_connection_survive_two_panics_in_a_row() {
    if let Some(why) = missing(&[("redis-server", "redis-server"), ("ip", "iproute2")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let mut command = orthros();
    command.args(["demo", "--json"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let network = format!("orrery-{}", child.id());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let events = events(&output.stdout);
    let of = |name: &str| events.iter().filter(|event| event["event"] == name).count();
    // The client itself has made sure that no answer was lost and none came twice.
    assert_eq!((of("died"), of("survived"), of("counted"), of("renewed"), of("end")), (2, 2, 2, 1, 1));
    for event in events.iter().filter(|event| event["event"] == "survived") {
        let summary = &event["failover"]["summary"];
        assert_eq!(event["failover"]["cause"], "panic");
        assert_eq!((&summary["connections"], &summary["processes"]), (&Value::from(1), &Value::from(1)));
        assert!(summary["threads"].as_u64().unwrap() >= 4, "{summary}");
    }
    let left = Command::new("ip").args(["netns", "list"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&left.stdout).contains(&network), "the network stays");
}

/// Three clients count as fast as redis answers, and a program changes files as fast as it can.
#[test]
fn redis_and_files_survive_two_panics_under_load() {
    if let Some(why) = missing(&[("redis-server", "redis-server"), ("ip", "iproute2")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let mut command = orthros();
    // Longer than a busy host lets a processor wait.
    command.args(["soak", "--crashes", "2", "--kinds", "panic", "--strict", "--silence", "10", "--json"]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
    let events = events(&output.stdout);
    let survived = |event: &&Value| {
        event["event"] == "crash" && event["text"].as_str().is_some_and(|text| text.contains(": survived in"))
    };
    assert_eq!(events.iter().filter(survived).count(), 2, "{told}");
}

/// Lets a guest write contents early and drop whatever it can from memory, again and again.
const FORGETFUL: &str = "run orrery-orthros-load drop-caches";

/// A program that creates, fills, cuts, renames, links and removes files, and compares them with what it remembers.
#[test]
fn files_survive_as_they_were_left_and_so_does_who_writes_them() {
    if let Some(why) = missing(&[("mkfs.ext4", "e2fsprogs"), ("e2fsck", "e2fsprogs")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let (image, pair) = (directory.path().join("disk-image"), directory.path().join("pair"));
    let made = std::fs::File::create(&image).and_then(|image| image.set_len(64 << 20));
    made.unwrap();
    let tool = |program: &str, words: &[&str]| {
        let output = Command::new(program).args(words).arg(&image).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    assert_eq!(tool("mkfs.ext4", &["-q", "-b", "1024"]).0, Some(0));
    let mut up = Up::start(
        &[
            "--disk",
            image.to_str().unwrap(),
            "--mount",
            "/var/lib/service",
            "--directory",
            pair.to_str().unwrap(),
            "--cpus",
            "2",
        ],
        &["orrery-orthros-load", "file-stress", "/var/lib/service", "7"],
    );
    up.expect("help");
    // Long enough for the journal's own commit, which comes every five seconds, to fall in between at times.
    std::thread::sleep(std::time::Duration::from_secs(3));
    let mut operations = 0;
    // A hang says nothing: it is the silence that is noticed.
    let ways = [
        ("crash oops", "panic"),
        ("failover", "request"),
        ("crash hang", "silence"),
        ("crash oom", "panic"),
        ("crash nmi", "panic"),
    ];
    for (round, (command, cause)) in ways.into_iter().enumerate() {
        if round % 2 == 1 {
            // Names, inodes and clean contents go from memory as soon as they can, whether committed or not.
            up.say(FORGETFUL);
            up.expect("ran");
            std::thread::sleep(std::time::Duration::from_secs(1));
        }
        up.say(command);
        let survived = up.expect("survived");
        // On a machine so busy that a guest gets no time, silence is noticed before a panic is told.
        let found = &survived["failover"]["cause"];
        assert!(found == cause || found == "silence", "{survived}");
        assert!(survived["failover"]["summary"]["written"]["bytes"].as_u64().unwrap() > 0, "{survived}");
        up.expect("renewed");
        let verdict = up.verdict();
        assert!(verdict.starts_with("right:"), "{verdict}");
        let count: u64 = verdict.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!(count > operations, "it goes on");
        operations = count;
    }
    // From outside, too.
    let at = pair.to_str().unwrap();
    let status = orthros().args(["status", "--directory", at]).output().unwrap();
    assert!(String::from_utf8_lossy(&status.stdout).contains("failovers"), "{status:?}");
    let crash = orthros().args(["crash", "--kind", "boredom", "--directory", at]).output().unwrap();
    assert!(String::from_utf8_lossy(&crash.stderr).contains("hang"), "{crash:?}");
    let second = orthros().args(["up", "--directory", at, "--", "true"]).output().unwrap();
    assert!(String::from_utf8_lossy(&second.stderr).contains("another pair"), "{second:?}");
    up.say("nonsense");
    assert!(up.expect("help")["text"].as_str().unwrap().contains("nonsense"));
    up.say("quit");
    up.expect("end");
    assert!(up.child.wait().unwrap().success());
    let (status, said) = tool("e2fsck", &["-fn"]);
    assert_eq!(status, Some(0), "{said}");
}

/// Types into a terminal that is served over the network, and waits until it shows `until`.
fn type_into(terminal: &mut TcpStream, keys: &[u8], until: &str) {
    terminal.write_all(keys).unwrap();
    let mut shown = Vec::new();
    let mut bytes = [0; 4096];
    while !String::from_utf8_lossy(&shown).contains(until) {
        let count = terminal.read(&mut bytes).unwrap();
        assert!(count > 0, "the terminal hung up: {}", String::from_utf8_lossy(&shown));
        shown.extend_from_slice(&bytes[..count]);
    }
}

/// nano in a terminal, its user over the network, and beside it a program that holds one of everything.
#[test]
fn an_editor_in_its_terminal_and_one_of_everything_survive() {
    const TERMINFO: &str = "/lib/terminfo/v/vt100";
    if let Some(why) = missing(&[("nano", "nano"), ("ip", "iproute2")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    if !Path::new(TERMINFO).is_file() {
        orrery_testing::skipped!("{TERMINFO} is not there");
        return;
    }
    let _one = ONE_PAIR.lock();
    let network = format!("orrery-nano-{}", std::process::id());
    let file = format!("{TERMINFO}:{TERMINFO}");
    let script = "orrery-orthros-load kernel-objects & exec orrery-guest terminal 23 nano -I /run/text";
    let mut up = Up::start(
        &[
            "--network",
            &network,
            "--program",
            "nano",
            "--program",
            "orrery-orthros-load",
            "--file",
            &file,
            "--silence",
            "60",
        ],
        &["busybox", "sh", "-c", script],
    );
    up.expect("help");
    let space = std::fs::File::open(Path::new("/run/netns").join(&network)).unwrap();
    // A socket stays in the network that its thread was in.
    let connected = std::thread::spawn(move || {
        let kind = rustix::thread::LinkNameSpaceType::Network;
        rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&space), Some(kind)).unwrap();
        TcpStream::connect(("10.77.0.2", 23)).unwrap()
    });
    let mut terminal = connected.join().unwrap();
    terminal.set_read_timeout(Some(std::time::Duration::from_secs(180))).unwrap();
    type_into(&mut terminal, b"", "Exit");
    type_into(&mut terminal, b"typed before\r", "before");
    // What would not survive is told before it happens.
    up.say("run orrery-guest check");
    let report: Value = serde_json::from_str(up.expect("ran")["text"].as_str().unwrap()).unwrap();
    let verdicts = |verdict: &str| {
        let findings = report["findings"].as_array().unwrap();
        findings.iter().filter(|finding| finding["verdict"] == verdict).count()
    };
    assert!(report["survives"] == false && verdicts("refused") == 1 && verdicts("hung-up") > 0, "{report}");
    // Taking all memory takes a while, in which the kernel may be silent.
    up.say("crash oom");
    let survived = up.expect("survived");
    let failover = &survived["failover"];
    let summary = &failover["summary"];
    assert_eq!((&summary["connections"], &summary["processes"]), (&Value::from(1), &Value::from(6)));
    assert_eq!(failover["cause"], "panic", "it was noticed by what the kernel said");
    // What cannot be carried over costs only itself.
    let remarks = summary["remarks"].to_string();
    assert!(
        remarks.contains("is hung up: sockets of family 16") && remarks.contains("count as killed"),
        "{remarks}"
    );
    type_into(&mut terminal, b"typed after", "after");
    // Write it out, under the name that it has.
    type_into(&mut terminal, b"\x0f", "Write");
    type_into(&mut terminal, b"\r", "Wrote");
    up.say("run cat /run/text");
    assert_eq!(up.expect("ran")["text"], "typed before\ntyped after");
    up.expect("renewed");
    assert_eq!(up.verdict(), "right");
    up.say("quit");
    up.expect("end");
}

/// Returns the PID of the QEMU with this role.
fn qemu_of(up: &mut Up, role: &str) -> rustix::process::Pid {
    up.say("status");
    let status = up.expect("status");
    let pid = status["status"][role]["pid"].as_i64().unwrap();
    rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
}

/// Returns the PID of the backup's QEMU.
fn backup_of(up: &mut Up) -> rustix::process::Pid {
    qemu_of(up, "backup")
}

#[test]
fn the_service_survives_a_qemu_that_is_killed_or_stopped() {
    use rustix::process::{Signal, kill_process};
    if let Some(why) = missing(&[("ip", "iproute2")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let network = format!("orrery-fence-{}", std::process::id());
    // A busy host may let a processor wait; the pause of a stopped QEMU is given up after as long.
    let options = ["--network", &network, "--silence", "5"];
    let mut up = Up::start(&options, &["orrery-orthros-load", "ballast", "1", "0", "0"]);
    up.expect("help");
    let mut client = Client::of(connect(&network, 7));
    assert_eq!(client.ask("count"), "1");
    let mut count = 1;
    for (signal, cause) in [(Signal::KILL, "killed"), (Signal::STOP, "silence")] {
        kill_process(qemu_of(&mut up, "active"), signal).unwrap();
        let survived = up.expect("survived");
        assert_eq!(survived["failover"]["cause"], cause, "{survived}");
        let remarks = survived["failover"]["summary"]["remarks"].to_string();
        assert_eq!(
            remarks.contains("QMP stop failed: no answer for 5 s"),
            signal == Signal::STOP,
            "{remarks}"
        );
        count += 1;
        assert_eq!(client.ask("count"), count.to_string(), "after {signal:?}");
        up.expect("renewed");
    }
    // Asked for, it is not more careful with a QEMU that does not answer.
    kill_process(qemu_of(&mut up, "active"), Signal::STOP).unwrap();
    up.say("failover");
    up.expect("survived");
    assert_eq!(client.ask("count"), (count + 1).to_string());
    up.expect("renewed");
    up.say("quit");
    up.expect("end");
}

#[test]
fn a_service_that_exits_is_reported_and_restarted_as_asked() {
    if let Some(why) = missing(&[]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    // One that ends at once has never run.
    let output = orthros().args(["up", "--", "cat", "/no/such"]).stdin(Stdio::null()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("the service exited with status 1"), "{error}");
    assert!(error.contains("it printed last: ") && error.contains("/no/such: No such file"), "{error}");
    // One that goes into the background runs on; it ends when its last process does.
    let script = "{ while ! test -e /run/end; do sleep 0.2; done; } & exit 0";
    let mut up = Up::start(&[], &["sh", "-c", script]);
    up.expect("help");
    let exited = up.expect("exited");
    assert_eq!(exited["text"], "the service exited with status 0, and other processes of it remain");
    up.say("run touch /run/end");
    assert_eq!(up.expect("exited")["text"], "the service exited with status 0");
    up.expect("end");
    assert_eq!(up.child.wait().unwrap().code(), Some(0));
    // One that was restored exits like one that was started, and prints into the pipe of the guest that it is in. When the kernel
    // dies no program is being started, which could not go on.
    let mut up = Up::start(
        &["--restart", "on-failure"],
        &["sh", "-c", "echo begun; sleep 1000; echo ends; echo now >&2; kill -9 $$"],
    );
    up.expect("help");
    up.say("crash");
    assert_eq!(up.expect("survived")["failover"]["summary"]["remarks"].to_string(), "[]");
    up.expect("renewed");
    up.say("run killall -INT sleep");
    let exited = up.expect("exited");
    assert_eq!(exited["text"], "the service was killed by signal 9; it printed last: ends\nnow");
    up.expect("restarted");
    up.expect("renewed");
    up.say("status");
    assert!(up.expect("status")["status"]["exit"].is_null());
    up.say("quit");
    up.expect("end");
}

/// While one processor is silent a thread on the other one may be entering the kernel or leaving it, with its registers half saved.
#[test]
fn a_service_that_calls_without_pause_survives_silence() {
    if let Some(why) = missing(&[]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    const CALLS: &str = "while umask 22; do umask 22; umask 22; umask 22; umask 22; umask 22; umask 22; done";
    let mut up = Up::start(&["--cpus", "2"], &["sh", "-c", &format!("({CALLS}) & {CALLS}")]);
    up.expect("help");
    for _ in 0..2 {
        up.say("crash hang");
        let survived = up.expect("survived");
        assert_eq!(survived["failover"]["cause"], "silence", "{survived}");
        up.expect("renewed");
    }
    up.say("quit");
    up.expect("end");
    assert!(up.child.wait().unwrap().success());
}

#[test]
fn a_backup_that_dies_is_replaced_and_its_successor_reads_the_same_memory() {
    use rustix::process::{Signal, kill_process};
    if let Some(why) = missing(&[("mkfs.ext4", "e2fsprogs")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().to_str().unwrap();
    let options = ["--disk", "64M", "--silence", "60", "--directory", at];
    let mut up = Up::start(&options, &["orrery-orthros-load", "file-stress", "/data", "5"]);
    up.expect("help");
    let first = backup_of(&mut up);
    kill_process(first, Signal::KILL).unwrap();
    up.expect("backup died");
    up.expect("renewed");
    let second = backup_of(&mut up);
    assert_ne!(first, second);
    // One whose kernel panics leaves its QEMU behind, which stands still. That no other one can be had meanwhile is no reason
    // to end the service.
    let (image, away) = (directory.path().join("image"), directory.path().join("away"));
    std::fs::rename(&image, &away).unwrap();
    up.say("crash backup");
    let died = up.expect("backup died")["text"].as_str().unwrap().to_owned();
    assert!(died.contains("guest2: its kernel has panicked"), "{died}");
    let alone = up.expect("alone")["text"].as_str().unwrap().to_owned();
    assert!(alone.contains("image") && alone.contains("tried again"), "{alone}");
    std::fs::rename(&away, &image).unwrap();
    up.say("status");
    let status = up.expect("status");
    assert!(status["status"]["active"]["lives"] == true && status["status"]["backup"].is_null(), "{status}");
    up.expect("renewed");
    let third = backup_of(&mut up);
    assert_ne!(second, third);
    up.say("status");
    let status = up.expect("status");
    assert_eq!(status["status"]["lost"].as_array().unwrap().len(), 2, "{status}");
    assert!(status["text"].as_str().unwrap().contains("backups lost: 2"), "{status}");
    // One that falls silent leaves its QEMU as it was: it is missed because it does not answer.
    up.say("crash backup hang");
    let died = up.expect("backup died")["text"].as_str().unwrap().to_owned();
    // Which of both is noticed first depends on how busy the host is.
    let silent = ["its processor 0 has been silent for 15 s", "it has not answered for 15 s"];
    assert!(silent.iter().any(|how| died.contains(&format!("guest4: {how}"))), "{died}");
    up.expect("renewed");
    let fourth = backup_of(&mut up);
    assert_ne!(third, fourth);
    // It is told to rescue the service, and dies before it can. A processor that is locked up is silent for two seconds before
    // the kernel panics of it, which is borne here.
    kill_process(fourth, Signal::STOP).unwrap();
    up.say("crash lockup");
    up.expect("died");
    kill_process(fourth, Signal::KILL).unwrap();
    up.expect("again");
    let survived = up.expect("survived");
    assert_eq!(survived["failover"]["steps"][0]["name"], "new backup", "{survived}");
    assert_eq!(survived["failover"]["cause"], "panic", "it was noticed by what the kernel said");
    up.expect("renewed");
    // It is silent already when it is needed, and nobody has noticed yet.
    up.say("crash backup spin");
    up.say("crash panic");
    let again = up.expect("again")["text"].as_str().unwrap().to_owned();
    assert!(again.contains("for 15 s"), "{again}");
    up.expect("survived");
    up.expect("renewed");
    let verdict = up.verdict();
    assert!(verdict.starts_with("right:"), "{verdict}");
    up.say("quit");
    up.expect("end");
}

#[test]
fn what_a_host_lacks_is_told_and_nothing_is_changed() {
    use std::os::unix::process::CommandExt as _;
    if let Some(why) = missing(&[("ip", "iproute2"), ("mount", "mount")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let said = |command: &mut Command| {
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().to_str().unwrap();
    // Programs are looked for in /usr/sbin, too; QEMU is not there.
    let told = said(orthros().args(["up", "--", "true"]).env("PATH", at));
    assert!(
        told.contains("qemu-system-x86_64 is not installed") && told.contains("apt-get install"),
        "{told}"
    );
    // A network of this name is somebody's, and stays.
    let name = format!("orrery-taken-{}", std::process::id());
    let ip = |words: &[&str]| Command::new("ip").args(words).output().unwrap();
    assert!(ip(&["netns", "add", &name]).status.success());
    let told = said(orthros().args(["up", "--network", &name, "--", "true"]));
    let left = String::from_utf8_lossy(&ip(&["netns", "list"]).stdout).into_owned();
    ip(&["netns", "delete", &name]);
    assert!(told.contains("it is there already") && told.contains(&name), "{told}");
    assert!(left.contains(&name), "{left}");
    // A directory with no room for the guests' image.
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=1M", "none", at]).status().unwrap();
    if mounted.success() {
        let told = said(orthros().args(["up", "--directory", at, "--", "true"]));
        Command::new("umount").arg(at).status().unwrap();
        assert!(told.contains("No space left") && told.contains("image"), "{told}");
    } else {
        orrery_testing::skipped!("a full directory: tmpfs cannot be mounted");
    }
    // Someone who may not make networks; where the program cannot be reached by others, there is nothing to see.
    let mut command = orthros();
    command.args(["up", "--network", "mine", "--", "true"]).env("HOME", "/nonexistent").uid(65534).gid(65534);
    match command.stdin(Stdio::null()).output() {
        Ok(output) => {
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(told.contains("making a network requires root"), "{told}");
        }
        Err(error) => orrery_testing::skipped!("no rights: {error}"),
    }
}

#[test]
fn who_interrupts_a_pair_finds_nothing_left() {
    use rustix::process::{Pid, Signal, getpgid, kill_process};
    if let Some(why) = missing(&[("ip", "iproute2")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let network = format!("orrery-interrupted-{}", std::process::id());
    let mut up = Up::start(&["--network", &network], &["sleep", "1000"]);
    up.expect("help");
    up.say("status");
    let status = up.expect("status");
    let own = up.pid();
    for machine in ["active", "backup"] {
        let pid = i32::try_from(status["status"][machine]["pid"].as_i64().unwrap()).unwrap();
        // A terminal tells all processes of a group.
        assert_ne!(getpgid(Pid::from_raw(pid)).unwrap(), getpgid(Some(own)).unwrap(), "{status}");
    }
    kill_process(own, Signal::INT).unwrap();
    up.expect("end");
    let there = std::path::Path::new("/run/netns").join(&network);
    let begin = Instant::now();
    while there.exists() {
        assert!(begin.elapsed() < Duration::from_secs(20), "the network is left");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn who_interrupts_a_demo_or_a_soak_finds_nothing_left() {
    use rustix::process::{Pid, Signal, kill_process};
    if let Some(why) = missing(&[("ip", "iproute2"), ("redis-server", "redis-server")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    for story in ["demo", "soak"] {
        let temporary = tempfile::tempdir().unwrap();
        let mut command = orthros();
        command.arg(story).env("TMPDIR", temporary.path());
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let there = std::path::PathBuf::from(format!("/run/netns/orrery-{}", child.id()));
        let begin = Instant::now();
        while !there.exists() {
            assert!(begin.elapsed() < Duration::from_secs(60), "{story}: no network is made");
            assert_eq!(child.try_wait().unwrap(), None, "{story}");
            std::thread::sleep(Duration::from_millis(20));
        }
        // The machines start meanwhile.
        std::thread::sleep(Duration::from_millis(500));
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        assert!(!child.wait().unwrap().success(), "{story}");
        let left = || there.exists() || std::fs::read_dir(temporary.path()).unwrap().count() > 0;
        let begin = Instant::now();
        while left() {
            assert!(begin.elapsed() < Duration::from_secs(20), "{story}: a network or files are left");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn a_process_of_this_machine_is_checked() {
    let mut command = Command::new("sleep");
    command.arg("1000").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let pid = child.id().to_string();
    let check = |arguments: &[&str]| orthros().arg("check").args(arguments).output().unwrap();
    let output = check(&[&pid, "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["survives"], &report["processes"]), (&Value::from(true), &Value::from(1)));
    let output = check(&[&pid]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 processes"), "{output:?}");
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let says = String::from_utf8_lossy(&output.stdout).contains("guests' processors lack");
    assert_eq!(says, flags.contains(" ssse3 "), "{output:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    let output = check(&[&pid]);
    assert!(!output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot find process"), "{output:?}");
    assert!(!check(&[]).status.success() && !check(&["--directory", "/no/such"]).status.success());
}

#[test]
fn bad_arguments_change_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("pair.toml");
    std::fs::write(&file, "service = ['x']\nmemory = 300\n").unwrap();
    let refused = |arguments: &[&str]| {
        let output = orthros().args(arguments).stdin(Stdio::null()).output().unwrap();
        assert!(!output.status.success() && output.stdout.is_empty());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused(&["up", "--memory", "300", "--", "x"]).contains("256"));
    assert!(refused(&["run", "--memory", "300", "--", "x"]).contains("256"), "the same by another name");
    assert!(refused(&["up", "--cpus", "0", "--", "x"]).contains("cpus"));
    assert!(refused(&["up", "--silence", "0.1", "--", "x"]).contains("0.5"));
    assert!(refused(&["soak", "--kinds", "oops,boredom"]).contains("boredom"));
    assert!(refused(&["soak", "--crashes", "0"]).contains("crashes"));
    assert!(refused(&["up"]).contains("SERVICE"));
    assert!(refused(&["up", "--file", "x", "--", "y"]).contains("HERE:THERE"));
    assert!(refused(&["up", "--config", file.to_str().unwrap()]).contains("memory = 300"));
    assert!(refused(&["up", "--config", "/no/such/file"]).contains("/no/such/file"));
    assert!(refused(&["up", "--config", file.to_str().unwrap(), "--", "y"]).contains("cannot be used with"));
    // A unit that is not there, that is no service's, or that a pair cannot have.
    let told = refused(&["up", "--unit", "no-such-unit"]);
    assert!(told.contains("no-such-unit.service") && told.contains("absolute path"), "{told}");
    assert!(refused(&["up", "--unit", "ssh.socket"]).contains("a socket runs no program"));
    assert!(refused(&["up", "--unit", "x", "--", "y"]).contains("cannot be used with"));
    assert!(refused(&["up", "--unit", "x", "--config", "y"]).contains("cannot be used with"));
    let unit = directory.path().join("x.service");
    let path = unit.to_str().unwrap();
    for (line, way) in
        [("Type=dbus", "message bus"), ("User=nobody-at-all", "adduser"), ("BindPaths=/srv", "--file")]
    {
        std::fs::write(&unit, format!("[Service]\nExecStart=/bin/sh\n{line}\n")).unwrap();
        let told = refused(&["up", "--unit", path]);
        assert!(told.contains(&format!("x.service:3: {line}: ")) && told.contains(way), "{told}");
    }
    std::fs::write(&file, format!("unit = '{path}'\n")).unwrap();
    assert!(refused(&["up", "--config", file.to_str().unwrap()]).contains("BindPaths=/srv"));
    std::fs::remove_file(&unit).and_then(|()| std::os::unix::fs::symlink("/dev/null", &unit)).unwrap();
    assert!(refused(&["up", "--unit", path]).contains("the unit is masked"));
    assert!(refused(&["status", "--directory", directory.path().to_str().unwrap()]).contains("no pair runs"));
    assert!(refused(&["crash", "--kind", "boredom", "--directory", "/tmp"]).contains("hang"));
    let told = refused(&["up", "--disk", "64M", "--disk", "/srv/b", "--", "y"]);
    assert!(told.contains("2 disks are given (64M, /srv/b)") && told.contains("directories"), "{told}");
    let told = refused(&["up", "--network", "inner", "--network", "outer", "--", "y"]);
    assert!(told.contains("2 networks are given (inner, outer)") && told.contains("forward"), "{told}");
    assert!(refused(&["up", "--disk", "1M", "--", "y"]).contains("8M"));
    assert!(refused(&["up", "--mount", "/data", "--", "y"]).contains("--disk"));
    assert!(refused(&["up", "--disk", "64M", "--mount", "data", "--", "y"]).contains("absolute"));
    assert!(refused(&["up", "--disk", "/proc/version", "--", "y"]).contains("/proc/version"));
    assert!(refused(&["up", "--disk", "/dev/null", "--content", "/tmp", "--", "y"]).contains("new disk"));
}
