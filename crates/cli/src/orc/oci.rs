//! `orrery orc oci`: containers that share, whatever starts them.
//!
//! Engines (containerd, Docker, Podman) start containers by an OCI runtime such as runc, which finds what to do in the
//! `config.json` of a *bundle* (<https://github.com/opencontainers/runtime-spec>). This stands in for the runtime: when a
//! container is to be created it adds the store's directory to the mounts and the auditor to the environment, and becomes the
//! runtime. A hook could not do it, as hooks run when the environment is settled.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use orrery_orc_client::{SOCKET, default_directory};
use serde_json::{Value, json};

/// Where the store is in containers.
const INSIDE: &str = "/run/orrery/orc";
/// Where the auditor is, if it is not in the store's directory.
const CODE_INSIDE: &str = "/run/orrery/auditor";
/// Options of runc, before its command, that take a value.
const WITH_VALUE: [&str; 5] = ["--log", "--log-format", "--root", "--criu", "--rootless"];

/// Stand in for an OCI runtime: containers that it creates share code and read-only data.
///
/// Name a script that calls this where the engine wants a runtime: `exec orrery orc oci -- "$@"`.
#[derive(Args)]
pub(super) struct Arguments {
    /// The directory, of the store or a tenant, with `socket` and the auditor in it [default: ORRERY_ORC, /run/orrery/orc]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// The runtime that does the work
    #[arg(long, default_value = "runc")]
    runtime: PathBuf,
    /// What the engine tells the runtime
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Does it; returns only where it cannot.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    if let Some(bundle) = bundle(&arguments.arguments) {
        let directory = arguments.directory.clone().unwrap_or_else(default_directory);
        // A container without a store is better than none.
        if let Err(error) = share(&bundle, &directory) {
            eprintln!("orrery orc oci: {}: the container shares nothing: {error:#}", bundle.display());
        }
    }
    let error = Command::new(&arguments.runtime).args(&arguments.arguments).exec();
    bail!("run {}: {error}", arguments.runtime.display())
}

/// The bundle of the container that these arguments of a runtime create, if they do.
fn bundle(arguments: &[OsString]) -> Option<PathBuf> {
    let mut rest = arguments.iter().map(OsString::as_os_str);
    let command = loop {
        let argument = rest.next()?;
        if WITH_VALUE.iter().any(|option| argument == *option) {
            rest.next()?;
        } else if !argument.as_encoded_bytes().starts_with(b"-") {
            break argument;
        }
    };
    if command != "create" && command != "run" {
        return None;
    }
    while let Some(argument) = rest.next() {
        if argument == "--bundle" || argument == "-b" {
            return rest.next().map(PathBuf::from);
        }
        let value = argument.to_str().and_then(|text| {
            text.strip_prefix("--bundle=").or_else(|| text.strip_prefix("-b=")).map(OsStr::new)
        });
        if let Some(value) = value {
            return Some(value.into());
        }
    }
    Some(".".into())
}

/// Adds what is needed to the bundle's configuration, once.
fn share(bundle: &Path, directory: &Path) -> Result<()> {
    let directory = directory
        .canonicalize()
        .with_context(|| format!("find the store's directory {}", directory.display()))?;
    let auditor =
        orrery_orc_auditor::find(&directory).context("find the auditor that the store has installed")?;
    let name = auditor.file_name().context("an auditor without a name")?.to_string_lossy().into_owned();
    let path = bundle.join("config.json");
    let text = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    let mut config: Value =
        serde_json::from_slice(&text).with_context(|| format!("understand {}", path.display()))?;
    let owner = std::fs::metadata(directory.join(SOCKET)).context("find the store's socket")?.uid();
    if !has_number(&config, owner) {
        bail!(
            "the store's user {owner} has no number in its user namespace: it could not tell whose the store is"
        );
    }
    // In a directory of its own where no code can be run from the store's.
    let home = auditor.parent().filter(|home| *home != directory);
    let inside = if home.is_some() { CODE_INSIDE } else { INSIDE };
    edit(&mut config, &directory, home, &format!("{inside}/{name}"))?;
    let draft = bundle.join(format!("config.json.orrery-{}", std::process::id()));
    std::fs::write(&draft, serde_json::to_vec(&config)?)
        .and_then(|()| std::fs::rename(&draft, &path))
        .with_context(|| format!("write {}", path.display()))
}

/// Whether a user of the host has a number in the container.
fn has_number(config: &Value, uid: u32) -> bool {
    let linux = &config["linux"];
    let namespaces = linux["namespaces"].as_array();
    if !namespaces.is_some_and(|all| all.iter().any(|namespace| namespace["type"] == "user")) {
        return true;
    }
    // None are told where the namespace is an older one, which the auditor looks at itself.
    linux["uidMappings"].as_array().is_none_or(|mappings| {
        mappings.iter().any(|mapping| {
            let start = mapping["hostID"].as_u64().unwrap_or(u64::MAX);
            u64::from(uid).checked_sub(start).is_some_and(|skip| skip < mapping["size"].as_u64().unwrap_or(0))
        })
    })
}

