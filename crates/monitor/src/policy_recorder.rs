//! A policy from what a program did.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use crate::policy::Rights;

/// As many names in one directory become the directory.
const MANY: usize = 6;

/// What was done.
#[derive(Debug, Default)]
pub(crate) struct PolicyRecorder {
    files: Mutex<BTreeMap<Vec<u8>, Rights>>,
    connect: Mutex<BTreeSet<String>>,
    bind: Mutex<BTreeSet<String>>,
    calls: Mutex<BTreeSet<&'static str>>,
}

#[derive(Serialize)]
struct Text {
    files: BTreeMap<&'static str, Vec<String>>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    network: BTreeMap<&'static str, Vec<String>>,
}

impl PolicyRecorder {
    pub(crate) fn file(&self, path: &[u8], rights: Rights) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        match files.get_mut(path) {
            Some(known) => *known |= rights,
            None => {
                files.insert(path.to_vec(), rights);
            }
        }
    }

    pub(crate) fn connect(&self, address: String) {
        self.connect.lock().unwrap_or_else(PoisonError::into_inner).insert(address);
    }

    pub(crate) fn bind(&self, address: String) {
        self.bind.lock().unwrap_or_else(PoisonError::into_inner).insert(address);
    }

    /// A call that is refused whatever a policy says, or unless it says so.
    pub(crate) fn call(&self, name: &'static str) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).insert(name);
    }

    /// The policy that allows what was done, and little more.
    pub(crate) fn policy(&self) -> String {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut text = Text { files: BTreeMap::new(), network: BTreeMap::new() };
        let kinds = [
            (Rights::STAT, "stat"),
            (Rights::LIST, "list"),
            (Rights::READ, "read"),
            (Rights::WRITE, "write"),
            (Rights::CREATE, "create"),
            (Rights::EXECUTE, "execute"),
        ];
        let mut implied: BTreeSet<Vec<u8>> = BTreeSet::new();
        for (right, name) in kinds.into_iter().rev() {
            let mut of_kind: BTreeSet<_> = files
                .iter()
                .filter(|(_, rights)| rights.contains(right))
                .map(|(path, _)| path.clone())
                .collect();
            if right == Rights::STAT {
                // Every entry may be looked at, and the directories that lead there: these must not stand for all beneath them.
                of_kind
                    .retain(|path| !implied.iter().any(|entry| covers(entry, path) || covers(path, entry)));
                let looked_at = of_kind.clone();
                of_kind.retain(|path| !looked_at.iter().any(|other| other != path && covers(path, other)));
            }
            let mut paths = gathered(of_kind, right);
            if right != Rights::STAT {
                implied.extend(paths.iter().cloned());
            }
            if right == Rights::LIST {
                let read: BTreeSet<_> = text
                    .files
                    .get("read")
                    .into_iter()
                    .flatten()
                    .map(|path| path.clone().into_bytes())
                    .collect();
                paths.retain(|path| !read.iter().any(|entry| covers(entry, path)));
            }
            if !paths.is_empty() {
                let paths = paths.into_iter().map(|path| escaped(&path)).collect();
                text.files.insert(name, paths);
            }
        }
        for (name, set) in [("connect", &self.connect), ("bind", &self.bind)] {
            let set = set.lock().unwrap_or_else(PoisonError::into_inner);
            if !set.is_empty() {
                text.network.insert(name, set.iter().cloned().collect());
            }
        }
        let mut written = String::from("# PolicyRecorder from a run: read it before you rely on it.\n");
        for call in self.calls.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            written += &format!("# The program tried {call}, which stays refused.\n");
        }
        written + &toml::to_string_pretty(&text).unwrap_or_default()
    }
}

/// Whether `path` lies at or beneath `entry`.
fn covers(entry: &[u8], path: &[u8]) -> bool {
    let entry = crate::policy::trees::trimmed(entry);
    path.starts_with(entry) && matches!(path.get(entry.len()), None | Some(b'/'))
}

