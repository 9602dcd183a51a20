//! Reads the kernel, its processes and their files out of a machine's memory, dead or alive.
mod error;
mod kallsyms;
mod kernel;
mod list;
mod memory;
mod object;
mod paging;
mod types;
mod vmcore;
mod vmcoreinfo;

pub use error::{Error, Problem, Result, Walk};
pub use kallsyms::Symbols;
pub use kernel::Kernel;
pub use memory::{Layout, MappedMemory, PhysicalMemory, Segment};
pub use object::Object;
pub use paging::{Entry, Leaf, PageTables};
pub use types::{Field, Types};
pub use vmcore::open_memory;
pub use vmcoreinfo::Vmcoreinfo;
