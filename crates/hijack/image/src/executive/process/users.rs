//! The memory that is shared with the supervisor, and with those tracees that could trace this process: see
//! [`crate::users`].
//!
//! A program that executes another one, or begins, attaches what the supervisor names. A process that gives up
//! privileges has what belongs to its new identity put in the same place: nobody has to learn of another address, and
//! nothing of those with the privileges can be reached any more. Where that cannot be had, there is fresh memory in
//! that place, which nobody reads.
//!
//! Threads of a process may act as different users, and the child of a `vfork` may while it uses its parent's memory: a
//! thread that has the memory has all that is shared. So it is changed for a whole process, and not by the child of a
//! `vfork`.

use core::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::config::Config;
use crate::executive::abi::state::{ORRERY_CONFIG, counted, shared_page, verdicts};
use crate::executive::abi::supervisor::request;
use crate::executive::abi::syscall::{
    EACCES, EINVAL, address, address_mut, block_signals, call, failed, set_mask,
};
use crate::executive::abi::thread_counters;
use crate::executive::abi::tsc::ticks;
use crate::executive::services::call::unusable;
use crate::journal::Journal;
use crate::nr;
use crate::request_slots::{DEAD, USER};
use crate::shared_page::{SharedPage, ThreadCounters, Unfollowed, Verdicts};
use crate::users::{Identity, USERS, User};

const SHM_RDONLY: u64 = 0o10_000;
const SHM_REMAP: u64 = 0o40_000;
const PROT_READ_WRITE: u64 = 3;
/// `MAP_PRIVATE`, `MAP_FIXED` and `MAP_ANONYMOUS`.
const FRESH_IN_PLACE: u64 = 0x32;
const CLONE_NEWUSER: u64 = 0x1000_0000;
/// `_LINUX_CAPABILITY_VERSION_3`.
const CAPABILITIES: u32 = 0x2008_0522;

/// How many threads wait in a `vfork`.
static VFORKS: AtomicU32 = AtomicU32::new(0);
/// A thread has changed its identity meanwhile.
static LATER: AtomicU32 = AtomicU32::new(0);

/// One of a user's segments.
struct Part {
    place: &'static AtomicU64,
    length: u64,
    wanted: bool,
}

/// Returns what a user's segments are attached as, in the order of [`User::segments`].
fn parts() -> [Part; 3] {
    let Config { shared_page, counters, journal, logged, .. } = &ORRERY_CONFIG;
    let part = |place, length: usize, wanted| Part { place, length: length as u64, wanted };
    [
        part(shared_page, size_of::<SharedPage>(), true),
        part(counters, size_of::<ThreadCounters>(), counted()),
        part(journal, size_of::<Journal>(), logged.load(Relaxed) != 0),
    ]
}

/// Returns what is attached: addresses and lengths, zeros where nothing is.
pub(crate) fn attached() -> [(u64, u64); 4] {
    let [page, counters, journal] = parts().map(|part| {
        let start = part.place.load(Relaxed);
        (start, if start == 0 { 0 } else { part.length })
    });
    [page, counters, journal, (ORRERY_CONFIG.verdicts.load(Relaxed), size_of::<Verdicts>() as u64)]
}

/// Whose memory is attached.
fn current() -> Option<&'static User> {
    verdicts().users.get(ORRERY_CONFIG.user.load(Relaxed) as usize)
}

/// As whom the calling thread acts, in numbers of its own user namespace.
fn identity() -> Option<Identity> {
    let (mut users, mut groups) = ([0_u32; 3], [0_u32; 3]);
    let header = [CAPABILITIES, 0];
    // Twice effective, permitted and inheritable ones.
    let mut sets = [0_u32; 6];
    let pointers = |ids: &mut [u32; 3]| {
        let first = address_mut(ids);
        [first, first + 4, first + 8, 0, 0, 0]
    };
    // SAFETY: the kernel writes three numbers each, and two times three sets.
    let results = unsafe {
        [
            call(nr::getresuid, pointers(&mut users)),
            call(nr::getresgid, pointers(&mut groups)),
            call(nr::capget, [address(&header), address_mut(&mut sets), 0, 0, 0, 0]),
        ]
    };
    core::hint::black_box((&users, &groups, &sets));
    let capabilities = u64::from(sets[1]) | u64::from(sets[4]) << 32;
    (results == [0; 3]).then_some(Identity { users, groups, capabilities })
}

/// Attaches the memory of the user that the supervisor has named: zero, or an error, after which nothing is attached.
/// EACCES, also where the program acts as another user, unless the supervisor has `checked` that.
pub(crate) fn attach(checked: bool) -> i64 {
    // SAFETY: only adds memory, which nobody writes to.
    let found =
        unsafe { call(nr::shmat, [ORRERY_CONFIG.verdicts_segment.load(Relaxed), 0, SHM_RDONLY, 0, 0, 0]) };
    if failed(found) {
        return found;
    }
    ORRERY_CONFIG.verdicts.store(found.cast_unsigned(), Release);
    let result = attach_parts(checked);
    if failed(result) {
        detach();
    }
    result
}

