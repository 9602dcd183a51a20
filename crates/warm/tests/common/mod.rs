//! What the tests of the warm server share: a server that ends with its test, and the two ways to run a script.

#![allow(dead_code, unreachable_pub, reason = "every test program uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::Write as _;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Debian's interpreter, which the server stands in for.
pub const PYTHON: &str = "/usr/bin/python3";
/// Modules that the servers of the tests import first.
pub const IMPORTS: &str =
    "json,re,sqlite3,csv,decimal,random,threading,asyncio,subprocess,tempfile,ctypes,ssl";

/// One way to keep requests apart: the option, and the tracker that the worker is made to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    pub isolation: &'static str,
    pub tracker: Option<&'static str>,
}

/// All ways that this build and kernel have; `WARM_WAYS` may name some of them.
pub fn ways() -> Vec<Way> {
    let all = [("fork", None), ("rollback", Some("wp_async")), ("rollback", Some("compare"))];
    let chosen = std::env::var("WARM_WAYS").ok();
    let is_chosen = |way: &&(&'static str, Option<&'static str>)| {
        chosen.as_ref().is_none_or(|names| names.split(',').any(|name| name == way.1.unwrap_or(way.0)))
    };
    all.iter().filter(is_chosen).map(|&(isolation, tracker)| Way { isolation, tracker }).collect()
}

/// Returns the examples' directory.
pub fn examples() -> PathBuf {
    orrery_testing::root().join("examples/warm")
}

/// A server for one test.
pub struct Server {
    pub child: Child,
    pub directory: tempfile::TempDir,
    pub way: Way,
    /// Those that were passed to it, as a service manager has them.
    pub sockets: Vec<OwnedFd>,
}

impl Server {
    pub fn start(way: Way, options: &[&str]) -> Self {
        Self::start_with(way, options, &[])
    }

    pub fn start_with(way: Way, options: &[&str], variables: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let mut command = serve_command(way, &socket, options);
        command.envs(variables.iter().copied());
        Self::start_command(way, directory, &mut command)
    }

    /// Starts a server to which its socket is passed as systemd does it, and with `control` the one beside it.
    pub fn start_passed(way: Way, control: bool, options: &[&str], variables: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let sockets = listeners(directory.path(), control);
        let mut command = passed_command(way, &sockets, options);
        command.envs(variables.iter().copied());
        let mut server = Self::start_command(way, directory, &mut command);
        server.sockets = sockets;
        server
    }

    /// Starts a server by `command`, whose socket is in `directory`.
    pub fn start_command(way: Way, directory: tempfile::TempDir, command: &mut Command) -> Self {
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let child = command.stderr(log).spawn().unwrap();
        let server = Self { child, directory, way, sockets: Vec::new() };
        server.wait_until("the workers are ready", || {
            let output = server.orrery(&["status"]).output().unwrap();
            output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("starting")
        });
        server
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// Returns a command of the client.
    pub fn orrery(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(orrery_testing::built("orrery"));
        settle_environment(&mut command).env("ORRERY_WARM", self.socket()).arg("warm").args(arguments);
        command
    }

    /// Runs a program by the client.
    pub fn run<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = self.orrery(&["run"]);
        command.args(arguments);
        command
    }

    /// Returns the workers' process ids, as the server tells them.
    pub fn workers(&self) -> Vec<i32> {
        let output = self.orrery(&["status"]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let worker = |line: &str| line.strip_prefix("worker ")?.split(':').next()?.parse().ok();
        text.lines().filter_map(worker).collect()
    }

    pub fn wait_until(&self, what: &str, done: impl FnMut() -> bool) {
        let log = self.directory.path().join("log");
        orrery_testing::eventually(&format!("{what} (log: {})", log.display()), done);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        signal(i32::try_from(self.child.id()).unwrap(), libc::SIGTERM);
        let begun = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            if begun.elapsed() > Duration::from_secs(10) {
                let _ = self.child.kill();
                let _ = self.child.wait();
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        if std::thread::panicking() {
            eprintln!("the server ({:?}) said:\n{}", self.way, self.log());
        }
    }
}

/// Returns the command that starts a server for a test, with one worker unless `options` have another number.
pub fn serve_command(way: Way, socket: &Path, options: &[&str]) -> Command {
    let mut command = default_serve_command(way);
    command.arg("--socket").arg(socket).args(options).args(one_worker(options));
    command
}

fn one_worker(options: &[&str]) -> &'static [&'static str] {
    if options.contains(&"--workers") { &[] } else { &["--workers", "1"] }
}

/// Returns listening sockets for a server in `directory`: for requests, and with `control` for that.
pub fn listeners(directory: &Path, control: bool) -> Vec<OwnedFd> {
    let names = ["socket", "socket.control"].into_iter().take(1 + usize::from(control));
    names.map(|name| UnixListener::bind(directory.join(name)).unwrap().into()).collect()
}

/// Returns the command that starts a server to which `sockets` are passed as descriptors 3 and up (`sd_listen_fds(3)`).
pub fn passed_command(way: Way, sockets: &[OwnedFd], options: &[&str]) -> Command {
    let serve = default_serve_command(way);
    let mut command = Command::new("/bin/sh");
    settle_environment(&mut command);
    command.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""]).arg(serve.get_program()).args(serve.get_args());
    command.args(options).args(one_worker(options));
    command.envs(serve.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command
        .env("LISTEN_FDS", sockets.len().to_string())
        .env("LISTEN_FDNAMES", vec!["x"; sockets.len()].join(":"));
    command.stdin(Stdio::null());
    // Out of the way of the numbers that they get.
    let sockets: Vec<OwnedFd> =
        sockets.iter().map(|socket| rustix::io::fcntl_dupfd_cloexec(socket, 200).unwrap()).collect();
    // SAFETY: plain system calls between fork and exec, on descriptors of the child; nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            for (socket, number) in sockets.iter().zip(3..) {
                if libc::dup2(socket.as_raw_fd(), number) == -1 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    command
}

