//! Which entries of a policy a run did not use.
//!
//! A policy grows while programs change, and what nothing uses any more still allows what an attacker needs. An audit records, while
//! the policy holds as ever, what it allowed, and compares that with each entry afterwards. To see all of it the filter asks about
//! paths and addresses even where everything is allowed, as it does to learn, and about the calls that the policy names under `allow`.
//! Entries that refuse are for what should not happen: they are none to remove because it did not.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use orrery_policy::{Document, Fault};
use syscalls::Sysno;
use toml::Spanned;

use crate::Error;
use crate::perform::{About, HANDLERS};
use crate::policy::network::Allowed;
use crate::policy::syscalls::named;
use crate::policy::text::{addresses, entry_path, of};
use crate::policy::{Rights, network::permits};
use crate::policy_recorder::{PolicyRecorder, covers};
use crate::state::State;

/// The entries of a policy that allow something.
#[derive(Debug)]
pub struct Audit {
    grants: Vec<Grant>,
}

/// An entry that allows something.
#[derive(Debug)]
struct Grant {
    unused: Unused,
    allows: Allows,
}

#[derive(Debug)]
enum Allows {
    /// What may be done to what lies at this path or beneath.
    Files(Vec<u8>, Rights),
    /// New names beneath this path.
    Own(Vec<u8>),
    Connect(Allowed),
    Bind(Allowed),
    Call(Sysno),
}

/// An entry that a run did not use.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unused {
    /// The line of the policy, counted from 1.
    pub line: usize,
    /// The column, counted from 1.
    pub column: usize,
    /// The section that has the entry.
    pub section: &'static str,
    /// The key of the section.
    pub key: &'static str,
    /// The entry, as it is written.
    pub entry: String,
}

/// What a policy has allowed to a program under audit ([`Guard::audit`](crate::Guard::audit)).
#[derive(Clone, Debug)]
pub struct Usage(pub(crate) Arc<State>);

impl Audit {
    /// Reads the entries of the policy in a file. Paths mean what they mean when this is called: before the program starts.
    ///
    /// # Errors
    /// As of [`Policy::load`](crate::Policy::load).
    pub fn load(path: &Path) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| Error::ReadPolicy { path: path.to_owned(), source })?;
        Self::parse(&text, &path.display().to_string())
    }

    fn parse(text: &str, name: &str) -> Result<Self, Error> {
        let document = Document::parse(text, name)?;
        let grants = grants(&document).map_err(|fault| document.error(fault))?;
        Ok(Self { grants })
    }

    /// Returns the entries that allowed nothing, in the order of the text.
    #[must_use]
    pub fn unused(&self, usage: &Usage) -> Vec<Unused> {
        self.unused_of(&usage.0.recorder)
    }

    fn unused_of(&self, recorder: &PolicyRecorder) -> Vec<Unused> {
        let (files, calls) = (recorder.files(), recorder.calls());
        let (connected, bound) = recorder.addresses();
        let is_used = |allows: &Allows| match allows {
            Allows::Files(entry, rights) => {
                files.iter().any(|(path, used)| used.intersects(*rights) && covers(entry, path))
            }
            Allows::Own(entry) => recorder.all_made().iter().any(|path| path != entry && covers(entry, path)),
            Allows::Connect(entry) => {
                connected.iter().any(|address| permits(std::slice::from_ref(entry), address))
            }
            Allows::Bind(entry) => bound.iter().any(|address| permits(std::slice::from_ref(entry), address)),
            Allows::Call(call) => calls.contains(call.name()),
        };
        let unused = self.grants.iter().filter(|grant| !is_used(&grant.allows));
        let by_place: BTreeMap<_, _> =
            unused.map(|grant| ((grant.unused.line, grant.unused.column), grant.unused.clone())).collect();
        by_place.into_values().collect()
    }
}

