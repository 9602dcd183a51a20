//! The `config.json` of a bundle, and the `process.json` of a further process in its container
//! (<https://github.com/opencontainers/runtime-spec>), with the store and the auditor in them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::environment::{audit_list, tunables};

/// Where the store is in containers.
pub const INSIDE: &str = "/run/orrery/orc";
/// Where the auditor is, if it is not in the store's directory.
pub const CODE_INSIDE: &str = "/run/orrery/auditor";

/// Why a configuration cannot be edited.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It is another kind of value.
    #[error("the configuration is no object")]
    NoObject,
    /// It describes no process.
    #[error("the configuration has no process")]
    NoProcess,
    /// A member is something else.
    #[error("{name} in the configuration is no {kind}")]
    OtherKind {
        /// The member's name.
        name: &'static str,
        /// What it should be.
        kind: &'static str,
    },
    /// JSON has no such text.
    #[error("{} has a name that JSON cannot carry: choose one in UTF-8", .0.display())]
    Name(PathBuf),
}

/// Returns whether a user of the host has a user ID in the container.
#[must_use]
pub fn has_number(config: &Value, uid: u32) -> bool {
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

/// Adds the store's directory, and that of the auditor if it is elsewhere, and the variables to a configuration, once. `auditor` is the
/// auditor's path in the container.
///
/// # Errors
/// [`Error`], with the configuration half edited.
pub fn edit(config: &mut Value, directory: &Path, home: Option<&Path>, auditor: &str) -> Result<(), Error> {
    let process = config.get_mut("process").ok_or(Error::NoProcess)?;
    edit_process(process, auditor)?;
    let mounts = list(config, "mounts")?;
    for (inside, directory) in [(INSIDE, Some(directory)), (CODE_INSIDE, home)] {
        let Some(directory) = directory else { continue };
        if !mounts.iter().any(|mount| mount["destination"] == inside) {
            mounts.push(json!({
                "destination": inside,
                "type": "bind",
                "source": text(directory)?,
                "options": ["rbind", "ro", "nosuid", "nodev"],
            }));
        }
    }
    Ok(())
}

/// Makes a directory the root of a container.
///
/// # Errors
/// [`Error`], with the configuration as it was.
pub fn set_root(config: &mut Value, directory: &Path) -> Result<(), Error> {
    let directory = text(directory)?;
    let root = config.as_object_mut().ok_or(Error::NoObject)?.entry("root").or_insert_with(|| json!({}));
    let root = root.as_object_mut().ok_or(Error::OtherKind { name: "root", kind: "object" })?;
    root.insert("path".to_owned(), json!(directory));
    Ok(())
}

/// Adds what is needed to the environment of a process, once.
///
/// # Errors
/// [`Error`], with the description half edited.
pub fn edit_process(process: &mut Value, auditor: &str) -> Result<(), Error> {
    let variables = list(process, "env")?;
    match position(variables, "LD_AUDIT") {
        None => variables.push(json!(format!("LD_AUDIT={auditor}"))),
        Some(at) => {
            let others = variables[at].as_str().unwrap_or_default().trim_start_matches("LD_AUDIT=");
            let list = audit_list(OsStr::new(others), OsStr::new(auditor));
            variables[at] = json!(format!("LD_AUDIT={}", list.to_string_lossy()));
        }
    }
    let at = position(variables, "GLIBC_TUNABLES");
    let before = at.and_then(|at| Some(variables[at].as_str()?.split_once('=')?.1.to_owned()));
    let after = tunables(before.as_deref().map(OsStr::new)).to_string_lossy().into_owned();
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
    Ok(())
}

/// Returns the auditor of a container that was created with [`edit`], and that has the store's directory in it.
#[must_use]
pub fn auditor(config: &Value) -> Option<&str> {
    let is_mounted = |mount: &Value| mount["destination"] == INSIDE;
    config["mounts"].as_array().filter(|mounts| mounts.iter().any(is_mounted))?;
    let variables = config["process"]["env"].as_array()?;
    let list = variables.get(position(variables, "LD_AUDIT")?)?.as_str()?.split_once('=')?.1;
    list.split(':').find(|path| path.starts_with(INSIDE) || path.starts_with(CODE_INSIDE))
}

fn position(variables: &[Value], name: &str) -> Option<usize> {
    let is_it = |variable: &Value| {
        variable.as_str().and_then(|text| text.split_once('=')).is_some_and(|(is, _)| is == name)
    };
    variables.iter().position(is_it)
}

fn list<'a>(value: &'a mut Value, name: &'static str) -> Result<&'a mut Vec<Value>, Error> {
    let object = value.as_object_mut().ok_or(Error::NoObject)?;
    let list = object.entry(name).or_insert_with(|| json!([]));
    if list.is_null() {
        *list = json!([]);
    }
    list.as_array_mut().ok_or(Error::OtherKind { name, kind: "list" })
}

fn text(path: &Path) -> Result<&str, Error> {
    path.to_str().ok_or_else(|| Error::Name(path.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(auditor(&config), None, "it is elsewhere");
        edit(&mut config, Path::new("/store"), None, "/run/orrery/orc/a.so").unwrap();
        assert_eq!(auditor(&config), Some("/run/orrery/orc/a.so"));
        assert_eq!(auditor(&before), None);
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

    #[test]
    fn the_root_is_set_where_there_can_be_one() {
        let tree = Path::new("/trees/one");
        let mut config = json!({ "root": { "path": "rootfs", "readonly": true } });
        set_root(&mut config, tree).unwrap();
        assert_eq!(config["root"], json!({ "path": "/trees/one", "readonly": true }));
        let mut empty = json!({});
        set_root(&mut empty, tree).unwrap();
        assert_eq!(empty["root"]["path"], "/trees/one");
        for other in [json!([]), json!({ "root": "rootfs" }), Value::Null] {
            let mut config = other.clone();
            assert!(set_root(&mut config, tree).is_err());
            assert_eq!(config, other);
        }
    }
}
