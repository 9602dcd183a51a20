//! The root is the kernel's parent of all contexts: it alone can learn how one ended, and must, or its process stays.
//!
//! The root asks the kernel itself. Others ask the root, where their strand is parked while they have control: they write a
//! request into the program's memory and call. A strand that does not exist in the root kills for itself, and the root
//! buries when it next looks. An exit in any context ends the program with its status.

use core::cell::UnsafeCell;
use core::sync::atomic::Ordering;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

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
use crate::threads::fork_lock::Lock;

/// A request is a seat's number with this; the root's own number asks for a look at all seats.
const ASKED: u32 = 1 << 31;

/// In the root, for its threads: who waits for a process. What a dead process was is said once.
static BURYING: Lock = Lock::new();

/// Contexts of the calling root that are not its children: copies that contexts of another program made of themselves.
/// Touched by who has `BURYING`.
static FOREIGN: Foreign = Foreign(UnsafeCell::new(Vec::new()));

struct Foreign(UnsafeCell<Vec<(u32, OwnedFd)>>);

// SAFETY: see `FOREIGN`.
unsafe impl Sync for Foreign {}

/// In a root that was just forked, before it has other threads: notes its contexts, by seat and pidfd.
pub(crate) fn adopt(contexts: Vec<(u32, OwnedFd)>) {
    BURYING.take();
    // SAFETY: we have `BURYING`.
    unsafe { *FOREIGN.0.get() = contexts };
    BURYING.give_back();
}

/// The pidfd of the context of a seat, if it is not a child. The caller has `BURYING`.
fn foreign(seat: u32) -> Option<BorrowedFd<'static>> {
    // SAFETY: the caller's promise; nothing is taken out while it has that.
    let all = unsafe { &*FOREIGN.0.get() };
    all.iter().find(|(other, _)| *other == seat).map(|(_, pidfd)| pidfd.as_fd())
}

/// How a dead context ended that is not a child. Its pidfd tells once somebody else has buried it (Linux 6.15); until
/// then it is listed with its status (proc_pid_stat(5)), for those who may look into it.
fn end_of_foreign(pidfd: BorrowedFd<'_>) -> End {
    for _ in 0..100 {
        let end = end_of(pidfd);
        if end != End::Unknown {
            return end;
        }
        if let Some(end) = listed_end(pidfd) {
            return end;
        }
        std::thread::sleep(core::time::Duration::from_millis(2));
    }
    End::Unknown
}

