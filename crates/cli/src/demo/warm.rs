//! Ordinary scripts by python3 and by a warm interpreter, with the same output; then hostile ones, which leave nothing behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::picture::{Bar, bars, median};
use super::stage::{Stage, ending};

/// A script of `examples/warm`, the file that it reads, and its arguments.
struct Script {
    name: &'static str,
    text: &'static str,
    file: (&'static str, &'static str),
    arguments: &'static [&'static str],
}

const SCRIPTS: &[Script] = &[
    Script {
        name: "json_transform",
        text: include_str!("../../../../examples/warm/json_transform/json_transform.py"),
        file: ("orders.json", include_str!("../../../../examples/warm/json_transform/orders.json")),
        arguments: &["orders.json"],
    },
    Script {
        name: "csv_statistics",
        text: include_str!("../../../../examples/warm/csv_statistics/csv_statistics.py"),
        file: ("harbours.csv", include_str!("../../../../examples/warm/csv_statistics/harbours.csv")),
        arguments: &["harbours.csv", "harbour", "depth", "draught"],
    },
    Script {
        name: "feed_reader",
        text: include_str!("../../../../examples/warm/feed_reader/feed_reader.py"),
        file: ("feed.xml", include_str!("../../../../examples/warm/feed_reader/feed.xml")),
        arguments: &["feed.xml"],
    },
];

/// What scripts do to their interpreter, and whether that ends them.
const HOSTILE: &[(&str, &str)] = &[
    ("replaces print() and json", "import builtins, json; builtins.print = json.dumps = json.loads = None"),
    ("segfaults", "import ctypes; ctypes.string_at(0)"),
    ("closes all descriptors", "import os; os.closerange(0, 1000)"),
    ("takes 1 GiB", "x = bytearray(1 << 30)"),
    ("loops for ever", "while True: pass"),
];
const MODULES: &str = "collections,csv,json,statistics,sys,argparse,html.parser,xml.etree.ElementTree,datetime,decimal,email.utils";
const COLD: usize = 4;
const WARM: usize = 20;

pub(super) fn show(stage: &mut Stage) -> Result<()> {
    let directory = stage.directory().join("warm");
    fs::create_dir_all(&directory).context("cannot make a directory for scripts")?;
    let socket = directory.join("socket");
    let mut serve = stage.orrery(["warm", "serve", "--python=/usr/bin/python3", "--workers", "1"]);
    serve.args(["--timeout", "1s", "--memory", "256M", "--import", MODULES, "--socket"]).arg(&socket);
    let mut server = stage.start(&mut serve)?;
    while !socket.exists() {
        ensure!(server.complaint().is_empty(), "the server ended: {}", server.complaint());
        stage.pause(Duration::from_millis(20))?;
    }
    let mut rows = Vec::new();
    let (mut equal, mut compared) = (0, 0);
    let mut sums = [0.0, 0.0];
    for script in SCRIPTS {
        let path = write(&directory, script)?;
        let mut due = None;
        for (way, times) in [("python3", COLD), ("orrery warm", WARM)] {
            let mut took = Vec::new();
            for _ in 0..times {
                let mut command = if way == "python3" {
                    Command::new("/usr/bin/python3")
                } else {
                    let mut command = stage.orrery(["warm", "run", "--wait", "10s", "--socket"]);
                    command.arg(&socket);
                    command
                };
                command.arg(&path).args(script.arguments).current_dir(&directory);
                let begin = Instant::now();
                let output = stage.run(&mut command)?;
                took.push(begin.elapsed().as_secs_f64() * 1e3);
                ensure!(output.status.success(), "{} by {way}: {}", script.name, ending(&output));
                match &due {
                    None => due = Some(output.stdout),
                    Some(due) => {
                        compared += 1;
                        equal += usize::from(*due == output.stdout);
                    }
                }
            }
            let median = median(&mut took);
            sums[usize::from(way != "python3")] += median;
            rows.push(Bar::new(format!("{:15} {way}", script.name), median, format!("{median:.1} ms")));
        }
    }
    print!("{}", bars(&rows));
    println!("  {:.1} times as fast; {equal} of {compared} runs printed the same bytes\n", sums[0] / sums[1]);
    ensure!(equal == compared, "a script printed something else");
    hostile(stage, &socket)
}

/// Runs hostile scripts one after the other, and looks after each whether the next script notices.
fn hostile(stage: &mut Stage, socket: &Path) -> Result<()> {
    let run = |stage: &mut Stage, text: &str| {
        let mut command = stage.orrery(["warm", "run", "--wait", "10s", "--socket"]);
        command.arg(socket).args(["-c", text]);
        let begin = Instant::now();
        stage.run(&mut command).map(|output| (output, begin.elapsed().as_secs_f64() * 1e3))
    };
    for (what, text) in HOSTILE {
        let (output, _) = run(stage, text)?;
        let end = match (output.status.code(), std::os::unix::process::ExitStatusExt::signal(&output.status))
        {
            (Some(124), _) => "ended after 1 s".to_owned(),
            (Some(0), _) => "exits".to_owned(),
            (Some(_), _) => {
                String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or("fails").to_owned()
            }
            (None, signal) => format!("signal {}", signal.unwrap_or(0)),
        };
        let (next, took) = run(stage, "import json; print(json.dumps({'all': 'well'}))")?;
        let well = next.stdout == b"{\"all\": \"well\"}\n";
        let found = if well { format!("finds nothing of it, {took:.1} ms") } else { ending(&next) };
        println!("  {what:26} {end:17} the next script {found}");
        ensure!(well, "a script left something behind");
    }
    Ok(())
}

fn write(directory: &Path, script: &Script) -> Result<PathBuf> {
    let path = directory.join(format!("{}.py", script.name));
    let (name, text) = script.file;
    fs::write(&path, script.text).with_context(|| format!("cannot write {}", path.display()))?;
    fs::write(directory.join(name), text).with_context(|| format!("cannot write {name}"))?;
    Ok(path)
}
