//! The records that the supervisor stores for the server, and that the next server restores its state from.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::trust_domain::TrustDomain;
use orrery_orc_wire::ObjectId;

/// Keys of records. They are restored in this order, in which each kind needs only those before it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Key {
    /// The configuration, as [`Config`](crate::Config) in JSON.
    Config,
    /// A listening socket; the value is the name of its trust domain, if it has one.
    Listener(u32),
    /// The lock that says that the socket of this number has a store; no value.
    Lock(u32),
    /// A trust domain: [`AccountRecord`].
    Account(TrustDomain),
    /// A backing file; the value is its path, if it has one.
    BackingFile(u64),
    /// An object: [`ObjectRecord`].
    Object(TrustDomain, ObjectId),
    /// A connection: [`PeerRecord`].
    Connection(u64),
    /// How many holds a connection has on an object of this trust domain.
    Hold(u64, TrustDomain, ObjectId),
    /// The placement table of a trust domain; no value.
    PlacementTable(TrustDomain),
}

/// An object's place in its backing file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ObjectRecord {
    pub(crate) file: u64,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// Bytes that it takes of the quota.
    pub(crate) bytes: u64,
    pub(crate) executable: bool,
}

/// What a trust domain may have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AccountRecord {
    pub(crate) account: TrustDomain,
    /// The bytes that the account may have.
    pub(crate) share: u64,
}

/// The process that connected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PeerRecord {
    pub(crate) domain: TrustDomain,
    /// Who pays for what it wants; see [`accounts`](crate::objects::accounts).
    pub(crate) account: TrustDomain,
    pub(crate) uid: u32,
    pub(crate) pid: i32,
    /// Whether it connected from outside of containers; see [`peer`](crate::server::peer).
    pub(crate) is_of_host: bool,
}

/// Encodes the path of a backing file, which may have none.
pub(crate) fn encode_path(path: Option<&Path>) -> Vec<u8> {
    path.map(|path| path.as_os_str().as_bytes().to_vec()).unwrap_or_default()
}

/// Decodes the path of a backing file.
pub(crate) fn decode_path(bytes: Vec<u8>) -> Option<PathBuf> {
    (!bytes.is_empty()).then(|| PathBuf::from(OsString::from_vec(bytes)))
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
            Key::Account(TrustDomain::Named("z".into())),
            Key::BackingFile(u64::MAX),
            Key::Object(TrustDomain::Named("z".into()), id),
            Key::Connection(u64::MAX),
            Key::Hold(u64::MAX, TrustDomain::Public, id),
            Key::PlacementTable(TrustDomain::Public),
        ];
        let encoded: Vec<_> = keys.iter().map(|key| postcard::to_stdvec(key).unwrap()).collect();
        assert!(encoded.is_sorted());
    }
}
