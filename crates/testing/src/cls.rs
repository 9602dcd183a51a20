//! Libraries that tests build with the compiler pass of `passes/cls`, and the sources of known ones.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::build::{root, target_directory};

/// The versions of LLVM that the pass is for.
const LLVM: [u32; 6] = [14, 15, 16, 17, 18, 19];

/// Chooses [`Build::of_instances`].
pub const BASE: &str = "ORRERY_TEST_CLS_BASE";

/// How a library is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    /// By clang, without instances.
    Plain,
    /// With the pass: instances are found by the thread-local word.
    Word,
    /// With the pass: instances are found by GS (`ORRERY_CLS_BASE=gs`).
    Gs,
}

impl Build {
    /// Returns how tests build libraries that have instances: `ORRERY_TEST_CLS_BASE=gs` chooses.
    #[must_use]
    pub fn of_instances() -> Self {
        let is_gs = std::env::var_os(BASE).is_some_and(|base| base == "gs");
        if is_gs { Self::Gs } else { Self::Word }
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Word => "cls",
            Self::Gs => "cls-gs",
        }
    }
}

/// Returns the version of LLVM that tests build the pass for: the oldest that is here with its headers and its clang.
#[must_use]
pub fn version() -> Option<u32> {
    let there = |version: &u32| {
        Path::new(&format!("/usr/lib/llvm-{version}/include/llvm/IR/Module.h")).exists()
            && Path::new(&format!("/usr/bin/clang-{version}")).exists()
    };
    LLVM.into_iter().find(there)
}

/// Builds the pass, if need be, and returns the directory with `bin/orrery-cc`; says that the test is skipped where there is
/// no LLVM that it is for.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn pass() -> Option<PathBuf> {
    let Some(version) = version() else {
        crate::skipped!("there is no clang of 14 to 19 with LLVM's headers");
        return None;
    };
    let directory = target_directory().join("cls");
    let _alone = lock(&directory);
    run(Command::new("make")
        .args(["-s", "-C"])
        .arg(root().join("passes/cls"))
        .arg(format!("LLVM={version}"))
        .arg(format!("BUILD={}", directory.display())));
    Some(directory)
}

/// Held while one process builds; others wait.
pub(crate) fn lock(directory: &Path) -> File {
    let made = std::fs::create_dir_all(directory).and_then(|()| File::create(directory.join("lock")));
    let file = made.unwrap_or_else(|error| panic!("cannot create {}: {error}", directory.display()));
    file.lock().unwrap_or_else(|error| panic!("cannot lock {}: {error}", directory.display()));
    file
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
}

/// Builds a shared library, unless that was done; returns its path.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn library(name: &str, sources: &[PathBuf], flags: &[&str], build: Build) -> Option<PathBuf> {
    let pass = pass()?;
    let driver = if sources.iter().any(|source| source.extension().is_some_and(|end| end == "cc")) {
        pass.join("bin/orrery-c++")
    } else {
        pass.join("bin/orrery-cc")
    };
    let _alone = lock(&pass);
    let output = pass.join(format!("lib{name}.so"));
    let mut command = if build == Build::Plain { Command::new("clang") } else { Command::new(driver) };
    if build == Build::Gs {
        command.env("ORRERY_CLS_BASE", "gs");
    }
    command.args(["-fPIC", "-shared"]).args(flags).args(sources).arg("-o").arg(&output);
    let line = format!("{command:?}");
    let record = output.with_extension("command");
    let age = |path: &Path| std::fs::metadata(path).and_then(|file| file.modified()).ok();
    let parts = std::fs::read_dir(pass.join("lib")).into_iter().flatten().flatten().map(|entry| entry.path());
    let newest = parts.chain(sources.iter().cloned()).filter_map(|path| age(&path)).max();
    if age(&output) < newest || std::fs::read_to_string(&record).ok().as_ref() != Some(&line) {
        run(&mut command);
        std::fs::write(&record, line)
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", record.display()));
    }
    Some(output)
}

/// Returns the directory of a package that Cargo.lock names, whose sources tests build.
///
/// # Panics
/// If Cargo does not know it.
#[must_use]
pub fn package_directory(name: &str) -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["metadata", "--format-version=1", "--locked", "--manifest-path"])
        .arg(root().join("Cargo.toml"));
    let output = command.output().unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout);
    // "manifest_path":"/.../NAME-VERSION/Cargo.toml": this crate reads no JSON otherwise.
    let found = text.split('"').find(|part| {
        part.ends_with("/Cargo.toml")
            && part.rsplit('/').nth(1).and_then(|directory| directory.strip_prefix(name)).is_some_and(
                |rest| {
                    rest.strip_prefix('-')
                        .is_some_and(|version| version.starts_with(|c: char| c.is_ascii_digit()))
                },
            )
    });
    let found = found.unwrap_or_else(|| panic!("{command:?} names no {name}"));
    Path::new(found).parent().map(Path::to_owned).unwrap_or_default()
}

/// Returns SQLite as one library, by one of the builds.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn sqlite(level: &str, build: Build) -> Option<PathBuf> {
    let directory = package_directory("libsqlite3-sys").join("sqlite3");
    let include = format!("-I{}", directory.display());
    let flags = [level, "-w", "-DSQLITE_THREADSAFE=0", "-DSQLITE_OMIT_LOAD_EXTENSION", &include];
    library(&named("sqlite", level, build), &[directory.join("sqlite3.c")], &flags, build)
}

fn named(library: &str, level: &str, build: Build) -> String {
    format!("{library}{}-{}", level.trim_start_matches('-'), build.suffix())
}

/// Returns Lua 5.4 as one library, by one of the builds. Its tables have the same order in each run.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn lua(level: &str, build: Build) -> Option<PathBuf> {
    let parent = package_directory("lua-src");
    let directory = entries(&parent)
        .into_iter()
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("lua-5.4")))
        .unwrap_or_else(|| panic!("{} has no Lua 5.4", parent.display()));
    // It seeds its hashes with an address, if nothing else is given.
    let flags = [level, "-w", "-DLUA_USE_POSIX", "-Dluai_makeseed(L)=1", "-lm"];
    library(&named("lua", level, build), &units(&directory), &flags, build)
}

/// Returns zlib as one library, by one of the builds.
///
/// # Panics
/// If it cannot be built.
#[must_use]
pub fn zlib(level: &str, build: Build) -> Option<PathBuf> {
    let directory = package_directory("libz-sys").join("src/zlib");
    let flags = [level, "-w", "-DHAVE_UNISTD_H", "-D_LARGEFILE64_SOURCE=1"];
    library(&named("zlib", level, build), &units(&directory), &flags, build)
}

/// Returns the C sources of a directory.
fn units(directory: &Path) -> Vec<PathBuf> {
    let mut units = entries(directory);
    units.retain(|path| path.extension().is_some_and(|end| end == "c"));
    units
}

/// Returns what a directory has, by name.
fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory)
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", directory.display()));
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}
