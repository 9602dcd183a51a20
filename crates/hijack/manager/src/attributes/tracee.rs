//! What a tracee is called.

use serde::{Deserialize, Serialize};

/// A tracee, for as long as it is in the table; numbers are never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TraceeId(pub u64);
