//! In-path handlers: code behind the policy's table that decides calls.
//!
//! A handler runs on the stack that the executive is on, with a context there, so that calls of several threads, and of a signal
//! handler that interrupts another call, do not meet. One that writes to its memory has an area of its own for as long as it
//! decides, which is afterwards what it was at first: nothing that one call left is there for the next one, but for the process's counters.
//!
//! A handler that fails has its call refused.

use core::mem::{MaybeUninit, size_of};
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::{AtomicU64, compiler_fence};

use super::conditions::Call;
use super::journal_writer;
use super::paths::PathBuffer;
use super::table::Policy;
use crate::executive::abi::areas::Areas;
use crate::executive::abi::pool::Item;
use crate::executive::abi::state::{ORRERY_CONFIG, shared_page};
use crate::executive::abi::syscall::{EMSGSIZE, ENAMETOOLONG, EPERM};
use crate::executive::abi::{user_memory, work_areas};
use crate::handler::{
    BLOCK, COUNTERS, Context, FUEL, Handler, LONGEST_DELAY, MEMORY, host, needs, trap, verdict,
};
use crate::journal::DATA;
use crate::nr;
use crate::policy::Rule;

/// What a handler that writes to its memory has.
#[repr(C, align(4096))]
struct Area {
    memory: [u8; MEMORY],
    /// Whose it was last, by the address of its entry in the table; zero: nobody's, or of one that did not end.
    owner: u64,
}

// SAFETY: made of integers, of which zero is one, and which nobody drops.
unsafe impl Item for Area {
    const ZERO: Self = Self { memory: [0; MEMORY], owner: 0 };
}

/// Few, and little memory, for what most programs never need.
///
/// A forked child releases none: a handler of the program's that has interrupted a decision may have forked, and the decision goes
/// on in the child. What other threads had stays taken there, and is never touched.
static AREAS: Areas<Area, 2> = Areas::new();

/// What handlers count: one set for the process. Threads add in one step; a forked child has a copy, as of all memory; a new program has
/// a new executive, and zeros.
static COUNTED: [AtomicU64; COUNTERS] = [const { AtomicU64::new(0) }; COUNTERS];

/// What a handler says about a call.
pub(crate) enum Decision {
    /// Further rules are asked.
    Pass,
    /// It is performed.
    Allow,
    /// It returns this.
    Answer(i64),
}

/// The same, and how many nanoseconds it waits first.
pub(crate) struct Decided {
    pub(crate) outcome: Decision,
    pub(crate) delay: u64,
}

/// What the functions need that handlers call.
struct Host<'a, 'b> {
    call: &'a Call,
    rule: &'a Rule,
    room: &'a mut PathBuffer<'b>,
}

/// Has the rule's handler decide about a call that is to be performed with these arguments.
#[inline(never)]
pub(crate) fn decide(
    call: &Call,
    rule: &Rule,
    arguments: &mut [u64; 6],
    room: &mut PathBuffer<'_>,
) -> Decided {
    let Some(handler) = call.policy.handler(rule.value) else { return refused(rule) };
    if handler.needs == 0 {
        let outcome = compare(call.policy, handler, rule, call.number, &call.arguments);
        return Decided { outcome, delay: 0 };
    }
    let mut host = Host { call, rule, room };
    let mut context = Context {
        memory: call.policy.address(handler.data.start),
        dirty: 0,
        fuel: FUEL,
        stack: handler.stack,
        trap: 0,
        constants: call.policy.address(handler.constants.start),
        given: call.arguments,
        arguments: *arguments,
        result: 0,
        delay: 0,
        globals: handler.globals,
        functions: functions(),
        host: (&raw mut host).addr() as u64,
        counters: COUNTED.as_ptr().expose_provenance() as u64,
    };
    (&raw mut host).expose_provenance();
    let decided = if handler.needs & needs::MEMORY != 0 {
        match with_memory(call, handler, &mut context) {
            Ok(decided) => decided,
            Err(_) => return refused(rule),
        }
    } else {
        run(call.policy, call.number, handler, &raw mut context)
    };
    if context.trap != 0 {
        return refused(rule);
    }
    if context.arguments != *arguments && keeps_arguments(call.number) {
        return refused(rule);
    }
    let Some(outcome) = meaning(decided, context.result) else { return refused(rule) };
    *arguments = context.arguments;
    Decided { outcome, delay: context.delay.min(LONGEST_DELAY) }
}

