//! The C interface, used by programs in C and C++.
//!
//! Each file in `tests/c` is a program that tries one behaviour and exits with 0 if it is as promised. It is built by
//! either compiler, with and without optimisation, against the shared and the static library, and run under each tracker.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use libtest_mimic::{Arguments, Failed, Trial};
use tempfile::TempDir;

const TRACKERS: [&str; 2] = ["wp_async", "compare"];

/// One way to build a program. Together they have each compiler, level and library with each other one.
#[derive(Clone, Copy)]
struct Build {
    compiler: Compiler,
    level: &'static str,
    library: Library,
}

#[derive(Clone, Copy)]
enum Compiler {
    Gcc,
    Clang,
}

#[derive(Clone, Copy)]
enum Library {
    Shared,
    Static,
}

const BUILDS: [Build; 4] = [
    Build { compiler: Compiler::Gcc, level: "-O2", library: Library::Shared },
    Build { compiler: Compiler::Gcc, level: "-O0", library: Library::Static },
    Build { compiler: Compiler::Clang, level: "-O2", library: Library::Static },
    Build { compiler: Compiler::Clang, level: "-O0", library: Library::Shared },
];

const C: [&str; 1] = ["c99"];
const CPP: [&str; 4] = ["c++98", "c++11", "c++17", "c++20"];

/// The examples, what they are given, and what they make of it: each request meets the same state, each session its own,
/// and the sums are FNV-1a of "the private key" and the line.
const EXAMPLES: [(&str, &str, &str); 5] = [
    (
        "algorithm1_snapshot.c",
        "one\ntwo\nthree and more\n",
        "request 1: ONE (3 bytes, 1 request served by this state)\n\
         request 2: TWO (3 bytes, 1 request served by this state)\n\
         request 3: THREE AND MORE (14 bytes, 1 request served by this state)\n\
         3 requests, the last one's secrets gone\n",
    ),
    (
        "algorithm1_contexts.c",
        "one\ntwo\nthree and more\n",
        "ONE, served by a state that served 1 request\n\
         TWO, served by a state that served 1 request\n\
         THREE AND MORE, served by a state that served 1 request\n\
         end\n",
    ),
    (
        "algorithm2_sessions.c",
        "a red\nb green\na blue\nb\nc\na end\na new\n",
        "a: red\nb: green\na: red blue\nb: green\nc:\na: red blue (ended)\na: new\n",
    ),
    (
        "algorithm3_signing.c",
        "first\nsecond\n",
        "first: 5f44482a\nsecond: 956b5c00\nthe key is out of reach\n",
    ),
    (
        "algorithm4_monitor.c",
        "/proc/version\n/etc/passwd\n/dev/null\n/proc/self/../version\n",
        "/proc/version: open\n/etc/passwd: Operation not permitted\n/dev/null: open\n\
         /proc/self/../version: Operation not permitted\n",
    ),
];

fn main() {
    let arguments = Arguments::from_args();
    let mut trials: Vec<Trial> = programs()
        .into_iter()
        .flat_map(|source| BUILDS.map(|build| (source.clone(), build)))
        .map(|(source, build)| {
            Trial::test(title(&source, build), move || {
                build.try_program(&source, |binary, tracker| run(binary, tracker, "").map(|_| ()))
            })
        })
        .collect();
    for (name, input, output) in EXAMPLES {
        trials.extend(BUILDS.map(|build| {
            let source = root().join("examples/lwc").join(name);
            Trial::test(title(&source, build), move || {
                build.try_program(&source, |binary, tracker| prints(binary, tracker, input, output))
            })
        }));
    }
    for compiler in [Compiler::Gcc, Compiler::Clang] {
        let languages = [("c", &C[..]), ("c++", &CPP[..])];
        for (language, standard) in
            languages.iter().flat_map(|(language, standards)| standards.iter().map(move |s| (*language, *s)))
        {
            for header in [
                "orrery/orrery.h",
                "orrery/error.h",
                "orrery/failover.h",
                "orrery/hijack.h",
                "orrery/rollback.h",
                "orrery/context.h",
                "orrery/session.h",
                "orrery/vault.h",
                "orrery/orbit.h",
                "orrery/object.h",
                "orrery/instance.h",
                "orrery/compat/lwc.h",
                "orrery/compat/orbit.h",
                "orrery/compat/orc.h",
                "orrery/compat/orbit/orbit.h",
            ] {
                let name = format!("{header}/{}/{standard}", compiler.of_c());
                trials
                    .push(Trial::test(name, move || compiler.check_header(header, language, standard, &[])));
                if language == "c++" {
                    let name = format!("{header}/{}/{standard}/without_exceptions", compiler.of_c());
                    let flags = &["-fno-exceptions", "-fno-rtti"];
                    trials.push(Trial::test(name, move || {
                        compiler.check_header(header, language, standard, flags)
                    }));
                }
            }
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}

fn title(source: &Path, build: Build) -> String {
    let library = match build.library {
        Library::Shared => "so",
        Library::Static => "a",
    };
    let name = source.file_name().unwrap().to_string_lossy();
    format!("{name}/{}{}/{library}", build.compiler.of_c(), build.level)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Returns the flags that a source names in its first comment, behind "Built with:".
fn own_flags(source: &Path) -> std::io::Result<Vec<String>> {
    let text = std::fs::read_to_string(source)?;
    let flags = text.lines().find_map(|line| line.strip_prefix(" * Built with: ")).unwrap_or_default();
    Ok(flags.split_whitespace().map(str::to_owned).collect())
}

/// Every source in `tests/c`.
fn programs() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
    let mut sources: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "c" || extension == "cc"))
        .collect();
    sources.sort();
    assert!(!sources.is_empty());
    sources
}

