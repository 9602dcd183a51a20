//! Makes the process look like the client's before the program begins.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::fs::Mode;
use rustix::net::sockopt::Timeout;

use super::sandbox::Protections;
use crate::protocol::{self, Received, Request};

/// Receives a request, from a client that must not dawdle.
///
/// # Errors
/// The message for a client whose request cannot be received.
pub(super) fn receive(connection: &OwnedFd, patience: Duration) -> Result<Received, String> {
    let patience = patience.max(Duration::from_millis(1));
    rustix::net::sockopt::set_socket_timeout(connection, Timeout::Recv, Some(patience))
        .map_err(|errno| format!("SO_RCVTIMEO: {errno}"))?;
    protocol::receive(connection.as_fd()).map_err(|error| format!("{:#}", anyhow::Error::from(error)))
}

/// Puts the client's descriptors, directory and mask in place; returns the opened script.
///
/// # Errors
/// The message for the client.
pub(super) fn enter(
    request: &Request<'_>,
    descriptors: Vec<OwnedFd>,
    protections: Protections,
) -> Result<Option<OwnedFd>, String> {
    let mut descriptors = descriptors.into_iter();
    for number in 0..3 {
        let passed = if request.streams & (1 << number) == 0 {
            None
        } else {
            Some(descriptors.next().ok_or("the request announces more descriptors than it brings")?)
        };
        set_stream(number, passed).map_err(|error| format!("descriptor {number} of the client: {error}"))?;
    }
    let directory = descriptors.next().ok_or("the request brings no working directory")?;
    change_directory(request, &directory, protections)?;
    rustix::process::umask(Mode::from_raw_mode(request.umask & 0o777));
    Ok(descriptors.next())
}

/// The client's directory is in the client's mounts; a worker that has mounts of its own goes to the same path there.
fn change_directory(
    request: &Request<'_>,
    directory: &OwnedFd,
    protections: Protections,
) -> Result<(), String> {
    let changed = if protections.namespaces && !request.directory.is_empty() {
        rustix::process::chdir(request.directory)
    } else {
        rustix::process::fchdir(directory)
    };
    changed.map_err(|errno| format!("the client's working directory: {errno}"))
}

/// Makes `passed` descriptor `number`, inherited by programs that the script starts; closes it where the client's
/// was closed.
fn set_stream(number: u32, passed: Option<OwnedFd>) -> io::Result<()> {
    match (number, passed) {
        (0, Some(fd)) => rustix::stdio::dup2_stdin(fd)?,
        (1, Some(fd)) => rustix::stdio::dup2_stdout(fd)?,
        (_, Some(fd)) => rustix::stdio::dup2_stderr(fd)?,
        (_, None) => {
            // SAFETY: nothing in this program owns descriptors 0 to 2; a write there fails with EBADF, as the
            // client would.
            unsafe { rustix::io::close(i32::try_from(number).unwrap_or(0)) };
        }
    }
    Ok(())
}

/// Copies of the descriptors 0 to 2 that the worker has between requests.
pub(super) fn save_streams() -> io::Result<[OwnedFd; 3]> {
    let copy = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, crate::descriptors::first_reserved());
    let [stdin, stdout, stderr] = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    Ok([copy(stdin)?, copy(stdout)?, copy(stderr)?])
}

/// Gives the descriptors 0 to 2 back to the worker. Rollback would do that, too, but has to fetch them from afar.
pub(super) fn leave(streams: &[OwnedFd; 3]) {
    let [stdin, stdout, stderr] = streams;
    // What fails here, rollback mends.
    let _ = rustix::stdio::dup2_stdin(stdin);
    let _ = rustix::stdio::dup2_stdout(stdout);
    let _ = rustix::stdio::dup2_stderr(stderr);
}
