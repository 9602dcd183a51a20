//! Holding the program's other threads still, for the moment of a copy, and going on with them in the copy.
//!
//! clone(2) copies the calling thread alone. So the creator of a context asks each other thread, by a signal, to wait
//! in the handler until the copy is made, and to say where it waits. Its stack is then part of the copy, down to the
//! handler's frame, and the new context makes a thread that goes on in that frame: a *counterpart*. What it has of the
//! original are the registers (the kernel put them on the stack for the handler, and takes them from there at its end),
//! the stack, the thread pointer with all thread-local storage behind it, the C library's list of robust futexes, and
//! where the kernel is to clear its number when it ends, for which pthread_join(3) waits. What is the kernel's is
//! registered again: rseq(2), and the number in the C library's books.
//!
//! A counterpart does not run before control comes to it. Then it does one of two things:
//!
//! - where the original waited in a call about contexts, or had been called there and was waiting for its turn to look,
//!   that call returns, with the context that switched to the counterpart;
//! - else it goes on where the original was, by returning from the handler. The context that switched there gets no
//!   notice: the paper has no way either.
//!
//! The signal is the C library's own for setuid(2) in programs with threads, which no program can block by way of the C
//! library (signal(7) calls it internal); what does not come from here is passed on to the C library. A thread that
//! blocks it all the same, by a bare system call, does not exist in the new context, nor does one that the kernel does
//! not let answer for [`PATIENCE`].
//!
//! **From the first signal to the release nothing here may allocate or lock**: another thread may have been stopped
//! while it held some lock.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use orrery_domain::Moment;
use orrery_sys::process::Threads;
use orrery_sys::seccomp::{self, Filter, Scope};
use orrery_sys::signals::{self, Action, INTERNAL as SIGNAL, Mask, QueuedInfo};
use rustix::io::Errno;
use rustix::thread::futex;
use syscalls::{Sysno, syscall};

use crate::arch;
use crate::error::Result;
use crate::shared::program::{MAX_THREADS, Program, own_thread};
use crate::spawn::process_status::other_threads;
use crate::switch::slow;
use crate::threads::logical;
use crate::threads::state_lock;
use orrery_rollback::watcher;
use orrery_sys::{rseq, thread};

/// For how long a thread may not answer. One that only waits for a CPU answers; on a busy machine that may take
/// seconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long its creator sleeps before it looks whether those who do not answer have ended.
const NAP: rustix::time::Timespec = rustix::time::Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// A thread that is asked to hold still.
#[derive(Debug)]
struct Stop {
    /// Its number; 0 where nobody is asked.
    thread: AtomicU32,
    logical_thread: AtomicU32,
    /// Where it waits; 0 while it does not.
    stack: AtomicUsize,
    /// The thread pointer of the stopped thread.
    pointer: AtomicUsize,
    /// Its list of robust futexes.
    robust: AtomicUsize,
    /// Where the kernel clears its number.
    clear: AtomicUsize,
}

/// All this is the process's own: a signal handler has nothing else to find it by.
static STOPS: [Stop; MAX_THREADS] = [const {
    Stop {
        thread: AtomicU32::new(0),
        logical_thread: AtomicU32::new(0),
        stack: AtomicUsize::new(0),
        pointer: AtomicUsize::new(0),
        robust: AtomicUsize::new(0),
        clear: AtomicUsize::new(0),
    }
}; MAX_THREADS];
/// Odd while threads are to hold still.
static ROUND: AtomicU32 = AtomicU32::new(0);
static ARRIVED: AtomicU32 = AtomicU32::new(0);
static INSTALLED: AtomicBool = AtomicBool::new(false);
/// What handled the signal before.
static FORMER: AtomicUsize = AtomicUsize::new(0);
/// Where a thread's rseq area is, from its thread pointer, and how long; 0 for none.
static RSEQ_OFFSET: AtomicIsize = AtomicIsize::new(0);
static RSEQ_LENGTH: AtomicU32 = AtomicU32::new(0);
/// What the calling context is deaf to.
static DEAF: AtomicU64 = AtomicU64::new(0);

/// Signals by which the kernel or this file reach a thread, whichever it blocks.
pub(crate) const NEVER_BLOCKED: Mask = signals::mask_of(&[SIGNAL]);

/// The other threads, held still for as long as this lives.
#[derive(Debug)]
pub(crate) struct StoppedThreads {
    /// How many of [`STOPS`] were asked.
    asked: usize,
    mask: Mask,
}

