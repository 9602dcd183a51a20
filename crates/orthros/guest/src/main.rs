//! What runs in the active and in the backup guest.
//!
//! As the guests' init (process 1) it mounts file systems, loads modules, and then takes the role that the kernel's command line
//! has: the *active*, which runs the service and counts heartbeats, or the *backup*, which sees the active's memory through a PCI
//! device and restores the service from it when the host reports that the active is dead. Host and guest exchange the messages of
//! `orrery-orthros-wire` over the second serial port.

mod active;
mod backup;
mod boot;
mod command;
mod control;
mod crash;
mod daemon;
mod disk;
mod heartbeat;
mod kernel_parameters;
mod lazy_pages;
mod network;
mod output;
mod pidns;
mod restore;
mod service;
mod terminal;
mod writeback;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow, bail};
use orrery_orthros_images as images;

use restore::pre_resume;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match pre_resume::stage() {
        Some(stage) => pre_resume::run(&stage),
        None if std::process::id() == 1 => init(),
        None => run_command(&words),
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
    boot::prepare()?;
    let role = kernel_parameters::parameter("orrery.role").unwrap_or_default();
    let result = match role.as_str() {
        "active" => active::run(),
        "backup" => backup::run(),
        other => {
            Err(anyhow!("the kernel's command line has orrery.role={other} instead of active or backup"))
        }
    };
    if let Err(error) = &result {
        control::Control::open()?.send_error(error)?;
    }
    // Process 1 must not exit; the host ends the machine.
    loop {
        std::thread::park();
    }
}

fn run_command(words: &[&str]) -> Result<()> {
    match words {
        ["check"] => check(pidns::any_service().context("no service runs here")?),
        ["check", pid] => check(pid.parse()?),
        ["terminal", port, argv @ ..] => terminal::run(port.parse()?, argv),
        ["images", memory, pid, directory] => write_images(memory.as_ref(), pid.parse()?, directory.as_ref()),
        _ => bail!(
            "usage: orrery-guest check [PID] | terminal PORT PROGRAM [ARGUMENT]... | images MEMORY PID DIRECTORY"
        ),
    }
}

/// Writes images of a process from a file with the memory of its kernel, and prints a summary.
fn write_images(memory: &Path, pid: i32, directory: &Path) -> Result<()> {
    let memory = orrery_kimage::open_memory(memory, orrery_kimage::Layout::Q35)?;
    let kernel = orrery_kimage::Kernel::open(Box::new(memory))?;
    let service = images::read_service(
        &kernel,
        &images::CpuRegisters::default(),
        pid,
        false,
        &images::Exclusions::default(),
    )?;
    images::write(&images::encode(&service)?, &kernel, directory)?;
    println!("{}", serde_json::to_string_pretty(&service.summary())?);
    Ok(())
}

/// Prints, as JSON, what of a process and its descendants would not survive.
fn check(pid: i32) -> Result<()> {
    println!("{}", serde_json::to_string(&orrery_orthros_check::check(pid)?)?);
    Ok(())
}
