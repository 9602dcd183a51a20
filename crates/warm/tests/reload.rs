//! `orrery warm reload` and `--watch`: modules are imported again, and no request is refused, lost or run twice for it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod common;

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::{Server, Way, is_alive, ran, serve_command, signal, ways};
use orrery_testing::Killed;

/// Starts a server that has imported `part.py` of this directory.
fn server_of(way: Way, directory: &Path, options: &[&str], variables: &[(&str, &str)]) -> Server {
    let (options, variables) = with_part(directory, options, variables);
    Server::start_with(way, &options, &variables)
}

/// The same, to which its socket is passed.
fn passed_server_of(way: Way, directory: &Path, options: &[&str]) -> Server {
    let (options, variables) = with_part(directory, options, &[]);
    Server::start_passed(way, true, &options, &variables)
}

type Variable<'a> = (&'a str, &'a str);

fn with_part<'a>(
    directory: &'a Path,
    options: &[&'a str],
    variables: &[Variable<'a>],
) -> (Vec<&'a str>, Vec<Variable<'a>>) {
    let path = [("PYTHONPATH", directory.to_str().unwrap()), ("PYTHONDONTWRITEBYTECODE", "1")];
    (options.iter().copied().chain(["--import", "part"]).collect(), [&path, variables].concat())
}

fn write(directory: &Path, text: &str) {
    fs::write(directory.join("part.py"), text).unwrap();
}

fn shown(server: &Server) -> String {
    ran(&mut server.run(["-c", "import part; print(part.VALUE)"]), b"").out()
}

#[test]
fn modules_are_imported_anew() {
    for (way, passed) in ways().into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), "VALUE = 'first'");
        let server = two_workers(way, passed, directory.path());
        let before = server.workers();
        write(directory.path(), "VALUE = 'second'");
        assert_eq!(shown(&server), "first\n");
        let reload = ran(&mut server.orrery(&["reload"]), b"");
        assert!(reload.status.success(), "{}", reload.err());
        assert_eq!(reload.out(), "2 new workers serve\n");
        assert_eq!(shown(&server), "second\n");
        server.wait_until("the former workers have left", || {
            let after = server.workers();
            after.len() == 2 && after.iter().all(|pid| !before.contains(pid))
        });
        assert!(before.iter().all(|pid| !is_alive(*pid)));
        // A worker counts a request when it has undone it, after the answer.
        server.wait_until("both requests are counted", || {
            let status = ran(&mut server.orrery(&["status"]), b"").out();
            status.contains("2 requests served, 0 workers replaced")
        });
    }
}

fn two_workers(way: Way, passed: bool, directory: &Path) -> Server {
    let options = ["--workers", "2"];
    if passed { passed_server_of(way, directory, &options) } else { server_of(way, directory, &options, &[]) }
}

#[test]
fn a_reload_refuses_and_loses_no_request() {
    for (way, passed) in ways().into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), "VALUE = 0");
        let server = two_workers(way, passed, directory.path());
        // One that began before all reloads, and ends after them.
        let gate = directory.path().join("gate");
        let script = format!(
            "import os, time, part\nprint('up', flush=True)\nwhile not os.path.exists({gate:?}): time.sleep(0.01)\n\
             print('end', part.VALUE)"
        );
        let mut long = server.run(["-c", &script]);
        let mut long = long.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        server.wait_until("the long script runs", || {
            String::from_utf8_lossy(&ran(&mut server.orrery(&["status"]), b"").stdout).contains(": busy")
        });

        let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for client in 0..3 {
                let (server, stop, done) = (&server, &stop, &done);
                scope.spawn(move || {
                    for number in 0.. {
                        let word = format!("{client}.{number}");
                        let result = ran(&mut server.run(["-c", &format!("print('{word}')")]), b"");
                        assert_eq!(result.out(), format!("{word}\n"), "{}", result.err());
                        done.fetch_add(1, Ordering::SeqCst);
                        if stop.load(Ordering::SeqCst) {
                            break;
                        }
                    }
                });
            }
            for value in 1..=4 {
                // Python compiles a file again where its size, or the second of its change, is another.
                write(directory.path(), &format!("VALUE = {}", "4".repeat(value)));
                let reload = ran(&mut server.orrery(&["reload"]), b"");
                if !reload.status.success() {
                    stop.store(true, Ordering::SeqCst);
                    panic!("{}", reload.err());
                }
                let now = done.load(Ordering::SeqCst);
                server.wait_until("requests are served", || done.load(Ordering::SeqCst) > now + 3);
            }
            stop.store(true, Ordering::SeqCst);
        });
        assert_eq!(shown(&server), "4444\n");
        fs::write(&gate, "").unwrap();
        assert!(long.wait().unwrap().success());
        let mut text = String::new();
        std::io::Read::read_to_string(&mut long.stdout.take().unwrap(), &mut text).unwrap();
        assert_eq!(text, "up\nend 0\n", "it kept the module that it began with");
    }
}

