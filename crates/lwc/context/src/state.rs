//! What one context knows: itself, the contexts that it holds descriptors of (its *peers*), and who holds descriptors
//! of it (its *grants*).
//!
//! A descriptor of a context is one end of a socket pair (unix(7)), so the kernel counts its holders: when the last one
//! closes it, the other end, which the context itself keeps as a *grant*, is hung up. Each grant has rights of its own.
//!
//! The process has one, at which its threads take turns ([`crate::threads::state_lock`]).

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use orrery_domain::forked::Creator;
use orrery_domain::gate::CpuPolicy;
use orrery_sys::{PageRange, descriptors};
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Pid, PidfdFlags};
use rustix::thread::CpuSet;

use crate::credentials::shared::SharedCredentials;
use crate::descriptors::table::SharedTable;
use crate::error::{Error, Result};
use crate::fork::rendezvous::Rendezvous;
use crate::id::Id;
use crate::memory::ranges::SharedRange;
use crate::peers::socket::{inode, own_pidfd, pair};
use crate::rights::Rights;
use crate::shared::control::Controller;
use crate::shared::link::Link;
use crate::shared::program::{ContextSlot, Place, Program, ROOT};
use crate::spawn::lifetime::Lifetime;
use crate::spawn::signal_forwarding::Shared;
use crate::switch::loan::Loan;
use crate::syscalls::listener::Listener;
use crate::threads::per_thread::entry;
use crate::types::Context;

/// The number of the root's descriptor in all contexts.
pub(crate) const WELL_KNOWN: RawFd = 1000;

/// Another context, of which this one holds a descriptor.
#[derive(Debug)]
pub(crate) struct Peer {
    /// What only its holders and the context itself know.
    pub(crate) id: Id,
    /// The descriptor by which the program names it. It is closed with the rest if it still is what it was.
    pub(crate) fd: ManuallyDrop<OwnedFd>,
    /// The inode behind it: the program may have closed it, and something else have its number.
    pub(crate) inode: u64,
    /// Cloned and dropped by who holds the state only.
    pub(crate) pidfd: Rc<OwnedFd>,
    /// Whose pidfd that is, as its slot said: another one has succeeded it where the slot says otherwise.
    pub(crate) pid: u32,
    pub(crate) context_slot: u32,
    pub(crate) generation: u32,
    /// Tells it from others that had its place.
    pub(crate) serial: u32,
    /// Memory for the two of us; none until we first speak.
    pub(crate) link: Option<Link>,
    /// The grant by which it reaches us.
    pub(crate) through: Option<usize>,
    /// The logical threads of ours whose questions it did not answer, and may yet.
    pub(crate) silent: Vec<u32>,
    /// Where its system calls arrive, if it is ours to answer them.
    pub(crate) listener: Option<Listener>,
    /// How often we two switch, for each logical thread.
    pub(crate) cpu_policies: Vec<Option<CpuPolicy>>,
    /// What priority each logical thread has lent to it.
    pub(crate) loans: Vec<Option<Loan>>,
}

/// A peer as it was when it handed control to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    serial: u32,
    pid: u32,
}

/// What one logical thread knows of who may call it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallState {
    /// The state of its bell when it last looked around.
    pub(crate) looked: Option<u32>,
    /// The peer that it has control from, where that one waits at the link.
    pub(crate) caller: Option<Waiting>,
}

