//! The way of a call: rules, then services, then the kernel.
//!
//! ```text
//!  Call --> rules::judge --> Answer(result) ----------------------------------------> result
//!                        `-> Perform(arguments) --> service --> Return(result) -----> result
//!                                                          `-> Perform --> kernel --> result
//!                                                    ^                       |
//!                                                    `-----------------------'  (the service looks at the result)
//! ```
//!
//! Each link is given data and returns data; this file alone calls them, one after the other. What a link hands on may point into
//! memory of this file's functions, which therefore stay on the stack until the kernel has performed the call.
//!
//! A call without rules and services goes to the kernel directly.

use super::kernel_calls::{Origin, perform};
use crate::executive::abi::work_areas::{self, Room};
use crate::executive::policy::conditions::{Call, Facts};
use crate::executive::policy::handlers::{self, Decision};
use crate::executive::policy::journal_writer;
use crate::executive::policy::paths::PathBuffer;
use crate::executive::policy::rules::{Changes, Outcome, judge};
use crate::executive::policy::table::policy;
use crate::executive::services::call::{Next, ServiceCall, Stage};
use crate::executive::services::{self, Service};
use crate::policy::Rule;

/// Performs a call, or does with it what the policy says. `site` is the address behind the call instruction.
#[inline(always)]
pub(crate) fn run(number: u64, arguments: [u64; 6], site: u64, mut origin: Origin<'_>) -> i64 {
    match policy() {
        Some(policy) if policy.concerns(number) => {
            if let Some((rule, handler)) = policy.bare(number) {
                return match handlers::compare(policy, handler, rule, number, &arguments) {
                    Decision::Answer(result) => result,
                    Decision::Pass | Decision::Allow => serve(number, arguments, &mut origin),
                };
            }
            let call = Call { policy, number, arguments, site, stack: origin.stack() };
            let paths = policy.rules(number).any(|rule| rule.path.length != 0 || rule.room != 0);
            if paths { judged_with_paths(&call, &mut origin) } else { judged(&call, &mut [], &mut origin) }
        }
        _ => serve(number, arguments, &mut origin),
    }
}

/// Paths need memory, for those calls alone for which rules name paths. Where there is none, the call fails.
#[inline(never)]
fn judged_with_paths(call: &Call, origin: &mut Origin<'_>) -> i64 {
    work_areas::with(|room| judged(call, room.paths, origin)).unwrap_or_else(|error| error)
}

#[inline(never)]
fn judged(call: &Call, room: &mut [u8], origin: &mut Origin<'_>) -> i64 {
    let mut facts = Facts::new(call, PathBuffer::new(room));
    let mut changes = Changes::new(call.arguments);
    let verdict = judge(call, &mut facts, &mut changes);
    let result = match verdict.logged {
        None => finish(call.number, &verdict.outcome, origin),
        Some(rule) => logged(call, rule, &mut facts, &verdict.outcome, origin),
    };
    // The arguments may have pointed to these.
    core::hint::black_box(&changes);
    result
}

/// An entry of the journal needs memory, too. Where there is none, the call is in no entry, which is counted.
#[inline(never)]
fn logged(
    call: &Call,
    rule: &Rule,
    facts: &mut Facts<'_>,
    outcome: &Outcome,
    origin: &mut Origin<'_>,
) -> i64 {
    let answered = matches!(outcome, Outcome::Answer(_));
    let log = |Room { entry, .. }: Room<'_>| {
        journal_writer::begin(entry, call, rule, facts, answered);
        let result = finish(call.number, outcome, origin);
        journal_writer::end(entry, call, answered, result);
        result
    };
    // Whether that can be had is known before the call is performed.
    match work_areas::with(log) {
        Ok(result) => result,
        Err(_) => {
            journal_writer::lose();
            finish(call.number, outcome, origin)
        }
    }
}

#[inline(always)]
fn finish(number: u64, outcome: &Outcome, origin: &mut Origin<'_>) -> i64 {
    match *outcome {
        Outcome::Answer(result) => result,
        Outcome::Perform(arguments) => serve(number, arguments, origin),
    }
}

#[inline(always)]
fn serve(number: u64, arguments: [u64; 6], origin: &mut Origin<'_>) -> i64 {
    match services::of(number) {
        None => perform(number, arguments, origin),
        Some(service) if !service.names_paths => {
            follow(service, ServiceCall::new(number, arguments, PathBuffer::new(&mut []), &mut []), origin)
        }
        Some(service) => serve_paths(service, number, arguments, origin),
    }
}

#[inline(never)]
fn serve_paths(service: &Service, number: u64, arguments: [u64; 6], origin: &mut Origin<'_>) -> i64 {
    let serve = |room: Room<'_>| {
        let call = ServiceCall::new(number, arguments, PathBuffer::new(room.paths), room.list);
        follow(service, call, origin)
    };
    work_areas::with(serve).unwrap_or_else(|error| error)
}

/// Has a service and the kernel take turns until the service returns a result.
#[inline(never)]
fn follow(service: &Service, mut call: ServiceCall<'_>, origin: &mut Origin<'_>) -> i64 {
    let mut stage = Stage::Begin;
    loop {
        match (service.step)(&mut call, stage) {
            Next::Return(result) => return result,
            Next::Perform => stage = Stage::Performed(perform(call.number, call.arguments, origin)),
        }
    }
}
