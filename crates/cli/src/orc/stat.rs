//! `orrery orc stat`: what the store has, who holds it, and what that saves.

mod stale;

use std::io::{self, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;
use comfy_table::presets::NOTHING;
use comfy_table::{Cell, CellAlignment, Table};
use orrery_orc_client::report::Report;
use orrery_orc_client::{Client, default_directory};
use orrery_orc_store::measure::{Measurement, measure};
use orrery_policy::values::shown_size;
use serde::Serialize;

use crate::repeat::Repeat;

/// Show the store's objects, their holders, and the bytes saved, as the kernel counts pages.
///
/// The superuser and the store's own user see all trust domains, others their own and what is public.
#[derive(Args)]
pub(super) struct Arguments {
    /// The store's directory or socket [default: ORRERY_ORC, /run/orrery/orc, or $XDG_RUNTIME_DIR/orrery/orc]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// List every object
    #[arg(long)]
    objects: bool,
    /// List programs that have an object of a file that was replaced since, as by an update: they have to be started again
    #[arg(long, conflicts_with_all = ["watch", "objects"])]
    stale: bool,
    #[command(flatten)]
    repeat: Repeat,
}

/// The version of the JSON; it grows when a key changes its meaning or goes.
const SCHEMA: u32 = 1;

#[derive(Serialize)]
struct Look {
    schema: u32,
    #[serde(flatten)]
    measured: Measurement,
    #[serde(flatten)]
    report: Report,
}

#[derive(Serialize)]
struct StaleLook<'a> {
    schema: u32,
    stale: &'a [stale::Stale],
}

/// Prints what there is.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let directory = arguments.directory.clone().unwrap_or_else(default_directory);
    let client = Client::connect_to(&directory)?;
    let json = arguments.repeat.json;
    if arguments.stale {
        return print_stale(&stale::find(&client.report()?)?, json);
    }
    arguments.repeat.print(|| {
        let report = client.report()?;
        let measured = measure(&report).context("cannot read /proc")?;
        let look = Look { schema: SCHEMA, measured, report };
        Ok(if json { serde_json::to_string(&look)? } else { tables(&look, arguments.objects) })
    })
}

fn print_stale(found: &[stale::Stale], json: bool) -> Result<()> {
    let text = if json {
        serde_json::to_string(&StaleLook { schema: SCHEMA, stale: found })?
    } else if found.is_empty() {
        "No program has an object of a file that was replaced.".to_owned()
    } else {
        let mut table = new_table(&["PID", "PROGRAM", "FILE", "NOW"]);
        for stale in found {
            let now = if stale.is_gone { "gone" } else { "replaced" };
            table.add_row([
                right(stale.pid.to_string()),
                Cell::new(&stale.program),
                Cell::new(&stale.file),
                Cell::new(now),
            ]);
        }
        table.trim_fmt()
    };
    writeln!(io::stdout().lock(), "{text}").context("cannot write to standard output")
}

fn new_table(heading: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(heading.iter().copied());
    table
}

fn right(text: impl Into<String>) -> Cell {
    Cell::new(text.into()).set_alignment(CellAlignment::Right)
}

fn tables(look: &Look, objects: bool) -> String {
    if look.report.objects.is_empty() {
        return format!("No objects, {} connections.{}", look.report.connections, stuck(&look.report));
    }
    let mut trust_domains = new_table(&["TRUST DOMAIN", "OBJECTS", "STORED", "MAPPED", "SAVED"]);
    for (name, saving) in &look.measured.trust_domains {
        let sign = if saving.saved < 0 { "-" } else { "" };
        trust_domains.add_row([
            Cell::new(name),
            right(saving.objects.to_string()),
            right(shown_size(saving.stored)),
            right(shown_size(saving.mapped)),
            right(format!("{sign}{}", shown_size(saving.saved.unsigned_abs()))),
        ]);
    }
    let mut programs = new_table(&["PROGRAM", "TRUST DOMAIN", "PROCESSES", "OBJECTS", "MAPPED", "SAVED"]);
    for (name, program) in &look.measured.programs {
        for (domain, used) in &program.trust_domains {
            programs.add_row([
                Cell::new(name),
                Cell::new(domain),
                right(used.processes.to_string()),
                right(used.objects.to_string()),
                right(shown_size(used.mapped)),
                right(shown_size(used.saved)),
            ]);
        }
    }
    let mut text = format!("{}\n\n{}", trust_domains.trim_fmt(), programs.trim_fmt());
    if objects {
        let mut list = new_table(&["OBJECT", "TRUST DOMAIN", "LENGTH", "CODE", "SERVED", "HOLDERS"]);
        for object in &look.report.objects {
            let holders: Vec<String> = object.holders.keys().map(ToString::to_string).collect();
            list.add_row([
                Cell::new(&object.id),
                Cell::new(&object.trust_domain),
                right(shown_size(object.length)),
                Cell::new(if object.executable { "yes" } else { "" }),
                right(object.served.to_string()),
                Cell::new(holders.join(" ")),
            ]);
        }
        text = format!("{text}\n\n{}", list.trim_fmt());
    }
    if look.measured.unreadable > 0 {
        text = format!("{text}\n\n{} processes may not be looked into.", look.measured.unreadable);
    }
    text + &stuck(&look.report)
}

/// Returns what is said of threads of the store that hang; nothing where none does.
fn stuck(report: &Report) -> String {
    match report.stuck_threads {
        0 => String::new(),
        1 => "\n\n1 thread of the store waits for a file that does not answer.".to_owned(),
        count => format!("\n\n{count} threads of the store wait for files that do not answer."),
    }
}
