//! Trust domains: sets of processes that share objects with one another.
//!
//! A process that may ask for objects by hash can find out what is there. So each trust domain has a table of its own: a
//! reply never depends on what others hold, and equal bytes of two trust domains are in memory twice. Nor does the time of a
//! reply depend on others, because their tables are not looked at. Public objects are shared by all, and known to all.

use core::fmt;

use serde::{Deserialize, Serialize};

/// A set of processes that may know what the others of the set hold.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum TrustDomain {
    /// The owner of public objects, which all clients may use.
    Public,
    /// The processes of one user that connect to the common socket (`SO_PEERCRED` in unix(7)).
    User(u32),
    /// All processes that connect to the socket of this name: those of a container, or of a group of containers.
    Named(String),
}

impl fmt::Display for TrustDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Public => write!(f, "public"),
            Self::User(uid) => write!(f, "user {uid}"),
            Self::Named(name) => write!(f, "named {name}"),
        }
    }
}
