//! Pictures made of characters: bars, lines of bars over time, and timelines.

use std::io::IsTerminal as _;

/// The widest bar, in columns.
const WIDEST: usize = 40;
/// A bar's ends, by eighths of a column.
const EIGHTHS: [char; 8] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉', '█'];
const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// One row of a chart.
pub(super) struct Bar {
    pub(super) label: String,
    pub(super) value: f64,
    /// What stands behind the bar.
    pub(super) text: String,
}

impl Bar {
    pub(super) fn new(label: impl Into<String>, value: f64, text: impl Into<String>) -> Self {
        Self { label: label.into(), value, text: text.into() }
    }
}

/// Returns a chart of horizontal bars from zero, the longest as wide as there is room for.
pub(super) fn bars(rows: &[Bar]) -> String {
    let labels = rows.iter().map(|row| row.label.chars().count()).max().unwrap_or(0);
    let most = rows.iter().map(|row| row.value).fold(0.0, f64::max);
    let mut text = String::new();
    for row in rows {
        let bar = bar(row.value, most);
        text.push_str(&format!("  {:labels$}  {bar} {}\n", row.label, row.text));
    }
    text
}

fn bar(value: f64, most: f64) -> String {
    let eighths = if most > 0.0 { scaled(value / most, WIDEST * 8) } else { 0 };
    let mut bar = "█".repeat(eighths / 8);
    if let Some(rest) = (eighths % 8).checked_sub(1) {
        bar.push(EIGHTHS[rest]);
    }
    if bar.is_empty() && value > 0.0 {
        bar.push(EIGHTHS[0]);
    }
    bar
}

/// Returns a line of vertical bars, one for each value, the tallest for the greatest.
pub(super) fn heights(values: &[f64]) -> String {
    let most = values.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    values
        .iter()
        .map(|value| HEIGHTS[scaled(value / most, HEIGHTS.len()).clamp(1, HEIGHTS.len()) - 1])
        .collect()
}

/// A span of a timeline, in seconds.
pub(super) struct Span {
    pub(super) label: String,
    pub(super) from: f64,
    pub(super) to: f64,
}

/// Returns spans one below the other, each where it is in time.
pub(super) fn timeline(spans: &[Span]) -> String {
    let begin = spans.iter().map(|span| span.from).fold(f64::MAX, f64::min);
    let whole = (spans.iter().map(|span| span.to).fold(begin, f64::max) - begin).max(f64::MIN_POSITIVE);
    let labels = spans.iter().map(|span| span.label.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for span in spans {
        let at = scaled((span.from - begin) / whole, WIDEST);
        let long = scaled((span.to - span.from) / whole, WIDEST).clamp(1, WIDEST);
        text.push_str(&format!(
            "  {:labels$}  {:at$}{:rest$} {:.0} ms\n",
            span.label,
            "",
            "█".repeat(long),
            (span.to - span.from) * 1e3,
            rest = WIDEST + 1 - at,
        ));
    }
    text
}

/// Returns a share of a whole number of columns.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped, and small")]
fn scaled(share: f64, whole: usize) -> usize {
    (share.clamp(0.0, 1.0) * whole as f64).round() as usize
}

/// Returns the text in bold where standard output is a terminal that shows it.
pub(super) fn bold(text: &str) -> String {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if plain || !std::io::stdout().is_terminal() { text.to_owned() } else { format!("\x1b[1m{text}\x1b[0m") }
}

/// Returns the middle value.
pub(super) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_values() {
        let text =
            bars(&[Bar::new("whole", 80.0, "80"), Bar::new("half", 40.0, "40"), Bar::new("none", 0.0, "0")]);
        let blocks: Vec<usize> = text.lines().map(|line| line.matches('█').count()).collect();
        assert_eq!(blocks, [40, 20, 0]);
        assert!(text.starts_with("  whole  █"), "{text}");
        assert_eq!(bar(1e-9, 1.0), "▏", "a little is seen");
    }

    #[test]
    fn heights_follow_the_values() {
        assert_eq!(heights(&[0.0, 1.0, 8.0]), "▁▁█");
        assert_eq!(heights(&[0.0, 0.0]), "▁▁");
    }

    #[test]
    fn a_timeline_has_spans_where_they_lie() {
        let span = |label: &str, from, to| Span { label: label.into(), from, to };
        let text = timeline(&[span("first", 1.0, 1.5), span("then", 1.5, 2.0)]);
        let begins: Vec<usize> =
            text.lines().map(|line| line.chars().position(|character| character == '█').unwrap()).collect();
        assert_eq!(begins, [9, 29]);
        assert!(text.contains(" 500 ms"), "{text}");
    }
}
