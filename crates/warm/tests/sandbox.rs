//! The walls of `--sandbox`: what they stop, and that ordinary work goes on behind them.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod common;

use std::fs;
use std::path::Path;
use std::process::Stdio;

use common::{Server, Way, compare, examples, python, ran, serve_command, ways};
use orrery_testing::Killed;

/// Each attempt, and whether it must succeed.
const ATTEMPTS: &str = r#"
import ctypes, os, signal, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
outside, readable, writable, other = sys.argv[1:]
def call(function, *arguments):
    if function(*arguments) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def attempt(name, function):
    try:
        function()
        print(name, 'done')
    except OSError as error:
        print(name, 'refused')
attempt('read outside', lambda: open(outside).close())
attempt('list outside', lambda: os.listdir(os.path.dirname(outside)))
attempt('write outside', lambda: open(outside, 'w').close())
attempt('truncate outside', lambda: os.truncate(outside, 0))
attempt('remove outside', lambda: os.remove(outside))
attempt('change mode outside', lambda: os.chmod(outside, 0o777))
attempt('change times outside', lambda: os.utime(outside, (1, 1)))
attempt('link outside', lambda: os.link(outside, writable + '/link'))
attempt('read shadow', lambda: open('/etc/shadow').close())
attempt('read readable', lambda: open(readable + '/file').close())
attempt('execute readable', lambda: subprocess.run([readable + '/tool'], check=True))
attempt('write readable', lambda: open(readable + '/file', 'w').close())
attempt('write writable', lambda: open(writable + '/new', 'w').close())
attempt('remove writable', lambda: os.remove(writable + '/new'))
attempt('see the other process', lambda: open(f'/proc/{other}/status').close())
attempt('signal the other process', lambda: os.kill(int(other), signal.SIGKILL))
attempt('attach to a terminal', lambda: call(libc.ioctl, 0, 0x5412, b'x'))
attempt('internet socket', lambda: socket.socket(socket.AF_INET))
attempt('unix socket', lambda: socket.socket(socket.AF_UNIX))
attempt('socket pair', lambda: socket.socketpair())
attempt('user namespace', lambda: call(libc.unshare, 0x10000000))
attempt('user namespace by clone', lambda: call(libc.syscall, 56, 0x10000000 | 17, 0, 0, 0, 0))
attempt('trace', lambda: call(libc.ptrace, 0, 0, 0, 0))
attempt('io_uring', lambda: call(libc.syscall, 425, 1, 0))
attempt('bpf', lambda: call(libc.syscall, 321, 0, 0, 0))
attempt('keys', lambda: call(libc.syscall, 250, 0, -1, 0, 0, 0))
attempt('filter of its own', lambda: call(libc.prctl, 22, 2, 0, 0, 0))
attempt('limits of its parent', lambda: call(libc.prlimit, os.getppid(), 7, None, None))
attempt('raise a hard limit', lambda: call(libc.setrlimit, 7, (ctypes.c_ulong * 2)(1 << 20, 1 << 20)))
attempt('set the user', lambda: os.setuid(1))
attempt('subprocess', lambda: subprocess.run(['/bin/true'], check=True))
attempt('child killed', lambda: subprocess.Popen(['/bin/sleep', '9']).kill())
attempt('random', lambda: open('/dev/urandom').close())
attempt('own process', lambda: open('/proc/self/status').close())
"#;

const DONE: [&str; 9] = [
    "read readable",
    "execute readable",
    "write writable",
    "remove writable",
    "socket pair",
    "subprocess",
    "child killed",
    "random",
    "own process",
];

fn furnish(scratch: &Path) {
    for directory in ["outside", "readable", "writable"] {
        fs::create_dir(scratch.join(directory)).unwrap();
    }
    fs::write(scratch.join("outside/file"), "precious").unwrap();
    fs::write(scratch.join("readable/file"), "public").unwrap();
    orrery_testing::write_program(scratch.join("readable/tool"), "#!/bin/sh\n");
}

fn walled(way: Way, namespaces: bool, options: &[&str]) -> Server {
    let variables: &[(&str, &str)] = if namespaces { &[] } else { &[("ORRERY_NAMESPACES", "off")] };
    Server::start_with(way, options, variables)
}

#[test]
fn the_walls_stop_what_they_should_and_nothing_else() {
    for way in ways() {
        for namespaces in [true, false] {
            let scratch = tempfile::tempdir().unwrap();
            furnish(scratch.path());
            let path = |name: &str| scratch.path().join(name).to_str().unwrap().to_owned();
            let options =
                ["--sandbox", "--read", &path("readable"), "--write", &path("writable"), "--timeout", "20s"];
            let server = walled(way, namespaces, &options);
            let bystander = Killed(std::process::Command::new("sleep").arg("100").spawn().unwrap());
            let other = bystander.0.id().to_string();
            let arguments =
                ["-c", ATTEMPTS, &path("outside/file"), &path("readable"), &path("writable"), &other];
            let ran = ran(&mut server.run(arguments), b"");
            let (text, what) = (ran.out(), format!("{way:?} namespaces: {namespaces}"));
            assert!(ran.status.success(), "{what}: {}", ran.err());
            assert_eq!(text.lines().count(), 34, "{what}: {text}");
            for line in text.lines() {
                let (name, result) = line.rsplit_once(' ').unwrap();
                // Without a /proc of the worker's own, only the worker's own entry is open, not its children's.
                if name == "own process" && !namespaces {
                    continue;
                }
                let expected = if DONE.contains(&name) { "done" } else { "refused" };
                assert_eq!(result, expected, "{what}: {name}");
            }
            assert_eq!(fs::read(scratch.path().join("outside/file")).unwrap(), b"precious");
            assert!(common::is_alive(i32::try_from(bystander.0.id()).unwrap()));
        }
    }
}

