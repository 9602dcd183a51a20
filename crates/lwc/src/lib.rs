//! Light-weight contexts: snapshot and rollback inside a process.
