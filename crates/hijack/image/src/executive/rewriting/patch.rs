//! Rewriting of sites: instructions before a `syscall` make room for a jump to a stub, where they go on. See
//! [`crate::rewrite_plan`] for what that does to threads and branches within.
//!
//! The supervisor says which instructions: a decoder has no place here. It keeps what it found, by the code's hash.
//!
//! Other threads may be executing the very page. So it is not written to: a copy with the jump in it, already
//! executable, is moved over it in one `mremap`. Threads see the old page or the new one; one that fetches in between
//! faults and waits in the kernel. No page is writable and executable at any time, however the site is aligned.
//! Stubs are added to their pages in the same path.

use super::assembler::Assembler;
use crate::executive::memory::code_page::{PAGE, with_bytes};
use crate::executive::process::mm;
use core::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Relaxed};

use crate::config::SA_ONSTACK;
use crate::executive::abi::state::{ORRERY_CONFIG, counted, timed, verdicts};
use crate::executive::abi::supervisor::{leave, request};
use crate::executive::abi::syscall::{address, block_signals, set_mask};
use crate::executive::abi::trampoline::{
    RETURN_ADDRESSES, TRAMPOLINES, orrery_stub_call, orrery_timed, orrery_trampolines,
};
use crate::executive::memory::{code_ranges, jump_pads, saved_code, stub_pages};
use crate::executive::policy::path_filter;
use crate::executive::policy::table::policy;
use crate::executive::services;
use crate::executive::services::scheduling::RealtimePolicy;
use crate::nr;
use crate::nr::CALLS;
use crate::request_slots::{CODE, Request, SITE, SITE_UNANSWERED, YES};
use crate::rewrite_plan::{RELOCATED, RewritePlan, SYSCALL, WORDS};
use crate::shared_page::{Verdict, code_hash};

/// What became of an attempt.
pub(crate) enum Outcome {
    /// The site jumps now.
    Done,
    /// It cannot, and never will.
    Refused,
    /// Another thread is at it, or memory is short.
    Later,
}

/// Changed under the lock of `code_ranges` only.
static TRAMPOLINES_USED: AtomicU32 = AtomicU32::new(0);

/// Rewrites the site whose call instruction ends at `end` and was executed with `made` in all of rax.
#[inline(never)]
pub(crate) fn rewrite(end: u64, made: u64) -> Outcome {
    let Some(start) =
        end.checked_sub(CODE as u64).filter(|start| code_ranges::containing(*start, end).is_some())
    else {
        return Outcome::Refused;
    };
    // SAFETY: the range is readable code, each time this is called.
    let read =
        || unsafe { core::ptr::with_exposed_provenance::<[u64; CODE / 8]>(start as usize).read_unaligned() };
    let code = read();
    let plan = match verdict(&code) {
        Some(Some(plan)) => plan,
        Some(None) => return Outcome::Refused,
        None => return Outcome::Later,
    };
    code_ranges::try_locked(|| match code_ranges::containing(start, end) {
        // Another thread was faster: what is to be said about jump pads holds for one jump only.
        Some(_) if read() != code => Outcome::Later,
        // Chosen under the lock: sites of paths that need larger stacks are restored under it when the program says
        // that its own are small.
        Some(range) => match CallPath::of(&plan, made) {
            // SAFETY: the code is still mapped if it is on the list, which cannot change now.
            Some(path) => unsafe { jump(&plan, path, &code, end, range) },
            None => Outcome::Refused,
        },
        None => Outcome::Refused,
    })
    .unwrap_or(Outcome::Later)
}

/// Returns what the supervisor says, or has said, about this code. `None` where it does not answer.
fn verdict(code: &[u64; CODE / 8]) -> Option<Option<RewritePlan>> {
    let hash = code_hash(code);
    let remembered = || {
        let is_it = |place: &&Verdict| {
            place.hash.load(Acquire) == hash
                && place.code.iter().zip(code).all(|(place, word)| place.load(Relaxed) == *word)
        };
        let place = verdicts().places(hash).find(is_it)?;
        let mut words = [0; WORDS];
        for (word, place) in words.iter_mut().zip(&place.plan) {
            *word = place.load(Relaxed);
        }
        Some(RewritePlan::decode(&words))
    };
    if let Some(known) = remembered() {
        return Some(known);
    }
    let fill = |request: &Request| {
        for (place, word) in request.code.iter().zip(code) {
            place.store(*word, Relaxed);
        }
    };
    // The supervisor has ordinary priority. A thread that may keep all CPUs from it does not wait for it, and asks again later.
    let waits = RealtimePolicy::current().is_none();
    let mask = block_signals();
    let answer = if waits { request(SITE, fill) } else { None };
    if !waits {
        leave(SITE_UNANSWERED, fill);
    }
    set_mask(mask);
    match answer {
        Some(YES) => Some(remembered().flatten()),
        Some(_) => Some(None),
        None => None,
    }
}

/// How a stub has its call performed.
#[derive(Clone, Copy)]
enum CallPath {
    /// By a trampoline; counted before that, or not.
    Trampoline { number: u16 },
    /// By a function that times it, or asks the policy, or does what the executive does with such calls.
    Function { number: u16, function: unsafe extern "C" fn() },
    /// By a trampoline, unless rules about paths can hold: then as by a function.
    Filtered { number: u16 },
    /// By looking at the word at `answer`, where a service remembers what to return; by a function that asks if there
    /// is nothing.
    CachedAnswer { number: u16, answer: u64 },
    /// By a trampoline or a function if it is an ordinary call: only then is its number known. If not, `asked` finds
    /// out what it is, or, in a program with small stacks, dispatch.
    AnyNumber { ask: bool },
}

