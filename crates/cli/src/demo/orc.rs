//! Copies of a program from files of their own, as containers have them: what they take in memory, by themselves and from a store.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use orrery_orc_client::Client;

use super::picture::{Bar, bars};
use super::stage::{Process, Stage};

const COPIES: usize = 6;
const WORK: &str =
    "import json, decimal, email.utils\nprint('ready', flush=True)\nimport time\ntime.sleep(600)";

pub(super) fn show(stage: &mut Stage) -> Result<()> {
    let directory = stage.directory().join("orc");
    let programs = copies(&directory)?;
    let store = directory.join("store");
    let mut plain = Vec::new();
    for program in &programs {
        plain.push(start(stage, &mut Command::new(program))?);
    }
    let before = proportional(&plain)?;
    drop(plain);
    let mut serve = stage.orrery(["orc", "serve", "--directory"]);
    let mut server = stage.start(serve.arg(&store))?;
    // The socket exists before the store listens at it.
    while Client::connect_to(&store).is_err() && server.complaint().is_empty() {
        stage.pause(Duration::from_millis(20))?;
    }
    let mut sharing = Vec::new();
    for program in &programs {
        let mut command = stage.orrery(["orc", "run", "--directory"]);
        command.arg(&store).arg("--").arg(program);
        sharing.push(start(stage, &mut command)?);
    }
    let after = proportional(&sharing)?;
    println!(
        "  memory of {COPIES} interpreters from {COPIES} equal files, each page divided by those who map it"
    );
    print!(
        "{}",
        bars(&[
            Bar::new("by themselves", before, format!("{before:.1} MiB")),
            Bar::new("orrery orc run", after, format!("{after:.1} MiB")),
        ])
    );
    let mut stat = stage.orrery(["orc", "stat", "--directory"]);
    let output = stage.run(stat.arg(&store))?;
    println!("\n  orrery orc stat:");
    for line in String::from_utf8_lossy(&output.stdout).lines().take(8) {
        println!("    {}", line.trim_end());
    }
    ensure!(after < before, "nothing was shared");
    Ok(())
}

/// Makes copies of the interpreter, each a file of its own.
fn copies(directory: &Path) -> Result<Vec<PathBuf>> {
    let program = fs::canonicalize("/usr/bin/python3").context("cannot find python3")?;
    (0..COPIES)
        .map(|number| {
            let own = directory.join(format!("container{number}"));
            fs::create_dir_all(&own).context("cannot make a directory")?;
            let copy = own.join("python3");
            fs::copy(&program, &copy).context("cannot copy python3")?;
            Ok(copy)
        })
        .collect()
}

/// Starts a copy, and waits until it has loaded all that it uses.
fn start(stage: &mut Stage, command: &mut Command) -> Result<Process> {
    let (mut process, lines) = stage.lines(command.args(["-S", "-c", WORK]).env("PYTHONHOME", "/usr"))?;
    let line = stage.next(&lines)?;
    ensure!(line.as_deref() == Some("ready"), "an interpreter ended: {}", process.complaint());
    Ok(process)
}

/// Returns the memory of processes in MiB, pages divided by the number of processes that map them (Pss in proc(5)).
fn proportional(processes: &[Process]) -> Result<f64> {
    let mut kib = 0.0;
    for process in processes {
        let path = format!("/proc/{}/smaps_rollup", process.id());
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).context("there is no Pss")?;
        kib += line.trim().trim_end_matches(" kB").trim().parse::<f64>().context("cannot read Pss")?;
    }
    Ok(kib / 1024.0)
}
