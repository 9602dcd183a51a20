use std::io;
use std::path::PathBuf;

/// What can go wrong before a program has become a tracee.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel lacks a facility, or denies it.
    #[error("{facility}: {source}; {way_out}")]
    Facility {
        /// What is missing.
        facility: &'static str,
        /// What the kernel said.
        source: io::Error,
        /// What to do about it.
        way_out: &'static str,
    },
    /// Somebody traces this process: the supervisor could not.
    #[error(
        "process {0} traces this one, so no executive can be put under a program: trace the program with `orrery trace` instead, or stop tracing"
    )]
    Traced(u32),
    /// There is no such program.
    #[error("{program}: no such program in PATH", program = .0.display())]
    NotFound(PathBuf),
    /// The program cannot be read or executed.
    #[error("{program}: {source}", program = .program.display())]
    NotExecutable {
        /// What was to be executed.
        program: PathBuf,
        /// Why it cannot be.
        source: io::Error,
    },
    /// The program is for other machines.
    #[error("{program} is a program for {machine}: the executive serves x86-64 programs only", program = .program.display())]
    Foreign {
        /// What was to be executed.
        program: PathBuf,
        /// The machine it is for.
        machine: String,
    },
    /// The file is neither ELF nor script.
    #[error("{program} is neither an ELF program nor a script that names its interpreter: if a shell understands it, run `sh {program}`", program = .0.display())]
    NotAProgram(PathBuf),
    /// The program has a set-user-ID or set-group-ID bit, or file capabilities.
    #[error("{program} gains privileges when executed, which a program with an executive must not: start it without, or as root", program = .0.display())]
    Privileged(PathBuf),
    /// The supervisor did not take the program on.
    #[error("no executive can be put under the program: {0}")]
    Unfollowed(&'static str),
    /// The image in this program is not what it should be.
    #[error("the executive's image is broken: {0}")]
    Image(String),
    /// A file system could not be made of an archive.
    #[error("mount {archive}: {message}", archive = .archive.display())]
    Archive {
        /// The archive.
        archive: PathBuf,
        /// Why not.
        message: String,
    },
    /// A system call failed.
    #[error("{operation}: {source}")]
    System {
        /// Which, and on what.
        operation: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn system(operation: &'static str) -> Self {
        Self::System { operation, source: io::Error::last_os_error() }
    }
}

/// Alias.
pub type Result<T, E = Error> = std::result::Result<T, E>;
