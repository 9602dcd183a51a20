//! Reads the kernel, its processes and their files out of a machine's memory, dead or alive.
//!
//! When a kernel dies, everything it knew still is in memory. This crate finds it there without help: no symbol file,
//! no agent in the machine, no version checks. A [`Kernel`] is opened on any [`PhysicalMemory`]: a hypervisor's memory
//! file, an ELF core of a machine, another machine's memory behind a PCI device.
//!
//! ```no_run
//! use orrery_kimage::{Kernel, Layout, open_memory};
//!
//! let memory = open_memory("guest.ram".as_ref(), Layout::Q35)?;
//! let kernel = Kernel::open(Box::new(memory))?;
//! let processes = kernel.processes();
//! for process in &processes.found {
//!     println!("{} {}", process.pid()?, process.name()?);
//!     for descriptor in process.descriptors().found {
//!         println!("    {} {}", descriptor.number, descriptor.file.path()?.display());
//!     }
//! }
//! for problem in &processes.problems {
//!     eprintln!("left out {problem}");
//! }
//! # Ok::<(), orrery_kimage::Error>(())
//! ```
//!
//! # How an image explains itself
//!
//! 1. A page that begins with `OSRELEASE=` is the kernel's note for dump readers ([`Vmcoreinfo`]): where KASLR put the
//!    kernel, and from 6.0 on, where its symbol table is. A note that the kernel's own variable does not point to is a
//!    copy, or a forgery, and passed over.
//! 2. The symbol table ([`Symbols`]) is expanded as `/proc/kallsyms` would.
//! 3. Two symbols bound the description of all types, BTF ([`Types`]): every member is looked up by its name.
//! 4. An [`Object`] is an address with a type; walkers ([`Kernel::processes`], [`Task::descriptors`],
//!    [`AddressSpace::mappings`], [`Mapping::pages`]) go from one to the next.
//!
//! # What a crash has broken
//!
//! Every pointer is checked before it is followed, every list and tree is bounded, and an object that is seen twice
//! ends the walk. What cannot be read costs that object, not the walk: a [`Walk`] holds what was found and, in words,
//! each [`Problem`]. A list of tasks that is broken in one place is followed from its other end.
//!
//! Reading never writes, so a rescue that fails can be tried again. A machine that runs changes under the reader's
//! hands: two members may then belong to two moments.
//!
//! x86-64 only.

mod cache;
mod confinement;
mod content;
mod control_group;
mod error;
mod ext4;
mod file;
#[doc(hidden)]
pub mod fuzzing;
mod gcore;
mod inode_table;
mod ipc;
mod journal;
mod kallsyms;
mod kernel;
mod list;
mod lock;
mod mapping;
mod memory;
mod object;
mod packet;
mod page;
mod paging;
#[cfg(test)]
mod properties;
mod rbtree;
mod registers;
mod signal;
mod socket;
mod special;
#[cfg(any(test, feature = "fuzzing"))]
#[expect(clippy::unwrap_used, reason = "a machine made by hand that cannot be made has to be mended")]
#[cfg_attr(not(test), expect(dead_code, reason = "tests use more of it than fuzz targets"))]
mod synthetic;
mod task;
mod tcp;
mod terminal;
#[cfg(test)]
mod tests;
mod transfer;
mod tree;
mod types;
mod unix;
mod unwind;
mod vmcore;
mod vmcoreinfo;
mod volume;
mod watch;
mod xattr;

pub use cache::{Buffer, CachedPage, Pages};
pub use confinement::{Seccomp, SeccompFilter};
pub use control_group::ControlGroup;
pub use error::{Error, Problem, Result, Walk};
pub use ext4::{Ext4, Ext4File, Extent, Name, ReadBlock};
pub use file::{Descriptor, FileKind, OpenFile, Path};
pub use gcore::Written;
pub use ipc::{IpcObject, MessageQueue, Semaphores};
pub use kallsyms::Symbols;
pub use kernel::Kernel;
pub use lock::FileLock;
pub use mapping::{AddressSpace, Mapping};
pub use memory::{Layout, MappedMemory, PhysicalMemory, Segment};
pub use object::Object;
pub use page::{PageCensus, PageOwner, PageUse};
pub use paging::{Entry, Leaf, PageTables};
pub use registers::{FloatState, Registers};
pub use signal::{PosixTimer, ProcessorTimer};
pub use socket::{Datagram, InetSocket, WaitingConnection};
pub use special::{EpollTarget, Special};
pub use task::{Credentials, IdKind, State, Task};
pub use tcp::TcpConnection;
pub use terminal::{Modes, Terminal};
pub use transfer::{Buffer as UserBuffer, Called, Progress, Returning};
pub use tree::MemoryFile;
pub use types::{Field, TableEntry, Types};
pub use unix::{UnixMessage, UnixSocket, UnixWaiting};
pub use unwind::{Frame, Standing};
pub use vmcore::open_memory;
pub use vmcoreinfo::Vmcoreinfo;
pub use volume::{Attributes, Inode, Time, Volume};
pub use watch::{Inotify, Watch};
pub use xattr::ExtendedAttribute;
