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

/// The example in Go: two equal files are one object, and an error names its cause.
#[test]
fn a_go_program_shares() {
    let libraries = beside_this_test();
    let orrery = libraries.parent().unwrap().join("orrery");
    if !orrery.exists() || !orrery_testing::is_there("go") {
        orrery_testing::skipped!("{} was not built, or there is no go", orrery.display());
        return;
    }
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let place = tempfile::tempdir().unwrap();
    // As `make install` writes it.
    let description = format!(
        "Name: orrery\nDescription: Orrery\nVersion: 0\nCflags: -I{}\nLibs: -L{1} -Wl,-rpath,{1} -lorrery\n",
        package.join("../../include").canonicalize().unwrap().display(),
        libraries.display(),
    );
    std::fs::write(place.path().join("orrery.pc"), description).unwrap();
    let binary = place.path().join("words");
    let mut build = Command::new("go");
    build.args(["build", "-o"]).arg(&binary).arg(".").current_dir(package.join("../../examples/go"));
    // Nothing is downloaded: the example has no dependencies.
    build.env("PKG_CONFIG_PATH", place.path()).env("GOFLAGS", "-mod=mod").env("GOPROXY", "off");
    build.env("GOCACHE", place.path().join("cache")).env("GOTOOLCHAIN", "local");
    let built = build.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let lines = [("one", 100_000), ("two", 100_000), ("three", 100_001)];
    let files = lines.map(|(name, lines)| {
        let file = place.path().join(name);
        std::fs::write(&file, "a line\n".repeat(lines)).unwrap();
        file
    });
    let directory = place.path().join("store");
    let run = |file: &Path| {
        let mut words = Command::new("timeout");
        words.arg("60").arg(&binary).arg(file).env("ORRERY_ORC", &directory).output().unwrap()
    };
    let refused = run(&files[0]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && message.starts_with("words: cannot share "), "{message}");
    let _store = Store::start(&orrery, &directory);
    let printed = files.each_ref().map(|file| {
        let output = run(file);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    });
    let (counted, name) = printed[0].trim().rsplit_once(' ').unwrap();
    assert_eq!((counted, name.len()), ("100000 lines, object", 64));
    assert_eq!(printed[1], printed[0]);
    assert!(printed[2].starts_with("100001 lines, object ") && !printed[2].contains(name));
}