#[test]
fn with_net_sockets_are_there() {
    let way = ways()[0];
    let server = walled(way, true, &["--sandbox", "--net"]);
    let script = "import socket, threading\ns = socket.create_server(('127.0.0.1', 0))\n\
                  threading.Thread(target=lambda: s.accept()[0].sendall(b'hi')).start()\n\
                  print(socket.create_connection(s.getsockname()).recv(2))";
    assert_eq!(ran(&mut server.run(["-c", script]), b"").out(), "b'hi'\n");
}

#[test]
fn a_worker_that_cannot_be_walled_in_does_not_start() {
    let scratch = tempfile::tempdir().unwrap();
    let socket = scratch.path().join("socket");
    for option in ["--read", "--write"] {
        let mut command = serve_command(ways()[0], &socket, &["--sandbox", option, "/nonexistent/path"]);
        let output = command.stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains("No such file"), "{option} {said}");
    }
}

#[test]
fn examples_run_behind_the_walls() {
    for way in ways() {
        for namespaces in [true, false] {
            let examples = examples();
            let options = [
                "--import",
                common::IMPORTS,
                "--timeout",
                "30s",
                "--sandbox",
                "--read",
                examples.to_str().unwrap(),
                "--write",
                "/tmp",
            ];
            let server = walled(way, namespaces, &options);
            let mut complaints = String::new();
            for entry in fs::read_dir(&examples).unwrap() {
                let folder = entry.unwrap().path();
                let name = folder.file_name().unwrap().to_str().unwrap();
                // Changing modes and times needs mounts of the worker's own.
                if name == "hostile" || name == "scratch_files" && !namespaces || !folder.is_dir() {
                    continue;
                }
                let arguments = fs::read_to_string(folder.join("ARGUMENTS")).unwrap_or_default();
                let input = fs::read(folder.join("STDIN")).unwrap_or_default();
                let mut words = vec![format!("{name}.py")];
                words.extend(arguments.split_whitespace().map(str::to_owned));
                let cold = ran(python(&words).current_dir(&folder), &input);
                let warm =
                    ran(server.run(&words).env("PYTHONDONTWRITEBYTECODE", "1").current_dir(&folder), &input);
                compare(&mut complaints, &format!("{way:?} {namespaces} {name}"), &warm, &cold);
            }
            assert!(complaints.is_empty(), "{complaints}");
        }
    }
}

/// Writes into a string that all scripts share, and asks the kernel, through the engine's own descriptor, to protect the page
/// as if nothing had been written.
const HIDE: &str = r#"
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
address = id(json.__doc__) + 48
ctypes.memmove(address, b'SECRET', 6)
page = address & ~4095
done = []
for number in os.listdir('/proc/self/fd'):
    try:
        link = os.readlink('/proc/self/fd/' + number)
    except OSError:
        continue
    if 'userfaultfd' in link:
        done.append(libc.ioctl(int(number), 0xc018aa06, (ctypes.c_ulong * 3)(page, 4096, 1)))
pagemap = os.open('/proc/self/pagemap', os.O_RDONLY)
regions = (ctypes.c_ulong * 30)()
scan = (ctypes.c_ulong * 12)(96, 3, page, page + 4096, 0, ctypes.addressof(regions), 10, 0, 0, 2, 0, 2)
done.append(libc.ioctl(pagemap, 0xc0606610, scan))
print(json.__doc__[:6], done)
"#;

#[test]
fn a_script_cannot_hide_what_it_wrote_with_the_engines_descriptors() {
    let Some(way) = ways().into_iter().find(|way| way.tracker == Some("wp_async")) else { return };
    for namespaces in [true, false] {
        let server = walled(way, namespaces, &["--sandbox", "--import", "json,ctypes", "--timeout", "20s"]);
        let hides = ran(&mut server.run(["-c", HIDE]), b"");
        assert!(hides.out().starts_with("SECRET [-1"), "{}{}", hides.out(), hides.err());
        assert!(!hides.out().contains(" 0") && !hides.out().contains("[0"), "{}", hides.out());
        let next = ran(&mut server.run(["-c", "import json; print(json.__doc__[:6])"]), b"");
        assert!(next.status.success() && !next.out().contains("SECRET"), "{}{}", next.out(), next.err());
    }
}
