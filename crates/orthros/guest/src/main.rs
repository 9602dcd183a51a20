//! What runs in the active and in the backup guest.
//!
//! As the guests' init (process 1) it mounts, loads modules, and then is what the kernel's command line says: the
//! *active*, which runs the service and sends heartbeats, or the *backup*, which watches the active's memory through a
//! PCI device and rebuilds the service from it when it is told that the active is dead. The host is spoken to in lines
//! of JSON over the second serial port.

mod active;
mod after;
mod backup;
mod beats;
mod borrowed;
mod burden;
mod control;
mod crash;
mod criu;
mod datagrams;
mod disk;
mod elsewhere;
mod forget;
mod ipc;
mod later;
mod loopback;
mod nest;
mod netlink;
mod network;
mod nudge;
mod objects;
mod online;
mod pump;
mod resets;
mod scribble;
mod service;
mod setup;
mod standby;
mod terminal;
mod writeback;

use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match online::stage() {
        Some(stage) => online::at(&stage),
        None if std::process::id() == 1 && words.first() != Some(&"nest") => init(),
        None => command(&words),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("orrery-guest: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn init() -> Result<()> {
    setup::prepare()?;
    let role = setup::parameter("orrery.role").unwrap_or_default();
    let result = match role.as_str() {
        "active" => active::run(),
        "backup" => backup::run(),
        other => Err(anyhow::anyhow!(
            "the kernel's command line has no orrery.role=active or backup, but {other:?}"
        )),
    };
    if let Err(error) = &result {
        control::Control::open()?.send_error(error)?;
    }
    // Process 1 must not end; the host sees to the rest.
    loop {
        std::thread::park();
    }
}

fn command(words: &[&str]) -> Result<()> {
    match words {
        ["burden", mib, files, threads] => burden::run(mib.parse()?, files.parse()?, threads.parse()?),
        ["count", path] => count(path),
        ["forget"] => forget::begin(),
        ["forget", "on"] => forget::go_on(),
        ["objects"] => objects::run(),
        ["pump"] => pump::run(),
        ["check"] => check(nest::any_service().context("no service runs here")?),
        ["check", pid] => check(pid.parse()?),
        ["verdict"] => verdict(),
        ["terminal", port, argv @ ..] => terminal::run(port.parse()?, argv),
        ["scribble", folder, seed] => scribble::run(folder.as_ref(), seed.parse()?),
        ["images", memory, pid, folder] => {
            let memory = orrery_kimage::open_memory(memory.as_ref(), orrery_kimage::Layout::Q35)?;
            let kernel = orrery_kimage::Kernel::open(Box::new(memory))?;
            let (summary, _) =
                criu::write(&kernel, &criu::Frozen::default(), pid.parse()?, folder.as_ref(), None)?;
            println!("{}", serde_json::to_string_pretty(&summary)?);
            Ok(())
        }
        _ => bail!(
            "usage: orrery-guest burden MIB FILES THREADS | count FILE | forget | objects | pump | check [PID] | terminal PORT PROGRAM ARGUMENTS | scribble FOLDER SEED | verdict | images MEMORY PID FOLDER"
        ),
    }
}

/// Where programs that look at what they hold leave what they found.
const VERDICT: &str = "/run/verdict";

/// Leaves it there, whole.
fn leave_verdict(verdict: &str) -> Result<()> {
    let aside = format!("{VERDICT}.new");
    std::fs::write(&aside, verdict)?;
    Ok(std::fs::rename(aside, VERDICT)?)
}

/// Shows what such a program found, once; nothing where it has not looked since.
fn verdict() -> Result<()> {
    match std::fs::read_to_string(VERDICT) {
        Ok(text) => print!("{text}"),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {VERDICT}")),
    }
    std::fs::remove_file(VERDICT).with_context(|| format!("cannot remove {VERDICT}"))
}

/// Tells, in JSON, what of a process and its descendants would not survive.
fn check(pid: i32) -> Result<()> {
    println!("{}", serde_json::to_string(&orrery_orthros_check::check(pid)?)?);
    Ok(())
}

/// Counts, a hundred times a second, and leaves the number in a file: the smallest service there is.
fn count(path: &str) -> Result<()> {
    let mut number = 0_u64;
    loop {
        number += 1;
        let aside = format!("{path}.new");
        std::fs::write(&aside, format!("{number}\n"))?;
        std::fs::rename(&aside, path)?;
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}
