//! What an engine asks the runtime for, as far as it matters here.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// Options of runc, before its command, that take a value.
const WITH_VALUE: [&str; 5] = ["--log", "--log-format", "--root", "--criu", "--rootless"];

/// What the runtime is to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Request {
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
    /// Something else.
    Other,
}

/// Reads the arguments of a runtime.
pub(super) fn read(arguments: &[OsString]) -> Request {
    let mut at = 0;
    loop {
        let Some(argument) = arguments.get(at) else { return Request::Other };
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
        Some("delete") => rest.last().map_or(Request::Other, |container| Request::Delete(container.clone())),
        Some("exec") => match (value(rest, "--process", "-p"), rest.last()) {
            (Some(process), Some(container)) => Request::Execute {
                global: global.to_vec(),
                process: process.into(),
                container: container.clone(),
            },
            // Such a process has the environment of the container.
            _ => Request::Other,
        },
        _ => Request::Other,
    }
}

/// Returns the value of an option.
fn value<'a>(arguments: &'a [OsString], long: &str, short: &str) -> Option<&'a OsStr> {
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
        assert_eq!(find("--log create start id"), Request::Other, "a file for the log");
        for other in ["start id", "--version", "state create", "", "--root"] {
            assert_eq!(find(other), Request::Other, "{other}");
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
        assert_eq!(find("exec id sh -c true"), Request::Other);
    }
}
