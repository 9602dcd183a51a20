//! A policy from what a program did.
//!
//! What a program made itself will have other names the next time, or be there already. So of what is gone at the end,
//! or has a name that looks made up, the directory is learnt as one in which the program makes its own files (`own`);
//! what is still there is learnt by its name, with all that was done to it and beneath it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use toml_edit::{Array, DocumentMut, Item, Table, Value};

use crate::policy::network::{Address, described, permits};
use crate::policy::{Policy, Rights};

/// As many names in one directory become the directory.
const MANY: usize = 6;
/// Who makes as many names in one directory makes others the next time.
const SEVERAL: usize = 3;

/// What was done.
#[derive(Debug, Default)]
pub(crate) struct PolicyRecorder {
    files: Mutex<BTreeMap<Vec<u8>, Rights>>,
    /// Names that were not there before.
    made: Mutex<BTreeSet<Vec<u8>>>,
    /// Files that got another name: by link(2) besides, by rename(2) instead.
    second_names: Mutex<Vec<(Vec<u8>, Vec<u8>)>>,
    connect: Mutex<BTreeMap<String, Address>>,
    bind: Mutex<BTreeMap<String, Address>>,
    calls: Mutex<BTreeSet<&'static str>>,
}

/// What a policy has to say besides what it says already.
#[derive(Debug, Default)]
struct Learnt {
    /// By section and key.
    entries: BTreeMap<(&'static str, &'static str), BTreeSet<String>>,
    /// A comment for the reader.
    remarks: Vec<String>,
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PolicyRecorder {
    pub(crate) fn file(&self, path: &[u8], rights: Rights) {
        let mut files = held(&self.files);
        match files.get_mut(path) {
            Some(known) => *known |= rights,
            None => {
                files.insert(path.to_vec(), rights);
            }
        }
    }

    /// Something was made that had not been there.
    pub(crate) fn made(&self, path: &[u8]) {
        held(&self.made).insert(path.to_vec());
    }

    /// Whether this, or a directory above it, was made.
    pub(crate) fn is_made(&self, path: &[u8]) -> bool {
        top(&held(&self.made), path).is_some()
    }

    /// A file got another name, which must not have rights that the first has not.
    pub(crate) fn second_name(&self, from: &[u8], to: &[u8]) {
        held(&self.second_names).push((from.to_vec(), to.to_vec()));
    }

    pub(crate) fn connect(&self, address: &Address) {
        held(&self.connect).insert(described(address), address.clone());
    }

    pub(crate) fn bind(&self, address: &Address) {
        held(&self.bind).insert(described(address), address.clone());
    }

    /// A call that is refused under every policy, or unless it says so; in an audit, one that the policy names and allows.
    pub(crate) fn call(&self, name: &'static str) {
        held(&self.calls).insert(name);
    }

    /// What was done to which files.
    pub(crate) fn files(&self) -> BTreeMap<Vec<u8>, Rights> {
        held(&self.files).clone()
    }

    /// All that was made.
    pub(crate) fn all_made(&self) -> BTreeSet<Vec<u8>> {
        held(&self.made).clone()
    }

    /// What was connected to, and what was bound.
    pub(crate) fn addresses(&self) -> (Vec<Address>, Vec<Address>) {
        let all = |of: &Mutex<BTreeMap<String, Address>>| held(of).values().cloned().collect();
        (all(&self.connect), all(&self.bind))
    }

    /// The calls.
    pub(crate) fn calls(&self) -> BTreeSet<&'static str> {
        held(&self.calls).clone()
    }

