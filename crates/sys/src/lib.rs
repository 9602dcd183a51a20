//! Linux facilities that libc and rustix lack: one file each, safe to call, no policy.
//!
//! The upper floors call this crate in narrow places: inside a signal handler, on a private stack while the program's own
//! memory is being restored, between `fork` and the end of the child. So nothing here takes a lock, touches thread-local
//! storage or panics, and system calls are made directly: `errno` stays as it is. Nothing allocates either, with six
//! exceptions: [`namespaces::Unmapped::map`], [`capability`], [`cgroups`] and [`processes`], which read tables, [`scm::receive`], if descriptors arrive, and the building of filters in
//! [`seccomp`].
//!
//! | what | where |
//! |---|---|
//! | which pages were written | [`uffd`] protects them without a handler, [`pagemap`] reads the records |
//! | what is mapped | [`maps`]; [`mapwatch`] notices changes without a system call |
//! | a process' memory or descriptors as they were | [`memory_copy`], [`fd_table_copy`], [`kcmp`] |
//! | the memory and threads of other processes | [`process_memory`], [`ptrace`] |
//! | who other processes are, and where they listen | [`processes`] |
//! | threads, children, descriptors, sizes | [`process`], [`timers`], [`signals`] |
//! | who is at the other end of a socket | [`peer`] |
//! | who owns a user namespace; entering new namespaces; mounts | [`namespaces`], [`mounts`] |
//! | descriptors over sockets, and out of the way of the program's own | [`scm`], [`descriptors`] |
//! | what sockets drop, and descriptors of other processes | [`socket_filter`] |
//! | what the sockets of a control group drop | [`cgroup_filter`] |
//! | whether this is a forked child | [`generation`] |
//! | filters for system calls, and answers to their notifications | [`seccomp`], [`notify`] |
//! | the calling thread | [`thread`], [`rseq`], `gs_base` |
//! | capabilities by name | [`capability`] |
//! | the control group of this process | [`cgroups`] |
//! | the kernel's network configuration and sockets | [`netlink`] |
//! | how a thread is scheduled, how long a process ran | [`scheduling`] |
//! | whether tasks wait for CPUs or memory | [`pressure`] |

mod error;
mod generation;
mod paused_child;
mod proc_self;
mod range;

pub mod capability;
pub mod cgroup_filter;
pub mod cgroups;
pub mod descriptors;
pub mod fd_table_copy;
#[cfg(target_arch = "x86_64")]
pub mod gs_base;
pub mod kcmp;
pub mod maps;
pub mod mapwatch;
pub mod memory_copy;
pub mod mounts;
pub mod namespaces;
pub mod netlink;
pub mod notify;
pub mod pagemap;
pub mod peer;
pub mod pressure;
pub mod process;
pub mod process_memory;
pub mod processes;
pub mod programs;
pub mod ptrace;
pub mod rseq;
pub mod scheduling;
pub mod scm;
pub mod seccomp;
pub mod service_manager;
pub mod signals;
pub mod socket_filter;
pub mod thread;
pub mod timers;
pub mod uffd;

pub use error::{Error, Result, errno};
pub use generation::generation;
pub use range::{PAGE, PageRange};