fn attach_parts(checked: bool) -> i64 {
    let user = current().and_then(|user| Some((user.identity()?, user.segments()?)));
    let Some((named, segments)) = user else { return -EINVAL };
    if !identity().is_some_and(|now| now.shares_with(&named)) {
        if !checked {
            return -EACCES;
        }
        ORRERY_CONFIG.other_namespace.store(1, Relaxed);
    }
    for (part, segment) in parts().into_iter().zip(segments).filter(|(part, _)| part.wanted) {
        // SAFETY: only adds memory.
        let found = unsafe { call(nr::shmat, [u64::from(segment), 0, 0, 0, 0, 0]) };
        if failed(found) {
            return found;
        }
        part.place.store(found.cast_unsigned(), Release);
    }
    0
}

/// Detaches all, before the program begins.
pub(crate) fn detach() {
    let places = parts().map(|part| part.place);
    for place in places.into_iter().chain([&ORRERY_CONFIG.verdicts]) {
        let attached = place.swap(0, Relaxed);
        if attached != 0 {
            // SAFETY: nobody uses it.
            unsafe { call(nr::shmdt, [attached, 0, 0, 0, 0, 0]) };
        }
    }
}

/// Puts memory of the process's own in place of all that is attached, which no supervisor reads: the executive leaves, and threads may
/// be on their way through it.
pub(crate) fn leave() {
    thread_counters::leave();
    for (start, length) in attached().into_iter().filter(|(start, _)| *start != 0) {
        // SAFETY: replaces what is shared at once; the executive alone refers to it, by atomics for which zeros are valid.
        unsafe { call(nr::mmap, [start, length, PROT_READ_WRITE, FRESH_IN_PLACE, u64::MAX, 0]) };
    }
    shared_page().requests.supervisor_alive.store(DEAD, Relaxed);
}

/// A call of the thread may have changed as whom it acts.
#[inline(never)]
pub(crate) fn after_change(number: u64, [first, second, ..]: [u64; 6]) {
    let namespaces = match number {
        nr::unshare => first,
        // Zero stands for any kind of namespace.
        nr::setns if second == 0 => CLONE_NEWUSER,
        nr::setns => second,
        _ => 0,
    };
    if namespaces & CLONE_NEWUSER != 0 {
        ORRERY_CONFIG.other_namespace.store(1, Relaxed);
    } else if matches!(number, nr::unshare | nr::setns) {
        return;
    }
    follow_identity();
}

/// Has the memory be that of the process's identity.
fn follow_identity() {
    // Who had no privileges has given up none. A program that has a filter calls nothing that it does not call without.
    let home = current().and_then(User::identity).filter(|home| home.capabilities != 0);
    let Some(home) = home.filter(|_| !unusable()) else { return };
    if VFORKS.load(SeqCst) != 0 {
        LATER.store(1, SeqCst);
        return;
    }
    let comparable = ORRERY_CONFIG.other_namespace.load(Relaxed) == 0;
    if comparable && identity().is_some_and(|now| now.may_return_to(&home)) {
        return;
    }
    let mask = block_signals();
    let nonce = ticks() ^ address(&mask).rotate_left(32);
    let answer = request(USER, |request| {
        request.nonce.store(nonce, Relaxed);
        request.nonce_address.store(address(&nonce), Relaxed);
    });
    core::hint::black_box(&nonce);
    let index = (answer.unwrap_or(0) as usize).wrapping_sub(1);
    if index as u32 != ORRERY_CONFIG.user.load(Relaxed) {
        replace(index);
    }
    set_mask(mask);
}

/// Puts a user's memory, or fresh memory where there is none, in place of what is attached.
fn replace(index: usize) {
    let supervisor = shared_page().supervisor.load(Relaxed);
    let segments = verdicts().users.get(index).and_then(User::segments);
    thread_counters::leave();
    let mut alone = false;
    for (part, segment) in parts().into_iter().zip(segments.unwrap_or_default()) {
        let place = part.place.load(Relaxed);
        if place == 0 {
            continue;
        }
        // SAFETY: replaces what is shared by what is shared in the same way, at once; the executive alone refers to it,
        // by atomics for which any bytes are valid.
        unsafe {
            if !alone {
                let unknown = segments.is_none();
                alone = unknown || failed(call(nr::shmat, [u64::from(segment), place, SHM_REMAP, 0, 0, 0]));
                if alone {
                    // In the memory that is left: nobody reads the other.
                    shared_page().unfollowed[Unfollowed::Failed as usize].fetch_add(1, Relaxed);
                }
            }
            if alone {
                call(nr::mmap, [place, part.length, PROT_READ_WRITE, FRESH_IN_PLACE, u64::MAX, 0]);
            }
        }
    }
    ORRERY_CONFIG.user.store(if alone { USERS } else { index } as u32, Relaxed);
    if alone {
        shared_page().requests.supervisor_alive.store(DEAD, Relaxed);
        shared_page().supervisor.store(supervisor, Relaxed);
    }
    thread_counters::claim();
}

/// In the child of a fork.
pub(crate) fn in_forked_child(flags: u64) {
    VFORKS.store(0, Relaxed);
    let later = LATER.swap(0, Relaxed) != 0;
    if flags & CLONE_NEWUSER != 0 {
        ORRERY_CONFIG.other_namespace.store(1, Relaxed);
    }
    if later || flags & CLONE_NEWUSER != 0 {
        follow_identity();
    }
}

/// A process is about to begin that uses this memory while this thread waits.
pub(crate) fn before_vfork() {
    VFORKS.fetch_add(1, SeqCst);
}

/// That process does not use it any more, or was not made.
pub(crate) fn after_vfork() {
    if VFORKS.fetch_sub(1, SeqCst) == 1 && LATER.swap(0, SeqCst) != 0 {
        follow_identity();
    }
}
