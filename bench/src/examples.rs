//! The scripts of `examples/warm`: useful, ordinary ones, each in a directory of its own, and hostile ones.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::machine;
use crate::script::Script;

/// Modules that are imported before any script runs, by every way that can do so: those that the examples import and
/// that a user might name.
pub const MODULES: [&str; 16] = [
    "argparse",
    "collections",
    "configparser",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "email.utils",
    "hashlib",
    "html.parser",
    "json",
    "re",
    "sqlite3",
    "statistics",
    "subprocess",
    "xml.etree.ElementTree",
];

/// Returns a script that prints one line.
pub fn hello() -> Script {
    let path = machine::source_root().join("bench/scripts/hello.py");
    let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
    Script { path, arguments: Vec::new(), input: "/dev/null".into(), directory }
}

/// Returns all ordinary scripts, by name.
pub fn ordinary() -> Result<Vec<(String, Script)>> {
    let mut scripts = Vec::new();
    for directory in entries(&directory())? {
        let name = name(&directory);
        let path = directory.join(format!("{name}.py"));
        if path.is_file() {
            let arguments = fs::read_to_string(directory.join("ARGUMENTS")).unwrap_or_default();
            let arguments = arguments.split_whitespace().map(Into::into).collect();
            let input = Some(directory.join("STDIN")).filter(|input| input.is_file());
            let input = input.unwrap_or_else(|| "/dev/null".into());
            scripts.push((name, Script { path, arguments, input, directory }));
        }
    }
    ensure!(!scripts.is_empty(), "there are no scripts in {}", directory().display());
    Ok(scripts)
}

/// Returns the ordinary script `name`.
pub fn of_name(name: &str) -> Result<Script> {
    let found = ordinary()?.into_iter().find(|(other, _)| other == name);
    found.map(|(_, script)| script).with_context(|| format!("there is no example {name:?}"))
}

/// A hostile script, with the expectations in its first lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hostile {
    /// The name of the C program.
    pub name: String,
    /// The script, to be run in a directory where it may leave things.
    pub script: Script,
    /// How it must end: `exit N`, `signal NAME`, `crash`, `timeout` or `anything`.
    pub expected: String,
    /// Whether it may kill the worker.
    pub may_kill_worker: bool,
}

/// Returns whether a status, negative for a signal, is the expected one.
pub fn is_expected(expected: &str, status: i32) -> bool {
    let signal = |name: &str| match name {
        "ABRT" => libc::SIGABRT,
        "BUS" => libc::SIGBUS,
        "ILL" => libc::SIGILL,
        "INT" => libc::SIGINT,
        "KILL" => libc::SIGKILL,
        "SEGV" => libc::SIGSEGV,
        "TERM" => libc::SIGTERM,
        _ => 0,
    };
    match expected.split_once(' ') {
        Some(("exit", number)) => number.parse() == Ok(status),
        Some(("signal", name)) => status < 0 && status == -signal(name),
        _ => match expected {
            "anything" => true,
            "crash" => ["ABRT", "BUS", "ILL", "SEGV"].iter().any(|name| status == -signal(name)),
            "timeout" => status == 124,
            _ => false,
        },
    }
}

/// Returns all hostile scripts.
pub fn hostile(scratch: &Path) -> Result<Vec<Hostile>> {
    let mut all = Vec::new();
    for path in entries(&directory().join("hostile"))? {
        let name = name(&path);
        if path.extension().is_some_and(|extension| extension == "py") && !name.starts_with('_') {
            let text =
                fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let expected = text.strip_prefix("# expect: ").and_then(|rest| rest.lines().next());
            let expected = expected.with_context(|| format!("{name} has no line \"# expect: \""))?.to_owned();
            let may_kill_worker = text.lines().nth(1).is_some_and(|line| line.starts_with("# worker: "));
            all.push(Hostile { name, script: alone(path, scratch), expected, may_kill_worker });
        }
    }
    Ok(all)
}

/// Returns a script that describes the process it runs in; with `portable`, nothing that differs from one worker to
/// another.
pub fn probe(portable: bool) -> Script {
    let mut probe = alone(directory().join("hostile/_pristine.py"), Path::new("/"));
    probe.arguments.extend(portable.then(|| "--portable".into()));
    probe
}

fn alone(path: PathBuf, directory: &Path) -> Script {
    Script { path, arguments: Vec::new(), input: "/dev/null".into(), directory: directory.to_owned() }
}

fn directory() -> PathBuf {
    machine::source_root().join("examples/warm")
}

/// Returns the entries of `directory`, sorted.
fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let reading = || format!("reading {}", directory.display());
    let mut entries = fs::read_dir(directory)
        .with_context(reading)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<Vec<_>, _>>()
        .with_context(reading)?;
    entries.sort();
    Ok(entries)
}

fn name(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_examples_are_found() {
        let ordinary = ordinary().unwrap();
        assert!(ordinary.len() >= 24, "{}", ordinary.len());
        let (_, columns) = ordinary.iter().find(|(name, _)| name == "columns").unwrap();
        assert!(columns.input.ends_with("columns/STDIN") && columns.arguments.len() > 3);
        let hostile = hostile(Path::new("/tmp")).unwrap();
        assert!(hostile.len() >= 40, "{}", hostile.len());
        assert!(hostile.iter().any(|hostile| hostile.may_kill_worker));
        assert!(probe(true).path.is_file() && hello().path.is_file());
        assert!(of_name("hostile").is_err());
    }

    #[test]
    fn ends_are_held_against_what_was_expected() {
        assert!(is_expected("exit 3", 3) && !is_expected("exit 3", 0));
        assert!(is_expected("signal SEGV", -11) && !is_expected("signal SEGV", 11));
        assert!(is_expected("crash", -4) && !is_expected("crash", 0));
        assert!(is_expected("timeout", 124) && is_expected("anything", -9));
        assert!(!is_expected("signal UNKNOWN", 0) && !is_expected("nonsense", 0));
    }
}
