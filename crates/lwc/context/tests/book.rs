//! The book's tables of contexts: each row names a test, and each test that is named is there and run.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// What stands between a heading and the next one.
fn chapter(book: &str, heading: &str) -> String {
    let (_, after) = book.split_once(&format!("\n## {heading}\n")).unwrap();
    after.split("\n## ").next().unwrap().to_owned()
}

/// The cases that `make test` runs.
fn cases() -> BTreeSet<String> {
    let lists = ["crates/lwc/context/tests/contexts/main.rs", "crates/lwc/vault/tests/private/main.rs"];
    let cases = lists.map(|list| text(list).split_once("cases![").unwrap().1.to_owned()).join(",");
    cases.split([',', ';']).map(|name| name.trim().to_owned()).collect()
}

/// The words in backquotes that look like names of tests.
fn names(text: &str) -> Vec<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let is_case = |name: &&str| {
        name.contains('_') && name.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c == '2')
    };
    let is_program = |name: &&str| name.ends_with(".c");
    quoted.filter(|name| is_case(name) || is_program(name)).map(str::to_owned).collect()
}

fn is_run(name: &str, cases: &BTreeSet<String>) -> bool {
    let program =
        ["crates/capi/tests/c", "examples/lwc"].iter().any(|folder| root().join(folder).join(name).exists());
    // Cases of the guard are functions that its test program lists.
    let guard = || {
        let found = std::fs::read_dir(root().join("crates/cli/tests/guard")).unwrap().flatten();
        found
            .filter_map(|file| std::fs::read_to_string(file.path()).ok())
            .any(|text| text.contains(&format!("fn {name}(")))
            || text("crates/monitor/src/policy/text.rs").contains(&format!("fn {name}("))
    };
    cases.contains(name) || (name.ends_with(".c") && program) || guard()
}

#[test]
fn every_sentence_has_its_test() {
    let book = text("docs/src/contexts.md");
    let cases = cases();
    let (mut rows, mut used) = (0, BTreeSet::new());
    for heading in ["Sentence by sentence", "What makes no sense", "Who can do what to whom"] {
        let chapter = chapter(&book, heading);
        for row in chapter.lines().filter(|line| line.starts_with("| ")).skip(1) {
            let shown = names(row);
            let told = row.contains("difference") || row.contains("by construction");
            assert!(!shown.is_empty() || told, "neither a test nor a difference: {row}");
            rows += 1;
        }
        for name in names(&chapter) {
            assert!(is_run(&name, &cases), "{heading}: there is no test {name}");
            used.insert(name);
        }
    }
    assert!(rows > 60, "only {rows} rows were found");
    let unnamed: Vec<&String> = cases
        .iter()
        .filter(|case| case.contains('_') && !case.contains(']') && !used.contains(*case))
        .collect();
    assert!(unnamed.is_empty(), "the book does not tell of {unnamed:?}");
}