fn edit(config: &mut Value, directory: &Path, home: Option<&Path>, auditor: &str) -> Result<()> {
    let process = config.get_mut("process").context("the configuration has no process")?;
    let variables = list(process, "env")?;
    let position = |variables: &[Value], name: &str| {
        let is_it = |variable: &Value| {
            variable.as_str().and_then(|text| text.split_once('=')).is_some_and(|(is, _)| is == name)
        };
        variables.iter().position(is_it)
    };
    match position(variables, "LD_AUDIT") {
        None => variables.push(json!(format!("LD_AUDIT={auditor}"))),
        Some(at) => {
            let others = variables[at].as_str().unwrap_or_default().trim_start_matches("LD_AUDIT=");
            let list = super::run::audit_list(OsStr::new(others), OsStr::new(auditor));
            variables[at] = json!(format!("LD_AUDIT={}", list.to_string_lossy()));
        }
    }
    let at = position(variables, "GLIBC_TUNABLES");
    let before = at.and_then(|at| Some(variables[at].as_str()?.split_once('=')?.1.to_owned()));
    let after = super::run::tunables(before.as_deref().map(OsStr::new)).to_string_lossy().into_owned();
    let after = json!(format!("GLIBC_TUNABLES={after}"));
    match at {
        Some(at) => variables[at] = after,
        None => variables.push(after),
    }
    // Filters of container engines allow sockets.
    for (name, value) in [("ORRERY_ORC", INSIDE), ("ORRERY_ORC_SECCOMP", "share")] {
        if position(variables, name).is_none() {
            variables.push(json!(format!("{name}={value}")));
        }
    }
    let mounts = list(config, "mounts")?;
    for (inside, directory) in [(INSIDE, Some(directory)), (CODE_INSIDE, home)] {
        let Some(directory) = directory else { continue };
        if !mounts.iter().any(|mount| mount["destination"] == inside) {
            mounts.push(json!({
                "destination": inside,
                "type": "bind",
                "source": directory.to_str().context("the store's directory has a name that JSON cannot carry")?,
                "options": ["rbind", "ro", "nosuid", "nodev"],
            }));
        }
    }
    Ok(())
}

fn list<'a>(value: &'a mut Value, key: &str) -> Result<&'a mut Vec<Value>> {
    let object = value.as_object_mut().context("the configuration is no object")?;
    let list = object.entry(key).or_insert_with(|| json!([]));
    if list.is_null() {
        *list = json!([]);
    }
    list.as_array_mut().with_context(|| format!("{key} in the configuration is no list"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundle_of_a_new_container_is_found() {
        let find = |text: &str| bundle(&text.split(' ').map(OsString::from).collect::<Vec<_>>());
        let engine = "--root /run/x --log /l --log-format json create --bundle /b --pid-file /p id";
        assert_eq!(find(engine), Some("/b".into()));
        assert_eq!(find("--root=/run/x --debug run -b /c id"), Some("/c".into()));
        assert_eq!(find("run --bundle=/d id"), Some("/d".into()));
        assert_eq!(find("run id"), Some(".".into()));
        assert_eq!(find("--log create start id"), None, "a file for the log");
        for other in ["start id", "delete --force id", "--version", "state create", ""] {
            assert_eq!(find(other), None, "{other}");
        }
    }

    #[test]
    fn users_have_numbers_in_some_containers() {
        let with = |namespaces: Value, mappings: Value| {
            has_number(&json!({ "linux": { "namespaces": namespaces, "uidMappings": mappings } }), 0)
        };
        let own = json!([{ "type": "pid" }, { "type": "user" }]);
        let mapping = |start| json!([{ "containerID": 0, "hostID": start, "size": 1000 }]);
        assert!(with(own.clone(), mapping(0)) && !with(own.clone(), mapping(100_000)));
        assert!(!with(own.clone(), json!([{ "hostID": "x" }])) && with(own, Value::Null));
        assert!(with(json!([{ "type": "pid" }]), mapping(100_000)) && has_number(&json!({}), 0));
    }

    #[test]
    fn the_configuration_is_edited_once() {
        let before = json!({
            "process": { "args": ["/bin/sh"], "env": ["PATH=/bin", "LD_AUDIT=/theirs.so"] },
            "hooks": null
        });
        let mut config = before.clone();
        edit(&mut config, Path::new("/store"), None, "/in/a.so").unwrap();
        let variables = &config["process"]["env"];
        assert_eq!(variables[1], "LD_AUDIT=/theirs.so:/in/a.so");
        assert!(variables.as_array().unwrap().contains(&json!("ORRERY_ORC=/run/orrery/orc")));
        assert_eq!(config["mounts"][0]["source"], "/store");
        assert_eq!(config["process"]["args"], before["process"]["args"]);
        let once = config.clone();
        edit(&mut config, Path::new("/store"), None, "/in/a.so").unwrap();
        assert_eq!(config, once);
        let mut other = before.clone();
        edit(&mut other, Path::new("/store"), Some(Path::new("/code")), "/in/a.so").unwrap();
        assert_eq!(
            (&other["mounts"][0], &other["mounts"][1]["source"]),
            (&config["mounts"][0], &json!("/code"))
        );
        let mut empty = json!({ "process": {}, "mounts": null });
        edit(&mut empty, Path::new("/store"), None, "/in/a.so").unwrap();
        assert_eq!(empty["process"]["env"][0], "LD_AUDIT=/in/a.so");
        assert!(edit(&mut json!({}), Path::new("/store"), None, "/in/a.so").is_err());
        assert!(
            edit(&mut json!({ "process": { "env": 3 } }), Path::new("/store"), None, "/in/a.so").is_err()
        );
    }
}
