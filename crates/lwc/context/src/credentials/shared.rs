//! Credentials that contexts have in common (`LWC_SHARE` of credentials, section 3.3 of the paper).
//!
//! A kernel has them per thread, and no two processes have the same. So each of those who share them says what it
//! changed before it releases control, in memory that those who share them share, and each takes on what was said
//! before it goes on. Since a thread is in one context at a time, it meets the same credentials in all of them. A
//! context that shares them could reach by itself all that the others did step by step: users and groups are chosen
//! among those that one has.
//!
//! Shared are real, effective and saved user and group, the list of groups, and the capability sets (permitted,
//! effective, inheritable: those of a thread, as the kernel has them). **One that cannot take on what the others have
//! ends**, and with the root the program: what was given up is not to be there still.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use orrery_domain::{Moment, SharedMemory};
use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::error::Result;
use crate::exit::kill_self;
use crate::threads::per_thread::entry;

/// How many groups a process is in at most (`NGROUPS_MAX`).
const MOST_GROUPS: usize = 65_536;
/// For how long what is said may be half said.
const PATIENCE: Duration = Duration::from_secs(2);
/// Of capget(2): two words for each set.
const VERSION: u32 = 0x2008_0522;

/// Who a thread is, as far as it is shared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Credentials {
    /// The real, effective and saved user IDs.
    users: [u32; 3],
    groups: [u32; 3],
    /// The effective, permitted and inheritable capabilities.
    capabilities: [u64; 3],
    others: Vec<u32>,
}

/// The same in shared memory. An odd number of changes: one is under way.
#[repr(C)]
struct Record {
    changes: AtomicU32,
    count: AtomicU32,
    users: [AtomicU32; 3],
    groups: [AtomicU32; 3],
    capabilities: [AtomicU64; 3],
    others: [AtomicU32; MOST_GROUPS],
}

/// Credentials that a context shares with others.
#[derive(Clone, Debug)]
pub(crate) struct SharedCredentials {
    memory: Arc<SharedMemory>,
    /// What each logical thread of ours has taken on, or said.
    seen: Vec<Option<u32>>,
    known: Vec<Option<Credentials>>,
}

impl SharedCredentials {
    pub(crate) fn new() -> Result<Self> {
        let memory = Arc::new(SharedMemory::new("orrery-credentials", size_of::<Record>())?);
        Ok(Self { memory, seen: Vec::new(), known: Vec::new() })
    }

    fn record(&self) -> &Record {
        // SAFETY: the memory is page-aligned, large enough, zeroed, and holds nothing but atomics.
        unsafe { self.memory.start().cast::<Record>().as_ref() }
    }
}

impl Record {
    /// Says what one has, and after which change that is.
    fn publish(&self, own: &Credentials) -> Option<u32> {
        let end = Moment::now().after(PATIENCE);
        let before = loop {
            let changes = self.changes.load(SeqCst);
            let free = changes.is_multiple_of(2);
            if free && self.changes.compare_exchange(changes, changes + 1, SeqCst, SeqCst).is_ok() {
                break changes;
            }
            if Moment::now() >= end {
                return None;
            }
            rustix::thread::sched_yield();
        };
        let words = self.users.iter().zip(own.users).chain(self.groups.iter().zip(own.groups));
        words.for_each(|(place, word)| place.store(word, SeqCst));
        self.capabilities.iter().zip(own.capabilities).for_each(|(place, set)| place.store(set, SeqCst));
        self.others.iter().zip(&own.others).for_each(|(place, group)| place.store(*group, SeqCst));
        self.count.store(u32::try_from(own.others.len()).unwrap_or(0), SeqCst);
        let after = before.wrapping_add(2);
        self.changes.store(after, SeqCst);
        Some(after)
    }

    /// Returns what was said last, and after which change that is.
    fn hear(&self) -> Option<(u32, Credentials)> {
        let end = Moment::now().after(PATIENCE);
        loop {
            let before = self.changes.load(SeqCst);
            let words = |places: &[AtomicU32; 3]| [0, 1, 2].map(|index: usize| places[index].load(SeqCst));
            let count = (self.count.load(SeqCst) as usize).min(MOST_GROUPS);
            let said = Credentials {
                users: words(&self.users),
                groups: words(&self.groups),
                capabilities: [0, 1, 2].map(|index: usize| self.capabilities[index].load(SeqCst)),
                others: self.others[..count].iter().map(|group| group.load(SeqCst)).collect(),
            };
            if before.is_multiple_of(2) && self.changes.load(SeqCst) == before {
                return Some((before, said));
            }
            if Moment::now() >= end {
                return None;
            }
            rustix::thread::sched_yield();
        }
    }
}

impl SharedCredentials {
    /// Publishes what the calling thread has, if that is news.
    pub(crate) fn publish(&mut self, logical_thread: u32) {
        let Ok(own) = Credentials::own() else { kill_self() };
        let known = entry(&mut self.known, logical_thread);
        if known.as_ref() == Some(&own) {
            return;
        }
        let first = known.is_none() && self.record().changes.load(SeqCst) != 0;
        *entry(&mut self.known, logical_thread) = Some(own.clone());
        // A thread that has just begun has what the others had when it did: that is no news.
        if !first {
            let Some(after) = self.record().publish(&own) else { kill_self() };
            *entry(&mut self.seen, logical_thread) = Some(after);
        }
    }

