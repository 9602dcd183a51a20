//! A table of descriptors that contexts have in common (`LWC_SHARE` of descriptors, section 5.2 of the paper): the
//! kernel's own, by CLONE_FILES in clone(2). What one opens or closes is open or closed in the other, at once; kcmp(2)
//! says that they are one. A part of a table cannot be shared.
//!
//! The library's own descriptors are in there, too, those of all who share it: ends of names, pidfds and so on. None
//! may outlive its owner, for others would hear of its end by them, and a new context with a table of its own must have
//! none but its creator's. So each says which numbers are its own, in memory that those who share the table share:
//! before it lets go of control, and before it creates a context. The others, when they next create or close something,
//! close what one that is dead has left. Numbers of 65536 and above are not noted.

use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::Ordering::SeqCst;

use orrery_domain::SharedMemory;
use orrery_domain::gate::is_dead;
use orrery_sys::descriptors;

use crate::descriptors::table::{Member, Owners, SIZE, SharedTable, close};
use crate::error::Result;
use crate::state::State;

impl State {
    /// Before a context is created that shares our table: says what is ours.
    pub(crate) fn open_table(&mut self) -> Result<()> {
        if self.table.is_none() {
            let owners = Owners(SharedMemory::new("orrery-table", SIZE)?);
            let me = owners.reserve()?;
            owners.join(me);
            self.table = Some(SharedTable { owners, me, next: 0, said: Vec::new(), members: Vec::new() });
        }
        if let Some(table) = &mut self.table {
            table.next = table.owners.reserve()?;
        }
        self.publish_descriptors();
        Ok(())
    }

    /// Says which descriptors of a shared table are ours.
    pub(crate) fn publish_descriptors(&mut self) {
        if self.table.is_none() {
            return;
        }
        let own = self.own_numbers();
        let Some(table) = &mut self.table else { return };
        let me = table.me;
        for number in table.said.iter().filter(|number| !own.contains(number)) {
            if let Some(owner) = table.owners.of(*number) {
                // Another context may have it by now.
                let _ = owner.compare_exchange(me, 0, SeqCst, SeqCst);
            }
        }
        for owner in own.iter().filter_map(|number| table.owners.of(*number)) {
            owner.store(me, SeqCst);
        }
        table.said = own;
    }

    /// A context that shares the table has been created.
    pub(crate) fn add_member(&mut self, pidfd: Rc<OwnedFd>, grant: usize) {
        if let Some(table) = &mut self.table {
            table.members.push(Member { who: table.next, pidfd, grant });
        }
    }

    /// Closes what contexts that shared the table, and are dead, have left in it.
    pub(crate) fn sweep_table(&mut self) {
        let Some(table) = &mut self.table else { return };
        let dead: Vec<Member> =
            table.members.extract_if(.., |member| is_dead(member.pidfd.as_fd())).collect();
        for member in &dead {
            table.owners.close_all_of(member.who);
        }
        // Those whom others have created.
        for who in table.owners.dead() {
            table.owners.close_all_of(who);
        }
        // The root sees for itself that nobody holds them any more.
        if self.lifetime.is_some() {
            dead.iter().for_each(|member| self.drop_grant(member.grant));
        }
    }

    /// Closes what a context has left that was to share the table, and died before it did.
    pub(crate) fn clear_failed_spawn(&self) {
        if let Some(table) = &self.table {
            table.owners.close_all_of(table.next);
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

    /// In a new context that shares its creator's table: what is its creator's stays that one's, and what both need,
    /// this one has a copy of.
    pub(crate) fn share_table(&mut self) -> rustix::io::Result<()> {
        let copy = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 0).map(descriptors::raise);
        let leave = |fd: OwnedFd| {
            let _ = fd.into_raw_fd();
        };
        for grant in self.grants.drain(..).flatten() {
            leave(grant.socket);
        }
        self.lifetime = None;
        std::mem::forget(self.rendezvous.take());
        self.leave_kicks();
        if let Some(connector) = self.connector.take() {
            self.connector = Some(copy(&connector)?);
            leave(connector);
        }
        let pidfd = copy(&self.pidfd)?;
        leave(std::mem::replace(&mut self.pidfd, pidfd));
        for shared in &mut self.shared {
            let file = copy(&shared.file)?;
            leave(std::mem::replace(&mut shared.file, file));
        }
        for peer in self.peers.iter_mut().flatten() {
            let pidfd = Rc::new(copy(&peer.pidfd)?);
            std::mem::forget(std::mem::replace(&mut peer.pidfd, pidfd));
            std::mem::forget(peer.listener.take());
        }
        if let Some(table) = &mut self.table {
            table.me = table.next;
            table.owners.join(table.me);
            table.said.clear();
            table.members.drain(..).for_each(std::mem::forget);
        }
        Ok(())
    }
}
