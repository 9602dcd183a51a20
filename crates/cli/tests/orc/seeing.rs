//! `orrery orc stat` and `orrery orc explain`.

use std::process::{Command, Output};

use orrery_orc::Flags;
use serde_json::Value;

use crate::{Store, bytes};

fn orc(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_orrery")).arg("orc").args(arguments).output().unwrap()
}

fn text(output: &Output) -> &str {
    assert!(output.status.success(), "{output:?}");
    std::str::from_utf8(&output.stdout).unwrap()
}

#[test]
fn what_is_shared_is_counted() {
    let store = Store::new(&[]);
    let folder = store.path().to_str().unwrap();
    let client = store.client();
    assert!(text(&orc(&["stat", "--directory", folder])).contains("No objects"));
    let object = client.register(&bytes(1 << 20, 1), Flags::none()).unwrap();
    // Two mappings of every page count twice.
    let (one, two) = (object.map().unwrap(), object.map().unwrap());
    let sum: u64 = one.iter().chain(&*two).map(|byte| u64::from(*byte)).sum();
    assert!(sum > 0);
    let stat =
        || -> Value { serde_json::from_str(text(&orc(&["stat", "--directory", folder, "--json"]))).unwrap() };
    // Children that other tests are forking just now have the mappings, too, for a moment.
    let processes = |look: &Value| {
        let programs = look["programs"].as_object().unwrap().values();
        programs.map(|program| program["processes"].as_u64().unwrap()).sum::<u64>()
    };
    let look = (0..50).map(|_| stat()).find(|look| processes(look) == 1).unwrap();
    let realm = &look["realms"].as_object().unwrap().values().next().unwrap();
    assert_eq!((&realm["objects"], &realm["stored"]), (&1.into(), &(1 << 20).into()));
    assert_eq!((&realm["mapped"], &realm["saved"]), (&(2 << 20).into(), &(1 << 20).into()));
    let program = look["programs"].as_object().unwrap().values().next().unwrap();
    assert_eq!((&program["processes"], &program["mapped"]), (&1.into(), &(2 << 20).into()));
    let held = &look["objects"][0];
    assert_eq!(held["id"], object.id().to_string());
    assert!(held["holders"].as_object().unwrap().contains_key(&std::process::id().to_string()));
    let table = text(&orc(&["stat", "--directory", folder, "--objects"])).to_owned();
    assert!(
        table.contains("TRUST DOMAIN") && table.contains("1 MiB") && table.contains(&object.id().to_string())
    );

    let own = std::process::id().to_string();
    let sums = text(&orc(&["explain", &own])).to_owned();
    assert!(
        sums.contains("one copy for all") && sums.contains("all together") && sums.contains("the stack"),
        "{sums}"
    );
    let rows: Value = serde_json::from_str(text(&orc(&["explain", &own, "--json"]))).unwrap();
    let rows = rows.as_array().unwrap();
    let shared: u64 = rows
        .iter()
        .filter(|row| row["name"].as_str().unwrap().starts_with("/memfd:orc:"))
        .map(|row| row["resident"].as_u64().unwrap())
        .sum();
    assert!(shared >= 2 << 20);
    assert!(text(&orc(&["explain", &own, "--all"])).contains("ADDRESSES"));
}

#[test]
fn nonsense_is_refused() {
    let failed = |arguments: &[&str], part: &str| {
        let output = orc(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(part), "{arguments:?}: {said}");
    };
    failed(&["stat", "--directory", "/nonexistent"], "orrery orc serve");
    failed(&["stat", "--every", "0", "--watch"], "--every 0");
    failed(&["explain", "2147483647"], "process 2147483647");
    failed(&["serve", "--quota", "0"], "too little");
    failed(&["serve", "--tenant", "x"], "NAME=SOCKET");
    failed(&["serve", "--tenant", "x=/tmp/1", "--tenant", "x=/tmp/2"], "twice");
    let store = Store::new(&[]);
    let _ = store.client();
    failed(&["serve", "--directory", store.path().to_str().unwrap()], "another store");
    failed(&["serve", "--directory", "/proc/nowhere"], "/proc/nowhere");
}