/// Returns where Cargo put the library that it built together with this test: beside it.
fn library_folder() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_path_buf()
}

impl Compiler {
    fn of_c(self) -> &'static str {
        match self {
            Self::Gcc => "gcc",
            Self::Clang => "clang",
        }
    }

    fn of(self, source: &Path) -> &'static str {
        match (self, source.extension().is_some_and(|extension| extension == "cc")) {
            (_, false) => self.of_c(),
            (Self::Gcc, true) => "g++",
            (Self::Clang, true) => "clang++",
        }
    }

    /// Returns whether it is there; says so if not.
    fn is_there(self) -> bool {
        let there = Command::new(self.of_c()).arg("--version").stdout(Stdio::null()).status().is_ok();
        if !there {
            orrery_testing::skipped!("there is no {} here", self.of_c());
        }
        there
    }

    fn check_header(
        self,
        header: &str,
        language: &str,
        standard: &str,
        flags: &[&str],
    ) -> Result<(), Failed> {
        if !self.is_there() {
            return Ok(());
        }
        let mut command = Command::new(self.of_c());
        command.args(["-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", language]).args(flags);
        // The types that the authors of orbits chose are no strict C: structures without names, arrays without ends.
        let strict = header != "orrery/compat/orbit/orbit.h";
        let standard = if strict { standard.to_owned() } else { standard.replacen('c', "gnu", 1) };
        if strict {
            command.arg("-pedantic");
        }
        // C++98 had no <stdint.h> of its own, nor long long; compilers have.
        if standard == "c++98" {
            command.arg("-Wno-long-long");
        }
        command.arg(format!("-std={standard}")).arg("-I").arg(root().join("include")).arg("-");
        finish(&mut command, &format!("#include <{header}>\n")).map(|_| ())
    }
}

impl Build {
    fn try_program(
        self,
        source: &Path,
        attempt: impl Fn(&Path, &str) -> Result<(), Failed>,
    ) -> Result<(), Failed> {
        if !self.compiler.is_there() {
            return Ok(());
        }
        let folder = TempDir::new()?;
        let binary = folder.path().join("program");
        let libraries = library_folder();
        let mut command = Command::new(self.compiler.of(source));
        command.args(["-Wall", "-Wextra", "-Werror", "-g", self.level, "-D_GNU_SOURCE"]);
        command.args(orrery_testing::sanitizers());
        if source.extension().is_some_and(|extension| extension == "c") {
            command.arg("-std=c11");
        }
        command.args(own_flags(source)?);
        command
            .arg("-I")
            .arg(root().join("include"))
            .arg("-I")
            .arg(root().join("include/orrery/compat"))
            .arg(source)
            .arg("-o")
            .arg(&binary);
        match self.library {
            Library::Shared => {
                command.arg(format!("-Wl,-rpath,{}", libraries.display())).arg("-L").arg(&libraries);
                command.arg("-lorrery");
            }
            Library::Static => {
                command.arg(libraries.join("liborrery.a"));
            }
        }
        // What rustc --print native-static-libs names.
        finish(command.args(["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"]), "")?;
        TRACKERS.iter().try_for_each(|tracker| attempt(&binary, tracker))
    }
}

fn run(binary: &Path, tracker: &str, input: &str) -> Result<String, Failed> {
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "60"]).arg(binary).env("ORRERY_TRACKER", tracker);
    match finish(&mut command, input) {
        Err(failed)
            if failed.message().is_some_and(|text| text.contains("tracker wp_async does not work")) =>
        {
            orrery_testing::skipped!(
                "{}/{tracker}: {}",
                binary.display(),
                failed.message().unwrap_or_default()
            );
            Ok(String::new())
        }
        other => other
            .map_err(|failed| format!("under {tracker}: {}", failed.message().unwrap_or_default()).into()),
    }
}

/// Runs it; gives what it printed, or everything there is to know about how it failed.
fn finish(command: &mut Command, input: &str) -> Result<String, Failed> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    // It may end without having read.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output()?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(stdout);
    }
    Err(format!("{command:?}: {}\n{stdout}{}", output.status, String::from_utf8_lossy(&output.stderr)).into())
}

/// Returns an example prints what it should.
fn prints(binary: &Path, tracker: &str, input: &str, wanted: &str) -> Result<(), Failed> {
    let printed = run(binary, tracker, input)?;
    if printed.is_empty() || printed == wanted {
        return Ok(());
    }
    Err(format!("it printed\n{printed}instead of\n{wanted}").into())
}
