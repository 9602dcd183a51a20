//! Profilers and stack dumps find in a tracee what they find without an executive.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/facility.rs"]
mod facility;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use facility::ORRERY;
use orrery_testing::Compiler;

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sources");

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn is_missing(programs: &[&str]) -> bool {
    facility::is_missing() || !programs.iter().all(|program| orrery_testing::is_there(program))
}

/// Runs these words, with or without an executive.
fn run(executive: bool, directory: &Path, words: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "100"]);
    if executive {
        command.args([*ORRERY, "run", "--"]);
    }
    let output = command.args(words).current_dir(directory).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{words:?}: {output:?}");
    output
}

/// A program that is looked at from outside while it runs.
struct Running {
    process: Child,
    _input: std::process::ChildStdin,
    _output: BufReader<ChildStdout>,
}

impl Running {
    /// Starts it, and waits for its first line.
    fn start(executive: bool, words: &[&str]) -> Self {
        let words = if executive { [&[*ORRERY, "run", "--"], words].concat() } else { words.to_vec() };
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "{words:?}");
        Self { _input: process.stdin.take().unwrap(), process, _output: output }
    }

    fn number(&self) -> String {
        self.process.id().to_string()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _gone = self.process.kill();
        let _status = self.process.wait();
    }
}

/// Go's tools, with what they compiled kept for the next time.
fn go(directory: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "300", "go"]).env("HOME", directory).env("GOPATH", directory);
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hijack-programs/go-build");
    command
        .env("GOCACHE", cache)
        .env("GO111MODULE", "off")
        .env("CGO_ENABLED", "0")
        .env("GOTOOLCHAIN", "local");
    command.stdin(Stdio::null());
    command
}

/// Go's profiler interrupts threads by SIGPROF, and unwinds from what its handler is shown: the share of the time that was found in each
/// function and what that calls, in percent.
fn shares(executive: bool, directory: &Path) -> BTreeMap<String, f64> {
    run(executive, directory, &["./profiled", "profile"]);
    // Newer releases of Go compile this tool when it is first used.
    let mut tool = go(directory);
    tool.args(["tool", "pprof", "-top", "-cum", "profiled", "profile"]).current_dir(directory);
    let output = tool.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = text(&output.stdout);
    let rows = said.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let share = words.get(4)?.strip_suffix('%')?.parse().ok()?;
        Some(((*words.get(5)?).to_owned(), share))
    });
    rows.collect()
}

