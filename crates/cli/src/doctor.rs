//! `orrery doctor`: which tasks work here, by the kernel facilities that work when they are tried.

mod json;
mod plan;
mod table;
mod tasks;
mod verdict;

use std::io::{self, Write as _};

use anyhow::Context as _;
use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use orrery_probe::{Facility, System};

use plan::{Plan, TRACKER_VARIABLE};

/// Show which tasks work here, and what is missing for the others.
///
/// Every facility is tried, never guessed from a version, and in a child process, so that trying does no harm. The exit
/// status is 0 whatever was found, except with --check.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Show every facility that was tried, and the mechanism that each system will use
    #[arg(long)]
    facts: bool,
    /// Show the verdict on this task alone, and exit with 1 if it does not work here
    #[arg(long, value_name = "TASK", value_parser = PossibleValuesParser::new(tasks::names()))]
    check: Option<String>,
    /// Print JSON, whose keys stay the same from release to release
    #[arg(long)]
    json: bool,
    /// Show the facts about this system alone
    #[arg(long, value_name = "NAME", conflicts_with = "check")]
    system: Option<Chosen>,
}

/// A system, by the name that a user would type.
#[derive(Clone, Copy, ValueEnum)]
enum Chosen {
    /// lwc-rollback and lwc-contexts
    Lwc,
    LwcRollback,
    LwcContexts,
    Orbit,
    Hijack,
    Orc,
    Orthros,
}

impl Chosen {
    fn systems(self) -> &'static [System] {
        match self {
            Self::Lwc => &[System::LwcRollback, System::LwcContexts],
            Self::LwcRollback => &[System::LwcRollback],
            Self::LwcContexts => &[System::LwcContexts],
            Self::Orbit => &[System::Orbit],
            Self::Hijack => &[System::Hijack],
            Self::Orc => &[System::Orc],
            Self::Orthros => &[System::Orthros],
        }
    }
}

pub(crate) use self::tasks::is_installed;

/// Returns what a task needs and does not have here; nothing if it works.
pub(crate) fn obstacles(task: &str) -> Vec<String> {
    let verdicts = tasks::judge(&orrery_probe::all(), None);
    let verdict = verdicts.into_iter().find(|verdict| verdict.task.name == task);
    verdict
        .filter(|verdict| verdict.state == tasks::State::No)
        .map(|verdict| verdict.reasons)
        .unwrap_or_default()
}

/// Tries every facility and prints the report.
///
/// # Errors
/// Those of writing to standard output; with `--check`, a task that does not work here.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let systems = arguments.system.map_or(System::ALL, Chosen::systems);
    let tried = orrery_probe::all();
    let forced = std::env::var_os(TRACKER_VARIABLE).map(|name| name.to_string_lossy().into_owned());
    let mut verdicts = tasks::judge(&tried, forced.as_deref());
    if let Some(task) = &arguments.check {
        verdicts.retain(|verdict| verdict.task.name == task);
    }
    let plan = Plan::of(&tried, systems, forced);
    let shown: Vec<&Facility> =
        tried.iter().filter(|facility| facility.systems.iter().any(|user| systems.contains(user))).collect();
    let text = if arguments.json {
        json::of(&verdicts, &shown, &plan)?
    } else if arguments.facts || arguments.system.is_some() {
        table::of(&shown, &plan)
    } else {
        verdict::of(&verdicts, arguments.check.is_none())
    };
    let mut output = io::stdout().lock();
    writeln!(output, "{text}").and_then(|()| output.flush()).context("cannot write to standard output")?;
    let works = verdicts.iter().all(|verdict| verdict.state != tasks::State::No);
    if arguments.check.is_some() && !works {
        std::process::exit(1);
    }
    Ok(())
}
