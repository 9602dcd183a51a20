//! `orrery/object.h`, used by a C program on a store that `orrery` runs.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// A store that ends with the test.
struct Store(Child);

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: a signal to a child of ours that was not waited for.
        unsafe { libc::kill(i32::try_from(self.0.id()).unwrap(), libc::SIGTERM) };
        let _ = self.0.wait();
    }
}

impl Store {
    /// Starts a store in `directory`, and returns when it accepts connections.
    fn start(orrery: &Path, directory: &Path) -> Self {
        let store =
            Self(Command::new(orrery).args(["orc", "serve", "--directory"]).arg(directory).spawn().unwrap());
        orrery_testing::eventually("the store accepts connections", || {
            orrery_orc_client::Client::connect_to(directory).is_ok()
        });
        store
    }
}

fn beside_this_test() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_path_buf()
}

#[test]
fn equal_files_are_one_object_in_python() {
    python("models.py");
}

#[test]
fn equal_heap_data_are_one_object_in_python() {
    python("heap.py");
}

/// Runs a script on a store of its own.
fn python(script: &str) {
    const PYTHON: &str = "/usr/bin/python3";
    let libraries = beside_this_test();
    let orrery = libraries.parent().unwrap().join("orrery");
    if !orrery.exists() || !Path::new(PYTHON).exists() {
        orrery_testing::skipped!("{} was not built, or there is no {PYTHON}", orrery.display());
        return;
    }
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("store");
    let _store = Store::start(&orrery, &directory);
    let run = Command::new("timeout")
        .args(["60", PYTHON])
        .arg(package.join("tests/orc").join(script))
        .arg(folder.path())
        .env("ORRERY_ORC", &directory)
        .env("ORRERY_LIBRARY", libraries.join("liborrery.so"))
        .env("PYTHONPATH", package.join("../../integrations/python"))
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

#[test]
fn a_c_program_shares() {
    a_program_shares("program.c");
}

#[test]
fn a_program_shares_by_the_papers_names() {
    a_program_shares("compat.c");
}

/// Compiles a program with each compiler, and runs it with a store of its own.
fn a_program_shares(source: &str) {
    let libraries = beside_this_test();
    let orrery = libraries.parent().unwrap().join("orrery");
    if !orrery.exists() {
        orrery_testing::skipped!("{} was not built; `make test` builds it", orrery.display());
        return;
    }
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    for compiler in ["gcc", "g++", "clang"] {
        // What one program registered, the next one must not find.
        let directory = folder.path().join(compiler);
        let _store = Store::start(&orrery, &directory);
        let binary = folder.path().join("program");
        let mut command = Command::new(compiler);
        command.args(["-Wall", "-Wextra", "-Werror", "-g", "-O1", "-D_GNU_SOURCE"]);
        if compiler == "g++" {
            command.args(["-x", "c++"]);
        }
        command.arg("-I").arg(package.join("../../include")).arg(package.join("tests/orc").join(source));
        command.arg("-o").arg(&binary).arg(format!("-Wl,-rpath,{}", libraries.display()));
        command.arg("-L").arg(&libraries).arg("-lorrery");
        match command.output() {
            Err(_) => orrery_testing::skipped!("there is no {compiler} here"),
            Ok(output) => {
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                let run = Command::new("timeout").arg("60").arg(&binary).arg(&directory).output().unwrap();
                assert!(run.status.success(), "{compiler}: {}", String::from_utf8_lossy(&run.stderr));
            }
        }
    }
}
