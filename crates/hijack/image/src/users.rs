//! Whose memory is shared with whom: programs that could trace each other share, others do not.
//!
//! What executives count, log and ask is in shared memory. A program that can read and write that reads what others have logged, and
//! changes what they ask. So each [`Identity`] among the tracees has memory of its own: a
//! [`SharedPage`](crate::shared_page::SharedPage), counters and a journal. Which segments these are stands in the [`User`]s, which only the supervisor writes.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// How many identities the tracees of a run may have.
pub const USERS: usize = 64;

const CAP_SETGID: u32 = 6;
const CAP_SETUID: u32 = 7;
const CAP_SYS_PTRACE: u32 = 19;

/// As whom a process acts, as far as it matters for who may trace it: see ptrace(2), "Ptrace access mode checking".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Real, effective and saved user.
    pub users: [u32; 3],
    /// Real, effective and saved group.
    pub groups: [u32; 3],
    /// The permitted capabilities, in the supervisor's user namespace; in another one there are none that matter here.
    pub capabilities: u64,
}

impl Identity {
    const fn may(&self, capability: u32) -> bool {
        self.capabilities >> capability & 1 != 0
    }

    /// Returns whether both share memory: they could trace each other.
    pub fn shares_with(&self, other: &Self) -> bool {
        self == other || self.may(CAP_SYS_PTRACE) && other.may(CAP_SYS_PTRACE)
    }

    /// Returns whether a process that acts like this may become `home` again, so that it has not given up what it had
    /// there.
    pub fn may_return_to(&self, home: &Self) -> bool {
        if home.may(CAP_SYS_PTRACE) {
            return self.may(CAP_SYS_PTRACE);
        }
        let within = |home: &[u32; 3], now: &[u32; 3]| home.iter().all(|id| now.contains(id));
        home.capabilities & !self.capabilities == 0
            && (within(&home.users, &self.users) || self.may(CAP_SETUID))
            && (within(&home.groups, &self.groups) || self.may(CAP_SETGID))
    }
}

/// One identity, and the segments that those who have it share. All-zero bytes: nobody yet.
#[repr(C)]
pub struct User {
    /// Stored last; zero: nobody.
    ready: AtomicU32,
    /// The segments' IDs: page, counters, journal.
    segments: [AtomicU32; 3],
    users: [AtomicU32; 3],
    groups: [AtomicU32; 3],
    capabilities: AtomicU64,
}

impl User {
    /// Enters an identity and its segments: page, counters, journal.
    pub fn enter(&self, identity: &Identity, segments: [u32; 3]) {
        let fill = |places: &[AtomicU32; 3], values: [u32; 3]| {
            for (place, value) in places.iter().zip(values) {
                place.store(value, Relaxed);
            }
        };
        fill(&self.segments, segments);
        fill(&self.users, identity.users);
        fill(&self.groups, identity.groups);
        self.capabilities.store(identity.capabilities, Relaxed);
        self.ready.store(1, Release);
    }

    /// Returns the identity, if there is one.
    pub fn identity(&self) -> Option<Identity> {
        let values = |places: &[AtomicU32; 3]| [0, 1, 2].map(|index: usize| places[index].load(Relaxed));
        (self.ready.load(Acquire) != 0).then(|| Identity {
            users: values(&self.users),
            groups: values(&self.groups),
            capabilities: self.capabilities.load(Relaxed),
        })
    }

    /// Returns the IDs of the segments, if there are any: page, counters, journal.
    pub fn segments(&self) -> Option<[u32; 3]> {
        (self.ready.load(Acquire) != 0)
            .then(|| [0, 1, 2].map(|index: usize| self.segments[index].load(Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 = (1 << 41) - 1;

    fn identity(users: [u32; 3], capabilities: u64) -> Identity {
        Identity { users, groups: users, capabilities }
    }

    #[test]
    fn the_superuser_shares_with_who_may_trace_all() {
        let root = identity([0; 3], ALL);
        assert!(root.shares_with(&Identity { groups: [5; 3], ..root }));
        assert!(root.shares_with(&identity([7; 3], 1 << CAP_SYS_PTRACE)));
        assert!(!root.shares_with(&identity([0; 3], 1 << CAP_SETUID)));
        assert!(!root.shares_with(&identity([7; 3], 0)));
    }

    #[test]
    fn who_gives_up_what_it_had_does_not_return() {
        let root = identity([0; 3], ALL);
        assert!(identity([0, 7, 0], ALL).may_return_to(&root), "seteuid(2) keeps the rest");
        assert!(!identity([7; 3], 0).may_return_to(&root));
        assert!(!identity([7; 3], 1 << CAP_SETUID).may_return_to(&root));
        // The superuser of a container.
        let contained = identity([0; 3], ALL & !(1 << CAP_SYS_PTRACE));
        assert!(Identity { groups: [5; 3], ..contained }.may_return_to(&contained));
        assert!(!identity([7; 3], 0).may_return_to(&contained));
        let ordinary = identity([7; 3], 0);
        assert!(ordinary.may_return_to(&ordinary));
        assert!(
            identity([7, 0, 0], 0).may_return_to(&ordinary) && !identity([0; 3], 0).may_return_to(&ordinary)
        );
    }
}
