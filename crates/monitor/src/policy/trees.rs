//! Rights over files: each entry names a file, or a directory with all that lies beneath.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use bitflags::bitflags;

bitflags! {
    /// What may be done to a file.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Rights: u8 {
        /// Look at its metadata: stat(2), access(2), readlink(2).
        const STAT = 1;
        /// List it, a directory.
        const LIST = 2;
        /// Open it for reading.
        const READ = 4;
        /// Open it for writing, or change its length, times, mode, owner or attributes.
        const WRITE = 8;
        /// Make, remove and rename it and what lies in it.
        const CREATE = 16;
        /// Execute it.
        const EXECUTE = 32;
    }
}

/// Rights by path. All paths are absolute, without symbolic links, `.`, `..` or a slash at the end (the root is empty).
///
/// This is asked for every call by path, about each directory on the way. So all that is known of a path is one entry, and
/// the hashes of a path's beginnings are come by on the way to its own (FNV-1a). The keys are the policy's, who need not be
/// kept from choosing ones that collide.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trees {
    entries: HashMap<u64, Vec<Known>, BuildHasherDefault<Identity>>,
}

/// A path, and what a policy says of it. Paths with the same hash stand in one list.
type Known = (Vec<u8>, Entry);

/// What a policy says of one path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry {
    /// Allowed here and beneath.
    allowed: Option<Rights>,
    /// Refused here and beneath, even where another entry allows it.
    denied: bool,
    /// Not refused here and beneath by a `denied` above.
    excepted: bool,
    /// Neither changed nor made, here and beneath, even where another entry allows it.
    read_only: bool,
    /// New names may be made beneath, and are then the program's own.
    own: bool,
    /// May be looked at, but not what lies beneath: leads to what is allowed.
    leading: bool,
    /// May be looked at even where it is denied: leads to an exception.
    leading_to_exception: bool,
}

impl Entry {
    /// Whether one of these rights is refused here and beneath.
    fn denies(&self, rights: Rights) -> bool {
        let denials = Denials { closed: self.denied, read_only: self.read_only };
        denials.rights().intersects(rights)
    }
}

/// What the entries on the way to a path deny.
#[derive(Clone, Copy, Debug, Default)]
struct Denials {
    closed: bool,
    read_only: bool,
}

impl Denials {
    /// Takes in the next entry on the way.
    fn pass(self, entry: &Entry) -> Self {
        Self {
            closed: entry.denied || self.closed && !entry.excepted,
            read_only: entry.read_only || self.read_only,
        }
    }

    /// Returns the rights that are refused.
    fn rights(self) -> Rights {
        match self {
            Self { closed: true, .. } => Rights::all(),
            Self { read_only: true, .. } => Rights::WRITE | Rights::CREATE,
            _ => Rights::empty(),
        }
    }
}

/// A hash is its own.
#[derive(Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {}

    fn write_u64(&mut self, hash: u64) {
        // The table takes its groups from the lower bits and its tags from the upper ones; FNV's lower ones are good.
        self.0 = hash ^ hash.rotate_left(32);
    }
}

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

fn mixed(hash: u64, byte: u8) -> u64 {
    (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME)
}

fn hash(path: &[u8]) -> u64 {
    path.iter().fold(FNV_OFFSET, |hash, &byte| mixed(hash, byte))
}

/// Without the slash at the end, so that the root is empty and joining is appending.
pub(crate) fn trimmed(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1);
    &path[..end]
}

/// The directories that lead to `path`, the root (empty) first, and at last `path`.
fn prefixes(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    let slashes = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
    slashes.map(|at| &path[..at]).chain(std::iter::once(path)).filter({
        let mut last = None;
        move |prefix: &&[u8]| last.replace(prefix.len()) != Some(prefix.len())
    })
}

impl Trees {
    fn entry(&self, hash: u64, path: &[u8]) -> Option<&Entry> {
        self.entries.get(&hash)?.iter().find(|(known, _)| known == path).map(|(_, entry)| entry)
    }