impl CallPath {
    /// `None` where only dispatch will do.
    fn of(plan: &RewritePlan, made: u64) -> Option<Self> {
        let small_stacks = ORRERY_CONFIG.action.flags.load(Relaxed) & SA_ONSTACK != 0;
        let Some(number) = plan.number else { return Some(Self::AnyNumber { ask: !small_stacks }) };
        let wide = u64::from(number);
        if wide != made || wide >= CALLS as u64 || nr::needs_frame(wide) {
            return None;
        }
        let concerned = policy().filter(|policy| policy.concerns(wide));
        let judged = concerned.is_some();
        // An answer that is remembered is not counted: that would cost more than the answer.
        if let Some(answer) = services::remembered(wide).filter(|_| !judged && !counted()) {
            return Some(Self::CachedAnswer { number, answer: address(answer) });
        }
        let treated = mm::treats(wide) || services::concerns(wide);
        // What a function takes of the caller's stack may be more than there is of it, and overwrite what is below.
        if (treated || judged) && small_stacks {
            return None;
        }
        if !treated && !timed() && concerned.is_some_and(|policy| path_filter::supports(policy, wide)) {
            return Some(Self::Filtered { number });
        }
        Some(match (judged || treated, timed()) {
            (true, _) => Self::Function { number, function: orrery_stub_call },
            (false, true) => Self::Function { number, function: orrery_timed },
            (false, false) => Self::Trampoline { number },
        })
    }
}

impl CallPath {
    /// The call's number, if it is always the same.
    fn number(self) -> Option<u16> {
        match self {
            Self::Trampoline { number }
            | Self::Function { number, .. }
            | Self::Filtered { number }
            | Self::CachedAnswer { number, .. } => Some(number),
            Self::AnyNumber { .. } => None,
        }
    }
}

/// Makes the stub, then the jump to it.
///
/// # Safety
/// The lock is held; `code` ends at `end`, in the code range `range`, with the plan's window.
unsafe fn jump(
    plan: &RewritePlan,
    path: CallPath,
    code: &[u64; CODE / 8],
    end: u64,
    range: (u64, u64),
) -> Outcome {
    let length = plan.length() + SYSCALL;
    let window = end - length as u64;
    let trampoline = TRAMPOLINES_USED.load(Relaxed);
    if trampoline as usize >= TRAMPOLINES {
        return Outcome::Refused;
    }
    let Some(place) = stub_pages::find(window, plan.distance_constraint(), range.0, range.1) else {
        return Outcome::Refused;
    };
    let distance = place.at.wrapping_sub(window + crate::rewrite_plan::JUMP as u64).cast_signed();
    let Some((bytes, changed)) = i32::try_from(distance).ok().and_then(|distance| plan.jump(distance)) else {
        return Outcome::Refused;
    };
    if window % PAGE + changed as u64 > PAGE {
        return Outcome::Refused;
    }
    let mut old = [0; CODE];
    for (bytes, word) in old.chunks_exact_mut(8).zip(code) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    let mut stub = Assembler::new();
    let moved = old.get(CODE - length..).and_then(|code| {
        let room = stub.bytes.get_mut(..RELOCATED)?;
        plan.relocate(code, window, place.at, room)
    });
    let Some(moved) = moved else { return Outcome::Refused };
    stub.length = moved.length;
    let trampoline_address = (orrery_trampolines as *const ()).addr() as u64 + 8 * u64::from(trampoline);
    RETURN_ADDRESSES[trampoline as usize].store(end, Relaxed);
    match path {
        CallPath::Trampoline { number } => stub.trampoline(number, trampoline_address),
        CallPath::Function { number, function } => stub.function(number, end, function),
        CallPath::Filtered { number } => stub.filtered(number, end, trampoline_address),
        CallPath::CachedAnswer { number, answer } => stub.cached_answer(number, end, answer),
        CallPath::AnyNumber { ask } => stub.any(place.at, end, trampoline_address, ask),
    }
    let Some(code) = stub.bytes.get(..stub.length) else { return Outcome::Refused };
    for (at, target) in plan.jump_pads().into_iter().zip(moved.jump_pads) {
        if let (Some(at), Some(target)) = (at, target) {
            let behind = window + (at + SYSCALL) as u64;
            if !jump_pads::add(behind, window, distance as i32, place.at + target as u64) {
                return Outcome::Refused;
            }
        }
    }
    stub_pages::describe(trampoline as usize, place.at, stub.length, plan, path.number());
    // SAFETY: the stub's page is ours; the site's page is code, by the caller.
    unsafe {
        if !with_bytes(place.page(), place.at, code) {
            return Outcome::Later;
        }
        place.take(stub.length);
        TRAMPOLINES_USED.store(trampoline + 1, Relaxed);
        let jump = bytes.get(..changed).unwrap_or(&bytes);
        let before = old.get(CODE - length..CODE - length + changed).unwrap_or_default();
        if !saved_code::remember(window, before) {
            return Outcome::Refused;
        }
        if !with_bytes(window & !(PAGE - 1), window, jump) {
            return Outcome::Later;
        }
    }
    Outcome::Done
}
