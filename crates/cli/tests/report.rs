//! `orrery report`: a page is made of the records of benchmarks.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const RECORD: &str = r#"[{"bench": "rollback", "case": "64MiB/4k/1 page", "unit": "us", "ours": 12.5, "rival_name": "fork + exit + wait",
    "rival": 1100, "ratio": 88.0, "spread": 14.8, "runs": 20}]"#;

fn report(directory: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_orrery"))
        .args(["report", "out"])
        .current_dir(directory)
        .output()
        .unwrap()
}

#[test]
fn a_source_tree_with_records_becomes_a_page() {
    let tree = tempfile::tempdir().unwrap();
    fs::create_dir_all(tree.path().join("target/bench")).unwrap();
    fs::create_dir_all(tree.path().join("bench")).unwrap();
    fs::write(tree.path().join("target/bench/rollback.json"), RECORD).unwrap();
    let promises = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/promises.toml");
    fs::copy(promises, tree.path().join("bench/promises.toml")).unwrap();
    let output = report(tree.path());
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(said.starts_with("out/index.html: 2 promises held, 0 broken, "), "{said}");
    let page = fs::read_to_string(tree.path().join("out/index.html")).unwrap();
    assert!(page.contains("64MiB/4k/1 page") && page.contains("88.0x"), "{page}");
    assert!(fs::read_to_string(tree.path().join("out/rollback.svg")).unwrap().contains("</svg>"));
    // Once more, over what is there.
    assert!(report(tree.path()).status.success());
}

#[test]
fn without_records_nothing_is_written() {
    let tree = tempfile::tempdir().unwrap();
    let refused = |part: &str| {
        let output = report(tree.path());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(said.contains(part), "{said}");
        assert!(!tree.path().join("out").exists());
    };
    refused("cannot read the records in target/bench: `make bench` writes some: No such file");
    fs::create_dir_all(tree.path().join("target/bench")).unwrap();
    refused("there are no records in target/bench");
    fs::write(tree.path().join("target/bench/rollback.json"), "[1]").unwrap();
    refused("rollback.json holds no list of benchmark records");
}
