//! Whole programs under something: servers that their clients ask, and programs from their start to their end.
//!
//! What they run under is a [`Way`]: a tracer, a sandbox, or nothing.

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::{Case, Contender, Options, Pin, Quantity, Sample, Skipped, machine};

/// How many files [`git_tree`] makes.
const FILES: usize = 10_000;
/// How many sources [`c_sources`] makes, beside the one with `main`.
const SOURCES: usize = 6;
/// How long clients ask servers at a time: what takes longer is fewer rounds.
const WHOLE: Duration = Duration::from_secs(1);
const QUICK: Duration = Duration::from_millis(150);
/// A bound of three percent is not judged by fewer.
const SERVER_ROUNDS: usize = 12;
const TIMEOUT: Duration = Duration::from_secs(20);
/// Long enough for a client to begin on a machine that has other things to do.
const BEGINNING: Duration = Duration::from_secs(1);
/// The duration that wrk gets on its command line, in seconds: it is interrupted before.
const CLIENT_TIMEOUT: u32 = 30;

/// Returns the CPU on which programs run, and leaves it: clients, which this process starts, run beside.
///
/// # Errors
/// Fails where the kernel does not report the CPUs of this process, or does not let it leave one.
pub fn cpu_of_programs(options: &Options) -> Result<Pin> {
    let pin = options.pin()?;
    if let Pin::Cpu(cpu) = pin {
        machine::avoid(cpu)?;
    }
    Ok(pin)
}

/// Returns how long a client asks its server in each round.
pub fn time_of_clients(options: &Options) -> Duration {
    if options.quick() { QUICK } else { WHOLE }
}

/// Makes a case of a server, of which the requests per second are recorded as `name`.
pub fn server_case(work: &str, name: &str) -> Case {
    Case::new(work).quantity(name, Quantity::Rate).quick(true).rounds(SERVER_ROUNDS)
}

/// Makes the command that executes a program, given with its arguments.
type Make = dyn Fn(&[&str]) -> Result<Command>;

/// What a program runs under.
#[derive(Clone)]
pub struct Way {
    name: String,
    make: Rc<Make>,
}

impl Way {
    /// Makes a way whose name is for messages. `make` returns the command that executes a program, given with its arguments.
    pub fn new(name: impl Into<String>, make: impl Fn(&[&str]) -> Result<Command> + 'static) -> Self {
        Self { name: name.into(), make: Rc::new(make) }
    }

    /// Returns the name of the way.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the command that executes `words`, silently.
    fn command(&self, words: &[&str]) -> Result<Command> {
        let mut command = (self.make)(words)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(command)
    }
}

/// Leads a process group, and kills it when its standard input is closed: servers, what they have started, and what they
/// run under.
struct Supervisor {
    process: Child,
}

impl Supervisor {
    fn start() -> Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", "read -r _; kill -KILL 0"]);
        Ok(Self { process: command.stdin(Stdio::piped()).process_group(0).spawn()? })
    }

    fn group(&self) -> i32 {
        self.process.id().cast_signed()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ended = self.process.wait();
    }
}

/// A server, with what is under it, in a process group of its own.
struct Server {
    process: Child,
    port: u16,
    /// Ends them all.
    _supervisor: Supervisor,
}

impl Server {
    fn start(way: &Way, words: &[&str], port: u16) -> Result<Self> {
        let supervisor = Supervisor::start()?;
        let process = way.command(words)?.process_group(supervisor.group()).spawn()?;
        let mut server = Self { process, port, _supervisor: supervisor };
        let start = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            ensure!(start.elapsed() < TIMEOUT, "{words:?} does not answer, {}", way.name);
            if let Some(status) = server.process.try_wait()? {
                bail!("{words:?} ended, {}: {status}", way.name);
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _there = self.process.kill();
        let _ended = self.process.wait();
    }
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Returns whether all of these are installed.
///
/// # Errors
/// [`Skipped`] where one is not.
pub fn need(programs: &[&str]) -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let there = |program: &str| {
        std::env::split_paths(&path).chain(["/usr/sbin".into()]).any(|place| place.join(program).exists())
    };
    match programs.iter().find(|program| !there(program)) {
        Some(program) => Err(Skipped(format!("{program} is not installed")).into()),
        None => Ok(()),
    }
}

/// Returns a command that gets SIGINT after `time`, and SIGKILL 10 seconds later.
fn within(time: Duration, program: &str) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--foreground", "--preserve-status", "--signal=INT", "--kill-after=10"]);
    command.arg(time.as_secs_f64().to_string()).arg(program);
    command
}

