//! What a client and a store of orc agree about: the protocol, names of objects, reports, where the store is found, and
//! files that nobody can change any more.

mod location;
mod object_id;

pub mod protocol;
pub mod report;
pub mod sealed_file;

pub use location::{SOCKET, default_directory};
pub use object_id::{ObjectId, ParseIdError};
