//! Guard functions: whether a change is admitted (the QoS contract and the isolation requirement of SafeX).
//!
//! A guard sees the values as they would be, of all tracees, and changes nothing. That no tracee's service improves at the cost of
//! another's is a bound on the sum of reservations: what others were admitted with stays possible.

use super::tracee::TraceeId;

/// The values of all tracees, as they would be.
#[derive(Debug)]
pub struct Proposal<'a> {
    /// Whose values are to change.
    pub tracee: TraceeId,
    /// Each tracee, and its values by class.
    pub values: &'a [(TraceeId, &'a [i64])],
}

impl Proposal<'_> {
    /// Returns a value of the tracee that is to change.
    #[must_use]
    pub fn own(&self, class: usize) -> i64 {
        let found = self.values.iter().find(|(tracee, _)| *tracee == self.tracee);
        found.and_then(|(_, values)| values.get(class).copied()).unwrap_or(0)
    }
}

/// What a guard decides: an error is the reason of a refusal.
pub type Admission = Result<(), String>;

/// A guard function.
pub trait Guard {
    /// Returns the classes, by index, whose changes it is to be asked about.
    fn classes(&self) -> Vec<usize>;

    /// Decides.
    ///
    /// # Errors
    /// The reason of a refusal, for the user.
    fn admit(&self, proposal: &Proposal<'_>) -> Admission;
}
