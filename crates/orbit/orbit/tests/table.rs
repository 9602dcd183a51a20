//! The table in `README.md` names tests that exist.

use std::path::Path;

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
