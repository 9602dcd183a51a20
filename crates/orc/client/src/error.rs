//! Errors of the client's operations.

use std::io;
use std::path::PathBuf;

use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::Refusal;
use orrery_sys::PageRange;
use rustix::io::Errno;

/// Why an operation failed. It has changed nothing then.
///
/// The text has no cause: [`std::error::Error::source`] returns it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no store.
    #[error("cannot connect to the store at {}; start one with `orrery orc serve`, or set ORRERY_ORC to its directory", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A process of another user listens at the socket.
    #[error("cannot use the store at {}: it runs as user {uid}, which is neither root nor this user", path.display())]
    Owner {
        /// The socket.
        path: PathBuf,
        /// The user.
        uid: u32,
    },
    /// The store refused the request.
    #[error("cannot {operation}")]
    Refused {
        /// The operation.
        operation: &'static str,
        /// The store's reason.
        #[source]
        refusal: Refusal,
    },
    /// The connection to the store broke, or the store sent a malformed reply.
    #[error("cannot {operation}: the connection to the store broke")]
    Broken {
        /// The operation.
        operation: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// The file of an object could change, or is too short.
    #[error("cannot use object {id}: the store handed out a file that is not sealed, or is too short")]
    NotSealed {
        /// The object.
        id: ObjectId,
    },
    /// The bytes of an object are not those of its name.
    #[error("cannot use object {id}: the store handed out bytes with another hash")]
    WrongBytes {
        /// The object.
        id: ObjectId,
    },
    /// The object may not be mapped executable.
    #[error("cannot map object {id} executable: it was not registered as code")]
    NotExecutable {
        /// The object.
        id: ObjectId,
    },
    /// The range of memory cannot be replaced by an object.
    #[error("cannot publish {:#x}-{:#x}: {reason}", range.start, range.end)]
    Range {
        /// The range.
        range: PageRange,
        /// What is wrong with it, and the way out.
        reason: &'static str,
    },
    /// A system call failed.
    #[error("cannot {operation}")]
    System {
        /// The operation.
        operation: &'static str,
        /// The error of the system.
        #[source]
        errno: Errno,
    },
}

/// The result of the client's operations.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn system(operation: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System { operation, errno }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn each_text_names_its_cause_once() {
        let source = || io::Error::from(io::ErrorKind::NotFound);
        let errors = [
            Error::Connect { path: "/nowhere".into(), source: source() },
            Error::Broken { operation: "request an object", source: source() },
            Error::Refused { operation: "register an object", refusal: Refusal::Quota },
            Error::System { operation: "map an object", errno: Errno::NOMEM },
        ];
        for error in errors {
            let cause = error.source().map(ToString::to_string);
            assert!(cause.is_some_and(|cause| !error.to_string().contains(&cause)), "{error}");
        }
    }
}