impl StoppedThreads {
    /// Holds the process' other threads still. `None` where there are none that could be. What is blocked meanwhile is
    /// everything: no handler may run that would wait for one of them.
    pub(crate) fn hold(program: &Program, context_slot: u32) -> Result<Option<Self>> {
        let asked = list(program, context_slot)?;
        if asked == 0 {
            return Ok(None);
        }
        install_once()?;
        let still = Self { asked, mask: signals::block_all() };
        let round = ROUND.load(SeqCst) | 1;
        ARRIVED.store(0, SeqCst);
        ROUND.store(round, SeqCst);
        let mut sent = 0;
        for (index, stop) in STOPS[..asked].iter().enumerate() {
            if send(stop.thread.load(SeqCst), index, round) {
                sent += 1;
            } else {
                stop.thread.store(0, SeqCst);
            }
        }
        still.await_all(sent);
        Ok(Some(still))
    }

    /// Returns the mask that the calling thread had.
    pub(crate) fn mask(&self) -> Mask {
        self.mask
    }

    fn await_all(&self, mut expected: u32) {
        let process = rustix::process::getpid().as_raw_pid();
        let end = Moment::now().after(PATIENCE);
        loop {
            let arrived = ARRIVED.load(SeqCst);
            if arrived >= expected {
                return;
            }
            let _ = futex::wait(&ARRIVED, futex::Flags::PRIVATE, arrived, Some(&NAP));
            let late = Moment::now() >= end;
            for stop in &STOPS[..self.asked] {
                let thread = stop.thread.load(SeqCst);
                let missing = thread != 0 && stop.stack.load(SeqCst) == 0;
                if missing && (late || !is_there(process, thread)) {
                    stop.thread.store(0, SeqCst);
                    expected -= 1;
                }
            }
        }
    }
}

impl Drop for StoppedThreads {
    fn drop(&mut self) {
        ROUND.fetch_add(1, SeqCst);
        let _ = futex::wake(&ROUND, futex::Flags::PRIVATE, u32::MAX >> 1);
        signals::set_mask(self.mask);
    }
}

/// Lists the threads that can be held still; gives how many.
fn list(program: &Program, context_slot: u32) -> Result<usize> {
    if other_threads()? == 0 || thread::shadow_stack_is_on() {
        return Ok(0);
    }
    let (own, watcher) = (own_thread().cast_signed(), watcher::thread());
    let (directory, mut threads) = (Threads::open()?, Vec::new());
    directory.for_each(|thread| {
        if thread != own && Some(thread) != watcher {
            threads.push(thread);
        }
    })?;
    let mut asked = 0;
    for thread in threads {
        if asked == STOPS.len() || !listens(&directory, thread) {
            continue;
        }
        let thread = thread.unsigned_abs();
        let known = program
            .thread_with_tid(context_slot, thread)
            .or_else(|| program.add_thread(context_slot, thread));
        let Some(logical_thread) = known else { continue };
        let stop = &STOPS[asked];
        stop.thread.store(thread, SeqCst);
        stop.logical_thread.store(logical_thread, SeqCst);
        stop.stack.store(0, SeqCst);
        asked += 1;
    }
    Ok(asked)
}

/// Returns whether a thread does not block the signal.
fn listens(threads: &Threads, thread: i32) -> bool {
    threads.condition(thread).is_some_and(|condition| condition.blocked & NEVER_BLOCKED == 0)
}

fn is_there(process: i32, thread: u32) -> bool {
    // SAFETY: the call takes numbers only, and signal 0 is not sent.
    let there = unsafe { syscall!(Sysno::tgkill, process, thread, 0) };
    there.map_err(syscalls::Errno::into_raw) != Err(libc::ESRCH)
}

fn send(thread: u32, index: usize, round: u32) -> bool {
    let value = u64::from(round) << 32 | index as u64;
    signals::queue_to_thread(thread.cast_signed(), SIGNAL, value).is_ok()
}

fn install_once() -> Result<()> {
    if INSTALLED.load(SeqCst) {
        return Ok(());
    }
    if let Some(area) = rseq::area() {
        // SAFETY: takes nothing; it only names the calling thread.
        let pointer = unsafe { libc::pthread_self() };
        let pointer = usize::try_from(pointer).unwrap_or(0);
        RSEQ_OFFSET.store(area.wrapping_sub(pointer).cast_signed(), SeqCst);
        RSEQ_LENGTH.store(u32::try_from(rseq::LENGTH).unwrap_or(0), SeqCst);
    }
    let former = signals::action(SIGNAL)?;
    FORMER.store(former.handler, SeqCst);
    const SA_SIGINFO: usize = 4;
    const SA_RESTORER: usize = 0x0400_0000;
    const SA_RESTART: usize = 0x1000_0000;
    // A thread that has not returned from the handler yet can be held still again.
    const SA_NODEFER: usize = 0x4000_0000;
    let action = Action {
        handler: on_signal as *const () as usize,
        flags: SA_SIGINFO | SA_RESTORER | SA_RESTART | SA_NODEFER,
        restorer: signals::restorer as *const () as usize,
        mask: Mask::MAX & !NEVER_BLOCKED,
    };
    // SAFETY: the handler has the type that SA_SIGINFO asks for and is async-signal-safe; the restorer
    // returns from it.
    unsafe { signals::set_action(SIGNAL, &action)? };
    INSTALLED.store(true, SeqCst);
    Ok(())
}

