//! ffmpeg, built by `orrery-cc` from the sources of Debian's package: films and its own tests in instances.
//!
//! With `ORRERY_WHOLE` (`make soak`): it takes minutes to build.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use orrery_testing::ffmpeg::{self, Build};

/// Static libraries that what is linked with libavcodec and libswscale needs.
const LIBRARIES: [&str; 4] = ["libavformat", "libavcodec", "libswscale", "libavutil"];
/// What of ffmpeg's own tests (FATE) runs: targets of its Makefile, and in how many instances each program does. None of them needs the
/// samples that are not in the sources. Which tests there are depends on the codecs, formats and filters that are built.
const SETS: &[(&[&str], &[u32])] = &[
    (&["fate-libavutil", "fate-libavcodec", "fate-libavformat", "fate-libswscale"], &[1, 2, MANY]),
    (&["fate-acodec", "fate-lavf"], &[2, MANY]),
    (VIDEO, &[2, MANY]),
];
/// So many instances exist, and a program runs in all of them unless that takes more seconds of processor time.
const MANY: u32 = 1000;
const SECONDS: u32 = 10;
/// Of `fate-vsynth1`, a part: each takes seconds.
const VIDEO: &[&str] = &[
    "fate-vsynth1-asv1",
    "fate-vsynth1-asv2",
    "fate-vsynth1-ffv1",
    "fate-vsynth1-ffv1-2pass",
    "fate-vsynth1-ffv1-v0",
    "fate-vsynth1-ffv1-v3-yuv420p",
    "fate-vsynth1-ffvhuff",
    "fate-vsynth1-flv",
    "fate-vsynth1-h261",
    "fate-vsynth1-h261-trellis",
    "fate-vsynth1-h263",
    "fate-vsynth1-h263-obmc",
    "fate-vsynth1-h263p",
    "fate-vsynth1-ljpeg",
    "fate-vsynth1-mpeg1",
    "fate-vsynth1-mpeg1b",
    "fate-vsynth1-mpeg2",
    "fate-vsynth1-mpeg2-422",
    "fate-vsynth1-mpeg2-idct-int",
    "fate-vsynth1-mpeg2-ilace",
    "fate-vsynth1-mpeg2-ivlc-qprd",
    "fate-vsynth1-mpeg2-thread",
    "fate-vsynth1-mpeg2-thread-ivlc",
    "fate-vsynth1-mpeg4",
    "fate-vsynth1-mpeg4-adap",
    "fate-vsynth1-mpeg4-adv",
    "fate-vsynth1-mpeg4-error",
    "fate-vsynth1-mpeg4-nr",
    "fate-vsynth1-mpeg4-nsse",
    "fate-vsynth1-mpeg4-qpel",
    "fate-vsynth1-mpeg4-qprd",
    "fate-vsynth1-mpeg4-rc",
    "fate-vsynth1-mpeg4-thread",
    "fate-vsynth1-msmpeg4",
    "fate-vsynth1-msmpeg4v2",
    "fate-vsynth1-rv10",
    "fate-vsynth1-rv20",
    "fate-vsynth1-vc2-420p",
];
/// Tests that pass in the plain build and cannot run in instances.
const EXCEPTIONS: &[(&str, &str)] = &[];

fn is_whole() -> bool {
    let whole = std::env::var_os("ORRERY_WHOLE").is_some_and(|value| !value.is_empty() && value != "0");
    if !whole {
        orrery_testing::skipped!("ffmpeg is not built without ORRERY_WHOLE=1");
    }
    whole
}

