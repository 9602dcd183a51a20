//! Programs of others whose kernels die. SKIPPED where QEMU, criu, a kernel, root or the program are absent.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "orthros/pairs.rs"]
mod pairs;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use pairs::{ONE_PAIR, Up, connect, missing};

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

/// Asks for something over a connection that stays open, and returns the answer.
fn ask(connection: &mut BufReader<TcpStream>, what: &str) -> String {
    write!(connection.get_mut(), "GET /?{what} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
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

/// haproxy watches each of its threads by a timer that goes by the processor time of that thread.
#[test]
fn haproxy_keeps_its_connections_over_two_panics() {
    if let Some(why) = missing(&[("ip", "iproute2"), ("haproxy", "haproxy")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let configuration = directory.path().join("haproxy.cfg");
    std::fs::write(&configuration, HAPROXY).unwrap();
    let network = format!("orrery-haproxy-{}", std::process::id());
    let file = format!("{}:/haproxy.cfg", configuration.display());
    let options = ["--network", &network, "--file", &file, "--cpus", "2"];
    let mut up = Up::start(&options, &["haproxy", "-db", "-f", "/haproxy.cfg"]);
    up.expect("help");
    let connection = connect(&network, 80);
    connection.set_read_timeout(Some(Duration::from_secs(180))).unwrap();
    let mut connection = BufReader::new(connection);
    assert_eq!(ask(&mut connection, "before"), "<before>");
    for round in 0..2 {
        up.say("crash panic");
        let survived = up.expect("survived");
        assert_eq!(survived["failover"]["summary"]["remarks"].to_string(), "[]");
        for request in 0..20 {
            let what = format!("round-{round}-{request}");
            assert_eq!(ask(&mut connection, &what), format!("<{what}>"));
        }
        up.expect("renewed");
    }
    up.say("quit");
    up.expect("end");
}