    /// The text of a policy that allows what `known` allows and what was done, and little more. `text` is that of
    /// `known`; what it says stays as it is written.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub(crate) fn policy(&self, known: &Policy, text: &str) -> Result<String, String> {
        let learnt = self.learnt(known);
        let mut document: DocumentMut = text.parse().map_err(|error| format!("{error}"))?;
        for ((section, key), entries) in &learnt.entries {
            let table = document.entry(section).or_insert(Item::Table(Table::new()));
            let table = table.as_table_like_mut().ok_or_else(|| format!("{section} is no section"))?;
            let list = table.entry(key).or_insert(Item::Value(Value::Array(Array::new())));
            let list = list.as_array_mut().ok_or_else(|| format!("{key} is no list"))?;
            for entry in entries {
                if !list.iter().any(|known| known.as_str() == Some(entry)) {
                    list.push_formatted(Value::from(entry.as_str()).decorated("\n    ", ""));
                }
            }
            list.set_trailing("\n");
            list.set_trailing_comma(true);
        }
        let mut written = document.to_string();
        if text.is_empty() {
            written.insert_str(0, "# Learnt from a run: read it before you rely on it.\n");
        }
        for remark in learnt.remarks.iter().filter(|remark| !text.contains(remark.as_str())) {
            written += &format!("# {remark}\n");
        }
        Ok(written)
    }

    fn learnt(&self, known: &Policy) -> Learnt {
        let mut learnt = Learnt::default();
        let made = held(&self.made).clone();
        let (files, own) = self.generalised(&made);
        let own: Vec<_> =
            own.into_iter().filter(|path| !known.trees.owns(&[path, b"/x".as_slice()].concat())).collect();
        let mut lists: BTreeMap<&'static str, BTreeSet<Vec<u8>>> =
            by_right(files, known, &mut learnt.remarks);
        lists.insert("own", own.iter().cloned().collect());
        for (name, paths) in lists {
            let mut entries = BTreeSet::new();
            for path in paths {
                match written(&path) {
                    Some(text) => {
                        entries.insert(text);
                    }
                    None => learnt.remarks.push(format!(
                        "The program used {:?}, which no policy can name: name the directory.",
                        String::from_utf8_lossy(&path)
                    )),
                }
            }
            if !entries.is_empty() {
                learnt.entries.insert(("files", name), entries);
            }
        }
        let lists =
            [("connect", &self.connect, &known.network.connect), ("bind", &self.bind, &known.network.bind)];
        for (name, recorded, allowed) in lists {
            // A Unix socket of its own is as the file is.
            let its_own = |address: &Address| match address {
                Address::Path(path) => own.iter().any(|own| covers(own, path)) && top(&made, path).is_some(),
                _ => false,
            };
            let recorded = held(recorded);
            let new = recorded.iter().filter(|(_, address)| !permits(allowed, address) && !its_own(address));
            let new: BTreeSet<_> = new.map(|(text, _)| text.clone()).collect();
            if !new.is_empty() {
                learnt.entries.insert(("network", name), new);
            }
        }
        let calls = held(&self.calls);
        learnt
            .remarks
            .extend(calls.iter().map(|call| format!("The program tried {call}, which stays refused.")));
        learnt
    }

    /// What was done to which files, where those that were made are named by what will be there the next time; and the
    /// directories in which the program makes its own.
    fn generalised(&self, made: &BTreeSet<Vec<u8>>) -> (BTreeMap<Vec<u8>, Rights>, BTreeSet<Vec<u8>>) {
        let mut recorded = held(&self.files).clone();
        for (from, to) in held(&self.second_names).iter().rev() {
            let gained = recorded
                .iter()
                .filter(|(path, _)| covers(to, path))
                .fold(Rights::empty(), |all, (_, rights)| all | *rights);
            *recorded.entry(from.clone()).or_insert(Rights::empty()) |= gained - Rights::EXECUTE;
        }
        let (mut files, mut tops) = (BTreeMap::new(), BTreeMap::new());
        let add = |to: &mut BTreeMap<Vec<u8>, Rights>, path: &[u8], rights: Rights| {
            *to.entry(path.to_vec()).or_insert(Rights::empty()) |= rights;
        };
        for (path, rights) in &recorded {
            match top(made, path) {
                Some(top) => add(&mut tops, top, *rights),
                None => add(&mut files, path, *rights),
            }
        }
        let mut own = BTreeSet::new();
        let mut kept: BTreeMap<&[u8], usize> = BTreeMap::new();
        for (path, rights) in &tops {
            let directory = parent(path);
            // What is not there yet cannot be listed for the kernel to execute.
            if rights.contains(Rights::EXECUTE) {
                add(&mut files, directory, Rights::EXECUTE);
            }
            let there = Path::new(OsStr::from_bytes(path)).symlink_metadata().is_ok();
            if there || directory.is_empty() {
                // What it made it may read when it finds it there the next time.
                add(&mut files, path, (*rights - Rights::EXECUTE) | Rights::READ);
                let made_up = is_made_up(path.rsplit(|&byte| byte == b'/').next().unwrap_or_default());
                let new = made_up || is_everybodys(directory);
                *kept.entry(directory).or_default() += if new { SEVERAL } else { 1 };
            } else {
                own.insert(directory.to_vec());
            }
        }
        // Further names will be made there, and found again by later runs, but where everybody makes names.
        for (directory, names) in kept {
            if names >= SEVERAL && !directory.is_empty() {
                own.insert(directory.to_vec());
                if !is_everybodys(directory) {
                    add(&mut files, directory, Rights::READ);
                }
            }
        }
        let all = own.clone();
        own.retain(|path| !all.iter().any(|other| other != path && covers(other, path)));
        (files, own)
    }
}

