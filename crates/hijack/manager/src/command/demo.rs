//! `orrery manager demo`: the slides' experiment in 16 seconds.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use orrery_sys::scheduling::{self, Policy, Scheduling};

use crate::PrivateManager;
use crate::bars::{Series, bars, svg};
use crate::experiment::{Bursts, HOG_PRIORITY, Measured, PROGRAMS, Spinner, Watched, observe};
use crate::join::{Joining, join};

/// Options of `demo`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// How long each half takes
    #[arg(long, value_name = "TIME", value_parser = orrery_policy::values::duration, default_value = "8s")]
    seconds: Duration,
    /// Run the disturbance at real-time priority 96
    #[arg(long)]
    realtime: bool,
    /// Write the figure of the half with a manager to this file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// Runs the experiment without a manager, then with one.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let mut out = io::stdout().lock();
    let kind = if arguments.realtime { "at real-time priority 96" } else { "at normal priority" };
    writeln!(
        out,
        "Three programs that compute, with targets, and a disturbance {kind}, on one CPU; a bar is 250 ms."
    )?;
    half(arguments, None, &mut out)?;
    let manager = PrivateManager::start(&[])?;
    half(arguments, Some(&manager.socket()), &mut out)
}

fn half(arguments: &Arguments, socket: Option<&Path>, out: &mut impl io::Write) -> Result<()> {
    let own = rustix::thread::sched_getaffinity(None)?;
    let cpu = (0..1024).rev().find(|cpu| own.is_set(*cpu));
    let spinners = [(); 3].map(|()| Spinner::start(cpu));
    let spinners: Vec<Spinner> =
        spinners.into_iter().collect::<io::Result<_>>().context("cannot start a program")?;
    let (mut joined, mut watched) = (Vec::new(), Vec::new());
    let mut mechanism = "no manager";
    for (spinner, (name, reservation)) in spinners.iter().zip(PROGRAMS) {
        if let Some(socket) = socket {
            let value = |class: &str, value: u64| (class.to_owned(), format!("{value}ns"));
            let values =
                vec![value("cpu.target", reservation.target), value("cpu.period", reservation.period)];
            let socket = Some(socket.to_owned());
            let one = join(&Joining { socket, name: name.to_owned(), values, journal: None }, spinner.pid())?;
            mechanism = one.mechanism.name();
            joined.push(one);
        }
        watched.push(Watched::new(spinner.pid(), Some(reservation)).context("cannot observe a program")?);
    }
    let bursts = Bursts {
        gap: Duration::from_secs(2),
        length: Duration::from_secs(2),
        seed: 3,
        priority: arguments.realtime.then_some(HOG_PRIORITY),
    };
    let hog = Spinner::disturb(cpu, bursts).context("cannot start the disturbance")?;
    // Who looks on is to see in time; without privilege it sees later, and as much.
    let before = scheduling::get(0);
    let _ = scheduling::set(0, Scheduling { policy: Policy::Fifo { priority: 99 }, reset_on_fork: true });
    watched.push(Watched::new(hog.pid(), None).context("cannot observe the disturbance")?);
    let measured = observe(&mut watched, arguments.seconds, Duration::from_millis(250), || {});
    if let Ok(before) = before {
        let _ = scheduling::set(0, before);
    }
    let measured = measured.context("cannot observe the programs")?;
    match socket {
        None => writeln!(out, "\nwithout a manager:")?,
        Some(_) => writeln!(out, "\nwith a manager (by {mechanism}):")?,
    }
    print(out, &measured)?;
    if let (Some(path), Some(_)) = (&arguments.plot, socket) {
        let title = "CPU time with a CPU service manager";
        let text = svg(title, &series(&measured));
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    // The connections end after the programs.
    drop((hog, spinners, joined));
    Ok(())
}

/// Returns the lines of the picture: programs, then the disturbance.
fn series(measured: &[Measured]) -> Vec<Series> {
    #[expect(clippy::cast_precision_loss, reason = "milliseconds")]
    let targets = PROGRAMS.map(|(name, own)| (name, Some(own.target as f64 / own.period as f64 * 100.0)));
    let lines = targets.into_iter().chain([("disturbance", None)]);
    let line = |((name, target), measured): ((&str, Option<f64>), &Measured)| Series {
        name: name.to_owned(),
        target,
        points: measured.points.clone(),
    };
    lines.zip(measured).map(line).collect()
}

fn print(out: &mut impl io::Write, measured: &[Measured]) -> io::Result<()> {
    for (line, measured) in series(measured).iter().zip(measured) {
        let mean =
            line.points.iter().sum::<f64>() / f64::from(u32::try_from(line.points.len()).unwrap_or(1).max(1));
        let bars = bars(&line.points, 48, 100.0);
        let target = line.target.map_or_else(|| "       ".to_owned(), |target| format!("of {target:>2.0}% "));
        write!(out, "  {:<12} {mean:>4.0}% {target} {bars:<34}", line.name)?;
        match line.target {
            Some(_) => writeln!(out, " missed {} of {} periods", measured.missed, measured.periods)?,
            None => writeln!(out)?,
        }
    }
    Ok(())
}
