//! `orrery orthros` with real kernels that really panic. SKIPPED where QEMU, criu, redis, a kernel or root are absent.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;

use orrery_orthros::{KernelFiles, command};
use serde_json::Value;

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");

/// Two machines at a time are enough for the processors.
static ONE_PAIR: Mutex<()> = Mutex::new(());

fn cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("orthros-cache")
}

/// What is missing to run a pair with these programs.
fn missing(programs: &[(&str, &'static str)]) -> Option<String> {
    let common = [("qemu-system-x86_64", "qemu-system-x86"), ("criu", "criu"), ("busybox", "busybox-static")];
    if !rustix::process::geteuid().is_root() {
        return Some("it takes root".to_owned());
    }
    if !Path::new(ORRERY).with_file_name("orrery-guest").is_file() {
        return Some("orrery-guest is not built; cargo build --workspace does".to_owned());
    }
    for (program, package) in common.iter().chain(programs) {
        if let Err(error) = command::require(program, package) {
            return Some(error.to_string());
        }
    }
    KernelFiles::obtain(&cache()).err().map(|error| format!("no kernel to boot: {error}"))
}

fn orthros() -> Command {
    let mut command = Command::new(ORRERY);
    command.arg("orthros").env("ORRERY_CACHE", cache());
    command
}

fn events(output: &[u8]) -> Vec<Value> {
    output.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

#[test]
fn redis_and_its_connection_survive_two_panics_in_a_row() {
    if let Some(why) = missing(&[("redis-server", "redis-server"), ("ip", "iproute2")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let output = orthros().args(["demo", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let events = events(&output.stdout);
    let of = |name: &str| events.iter().filter(|event| event["event"] == name).count();
    // The client itself has made sure that no answer was lost and none came twice.
    assert_eq!((of("died"), of("survived"), of("counted"), of("renewed"), of("end")), (2, 2, 2, 1, 1));
    for event in events.iter().filter(|event| event["event"] == "survived") {
        let summary = &event["failover"]["summary"];
        assert_eq!(event["failover"]["cause"], "panic");
        assert_eq!((&summary["connections"], &summary["processes"]), (&Value::from(1), &Value::from(1)));
        assert!(summary["threads"].as_u64().unwrap() >= 4, "{summary}");
    }
    let left = Command::new("ip").args(["netns", "list"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&left.stdout).contains("orrery-"), "the network is gone");
}

/// `orrery orthros up`, spoken to.
struct Up {
    child: Child,
    input: ChildStdin,
    lines: BufReader<ChildStdout>,
    /// What was told before it was asked for: a new backup may stand by before or after a command is answered.
    told: Vec<Value>,
}

impl Up {
    fn start(service: &[&str]) -> Self {
        let mut command = orthros();
        command.args(["up", "--json", "--"]).args(service);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, lines) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, lines, told: Vec::new() }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// The next event of a kind; a failure is none.
    fn expect(&mut self, name: &str) -> Value {
        if let Some(at) = self.told.iter().position(|event| event["event"] == name) {
            return self.told.remove(at);
        }
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "it ended before {name}");
            let event: Value = serde_json::from_str(&line).unwrap();
            assert!(event["event"] != "failed", "{event}");
            if event["event"] == name {
                return event;
            }
            self.told.push(event);
        }
    }

    fn counted(&mut self) -> u64 {
        self.say("run cat /run/count");
        self.expect("ran")["text"].as_str().unwrap().trim().parse().unwrap()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_process_counts_on_in_another_kernel() {
    if let Some(why) = missing(&[]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let mut up = Up::start(&["orrery-guest", "count", "/run/count"]);
    up.expect("armed");
    up.expect("help");
    let before = up.counted();
    up.say("crash");
    assert_eq!(up.expect("survived")["failover"]["cause"], "panic");
    // The file did not survive, as it lay in memory; the number that the process writes into it did.
    let (first, second) = (up.counted(), up.counted());
    assert!(before <= first && first <= second, "{before}, {first}, {second}");
    up.expect("renewed");
    // By hand, while all is well.
    let before = up.counted();
    up.say("failover");
    assert_eq!(up.expect("survived")["failover"]["cause"], "request");
    assert!(up.counted() >= before);
    up.say("nonsense");
    assert!(up.expect("help")["text"].as_str().unwrap().contains("nonsense"));
    up.say("quit");
    up.expect("end");
    assert!(up.child.wait().unwrap().success());
}

#[test]
fn bad_arguments_change_nothing() {
    let refused = |arguments: &[&str]| {
        let output = orthros().args(arguments).stdin(Stdio::null()).output().unwrap();
        assert!(!output.status.success() && output.stdout.is_empty());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused(&["up", "--memory", "300", "--", "x"]).contains("256"));
    assert!(refused(&["up"]).contains("SERVICE"));
    assert!(refused(&["up", "--file", "x", "--", "y"]).contains("HERE:THERE"));
}