/// Files by what may be done to them, as few entries as possible, without what is known.
fn by_right(
    mut files: BTreeMap<Vec<u8>, Rights>,
    known: &Policy,
    remarks: &mut Vec<String>,
) -> BTreeMap<&'static str, BTreeSet<Vec<u8>>> {
    files.retain(|path, rights| {
        if known.trees.denied(path).intersects(*rights) {
            remarks.push(format!(
                "The program used {:?}, which is denied or read-only.",
                String::from_utf8_lossy(path)
            ));
            return false;
        }
        !known.rights(path).contains(*rights)
    });
    let kinds = [
        (Rights::STAT, "stat"),
        (Rights::LIST, "list"),
        (Rights::READ, "read"),
        (Rights::WRITE, "write"),
        (Rights::CREATE, "create"),
        (Rights::EXECUTE, "execute"),
    ];
    let mut lists: BTreeMap<&'static str, BTreeSet<Vec<u8>>> = BTreeMap::new();
    let mut implied: BTreeSet<Vec<u8>> = BTreeSet::new();
    for (right, name) in kinds.into_iter().rev() {
        let mut of_kind: BTreeSet<_> = files
            .iter()
            .filter(|(path, rights)| rights.contains(right) && !known.rights(path).contains(right))
            .map(|(path, _)| path.clone())
            .collect();
        if right == Rights::STAT {
            // Every entry may be looked at, and the directories that lead there: these must not stand for all beneath
            // them.
            of_kind.retain(|path| !implied.iter().any(|entry| covers(entry, path) || covers(path, entry)));
            let looked_at = of_kind.clone();
            of_kind.retain(|path| !looked_at.iter().any(|other| other != path && covers(path, other)));
        }
        let mut paths = gathered(of_kind, right);
        if right != Rights::STAT {
            implied.extend(paths.iter().cloned());
        }
        if right == Rights::LIST
            && let Some(read) = lists.get("read")
        {
            paths.retain(|path| !read.iter().any(|entry| covers(entry, path)));
        }
        lists.insert(name, paths);
    }
    lists
}

/// The shortest beginning of `path` that was made.
fn top<'p>(made: &BTreeSet<Vec<u8>>, path: &'p [u8]) -> Option<&'p [u8]> {
    let slashes = path.iter().enumerate().filter(|(at, byte)| **byte == b'/' && *at > 0);
    slashes.map(|(at, _)| &path[..at]).chain([path]).find(|prefix| made.contains(*prefix))
}

/// Whether a directory is one like `/tmp`, in which everybody makes files of their own.
fn is_everybodys(path: &[u8]) -> bool {
    const STICKY: u32 = 0o1002;
    let known = Path::new(OsStr::from_bytes(path)).metadata();
    known.is_ok_and(|known| known.permissions().mode() & STICKY == STICKY)
}

/// Whether a name looks as if it were another one the next time: it has a run of letters and digits that is long and
/// has both, or is a long number.
fn is_made_up(name: &[u8]) -> bool {
    name.split(|byte| !byte.is_ascii_alphanumeric()).any(|run| {
        let digits = run.iter().filter(|byte| byte.is_ascii_digit()).count();
        run.len() >= 6 && digits > 0 && digits < run.len() || run.len() >= 4 && digits == run.len()
    })
}

/// Whether `path` lies at or beneath `entry`.
pub(crate) fn covers(entry: &[u8], path: &[u8]) -> bool {
    let entry = crate::policy::trees::trimmed(entry);
    path.starts_with(entry) && matches!(path.get(entry.len()), None | Some(b'/'))
}

