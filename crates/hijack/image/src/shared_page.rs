//! The page: memory shared by the executives of tracees that could trace each other (see [`crate::users`]), and by the
//! supervisor that serves them. Beside it, only where they are used: the counters of threads, and the journal.
//!
//! System V segments, because a freshly executed program can attach one with one system call, without a descriptor
//! and without `/proc`; and because the kernel counts who is attached, which shows the supervisor when nobody is left.
//! All-zero bytes are a valid, fresh page.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::nr::CALLS;

use crate::policy::RULES;
use crate::request_slots::{CODE, Requests};
use crate::rewrite_plan::WORDS;
use crate::users::{USERS, User};

/// Buckets of a latency histogram.
pub const BUCKETS: usize = 28;
/// The first bucket holds everything below two to this many ticks; each further one twice as much.
pub const FIRST_BUCKET: u32 = 6;
/// How many verdicts about code are remembered.
pub const VERDICTS: usize = 4096;

/// The shared page's layout.
#[repr(C)]
pub struct SharedPage {
    /// The supervisor's process number.
    pub supervisor: AtomicU32,
    /// Not zero where the supervisor may trace set-user-ID programs without their losing their privilege.
    pub privileged: AtomicU32,
    /// Programs that got an executive.
    pub followed: AtomicU64,
    /// Programs that did not, by [`Unfollowed`].
    pub unfollowed: [AtomicU64; Unfollowed::COUNT],
    /// Threads and processes in which dispatch could not be armed.
    pub unarmed: AtomicU64,
    /// Sites that were rewritten, and sites that were found unfit.
    pub patched_sites: AtomicU64,
    /// Sites that reached the threshold but cannot be shown to be safe to rewrite.
    pub refused_sites: AtomicU64,
    /// What executives ask of the supervisor.
    pub requests: Requests,
    /// What rules of a policy met.
    pub rules: [RuleCount; RULES],
    /// What was called, by threads that have no counters for themselves.
    pub calls: [Calls; CALLS + 1],
}

/// Counters of threads that have some for themselves: a segment of its own, which programs have only where calls are
/// counted.
#[repr(C)]
pub struct ThreadCounters {
    /// One for each thread.
    pub blocks: [Block; BLOCKS],
}

/// How many threads have counters for themselves. Memory that was never touched takes no room.
pub const BLOCKS: usize = 64;

/// Counters to which one thread at a time adds, without lock.
#[repr(C)]
pub struct Block {
    /// [`FRESH_BLOCK`], [`USED_BLOCK`] or [`CLAIMED_BLOCK`].
    pub state: AtomicU32,
    /// As of the page.
    pub calls: [Calls; CALLS + 1],
}

/// Nobody has ever counted there.
pub const FRESH_BLOCK: u32 = 0;
/// A thread counts there.
pub const CLAIMED_BLOCK: u32 = 1;
/// Nobody does any more: what was counted stays.
pub const USED_BLOCK: u32 = 2;

/// What the supervisor said about code, by its hash. A segment of its own, which tracees attach for reading: what
/// stands here becomes code of every reader, and one tracee may have privileges that another lacks. All-zero bytes are
/// valid.
#[repr(C)]
pub struct Verdicts {
    places: [Verdict; VERDICTS],
    /// Which segments belong to whom.
    pub users: [User; USERS],
}

impl Verdicts {
    /// Returns where a verdict may be.
    pub fn places(&self, hash: u64) -> impl Iterator<Item = &Verdict> {
        // The index takes bits that the hash's mark does not.
        let first = (hash >> 8 & 0xffff_ffff) as usize;
        (0..8).filter_map(move |probe| self.places.get((first + probe) % VERDICTS))
    }
}

/// What is known of a stretch of code.
#[repr(C)]
pub struct Verdict {
    /// Its [`code_hash`], stored last; zero: this place is free.
    pub hash: AtomicU64,
    /// The code: another of the same hash can be found by who looks for it.
    pub code: [AtomicU64; CODE / 8],
    /// How to rewrite it: see [`crate::rewrite_plan::RewritePlan::decode`].
    pub plan: [AtomicU64; WORDS],
}

/// What is counted of a rule.
#[repr(C)]
pub struct RuleCount {
    /// Calls for which its conditions held.
    pub hits: AtomicU64,
    /// Calls on which it acted.
    pub acts: AtomicU64,
    /// Calls about which its handler has failed, and which were refused.
    pub failures: AtomicU64,
}

