//! Addresses as the kernel means them, whatever a program writes: see `network.c`.

use std::fs;
use std::io::Read as _;
use std::net::{TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

use crate::scene::{Scene, User, built, text};

/// What listens outside: at every address, at a path, at an abstract name.
struct Outside {
    port: u16,
    path: PathBuf,
    name: String,
    datagrams: UdpSocket,
    _unix: UnixListener,
    _abstract: UnixListener,
    _folder: TempDir,
}

impl Outside {
    fn new() -> Self {
        let streams = TcpListener::bind("[::]:0").unwrap();
        let port = streams.local_addr().unwrap().port();
        let datagrams = UdpSocket::bind(("::", port)).unwrap();
        datagrams.set_nonblocking(true).unwrap();
        // Whatever connects is let go, so that the queue does not fill.
        std::thread::spawn(move || {
            for mut stream in streams.incoming().flatten() {
                let _ = stream.read(&mut [0; 8]);
            }
        });
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        let path = folder.path().canonicalize().unwrap().join("socket");
        let name = format!("orrery-test-{}-{port}", std::process::id());
        let unix = UnixListener::bind(&path).unwrap();
        let other = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        for (place, mode) in [(folder.path(), "755"), (path.as_path(), "777")] {
            assert!(Command::new("chmod").arg(mode).arg(place).status().unwrap().success());
        }
        Self { port, path, name, datagrams, _unix: unix, _abstract: other, _folder: folder }
    }

    fn arguments(&self) -> [String; 3] {
        [self.port.to_string(), self.path.to_str().unwrap().to_owned(), self.name.clone()]
    }

    fn received(&self) -> usize {
        std::iter::from_fn(|| self.datagrams.recv(&mut [0; 8]).ok()).count()
    }
}

/// Returns the lines that tell of ways that led somewhere.
fn ways(output: &Output) -> Vec<String> {
    let said = text(&output.stdout);
    assert!(output.status.success() && said.contains("ways led somewhere"), "{output:?}");
    said.lines().filter(|line| line.starts_with("PASSED")).map(str::to_owned).collect()
}

/// Runs the program under guard, by this user, with this section of addresses.
fn guarded(user: User, outside: &Outside, network: &str) -> Option<Vec<String>> {
    let program = built("network").to_str().unwrap();
    let scene = Scene::new(&format!("execute = [\"{program}\"]\n"));
    scene.change(|policy| {
        let policy = policy.replace("read = [", &format!("read = [\"{program}\", "));
        format!("{policy}{network}")
    });
    let output = scene.run_as(user, &["--quiet"], program, &outside.arguments())?;
    Some(ways(&output))
}

#[test]
fn the_ways_are_real() {
    let outside = Outside::new();
    let folder = tempfile::tempdir().unwrap();
    let output =
        Command::new(built("network")).args(outside.arguments()).current_dir(&folder).output().unwrap();
    let ways = ways(&output);
    // Among them those that once led past the monitor.
    for way in [
        "PASSED bind, tcp4, unspec 0.0.0.0, 16: 0.0.0.0:",
        "PASSED listen, tcp4, ",
        "PASSED listen, tcp6, ",
        "PASSED sendto, udp4, unspec 127.0.0.1, 16",
        "PASSED sendmsg, udp4, unspec 127.0.0.1, 16",
        "PASSED sendmmsg, udp4, unspec 127.0.0.1, 16",
        "PASSED connect, tcp6, ::ffff:0.0.0.0, 28",
        "PASSED connect, tcp4, 0.0.0.0, 16",
        "PASSED bind, unix stream, only the family, 2",
        "PASSED autobind, unix datagram, ",
    ] {
        assert!(ways.iter().any(|line| line.starts_with(way)), "{way}: {ways:#?}");
    }
    assert!(outside.received() > 10);
}

#[test]
fn without_addresses_nothing_listens_and_nothing_leaves() {
    for user in User::ALL {
        for network in ["", "\n[network]\n", "\n[network]\nconnect = []\nbind = []\n"] {
            let outside = Outside::new();
            let Some(ways) = guarded(user, &outside, network) else { continue };
            assert_eq!(ways, [""; 0], "{user:?}, {network:?}");
            assert_eq!(outside.received(), 0, "{user:?}, {network:?}");
        }
    }
}

/// Other addresses are listed than those that are tried, so that every kind of socket can be made.
#[test]
fn addresses_that_are_not_listed_are_not_reached() {
    for user in User::ALL {
        let outside = Outside::new();
        let network = "\n[network]\nconnect = [\"127.0.0.9:*\", \"[::9]:*\", \"unix:@other\"]\nbind = [\"127.0.0.9:*\", \"unix:@other\"]\n";
        let Some(ways) = guarded(user, &outside, network) else { continue };
        assert_eq!(ways, [""; 0], "{user:?}");
        assert_eq!(outside.received(), 0, "{user:?}");
    }
}

/// One address is listed: whatever led somewhere led there, by the kernel's own words.
#[test]
fn an_address_is_listed_however_it_is_written() {
    for user in User::ALL {
        let outside = Outside::new();
        let port = outside.port;
        let network = format!("\n[network]\nconnect = [\"127.0.0.1:{port}\"]\n");
        let Some(ways) = guarded(user, &outside, &network) else { continue };
        for way in &ways {
            let peer = way.rsplit(" -> ").next().unwrap();
            let there = [format!("127.0.0.1:{port}"), format!("[::ffff:127.0.0.1]:{port}"), "-".to_owned()];
            assert!(there.iter().any(|known| known == peer), "{user:?}: {way}");
        }
        for way in [
            "PASSED connect, tcp4, 127.0.0.1, 16",
            "PASSED connect, tcp4, 0.0.0.0, 16",
            "PASSED connect, tcp6, ::ffff:127.0.0.1, 28",
            "PASSED connect, tcp6, ::ffff:0.0.0.0, 24",
            "PASSED sendto, udp4, unspec 127.0.0.1, 16",
            "PASSED sendmmsg, udp4, 0.0.0.0, 128",
            "PASSED sendmsg, udp6, ::ffff:0.0.0.0, 28",
        ] {
            assert!(ways.iter().any(|line| line.starts_with(way)), "{user:?}, {way}: {ways:#?}");
        }
        // As many datagrams as were said to be sent.
        let sent = ways
            .iter()
            .filter(|way| way.contains(", udp") && (way.contains("send") || way.contains("fast")))
            .count();
        assert_eq!(outside.received(), sent, "{user:?}: {ways:#?}");
    }
}

#[test]
fn names_that_the_kernel_picks_have_to_be_listed() {
    let outside = Outside::new();
    let listed =
        guarded(User::Current, &outside, "\n[network]\nbind = [\"unix:@\", \"127.0.0.1:0\"]\n").unwrap();
    assert!(
        listed.iter().any(|way| way.starts_with("PASSED bind, unix stream, only the family")),
        "{listed:#?}"
    );
    assert!(!listed.iter().any(|way| way.starts_with("PASSED listen, tcp")), "{listed:#?}");
    let listening = guarded(User::Current, &outside, "\n[network]\nbind = [\"tcp:0.0.0.0:0\"]\n").unwrap();
    assert_eq!(
        listening.iter().filter(|way| way.starts_with("PASSED listen, ")).count(),
        2,
        "{listening:#?}"
    );
    assert!(
        listening.iter().all(|way| way.contains("tcp4") || way.contains("::ffff:0.0.0.0")),
        "{listening:#?}"
    );
}

/// What was asked about when it was bound listens, as often as it likes; Go's servers are MPTCP's.
#[test]
fn who_is_bound_listens() {
    let scene = Scene::ordinary();
    scene.change(|policy| {
        format!(
            "{policy}\n[network]\nbind = [\"127.0.0.1:0\", \"[::1]:0\", \"unix:{}\", \"unix:@\"]\n",
            scene.work.display()
        )
    });
    let script = "
import socket
made = []
for family, address in ((socket.AF_INET, ('127.0.0.1', 0)), (socket.AF_INET6, ('::1', 0)), (socket.AF_UNIX, 'path'), (socket.AF_UNIX, b'')):
    for protocol in (0, 262) if family != socket.AF_UNIX else (0,):
        try: server = socket.socket(family, socket.SOCK_STREAM, protocol)
        except OSError: continue
        server.bind(address)
        server.listen(1); server.listen(2)
        made.append(server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
print(len(made) >= 4, set(made))
";
    let output = scene.run(&["/usr/bin/python3", "-S", "-c", script]);
    assert_eq!(text(&output.stdout), "True {1}\n", "{output:?}");
}

/// Rules that let everything pass but addresses, under `orrery run --enforce`.
#[test]
fn rules_about_addresses_are_held_by_every_way() {
    let outside = Outside::new();
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.toml");
    let rule = "[[rule]]\ncall = '%network'\naddress = ['*', 'unix:**']\ndeny = 'EACCES'\n";
    fs::write(&policy, rule).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.args(["run", "--enforce", "--policy"]).arg(&policy).current_dir(&folder).stdin(Stdio::null());
    let output = command.arg("--").arg(built("network")).args(outside.arguments()).output().unwrap();
    if text(&output.stderr).contains("no executive") {
        return orrery_testing::skipped!("no executive under guard: {}", text(&output.stderr));
    }
    assert_eq!(ways(&output), [""; 0], "{}", text(&output.stderr));
    assert_eq!(outside.received(), 0);
}

/// Sends messages in all ways, and prints who each of them was from, as the receiver is shown: nothing else may be claimed.
const SENDERS: &str = "
import os, socket, struct
PIPES = [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM]
who = lambda: (os.getpid(), os.getuid(), os.getgid())
def shown(b):
    data, control, *_ = b.recvmsg(10, 200)
    found = [c for c in control if c[1] == 2]
    files = [c for c in control if c[1] == 1]
    [os.close(*struct.unpack('i', c[2])) for c in files]
    return struct.unpack('3i', found[0][2]), data, len(files)
def claim(pid, uid, gid): return [(socket.SOL_SOCKET, 2, struct.pack('3i', pid, uid, gid))]
def exchange(kind):
    a, b = socket.socketpair(socket.AF_UNIX, kind)
    b.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ways = {
        'plain': lambda: a.sendmsg([b'x']),
        'file': lambda: a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack('i', 1))]),
        'claimed': lambda: a.sendmsg([b'x'], claim(*who())),
    }
    for name, send in ways.items():
        send()
        sender, data, files = shown(b)
        print(kind, name, sender[0] == os.getpid(), sender[1:] == who()[1:], data, files)
        if os.fork() == 0:
            send()
            os._exit(0)
        child = os.wait()[0]
        sender = shown(b)[0]
        print(kind, name, sender[0] == child, sender[1:] == who()[1:])
    pid, uid, gid = who()
    for name, wrong in {'pid': (os.getppid(), uid, gid), 'uid': (pid, uid + 5, gid), 'gid': (pid, uid, gid + 5)}.items():
        try: print(kind, 'as another', name, a.sendmsg([b'x'], claim(*wrong)))
        except OSError as error: print(kind, 'as another', name, error.errno)
