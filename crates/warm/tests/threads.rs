//! Threads of scripts that block signals end with the script, and the worker goes on.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod common;

use common::{Server, compare, python, ran, ways};

/// What ordinary scripts have at their end: the thread of faulthandler, a thread that blocks signals as libraries such as
/// ZeroMQ do, the C library's thread behind timers.
const SCRIPTS: [(&str, &str); 3] = [
    ("faulthandler", "import faulthandler; faulthandler.dump_traceback_later(1000); print(1)"),
    (
        "pthread_sigmask",
        "import signal, threading, time\n\
         ready = threading.Event()\n\
         def work():\n\
         \x20   signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); ready.set(); time.sleep(1000)\n\
         threading.Thread(target=work, daemon=True).start(); ready.wait(); print(2)",
    ),
    (
        "SIGEV_THREAD",
        "import ctypes, time\n\
         c = ctypes.CDLL(None); e = (ctypes.c_long * 8)(); t = ctypes.c_void_p()\n\
         f = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)\n\
         e[1] = 2 << 32; e[2] = ctypes.cast(f, ctypes.c_void_p).value\n\
         print(c.timer_create(1, e, ctypes.byref(t)))",
    ),
];

#[test]
fn threads_that_block_signals_leave_the_worker_alive() {
    let mut complaints = String::new();
    for way in ways() {
        let server = Server::start(way, &["--workers", "1"]);
        let workers = server.workers();
        for (name, script) in SCRIPTS {
            let cold = ran(&mut python(["-c", script]), b"");
            for _ in 0..3 {
                let warm = ran(&mut server.run(["-c", script]), b"");
                compare(&mut complaints, &format!("{way:?} {name}"), &warm, &cold);
            }
            let threads = "import os; print(len(os.listdir('/proc/self/task')))";
            assert_eq!(ran(&mut server.run(["-c", threads]), b"").out(), "1\n", "{way:?} {name}");
            assert_eq!(server.workers(), workers, "{way:?} {name}: the worker did not survive it");
        }
    }
    assert!(complaints.is_empty(), "{complaints}");
}
