//! What clients' operations can fail of.

use std::io;
use std::path::PathBuf;

use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::Refusal;
use orrery_sys::PageRange;
use rustix::io::Errno;

/// Why an operation failed. It then changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no store.
    #[error(
        "connect to the store at {path}: {source}; start one with `orrery orc serve`, or name its folder in ORRERY_ORC"
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Somebody else's process pretends to be the store.
    #[error("the store at {path} runs as user {uid}, which is neither the superuser nor this user: refused")]
    Owner {
        /// The socket.
        path: PathBuf,
        /// Who it is.
        uid: u32,
    },
    /// The store said no.
    #[error("{operation}: {refusal}")]
    Refused {
        /// What was asked for.
        operation: &'static str,
        /// Why not.
        refusal: Refusal,
    },
    /// The store is gone, or talks nonsense.
    #[error("{operation}: the connection to the store broke: {source}")]
    Broken {
        /// What was under way.
        operation: &'static str,
        /// What happened.
        source: io::Error,
    },
    /// What the store handed out could change, or is too short.
    #[error("the store handed out a descriptor for {id} that is not sealed, or too short: refused")]
    NotSealed {
        /// What was asked for.
        id: ObjectId,
    },
    /// The bytes handed out are not those of the name.
    #[error("the bytes handed out for {id} have another hash: refused")]
    WrongBytes {
        /// What was asked for.
        id: ObjectId,
    },
    /// The object may not be mapped executable.
    #[error("object {id} may not be mapped executable: it was not registered as code")]
    NotExecutable {
        /// Which.
        id: ObjectId,
    },
    /// The range is not fit for being replaced.
    #[error("publish {:#x}..{:#x}: {reason}", range.start, range.end)]
    Range {
        /// The range.
        range: PageRange,
        /// What is wrong with it, and what to do.
        reason: &'static str,
    },
    /// The system refused.
    #[error("{operation}: {errno}")]
    System {
        /// What.
        operation: &'static str,
        /// Why.
        errno: Errno,
    },
}

/// What this crate's functions return.
pub type Result<T> = core::result::Result<T, Error>;

impl Error {
    pub(crate) fn system(operation: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System { operation, errno }
    }
}
