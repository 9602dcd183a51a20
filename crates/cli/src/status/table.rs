//! The status for people: a line for each item, then what could not be asked.

use comfy_table::presets::NOTHING;
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};

use super::model::{Item, Kind, Status};
use super::text::{age, printable, summary};

/// The width of a table that goes to a file or a pipe, unless `COLUMNS` says another.
const WIDTH_OF_A_FILE: u16 = 160;

/// Returns the table. `kinds` are those that were asked for.
pub(crate) fn of(status: &Status, kinds: &[Kind]) -> String {
    let mut text = match (status.items.is_empty(), status.unreadable.is_empty()) {
        (false, true) => table(status).trim_fmt(),
        (false, false) => table(status).trim_fmt() + "\n\nCould not be asked:",
        (true, true) => nothing(kinds),
        (true, false) => "Could not be asked:".to_owned(),
    };
    for one in &status.unreadable {
        text.push_str(&format!("\n{} {}: {}", one.kind.word(), printable(&one.name), printable(&one.reason)));
    }
    text
}

fn nothing(kinds: &[Kind]) -> String {
    if kinds.len() == Kind::ALL.len() {
        return "Nothing of Orrery's runs.".to_owned();
    }
    let words: Vec<&str> = kinds.iter().map(|kind| kind.word()).collect();
    format!("Nothing runs of these kinds: {}.", words.join(", "))
}

fn table(status: &Status) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    if table.width().is_none() {
        let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        table.set_width(columns.unwrap_or(WIDTH_OF_A_FILE));
    }
    table.set_header(["KIND", "NAME", "PID", "USER", "STATE", "SINCE", "FIGURES"]);
    table.add_rows(status.items.iter().map(|item| row(item, status.taken_at_unix_seconds)));
    table
}

fn row(item: &Item, now: f64) -> Vec<Cell> {
    let absent = || "-".to_owned();
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let since = item.started_at_unix_seconds.map_or_else(absent, |started| age(now - started));
    vec![
        Cell::new(item.kind.word()),
        Cell::new(name(item)),
        right(item.pid.map_or_else(absent, |pid| pid.to_string())),
        Cell::new(item.user.as_deref().map_or_else(absent, printable)),
        Cell::new(item.state),
        right(since),
        Cell::new(summary(item)),
    ]
}

/// Returns the name of an item, with that of the program that has it.
pub(crate) fn name(item: &Item) -> String {
    match &item.main {
        Some(main) => format!("{} of {} {}", printable(&item.name), main.pid, printable(&main.name)),
        None => printable(&item.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::samples;

    #[test]
    fn each_item_has_a_line_and_what_is_silent_is_named() {
        let text = of(&samples::status(), &Kind::ALL);
        let line = |word: &str| text.lines().find(|line| line.trim_start().starts_with(word)).unwrap();
        assert!(line("KIND").contains("FIGURES"), "{text}");
        let warm = line("warm");
        assert!(
            warm.contains(r#"/run/a "b"\\nc"#) && warm.contains("71") && warm.contains("alice"),
            "{text}"
        );
        assert!(warm.contains("busy") && warm.contains("requests 17"), "{text}");
        assert!(line("orbit").contains("checker of 89 kv"), "{text}");
        assert!(
            text.ends_with("Could not be asked:\norc /run/orrery/orc/socket: no answer within 1 s"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }

    #[test]
    fn an_empty_status_says_so() {
        let none = Status::of(Vec::new(), Vec::new());
        assert_eq!(of(&none, &Kind::ALL), "Nothing of Orrery's runs.");
        assert_eq!(of(&none, &[Kind::Orc, Kind::Warm]), "Nothing runs of these kinds: orc, warm.");
        let silent = Status::of(Vec::new(), samples::status().unreadable);
        let text = of(&silent, &Kind::ALL);
        assert!(text.starts_with("Could not be asked:\norc "), "{text}");
    }
}
