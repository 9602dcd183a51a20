//! Errors of starting programs under an executive.

use std::io;
use std::path::PathBuf;

/// Errors before a program runs under an executive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel lacks a facility, or denies it.
    #[error("cannot use {facility}: {cause}; {way_out}")]
    Facility {
        /// The facility that is missing.
        facility: &'static str,
        /// The kernel's error. It is part of the message, before the way out, and so no source.
        cause: io::Error,
        /// What to do about it.
        way_out: &'static str,
    },
    /// Another process traces this one: the supervisor could not.
    #[error(
        "cannot put an executive under a program: process {0} traces this one; use `orrery trace`, or stop tracing"
    )]
    Traced(u32),
    /// There is no such program.
    #[error("cannot execute {program}: no such program in PATH", program = .0.display())]
    NotFound(PathBuf),
    /// The program cannot be read or executed.
    #[error("cannot execute {program}", program = .program.display())]
    NotExecutable {
        /// What was to be executed.
        program: PathBuf,
        /// Why it cannot be.
        source: io::Error,
    },
    /// The program is for other machines.
    #[error("cannot execute {program}: it is a program for {machine}; the executive serves x86-64 programs only", program = .program.display())]
    Foreign {
        /// What was to be executed.
        program: PathBuf,
        /// The machine it is for.
        machine: String,
    },
    /// The file is neither ELF nor script.
    #[error("cannot execute {program}: it is neither an ELF program nor a script that names its interpreter; if it is a shell script, run `sh {program}`", program = .0.display())]
    NotAProgram(PathBuf),
    /// The program has a set-user-ID or set-group-ID bit, or file capabilities.
    #[error("cannot execute {program}: it is set-user-ID or set-group-ID, or has file capabilities; run as root, or without an executive", program = .0.display())]
    Privileged(PathBuf),
    /// The supervisor did not take the program on.
    #[error("cannot put an executive under the program: {0}")]
    Unfollowed(&'static str),
    /// The image in this program is not what it should be.
    #[error("cannot read the executive's image: {0}")]
    Image(String),
    /// A file system could not be made of an archive.
    #[error("cannot mount {archive}: {message}", archive = .archive.display())]
    Archive {
        /// The archive.
        archive: PathBuf,
        /// The sentence that says why not.
        message: String,
    },
    /// A system call failed.
    #[error("cannot {operation}")]
    System {
        /// Which, and on what.
        operation: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl Error {
    /// Returns the exit status with which a command reports this error, as shells do: 127 for a program that was not
    /// found, 126 for one that cannot be executed, and 1 otherwise.
    #[must_use]
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::NotFound(_) => 127,
            Self::NotExecutable { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            Self::NotExecutable { .. }
            | Self::Foreign { .. }
            | Self::NotAProgram(_)
            | Self::Privileged(_) => 126,
            _ => 1,
        }
    }

    /// Returns the error and its causes in one line.
    pub(crate) fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            text.push_str(": ");
            text.push_str(&cause.to_string());
            source = cause.source();
        }
        text
    }

    pub(crate) fn system(operation: &'static str) -> Self {
        Self::System { operation, source: io::Error::last_os_error() }
    }
}

/// The result of starting a program under an executive.
pub type Result<T, E = Error> = std::result::Result<T, E>;
