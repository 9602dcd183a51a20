//! What clients of `orrery warm http` get, end to end: a warm server with CPython, the HTTP server before it, and requests as they
//! are on the wire.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

mod common;

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use common::warm::Server;
use common::{Answer, Front, WAY, a_while, command, directory, raw, until_there};
use orrery_testing::eventually;

const TEXT: &str = "Content-Type: text/plain\n\n";

fn warm() -> Server {
    Server::start(WAY, &["--import", "json,hashlib"])
}

#[test]
fn scripts_get_their_requests_as_the_specification_has_it() {
    let server = warm();
    let front = Front::start(&server, &["--env", "OWN=value", "--env", "ABSENT"]);
    let answer = front.send(
        "POST /sub/inner.py/a%20b?q=1&r=%41 HTTP/1.1\r\nHost: example.org:8080\r\nContent-Type: text/x\r\nContent-Length: 3\r\n\
         X-Thing: one\r\nx-thing: two\r\nProxy: http://evil\r\nX_Forwarded_For: evil\r\nAuthorization: Basic c2VjcmV0\r\n\
         Connection: close\r\n\r\nabc",
    );
    assert_eq!((answer.status, answer.whole), (200, true), "{answer:?}");
    assert_eq!(answer.field("content-type"), Some("application/json"));
    let variables: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    let scripts = front.directory.path().join("scripts").canonicalize().unwrap();
    let path = scripts.join("sub/inner.py");
    let expected = [
        ("REQUEST_METHOD", "POST"),
        ("QUERY_STRING", "q=1&r=%41"),
        ("CONTENT_TYPE", "text/x"),
        ("CONTENT_LENGTH", "3"),
        ("SCRIPT_NAME", "/sub/inner.py"),
        ("PATH_INFO", "/a b"),
        ("SERVER_NAME", "example.org"),
        ("SERVER_PORT", &front.address.port().to_string()),
        ("SERVER_PROTOCOL", "HTTP/1.1"),
        ("REMOTE_ADDR", "127.0.0.1"),
        ("GATEWAY_INTERFACE", "CGI/1.1"),
        ("HTTP_X_THING", "one, two"),
        ("HTTP_HOST", "example.org:8080"),
        ("OWN", "value"),
        ("LANG", "C.UTF-8"),
        ("INPUT", "abc"),
        ("CWD", path.parent().unwrap().to_str().unwrap()),
        ("FILE", path.to_str().unwrap()),
    ];
    for (name, value) in expected {
        assert_eq!(variables[name], value, "{name}: {variables:#}");
    }
    for name in [
        "HTTP_PROXY",
        "HTTP_X_FORWARDED_FOR",
        "HTTP_AUTHORIZATION",
        "HTTP_CONNECTION",
        "HTTP_CONTENT_LENGTH",
        "ABSENT",
        "ORRERY_WARM",
    ] {
        assert!(variables[name].is_null(), "{name}: {variables:#}");
    }
    let front = Front::start(&server, &["--authorization"]);
    let answer = front.send("GET /environment.py HTTP/1.0\r\nAuthorization: Basic c2VjcmV0\r\n\r\n");
    let variables: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(variables["HTTP_AUTHORIZATION"], "Basic c2VjcmV0");
    assert_eq!(
        (&variables["SERVER_PROTOCOL"], &variables["SERVER_NAME"]),
        (&"HTTP/1.0".into(), &"127.0.0.1".into())
    );
    assert!(variables["CONTENT_LENGTH"].is_null() && variables["INPUT"] == "", "{variables:#}");
}

