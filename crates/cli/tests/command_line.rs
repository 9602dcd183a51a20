//! The command line itself: unknown options, options of the program, and help.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::process::{Command, Output, Stdio};

fn orrery(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_orrery")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Commands that run a program, with what must stand before it.
const RUNNERS: [&[&str]; 5] = [&["run"], &["trace"], &["guard"], &["faults"], &["orc", "run"]];

#[test]
fn an_unknown_option_is_no_program_name() {
    for runner in RUNNERS {
        let output = orrery(&[runner, &["--no-such-option", "true"][..]].concat());
        assert_eq!(output.status.code(), Some(2), "{runner:?}: {}", stderr(&output));
        assert!(stderr(&output).contains("--no-such-option"), "{runner:?}: {}", stderr(&output));
    }
}

#[test]
fn options_after_the_program_are_the_programs() {
    let output = orrery(&["run", "echo", "--version", "-x"]);
    if stderr(&output).contains("syscall user dispatch") {
        orrery_testing::skipped!("{}", stderr(&output));
        return;
    }
    assert!(output.status.success(), "{}", stderr(&output));
    let output = orrery(&["run", "sh", "-c", "echo $0 $1", "--policy", "-e"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "--policy -e\n", "{}", stderr(&output));
}

/// What a command is for is known only when its arguments are built, which is done for the one that is given alone.
#[test]
fn help_says_of_each_command_what_it_is_for() {
    for words in
        [&["--help"][..], &["-h"], &["help"], &["orc", "--help"], &["help", "vault"], &["kimage", "-h"]]
    {
        let text = String::from_utf8(orrery(words).stdout).unwrap();
        let commands: Vec<&str> = text
            .lines()
            .skip_while(|line| *line != "Commands:")
            .skip(1)
            .take_while(|line| !line.is_empty())
            .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
            .collect();
        assert!(commands.len() > 3, "{words:?}: {text}");
        for line in commands {
            assert!(line.split_ascii_whitespace().count() > 3, "{words:?}: {line}");
        }
    }
    let nothing = orrery(&[]);
    assert_eq!(nothing.status.code(), Some(2));
    assert!(stderr(&nothing).contains("Run a program under an executive"), "{}", stderr(&nothing));
}

#[test]
fn help_fits_the_terminal() {
    for command in [
        "debug", "doctor", "faults", "guard", "kimage", "orbits", "orc", "orthros", "run", "status", "top",
        "trace",
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_orrery"))
            .args([command, "--help"])
            .env("COLUMNS", "80")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        // A usage line is not wrapped.
        for line in text.lines().filter(|line| !line.starts_with("Usage:")) {
            assert!(line.chars().count() <= 120, "{command}: {line}");
        }
    }
}
