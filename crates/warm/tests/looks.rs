//! What a worker looks at after each script: a change of one attribute alone is found, and a script that changes nothing
//! costs few looks.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::process::{Command, Stdio};

use common::{Server, ran, ways};

/// Prints what `/proc/self/status`, `/proc/self/limits` and direct questions tell of the worker, in which each script runs.
const PROBE: &str = "\
import ctypes, os, resource
c = ctypes.CDLL(None)
def action(signal):
    old = (ctypes.c_ulong * 4)()
    c.syscall(13, signal, None, old, 8)
    # Beside handlers, flags count for SIGCHLD alone.
    return list(old) if old[0] > 1 or signal == 17 else old[0]
for signal in range(1, 65): print(signal, action(signal))
for which in range(16): print(which, resource.prlimit(0, which))
print(oct(os.umask(0o22)), open('/proc/self/comm').read(), os.getresuid(), os.getresgid(), os.getsid(0), os.getpgrp())
print(os.listdir('/proc/self/fd'), c.getpriority(0, 0), os.sched_getaffinity(0))
for number in range(1010):
    try: info = open(f'/proc/self/fdinfo/{number}').read().split()[:4]
    except OSError: continue
    # The script's own streams are its client's.
    if 3 < number < 1008: print(number, info, os.readlink(f'/proc/self/fd/{number}'))
";

/// Changes of one attribute each.
const CHANGES: &[&str] = &[
    "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
    "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)",
    "import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)",
    "import signal; signal.siginterrupt(signal.SIGINT, False)",
    // From one handler to another: that of SIGINT becomes SIGSEGV's, and the other way about.
    "import ctypes; c = ctypes.CDLL(None); a = (ctypes.c_ulong * 4)(); c.syscall(13, 2, None, a, 8); c.syscall(13, 11, a, None, 8)",
    "import ctypes; c = ctypes.CDLL(None); a = (ctypes.c_ulong * 4)(); c.syscall(13, 11, None, a, 8); c.syscall(13, 2, a, None, 8)",
    // Flags and mask of a handler; SA_NOCLDWAIT and SA_NOCLDSTOP of SIGCHLD.
    "import ctypes; c = ctypes.CDLL(None); a = (ctypes.c_ulong * 4)(); c.syscall(13, 7, None, a, 8); a[1] ^= 1 << 30; c.syscall(13, 7, a, None, 8)",
    "import ctypes; c = ctypes.CDLL(None); a = (ctypes.c_ulong * 4)(); c.syscall(13, 7, None, a, 8); a[3] ^= 1; c.syscall(13, 7, a, None, 8)",
    "import ctypes; c = ctypes.CDLL(None); a = (ctypes.c_ulong * 4)(0, 2); c.syscall(13, 17, a, None, 8)",
    "import ctypes; c = ctypes.CDLL(None); a = (ctypes.c_ulong * 4)(0, 1); c.syscall(13, 17, a, None, 8)",
    "import os; os.umask(0o777)",
    "import os; os.umask(0)",
    "import ctypes; ctypes.CDLL(None).prctl(15, b'another')",
    "import os; os.nice(3)",
    "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
    "import os, contextlib\nwith contextlib.suppress(OSError): os.setresuid(-1, 65534, -1)",
    "import os, contextlib\nwith contextlib.suppress(OSError): os.setresgid(-1, 65534, -1)",
    // The worker's own descriptors: their flags, their offsets, and others in their place.
    "import fcntl, os\nfor n in os.listdir('/proc/self/fd'):\n  if int(n) > 3 and os.path.exists('/proc/self/fd/' + n): fcntl.fcntl(int(n), fcntl.F_SETFD, 0)",
    // What the worker's streams go to is output, whose offset stays.
    "import os, contextlib\nfor n in os.listdir('/proc/self/fd'):\n  with contextlib.suppress(OSError):\n    if 985 < int(n) and os.readlink('/proc/self/fd/' + n).startswith('/proc'): os.lseek(int(n), 1, 0)",
    "import fcntl, os, contextlib\nfor n in os.listdir('/proc/self/fd'):\n  if 993 < int(n) < 1008:\n    with contextlib.suppress(OSError): fcntl.fcntl(int(n), fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)",
    "import os\nfor n in os.listdir('/proc/self/fd'):\n  if 993 < int(n) < 1008: os.dup2(0, int(n))",
    "import os; os.open('/', os.O_RDONLY); os.dup2(0, 600)",
];