#[test]
fn bodies_arrive_whole_whatever_their_size_and_framing() {
    let server = warm();
    let front = Front::start(&server, &["--body", "11M"]);
    let head = "POST /count.py HTTP/1.1\r\nHost: x\r\nConnection: close\r\n";
    for size in [0, 1, 10 << 20] {
        let body: Vec<u8> = (0..size).map(|index: u32| (index % 251).to_le_bytes()[0]).collect();
        let sum = {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(&body).unwrap();
            let output = std::process::Command::new("sha256sum").arg(file.path()).output().unwrap();
            String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap().to_owned()
        };
        let known = [format!("{head}Content-Length: {size}\r\n\r\n").as_bytes(), &body].concat();
        let mut chunked = format!("{head}Transfer-Encoding: chunked\r\n\r\n").into_bytes();
        for piece in body.chunks(100_000) {
            chunked.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
            chunked.extend_from_slice(piece);
            chunked.extend_from_slice(b"\r\n");
        }
        chunked.extend_from_slice(b"0\r\n\r\n");
        for (framing, request) in [("Content-Length", known), ("chunked", chunked)] {
            let answer = front.send(request);
            // An empty body without a length has no CONTENT_LENGTH.
            let length = if size == 0 && framing == "chunked" { "None".to_owned() } else { size.to_string() };
            assert_eq!(
                (answer.status, answer.text()),
                (200, format!("{size} {length} {sum}\n")),
                "{framing}, {size}"
            );
        }
    }
    let too_large = front.send(format!("{head}Content-Length: {}\r\n\r\n", 12 << 20));
    assert_eq!(too_large.status, 413);
    let chunk = format!("{:x}\r\n{}\r\n", 1 << 20, "x".repeat(1 << 20));
    let too_large = front.send(format!("{head}Transfer-Encoding: chunked\r\n\r\n{}", chunk.repeat(12)));
    assert_eq!(too_large.status, 413, "{too_large:?}");
    let broken = front.send(format!("{head}Transfer-Encoding: chunked\r\n\r\nxyz\r\n"));
    assert_eq!(broken.status, 400);
}

#[test]
fn answers_of_scripts_become_answers_of_http() {
    let server = warm();
    let front = Front::start(&server, &[]);
    let long = format!("Content-Type: a/b\nX-Long: {}\n\n", "x".repeat(70_000));
    for (text, status, body) in [
        ("Content-Type: text/plain\n\nhello", 200, "hello"),
        ("Content-Type: text/plain\r\n\r\nhello", 200, "hello"),
        ("Status: 404 Not Here\nContent-Type: text/plain\n\nnone", 404, "none"),
        ("Status: 204 None\n\n", 204, ""),
        ("Location: https://elsewhere/x\n\n", 302, ""),
        ("Location: /x?y\n\n", 302, ""),
        ("Status: 308\nLocation: /x\nContent-Type: text/plain\n\nmoved", 308, "moved"),
        ("Content-Type: text/plain\nContent-Length: 5\n\nhello", 200, "hello"),
        (
            "Content-Type: text/plain\nTransfer-Encoding: chunked\nConnection: keep-alive\n\nhello",
            200,
            "hello",
        ),
        // What is no answer.
        ("", 502, ""),
        ("hello", 502, ""),
        ("\n\nhello", 502, ""),
        ("X-Only: x\n\nhello", 502, ""),
        ("HTTP/1.1 200 OK\r\nContent-Type: a/b\r\n\r\n", 502, ""),
        ("Status: 99\n\n", 502, ""),
        ("Status: 101 Switching\n\n", 502, ""),
        ("Content-Type: a/b\nContent-Length: 6\n\nhello", 502, ""),
        ("Content-Type: a/b\nContent-Length: 4\n\nhello", 502, ""),
        ("Content-Type: a/b\nContent-Length: x\n\nhello", 502, ""),
        ("Content-Type: a/b\nX-Bad: a\rSet-Cookie: x\n\n", 502, ""),
        ("Content-Type: a/b\nX Bad: x\n\n", 502, ""),
        (long.as_str(), 502, ""),
    ] {
        // The longest is too long for a query.
        let answer = if text.len() > 10_000 {
            fs::write(front.directory.path().join("scripts/long.py"), format!("print({text:?}, end='')"))
                .unwrap();
            front.get("/long.py")
        } else {
            front.get(&raw("", text))
        };
        assert_eq!(answer.status, status, "{text:?}: {answer:?}\n{}", front.log());
        assert!(answer.whole || status == 204, "{text:?}: {answer:?}");
        if status != 502 {
            assert_eq!(answer.text(), body, "{text:?}");
            assert!(answer.field("status").is_none(), "{answer:?}");
        }
        assert!(answer.field("set-cookie").is_none(), "{answer:?}");
    }
    let answer = front.get(&raw("", "Location: /x?y\nX-A: 1\nX-A: 2\n\n"));
    assert_eq!(answer.field("location"), Some("/x?y"));
    assert_eq!(answer.fields.iter().filter(|(name, _)| name == "x-a").count(), 2);
    // Line ends in a path go no further than to the script.
    let answer =
        front.get(&format!("/raw.py/%0d%0aX-Injected:%20yes?{}", raw("", TEXT).split_once('?').unwrap().1));
    assert_eq!((answer.status, answer.field("x-injected")), (200, None), "{answer:?}");
    let answer = front.send(format!(
        "HEAD {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        raw("", &format!("{TEXT}hello"))
    ));
    assert_eq!(
        (answer.status, answer.field("content-length"), answer.body.len()),
        (200, Some("5"), 0),
        "{answer:?}"
    );
    for method in ["TRACE", "CONNECT"] {
        let answer = front.send(format!("{method} /raw.py HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"));
        assert!(matches!(answer.status, 400 | 404 | 405), "{method}: {answer:?}");
    }
    // Lines of standard error are in the log, without what is not text.
    front.get(&raw("/complain=one%0a%1b%5b31mtwo", TEXT));
    eventually("the log has what the script complained", || front.log().contains("\u{fffd}[31mtwo"));
    assert!(!front.log().contains('\u{1b}'));
}

