//! What can go wrong with machines.

use std::io;
use std::path::PathBuf;

/// Why a machine, its image or its network could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// a file could not be read or written
    #[error("cannot {operation} {path}: {error}")]
    File {
        /// The operation that failed.
        operation: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// a disk that the service cannot have
    #[error("{path}: {why}")]
    Disk {
        /// Its image, or where it was to be mounted.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// a network that the service cannot have
    #[error("network {name}: {why}")]
    Network {
        /// The bridge.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// a systemd unit that no pair can be made of
    #[error("{place}: {why}")]
    Unit {
        /// Its file and the line, or how it was named.
        place: String,
        /// What stands there, what is wrong with it, and what to do.
        why: String,
    },
    /// a program that is needed is not installed
    #[error("{program} is not installed; on Debian: apt-get install {package}")]
    Missing {
        /// The program.
        program: String,
        /// The package that has it.
        package: &'static str,
    },
    /// an image that the guests' memory is too small for
    #[error(
        "the image of {image_mib} MiB, with the service's files in it, takes guests of {needed_mib} MiB, and they have {memory_mib} \
         MiB; give them more (--memory {needed_mib}), or the files on a disk (--disk, --mount, --content)"
    )]
    ImageTooLarge {
        /// The size of the image.
        image_mib: u64,
        /// The memory of each guest.
        memory_mib: u64,
        /// The memory that would do.
        needed_mib: u64,
    },
    /// a path that the guest hides
    #[error(
        "{} would not be seen in the guest, which has a file system of its own at {place}; use another path",
        path.display()
    )]
    Hidden {
        /// The path.
        path: PathBuf,
        /// Where the guest's file system is.
        place: String,
    },
    /// a helper program of Orrery's own is not there
    #[error("{why}")]
    Helper {
        /// The name of the program.
        program: String,
        /// Where it was looked for.
        why: String,
    },
    /// something that only some may do
    #[error("{operation} requires root; {way}")]
    Rights {
        /// What was to be done.
        operation: &'static str,
        /// What can be done instead.
        way: String,
    },
    /// too little memory for both machines
    #[error(
        "both machines together take {needs} MiB, and {has} MiB can be had; --memory says how much each has"
    )]
    Room {
        /// The memory that the machines need, in MiB.
        needs: u64,
        /// The memory that the host has, in MiB.
        has: u64,
    },
    /// a program that was started failed
    #[error("`{command}` failed: {why}")]
    Command {
        /// The command line.
        command: String,
        /// The text that it printed.
        why: String,
    },
    /// a package without what it is known to have
    #[error("the kernel package {package} holds no {what}")]
    Package {
        /// The package.
        package: String,
        /// What was looked for.
        what: String,
    },
    /// the machine's monitor refused
    #[error("{machine}: QMP {command} failed: {why}")]
    Qmp {
        /// The machine's name.
        machine: String,
        /// The command.
        command: String,
        /// What it answered, or why it did not.
        why: String,
    },
    /// something did not happen in time
    #[error("{machine}: waited {seconds} s for {what}{hint}")]
    Timeout {
        /// The machine's name.
        machine: String,
        /// The time that was waited, in seconds.
        seconds: u64,
        /// The event that did not happen.
        what: String,
        /// The place that says more.
        hint: String,
    },
    /// the survivor was lost when the service had begun to go on in it
    #[error(
        "{machine} was lost after the service had come onto the network in it: {why}; from the older memory it would go back in time, and is not rebuilt"
    )]
    Gone {
        /// The machine's name.
        machine: String,
        /// The sign by which the loss was noticed.
        why: String,
    },
    /// a guest answered that it could not
    #[error("{machine}: {why}")]
    Guest {
        /// The machine's name.
        machine: String,
        /// The text that it printed.
        why: String,
    },
}

/// What working with machines gives.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns what an error of one of QEMU's sockets says: of one that closed them, that it has ended.
pub(crate) fn of_qemu(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => "QEMU has ended".to_owned(),
        _ => error.to_string(),
    }
}

/// Returns an error about a file.
pub(crate) fn file<'p>(
    operation: &'static str,
    path: &'p std::path::Path,
) -> impl FnOnce(io::Error) -> Error + use<'p> {
    move |error| Error::File { operation, path: path.to_owned(), error }
}