/// What a verdict says; nothing, if it is none.
#[inline(always)]
fn meaning(decided: i32, result: i64) -> Option<Decision> {
    Some(match decided {
        verdict::PASS => Decision::Pass,
        verdict::ALLOW => Decision::Allow,
        verdict::ANSWER => Decision::Answer(result),
        error @ verdict::LEAST_ERROR..0 => Decision::Answer(error.into()),
        _ => return None,
    })
}

/// Has a handler decide that needs nothing: it reads arguments, and says what becomes of the call.
///
/// Its context is on the stack for as long as that takes, and not below calls that no handler decides.
#[inline(never)]
pub(crate) fn compare(
    policy: Policy,
    handler: &Handler,
    rule: &Rule,
    number: u64,
    arguments: &[u64; 6],
) -> Decision {
    let mut context = MaybeUninit::<Context>::uninit();
    let place = context.as_mut_ptr();
    // SAFETY: fields of a structure that is there. What is not written is not read: the compiler has found that the code names
    // none of it, and `needs` says so.
    let (decided, trap) = unsafe {
        (&raw mut (*place).fuel).write(FUEL);
        (&raw mut (*place).stack).write(handler.stack);
        (&raw mut (*place).trap).write(0);
        (&raw mut (*place).constants).write(policy.address(handler.constants.start));
        (&raw mut (*place).given).write(*arguments);
        (run(policy, number, handler, place), (&raw const (*place).trap).read())
    };
    let outcome = if trap == 0 { meaning(decided, 0) } else { None };
    outcome.unwrap_or_else(|| refused(rule).outcome)
}

/// Returns whether a call is performed with the arguments that are in the program's registers, whatever rules say.
fn keeps_arguments(number: u64) -> bool {
    matches!(number, nr::fork | nr::vfork | nr::clone | nr::clone3 | nr::rt_sigprocmask | nr::sigaltstack)
}

/// The handler has failed: the call is refused, which is counted.
#[cold]
fn refused(rule: &Rule) -> Decided {
    if let Some(count) = shared_page().rules.get(rule.counter as usize) {
        count.failures.fetch_add(1, Relaxed);
    }
    Decided { outcome: Decision::Answer(-EPERM), delay: 0 }
}

#[inline(always)]
fn run(policy: Policy, number: u64, handler: &Handler, context: *mut Context) -> i32 {
    let entry = core::ptr::with_exposed_provenance::<()>(policy.address(handler.entry) as usize);
    // SAFETY: the supervisor has put the handler's code there, which is a function of this type, and which writes to nothing but
    // the context, its memory and, in one step each, the counters: see `orrery-handler`.
    unsafe {
        let decide: unsafe extern "C" fn(*mut Context, i32) -> i32 = core::mem::transmute(entry);
        decide(context, number as i32)
    }
}