#[test]
fn paths_do_not_leave_the_directory() {
    let server = warm();
    let front = Front::start(&server, &[]);
    let scripts = front.directory.path().join("scripts");
    fs::write(front.directory.path().join("secret.py"), common::ENVIRONMENT).unwrap();
    std::os::unix::fs::symlink("../secret.py", scripts.join("link.py")).unwrap();
    std::os::unix::fs::symlink("sub/inner.py", scripts.join("inside.py")).unwrap();
    for target in [
        "/",
        "/none.py",
        "/../secret.py",
        "/%2e%2e/secret.py",
        "/sub/%2e%2e/%2e%2e/secret.py",
        "/..%2fsecret.py",
        "/link.py",
        "/inside.py",
        "/sub",
        "/environment.py%00",
        "/environment.py/%00",
        "/environment.py/../x",
        "//environment.py",
        "/scripts/environment.py",
    ] {
        assert_eq!(front.get(target).status, 404, "{target}");
    }
    // The one script that is served gets every path, but these.
    let mut command = std::process::Command::new(orrery_testing::built("orrery"));
    common::warm::settle_environment(&mut command).args([
        "warm",
        "http",
        "--listen",
        "127.0.0.1:0",
        "--socket",
    ]);
    command.arg(server.socket()).arg("--script").arg(scripts.join("environment.py"));
    let one = Front::start_command(directory(), &mut command);
    let answer = one.get("/any/path.py?x");
    let variables: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!((&variables["SCRIPT_NAME"], &variables["PATH_INFO"]), (&"".into(), &"/any/path.py".into()));
    assert_eq!(one.get("/any/%2e%2e/path").status, 404);
}