/// What is counted of one system call.
#[repr(C)]
pub struct Calls {
    /// Calls that came through dispatch.
    pub dispatched: AtomicU64,
    /// Calls that came from a rewritten site.
    pub patched: AtomicU64,
    /// Calls that returned an error. Counted only with [`crate::config::Config::timed`].
    pub errors: AtomicU64,
    /// Ticks of the time stamp counter that calls took. Counted only when timed.
    pub ticks: AtomicU64,
    /// The number of calls by duration, counted only while calls are timed.
    pub buckets: [AtomicU64; BUCKETS],
}

impl ThreadCounters {
    /// All counters that some thread has counted with.
    pub fn used(&self) -> impl Iterator<Item = &[Calls; CALLS + 1]> {
        let used = |block: &&Block| block.state.load(Relaxed) != FRESH_BLOCK;
        self.blocks.iter().filter(used).map(|block| &block.calls)
    }
}

impl SharedPage {
    /// Returns the row of a system call.
    pub fn row(&self, number: u64) -> &Calls {
        let index = usize::try_from(number).unwrap_or(CALLS).min(CALLS);
        self.calls.get(index).unwrap_or(&self.calls[CALLS])
    }
}

impl Calls {
    /// Returns the bucket for a duration.
    pub const fn bucket(ticks: u64) -> usize {
        let bits = (u64::BITS - (ticks >> FIRST_BUCKET).leading_zeros()) as usize;
        if bits < BUCKETS { bits } else { BUCKETS - 1 }
    }

    /// Enters a call that took so long and returned this, with a function that adds.
    pub fn time(&self, ticks: u64, result: i64, add: &dyn Fn(&AtomicU64, u64)) {
        if (-4095..0).contains(&result) {
            add(&self.errors, 1);
        }
        add(&self.ticks, ticks);
        add(&self.buckets[Self::bucket(ticks)], 1);
    }
}

/// Why a program runs without executive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Unfollowed {
    /// It gains privileges when executed, which being traced would deny it.
    Privileged,
    /// The supervisor may not trace the process: another one does, or it belongs to another user.
    Untraceable,
    /// It is in another process number namespace, where the supervisor cannot find it.
    Namespace,
    /// It is no x86-64 program.
    Foreign,
    /// Putting an executive under it failed: a limit on its address space, for instance.
    Failed,
    /// The supervisor is gone.
    Deserted,
    /// A filter of the program's would end it for what it does to become a tracee.
    Filtered,
}

impl Unfollowed {
    /// How many reasons there are.
    pub const COUNT: usize = 7;
    /// All of them, in the order of their counters.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Privileged,
        Self::Untraceable,
        Self::Namespace,
        Self::Foreign,
        Self::Failed,
        Self::Deserted,
        Self::Filtered,
    ];

    /// In words, for "one program was not followed: ...".
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Privileged => "it gains privileges when executed (set-user-ID or file capabilities)",
            Self::Untraceable => "the process is traced by another one, or is another user's",
            Self::Namespace => "it runs in another PID namespace",
            Self::Foreign => "it is no x86-64 program",
            Self::Failed => "its address space or limits leave no room for the executive",
            Self::Deserted => "the supervisor process is gone",
            Self::Filtered => "a filter that it has installed keeps it from the executive",
        }
    }
}

/// The key under which a verdict about code is remembered; not zero.
pub fn code_hash(code: &[u64; CODE / 8]) -> u64 {
    // FNV-1a over words, then mixed: a collision would have to be sought.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for word in code {
        hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^= hash >> 29;
    }
    hash | 1 << 63
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_double() {
        assert_eq!(Calls::bucket(0), 0);
        assert_eq!(Calls::bucket(63), 0);
        assert_eq!(Calls::bucket(64), 1);
        assert_eq!(Calls::bucket(127), 1);
        assert_eq!(Calls::bucket(128), 2);
        assert_eq!(Calls::bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn the_layout_is_what_the_gates_compute_with() {
        assert_eq!(size_of::<Calls>(), 256);
        assert_eq!(core::mem::offset_of!(Calls, patched), 8);
    }

    #[test]
    fn hashes_are_keys() {
        let a = code_hash(&[0; CODE / 8]);
        let mut other = [0; CODE / 8];
        other[3] = 1;
        assert_ne!(a, 0);
        assert_ne!(a, code_hash(&other));
    }
}
