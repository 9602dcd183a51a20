//! Programs that tests run: those of the workspace, which Cargo built, and C sources, which are compiled here.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the root of the checkout.
///
/// # Panics
/// If this crate was moved out of `crates/testing`.
#[must_use]
pub fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().unwrap_or_else(|error| panic!("cannot find the checkout {}: {error}", root.display()))
}

/// Returns the directory in which Cargo puts the programs and libraries of this build (`target/debug`, for instance).
///
/// # Panics
/// If the running test does not lie below it.
#[must_use]
pub fn target_directory() -> PathBuf {
    let test =
        std::env::current_exe().unwrap_or_else(|error| panic!("cannot find the running test: {error}"));
    let below = test.ancestors().find(|directory| directory.join(".cargo-lock").is_file());
    let directory = below.or_else(|| test.ancestors().nth(2));
    directory.unwrap_or_else(|| panic!("cannot find the build directory of {}", test.display())).to_owned()
}

/// Returns the path of a program or library of the workspace that another crate builds, such as `orrery`.
///
/// A crate's own programs are `env!("CARGO_BIN_EXE_name")`, which Cargo rebuilds before the test; those of another crate
/// it does not, so `make test` builds the workspace first.
///
/// # Panics
/// If it was not built; the message names the command that builds it.
#[must_use]
pub fn built(name: &str) -> PathBuf {
    let path = target_directory().join(name);
    assert!(
        path.is_file(),
        "cannot find {}: not built; run `cargo build --workspace{}` first",
        path.display(),
        if path.components().any(|part| part.as_os_str() == "release") { " --release" } else { "" }
    );
    path
}

/// Returns the arguments by which compilers add the sanitizers that `ORRERY_SANITIZE` names (`undefined`, `address`), which end a program
/// at its first fault; none where it is not set.
#[must_use]
pub fn sanitizers() -> Vec<String> {
    let Ok(names) = std::env::var("ORRERY_SANITIZE") else { return Vec::new() };
    vec![
        format!("-fsanitize={names}"),
        "-fno-sanitize-recover=all".to_owned(),
        "-fno-omit-frame-pointer".to_owned(),
    ]
}

/// Compiles one C or C++ program with warnings as errors.
///
/// ```no_run
/// let program = orrery_testing::Compiler::c().flag("-pthread").build(&["tests/c/guest.c"], "/tmp/guest");
/// ```
#[derive(Debug)]
pub struct Compiler {
    command: Command,
}

impl Compiler {
    /// Compiles with `cc`, for C11 with GNU extensions.
    #[must_use]
    pub fn c() -> Self {
        Self::named("cc").flag("-std=gnu11")
    }

    /// Compiles with the given compiler driver (`clang`, `c++`, `musl-gcc`).
    #[must_use]
    pub fn named(driver: &str) -> Self {
        let mut command = Command::new(driver);
        command.args(["-O1", "-g", "-Wall", "-Wextra", "-Werror"]);
        // Sanitizers need glibc.
        if !driver.starts_with("musl") {
            command.args(sanitizers());
        }
        Self { command }
    }

    /// Adds an argument before the sources; a later one overrides those of this type.
    #[must_use]
    pub fn flag(mut self, flag: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.arg(flag);
        self
    }

    /// Adds arguments before the sources.
    #[must_use]
    pub fn flags<S: AsRef<std::ffi::OsStr>>(mut self, flags: impl IntoIterator<Item = S>) -> Self {
        self.command.args(flags);
        self
    }

    /// Makes the headers of `include/` and a library of the workspace (`orrery`, `orthros`) available, and has the
    /// program find that library where Cargo built it.
    #[must_use]
    pub fn library(self, name: &str) -> Self {
        let directory = target_directory();
        let _path = built(&format!("lib{name}.so"));
        self.flag("-I")
            .flag(root().join("include"))
            .flag(format!("-L{}", directory.display()))
            .flag(format!("-Wl,-rpath,{}", directory.display()))
            // The sources come after it.
            .flag("-Wl,--no-as-needed")
            .flag(format!("-l{name}"))
    }

    /// Compiles `sources` to the program `output`, and returns its path.
    ///
    /// # Panics
    /// If the compiler fails; the message has its command line and what it printed.
    pub fn build(mut self, sources: &[impl AsRef<std::ffi::OsStr>], output: impl Into<PathBuf>) -> PathBuf {
        let output = output.into();
        self.command.args(sources).arg("-o").arg(&output);
        let result = self.command.output();
        let result = result.unwrap_or_else(|error| panic!("cannot run {:?}: {error}", self.command));
        assert!(result.status.success(), "{:?}:\n{}", self.command, String::from_utf8_lossy(&result.stderr));
        output
    }
}
