//! Want of resources, and workers whose own part of a request is broken: the server goes on, and clients are answered.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

mod common;

use std::process::{Child, Stdio};
use std::time::Duration;

use common::{Server, Way, is_alive, ran, signal, told, ways};

fn rollback() -> Option<Way> {
    ways().into_iter().find(|way| way.tracker == Some("wp_async"))
}

fn start(server: &Server, script: &str) -> Child {
    let mut command = server.run(["-c", script]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn pid(child: &Child) -> i32 {
    i32::try_from(child.id()).unwrap()
}

/// A script that says that it runs, and then does what follows; returns when it runs.
fn start_and_wait(server: &Server, script: &str) -> Child {
    let mark = server.directory.path().join(format!("runs-{}", rand()));
    let script = format!("open({:?}, 'w').close()\n{script}", mark.to_str().unwrap());
    let child = start(server, &script);
    server.wait_until("the script runs", || mark.exists());
    child
}

fn rand() -> u128 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos()
}

/// Sets the soft limit of a server, whose hard one is ours.
fn limit_descriptors(pid: i32, soft: u64) {
    use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
    let limit = Rlimit { current: Some(soft), maximum: getrlimit(Resource::Nofile).maximum };
    prlimit(Pid::from_raw(pid), Resource::Nofile, limit).unwrap();
}

#[test]
fn a_worker_that_cannot_be_started_ends_nobody() {
    for way in ways() {
        let server = Server::start(way, &["--workers", "2"]);
        let master = pid(&server.child);
        let script = start_and_wait(&server, "import time; time.sleep(3); print('finished')");
        let status = server.orrery(&["status"]).output().unwrap();
        let status = String::from_utf8(status.stdout).unwrap();
        let idle = status.lines().find(|line| line.contains("idle")).unwrap();
        let idle: i32 = idle.split([' ', ':']).nth(1).unwrap().parse().unwrap();
        limit_descriptors(master, 6);
        signal(idle, libc::SIGKILL);
        server.wait_until("the failure is reported", || server.log().contains("cannot start a worker"));
        assert!(is_alive(master));
        let output = script.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "finished\n", "{way:?}: {output:?}");
        limit_descriptors(master, 1024);
        server.wait_until("the place is filled again", || {
            let output = server.orrery(&["status"]).output().unwrap();
            String::from_utf8_lossy(&output.stdout).matches("idle").count() == 2
        });
        // It tried again with pauses, not at once.
        assert!(server.log().matches("cannot start a worker").count() < 50, "{}", server.log());
    }
}

/// Scripts after which the worker's own code faults, unless somebody sees to it.
const BREAKERS: [(&str, &str); 4] = [
    ("FS", "import ctypes; ctypes.CDLL(None).syscall(158, 0x1002, ctypes.c_ulong(0))"),
    ("GS", "import ctypes; ctypes.CDLL(None).syscall(158, 0x1001, ctypes.c_ulong(0x1234))"),
    ("TSC", "import ctypes; ctypes.CDLL(None).prctl(26, 2, 0, 0, 0)"),
    (
        "vDSO",
        "import ctypes\n\
         for line in open('/proc/self/maps'):\n\
         \x20   if '[vdso]' in line or '[vvar' in line:\n\
         \x20       a, b = (int(x, 16) for x in line.split()[0].split('-'))\n\
         \x20       ctypes.CDLL(None).munmap(ctypes.c_void_p(a), ctypes.c_size_t(b - a))",
    ),
];

#[test]
fn a_worker_whose_own_part_is_broken_is_replaced_or_mended() {
    let Some(way) = rollback() else { return };
    let server = Server::start(way, &[]);
    for (name, script) in BREAKERS {
        let _whatever = ran(&mut server.run(["-c", script]), b"");
        let next = ran(&mut server.run(["-c", "import time; time.time(); print('good')"]), b"");
        assert_eq!(
            (told(next.status).as_str(), next.out().as_str()),
            ("exit 0", "good\n"),
            "{name}: {}",
            next.err()
        );
        let mut ends = server.run([
            "-c",
            "import ctypes; r = ctypes.c_ulong(); \
             ctypes.CDLL(None).syscall(158, 0x1004, ctypes.byref(r)); print(hex(r.value))",
        ]);
        assert_eq!(ran(&mut ends, b"").out(), "0x0\n", "{name}: the base of GS");
    }
}

#[test]
fn a_worker_that_makes_every_script_die_is_replaced() {
    let Some(way) = rollback() else { return };
    let server = Server::start(way, &[]);
    let before = server.workers();
    for _ in 0..3 {
        let died = ran(&mut server.run(["-c", "import ctypes; ctypes.string_at(1)"]), b"");
        assert_eq!(told(died.status), "signal 11");
    }
    server.wait_until("another worker", || server.workers() != before && server.workers().len() == 1);
    let next = ran(&mut server.run(["-c", "print(1)"]), b"");
    assert_eq!(next.out(), "1\n");
}

#[test]
fn a_client_that_waits_for_its_turn_can_be_ended() {
    for way in ways() {
        let server = Server::start(way, &[]);
        let mut busy = start_and_wait(&server, "import time; time.sleep(100)");
        for number in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            let mut queued = start(&server, "print('never')");
            std::thread::sleep(Duration::from_millis(200));
            signal(pid(&queued), number);
            let status = queued.wait().unwrap();
            assert_eq!(told(status), format!("signal {number}"), "{way:?}");
        }
        signal(pid(&busy), libc::SIGKILL);
        busy.wait().unwrap();
        assert_eq!(ran(&mut server.run(["-c", "print(1)"]), b"").out(), "1\n", "the others were not run");
    }
}

#[test]
fn a_second_signal_ends_a_client_whose_script_takes_none() {
    let Some(way) = rollback() else { return };
    let server = Server::start(way, &[]);
    // Nothing that arrives is noticed by a script that blocks all signals.
    let blocks =
        "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(60)";
    let mut client = start_and_wait(&server, blocks);
    std::thread::sleep(Duration::from_millis(500));
    signal(pid(&client), libc::SIGINT);
    std::thread::sleep(Duration::from_millis(2200));
    assert!(client.try_wait().unwrap().is_none(), "the first one is the script's");
    signal(pid(&client), libc::SIGINT);
    assert_eq!(told(client.wait().unwrap()), "signal 2");
}

#[test]
fn a_script_that_writes_into_the_status_page_is_run_once_and_believed_nothing() {
    for byte in [0_u8, 0x7f, 0xff] {
        let Some(way) = rollback() else { return };
        let server = Server::start(way, &[]);
        let runs = server.directory.path().join("runs");
        let script = format!(
            "open({:?}, 'a').write('x')\nimport ctypes\n\
             for line in open('/proc/self/maps'):\n\
             \x20   if 'orrery-warm-status' in line: ctypes.memset(int(line.split('-')[0], 16), {byte}, 4096)\n\
             ctypes.CDLL(None).syscall(231, 0)",
            runs.to_str().unwrap()
        );
        let _however = ran(&mut server.run(["-c", &script]), b"");
        let next = ran(&mut server.run(["-c", "print(1)"]), b"");
        assert_eq!(next.out(), "1\n", "{byte}: {}", next.err());
        assert_eq!(std::fs::read_to_string(&runs).unwrap(), "x", "{byte}: how often it was run");
        let status = server.orrery(&["status"]).output().unwrap();
        let status = String::from_utf8(status.stdout).unwrap();
        let numbers = status.split(|character: char| !character.is_ascii_digit());
        assert!(
            numbers.filter(|number| !number.is_empty()).all(|number| number.len() < 9),
            "{byte}: {status}"
        );
    }
}
