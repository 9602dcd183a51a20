//! What a service is given, and what it returns.

use core::sync::atomic::Ordering::Relaxed;

use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::policy::paths::PathBuffer;

/// A call that a service is to answer.
pub(crate) struct ServiceCall<'a> {
    pub(crate) number: u64,
    /// As the program, or a rule, gave them.
    pub(crate) given: [u64; 6],
    /// What the kernel is to perform the call with.
    pub(crate) arguments: [u64; 6],
    /// What the service carries from one stage to the next; zero at first.
    pub(crate) carried: [u64; 2],
    /// PathBuffer for paths, which stays until the call is over. Empty for services that do not name paths.
    pub(crate) room: PathBuffer<'a>,
    /// PathBuffer for a list of arguments, in an `execve`.
    pub(crate) list: &'a mut [u64],
}

impl<'a> ServiceCall<'a> {
    pub(crate) fn new(number: u64, arguments: [u64; 6], room: PathBuffer<'a>, list: &'a mut [u64]) -> Self {
        Self { number, given: arguments, arguments, carried: [0; 2], room, list }
    }
}

/// How far a call has come that a service answers.
#[derive(Clone, Copy)]
pub(crate) enum Stage {
    /// The call is about to begin.
    Begin,
    /// The kernel has performed the call, with this result.
    Performed(i64),
}

/// What is done next with a call.
pub(crate) enum Next {
    /// The program gets this result.
    Return(i64),
    /// The kernel performs the call, with [`ServiceCall::arguments`]; the service is asked again then.
    Perform,
}

/// Returns which services are on.
#[inline(always)]
pub(crate) fn enabled() -> u64 {
    ORRERY_CONFIG.services.load(Relaxed)
}

/// Returns whether the executive is not to make calls of its own.
pub(crate) fn unusable() -> bool {
    ORRERY_CONFIG.filtered.load(Relaxed) != 0
}