    /// Takes on what the others have published. What cannot be taken on ends this context.
    pub(crate) fn follow(&mut self, logical_thread: u32) {
        let seen = *entry(&mut self.seen, logical_thread);
        if seen == Some(self.record().changes.load(SeqCst)) {
            return;
        }
        let (Some((after, said)), Ok(own)) = (self.record().hear(), Credentials::own()) else { kill_self() };
        let taken = if own == said { Ok(()) } else { said.take_on(&own) };
        if taken.is_err() || Credentials::own().as_ref() != Ok(&said) {
            kill_self();
        }
        *entry(&mut self.seen, logical_thread) = Some(after);
        *entry(&mut self.known, logical_thread) = Some(said);
    }
}

impl Credentials {
    /// Returns the calling thread's.
    fn own() -> rustix::io::Result<Self> {
        let (mut users, mut groups) = ([0_u32; 3], [0_u32; 3]);
        let [real, effective, saved] = &mut users;
        // SAFETY: the kernel writes one number to each of three variables of this frame.
        checked(unsafe { syscall!(Sysno::getresuid, &raw mut *real, &raw mut *effective, &raw mut *saved) })?;
        let [real, effective, saved] = &mut groups;
        // SAFETY: the kernel writes three numbers into three variables of this frame.
        checked(unsafe { syscall!(Sysno::getresgid, &raw mut *real, &raw mut *effective, &raw mut *saved) })?;
        // SAFETY: a size of 0 asks for the count.
        let count = checked(unsafe { syscall!(Sysno::getgroups, 0, 0) })?;
        let mut others = vec![0_u32; count];
        // SAFETY: the kernel writes that many numbers at most.
        let count = checked(unsafe { syscall!(Sysno::getgroups, count, others.as_mut_ptr()) })?;
        others.truncate(count);
        let mut sets = [[0_u32; 3]; 2];
        let header = [VERSION, 0];
        // SAFETY: the kernel reads the header and writes two words for each set.
        checked(unsafe { syscall!(Sysno::capget, header.as_ptr(), sets.as_mut_ptr()) })?;
        let capabilities =
            [0, 1, 2].map(|set: usize| u64::from(sets[1][set]) << 32 | u64::from(sets[0][set]));
        Ok(Self { users, groups, capabilities, others })
    }

    /// Makes the calling thread, which is `own`, have these; of users and groups, all threads of its process.
    fn take_on(&self, own: &Self) -> rustix::io::Result<()> {
        let [real, effective, saved] = self.users;
        let keeps = self.capabilities[1] != 0 && !self.users.contains(&0) && own.users.contains(&0);
        if keeps {
            rustix::thread::set_keep_capabilities(true)?;
        }
        // The C library's own calls, for they concern all threads.
        if self.others != own.others {
            // SAFETY: the kernel reads as many numbers as the list has, which outlives the call.
            called(unsafe { libc::setgroups(self.others.len(), self.others.as_ptr()) })?;
        }
        if self.groups != own.groups {
            let [real, effective, saved] = self.groups;
            // SAFETY: the call takes numbers only; a change of identity invalidates no memory.
            called(unsafe { libc::setresgid(real, effective, saved) })?;
        }
        if self.users != own.users {
            // SAFETY: takes numbers; a change of identity invalidates no memory.
            called(unsafe { libc::setresuid(real, effective, saved) })?;
        }
        if keeps {
            rustix::thread::set_keep_capabilities(false)?;
        }
        if Self::own()?.capabilities != self.capabilities {
            let half = |set: u64, index: u32| u32::try_from(set >> (32 * index) & 0xffff_ffff).unwrap_or(0);
            let sets = [0, 1].map(|index| self.capabilities.map(|set| half(set, index)));
            let header = [VERSION, 0];
            // SAFETY: the kernel reads the header and two words for each set.
            checked(unsafe { syscall!(Sysno::capset, header.as_ptr(), sets.as_ptr()) })?;
        }
        Ok(())
    }
}

fn checked(result: std::result::Result<usize, syscalls::Errno>) -> rustix::io::Result<usize> {
    result.map_err(|errno| Errno::from_raw_os_error(errno.into_raw()))
}

fn called(result: i32) -> rustix::io::Result<()> {
    if result == 0 { Ok(()) } else { Err(orrery_domain::watch::last_errno()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard() {
        let shared_credentials = SharedCredentials::new().unwrap();
        let said = Credentials {
            users: [1, 2, 3],
            groups: [4, 5, 6],
            capabilities: [7, u64::MAX, 8],
            others: (10..1000).collect(),
        };
        assert_eq!(shared_credentials.record().hear(), Some((0, Credentials::default())));
        assert_eq!(shared_credentials.record().publish(&said), Some(2));
        assert_eq!(shared_credentials.record().hear(), Some((2, said.clone())));
        let fewer = Credentials { others: vec![3], ..said };
        assert_eq!(shared_credentials.record().publish(&fewer), Some(4));
        assert_eq!(shared_credentials.record().hear(), Some((4, fewer)));
        assert_eq!(Credentials::own(), Credentials::own());
    }
}
