//! A process's own connection to the keeper, and what becomes of it when the process forks.
//!
//! Each process of the program has a connection of its own, so that one in the hands of an attacker can spoil nobody
//! else's: whoever holds a socket can shut it down, fill its queue and set its options, and receive what arrives there.
//! Before a fork(2), the parent asks for a connection for the child (pthread_atfork(3)); before the child runs anything of
//! the program's, it closes all sockets of the parent's.
//!
//! The parent does not wait long for the answer: a keeper may be busy, or stopped. The child then has the socket on
//! which the answer arrives, and waits when it first asks for something.
//!
//! A process that is made by another way than fork(3), for example a context, shares the connection of its parent.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use orrery_domain::forked::Creator;
use orrery_domain::time::Moment;
use orrery_sys::descriptors;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::message::{self, Request};

/// How long a fork waits for the child's connection.
const FORK_PATIENCE: Duration = Duration::from_millis(100);
/// How long to wait where this user has too many descriptors in flight.
const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(1);
/// How often a connection is asked for where one keeper after the other dies.
const TRIES: usize = 3;

/// Why nothing came of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The vault, or the twin, is gone.
    Gone,
    /// No answer in time.
    TimedOut,
    /// What the vault answered, or the system.
    Errno(Errno),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => Self::Gone,
            other => Self::Errno(other),
        }
    }
}

/// The sockets of one vault in this process. It is never freed: a fork may look at it at any time.
#[derive(Debug)]
pub(super) struct Connection {
    in_use: AtomicBool,
    own: Mutex<Own>,
    /// The next one in the list of all.
    next: AtomicPtr<Connection>,
}

/// What a process has for itself.
#[derive(Debug)]
struct Own {
    /// The process that has it.
    process: Creator,
    keeper: Keeper,
    /// All sockets of this process, by number and by the kernel's own name for them: what its children close.
    sockets: Vec<(RawFd, u64)>,
    /// Between the two halves of a fork: what the child is to have.
    for_child: ForChild,
}

/// The way to the keeper.
#[derive(Clone, Debug)]
enum Keeper {
    /// Requests go here.
    Connected(Arc<Socket>),
    /// The connection arrives here.
    Promised(Arc<Socket>),
    None(Failure),
}

/// What a child is to have as its way to the keeper.
#[derive(Debug)]
enum ForChild {
    Connected(OwnedFd),
    Promised(OwnedFd),
    None(Failure),
}

impl ForChild {
    /// What a child has that nothing was done for.
    const NOTHING: Self = Self::None(Failure::Gone);
}

/// A socket that no child of this process keeps.
#[derive(Debug)]
pub(super) struct Socket {
    fd: ManuallyDrop<OwnedFd>,
    cookie: u64,
    connection: &'static Connection,
}

