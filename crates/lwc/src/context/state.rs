//! What one context knows: itself, the contexts that it holds descriptors of (its *peers*), and who holds descriptors of
//! it (its *grants*).
//!
//! A descriptor of a context is one end of a socket pair (unix(7)), so the kernel counts its holders: when the last one
//! closes it, the other end, which the context itself keeps as a *grant*, is hung up. Each grant has rights of its own.
//!
//! Process-wide state, because fork(2) and signal handlers are: this file is where it lives.

use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use orrery_domain::forked::Creator;
use orrery_domain::gate::Pace;
use orrery_sys::{PageRange, descriptors};
use rustix::process::PidfdFlags;
use rustix::thread::CpuSet;

use super::Context;
use super::error::{Error, Result};
use super::leash::Leash;
use super::link::Link;
use super::program::{Program, ROOT, Seat};
use super::ranges::SharedRange;
use super::rights::Rights;
use super::trap::Listener;

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Another context, of which this one holds a descriptor.
#[derive(Debug)]
pub(crate) struct Peer {
    /// The descriptor by which the program names it.
    pub(crate) fd: OwnedFd,
    /// The inode behind it: the program may have closed it, and something else have its number.
    pub(crate) inode: u64,
    pub(crate) pidfd: OwnedFd,
    pub(crate) seat: u32,
    pub(crate) generation: u32,
    /// Tells it from others that had its place.
    pub(crate) serial: u32,
    /// Memory for the two of us; none until we first speak.
    pub(crate) link: Option<Link>,
    /// The grant by which it reaches us.
    pub(crate) through: Option<usize>,
    /// It did not answer a question, and may yet.
    pub(crate) silent: bool,
    /// Where its system calls arrive, if it is ours to answer them.
    pub(crate) listener: Option<Listener>,
    /// How often we two switch.
    pub(crate) pace: Pace,
}

/// Our end of a descriptor that others hold of us.
#[derive(Debug)]
pub(crate) struct Grant {
    pub(crate) socket: OwnedFd,
    /// What of ours is for holders to use.
    pub(crate) rights: Rights,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) program: &'static Program,
    /// Our seat.
    pub(crate) me: u32,
    pub(crate) creator: Creator,
    thread: usize,
    /// The pidfds of the root and of ourselves.
    pub(crate) main: RawFd,
    pub(crate) pidfd: OwnedFd,
    pub(crate) peers: Vec<Option<Peer>>,
    pub(crate) grants: Vec<Option<Grant>>,
    /// Ends us when nobody holds us; the root has none.
    pub(crate) leash: Option<&'static Leash>,
    /// Private memory that became shared.
    pub(crate) shared: Vec<SharedRange>,
    /// Where memory of other contexts lies over ours.
    pub(crate) overlaid: Vec<PageRange>,
    /// Whether we are filtered ourselves.
    pub(crate) filtered: bool,
    /// Where the program may run.
    pub(crate) cpus: Option<CpuSet>,
    /// The state of our bell when we last looked around.
    pub(crate) looked: Option<u32>,
    serials: u32,
}

/// The calling context's state, from now to the end of the call.
pub(crate) struct Held(MutexGuard<'static, Option<State>>);

impl core::ops::Deref for Held {
    type Target = State;

    fn deref(&self) -> &State {
        match &*self.0 {
            Some(state) => state,
            None => unreachable!("`hold` saw to it"),
        }
    }
}

impl core::ops::DerefMut for Held {
    fn deref_mut(&mut self) -> &mut State {
        match &mut *self.0 {
            Some(state) => state,
            None => unreachable!("`hold` saw to it"),
        }
    }
}

/// The calling context's state, if it has any yet.
pub(crate) fn hold() -> Result<Option<Held>> {
    let guard = match STATE.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(poisoned)) => PoisonError::into_inner(poisoned),
        Err(TryLockError::WouldBlock) => return Err(Error::Busy),
    };
    match &*guard {
        None => Ok(None),
        Some(state) if !state.creator.is_here() => Err(Error::OtherProcess),
        Some(state) if state.thread != own_thread() => Err(Error::WrongThread),
        Some(_) => Ok(Some(Held(guard))),
    }
}