/// Our end of a descriptor that others hold of us.
#[derive(Debug)]
pub(crate) struct Grant {
    pub(crate) socket: OwnedFd,
    /// What only holders and we know.
    pub(crate) id: Id,
    /// What of ours is for holders to use.
    pub(crate) rights: Rights,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) program: &'static Program,
    /// The slot of this context.
    pub(crate) me: u32,
    pub(crate) creator: Creator,
    /// The logical thread of the thread whose turn it is.
    pub(crate) logical_thread: u32,
    /// The pidfds of the root and of ourselves.
    pub(crate) main: RawFd,
    pub(crate) pidfd: OwnedFd,
    pub(crate) peers: Vec<Option<Peer>>,
    pub(crate) grants: Vec<Option<Grant>>,
    /// Ends us when nobody holds us; the root has none.
    pub(crate) lifetime: Option<&'static Lifetime>,
    /// By which copies of the root reach its contexts; contexts themselves have its other end.
    pub(crate) rendezvous: Option<Rendezvous>,
    pub(crate) connector: Option<OwnedFd>,
    /// What is to take our place when we are killed.
    pub(crate) checkpoint_pid: Option<Pid>,
    /// Private memory that became shared.
    pub(crate) shared: Vec<SharedRange>,
    /// Where memory of other contexts is over ours.
    pub(crate) overlaid: Vec<PageRange>,
    /// Whether we are filtered ourselves.
    pub(crate) filtered: bool,
    /// Whether we are isolated: we, or a context whose copy we are.
    pub(crate) isolated: bool,
    /// Whether we may move others, as far as is known.
    pub(crate) may_place: bool,
    /// Whether calls are kept from us that it takes to make a copy.
    pub(crate) cannot_copy: bool,
    /// The table of descriptors, where others share it.
    pub(crate) table: Option<SharedTable>,
    /// The credentials, where others share them.
    pub(crate) shared_credentials: Option<SharedCredentials>,
    /// The name that we have of our creator, which the library made.
    pub(crate) creators_name: RawFd,
    /// Where the program may run.
    pub(crate) cpus: Option<CpuSet>,
    /// What each logical thread knows.
    call_states: Vec<CallState>,
    /// What wakes a logical thread of ours that waits for descriptors.
    kicks: Vec<Option<OwnedFd>>,
    /// Files that others have sent us with a mark ([`introduction::take_marked`]).
    pub(crate) marked_files: Vec<(Id, OwnedFd)>,
    /// Files that others have passed, by these grants, and that the program has not taken
    /// ([`introduction::take_passed`]); without one where there was no number for it.
    pub(crate) passed_files: Vec<(usize, Option<OwnedFd>)>,
    serials: u32,
    /// Whether there ever was a peer whose system calls arrive here: most contexts need not look.
    pub(crate) had_listener: bool,
    /// Whether what is sent to the program reaches us, or those that we create.
    pub(crate) hears_program: bool,
    /// What we know of the root's signals, where we share them.
    pub(crate) shared_signals: Option<Box<Shared>>,
}

impl State {
    /// Of a process that becomes the root of a new program.
    pub(crate) fn root() -> Result<Self> {
        let pidfd = own_pidfd()?;
        let (rendezvous, connector) = Rendezvous::open().unzip();
        let mut root = Self {
            rendezvous,
            connector,
            checkpoint_pid: None,
            program: Box::leak(Box::new(Program::new()?)),
            me: ROOT,
            creator: Creator::here(),
            logical_thread: 0,
            // Every context's watcher looks at it, and none closes it.
            main: own_pidfd()?.into_raw_fd(),
            pidfd,
            peers: Vec::new(),
            grants: Vec::new(),
            lifetime: None,
            shared: Vec::new(),
            overlaid: Vec::new(),
            filtered: false,
            isolated: false,
            may_place: true,
            cannot_copy: false,
            table: None,
            shared_credentials: None,
            creators_name: -1,
            cpus: rustix::thread::sched_getaffinity(None).ok(),
            call_states: Vec::new(),
            kicks: Vec::new(),
            marked_files: Vec::new(),
            passed_files: Vec::new(),
            serials: 0,
            had_listener: false,
            hears_program: true,
            shared_signals: None,
        };
        root.name_itself()?;
        Ok(root)
    }

    /// Has the root be named by [`WELL_KNOWN`] in all contexts. Where the program uses the number, or may not have one
    /// so high, it is not.
    fn name_itself(&mut self) -> Result<()> {
        let (own, theirs, id) = pair()?;
        let Ok(name) = rustix::io::fcntl_dupfd_cloexec(&theirs, WELL_KNOWN) else { return Ok(()) };
        if name.as_raw_fd() == WELL_KNOWN {
            let pidfd = own_pidfd()?;
            self.add_grant(own, id, Rights::none())?;
            let generation = self.context_slot().generation.load(SeqCst);
            self.add_peer(name, id, pidfd, (ROOT, generation), None, None)?;
        }
        Ok(())
    }