/// A path as a policy's entry, which takes `$` as a variable and knows no `*`.
fn written(path: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(if path.is_empty() { b"/" } else { path }).ok()?;
    (!text.contains(['$', '*'])).then(|| text.to_owned())
}

/// Fewer entries: directories in which many files were used stand for them. What may be executed is named one by one.
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

    fn nothing() -> Policy {
        Policy::parse("").unwrap()
    }

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
        recorder.connect(&Address::Internet(None, [127, 0, 0, 1].into(), 80));
        let text = recorder.policy(&nothing(), "").unwrap();
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
        let text = recorder.policy(&nothing(), "").unwrap();
        let policy = crate::Policy::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        for path in [&b"/"[..], b"/usr", b"/srv", b"/srv/one", b"/srv/one/readme", b"/home"] {
            assert!(policy.rights(path).contains(Rights::STAT), "{}: {text}", String::from_utf8_lossy(path));
        }
        assert!(!policy.rights(b"/srv/one/other").contains(Rights::STAT), "{text}");
        assert!(!policy.rights(b"/srv/two").contains(Rights::STAT), "{text}");
    }

    #[test]
    fn names_that_look_made_up_are_told_from_others() {
        for name in ["tmpgurk2txb", "ccX8aB1o.o", "sed7Hj3kQ", "2026-11-23T22_01_00-debug-0.log", "x.4711"] {
            assert!(is_made_up(name.as_bytes()), "{name}");
        }
        for name in ["out", "a.out", "index.lock", "file1", "readme.txt", "v1.2.3"] {
            assert!(!is_made_up(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn what_was_made_is_learnt_as_it_will_be() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().canonicalize().unwrap();
        let at = |name: &str| base.join(name).into_os_string().into_encoded_bytes();
        std::fs::write(base.join("kept"), "").unwrap();
        let recorder = PolicyRecorder::default();
        for (name, rights) in [
            ("kept", Rights::CREATE | Rights::WRITE),
            ("cache/gone", Rights::CREATE | Rights::WRITE),
            ("tree", Rights::CREATE),
            ("tree/beneath", Rights::READ),
        ] {
            recorder.file(&at(name), rights);
        }
        std::fs::create_dir(base.join("tree")).unwrap();
        ["kept", "cache/gone", "tree", "tree/beneath"].iter().for_each(|name| recorder.made(&at(name)));
        let text = recorder.policy(&nothing(), "").unwrap();
        let policy = Policy::parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert!(policy.rights(&at("kept")).contains(Rights::CREATE | Rights::WRITE), "{text}");
        assert!(policy.rights(&at("tree/other")).contains(Rights::CREATE | Rights::READ), "{text}");
        assert!(policy.trees.owns(&at("cache/other")) && !policy.trees.owns(&at("other")), "{text}");
        assert!(!policy.rights(&at("cache/gone")).contains(Rights::WRITE), "{text}");
    }

    #[test]
    fn what_is_known_stays_as_it_is_written() {
        let text = "# By hand.\nrefusal = \"ENOENT\"\n\n[files]\nread = [\"/usr\"] # all of it\ndeny = [\"/srv/keys\"]\n";
        let recorder = PolicyRecorder::default();
        recorder.file(b"/usr/lib/x", Rights::READ);
        recorder.file(b"/srv/a", Rights::READ);
        recorder.file(b"/srv/keys/b", Rights::READ);
        recorder.file(b"/srv/$odd", Rights::READ);
        let merged = recorder.policy(&Policy::parse(text).unwrap(), text).unwrap();
        let policy = Policy::parse(&merged).unwrap_or_else(|error| panic!("{error}\n{merged}"));
        assert!(
            merged.starts_with("# By hand.\nrefusal = \"ENOENT\"") && merged.contains("# all of it"),
            "{merged}"
        );
        assert!(
            !merged.contains("/usr/lib") && merged.contains("keys/b\", which is denied or read-only"),
            "{merged}"
        );
        assert!(merged.contains("/srv/$odd\", which no policy can name"), "{merged}");
        assert!(policy.rights(b"/srv/a").contains(Rights::READ));
        assert_eq!(
            recorder.policy(&policy, &merged).unwrap(),
            merged,
            "the second time there is nothing new"
        );
    }
}
