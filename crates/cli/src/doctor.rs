//! `orrery doctor`: which kernel facilities work here, found by trying them, and what each system will use.

mod json;
mod plan;
mod table;

use std::io::{self, Write as _};

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use orrery_probe::{Facility, System};

use plan::{Plan, TRACKER_VARIABLE};

/// Show which kernel facilities work here, and which mechanism each system will use.
///
/// Every facility is tried, never guessed from a version, and in a child process, so that trying does no harm. The exit
/// status is 0 whatever was found.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print JSON, whose keys stay the same from release to release
    #[arg(long)]
    json: bool,
    /// Show only what this system uses
    #[arg(long, value_name = "NAME")]
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

/// Tries every facility and prints the report.
///
/// # Errors
/// Those of writing to standard output.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let systems = arguments.system.map_or(System::ALL, Chosen::systems);
    let tried = orrery_probe::all();
    let forced = std::env::var_os(TRACKER_VARIABLE).map(|name| name.to_string_lossy().into_owned());
    let plan = Plan::of(&tried, systems, forced);
    let shown: Vec<&Facility> =
        tried.iter().filter(|facility| facility.systems.iter().any(|user| systems.contains(user))).collect();
    let text = if arguments.json { json::of(&shown, &plan)? } else { table::of(&shown, &plan) };
    let mut output = io::stdout().lock();
    writeln!(output, "{text}").and_then(|()| output.flush()).context("cannot write to standard output")
}
