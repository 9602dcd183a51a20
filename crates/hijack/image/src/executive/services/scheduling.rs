//! How a thread that sleeps is scheduled, so that it gets a CPU when it wakes.
//!
//! A thread that wakes has to be chosen before those that run. What there is for that, best first:
//!
//! | how | who may | what the kernel makes of it |
//! |---|---|---|
//! | `SCHED_FIFO` | `CAP_SYS_NICE`, or `RLIMIT_RTPRIO` above zero | it runs at once |
//! | nice -20 | `CAP_SYS_NICE`, or `RLIMIT_NICE` | it outweighs the others of its group |
//! | a slice of 0.1 ms | everybody | EEVDF (from Linux 6.12 on) lets it preempt those with longer slices |
//!
//! The slice changes nothing about how much of the CPU a thread gets, so it is left as it is after the sleep. The others do,
//! and are given on demand only. They are kept between sleeps: who gave them up when it wakes would have to wait its turn
//! just then. So a thread loses them at the next sleep before which it was busy for more than a quarter of the time, and
//! does not hand them on to threads, processes and programs that it makes. One that never sleeps again is held back by the
//! kernel's limit for real-time threads alone (`kernel.sched_rt_runtime_us`). `sched_setattr(2)`, `sched(7)`.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::config::service;
use crate::executive::abi::syscall::{address, address_mut, call, failed};
use crate::executive::services::call::enabled;
use crate::nr;

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
const ROUND_ROBIN: u32 = 2;
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
const BOOSTED: usize = 64;

/// A thread that slept.
struct Sleeper {
    /// The sleeping thread; zero if the slot is free.
    thread: AtomicU32,
    /// Not zero while it has a higher priority than the program gave it.
    boosted: AtomicU32,
    /// Its own policy, and above that its nice value.
    own: AtomicU64,
    /// When it went to sleep, and how much time of a CPU it had used by then: nanoseconds.
    slept: AtomicU64,
    used: AtomicU64,
}

static SLEEPERS: [Sleeper; BOOSTED] = [const {
    Sleeper {
        thread: AtomicU32::new(0),
        boosted: AtomicU32::new(0),
        own: AtomicU64::new(0),
        slept: AtomicU64::new(0),
        used: AtomicU64::new(0),
    }
}; BOOSTED];

const MONOTONIC: u64 = 1;
const THREAD_CPU: u64 = 3;

fn current() -> Option<Attributes> {
    let mut attributes =
        Attributes { size: 0, policy: 0, flags: 0, nice: 0, priority: 0, runtime: 0, deadline: 0, period: 0 };
    // SAFETY: the kernel writes so many bytes.
    let result = unsafe {
        let size = u64::from(SIZE);
        call(nr::sched_getattr, [0, address_mut(&mut attributes), size, 0, 0, 0])
    };
    attributes.size = SIZE;
    (!failed(result)).then_some(attributes)
}

fn set(attributes: &Attributes) -> bool {
    // SAFETY: the kernel reads so many bytes; the calling thread's scheduling is what the service is about.
    !failed(unsafe { call(nr::sched_setattr, [0, address(attributes), 0, 0, 0, 0]) })
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

fn nanoseconds(clock: u64) -> u64 {
    let mut time = [0_u64; 2];
    // SAFETY: the kernel writes a `struct timespec`.
    unsafe { call(nr::clock_gettime, [clock, address_mut(&mut time), 0, 0, 0, 0]) };
    time[0].wrapping_mul(1_000_000_000).wrapping_add(time[1])
}

fn this_thread() -> u32 {
    // SAFETY: the call takes no pointer.
    unsafe { call(nr::gettid, [0; 6]) as u32 }
}

impl Sleeper {
    fn find(thread: u32) -> Option<&'static Self> {
        SLEEPERS.iter().find(|sleeper| sleeper.thread.load(Relaxed) == thread)
    }

    /// A place for this thread: its own, a free one, or that of a thread which is gone.
    fn of(thread: u32) -> Option<&'static Self> {
        // SAFETY: the call takes no pointer.
        let own = unsafe { call(nr::getpid, [0; 6]).cast_unsigned() };
        // SAFETY: signal 0 asks whether there is such a thread.
        let gone = |other: u32| failed(unsafe { call(nr::tgkill, [own, u64::from(other), 0, 0, 0, 0]) });
        let take = |sleeper: &&Self, from: u32| {
            let taken = sleeper.thread.compare_exchange(from, thread, Relaxed, Relaxed).is_ok();
            if taken {
                sleeper.boosted.store(0, Relaxed);
                sleeper.slept.store(0, Relaxed);
            }
            taken
        };
        Self::find(thread).or_else(|| SLEEPERS.iter().find(|sleeper| take(sleeper, 0))).or_else(|| {
            SLEEPERS.iter().find(|sleeper| {
                let other = sleeper.thread.load(Relaxed);
                gone(other) && take(sleeper, other)
            })
        })
    }

    /// Returns whether the thread had little to do since its last sleep began. At its first one that is not known:
    /// then it had.
    fn is_idle(&self) -> bool {
        let (now, used) = (nanoseconds(MONOTONIC), nanoseconds(THREAD_CPU));
        let slept = self.slept.swap(now, Relaxed);
        let before = self.used.swap(used, Relaxed);
        slept == 0 || used.saturating_sub(before) <= now.saturating_sub(slept) / 4
    }

    /// Gives the thread what the program gave it.
    fn restore(&self) {
        if self.boosted.swap(0, Relaxed) == 0 {
            return;
        }
        let own = self.own.load(Relaxed);
        if let Some(now) = current() {
            let (policy, nice) = (own as u32, (own >> 32) as i32);
            set(&Attributes { policy, nice, priority: 0, runtime: SLICE, ..now });
        }
    }
}