/// `ucontext_t` up to the floating-point state, with the mask behind the registers (sigreturn(2)).
#[repr(C)]
struct Frame {
    flags: u64,
    link: u64,
    stack: [u64; 3],
    registers: [u64; 32],
    mask: Mask,
}

extern "C" fn on_signal(signal: i32, info: *const QueuedInfo, frame: *mut Frame) {
    // SAFETY: the kernel passes a valid siginfo.
    let value = signals::queued_value(unsafe { &*info });
    let stop = value.and_then(|value| {
        let index = usize::try_from(value & 0xffff_ffff).ok()?;
        Some((STOPS.get(index)?, value >> 32))
    });
    let Some((stop, round)) = stop else {
        // SAFETY: the disposition before ours, and what the kernel passed.
        unsafe { signals::pass_on(FORMER.load(SeqCst), signal, info, frame.cast()) };
        return;
    };
    let current = ROUND.load(SeqCst);
    if u64::from(current) != round || stop.thread.load(SeqCst) != own_thread() {
        return;
    }
    const PR_GET_TID_ADDRESS: usize = 40;
    let (mut clear, mut robust, mut length) = (0_usize, 0_usize, 0_usize);
    // SAFETY: the kernel writes one pointer, and one pointer with a size.
    let known = unsafe {
        syscall!(Sysno::prctl, PR_GET_TID_ADDRESS, &raw mut clear).is_ok()
            && syscall!(Sysno::get_robust_list, 0, &raw mut robust, &raw mut length).is_ok()
    };
    if !known {
        return;
    }
    // SAFETY: takes nothing; it only names the calling thread.
    let pointer = unsafe { libc::pthread_self() };
    stop.clear.store(clear, SeqCst);
    stop.robust.store(robust, SeqCst);
    stop.pointer.store(usize::try_from(pointer).unwrap_or(0), SeqCst);
    // SAFETY: the pointers lead to statics, which stay valid.
    let copied =
        unsafe { arch::hold_still(&raw const stop.stack, &raw const ROUND, current, &raw const ARRIVED) };
    if copied == 1 {
        // SAFETY: the kernel's frame is above us on this stack, until we return.
        begin(stop, unsafe { &mut *frame });
    }
}

/// In a new context, whose only thread this is so far, before anything else runs: makes the counterparts of the threads
/// that were held still in its creator. `mask` is what the context is deaf to.
///
/// # Errors
/// Those of clone(2).
pub(crate) fn make_counterparts(
    still: Option<&StoppedThreads>,
    program: &'static Program,
    context_slot: u32,
    deaf: Mask,
) -> std::result::Result<(), Errno> {
    DEAF.fetch_or(deaf, SeqCst);
    let Some(still) = still else { return Ok(()) };
    let flags = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_FILES
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM
        | libc::CLONE_SETTLS
        | libc::CLONE_PARENT_SETTID
        | libc::CLONE_CHILD_SETTID
        | libc::CLONE_CHILD_CLEARTID;
    ARRIVED.store(0, SeqCst);
    let mut expected = 0;
    for stop in &STOPS[..still.asked] {
        let stack = stop.stack.load(SeqCst);
        if stop.thread.load(SeqCst) == 0 || stack == 0 {
            continue;
        }
        let logical_thread = stop.logical_thread.load(SeqCst);
        program.clear_place(logical_thread, context_slot);
        // SAFETY: the stack is the original's, which does not run here; so are thread pointer and number.
        let made = unsafe {
            arch::start_at(
                flags.cast_unsigned() as usize,
                stack,
                program.place(logical_thread, context_slot).thread.as_ptr(),
                stop.clear.load(SeqCst),
                stop.pointer.load(SeqCst),
            )
        };
        if made < 0 {
            return Err(Errno::from_raw_os_error(i32::try_from(-made).unwrap_or(libc::EAGAIN)));
        }
        expected += 1;
    }
    // Once the context is filtered they may not register themselves any more.
    loop {
        let arrived = ARRIVED.load(SeqCst);
        if arrived >= expected {
            break;
        }
        let _ = futex::wait(&ARRIVED, futex::Flags::PRIVATE, arrived, None);
    }
    // What was held still, was held still there.
    ROUND.fetch_add(1, SeqCst);
    Ok(())
}