for kind in PIPES: exchange(kind)
";

#[test]
fn messages_are_from_the_program_and_nobody_is_somebody_else() {
    let python = "/usr/bin/python3";
    for user in User::ALL {
        let scene = Scene::ordinary();
        // Each message is looked at, as each may go to an address of its own.
        scene.change(|policy| format!("{policy}\n[network]\nconnect = [\"unix:@somebody\"]\n"));
        let words = ["-c".to_owned(), SENDERS.to_owned()];
        let Some(output) = scene.run_as(user, &[], python, &words) else { continue };
        let shown = text(&output.stdout);
        assert!(output.status.success(), "{user:?}: {output:?}");
        // The kernel lets no ordinary user name another process.
        let names_process = user == User::Current && crate::scene::is_superuser();
        for kind in [libc::SOCK_STREAM, libc::SOCK_SEQPACKET, libc::SOCK_DGRAM] {
            let process = if names_process { "True" } else { "False" };
            for (way, files) in [("plain", 0), ("file", 1), ("claimed", 0)] {
                assert!(
                    shown.contains(&format!("{kind} {way} {process} True b'x' {files}\n")),
                    "{user:?}: {shown}"
                );
                assert!(shown.contains(&format!("{kind} {way} {process} True\n")), "{user:?}: {shown}");
            }
            for claim in ["pid", "uid", "gid"] {
                assert!(shown.contains(&format!("{kind} as another {claim} 1\n")), "{user:?}: {shown}");
            }
        }
    }
}
