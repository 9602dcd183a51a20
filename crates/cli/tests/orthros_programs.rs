//! Programs of others whose kernels die. SKIPPED where QEMU, criu, a kernel, root or the program are absent.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "orthros/pairs.rs"]
mod pairs;

use std::io::BufReader;
use std::time::{Duration, Instant};

use pairs::{ONE_PAIR, Up, connect, get, missing, orthros};

/// Answers each request with what was asked.
const HAPROXY: &str = "\
defaults
  mode http
  timeout client 600s
  timeout connect 60s
  timeout server 60s
frontend echo
  bind :80
  http-request return status 200 content-type text/plain lf-string \"<%[query]>\"
";

/// haproxy watches each of its threads by a timer that goes by the processor time of that thread. It runs as Debian's unit says, a
/// master with a worker, but for the configuration's path.
#[test]
fn haproxy_keeps_its_connections() {
    if let Some(why) = missing(&[("ip", "iproute2"), ("haproxy", "haproxy")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    if !std::path::Path::new("/lib/systemd/system/haproxy.service").is_file() {
        orrery_testing::skipped!("haproxy's unit is not installed");
        return;
    }
    let configuration = directory.path().join("haproxy.cfg");
    std::fs::write(&configuration, HAPROXY).unwrap();
    let network = format!("orrery-haproxy-{}", std::process::id());
    let file = format!("{}:/haproxy.cfg", configuration.display());
    let drop_ins = directory.path().join("haproxy.service.d");
    std::fs::create_dir(&drop_ins).unwrap();
    std::fs::write(drop_ins.join("own.conf"), "[Service]\nEnvironment=CONFIG=/haproxy.cfg\n").unwrap();
    let mut command = orthros();
    command.args([
        "up",
        "--json",
        "--unit",
        "haproxy",
        "--network",
        &network,
        "--file",
        &file,
        "--cpus",
        "2",
    ]);
    // The directory first, and then where units are.
    command.env("SYSTEMD_UNIT_PATH", format!("{}:", directory.path().display()));
    let mut up = Up::begin(command);
    up.expect("help");
    let connection = connect(&network, 80);
    connection.set_read_timeout(Some(Duration::from_secs(180))).unwrap();
    let mut connection = BufReader::new(connection);
    assert_eq!(get(&mut connection, "?before"), "<before>");
    for round in ["panic", "hang"] {
        up.say(&format!("crash {round}"));
        let survived = up.expect("survived");
        assert_eq!(survived["failover"]["summary"]["remarks"].to_string(), "[]");
        for request in 0..20 {
            let what = format!("round-{round}-{request}");
            assert_eq!(get(&mut connection, &format!("?{what}")), format!("<{what}>"));
        }
        up.expect("renewed");
    }
    up.say("quit");
    up.expect("end");
}

/// In place of criu: fails twice as criu does when it cannot make a file, and then when it cannot make a process.
const FAILING: &str = r##"#!/bin/busybox sh
[ "$1" = restore ] || exec /usr/sbin/criu "$@"
fail() {
    echo "$2" > /run/orrery/restore.log
    for line in $(busybox seq 3000); do echo "(00.2)      2: nothing to see"; done >> /run/orrery/restore.log
    busybox touch /run/orrery/failed-$1
    exit 1
}
[ -e /run/orrery/failed-1 ] || fail 1 "(00.1)      2: Error (criu/pipes.c:1): no pipe
(00.1)      2: Error (criu/files.c:1213): Unable to open fd=7 id=0x1b"
[ -e /run/orrery/failed-2 ] || fail 2 "(00.1)      $(busybox cat /tmp/child): Error (criu/mem.c:1): no memory"
exec /usr/sbin/criu "$@"
"##;

/// Has a pipe and a child, which a failover costs, and a device that is no terminal.
const VICTIM: &str = "busybox mkfifo /tmp/pipe; exec 7<>/tmp/pipe 8</dev/kmsg; sleep 1000 & echo $! > /tmp/child; wait $!; \
    echo \"the child ends with $?, the pipe with <$(cat <&7)>\" > /run/verdict; sleep 1000";

/// What criu cannot restore costs itself, whatever it is: the service goes on without it.
#[test]
fn what_criu_cannot_restore_is_left_out() {
    use std::os::unix::fs::PermissionsExt as _;
    if let Some(why) = missing(&[]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let criu = directory.path().join("criu");
    std::fs::write(&criu, FAILING).unwrap();
    std::fs::set_permissions(&criu, std::fs::Permissions::from_mode(0o755)).unwrap();
    let file = format!("{}:/usr/local/bin/criu", criu.display());
    let mut up =
        Up::start(&["--file", &file, "--program", "sleep", "--program", "cat"], &["sh", "-c", VICTIM]);
    up.expect("help");
    up.say("crash panic");
    let survived = up.expect("survived");
    let remarks = survived["failover"]["summary"]["remarks"].to_string();
    for words in ["is hung up: criu cannot restore it", "no pipe", "count as killed", "no memory"] {
        assert!(remarks.contains(words), "{words}: {remarks}");
    }
    assert!(remarks.contains("(/dev/kmsg) is hung up: devices are not carried over"), "{remarks}");
    assert!(!remarks.contains("nothing to see"), "{remarks}");
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        up.say("run busybox find /run -name verdict -exec cat {} ;");
        let verdict = up.expect("ran")["text"].as_str().unwrap().trim().to_owned();
        if !verdict.is_empty() {
            assert_eq!(verdict, "the child ends with 137, the pipe with <>");
            break;
        }
        assert!(Instant::now() < deadline, "it says nothing");
        std::thread::sleep(Duration::from_millis(100));
    }
    up.say("quit");
    up.expect("end");
}

/// What becomes of each process of `orthros/oddities.c`: what it saw before and sees after, and words of the remark, if there is one.
const ODDITIES: &[(&str, &str, &str, &str)] = &[
    ("working directory", "No such file or directory", "No such file or directory", ""),
    ("bytes", "bytes 1 0", "bytes 1 0", ""),
    ("mapping", "arena arena x", "arena arena x", ""),
    ("directory", "/tmp/removed (deleted)", "/tmp/removed (deleted)", ""),
    ("pipe", "/tmp/fifo (deleted) piped", "/tmp/fifo (deleted) piped", ""),
    ("program", "/memfd:program (deleted) 0", "/memfd:program (deleted) 0", ""),
    ("limit", "0 0", "0 0", ""),
    ("dispatch", "1", "1", ""),
    ("policy", "40000003", "40000003", ""),
    ("gone process", "proc", "socket", "is hung up: the process that it tells about is gone"),
    ("namespace", "net", "socket", "is hung up: no path leads to it"),
    ("queue", "/queue", "socket", "(/queue) is hung up: no path leads to it"),
    ("unmounted", "/", "socket", "is hung up: no path leads to it"),
    ("landlock", "may not", "has ended", "it is confined by Landlock"),
    ("segment", "16", "has ended", "it has segments of its own"),
    ("tracee", "traced", "killed", "PTRACE_O_EXITKILL"),
    ("port", "open", "closed", "has no access to I/O ports any more"),
];

/// Files without a name or a place, names that are no text, and what confines a process: each survives, or costs itself.
#[test]
fn what_is_unusual_survives_or_costs_itself() {
    if let Some(why) = missing(&[("cc", "gcc")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("oddities");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/orthros/oddities.c");
    let mut compiler = std::process::Command::new("cc");
    let compiled = compiler.args(["-O1", "-static", "-o"]).arg(&program).arg(source).status().unwrap();
    assert!(compiled.success());
    let file = format!("{}:/usr/local/bin/oddities", program.display());
    let mut up = Up::start(&["--file", &file], &["sh", "-c", "exec /usr/local/bin/oddities"]);
    up.expect("help");
    let look = |up: &mut Up| {
        up.say("run touch /run/ask");
        up.expect("ran");
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            up.say("run busybox find /run -name ask");
            if up.expect("ran")["text"].as_str().unwrap().trim().is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "it does not answer");
            std::thread::sleep(Duration::from_millis(100));
        }
        up.say("run cat /run/state");
        up.expect("ran")["text"].as_str().unwrap().to_owned()
    };
    let expected = |of: fn(&(&str, &'static str, &'static str, &str)) -> &'static str| -> String {
        ODDITIES.iter().map(|row| format!("{}: {}\n", row.0, of(row))).collect()
    };
    assert_eq!(look(&mut up).trim(), expected(|row| row.1).trim());
    // What is said to be lost is what will be; the guest reads what the service prints.
    up.say("run orrery-guest check");
    let checked = up.expect("ran")["text"].as_str().unwrap().to_owned();
    for words in
        ["namespaces and message queues are not carried over", "the process that it tells about is gone"]
    {
        assert!(checked.contains(words), "{words}: {checked}");
    }
    for words in ["nobody of the service has the other end", "refused"] {
        assert!(!checked.contains(words), "{words}: {checked}");
    }
    up.say("crash panic");
    let remarks = up.expect("survived")["failover"]["summary"]["remarks"].clone();
    assert_eq!(look(&mut up).trim(), expected(|row| row.2).trim(), "{remarks}");
    let remarks: Vec<&str> =
        remarks.as_array().unwrap().iter().filter_map(|remark| remark.as_str()).collect();
    for (name, _, _, words) in ODDITIES {
        assert!(remarks.iter().any(|remark| remark.contains(words)), "{name}: {words}: {remarks:?}");
    }
    let count = ODDITIES.iter().filter(|row| !row.3.is_empty()).count();
    assert_eq!(remarks.len(), count, "{remarks:?}");
    up.say("quit");
    up.expect("end");
}
