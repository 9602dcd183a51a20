//! `make bench B=hijack-apps`: whole programs under an executive, beside what else sees each of their calls.
//!
//! Redis under redis-benchmark and nginx under wrk, each server bound to a CPU that its client leaves alone, with the process that traces it; `git status` in a tree of many files, a build by make and gcc, and programs that do nothing, from the start of the
//! program to its end. Redis, nginx and find, too, with each call printed and what its descriptors lead to.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use orrery_bench::{Bench, Case, Contender, Entry, Group, Pin, Quantity, Sample, Skipped, Unit, machine};
use orrery_hijack::{Hijack, Policy};
use rustix::process::{Signal, getpgrp, kill_process_group};

/// The argument with which this program executes another one, under one of the following.
const EXECUTE_UNDER: &str = "execute-under";
const EXECUTIVE: &str = "executive";
const POLICY: &str = "executive, path policy";
const NATIVE: &str = "native";
const STRACE: &str = "strace -c";
/// Each call in a line, with what its descriptors lead to.
const TRACE_YY: &str = "orrery trace -yy";
const STRACE_YY: &str = "strace -f -yy";
const PTRACE: &str = "ptrace";
/// What a program costs at least that somebody meets before its first instruction: each is traced until it has executed one.
const MET: &str = "met by ptrace";
/// No contender: see [`Supervisor`].
const SUPERVISOR: &str = "supervisor";

/// A rule that is checked for each call that takes a path, or a descriptor that has one, and matches none.
const RULES: &str = "[[rule]]\ncall = '%file'\npath = '/nowhere/**'\ndeny = 'EACCES'\n";
/// Only starts and exits of programs.
const EXECUTE: &str = "i=0; while [ $i -lt 50 ]; do /bin/true; i=$((i + 1)); done";
const FILES: usize = 10_000;
const SOURCES: usize = 6;
const TIMEOUT: Duration = Duration::from_secs(20);
/// Long enough for a client to begin on a machine that has other things to do.
const BEGINNING: Duration = Duration::from_secs(1);
/// The duration that wrk gets on its command line, in seconds: it is interrupted before.
const CLIENT_TIMEOUT: u32 = 30;

fn main() -> Result<ExitCode> {
    let about = "Whole programs under an executive beside their rivals";
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, way, pin, words @ ..] = &arguments[..]
        && mode == EXECUTE_UNDER
    {
        return execute_under(way, pin.parse().map_err(anyhow::Error::msg)?, words);
    }
    let mut bench = Bench::new("hijack-apps", about);
    let pin = bench.options().pin()?;
    let time = if bench.options().quick() { QUICK } else { WHOLE };
    if let Pin::Cpu(cpu) = pin {
        // Clients; servers and programs bind themselves.
        machine::avoid(cpu)?;
    }
    let directory = tempfile::tempdir()?;
    let place = directory.path().to_owned();
    let redis = |way| Entry::new(way, move || Redis::start(way, pin, time));
    let pages = place.clone();
    let nginx = |way| {
        let pages = pages.clone();
        Entry::new(way, move || Nginx::start(way, pin, &pages, time))
    };
    let tree = place.join("tree");
    let git = |way| {
        let tree = tree.clone();
        Entry::new(way, move || Run::new(way, pin, tree_of(&tree)?, &["git", "status", "--short"]))
    };
    let sources = place.join("sources");
    let gcc = |way| {
        let sources = sources.clone();
        Entry::new(way, move || Run::new(way, pin, sources_in(&sources)?, &["make", "-s", "-B"]))
    };
    let shell = |way| Entry::new(way, move || Run::new(way, pin, "/".into(), &["sh", "-c", EXECUTE]));
    // Servers have the closest promises, so most of the time is theirs.
    let rate = |work: &'static str, name: &str| {
        Case::new(work).quantity(name, Quantity::Rate).quick(true).share(4).rounds(SERVER_ROUNDS)
    };
    let time = |work: &'static str, name: &str| Case::mean(work, name, Unit::Milliseconds).quick(true);
    let programs: [(&str, Start<'_>, Vec<Case>); 5] = [
        ("redis", &redis, vec![rate("get", "redis GET"), rate("set", "redis SET")]),
        ("nginx", &nginx, vec![rate("page", "nginx")]),
        ("git", &git, vec![time("status", "git status").share(2)]),
        ("gcc", &gcc, vec![time("build", "gcc build").share(3)]),
        ("shell", &shell, vec![time("execute", "50 programs executed")]),
    ];
    for (name, entry, cases) in &programs {
        let group = |name: String, ours, rival| Group::new(name, entry(ours), [entry(rival)]);
        bench.group(group((*name).to_owned(), EXECUTIVE, NATIVE).cases(cases.clone()));
        if *name == "shell" {
            bench.group(group("shell, traced at the start".to_owned(), EXECUTIVE, MET).cases(cases.clone()));
        }
        let ruled = group(format!("{name}, path policy"), POLICY, NATIVE);
        // No promise is about the others' time under a policy.
        let quick = ["redis", "nginx"].contains(name);
        let named = |case: &str| format!("{case}, path policy");
        bench.group(ruled.cases(cases.iter().map(|case| case.clone().renamed(named).quick(quick))));
    }
    // Tracers take so long that beside them the others would hardly run. A quick run has two programs for them: one that
    // serves, one that ends.
    for (name, entry, cases) in &programs {
        let traced = Group::new(format!("{name}, traced"), entry(EXECUTIVE), [STRACE, PTRACE].map(entry));
        let quick = ["nginx", "git"].contains(name);
        let cases = cases.iter().cloned().map(|case| case.share(1).rounds(0).quick(quick));
        bench.group(traced.cases(cases));
    }
    // What is printed of descriptors is looked up at each call: sockets by addresses, files by paths.
    let find =
        |way| Entry::new(way, move || Run::new(way, pin, PLACE.into(), &["find", ".", "-size", "+1k"]));
    let described: [(&str, Start<'_>, Vec<Case>); 3] = [
        ("redis", &redis, vec![rate("get", "redis GET, -yy")]),
        ("nginx", &nginx, vec![rate("page", "nginx, -yy")]),
        ("find", &find, vec![time("find", "find, -yy")]),
    ];
    for (name, entry, cases) in described {
        let group = Group::new(format!("{name}, -yy"), entry(TRACE_YY), [entry(STRACE_YY)]);
        bench.group(group.cases(cases.into_iter().map(|case| case.share(1).rounds(0).quick(false))));
    }
    bench.run()
}

/// A tree of many files, on most machines.
const PLACE: &str = "/usr/share/doc";

/// Makes the entry of a program under one of the ways.
type Start<'a> = &'a dyn Fn(&'static str) -> Entry;

/// How long clients ask servers at a time: what takes longer is fewer rounds.
const WHOLE: Duration = Duration::from_secs(1);
const QUICK: Duration = Duration::from_millis(150);
/// A bound of three percent is not judged by fewer.
const SERVER_ROUNDS: usize = 12;

/// Returns a command that executes `words` under one of the ways.
fn command(way: &str, pin: Pin, words: &[&str]) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args([EXECUTE_UNDER, way, &pin.to_string()]).args(words);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command)
}

