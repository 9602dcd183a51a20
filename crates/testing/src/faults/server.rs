//! A server whose calls fail one after the other.

use std::fmt;

use syscalls::Sysno;

use super::{Faults, Which, errors_of};

/// A server that repeats at once what fails, without a pause, does so far more often than this while a client asks.
const MOST_FAILURES: usize = 20_000;
/// How many calls of a number fail one at a time, at most, where all are tried.
const MOST_PLACES: usize = 40;

/// Returns whether to have each call fail by itself too, and with each error, not only all of a number at once with
/// one (`ORRERY_FAULTS`; `make soak`).
#[must_use]
pub fn is_thorough() -> bool {
    std::env::var_os("ORRERY_FAULTS").is_some()
}

/// A call that is made to fail.
#[derive(Clone, Copy, Debug)]
pub struct Attempt {
    /// The call's number.
    pub call: u64,
    /// The error that it returns.
    pub errno: i32,
    /// Which calls of that number.
    pub which: Which,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = usize::try_from(self.call).ok().and_then(Sysno::new);
        let name = name.map_or_else(|| format!("call {}", self.call), |call| call.name().to_owned());
        let error = std::io::Error::from_raw_os_error(self.errno);
        match self.which {
            Which::All => write!(f, "each {name} fails: {error}"),
            Which::After(others) => write!(f, "{name} fails after {others} others: {error}"),
        }
    }
}

/// A server, and who uses it.
pub struct Server<'a> {
    /// The server, which is ready.
    pub faults: &'a Faults,
    /// Uses all that it does. That may fail and be cut short, within a second.
    pub work: &'a mut dyn FnMut(),
    /// Panics unless the server serves as if nothing had been. It may need a moment for that.
    pub serves: &'a mut dyn FnMut(),
    /// Calls that do not fail: those for memory, where a server starts threads as it serves, with which the standard library ends a process.
    pub spared: &'a [Sysno],
    /// What it has logged, for failures.
    pub log: &'a dyn Fn() -> String,
}

impl Server<'_> {
    /// Has each system call fail that the server makes while it is used, with each error that it may return for want of a resource: one
    /// call at a time, and all of a number at once. Returns how many of these attempts reached a call.
    ///
    /// # Panics
    /// Where the server ends, repeats what fails without a pause, or does not serve afterwards.
    pub fn survives_each_failure(&mut self) -> usize {
        (self.work)();
        let counts = self.faults.count(|| (self.work)());
        let mut reached = 0;
        let spared = |call: u64| self.spared.iter().any(|of| u64::from(*of as u32) == call);
        let counts: Vec<_> = counts.into_iter().filter(|(call, _)| !spared(*call)).collect();
        for (call, count) in counts {
            let (places, errors) = if is_thorough() { (count.min(MOST_PLACES), usize::MAX) } else { (0, 1) };
            let which = || (0..places).map(Which::After).chain([Which::All]);
            for attempt in errors_of(call)
                .iter()
                .take(errors)
                .flat_map(|&errno| which().map(move |which| Attempt { call, errno, which }))
            {
                reached += usize::from(self.try_once(attempt) > 0);
            }
        }
        reached
    }

    /// Makes one attempt, and returns how many calls failed.
    ///
    /// # Panics
    /// As [`survives_each_failure`](Self::survives_each_failure).
    pub fn try_once(&mut self, attempt: Attempt) -> usize {
        let failed = self.faults.fail(attempt.call, attempt.errno, attempt.which, || (self.work)());
        assert!(!self.faults.has_ended(), "the server has ended: {attempt}\n{}", (self.log)());
        assert!(
            failed < MOST_FAILURES,
            "the server makes no pause: {attempt}, {failed} times\n{}",
            (self.log)()
        );
        // What it says where it fails has the attempt above it.
        let named = Named(attempt, self.log);
        (self.serves)();
        std::mem::forget(named);
        assert!(!self.faults.has_ended(), "the server ended later: {attempt}\n{}", (self.log)());
        failed
    }
}

impl fmt::Debug for Server<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("faults", self.faults).finish_non_exhaustive()
    }
}

/// Prints the attempt where a panic drops it.
struct Named<'a>(Attempt, &'a dyn Fn() -> String);

impl Drop for Named<'_> {
    fn drop(&mut self) {
        eprintln!("it does not serve any more after: {}\n{}", self.0, (self.1)());
    }
}
