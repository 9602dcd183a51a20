//! The configuration of a container ([OCI runtime specification](https://github.com/opencontainers/runtime-spec)) whose program is
//! to start beneath a guard inside the container.
//!
//! The guard's program and what belongs to it are mounted read-only at [`DIRECTORY`], on a file system of their own, so that nothing in
//! the container can take their place.

use std::path::PathBuf;

use serde_json::{Map, Value, json};

/// Where the guard's files are in a container. It lies in the root directory, which cannot be renamed.
pub const DIRECTORY: &str = "/.orrery-guard";

/// What is added to a container.
#[derive(Clone, Debug, Default)]
pub struct Additions {
    /// Files of the host, and their names in [`DIRECTORY`].
    pub files: Vec<(PathBuf, String)>,
    /// The words before those of the program: the guard's program and its options, without the last `--`.
    pub command: Vec<String>,
}

/// Variables by which libraries are loaded into a program or change how it works: those of the loader, of the C library's memory
/// allocator, and Orrery's own. They are for the program, and not for its guard.
fn is_of_loaders(name: &str) -> bool {
    const BEGINNINGS: [&str; 5] = ["LD_", "GLIBC_", "MALLOC_", "ORRERY_", "RUST_"];
    const NAMES: [&str; 4] = ["GCONV_PATH", "LOCPATH", "NLSPATH", "TMPDIR"];
    BEGINNINGS.iter().any(|beginning| name.starts_with(beginning)) || NAMES.contains(&name)
}

/// Has a container's program start beneath the guard.
///
/// # Errors
/// Why that cannot be; then nothing is changed.
pub fn edit(config: &mut Value, additions: &Additions) -> Result<(), String> {
    let mounts = list(config.get("mounts"), "mounts")?;
    let is_proc = |mount: &&Value| at(mount) == "/proc" && mount["type"] == "proc";
    if !mounts.iter().any(|mount| is_proc(&mount)) {
        return Err("it mounts no proc at /proc, where the guard finds processes".to_owned());
    }
    let namespaces = list(config.get("linux").and_then(|linux| linux.get("namespaces")), "linux.namespaces")?;
    let own = |space: &&Value| space["type"] == "mount" && space.get("path").is_none_or(|path| path == "");
    if !namespaces.iter().any(|space| own(&space)) {
        return Err("it has no mount namespace of its own, in which the guard's files could be".to_owned());
    }
    // What else would be there gives way.
    let mut kept: Vec<Value> = mounts
        .iter()
        .filter(|mount| !std::path::Path::new(&at(mount)).starts_with(DIRECTORY))
        .cloned()
        .collect();
    kept.push(json!({
        "destination": DIRECTORY, "type": "tmpfs", "source": "tmpfs", "options": ["ro", "nosuid", "nodev", "mode=755", "size=64k"]
    }));
    for (source, name) in &additions.files {
        let source = source.to_str().ok_or_else(|| format!("{} is no UTF-8", source.display()))?;
        kept.push(json!({
            "destination": format!("{DIRECTORY}/{name}"), "type": "bind", "source": source,
            "options": ["bind", "ro", "nosuid", "nodev"]
        }));
    }
    let process = config.get_mut("process").ok_or("it has no process to guard")?;
    edit_process(process, &additions.command)?;
    config["mounts"] = Value::Array(kept);
    Ok(())
}

/// Has a process start beneath the guard, in a container that has its files.
///
/// # Errors
/// Why that cannot be; then nothing is changed.
pub fn edit_process(process: &mut Value, command: &[String]) -> Result<(), String> {
    let process: &mut Map<String, Value> = process.as_object_mut().ok_or("its process is no object")?;
    let arguments = texts(process.get("args"), "process.args")?;
    if arguments.is_empty() {
        return Err("process.args names no program".to_owned());
    }
    let environment = texts(process.get("env"), "process.env")?;
    let name = |entry: &String| entry.split_once('=').is_some_and(|(name, _)| is_of_loaders(name));
    let (of_loaders, others): (Vec<String>, Vec<String>) = environment.into_iter().partition(name);
    let mut words = command.to_vec();
    words.extend(of_loaders.into_iter().flat_map(|entry| ["--env".to_owned(), entry]));
    words.push("--".to_owned());
    words.extend(arguments);
    process.insert("args".to_owned(), words.into());
    process.insert("env".to_owned(), others.into());
    Ok(())
}