/// The same; makes the process the root of a new program where it is no context yet.
pub(crate) fn hold_or_become_root() -> Result<Held> {
    match hold() {
        Ok(Some(held)) => return Ok(held),
        // A forked process may have contexts of its own; what it inherited is its parent's.
        Ok(None) | Err(Error::OtherProcess) => {}
        Err(error) => return Err(error),
    }
    let root = State::root()?;
    let mut guard = STATE.try_lock().or(Err(Error::Busy))?;
    // Dropping the parent's closes our copies of its descriptors.
    *guard = Some(root);
    Ok(Held(guard))
}

/// After the context's memory was put back to what it was: what it was told since, it has been told. It has control, so
/// nothing is under way to it; but the links, which are shared, are further on than its own books.
pub(crate) fn after_rollback() {
    if let Ok(Some(mut state)) = hold() {
        state.looked = None;
        for link in state.peers.iter_mut().flatten().filter_map(|peer| peer.link.as_mut()) {
            link.catch_up();
        }
    }
}

fn own_thread() -> usize {
    // SAFETY: takes nothing; it only names the calling thread.
    let thread = unsafe { libc::pthread_self() };
    usize::try_from(thread).unwrap_or(0)
}

pub(crate) fn own_pidfd() -> Result<OwnedFd> {
    rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
        .map(descriptors::raise)
        .map_err(|e| Error::system("pidfd_open(self)", 0, e))
}

impl State {
    fn root() -> Result<Self> {
        let pidfd = own_pidfd()?;
        Ok(Self {
            program: Box::leak(Box::new(Program::new()?)),
            me: ROOT,
            creator: Creator::here(),
            thread: own_thread(),
            // Every context's watcher looks at it, and none closes it.
            main: own_pidfd()?.into_raw_fd(),
            pidfd,
            peers: Vec::new(),
            grants: Vec::new(),
            leash: None,
            shared: Vec::new(),
            overlaid: Vec::new(),
            filtered: false,
            cpus: rustix::thread::sched_getaffinity(None).ok(),
            looked: None,
            serials: 0,
        })
    }