    pub(crate) fn context_slot(&self) -> &'static ContextSlot {
        self.program.context_slot(self.me)
    }

    /// Returns where the calling logical thread waits.
    pub(crate) fn place(&self) -> &'static Place {
        self.program.place(self.logical_thread, self.me)
    }

    /// We, as who has control.
    pub(crate) fn own_controller(&self) -> Controller {
        self.program.controller(self.me)
    }

    /// Returns who has the calling logical thread's control: a [`Controller`].
    pub(crate) fn control(&self) -> &'static AtomicU32 {
        self.program.control(self.logical_thread)
    }

    /// Returns the state of the calling logical thread's bell when it last looked around.
    pub(crate) fn looked(&self) -> Option<u32> {
        self.call_states.get(self.logical_thread as usize)?.looked
    }

    pub(crate) fn set_looked(&mut self, heard: Option<u32>) {
        self.call_state().looked = heard;
    }

    /// Notes that the calling logical thread has control from a peer that waits at the link, or has it in any other
    /// way.
    pub(crate) fn set_caller(&mut self, slot: Option<usize>) {
        let caller = slot.and_then(|slot| self.peers.get(slot)?.as_ref()).map(Peer::waiting);
        self.call_state().caller = caller;
    }

    /// Returns whether the peer still waits at the link to which control is about to go: it cannot have gone away
    /// from there meanwhile, unless another context has its name now. What was noted is over with that.
    pub(crate) fn take_caller(&mut self, slot: usize) -> bool {
        let caller = self.call_state().caller.take();
        caller.is_some() && caller == self.peers.get(slot).and_then(Option::as_ref).map(Peer::waiting)
    }

    /// Returns whether system calls of any peer arrive here.
    pub(crate) fn has_listener(&self) -> bool {
        self.had_listener
            && self.peers.iter().flatten().any(|peer| peer.listener.as_ref().is_some_and(|l| !l.is_over))
    }

    /// Returns whether the peer waits at the link, as [`State::take_caller`] would say.
    #[inline]
    pub(crate) fn is_caller(&self, peer: &Peer) -> bool {
        self.call_states
            .get(self.logical_thread as usize)
            .is_some_and(|call_state| call_state.caller == Some(peer.waiting()))
    }

    /// Returns what the calling logical thread knows.
    #[inline(always)]
    pub(crate) fn call_state(&mut self) -> &mut CallState {
        let logical_thread = self.logical_thread as usize;
        if self.call_states.len() <= logical_thread {
            self.add_call_state();
        }
        &mut self.call_states[logical_thread]
    }

    #[cold]
    fn add_call_state(&mut self) {
        self.call_states.resize(self.logical_thread as usize + 1, CallState::default());
    }

    /// Returns what wakes the calling logical thread while it waits for descriptors, made where there is none yet;
    /// `None` where the program has one logical thread, or there is no room.
    pub(crate) fn own_kick(&mut self) -> Option<&OwnedFd> {
        if *self.program.logical_threads().end() == 0 {
            return None;
        }
        let logical_thread = self.logical_thread;
        let kick = entry(&mut self.kicks, logical_thread);
        if kick.is_none() {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            *kick = eventfd(0, flags).ok().map(descriptors::raise);
        }
        kick.as_ref()
    }

    /// Has a logical thread of ours look around, however it waits.
    pub(crate) fn kick(&self, logical_thread: u32) {
        self.program.place(logical_thread, self.me).face.call();
        if let Some(Some(kick)) = self.kicks.get(logical_thread as usize) {
            let _ = rustix::io::write(kick, &1_u64.to_ne_bytes());
        }
    }

    /// Has the other logical threads look around that wait for descriptors: we may have taken what woke them.
    pub(crate) fn kick_others(&self) {
        for logical_thread in
            self.program.logical_threads().filter(|logical_thread| *logical_thread != self.logical_thread)
        {
            if self.program.place(logical_thread, self.me).by_descriptor.load(SeqCst) != 0 {
                self.kick(logical_thread);
            }
        }
    }

    /// In a new context: what its creator's logical threads looked at, or wait for, is not its own.
    pub(crate) fn forget_threads(&mut self) {
        self.call_states.clear();
        self.kicks.clear();
        self.marked_files.clear();
        self.passed_files.clear();
    }

    /// What is known of who waits where may be of another time, or another program.
    pub(crate) fn forget_callers(&mut self) {
        self.call_states.iter_mut().for_each(|call_state| call_state.caller = None);
    }

    /// The same where the descriptors are another context's.
    pub(crate) fn leave_kicks(&mut self) {
        let marked_files = self.marked_files.drain(..).map(|(_, file)| file);
        let passed_files = self.passed_files.drain(..).filter_map(|(_, file)| file);
        for left in self.kicks.drain(..).flatten().chain(marked_files).chain(passed_files) {
            let _ = left.into_raw_fd();
        }
    }

    /// Before a context is created that shares our credentials.
    pub(crate) fn open_credentials(&mut self) -> Result<()> {
        if self.shared_credentials.is_none() {
            self.shared_credentials = Some(SharedCredentials::new()?);
        }
        self.publish_credentials();
        Ok(())
    }

    /// Publishes what the calling thread has to those who share credentials with us.
    pub(crate) fn publish_credentials(&mut self) {
        if let Some(shared_credentials) = &mut self.shared_credentials {
            shared_credentials.publish(self.logical_thread);
        }
    }

    /// Takes on the credentials that others have published.
    #[inline]
    pub(crate) fn follow_credentials(&mut self) {
        if let Some(shared_credentials) = &mut self.shared_credentials {
            shared_credentials.follow(self.logical_thread);
        }
    }

    /// Notes a peer; gives its place.
    pub(crate) fn add_peer(
        &mut self,
        fd: OwnedFd,
        id: Id,
        pidfd: OwnedFd,
        (context_slot, generation): (u32, u32),
        link: Option<Link>,
        through: Option<usize>,
    ) -> Result<usize> {
        let inode = inode(fd.as_raw_fd()).unwrap_or(0);
        self.program.list_name(inode, (context_slot, generation));
        self.serials = self.serials.wrapping_add(1);
        let serial = self.serials;
        self.forget_replaced(fd.as_raw_fd());
        let slot = place(&mut self.peers);
        if let Some(link) = &link {
            link.set_slot(slot);
            link.set_copied(false);
        }
        self.peers[slot] = Some(Peer {
            id,
            fd: ManuallyDrop::new(fd),
            inode,
            pidfd: Rc::new(pidfd),
            pid: self.program.context_slot(context_slot).pid.load(SeqCst),
            context_slot,
            generation,
            serial,
            link,
            through,
            silent: Vec::new(),
            listener: None,
            cpu_policies: Vec::new(),
            loans: Vec::new(),
        });
        Ok(slot)
    }

    /// In a copy of a context: the links that it did not get again are not there.
    pub(crate) fn forget_links(&mut self) {
        for peer in self.peers.iter_mut().flatten() {
            peer.link.take_if(|link| !link.is_here());
        }
    }

    /// A peer whose descriptor the program closed behind our back, as it shows when the number names something else.
    fn forget_replaced(&mut self, number: RawFd) {
        for place in &mut self.peers {
            if place.as_ref().is_some_and(|peer| peer.fd.as_raw_fd() == number)
                && let Some(peer) = place.take()
                && let Some(link) = &peer.link
            {
                link.set_closed();
            }
        }
    }

    pub(crate) fn add_grant(&mut self, socket: OwnedFd, id: Id, rights: Rights) -> Result<usize> {
        if let Some(lifetime) = self.lifetime {
            lifetime.add(&socket, place(&mut self.grants))?;
        }
        Ok(self.add_members_grant(socket, id, rights))
    }

    /// The same for one who shares our table, and so holds us by all names that are there: by this one we do not live
    /// on.
    pub(crate) fn add_members_grant(&mut self, socket: OwnedFd, id: Id, rights: Rights) -> usize {
        let slot = place(&mut self.grants);
        self.grants[slot] = Some(Grant { socket, id, rights });
        slot
    }

    /// Returns whether holders of a grant are left, as far as is known.
    pub(crate) fn is_held(&self, grant: usize) -> bool {
        self.grants.get(grant).is_some_and(Option::is_some)
            && !self.lifetime.is_some_and(|lifetime| lifetime.is_hung_up(grant))
    }

    /// Releases the grants that nobody holds.
    pub(crate) fn sweep_grants(&mut self) {
        let hung_up: Vec<usize> = match self.lifetime {
            // Its watcher must have seen it first.
            Some(lifetime) => (0..self.grants.len())
                .filter(|slot| self.grants[*slot].is_some() && lifetime.is_hung_up(*slot))
                .collect(),
            None => self.hung_up(),
        };
        for slot in hung_up {
            self.drop_grant(slot);
        }
    }

    /// Releases a grant.
    pub(crate) fn drop_grant(&mut self, slot: usize) {
        if let Some(grant) = self.grants.get_mut(slot) {
            *grant = None;
        }
        self.passed_files.retain(|(grant, _)| *grant != slot);
        if let Some(lifetime) = self.lifetime {
            lifetime.forget(slot);
        }
        for peer in self.peers.iter_mut().flatten() {
            peer.through.take_if(|grant| *grant == slot);
        }
    }

    /// Returns the grants that nobody holds, asked of the kernel, of all at once.
    fn hung_up(&self) -> Vec<usize> {
        use rustix::event::{PollFd, PollFlags};
        let (slots, mut fds): (Vec<usize>, Vec<PollFd<'_>>) = self
            .grants
            .iter()
            .enumerate()
            .filter_map(|(slot, grant)| {
                Some((slot, PollFd::new(&grant.as_ref()?.socket, PollFlags::empty())))
            })
            .unzip();
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        if !matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1..)) {
            return Vec::new();
        }
        let pairs = slots.into_iter().zip(&fds);
        pairs.filter(|(_, fd)| fd.revents().contains(PollFlags::HUP)).map(|(slot, _)| slot).collect()
    }

    /// Returns whether a number is that of a descriptor by which the library, not the program, lives.
    pub(crate) fn is_own(&self, number: RawFd) -> bool {
        number == self.main
            || self.own_numbers().contains(&number)
            || self.peers.iter().flatten().any(|peer| peer.fd.as_raw_fd() == number)
    }

    /// The numbers of the library's descriptors in this context, but those that name contexts for the program, and the
    /// one that all contexts have of the root.
    pub(crate) fn own_numbers(&self) -> Vec<RawFd> {
        let heard = |listener: &Listener| {
            [Some(listener.calls.as_fd().as_raw_fd()), listener.memory.as_ref().map(AsRawFd::as_raw_fd)]
        };
        let peers = self.peers.iter().flatten();
        let listeners = peers.clone().filter_map(|peer| peer.listener.as_ref());
        [self.pidfd.as_raw_fd(), self.creators_name]
            .into_iter()
            .chain(self.lifetime.map(Lifetime::descriptor))
            .chain(self.grants.iter().flatten().map(|grant| grant.socket.as_raw_fd()))
            .chain(self.shared.iter().map(|shared| shared.file.as_raw_fd()))
            .chain(self.kicks.iter().flatten().map(AsRawFd::as_raw_fd))
            .chain(self.marked_files.iter().map(|(_, file)| file.as_raw_fd()))
            .chain(self.passed_files.iter().filter_map(|(_, file)| Some(file.as_ref()?.as_raw_fd())))
            .chain(self.rendezvous.iter().flat_map(Rendezvous::numbers))
            .chain(self.connector.iter().map(AsRawFd::as_raw_fd))
            .chain(self.table.iter().flat_map(SharedTable::members).map(AsRawFd::as_raw_fd))
            .chain(peers.map(|peer| peer.pidfd.as_raw_fd()))
            .chain(listeners.flat_map(heard).flatten())
            .filter(|number| *number >= 0)
            .collect()
    }

    /// Returns the place of a context named by a handle.
    pub(crate) fn find(&self, context: Context) -> Result<usize> {
        match self.peers.get(context.slot) {
            Some(Some(peer)) if peer.serial == context.serial => Ok(context.slot),
            _ => Err(Error::NoContext { descriptor: context.fd }),
        }
    }

    pub(crate) fn handle(&self, slot: usize) -> Context {
        match self.peers.get(slot) {
            Some(Some(peer)) => Context { fd: peer.fd.as_raw_fd(), slot, serial: peer.serial },
            _ => Context { fd: -1, slot, serial: 0 },
        }
    }

    /// The context that a number names, if the number still is what it was.
    pub(crate) fn named(&self, descriptor: RawFd) -> Result<Context> {
        let found = self
            .peers
            .iter()
            .position(|peer| peer.as_ref().is_some_and(|peer| peer.fd.as_raw_fd() == descriptor));
        let slot = found.ok_or(Error::NoContext { descriptor })?;
        let intact = self.peers[slot].as_ref().is_some_and(|peer| inode(descriptor) == Some(peer.inode));
        if intact { Ok(self.handle(slot)) } else { Err(Error::NoContext { descriptor }) }
    }

    /// The context that a number names; one that came by ways that the library does not see (dup(2), a socket of the
    /// program's own) is a name like others from then on.
    pub(crate) fn named_or_adopted(&mut self, descriptor: RawFd) -> Result<Context> {
        match self.named(descriptor) {
            Err(Error::NoContext { .. }) => self.adopt(descriptor).map(|slot| self.handle(slot)),
            known => known,
        }
    }

    fn adopt(&mut self, descriptor: RawFd) -> Result<usize> {
        let unknown = Error::NoContext { descriptor };
        if descriptor < 0 || self.is_own(descriptor) {
            return Err(unknown);
        }
        // SAFETY: a number that is none is an error; nothing is closed.
        let status = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(descriptor) }).map_err(|_| unknown)?;
        let is_socket = rustix::fs::FileType::from_raw_mode(status.st_mode) == rustix::fs::FileType::Socket;
        let (context_slot, generation) =
            self.program.named(status.st_ino).filter(|_| is_socket).ok_or(unknown)?;
        let gone = Error::Gone { descriptor };
        let pid = self.program.pid(context_slot).ok_or(gone)?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| match errno {
            rustix::io::Errno::SRCH => gone,
            errno => Error::system("pidfd_open", pid.as_raw_pid().unsigned_abs() as usize, errno),
        })?;
        // It was that one's process when it was opened.
        if self.program.pid(context_slot) != Some(pid)
            || self.program.context_slot(context_slot).generation.load(SeqCst) != generation
        {
            return Err(gone);
        }
        // SAFETY: it is open, and the caller has it named: it is closed by that name.
        let fd = unsafe { OwnedFd::from_raw_fd(descriptor) };
        self.add_peer(fd, Id::NONE, descriptors::raise(pidfd), (context_slot, generation), None, None)
    }

    /// Lists all names that are held, in a program that is new.
    pub(crate) fn list_names(&self) {
        for peer in self.peers.iter().flatten() {
            self.program.list_name(peer.inode, (peer.context_slot, peer.generation));
        }
    }

    pub(crate) fn peer(&self, slot: usize) -> Result<&Peer> {
        self.peers.get(slot).and_then(Option::as_ref).ok_or(Error::NoContext { descriptor: -1 })
    }

    pub(crate) fn peer_mut(&mut self, slot: usize) -> Result<&mut Peer> {
        self.peers.get_mut(slot).and_then(Option::as_mut).ok_or(Error::NoContext { descriptor: -1 })
    }
}

impl Peer {
    #[inline]
    pub(crate) fn waiting(&self) -> Waiting {
        Waiting { serial: self.serial, pid: self.pid }
    }

    /// It, as who has control.
    pub(crate) fn controller(&self) -> Controller {
        Controller::new(self.context_slot, self.generation)
    }

    /// Returns whether it has ended.
    pub(crate) fn is_gone(&self, program: &Program) -> bool {
        let generation =
            program.context_slot(self.context_slot).generation.load(std::sync::atomic::Ordering::SeqCst);
        generation != self.generation
            || (self.context_slot != ROOT && program.is_marked_dead(self.context_slot))
    }

    /// Returns whether its descriptor still is what it was.
    pub(crate) fn is_intact(&self) -> bool {
        inode(self.fd.as_raw_fd()) == Some(self.inode)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The program may have closed it, and the number may name something else.
        if self.is_intact() {
            // SAFETY: the descriptor is dropped here alone, and `self` is not used any more.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

/// The index of a free place, made where there is none.
fn place<T>(places: &mut Vec<Option<T>>) -> usize {
    places.iter().position(Option::is_none).unwrap_or_else(|| {
        places.push(None);
        places.len() - 1
    })
}
