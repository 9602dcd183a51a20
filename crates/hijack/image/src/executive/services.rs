//! Services: functions that answer calls in the kernel's place.
//!
//! ```text
//!  call --> rules of the policy --> TABLE[number] --> service --> the kernel, if the service asks for that
//!                                        |
//!                                        +-- no service, or not on: the kernel
//! ```
//!
//! A service is a function that takes a [`ServiceCall`](call::ServiceCall) and the [`Stage`](call::Stage) that it is at, and returns
//! what is [`Next`](call::Next). It is entered in [`SERVICES`] with the calls that it answers and the bits of
//! [`Config::services`](crate::config::Config::services) that turn it on. Its rules:
//!
//! - It runs in the program's thread, on the program's stack, with the program's signal mask: it allocates nothing, locks
//!   nothing, uses little stack and no registers but general ones and xmm.
//! - A signal handler of the program may interrupt it anywhere, call it again, and leave with `siglongjmp`: state is kept in
//!   atomics that are right after each single step.
//! - Other threads are in it at the same time, and a child of `fork` has a copy of its state: see [`in_forked_child`] and the
//!   others here, which are called where threads and processes begin.
//! - What it does not understand it has the kernel perform: errors are the kernel's to find.
//! - It reads and writes the program's memory by `user_memory`, which reports faults.
//!
//! A service that is off is free: sites of its calls are rewritten as if it was not there. One that is on takes as long for its
//! own calls as a rule of a policy does.

pub(crate) mod call;
pub(crate) mod identity;
pub(crate) mod mounts;
pub(crate) mod receive;
pub(crate) mod scheduling;
pub(crate) mod sleeps;
pub(crate) mod timeouts;

use core::sync::atomic::AtomicU64;

use crate::config::service;
use crate::executive::services::call::{Next, ServiceCall, Stage, enabled, unusable};
use crate::nr;
use crate::nr::CALLS;

/// What answers some calls.
pub(crate) struct Service {
    /// It is on if one of these bits is.
    bits: u64,
    calls: &'static [u64],
    /// Whether it needs room for paths.
    pub(crate) names_paths: bool,
    pub(crate) step: fn(&mut ServiceCall<'_>, Stage) -> Next,
}

static SERVICES: [Service; 7] = [
    Service { bits: service::SLEEP, calls: &sleeps::CALLS, names_paths: false, step: sleeps::step },
    Service { bits: service::SLEEP, calls: &timeouts::CALLS, names_paths: false, step: timeouts::step },
    Service {
        bits: service::PROCESS | service::USER,
        calls: &identity::ASKED,
        names_paths: false,
        step: identity::step,
    },
    Service {
        bits: service::USER,
        calls: &identity::CHANGING,
        names_paths: false,
        step: identity::step_of_change,
    },
    Service { bits: service::MOUNT, calls: &mounts::CALLS, names_paths: true, step: mounts::step },
    Service { bits: service::RECEIVE, calls: &receive::CALLS, names_paths: false, step: receive::step },
    Service { bits: service::RECEIVE, calls: &receive::SEEN, names_paths: false, step: receive::see },
];

/// The value of a call that no service decides.
const NONE: u8 = u8::MAX;

/// For each call the index of its service. Calls that may return by another way can have none; where `execve` returns, it does
/// so here.
static TABLE: [u8; CALLS] = {
    let mut table = [NONE; CALLS];
    let mut index = 0;
    while index < SERVICES.len() {
        let calls = SERVICES[index].calls;
        let mut which = 0;
        while which < calls.len() {
            let place = calls[which] as usize;
            assert!(table[place] == NONE, "a call has one service");
            assert!(!returns_elsewhere(calls[which]), "this call may not return to its service");
            table[place] = index as u8;
            which += 1;
        }
        index += 1;
    }
    table
};

const fn returns_elsewhere(number: u64) -> bool {
    matches!(
        number,
        nr::rt_sigreturn | nr::fork | nr::vfork | nr::clone | nr::clone3 | nr::exit | nr::exit_group
    )
}

/// Returns the service that answers a call, if it is on.
#[inline(always)]
pub(crate) fn of(number: u64) -> Option<&'static Service> {
    if enabled() == 0 { None } else { find(number) }
}

fn find(number: u64) -> Option<&'static Service> {
    let index = TABLE.get(number as usize)?;
    SERVICES.get(usize::from(*index)).filter(|service| service.bits & enabled() != 0)
}

/// Returns whether some service answers this call.
pub(crate) fn concerns(number: u64) -> bool {
    of(number).is_some()
}

/// Returns where the answer to a call without arguments is remembered, in a form that a rewritten site can look at.
pub(crate) fn remembered(number: u64) -> Option<&'static AtomicU64> {
    if concerns(number) { identity::place(number).filter(|_| !unusable()) } else { None }
}

/// The thread is about to make a thread or a process, or to execute a program.
pub(crate) fn before_clone_or_exec() {
    scheduling::before_clone_or_exec();
}

/// This is the child of a `fork`, before it returns to the program: nobody else uses this memory.
pub(crate) fn in_forked_child(flags: u64) {
    if enabled() != 0 {
        scheduling::in_forked_child();
        identity::in_forked_child(flags);
    }
}

/// A thread or process is about to begin that uses this memory at the same time.
pub(crate) fn before_sharing_memory(flags: u64) {
    if enabled() != 0 {
        identity::before_sharing_memory(flags);
    }
}

/// A process is about to begin that uses this memory while this thread waits.
pub(crate) fn before_vfork() {
    if enabled() != 0 {
        identity::before_vfork();
    }
}

/// That process does not use it any more, or was not made.
pub(crate) fn after_vfork() {
    if enabled() != 0 {
        identity::after_vfork();
    }
}