/// A policy's entry takes `$` as a variable; a path with one, or with bytes that are no text, is left to people.
fn escaped(path: &[u8]) -> String {
    String::from_utf8_lossy(if path.is_empty() { b"/" } else { path }).into_owned()
}

/// Fewer entries: directories in which many files were used stand for them. Made files stand for their directory at once,
/// because the next run will name them differently; and what may be executed is named one by one.
fn gathered(paths: BTreeSet<Vec<u8>>, right: Rights) -> BTreeSet<Vec<u8>> {
    let many = if right == Rights::EXECUTE { usize::MAX } else { MANY };
    let mut paths = paths;
    // Deepest first, and again for what that yields.
    for _ in 0..2 {
        let mut by_parent: BTreeMap<Vec<u8>, usize> = BTreeMap::new();
        for path in &paths {
            *by_parent.entry(parent(path).to_vec()).or_default() += 1;
        }
        let tops: Vec<Vec<u8>> = by_parent
            .into_iter()
            // Never the root or a directory at its top, which would allow too much.
            .filter(|(parent, count)| {
                *count >= many && parent.iter().filter(|&&byte| byte == b'/').count() >= 2
            })
            .map(|(parent, _)| parent)
            .collect();
        paths.retain(|path| !tops.iter().any(|top| covers(top, path)));
        paths.extend(tops);
    }
    let all = paths.clone();
    paths.retain(|path| !all.iter().any(|other| other != path && covers(other, path)));
    paths
}

fn parent(path: &[u8]) -> &[u8] {
    &path[..path.iter().rposition(|&byte| byte == b'/').unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_learnt_is_a_policy() {
        let recorder = PolicyRecorder::default();
        for name in 0..10 {
            recorder.file(format!("/usr/share/many/{name}").as_bytes(), Rights::READ);
        }
        recorder.file(b"/usr/bin/prog", Rights::EXECUTE);
        recorder.file(b"/usr", Rights::STAT);
        recorder.file(b"/etc/some.conf", Rights::READ | Rights::STAT);
        recorder.file(b"/srv/data/new", Rights::CREATE | Rights::WRITE);
        recorder.connect("127.0.0.1:80".to_owned());
        let text = recorder.policy();
        let policy = crate::Policy::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert!(policy.rights(b"/usr/share/many/11").contains(Rights::READ), "{text}");
        assert!(policy.rights(b"/usr/bin/prog").contains(Rights::EXECUTE));
        assert!(!policy.rights(b"/usr/bin/other").contains(Rights::EXECUTE));
        assert!(policy.rights(b"/etc/some.conf").contains(Rights::READ));
        assert!(!policy.rights(b"/etc/other.conf").contains(Rights::READ));
        assert!(policy.rights(b"/srv/data/new").contains(Rights::CREATE | Rights::WRITE));
        assert!(text.contains("127.0.0.1:80"));
    }

    #[test]
    fn a_directory_that_was_looked_at_does_not_stand_for_what_is_beneath() {
        let recorder = PolicyRecorder::default();
        recorder.file(b"/usr/bin/prog", Rights::EXECUTE);
        for path in [&b"/"[..], b"/usr", b"/srv", b"/srv/one", b"/srv/one/readme", b"/home"] {
            recorder.file(path, Rights::STAT);
        }
        let text = recorder.policy();
        let policy = crate::Policy::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        for path in [&b"/"[..], b"/usr", b"/srv", b"/srv/one", b"/srv/one/readme", b"/home"] {
            assert!(policy.rights(path).contains(Rights::STAT), "{}: {text}", String::from_utf8_lossy(path));
        }
        assert!(!policy.rights(b"/srv/one/other").contains(Rights::STAT), "{text}");
        assert!(!policy.rights(b"/srv/two").contains(Rights::STAT), "{text}");
    }
}