    fn entry_mut(&mut self, path: &[u8]) -> &mut Entry {
        let same = self.entries.entry(hash(path)).or_default();
        let at = same.iter().position(|(known, _)| known == path).unwrap_or_else(|| {
            same.push((path.to_vec(), Entry::default()));
            same.len() - 1
        });
        &mut same[at].1
    }

    fn all(&self) -> impl Iterator<Item = (&[u8], &Entry)> {
        self.entries.values().flatten().map(|(path, entry)| (path.as_slice(), entry))
    }

    /// Allows `rights` for `path` and what lies beneath.
    pub(crate) fn allow(&mut self, path: &[u8], rights: Rights) {
        let path = trimmed(path);
        let allowed = &mut self.entry_mut(path).allowed;
        *allowed = Some(allowed.unwrap_or(Rights::empty()) | rights | Rights::STAT);
        self.lead_to(path);
    }

    /// Lets new names be made beneath `path`.
    pub(crate) fn allow_own(&mut self, path: &[u8]) {
        self.entry_mut(trimmed(path)).own = true;
        self.lead_to(path);
    }

    /// Whether a new name `path` may be made, to be the program's own.
    pub(crate) fn owns(&self, path: &[u8]) -> bool {
        let path = trimmed(path);
        let own = prefixes(path).any(|prefix| {
            prefix.len() < path.len() && self.entry(hash(prefix), prefix).is_some_and(|entry| entry.own)
        });
        own && !self.denied(path).contains(Rights::CREATE)
    }

    /// Returns the rights over `path` that are refused even where another entry allows them.
    pub(crate) fn denied(&self, path: &[u8]) -> Rights {
        prefixes(trimmed(path))
            .filter_map(|prefix| self.entry(hash(prefix), prefix))
            .fold(Denials::default(), Denials::pass)
            .rights()
    }

    /// The directories in which new names may be made.
    pub(crate) fn own(&self) -> impl Iterator<Item = &[u8]> {
        self.all().filter(|(_, entry)| entry.own).map(|(path, _)| path)
    }

    /// Lets `path`, but nothing beneath, be looked at, and all that leads there.
    pub(crate) fn lead_to(&mut self, path: &[u8]) {
        for prefix in prefixes(trimmed(path)) {
            self.entry_mut(prefix).leading = true;
        }
    }

    /// Refuses everything at `path` and beneath.
    pub(crate) fn deny(&mut self, path: &[u8]) {
        self.entry_mut(trimmed(path)).denied = true;
    }

    /// Refuses to change, make and remove what is at `path` and beneath.
    pub(crate) fn deny_changes(&mut self, path: &[u8]) {
        self.entry_mut(trimmed(path)).read_only = true;
    }

    /// Leaves `path` and what lies beneath out of a [`deny`](Self::deny) above.
    pub(crate) fn except(&mut self, path: &[u8]) {
        let path = trimmed(path);
        self.entry_mut(path).excepted = true;
        for prefix in prefixes(path) {
            self.entry_mut(prefix).leading_to_exception = true;
        }
    }

    /// The rights over `path`.
    pub(crate) fn rights(&self, path: &[u8]) -> Rights {
        self.rights_by_entries_of(path, 0)
    }

    /// The rights over `path` that entries give whose own paths have this length or more.
    pub(crate) fn rights_by_entries_of(&self, path: &[u8], least: usize) -> Rights {
        let path = trimmed(path);
        let (mut rights, mut denials) = (Rights::empty(), Denials::default());
        let (mut leading, mut leading_to_exception) = (false, false);
        let mut hash = FNV_OFFSET;
        for at in 0..=path.len() {
            if path.get(at).is_none_or(|&byte| byte == b'/') {
                let entry = self.entry(hash, &path[..at]);
                denials = entry.map_or(denials, |entry| denials.pass(entry));
                if at >= least {
                    rights |= entry.and_then(|entry| entry.allowed).unwrap_or(Rights::empty());
                }
                // Of the last one, which is the path itself.
                leading = entry.is_some_and(|entry| entry.leading);
                leading_to_exception = entry.is_some_and(|entry| entry.leading_to_exception);
            }
            hash = path.get(at).map_or(hash, |&byte| mixed(hash, byte));
        }
        rights -= denials.rights();
        if leading && !denials.closed || leading_to_exception { rights | Rights::STAT } else { rights }
    }

