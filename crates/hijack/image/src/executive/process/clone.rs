//! `fork`, `vfork`, `clone` and `clone3`: dispatch is not inherited, so new threads and processes are armed here.
//!
//! | the child | how it comes to the program |
//! |---|---|
//! | has memory of its own | it returns from the handler as its parent does |
//! | shares memory, has a stack | from `orrery_clone`, with the program's registers, on its own stack |
//! | shares memory, and its parent waits (`vfork`, `posix_spawn`) | by `rt_sigreturn` from a copy of the frame, because it may overwrite the frame itself: it runs on the same stack, or takes its signals on the same alternate stack; its parent waits on the stack of that copy's slot |
//!
//! All signals are blocked until the child is armed, so that no handler runs unseen in it.

use crate::executive::policy::journal_writer;
use core::sync::atomic::Ordering::Relaxed;

use crate::executive::abi::signal_frame::Context;
use crate::executive::abi::state::{ORRERY_CONFIG, shared_page};
use crate::executive::abi::syscall::{EINVAL, EPERM, address, block_signals, call, failed};
use crate::executive::abi::trampoline::{
    orrery_clone, orrery_sigreturn_at, orrery_sigreturn_releasing, orrery_vfork,
};
use crate::executive::abi::vfork_slots::{CLONE_ARGUMENTS, Slot};
use crate::executive::abi::{thread_counters, user_memory, vfork_slots, work_areas};
use crate::executive::memory::code_ranges;
use crate::executive::process::{program_filters, unfollowed, users};
use crate::executive::services;
use crate::executive::services::call::unusable;
use crate::executive::signals::{held_sigsys, sigaction, upcalls};
use crate::nr;
use crate::shared_page::Unfollowed;

const CLONE_VM: u64 = 0x100;
const CLONE_VFORK: u64 = 0x4000;
const CLONE_SETTLS: u64 = 0x8_0000;
const PR_SET_SYSCALL_USER_DISPATCH: u64 = 59;
const OFF: u64 = 0;
const ON: u64 = 1;
const SMALLEST_CLONE_ARGUMENTS: u64 = 64;
const FLAGS: usize = 0;
const STACK: usize = 5;
const STACK_SIZE: usize = 6;
const THREAD_POINTER: usize = 7;

/// Arms dispatch in the calling thread; what the kernel says.
pub(crate) fn try_to_arm() -> i64 {
    let code = ORRERY_CONFIG.code.load(Relaxed);
    let length = ORRERY_CONFIG.code_length.load(Relaxed);
    // SAFETY: calls from outside of the image arrive at the handler from now on.
    unsafe { call(nr::prctl, [PR_SET_SYSCALL_USER_DISPATCH, ON, code, length, 0, 0]) }
}

/// Returns whether a new thread or process may be made: where a filter of the program's keeps it from being armed, it
/// would be under no policy.
fn may_be_made() -> bool {
    // What this thread, which is armed, may do once more, its child may do.
    let unarmed = ORRERY_CONFIG.filtered.load(Relaxed) != 0
        && unfollowed::matters()
        && (program_filters::forbid_arming() || try_to_arm() != 0);
    !unarmed || unfollowed::may_run("a filter that it has installed keeps its children from the executive")
}

/// Takes SIGSYS and arms dispatch in a new process, unless that would end it: then it is not followed, which is counted.
fn begin_child() {
    if program_filters::forbid_arming() {
        shared_page().unarmed.fetch_add(1, Relaxed);
    } else {
        sigaction::install();
        arm();
    }
}

/// Blocks the signals that a child must not get before it is armed.
fn block_signals_of_child() {
    if !program_filters::forbid_arming() {
        block_signals();
    }
}

/// Arms dispatch in the calling thread.
fn arm() {
    if try_to_arm() != 0 {
        shared_page().unarmed.fetch_add(1, Relaxed);
    }
}

