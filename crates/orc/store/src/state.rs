//! The state of a running store, of which each part is private to one file. It is changed by
//! [transactions](transaction::Transaction) only.

pub(crate) mod backup;
pub(crate) mod clients;
pub(crate) mod descriptor_budget;
pub(crate) mod fdstore;
pub(crate) mod file_occupancy;
pub(crate) mod known_content;
pub(crate) mod origins;
pub(crate) mod restore;
pub(crate) mod store_state;
pub(crate) mod transaction;
