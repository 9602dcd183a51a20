//! Small C programs, made by the tests, that share or are left alone.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use orrery_testing::Killed;
use serde_json::Value;
use tempfile::TempDir;

use crate::Store;
use crate::unmodified::run;

/// A directory for what is compiled.
pub(crate) struct Workshop(TempDir);

impl Workshop {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        Self(directory)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Compiles a program; `$LIB` in the options is this directory.
    pub(crate) fn program(&self, name: &str, source: &str, options: &[&str]) -> PathBuf {
        let (from, to) = (self.path(&format!("{name}.c")), self.path(name));
        fs::write(&from, source).unwrap();
        let directory = self.0.path().to_str().unwrap();
        let options = options.iter().map(|option| option.replace("$LIB", directory));
        let output =
            Command::new("cc").args(["-O1", "-w", "-o"]).arg(&to).arg(&from).args(options).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        to
    }

    /// Compiles a library, which is larger than those that are left alone when they are loaded by their paths.
    pub(crate) fn library(&self, name: &str, source: &str, options: &[&str]) -> PathBuf {
        let filler = "static const char filler_of_the_test[36864] __attribute__((used)) = {1};";
        self.small_library(name, &format!("{source}\n{filler}\n"), options)
    }

    /// Compiles a library without more.
    pub(crate) fn small_library(&self, name: &str, source: &str, options: &[&str]) -> PathBuf {
        self.program(name, source, &[&["-shared", "-fPIC"], options].concat())
    }
}

/// What all programs here begin with: `say` answers the test, `hear` waits for it.
pub(crate) const TALK: &str = "
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
static void say(int number) { printf(\"%d\\n\", number), fflush(stdout); }
static void hear(void) { char line[64]; if (!fgets(line, sizeof line, stdin)) _exit(9); }
static void *load(const char *path) {
    void *library = dlopen(path, RTLD_NOW);
    if (!library) fprintf(stderr, \"%s\\n\", dlerror()), _exit(8);
    return library;
}
";

/// A running one, which says a number whenever it has come a step further, and waits for the next.
pub(crate) struct Guest {
    child: Killed,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    said: PathBuf,
}

impl Guest {
    pub(crate) fn start(store: &Store, workshop: &Workshop, program: &Path) -> Self {
        Self::spawn(run(store, &[program.to_str().unwrap()]), workshop)
    }

    /// Starts a program with the loader's auditors that `auditors` names, given ours.
    pub(crate) fn audited(
        store: &Store,
        workshop: &Workshop,
        program: &Path,
        auditors: impl Fn(&str) -> String,
    ) -> Self {
        let mut command = Command::new(program);
        for (name, value) in variables(store, &[]) {
            let value = if name == "LD_AUDIT" { auditors(&value) } else { value };
            command.env(name, value);
        }
        Self::spawn(command, workshop)
    }

    pub(crate) fn spawn(mut command: Command, workshop: &Workshop) -> Self {
        let said = workshop.path(&format!("said.{}", fs::read_dir(workshop.path("")).unwrap().count()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&said).unwrap());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child: Killed(child), lines, said }
    }

    /// Returns the next number.
    pub(crate) fn number(&mut self) -> i64 {
        match self.lines.next() {
            Some(Ok(line)) => line.parse().unwrap(),
            end => panic!("{end:?}, {:?}: {}", self.child.0.try_wait(), self.said()),
        }
    }

    /// Lets it go on; the next number.
    pub(crate) fn go_on(&mut self) -> i64 {
        writeln!(self.child.0.stdin.as_mut().unwrap(), "go on").unwrap();
        self.number()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Returns what was said on standard error.
    pub(crate) fn said(&self) -> String {
        fs::read_to_string(&self.said).unwrap()
    }

    /// Returns the mappings that `orrery orc explain` tells of.
    pub(crate) fn explain(&self) -> Vec<Explained> {
        let pid = self.pid().to_string();
        let output =
            Command::new(env!("CARGO_BIN_EXE_orrery")).args(["orc", "explain", "--json", &pid]).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        let text = |row: &Value, key: &str| row[key].as_str().unwrap().to_owned();
        rows.iter()
            .map(|row| Explained {
                name: text(row, "name"),
                access: text(row, "access"),
                reason: text(row, "reason"),
                anonymous: row["anonymous"].as_u64().unwrap(),
            })
            .collect()
    }

    /// Returns why those mappings are as they are whose name contains `name`, and whose access is `access`.
    pub(crate) fn reasons(&self, name: &str, access: &str) -> Vec<String> {
        let rows = self.explain();
        let found: Vec<_> = rows
            .iter()
            .filter(|row| row.name.contains(name) && row.access == access)
            .map(|row| row.reason.clone())
            .collect();
        assert!(!found.is_empty(), "{name} {access}: {rows:#?}");
        found
    }

    /// Returns what `orrery orc explain` says to people.
    pub(crate) fn summary(&self) -> String {
        let pid = self.pid().to_string();
        let output = Command::new(env!("CARGO_BIN_EXE_orrery")).args(["orc", "explain", &pid]).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    }
}

/// A mapping and why it is as it is.
#[derive(Debug)]
pub(crate) struct Explained {
    pub(crate) name: String,
    pub(crate) access: String,
    pub(crate) reason: String,
    pub(crate) anonymous: u64,
}

/// Returns the variables that make a program share, as `orrery orc run --print` tells them.
pub(crate) fn variables(store: &Store, options: &[&str]) -> Vec<(String, String)> {
    let _ = store.client();
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.args(["orc", "run", "--print", "--verbose", "--directory"]).arg(store.path()).args(options);
    let output = command.env_remove("LD_AUDIT").env_remove("GLIBC_TUNABLES").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.split_once('=')).map(|(a, b)| (a.to_owned(), b.to_owned())).collect()
}
