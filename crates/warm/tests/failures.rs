//! Clients that vanish, processes that are killed, sockets in the way, full queues: each has its clear answer, and the
//! server goes on.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Server, default_serve_command, is_alive, python, ran, serve_command, signal, told, ways};
use orrery_warm::client::{Client, Job};
use orrery_warm::protocol::{self, Answer, Outcome};

/// Starts a client whose script first tells that it runs.
fn start(server: &Server, script: &str) -> Child {
    let script = format!("print('up', flush=True)\n{script}");
    let mut command = server.run(["-c", &script]);
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut greeting = [0; 3];
    child.stdout.as_mut().unwrap().read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"up\n");
    child
}

fn pid(child: &Child) -> i32 {
    i32::try_from(child.id()).unwrap()
}

fn idle(server: &Server) -> bool {
    let output = server.orrery(&["status"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    output.status.success()
        && text.contains("worker ")
        && !text.contains(": busy")
        && !text.contains(": starting")
}

fn works(server: &Server) {
    assert_eq!(ran(&mut server.run(["-c", "print(6 * 7)"]), b"").out(), "42\n", "{}", server.log());
}

#[test]
fn a_client_that_vanishes_ends_its_script() {
    for way in ways() {
        let server = Server::start(way, &[]);
        let scratch = tempfile::tempdir().unwrap();
        let trace = scratch.path().join("trace");
        for how in [
            "time.sleep(1000)",
            "\nwhile True: pass",
            "threading.Lock().__enter__().__class__; L = threading.Lock(); L.acquire(); L.acquire()",
        ] {
            let script =
                format!("import atexit, threading, time; atexit.register(open, {trace:?}, 'w'); {how}");
            let mut client = start(&server, &script);
            client.kill().unwrap();
            client.wait().unwrap();
            server.wait_until("the worker is idle", || idle(&server));
            works(&server);
            assert!(!trace.exists(), "{way:?}: no handler runs for a client that has gone");
        }
    }
}

#[test]
fn a_killed_worker_takes_its_script_with_it_and_the_client_learns_how() {
    for way in ways() {
        let server = Server::start(way, &[]);
        let mut client = start(&server, "import time; time.sleep(1000)");
        let worker = server.workers()[0];
        signal(worker, libc::SIGKILL);
        assert_eq!(told(client.wait().unwrap()), "signal 9", "{way:?}");
        server.wait_until("another worker is there", || idle(&server) && server.workers()[0] != worker);
        works(&server);
    }
}

#[test]
fn workers_do_not_outlive_a_killed_master() {
    for way in ways() {
        let mut server = Server::start(way, &["--workers", "2"]);
        let mut client = start(&server, "import os, time; print(os.getpid(), flush=True); time.sleep(1000)");
        let mut line = [0; 16];
        let count = client.stdout.as_mut().unwrap().read(&mut line).unwrap();
        let script: i32 = std::str::from_utf8(&line[..count]).unwrap().trim().parse().unwrap();
        let workers = server.workers();
        assert_eq!(workers.len(), 2);
        server.child.kill().unwrap();
        server.child.wait().unwrap();
        server.wait_until("all have ended", || !workers.iter().chain([&script]).any(|&pid| is_alive(pid)));
        assert_eq!(told(client.wait().unwrap()), "exit 70");
        let mut said = String::new();
        client.stderr.unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains("the server ended while the program ran"), "{said}");
        // Helpers that hold a worker's files may take a moment longer, and the socket with them.
        let mut again = ran(&mut server.run(["-c", "pass"]), b"");
        server.wait_until("the socket is dead", || {
            again = ran(&mut server.run(["-c", "pass"]), b"");
            told(again.status) != "exit 70"
        });
        assert_eq!(told(again.status), "exit 69");
        assert!(again.err().contains("no server listens"), "{}", again.err());
        // The leftovers are in nobody's way.
        server.child = serve_command(way, &server.socket(), &[]).stderr(Stdio::null()).spawn().unwrap();
        server.wait_until("another server is ready", || idle(&server));
        works(&server);
    }
}

#[test]
fn a_socket_in_use_is_left_alone() {
    let way = ways()[0];
    let server = Server::start(way, &[]);
    let output = serve_command(way, &server.socket(), &[]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("in use by another server"), "{said}");
    works(&server);

    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    assert!(!serve_command(way, &path, &[]).status().unwrap().success());
    drop(listener);
    fs::remove_file(&path).unwrap();
    fs::write(&path, "a file").unwrap();
    let output = serve_command(way, &path, &[]).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("is not a socket"));
    assert_eq!(fs::read(&path).unwrap(), b"a file");
}

