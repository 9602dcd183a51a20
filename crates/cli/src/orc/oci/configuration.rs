//! The `config.json` of a bundle, and the `process.json` of a further process in its container.

use std::ffi::OsStr;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

/// Where the store is in containers.
pub(super) const INSIDE: &str = "/run/orrery/orc";
/// Where the auditor is, if it is not in the store's directory.
pub(super) const CODE_INSIDE: &str = "/run/orrery/auditor";

/// Returns whether a user of the host has a user ID in the container.
pub(super) fn has_number(config: &Value, uid: u32) -> bool {
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

/// Adds the store's directory, and that of the auditor if it lies elsewhere, and the variables to a configuration, once.
pub(super) fn edit(config: &mut Value, directory: &Path, home: Option<&Path>, auditor: &str) -> Result<()> {
    let process = config.get_mut("process").context("the configuration has no process")?;
    edit_process(process, auditor)?;
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

/// Adds what is needed to the environment of a process, once.
pub(super) fn edit_process(process: &mut Value, auditor: &str) -> Result<()> {
    let variables = list(process, "env")?;
    match position(variables, "LD_AUDIT") {
        None => variables.push(json!(format!("LD_AUDIT={auditor}"))),
        Some(at) => {
            let others = variables[at].as_str().unwrap_or_default().trim_start_matches("LD_AUDIT=");
            let list = crate::orc::run::audit_list(OsStr::new(others), OsStr::new(auditor));
            variables[at] = json!(format!("LD_AUDIT={}", list.to_string_lossy()));
        }
    }
    let at = position(variables, "GLIBC_TUNABLES");
    let before = at.and_then(|at| Some(variables[at].as_str()?.split_once('=')?.1.to_owned()));
    let after = crate::orc::run::tunables(before.as_deref().map(OsStr::new)).to_string_lossy().into_owned();
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
pub(super) fn auditor(config: &Value) -> Option<&str> {
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
}
