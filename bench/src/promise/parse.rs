//! Reads promises from the tables of a Markdown text.
//!
//! A table of promises is one whose header is `promise | bench | case | quantity | bound | measured |
//! command`; other tables are prose. Nothing is guessed: a cell that cannot be understood is an error that
//! names its line.

use std::fmt;
use std::ops::Range;

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

const HEADER: [&str; 7] = ["promise", "bench", "case", "quantity", "bound", "measured", "command"];

/// One row: what a benchmark's case must show.
#[derive(Debug, Clone, PartialEq)]
pub struct Promise {
    /// In words.
    pub promise: String,
    /// The benchmark that measures it.
    pub bench: String,
    /// Which of its cases.
    pub case: String,
    /// Which number of that case.
    pub quantity: Quantity,
    /// On which side of `bound` that number must be.
    pub comparison: Comparison,
    /// In the unit of `unit`.
    pub bound: f64,
    /// The case's unit (`us`, say), or `x` for a ratio.
    pub unit: String,
    /// Where the cell `measured` lies in the text, in bytes, its padding included.
    pub measured: Range<usize>,
    /// The line of the text, from 1.
    pub line: usize,
}

/// The number of a case that is promised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Quantity {
    /// Our own value (`ours`).
    Ours,
    /// How many times better than the named rival we are (`ratio vs NAME`).
    RatioVs(String),
}

/// The direction of a bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// `<=`
    AtMost,
    /// `>=`
    AtLeast,
}

impl Comparison {
    /// Whether `value` is on the promised side of `bound`.
    pub fn holds(self, value: f64, bound: f64) -> bool {
        match self {
            Self::AtMost => value <= bound,
            Self::AtLeast => value >= bound,
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::AtMost => "<=",
            Self::AtLeast => ">=",
        })
    }
}

/// Why a text's promises cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseError {
    line: usize,
    reason: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "line {}: {}", self.line, self.reason)
    }
}

impl std::error::Error for ParseError {}

/// All promises of `markdown`, in their order.
///
/// # Errors
/// Where a table of promises has a cell that cannot be understood, or two rows promise the same, or there is
/// no table of promises at all.
pub fn parse(markdown: &str) -> Result<Vec<Promise>, ParseError> {
    let mut promises: Vec<Promise> = Vec::new();
    let mut tables = 0;
    for table in tables_of(markdown) {
        let Some((header, rows)) = table.split_first() else {
            continue;
        };
        let names: Vec<_> = header.cells.iter().map(|cell| cell.text.as_str()).collect();
        if names != HEADER {
            // Likely a table of promises that somebody misspelled: silence would unmake its promises.
            if names.first() == Some(&HEADER[0]) {
                let reason =
                    format!("a table of promises has the columns {HEADER:?}, this one has {names:?}");
                return Err(ParseError { line: header.line, reason });
            }
            continue;
        }
        tables += 1;
        for row in rows {
            let promise = promise(row)?;
            let same = |other: &&Promise| {
                other.bench == promise.bench
                    && other.case == promise.case
                    && other.quantity == promise.quantity
                    && other.comparison == promise.comparison
            };
            if let Some(other) = promises.iter().find(same) {
                let reason = format!("line {} bounds the same quantity already", other.line);
                return Err(ParseError { line: row.line, reason });
            }
            promises.push(promise);
        }
    }
    if tables == 0 {
        return Err(ParseError { line: 1, reason: format!("no table has the columns {HEADER:?}") });
    }
    Ok(promises)
}

struct Row {
    line: usize,
    cells: Vec<Cell>,
}

struct Cell {
    text: String,
    range: Range<usize>,
}

/// All tables of a text; the first row of each is its header.
fn tables_of(markdown: &str) -> Vec<Vec<Row>> {
    let mut tables: Vec<Vec<Row>> = Vec::new();
    let mut text = None;
    for (event, range) in Parser::new_ext(markdown, Options::ENABLE_TABLES).into_offset_iter() {
        match event {
            Event::Start(Tag::Table(_)) => tables.push(Vec::new()),
            Event::Start(Tag::TableHead | Tag::TableRow) => {
                let line = 1 + markdown[..range.start].matches('\n').count();
                tables.last_mut().into_iter().for_each(|table| table.push(Row { line, cells: Vec::new() }));
            }
            Event::Start(Tag::TableCell) => text = Some(String::new()),
            Event::Text(piece) | Event::Code(piece) => text.iter_mut().for_each(|text| text.push_str(&piece)),
            Event::End(TagEnd::TableCell) => {
                let row = tables.last_mut().and_then(|table| table.last_mut());
                if let (Some(row), Some(text)) = (row, text.take()) {
                    row.cells.push(Cell { text: text.trim().to_owned(), range });
                }
            }
            _ => {}
        }
    }
    tables
}