    /// Whether some path beneath `path` has other rights than `path`: then the names beneath must stay what they are.
    pub(crate) fn differ_beneath(&self, path: &[u8]) -> bool {
        let path = trimmed(path);
        let rights = self.rights(path);
        self.all().any(|(other, entry)| {
            is_beneath(other, path)
                && (entry.denies(Rights::all())
                    || entry.excepted
                    || entry.allowed.is_some_and(|more| !rights.contains(more)))
        })
    }

    /// Whether one of these rights is refused somewhere beneath `path`, even where another entry allows it.
    pub(crate) fn denies_beneath(&self, path: &[u8], rights: Rights) -> bool {
        let path = trimmed(path);
        self.all().any(|(other, entry)| entry.denies(rights) && is_beneath(other, path))
    }

    /// Whether something beneath `path` is an exception from what is denied.
    pub(crate) fn excepts_beneath(&self, path: &[u8]) -> bool {
        let path = trimmed(path);
        self.all().any(|(other, entry)| entry.excepted && is_beneath(other, path))
    }

    /// What is allowed, and where: there and beneath.
    pub(crate) fn allowed(&self) -> impl Iterator<Item = (&[u8], Rights)> {
        self.all().filter_map(|(path, entry)| Some((path, entry.allowed?)))
    }

    /// What may be executed.
    pub(crate) fn executable(&self) -> impl Iterator<Item = &[u8]> {
        self.allowed().filter(|(_, rights)| rights.contains(Rights::EXECUTE)).map(|(path, _)| path)
    }

    /// Whether a right is allowed for everything, and nowhere refused.
    fn everywhere(&self, right: Rights) -> bool {
        let allowed = self.entry(FNV_OFFSET, b"").and_then(|entry| entry.allowed);
        allowed.is_some_and(|rights| rights.contains(right))
            && !self.all().any(|(_, entry)| entry.denies(right))
    }

    /// Whether everything may be executed.
    pub(crate) fn all_executable(&self) -> bool {
        self.everywhere(Rights::EXECUTE)
    }

    /// Whether everything may be looked at.
    pub(crate) fn all_visible(&self) -> bool {
        self.everywhere(Rights::STAT)
    }
}

