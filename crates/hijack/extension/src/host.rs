//! What extensions act on: the manager's side, as a trait.

use std::fmt::Debug;

use crate::error::Abort;
use crate::id::Id;
use crate::interface;

/// The manager that extensions run in. A call comes from within [`Extensions::run`](crate::Extensions::run), on its thread, and
/// must not wait: its time counts as the extension's.
pub trait Host: Send + Sync + 'static {
    /// What a handle stands for: an attribute of a program, an event source, an outlet. The host checks again whether the owner
    /// still has this right.
    type Capability: Clone + Debug + Send + Sync + 'static;

    /// Returns the value of an attribute.
    ///
    /// # Errors
    /// [`Refusal::Gone`], [`Refusal::Denied`], or [`Refusal::Invalid`] for what has no value.
    fn get_attribute(&self, of: &Self::Capability) -> Result<i64, Refusal>;

    /// Sets an attribute, after the guards of its class agree.
    ///
    /// # Errors
    /// Why not; nothing is changed then.
    fn set_attribute(&self, of: &Self::Capability, value: i64) -> Result<(), Refusal>;

    /// Has events of a source posted to the subscriber, until [`Host::unsubscribe`]. `parameter` is the source's own, the period
    /// of a timer in nanoseconds for instance.
    ///
    /// # Errors
    /// Why not.
    fn subscribe(
        &self,
        source: &Self::Capability,
        parameter: i64,
        subscriber: Subscriber,
    ) -> Result<(), Refusal>;

    /// Ends all subscriptions of an extension.
    fn unsubscribe(&self, extension: Id);

    /// Sends a message to an outlet, of at most [`interface::MESSAGE`] bytes.
    ///
    /// # Errors
    /// Why not: [`Refusal::Limit`] where the receiver's queue is full.
    fn emit(&self, to: &Self::Capability, message: &[u8]) -> Result<(), Refusal>;

    /// Returns the monotonic clock, in nanoseconds.
    fn clock(&self) -> u64;

    /// Logs a line of an extension. Control characters are already replaced.
    fn log(&self, extension: Id, line: &str);

    /// Notifies the owner of an extension.
    fn notify(&self, extension: Id, notice: Notice);
}

/// Where the events of a subscription go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Subscriber {
    /// The extension.
    pub extension: Id,
    /// The number of its subscription.
    pub subscription: u32,
    /// Which run of the extension made it. Events for an earlier one are ignored.
    pub incarnation: u32,
}

/// Why a host does not do what an extension asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The right does not include this.
    #[error("the handle does not have this right")]
    Denied,
    /// The value is outside the range of its class.
    #[error("the value is outside the attribute's range")]
    Range,
    /// A guard refuses the value.
    #[error("a guard refuses the value")]
    Guard,
    /// The right was revoked, or its object does not exist any more.
    #[error("the handle was revoked, or its object does not exist any more")]
    Gone,
    /// There is no more room.
    #[error("there is no more room")]
    Limit,
    /// The object has no such operation, or the parameter is invalid.
    #[error("the object has no such operation, or the parameter is invalid")]
    Invalid,
}

impl Refusal {
    /// Returns what the module gets.
    pub(crate) fn code(self) -> i32 {
        match self {
            Self::Denied => interface::DENIED,
            Self::Range => interface::RANGE,
            Self::Guard => interface::GUARD,
            Self::Gone => interface::GONE,
            Self::Limit => interface::LIMIT,
            Self::Invalid => interface::INVALID,
        }
    }
}

/// What the owner of an extension is notified of.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// A run was aborted; the module starts over.
    Aborted {
        /// The reason of the abort.
        cause: Abort,
        /// How many runs were aborted so far.
        failures: u32,
        /// At how many it is unloaded.
        limit: u32,
    },
    /// It was aborted for the last time and is unloaded.
    Unloaded {
        /// Why the last run was aborted.
        cause: Abort,
        /// The number of failures.
        failures: u32,
    },
    /// Its queue is full, and an event was dropped: the first since it last was empty.
    Dropped {
        /// How many events were dropped so far.
        dropped: u64,
    },
}