/// The same, with memory that the handler may write to.
///
/// # Errors
/// There is none.
#[inline(never)]
fn with_memory(call: &Call, handler: &Handler, context: &mut Context) -> Result<i32, i64> {
    let beginning = call.policy.bytes(handler.data);
    let owner = core::ptr::from_ref(handler).addr() as u64;
    AREAS.with(|area| {
        // SAFETY: the area is this call's while this runs, and its memory is only referred to here, or by the handler's code and
        // what that calls, between these lines.
        unsafe {
            if (*area).owner != owner {
                restore(&mut (*area).memory, beginning, u64::MAX);
            }
            // Until it has ended: who leaves it by a signal handler leaves it as it is.
            (&raw mut (*area).owner).write_volatile(0);
            compiler_fence(SeqCst);
            let memory = (&raw mut (*area).memory).cast::<u8>();
            context.memory = memory.expose_provenance() as u64;
            let decided = run(call.policy, call.number, handler, context);
            restore(&mut (*area).memory, beginning, context.dirty);
            compiler_fence(SeqCst);
            (&raw mut (*area).owner).write_volatile(owner);
            decided
        }
    })
}

/// Makes blocks of memory what they are at first.
fn restore(memory: &mut [u8; MEMORY], beginning: &[u8], mut blocks: u64) {
    blocks &= (1 << (MEMORY / BLOCK)) - 1;
    while blocks != 0 {
        let start = blocks.trailing_zeros() as usize * BLOCK;
        blocks &= blocks - 1;
        let Some(block) = memory.get_mut(start..start + BLOCK) else { return };
        let from = beginning.get(start..).unwrap_or(&[]);
        let length = from.len().min(BLOCK);
        let (same, zeros) = block.split_at_mut(length);
        same.copy_from_slice(from.get(..length).unwrap_or(&[]));
        zeros.fill(0);
    }
}

type Function = extern "C" fn(&mut Context, i32, i32, i32, i32) -> i32;

fn functions() -> [u64; host::COUNT] {
    let address = |function: Function| (function as *const ()).addr() as u64;
    let mut functions = [0; host::COUNT];
    functions[host::COPY_FROM] = address(copy_from);
    functions[host::REPLACE] = address(replace);
    functions[host::EMIT] = address(emit);
    functions
}

/// Returns bytes of the handler's memory; where there are not so many, it has failed.
fn bytes<'a>(context: &mut Context, at: i32, length: i32) -> Option<&'a mut [u8]> {
    let (at, length) = (at.cast_unsigned() as usize, length.cast_unsigned() as usize);
    if at.checked_add(length).is_none_or(|end| end > MEMORY) {
        context.trap = trap::BOUNDS;
        return None;
    }
    let memory = core::ptr::with_exposed_provenance_mut::<u8>(context.memory as usize);
    // SAFETY: a handler that calls functions has memory of its own, of that size, which its code does not touch while one runs.
    Some(unsafe { core::slice::from_raw_parts_mut(memory.add(at), length) })
}

/// Copies what an argument points to.
extern "C" fn copy_from(context: &mut Context, index: i32, offset: i32, to: i32, length: i32) -> i32 {
    let Some(start) = context.given.get(index.cast_unsigned() as usize).copied() else {
        context.trap = trap::BOUNDS;
        return 0;
    };
    let Some(place) = bytes(context, to, length) else { return 0 };
    if place.is_empty() {
        return 0;
    }
    let (first, last) = (to as usize / BLOCK, (to as usize + place.len() - 1) / BLOCK);
    context.dirty |= (first..=last).fold(0, |blocks, block| blocks | 1 << block);
    match user_memory::read_some(start.wrapping_add(u64::from(offset.cast_unsigned())), place) {
        // No more than the memory has.
        Ok(copied) => i32::try_from(copied).unwrap_or(0),
        Err(error) => error as i32,
    }
}