fn grants(document: &Document) -> Result<Vec<Grant>, Fault> {
    let mut grants = Vec::new();
    let mut add = |(section, key), entry: &Spanned<String>, allows| {
        let place = document.error(Fault { span: entry.span(), message: String::new() });
        let (line, column, entry) = (place.line, place.column, entry.get_ref().clone());
        grants.push(Grant { unused: Unused { line, column, section, key, entry }, allows });
    };
    let files = document.files();
    let kinds = [
        ("stat", &files.stat, Rights::STAT),
        ("list", &files.list, Rights::LIST),
        ("read", &files.read, Rights::READ | Rights::LIST),
        ("write", &files.write, Rights::WRITE),
        ("create", &files.create, Rights::CREATE),
        ("execute", &files.execute, Rights::EXECUTE),
        ("except", &files.except, Rights::all()),
    ];
    for (key, entries, rights) in kinds {
        for entry in entries {
            add(("files", key), entry, Allows::Files(of(entry, entry_path)?, rights));
        }
    }
    for entry in &files.own {
        add(("files", "own"), entry, Allows::Own(of(entry, entry_path)?));
    }
    let network = document.network();
    for (entry, allowed) in network.connect.iter().zip(addresses(&network.connect)?) {
        add(("network", "connect"), entry, Allows::Connect(allowed));
    }
    for (entry, allowed) in network.bind.iter().zip(addresses(&network.bind)?) {
        add(("network", "bind"), entry, Allows::Bind(allowed));
    }
    for entry in &document.calls().allow {
        let call = of(entry, named)?;
        if is_seen(call) {
            add(("calls", "allow"), entry, Allows::Call(call));
        }
    }
    Ok(grants)
}

/// Whether an audit sees each of these calls. Those about other processes are asked about by their arguments.
fn is_seen(call: Sysno) -> bool {
    match HANDLERS.iter().find(|(name, ..)| *name == call.name()) {
        Some((_, about, _)) => {
            matches!(about, About::Looking | About::Files | About::Network | About::Caller | About::Shared)
        }
        None => can_be_asked(call),
    }
}

/// Whether the filter can ask about calls that are only recorded: not about those that a program makes before it has a monitor, and
/// not about ends and beginnings of threads and handlers.
pub(crate) fn can_be_asked(call: Sysno) -> bool {
    call != Sysno::write && !crate::filter_rules::ALWAYS.contains(&call.name())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::network::Address;

    const POLICY: &str = r#"[files]
read = ["/usr", "/etc"]
stat = ["/"]
write = ["/srv/out"]
execute = ["/usr/bin/env",
  "/usr/bin/true"]
own = ["/tmp", "/var/tmp"]
deny = ["/srv/keys"]

[network]
connect = ["127.0.0.1:80", "10.0.0.0/8:*"]
bind = ["*"]

[calls]
allow = ["keyctl", "bpf", "kill", "exit", "write"]
deny = ["ptrace"]
"#;

    fn unused(recorder: &PolicyRecorder) -> Vec<String> {
        let unused = Audit::parse(POLICY, "policy").unwrap().unused_of(recorder);
        let shown = unused
            .iter()
            .map(|one| format!("{}:{} {}.{} {}", one.line, one.column, one.section, one.key, one.entry));
        shown.collect()
    }

    #[test]
    fn entries_that_allowed_nothing_are_found_with_their_places() {
        let recorder = PolicyRecorder::default();
        assert_eq!(
            unused(&recorder),
            [
                "2:9 files.read /usr",
                "2:17 files.read /etc",
                "3:9 files.stat /",
                "4:10 files.write /srv/out",
                "5:12 files.execute /usr/bin/env",
                "6:3 files.execute /usr/bin/true",
                "7:8 files.own /tmp",
                "7:16 files.own /var/tmp",
                "11:12 network.connect 127.0.0.1:80",
                "11:28 network.connect 10.0.0.0/8:*",
                "12:9 network.bind *",
                "15:10 calls.allow keyctl",
                "15:20 calls.allow bpf",
            ],
            "what refuses, and what an audit does not see, is not among them"
        );
        // Rights of another kind, and paths beside, use nothing.
        recorder.file(b"/usr/lib/x", Rights::LIST);
        recorder.file(b"/etc/hosts", Rights::WRITE);
        recorder.file(b"/srv/output", Rights::WRITE);
        recorder.file(b"/usr/bin/true", Rights::EXECUTE | Rights::STAT);
        recorder.file(b"/tmp", Rights::CREATE);
        recorder.made(b"/var/tmp/x");
        recorder.connect(&Address::Internet(None, [10, 1, 2, 3].into(), 443));
        recorder.bind(&Address::Other(16));
        recorder.call("keyctl");
        assert_eq!(
            unused(&recorder),
            [
                "2:17 files.read /etc",
                "4:10 files.write /srv/out",
                "5:12 files.execute /usr/bin/env",
                "7:8 files.own /tmp",
                "11:12 network.connect 127.0.0.1:80",
                "15:20 calls.allow bpf",
            ]
        );
    }
}
