//! Upcalls: a manager has a function of the program called, in the thread that registered it, on a stack of its own.
//!
//! See [`crate::upcall`] for what is shared with the manager. From the first registration on, [`SIGNAL`] is the executive's: the
//! program has no such signal any more. It can neither set its action, nor wait for it, nor block it alone. It blocks it together with all
//! other signals: C libraries do that where no handler may run at all (a thread that frees its stack, the child of a `vfork`).
//!
//! The handler runs where the kernel puts it, with all signals blocked. It takes one upcall out of the queue; where there is none, the signal was
//! sent by somebody else, and nothing is called. The function runs on its own stack, with the mask of what was interrupted, and this
//! signal blocked. Whether it returns or leaves by `siglongjmp`, the next signal arrives when it is unblocked again, and begins at the top
//! of that stack.

use core::sync::atomic::{
    AtomicU8, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::SeqCst,
};

use crate::config::{Action, SA_ONSTACK, SA_RESTART, SA_RESTORER, SA_SIGINFO};
use crate::executive::abi::signal_frame::{AlternateStack, Context, Info};
use crate::executive::abi::syscall::{
    EBUSY, EINVAL, ENOENT, EPERM, SET_BYTES, SIGSYS_BIT, address, call, failed, set_mask,
};
use crate::executive::abi::trampoline::{orrery_call_on_stack, orrery_restorer, orrery_set_alternate_stack};
use crate::executive::abi::user_memory;
use crate::executive::services::call::unusable;
use crate::nr;
use crate::upcall::{
    ENTRIES, IS_REGISTERED, PROBE, Queue, REGISTER, Registration, SIGNAL, State, UNREGISTER, VERSION,
};

/// The signal in a set.
const SIGNAL_BIT: u64 = 1 << (SIGNAL - 1);
/// All signals that a program can block, but for [`SIGNAL`], SIGSYS, and those that C libraries keep for themselves (32 to 34).
const ALL: u64 = !(1 << 8 | 1 << 18 | SIGSYS_BIT | 0b111 << 31 | SIGNAL_BIT);
const SIG_UNBLOCK: u64 = 1;
const SIG_DFL: u64 = 0;
const SIG_IGN: u64 = 1;
/// Those that the handler does not block: what causes them could not go on.
const FAULTS: u64 = 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 10 | SIGSYS_BIT;
/// `SS_DISABLE` and `SS_AUTODISARM`.
const DISABLE: i32 = 2;
const AUTO_DISARM: i32 = i32::MIN;
/// How often, with a millisecond between, is waited for a manager that is about to send a signal.
const PATIENCE: u32 = 1000;
/// The same for a program that may not sleep any more.
const SPINS: u32 = 1 << 22;

/// Whether the signal is the executive's.
static RESERVED: AtomicU8 = AtomicU8::new(0);
/// The thread that has registered a function; zero where none is registered.
static THREAD: AtomicU32 = AtomicU32::new(0);
/// Its process.
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// A [`Registration`], word by word. Its queue and state stay mapped for the life of the process.
static WORDS: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];
/// The alternate stack of the thread's own, while another one is in its place.
static OWN_ALTERNATE: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
static ACTION: Action = Action {
    handler: AtomicU64::new(SIG_DFL),
    flags: AtomicU64::new(0),
    restorer: AtomicU64::new(0),
    mask: AtomicU64::new(0),
};

fn is_reserved() -> bool {
    RESERVED.load(Relaxed) != 0
}

fn registration() -> Registration {
    let [function, user, queue, state, stack, stack_length, alternate, alternate_length] =
        WORDS.each_ref().map(|word| word.load(Relaxed));
    Registration { function, user, queue, state, stack, stack_length, alternate, alternate_length }
}

/// What is shared with the manager.
struct Shared {
    queue: &'static Queue,
    state: &'static State,
}

impl Registration {
    fn shared(&self) -> Shared {
        // SAFETY: the program has mapped both there when it registered, and promised to leave them; they consist of atomics, for which any
        // bytes are valid.
        unsafe {
            Shared {
                queue: &*core::ptr::with_exposed_provenance(self.queue as usize),
                state: &*core::ptr::with_exposed_provenance(self.state as usize),
            }
        }
    }
}