/// Has an argument point to a copy of some bytes, with a zero behind them.
extern "C" fn replace(context: &mut Context, index: i32, from: i32, length: i32, _: i32) -> i32 {
    let index = index.cast_unsigned() as usize;
    if index >= context.arguments.len() {
        context.trap = trap::BOUNDS;
        return 0;
    }
    let Some(bytes) = bytes(context, from, length) else { return 0 };
    let host = core::ptr::with_exposed_provenance_mut::<Host<'_, '_>>(context.host as usize);
    // SAFETY: `decide` has it on its stack, and uses it no more until the handler has returned.
    let host = unsafe { &mut *host };
    let copied = host.room.take(|room| {
        let place = room.get_mut(..=bytes.len()).ok_or(-ENAMETOOLONG)?;
        let (copy, end) = place.split_at_mut(bytes.len());
        copy.copy_from_slice(bytes);
        end.fill(0);
        Ok(bytes.len() + 1)
    });
    match (copied, context.arguments.get_mut(index)) {
        (Ok(copy), Some(place)) => {
            *place = copy.as_ptr().addr() as u64;
            0
        }
        (Err(error), _) => error as i32,
        (_, None) => 0,
    }
}

/// Reports some bytes.
extern "C" fn emit(context: &mut Context, from: i32, length: i32, _: i32, _: i32) -> i32 {
    let Some(bytes) = bytes(context, from, length) else { return 0 };
    // SAFETY: `decide` has it on its stack, and uses it no more until the handler has returned.
    let host = unsafe { &*core::ptr::with_exposed_provenance::<Host<'_, '_>>(context.host as usize) };
    if bytes.len() > DATA {
        return -EMSGSIZE as i32;
    }
    match work_areas::with(|room| journal_writer::event(room.entry, host.call, host.rule, bytes)) {
        Ok(()) => 0,
        Err(error) => error as i32,
    }
}

/// Returns whether an address is in the code of a handler.
pub(crate) fn contain(address: u64) -> bool {
    address.wrapping_sub(ORRERY_CONFIG.handlers.load(Relaxed)) < ORRERY_CONFIG.handlers_length.load(Relaxed)
}

/// Returns whether some of a range is memory of handlers that was mapped.
pub(crate) fn overlap(start: u64, end: u64) -> bool {
    AREAS.overlap(start, end)
}

const _: () = assert!(MEMORY / BLOCK < u64::BITS as usize && size_of::<Area>().is_multiple_of(8));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_were_written_to_become_what_they_were() {
        let beginning: Vec<u8> = (0..BLOCK + 100).map(|at| at as u8 | 1).collect();
        let mut memory = Box::new([0x55; MEMORY]);
        restore(&mut memory, &beginning, u64::MAX);
        let first = memory.clone();
        assert!(
            first[..beginning.len()] == beginning[..]
                && first[beginning.len()..].iter().all(|byte| *byte == 0)
        );
        for block in 0..MEMORY / BLOCK {
            memory[block * BLOCK..(block + 1) * BLOCK].fill(0xaa);
            // The next one was written to as well, and nobody says so.
            let next = (block + 1) % (MEMORY / BLOCK);
            memory[next * BLOCK] = 0xbb;
            restore(&mut memory, &beginning, 1 << block);
            assert_eq!(memory[next * BLOCK], 0xbb);
            memory[next * BLOCK] = first[next * BLOCK];
            assert!(memory == first, "{block}");
        }
    }

    #[test]
    fn bytes_beyond_memory_are_a_failure() {
        let mut memory = Box::new([0; MEMORY]);
        // SAFETY: a structure of integers.
        let mut context: Context = unsafe { core::mem::zeroed() };
        context.memory = memory.as_mut_ptr().expose_provenance() as u64;
        let end = i32::try_from(MEMORY).unwrap();
        for (at, length) in [(0, end), (end, 0), (end - 1, 1), (0, 0)] {
            assert_eq!(bytes(&mut context, at, length).map(|bytes| bytes.len()), Some(length as usize));
        }
        assert_eq!(context.trap, 0);
        for (at, length) in [(0, end + 1), (end, 1), (-1, 1), (1, -1), (-1, -1), (i32::MIN, i32::MIN)] {
            context.trap = 0;
            assert!(bytes(&mut context, at, length).is_none(), "{at} {length}");
            assert_eq!(context.trap, trap::BOUNDS);
        }
    }
}
