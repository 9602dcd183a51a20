//! A table of descriptors that contexts have in common (`LWC_SHARE` of descriptors, section 5.2 of the paper): the kernel's
//! own, by CLONE_FILES in clone(2). What one opens or closes is open or closed in the other, at once; kcmp(2) says that they
//! are one. A part of a table cannot be shared.
//!
//! The library's own descriptors lie in there, too, those of all who share it: ends of names, pidfds and so on. None may
//! outlive its owner, for others would hear of its end by them, and a new context with a table of its own must have none but
//! its creator's. So each says which numbers are its own, in memory that those who share the table share: before it lets
//! go of control, and before it creates a context. The others, when they next create or close something, close what
//! one that is dead has left. Numbers of 65536 and above are not noted.

use core::sync::atomic::{AtomicU16, AtomicU32, Ordering::SeqCst};
use std::os::fd::{AsFd, IntoRawFd, OwnedFd, RawFd};
use std::rc::Rc;

use orrery_domain::SharedMemory;
use orrery_domain::gate::is_dead;
use orrery_sys::descriptors;
use rustix::io::Errno;
use rustix::process::Pid;
use syscalls::{Sysno, syscall};

use crate::error::{Error, Result};
use crate::state::{State, inode};

/// How many numbers are noted.
const NUMBERS: usize = 1 << 16;

/// How many contexts share one table at a time.
const MEMBERS: usize = 4096;
/// Of a member that is about to be.
const RESERVED: u32 = u32::MAX;
const SIZE: usize = NUMBERS * size_of::<AtomicU16>() + MEMBERS * size_of::<AtomicU32>();

/// Whose which number is; 0 where it is the program's. Behind it, the process of each member; 0 for none.
#[derive(Debug)]
struct Owners(SharedMemory);

impl Owners {
    fn all(&self) -> &[AtomicU16] {
        // SAFETY: the memory is page-aligned, zeroed, of that size, and holds nothing but atomics.
        unsafe { core::slice::from_raw_parts(self.0.start().as_ptr().cast(), NUMBERS) }
    }

    fn of(&self, number: RawFd) -> Option<&AtomicU16> {
        self.all().get(usize::try_from(number).ok()?)
    }

    fn processes(&self) -> &[AtomicU32] {
        // SAFETY: as above, behind the numbers.
        unsafe {
            let start = self.0.start().as_ptr().add(NUMBERS * size_of::<AtomicU16>());
            core::slice::from_raw_parts(start.cast(), MEMBERS)
        }
    }

    /// Who shares it next.
    fn reserve(&self) -> Result<u16> {
        let free = |process: &AtomicU32| process.compare_exchange(0, RESERVED, SeqCst, SeqCst).is_ok();
        let found = self.processes().iter().skip(1).position(free);
        found.and_then(|found| u16::try_from(found + 1).ok()).ok_or(Error::Full { most: MEMBERS })
    }

    /// Notes the calling process as that of a member.
    fn join(&self, who: u16) {
        let own = rustix::process::getpid().as_raw_pid().unsigned_abs();
        self.processes()[usize::from(who) % MEMBERS].store(own, SeqCst);
    }