fn own_process() -> u32 {
    // SAFETY: the call takes no pointer.
    unsafe { call(nr::getpid, [0; 6]) as u32 }
}

fn own_thread() -> u32 {
    // SAFETY: the call takes no pointer.
    unsafe { call(nr::gettid, [0; 6]) as u32 }
}

/// Sends a signal, or none, to a thread of a process; returns what the kernel says.
fn send(process: u32, thread: u32, signal: u64) -> i64 {
    // SAFETY: the call takes no pointer.
    unsafe { call(nr::tgkill, [u64::from(process), u64::from(thread), signal, 0, 0, 0]) }
}

fn set_action(action: &Action) {
    // SAFETY: the action names functions of this image, or none.
    unsafe {
        call(nr::rt_sigaction, [SIGNAL, address(action), 0, SET_BYTES, 0, 0]);
    }
}

fn install() {
    ACTION.handler.store((on_signal as *const ()).addr() as u64, Relaxed);
    ACTION.flags.store(SA_SIGINFO | SA_RESTORER | SA_RESTART | SA_ONSTACK, Relaxed);
    ACTION.restorer.store((orrery_restorer as *const ()).addr() as u64, Relaxed);
    ACTION.mask.store(!FAULTS, Relaxed);
    set_action(&ACTION);
}

fn set_plain_action(handler: u64) {
    let plain = [const { AtomicU64::new(0) }; 4];
    let [first, flags, restorer, mask] = plain;
    first.store(handler, Relaxed);
    set_action(&Action { handler: first, flags, restorer, mask });
}

/// What a set of signals to block becomes before the kernel gets it: the signal is in it if all others are.
pub(crate) fn blocked(set: u64) -> u64 {
    if is_reserved() && set & ALL != ALL { set & !SIGNAL_BIT } else { set }
}

/// The same of what `rt_sigprocmask` is given, where the mask that it changes is not known.
pub(crate) fn changing(how: u64, set: u64) -> u64 {
    match how {
        // It was blocked with all others: these are not all any more.
        SIG_UNBLOCK if is_reserved() => set | SIGNAL_BIT,
        _ => blocked(set),
    }
}

/// The signals of a set that a program may wait for.
pub(crate) fn awaited(set: u64) -> u64 {
    if is_reserved() { set & !SIGNAL_BIT } else { set }
}

/// Whether the program has no such signal.
pub(crate) fn hides(signal: u64) -> bool {
    signal == SIGNAL && is_reserved()
}

/// `rt_sigtimedwait`, `signalfd` and `signalfd4`.
#[inline(never)]
pub(crate) fn wait_without(
    number: u64,
    mut arguments: [u64; 6],
    stack: u64,
    perform: impl FnOnce([u64; 6]) -> i64,
) -> i64 {
    let index = usize::from(number != nr::rt_sigtimedwait);
    let mut set = 0_u64;
    if is_reserved()
        // SAFETY: any eight bytes are a valid word. Where they cannot be read, the kernel says so.
        && let Ok(found) = unsafe { user_memory::read_beside::<u64>(stack, arguments[index]) }
        && awaited(found) != found
    {
        set = awaited(found);
        arguments[index] = address(&set);
    }
    let result = perform(arguments);
    core::hint::black_box(&set);
    result
}

/// `prctl(OPTION, ...)`. `mask` is what is put in force when the call returns, where that is not the thread's mask now.
#[inline(never)]
pub(crate) fn control(arguments: [u64; 6], stack: u64, mask: Option<&mut u64>) -> i64 {
    match arguments[1] {
        PROBE if THREAD.load(Acquire) != 0 => (VERSION | IS_REGISTERED).cast_signed(),
        PROBE => VERSION.cast_signed(),
        // The program's filter may end who makes a call that the program does not make.
        _ if unusable() => -EPERM,
        REGISTER => register(arguments[2], mask),
        UNREGISTER => unregister(stack),
        _ => -EINVAL,
    }
}