impl Socket {
    /// Returns whether the program has not closed it behind our back, as those do that close all descriptors.
    pub(super) fn is_there(&self) -> bool {
        sockopt::socket_cookie(self) == Ok(self.cookie)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let mut own = self.connection.lock();
        let here = (self.fd.as_raw_fd(), self.cookie);
        // In a forked child the number is closed already, and may be another file's by now.
        if own.process.is_here()
            && let Some(at) = own.sockets.iter().position(|one| *one == here)
        {
            own.sockets.swap_remove(at);
            // SAFETY: the descriptor is dropped here alone, and `self` is not used any more.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

impl Own {
    /// Counts a socket among those of this process.
    fn add(&mut self, connection: &'static Connection, fd: OwnedFd) -> Result<Arc<Socket>, Errno> {
        let cookie = sockopt::socket_cookie(&fd)?;
        self.sockets.push((fd.as_raw_fd(), cookie));
        Ok(Arc::new(Socket { fd: ManuallyDrop::new(fd), cookie, connection }))
    }
}

impl Connection {
    /// Keeps the socket of the process that made the vault.
    pub(super) fn new(socket: OwnedFd) -> Result<&'static Self, Errno> {
        register_handlers()?;
        let this = Self::unused();
        let mut own = this.lock();
        own.process = Creator::here();
        own.sockets.clear();
        let added = own.add(this, descriptors::raise(socket));
        own.keeper = added.map_or_else(|errno| Keeper::None(errno.into()), Keeper::Connected);
        own.for_child = ForChild::NOTHING;
        drop(own);
        Ok(this)
    }

    /// One that is in use from now on.
    fn unused() -> &'static Self {
        let free = all().find(|one| !one.in_use.swap(true, Ordering::AcqRel));
        free.unwrap_or_else(|| {
            let own = Own {
                process: Creator::here(),
                keeper: Keeper::None(Failure::Gone),
                sockets: Vec::new(),
                for_child: ForChild::NOTHING,
            };
            let new = Box::leak(Box::new(Self {
                in_use: AtomicBool::new(true),
                own: Mutex::new(own),
                next: AtomicPtr::new(FIRST.load(Ordering::Acquire)),
            }));
            let pointer: *mut Self = new;
            // SAFETY: leaked above; whoever finds it in the list has a shared reference, too.
            let new: &'static Self = unsafe { &*pointer };
            while let Err(first) = FIRST.compare_exchange(
                new.next.load(Ordering::Relaxed),
                pointer,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                new.next.store(first, Ordering::Relaxed);
            }
            new
        })
    }

    /// Closes the sockets that are not dropped by themselves, and lets another vault have this.
    pub(super) fn close(&'static self) {
        let mut own = self.lock();
        let keeper = std::mem::replace(&mut own.keeper, Keeper::None(Failure::Gone));
        drop(own);
        drop(keeper);
        self.in_use.store(false, Ordering::Release);
    }

    fn lock(&'static self) -> MutexGuard<'static, Own> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a pair of sockets for an answer: where it arrives, and where the keeper sends it.
    pub(super) fn pair(&'static self) -> Result<(Arc<Socket>, Arc<Socket>), Failure> {
        // Under the lock, so that no fork sees them before they are counted.
        let mut own = self.lock();
        let (hear, say) = message::pair()?;
        let hear = own.add(self, descriptors::raise(hear))?;
        match own.add(self, say) {
            Ok(say) => Ok((hear, say)),
            Err(errno) => {
                // What drops a socket acquires the lock.
                drop(own);
                Err(errno.into())
            }
        }
    }

    /// Returns the socket on which the keeper hears this process, by `until`.
    pub(super) fn keeper(&'static self, until: Moment) -> Result<Arc<Socket>, Failure> {
        loop {
            let known = self.lock().keeper.clone();
            let promise = match known {
                Keeper::Connected(socket) => return Ok(socket),
                Keeper::None(failure) => return Err(failure),
                Keeper::Promised(promise) => promise,
            };
            if !promise.is_there() {
                return Err(Failure::Errno(Errno::BADF));
            }
            if !wait(&*promise, PollFlags::IN, until)? {
                return Err(Failure::TimedOut);
            }
            let mut own = self.lock();
            if matches!(&own.keeper, Keeper::Promised(still) if Arc::ptr_eq(still, &promise)) {
                let received = match take_connection(&*promise) {
                    Err(Failure::Errno(Errno::AGAIN)) => continue,
                    received => received,
                };
                let received = received.and_then(|fd| Ok(own.add(self, fd)?));
                own.keeper = received.map_or_else(Keeper::None, Keeper::Connected);
            }
            // What drops a socket acquires the lock.
            drop(own);
        }
    }
}

/// Receives a connection, and puts it out of the program's way.
fn take_connection(socket: impl AsFd) -> Result<OwnedFd, Failure> {
    let (bytes, mut fds) = message::receive(socket.as_fd())?;
    if bytes.is_empty() {
        return Err(Failure::Gone);
    }
    message::decode_answer(&bytes).map_err(Failure::Errno)?;
    fds.pop().map(descriptors::raise).ok_or(Failure::Errno(Errno::BADMSG))
}

/// Waits until something of `events` is so, or there is nobody on the other side; false after `until`.
pub(super) fn wait(socket: impl AsFd, events: PollFlags, until: Moment) -> Result<bool, Errno> {
    loop {
        let left = until.since(Moment::now());
        let left = rustix::time::Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match rustix::event::poll(&mut [PollFd::new(&socket, events)], Some(&left)) {
            Ok(0) if until.since(Moment::now()).is_zero() => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(errno) => return Err(errno),
        }
    }
}

/// Sends a request with the socket for its answer, by `until`.
pub(super) fn send(
    keeper: BorrowedFd<'_>,
    request: &[u8],
    say: BorrowedFd<'_>,
    until: Moment,
) -> Result<(), Failure> {
    loop {
        match message::send(keeper, request, &[say], false) {
            // The queue is full.
            Err(Errno::AGAIN) if wait(keeper, PollFlags::OUT, until)? => {}
            Err(Errno::AGAIN) => return Err(Failure::TimedOut),
            // Descriptors in flight are counted by user: another process of ours has sent that many.
            Err(Errno::TOOMANYREFS) if !until.since(Moment::now()).is_zero() => {
                std::thread::sleep(IN_FLIGHT_PAUSE)
            }
            sent => return Ok(sent?),
        }
    }
}

/// The first one of all; null while there is none.
static FIRST: AtomicPtr<Connection> = AtomicPtr::new(std::ptr::null_mut());

fn all() -> impl Iterator<Item = &'static Connection> {
    let at = |pointer: &AtomicPtr<Connection>| {
        // SAFETY: null, or one that is never freed.
        unsafe { pointer.load(Ordering::Acquire).as_ref() }
    };
    std::iter::successors(at(&FIRST), move |one| at(&one.next))
}

std::thread_local! {
    /// The connections that this thread has locked, between the two halves of a fork.
    static LOCKED: RefCell<Vec<(&'static Connection, MutexGuard<'static, Own>)>> =
        const { RefCell::new(Vec::new()) };
}

fn register_handlers() -> Result<(), Errno> {
    static ONCE: Once = Once::new();
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    ONCE.call_once(|| {
        // SAFETY: the handlers are functions of this library, and are taken off the list when it is unloaded.
        let registered = unsafe {
            libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child))
        };
        REGISTERED.store(registered == 0, Ordering::Release);
    });
    if REGISTERED.load(Ordering::Acquire) { Ok(()) } else { Err(Errno::NOMEM) }
}

