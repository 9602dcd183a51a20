//! What the store has read before: which object the bytes of a file, or the relocated data of a library, are.

use std::collections::HashMap;
use std::hash::Hash;

use orrery_orc_wire::ObjectId;

use crate::trust_domain::TrustDomain;

/// How many names of a trust domain are remembered at most.
const CAPACITY: usize = 65_536;

/// Objects by another name than their hash, for each trust domain that has shown what the name stands for.
#[derive(Debug)]
pub(crate) struct KnownContent<K>(HashMap<TrustDomain, HashMap<K, ObjectId>>);

impl<K: Eq + Hash> KnownContent<K> {
    /// Creates an empty one.
    pub(super) fn new() -> Self {
        Self(HashMap::new())
    }

    /// Returns the object that the trust domain knows as `name`.
    pub(crate) fn get(&self, domain: &TrustDomain, name: &K) -> Option<ObjectId> {
        self.0.get(domain)?.get(name).copied()
    }

    /// Remembers what `name` stands for. If there are too many names, all others of the trust domain are forgotten.
    pub(crate) fn insert(&mut self, domain: &TrustDomain, name: K, id: ObjectId) {
        let names = self.0.entry(domain.clone()).or_default();
        if names.len() >= CAPACITY {
            names.clear();
        }
        names.insert(name, id);
    }

    /// Forgets what `name` stands for.
    pub(crate) fn remove(&mut self, domain: &TrustDomain, name: &K) {
        if let Some(names) = self.0.get_mut(domain) {
            names.remove(name);
        }
    }
}