fn limit_changes() -> impl Iterator<Item = String> {
    (0..16).map(|which| {
        format!(
            "import resource, contextlib\n\
             soft, hard = resource.prlimit(0, {which})\n\
             with contextlib.suppress(ValueError): resource.prlimit(0, {which}, (soft - 1 if soft > 0 else 1 << 30, hard))"
        )
    })
}

#[test]
fn a_change_of_one_attribute_is_found() {
    for way in ways().into_iter().filter(|way| way.isolation == "rollback") {
        let server = Server::start(way, &["--workers", "1", "--import", "ctypes,resource,signal,fcntl"]);
        let probe = || ran(&mut server.run(["-c", PROBE]), b"").out();
        let (worker, before) = (server.workers(), probe());
        assert!(before.lines().count() > 80, "{before}");
        let changes = CHANGES.iter().map(|change| (*change).to_owned()).chain(limit_changes());
        for change in changes {
            let changed = ran(&mut server.run(["-c", &change]), b"");
            assert!(changed.out().is_empty() && changed.err().is_empty(), "{change}: {changed:?}");
            let after = probe();
            assert_eq!(after, before, "{way:?}: after {change}");
        }
        assert_eq!(server.workers(), worker, "{way:?}: all of these can be set back");
    }
}

/// How many system calls a trivial script may cost: 200 on Linux 6.18, where the worker is root's.
const MOST_CALLS: usize = 240;

#[test]
fn a_trivial_script_costs_few_system_calls() {
    const REQUESTS: usize = 20;
    let Some(way) = ways().into_iter().find(|way| way.tracker == Some("wp_async")) else { return };
    if Command::new("strace").arg("-V").output().is_err() {
        orrery_testing::skipped!("strace is not installed");
        return;
    }
    let server = Server::start(way, &["--workers", "1"]);
    let request = || assert_eq!(ran(&mut server.run(["-c", "print(1)"]), b"").out(), "1\n");
    // Hot pages are known after a few.
    (0..5).for_each(|_| request());
    let log = server.directory.path().join("calls");
    let worker = server.workers()[0].to_string();
    let mut strace = Command::new("strace");
    strace.args(["-q", "-o"]).arg(&log).args(["-p", &worker]).stderr(Stdio::piped());
    let mut strace = strace.spawn().unwrap();
    let count = || std::fs::read_to_string(&log).unwrap_or_default().lines().count();
    orrery_testing::eventually("strace sees the worker", || {
        if strace.try_wait().unwrap().is_some() {
            return true;
        }
        request();
        count() > 0
    });
    if strace.try_wait().unwrap().is_some() {
        let said = std::io::read_to_string(strace.stderr.take().unwrap()).unwrap();
        orrery_testing::skipped!("strace may not trace a worker here: {said}");
        return;
    }
    // What it writes is complete when a later request is in it.
    let settled = || {
        let mut last = 0;
        orrery_testing::eventually("the log stands still", || {
            std::thread::sleep(std::time::Duration::from_millis(100));
            std::mem::replace(&mut last, count()) == count() && last > 0
        });
        last
    };
    let before = settled();
    (0..REQUESTS).for_each(|_| request());
    let calls = (settled() - before) / REQUESTS;
    strace.kill().unwrap();
    strace.wait().unwrap();
    println!("{calls} system calls for a trivial script");
    assert!(calls <= MOST_CALLS, "{calls} system calls; {}", std::fs::read_to_string(&log).unwrap());
}
