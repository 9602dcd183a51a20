//! What to do when the queue is full, and where an orbit runs.

use core::time::Duration;

/// What to do with a call when the queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackPressure {
    /// Wait for room like [`BackPressure::WaitAtMost`], but a call without a return value waits for 100 ms at most, and
    /// once that was in vain, others fail at once until the orbit returns from a task: an orbit that hangs does not
    /// hold up a program that does not depend on its answers. [`orrery_domain::Statistics::dropped`] counts the calls
    /// that fail.
    WaitForValues(Duration),
    /// Wait until there is room.
    Wait,
    /// Wait for room, then fail.
    WaitAtMost(Duration),
    /// Fail at once.
    Fail,
    /// Cancel the oldest waiting call that is cancellable; fail where there is none.
    CancelOldest,
}

/// Where an orbit runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Placement {
    /// On the caller's CPU for synchronous calls (main waits anyway, and no other CPU has to be woken), anywhere for
    /// asynchronous ones.
    #[default]
    Auto,
    /// On the CPU of the thread that called last.
    Caller,
    /// On the CPU with this number.
    Cpu(usize),
    /// Where the scheduler wants it.
    Anywhere,
}
