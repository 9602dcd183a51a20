//! Errors of a check.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a service cannot be checked.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// There is no such process.
    NoProcess(i32),
    /// A file of `/proc` cannot be read.
    Read {
        /// The path of the file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoProcess(pid) => write!(f, "cannot find process {pid}; `ps -e` lists all processes"),
            Self::Read { path, error } => {
                write!(
                    f,
                    "cannot read {}: {error}; run this as root, or as the owner of the process",
                    path.display()
                )
            }
        }
    }
}

impl std::error::Error for Error {}

/// The result of a check.
pub type Result<T> = std::result::Result<T, Error>;