fn listed_end(pidfd: BorrowedFd<'_>) -> Option<End> {
    let pid = pid_of(pidfd)?;
    let text = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
    let (_, fields) = text.rsplit_once(')')?;
    let status: i32 = fields.split_whitespace().last()?.parse().ok()?;
    // The number may have become somebody else's.
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

/// How process `pid` ended, which is or was on `seat`. It is killed first, should it live.
pub(crate) fn bury(state: &State, seat: u32, pid: u32) -> End {
    let program = state.program;
    if state.me == ROOT {
        return reap(program, seat, pid);
    }
    if !program.exists(state.strand, ROOT) {
        return kill_alone(program, seat, pid);
    }
    let strand = program.strand(state.strand);
    strand.victim.store(pid, Ordering::SeqCst);
    ask(program, state.strand, seat | ASKED);
    unpack(strand.answer.load(Ordering::SeqCst))
}

/// Buries whoever is dead.
pub(crate) fn sweep(state: &State) {
    if state.me == ROOT {
        sweep_here(state.program);
    } else if state.program.exists(state.strand, ROOT) {
        ask(state.program, state.strand, ROOT | ASKED);
    }
}

fn ask(program: &Program, strand: u32, what: u32) {
    let request = &program.strand(strand).request;
    request.store(what, Ordering::SeqCst);
    program.place(strand, ROOT).face.call();
    // Should the root die, our watcher ends us.
    while request.load(Ordering::SeqCst) == what {
        let nap = rustix::time::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        let _ = futex::wait(request, futex::Flags::empty(), what, Some(&nap));
    }
}

/// In the root, on the thread that is `strand` there: does what was asked. Needs no turn at the state: who asks may have
/// that of its own context.
pub(crate) fn serve(program: &Program, me: u32, strand: u32) {
    let asked = program.strand(strand);
    let what = asked.request.load(Ordering::SeqCst);
    if me != ROOT || what & ASKED == 0 {
        return;
    }
    let seat = what & !ASKED;
    let end = if seat == ROOT {
        sweep_here(program);
        End::Unknown
    } else {
        reap(program, seat, asked.victim.load(Ordering::SeqCst))
    };
    asked.answer.store(pack(end), Ordering::SeqCst);
    asked.request.store(0, Ordering::SeqCst);
    let _ = futex::wake(&asked.request, futex::Flags::empty(), u32::MAX >> 1);
}

/// Without the root, whose child it is.
fn kill_alone(program: &Program, seat: u32, victim: u32) -> End {
    if let Some(pid) = program.pid(seat).filter(|pid| pid.as_raw_pid().unsigned_abs() == victim) {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
    End::Unknown
}

fn sweep_here(program: &Program) {
    BURYING.take();
    for seat in program.used() {
        if !program.is_marked_dead(seat) {
            continue;
        }
        let Some(pid) = program.pid(seat) else { continue };
        let end = match foreign(seat) {
            Some(pidfd) => is_dead(pidfd).then(|| end_of_foreign(pidfd)),
            None => wait(pid, WaitIdOptions::NOHANG),
        };
        if let Some(end) = end {
            conclude(program, seat, end);
        }
    }
    BURYING.give_back();
}

fn reap(program: &Program, seat: u32, victim: u32) -> End {
    BURYING.take();
    let there = program.pid(seat).filter(|pid| pid.as_raw_pid().unsigned_abs() == victim);
    let end = match there {
        // Another thread was faster, and somebody else may have the seat by now.
        None => unpack(program.seat(seat).end.load(Ordering::SeqCst)),
        Some(_) if let Some(pidfd) = foreign(seat) => {
            let _ = rustix::process::pidfd_send_signal(pidfd, Signal::KILL);
            let mut one = [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)];
            let _ = rustix::io::retry_on_intr(|| rustix::event::poll(&mut one, None));
            conclude(program, seat, end_of_foreign(pidfd))
        }
        Some(pid) => {
            // The number is read from memory that every context can write: only a hidden child of ours is killed.
            let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT | hidden();
            if rustix::process::waitid(WaitId::Pid(pid), look).is_ok() {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
            let end = wait(pid, WaitIdOptions::empty()).unwrap_or(End::Unknown);
            conclude(program, seat, end)
        }
    };
    BURYING.give_back();
    end
}

/// A context is dead and reaped.
fn conclude(program: &Program, seat: u32, end: End) -> End {
    if !matches!(end, End::Exited { .. }) && succeed(program, seat, end) {
        return end;
    }
    program.release(seat, pack(end));
    // SAFETY: who concludes has `BURYING`.
    unsafe { (*FOREIGN.0.get()).retain(|(other, _)| *other != seat) };
    if let End::Exited { status } = end {
        // SAFETY: ends the program, as the context's exit meant to. The context has run the exit handlers.
        unsafe { libc::_exit(status) };
    }
    end
}

/// Gives the seat of a dead context to its spare, if it has one that lives.
fn succeed(program: &Program, seat: u32, end: End) -> bool {
    let spare = program.seat(seat).spare.load(Ordering::SeqCst);
    let Some(spare) = i32::try_from(spare).ok().and_then(Pid::from_raw) else { return false };
    let Ok(pidfd) = rustix::process::pidfd_open(spare, rustix::process::PidfdFlags::empty()) else {
        return false;
    };
    let pidfd = orrery_sys::descriptors::raise(pidfd);
    if is_dead(pidfd.as_fd()) {
        return false;
    }
    // SAFETY: who concludes has `BURYING`.
    let foreign = unsafe { &mut *FOREIGN.0.get() };
    foreign.retain(|(other, _)| *other != seat);
    foreign.push((seat, pidfd));
    program.bequeath(seat, spare, pack(end));
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
