//! The page that goes through all that was promised.

use std::collections::BTreeSet;
use std::path::Path;

use orrery_testing::sources;

#[test]
fn every_promise_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/src/orc-audit.md")).unwrap();
    let text: String = ["crates/orc", "crates/capi", "crates/cli"]
        .map(|directory| sources::below(&root.join(directory)))
        .concat();
    let own = sources::below(&root.join("crates/cli/tests/orc"));
    let (all, own) = (sources::tests(&text), sources::tests(&own));
    let (mut rows, mut named) = (0, BTreeSet::new());
    for sources::Promise { row, held, tests } in sources::promises(&page) {
        for test in &tests {
            assert!(all.contains(test), "there is no test {test}: {row}");
        }
        let told = ["difference", "by construction", "the same", "make bench"]
            .iter()
            .any(|word| held.contains(word));
        assert!(told || !tests.is_empty(), "neither a test nor a difference: {row}");
        named.extend(tests);
        rows += 1;
    }
    assert!(rows > 50, "only {rows} rows were found");
    // This one, what a killed client does, which is none, and one of what other tests need.
    let others = [
        "every_promise_has_its_test",
        "as_a_client",
        "children_that_inherit_a_file_for_a_moment_execute_their_programs",
    ];
    let unnamed: Vec<_> =
        own.iter().filter(|test| !others.contains(test) && !named.contains(*test)).collect();
    assert!(unnamed.is_empty(), "the page does not tell of {unnamed:?}");
}