fn promise(row: &Row) -> Result<Promise, ParseError> {
    let fail = |reason: String| ParseError { line: row.line, reason };
    // Markdown itself makes every row as long as the header, cutting or padding it.
    let [promise, bench, case, quantity, bound, measured, command] = &row.cells[..] else {
        return Err(fail(format!("a promise has {} cells, not {}", HEADER.len(), row.cells.len())));
    };
    for (cell, column) in row.cells.iter().zip(HEADER) {
        if cell.text.is_empty() {
            return Err(fail(format!("the cell \"{column}\" is empty")));
        }
    }
    let quantity = match quantity.text.split_once(" vs ") {
        Some(("ratio", rival)) if !rival.trim().is_empty() => Quantity::RatioVs(rival.trim().to_owned()),
        None if quantity.text == "ours" => Quantity::Ours,
        _ => {
            return Err(fail(format!("{:?} is neither \"ours\" nor \"ratio vs NAME\"", quantity.text)));
        }
    };
    let (comparison, bound, unit) = bounded(&bound.text).map_err(fail)?;
    match (&quantity, unit.as_str()) {
        (Quantity::RatioVs(_), "x") | (Quantity::Ours, "ns" | "us" | "ms" | "1/s") => {}
        (Quantity::RatioVs(_), _) => return Err(fail(format!("a ratio is bounded in x, not {unit:?}"))),
        (Quantity::Ours, _) => return Err(fail(format!("{unit:?} is none of ns, us, ms, 1/s"))),
    }
    let asked = format!("B={}", bench.text);
    if !command.text.split_whitespace().any(|word| word == asked) {
        return Err(fail(format!(
            "the command {:?} does not run the benchmark: {asked} is missing",
            command.text
        )));
    }
    Ok(Promise {
        promise: promise.text.clone(),
        bench: bench.text.clone(),
        case: case.text.clone(),
        quantity,
        comparison,
        bound,
        unit,
        measured: measured.range.clone(),
        line: row.line,
    })
}

