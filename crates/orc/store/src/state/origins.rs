//! From which files each object was read.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use orrery_orc_wire::ObjectId;

use crate::trust_domain::TrustDomain;

/// How many files of an object are remembered at most.
const MAX_FILES: usize = 64;

/// Paths of files, as the kernel showed them to the store, by the objects that show their bytes. A file is known by device and inode.
#[derive(Debug, Default)]
pub(crate) struct Origins(HashMap<(TrustDomain, ObjectId), BTreeMap<(u64, u64), PathBuf>>);

impl Origins {
    /// Notes that an object shows the bytes of a file.
    pub(crate) fn insert(&mut self, domain: &TrustDomain, id: ObjectId, file: (u64, u64), path: PathBuf) {
        let files = self.0.entry((domain.clone(), id)).or_default();
        if files.len() < MAX_FILES || files.contains_key(&file) {
            files.insert(file, path);
        }
    }

    /// Forgets the files of an object that was evicted.
    pub(super) fn remove(&mut self, domain: &TrustDomain, id: ObjectId) {
        self.0.remove(&(domain.clone(), id));
    }

    /// Returns the paths of the files whose bytes an object shows.
    pub(crate) fn paths(&self, domain: &TrustDomain, id: ObjectId) -> Vec<PathBuf> {
        self.0.get(&(domain.clone(), id)).map(|files| files.values().cloned().collect()).unwrap_or_default()
    }
}
