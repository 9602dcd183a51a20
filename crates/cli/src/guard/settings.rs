//! Settings of the sandbox runtimes that coding agents use, as a policy.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use orrery_monitor::Policy;
use serde::Deserialize;
use toml::{Table, Value};

/// A file of settings. What it may contain besides is refused by its name, because it would be left out in silence otherwise.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
#[derive(Default)]
struct Settings {
    filesystem: Filesystem,
    network: Network,
    /// A sandbox inside of containers, where bubblewrap can do less. The guard is the same there.
    #[serde(rename = "enableWeakerNestedSandbox")]
    _weaker: bool,
}

/// Everything may be read but what is denied, and nothing written but what is allowed.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Filesystem {
    deny_read: Vec<String>,
    /// Exceptions from `denyRead`.
    allow_read: Vec<String>,
    allow_write: Vec<String>,
    /// Exceptions from `allowWrite`.
    deny_write: Vec<String>,
}

/// Nothing is reached but what is allowed.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Network {
    allowed_domains: Vec<String>,
    denied_domains: Vec<String>,
    allow_unix_sockets: Vec<String>,
    allow_all_unix_sockets: bool,
    allow_local_binding: bool,
}

/// Devices that every program may write to.
const DEVICES: [&str; 6] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx", "/dev/pts"];
/// What programs of this machine listen on for one another.
const LOOPBACK: [&str; 2] = ["localhost:*", "[::1]:*"];

/// Returns the policy that a file of settings means, as text.
///
/// # Errors
/// Those of reading the file; settings that no policy can hold, by name.
pub(super) fn text(path: &Path) -> Result<String> {
    let shown = path.display();
    let json = std::fs::read_to_string(path).with_context(|| format!("cannot read the settings {shown}"))?;
    let settings: Settings = serde_json::from_str(&json).map_err(|error| {
        let text = error.to_string();
        let message = text.rsplit_once(" at line ").map_or(text.as_str(), |(message, _)| message);
        anyhow::anyhow!("{shown}:{}:{}: cannot honour the settings: {message}", error.line(), error.column())
    })?;
    translated(settings).with_context(|| shown.to_string())
}

/// Returns the policy that a file of settings means.
///
/// # Errors
/// As of [`text`].
pub(super) fn policy(path: &Path) -> Result<Policy> {
    Policy::parse(&text(path)?).with_context(|| format!("cannot use the settings {}", path.display()))
}

fn translated(settings: Settings) -> Result<String> {
    let Settings { filesystem, network, .. } = settings;
    let everything = || vec!["/".to_owned()];
    let writable = paths("filesystem.allowWrite", filesystem.allow_write)?;
    let devices = DEVICES.map(str::to_owned);
    let files = [
        ("stat", everything()),
        ("read", everything()),
        ("execute", everything()),
        ("write", devices.into_iter().chain(writable.iter().cloned()).collect()),
        ("create", writable),
        ("read-only", paths("filesystem.denyWrite", filesystem.deny_write)?),
        ("deny", paths("filesystem.denyRead", filesystem.deny_read)?),
        ("except", paths("filesystem.allowRead", filesystem.allow_read)?),
    ];
    let (connect, bind) = addresses(network)?;
    let mut sections = Table::new();
    sections.insert("files".to_owned(), table(files.into()));
    sections.insert("network".to_owned(), table(vec![("connect", connect), ("bind", bind)]));
    Ok(sections.to_string())
}

fn table(lists: Vec<(&str, Vec<String>)>) -> Value {
    let lists = lists.into_iter().filter(|(_, entries)| !entries.is_empty());
    lists.map(|(key, entries)| (key.to_owned(), Value::from(entries))).collect::<Table>().into()
}

/// Returns paths as policies have them. `/**` at the end is what a directory means there.
fn paths(key: &str, entries: Vec<String>) -> Result<Vec<String>> {
    let plain = |entry: String| {
        let path = entry.strip_suffix("/**").unwrap_or(&entry);
        let path = if path.is_empty() && entry.starts_with('/') { "/" } else { path };
        if path.contains(['*', '?', '[', '{']) {
            bail!(
                "cannot honour {key} {entry:?}: files that match a pattern later would not be held; name files or directories"
            );
        }
        if path.contains('$') {
            bail!("cannot honour {key} {entry:?}: a policy takes what follows $ for a variable");
        }
        Ok(path.to_owned())
    };
    entries.into_iter().map(plain).collect()
}

