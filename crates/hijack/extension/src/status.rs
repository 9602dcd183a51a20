//! What is known of an extension.

/// Counters of one extension, since it was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Events that were handled, aborted ones included.
    pub handled: u64,
    /// The number of events that wait.
    pub waiting: usize,
    /// Events that were dropped because the queue was full.
    pub dropped: u64,
    /// Runs that were aborted.
    pub failures: u32,
    /// Operations in all.
    pub fuel: u64,
    /// Operations of the longest run that was not aborted.
    pub longest: u64,
}
