//! Rights over files: each entry names a file, or a directory with all that lies beneath.

use std::collections::HashMap;

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
#[derive(Clone, Debug, Default)]
pub(crate) struct Trees {
    /// What is allowed beneath.
    allowed: HashMap<Vec<u8>, Rights>,
    /// What is refused beneath, whatever is allowed.
    denied: HashMap<Vec<u8>, ()>,
    /// What may be looked at, but not what lies beneath: the directories that lead to what is allowed.
    leading: HashMap<Vec<u8>, ()>,
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
    /// Allows `rights` for `path` and what lies beneath.
    pub(crate) fn allow(&mut self, path: &[u8], rights: Rights) {
        let path = trimmed(path);
        let entry = self.allowed.entry(path.to_vec()).or_insert(Rights::empty());
        *entry |= rights | Rights::STAT;
        self.lead_to(path);
    }

    /// Lets `path`, but nothing beneath, be looked at, and all that leads there.
    pub(crate) fn lead_to(&mut self, path: &[u8]) {
        for prefix in prefixes(trimmed(path)) {
            self.leading.insert(prefix.to_vec(), ());
        }
    }

    /// Refuses everything at `path` and beneath.
    pub(crate) fn deny(&mut self, path: &[u8]) {
        self.denied.insert(trimmed(path).to_vec(), ());
    }

    /// The rights over `path`.
    pub(crate) fn rights(&self, path: &[u8]) -> Rights {
        let path = trimmed(path);
        let mut rights = Rights::empty();
        for prefix in prefixes(path) {
            if self.denied.contains_key(prefix) {
                return Rights::empty();
            }
            if let Some(more) = self.allowed.get(prefix) {
                rights |= *more;
            }
        }
        if !rights.contains(Rights::STAT) && self.leading.contains_key(path) {
            rights |= Rights::STAT;
        }
        rights
    }

    /// Whether some path beneath `path` has other rights than `path`: then the names beneath must stay what they are.
    pub(crate) fn differ_beneath(&self, path: &[u8]) -> bool {
        let path = trimmed(path);
        let beneath =
            |other: &[u8]| other.len() > path.len() && other.starts_with(path) && other[path.len()] == b'/';
        let rights = self.rights(path);
        self.denied.keys().any(|other| beneath(other))
            || self.allowed.iter().any(|(other, more)| beneath(other) && !rights.contains(*more))
    }

    /// Whether something beneath `path` is refused whatever is allowed.
    pub(crate) fn denies_beneath(&self, path: &[u8]) -> bool {
        let path = trimmed(path);
        self.denied.keys().any(|other| other.starts_with(path) && other.get(path.len()) == Some(&b'/'))
    }

    /// What may be executed, and what is refused beneath.
    pub(crate) fn executable(&self) -> impl Iterator<Item = &[u8]> {
        self.allowed
            .iter()
            .filter(|(_, rights)| rights.contains(Rights::EXECUTE))
            .map(|(path, _)| path.as_slice())
    }

    /// Whether everything may be executed.
    pub(crate) fn all_executable(&self) -> bool {
        self.denied.is_empty()
            && self.allowed.get(b"".as_slice()).is_some_and(|rights| rights.contains(Rights::EXECUTE))
    }

    /// Whether everything may be looked at.
    pub(crate) fn all_visible(&self) -> bool {
        self.denied.is_empty() && self.allowed.contains_key(b"".as_slice())
    }
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
