//! Job control: a program that is stopped is stopped whichever context has control, and continued likewise.
//!
//! The root is what the outside knows as the program. Who stops it with the whole process group, as a terminal does
//! (SIGTSTP, SIGTTIN, SIGTTOU), stops contexts by a handler of the library's, where these signals have no other
//! disposition; where the program handles them, what it does with its root decides. For the root alone may be stopped
//! (`kill -STOP PID`), which no signal and no descriptor tells its children, each context's watcher looks at the root:
//! often while the context has control, seldom else.
//!
//! A context that stops notes so, and the root, once it goes on, has it continue: SIGCONT may have come to the root
//! alone.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::SeqCst};

use orrery_sys::signals::{self, Action, Mask};
use syscalls::{Sysno, syscall};

use crate::shared::program::{ContextSlot, Program, ROOT};

/// How long a watcher waits before it looks at the root, in milliseconds: while its context has control, and else.
const SOON: i32 = 100;
const LATER: i32 = 2000;

/// What a terminal stops programs with.
const STOPPING: [i32; 3] = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// The calling context's slot, and the program's word that says that any context has halted. Handlers have nothing else
/// to find them by; both are in memory that stays for as long as signals are not blocked.
static SLOT: AtomicPtr<ContextSlot> = AtomicPtr::new(std::ptr::null_mut());
static HAS_HALTED: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
/// Whether the watcher may not open files.
static FILTERED: AtomicBool = AtomicBool::new(false);

/// Notes which context the calling process is.
pub(crate) fn set_slot(program: &'static Program, me: u32) {
    SLOT.store(std::ptr::from_ref(program.context_slot(me)).cast_mut(), SeqCst);
    HAS_HALTED.store(std::ptr::from_ref(program.has_halted()).cast_mut(), SeqCst);
}

/// Has the watcher leave the root alone: system calls of this process are kept from it, or arrive elsewhere.
pub(crate) fn leave_root_alone() {
    FILTERED.store(true, SeqCst);
}

/// In a new context: has it stop by those signals that have their default disposition, and gives these.
pub(crate) fn stop_by_terminal() -> Mask {
    const SA_RESTORER: usize = 0x0400_0000;
    const SA_RESTART: usize = 0x1000_0000;
    let action = Action {
        handler: on_stop as *const () as usize,
        flags: SA_RESTORER | SA_RESTART,
        restorer: signals::restorer as *const () as usize,
        mask: 0,
    };
    let mut stopped = 0;
    for signal in STOPPING {
        let handler = signals::action(signal).map(|former| former.handler);
        // A context of a context has it already.
        let is_set = handler == Ok(action.handler)
            // SAFETY: the handler has the type that the flags ask for, and makes async-signal-safe calls
            // only; the restorer returns from it.
            || handler == Ok(libc::SIG_DFL) && unsafe { signals::set_action(signal, &action) }.is_ok();
        if is_set {
            stopped |= signals::mask_of(&[signal]);
        }
    }
    stopped
}

extern "C" fn on_stop(_: i32, _: *const c_void, _: *mut c_void) {
    halt();
}

/// Stops the calling process until the root, or another process, has it continue. Neither allocates nor touches
/// thread-local storage.
fn halt() {
    let own = rustix::process::getpid().as_raw_pid();
    // SAFETY: null, or memory of the program's, which is there for as long as this may be called.
    if let (Some(slot), Some(any)) = unsafe { (SLOT.load(SeqCst).as_ref(), HAS_HALTED.load(SeqCst).as_ref()) }
        && slot.pid.load(SeqCst) == own.unsigned_abs()
    {
        slot.halted.store(1, SeqCst);
        any.store(1, SeqCst);
    }
    // SAFETY: the call takes numbers only, and stops this process.
    let _ = unsafe { syscall!(Sysno::kill, own, libc::SIGSTOP) };
}

/// On a watcher's thread: stops the context where it has control and the root is stopped. Gives after how many
/// milliseconds to look again.
pub(crate) fn follow_root(program: &Program, me: u32) -> i32 {
    let own = rustix::process::getpid().as_raw_pid().unsigned_abs();
    // A spare has no control, though its original may.
    if FILTERED.load(SeqCst) || !program.has_control(me) || program.context_slot(me).pid.load(SeqCst) != own {
        return LATER;
    }
    if program.pid(ROOT).is_some_and(|root| is_stopped(root.as_raw_pid())) {
        halt();
    }
    SOON
}

/// Returns whether process `pid` is stopped, and not by a debugger. Neither allocates nor touches thread-local
/// storage.
fn is_stopped(pid: i32) -> bool {
    let mut path = *b"/proc/0000000000/stat\0";
    let mut digits = pid.unsigned_abs();
    // procfs takes no zeros in front: they are slashes, of which any number is one.
    for place in path[6..16].iter_mut().rev() {
        *place = if digits == 0 { b'/' } else { b'0' + u8::try_from(digits % 10).unwrap_or(0) };
        digits /= 10;
    }
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: the kernel reads a path with its end.
    let Ok(file) = (unsafe { syscall!(Sysno::openat, libc::AT_FDCWD, path.as_ptr(), flags, 0) }) else {
        return false;
    };
    let mut text = [0_u8; 64];
    // SAFETY: the kernel writes into the buffer, and closes a file that nobody else knows.
    let read = unsafe {
        let read = syscall!(Sysno::read, file, text.as_mut_ptr(), text.len());
        let _ = syscall!(Sysno::close, file);
        read.unwrap_or(0)
    };
    // The name, of 15 bytes at most, may hold anything and ends with the last parenthesis.
    let text = text.get(..read).unwrap_or(&[]);
    let name = text.iter().rposition(|byte| *byte == b')');
    name.and_then(|end| text.get(end + 2)) == Some(&b'T')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stopped_processes_are_known() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id().cast_signed();
        assert!(!is_stopped(pid));
        for (signal, stopped) in [(libc::SIGSTOP, true), (libc::SIGCONT, false), (libc::SIGSTOP, true)] {
            // SAFETY: our child, which is not reaped yet.
            unsafe { libc::kill(pid, signal) };
            while is_stopped(pid) != stopped {
                std::thread::yield_now();
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_stopped(pid));
    }
}