extern "C" fn before_fork() {
    // A thread that forks while its own end is under way has no such variables any more: its child shares.
    let _ = LOCKED.try_with(|locked| {
        let Ok(mut locked) = locked.try_borrow_mut() else { return };
        for connection in all().filter(|one| one.in_use.load(Ordering::Acquire)) {
            let until = Moment::now().after(FORK_PATIENCE);
            // What was promised to this process, it may have by now.
            let _ = connection.keeper(until);
            let mut own = connection.lock();
            own.for_child = ask_for_child(&own, until);
            locked.push((connection, own));
        }
    });
}

extern "C" fn after_fork_in_parent() {
    let _ = LOCKED.try_with(|locked| {
        let Ok(mut locked) = locked.try_borrow_mut() else { return };
        for (_, mut own) in locked.drain(..) {
            own.for_child = ForChild::NOTHING;
        }
    });
}

extern "C" fn after_fork_in_child() {
    let _ = LOCKED.try_with(|locked| {
        let Ok(mut locked) = locked.try_borrow_mut() else { return };
        for (connection, mut own) in locked.drain(..) {
            let own = &mut *own;
            for (number, cookie) in own.sockets.drain(..) {
                // A program that became a daemon may have closed it, and opened another file since.
                // SAFETY: asked about, and not kept; a number that is closed is refused.
                let same = sockopt::socket_cookie(unsafe { BorrowedFd::borrow_raw(number) }) == Ok(cookie);
                if same {
                    // SAFETY: the handles of this number are copies of the parent's; those that are dropped find that it
                    // is not in the list any more.
                    unsafe { libc::close(number) };
                }
            }
            own.process = Creator::here();
            let keeper = match std::mem::replace(&mut own.for_child, ForChild::NOTHING) {
                ForChild::Connected(fd) => own.add(connection, fd).map(Keeper::Connected),
                ForChild::Promised(fd) => own.add(connection, fd).map(Keeper::Promised),
                ForChild::None(failure) => Ok(Keeper::None(failure)),
            };
            let keeper = keeper.unwrap_or_else(|errno| Keeper::None(errno.into()));
            // Dropping a socket acquires the lock; and there is nothing left of the parent's to close.
            std::mem::forget(std::mem::replace(&mut own.keeper, keeper));
        }
    });
}

/// Asks for a connection for a child that is about to be forked.
fn ask_for_child(own: &Own, until: Moment) -> ForChild {
    let mut tries = 0;
    while tries < TRIES {
        match try_for_child(own, until) {
            Err(Failure::Gone) => tries += 1,
            // The keeper's user has too many descriptors in flight.
            Err(Failure::Errno(Errno::TOOMANYREFS)) if !until.since(Moment::now()).is_zero() => {
                std::thread::sleep(IN_FLIGHT_PAUSE)
            }
            Err(failure) => return ForChild::None(failure),
            Ok(answer) => return answer,
        }
    }
    ForChild::NOTHING
}

fn try_for_child(own: &Own, until: Moment) -> Result<ForChild, Failure> {
    let keeper = match &own.keeper {
        Keeper::Connected(socket) if socket.is_there() => socket.as_fd(),
        Keeper::Connected(_) => return Err(Failure::Errno(Errno::BADF)),
        // A process that has not heard yet whether it is connected cannot ask for others.
        Keeper::Promised(_) => return Err(Failure::TimedOut),
        Keeper::None(failure) => return Err(*failure),
    };
    let (hear, say) = message::pair()?;
    send(keeper, &Request::Connection.encode(), say.as_fd(), until)?;
    drop(say);
    if !wait(&hear, PollFlags::IN, until)? {
        return Ok(ForChild::Promised(descriptors::raise(hear)));
    }
    take_connection(&hear).map(ForChild::Connected)
}
