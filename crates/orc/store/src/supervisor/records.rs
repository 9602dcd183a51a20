//! What the store has its keeper keep, and how it finds its way in it again.

use serde::{Deserialize, Serialize};

use crate::trust_domain::Realm;
use orrery_orc_wire::ObjectId;

/// Keys, in the order in which their records come back: each kind needs only those before it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Key {
    /// The configuration, as [`Config`](super::Config) in JSON.
    Config,
    /// A listening socket; the value is the tenant's name, if it is a tenant's.
    Listener(u32),
    /// The lock that says that the socket of this number has a store; no value.
    Lock(u32),
    /// A memory file; no value.
    Memory(u64),
    /// An object: [`ObjectRecord`].
    Object(Realm, ObjectId),
    /// A connection: [`ConnectionRecord`].
    Connection(u64),
    /// How many holds a connection has on an object of this realm.
    Hold(u64, Realm, ObjectId),
    /// A realm's book of places; no value.
    Book(Realm),
}

/// Where an object is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ObjectRecord {
    pub(crate) memory: u64,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// What it counts in the quota.
    pub(crate) bytes: u64,
    pub(crate) executable: bool,
}

/// Who is at the other end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ConnectionRecord {
    pub(crate) realm: Realm,
    pub(crate) uid: u32,
    pub(crate) pid: i32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_keys_are_ordered_by_kind() {
        let id = ObjectId([255; 32]);
        let keys = [
            Key::Config,
            Key::Listener(u32::MAX),
            Key::Lock(u32::MAX),
            Key::Memory(u64::MAX),
            Key::Object(Realm::Tenant("z".into()), id),
            Key::Connection(u64::MAX),
            Key::Hold(u64::MAX, Realm::Public, id),
            Key::Book(Realm::Public),
        ];
        let encoded: Vec<_> = keys.iter().map(|key| postcard::to_stdvec(key).unwrap()).collect();
        assert!(encoded.is_sorted());
    }
}
