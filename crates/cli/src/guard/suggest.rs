//! Which lines of a policy would allow what was refused.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use orrery_monitor::{Policy, Rights};
use serde::Deserialize;

/// A line of the log, as far as it matters here.
#[derive(Deserialize)]
struct Refusal {
    call: String,
    action: String,
    path: Option<String>,
    #[serde(default)]
    missing: Vec<String>,
    address: Option<String>,
    reason: Option<String>,
}

/// The log of one run.
pub(super) struct Record {
    path: PathBuf,
    begin: u64,
    /// The open log: at the end the program's view may cover its path. One that nobody asked for has no name, and `path` leads to it.
    file: File,
}

/// The calls by which a program can be reached; all others with an address reach out.
const BINDING: [&str; 2] = ["bind", "listen"];
/// The reason for a call that no entry names, where others are refused.
const UNNAMED: &str = "the policy does not name it";

impl Record {
    /// Uses the log in `path`, of which what is there already belongs to other runs; or one of its own.
    ///
    /// # Errors
    /// Those of making a temporary file, or of opening the log.
    pub(super) fn new(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else {
            let own = tempfile::tempfile().context("cannot make a temporary file for the log")?;
            let path = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), own.as_raw_fd()));
            return Ok(Self { path, begin: 0, file: own });
        };
        let shown = path.display();
        let file = OpenOptions::new().read(true).append(true).create(true).open(path);
        let file = file.with_context(|| format!("cannot open the log {shown}"))?;
        let begin = file.metadata().with_context(|| format!("cannot read the log {shown}"))?.len();
        Ok(Self { path: path.to_owned(), begin, file })
    }

    /// Returns the file to which refusals are to be written.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns lines for `policy`, under which the program ran; `None` if nothing was refused.
    ///
    /// # Errors
    /// Those of reading the log.
    pub(super) fn suggestion(&self, policy: &Policy) -> Result<Option<String>> {
        let shown = self.path.display();
        let mut file = &self.file;
        file.seek(SeekFrom::Start(self.begin)).with_context(|| format!("cannot read the log {shown}"))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).with_context(|| format!("cannot read the log {shown}"))?;
        Ok(suggest(&String::from_utf8_lossy(&bytes), policy))
    }
}

/// Returns what a log suggests.
fn suggest(log: &str, policy: &Policy) -> Option<String> {
    let refusals: Vec<Refusal> = log
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .filter(|refusal: &Refusal| refusal.action == "refused")
        .collect();
    if refusals.is_empty() {
        return None;
    }
    let mut sections: BTreeMap<&str, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    let mut others = BTreeSet::new();
    for refusal in &refusals {
        for (section, key, entry) in entries(refusal) {
            if section == "files" && policy.denied(entry.as_bytes()).intersects(right(&key)) {
                others.insert(format!("{} of {entry}: deny or read-only wins over {key}", refusal.call));
            } else if is_understood(section, &key, &entry) {
                sections.entry(section).or_default().entry(key).or_default().insert(entry);
            } else {
                others.insert(format!("{} of {entry}: no entry can name it", refusal.call));
            }
        }
        if let Some(reason) = refusal.reason.as_deref().filter(|reason| *reason != UNNAMED) {
            others.insert(format!("{}: {reason}", refusal.call));
        }
    }
    let mut text =
        format!("these lines of the policy would allow what was refused ({} times):\n", refusals.len());
    for (section, keys) in &sections {
        text.push_str(&format!("[{section}]\n"));
        for (key, entries) in keys {
            let entries: Vec<String> = entries.iter().map(|entry| quoted(entry)).collect();
            text.push_str(&format!("{key} = [{}]\n", entries.join(", ")));
        }
    }
    for other in &others {
        text.push_str(&format!("# no line would allow {other}\n"));
    }
    Some(text)
}

/// Returns the right that a key of `[files]` allows.
fn right(key: &str) -> Rights {
    match key {
        "stat" => Rights::STAT,
        "list" => Rights::LIST,
        "read" => Rights::READ,
        "write" => Rights::WRITE,
        "create" => Rights::CREATE,
        _ => Rights::EXECUTE,
    }
}