fn register(from: u64, mask: Option<&mut u64>) -> i64 {
    // SAFETY: any bytes are valid words.
    let words = match unsafe { user_memory::read::<[u64; 8]>(from) } {
        Ok(words) => words,
        Err(error) => return error,
    };
    let former = THREAD.load(Acquire);
    if former != 0 && !failed(send(PROCESS.load(Relaxed), former, 0)) {
        return -EBUSY;
    }
    THREAD.store(0, SeqCst);
    for (place, word) in WORDS.iter().zip(words) {
        place.store(word, Relaxed);
    }
    PROCESS.store(own_process(), Relaxed);
    RESERVED.store(1, Relaxed);
    install();
    THREAD.store(own_thread(), SeqCst);
    registration().shared().state.open.store(1, SeqCst);
    match mask {
        Some(mask) => *mask &= !SIGNAL_BIT,
        None => {
            let set = SIGNAL_BIT;
            // SAFETY: a set of eight bytes.
            unsafe { call(nr::rt_sigprocmask, [SIG_UNBLOCK, address(&set), 0, SET_BYTES, 0, 0]) };
            core::hint::black_box(&set);
        }
    }
    0
}

fn unregister(stack: u64) -> i64 {
    let thread = THREAD.load(Acquire);
    if thread == 0 {
        return -ENOENT;
    }
    if own_thread() != thread && !failed(send(PROCESS.load(Relaxed), thread, 0)) {
        return -EPERM;
    }
    close(&sleep);
    let registration = registration();
    i64::from(stack.wrapping_sub(registration.stack) <= registration.stack_length)
}

/// Waits for a millisecond; returns whether it may be waited on, for the so many-th time.
fn sleep(times: u32) -> bool {
    let time = [0_u64, 1_000_000];
    // SAFETY: a `struct timespec`.
    unsafe { call(nr::nanosleep, [address(&time), 0, 0, 0, 0, 0]) };
    core::hint::black_box(&time);
    times < PATIENCE
}

fn spin(times: u32) -> bool {
    core::hint::spin_loop();
    times < SPINS
}

/// Has the manager send no more signals, and waits until it is not about to; returns whether that is so.
fn shut(shared: &Shared, wait: &dyn Fn(u32) -> bool) -> bool {
    shared.state.open.store(0, SeqCst);
    let mut times = 0;
    while shared.queue.sending.load(SeqCst) != 0 {
        if !wait(times) {
            return false;
        }
        times += 1;
    }
    true
}

/// Ends the registration.
fn close(wait: &dyn Fn(u32) -> bool) {
    shut(&registration().shared(), wait);
    THREAD.store(0, SeqCst);
}

/// The executive leaves the program.
pub(crate) fn leave() {
    if is_own() {
        close(&sleep);
    }
}

/// Whether a function is registered, by the calling process.
fn is_own() -> bool {
    THREAD.load(Acquire) != 0 && !unusable() && PROCESS.load(Relaxed) == own_process()
}

/// The program has installed a filter of its own: the executive makes no call any more that the program does not make.
pub(crate) fn after_filter() {
    if THREAD.load(Acquire) != 0 {
        close(&spin);
    }
}

/// The calling thread ends.
pub(crate) fn thread_ends() {
    if is_own() && THREAD.load(Acquire) == own_thread() {
        close(&sleep);
    }
}

/// In the child of a fork, which has no function registered, nor the memory that is shared with the manager.
pub(crate) fn in_forked_child() {
    THREAD.store(0, Relaxed);
}

/// The process is about to execute a program, which is to get no signal that was meant for this one. Returns whether
/// [`after_failed_exec`] is to be called where that fails.
pub(crate) fn before_exec() -> bool {
    if !is_own() {
        return false;
    }
    let shared = registration().shared();
    if shared.state.open.load(Relaxed) == 0 {
        return false;
    }
    let settled = shut(&shared, &sleep);
    // Discards those that are pending. A manager that was stopped just before it sends one may send it to the new program, which
    // then ignores it.
    set_plain_action(SIG_IGN);
    if settled {
        set_plain_action(SIG_DFL);
    }
    true
}

/// The process goes on as it was.
pub(crate) fn after_failed_exec() {
    install();
    let shared = registration().shared();
    shared.state.open.store(1, SeqCst);
    if shared.queue.head.load(SeqCst) != shared.state.tail.load(Relaxed) {
        send(PROCESS.load(Relaxed), THREAD.load(Relaxed), SIGNAL);
    }
}

