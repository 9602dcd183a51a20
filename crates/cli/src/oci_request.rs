//! What an engine asks an OCI runtime for, as far as it matters to what stands in for one; and the files that describe it.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// Options of runc, before its command, that take a value.
const WITH_VALUE: [&str; 6] = ["--log", "--log-format", "--root", "--criu", "--rootless", "--cgroup-manager"];

/// What the runtime is to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Create the container of a bundle.
    Create { bundle: PathBuf, container: OsString },
    /// Delete a container.
    Delete(OsString),
    /// Start a further process, which a file describes, in a container.
    Execute {
        /// The runtime's arguments before its command.
        global: Vec<OsString>,
        process: PathBuf,
        container: OsString,
    },
    /// Start a further process in a container, which the command line describes.
    ExecuteWords,
    /// Something else, of this name; empty where there is none.
    Other(OsString),
}

/// Reads the arguments of a runtime.
pub(crate) fn read(arguments: &[OsString]) -> Request {
    let mut at = 0;
    loop {
        let Some(argument) = arguments.get(at) else { return Request::Other(OsString::new()) };
        if WITH_VALUE.iter().any(|option| argument == *option) {
            at += 2;
        } else if argument.as_encoded_bytes().starts_with(b"-") {
            at += 1;
        } else {
            break;
        }
    }
    let (global, rest) = (&arguments[..at], &arguments[at + 1..]);
    match arguments[at].to_str() {
        Some("create" | "run") => Request::Create {
            bundle: value(rest, "--bundle", "-b").map_or_else(|| ".".into(), PathBuf::from),
            container: rest.last().cloned().unwrap_or_default(),
        },
        Some("delete") => match rest.last() {
            Some(container) => Request::Delete(container.clone()),
            None => Request::Other("delete".into()),
        },
        Some("exec") => match (value(rest, "--process", "-p"), operands(rest).as_slice()) {
            (Some(process), &[container]) => Request::Execute {
                global: global.to_vec(),
                process: process.into(),
                container: container.clone(),
            },
            // Such a process has the environment of the container.
            _ => Request::ExecuteWords,
        },
        _ => Request::Other(arguments[at].clone()),
    }
}

/// Returns the words of `exec` that are neither options nor their values: behind the container's name there may be a program's.
fn operands(arguments: &[OsString]) -> Vec<&OsString> {
    const WITH_VALUE: [&str; 19] = [
        "--additional-gids",
        "--apparmor",
        "--cap",
        "--cgroup",
        "--console-socket",
        "--cwd",
        "--env",
        "--pid-file",
        "--preserve-fds",
        "--process",
        "--process-label",
        "--user",
        "-c",
        "-e",
        "-g",
        "-p",
        "-u",
        "--log",
        "--root",
    ];
    let (mut found, mut rest) = (Vec::new(), arguments.iter());
    while let Some(argument) = rest.next() {
        if found.is_empty() && WITH_VALUE.iter().any(|option| argument == *option) {
            rest.next();
        } else if !found.is_empty() || !argument.as_encoded_bytes().starts_with(b"-") {
            // All that follows the first one, options or not.
            found.push(argument);
        }
    }
    found
}

/// Returns the value of an option.
pub(crate) fn value<'a>(arguments: &'a [OsString], long: &str, short: &str) -> Option<&'a OsStr> {
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        if argument == long || argument == short {
            return rest.next().map(OsString::as_os_str);
        }
        let value = argument.to_str().and_then(|text| {
            let (name, value) = text.split_once('=')?;
            (name == long || name == short).then_some(OsStr::new(value))
        });
        if value.is_some() {
            return value;
        }
    }
    None
}

/// Asks the runtime for the state of a container.
pub(crate) fn state(runtime: &Path, global: &[OsString], container: &OsStr) -> Result<Value> {
    let output = Command::new(runtime)
        .args(global)
        .arg("state")
        .arg(container)
        .output()
        .with_context(|| format!("cannot run {}", runtime.display()))?;
    serde_json::from_slice(&output.stdout).context("cannot find the bundle of the container")
}

/// Reads a file of JSON.
pub(crate) fn load(path: &Path) -> Result<Value> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("cannot understand {}", path.display()))
}

/// Writes a file of JSON whole or not at all.
pub(crate) fn save(path: &Path, value: &Value) -> Result<()> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(format!(".orrery-{}", std::process::id()));
    std::fs::write(&draft, serde_json::to_vec(value)?)
        .and_then(|()| std::fs::rename(&draft, path))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(text: &str) -> Request {
        read(&text.split(' ').map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn the_bundle_of_a_new_container_is_found() {
        let create = |bundle: &str| Request::Create { bundle: bundle.into(), container: "id".into() };
        let engine = "--root /run/x --log /l --log-format json create --bundle /b --pid-file /p id";
        assert_eq!(find(engine), create("/b"));
        assert_eq!(find("--root=/run/x --debug run -b /c id"), create("/c"));
        assert_eq!(find("run --bundle=/d id"), create("/d"));
        assert_eq!(find("run id"), create("."));
        assert_eq!(find("delete --force id"), Request::Delete("id".into()));
        assert_eq!(find("--log create start id"), Request::Other("start".into()), "a file for the log");
        for (other, name) in [("start id", "start"), ("state create", "state"), ("delete", "delete")] {
            assert_eq!(find(other), Request::Other(name.into()), "{other}");
        }
        for none in ["--version", "", "--root"] {
            assert_eq!(find(none), Request::Other(OsString::new()), "{none}");
        }
    }

    #[test]
    fn further_processes_are_found() {
        let engine = "--root /run/x --log-format json exec --process /p.json --detach --pid-file /f id";
        let global = ["--root", "/run/x", "--log-format", "json"].map(OsString::from).to_vec();
        let wanted = Request::Execute { global, process: "/p.json".into(), container: "id".into() };
        assert_eq!(find(engine), wanted);
        let short = Request::Execute { global: Vec::new(), process: "/q".into(), container: "id".into() };
        assert_eq!(find("exec -p /q id"), short);
        // What the program is given is not the runtime's.
        for words in
            ["exec id sh -c true", "exec id sh --process /q id", "exec --tty id sh -p", "exec -p /q", "exec"]
        {
            assert_eq!(find(words), Request::ExecuteWords, "{words}");
        }
    }
}
