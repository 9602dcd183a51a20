//! What the tests of the HTTP server share: a server, and a client that sees whether an answer is whole.

#![allow(dead_code, unreachable_pub, reason = "every test program uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../../warm/tests/common/mod.rs"]
pub mod warm;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use orrery_testing::{PATIENCE, until};
use warm::{Server, Way};

/// How requests are kept apart in the warm servers of these tests.
pub const WAY: Way = Way { isolation: "rollback", tracker: None };

/// Writes its query, which is hexadecimal, and then does what its path says; `wait` is for a file that its query does not name.
pub const RAW: &str = r#"
import os, signal, sys, time
sys.stdout.buffer.write(bytes.fromhex(os.environ["QUERY_STRING"]))
sys.stdout.flush()
for word in os.environ["PATH_INFO"].split("/")[1:]:
    name, _, value = word.partition("=")
    if name == "begun":
        open(os.path.join(os.environ["FILES"], value), "w").close()
    elif name == "wait":
        while not os.path.exists(os.path.join(os.environ["FILES"], value)):
            time.sleep(0.01)
    elif name == "more":
        sys.stdout.write(value)
        sys.stdout.flush()
    elif name == "complain":
        sys.stderr.write(value)
    elif name == "exit":
        sys.exit(int(value))
    elif name == "kill":
        os.kill(os.getpid(), int(value))
"#;

/// Prints all that it knows about its request.
pub const ENVIRONMENT: &str = r#"
import json, os, sys
print("Content-Type: application/json\n")
print(json.dumps(dict(os.environ, CWD=os.getcwd(), FILE=__file__, INPUT=sys.stdin.read(), MASK=oct(os.umask(0)))))
"#;

/// Prints what it read.
pub const COUNT: &str = r#"
import hashlib, os, sys
body = sys.stdin.buffer.read()
print(f"Content-Type: text/plain\n\n{len(body)} {os.environ.get('CONTENT_LENGTH')} {hashlib.sha256(body).hexdigest()}")
"#;

/// An HTTP server before a warm server.
pub struct Front {
    pub child: Child,
    /// Its scripts are in `scripts`, and what they leave in `files`.
    pub directory: tempfile::TempDir,
    pub address: SocketAddr,
}

impl Front {
    pub fn start(server: &Server, options: &[&str]) -> Self {
        Self::start_at(&server.socket(), options)
    }

    pub fn start_at(socket: &Path, options: &[&str]) -> Self {
        let directory = directory();
        let mut command = command(directory.path(), socket);
        command.args(["--listen", "127.0.0.1:0"]).args(options);
        Self::start_command(directory, &mut command)
    }

    pub fn start_command(directory: tempfile::TempDir, command: &mut Command) -> Self {
        let log = directory.path().join("log");
        let mut child = command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
        let address = until(&format!("the server listens (log: {})", log.display()), || {
            let log = fs::read_to_string(&log).unwrap();
            assert!(child.try_wait().unwrap().is_none(), "the server has ended: {log}");
            let (_, rest) = log.split_once("listening on http://")?;
            rest.split_once(['"', '\n'])?.0.parse().ok()
        });
        Self { child, directory, address }
    }

    pub fn files(&self) -> PathBuf {
        self.directory.path().join("files")
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    pub fn signal(&self, number: i32) {
        warm::signal(i32::try_from(self.child.id()).unwrap(), number);
    }

    pub fn connect(&self) -> TcpStream {
        connect(self.address)
    }

    pub fn get(&self, target: &str) -> Answer {
        self.send(format!("GET {target} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"))
    }

    /// Sends a request as it is written, and reads until the server ends the connection.
    pub fn send(&self, request: impl AsRef<[u8]>) -> Answer {
        let mut stream = self.connect();
        // The server may answer before it has read all.
        let _ = stream.write_all(request.as_ref());
        Answer::read(stream)
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }
        if std::thread::panicking() {
            eprintln!("the log of the HTTP server:\n{}", self.log());
        }
    }
}

/// Makes a directory with scripts.
pub fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let scripts = directory.path().join("scripts");
    fs::create_dir_all(scripts.join("sub")).unwrap();
    fs::create_dir(directory.path().join("files")).unwrap();
    for (name, text) in
        [("raw.py", RAW), ("environment.py", ENVIRONMENT), ("count.py", COUNT), ("sub/inner.py", ENVIRONMENT)]
    {
        fs::write(scripts.join(name), text).unwrap();
    }
    directory
}

/// Returns the command that serves the scripts of a directory.
pub fn command(directory: &Path, socket: &Path) -> Command {
    let mut command = Command::new(orrery_testing::built("orrery"));
    warm::settle_environment(&mut command).stdin(Stdio::null());
    command.args(["--log-level", "debug", "warm", "http", "--socket"]).arg(socket);
    command.arg("--directory").arg(directory.join("scripts"));
    command.arg("--env").arg(format!("FILES={}", directory.join("files").display()));
    command
}

pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// An answer to a request.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    /// The lines of the header, with their names in lower case.
    pub fields: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Whether the body came to the end that its framing has.
    pub whole: bool,
}

impl Answer {
    /// Reads what comes until the connection ends, which is one answer.
    pub fn read(mut stream: TcpStream) -> Self {
        let mut bytes = Vec::new();
        let mut piece = [0; 65536];
        loop {
            match stream.read(&mut piece) {
                Ok(0) => break,
                Ok(count) => bytes.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
                // The test was stopped and goes on.
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => panic!("{error} after {:?}", String::from_utf8_lossy(&bytes)),
            }
        }
        Self::parse(&bytes)
    }

    /// `status` is 0 for no answer at all.
    pub fn parse(bytes: &[u8]) -> Self {
        let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
            return Self { status: 0, fields: Vec::new(), body: bytes.to_vec(), whole: false };
        };
        let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let field = |line: &str| {
            let (name, value) = line.split_once(':').unwrap();
            (name.to_ascii_lowercase(), value.trim().to_owned())
        };
        let fields: Vec<_> = lines.map(field).collect();
        let mut answer = Self { status, fields, body: bytes[end + 4..].to_vec(), whole: false };
        if answer.field("transfer-encoding") == Some("chunked") {
            (answer.body, answer.whole) = without_chunks(&answer.body);
        } else if let Some(length) = answer.field("content-length") {
            answer.whole = length.parse() == Ok(answer.body.len());
        }
        answer
    }

    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

fn without_chunks(mut bytes: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    loop {
        let Some(end) = bytes.windows(2).position(|two| two == b"\r\n") else { return (body, false) };
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        let data = &bytes[end + 2..];
        if size == 0 {
            return (body, data == b"\r\n");
        }
        let Some(whole) = data.get(..size) else { return ([body, data.to_vec()].concat(), false) };
        body.extend_from_slice(whole);
        bytes = data.get(size + 2..).unwrap_or_default();
    }
}

/// The target that has `raw.py` write the text.
pub fn raw(actions: &str, text: &str) -> String {
    let hexadecimal: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("/raw.py{actions}?{hexadecimal}")
}

/// Waits until a file is there, which a script makes.
pub fn until_there(path: &Path) {
    orrery_testing::eventually(&format!("{} is there", path.display()), || path.exists());
}

/// A while in which nothing is to happen.
pub fn a_while() {
    std::thread::sleep(Duration::from_millis(200));
}