/// Prepares the calling thread for waking in time. Threads that have a real-time priority of their own, or asked to run
/// only when nobody else does, are left alone.
pub(crate) fn boost() {
    let may_be_first = enabled() & service::REALTIME != 0 && FORBIDDEN.load(Relaxed) & FORBIDDEN_NICE == 0;
    let sleeper = if may_be_first { Sleeper::of(this_thread()) } else { None };
    if let Some(sleeper) = sleeper {
        let idle = sleeper.is_idle();
        if sleeper.boosted.load(Relaxed) != 0 {
            if !idle {
                sleeper.restore();
            }
            return;
        }
        if idle && let Some(own) = own_attributes() {
            let first = Attributes { policy: FIFO, priority: 1, runtime: 0, nice: 0, ..own };
            let nice = Attributes { nice: HIGHEST_NICE, runtime: SLICE, ..own };
            sleeper.own.store(u64::from(own.policy) | u64::from(own.nice as u32) << 32, Relaxed);
            if try_way(FORBIDDEN_FIFO, &first) || try_way(FORBIDDEN_NICE, &nice) {
                sleeper.boosted.store(1, Relaxed);
                return;
            }
        }
    }
    if let Some(own) = own_attributes().filter(|own| own.runtime != SLICE) {
        try_way(FORBIDDEN_SLICE, &Attributes { runtime: SLICE, ..own });
    }
}

/// Returns what the program gave the thread, if that may be changed.
fn own_attributes() -> Option<Attributes> {
    current().filter(|own| own.policy == OTHER || own.policy == BATCH)
}

/// The policies in which `sched_yield` gives up nothing but the turn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RealtimePolicy {
    /// `SCHED_FIFO`
    Fifo,
    /// `SCHED_RR`
    RoundRobin,
}

impl RealtimePolicy {
    /// Returns that of the calling thread, if it has one.
    pub(crate) fn current() -> Option<Self> {
        /// `SCHED_RESET_ON_FORK`, which is added to the policy.
        const RESET_ON_FORK: i64 = 0x4000_0000;
        // SAFETY: the call takes no pointer.
        let policy = unsafe { call(nr::sched_getscheduler, [0; 6]) };
        match policy & !RESET_ON_FORK {
            _ if failed(policy) => None,
            policy if policy == i64::from(FIFO) => Some(Self::Fifo),
            policy if policy == i64::from(ROUND_ROBIN) => Some(Self::RoundRobin),
            _ => None,
        }
    }
}

/// The calling thread is about to make a thread or a process, or to execute a program: these are to be as the program
/// would have them.
pub(crate) fn before_clone_or_exec() {
    if enabled() & service::REALTIME != 0
        && let Some(sleeper) = Sleeper::find(this_thread())
    {
        sleeper.restore();
    }
}

/// The threads of the parent are not in a forked child.
pub(crate) fn in_forked_child() {
    for sleeper in &SLEEPERS {
        sleeper.thread.store(0, Relaxed);
    }
}
