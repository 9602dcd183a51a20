//! `orrery/instance.h`, used by a C program with a library that is built with the pass.

mod examples;

use std::path::Path;
use std::process::Command;

use examples::{COMPILERS, build};
use orrery_testing::cls::Build;

#[test]
fn a_c_program_has_instances() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/instance");
    let of_library = [sources.join("library.c")];
    let made = |name, how| orrery_testing::cls::library(name, &of_library, &["-O1"], how);
    let (word, gs) = (made("capi-cls", Build::Word), made("capi-cls-gs", Build::Gs));
    let (Some(word), Some(gs), Some(plain)) = (word, gs, made("capi-plain", Build::Plain)) else { return };
    let libraries = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let directory = tempfile::tempdir().unwrap();
    for (compiler, language) in [("gcc", "c"), ("clang", "c"), ("g++", "c++")] {
        if !orrery_testing::is_there(compiler) {
            continue;
        }
        let program = directory.path().join("program");
        let mut command = Command::new(compiler);
        command.args(["-Wall", "-Wextra", "-Werror", "-g", "-O1", "-pthread", "-x", language]);
        command.arg("-I").arg(sources.join("../../../../include")).arg(sources.join("program.c"));
        command.arg(format!("-Wl,-rpath,{}", libraries.display())).arg("-L").arg(&libraries);
        let output = command.args(["-lorrery", "-o"]).arg(&program).output().unwrap();
        assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
        for library in [&word, &gs] {
            let run =
                Command::new("timeout").arg("120").arg(&program).args([library, &plain]).output().unwrap();
            let errors = String::from_utf8_lossy(&run.stderr);
            assert!(run.status.success(), "{compiler}, {}: {}: {errors}", library.display(), run.status);
        }
    }
}

/// Of a library that a plain compiler built.
#[test]
fn a_c_program_has_instances_of_mapped_libraries() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/instance");
    let libraries = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let directory = tempfile::tempdir().unwrap();
    let mut tried = 0;
    for (compiler, language) in [("gcc", "c"), ("clang", "c"), ("g++", "c++")] {
        if !orrery_testing::is_there(compiler) {
            continue;
        }
        tried += 1;
        let (library, program) = (directory.path().join("library.so"), directory.path().join("program"));
        let mut command = Command::new(compiler);
        command.args(["-shared", "-fPIC", "-O1", "-x", language]).arg(sources.join("mapped_library.c"));
        let output = command.args(["-pthread", "-o"]).arg(&library).output().unwrap();
        assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
        let mut command = Command::new(compiler);
        command.args(["-Wall", "-Wextra", "-Werror", "-g", "-O1", "-pthread", "-x", language]);
        command.arg("-I").arg(sources.join("../../../../include")).arg(sources.join("mapped.c"));
        command.arg(format!("-Wl,-rpath,{}", libraries.display())).arg("-L").arg(&libraries);
        let output = command.args(["-lorrery", "-o"]).arg(&program).output().unwrap();
        assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
        let run = Command::new("timeout").arg("120").arg(&program).arg(&library).output().unwrap();
        assert!(run.status.success(), "{compiler}: {}: {}", run.status, String::from_utf8_lossy(&run.stderr));
    }
    assert!(tried > 0);
}

/// `examples/instances`: each of many SQLites answers rightly, and dlopen's namespaces are few.
#[test]
fn the_example_has_many_sqlites() {
    let sqlite = |build| orrery_testing::cls::sqlite("-O1", build);
    let (Some(library), Some(plain)) = (sqlite(Build::Word), sqlite(Build::Plain)) else { return };
    for compiler in COMPILERS {
        let Some(program) = build("instances", compiler) else { continue };
        let mut command = Command::new("timeout");
        let output = command.arg("120").arg(program).args([&library, &plain]).arg("60").output().unwrap();
        let table = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{compiler}: {table}{}", String::from_utf8_lossy(&output.stderr));
        let made = |way: &str| {
            let row = table.lines().find_map(|line| line.trim().strip_prefix(way)).unwrap();
            let numbers: Vec<u32> =
                row.split_whitespace().take(2).map(|word| word.parse().unwrap()).collect();
            assert_eq!(numbers[0], numbers[1], "made and right: {row}");
            numbers[0]
        };
        assert_eq!((made("instances"), made("a process each")), (60, 60), "{table}");
        assert!((1..60).contains(&made("dlmopen")), "{table}");
    }
}

/// `examples/isolation`: a request that corrupts what is not its instance's harms no other instance, in contexts and orbits; it does in
/// instances alone.
#[test]
fn a_corrupt_instance_in_a_context_or_an_orbit_harms_no_other() {
    let source = orrery_testing::root().join("examples/isolation/library/sums.c");
    let Some(library) = orrery_testing::cls::library("sums", &[source], &["-O1"], Build::Word) else {
        return;
    };
    for compiler in COMPILERS {
        let Some(program) = build("isolation", compiler) else { continue };
        let run = |way: &str| {
            let mut command = Command::new("timeout");
            let output = command.arg("120").arg(&program).arg(&library).arg(way).output().unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            (output.status, String::from_utf8_lossy(&output.stdout).into_owned(), errors.into_owned())
        };
        for (way, after_crash) in [("contexts", 1), ("orbits", 0)] {
            let (status, text, errors) = run(way);
            let expected = format!(
                "ann: put 0 40: 40\nbob: put 0 7: 7\neve: put 0 1: 1\neve: put into ann's numbers: no answer\n\
                 ann: put 0 42: 42\neve: put where nothing is: no answer\neve: sum: {after_crash}\nbob: sum: 7\n\
                 ann: sum: 42\nthe others were not harmed\n"
            );
            assert_eq!(text, expected, "{compiler}, {way}: {status}: {errors}");
            assert!(status.success(), "{compiler}, {way}: {status}: {errors}");
        }
        let (status, text, errors) = run("instances");
        assert!(
            text.contains("\nann: put 0 42: -584, which is wrong\n"),
            "{compiler}: {status}: {text}{errors}"
        );
        assert!(!text.contains("bob: sum"), "{compiler}: it goes on after a crash: {text}");
        assert!(!status.success(), "{compiler}: {status}: {text}{errors}");
    }
}
