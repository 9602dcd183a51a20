//! `getpid`, `gettid`, `getuid` and their like, answered from what was answered before.
//!
//! Only answers are remembered that cannot change unseen. All of them are numbers in registers: an answer that has to
//! be written to the program's memory, so that a bad address gives EFAULT, costs more than the kernel's.
//!
//! | answer | changes | seen by |
//! |---|---|---|
//! | `getpid` | in the child of a fork; while the child of a `vfork` uses the same memory; in a process made with `CLONE_VM` | `process::clone` |
//! | `gettid` | between threads: remembered by processes that never had a second one | `process::clone` |
//! | user and group numbers | by `setuid` and the like, for the calling thread alone; with the user namespace | [`step_of_change`] |
//!
//! Numbers of users are remembered only where the map of the user namespace was written already (the supervisor looks):
//! until then they change when another process writes it. `getppid` (parents die), `getpgrp` and `getsid` (parents and
//! children change them), `uname` and `getcwd` (any process changes them) are never remembered.

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use crate::config::service;
use crate::executive::services::call::{Next, ServiceCall, Stage, enabled};
use crate::nr;

/// Calls that are answered here.
pub(crate) const ASKED: [u64; 6] = [nr::getpid, nr::gettid, nr::getuid, nr::geteuid, nr::getgid, nr::getegid];
/// Calls after which user and group numbers may be others.
pub(crate) const CHANGING: [u64; 8] = [
    nr::setuid,
    nr::setgid,
    nr::setreuid,
    nr::setregid,
    nr::setresuid,
    nr::setresgid,
    nr::unshare,
    nr::setns,
];
const PID: usize = 0;
const TID: usize = 1;
const FIRST_USER: usize = 2;

/// The highest byte says whether the lowest four hold an answer; between them is counted how often one was forgotten,
/// so that one that was asked for before is not entered afterwards.
static ANSWERS: [AtomicU64; ASKED.len()] = [const { AtomicU64::new(0) }; ASKED.len()];
const VALID: u64 = 1 << 56;
const FORGOTTEN: u64 = 1 << 32;
const COUNTED: u64 = 0xff_ffff << 32;

/// Reasons not to remember.
static OBSTACLES: AtomicU64 = AtomicU64::new(0);
/// There were two threads.
const THREADS: u64 = 1 << 32;
/// Another process uses this memory, and may for ever.
const SHARED: u64 = 1 << 33;
/// Threads may act as different users.
const DIVIDED: u64 = 1 << 34;
/// The user namespace was changed: its map may be written later.
const UNMAPPED: u64 = 1 << 35;
/// Below: how many threads wait in a `vfork`.
const VFORKS: u64 = THREADS - 1;

/// What the kernel says where a number has none in this user namespace: the administrator may have it say something
/// else.
const OVERFLOW: u32 = 65534;

const CLONE_THREAD: u64 = 0x1_0000;
const CLONE_NEWUSER: u64 = 0x1000_0000;

fn index(number: u64) -> Option<usize> {
    ASKED.iter().position(|asked| *asked == number)
}

/// Returns whether the bits that are on include this answer.
fn is_on(index: usize) -> bool {
    enabled() & if index < FIRST_USER { service::PROCESS } else { service::USER } != 0
}

/// Returns where the answer is: none where the highest byte is zero.
pub(crate) fn place(number: u64) -> Option<&'static AtomicU64> {
    index(number).filter(|index| is_on(*index)).and_then(|index| ANSWERS.get(index))
}

/// Returns what must not be for an answer to be remembered.
const fn hindrances(index: usize) -> u64 {
    match index {
        PID => VFORKS | SHARED,
        TID => VFORKS | SHARED | THREADS,
        _ => VFORKS | SHARED | DIVIDED | UNMAPPED,
    }
}

fn forget(indices: core::ops::Range<usize>) {
    for place in ANSWERS.get(indices).unwrap_or(&[]) {
        let next = |word: u64| Some(word.wrapping_add(FORGOTTEN) & COUNTED);
        let _always = place.fetch_update(SeqCst, SeqCst, next);
    }
}

/// Answers one of [`ASKED`].
pub(crate) fn step(call: &mut ServiceCall<'_>, stage: Stage) -> Next {
    const REMEMBER: u64 = 1;
    let index = index(call.number).filter(|index| is_on(*index));
    let found = index.and_then(|index| Some((index, ANSWERS.get(index)?)));
    match (stage, found) {
        (Stage::Begin, None) => Next::Perform,
        (Stage::Begin, Some((index, place))) => {
            let before = place.load(SeqCst);
            if before & VALID != 0 {
                return Next::Return(i64::from(before as u32));
            }
            let hindered = OBSTACLES.load(SeqCst) & hindrances(index) != 0;
            call.carried = [before, if hindered { 0 } else { REMEMBER }];
            Next::Perform
        }
        (Stage::Performed(result), found) => {
            let [before, remember] = call.carried;
            if let (Some((_, place)), Ok(value)) = (found, u32::try_from(result))
                && remember == REMEMBER
                && value != OVERFLOW
            {
                // Where it was forgotten meanwhile, it stays so.
                let _kept = place.compare_exchange(before, before | VALID | u64::from(value), SeqCst, SeqCst);
            }
            Next::Return(result)
        }
    }
}

/// Performs one of [`CHANGING`].
pub(crate) fn step_of_change(call: &mut ServiceCall<'_>, stage: Stage) -> Next {
    const CHANGES: u64 = 1;
    match stage {
        Stage::Begin => {
            let obstacle = match call.number {
                nr::unshare if call.arguments[0] & CLONE_NEWUSER == 0 => return Next::Perform,
                nr::unshare | nr::setns => UNMAPPED,
                // The kernel changes the calling thread only.
                _ if OBSTACLES.load(SeqCst) & (THREADS | SHARED) != 0 => DIVIDED,
                _ => 0,
            };
            OBSTACLES.fetch_or(obstacle, SeqCst);
            forget(FIRST_USER..ASKED.len());
            call.carried[0] = CHANGES;
            Next::Perform
        }
        Stage::Performed(result) => {
            if call.carried[0] == CHANGES {
                // A signal handler may have asked in between.
                forget(FIRST_USER..ASKED.len());
            }
            Next::Return(result)
        }
    }
}

/// See [`super::in_forked_child`].
pub(crate) fn in_forked_child(flags: u64) {
    let mut obstacles = OBSTACLES.load(SeqCst) & UNMAPPED;
    if flags & CLONE_NEWUSER != 0 {
        obstacles |= UNMAPPED;
    }
    OBSTACLES.store(obstacles, SeqCst);
    forget(0..ASKED.len());
}

/// See [`super::before_sharing_memory`].
pub(crate) fn before_sharing_memory(flags: u64) {
    let obstacles = if flags & CLONE_THREAD == 0 { THREADS | SHARED } else { THREADS };
    if OBSTACLES.fetch_or(obstacles, SeqCst) & obstacles != obstacles {
        forget(0..ASKED.len());
    }
}

/// See [`super::before_vfork`].
pub(crate) fn before_vfork() {
    OBSTACLES.fetch_add(1, SeqCst);
    forget(0..ASKED.len());
}

/// See [`super::after_vfork`].
pub(crate) fn after_vfork() {
    OBSTACLES.fetch_sub(1, SeqCst);
}
