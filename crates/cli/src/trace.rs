//! `orrery trace`: what system calls a program makes, how often and for how long.

mod forward;
mod report;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, exit};
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use orrery_hijack::{Hijack, Options};

/// Run a program, then tell which system calls it and its children made
///
/// Counts calls, their errors and how long they took. The report goes to standard error when the program has ended;
/// status and signal are the program's.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Count only, which is cheaper: no errors, no durations
    #[arg(short, long)]
    count: bool,

    /// Write the report to a file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Report as JSON
    #[arg(long)]
    json: bool,

    /// Leave the program's code as it is: every call is dispatched by the kernel
    #[arg(long)]
    no_patch: bool,

    /// The program, and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Runs the program, reports, and ends as the program ended.
///
/// # Errors
/// Where the program could not be started, or the report not be written.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Some((program, rest)) = arguments.command.split_first() else {
        anyhow::bail!("no program given");
    };
    // Before the program runs: it is not to work for nothing.
    let mut output: Box<dyn Write> = match &arguments.output {
        Some(path) => {
            let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
            Box::new(file)
        }
        None => Box::new(io::stderr()),
    };
    let options = Options::default().timed(!arguments.count).patch(!arguments.no_patch);
    let hijack = Hijack::start(options)?;
    crate::pipes::restore();
    let clock = Clock::start();
    let guest = hijack.spawn(program, rest)?;
    forward::to(guest.pid());
    let status = guest.wait()?;
    let counts = hijack.counts();
    let nanoseconds = clock.nanoseconds_per_tick();
    let text = if arguments.json {
        report::json(&counts, nanoseconds)?
    } else {
        report::table(&counts, nanoseconds, !arguments.count)
    };
    output.write_all(text.as_bytes()).and_then(|()| output.flush()).context("write the report")?;
    end_as(status)
}

/// Ends this process as the program ended.
fn end_as(status: ExitStatus) -> ! {
    if let Some(signal) = status.signal() {
        forward::die_of(signal);
    }
    exit(status.code().unwrap_or(1))
}

/// The time stamp counter beside the clock.
struct Clock {
    instant: Instant,
    ticks: u64,
}

impl Clock {
    fn start() -> Self {
        Self { instant: Instant::now(), ticks: ticks() }
    }

    #[expect(clippy::cast_precision_loss, reason = "more digits than the clock has")]
    fn nanoseconds_per_tick(&self) -> f64 {
        let elapsed = ticks().wrapping_sub(self.ticks).max(1);
        self.instant.elapsed().as_nanos() as f64 / elapsed as f64
    }
}

fn ticks() -> u64 {
    // SAFETY: reads a counter.
    unsafe { core::arch::x86_64::_rdtsc() }
}
