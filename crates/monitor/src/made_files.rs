//! Files that guarded programs have made in directories where they may make their own (`own` of a policy).
//!
//! They are known by name: a name that a program made is its own until the program removes it, though others may have
//! the file open.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use crate::policy::Rights;

/// What a program may do with what it made: anything but execute it, which the kernel would not let it.
pub(crate) const OWN: Rights = Rights::all().difference(Rights::EXECUTE);

/// Names that guarded programs made.
#[derive(Debug, Default)]
pub(crate) struct MadeFiles {
    names: Mutex<HashSet<Vec<u8>>>,
}

impl MadeFiles {
    fn names(&self) -> std::sync::MutexGuard<'_, HashSet<Vec<u8>>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A program has made this.
    pub(crate) fn insert(&self, path: &[u8]) {
        self.names().insert(path.to_vec());
    }

    /// A program has removed this, or moved it away.
    pub(crate) fn remove(&self, path: &[u8]) {
        self.names().remove(path);
    }

    /// Whether a program made this, or a directory above it.
    pub(crate) fn contain(&self, path: &[u8]) -> bool {
        let names = self.names();
        let slashes = path.iter().enumerate().filter(|(at, byte)| **byte == b'/' && *at > 0);
        slashes.map(|(at, _)| &path[..at]).chain([path]).any(|name| names.contains(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_beneath_is_ones_own_too() {
        let made = MadeFiles::default();
        made.insert(b"/tmp/one");
        assert!(made.contain(b"/tmp/one") && made.contain(b"/tmp/one/two/three"));
        assert!(!made.contain(b"/tmp/oner") && !made.contain(b"/tmp"));
        made.remove(b"/tmp/one");
        assert!(!made.contain(b"/tmp/one/two"));
    }
}
