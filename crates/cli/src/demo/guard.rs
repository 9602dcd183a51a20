//! A program that does its work, and tries what a policy does not allow it.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::picture::{Bar, bars};
use super::stage::{Stage, ending};

/// What the program does: a name, a command for bash, and whether the policy allows it.
const ATTEMPTS: &[(&str, &str, bool)] = &[
    ("reads its input", "read line < input.txt", true),
    ("writes its output", "echo done > output.txt", true),
    ("reads another user's files", "read line < /etc/shadow", false),
    ("reads a key", "read line < secret.key", false),
    ("adds to a start-up file", "echo evil >> .bashrc", false),
    ("connects to the network", "echo hello > /dev/tcp/127.0.0.1/9", false),
    ("kills the monitor", "kill -9 $PPID", false),
];

pub(super) fn show(stage: &mut Stage) -> Result<()> {
    let directory = stage.directory().join("guard");
    fs::create_dir_all(&directory).context("cannot make a directory")?;
    let shown = directory.display();
    for name in ["input.txt", "secret.key", ".bashrc"] {
        fs::write(directory.join(name), "text\n").context("cannot write a file")?;
    }
    let policy = directory.join("policy.toml");
    let text = format!(
        "[files]\nread = [\"/usr\", \"/bin\", \"/lib\", \"/lib64\", \"/etc/ld.so.cache\", \"/dev/null\", \"{shown}/input.txt\"]\n\
         write = [\"/dev/null\"]\nown = [\"{shown}\"]\nexecute = [\"/usr\", \"/bin\", \"/lib\", \"/lib64\"]\n"
    );
    fs::write(&policy, &text).context("cannot write the policy")?;
    let log = directory.join("log");
    let script: Vec<String> = ATTEMPTS
        .iter()
        .map(|(_, command, _)| format!("if {{ {command}; }} 2>/dev/null; then echo yes; else echo no; fi"))
        .collect();
    let mut command = stage.orrery(["guard", "--policy"]);
    command.arg(&policy).arg("--log").arg(&log).args(["--", "bash", "-c", &script.join("\n")]);
    let output = stage.run(command.current_dir(&directory))?;
    ensure!(output.status.success(), "the guarded program: {}", ending(&output));
    let answers = String::from_utf8_lossy(&output.stdout).into_owned();
    for ((what, attempt, allowed), answer) in ATTEMPTS.iter().zip(answers.lines()) {
        let done = answer == "yes";
        println!("  {} {what:28} {attempt}", if done { "allowed" } else { "refused" });
        ensure!(done == *allowed, "the policy has it otherwise");
    }
    ensure!(answers.lines().count() == ATTEMPTS.len(), "the program ended early: {}", ending(&output));
    let refused = fs::read_to_string(&log).unwrap_or_default();
    if let Some(line) = refused.lines().find(|line| line.contains("shadow")) {
        println!("\n  a line of JSON for each refusal, while it happens:\n  {line}");
    }
    cost(stage)
}

/// What a guard costs a program that does nothing but look at files.
fn cost(stage: &mut Stage) -> Result<()> {
    const FIND: [&str; 3] = ["find", "/usr/share", "-newer"];
    let policy = stage.directory().join("guard/open.toml");
    fs::write(&policy, "[files]\nread = [\"/\"]\nexecute = [\"/\"]\n").context("cannot write the policy")?;
    let find = |command: &mut Command| {
        command.args([FIND[1], "-newer", "/proc/version"]);
    };
    let mut bare = Command::new(FIND[0]);
    find(&mut bare);
    let mut guarded = stage.orrery(["guard", "--policy"]);
    find(guarded.arg(&policy).args(["--", FIND[0]]));
    let mut rows = Vec::new();
    // The first run fills the cache.
    stage.seconds(&mut bare)?;
    for (name, command) in [("bare", &mut bare), ("guarded", &mut guarded)] {
        let seconds = stage.seconds(command)?;
        rows.push(Bar::new(name, seconds, format!("{:.0} ms: find /usr/share", seconds * 1e3)));
    }
    println!();
    print!("{}", bars(&rows));
    Ok(())
}