    /// The members whose processes are no more.
    fn dead(&self) -> impl Iterator<Item = u16> {
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
    fn numbers(&self, wanted: impl Fn(u16) -> bool) -> impl Iterator<Item = RawFd> {
        let all = self.all().iter().enumerate();
        all.filter(move |(_, owner)| wanted(owner.load(SeqCst)))
            .filter_map(|(number, _)| RawFd::try_from(number).ok())
    }

    /// Closes what somebody who is dead has left.
    fn clear_out(&self, whose: u16) {
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
pub(crate) struct Table {
    owners: Owners,
    /// Who we are there, and who a new context is.
    me: u16,
    next: u16,
    /// What we said last.
    said: Vec<RawFd>,
    tenants: Vec<Tenant>,
}

/// A context that we created to share it.
#[derive(Debug)]
struct Tenant {
    who: u16,
    pidfd: Rc<OwnedFd>,
    /// Our end of the name that it has of us.
    grant: usize,
}

/// The ends that are made for a new context before it is there, by which it lives if it shares our table.
#[derive(Debug)]
pub(crate) struct Dowry([(RawFd, Option<u64>); 2]);

impl Dowry {
    /// Leaves them to it.
    pub(crate) fn of(ends: [OwnedFd; 2]) -> Self {
        Self(ends.map(|end| {
            let number = end.into_raw_fd();
            (number, inode(number))
        }))
    }

    /// It never lived: closes what it left of them.
    pub(crate) fn take_back(self) {
        for (number, inode_then) in self.0 {
            if inode_then.is_some() && inode(number) == inode_then {
                close(number);
            }
        }
    }
}

fn close(number: RawFd) {
    // SAFETY: the library's, of a context that is dead or another process by now, which may have closed it last of all.
    let _ = unsafe { syscall!(Sysno::close, number) };
}

impl State {
    /// Before a context is created that shares our table: says what is ours.
    pub(crate) fn open_table(&mut self) -> Result<()> {
        if self.table.is_none() {
            let owners = Owners(SharedMemory::new("orrery-table", SIZE)?);
            let me = owners.reserve()?;
            owners.join(me);
            self.table = Some(Table { owners, me, next: 0, said: Vec::new(), tenants: Vec::new() });
        }
        if let Some(table) = &mut self.table {
            table.next = table.owners.reserve()?;
        }
        self.say_own();
        Ok(())
    }

    /// Says which descriptors of a shared table are ours.
    pub(crate) fn say_own(&mut self) {
        if self.table.is_none() {
            return;
        }
        let own = self.own_numbers();
        let Some(table) = &mut self.table else { return };
        let me = table.me;
        for number in table.said.iter().filter(|number| !own.contains(number)) {
            if let Some(owner) = table.owners.of(*number) {
                // Somebody else may have it by now.
                let _ = owner.compare_exchange(me, 0, SeqCst, SeqCst);
            }
        }
        for owner in own.iter().filter_map(|number| table.owners.of(*number)) {
            owner.store(me, SeqCst);
        }
        table.said = own;
    }

    /// A context that shares the table has been created.
    pub(crate) fn add_tenant(&mut self, pidfd: Rc<OwnedFd>, grant: usize) {
        if let Some(table) = &mut self.table {
            table.tenants.push(Tenant { who: table.next, pidfd, grant });
        }
    }

    /// Closes what contexts that shared the table, and are dead, have left in it.
    pub(crate) fn sweep_table(&mut self) {
        let Some(table) = &mut self.table else { return };
        let dead: Vec<Tenant> =
            table.tenants.extract_if(.., |tenant| is_dead(tenant.pidfd.as_fd())).collect();
        for tenant in &dead {
            table.owners.clear_out(tenant.who);
        }
        // Those whom others have created.
        for who in table.owners.dead() {
            table.owners.clear_out(who);
        }
        // The root sees for itself that nobody holds them any more.
        if self.leash.is_some() {
            dead.iter().for_each(|tenant| self.drop_grant(tenant.grant));
        }
    }

    /// Closes what a context has left that was to share the table, and died before it did.
    pub(crate) fn clear_out_unborn(&self) {
        if let Some(table) = &self.table {
            table.owners.clear_out(table.next);
        }
    }

    /// In a copy of a context that has a table of its own: closes what is others' of those who shared the original's.
    pub(crate) fn leave_table(&mut self) {
        let Some(table) = self.table.take() else { return };
        let me = table.me;
        for number in table.owners.numbers(|owner| owner != 0 && owner != me) {
            close(number);
        }
    }

    /// In a new context that shares its creator's table: what is its creator's stays that one's, and what both need, this one
    /// has a copy of.
    pub(crate) fn share_table(&mut self) -> rustix::io::Result<()> {
        let copy = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 0).map(descriptors::raise);
        let leave = |fd: OwnedFd| {
            let _ = fd.into_raw_fd();
        };
        for grant in self.grants.drain(..).flatten() {
            leave(grant.socket);
        }
        self.leash = None;
        core::mem::forget(self.door.take());
        self.leave_kicks();
        if let Some(knocker) = self.knocker.take() {
            self.knocker = Some(copy(&knocker)?);
            leave(knocker);
        }
        let pidfd = copy(&self.pidfd)?;
        leave(core::mem::replace(&mut self.pidfd, pidfd));
        for shared in &mut self.shared {
            let file = copy(&shared.file)?;
            leave(core::mem::replace(&mut shared.file, file));
        }
        for peer in self.peers.iter_mut().flatten() {
            let pidfd = Rc::new(copy(&peer.pidfd)?);
            core::mem::forget(core::mem::replace(&mut peer.pidfd, pidfd));
            core::mem::forget(peer.listener.take());
        }
        if let Some(table) = &mut self.table {
            table.me = table.next;
            table.owners.join(table.me);
            table.said.clear();
            table.tenants.drain(..).for_each(core::mem::forget);
        }
        Ok(())
    }
}

impl Table {
    /// The numbers by which it knows its tenants.
    pub(crate) fn tenants(&self) -> impl Iterator<Item = &OwnedFd> {
        self.tenants.iter().map(|tenant| &*tenant.pidfd)
    }
}
