//! Many instances of one library, and what does the same otherwise.

pub mod fresh;
pub mod lua;
pub mod program;
pub mod sqlite;
