//! The Python package of integrations/python: it installs without a network, has types, and passes its own tests under the
//! system's Python and every newer one; those of its interpreters with an extension that is built by the compiler pass.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const SYSTEM: &str = "/usr/bin/python3";

fn package() -> PathBuf {
    orrery_testing::root().join("integrations/python")
}

fn output(command: &mut Command) -> (bool, String) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

fn has(interpreter: &Path, module: &str) -> bool {
    Command::new(interpreter)
        .args(["-c", &format!("import {module}")])
        .output()
        .is_ok_and(|run| run.status.success())
}

/// Returns the system's Python, and those of 3.12 and later in `PATH` and where pyenv has them.
fn interpreters() -> Vec<PathBuf> {
    let mut directories: Vec<PathBuf> =
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    let pyenv = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
    let pyenv = pyenv.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".pyenv")));
    if let Some(versions) = pyenv.and_then(|root| fs::read_dir(root.join("versions")).ok()) {
        directories.extend(versions.flatten().map(|version| version.path().join("bin")));
    }
    let mut found = vec![PathBuf::from(SYSTEM)];
    for minor in 12..20 {
        // One of each version, and no program that only chooses another.
        let program = directories.iter().map(|directory| directory.join(format!("python3.{minor}")));
        found.extend(program.filter(|path| has(path, "sys")).take(1));
    }
    found
}

/// Installs the package as `pip install` does, from a copy, in which the build leaves files.
fn install(directory: &Path) -> PathBuf {
    let (source, target) = (directory.join("source"), directory.join("site"));
    let (copied, said) = output(Command::new("cp").arg("-R").arg(package()).arg(&source));
    assert!(copied, "{said}");
    let mut pip = Command::new(SYSTEM);
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-build-isolation",
        "--no-deps",
        "--target",
    ]);
    let (installed, said) = output(pip.arg(&target).arg(&source));
    assert!(installed, "{said}");
    target
}

