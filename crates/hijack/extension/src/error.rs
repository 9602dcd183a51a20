//! Why a module is not loaded, and why a run is aborted.

use crate::host::Refusal;

/// Why a module cannot be loaded. Nothing is changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// It is too large.
    #[error("cannot load extension {name:?}: the module has {size} bytes; at most {limit} are allowed")]
    Size {
        /// The extension.
        name: String,
        /// The module's size in bytes.
        size: usize,
        /// The largest size.
        limit: usize,
    },
    /// It is not a valid module of this kind.
    #[error("cannot load extension {name:?}: {cause}")]
    Module {
        /// The extension.
        name: String,
        /// The sentence that says what is wrong.
        cause: String,
    },
    /// The host does not grant a right that the manifest requests.
    #[error("cannot load extension {name:?}: handle {handle:?} is refused: {cause}")]
    Refused {
        /// The extension.
        name: String,
        /// The handle's name in the manifest.
        handle: String,
        /// The reason of the refusal.
        cause: Refusal,
    },
    /// The sum of all reservations would exceed a limit.
    #[error(
        "cannot load extension {name:?}: with it, {what} of all extensions would be {sum}; the limit is {limit}"
    )]
    Sum {
        /// The extension.
        name: String,
        /// The kind of resource.
        what: &'static str,
        /// The sum with this extension.
        sum: u64,
        /// The limit.
        limit: u64,
    },
    /// The first run failed.
    #[error("cannot load extension {name:?}: its start was aborted: {cause}")]
    Start {
        /// The extension.
        name: String,
        /// The reason of the abort.
        cause: Abort,
    },
    /// The kernel refuses the timer that bounds runs.
    #[error("cannot load extension {name:?}: cannot make a timer: {cause}")]
    Timer {
        /// The extension.
        name: String,
        /// The error of the kernel.
        cause: orrery_sys::Error,
    },
}

/// Why a run was aborted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Abort {
    /// It used up its fuel.
    #[error("it used up its fuel")]
    Fuel,
    /// It used up its CPU time.
    #[error("it used up its CPU time")]
    Expired,
    /// It asked for more memory or table entries than it may have.
    #[error("it asked for more memory than its limit")]
    Memory,
    /// It used up its stack.
    #[error("it used up its stack")]
    Stack,
    /// It used a handle that it was never granted.
    #[error("it used handle {0:#x}, which it was never granted")]
    Forged(u32),
    /// It passed an address outside its memory.
    #[error("it passed an address outside its memory")]
    Address,
    /// It trapped: an access out of bounds, a division by zero, `unreachable`.
    #[error("it trapped: {0}")]
    Trap(String),
}
