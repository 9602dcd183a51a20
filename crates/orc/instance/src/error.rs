//! What can fail.

use std::ffi::CString;
use std::path::PathBuf;

use rustix::io::Errno;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a library or an instance could not be had or used. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot open library {}: {cause}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        cause: std::io::Error,
    },
    /// The file is no library for this machine.
    #[error("cannot load library {}: it is no shared object for x86-64: {cause}", path.display())]
    Elf {
        /// The file.
        path: PathBuf,
        /// The sentence that says what is wrong.
        cause: String,
    },
    /// The library was built without the pass.
    #[error("cannot load library {}: it was not built for instances; build it with orrery-cc, \
             or load it as a mapped library", path.display())]
    NotBuilt {
        /// The file.
        path: PathBuf,
    },
    /// The library was built by another version of the pass.
    #[error("cannot load library {}: its pass has version {version}, this is version {}; build it again", path.display(), crate::abi::VERSION)]
    Version {
        /// The file.
        path: PathBuf,
        /// The version of the pass.
        version: u32,
    },
    /// A part of the library was built without the pass.
    #[error("cannot load library {}: section {section} has {bytes} bytes of state that all instances would share; \
             build all of its units with orrery-cc", path.display())]
    Mixed {
        /// The file.
        path: PathBuf,
        /// The section that has the state.
        section: String,
        /// How many bytes there are.
        bytes: u64,
    },
    /// The loader would have to write to the library's code.
    #[error("cannot load library {}: it has text relocations; build it with -fPIC", path.display())]
    TextRelocations {
        /// The file.
        path: PathBuf,
    },
    /// The library wants an executable stack.
    #[error("cannot load library {}: it needs an executable stack; link it with -z noexecstack", path.display())]
    ExecutableStack {
        /// The file.
        path: PathBuf,
    },
    /// Thread-local variables of a library to be mapped have fixed offsets from the thread pointer.
    #[error("cannot load library {}: its thread-local variables are of the initial-exec model, for which there is room once \
             in a process; build it without -ftls-model", path.display())]
    InitialExec {
        /// The file.
        path: PathBuf,
    },
    /// A library to be mapped has a relocation of a type that is not supported.
    #[error("cannot load library {}: relocations of type {kind} are not supported; use dlmopen(3)", path.display())]
    Relocation {
        /// The file.
        path: PathBuf,
        /// The type: `R_X86_64_*` of elf.h.
        kind: u32,
    },
    /// Neither the program nor what a library to be mapped needs has a symbol.
    #[error("cannot load library {}: nothing has the symbol {symbol}, which it imports; load the library that has it, \
             with RTLD_GLOBAL", path.display())]
    Import {
        /// The file.
        path: PathBuf,
        /// The symbol, with its version.
        symbol: String,
    },
    /// The dynamic loader refused it, or a library that it needs.
    #[error("cannot load library {}: {cause}", path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// The text of dlerror(3).
        cause: String,
    },
    /// The library was in the process before, and may have been used.
    #[error("cannot load library {}: the process has it already, so its state may not be the first one; \
             do not link the program to it", path.display())]
    Loaded {
        /// The file.
        path: PathBuf,
    },
    /// The library finds its instances by GS, and so does another one that is loaded.
    #[error("cannot load library {}: it finds its instances by GS, as another library of this process does; \
             build one of them without ORRERY_CLS_BASE=gs", path.display())]
    BaseTaken {
        /// The file.
        path: PathBuf,
    },
    /// The library finds its instances by GS, whose base the calling thread uses for something else.
    #[error("cannot load library {}: it finds its instances by GS, whose base is {base:#x} in this thread, as another part of \
             the program has set it; build the library without ORRERY_CLS_BASE=gs", path.display())]
    BaseUsed {
        /// The file.
        path: PathBuf,
        /// The base.
        base: usize,
    },
    /// The library has no such symbol.
    #[error("cannot find symbol {}: the library has none of this name", name.to_string_lossy())]
    Symbol {
        /// The symbol.
        name: CString,
    },
    /// There is no address space for the memory of instances.
    #[error("cannot reserve {bytes} bytes of address space for instances: {errno}; raise RLIMIT_AS")]
    AddressSpace {
        /// How much was asked for.
        bytes: usize,
        /// The error of the kernel.
        errno: Errno,
    },
    /// A system call failed.
    #[error("cannot {action}: {errno}")]
    System {
        /// What was to be done.
        action: &'static str,
        /// Why it was not.
        errno: Errno,
    },
    /// A thread is in the instance.
    #[error("cannot {action} an instance: a thread has entered it{}; leave it first, also where longjmp or an exception \
             passed by", if *own { ", this one" } else { "" })]
    Entered {
        /// What was to be done.
        action: &'static str,
        /// Whether it is the calling thread.
        own: bool,
    },
    /// Threads that the library made, or that were attached, are in the instance.
    #[error("cannot {action} an instance: {count} of its threads run; end or join them first")]
    Threads {
        /// What was to be done.
        action: &'static str,
        /// How many threads there are.
        count: usize,
    },
    /// The calling thread is not in the instance, or entered another one since.
    #[error("cannot leave an instance: {}", if *entered {
        "this thread entered another instance of the library since; leave that first"
    } else {
        "this thread has not entered it"
    })]
    NotInnermost {
        /// Whether the thread is in the instance at all.
        entered: bool,
    },
    /// The calling thread is in an instance of the same library.
    #[error("cannot attach a thread to an instance: it is in an instance of the library; leave that first")]
    Attached,
    /// The snapshot is of another instance.
    #[error("cannot restore an instance: the snapshot is of another one; create an instance from it")]
    Foreign,
}