/// Returns what a command prints.
///
/// # Errors
/// Fails where it cannot be started, or fails.
pub fn output_of(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{command:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(text)
}

/// A contender that runs Redis, and asks it by redis-benchmark.
pub struct Redis {
    server: Server,
    time: Duration,
    /// Requests per second as of the last run: the client needs a number of requests.
    rate: f64,
}

/// Few enough for one that is traced on a busy machine. The client measures in milliseconds.
const FEWEST_REQUESTS: f64 = 1000.0;
const MOST_REQUESTS: f64 = 200_000.0;

impl Redis {
    /// Starts the server. The client asks it for `time` in each round; its cases are called as redis-benchmark calls them.
    ///
    /// # Errors
    /// [`Skipped`] where Redis is not installed; fails where the server does not start.
    pub fn start(way: &Way, time: Duration) -> Result<Self> {
        need(&["redis-server", "redis-benchmark"])?;
        let port = free_port()?;
        let number = port.to_string();
        let words =
            ["redis-server", "--bind", "127.0.0.1", "--port", &number, "--save", "", "--appendonly", "no"];
        Ok(Self { server: Server::start(way, &words, port)?, time, rate: 0.0 })
    }
}

impl Contender for Redis {
    fn measure(&mut self, work: &str, _: u32) -> Result<Sample> {
        let requests = (self.rate * self.time.as_secs_f64()).clamp(FEWEST_REQUESTS, MOST_REQUESTS);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within these bounds")]
        let requests = requests as u32;
        let mut client = within(TIMEOUT, "redis-benchmark");
        client.args(["-p", &self.server.port.to_string(), "-n", &requests.to_string()]);
        let text = output_of(client.args(["-c", "20", "-t", work, "--csv"]))?;
        let rate = text.lines().last().and_then(|line| line.split(',').nth(1));
        let rate: f64 = rate.and_then(|rate| rate.trim_matches('"').parse().ok()).context("a rate")?;
        ensure!(rate > 0.0, "redis-benchmark: {text}");
        self.rate = rate;
        let elapsed = Duration::from_secs_f64(f64::from(requests) / rate);
        Ok(Sample { iterations: requests, elapsed, latencies: Vec::new() })
    }

    fn processes(&self) -> Vec<u32> {
        vec![self.server.process.id()]
    }
}

/// A contender that runs nginx, and asks it by wrk.
pub struct Nginx {
    server: Server,
    time: Duration,
}

impl Nginx {
    /// Starts the server, whose files are made in `place`. The client asks it for `time` in each round.
    ///
    /// # Errors
    /// [`Skipped`] where nginx or wrk is not installed; fails where the server does not start.
    pub fn start(way: &Way, place: &Path, time: Duration) -> Result<Self> {
        need(&["nginx", "wrk"])?;
        let port = free_port()?;
        let prefix = place.join(format!("nginx-{port}"));
        let root = prefix.join("www");
        fs::create_dir_all(&root)?;
        fs::write(root.join("page"), [b'p'; 4096])?;
        let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
        let text = format!(
            "daemon off; worker_processes 1; {user} pid pid; error_log errors;
            events {{ worker_connections 512; }}
            http {{ access_log off; client_body_temp_path b; proxy_temp_path p; fastcgi_temp_path f;
              uwsgi_temp_path u; scgi_temp_path s; sendfile on; keepalive_requests 1000000;
              server {{ listen 127.0.0.1:{port}; root {}; }} }}",
            root.display()
        );
        let file = prefix.join("nginx.conf");
        fs::write(&file, text)?;
        let (prefix, file) = (prefix.display().to_string(), file.display().to_string());
        let words = ["/usr/sbin/nginx", "-e", "errors", "-p", &prefix, "-c", &file];
        Ok(Self { server: Server::start(way, &words, port)?, time })
    }
}

impl Contender for Nginx {
    fn measure(&mut self, _: &str, _: u32) -> Result<Sample> {
        let url = format!("http://127.0.0.1:{}/page", self.server.port);
        // It takes whole seconds, and prints what it has when it is interrupted.
        let long = format!("-d{CLIENT_TIMEOUT}s");
        let ask = |time| output_of(within(time, "wrk").args(["-t1", "-c16", &long, &url]));
        // On a busy machine, it may be interrupted before it has begun, and is ended by that.
        let text = ask(self.time).or_else(|_| {
            self.time = (2 * self.time).max(BEGINNING);
            ask(self.time)
        })?;
        ensure!(!text.contains("Non-2xx"), "wrk: {text}");
        // "  68023 requests in 1.00s, ..."
        let line =
            text.lines().find(|line| line.contains(" requests in ")).context("wrk printed no requests")?;
        let mut words = line.split_ascii_whitespace();
        let iterations = words.next().and_then(|count| count.parse().ok()).context("a count")?;
        let elapsed = words.nth(2).and_then(parse_time).with_context(|| format!("no time in {line:?}"))?;
        Ok(Sample { iterations, elapsed, latencies: Vec::new() })
    }

    fn processes(&self) -> Vec<u32> {
        vec![self.server.process.id()]
    }
}

/// Parses a time as wrk prints it: `1.00s,` or `402.11ms,`.
fn parse_time(text: &str) -> Option<Duration> {
    let text = text.trim_end_matches(',');
    let (number, unit) = text.split_at(text.find(|letter: char| letter.is_ascii_alphabetic())?);
    let scale = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return None,
    };
    Some(Duration::from_secs_f64(number.parse::<f64>().ok()? * scale))
}

