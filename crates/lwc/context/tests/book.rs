//! Checks the book's tables of contexts: each row names a test or a difference, and each test that is named exists and runs.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// Returns the text between a heading and the next one of its level or above.
fn section(page: &str, heading: &str) -> String {
    let (_, after) = page.split_once(&format!("\n{heading}\n")).unwrap();
    let level = heading.split(' ').next().unwrap();
    after.split("\n## ").next().unwrap().split(&format!("\n{level} ")).next().unwrap().to_owned()
}

/// Returns the cases that `make test` runs.
fn cases() -> BTreeSet<String> {
    let lists = ["crates/lwc/context/tests/contexts/main.rs", "crates/lwc/vault/tests/private/main.rs"];
    let cases = lists.map(|list| text(list).split_once("cases![").unwrap().1.to_owned()).join(",");
    cases.split([',', ';']).map(|name| name.trim().to_owned()).collect()
}

/// Returns the words in backquotes that look like names of tests.
fn names(text: &str) -> Vec<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let is_case = |name: &&str| {
        name.contains('_') && name.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c == '2')
    };
    let is_program = |name: &&str| name.ends_with(".c");
    quoted.filter(|name| is_case(name) || is_program(name)).map(str::to_owned).collect()
}

fn is_run(name: &str, cases: &BTreeSet<String>) -> bool {
    let program = ["crates/capi/tests/c", "examples/lwc"]
        .iter()
        .any(|directory| root().join(directory).join(name).exists());
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
    let cases = cases();
    let (mut rows, mut used) = (0, BTreeSet::new());
    for (page, heading) in [
        ("contexts.md", "### Errors"),
        ("contexts-isolation.md", "## Reference"),
        ("lwc-audit.md", "## Feature by feature"),
        ("lwc-audit.md", "## Differences"),
        ("lwc-audit.md", "## Further tests"),
    ] {
        let section = section(&text(&format!("docs/src/{page}")), heading);
        for row in
            section.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| section")).skip(1)
        {
            let shown = names(row);
            let stated = ["difference", "by construction", "| none"].iter().any(|word| row.contains(word));
            assert!(!shown.is_empty() || stated, "neither a test nor a difference: {row}");
            rows += 1;
        }
        for name in names(&section) {
            assert!(is_run(&name, &cases), "{page}: there is no test {name}");
            used.insert(name);
        }
    }
    assert!(rows > 60, "only {rows} rows were found");
    let unnamed: Vec<&String> = cases
        .iter()
        .filter(|case| case.contains('_') && !case.contains(']') && !used.contains(*case))
        .collect();
    assert!(unnamed.is_empty(), "no page of the book names {unnamed:?}");
}