/// Returns what a refusal lacks: section, key and entry.
fn entries(refusal: &Refusal) -> Vec<(&'static str, String, String)> {
    let mut entries = Vec::new();
    if let Some(path) = &refusal.path {
        entries.extend(refusal.missing.iter().map(|right| ("files", right.clone(), path.clone())));
    }
    if let Some(address) = &refusal.address {
        let key = if BINDING.contains(&refusal.call.as_str()) { "bind" } else { "connect" };
        entries.push(("network", key.to_owned(), address.clone()));
    }
    if refusal.reason.as_deref() == Some(UNNAMED) {
        entries.push(("calls", "allow".to_owned(), refusal.call.clone()));
    }
    entries
}

/// Returns whether a policy may have such an entry, and means by it what the log does: `$` begins the name of a variable, and the other
/// sign stands for bytes that are no text.
fn is_understood(section: &str, key: &str, entry: &str) -> bool {
    let is_plain = section != "files" || !entry.contains(['$', char::REPLACEMENT_CHARACTER]);
    is_plain && Policy::parse(&format!("[{section}]\n{key} = [{}]\n", quoted(entry))).is_ok()
}

/// Returns a string of TOML.
fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = r#"{"time":1.0,"process":1,"thread":1,"call":"openat","action":"refused","path":"/root/a b","missing":["read","write"]}
{"time":1.0,"process":1,"thread":1,"call":"openat","action":"refused","path":"/etc/shadow","missing":["read"]}
{"time":1.0,"process":1,"thread":1,"call":"openat","action":"refused","path":"/etc/shadow","missing":["read"]}
{"time":1.0,"process":1,"thread":1,"call":"openat","action":"refused","path":"/tmp/*","missing":["read"]}
{"time":1.0,"process":1,"thread":1,"call":"openat","action":"refused","path":"/srv/keys/a","missing":["read"]}
{"time":1.0,"process":1,"thread":1,"call":"openat","action":"refused","path":"/srv/read/a","missing":["write"]}
{"time":1.0,"process":1,"thread":1,"call":"openat","action":"refused","path":"/srv/$HOME","missing":["read"]}
{"time":1.0,"process":1,"thread":1,"call":"connect","action":"refused","address":"tcp:127.0.0.1:80"}
{"time":1.0,"process":1,"thread":1,"call":"bind","action":"refused","address":"tcp:[::1]:80"}
{"time":1.0,"process":1,"thread":1,"call":"keyctl","action":"refused","reason":"the policy does not name it"}
{"time":1.0,"process":1,"thread":1,"call":"ptrace","action":"refused","reason":"the policy denies it"}
{"time":1.0,"process":1,"thread":1,"call":"setuid","action":"allowed","reason":"the policy has it logged"}
a line that is cut"#;

    #[test]
    fn each_refusal_has_its_line_once() {
        let policy = Policy::parse("[files]\ndeny = ['/srv/keys']\nread-only = ['/srv/read']").unwrap();
        let text = suggest(LOG, &policy).unwrap();
        assert_eq!(
            text,
            "these lines of the policy would allow what was refused (11 times):\n\
             [calls]\nallow = [\"keyctl\"]\n\
             [files]\nread = [\"/etc/shadow\", \"/root/a b\"]\nwrite = [\"/root/a b\"]\n\
             [network]\nbind = [\"tcp:[::1]:80\"]\nconnect = [\"tcp:127.0.0.1:80\"]\n\
             # no line would allow openat of /srv/$HOME: no entry can name it\n\
             # no line would allow openat of /srv/keys/a: deny or read-only wins over read\n\
             # no line would allow openat of /srv/read/a: deny or read-only wins over write\n\
             # no line would allow openat of /tmp/*: no entry can name it\n\
             # no line would allow ptrace: the policy denies it\n"
        );
        Policy::parse(text.split_once('\n').unwrap().1).unwrap();
        assert_eq!(suggest("", &policy), None);
    }
}
