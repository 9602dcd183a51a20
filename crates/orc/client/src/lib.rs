//! ORC: identical code and read-only data exist once in memory, shared on request by content hash, through descriptors that
//! cannot be forged, with no scanning of pages.
//!
//! A *store* (`orrery orc serve`) has the one copy of each *object* in a sealed memory file. A program that has
//! the bytes, or knows their BLAKE3 hash, asks for the object and gets a descriptor: a capability that shows these bytes for
//! ever and can do nothing else. [`Client::publish`] puts an object in the place of a program's own copy.
//!
//! ```no_run
//! use orrery_orc_client::{Client, Flags};
//!
//! # fn main() -> Result<(), orrery_orc_client::Error> {
//! let client = Client::connect()?;
//! let words = client.register(b"a large dictionary ...", Flags::none())?;
//! // In another program:
//! let same = client.request(words.id())?;
//! assert_eq!(&*same.map()?, b"a large dictionary ...");
//! # Ok(())
//! # }
//! ```
//!
//! After "ORC: Increasing Cloud Memory Density via Object Reuse with Capabilities" (Sartakov et al., OSDI 2023), whose
//! capabilities are CHERI's.

mod client;
mod error;
mod object;
mod publish;

pub use client::{Client, Flags};
pub use error::{Error, Result};
pub use object::{Mapping, Object};
pub use orrery_orc_wire::protocol::Refusal;
pub use orrery_orc_wire::{ObjectId, ParseIdError, SOCKET, default_directory, protocol, report};
pub use orrery_sys::{PAGE, PageRange};
pub use publish::Published;
