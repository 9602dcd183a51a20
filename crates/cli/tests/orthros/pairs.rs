//! Pairs of machines that tests talk to, and what it takes to have them.

#![allow(dead_code, unreachable_pub, reason = "every test program uses a part of it")]

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use orrery_orthros_host::{KernelFiles, command};
use serde_json::Value;

pub const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");

/// Two machines at a time are enough for the processors.
pub static ONE_PAIR: Mutex<()> = Mutex::new(());

/// How long a program may take to look at everything on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// The package whose kernel guests boot, if not that of this machine's release (`make soak`).
fn kernel() -> Option<String> {
    std::env::var("ORRERY_GUEST_KERNEL").ok().filter(|package| !package.is_empty())
}

pub fn cache() -> PathBuf {
    let name =
        kernel().map_or_else(|| "orthros-cache".to_owned(), |package| format!("orthros-cache-{package}"));
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// Returns what is missing to run a pair with these programs.
pub fn missing(programs: &[(&str, &'static str)]) -> Option<String> {
    let common = [("qemu-system-x86_64", "qemu-system-x86"), ("criu", "criu"), ("busybox", "busybox-static")];
    if !rustix::process::geteuid().is_root() {
        return Some("requires root".to_owned());
    }
    for program in ["orrery-guest", "orrery-orthros-load"] {
        if !Path::new(ORRERY).with_file_name(program).is_file() {
            return Some(format!("{program} is not built: run `cargo build --workspace`"));
        }
    }
    for (program, package) in common.iter().chain(programs) {
        if let Err(error) = command::require(program, package) {
            return Some(error.to_string());
        }
    }
    let kernel = match kernel() {
        Some(package) => KernelFiles::obtain_package(&cache(), &package),
        None => KernelFiles::obtain(&cache()),
    };
    kernel.err().map(|error| format!("no kernel to boot: {error}"))
}

pub fn orthros() -> Command {
    let mut command = Command::new(ORRERY);
    command.arg("orthros").env("ORRERY_CACHE", cache());
    command
}

pub fn events(output: &[u8]) -> Vec<Value> {
    output.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

/// Who asks `orrery-orthros-load ballast` over one connection.
pub struct Client(BufReader<TcpStream>);

impl Client {
    pub fn of(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(180))).unwrap();
        Self(BufReader::new(stream))
    }

    pub fn ask(&mut self, line: &str) -> String {
        writeln!(self.0.get_mut(), "{line}").unwrap();
        let mut answer = String::new();
        self.0.read_line(&mut answer).unwrap();
        answer.trim().to_owned()
    }
}

/// A connection to a port of the service in a network, once it listens there: a program that runs may not be so far yet.
pub fn connect(network: &str, port: u16) -> TcpStream {
    connect_to(network, "10.77.0.2", port)
}

/// The same by another address that the service has, or will have soon.
pub fn connect_to(network: &str, address: &'static str, port: u16) -> TcpStream {
    let space = std::fs::File::open(Path::new("/run/netns").join(network)).unwrap();
    // A socket stays in the network that its thread was in.
    let connected = std::thread::spawn(move || {
        let kind = rustix::thread::LinkNameSpaceType::Network;
        rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&space), Some(kind)).unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            match TcpStream::connect((address, port)) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::HostUnreachable)
                        && Instant::now() < deadline =>
                {
                    std::thread::sleep(Duration::from_millis(50));
                }
                result => return result.unwrap(),
            }
        }
    });
    connected.join().unwrap()
}

/// Asks an HTTP server for `/what` over a connection that stays open, and returns the body.
pub fn get(connection: &mut BufReader<TcpStream>, what: &str) -> String {
    write!(connection.get_mut(), "GET /{what} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
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

/// `orrery orthros up`, spoken to.
pub struct Up {
    pub child: Child,
    input: ChildStdin,
    lines: BufReader<ChildStdout>,
    /// What was told before it was asked for: a new backup may stand by before or after a command is answered.
    told: Vec<Value>,
}

impl Up {
    pub fn start(options: &[&str], service: &[&str]) -> Self {
        let mut command = orthros();
        command.args(["up", "--json"]).args(options).arg("--").args(service);
        Self::begin(command)
    }

    /// Starts a whole command, which prints JSON.
    pub fn begin(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, lines) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, lines, told: Vec::new() }
    }

    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    pub fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// The next event of a kind; a failure is none.
    pub fn expect(&mut self, name: &str) -> Value {
        if let Some(at) = self.told.iter().position(|event| event["event"] == name) {
            return self.told.remove(at);
        }
        loop {
            let event = self.next(name);
            assert!(event["event"] != "failed", "{event} after {:#?}", self.told);
            if event["event"] == name {
                return event;
            }
            self.told.push(event);
        }
    }

    /// Returns the next event of a kind, or what fails before it.
    pub fn answer(&mut self, name: &str) -> Result<Value, String> {
        loop {
            let event = self.next(name);
            if event["event"] == "failed" {
                return Err(event["text"].as_str().unwrap_or_default().to_owned());
            }
            if event["event"] == name {
                return Ok(event);
            }
            self.told.push(event);
        }
    }

    /// Returns what the next thing that fails says.
    pub fn expect_failure(&mut self) -> String {
        loop {
            let event = self.next("something failed");
            if event["event"] == "failed" {
                return event["text"].as_str().unwrap_or_default().to_owned();
            }
        }
    }

    fn next(&mut self, what: &str) -> Value {
        let mut line = String::new();
        assert!(self.lines.read_line(&mut line).unwrap() > 0, "it ended before {what}");
        serde_json::from_str(&line).unwrap()
    }

    /// Returns what the program of everything, or the one that scribbles, says since it was last asked.
    pub fn verdict(&mut self) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.say("run orrery-orthros-load verdict");
            let verdict = self.expect("ran")["text"].as_str().unwrap().to_owned();
            if !verdict.is_empty() {
                return verdict;
            }
            assert!(Instant::now() < deadline, "it says nothing");
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
