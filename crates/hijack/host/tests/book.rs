//! The book's tables of the executive: each row names a test or a difference, each test that is named is there, and each test of
//! what must stay as it is, is named.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const CHAPTER: &str = "Sentence by sentence";
/// Files all of whose tests the chapter lists.
const LISTED: [&str; 10] = [
    "attach",
    "behavior",
    "counts",
    "frames",
    "fuzz",
    "hostile",
    "profilers",
    "programs",
    "steps",
    "rewriting",
];
/// Other files that rows may name; the last ones are tests of the command.
const OTHERS: [&str; 8] =
    ["services", "start", "faults", "run_closed", "run_handler", "run_policy", "trace", "trace_decoding"];

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// The tests in a file: functions behind `#[test]`, and what a macro makes of a list.
fn of(file: &str) -> Option<BTreeSet<String>> {
    let (own, cli) = (tests().join(format!("{file}.rs")), format!("../../../cli/tests/{file}.rs"));
    let text = std::fs::read_to_string(own).or_else(|_| std::fs::read_to_string(tests().join(cli))).ok()?;
    let mut found = BTreeSet::new();
    for after in text.split("#[test]\n").skip(1) {
        let name = after.trim_start().strip_prefix("fn ").unwrap_or_default();
        found.extend(name.split_once('(').map(|(name, _)| name.to_owned()));
    }
    if let Some((_, list)) = text.split_once("\nprograms! {") {
        found.extend(list.lines().filter_map(|line| Some(line.trim().split_once(": ")?.0.to_owned())));
    }
    Some(found)
}

/// Returns whether a word is the name of a file of tests, or of a test in one.
fn is_test(word: &str) -> bool {
    let (file, test) = word.split_once("::").unwrap_or((word, ""));
    !test.is_empty() || LISTED.iter().chain(&OTHERS).any(|known| *known == file)
}

#[test]
fn every_sentence_has_its_test() {
    let book = tests().join("../../../../docs/src/hijack-audit.md");
    let book = std::fs::read_to_string(book).unwrap();
    let (_, chapter) = book.split_once(&format!("## {CHAPTER}\n")).unwrap();
    let chapter = chapter.split("\n## ").next().unwrap();
    let (mut rows, mut listed) = (0, BTreeSet::new());
    for row in
        chapter.lines().filter(|line| line.starts_with("| ") && !line.ends_with("test, or difference |"))
    {
        let names: Vec<&str> = row.split('`').skip(1).step_by(2).filter(|word| is_test(word)).collect();
        let excused =
            row.contains("difference") || row.contains("by construction") || row.contains("see below");
        assert!(
            !names.is_empty() || excused || row.ends_with("| test |"),
            "neither a test nor a difference: {row}"
        );
        for name in names {
            let (file, test) = name.split_once("::").unwrap_or((name, ""));
            let tests = of(file).unwrap_or_else(|| panic!("there is no file {file}: {row}"));
            assert!(test.is_empty() || tests.contains(test), "there is no test {name}: {row}");
            listed.insert(name.to_owned());
        }
        rows += 1;
    }
    assert!(rows > 35, "only {rows} rows were found");
    // The list of the K23 paper, whole.
    for pitfall in ["P1a", "P1b", "P2a", "P2b", "P3a", "P3b", "P4a", "P4b", "P5"] {
        assert!(chapter.contains(&format!("\n| {pitfall}: ")), "nothing is said of the pitfall {pitfall}");
    }
    for file in LISTED {
        let tests = of(file).unwrap();
        assert!(!tests.is_empty(), "{file}");
        for test in tests {
            let name = format!("{file}::{test}");
            assert!(listed.contains(&name), "the book does not list {name}");
        }
    }
}