fn execute_under(way: &str, pin: Pin, words: &[String]) -> Result<ExitCode> {
    pin.bind()?;
    let words: Vec<OsString> = words.iter().map(OsString::from).collect();
    let (program, rest) = words.split_first().context("no program to execute")?;
    let options = orrery_hijack::Options::default().counted(false);
    let options = match way {
        NATIVE => bail!("execute {program:?}: {}", Command::new(program).args(rest).exec()),
        STRACE => {
            let mut strace = Command::new("strace");
            strace.args(["-c", "-f", "-qq", "-o", "/dev/null"]).args(&words);
            bail!("execute strace: {}", strace.exec());
        }
        TRACE_YY => {
            let mut trace = Command::new(machine::program_directory()?.join("orrery"));
            trace.args(["trace", "-yy", "-o", "/dev/null", "--"]).args(&words);
            bail!("execute orrery: {}", trace.exec());
        }
        STRACE_YY => {
            let mut strace = Command::new("strace");
            strace.args(["-f", "-yy", "-qq", "-o", "/dev/null"]).args(&words);
            bail!("execute strace: {}", strace.exec());
        }
        PTRACE => return traced(program, rest, Until::End),
        MET => return traced(program, rest, Until::Executed),
        SUPERVISOR => return supervise(),
        POLICY => options.policy(Policy::parse(RULES, "built in")?),
        EXECUTIVE => options,
        other => bail!("there is no contender {other:?}"),
    };
    Err(Hijack::start(options)?.execute(program, rest).into())
}

/// How long a tracer stays.
#[derive(Clone, Copy, PartialEq)]
enum Until {
    /// To the end, stopping it at each call, twice.
    End,
    /// Until a process has executed a program.
    Executed,
}

/// Starts a program, traces all that it starts, and does nothing about it.
fn traced(program: &OsString, rest: &[OsString], until: Until) -> Result<ExitCode> {
    let mut command = Command::new(program);
    command.args(rest);
    // SAFETY: the child makes two system calls between fork and exec, and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
            libc::raise(libc::SIGSTOP);
            Ok(())
        });
    }
    let first = start_stopped(command)?;
    let options = libc::PTRACE_O_TRACESYSGOOD
        | libc::PTRACE_O_TRACEFORK
        | libc::PTRACE_O_TRACEVFORK
        | libc::PTRACE_O_TRACECLONE
        | libc::PTRACE_O_TRACEEXEC
        | libc::PTRACE_O_EXITKILL;
    let resume = if until == Until::End { libc::PTRACE_SYSCALL } else { libc::PTRACE_CONT };
    // SAFETY: what is waited for is traced by this thread.
    unsafe {
        libc::ptrace(libc::PTRACE_SETOPTIONS, first, 0, options);
        libc::ptrace(resume, first, 0, 0);
        loop {
            let mut status = 0;
            let pid = libc::waitpid(-1, &raw mut status, libc::__WALL);
            ensure!(pid > 0, "wait: {}", io::Error::last_os_error());
            if pid == first && libc::WIFEXITED(status) {
                return Ok(ExitCode::from(u8::try_from(libc::WEXITSTATUS(status))?));
            }
            if !libc::WIFSTOPPED(status) {
                ensure!(pid != first, "the program was killed: status {status:#x}");
                continue;
            }
            let executed = status >> 16 == libc::PTRACE_EVENT_EXEC;
            if executed && until == Until::Executed && pid != first {
                libc::ptrace(libc::PTRACE_DETACH, pid, 0, 0);
                continue;
            }
            let signal = match libc::WSTOPSIG(status) {
                // A call; an event; a thread's first stop.
                signal if signal & 0x80 != 0 || signal == libc::SIGTRAP || signal == libc::SIGSTOP => 0,
                signal => signal,
            };
            libc::ptrace(resume, pid, 0, signal);
        }
    }
}