/// Where a mount is, without needless parts.
fn at(mount: &Value) -> String {
    let mut path = PathBuf::from("/");
    for part in std::path::Path::new(mount["destination"].as_str().unwrap_or_default()).components() {
        match part {
            std::path::Component::Normal(name) => path.push(name),
            std::path::Component::ParentDir => {
                path.pop();
            }
            _ => (),
        }
    }
    path.display().to_string()
}

fn list<'v>(value: Option<&'v Value>, name: &str) -> Result<&'v [Value], String> {
    match value {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(all)) => Ok(all),
        Some(_) => Err(format!("{name} is no list")),
    }
}

fn texts(value: Option<&Value>, name: &str) -> Result<Vec<String>, String> {
    let text = |value: &Value| {
        value.as_str().map(str::to_owned).ok_or_else(|| format!("{name} has what is no text"))
    };
    list(value, name)?.iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn additions() -> Additions {
        Additions {
            files: vec![("/host/orrery".into(), "orrery".to_owned())],
            command: ["/.orrery-guard/orrery", "guard"].map(str::to_owned).to_vec(),
        }
    }

    fn config() -> Value {
        json!({
            "process": {"args": ["sh", "-c", "true"], "env": ["PATH=/bin", "LD_PRELOAD=/x.so", "ORRERY_GUARD_LANDLOCK=off"]},
            "mounts": [{"destination": "/proc", "type": "proc"}],
            "linux": {"namespaces": [{"type": "mount"}]}
        })
    }

    #[test]
    fn programs_start_beneath_the_guard() {
        let mut edited = config();
        edit(&mut edited, &additions()).unwrap();
        let words = [
            "/.orrery-guard/orrery",
            "guard",
            "--env",
            "LD_PRELOAD=/x.so",
            "--env",
            "ORRERY_GUARD_LANDLOCK=off",
            "--",
            "sh",
            "-c",
            "true",
        ];
        assert_eq!(edited["process"]["args"], json!(words));
        assert_eq!(edited["process"]["env"], json!(["PATH=/bin"]));
        let mounts = edited["mounts"].as_array().unwrap();
        assert_eq!(mounts.iter().map(at).collect::<Vec<_>>(), ["/proc", DIRECTORY, "/.orrery-guard/orrery"]);
        assert!(mounts[2]["options"].as_array().unwrap().contains(&json!("ro")), "{mounts:?}");
    }

    #[test]
    fn what_would_be_in_the_guards_place_gives_way() {
        for destination in
            ["/.orrery-guard", "/x/..//.orrery-guard/", "/.orrery-guard/orrery", "/./.orrery-guard/lib"]
        {
            let mut edited = config();
            edited["mounts"]
                .as_array_mut()
                .unwrap()
                .push(json!({"destination": destination, "source": "/evil"}));
            edit(&mut edited, &additions()).unwrap();
            assert!(!edited.to_string().contains("evil"), "{destination}: {edited}");
        }
    }

    #[test]
    fn what_cannot_be_guarded_is_left_alone() {
        let changed = |change: fn(&mut Value)| {
            let mut config = config();
            change(&mut config);
            config
        };
        for (before, told) in [
            (changed(|config| drop(config["process"].take())), "no object"),
            (changed(|config| drop(config.as_object_mut().unwrap().remove("process"))), "no process"),
            (changed(|config| config["process"]["args"] = json!([])), "no program"),
            (changed(|config| config["process"]["args"] = json!(["sh", 1])), "no text"),
            (changed(|config| config["process"]["env"] = json!({})), "no list"),
            (changed(|config| config["mounts"] = json!([])), "/proc"),
            (changed(|config| config["mounts"][0]["type"] = json!("bind")), "/proc"),
            (changed(|config| config["linux"]["namespaces"] = json!([])), "mount namespace"),
            (
                changed(|config| config["linux"]["namespaces"][0]["path"] = json!("/proc/1/ns/mnt")),
                "mount namespace",
            ),
        ] {
            let mut after = before.clone();
            let error = edit(&mut after, &additions()).unwrap_err();
            assert!(error.contains(told), "{before}: {error}");
            assert_eq!(after, before);
        }
    }
}