/// Takes `<= 25 us` or `>= 50x` apart.
fn bounded(text: &str) -> Result<(Comparison, f64, String), String> {
    let (comparison, rest) = if let Some(rest) = text.strip_prefix("<=") {
        (Comparison::AtMost, rest)
    } else if let Some(rest) = text.strip_prefix(">=") {
        (Comparison::AtLeast, rest)
    } else {
        return Err(format!("the bound {text:?} begins with neither <= nor >="));
    };
    let rest = rest.trim_start();
    let end = rest.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(rest.len());
    let number: f64 =
        rest[..end].parse().map_err(|_| format!("the bound {text:?} has no number after {comparison}"))?;
    if !number.is_finite() || number <= 0.0 {
        return Err(format!("the bound {text:?} bounds nothing: the number must be above 0"));
    }
    Ok((comparison, number, rest[end..].trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP: &str = "| promise | bench | case | quantity | bound | measured | command |\n|-|-|-|-|-|-|-|\n";

    fn row(cells: &str) -> Result<Vec<Promise>, ParseError> {
        parse(&format!("{TOP}{cells}\n"))
    }

    fn complaint(cells: &str) -> String {
        row(cells).unwrap_err().to_string()
    }

    #[test]
    fn a_promise_is_read_whole() {
        let text = format!(
            "# Title\n\n{TOP}| one *page* | `rollback` | `64MiB/4k/1 page` | ours | <= 25 us | not yet | `make bench B=rollback` |\n\
             | beats fork | rollback | 64MiB/4k/1 page | ratio vs fork + exit + wait | >= 50x | not yet | make bench B=rollback |\n"
        );
        let promises = parse(&text).unwrap();
        assert_eq!(promises.len(), 2);
        let [first, second] = &promises[..] else { unreachable!() };
        assert_eq!((first.promise.as_str(), first.bench.as_str()), ("one page", "rollback"));
        assert_eq!((first.case.as_str(), first.quantity.clone()), ("64MiB/4k/1 page", Quantity::Ours));
        assert_eq!((first.comparison, first.bound, first.unit.as_str()), (Comparison::AtMost, 25.0, "us"));
        assert_eq!(first.line, 5);
        assert_eq!(text[first.measured.clone()].trim_matches([' ', '|']), "not yet");
        assert_eq!(second.quantity, Quantity::RatioVs("fork + exit + wait".into()));
        assert_eq!((second.comparison, second.bound, second.unit.as_str()), (Comparison::AtLeast, 50.0, "x"));
    }

    #[test]
    fn other_tables_are_prose_and_all_tables_of_promises_count() {
        let one = "| p | b | c | ours | <= 1.5 ms | - | B=b |\n";
        let two = "| p | b | c2 | ours | >= 10 1/s | - | B=b |\n";
        let text = format!("| a | b |\n|-|-|\n| 1 | 2 |\n\n{TOP}{one}\n## Next\n\n{TOP}{two}");
        assert_eq!(parse(&text).unwrap().len(), 2);
        assert_eq!(row("").unwrap(), []);
    }

    #[test]
    fn a_text_without_promises_is_no_specification() {
        assert!(parse("").unwrap_err().to_string().contains("no table has the columns"));
        assert!(parse("| a |\n|-|\n| 1 |\n").is_err());
    }

    #[test]
    fn a_misspelled_header_does_not_unmake_promises() {
        let text = format!("{}| p | b | c | ours | <= 1 us | - | B=b |\n", TOP.replace("bound", "bounds"));
        assert!(
            parse(&text).unwrap_err().to_string().starts_with("line 1: a table of promises has the columns")
        );
    }

    #[test]
    fn bad_cells_are_named_with_their_line() {
        let bad = [
            ("| p | b | c | theirs | <= 1 us | - | B=b |", "\"theirs\" is neither"),
            ("| p | b | c | ratio vs | >= 1x | - | B=b |", "\"ratio vs\" is neither"),
            ("| p | b | c | ratio | >= 1x | - | B=b |", "\"ratio\" is neither"),
            ("| p | b | c | ours | 25 us | - | B=b |", "begins with neither"),
            ("| p | b | c | ours | < 25 us | - | B=b |", "begins with neither"),
            ("| p | b | c | ours | <= us | - | B=b |", "no number"),
            ("| p | b | c | ours | <= -5 us | - | B=b |", "no number"),
            ("| p | b | c | ours | <= 1.2.3 us | - | B=b |", "no number"),
            ("| p | b | c | ours | <= 0 us | - | B=b |", "bounds nothing"),
            ("| p | b | c | ours | <= 25 | - | B=b |", "\"\" is none of"),
            ("| p | b | c | ours | <= 25 parsecs | - | B=b |", "\"parsecs\" is none of"),
            ("| p | b | c | ours | <= 25x | - | B=b |", "\"x\" is none of"),
            ("| p | b | c | ratio vs fork | >= 2 us | - | B=b |", "a ratio is bounded in x"),
            ("| p | b | c | ours | <= 1 us | - | make bench |", "B=b is missing"),
            ("| p | b | c | ours | <= 1 us | - | make bench B=bb |", "B=b is missing"),
            ("| p |  | c | ours | <= 1 us | - | B= |", "\"bench\" is empty"),
            ("| p | b | c | ours | <= 1 us | - |", "\"command\" is empty"),
        ];
        for (cells, part) in bad {
            let said = complaint(cells);
            assert!(said.starts_with("line 3: ") && said.contains(part), "{cells}: {said}");
        }
    }

    #[test]
    fn the_same_quantity_is_not_promised_twice() {
        let cells = "| p | b | c | ours | <= 1 us | - | B=b |\n| q | b | c | ours | <= 2 us | - | B=b |";
        assert_eq!(complaint(cells), "line 4: line 3 bounds the same quantity already");
        row(&cells.replace("<= 2", ">= 2")).unwrap();
    }
}
