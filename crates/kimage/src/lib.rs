//! Reads the kernel, its processes and their files out of a machine's memory, dead or alive.
mod error;
mod file;
mod gcore;
mod kallsyms;
mod kernel;
mod list;
mod mapping;
mod memory;
mod object;
mod page;
mod paging;
mod registers;
#[cfg(test)]
mod synthetic;
mod task;
#[cfg(test)]
mod tests;
mod types;
mod vmcore;
mod vmcoreinfo;

pub use error::{Error, Problem, Result, Walk};
pub use file::{Descriptor, FileKind, OpenFile, Path};
pub use gcore::Written;
pub use kallsyms::Symbols;
pub use kernel::Kernel;
pub use mapping::{AddressSpace, Mapping};
pub use memory::{Layout, MappedMemory, PhysicalMemory, Segment};
pub use object::Object;
pub use page::PageOwner;
pub use paging::{Entry, Leaf, PageTables};
pub use registers::{FloatState, Registers};
pub use task::{Credentials, IdKind, State, Task};
pub use types::{Field, TableEntry, Types};
pub use vmcore::open_memory;
pub use vmcoreinfo::Vmcoreinfo;