/// What a counterpart does first. Everything is blocked: so is its maker's, from whom it has that.
fn begin(stop: &Stop, frame: &mut Frame) {
    let length = RSEQ_LENGTH.load(SeqCst);
    if length != 0 {
        const SIGNATURE: usize = 0x5305_3053;
        let area = stop.pointer.load(SeqCst).wrapping_add_signed(RSEQ_OFFSET.load(SeqCst));
        // SAFETY: the C library's area of this thread; the kernel forgot it when the thread was made.
        let _ = unsafe { syscall!(Sysno::rseq, area, length, 0, SIGNATURE) };
    }
    let robust = stop.robust.load(SeqCst);
    if robust != 0 {
        const ROBUST_LENGTH: usize = 24;
        // SAFETY: the C library's list of this thread.
        let _ = unsafe { syscall!(Sysno::set_robust_list, robust, ROBUST_LENGTH) };
    }
    logical::know(stop.logical_thread.load(SeqCst));
    let course = logical::set_out();
    // So that this one can be held still as well, from its first moment on: its maker waits until it has arrived.
    signals::set_mask(Mask::MAX & !NEVER_BLOCKED);
    ARRIVED.fetch_add(1, SeqCst);
    let _ = futex::wake(&ARRIVED, futex::Flags::PRIVATE, 1);
    match course {
        logical::Course::Land(landing) => {
            signals::set_mask(frame.mask | DEAF.load(SeqCst));
            // SAFETY: the original waited there, and this is a copy of its stack.
            unsafe { arch::land(landing) }
        }
        logical::Course::Wait => {
            let inside = logical::set_inside(true);
            if let Some(mut held) = state_lock::hold_as_counterpart() {
                let _ = slow::park(&mut held, None, None);
            }
            logical::set_inside(inside);
        }
        logical::Course::GoOn => {}
    }
    frame.mask |= DEAF.load(SeqCst);
}

/// Has a filtered context's other threads obey the filter of the calling one, and answer to the same listener.
pub(crate) fn spread_filter() -> rustix::io::Result<()> {
    let allow = seccomp::Action::Allow;
    // A filter that allows everything: what counts is that it spreads those of this thread.
    let allow_all = Filter::new(allow).foreign(allow).x32(allow).program();
    seccomp::install(&allow_all, Scope::Process).map(drop)
}

/// In a new context whose creator had other threads: takes and releases each lock of the C library that a new context
/// needs. Where one was held when the copy was made, this does not return, and the creator starts over.
pub(crate) fn try_locks() {
    unsafe extern "C" fn stop(_: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> i32 {
        1
    }
    // SAFETY: walks all arenas of malloc(3), with each one's lock; walks the list of libraries; flushes nothing, for
    // no stream is written to.
    unsafe {
        let _ = libc::mallinfo2();
        libc::dl_iterate_phdr(Some(stop), std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicI32;

    use super::*;

    static PASSED: AtomicI32 = AtomicI32::new(0);

    #[test]
    fn what_is_not_ours_is_passed_on() {
        extern "C" fn note(signal: i32, _: *const QueuedInfo, _: *mut Frame) {
            PASSED.store(signal, SeqCst);
        }
        FORMER.store(note as *const () as usize, SeqCst);
        // SAFETY: a `QueuedInfo` consists of integers, for which all-zero is a valid value.
        let info: QueuedInfo = unsafe { std::mem::zeroed() };
        on_signal(SIGNAL, &raw const info, std::ptr::null_mut());
        assert_eq!(PASSED.load(SeqCst), SIGNAL);
        FORMER.store(0, SeqCst);
    }

    #[test]
    fn threads_hold_still_and_go_on() {
        let program: &'static Program = Box::leak(Box::new(Program::new().unwrap()));
        let (count, over) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !over.load(SeqCst) {
                        count.fetch_add(1, SeqCst);
                        std::thread::yield_now();
                    }
                });
            }
            while count.load(SeqCst) < 100 {
                std::thread::yield_now();
            }
            for _ in 0..20 {
                let still = StoppedThreads::hold(program, 0).unwrap().unwrap();
                assert!(still.asked >= 3);
                let before = count.load(SeqCst);
                std::thread::sleep(Duration::from_millis(2));
                assert_eq!(count.load(SeqCst), before);
                drop(still);
                while count.load(SeqCst) == before {
                    std::thread::yield_now();
                }
            }
            over.store(true, SeqCst);
        });
    }
}
