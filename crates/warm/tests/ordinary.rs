//! Ordinary scripts run warm as they run in `python3`: the same bytes on both streams, the same exit status.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod common;

use std::fs;
use std::path::PathBuf;

use common::{Server, compare, examples, python, ran, ways};

fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<_> = fs::read_dir(examples())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir() && !path.ends_with("hostile"))
        .collect();
    folders.sort();
    assert!(folders.len() >= 20);
    folders
}

#[test]
fn every_example_does_what_it_does_in_python3() {
    for way in ways() {
        let server = Server::start(way, &["--import", common::IMPORTS, "--timeout", "30s", "--workers", "2"]);
        let mut complaints = String::new();
        for folder in folders() {
            let name = folder.file_name().unwrap().to_str().unwrap();
            let arguments = fs::read_to_string(folder.join("ARGUMENTS")).unwrap_or_default();
            let input = fs::read(folder.join("STDIN")).unwrap_or_default();
            let mut words = vec![format!("{name}.py")];
            words.extend(arguments.split_whitespace().map(str::to_owned));
            let cold = ran(python(&words).current_dir(&folder), &input);
            // Twice: what the first run left behind, the second would meet.
            for _ in 0..2 {
                let warm =
                    ran(server.run(&words).env("PYTHONDONTWRITEBYTECODE", "1").current_dir(&folder), &input);
                compare(&mut complaints, &format!("{way:?} {name}"), &warm, &cold);
            }
        }
        assert!(complaints.is_empty(), "{complaints}");
    }
}
