//! The root is the kernel's parent of all contexts: it alone can learn how one ended, and must, or its process stays.
//!
//! The root asks the kernel itself. Others ask the root, where their logical thread is parked while they have control:
//! they write a request into the program's memory and call. A logical thread that does not exist in the root kills for
//! itself, and the root reaps when it next looks. An exit in any context ends the program with its status.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use orrery_domain::End;
use orrery_domain::gate::is_dead;
use orrery_domain::process::end_of;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use rustix::thread::futex;

use crate::shared::program::{Program, ROOT};
use crate::spawn::process_status::pid_of;
use crate::state::State;
use crate::threads::fork_lock::Guarded;

/// A request is a slot's number with this; the root's own number asks for a look at all slots.
const ASKED: u32 = 1 << 31;

/// Contexts of the calling root that are not its children: copies that contexts of another program made of themselves,
/// by slot and pidfd. Who holds the lock is the one thread of the root that waits for processes, so that the end of a
/// dead process is reported once.
static FOREIGN: Guarded<Foreign> = Guarded::new(Foreign(Vec::new()));

#[derive(Debug)]
struct Foreign(Vec<(u32, OwnedFd)>);

impl Foreign {
    /// Returns the pidfd of the context of a slot, if it is not a child.
    fn pidfd(&self, context_slot: u32) -> Option<BorrowedFd<'_>> {
        self.0.iter().find(|(other, _)| *other == context_slot).map(|(_, pidfd)| pidfd.as_fd())
    }

    fn remove(&mut self, context_slot: u32) {
        self.0.retain(|(other, _)| *other != context_slot);
    }
}

/// In a root that was just forked, before it has other threads: notes its contexts, by slot and pidfd.
pub(crate) fn adopt(contexts: Vec<(u32, OwnedFd)>) {
    FOREIGN.lock().0 = contexts;
}

