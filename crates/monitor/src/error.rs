//! What can go wrong before the program runs.

use std::io;
use std::path::PathBuf;

/// Why a program was not started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// reading the policy {path}: {source}
    #[error("reading the policy {}: {source}", path.display())]
    ReadPolicy {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// reading the seccomp profile {path}: {source}
    #[error("reading the seccomp profile {}: {source}", path.display())]
    ReadProfile {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A seccomp profile is wrong, or says what a guard cannot honour.
    #[error("{0}")]
    Profile(
        /// What, and where.
        String,
    ),
    /// The policy is wrong.
    #[error(transparent)]
    Policy(#[from] orrery_policy::PolicyError),
    /// What is in the file that is to learn is no policy.
    #[error("{0} (what is learnt is added to a policy; --force replaces the file)")]
    Learn(
        /// What is wrong with it.
        orrery_policy::PolicyError,
    ),
    /// The kernel cannot decide about opened files alone, as the policy wants it.
    #[error("mediation = \"kernel\": the kernel cannot hold this policy by itself: {0} (or write \"auto\")")]
    Kernels(
        /// Why not.
        String,
    ),
    /// A call to be mediated that does not exist.
    #[error("{0}")]
    Call(
        /// Which, and how it is done right.
        String,
    ),
    /// What the program is to see of the file system could not be arranged.
    #[error("cannot make the view that the policy describes: {operation}: {source}{hint}")]
    View {
        /// What was tried.
        operation: String,
        /// Why it failed.
        source: io::Error,
        /// What to do about it.
        hint: &'static str,
    },
    /// The program that is to be asked does not listen.
    #[error("cannot connect to {}, where what the policy does not allow is to be asked about: {source}", path.display())]
    Ask {
        /// Its socket.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Calls without which no program can be guarded.
    #[error(
        "cannot guard a program here: these system calls are refused: {0}; there is no guard inside of another, and in a container its \
         seccomp profile has to allow them (Docker: --security-opt seccomp=FILE, or --cap-add SYS_ADMIN --cap-add SYS_PTRACE), or the runtime has to be `orrery guard oci`"
    )]
    Refused(
        /// Their names.
        String,
    ),
    /// A facility that the kernel would not give.
    #[error("{operation}: {source}")]
    Kernel {
        /// What was asked for, and what can be done about it.
        operation: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The program could not be executed.
    #[error("running {program}: {source}{hint}")]
    Execute {
        /// What was to run.
        program: String,
        /// Why not.
        source: io::Error,
        /// What to do about it.
        hint: &'static str,
    },
    /// Something to write, a log or a policy, could not be.
    #[error("writing {}: {source}", path.display())]
    Write {
        /// Where to.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn kernel(operation: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Kernel { operation, source: errno.into() }
    }
}
