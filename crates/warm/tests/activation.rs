//! Sockets that a service manager passed: the server serves on them and leaves them, and refuses what is none.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod common;

use std::fs;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Child, Stdio};

use common::{Server, Way, listeners, passed_command, ran, signal, told, ways};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

fn way() -> Way {
    ways().pop().unwrap()
}

fn works(server: &Server) -> bool {
    ran(&mut server.run(["-c", "print(6 * 7)"]), b"").out() == "42\n"
}

fn start(server: &Server, script: &str) -> Child {
    let mut command = server.run(["-c", script]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn end(mut server: Server) -> Server {
    signal(i32::try_from(server.child.id()).unwrap(), libc::SIGTERM);
    assert!(server.child.wait().unwrap().success(), "{}", server.log());
    server
}

#[test]
fn a_passed_socket_is_served_and_left() {
    for (way, control) in ways().into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let server = Server::start_passed(way, control, &["--workers", "2"], &[]);
        let inode = fs::symlink_metadata(server.socket()).unwrap().ino();
        assert!(works(&server), "{}", server.log());
        assert_eq!(server.workers().len(), 2);
        let mut server = end(server);
        assert_eq!(fs::symlink_metadata(server.socket()).unwrap().ino(), inode, "it was not replaced");
        assert_eq!(server.directory.path().join("socket.control").exists(), control);
        // What comes meanwhile is the next server's.
        let client = start(&server, "print('late')");
        let sockets = std::mem::take(&mut server.sockets);
        server.child = passed_command(way, &sockets, &[]).stderr(Stdio::null()).spawn().unwrap();
        let output = client.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "late\n", "{output:?}");
    }
}

/// A request that came before the start, which fails, is there for the next.
#[test]
fn a_start_that_fails_loses_no_request() {
    let directory = tempfile::tempdir().unwrap();
    let sockets = listeners(directory.path(), true);
    let mut client = std::process::Command::new(orrery_testing::built("orrery"));
    client
        .args(["warm", "run", "--socket"])
        .arg(directory.path().join("socket"))
        .args(["-c", "print('served')"]);
    let client = client.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The listener is readable when the client waits.
    let mut waits = [rustix::event::PollFd::new(&sockets[0], rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut waits, None).unwrap();
    assert!(refused(&sockets, &["--import", "no_such_module"]).contains("no_such_module"));
    let mut command = passed_command(way(), &sockets, &[]);
    let server = Server::start_command(way(), directory, &mut command);
    let output = client.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "served\n", "{output:?}: {}", server.log());
}

#[test]
fn the_variables_are_the_servers_alone() {
    let modules = tempfile::tempdir().unwrap();
    let text = "import os\nVALUE = [name for name in os.environ if name.startswith('LISTEN')]\n";
    fs::write(modules.path().join("part.py"), text).unwrap();
    let variables = [("PYTHONPATH", modules.path().to_str().unwrap())];
    let server = Server::start_passed(way(), true, &["--import", "part"], &variables);
    assert_eq!(ran(&mut server.run(["-c", "import part; print(part.VALUE)"]), b"").out(), "[]\n");
}

/// A full queue is one of the kernel's, as without a service manager.
#[test]
fn clients_are_refused_when_the_queue_is_full() {
    for way in ways() {
        let server = Server::start_passed(way, true, &["--queue", "2"], &[]);
        let gate = server.directory.path().join("gate");
        let script =
            format!("import os, time\nwhile not os.path.exists({gate:?}): time.sleep(0.01)\nprint('end')");
        let mut waiting: Vec<Child> = Vec::new();
        let mut refused = false;
        server.wait_until("a client is refused", || {
            waiting.push(start(&server, &script));
            std::thread::sleep(std::time::Duration::from_millis(10));
            for child in &mut waiting {
                refused |= child.try_wait().unwrap().is_some_and(|status| told(status) == "exit 75");
            }
            refused
        });
        assert!(waiting.len() < 100, "{}", waiting.len());
        fs::write(&gate, "").unwrap();
        for child in waiting {
            let output = child.wait_with_output().unwrap();
            let ended = (told(output.status), String::from_utf8_lossy(&output.stdout).into_owned());
            assert!(ended.0 == "exit 75" || ended == ("exit 0".to_owned(), "end\n".to_owned()), "{ended:?}");
        }
    }
}