    pub(crate) fn seat(&self) -> &'static Seat {
        self.program.seat(self.me)
    }

    /// How many threads the process has when it is alone: a context's watcher is one, too.
    pub(crate) fn own_threads(&self) -> usize {
        if self.me == ROOT { 1 } else { 2 }
    }

    /// Notes a peer; gives its place.
    pub(crate) fn add_peer(
        &mut self,
        fd: OwnedFd,
        pidfd: OwnedFd,
        (seat, generation): (u32, u32),
        link: Link,
        through: Option<usize>,
    ) -> Result<usize> {
        let inode = inode(fd.as_raw_fd()).unwrap_or(0);
        self.serials = self.serials.wrapping_add(1);
        let serial = self.serials;
        self.forget_replaced(fd.as_raw_fd());
        let slot = place(&mut self.peers);
        link.set_slot(slot);
        self.peers[slot] = Some(Peer {
            fd,
            inode,
            pidfd,
            seat,
            generation,
            serial,
            link: Some(link),
            through,
            silent: false,
            listener: None,
            pace: Pace::default(),
        });
        Ok(slot)
    }

    /// A peer whose descriptor the program closed behind our back, as it shows when somebody else has the number.
    fn forget_replaced(&mut self, number: RawFd) {
        for place in &mut self.peers {
            if place.as_ref().is_some_and(|peer| peer.fd.as_raw_fd() == number)
                && let Some(peer) = place.take()
            {
                peer.disown();
            }
        }
    }

    pub(crate) fn add_grant(&mut self, socket: OwnedFd, rights: Rights) -> Result<usize> {
        let slot = place(&mut self.grants);
        if let Some(leash) = self.leash {
            leash.add(&socket, slot)?;
        }
        self.grants[slot] = Some(Grant { socket, rights });
        Ok(slot)
    }

    /// Whether holders of a grant are left, as far as is known.
    pub(crate) fn is_held(&self, grant: usize) -> bool {
        self.grants.get(grant).is_some_and(Option::is_some)
            && !self.leash.is_some_and(|leash| leash.is_hung_up(grant))
    }

    /// Lets go of the grants that nobody holds.
    pub(crate) fn sweep_grants(&mut self) {
        for slot in 0..self.grants.len() {
            let hung_up = match (&self.grants[slot], self.leash) {
                (None, _) => false,
                // Its watcher must have seen it first.
                (Some(_), Some(leash)) => leash.is_hung_up(slot),
                (Some(grant), None) => is_hung_up(&grant.socket),
            };
            if hung_up {
                self.grants[slot] = None;
                if let Some(leash) = self.leash {
                    leash.forget(slot);
                }
                for peer in self.peers.iter_mut().flatten() {
                    if peer.through == Some(slot) {
                        peer.through = None;
                    }
                }
            }
        }
    }

    /// Whether a number is that of a descriptor by which the library, not the program, lives.
    pub(crate) fn is_own(&self, number: RawFd) -> bool {
        let own = |fd: &OwnedFd| fd.as_raw_fd() == number;
        number == self.main
            || own(&self.pidfd)
            || self.leash.is_some_and(|leash| leash.descriptor() == number)
            || self.grants.iter().flatten().any(|grant| own(&grant.socket))
            || self.shared.iter().any(|shared| own(&shared.file))
            || self.peers.iter().flatten().any(|peer| {
                let heard = peer.listener.as_ref();
                own(&peer.fd)
                    || own(&peer.pidfd)
                    || heard.is_some_and(|heard| own(&heard.fd) || heard.memory.as_ref().is_some_and(own))
            })
    }

    /// The place of a context named by a handle.
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

    pub(crate) fn peer(&self, slot: usize) -> Result<&Peer> {
        self.peers.get(slot).and_then(Option::as_ref).ok_or(Error::NoContext { descriptor: -1 })
    }

    pub(crate) fn peer_mut(&mut self, slot: usize) -> Result<&mut Peer> {
        self.peers.get_mut(slot).and_then(Option::as_mut).ok_or(Error::NoContext { descriptor: -1 })
    }
}

impl Peer {
    /// Whether it has ended.
    pub(crate) fn is_gone(&self, program: &Program) -> bool {
        let seat = program.seat(self.seat);
        use core::sync::atomic::Ordering::SeqCst;
        seat.generation.load(SeqCst) != self.generation || (self.seat != ROOT && seat.face.is_marked_dead())
    }

    /// Whether its descriptor still is what it was.
    pub(crate) fn is_intact(&self) -> bool {
        inode(self.fd.as_raw_fd()) == Some(self.inode)
    }

    /// Forgets it without closing its descriptor, whose number is somebody else's.
    pub(crate) fn disown(self) {
        if let Some(link) = &self.link {
            link.set_closed();
        }
        let _ = self.fd.into_raw_fd();
    }
}

/// The index of a free place, made where there is none.
fn place<T>(places: &mut Vec<Option<T>>) -> usize {
    places.iter().position(Option::is_none).unwrap_or_else(|| {
        places.push(None);
        places.len() - 1
    })
}

/// The inode behind a descriptor.
fn inode(fd: RawFd) -> Option<u64> {
    // SAFETY: fstat of a number that may be none fails; nothing is closed.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    rustix::fs::fstat(fd).ok().map(|status| status.st_ino)
}

/// Whether the other end of a socket is closed by all who had it.
pub(crate) fn is_hung_up(socket: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags};
    let mut one = [PollFd::new(socket, PollFlags::empty())];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut one, Some(&now)), Ok(ready) if ready > 0)
        && one[0].revents().contains(PollFlags::HUP)
}
