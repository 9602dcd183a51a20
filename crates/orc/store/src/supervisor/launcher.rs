//! Starts the two processes of a store.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::supervisor::channel::prepare;

/// A process of a running store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The process that answers requests.
    Server,
    /// The process that holds a copy of all descriptors, and starts the server again.
    Supervisor,
}

impl Part {
    /// Returns the argument that makes a program this part.
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Supervisor => "supervisor",
        }
    }
}

/// How to start a part as a process of its own.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The program.
    pub program: PathBuf,
    /// Its first arguments, which the part's name follows. Its standard input is the socket to the other part.
    pub arguments: Vec<OsString>,
}

impl Launcher {
    /// Starts `part`, and returns the socket to it.
    ///
    /// # Errors
    /// Those of socketpair(2), fork(2) and execve(2).
    pub(crate) fn start(&self, part: Part) -> io::Result<(OwnedFd, Child)> {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).arg(part.name()).stdin(Stdio::from(theirs)).stdout(Stdio::null());
        Ok((prepare(ours)?, command.spawn()?))
    }
}
