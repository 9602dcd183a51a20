//! What can go wrong while reading a kernel that is dead, or that changes while it is read.

use std::io;
use std::path::PathBuf;

/// Why something could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// the image file cannot be opened, sized or mapped
    #[error("cannot {operation} {path}: {error}")]
    File {
        /// The operation that failed.
        operation: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// the file is no memory image
    #[error("{path} is no image of a machine's memory: {why}")]
    NotAnImage {
        /// The path of the file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// a physical address without memory behind it
    #[error("the image holds no memory at physical address {physical:#x}")]
    NoMemory {
        /// The address.
        physical: u64,
    },
    /// a virtual address that the page tables do not map
    #[error("{address:#x} is not mapped (level {level} of the page tables)")]
    NotMapped {
        /// The virtual address.
        address: u64,
        /// The level at which the walk ended; 1 is the lowest.
        level: u8,
    },
    /// a pointer that cannot point to what it should
    #[error("{address:#x} cannot be the address of a {kind}")]
    BadPointer {
        /// The value of the pointer.
        address: u64,
        /// The type that it should point to.
        kind: &'static str,
    },
    /// no kernel was recognized
    #[error(
        "no Linux kernel found in this image: no page holds a VMCOREINFO that fits it (is the memory complete, \
         and does its kernel have CONFIG_CRASH_CORE or CONFIG_VMCORE_INFO?)"
    )]
    NoKernel,
    /// the kernel lacks a fact needed to read it
    #[error("this kernel's VMCOREINFO lacks {key}; kernels from 6.0 on have it")]
    NoFact {
        /// The key.
        key: &'static str,
    },
    /// a symbol that this kernel does not have
    #[error("this kernel has no symbol {0}")]
    NoSymbol(String),
    /// the kernel describes no types
    #[error("this kernel does not describe its types: {0} (it needs CONFIG_DEBUG_INFO_BTF)")]
    NoTypes(String),
    /// a type or a member that this kernel does not have
    #[error("this kernel has no {kind}.{member}")]
    NoMember {
        /// The type.
        kind: String,
        /// The path of members within it; empty for the type itself.
        member: String,
    },
    /// a structure that contradicts itself
    #[error("the {kind} at {address:#x} is corrupt: {why}")]
    Corrupt {
        /// The type of the object.
        kind: &'static str,
        /// The address of the object.
        address: u64,
        /// The sentence that says what is wrong.
        why: String,
    },
    /// the process asked for is not there
    #[error("this image holds no process {0}")]
    NoProcess(i32),
    /// the disk of a file system, where memory does not have a block of it
    #[error("cannot read block {block} of the dead kernel's disk: {error}")]
    Disk {
        /// The number of the block.
        block: u64,
        /// What the system said.
        error: io::Error,
    },
    /// an output file cannot be written
    #[error("cannot write the core")]
    Write(#[from] io::Error),
}

/// The result of reading a kernel.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Something that was left out because it could not be read.
#[derive(Debug)]
pub struct Problem {
    /// What was being read, in words, as "task list after pid 17".
    pub during: String,
    /// The error that it failed with.
    pub error: Error,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.during, self.error)
    }
}

/// What a walk through damaged structures found, and what it had to leave out.
#[derive(Debug)]
pub struct Walk<T> {
    /// What could be read.
    pub found: Vec<T>,
    /// The objects that could not be read.
    pub problems: Vec<Problem>,
}

impl<T> Default for Walk<T> {
    fn default() -> Self {
        Self { found: Vec::new(), problems: Vec::new() }
    }
}

impl<T> Walk<T> {
    /// Keeps what was read, or notes why it could not be.
    pub(crate) fn take(&mut self, during: impl FnOnce() -> String, result: Result<T>) {
        match result {
            Ok(found) => self.found.push(found),
            Err(error) => self.note(during(), error),
        }
    }

    /// Notes what could not be read.
    pub(crate) fn note(&mut self, during: String, error: Error) {
        self.problems.push(Problem { during, error });
    }
}
