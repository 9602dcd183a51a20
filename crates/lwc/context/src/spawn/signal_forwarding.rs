//! Signals of the program in contexts that share them: what is sent to the root alone they get when control next comes.
//!
//! A signal that is sent to the process group reaches such a context by itself. One that is sent to the program, which is
//! to say to the root's process, does not. So where the root creates a context that shares signals, the handlers that it
//! has are wrapped: each process counts what its handlers were called for, the root's for all, and a context that
//! finds, when control comes, that the root has had more of a signal than itself sends itself one.
//!
//! Everything that handlers do here is async-signal-safe.

use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst};

use orrery_sys::signals::{self, Action, LAST, Mask};

use crate::shared::program::{Program, ROOT};

/// The program, for handlers; null where the process has none, or not yet.
static PROGRAM: AtomicPtr<Program> = AtomicPtr::new(std::ptr::null_mut());
/// The slot of the calling process.
static SLOT: AtomicUsize = AtomicUsize::new(0);
/// The program's handlers, by signal.
static FORMER: [AtomicUsize; LAST as usize + 1] = [const { AtomicUsize::new(0) }; LAST as usize + 1];

/// How many of a signal a context sends itself at most when control comes: as many as were missed, but no flood.
const MOST: i32 = 64;

/// What a context that shares signals knows of them: how many of each the root has had that it has had as well, one way
/// or the other.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    total: u32,
    balance: [i32; LAST as usize + 1],
}

/// Notes which context the calling process is. The former program's memory may be gone before, and then it is noted by
/// [`forget_program`].
pub(crate) fn set_slot(program: &'static Program, me: u32) {
    SLOT.store(me as usize, SeqCst);
    PROGRAM.store(std::ptr::from_ref(program).cast_mut(), SeqCst);
}

/// Before the program's memory goes.
pub(crate) fn forget_program() {
    PROGRAM.store(std::ptr::null_mut(), SeqCst);
}

/// In the root: wraps the handlers of `wanted` that there are.
pub(crate) fn wrap_handlers(program: &'static Program, wanted: Mask) {
    const SA_SIGINFO: usize = 4;
    set_slot(program, ROOT);
    for signal in (1..=LAST).filter(|signal| wanted & signals::mask_of(&[*signal]) != 0) {
        let Ok(former) = signals::action(signal) else { continue };
        let wrapper = on_signal as *const () as usize;
        if former.handler <= libc::SIG_IGN || former.handler == wrapper {
            continue;
        }
        FORMER[index(signal)].store(former.handler, SeqCst);
        let action = Action { handler: wrapper, flags: former.flags | SA_SIGINFO, ..former };
        // SAFETY: it does what is async-signal-safe, and calls the handler that was there.
        let _ = unsafe { signals::set_action(signal, &action) };
    }
}

fn index(signal: i32) -> usize {
    usize::try_from(signal).unwrap_or(0).min(LAST as usize)
}

extern "C" fn on_signal(signal: i32, info: *const signals::QueuedInfo, context: *mut c_void) {
    let own = rustix::process::getpid().as_raw_pid();
    // SAFETY: null, or the program, which is there for as long as this says so.
    if let Some(program) = unsafe { PROGRAM.load(SeqCst).as_ref() } {
        let slot = u32::try_from(SLOT.load(SeqCst)).unwrap_or(ROOT);
        // SAFETY: the kernel passes a valid siginfo.
        let sender = signals::sender(unsafe { &*info });
        // What a context sends itself, the root has not had. A forked process has a copy of this, and is nobody.
        let is_own_doing = slot != ROOT && sender == Some(own);
        if program.context_slot(slot).pid.load(SeqCst) == own.unsigned_abs() && !is_own_doing {
            program.signals(slot, signal).fetch_add(1, SeqCst);
            if slot == ROOT {
                program.root_signals().fetch_add(1, SeqCst);
            }
        }
    }
    // SAFETY: the handler that was there, which takes no more than it is passed.
    unsafe { signals::pass_on(FORMER[index(signal)].load(SeqCst), signal, info, context) };
}

impl Shared {
    /// Returns what a context has of the past: nothing is missing.
    pub(crate) fn from_now_on(program: &Program, me: u32) -> Self {
        let mut shared = Self { total: 0, balance: [0; LAST as usize + 1] };
        shared.total = program.root_signals().load(SeqCst);
        for signal in 1..=LAST {
            shared.balance[index(signal)] = missing(program, me, signal);
        }
        shared
    }

    /// Notes and gives which signals the root has had and the context has not, and how many.
    pub(crate) fn missed(&mut self, program: &Program, me: u32) -> Vec<(i32, i32)> {
        let mut found = Vec::new();
        let total = program.root_signals().load(SeqCst);
        if self.total == total {
            return found;
        }
        self.total = total;
        for signal in 1..=LAST {
            let balance = &mut self.balance[index(signal)];
            let due = missing(program, me, signal).wrapping_sub(*balance);
            // Fewer than none: one that went to the group has come here first.
            if due > 0 {
                *balance = balance.wrapping_add(due);
                found.push((signal, due.min(MOST)));
            }
        }
        found
    }
}

/// Returns how many more of a signal the root has had.
fn missing(program: &Program, me: u32, signal: i32) -> i32 {
    let [root, own] = [ROOT, me].map(|slot| program.signals(slot, signal).load(SeqCst));
    root.wrapping_sub(own).cast_signed()
}

/// Sends the calling thread signals, so many of each.
pub(crate) fn send(missed: &[(i32, i32)]) {
    let (process, thread) = (rustix::process::getpid().as_raw_pid(), rustix::thread::gettid().as_raw_pid());
    for (signal, count) in missed {
        for _ in 0..*count {
            let _ = signals::send_to_thread(process, thread, *signal);
        }
    }
}