#[test]
fn a_reload_that_fails_changes_nothing() {
    for way in ways() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), "VALUE = 'first'");
        let server = server_of(way, directory.path(), &[], &[]);
        let before = server.workers();
        write(directory.path(), "raise SystemError('a mistake')");
        let reload = ran(&mut server.orrery(&["reload"]), b"");
        assert_eq!(reload.status.code(), Some(1));
        let message = reload.err();
        assert!(message.contains("did not reload") && message.contains("ended before"), "{message}");
        assert!(server.log().contains("a mistake"), "{}", server.log());
        assert_eq!((server.workers(), shown(&server)), (before, "first\n".to_owned()));

        // A file in the way of the next socket is left alone.
        let precious = server.directory.path().join("socket.new");
        fs::write(&precious, "precious").unwrap();
        write(directory.path(), "VALUE = 'second'");
        let reload = ran(&mut server.orrery(&["reload"]), b"");
        assert!(!reload.status.success() && reload.err().contains("is not a socket"), "{}", reload.err());
        assert_eq!(
            (shown(&server), fs::read(&precious).unwrap()),
            ("first\n".to_owned(), b"precious".to_vec())
        );
        fs::remove_file(&precious).unwrap();
        assert!(ran(&mut server.orrery(&["reload"]), b"").status.success());
        assert_eq!(shown(&server), "second\n");
    }
}

/// Returns a module that waits while there is a file, and makes another.
fn waiting(held: &Path, seen: &Path) -> String {
    format!(
        "import os, time\nVALUE = 'held'\nopen({seen:?}, 'w').write(str(os.getpid()))\n\
         while os.path.exists({held:?}): time.sleep(0.01)"
    )
}

/// Starts a reload whose workers wait while a file is there, and returns when they do.
fn hold(server: &Server, directory: &Path) -> Child {
    let (held, seen) = (directory.join("held"), directory.join("seen"));
    fs::write(&held, "").unwrap();
    write(directory, &waiting(&held, &seen));
    let mut command = server.orrery(&["reload"]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    server.wait_until("a new worker starts", || fs::read_to_string(&seen).is_ok_and(|pid| !pid.is_empty()));
    child
}

#[test]
fn one_reload_is_made_at_a_time() {
    for way in ways() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), "VALUE = 'first'");
        let server = server_of(way, directory.path(), &[], &[]);
        let first = hold(&server, directory.path());
        let second = ran(&mut server.orrery(&["reload"]), b"");
        assert!(
            !second.status.success() && second.err().contains("another reload is under way"),
            "{}",
            second.err()
        );
        assert_eq!(shown(&server), "first\n", "it serves meanwhile");
        // Who has asked may leave.
        drop(Killed(first));
        assert_eq!(shown(&server), "first\n");
        fs::remove_file(directory.path().join("held")).unwrap();
        server.wait_until("the reload ends", || shown(&server) == "held\n");
    }
}

#[test]
fn a_server_that_ends_ends_its_reload() {
    for way in ways() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), "VALUE = 'first'");
        let mut server = server_of(way, directory.path(), &[], &[]);
        let reload = hold(&server, directory.path());
        let new: i32 = fs::read_to_string(directory.path().join("seen")).unwrap().parse().unwrap();
        signal(i32::try_from(server.child.id()).unwrap(), libc::SIGTERM);
        let output = reload.wait_with_output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && message.contains("about to end"), "{message}");
        assert!(server.child.wait().unwrap().success());
        server.wait_until("the new worker ends", || !is_alive(new));
        let left: Vec<_> = fs::read_dir(server.directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .filter(|name| name.to_str().unwrap().starts_with("socket"))
            .collect();
        assert!(!left.iter().any(|name| name == "socket" || name == "socket.new"), "{left:?}");
    }
}

