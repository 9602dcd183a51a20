//! Trust domains: who shares with whom.
//!
//! Somebody who may ask for objects by hash can find out what is there. So each trust domain, here *realm*, has a table of
//! its own: an answer never depends on what others hold, and equal bytes of two realms lie in memory twice. Timing tells
//! nothing either, as the tables of others are not looked at. What is public is shared by all, and known to all.

use core::fmt;

use serde::{Deserialize, Serialize};

/// A set of processes that trust one another with the knowledge of what they have.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Realm {
    /// What everybody may know of.
    Public,
    /// The processes of one user, who came through the common socket (`SO_PEERCRED` in unix(7)).
    User(u32),
    /// Whoever can reach the socket of this name: a container, a group of them.
    Tenant(String),
}

impl fmt::Display for Realm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Public => write!(f, "public"),
            Self::User(uid) => write!(f, "user {uid}"),
            Self::Tenant(name) => write!(f, "tenant {name}"),
        }
    }
}
