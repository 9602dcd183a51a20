//! Calls from rewritten sites that are more than passed on: the stubs' assembly calls these functions.

use super::chain;
use super::kernel_calls::Origin;
use crate::executive::abi::state::{counted, timed};
use crate::executive::abi::syscall::address;
use crate::executive::abi::trampoline::{RED_ZONE, StubFrame};
use crate::executive::abi::{thread_counters, tsc};
use crate::executive::policy::path_filter::no_rule_applies;
use crate::executive::policy::table::policy;
use crate::executive::process::mm;
use crate::executive::services;
use crate::nr;
use crate::rewrite_plan::SYSCALL;

/// A call from a rewritten site that is more than passed on: the policy has something to say about it, or the executive.
pub(crate) extern "C" fn stub_call(call: &mut StubFrame) -> i64 {
    if counted() {
        thread_counters::count(call.number, |row, add| add(&row.patched, 1));
    }
    let start = if timed() { tsc::ticks() } else { 0 };
    let [r9, r8, r10, rdx, rsi, rdi] = call.arguments;
    let stack = address(call) + size_of::<StubFrame>() as u64 + RED_ZONE;
    let number = call.number;
    let progress = &raw mut call.progress;
    let arguments = [rdi, rsi, rdx, r10, r8, r9];
    let result = chain::run(number, arguments, call.site, Origin::Rewritten { stack, progress });
    call.progress.made(result);
    if let Some(taken) = tsc::since(start) {
        thread_counters::count(number, |row, add| row.time(taken, result, add));
    }
    result
}

/// Returns where a site goes on whose call may be one that rules are about: its trampoline, its own `syscall` (which
/// is dispatched), or zero for the slow way.
pub(crate) extern "C" fn stub_filter(patched: &mut StubFrame, trampoline: u64) -> u64 {
    // The kernel reads an `int`.
    let number = patched.number & 0xffff_ffff;
    patched.number = number;
    if nr::needs_frame(number) {
        return patched.site.wrapping_sub(SYSCALL as u64);
    }
    if mm::treats(number) || services::concerns(number) || timed() {
        return 0;
    }
    let [r9, r8, r10, rdx, rsi, rdi] = patched.arguments;
    let stack = address(patched) + size_of::<StubFrame>() as u64 + RED_ZONE;
    let concerned = policy().filter(|policy| policy.concerns(number));
    if concerned.is_some_and(|policy| !no_rule_applies(policy, number, &[rdi, rsi, rdx, r10, r8, r9], stack))
    {
        return 0;
    }
    if counted() {
        thread_counters::count(number, |row, add| add(&row.patched, 1));
    }
    trampoline
}