/// A mask of one CPU, and all that the test may use.
#[test]
fn there_are_as_many_workers_as_usable_cpus() {
    let way = ways()[0];
    let usable = std::thread::available_parallelism().unwrap().get();
    for (one, wanted) in [(true, 1), (false, usable)] {
        let directory = tempfile::tempdir().unwrap();
        let mut command = default_serve_command(way);
        command.arg("--socket").arg(directory.path().join("socket"));
        // SAFETY: plain system calls between fork and exec, on sets that are initialized; nothing is allocated.
        unsafe {
            command.pre_exec(move || {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                if one && libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) == 0 {
                    let first = (0..libc::CPU_SETSIZE as usize).find(|&cpu| libc::CPU_ISSET(cpu, &set));
                    libc::CPU_ZERO(&mut set);
                    libc::CPU_SET(first.unwrap_or(0), &mut set);
                    if libc::sched_setaffinity(0, size_of_val(&set), &raw const set) == -1 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let server = Server::start_command(way, directory, &mut command);
        assert_eq!(server.workers().len(), wanted, "{}", server.log());
        works(&server);
    }
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let scratch = tempfile::tempdir().unwrap();
    fs::write(
        scratch.path().join("threaded.py"),
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n",
    )
    .unwrap();
    let refused = |options: &[&str]| {
        let mut command = serve_command(ways()[0], &scratch.path().join("socket"), options);
        let output = command.env("PYTHONPATH", scratch.path()).output().unwrap();
        assert!(!output.status.success(), "{options:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let said = refused(&["--import", "json,no_such_module"]);
    assert!(said.contains("ModuleNotFoundError: No module named 'no_such_module'"), "{said}");
    // By the first of many workers, before the others start.
    let text =
        "import sys, time\nprint('begins', file=sys.stderr, flush=True)\ntime.sleep(0.5)\nraise SystemError";
    fs::write(scratch.path().join("slow.py"), text).unwrap();
    let said = refused(&["--workers", "4", "--import", "slow"]);
    assert_eq!(said.matches("begins\n").count(), 1, "{said}");
    let said = refused(&["--import", "threaded"]);
    assert!(said.contains("importing 'threaded' started a thread"), "{said}");
    assert!(refused(&["--workers", "0"]).contains("at least one worker"));
    assert!(refused(&["--workers", "many"]).contains("many"));
    assert!(refused(&["--timeout", "soon"]).contains("soon"));
    assert!(refused(&["--memory", "much"]).contains("much"));
    assert!(refused(&["--read", "/"]).contains("--sandbox"));
}

#[test]
fn modules_of_the_servers_own_path_are_imported_but_the_path_is_the_clients() {
    for way in ways() {
        let scratch = tempfile::tempdir().unwrap();
        fs::write(scratch.path().join("house_style.py"), "rule = 7\n").unwrap();
        let socket = scratch.path().join("socket");
        let mut command = serve_command(way, &socket, &["--import", "house_style"]);
        let mut server = command.env("PYTHONPATH", scratch.path()).stderr(Stdio::null()).spawn().unwrap();
        let client = Client::new(&socket);
        let begun = Instant::now();
        while client.health().is_err() && begun.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let script =
            "import sys, house_style as h; sys.exit(h.rule + any(p in h.__file__ for p in sys.path if p))";
        let answer = client.run(&Job::command(script)).unwrap();
        assert_eq!(answer.outcome, Outcome::Exited(7), "{way:?}");
        signal(pid(&server), libc::SIGTERM);
        assert!(server.wait().unwrap().success());
    }
}

#[test]
fn a_full_queue_is_answered_at_once_and_can_be_waited_for() {
    for way in ways() {
        let server = Server::start(way, &["--queue", "1"]);
        let mut running = start(&server, "import time; time.sleep(1000)");
        // How many the kernel lets wait is nearly what it was told; the next one is turned away.
        let mut queued: Vec<Child> = Vec::new();
        let refused = loop {
            assert!(queued.len() < 10, "{way:?}: the queue has no bound");
            let mut command = server.run(["-c", "pass"]);
            let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(300));
            match child.try_wait().unwrap() {
                Some(_) => break child.wait_with_output().unwrap(),
                None => queued.push(child),
            }
        };
        assert_eq!(told(refused.status), "exit 75");
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(said.contains("busy and its queue is full"), "{said}");
        let short = ran(&mut server.orrery(&["run", "--wait", "50ms", "-c", "pass"]), b"");
        assert_eq!(told(short.status), "exit 75");
        let mut patient = server.orrery(&["run", "--wait", "30s", "-c", "pass"]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        running.kill().unwrap();
        running.wait().unwrap();
        assert_eq!(told(patient.wait().unwrap()), "exit 0", "{way:?}");
        for child in &mut queued {
            assert_eq!(told(child.wait().unwrap()), "exit 0", "{way:?}");
        }
    }
}

#[test]
fn a_client_without_descriptors_says_so() {
    let server = Server::start(ways()[0], &[]);
    for limit in [4, 5, 6] {
        let mut shell = Command::new("/bin/sh");
        common::settle_environment(&mut shell).env("ORRERY_WARM", server.socket());
        let client = orrery_testing::built("orrery");
        shell.args(["-c", &format!("ulimit -n {limit}; exec {} warm run /dev/null", client.display())]);
        let ran = ran(&mut shell, b"");
        let (status, said) = (told(ran.status), ran.err());
        assert!(
            status == "exit 0" || status == "exit 71" && said.contains("Too many open files"),
            "{status} {said}"
        );
        assert!(limit > 3 || status == "exit 71", "with three descriptors nothing can be opened");
    }
    works(&server);
}

#[test]
fn signals_reach_the_script_and_end_the_client_likewise() {
    for way in ways() {
        let server = Server::start(way, &[]);
        for (number, expected) in [
            (libc::SIGTERM, "signal 15"),
            (libc::SIGINT, "signal 2"),
            (libc::SIGHUP, "signal 1"),
            (libc::SIGUSR1, "signal 10"),
            (libc::SIGQUIT, "signal 3"),
        ] {
            // Not one long sleep: CPython misses a signal that comes just before it falls asleep until it wakes up.
            let mut client = start(&server, "import time\nwhile True: time.sleep(0.05)");
            signal(pid(&client), number);
            assert_eq!(told(client.wait().unwrap()), expected, "{way:?}");
            let mut said = String::new();
            client.stderr.unwrap().read_to_string(&mut said).unwrap();
            assert_eq!(said.contains("KeyboardInterrupt"), number == libc::SIGINT, "{way:?} {said}");
            server.wait_until("the worker is idle", || idle(&server));
        }
        let handled = "import os, signal, time\ndef f(n, _): os.write(1, b'got %d\\n' % n)\n\
                       for n in (1, 10, 12, 15): signal.signal(n, f)\nsignal.signal(2, signal.SIG_IGN)\nprint('set', flush=True)\n\
                       end = time.time() + 30\nwhile time.time() < end: time.sleep(0.01)";
        let mut client = start(&server, handled);
        let mut out = client.stdout.take().unwrap();
        let mut text = String::new();
        let mut expect = |wanted: &str| {
            while !text.contains(wanted) {
                let mut piece = [0; 64];
                let count = out.read(&mut piece).unwrap();
                assert!(count > 0, "{way:?} {text}");
                text += std::str::from_utf8(&piece[..count]).unwrap();
            }
        };
        expect("set");
        signal(pid(&client), libc::SIGINT);
        for number in [1, 10, 12, 15] {
            signal(pid(&client), number);
            expect(&format!("got {number}\n"));
        }
        client.kill().unwrap();
        client.wait().unwrap();
        works(&server);
    }
}

#[test]
fn stopping_the_client_stops_the_script() {
    for way in ways() {
        let server = Server::start(way, &[]);
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("count");
        let script = format!(
            "import os\nf = os.open({file:?}, os.O_CREAT | os.O_WRONLY)\nn = 0\nwhile True:\n  n += 1; os.pwrite(f, b'%20d' % n, 0)"
        );
        let mut client = start(&server, &script);
        let count = || fs::read_to_string(&file).unwrap_or_default();
        server.wait_until("it counts", || !count().is_empty());
        signal(pid(&client), libc::SIGTSTP);
        server.wait_until("it stands still", || {
            let before = count();
            std::thread::sleep(Duration::from_millis(100));
            count() == before
        });
        let before = count();
        signal(pid(&client), libc::SIGCONT);
        server.wait_until("it counts again", || count() != before);
        client.kill().unwrap();
        client.wait().unwrap();
        server.wait_until("the worker is idle", || idle(&server));
        works(&server);
    }
}

#[test]
fn a_server_told_to_stop_lets_scripts_finish() {
    for way in ways() {
        let mut server = Server::start(way, &[]);
        let mut client = start(&server, "import time; time.sleep(0.5); print('finished')");
        let mut queued = server.run(["-c", "print('queued')"]).stdout(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        signal(pid(&server.child), libc::SIGTERM);
        let mut out = String::new();
        client.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        assert_eq!((out.as_str(), told(client.wait().unwrap()).as_str()), ("finished\n", "exit 0"));
        let mut out = String::new();
        queued.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        assert_eq!((out.as_str(), told(queued.wait().unwrap()).as_str()), ("queued\n", "exit 0"));
        assert!(server.child.wait().unwrap().success());
        let left: Vec<_> =
            fs::read_dir(server.directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(!left.iter().any(|name| name == "socket" || name == "socket.control"), "{left:?}");
    }
}

#[test]
fn without_help_the_client_becomes_python3_if_it_may() {
    let way = ways()[0];
    let server = Server::start(way, &[]);
    let script = "import os, sys; print(os.path.basename(sys.executable), sys.argv, open('/proc/self/cmdline').read().split('\\0')[0])";
    let run = |server: &Server, extra: &[&str], variable: (&str, &str)| {
        let mut command = server.orrery(&["run"]);
        ran(command.args(extra).args(["-B", "-c", script, "x"]).env(variable.0, variable.1), b"")
    };
    let seed = ("PYTHONHASHSEED", "5");
    let refused = run(&server, &[], seed);
    assert_eq!(told(refused.status), "exit 76");
    assert!(refused.err().contains("PYTHONHASHSEED is not the same here"), "{}", refused.err());
    // The server's own: by its path, or a virtual environment would not be known as one.
    assert_eq!(run(&server, &["--fallback"], seed).out(), "python3 ['-c', 'x'] /usr/bin/python3\n");
    let nowhere = ("ORRERY_WARM", "/nonexistent/socket");
    assert_eq!(told(run(&server, &[], nowhere).status), "exit 69");
    assert_eq!(run(&server, &["--fallback"], nowhere).out(), "python3 ['-c', 'x'] python3\n");
}

#[test]
fn a_client_that_talks_nonsense_or_not_at_all_holds_nobody_up() {
    for way in ways() {
        let server = Server::start(way, &["--timeout", "500ms"]);
        let silent = UnixStream::connect(server.socket()).unwrap();
        let mut rude = UnixStream::connect(server.socket()).unwrap();
        rude.write_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
        let mut cut = UnixStream::connect(server.socket()).unwrap();
        cut.write_all(b"ORRY\x01\0\0\0\xff\0\0\0half").unwrap();
        drop(cut);
        works(&server);
        let refusal = |stream: &UnixStream| {
            let received = protocol::receive(std::os::fd::AsFd::as_fd(stream)).unwrap();
            protocol::decode::<Answer>(&received.body).unwrap().outcome
        };
        assert!(matches!(refusal(&rude), Outcome::Refused(reason) if reason.contains("not a frame")));
        assert!(matches!(refusal(&silent), Outcome::Refused(_) | Outcome::TimedOut { .. }));
        let mut control = UnixStream::connect(server.directory.path().join("socket.control")).unwrap();
        control.write_all(b"hello?").unwrap();
        assert_eq!(control.read(&mut [0; 8]).unwrap(), 0);
        works(&server);
    }
}

#[test]
fn workers_run_side_by_side_and_requests_do_not_mix() {
    for way in ways() {
        let server = Server::start(way, &["--workers", "3"]);
        let begun = Instant::now();
        let meet = tempfile::tempdir().unwrap();
        // Each waits until all three are there: with fewer workers they would wait for ever.
        let script = "import os, sys, time\nopen(sys.argv[1], 'w')\nend = time.time() + 20\n\
                      while len(os.listdir('.')) < 3 and time.time() < end: time.sleep(0.001)\n\
                      print(sys.argv[1], sys.stdin.read())\nsys.exit(int(sys.argv[1]))";
        let clients: Vec<_> = (1..=3)
            .map(|number: i32| {
                let mut command = server.run(["-c", script, &number.to_string()]);
                command.current_dir(&meet);
                std::thread::spawn(move || (number, ran(&mut command, format!("input {number}").as_bytes())))
            })
            .collect();
        for client in clients {
            let (number, ran) = client.join().unwrap();
            assert_eq!(
                (ran.out(), told(ran.status)),
                (format!("{number} input {number}\n"), format!("exit {number}"))
            );
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{way:?}");
    }
}

#[test]
fn many_requests_leave_the_server_as_it_was() {
    for way in ways() {
        let server = Server::start(way, &["--import", "json"]);
        let client = Client::new(server.socket());
        let worker = server.workers()[0];
        let state = || {
            server.wait_until("the worker is idle", || idle(&server));
            let fds = fs::read_dir(format!("/proc/{worker}/fd")).unwrap().count();
            let maps = fs::read_to_string(format!("/proc/{worker}/maps")).unwrap().lines().count();
            (fds, maps)
        };
        let environment = [("PATH", "/usr/bin:/bin")];
        let run = |script: &str| client.run(&Job::command(script).environment(environment)).unwrap().outcome;
        for number in 0..20_u8 {
            assert_eq!(
                run(&format!("import json, sys; x = [0] * 10000; sys.exit({number})")),
                Outcome::Exited(number)
            );
        }
        let before = state();
        for number in 0..250_u8 {
            assert_eq!(
                run(&format!("import json, sys; x = [0] * 10000; sys.exit({number})")),
                Outcome::Exited(number)
            );
        }
        assert_eq!(state(), before, "{way:?}");
        assert_eq!(server.workers(), [worker]);
    }
}

#[test]
fn the_library_passes_whatever_streams_it_is_given() {
    for way in ways() {
        let server = Server::start(way, &[]);
        let client = Client::new(server.socket());
        let (reader, writer) = std::io::pipe().unwrap();
        let writer = OwnedFd::from(writer);
        let directory = fs::File::open("/usr/lib").unwrap();
        // SAFETY: both are open for as long as they are borrowed.
        let borrow = |fd: &dyn AsRawFd| unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
        let script = "import os, sys; print(sys.stdin, os.getcwd(), dict(os.environ), sys.stderr)";
        let job = Job::command(script)
            .arguments(["a"])
            .environment([("LC_ALL", "C"), ("ONLY", "this")])
            .streams([None, Some(borrow(&writer)), None])
            .directory(borrow(&directory));
        let answer = client.run(&job).unwrap();
        assert_eq!(answer.outcome, Outcome::Exited(0));
        assert!(answer.micros > 0);
        drop(writer);
        let mut text = String::new();
        { reader }.read_to_string(&mut text).unwrap();
        assert_eq!(text, "None /usr/lib {'LC_ALL': 'C', 'ONLY': 'this'} None\n", "{way:?}");
    }
}

#[test]
fn it_serves_as_the_interpreter_of_a_first_line() {
    let server = Server::start(ways()[0], &[]);
    let scratch = tempfile::tempdir().unwrap();
    let script = scratch.path().join("tool");
    let client = orrery_testing::built("orrery");
    let text = format!(
        "#!/usr/bin/env -S {} warm run\nimport sys; print(sys.argv[1:], sys.stdin.read())\n",
        client.display()
    );
    orrery_testing::write_program(&script, &text);
    let mut command = Command::new(&script);
    common::settle_environment(&mut command).env("ORRERY_WARM", server.socket()).args(["--flag", "x"]);
    let warm = ran(&mut command, b"in");
    assert_eq!(
        warm,
        ran(&mut python([script.as_path(), Path::new("--flag"), Path::new("x")].as_slice()), b"in")
    );
}
