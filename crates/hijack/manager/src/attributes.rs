//! Attribute classes: named, typed, ranged values of each tracee, read and set through capabilities (SafeX' attribute classes
//! and guard functions).
//!
//! | file | idea |
//! |---|---|
//! | `class` | what an attribute is: its type, range, permissions; read from TOML |
//! | `rights` | which classes of which tracees somebody may read and set |
//! | `event` | what happens, and bounded queues of it |
//! | `guard` | whether a change is admitted |
//! | `tracee` | what a tracee is called |
//! | `upcalls` | where upcalls of a tracee go |
//! | `table` | the values, the capabilities and the subscriptions |

mod class;
mod event;
mod guard;
mod rights;
mod table;
mod tracee;
mod upcalls;

use thiserror::Error;

pub use class::{Class, Classes, Kind, Permission};
pub use event::{Event, Topic};
pub use guard::{Admission, Guard, Proposal};
pub use rights::{ClassSet, Rights, Scope};
pub use table::{Capability, Change, Subscription, Table};
pub use tracee::TraceeId;
pub use upcalls::{NotMade, Upcalls};

/// Errors of classes, capabilities and values. What fails has changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AttributeError {
    /// A file of classes is wrong.
    #[error("cannot read classes from {name}: {message}")]
    Declaration {
        /// The file.
        name: String,
        /// What is wrong with it, and where.
        message: String,
    },
    /// There is no such class.
    #[error(
        "cannot find attribute class {0:?}: it is not declared; `orrery manager classes` lists those that are"
    )]
    UnknownClass(String),
    /// There is no such tracee.
    #[error("cannot find tracee {0}: it has ended, or never joined")]
    UnknownTracee(u64),
    /// The capability was revoked, or it is another table's.
    #[error("cannot use the capability: it was revoked")]
    Revoked,
    /// The capability does not include this.
    #[error("cannot {operation} {object}: the capability does not include it")]
    Denied {
        /// The operation that was refused.
        operation: &'static str,
        /// The object of the operation.
        object: String,
    },
    /// The value is no value of this type.
    #[error("cannot read {text:?} as the value of {class}: {message}")]
    Malformed {
        /// The class.
        class: String,
        /// The value.
        text: String,
        /// What is wrong with it.
        message: String,
    },
    /// The value is out of range.
    #[error("cannot set {class} to {value}: the range is {lowest} to {highest}")]
    Range {
        /// The class.
        class: String,
        /// The value.
        value: String,
        /// The lowest value.
        lowest: String,
        /// The highest one.
        highest: String,
    },
    /// All tracees together would have more than there is.
    #[error("cannot set {class} to {value}: the sum over all tracees would be {sum}; the bound is {bound}")]
    Sum {
        /// The class.
        class: String,
        /// The value.
        value: String,
        /// The sum.
        sum: String,
        /// The bound that would be exceeded.
        bound: String,
    },
    /// A guard function refuses the change.
    #[error("cannot reserve {what}: {reason}")]
    Refused {
        /// What was to be set.
        what: String,
        /// The sentence that says why not.
        reason: String,
    },
    /// The tracee has no function registered for upcalls.
    #[error("cannot make an upcall into tracee {0}: it has no function registered")]
    NotRegistered(u64),
    /// There is no room for more.
    #[error("cannot add another {0}: the table has as many as it may hold")]
    Full(&'static str),
}
