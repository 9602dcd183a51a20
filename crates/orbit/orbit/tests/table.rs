//! Checks that the tables of `README.md` and of the book name tests that exist.

use std::path::Path;

use orrery_testing::sources;

#[test]
fn every_test_in_the_table_exists() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let table = std::fs::read_to_string(crates.join("orbit/orbit/tests/README.md")).unwrap();
    let mut rows = 0;
    for line in table.lines().filter(|line| line.starts_with("| ") && line.contains('`')) {
        let parts: Vec<&str> = line.rsplit(" | ").next().unwrap().split('`').collect();
        let [_, file, _, name, _] = parts[..] else { panic!("no file and test in {line:?}") };
        let text =
            std::fs::read_to_string(crates.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let wanted = if file.ends_with(".rs") { format!("fn {name}(") } else { name.to_owned() };
        assert!(text.contains(&wanted), "{file} has no {name}");
        rows += 1;
    }
    assert!(rows > 30, "{rows}");
}

#[test]
fn every_row_of_the_paper_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let page = std::fs::read_to_string(root.join("docs/src/orbit-audit.md")).unwrap();
    let text: String = ["orbit", "memory", "capi"]
        .iter()
        .map(|name| sources::below(&root.join("crates").join(name)))
        .collect();
    let mut rows = 0;
    for sources::Promise { row, held, tests } in sources::promises(&page) {
        for test in &tests {
            assert!(text.contains(&format!("fn {test}(")), "there is no test {test}: {row}");
        }
        for quoted in held.split('`').skip(1).step_by(2) {
            if let Some(name) = quoted.strip_prefix("make bench B=") {
                let program = root.join(format!("bench/src/bin/{name}.rs"));
                assert!(program.exists(), "there is no benchmark {name}: {row}");
            }
            if quoted.starts_with("crates/") {
                assert!(root.join(quoted).exists(), "there is no file {quoted}: {row}");
            }
        }
        let stated =
            held.starts_with("none") || held.contains("difference") || held.contains("by construction");
        assert!(
            stated || !tests.is_empty() || held.contains("crates/"),
            "no test, difference or none: {row}"
        );
        rows += 1;
    }
    assert!(rows > 25, "only {rows} rows were found");
}