#[test]
fn a_script_that_dies_leaves_no_answer_that_looks_whole() {
    let server = Server::start(WAY, &["--timeout", "5s"]);
    let front = Front::start(&server, &[]);
    // Before it has begun to answer.
    assert_eq!(front.get(&raw("/exit=3", "")).status, 502);
    assert_eq!(front.get(&raw("/kill=11", "")).status, 502);
    assert_eq!(front.get(&raw("/kill=9", "Content-Type: text/plain\n")).status, 502);
    assert_eq!(front.get(&raw("/wait=never", "")).status, 504);
    // After it has begun.
    for (index, end) in ["/exit=1", "/kill=11", "/kill=9", "/wait=never"].into_iter().enumerate() {
        for version in ["1.0", "1.1"] {
            let seen = format!("seen{index}-{version}");
            let target = raw(&format!("/wait={seen}{end}"), &format!("{TEXT}some"));
            let mut stream = front.connect();
            write!(stream, "GET {target} HTTP/{version}\r\nHost: x\r\n\r\n").unwrap();
            let mut bytes = Vec::new();
            let mut piece = [0; 1000];
            while !bytes.windows(4).any(|four| four == b"some") {
                let count = stream.read(&mut piece).unwrap();
                assert!(count > 0, "{target}: {}", front.log());
                bytes.extend_from_slice(&piece[..count]);
            }
            fs::write(front.files().join(seen), "").unwrap();
            let ended = loop {
                match stream.read(&mut piece) {
                    Ok(0) => break "an end",
                    Ok(count) => bytes.extend_from_slice(&piece[..count]),
                    Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break "a reset",
                    Err(error) => panic!("{target}: {error}"),
                }
            };
            let answer = Answer::parse(&bytes);
            assert!(answer.status == 200 && !answer.whole, "{target}: {answer:?}");
            // In HTTP/1.0 the end of the connection is the end of the answer.
            assert_eq!(ended, "a reset", "{target}, {version}: {answer:?}");
        }
    }
    // The next ones are served as ever.
    assert_eq!(front.get(&raw("", &format!("{TEXT}fine"))).text(), "fine");
}