/// Handles `PTRACE_TRACEME`. From now on each dispatched call would stop this thread by a signal for its tracer,
/// which may be waiting for that very call (a debugger that called vfork(2)). So dispatch is turned off, and the
/// process is reported as not followed.
#[inline(never)]
pub(crate) fn traceme(arguments: [u64; 6]) -> i64 {
    if !unfollowed::may_run(Unfollowed::Untraceable.reason()) {
        return -EPERM;
    }
    // SAFETY: what the program asked for; then calls go to the kernel, but for those from rewritten sites.
    unsafe {
        let result = call(nr::ptrace, arguments);
        if !failed(result) {
            call(nr::prctl, [PR_SET_SYSCALL_USER_DISPATCH, OFF, 0, 0, 0, 0]);
            shared_page().unfollowed[Unfollowed::Untraceable as usize].fetch_add(1, Relaxed);
        }
        result
    }
}

/// What is to be born.
struct CloneRequest {
    flags: u64,
    /// The upper end of the child's stack; zero: its parent's.
    stack: u64,
    /// What `fs` will be, if not the parent's.
    thread_pointer: Option<u64>,
    clone3: Option<[u64; CLONE_ARGUMENTS]>,
}

impl CloneRequest {
    fn read(number: u64, arguments: [u64; 6]) -> Result<Self, i64> {
        Ok(match number {
            nr::fork => Self { flags: 0, stack: 0, thread_pointer: None, clone3: None },
            nr::vfork => Self { flags: CLONE_VM | CLONE_VFORK, stack: 0, thread_pointer: None, clone3: None },
            nr::clone => {
                let thread_pointer = (arguments[0] & CLONE_SETTLS != 0).then_some(arguments[4]);
                Self { flags: arguments[0], stack: arguments[1], thread_pointer, clone3: None }
            }
            _ => {
                let mut words = [0_u64; CLONE_ARGUMENTS];
                if arguments[1] < SMALLEST_CLONE_ARGUMENTS {
                    return Err(-EINVAL);
                }
                let known = CLONE_ARGUMENTS.min((arguments[1] / 8) as usize);
                for (index, word) in words.iter_mut().enumerate().take(known) {
                    *word = user_memory::read_word(arguments[0] + 8 * index as u64)?;
                }
                // The kernel would see neither: see `without_stack`.
                if (words[STACK] == 0) != (words[STACK_SIZE] == 0) {
                    return Err(-EINVAL);
                }
                let stack = if words[STACK] == 0 { 0 } else { words[STACK].wrapping_add(words[STACK_SIZE]) };
                let thread_pointer = (words[FLAGS] & CLONE_SETTLS != 0).then_some(words[THREAD_POINTER]);
                Self { flags: words[FLAGS], stack, thread_pointer, clone3: Some(words) }
            }
        })
    }
}

/// Serves all four. Does not return where the thread goes on by another way.
#[inline(never)]
pub(crate) fn clone_process(context: &mut Context, number: u64) -> i64 {
    let arguments = context.arguments();
    let request = match CloneRequest::read(number, arguments) {
        Ok(request) => request,
        Err(error) => return error,
    };
    if !may_be_made() {
        return -EPERM;
    }
    services::before_clone_or_exec();
    if request.flags & CLONE_VM == 0 {
        fork(context, number, arguments, &request)
    } else if request.flags & CLONE_VFORK != 0 {
        vfork(context, number, arguments, &request)
    } else if request.stack != 0 {
        with_stack(context, &request)
    } else {
        // Two threads at once on one stack.
        -EINVAL
    }
}

/// Takes the child's stack out of the arguments: it has to find its way out of here before it goes there.
fn without_stack(
    arguments: &mut [u64; 6],
    request: &CloneRequest,
    place: &mut [u64; CLONE_ARGUMENTS],
) -> Result<(), i64> {
    if request.stack == 0 {
        return Ok(());
    }
    if let Some(given) = request.clone3 {
        if arguments[1] > (CLONE_ARGUMENTS * 8) as u64 {
            return Err(-EINVAL);
        }
        *place = given;
        (place[STACK], place[STACK_SIZE]) = (0, 0);
        arguments[0] = address(place);
    } else {
        arguments[1] = 0;
    }
    Ok(())
}