#[test]
fn it_passes_its_tests_where_pip_installs_it() {
    if !["pip", "setuptools", "wheel"].iter().all(|module| has(Path::new(SYSTEM), module)) {
        orrery_testing::skipped!("{SYSTEM} lacks pip, setuptools or wheel");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let site = install(directory.path());
    for file in ["orrery/__init__.py", "orrery/py.typed", "orrery_orc.py"] {
        assert!(site.join(file).is_file(), "{file} is not installed");
    }
    let version = fs::read_dir(&site).unwrap().flatten().map(|entry| entry.file_name());
    let versions: BTreeSet<_> =
        version.filter(|name| name.to_string_lossy().ends_with(".dist-info")).collect();
    assert_eq!(versions, [format!("orrery-{}.dist-info", env!("CARGO_PKG_VERSION")).into()].into());

    let program = orrery_testing::Compiler::c().library("orrery").build(
        &[Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/counter.c")],
        directory.path().join("counter"),
    );
    let _ = orrery_testing::built("orrery-warm-python");
    let running: Vec<_> = interpreters()
        .into_iter()
        .map(|interpreter| {
            let mut tests = Command::new(&interpreter);
            tests.args(["-W", "error", "-m", "unittest", "discover", "-s"]).arg(package().join("tests"));
            tests
                .env("PYTHONPATH", &site)
                .env("PYTHONDONTWRITEBYTECODE", "1")
                .env("ORRERY_PROGRAM_WITH_ORBIT", &program);
            tests.env("ORRERY", env!("CARGO_BIN_EXE_orrery"));
            tests.env("ORRERY_LIBRARY", orrery_testing::built("liborrery.so"));
            tests.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
            (interpreter, tests.spawn().unwrap())
        })
        .collect();
    for (interpreter, tests) in running {
        let done = tests.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{}: {said}", interpreter.display());
        // What is skipped would be counted behind it.
        assert!(said.trim_end().ends_with("\nOK"), "{}: {said}", interpreter.display());
    }
}

/// Builds the extension of the package's own tests for an interpreter, as modules of several names, with the pass and without.
fn extensions(interpreter: &Path, pass: &Path, directory: &Path) -> bool {
    let include = Command::new(interpreter)
        .args(["-c", "import sysconfig; print(sysconfig.get_path('include'), end='')"])
        .output()
        .unwrap();
    let include = String::from_utf8(include.stdout).unwrap();
    if !Path::new(&include).join("Python.h").exists() {
        orrery_testing::skipped!("{} has no headers", interpreter.display());
        return false;
    }
    let source = package().join("tests/interpreters/counter.c");
    for (compiler, place) in [(pass.join("bin/orrery-cc"), "."), ("cc".into(), "plain")] {
        let place = directory.join(place);
        fs::create_dir_all(&place).unwrap();
        let mut compile = Command::new(compiler);
        compile.args(["-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-I", &include]);
        let (built, said) = output(compile.arg(&source).arg("-o").arg(place.join("counter.so")));
        assert!(built, "{said}");
    }
    let counter = directory.join("counter.so");
    fs::create_dir(directory.join("packaged")).unwrap();
    fs::write(directory.join("packaged/__init__.py"), "").unwrap();
    fs::hard_link(&counter, directory.join("second.so")).unwrap();
    for copy in ["phases.so", "packaged/counter.so"] {
        fs::copy(&counter, directory.join(copy)).unwrap();
    }
    fs::write(directory.join("broken.so"), b"\x7fELF\0orrery_cls_descriptor\0").unwrap();
    true
}

#[test]
fn extensions_have_a_state_in_each_interpreter() {
    let Some(pass) = orrery_testing::cls::pass() else { return };
    for interpreter in interpreters() {
        let directory = tempfile::tempdir().unwrap();
        if !extensions(&interpreter, &pass, directory.path()) {
            continue;
        }
        let mut tests = Command::new(&interpreter);
        tests.args(["-W", "error", "-m", "unittest", "discover", "-s"]);
        tests.arg(package().join("tests/interpreters"));
        tests
            .env("PYTHONPATH", package())
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("ORRERY_EXTENSIONS", directory.path())
            .env("ORRERY_LIBRARY", orrery_testing::built("liborrery.so"));
        let (passed, said) = output(&mut tests);
        assert!(passed && said.trim_end().ends_with("\nOK"), "{}: {said}", interpreter.display());
    }
}

#[test]
fn its_plug_in_for_pytest_passes_its_tests() {
    if !["pip", "setuptools", "wheel"].iter().all(|module| has(Path::new(SYSTEM), module)) {
        orrery_testing::skipped!("{SYSTEM} lacks pip, setuptools or wheel");
        return;
    }
    let (with, without): (Vec<_>, Vec<_>) =
        interpreters().into_iter().partition(|interpreter| has(interpreter, "pytest"));
    for interpreter in &without {
        orrery_testing::skipped!("{} lacks pytest", interpreter.display());
    }
    let directory = tempfile::tempdir().unwrap();
    let site = install(directory.path());
    let library = orrery_testing::built("liborrery.so");
    for interpreter in with {
        let mut tests = Command::new(&interpreter);
        tests
            .args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"])
            .arg(package().join("tests/plugin"));
        tests
            .arg(format!("--basetemp={}", directory.path().join("base").display()))
            .env("PYTHONPATH", &site)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("ORRERY_LIBRARY", &library)
            .current_dir(directory.path());
        let (passed, said) = output(&mut tests);
        assert!(passed, "{}: {said}", interpreter.display());
        // What needs xdist, pytest-cov, pytest-forked or pexpect where those are absent.
        for line in said.lines().filter(|line| line.starts_with("SKIPPED")) {
            orrery_testing::skipped!("{}: {line}", interpreter.display());
        }
    }
}

#[test]
fn its_types_are_strict() {
    if !orrery_testing::is_there("mypy") {
        orrery_testing::skipped!("mypy is not installed");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let user = directory.path().join("user.py");
    // Who uses it has types, too.
    let text = "import orrery\nreveal_type(orrery.guard.run(['true'], profile='python').refusals)\n\
                reveal_type(orrery.rollback.call(len, []))\norrery.objects.hash('text')\n";
    fs::write(&user, text).unwrap();
    let mypy = |arguments: &[&str]| {
        let mut mypy = Command::new("mypy");
        mypy.args(["--python-executable", SYSTEM, "--cache-dir"])
            .arg(directory.path().join("cache"))
            .args(arguments);
        output(mypy.current_dir(package()))
    };
    let (clean, said) = mypy(&[]);
    assert!(clean, "{said}");
    let (clean, said) = mypy(&["--strict", user.to_str().unwrap()]);
    assert!(!clean, "{said}");
    for part in [
        "Sequence[orrery.guard.Refusal]",
        "\"builtins.int\"",
        "incompatible type \"str\"; expected \"bytes\"",
        "Found 1 error",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
}
