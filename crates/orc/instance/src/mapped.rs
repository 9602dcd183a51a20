//! Instances of libraries that were not built with the pass: each is a mapping of the library's file.
//!
//! Pages that are not written, code above all, are the page cache's in every mapping. Writable pages are private, and become an
//! instance's own when they are relocated or written. What the dynamic loader does once for a library is done here for each
//! instance, by steps that each have a file: [`segments`], [`dynamic`], [`symbols`], [`relocations`] and [`frames`] read
//! the file; the outcome is a [`plan`], which is checked: where it is wrong, nothing was mapped. [`imports`] finds what the
//! library needs in the process, [`memory`] maps, and an [`instance`] is relocated and constructed. [`threads`] and
//! [`descriptors`] do what the C library would for thread-local variables.
//!
//! The dynamic loader itself offers the same by dlmopen(3), for a dozen namespaces, each with a C library of its own.

mod descriptors;
mod dynamic;
mod elf;
mod frames;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod imports;
mod instance;
mod library;
mod memory;
mod plan;
mod relocations;
mod segments;
mod symbols;
mod threads;

pub use instance::MappedInstance;
pub use library::{MappedLibrary, MappedOptions};