/// Each film of 1, 2 and 100 instances, whose frames four threads transcode in turn, is that of the plain library.
#[test]
fn films_of_instances_are_those_of_the_plain_library() {
    if !is_whole() {
        return;
    }
    let (Some(ours), Some(plain)) = (ffmpeg::build(Build::Instances), ffmpeg::build(Build::Plain)) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let ours = library(directory.path(), Build::Instances, &ours);
    let plain = library(directory.path(), Build::Plain, &plain);
    let program = program(directory.path(), "transcode");
    for count in [1, 2, 100] {
        let mut command = Command::new("timeout");
        command.arg("1200").arg(&program).args([&ours, &plain]).args([&count.to_string(), "25"]);
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        println!("{}", text.trim_end());
        assert!(output.status.success(), "{count}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains(&format!("{count} instances")) && text.contains(" 0 failed"), "{text}");
    }
}

/// Each program that FATE starts runs in instances, which all exist: each has to print what the first one prints, and that is held against
/// FATE's reference. Tests that pass in the plain build pass.
#[test]
fn ffmpegs_own_tests_pass_in_instances() {
    if !is_whole() {
        return;
    }
    if ffmpeg::build(Build::Instances).is_none() || ffmpeg::build(Build::Plain).is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = program(directory.path(), "fate");
    let mut failed = Vec::new();
    for (targets, counts) in SETS {
        let (plain, output) = fate(Build::Plain, targets, "");
        println!("{targets:?}: {} tests pass in the plain build", plain.len());
        assert!(!plain.is_empty(), "{output}");
        for count in *counts {
            let log = directory.path().join("log");
            let starter = format!(
                "env ORRERY_FATE_SECONDS={SECONDS} ORRERY_FATE_LOG={} {} {count}",
                log.display(),
                program.display()
            );
            let (ours, output) = fate(Build::Instances, targets, &starter);
            let missing: Vec<_> = plain.difference(&ours).cloned().collect();
            println!("in {count} instances: {} tests pass; these do not: {missing:?}", ours.len());
            println!("{}", turns(&std::fs::read_to_string(&log).unwrap(), *count));
            std::fs::remove_file(log).unwrap();
            let is_known = |name: &String| EXCEPTIONS.iter().any(|(known, _)| known == name);
            if !missing.iter().all(is_known) {
                failed.push(format!("in {count} instances: {missing:?}\n{output}"));
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Runs targets of FATE, with a program that starts its programs; returns the tests that pass, and what make prints.
fn fate(build: Build, targets: &[&str], starter: &str) -> (BTreeSet<String>, String) {
    let mut make = ffmpeg::make(build).unwrap();
    make.arg("--keep-going").args(targets).arg(format!("TARGET_EXEC={starter}"));
    let output = make.output().unwrap();
    let [text, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success() || errors.contains("] Error "), "{}: {errors}", output.status);
    let tests = text.lines().filter_map(|line| line.strip_prefix("TEST")).map(str::trim);
    let failed: BTreeSet<&str> = errors
        .lines()
        .filter_map(|line| line.split_once(": fate-")?.1.split_once("] Error ").map(|(name, _)| name))
        .collect();
    let passed = tests.filter(|name| !failed.contains(name)).map(str::to_owned).collect();
    (passed, errors.into_owned())
}

/// Returns how many of the runs that a log lists as passed were in `count` instances, and of the others in how many each.
fn turns(log: &str, count: u32) -> String {
    let number = |line: &str, at| line.split(' ').nth(at).unwrap().parse::<u32>().unwrap();
    let (whole, parts): (Vec<&str>, Vec<&str>) =
        log.lines().filter(|line| number(line, 2) == 0).partition(|line| number(line, 0) == count);
    assert!(whole.len() + parts.len() > 0 && parts.iter().all(|line| number(line, 0) >= 2), "{log}");
    format!("{} runs in all instances, {} in as many:\n{}", whole.len(), parts.len(), parts.join("\n"))
}

/// Links what transcodes films with the libraries of a build.
fn library(directory: &Path, build: Build, built: &Path) -> PathBuf {
    let output = directory.join(format!("film-{build:?}.so"));
    let pass = orrery_testing::cls::pass().unwrap();
    let mut command = match build {
        Build::Instances => Command::new(pass.join("bin/orrery-cc")),
        Build::Plain => Command::new(format!("clang-{}", orrery_testing::cls::version().unwrap())),
    };
    command.args(["-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]);
    command.args(["-Wl,-z,defs", "-Wl,-Bsymbolic", "-I"]).arg(ffmpeg::sources()).arg("-I").arg(built);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/instance/transcode_library.c"));
    command.args(LIBRARIES.map(|name| built.join(name).join(format!("{name}.a"))));
    run(command.args(["-lm", "-pthread", "-o"]).arg(&output));
    output
}

/// Builds a program that uses instances by the C library.
fn program(directory: &Path, name: &str) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
    let libraries = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let program = directory.join(name);
    let mut command = Command::new("cc");
    command.args(["-Wall", "-Wextra", "-Werror", "-O1", "-g", "-rdynamic", "-pthread", "-I"]);
    command.arg(sources.join("../../include")).arg(sources.join(format!("tests/instance/{name}.c")));
    command.arg(format!("-Wl,-rpath,{}", libraries.display())).arg("-L").arg(&libraries);
    run(command.args(["-lorrery", "-o"]).arg(&program));
    program
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