fn is_beneath(other: &[u8], path: &[u8]) -> bool {
    other.starts_with(path) && other.get(path.len()) == Some(&b'/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_reach_down_but_not_sideways() {
        let mut trees = Trees::default();
        trees.allow(b"/usr", Rights::READ);
        trees.allow(b"/usr/bin/", Rights::EXECUTE);
        trees.allow(b"/home/u", Rights::READ | Rights::WRITE | Rights::CREATE);
        trees.deny(b"/home/u/.ssh");
        let rights = |path: &str| trees.rights(path.as_bytes());
        assert_eq!(rights("/usr/bin/ls"), Rights::READ | Rights::EXECUTE | Rights::STAT);
        assert_eq!(rights("/usr/lib"), Rights::READ | Rights::STAT);
        assert_eq!(rights("/usrx"), Rights::empty());
        assert_eq!(rights("/"), Rights::STAT);
        assert_eq!(rights("/home"), Rights::STAT);
        assert_eq!(rights("/home/v"), Rights::empty());
        assert_eq!(rights("/home/u/.ssh/id"), Rights::empty());
        assert_eq!(rights("/home/u/.ssh"), Rights::empty());
        assert!(rights("/home/u/.sshx").contains(Rights::WRITE));
        assert!(trees.differ_beneath(b"/home/u") && trees.differ_beneath(b"/usr"));
        assert!(!trees.differ_beneath(b"/usr/bin") && !trees.all_executable() && !trees.all_visible());
    }

    #[test]
    fn new_names_are_made_beneath_and_not_where_it_is_denied() {
        let mut trees = Trees::default();
        trees.allow_own(b"/tmp");
        trees.deny(b"/tmp/closed");
        assert!(trees.owns(b"/tmp/a") && trees.owns(b"/tmp/a/b"));
        assert!(!trees.owns(b"/tmp") && !trees.owns(b"/tmp/closed/x") && !trees.owns(b"/tmpx"));
        assert_eq!((trees.rights(b"/tmp/a"), trees.rights(b"/tmp")), (Rights::empty(), Rights::STAT));
    }

    #[test]
    fn what_is_read_only_is_neither_changed_nor_made() {
        let mut trees = Trees::default();
        trees.allow(b"/", Rights::all());
        trees.allow_own(b"/project");
        trees.deny_changes(b"/project/.git");
        let rights = trees.rights(b"/project/.git/config");
        assert!(
            rights.contains(Rights::READ | Rights::EXECUTE)
                && !rights.intersects(Rights::WRITE | Rights::CREATE)
        );
        assert!(trees.owns(b"/project/new") && !trees.owns(b"/project/.git/new"));
        assert!(trees.differ_beneath(b"/project") && trees.denies_beneath(b"/project", Rights::all()));
        assert!(!trees.denies_beneath(b"/project", Rights::EXECUTE));
        assert!(trees.all_executable() && trees.all_visible());
        assert_eq!(trees.denied(b"/project/.git/x"), Rights::WRITE | Rights::CREATE);
        trees.deny(b"/project/.git/secret");
        assert!(
            trees.rights(b"/project/.git/secret").is_empty()
                && trees.denied(b"/project/.git/secret").is_all()
        );
    }

    #[test]
    fn exceptions_are_decided_by_the_other_entries() {
        let mut trees = Trees::default();
        trees.allow(b"/", Rights::READ);
        trees.allow_own(b"/home");
        trees.deny(b"/home/u");
        trees.except(b"/home/u/project/in");
        trees.deny(b"/home/u/project/in/keys");
        trees.deny_changes(b"/home/u/project");
        let rights = |path: &str| trees.rights(path.as_bytes());
        assert_eq!(rights("/home/u/project/in/file"), Rights::READ | Rights::STAT);
        assert_eq!((rights("/home/u/project"), rights("/home/u")), (Rights::STAT, Rights::STAT));
        assert_eq!(
            (rights("/home/u/other"), rights("/home/u/project/inside")),
            (Rights::empty(), Rights::empty())
        );
        assert_eq!(rights("/home/u/project/in/keys/a"), Rights::empty());
        assert!(
            trees.owns(b"/home/new") && !trees.owns(b"/home/u/new") && !trees.owns(b"/home/u/project/in/new")
        );
        assert!(trees.excepts_beneath(b"/home/u") && !trees.excepts_beneath(b"/home/u/project/in"));
        assert!(trees.differ_beneath(b"/home/u/project") && trees.denied(b"/home/u/other").is_all());
        assert_eq!(trees.denied(b"/home/u/project/in"), Rights::WRITE | Rights::CREATE);
    }

    #[test]
    fn the_root_is_a_tree() {
        let mut trees = Trees::default();
        trees.allow(b"/", Rights::all());
        assert_eq!(trees.rights(b"/"), Rights::all());
        assert_eq!(trees.rights(b"/a/b"), Rights::all());
        assert!(trees.all_executable() && trees.all_visible() && !trees.differ_beneath(b"/"));
        trees.deny(b"/a");
        assert!(!trees.all_executable() && trees.differ_beneath(b"/"));
    }
}