/// As an editor or an update does it, and nothing is asked of the server.
#[test]
fn changed_files_are_imported_anew() {
    for (way, passed) in ways().into_iter().zip([false, true].into_iter().cycle()) {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("package")).unwrap();
        let path = directory.path().to_str().unwrap();
        write(directory.path(), "VALUE = 'first'");
        let options = ["--workers", "2", "--watch", path];
        let server = if passed {
            passed_server_of(way, directory.path(), &options)
        } else {
            server_of(way, directory.path(), &options, &[])
        };
        write(directory.path(), "VALUE = 'second'");
        server.wait_until("the change is imported", || shown(&server) == "second\n");

        // Many changes, of which the server gets to know at once.
        server.wait_until("the server has come to rest", || at_rest(&server));
        let before = reloads(&server);
        let master = i32::try_from(server.child.id()).unwrap();
        signal(master, libc::SIGSTOP);
        for number in 0..50 {
            fs::write(directory.path().join(format!("package/other{number}.py")), "").unwrap();
        }
        write(directory.path(), "from package.other49 import *\nVALUE = 'the third'");
        signal(master, libc::SIGCONT);
        server.wait_until("the changes are imported", || shown(&server) == "the third\n");
        server.wait_until("the server has come to rest", || at_rest(&server));
        assert_eq!(reloads(&server), before + 1, "{}", server.log());
        fs::write(directory.path().join("package/notes.txt"), "").unwrap();
    }
}

fn reloads(server: &Server) -> usize {
    server.log().matches("reloading: ").count()
}

/// Returns whether each reload that the server began has ended.
fn at_rest(server: &Server) -> bool {
    let log = server.log();
    reloads(server) == log.matches("reloaded").count() + log.matches("cannot reload").count()
}

#[test]
fn what_changes_during_a_reload_is_imported_after_it() {
    for way in ways() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), "VALUE = 'first'");
        let options = ["--watch", directory.path().to_str().unwrap()];
        let server = server_of(way, directory.path(), &options, &[]);
        let (held, seen) = (directory.path().join("held"), directory.path().join("seen"));
        fs::write(&held, "").unwrap();
        write(directory.path(), &waiting(&held, &seen));
        server.wait_until("a reload is under way", || seen.exists());
        write(directory.path(), "VALUE = 'changed meanwhile'");
        assert_eq!(shown(&server), "first\n");
        fs::remove_file(&held).unwrap();
        server.wait_until("the change is imported", || shown(&server) == "changed meanwhile\n");
    }
}

#[test]
fn a_change_that_cannot_be_imported_is_reported_once() {
    for way in ways() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), "VALUE = 'first'");
        let options = ["--workers", "3", "--watch", directory.path().to_str().unwrap()];
        let server = server_of(way, directory.path(), &options, &[]);
        let text = "import sys, time\nprint('begins', file=sys.stderr, flush=True)\ntime.sleep(0.3)\n";
        write(directory.path(), &format!("{text}raise SystemError('a mistake')"));
        server.wait_until("it is reported", || server.log().contains("cannot reload"));
        server.wait_until("the server has come to rest", || at_rest(&server));
        let count = |text: &str| server.log().matches(text).count();
        assert_eq!(count("SystemError: a mistake"), count("cannot reload"), "{}", server.log());
        assert_eq!(count("begins\n"), count("cannot reload"), "{}", server.log());
        assert_eq!(shown(&server), "first\n");
        assert_eq!(server.workers().len(), 3);
        write(directory.path(), "VALUE = 'mended'");
        server.wait_until("the change is imported", || shown(&server) == "mended\n");
    }
}

#[test]
fn only_directories_are_watched() {
    let Some(way) = ways().first().copied() else { return };
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), "");
    for (name, wanted) in [("part.py", "--watch wants a directory"), ("nowhere", "nowhere: No such file")] {
        let path = directory.path().join(name);
        let options = ["--watch", path.to_str().unwrap()];
        let output = serve_command(way, &directory.path().join("socket"), &options).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && message.contains(wanted), "{message}");
    }
    assert!(!directory.path().join("socket").exists());
}

/// `READY=1` comes when requests are served, `STOPPING=1` when the server is about to end.
#[test]
fn the_service_manager_is_notified() {
    let Some(way) = ways().first().copied() else { return };
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), "VALUE = 'first'");
    let path = directory.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let receive = || {
        let mut buffer = [0; 200];
        let length = manager.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).trim().to_owned()
    };
    let mut server = server_of(way, directory.path(), &[], &[("NOTIFY_SOCKET", path.to_str().unwrap())]);
    assert_eq!(receive(), "READY=1");
    assert_eq!(shown(&server), "first\n");
    let seen = ran(&mut server.run(["-c", "import os; print('NOTIFY_SOCKET' in os.environ)"]), b"").out();
    assert_eq!(seen, "False\n", "a script has the client's environment");
    signal(i32::try_from(server.child.id()).unwrap(), libc::SIGTERM);
    assert_eq!(receive(), "STOPPING=1");
    assert!(server.child.wait().unwrap().success());
}