/// Forks a child, which stops before it executes the program.
fn start_stopped(mut command: Command) -> Result<libc::pid_t> {
    // SAFETY: this process has one thread, so the child finds no lock held by another one.
    unsafe {
        let child = libc::fork();
        ensure!(child >= 0, "fork: {}", io::Error::last_os_error());
        if child == 0 {
            let error = command.exec();
            eprintln!("execute {command:?}: {error}");
            libc::_exit(127);
        }
        let mut status = 0;
        let waited = libc::waitpid(child, &raw mut status, libc::__WALL);
        ensure!(waited == child && libc::WIFSTOPPED(status), "the child does not stop: status {status:#x}");
        Ok(child)
    }
}

/// Leads a process group, and kills it when the other end of its standard input is closed: servers, what they have
/// started, and their tracers.
struct Supervisor {
    process: Child,
}

impl Supervisor {
    fn start() -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([EXECUTE_UNDER, SUPERVISOR, "none", SUPERVISOR]);
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

fn supervise() -> Result<ExitCode> {
    io::copy(&mut io::stdin(), &mut io::sink())?;
    kill_process_group(getpgrp(), Signal::KILL)?;
    Ok(ExitCode::SUCCESS)
}

/// A server, with what is under it, in a process group of its own.
struct Server {
    process: Child,
    port: u16,
    /// Ends them all.
    _supervisor: Supervisor,
}

impl Server {
    fn start(way: &str, pin: Pin, words: &[&str], port: u16) -> Result<Self> {
        let supervisor = Supervisor::start()?;
        let process = command(way, pin, words)?.process_group(supervisor.group()).spawn()?;
        let mut server = Self { process, port, _supervisor: supervisor };
        let start = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            ensure!(start.elapsed() < TIMEOUT, "{words:?} does not answer, {way}");
            if let Some(status) = server.process.try_wait()? {
                bail!("{words:?} ended, {way}: {status}");
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

/// Skips where one of these is not installed.
fn need(programs: &[&str]) -> Result<()> {
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

/// Returns what a client prints.
fn output_of(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{command:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(text)
}

/// Redis, and redis-benchmark.
struct Redis {
    server: Server,
    time: Duration,
    /// Requests per second as of the last run: the client needs a number of requests.
    rate: f64,
}

/// Few enough for one that is traced on a busy machine. The client measures in milliseconds.
const FEWEST_REQUESTS: f64 = 1000.0;
const MOST_REQUESTS: f64 = 200_000.0;

impl Redis {
    fn start(way: &str, pin: Pin, time: Duration) -> Result<Self> {
        need(&["redis-server", "redis-benchmark"])?;
        let port = free_port()?;
        let number = port.to_string();
        let words =
            ["redis-server", "--bind", "127.0.0.1", "--port", &number, "--save", "", "--appendonly", "no"];
        Ok(Self { server: Server::start(way, pin, &words, port)?, time, rate: 0.0 })
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
}

/// nginx, and wrk.
struct Nginx {
    server: Server,
    time: Duration,
}

impl Nginx {
    fn start(way: &'static str, pin: Pin, place: &Path, time: Duration) -> Result<Self> {
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
        Ok(Self { server: Server::start(way, pin, &words, port)?, time })
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
struct Run {
    way: &'static str,
    pin: Pin,
    directory: PathBuf,
    words: Vec<&'static str>,
}

impl Run {
    fn new(way: &'static str, pin: Pin, directory: PathBuf, words: &[&'static str]) -> Result<Self> {
        need(&words[..1])?;
        Ok(Self { way, pin, directory, words: words.to_vec() })
    }
}

impl Contender for Run {
    fn measure(&mut self, _: &str, iterations: u32) -> Result<Sample> {
        Sample::batch(iterations, |_| {
            let status = command(self.way, self.pin, &self.words)?.current_dir(&self.directory).status()?;
            ensure!(status.success(), "{:?}, {}: {status}", self.words, self.way);
            Ok(())
        })
    }
}

/// Makes a repository of many files, unless it exists.
fn tree_of(place: &Path) -> Result<PathBuf> {
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

/// Makes C sources and a Makefile, unless they exist.
fn sources_in(place: &Path) -> Result<PathBuf> {
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
