//! `make bench B=hijack-apps`: whole programs under an executive, beside what else sees each of their calls.
//!
//! Redis under redis-benchmark and nginx under wrk, each server bound to a CPU that its client leaves alone, with the process that traces it; `git status` in a tree of many files, a build by make and gcc, and programs that do nothing, from the start of the
//! program to its end. Redis, nginx and find, too, with each call printed and what its descriptors lead to.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};
use orrery_bench::programs::{
    Nginx, Redis, Run, Way, c_sources, cpu_of_programs, git_tree, server_case, time_of_clients,
};
use orrery_bench::{Bench, Case, Entry, Group, Pin, Unit, machine};
use orrery_hijack::{Hijack, Policy};

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

/// A rule that is checked for each call that takes a path, or a descriptor that has one, and matches none.
const RULES: &str = "[[rule]]\ncall = '%file'\npath = '/nowhere/**'\ndeny = 'EACCES'\n";
/// Only starts and exits of programs.
const EXECUTE: &str = "i=0; while [ $i -lt 50 ]; do /bin/true; i=$((i + 1)); done";

fn main() -> Result<ExitCode> {
    let about = "Whole programs under an executive beside their rivals";
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, way, pin, words @ ..] = &arguments[..]
        && mode == EXECUTE_UNDER
    {
        return execute_under(way, pin.parse().map_err(anyhow::Error::msg)?, words);
    }
    let mut bench = Bench::new("hijack-apps", about);
    let pin = cpu_of_programs(bench.options())?;
    let time = time_of_clients(bench.options());
    let directory = tempfile::tempdir()?;
    let place = directory.path().to_owned();
    let redis = |name| Entry::new(name, move || Redis::start(&way(name, pin), time));
    let pages = place.clone();
    let nginx = |name| {
        let pages = pages.clone();
        Entry::new(name, move || Nginx::start(&way(name, pin), &pages, time))
    };
    let tree = place.join("tree");
    let git = |name| {
        let tree = tree.clone();
        Entry::new(name, move || Run::new(&way(name, pin), git_tree(&tree)?, &["git", "status", "--short"]))
    };
    let sources = place.join("sources");
    let gcc = |name| {
        let sources = sources.clone();
        Entry::new(name, move || Run::new(&way(name, pin), c_sources(&sources)?, &["make", "-s", "-B"]))
    };
    let shell =
        |name| Entry::new(name, move || Run::new(&way(name, pin), "/".into(), &["sh", "-c", EXECUTE]));
    // Servers have the closest promises, so most of the time is theirs.
    let rate = |work, name| server_case(work, name).share(4);
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
    let find = |name| {
        Entry::new(name, move || Run::new(&way(name, pin), PLACE.into(), &["find", ".", "-size", "+1k"]))
    };
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

/// Returns one of the ways: this program executes the other one under it.
fn way(name: &'static str, pin: Pin) -> Way {
    Way::new(name, move |words| {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([EXECUTE_UNDER, name, &pin.to_string()]).args(words);
        Ok(command)
    })
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
