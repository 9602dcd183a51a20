//! `orrery orthros`: a service that outlives its kernel.

mod check;
mod config;
mod counter;
mod demo;
mod remote;
mod soak;
mod up;
mod workspace;

pub(crate) use self::remote::{SOCKET, status_at};

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use clap::{Args, Subcommand};
use orrery_orthros_host::{Failover, Status};
use serde::Serialize;

/// Run a service in a pair of virtual machines, so that it survives its kernel's panic: processes, memory, files it has
/// open and TCP connections go on in the second machine, rebuilt from the first one's memory.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Let redis survive two kernel panics while a client counts over one TCP connection
    Demo(demo::Arguments),
    /// Let redis and a writer of files survive many crashes of all kinds, and tell what became of each
    Soak(soak::Arguments),
    /// Run a service in a pair, in the foreground; commands are read from standard input, and from those below
    #[command(visible_alias = "run")]
    Up(Box<up::Arguments>),
    /// Tell which machine has the service of a pair that runs, and which stands by
    Status(remote::Target),
    /// Let the active's kernel die, and wait until the service lives again and a new backup stands by
    Crash(remote::Crash),
    /// Move the service to the backup, for maintenance; where that cannot be, it stays where it is
    Failover(remote::Target),
    /// Tell which parts of a process and its descendants would not survive their kernel, and why
    Check(check::Arguments),
    /// End the service and both machines
    Down(remote::Target),
}

/// What both subcommands need to make a pair.
#[derive(Args)]
struct Common {
    /// Memory of each machine in MiB, a power of two
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = power_of_two)]
    memory: u64,
    /// Processors of each machine
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,
    /// How long a processor may be silent before its machine is given up
    #[arg(long, value_name = "SECONDS", default_value_t = SILENCE, value_parser = silence)]
    silence: f64,
    /// Where consoles and sockets lie; without it, in a temporary directory that is removed afterwards
    #[arg(long)]
    directory: Option<PathBuf>,
    /// Print one JSON object for each event
    #[arg(long)]
    json: bool,
}

fn power_of_two(text: &str) -> Result<u64, String> {
    match text.parse() {
        // Below that the guests' image does not fit beside the service.
        Ok(mib) if (256..=2048).contains(&mib) && u64::is_power_of_two(mib) => Ok(mib),
        _ => Err("a machine has 256, 512, 1024 or 2048 MiB".to_owned()),
    }
}

/// In seconds: ten heartbeats.
const SILENCE: f64 = 1.0;

fn silence(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        // A machine of several processors hears each of them less often than ten times a second.
        Ok(seconds) if (0.5..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("a processor may be silent for 0.5 to 3600 seconds".to_owned()),
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.command {
        Command::Demo(arguments) => demo::run(arguments),
        Command::Soak(arguments) => soak::run(arguments),
        Command::Up(arguments) => up::run(arguments),
        Command::Status(target) => remote::say(target, "status"),
        Command::Crash(arguments) => remote::crash(arguments),
        Command::Failover(target) => remote::say(target, "failover"),
        Command::Check(arguments) => check::run(arguments),
        Command::Down(target) => remote::say(target, "quit"),
    }
}

/// Something that happened, with the seconds since the start.
#[derive(Serialize)]
struct Event<'e> {
    at: f64,
    event: &'e str,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failover: Option<&'e Failover>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'e Status>,
    text: String,
}

/// Tells what happens, to people or to programs.
struct Story {
    start: Instant,
    json: bool,
    /// Who has asked for what is happening, and is told as well.
    listener: Option<UnixStream>,
}

impl Story {
    fn new(json: bool) -> Self {
        Self { start: Instant::now(), json, listener: None }
    }

    /// Tells someone else, too, until [`hang_up`](Self::hang_up).
    fn listen(&mut self, listener: Option<UnixStream>) {
        if listener.is_some() {
            self.listener = listener;
        }
    }

    fn hang_up(&mut self) {
        self.listener = None;
    }

    fn tell(&self, event: &str, seconds: Option<f64>, text: impl Into<String>) -> Result<()> {
        self.print(&Event {
            at: self.start.elapsed().as_secs_f64(),
            event,
            seconds,
            failover: None,
            status: None,
            text: text.into(),
        })
    }

    fn tell_status(&self, status: &Status) -> Result<()> {
        let at = self.start.elapsed().as_secs_f64();
        let (event, text) = ("status", status.to_string());
        self.print(&Event { at, event, seconds: None, failover: None, status: Some(status), text })
    }

    fn tell_failover(&self, failover: &Failover) -> Result<()> {
        let steps: Vec<String> =
            failover.steps.iter().map(|step| format!("{} {:.0} ms", step.name, step.seconds * 1e3)).collect();
        let mut text =
            format!("the service lives again after {:.0} ms: {}", failover.seconds * 1e3, steps.join(", "));
        for remark in &failover.summary.remarks {
            text.push_str(&format!("\n          {remark}"));
        }
        let at = self.start.elapsed().as_secs_f64();
        let seconds = Some(failover.seconds);
        self.print(&Event { at, event: "survived", seconds, failover: Some(failover), status: None, text })
    }

    fn print(&self, event: &Event<'_>) -> Result<()> {
        use std::io::Write as _;
        if let Some(mut listener) = self.listener.as_ref() {
            // Whoever went away in between is not waited for.
            let _ = writeln!(listener, "{}", serde_json::to_string(event)?);
            // `orrery top` asks each second: that is no news for the log of the pair.
            if event.status.is_some() {
                return Ok(());
            }
        }
        let line = if self.json {
            serde_json::to_string(event)?
        } else {
            format!("{:7.2} s  {}", event.at, event.text)
        };
        // A full disk, or a reader that is gone, is no reason to end a service.
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
        Ok(())
    }
}
