//! Credentials: shared ones, assumed ones, and isolation between processes of one user.

pub(crate) mod assume;
pub(crate) mod isolation;
pub(crate) mod shared;