/// Handles the signal, on the stack that the thread is on or has for signals.
extern "C" fn on_signal(_: i32, _: *mut Info, context: *mut Context) {
    let thread = THREAD.load(Acquire);
    // A child that shares the memory has the handler, too.
    if thread == 0 || own_process() != PROCESS.load(Relaxed) {
        return;
    }
    if own_thread() != thread {
        send(PROCESS.load(Relaxed), thread, SIGNAL);
        return;
    }
    let registration = registration();
    let Shared { queue, state } = registration.shared();
    let tail = state.tail.load(Relaxed);
    if queue.head.load(Acquire) == tail {
        return;
    }
    let [number, value] = queue
        .entries
        .get((tail % ENTRIES as u64) as usize)
        .map_or([0; 2], |entry| [entry.number.load(Relaxed), entry.value.load(Relaxed)]);
    state.tail.store(tail.wrapping_add(1), SeqCst);
    if queue.head.load(SeqCst) != tail.wrapping_add(1) {
        // It arrives when this one is over, however that ends.
        send(PROCESS.load(Relaxed), thread, SIGNAL);
    }
    // SAFETY: the kernel gives a handler a valid pointer to the context in its own frame.
    let context = unsafe { &mut *context };
    leave_alternate_stack(context, &registration);
    set_mask(context.mask | SIGNAL_BIT);
    let top = registration.stack.wrapping_add(registration.stack_length) & !0xf;
    // SAFETY: the program has registered a function of this form, with a stack that nothing else is on: the signal is blocked while it runs
    // in the only thread that gets here.
    unsafe { orrery_call_on_stack(registration.function, number, value, registration.user, top) };
}

/// Has further signals not be handled over what was interrupted, where that is on the thread's alternate stack: the kernel looks at the stack
/// pointer, which will be elsewhere. The thread's own alternate stack is restored on return.
fn leave_alternate_stack(context: &mut Context, registration: &Registration) {
    let AlternateStack { start, flags, size, .. } = context.stack;
    let is_on = |start: u64, size: u64| context.frame().wrapping_sub(start) < size;
    if flags & (DISABLE | AUTO_DISARM) != 0 || size == 0 {
        return;
    }
    let replacement = AlternateStack {
        start: registration.alternate,
        flags: 0,
        padding: 0,
        size: registration.alternate_length,
    };
    if start == replacement.start {
        // An earlier function has left for good. What is on that stack stays until it is left.
        if !is_on(start, size) {
            let [start, flags, size] = OWN_ALTERNATE.each_ref().map(|word| word.load(Relaxed));
            context.stack = AlternateStack { start, flags: flags as i32, padding: 0, size };
        }
        return;
    }
    if is_on(start, size) {
        for (place, word) in OWN_ALTERNATE.iter().zip([start, u64::from(flags.cast_unsigned()), size]) {
            place.store(word, Relaxed);
        }
        // SAFETY: the memory is the program's for this purpose; signals are blocked.
        unsafe { orrery_set_alternate_stack(address(&replacement)) };
        core::hint::black_box(&replacement);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signal_is_blocked_with_all_others_only() {
        let filled = !0_u64;
        assert_eq!(blocked(SIGNAL_BIT), SIGNAL_BIT);
        RESERVED.store(1, Relaxed);
        assert_eq!((blocked(SIGNAL_BIT), blocked(SIGNAL_BIT | 1)), (0, 1));
        // What sigfillset(3) makes in glibc and in musl, and what neither contains.
        assert_eq!(blocked(filled), filled);
        assert_eq!(blocked(!(0b11 << 31)), !(0b11 << 31));
        assert_eq!(blocked(!(0b111 << 31) & !SIGSYS_BIT), !(0b111 << 31) & !SIGSYS_BIT);
        assert_eq!(blocked(filled & !1), filled & !1 & !SIGNAL_BIT);
        assert_eq!(changing(SIG_UNBLOCK, 1), 1 | SIGNAL_BIT);
        assert_eq!((awaited(filled), hides(SIGNAL), hides(63)), (filled & !SIGNAL_BIT, true, false));
        RESERVED.store(0, Relaxed);
        assert_eq!((awaited(filled), hides(SIGNAL), changing(SIG_UNBLOCK, 1)), (filled, false, 1));
    }
}
