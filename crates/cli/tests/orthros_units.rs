//! Services that go into the background, as their units have them. SKIPPED where QEMU, criu, a kernel, root or the program are absent.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "orthros/pairs.rs"]
mod pairs;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use pairs::{ONE_PAIR, Up, connect, missing, orthros};

const PAGE: &str = "/var/www/html/index.nginx-debian.html";

/// Asks for the page over a connection that stays open, and returns it.
fn page(connection: &mut BufReader<TcpStream>) -> String {
    write!(connection.get_mut(), "GET /index.nginx-debian.html HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut length = 0;
    loop {
        let mut line = String::new();
        assert!(connection.read_line(&mut line).unwrap() > 0, "the connection is closed");
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    connection.read_exact(&mut body).unwrap();
    String::from_utf8(body).unwrap()
}

/// Debian's unit as it is: `Type=forking`, a PID file, a master with its workers.
#[test]
fn debians_nginx_keeps_its_connections_over_two_panics() {
    if let Some(why) = missing(&[("ip", "iproute2"), ("nginx", "nginx")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    if !Path::new("/lib/systemd/system/nginx.service").is_file() || !Path::new(PAGE).is_file() {
        orrery_testing::skipped!("nginx' unit and its first page are not installed");
        return;
    }
    let _one = ONE_PAIR.lock();
    let network = format!("orrery-nginx-{}", std::process::id());
    let mut command = orthros();
    command.args(["up", "--json", "--unit", "nginx", "--network", &network]);
    for directory in ["/etc/nginx", "/usr/share/nginx", "/var/www/html", "/var/lib/nginx", "/var/log/nginx"] {
        command.args(["--file", directory]);
    }
    let mut up = Up::begin(command);
    up.expect("help");
    let connection = connect(&network, 80);
    connection.set_read_timeout(Some(Duration::from_secs(180))).unwrap();
    let mut connection = BufReader::new(connection);
    let expected = std::fs::read_to_string(PAGE).unwrap();
    assert_eq!(page(&mut connection), expected);
    for _ in 0..2 {
        up.say("crash panic");
        let survived = up.expect("survived");
        assert_eq!(survived["failover"]["summary"]["remarks"].to_string(), "[]");
        for _ in 0..20 {
            assert_eq!(page(&mut connection), expected);
        }
        up.expect("renewed");
    }
    up.say("quit");
    up.expect("end");
}

/// The daemon's parent and the leader of its session have exited, as daemon(7) has it.
const DAEMON: &str = "[Service]
Type=forking
PIDFile=daemon/pid
RuntimeDirectory=daemon
User=nobody
AmbientCapabilities=CAP_NET_BIND_SERVICE
ExecStart=/bin/busybox setsid /bin/busybox sh -c 'busybox sleep 1000000 & echo $! > /run/daemon/pid'
";

#[test]
fn a_daemon_survives_without_the_leader_of_its_session() {
    if let Some(why) = missing(&[]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let unit = directory.path().join("daemon.service");
    std::fs::write(&unit, DAEMON).unwrap();
    let mut command = orthros();
    command.args(["up", "--json", "--unit", unit.to_str().unwrap()]);
    let mut up = Up::begin(command);
    up.expect("help");
    let look = |up: &mut Up| {
        up.say("status");
        let pid = up.expect("status")["status"]["service"].as_i64().unwrap();
        up.say(&format!("run busybox grep -E ^(NSpid|NSsid|CapAmb|CapEff|Name) /proc/{pid}/status"));
        let status = up.expect("ran")["text"].as_str().unwrap().to_owned();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        let [pid, session] = ["NSpid", "NSsid"].map(|name| field(name).pop().unwrap());
        assert_ne!(pid, session, "it leads its session");
        up.say("run cat /run/daemon/pid");
        assert_eq!(up.expect("ran")["text"].as_str().unwrap().trim(), pid);
        (pid, session, field("CapAmb"), field("CapEff"), field("Name"))
    };
    let before = look(&mut up);
    assert_eq!(before.2, ["0000000000000400"]);
    up.say("crash panic");
    assert_eq!(up.expect("survived")["failover"]["summary"]["remarks"].to_string(), "[]");
    assert_eq!(look(&mut up), before);
    up.say("quit");
    up.expect("end");
}

/// What leaves nothing behind, or several things, is no service.
#[test]
fn what_cannot_be_carried_over_is_told_when_it_starts() {
    if let Some(why) = missing(&[]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let unit = directory.path().join("none.service");
    for (text, expected) in [
        ("Type=oneshot\nExecStart=/bin/busybox true", "left no process"),
        ("Type=forking\nExecStart=/bin/busybox false", "exit status: 1"),
        (
            "Type=forking\nExecStart=/bin/busybox sh -c 'busybox sleep 1000 & busybox sleep 1000 &'",
            "left 2 processes (busybox",
        ),
    ] {
        std::fs::write(&unit, format!("[Service]\n{text}\n")).unwrap();
        let output = orthros().args(["up", "--json", "--unit", unit.to_str().unwrap()]).output().unwrap();
        assert!(!output.status.success());
        let told = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
        assert!(told.contains(expected), "{text}: {told}");
    }
}