#[test]
fn profiles_of_go_programs_are_the_same() {
    if is_missing(&["go"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut build = go(directory.path());
    build.args(["build", "-o"]).arg(directory.path().join("profiled"));
    let built = build.arg(Path::new(SOURCES).join("profiled.go")).output().unwrap();
    assert!(built.status.success(), "{built:?}");
    let [expected, found] = [false, true].map(|executive| shares(executive, directory.path()));
    for function in ["main.main", "main.spins", "main.calls", "syscall.Getppid"] {
        let share = |of: &BTreeMap<String, f64>| of.get(function).copied().unwrap_or(0.0);
        let (expected_share, found_share) = (share(&expected), share(&found));
        assert!(expected_share > 10.0, "{function}: {expected:?}");
        // Calls take a little more of the time.
        assert!((expected_share - found_share).abs() < 25.0, "{function}: {expected:?}\n{found:?}");
    }
    // Where nothing is known of the code.
    for (function, share) in &found {
        let strange =
            function.contains("_ExternalCode") || function.contains("unknown") || function.starts_with("0x");
        assert!(!strange || *share < 3.0, "{found:?}");
    }
}

/// Returns the frames of a Java program's threads, by thread.
fn frames(executive: bool, directory: &Path) -> BTreeMap<String, Vec<String>> {
    let class = directory.to_str().unwrap();
    let tracee = Running::start(executive, &["java", "-XX:-UsePerfData", "-cp", class, "Blocked"]);
    let mut found = BTreeMap::new();
    // The main thread goes from its line of output to its input.
    for _ in 0..100 {
        let said = text(&run(false, directory, &["jstack", &tracee.number()]).stdout);
        for thread in ["main", "waiter"] {
            let Some((_, behind)) = said.split_once(&format!("\"{thread}\" ")) else { continue };
            let own = behind.split("\n\n").next().unwrap_or_default();
            let frames = own.lines().filter(|line| line.trim_start().starts_with("at "));
            // Classes that are made at run time have their addresses in their names.
            let named = |line: &str| {
                let (name, address) = line.trim().split_once("/0x").unwrap_or((line.trim(), ""));
                format!("{name}{}", address.trim_start_matches(|c: char| c.is_ascii_hexdigit()))
            };
            found.insert(thread.to_owned(), frames.map(named).collect::<Vec<_>>());
        }
        if found.get("main").is_some_and(|frames| frames.iter().any(|frame| frame.contains("Blocked.reads")))
        {
            break;
        }
    }
    found
}

#[test]
fn stacks_of_java_programs_are_the_same() {
    if is_missing(&["javac", "java", "jstack"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = format!("{SOURCES}/Blocked.java");
    run(false, directory.path(), &["javac", "-d", directory.path().to_str().unwrap(), &source]);
    let expected = frames(false, directory.path());
    for (thread, frame) in [("main", "Blocked.reads"), ("waiter", "Blocked.waits")] {
        assert!(expected[thread].iter().any(|line| line.contains(frame)), "{expected:?}");
    }
    assert_eq!(frames(true, directory.path()), expected);
}

/// How many stacks perf saw, and how many of them lead through the function that calls.
struct Sampled {
    stacks: usize,
    leading: usize,
}

impl Sampled {
    /// Enough to tell most from some.
    const ENOUGH: usize = 50;
    /// So many looks at most, of a second each: others may have the CPU meanwhile.
    const LOOKS: usize = 120;

    fn of(executive: bool, directory: &Path) -> Option<Self> {
        let program = directory.join("hostile");
        let tracee = Running::start(executive, &[program.to_str().unwrap(), "spins"]);
        let mut all = Self { stacks: 0, leading: 0 };
        for _ in 0..Self::LOOKS {
            let one = Self::look(&tracee, directory)?;
            all = Self { stacks: all.stacks + one.stacks, leading: all.leading + one.leading };
            if all.stacks >= Self::ENOUGH {
                return Some(all);
            }
        }
        panic!("perf saw {} stacks only", all.stacks);
    }

    fn look(tracee: &Running, directory: &Path) -> Option<Self> {
        let mut record = Command::new("timeout");
        record.args(["--signal=KILL", "250", "perf", "record", "-q", "-e", "cpu-clock", "-F", "499"]);
        record.args(["-g", "-o", "data", "-p", &tracee.number(), "--", "sleep", "1"]).current_dir(directory);
        let recorded = record.output().unwrap();
        if !recorded.status.success() {
            orrery_testing::skipped!("perf cannot look here: {}", text(&recorded.stderr).trim());
            return None;
        }
        let said = text(&run(false, directory, &["perf", "script", "-i", "data", "-F", "ip,sym"]).stdout);
        let stacks: Vec<&str> = said.split("\n\n").filter(|stack| !stack.trim().is_empty()).collect();
        let leads = |stack: &&&str| stack.lines().any(|line| line.trim().ends_with(" turn"));
        fs::remove_file(directory.join("data")).unwrap();
        Some(Self { stacks: stacks.len(), leading: stacks.iter().filter(leads).count() })
    }

    fn lead(&self) -> bool {
        10 * self.leading > 9 * self.stacks
    }
}

/// By frame pointers: trampolines and stubs leave the program's alone.
#[test]
fn perf_finds_who_calls() {
    if is_missing(&["perf"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let flags =
        ["-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-pthread", "-Wno-null-dereference"];
    let source = Path::new(SOURCES).join("hostile.c");
    Compiler::c().flags(flags).build(&[source], directory.path().join("hostile"));
    for executive in [false, true] {
        let Some(sampled) = Sampled::of(executive, directory.path()) else { return };
        let Sampled { stacks, leading } = sampled;
        assert!(sampled.lead(), "with an executive: {executive}; {leading} of {stacks}");
    }
}
