//! Services: functions that answer calls in the kernel's place. This is where a handler plugs in.
//!
//! ```text
//!  call --> policy's rules --> TABLE[number] --> service --> the kernel, if the service passes the call on
//!                                   |
//!                                   +-- no service, or not on: the kernel
//! ```
//!
//! A service is a function of a [`Call`] that returns what the program is to get. It is entered in [`SERVICES`] with the
//! calls that it answers and the bits of [`Config::services`](crate::config::Config::services) that turn it on. What it
//! is:
//!
//! - It runs in the program's thread, on the program's stack, with the program's signal mask: it allocates nothing, locks
//!   nothing, uses little stack and no registers but general ones and xmm.
//! - A signal handler of the program may interrupt it anywhere, call it again, and leave with `siglongjmp`: state is kept in
//!   atomics that are right after each single step.
//! - Other threads are in it at the same time, and a child of `fork` has a copy of its state: see [`forked`] and the
//!   others here, which are called where threads and processes begin.
//! - What it does not understand it passes on ([`Call::pass_on`]): errors are the kernel's to find.
//! - It reads and writes the program's memory by `user`, which reports faults.
//!
//! A service that is off costs nothing: sites of its calls are rewritten as if it was not there. One that is on costs its
//! own calls what a rule of a policy costs them.

pub(crate) mod attributes;
pub(crate) mod identity;
pub(crate) mod mounts;
pub(crate) mod sleeps;
pub(crate) mod timeouts;

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::gates::ORRERY_CONFIG;
use crate::board::CALLS;
use crate::config::service;
use crate::numbers;

/// A call that a service is to answer.
pub(crate) struct Call<'a> {
    pub(crate) number: u64,
    pub(crate) arguments: [u64; 6],
    kernel: &'a mut dyn FnMut([u64; 6]) -> i64,
}

impl Call<'_> {
    /// Has the kernel perform it, with the arguments as they are now.
    pub(crate) fn pass_on(&mut self) -> i64 {
        (self.kernel)(self.arguments)
    }
}

/// What answers some calls.
struct Service {
    /// It is on if one of these bits is.
    bits: u64,
    calls: &'static [u64],
    answer: fn(&mut Call<'_>) -> i64,
}

static SERVICES: [Service; 5] = [
    Service { bits: service::SLEEP, calls: &sleeps::CALLS, answer: sleeps::answer },
    Service { bits: service::SLEEP, calls: &timeouts::CALLS, answer: timeouts::answer },
    Service { bits: service::PROCESS | service::USER, calls: &identity::ASKED, answer: identity::answer },
    Service { bits: service::USER, calls: &identity::CHANGING, answer: identity::change },
    Service { bits: service::MOUNT, calls: &mounts::CALLS, answer: mounts::answer },
];

/// No service.
const NONE: u8 = u8::MAX;

/// For each call the index of its service. Calls that may return by another way can have none; where `execve` returns, it does
/// so here.
static TABLE: [u8; CALLS] = {
    let mut table = [NONE; CALLS];
    let mut index = 0;
    while index < SERVICES_CALLS.len() {
        let calls = SERVICES_CALLS[index];
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

/// The calls of [`SERVICES`], which constants cannot refer to.
const SERVICES_CALLS: [&[u64]; 5] =
    [&sleeps::CALLS, &timeouts::CALLS, &identity::ASKED, &identity::CHANGING, &mounts::CALLS];

const fn returns_elsewhere(number: u64) -> bool {
    matches!(
        number,
        numbers::rt_sigreturn
            | numbers::fork
            | numbers::vfork
            | numbers::clone
            | numbers::clone3
            | numbers::exit
            | numbers::exit_group
    )
}

/// Which services are on.
#[inline(always)]
pub(crate) fn enabled() -> u64 {
    ORRERY_CONFIG.services.load(Relaxed)
}

fn service_of(number: u64) -> Option<&'static Service> {
    let index = TABLE.get(number as usize)?;
    SERVICES.get(usize::from(*index)).filter(|service| service.bits & enabled() != 0)
}

/// Whether some service answers this call.
pub(crate) fn concerns(number: u64) -> bool {
    enabled() != 0 && service_of(number).is_some()
}

/// Answers a call, or has the kernel do so.
#[inline(always)]
pub(crate) fn serve(number: u64, arguments: [u64; 6], kernel: &mut dyn FnMut([u64; 6]) -> i64) -> i64 {
    if enabled() == 0 {
        return kernel(arguments);
    }
    match service_of(number) {
        Some(service) => (service.answer)(&mut Call { number, arguments, kernel }),
        None => kernel(arguments),
    }
}

/// Where the answer to a call without arguments is remembered, in a form that a rewritten site can look at.
pub(crate) fn remembered(number: u64) -> Option<&'static AtomicU64> {
    if concerns(number) { identity::place(number).filter(|_| !unusable()) } else { None }
}

/// Whether the executive is not to make calls of its own.
pub(crate) fn unusable() -> bool {
    ORRERY_CONFIG.filtered.load(Relaxed) != 0
}

/// The thread is about to make a thread or a process, or to execute a program.
pub(crate) fn about_to_hand_on() {
    attributes::about_to_hand_on();
}

/// This is the child of a `fork`, before it returns to the program: nobody else uses this memory.
pub(crate) fn forked(flags: u64) {
    if enabled() != 0 {
        attributes::forked();
        identity::forked(flags);
    }
}

/// A thread or process is about to begin that uses this memory at the same time.
pub(crate) fn about_to_share(flags: u64) {
    if enabled() != 0 {
        identity::about_to_share(flags);
    }
}

/// A process is about to begin that uses this memory while this thread waits.
pub(crate) fn about_to_vfork() {
    if enabled() != 0 {
        identity::about_to_vfork();
    }
}

/// That process does not use it any more, or was not made.
pub(crate) fn vforked() {
    if enabled() != 0 {
        identity::vforked();
    }
}