/// A program that is run from its start to its end.
pub struct Run {
    way: Way,
    directory: PathBuf,
    words: Vec<&'static str>,
}

impl Run {
    /// Makes the run of a program in a directory.
    ///
    /// # Errors
    /// [`Skipped`] where the program is not installed.
    pub fn new(way: &Way, directory: PathBuf, words: &[&'static str]) -> Result<Self> {
        need(&words[..1])?;
        Ok(Self { way: way.clone(), directory, words: words.to_vec() })
    }
}

impl Contender for Run {
    fn measure(&mut self, _: &str, iterations: u32) -> Result<Sample> {
        Sample::batch(iterations, |_| {
            let status = self.way.command(&self.words)?.current_dir(&self.directory).status()?;
            ensure!(status.success(), "{:?}, {}: {status}", self.words, self.way.name);
            Ok(())
        })
    }
}

/// Makes a repository of many files, unless it exists, and returns its path.
///
/// # Errors
/// [`Skipped`] where git is not installed; fails where files cannot be made.
pub fn git_tree(place: &Path) -> Result<PathBuf> {
    need(&["git"])?;
    if !place.exists() {
        for index in 0..FILES {
            let directory = place.join(format!("d{}", index / 100));
            fs::create_dir_all(&directory)?;
            fs::write(directory.join(format!("f{index}")), index.to_string())?;
        }
        let script = "git init -q . && git add . && git -c user.name=a -c user.email=a@b -c commit.gpgsign=false commit -qm x";
        output_of(Command::new("sh").args(["-c", script]).current_dir(place))?;
    }
    Ok(place.to_owned())
}

/// Makes C sources and a Makefile, unless they exist, and returns their directory.
///
/// # Errors
/// [`Skipped`] where make or gcc is not installed; fails where files cannot be made.
pub fn c_sources(place: &Path) -> Result<PathBuf> {
    need(&["make", "gcc"])?;
    if !place.exists() {
        fs::create_dir_all(place)?;
        let names: Vec<String> = (0..SOURCES).map(|index| format!("f{index}")).collect();
        for name in &names {
            let text = format!(
                "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\nint {name}(int x) {{ char t[64]; \
                 snprintf(t, sizeof t, \"%d\", x); return atoi(t) + (int)strlen(t); }}\n"
            );
            fs::write(place.join(format!("{name}.c")), text)?;
        }
        fs::write(place.join("main.c"), "int f0(int);\nint main(void) { return f0(1) == 0; }\n")?;
        let objects = names.iter().map(|name| format!("{name}.o")).collect::<Vec<_>>().join(" ");
        let rules = format!("program: main.o {objects} ; gcc -o $@ $^\n%.o: %.c ; gcc -O2 -c $<\n");
        fs::write(place.join("Makefile"), rules)?;
    }
    Ok(place.to_owned())
}
