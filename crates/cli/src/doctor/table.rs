//! The report for people: a table for each group, then what follows for each system.

use std::fmt::Write as _;

use comfy_table::presets::NOTHING;
use comfy_table::{
    Attribute, Cell, Color, ColumnConstraint, ContentArrangement, LineStyle, Table, TableStyle, Width,
};
use orrery_probe::{Facility, Group, State, System};

use super::plan::{Plan, TRACKER_VARIABLE};

/// The width of a report that goes to a file or a pipe, unless `COLUMNS` says another.
const WIDTH_OF_A_FILE: u16 = 140;
/// From this width on each fact has a column of its own.
const WIDE: u16 = 120;
/// Narrower than this the columns would hold a word or two each.
const NARROWEST: u16 = 70;
/// The longest name of a facility, and the space around it.
const NAME_WIDTH: u16 = 33;
const STATE_WIDTH: u16 = 27;

/// A line under the heading, nothing else: rows are told apart by the names in the first column.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

pub(super) fn of(facilities: &[&Facility], plan: &Plan) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    for &group in Group::ALL {
        let members: Vec<_> = facilities.iter().filter(|facility| facility.group == group).collect();
        if !members.is_empty() {
            let _ = writeln!(text, "{}\n", table_of(group, &members).trim_fmt());
        }
    }
    let count = |wanted: &str| facilities.iter().filter(|facility| facility.state.word() == wanted).count();
    let _ = writeln!(
        text,
        "{} of {} facilities available, {} missing, {} denied to this process.",
        count("available"),
        facilities.len(),
        count("missing"),
        count("denied")
    );
    if let Some(forced) = &plan.forced_tracker {
        let _ = writeln!(text, "{TRACKER_VARIABLE}={forced} is set.");
    }
    let _ = write!(text, "\nWhat each system will use here:\n{}", mechanisms(plan).trim_fmt());
    text
}

fn table_of(group: Group, members: &[&&Facility]) -> Table {
    let mut table = empty_table(STYLE);
    let width = table.width().unwrap_or(WIDTH_OF_A_FILE);
    let wide = width >= WIDE;
    // A space stands between two columns.
    let width = width.saturating_sub(if wide { 3 } else { 1 });
    let title = group.word().to_uppercase();
    let headings: &[&str] = if wide {
        &[&title, "state", "what for", "without it"]
    } else {
        &[&title, "what for, and without it"]
    };
    table.set_header(headings.iter().map(|text| Cell::new(text).add_attribute(Attribute::Bold)));
    table.add_rows(members.iter().map(
        |facility| {
            if wide { wide_row(facility) } else { narrow_row(facility) }
        },
    ));
    let rest = |taken: u16| width.saturating_sub(taken);
    let widths = if wide {
        let what_for = rest(NAME_WIDTH + STATE_WIDTH) / 2;
        vec![NAME_WIDTH, STATE_WIDTH, what_for, rest(NAME_WIDTH + STATE_WIDTH) - what_for]
    } else {
        vec![NAME_WIDTH, rest(NAME_WIDTH)]
    };
    table.set_constraints(widths.into_iter().map(|width| ColumnConstraint::Absolute(Width::Fixed(width))));
    table
}

fn empty_table(style: TableStyle) -> Table {
    let mut table = Table::new();
    table.load_style(style).set_content_arrangement(ContentArrangement::Dynamic);
    let width = table.width().unwrap_or_else(|| {
        std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).unwrap_or(WIDTH_OF_A_FILE)
    });
    table.set_width(width.max(NARROWEST));
    table
}

fn wide_row(facility: &Facility) -> Vec<Cell> {
    let fallback = Cell::new(facility.fallback);
    vec![
        Cell::new(facility.name),
        Cell::new(state(&facility.state)).fg(color(&facility.state)),
        Cell::new(purpose(facility)),
        // What is in force stands out.
        if facility.state.is_available() { fallback } else { fallback.add_attribute(Attribute::Bold) },
    ]
}

fn narrow_row(facility: &Facility) -> Vec<Cell> {
    vec![
        Cell::new(format!("{}\n{}", facility.name, state(&facility.state))).fg(color(&facility.state)),
        Cell::new(format!("{}\nwithout it: {}", purpose(facility), facility.fallback)),
    ]
}

fn purpose(facility: &Facility) -> String {
    let systems: Vec<_> = facility.systems.iter().copied().map(System::word).collect();
    format!("{}: {}", systems.join(", "), facility.purpose)
}

fn state(state: &State) -> String {
    match (state.word(), state.detail(), state.errno()) {
        (word, "", _) => word.to_owned(),
        (word, detail, None) => format!("{word}\n{detail}"),
        (word, detail, Some(errno)) => format!("{word}\n{detail}: {errno}"),
    }
}

fn color(state: &State) -> Color {
    match state {
        State::Available { .. } => Color::Green,
        State::Missing { .. } => Color::Yellow,
        State::Denied { .. } => Color::Red,
    }
}

fn mechanisms(plan: &Plan) -> Table {
    let mut table = empty_table(NOTHING);
    for &system in System::ALL {
        let roles: Vec<_> =
            plan.roles_of(system).map(|role| format!("{}: {}", role.name, role.mechanism)).collect();
        if !roles.is_empty() {
            table.add_row([system.word().to_owned(), roles.join("; ")]);
        }
    }
    table
}
