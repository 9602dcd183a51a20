//! Trees on other machines. What is pushed and pulled is tested in `crates/orc/registry`; here, that `orrery` has it done.

use std::fs;
use std::process::{Command, Output};

#[test]
fn trees_are_pushed_and_pulled_by_a_program_of_its_own() {
    let _ = orrery_testing::built("orrery-orc-registry");
    let directory = tempfile::tempdir().unwrap();
    let tree = directory.path().join("tree");
    fs::create_dir(&tree).unwrap();
    let orrery = |words: &[&str]| -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
        command.args(words).env("HOME", directory.path()).env_remove("REGISTRY_AUTH_FILE").output().unwrap()
    };
    let path = tree.to_str().unwrap();
    // Nothing listens at this port.
    let output = orrery(&["--log-level", "debug", "orc", "push", "--plain-http", path, "127.0.0.1:1/x"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("orrery-orc-registry: HEAD http://127.0.0.1:1/v2/x/manifests/latest"), "{error}");
    assert!(
        error.contains(&format!("orrery-orc-registry: cannot push {path} to 127.0.0.1:1/x:latest")),
        "{error}"
    );
    // What is no command line is refused before.
    for words in [&["orc", "push", path, "x"][..], &["orc", "pull", "127.0.0.1:1/x"], &["orc", "push", path]]
    {
        let output = orrery(words);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains("For more information, try"), "{error}");
    }
}
