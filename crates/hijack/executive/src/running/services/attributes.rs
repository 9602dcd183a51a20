//! How a thread is scheduled while it sleeps, so that it gets a CPU when it wakes.
//!
//! A thread that wakes has to be chosen before those that run. What there is for that, best first:
//!
//! | how | who may | what the kernel makes of it |
//! |---|---|---|
//! | `SCHED_FIFO` | `CAP_SYS_NICE`, or `RLIMIT_RTPRIO` above zero | it runs at once |
//! | nice -20 | `CAP_SYS_NICE`, or `RLIMIT_NICE` | it runs before those of its group with less weight |
//! | a slice of 0.1 ms | everybody | EEVDF (from Linux 6.12 on) lets it preempt those with longer slices |
//!
//! The first two are in force only from before the sleep until it is over; the slice is left as it is then, since it changes
//! nothing about how much of the CPU the thread gets. `sched_setattr(2)`.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::super::kernel::{address, address_mut, call, failed};
use super::enabled;
use crate::config::service;
use crate::numbers;

/// `struct sched_attr`, in its first version.
#[repr(C)]
#[derive(Clone, Copy)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    /// Nanoseconds: for threads without real-time priority their slice.
    runtime: u64,
    deadline: u64,
    period: u64,
}

const OTHER: u32 = 0;
const FIFO: u32 = 1;
const BATCH: u32 = 3;
/// What the kernel takes for the shortest slice.
const SLICE: u64 = 100_000;
const HIGHEST_NICE: i32 = -20;
const SIZE: u32 = size_of::<Attributes>() as u32;

/// Ways that were found to be forbidden to this process: not tried again.
static FORBIDDEN: AtomicU32 = AtomicU32::new(0);
const FORBIDDEN_FIFO: u32 = 1;
const FORBIDDEN_NICE: u32 = 2;
const FORBIDDEN_SLICE: u32 = 4;

/// How many threads of a process can have a higher priority at a time; further ones sleep with what everybody may have.
const PREFERRED: usize = 64;

/// A thread with a higher priority than the program gave it.
struct Preferred {
    /// Zero where free.
    thread: AtomicU32,
    /// Its policy, and above that the nice value.
    own: AtomicU64,
}

static THREADS: [Preferred; PREFERRED] =
    [const { Preferred { thread: AtomicU32::new(0), own: AtomicU64::new(0) } }; PREFERRED];

fn current() -> Option<Attributes> {
    let mut attributes =
        Attributes { size: 0, policy: 0, flags: 0, nice: 0, priority: 0, runtime: 0, deadline: 0, period: 0 };
    // SAFETY: the kernel writes so many bytes.
    let result = unsafe {
        let size = u64::from(SIZE);
        call(numbers::sched_getattr, [0, address_mut(&mut attributes), size, 0, 0, 0])
    };
    attributes.size = SIZE;
    (!failed(result)).then_some(attributes)
}

fn set(attributes: &Attributes) -> bool {
    // SAFETY: the kernel reads so many bytes; the calling thread's scheduling is what the service is about.
    !failed(unsafe { call(numbers::sched_setattr, [0, address(attributes), 0, 0, 0, 0]) })
}

/// Tries one way, unless it is known to be forbidden.
fn try_way(way: u32, attributes: &Attributes) -> bool {
    if FORBIDDEN.load(Relaxed) & way != 0 {
        return false;
    }
    let done = set(attributes);
    if !done {
        FORBIDDEN.fetch_or(way, Relaxed);
    }
    done
}

fn this_thread() -> u32 {
    // SAFETY: asks for a number.
    unsafe { call(numbers::gettid, [0; 6]) as u32 }
}

/// Prepares the calling thread for waking in time. Threads that have a real-time priority of their own, or asked to run
/// only when nobody else does, are left alone.
pub(crate) fn prefer() {
    restore();
    let Some(own) = current().filter(|own| own.policy == OTHER || own.policy == BATCH) else { return };
    if enabled() & service::REALTIME != 0 && FORBIDDEN.load(Relaxed) & FORBIDDEN_NICE == 0 {
        let thread = this_thread();
        let free = |place: &&Preferred| place.thread.compare_exchange(0, thread, Relaxed, Relaxed).is_ok();
        if let Some(place) = THREADS.iter().find(free) {
            place.own.store(u64::from(own.policy) | u64::from(own.nice as u32) << 32, Relaxed);
            let first = Attributes { policy: FIFO, priority: 1, runtime: 0, nice: 0, ..own };
            let nice = Attributes { nice: HIGHEST_NICE, runtime: SLICE, ..own };
            if try_way(FORBIDDEN_FIFO, &first) || try_way(FORBIDDEN_NICE, &nice) {
                return;
            }
            place.thread.store(0, Relaxed);
        }
    }
    if own.runtime != SLICE {
        try_way(FORBIDDEN_SLICE, &Attributes { runtime: SLICE, ..own });
    }
}

/// Puts in force what was before. Also called where the priority would be handed on: a handler of the program may leave a
/// sleep without returning to it, or make a process in the midst of it.
pub(crate) fn restore() {
    if enabled() & service::REALTIME == 0 {
        return;
    }
    let thread = this_thread();
    let Some(place) = THREADS.iter().find(|place| place.thread.load(Relaxed) == thread) else { return };
    let own = place.own.load(Relaxed);
    if let Some(now) = current() {
        let (policy, nice) = (own as u32, (own >> 32) as i32);
        set(&Attributes { policy, nice, priority: 0, runtime: SLICE, ..now });
    }
    place.thread.store(0, Relaxed);
}

/// The other threads of the parent are not in a forked child.
pub(crate) fn forked() {
    for place in &THREADS {
        place.thread.store(0, Relaxed);
    }
}
