//! `orrery orc explain`: which pages of a process are its own, and why.

use std::collections::BTreeMap;
use std::io::{self, Write as _};

use anyhow::{Context as _, Result};
use clap::Args;
use comfy_table::presets::NOTHING;
use comfy_table::{Cell, CellAlignment, Table};
use orrery_orc_store::explain::Process;
use orrery_orc_store::measure::{MappingUsage, mappings};
use orrery_policy::values::shown_size;
use serde::Serialize;

/// Show which pages of a process are private, and why.
#[derive(Args)]
pub(super) struct Arguments {
    /// The process
    pid: i32,
    /// Show each mapping, not only the sums of those that have the same reason
    #[arg(long)]
    all: bool,
    /// Print JSON, whose keys stay the same from release to release
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    area: MappingUsage,
    reason: &'static str,
}

#[derive(Default)]
struct Sum {
    mappings: usize,
    resident: u64,
    proportional: u64,
    private: u64,
}

impl Sum {
    fn add(&mut self, area: &MappingUsage) {
        self.mappings += 1;
        self.resident += area.resident;
        self.proportional += area.proportional;
        self.private += area.private;
    }
}

/// Prints it.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let look = || Ok::<_, io::Error>((mappings(arguments.pid)?, Process::inspect(arguments.pid)?));
    let (found, process) = look().with_context(|| format!("cannot look into process {}", arguments.pid))?;
    let rows: Vec<Row> = found.into_iter().map(|area| Row { reason: process.reason(&area), area }).collect();
    let text = if arguments.json {
        serde_json::to_string(&rows)?
    } else {
        let table = if arguments.all { all(&rows) } else { sums(&rows) };
        match process.obstacle() {
            Some(obstacle) => format!("What is not shared yet stays so: {obstacle}.\n\n{table}"),
            None => table,
        }
    };
    let mut output = io::stdout().lock();
    writeln!(output, "{text}").and_then(|()| output.flush()).context("cannot write to standard output")
}

fn right(bytes: u64) -> Cell {
    Cell::new(shown_size(bytes)).set_alignment(CellAlignment::Right)
}

fn all(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(["ADDRESSES", "ACCESS", "RESIDENT", "SHARE", "PRIVATE", "NAME", "WHY"]);
    for Row { area, reason } in rows {
        table.add_row([
            Cell::new(&area.range),
            Cell::new(&area.access),
            right(area.resident),
            right(area.proportional),
            right(area.private),
            Cell::new(&area.name),
            Cell::new(reason),
        ]);
    }
    table.trim_fmt()
}

fn sums(rows: &[Row]) -> String {
    let mut sums: BTreeMap<&str, Sum> = BTreeMap::new();
    let mut total = Sum::default();
    for row in rows {
        sums.entry(row.reason).or_default().add(&row.area);
        total.add(&row.area);
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by_key(|(_, sum)| std::cmp::Reverse((sum.private, sum.resident)));
    sums.push(("all together", total));
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(["PRIVATE", "SHARE", "RESIDENT", "MAPPINGS", "WHY"]);
    for (reason, sum) in sums {
        let mappings = Cell::new(sum.mappings).set_alignment(CellAlignment::Right);
        table.add_row([
            right(sum.private),
            right(sum.proportional),
            right(sum.resident),
            mappings,
            Cell::new(reason),
        ]);
    }
    table.trim_fmt()
}