#[test]
fn answers_are_sent_as_they_come() {
    let server = warm();
    let front = Front::start(&server, &[]);
    let mut stream = front.connect();
    let target = raw("/wait=seen/more=second", &format!("{TEXT}first"));
    write!(stream, "GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut bytes = vec![0; 1000];
    let mut filled = 0;
    while !bytes[..filled].windows(5).any(|five| five == b"first") {
        filled += stream.read(&mut bytes[filled..]).unwrap();
    }
    fs::write(front.files().join("seen"), "").unwrap();
    bytes.truncate(filled);
    stream.read_to_end(&mut bytes).unwrap();
    let answer = Answer::parse(&bytes);
    assert_eq!((answer.status, answer.whole, answer.text()), (200, true, "firstsecond".to_owned()));
}

#[test]
fn connections_are_kept_and_bodies_are_asked_for() {
    let server = warm();
    let front = Front::start(&server, &[]);
    let mut stream = front.connect();
    let mut next = |request: &str, end: &str| {
        stream.write_all(request.as_bytes()).unwrap();
        let (mut bytes, mut piece) = (Vec::new(), [0; 1000]);
        while !bytes.ends_with(end.as_bytes()) {
            let count = stream.read(&mut piece).unwrap();
            assert!(count > 0, "{}", String::from_utf8_lossy(&bytes));
            bytes.extend_from_slice(&piece[..count]);
        }
        Answer::parse(&bytes)
    };
    for text in ["first", "second"] {
        let target = raw("", &format!("{TEXT}{text}"));
        let answer = next(&format!("GET {target} HTTP/1.1\r\nHost: x\r\n\r\n"), text);
        assert!(answer.status == 200 && answer.whole, "{answer:?}");
    }
    let head = "POST /count.py HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n";
    assert_eq!(next(head, "\r\n\r\n").status, 100);
    assert_eq!(next("abc", "\n").text().split(' ').next(), Some("3"));
    // A body that nobody wants is not asked for.
    let answer = next(&head.replace("count.py", "none.py"), "script\n");
    assert_eq!((answer.status, answer.field("connection")), (404, Some("close")), "{answer:?}");
}

#[test]
fn requests_at_a_time_are_kept_apart_and_leave_nothing_open() {
    let server = Server::start(WAY, &["--workers", "2"]);
    let front = Front::start(&server, &[]);
    let open = || fs::read_dir(format!("/proc/{}/fd", front.child.id())).unwrap().count();
    front.get(&raw("", TEXT));
    let before = open();
    std::thread::scope(|scope| {
        for client in 0..8 {
            let front = &front;
            scope.spawn(move || {
                for number in 0..25 {
                    let text = format!("{client} {number}");
                    // Some end before their answers, some in them, and some clients do not wait.
                    let answer = front.get(&raw("", &format!("{TEXT}{text}")));
                    assert_eq!((answer.status, answer.text()), (200, text));
                    assert_eq!(front.get(&raw("/exit=1", "")).status, 502);
                    let mut stream = front.connect();
                    write!(stream, "GET {} HTTP/1.1\r\n\r\n", raw("/wait=never", TEXT)).unwrap();
                }
            });
        }
    });
    eventually("what the requests had open is closed", || open() <= before);
}

#[test]
fn the_script_of_a_client_that_has_gone_is_ended() {
    let server = Server::start(WAY, &["--workers", "1"]);
    let front = Front::start(&server, &[]);
    for (name, text) in [("before", ""), ("after", TEXT)] {
        let mut stream = front.connect();
        let target = raw(&format!("/begun={name}/wait=never"), text);
        write!(stream, "GET {target} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        until_there(&front.files().join(name));
        drop(stream);
        // There is one worker.
        assert_eq!(front.get(&raw("", &format!("{TEXT}next"))).text(), "next", "{name}");
    }
}

#[test]
fn slow_clients_are_left() {
    let server = warm();
    let front = Front::start(
        &server,
        &["--head-time", "500ms", "--body-time", "500ms", "--send-time", "500ms", "--head", "8K"],
    );
    let mut stream = front.connect();
    stream.write_all(b"GET /raw.py HTTP/1.1\r\nHos").unwrap();
    // Nothing more is sent, and the server ends the connection.
    let answer = Answer::read(stream);
    assert!(matches!(answer.status, 0 | 408), "{answer:?}");
    let answer = front
        .send("POST /count.py HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nConnection: close\r\n\r\nabc");
    assert_eq!(answer.status, 408);
    let answer =
        front.send(format!("GET /raw.py HTTP/1.1\r\nHost: x\r\nX-Long: {}\r\n\r\n", "x".repeat(20_000)));
    assert_eq!(answer.status, 431, "{answer:?}");
    // One that does not read: its script, which writes for ever, would have the worker for ever.
    let text = "import sys\nprint('Content-Type: a/b\\n')\nwhile True: sys.stdout.write('x' * 65536)\n";
    fs::write(front.directory.path().join("scripts/endless.py"), text).unwrap();
    let mut stream = front.connect();
    write!(stream, "GET /endless.py HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    assert_eq!(front.get(&raw("", &format!("{TEXT}next"))).text(), "next", "there is one worker");
    drop(stream);
}

#[test]
fn a_refusal_reaches_a_client_that_is_still_sending() {
    let server = warm();
    let front = Front::start(&server, &["--body", "1M"]);
    let head = "POST /count.py HTTP/1.1\r\nHost: x\r\n";
    let piece = vec![b'x'; 64 << 10];
    let chunk = [format!("{:x}\r\n", piece.len()).as_bytes(), &piece, b"\r\n"].concat();
    let length = format!("Content-Length: {}\r\n\r\n", 64 * piece.len());
    for (head, piece, status) in [
        (format!("{head}{length}"), &piece, 413),
        (format!("{head}Transfer-Encoding: chunked\r\n\r\n"), &chunk, 413),
        (format!("{}{length}", head.replace("count", "none")), &piece, 404),
        (format!("GET / HTTP/1.1\r\n{}", "X: y\r\n".repeat(200)), &piece, 431),
    ] {
        let mut stream = front.connect();
        stream.write_all(head.as_bytes()).unwrap();
        // The answer is there when the rest is sent, slowly, by a client that reads nothing before.
        a_while();
        for index in 0..64 {
            if let Err(error) = stream.write_all(piece) {
                panic!("{status}: {error} at piece {index}");
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let answer = Answer::read(stream);
        assert!(answer.status == status && answer.whole, "{status}: {answer:?}");
        assert_eq!(answer.field("connection"), Some("close"));
    }
    // One that never stops is left.
    let mut stream = front.connect();
    write!(stream, "{head}Content-Length: 1000000000000\r\n\r\n").unwrap();
    let most = 1 << 30;
    let sent = (0..most / piece.len()).take_while(|_| stream.write_all(&piece).is_ok()).count();
    assert!(sent < most / piece.len(), "all was taken");
    eventually("its connection is closed", || front.get("/-/health").text().contains(r#""connections":1,"#));
}

/// Signals the workers of a warm server, and the server.
fn signal_all(server: &Server, workers: &[i32], number: i32) {
    for pid in workers.iter().copied().chain([i32::try_from(server.child.id()).unwrap()]) {
        common::warm::signal(pid, number);
    }
}

fn report(front: &Front) -> serde_json::Value {
    serde_json::from_str(&front.get("/-/health").text()).unwrap()
}

#[test]
fn requests_do_not_wait_for_a_warm_server_that_is_stopped() {
    let server = Server::start(WAY, &["--workers", "2"]);
    let front = Front::start(&server, &["--reply-time", "3s"]);
    let begin = |name: &str, text: &str| {
        let mut stream = front.connect();
        let target = raw(&format!("/begun={name}/wait=never"), text);
        write!(stream, "GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        until_there(&front.files().join(name));
        stream
    };
    let (waiting, begun) = (begin("first", ""), begin("second", &format!("{TEXT}some")));
    let workers = server.workers();
    signal_all(&server, &workers, libc::SIGSTOP);
    // One that has connected when the server was stopped already, and whose worker never takes it.
    let mut queued = front.connect();
    write!(queued, "GET {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", raw("/begun=third", TEXT))
        .unwrap();
    let answer = Answer::read(waiting);
    assert_eq!((answer.status, answer.text().contains("does not reply")), (504, true), "{answer:?}");
    let answer = Answer::read(begun);
    assert!(answer.status == 200 && !answer.whole, "{answer:?}");
    assert_eq!(Answer::read(queued).status, 504);
    // From now on nothing waits, and what is refused can be tried elsewhere.
    let health = front.get("/-/health");
    assert_eq!(health.status, 503, "{health:?}");
    let health: serde_json::Value = serde_json::from_slice(&health.body).unwrap();
    assert_eq!(
        (&health["status"], &health["warm"], &health["failed"]),
        (&"the warm server does not reply".into(), &"silent".into(), &3.into())
    );
    eventually("their places are free", || report(&front)["requests"] == 0);
    let refused = front.get(&raw("/begun=fourth", TEXT));
    assert_eq!((refused.status, refused.field("retry-after")), (503, Some("1")), "{refused:?}");
    assert_eq!((&report(&front)["refused"], &report(&front)["received"]), (&1.into(), &4.into()));
    signal_all(&server, &workers, libc::SIGCONT);
    eventually("the server replies again", || front.get("/-/health").status == 200);
    assert_eq!(front.get(&raw("", &format!("{TEXT}next"))).text(), "next");
    assert!(!front.files().join("fourth").exists());
}

#[test]
fn a_script_that_writes_goes_on_while_its_server_is_stopped() {
    let server = Server::start(WAY, &["--workers", "2"]);
    let front = Front::start(&server, &["--reply-time", "3s"]);
    let text = "import os, sys, time\nprint('Content-Type: a/b\\n')\nopen(os.environ['FILES'] + '/writes', 'w')\n\
                while not os.path.exists(os.environ['FILES'] + '/end'): print('more', flush=True); time.sleep(0.05)\n";
    fs::write(front.directory.path().join("scripts/writes.py"), text).unwrap();
    let mut writing = front.connect();
    write!(writing, "GET /writes.py HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut waiting = front.connect();
    let target = raw("/begun=waits/wait=never", "");
    write!(waiting, "GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    until_there(&front.files().join("writes"));
    until_there(&front.files().join("waits"));
    // The workers run.
    signal_all(&server, &[], libc::SIGSTOP);
    assert_eq!(Answer::read(waiting).status, 504);
    fs::write(front.files().join("end"), "").unwrap();
    let answer = Answer::read(writing);
    assert!(answer.status == 200 && answer.whole && answer.text().starts_with("more\nmore\n"), "{answer:?}");
    signal_all(&server, &[], libc::SIGCONT);
}

#[test]
fn who_asks_says_how_long_the_warm_server_is_waited_for() {
    let server = warm();
    let front = Front::start(&server, &["--reply-time", "10m"]);
    assert_eq!(front.get("/-/health?wait=1s").status, 200);
    assert_eq!(front.get("/-/health?wait=soon").status, 400);
    signal_all(&server, &[], libc::SIGSTOP);
    let begun = std::time::Instant::now();
    let health = front.get("/-/health?wait=1ms");
    assert_eq!((health.status, health.text().contains(r#""warm":"silent""#)), (503, true), "{health:?}");
    assert!(begun.elapsed() < std::time::Duration::from_millis(1900), "{:?}", begun.elapsed());
    // It was not waited for as long as it has; so scripts are run.
    signal_all(&server, &[], libc::SIGCONT);
    assert_eq!(front.get(&raw("", &format!("{TEXT}next"))).text(), "next");
}

#[test]
fn what_never_began_may_be_tried_elsewhere() {
    let absent = Front::start_at(Path::new("/nonexistent/socket"), &[]);
    let answer = absent.get(&raw("", TEXT));
    assert_eq!((answer.status, answer.field("retry-after")), (503, Some("1")), "{answer:?}");
    let health = absent.get("/-/health");
    assert_eq!(health.status, 503);
    assert!(health.text().contains(r#""status":"no worker is ready""#), "{}", health.text());

    // The server's own limit, and then that of the warm server's queue.
    let server = Server::start(WAY, &["--workers", "1", "--queue", "1"]);
    for options in [&["--requests", "1"][..], &[]] {
        let front = Front::start(&server, options);
        let target = raw("/begun=first/wait=end", TEXT);
        let request = format!("GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        let mut first = front.connect();
        first.write_all(request.as_bytes()).unwrap();
        until_there(&front.files().join("first"));
        let (sender, answers) = std::sync::mpsc::channel();
        for _ in 0..6 {
            let (mut other, sender) = (front.connect(), sender.clone());
            other.write_all(request.as_bytes()).unwrap();
            std::thread::spawn(move || sender.send(Answer::read(other)));
        }
        // Those that are refused are refused at once; the others wait for the first.
        let refused = answers.recv_timeout(orrery_testing::PATIENCE).unwrap();
        assert_eq!((refused.status, refused.field("retry-after")), (503, Some("1")), "{refused:?}");
        fs::write(front.files().join("end"), "").unwrap();
        assert_eq!(Answer::read(first).status, 200);
        for _ in 1..6 {
            let other = answers.recv_timeout(orrery_testing::PATIENCE).unwrap();
            assert!(matches!(other.status, 200 | 503), "{other:?}");
        }
    }
}

#[test]
fn requests_that_wait_at_a_server_that_ends_never_began() {
    let mut server = Server::start(WAY, &["--workers", "1"]);
    let front = Front::start(&server, &[]);
    let mut first = front.connect();
    write!(
        first,
        "GET {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        raw("/begun=first/wait=never", "")
    )
    .unwrap();
    until_there(&front.files().join("first"));
    let mut waiting = front.connect();
    write!(
        waiting,
        "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        raw("/begun=second", TEXT)
    )
    .unwrap();
    eventually("the second waits", || front.get("/-/health").text().contains(r#""requests":2"#));
    a_while();
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    // How far the first came is unknown.
    assert_eq!(Answer::read(first).status, 502);
    let waiting = Answer::read(waiting);
    assert_eq!((waiting.status, waiting.field("retry-after")), (503, Some("1")), "{}", front.log());
    assert!(!front.files().join("second").exists());
}

#[test]
fn a_server_that_drains_says_so_and_ends_what_it_began() {
    let server = Server::start(WAY, &["--workers", "2"]);
    let mut front = Front::start(&server, &["--drain", "10m", "--finish", "10m"]);
    let health = front.get("/-/health");
    assert_eq!(health.status, 200, "{health:?}");
    let report: serde_json::Value = serde_json::from_slice(&health.body).unwrap();
    assert_eq!(
        (&report["status"], &report["workers"], &report["requests"]),
        (&"ok".into(), &2.into(), &0.into())
    );
    let mut running = front.connect();
    write!(
        running,
        "GET {} HTTP/1.1\r\nHost: x\r\n\r\n",
        raw("/begun=first/wait=end", &format!("{TEXT}whole"))
    )
    .unwrap();
    until_there(&front.files().join("first"));
    front.signal(libc::SIGTERM);
    eventually("the server drains", || front.get("/-/health").status == 503);
    assert!(front.get("/-/health").text().contains(r#""status":"draining""#));
    // Who comes all the same is served, and asked not to come again on this connection.
    let mut stream = front.connect();
    write!(stream, "GET {} HTTP/1.1\r\nHost: x\r\n\r\n", raw("", &format!("{TEXT}served"))).unwrap();
    let answer = Answer::read(stream);
    assert_eq!((answer.text().as_str(), answer.field("connection")), ("served", Some("close")), "{answer:?}");
    // A second signal ends the drain.
    front.signal(libc::SIGTERM);
    let address = front.address;
    eventually("the server listens no more", || std::net::TcpStream::connect(address).is_err());
    assert!(front.child.try_wait().unwrap().is_none(), "it ends before what it began");
    fs::write(front.files().join("end"), "").unwrap();
    let answer = Answer::read(running);
    assert!(answer.status == 200 && answer.whole && answer.text() == "whole", "{answer:?}");
    assert!(front.child.wait().unwrap().success());
}

#[test]
fn a_service_manager_passes_the_socket_and_is_notified() {
    let server = warm();
    let scene = directory();
    let notifications = scene.path().join("notify");
    let notified = UnixDatagram::bind(&notifications).unwrap();
    notified.set_read_timeout(Some(orrery_testing::PATIENCE)).unwrap();
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let passed = |options: &[&str]| {
        let plain = command(scene.path(), &server.socket());
        let mut command = std::process::Command::new("/bin/sh");
        common::warm::settle_environment(&mut command);
        command
            .args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""])
            .arg(plain.get_program())
            .args(plain.get_args())
            .args(options);
        command.env("LISTEN_FDS", "1").env("NOTIFY_SOCKET", &notifications);
        let socket = rustix::io::fcntl_dupfd_cloexec(&socket, 200).unwrap();
        // SAFETY: a plain system call between fork and exec, on a descriptor of the child; nothing is allocated.
        unsafe {
            use std::os::fd::AsRawFd as _;
            use std::os::unix::process::CommandExt as _;
            command.pre_exec(move || match libc::dup2(socket.as_raw_fd(), 3) {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        command
    };
    let refused = passed(&["--listen", "127.0.0.1:1"]).output().unwrap();
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("passed a socket to listen on; leave --listen out"), "{said}");
    let mut command = passed(&["--drain", "0s"]);
    let mut front = Front::start_command(directory(), &mut command);
    assert_eq!(front.address, address);
    let next = || {
        let mut message = [0; 200];
        let count = notified.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..count]).into_owned()
    };
    assert!(next().contains("READY=1"));
    assert_eq!(front.get(&raw("", &format!("{TEXT}hello"))).text(), "hello");
    front.signal(libc::SIGTERM);
    assert!(next().contains("STOPPING=1"));
    assert!(front.child.wait().unwrap().success());
}

#[test]
fn settings_that_make_no_sense_are_refused_by_name() {
    let scene = directory();
    let refused = |options: &[&str]| {
        let mut command = std::process::Command::new(orrery_testing::built("orrery"));
        common::warm::settle_environment(&mut command).args(["warm", "http"]).args(options);
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{options:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let scripts = scene.path().join("scripts");
    let scripts = scripts.to_str().unwrap();
    for (options, part) in [
        (&["--socket", "/s"][..], "--script"),
        (&["--directory", scripts], "no socket: pass --socket or set ORRERY_WARM"),
        (&["--socket", "/s", "--directory", "/nonexistent"], "cannot open the directory /nonexistent"),
        (&["--socket", "/s", "--script", scripts], "cannot open the script"),
        (
            &["--socket", "/s", "--directory", scripts, "--listen", "192.0.2.1:1"],
            "cannot listen on 192.0.2.1:1",
        ),
        (&["--socket", "/s", "--directory", scripts, "--health", "x"], "no path of a request"),
        (&["--socket", "/s", "--directory", scripts, "--head", "1"], "not between 8K and 1M"),
    ] {
        let said = refused(options);
        assert!(said.contains(part), "{options:?}: {said}");
    }
}
