//! Debuggers, profilers and crash reports of programs that share: functions, lines and breakpoints are found as ever.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Store;
use crate::guest::{Guest, TALK, Workshop, variables};

/// Returns what gdb says to these commands, or nothing where there is no gdb.
fn gdb(arguments: &[&str], commands: &[String]) -> Option<String> {
    let mut command = Command::new("timeout");
    command.args(["60", "gdb", "-nx", "-batch", "-iex", "set debuginfod enabled off"]);
    commands.iter().for_each(|text| {
        command.args(["-ex", text]);
    });
    let output = command.args(arguments).env_remove("LD_AUDIT").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    // timeout(1) says so where there is no such program.
    (output.status.code() != Some(127)).then(|| said.into_owned())
}

fn is_here() -> bool {
    let there = Command::new("gdb").arg("--version").output().is_ok();
    if !there {
        orrery_testing::skipped!("there is no gdb");
    }
    there
}

/// A program that waits within a function of a library.
fn program(workshop: &Workshop) -> PathBuf {
    let library = format!(
        "{TALK} const char much[300000] = {{1}};
         int innermost(int number) {{ say(number); hear(); return number + 1; }}
         int answer(int number) {{ return innermost(number) + 1; }}"
    );
    workshop.library("libdeep.so", &library, &["-g", "-O0"]);
    let source = "int answer(int); int main(void) { return answer(40) - 42; }";
    workshop.program("deep", source, &["-g", "-O0", "-L$LIB", "-ldeep", "-Wl,-rpath,$LIB"])
}

/// Returns whether a backtrace has all frames, with their lines.
fn is_whole(trace: &str) -> bool {
    let lines = ["in innermost (number=40)", "in answer (number=40)", "in main ()"];
    let find = |frame: &str| trace.find(frame).unwrap_or(usize::MAX);
    let places = lines.map(find);
    places.is_sorted() && places[2] != usize::MAX && trace.contains("deep.c:") && trace.contains("read")
}

#[test]
fn backtraces_of_programs_and_of_their_core_dumps_are_whole() {
    if !is_here() {
        return;
    }
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let program = program(&workshop);
    // The second one finds its libraries by name.
    for round in 0..2 {
        let mut guest = Guest::start(&store, &workshop, &program);
        assert_eq!(guest.number(), 40);
        let reasons = guest.reasons("libdeep.so", "r-xp");
        assert!(reasons.iter().all(|reason| reason.starts_with("an object")), "{reasons:?}");
        let core = workshop.path(&format!("core{round}"));
        let dump = format!("generate-core-file {}", core.display());
        let Some(said) = gdb(&["-p", &guest.pid().to_string()], &["bt".to_owned(), dump]) else { return };
        if said.contains("ptrace: Operation not permitted") {
            orrery_testing::skipped!("processes cannot be traced here");
            return;
        }
        assert!(is_whole(&said), "of the process: {said}");
        let said = gdb(&[program.to_str().unwrap(), core.to_str().unwrap()], &["bt".to_owned()]).unwrap();
        assert!(is_whole(&said), "of the dump: {said}");
    }
}

fn run_under_gdb(store: &Store, program: &Path, commands: &[&str]) -> Option<String> {
    let mut all: Vec<String> = variables(store, &[])
        .into_iter()
        .filter(|(name, _)| name != "ORRERY_ORC_VERBOSE")
        .map(|(name, value)| format!("set environment {name} {value}"))
        .collect();
    all.extend(commands.iter().map(|&text| text.to_owned()));
    gdb(&[program.to_str().unwrap()], &all)
}

#[test]
fn breakpoints_are_met_wherever_they_were_set() {
    if !is_here() {
        return;
    }
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let program = program(&workshop);
    // Set before the program runs, in itself and in a library, and met again by the next run, which finds objects by name.
    let commands = [
        "set breakpoint pending on",
        "break main",
        "break innermost",
        "run </dev/null",
        "continue",
        "bt",
        "info proc mappings",
        "kill",
    ];
    for _ in 0..2 {
        let Some(said) = run_under_gdb(&store, &program, &commands) else { return };
        if said.contains("Operation not permitted") {
            orrery_testing::skipped!("processes cannot be traced here: {said}");
            return;
        }
        assert!(said.contains("Breakpoint 1, main ()"), "{said}");
        assert!(said.contains("Breakpoint 2, innermost (number=40)"), "{said}");
        assert!(said.contains("in answer (number=40)"), "{said}");
        assert!(said.contains("orc:libdeep.so") && said.contains("orc:deep"), "it shares: {said}");
    }
}

/// Returns what perf says of a program that spends its time in a function of a library, where it can be had.
fn profile(workshop: &Workshop, variables: &[(String, String)], program: &Path) -> Option<String> {
    let data = workshop.path("perf.data");
    let mut command = Command::new("timeout");
    command.args(["60", "perf", "record", "-q", "-e", "cpu-clock", "-o"]).arg(&data).arg("--").arg("env");
    command.args(variables.iter().map(|(name, value)| format!("{name}={value}"))).arg(program);
    let output = command.env_remove("LD_AUDIT").output().unwrap();
    if !output.status.success() {
        orrery_testing::skipped!("perf cannot record: {}", String::from_utf8_lossy(&output.stderr));
        return None;
    }
    let mut command = Command::new("timeout");
    command.args(["60", "perf", "report", "--stdio", "--sort", "dso,symbol", "-i"]).arg(&data);
    let output = command.env("DEBUGINFOD_URLS", "").output().unwrap();
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn profiles_tell_functions_in_objects() {
    if Command::new("perf").arg("--version").output().is_err() {
        orrery_testing::skipped!("there is no perf");
        return;
    }
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    // A second of work, most of it in a function that is told by name only where the table of symbols is found.
    let library = format!(
        "{TALK}
         #include <time.h>
         const char much[300000] = {{1}};
         static double passed(clock_t begin) {{ return (double)(clock() - begin) / CLOCKS_PER_SEC; }}
         int busy(void) {{
             volatile long sum = 0;
             for (clock_t begin = clock(); passed(begin) < 0.5;)
                 for (int i = 0; i < 1000000; i++) sum += i;
             return sum == 7;
         }}"
    );
    workshop.library("libbusy.so", &library, &[]);
    let source = "int busy(void); int main(void) { return busy(); }";
    let program = workshop.program("profiled", source, &["-L$LIB", "-lbusy", "-Wl,-rpath,$LIB"]);
    let variables = variables(&store, &[]);
    // The second one finds its libraries by name.
    for round in 0..2 {
        let Some(said) = profile(&workshop, &variables, &program) else { return };
        let line = said.lines().find(|line| line.contains("[.] busy "));
        let Some(line) = line else { panic!("round {round}: {said}") };
        assert!(line.contains("orc:libbusy.so"), "round {round}: it shares: {said}");
        let share: f64 = line.trim_start().split('%').next().unwrap().parse().unwrap();
        assert!(share > 50.0, "round {round}: {said}");
    }
}