/// It gets hold of what its worker has, which is no socket of the service manager's.
#[test]
fn a_script_cannot_shut_the_passed_socket() {
    const HOSTILE: [&str; 4] = [
        "s.shutdown(socket.SHUT_RDWR)",
        "s.shutdown(socket.SHUT_RD)",
        // Each message with credentials; none with descriptors, where the kernel can (SO_PASSRIGHTS).
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1); s.setsockopt(socket.SOL_SOCKET, 83, 0)",
        // A filter that drops all (SO_ATTACH_FILTER), and messages to the master.
        "s.setsockopt(socket.SOL_SOCKET, 26, struct.pack('HxxxxxxP', 1, code)); s.send(b'x')",
    ];
    for way in ways() {
        let server = Server::start_passed(way, true, &["--workers", "2"], &[]);
        for hostile in HOSTILE {
            let script = format!(
                "import ctypes, os, socket, struct\nnone = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0))\n\
                 code = ctypes.addressof(none)\nfor n in range(3, 1100):\n  for act in {:?}.split('; '):\n    try:\n      \
                 s = socket.socket(fileno=os.dup(n)); exec(act)\n    except OSError: pass",
                hostile
            );
            let _ = ran(&mut server.run(["-c", &script]), b"");
            for _ in 0..5 {
                server.wait_until("requests are served", || works(&server));
            }
            let reload = ran(&mut server.orrery(&["reload"]), b"");
            assert!(reload.status.success() && works(&server), "{hostile}: {}", reload.err());
        }
    }
}

#[test]
fn what_is_no_socket_to_serve_on_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let stream = |name: &str| OwnedFd::from(UnixListener::bind(path(name)).unwrap());
    let unix = |kind| rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
    let sequential = unix(SocketType::SEQPACKET);
    rustix::net::bind(&sequential, &SocketAddrUnix::new(path("sequential")).unwrap()).unwrap();
    rustix::net::listen(&sequential, 5).unwrap();
    let without_path = unix(SocketType::STREAM);
    let name = format!("orrery-warm-{}", std::process::id());
    rustix::net::bind(&without_path, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    rustix::net::listen(&without_path, 5).unwrap();
    let one_of = |fd: OwnedFd| vec![fd];
    for (sockets, wanted) in [
        (
            one_of(std::io::pipe().unwrap().0.into()),
            "descriptor 3 of those that the service manager passed: it is not a socket",
        ),
        (one_of(TcpListener::bind("127.0.0.1:0").unwrap().into()), "it is not a Unix socket"),
        (one_of(UnixDatagram::bind(path("datagram")).unwrap().into()), "of type SOCK_DGRAM"),
        (one_of(sequential), "of type SOCK_SEQPACKET"),
        (one_of(unix(SocketType::STREAM)), "connected or unbound"),
        (one_of(without_path), "a socket without a path"),
        (vec![stream("first"), unix(SocketType::DGRAM)], "descriptor 4"),
        (vec![stream("one"), stream("two")], "pass one, or start a server for each"),
        (vec![stream("a"), stream("a.control"), stream("b")], "pass one, or start a server for each"),
    ] {
        let message = refused(&sockets, &[]);
        assert!(
            message.contains(wanted) && message.contains("ListenStream=") != message.contains("pass one"),
            "{message}"
        );
    }
    let message = refused(&listeners(directory.path(), false), &["--socket", "/tmp/another"]);
    assert!(message.contains("/tmp/another") && message.contains("leave --socket out"), "{message}");
    assert!(path("socket").exists() && !Path::new("/tmp/another").exists());
    // The control socket cannot be made, because something is in its way.
    fs::write(path("c.control"), "precious").unwrap();
    let message = refused(&[stream("c")], &[]);
    assert!(
        message.contains("c.control; pass it as well") && message.contains("is not a socket"),
        "{message}"
    );
    assert_eq!(fs::read(path("c.control")).unwrap(), b"precious");
}

/// Returns what a server prints that must not start.
fn refused(sockets: &[OwnedFd], options: &[&str]) -> String {
    let output = passed_command(way(), sockets, options).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{message}");
    message
}
