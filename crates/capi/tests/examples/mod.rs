//! Building the C programs in `examples`, and talking to them.

#![allow(dead_code, unreachable_pub, reason = "every test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on has failed")]

pub mod resp;
pub mod server;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The longest that a test waits for something to happen.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub const COMPILERS: [&str; 2] = ["gcc", "clang"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Returns where Cargo put the library that it built together with this test: beside it.
fn library_folder() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_path_buf()
}

/// Returns whether a program is there; says so if not.
pub fn is_there(program: &str) -> bool {
    let there =
        Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !there {
        orrery_testing::skipped!("there is no {program} here");
    }
    there
}

/// The example, built by this compiler; `None` where that is not there. Built once for all tests of this process.
pub fn build(example: &str, compiler: &str) -> Option<PathBuf> {
    type Built = HashMap<(String, String), Option<PathBuf>>;
    static BUILT: OnceLock<Mutex<Built>> = OnceLock::new();
    let mut built = BUILT.get_or_init(Mutex::default).lock().unwrap();
    built
        .entry((example.to_owned(), compiler.to_owned()))
        .or_insert_with(|| is_there(compiler).then(|| compile(example, compiler)))
        .clone()
}

fn compile(example: &str, compiler: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let binary = folder.join(format!("{example}-{compiler}"));
    let unfinished = folder.join(format!("{example}-{compiler}.{}", std::process::id()));
    let mut sources: Vec<PathBuf> = std::fs::read_dir(root().join("examples").join(example))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "c"))
        .collect();
    sources.sort();
    let libraries = library_folder();
    let output = Command::new(compiler)
        .args(["-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"])
        .arg(root().join("include"))
        .args(sources)
        .arg("-o")
        .arg(&unfinished)
        .arg(format!("-Wl,-rpath,{}", libraries.display()))
        .arg("-L")
        .arg(&libraries)
        .arg("-lorrery")
        .output()
        .unwrap();
    assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&unfinished, &binary).unwrap();
    binary
}

/// Waits until `ready` gives something.
pub fn until<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = ready() {
            return found;
        }
        assert!(begin.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
