//! ffmpeg's libavcodec, built by `orrery-cc` from the sources of Debian's package: films in instances.
//!
//! With `ORRERY_WHOLE` (`make soak`): it takes minutes to build.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::path::{Path, PathBuf};
use std::process::Command;

use orrery_testing::ffmpeg::{self, Build};

/// Static libraries that what is linked with libavcodec and libswscale needs.
const LIBRARIES: [&str; 4] = ["libavformat", "libavcodec", "libswscale", "libavutil"];
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