fn fork(context: &mut Context, number: u64, mut arguments: [u64; 6], request: &CloneRequest) -> i64 {
    let mut words = [0; CLONE_ARGUMENTS];
    if let Err(error) = without_stack(&mut arguments, request, &mut words) {
        return error;
    }
    let sigsys_blocked = held_sigsys::is_blocked();
    block_signals_of_child();
    // SAFETY: what the program asked for; the child gets a copy of this stack.
    let result = unsafe { call(number, arguments) };
    core::hint::black_box(&words);
    if result == 0 {
        code_ranges::unlock_in_child();
        vfork_slots::free_in_child();
        work_areas::free_in_child();
        services::in_forked_child(request.flags);
        thread_counters::reset_in_child();
        held_sigsys::begin_in_child(sigsys_blocked);
        upcalls::in_forked_child();
        begin_child();
        users::in_forked_child(request.flags);
        if request.stack != 0 {
            context.registers.rsp = request.stack;
        }
    }
    // The mask is restored on return from the signal.
    result
}

fn with_stack(context: &Context, request: &CloneRequest) -> i64 {
    let top = [context.mask, context.registers.rip];
    // SAFETY: below the upper end of a stack that the program provides for the child.
    if let Err(error) = unsafe { user_memory::write(request.stack.wrapping_sub(16), top) } {
        return error;
    }
    let extended = context.extended();
    services::before_sharing_memory(request.flags);
    thread_counters::before_thread(request.thread_pointer);
    block_signals_of_child();
    // SAFETY: the registers are those of the call; the child's stack holds what is needed.
    unsafe { orrery_clone(&raw const context.registers, extended.address, extended.features) }
}

fn vfork(context: &mut Context, number: u64, mut arguments: [u64; 6], request: &CloneRequest) -> i64 {
    let slot = match vfork_slots::take(context) {
        Ok(slot) => slot,
        Err(error) => return error,
    };
    // SAFETY: the slot is ours until the parent has returned.
    unsafe {
        let call = vfork_slots::call(slot);
        if let Err(error) = without_stack(&mut arguments, request, &mut (*call).clone3) {
            vfork_slots::release(slot);
            return error;
        }
        let [a, b, c, d, e, f] = arguments;
        (*call).call = [number, a, b, c, d, e, f];
        (*call).stack = request.stack;
        (*call).own = context.registers.rsp;
        (*call).sigsys_blocked = held_sigsys::is_blocked();
        sigaction::copy_to(&(*call).sigsys_action);
        services::before_vfork();
        users::before_vfork();
        block_signals_of_child();
        orrery_vfork(slot, &raw const (*call).call, vfork_slots::stack(slot))
    }
}

/// The child of a `vfork`, on the slot's stack.
pub(crate) extern "C" fn vfork_child(slot: *mut Slot) -> ! {
    // SAFETY: the slot is this thread's and its parent's, which waits.
    held_sigsys::set_blocked(unsafe { (*vfork_slots::call(slot)).sigsys_blocked });
    // It has actions of its own: posix_spawn(3) sets defaults.
    if !unusable() {
        // SAFETY: the slot is this thread's and its parent's, which waits.
        unsafe { vfork_slots::begin_child(slot, held_sigsys::own_id()) };
    }
    begin_child();
    // SAFETY: the copy is a whole frame, and the parent waits until the child does not need it any more.
    unsafe {
        let context = vfork_slots::context(slot);
        (*context).registers.rax = 0;
        let stack = (*vfork_slots::call(slot)).stack;
        if stack != 0 {
            (*context).registers.rsp = stack;
        }
        orrery_sigreturn_at(context.addr() as u64)
    }
}

/// Its parent, when the child has executed a program or ended.
pub(crate) extern "C" fn vfork_parent(slot: *mut Slot, result: u64) -> ! {
    services::after_vfork();
    users::after_vfork();
    // In whose PID namespace that is, does not matter: it is the child's where they share one, and nobody's else.
    held_sigsys::forget(result as u32);
    // SAFETY: the child is gone, so the stack below the program's pointer is free again.
    unsafe {
        vfork_slots::end_child(slot);
        let context = vfork_slots::context(slot);
        (*context).registers.rax = result;
        // The child may have put its own there.
        (*context).registers.rsp = (*vfork_slots::call(slot)).own;
        // The child may have given it back.
        thread_counters::claim();
        journal_writer::write_result((*vfork_slots::call(slot)).call[0], result.cast_signed());
        let (frame, taker) = vfork_slots::put_back(slot);
        orrery_sigreturn_releasing(frame, taker)
    }
}
