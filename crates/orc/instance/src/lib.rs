//! Many instances of one library in one process: its code and constants exist once, its state is apart.
//!
//! A library that is built by `orrery-cc` (the compiler pass in `passes/cls`) finds its writable variables at a distance
//! that a thread-local word holds. [`Library::load`] loads it once; [`Library::create`] makes an [`Instance`]: a copy of
//! the state as it was when the library was loaded, and a heap of its own. [`Instance::enter`] has the calling thread use
//! that state until the guard is dropped, which takes a few nanoseconds.
//!
//! ```no_run
//! use orrery_orc_instance::Library;
//!
//! # fn main() -> Result<(), orrery_orc_instance::Error> {
//! let library = Library::load("/usr/lib/example/libcounter.so")?;
//! let next = library.symbol(c"next")?;
//! // SAFETY: `next` has this type in the library's source.
//! let next: extern "C" fn() -> i32 = unsafe { std::mem::transmute(next) };
//! let (mut one, mut two) = (library.create()?, library.create()?);
//! assert_eq!(one.enter()?.run(|| (next(), next())), (1, 2));
//! assert_eq!(two.enter()?.run(|| next()), 1);
//! # Ok(())
//! # }
//! ```
//!
//! Of a library that was not built so, [`MappedLibrary`] makes instances by mapping its file again for each: code and
//! constants stay one in memory, but have other addresses in each [`MappedInstance`], and so does every function.
//!
//! Instances are apart as objects of one program are: nothing keeps a library from writing to wrong addresses. Where
//! an instance must not harm others, it belongs into a context or an orbit.
//!
//! After "ORC: Increasing Cloud Memory Density via Object Reuse with Capabilities" (Sartakov et al., OSDI 2023), section
//! 2.3 of the slides: compartment-local storage.

mod abi;
mod claim;
mod dl;
mod error;
mod file;
mod heap;
mod host;
mod image;
mod instance;
mod library;
mod mapped;
mod places;
mod region;
mod resources;
mod snapshot;
mod words;

pub use error::{Error, Result};
pub use instance::{Attached, Entered, Instance};
pub use library::{Library, Options};
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub use mapped::fuzzing;
pub use mapped::{MappedInstance, MappedLibrary, MappedOptions};
pub use snapshot::Snapshot;
