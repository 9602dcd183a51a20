//! The table that a benchmark prints.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};

use crate::record::Record;

/// Renders `records`, one row each, in their order.
pub(crate) fn table(records: &[Record]) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic).set_header([
        "case",
        "unit",
        "ours",
        "rival",
        "its value",
        "ratio",
        "spread",
        "runs",
    ]);
    let mut previous = None;
    for record in records {
        let case = if previous == Some(&record.case) { "" } else { &record.case };
        previous = Some(&record.case);
        table.add_row([
            Cell::new(case),
            Cell::new(&record.unit),
            number(significant(record.ours)),
            Cell::new(&record.rival_name),
            number(significant(record.rival)),
            number(format!("{}x", significant(record.ratio))),
            number(significant(record.spread)),
            number(record.runs.to_string()),
        ]);
    }
    table.to_string()
}

fn number(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

/// Writes `value` with three significant digits, never in exponential form.
pub fn significant(value: f64) -> String {
    let magnitude = value.abs();
    let decimals = match magnitude {
        _ if magnitude >= 100.0 => 0,
        _ if magnitude >= 10.0 => 1,
        _ if magnitude >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits() {
        let written: Vec<_> = [1234.6, 99.94, 1.234, 0.0567, 0.0].into_iter().map(significant).collect();
        assert_eq!(written, ["1235", "99.9", "1.23", "0.057", "0.000"]);
    }

    #[test]
    fn a_case_is_named_once_and_each_rival_has_its_row() {
        let record = |rival: &str| Record {
            bench: "b".into(),
            case: "64MiB/4k/1 page".into(),
            unit: "us".into(),
            ours: 20.0,
            rival_name: rival.into(),
            rival: 1000.0,
            ratio: 50.0,
            spread: 1.5,
            runs: 9,
        };
        let text = table(&[record("fork"), record("fork server")]);
        assert_eq!(text.matches("64MiB/4k/1 page").count(), 1, "{text}");
        assert_eq!(text.matches("50.0x").count(), 2, "{text}");
        assert!(text.contains("fork server"), "{text}");
    }
}
