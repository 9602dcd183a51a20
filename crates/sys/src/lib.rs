//! Linux facilities that libc and rustix lack: one file each, safe to call, no policy.
//!
//! Everything here is fit for the narrow places in which the upper floors run: inside a signal handler, on a private
//! stack while the program's own memory is being put back, between `fork` and the end of the child. So nothing in this
//! crate allocates, takes a lock, touches thread-local storage (system calls are made directly, `errno` stays as it is)
//! or panics. The exceptions are [`cgroups`], which reads
//! tables, and the building of filters in [`seccomp`]: both allocate.

mod error;
mod own;
mod range;
mod sleeper;

pub mod cgroups;
pub mod descriptors;
pub mod holder;
pub mod kcmp;
pub mod keeper;
pub mod maps;
pub mod mapwatch;
pub mod notify;
pub mod pagemap;
pub mod process;
pub mod rseq;
pub mod seccomp;
pub mod signals;
pub mod thread;
pub mod timers;
pub mod uffd;

pub use error::{Error, Result, errno};
pub use range::{PAGE, PageRange};