/// Returns what may be connected to, and what may be bound.
fn addresses(network: Network) -> Result<(Vec<String>, Vec<String>)> {
    if let Some(name) = network.denied_domains.first() {
        bail!("cannot honour network.deniedDomains {name:?}: a policy allows addresses, and denies none");
    }
    let mut connect = Vec::new();
    for domain in network.allowed_domains {
        connect.extend(match domain.as_str() {
            "*" => vec!["*:*".to_owned()],
            "localhost" => LOOPBACK.map(str::to_owned).to_vec(),
            name => match name.trim_matches(['[', ']']).parse() {
                Ok(std::net::IpAddr::V4(address)) => vec![format!("{address}:*")],
                Ok(std::net::IpAddr::V6(address)) => vec![format!("[{address}]:*")],
                Err(_) => bail!(
                    "cannot honour network.allowedDomains {name:?}: names of hosts mean other addresses tomorrow; write \
                     addresses, or let a proxy on localhost decide about names"
                ),
            },
        });
    }
    if network.allow_all_unix_sockets {
        connect.extend(["unix:/".to_owned(), "unix:@*".to_owned()]);
    }
    let sockets = paths("network.allowUnixSockets", network.allow_unix_sockets)?;
    for path in sockets {
        let path = std::path::absolute(home(&path)?)?;
        connect.push(format!("unix:{}", path.display()));
    }
    let mut bind = Vec::new();
    if network.allow_local_binding {
        bind.extend(LOOPBACK.map(str::to_owned));
        connect.extend(LOOPBACK.map(str::to_owned));
    }
    Ok((connect, bind))
}

/// Returns a path with its `~`, which addresses of policies do not have.
fn home(path: &str) -> Result<String> {
    match path.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => {
            let home = std::env::var("HOME").context("cannot find the home directory: HOME is not set")?;
            Ok(home + rest)
        }
        _ => Ok(path.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(json: &str) -> Result<String> {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), json)?;
        text(file.path())
    }

    #[test]
    fn settings_are_a_policy() {
        let text = of(r#"{"filesystem": {"denyRead": ["/home"], "allowRead": ["/home/u/project/**"], "allowWrite": ["/home/u/project"],
            "denyWrite": ["/home/u/project/.git"]}, "network": {"allowedDomains": ["127.0.0.1", "::1"], "allowUnixSockets": ["/run/x"]}}"#)
        .unwrap();
        for line in [
            "deny = [\"/home\"]",
            "except = [\"/home/u/project\"]",
            "read-only = [\"/home/u/project/.git\"]",
            "create = [\"/home/u/project\"]",
            "connect = [\"127.0.0.1:*\", \"[::1]:*\", \"unix:/run/x\"]",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(!text.contains("bind"), "{text}");
        Policy::parse(&text).unwrap();
        assert!(!of("{}").unwrap().contains("connect"));
    }

    #[test]
    fn what_is_not_honoured_is_refused_by_name() {
        for (json, named) in [
            ("{\n \"hooks\": {}}", ":2:8: cannot honour the settings: unknown field `hooks`"),
            (r#"{"network": {"allowedDomains": ["example.org"]}}"#, "network.allowedDomains \"example.org\""),
            (r#"{"network": {"deniedDomains": ["example.org"]}}"#, "network.deniedDomains \"example.org\""),
            (r#"{"network": {"httpProxyPort": 1}}"#, "unknown field `httpProxyPort`"),
            (r#"{"filesystem": {"denyRead": ["**/.env"]}}"#, "filesystem.denyRead \"**/.env\""),
            (r#"{"filesystem": {"denyWrite": ["$X"]}}"#, "filesystem.denyWrite \"$X\""),
            (r#"{"filesystem": {"allowWrite": "/"}}"#, "invalid type"),
        ] {
            let error = format!("{:#}", of(json).unwrap_err());
            assert!(error.contains(named), "{json}: {error}");
        }
    }
}