/// Returns the command that starts a server with the default socket and number of workers.
pub fn default_serve_command(way: Way) -> Command {
    let mut command = Command::new(orrery_testing::built("orrery"));
    settle_environment(&mut command);
    command.args(["warm", "serve", "--python", "--isolate", way.isolation]);
    if let Some(tracker) = way.tracker {
        command.env("ORRERY_TRACKER", tracker);
    }
    command.stdin(Stdio::null());
    // SAFETY: a plain system call between fork and exec.
    unsafe {
        command.pre_exec(|| {
            // A test that is killed takes its server along.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    command
}

/// The same environment for server, client and plain python3, whatever the test runner's is: one that was started in the
/// background or by nohup(1) ignores signals.
pub fn settle_environment(command: &mut Command) -> &mut Command {
    // SAFETY: plain system calls between fork and exec; nothing is allocated.
    unsafe {
        command.pre_exec(|| {
            for number in 1..32 {
                libc::signal(number, libc::SIG_DFL);
            }
            libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC.cast_signed());
            Ok(())
        });
    }
    command.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", "/nonexistent").env("LANG", "C.UTF-8")
}

/// Plain python3, called as users call it.
pub fn python<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(PYTHON);
    settle_environment(&mut command).env("PYTHONDONTWRITEBYTECODE", "1").arg0("python3").args(arguments);
    command
}

/// What a program did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ran {
    pub status: ExitStatus,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

impl Ran {
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }
}

/// Runs a command to its end with `input` on its standard input.
pub fn ran(command: &mut Command, input: &[u8]) -> Ran {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // A program that does not read its input is no failure.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    Ran { status: output.status, stdout: output.stdout, stderr: output.stderr }
}

/// Returns how a status reads in a failure message: the exit status or the signal, core files apart.
pub fn told(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("signal {signal}"),
        None => format!("exit {}", status.code().unwrap()),
    }
}

/// Output with what differs from process to process taken out: the numbers after 0x.
pub fn without_addresses(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let mut pieces = text.split("0x");
    let first = pieces.next().unwrap_or_default().to_owned();
    let digits = |character: char| character.is_ascii_hexdigit();
    pieces.fold(first, |text, piece| text + "0x..." + piece.trim_start_matches(digits))
}

/// Adds a complaint for every way in which `warm` differs from `cold`.
pub fn compare(complaints: &mut String, what: &str, warm: &Ran, cold: &Ran) {
    if told(warm.status) != told(cold.status) {
        writeln!(complaints, "{what}: {} instead of {}", told(warm.status), told(cold.status)).unwrap();
    }
    for (stream, warm, cold) in
        [("stdout", &warm.stdout, &cold.stdout), ("stderr", &warm.stderr, &cold.stderr)]
    {
        let (warm, cold) = (without_addresses(warm), without_addresses(cold));
        if warm != cold {
            writeln!(complaints, "{what}: {stream} differs\n--- warm\n{warm}\n--- cold\n{cold}").unwrap();
        }
    }
}

pub fn signal(pid: i32, number: i32) {
    // SAFETY: a plain system call; tests signal only what they started.
    unsafe { libc::kill(pid, number) };
}

pub fn is_alive(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        let state = stat.rsplit_once(')').unwrap().1.trim_start();
        !state.starts_with(['Z', 'X'])
    })
}
