//! Which context each descriptor of a shared table belongs to: see [`crate::descriptors::shared_table`].

use std::os::fd::{IntoRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering::SeqCst};

use orrery_domain::SharedMemory;
use rustix::io::Errno;
use rustix::process::Pid;
use syscalls::{Sysno, syscall};

use crate::error::{Error, Result};
use crate::peers::socket::inode;

/// How many numbers are noted.
const NUMBERS: usize = 1 << 16;

/// How many contexts share one table at a time.
const MEMBERS: usize = 4096;
/// Of a member that is about to be.
const RESERVED: u32 = u32::MAX;
pub(super) const SIZE: usize = NUMBERS * size_of::<AtomicU16>() + MEMBERS * size_of::<AtomicU32>();

/// Whose which number is; 0 where it is the program's. Behind it, the process of each member; 0 for none.
#[derive(Debug)]
pub(super) struct Owners(pub(super) SharedMemory);

impl Owners {
    fn all(&self) -> &[AtomicU16] {
        // SAFETY: the memory is page-aligned, zeroed, of that size, and holds nothing but atomics.
        unsafe { std::slice::from_raw_parts(self.0.start().as_ptr().cast(), NUMBERS) }
    }

    pub(super) fn of(&self, number: RawFd) -> Option<&AtomicU16> {
        self.all().get(usize::try_from(number).ok()?)
    }

    fn processes(&self) -> &[AtomicU32] {
        // SAFETY: the memory is page-aligned, zeroed and of that size; behind the numbers it holds these
        // atomics only.
        unsafe {
            let start = self.0.start().as_ptr().add(NUMBERS * size_of::<AtomicU16>());
            std::slice::from_raw_parts(start.cast(), MEMBERS)
        }
    }

    /// Returns who shares it next.
    pub(super) fn reserve(&self) -> Result<u16> {
        let free = |process: &AtomicU32| process.compare_exchange(0, RESERVED, SeqCst, SeqCst).is_ok();
        let found = self.processes().iter().skip(1).position(free);
        found.and_then(|found| u16::try_from(found + 1).ok()).ok_or(Error::Full { most: MEMBERS })
    }

    /// Notes the calling process as that of a member.
    pub(super) fn join(&self, who: u16) {
        let own = rustix::process::getpid().as_raw_pid().unsigned_abs();
        self.processes()[usize::from(who) % MEMBERS].store(own, SeqCst);
    }

    /// The members whose processes are no more.
    pub(super) fn dead(&self) -> impl Iterator<Item = u16> {
        let is_dead = |process: u32| {
            let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
            pid.is_some_and(|pid| rustix::process::test_kill_process(pid) == Err(Errno::SRCH))
        };
        let all = self.processes().iter().enumerate();
        all.filter(move |(_, process)| {
            !matches!(process.load(SeqCst), 0 | RESERVED) && is_dead(process.load(SeqCst))
        })
        .filter_map(|(who, _)| u16::try_from(who).ok())
    }

    /// The numbers whose owner is as wanted.
    pub(super) fn numbers(&self, wanted: impl Fn(u16) -> bool) -> impl Iterator<Item = RawFd> {
        let all = self.all().iter().enumerate();
        all.filter(move |(_, owner)| wanted(owner.load(SeqCst)))
            .filter_map(|(number, _)| RawFd::try_from(number).ok())
    }

    /// Closes what a dead member has left.
    pub(super) fn close_all_of(&self, whose: u16) {
        for number in self.numbers(|owner| owner == whose) {
            if let Some(owner) = self.of(number) {
                owner.store(0, SeqCst);
            }
            close(number);
        }
        self.processes()[usize::from(whose) % MEMBERS].store(0, SeqCst);
    }
}

/// A table that a context shares with others.
#[derive(Debug)]
pub(crate) struct SharedTable {
    pub(super) owners: Owners,
    /// Who we are there, and who a new context is.
    pub(super) me: u16,
    pub(super) next: u16,
    /// What we said last.
    pub(super) said: Vec<RawFd>,
    pub(super) members: Vec<Member>,
}

/// A context that we created to share it.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) who: u16,
    pub(super) pidfd: Rc<OwnedFd>,
    /// Our end of the name that it has of us.
    pub(super) grant: usize,
}

/// The ends that are made for a new context before it is there, by which it lives if it shares our table.
#[derive(Debug)]
pub(crate) struct InitialFds([(RawFd, Option<u64>); 2]);

impl InitialFds {
    /// Leaves them to it.
    pub(crate) fn of(ends: [OwnedFd; 2]) -> Self {
        Self(ends.map(|end| {
            let number = end.into_raw_fd();
            (number, inode(number))
        }))
    }

    /// It never lived: closes what it left of them.
    pub(crate) fn close_remaining(self) {
        for (number, inode_then) in self.0 {
            if inode_then.is_some() && inode(number) == inode_then {
                close(number);
            }
        }
    }
}

pub(super) fn close(number: RawFd) {
    // SAFETY: the library's, of a context that is dead or another process by now, which may have closed it last of all.
    let _ = unsafe { syscall!(Sysno::close, number) };
}

impl SharedTable {
    /// Returns the numbers by which it knows its members.
    pub(crate) fn members(&self) -> impl Iterator<Item = &OwnedFd> {
        self.members.iter().map(|member| &*member.pidfd)
    }
}