/// Returns how a dead context ended that is not a child. Its pidfd tells once another process has reaped it (Linux
/// 6.15); until then it is listed with its status (proc_pid_stat(5)), for those who may look into it.
fn end_of_foreign(pidfd: BorrowedFd<'_>) -> End {
    for _ in 0..100 {
        let end = end_of(pidfd);
        if end != End::Unknown {
            return end;
        }
        if let Some(end) = listed_end(pidfd) {
            return end;
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    End::Unknown
}

fn listed_end(pidfd: BorrowedFd<'_>) -> Option<End> {
    let pid = pid_of(pidfd)?;
    let text = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
    let (_, fields) = text.rsplit_once(')')?;
    let status: i32 = fields.split_whitespace().last()?.parse().ok()?;
    // The number may have become another process's.
    if !fields.trim_start().starts_with('Z') || pid_of(pidfd) != Some(pid) {
        return None;
    }
    // Others read zero, and may not follow its links either.
    if status == 0
        && rustix::fs::readlink(format!("/proc/{}/exe", pid.as_raw_pid()), Vec::new()) == Err(Errno::ACCESS)
    {
        return None;
    }
    Some(match status & 0x7f {
        0 => End::Exited { status: status >> 8 & 0xff },
        signal => End::Killed { signal },
    })
}

/// Returns how process `pid` ended, which is or was on `context_slot`. It is killed first, should it live.
pub(crate) fn reap(state: &State, context_slot: u32, pid: u32) -> End {
    let program = state.program;
    if state.me == ROOT {
        return reap_child(program, context_slot, pid);
    }
    if !program.exists(state.logical_thread, ROOT) {
        return kill_alone(program, context_slot, pid);
    }
    let logical_thread = program.logical_thread(state.logical_thread);
    logical_thread.victim.store(pid, Ordering::SeqCst);
    ask(program, state.logical_thread, context_slot | ASKED);
    unpack(logical_thread.answer.load(Ordering::SeqCst))
}

/// Reaps all contexts that are dead.
pub(crate) fn sweep(state: &State) {
    if state.me == ROOT {
        reap_all(state.program);
    } else if state.program.exists(state.logical_thread, ROOT) {
        ask(state.program, state.logical_thread, ROOT | ASKED);
    }
}

fn ask(program: &Program, logical_thread: u32, what: u32) {
    let request = &program.logical_thread(logical_thread).request;
    request.store(what, Ordering::SeqCst);
    program.place(logical_thread, ROOT).face.call();
    // Should the root die, our watcher ends us.
    while request.load(Ordering::SeqCst) == what {
        let nap = rustix::time::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        let _ = futex::wait(request, futex::Flags::empty(), what, Some(&nap));
    }
}

/// In the root, on the thread that is `logical_thread` there: does what was asked. Needs no turn at the state: who asks
/// may have that of its own context.
pub(crate) fn serve(program: &Program, me: u32, logical_thread: u32) {
    let asked = program.logical_thread(logical_thread);
    let what = asked.request.load(Ordering::SeqCst);
    if me != ROOT || what & ASKED == 0 {
        return;
    }
    let context_slot = what & !ASKED;
    let end = if context_slot == ROOT {
        reap_all(program);
        End::Unknown
    } else {
        reap_child(program, context_slot, asked.victim.load(Ordering::SeqCst))
    };
    asked.answer.store(pack(end), Ordering::SeqCst);
    asked.request.store(0, Ordering::SeqCst);
    let _ = futex::wake(&asked.request, futex::Flags::empty(), u32::MAX >> 1);
}

/// In the root: has those contexts continue that stopped because it was stopped.
pub(crate) fn continue_halted(program: &Program) {
    if program.has_halted().load(Ordering::SeqCst) == 0 || program.has_halted().swap(0, Ordering::SeqCst) == 0
    {
        return;
    }
    let foreign = FOREIGN.lock();
    for context_slot in program.used() {
        if program.context_slot(context_slot).halted.swap(0, Ordering::SeqCst) == 0 {
            continue;
        }
        if let Some(pidfd) = foreign.pidfd(context_slot) {
            let _ = rustix::process::pidfd_send_signal(pidfd, Signal::CONT);
        } else if let Some(pid) = program.pid(context_slot)
            && is_child(pid)
        {
            let _ = rustix::process::kill_process(pid, Signal::CONT);
        }
    }
}

/// Returns whether a number, which is read from memory that every context can write, is that of a hidden child of
/// ours.
fn is_child(pid: Pid) -> bool {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT | hidden();
    rustix::process::waitid(WaitId::Pid(pid), look).is_ok()
}

/// Without the root, whose child it is.
fn kill_alone(program: &Program, context_slot: u32, victim: u32) -> End {
    if let Some(pid) = program.pid(context_slot).filter(|pid| pid.as_raw_pid().unsigned_abs() == victim) {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
    End::Unknown
}

fn reap_all(program: &Program) {
    let mut foreign = FOREIGN.lock();
    for context_slot in program.used() {
        if !program.is_marked_dead(context_slot) {
            continue;
        }
        let Some(pid) = program.pid(context_slot) else { continue };
        let end = match foreign.pidfd(context_slot) {
            Some(pidfd) => is_dead(pidfd).then(|| end_of_foreign(pidfd)),
            None => wait(pid, WaitIdOptions::NOHANG),
        };
        if let Some(end) = end {
            conclude(&mut foreign, program, context_slot, end);
        }
    }
}

fn reap_child(program: &Program, context_slot: u32, victim: u32) -> End {
    let mut foreign = FOREIGN.lock();
    let there = program.pid(context_slot).filter(|pid| pid.as_raw_pid().unsigned_abs() == victim);
    match there {
        // Another thread was faster, and another context may have the slot by now.
        None => unpack(program.context_slot(context_slot).end.load(Ordering::SeqCst)),
        Some(_) if let Some(pidfd) = foreign.pidfd(context_slot) => {
            let _ = rustix::process::pidfd_send_signal(pidfd, Signal::KILL);
            let mut one = [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)];
            let _ = rustix::io::retry_on_intr(|| rustix::event::poll(&mut one, None));
            let end = end_of_foreign(pidfd);
            conclude(&mut foreign, program, context_slot, end)
        }
        Some(pid) => {
            if is_child(pid) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
            let end = wait(pid, WaitIdOptions::empty()).unwrap_or(End::Unknown);
            conclude(&mut foreign, program, context_slot, end)
        }
    }
}

/// A context is dead and reaped.
fn conclude(foreign: &mut Foreign, program: &Program, context_slot: u32, end: End) -> End {
    if !matches!(end, End::Exited { .. }) && succeed(foreign, program, context_slot, end) {
        return end;
    }
    program.release(context_slot, pack(end));
    foreign.remove(context_slot);
    if let End::Exited { status } = end {
        // SAFETY: ends the program, as the context's exit meant to. The context has run the exit handlers.
        unsafe { libc::_exit(status) };
    }
    end
}

/// Gives the slot of a dead context to its checkpoint, if it has one that lives.
fn succeed(foreign: &mut Foreign, program: &Program, context_slot: u32, end: End) -> bool {
    let checkpoint_pid = program.context_slot(context_slot).checkpoint_pid.load(Ordering::SeqCst);
    let Some(checkpoint_pid) = i32::try_from(checkpoint_pid).ok().and_then(Pid::from_raw) else {
        return false;
    };
    let Ok(pidfd) = rustix::process::pidfd_open(checkpoint_pid, rustix::process::PidfdFlags::empty()) else {
        return false;
    };
    let pidfd = orrery_sys::descriptors::raise(pidfd);
    if is_dead(pidfd.as_fd()) {
        return false;
    }
    foreign.remove(context_slot);
    foreign.0.push((context_slot, pidfd));
    program.replace_with_checkpoint(context_slot, checkpoint_pid, pack(end));
    true
}

fn hidden() -> WaitIdOptions {
    WaitIdOptions::from_bits_retain(libc::__WALL.cast_unsigned())
}

/// Takes the status of a child.
fn wait(pid: Pid, how: WaitIdOptions) -> Option<End> {
    let options = WaitIdOptions::EXITED | how | hidden();
    let waited = rustix::io::retry_on_intr(|| rustix::process::waitid(WaitId::Pid(pid), options));
    match waited {
        Ok(Some(status)) => Some(match (status.exit_status(), status.terminating_signal()) {
            (Some(status), _) => End::Exited { status },
            (None, Some(signal)) => End::Killed { signal },
            (None, None) => End::Unknown,
        }),
        Ok(None) => None,
        // The program has reaped it with __WALL.
        Err(_) => Some(End::Unknown),
    }
}

fn pack(end: End) -> u32 {
    match end {
        End::Killed { signal } => signal.unsigned_abs() & 0xff | 0x100,
        End::Exited { status } => status.unsigned_abs() & 0xff | 0x200,
        End::Unknown => 0,
    }
}

fn unpack(packed: u32) -> End {
    let value = i32::try_from(packed & 0xff).unwrap_or(0);
    match packed & 0xf00 {
        0x100 => End::Killed { signal: value },
        0x200 => End::Exited { status: value },
        _ => End::Unknown,
    }
}
