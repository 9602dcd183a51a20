//! The sources, for tests that hold a page of the book to them: every test that the page names must be there.

use std::collections::BTreeSet;
use std::path::Path;

/// Returns all Rust sources below a directory, one after the other.
///
/// # Panics
/// If one cannot be read.
#[must_use]
pub fn below(folder: &Path) -> String {
    let mut text = String::new();
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            text.push_str(&below(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = std::fs::read_to_string(&path);
            text.push_str(&source.unwrap_or_else(|error| panic!("{}: {error}", path.display())));
        }
    }
    text
}

/// Returns the functions that come after `#[test]`.
#[must_use]
pub fn tests(source: &str) -> BTreeSet<&str> {
    source
        .split("#[test]\n")
        .skip(1)
        .filter_map(|part| part.split_once("fn ")?.1.split('(').next())
        .filter(|name| name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'))
        .collect()
}

/// A row of a table that goes through what was promised: a sentence, and what holds it.
#[derive(Clone, Debug)]
pub struct Promise<'a> {
    /// The whole row.
    pub row: &'a str,
    /// The second column of the row.
    pub held: &'a str,
    /// The tests that are named there.
    pub tests: Vec<&'a str>,
}

/// Returns the rows of a page's tables.
#[must_use]
pub fn promises(page: &str) -> Vec<Promise<'_>> {
    let is_test = |word: &&str| {
        word.matches('_').count() > 1 && word.chars().all(|c| c.is_ascii_lowercase() || c == '_')
    };
    page.lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| sentence"))
        .map(|row| {
            let held = row.split(" | ").nth(1).unwrap_or_default();
            Promise { row, held, tests: held.split('`').skip(1).step_by(2).filter(is_test).collect() }
        })
        .collect()
}
