//! The policy: its table, what its rules ask about a call, and what they do with it.

pub(crate) mod call_stack;
pub(crate) mod conditions;
pub(crate) mod descriptors;
pub(crate) mod handlers;
pub(crate) mod journal_writer;
pub(crate) mod path_filter;
pub(crate) mod paths;
pub(crate) mod rules;
pub(crate) mod table;
