//! The program's side: who asks.
//!
//! A client has a [`Link`] to each twin of its own. Threads take links out of a pool, so that as many calls run at once
//! as there are CPUs. After a fork, the pool is the parent's: the child begins with an empty one, and its first call
//! makes it a twin. Nothing of the parent's links is there any more: their memory is not inherited ([`CallBuffer`]), and
//! their sockets were closed ([`Socket`]).

use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use orrery_domain::forked::Creator;
use orrery_domain::gate::{Partner, Woken};
use orrery_domain::time::Moment;
use orrery_sys::descriptors;
use rustix::event::PollFlags;
use rustix::io::Errno;

use super::call_buffer::{ANYWHERE, CallBuffer, ROOM};
pub(super) use super::connection::Failure;
use super::connection::{self, Connection, Socket};
use super::message::{self, LOAD_ROOM, Request};

/// How long an answer may take. An RSA signature of 16384 bits takes less than a second.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often a twin is asked for, where one keeper after the other dies of it, or beside it.
const TRIES: usize = 3;

/// A vault, as each process sees it that inherited it.
#[derive(Debug)]
pub(super) struct Client {
    connection: &'static Connection,
    pool: AtomicPtr<Pool>,
    /// How often something was loaded: links made before do not know of it.
    loads: AtomicU32,
}

/// A process' links.
#[derive(Debug)]
struct Pool {
    owner: Creator,
    /// How many links there may be. The kernel tells through a dozen files, so it is asked once.
    most: usize,
    links: Mutex<Links>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct Links {
    free: Vec<Link>,
    /// How many there are, free or in use.
    made: usize,
    /// How many threads wait for one. To wake nobody takes a system call, too.
    awaited: usize,
}

/// The way to one twin.
#[derive(Debug)]
struct Link {
    line: CallBuffer,
    twin: OwnedFd,
    /// The twin ends when this is closed.
    socket: Arc<Socket>,
    calls: u32,
    loads: u32,
}

/// What was answered, and descriptors that came with it.
type Answered = (Vec<u8>, Vec<OwnedFd>);

impl Client {
    pub(super) fn new(socket: OwnedFd) -> Result<Self, Errno> {
        let connection = Connection::new(socket)?;
        Ok(Self { connection, pool: AtomicPtr::new(std::ptr::null_mut()), loads: AtomicU32::new(0) })
    }

    /// Waits for the vault's first word: it is ready, or why not.
    /// Returns whether its memory is locked.
    pub(super) fn hear(&self) -> Result<bool, Failure> {
        let until = Moment::now().after(PATIENCE);
        let keeper = self.connection.keeper(until)?;
        await_answer(keeper.as_fd(), until).map(|(body, _)| body == [1])
    }

    /// Has the keeper load something.
    pub(super) fn load(&self, request: &[u8]) -> Result<Vec<u8>, Failure> {
        if request.len() > LOAD_ROOM {
            return Err(Errno::MSGSIZE.into());
        }
        let answered = self.ask(Request::Load(request))?;
        self.loads.fetch_add(1, Ordering::SeqCst);
        Ok(answered.0)
    }

    /// Has a twin serve a call.
    pub(super) fn call(&self, request: &[u8], answer: &mut [u8]) -> Result<usize, Failure> {
        if request.len() > ROOM {
            return Err(Errno::MSGSIZE.into());
        }
        let pool = self.pool();
        let mut last = None;
        // A twin that was killed is replaced, and asked again: what is asked of vaults may be asked twice.
        for _ in 0..2 {
            let mut link = self.take(pool)?;
            let alone = pool.lock().made == 1;
            match link.call(request, answer, alone) {
                Ok(outcome) => {
                    pool.put_back(link);
                    return outcome.map_err(Failure::Errno);
                }
                Err(failure) => {
                    drop(link);
                    pool.lost();
                    if failure == Failure::TimedOut {
                        return Err(failure);
                    }
                    last = Some(failure);
                }
            }
        }
        Err(last.unwrap_or(Failure::Gone))
    }

    /// This process' pool; never freed, since threads may be in it.
    fn pool(&self) -> &'static Pool {
        let seen = self.pool.load(Ordering::Acquire);
        // SAFETY: the pointer is null or leads to a pool, and pools are never freed.
        if let Some(pool) = unsafe { seen.as_ref() } {
            if pool.owner.is_here() {
                return pool;
            }
            // The parent's, copied. Should a thread of the parent have had the lock at the fork, nobody will ever release
            // it here.
            if let Ok(mut links) = pool.links.try_lock() {
                links.free.drain(..).for_each(Link::forget);
            }
        }
        let most = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let (links, returned) = (Mutex::new(Links::default()), Condvar::new());
        let new = Box::into_raw(Box::new(Pool { owner: Creator::here(), most, links, returned }));
        match self.pool.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: just made, and never freed once it is there.
            Ok(_) => unsafe { &*new },
            Err(other) => {
                // SAFETY: nobody has seen it; and the other thread's is never freed.
                unsafe {
                    drop(Box::from_raw(new));
                    &*other
                }
            }
        }
    }

    fn take(&self, pool: &Pool) -> Result<Link, Failure> {
        let loads = self.loads.load(Ordering::SeqCst);
        let mut links = pool.lock();
        loop {
            while let Some(link) = links.free.pop() {
                if link.loads == loads && !link.is_dead() {
                    return Ok(link);
                }
                links.made -= 1;
            }
            if links.made < pool.most {
                links.made += 1;
                drop(links);
                return self.connect(loads).inspect_err(|_| pool.lost());
            }
            links.awaited += 1;
            links = pool.returned.wait(links).unwrap_or_else(PoisonError::into_inner);
            links.awaited -= 1;
        }
    }

    fn connect(&self, loads: u32) -> Result<Link, Failure> {
        let ((_, mut fds), socket) = self.ask_for_twin()?;
        if fds.len() != 2 {
            return Err(Failure::Errno(Errno::BADMSG));
        }
        let (twin, memory) = (fds.pop().ok_or(Errno::BADMSG)?, fds.pop().ok_or(Errno::BADMSG)?);
        let line = CallBuffer::map(memory.as_fd())?;
        Ok(Link { line, twin: descriptors::raise(twin), socket, calls: 0, loads })
    }

    /// A request that a keeper has taken is lost with it, and the next keeper knows nothing of it. A twin may be asked
    /// for again: one that was made and not heard of ends by itself. What else is asked may be what the keeper died of.
    fn ask_for_twin(&self) -> Result<(Answered, Arc<Socket>), Failure> {
        for _ in 1..TRIES {
            match self.ask_with_socket(Request::Twin) {
                Err(Failure::Gone) => {}
                other => return other,
            }
        }
        self.ask_with_socket(Request::Twin)
    }

    fn ask(&self, request: Request<'_>) -> Result<Answered, Failure> {
        self.ask_with_socket(request).map(|(answered, _)| answered)
    }

    fn ask_with_socket(&self, request: Request<'_>) -> Result<(Answered, Arc<Socket>), Failure> {
        let until = Moment::now().after(PATIENCE);
        let keeper = self.connection.keeper(until)?;
        let (hear, say) = self.connection.pair()?;
        connection::send(keeper.as_fd(), &request.encode(), say.as_fd(), until)?;
        // From now on only the vault has the other end: its death is an end of file.
        drop(say);
        Ok((await_answer(hear.as_fd(), until)?, hear))
    }
}

/// Waits for an answer, or for the death of whoever could give it.
fn await_answer(socket: BorrowedFd<'_>, until: Moment) -> Result<Answered, Failure> {
    loop {
        if !connection::wait(socket, PollFlags::IN, until)? {
            return Err(Failure::TimedOut);
        }
        let (bytes, fds) = match message::receive(socket) {
            // The other side ended with messages of ours unread, which the kernel reports once; what it said before comes
            // next.
            Err(Errno::CONNRESET) => continue,
            received => received?,
        };
        if bytes.is_empty() {
            return Err(Failure::Gone);
        }
        let body = message::decode_answer(&bytes).map_err(Failure::Errno)?.to_vec();
        return Ok((body, fds));
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // SAFETY: pools are never freed; nobody calls any more, so the links are free.
        if let Some(pool) = unsafe { self.pool.load(Ordering::Acquire).as_ref() }
            && let Ok(mut links) = pool.links.try_lock()
        {
            let links = mem::take(&mut links.free);
            let end = if pool.owner.is_here() { mem::drop::<Link> } else { Link::forget };
            links.into_iter().for_each(end);
        }
        self.connection.close();
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put_back(&self, link: Link) {
        self.change(|links| links.free.push(link));
    }

    fn lost(&self) {
        self.change(|links| links.made -= 1);
    }

    /// Changes something that others may wait for.
    fn change(&self, change: impl FnOnce(&mut Links)) {
        let awaited = {
            let mut links = self.lock();
            change(&mut links);
            links.awaited
        };
        if awaited != 0 {
            self.returned.notify_one();
        }
    }
}

impl Link {
    /// One call. An error of the outer kind says that the link is of no more use.
    fn call(
        &mut self,
        request: &[u8],
        answer: &mut [u8],
        alone: bool,
    ) -> Result<Result<usize, Errno>, Failure> {
        self.calls = self.calls.wrapping_add(1);
        let gate = self.line.client();
        let mut heard = gate.heard();
        // With several threads, the CPU where one waits is some other's.
        let cpu = gate.show_cpu();
        self.line.ask(self.calls, request, if alone { cpu } else { ANYWHERE });
        gate.ring();
        // Most answers are there when the ring is over, and take no clock.
        let mut until = None;
        let mut end = || *until.get_or_insert_with(|| Moment::now().after(PATIENCE));
        loop {
            if let Some(outcome) = self.line.answered(self.calls, answer) {
                return Ok(outcome);
            }
            let partner = Partner::Pidfd(self.twin.as_fd());
            // On our CPU the twin, just woken, runs as soon as we yield, and at its end falls asleep, upon which we
            // run: neither do we need to be woken, nor to ask before a sleep whether it lives.
            let woken = if alone {
                gate.wait_until(heard, || Some(end()), partner)
            } else {
                gate.wait_asleep(heard, Some(end()), partner)
            };
            match woken {
                Woken::Rung => heard = gate.heard(),
                Woken::TimedOut => return Err(Failure::TimedOut),
                Woken::PartnerGone => return Err(Failure::Gone),
            }
        }
    }

    /// Drops a copy of a parent's link: nothing is mapped there, and the socket was closed by the fork. Where it was not,
    /// the descriptors may still be the parent's.
    fn forget(self) {
        if self.socket.is_there() {
            mem::forget(self.twin);
        }
        mem::forget(self.line);
        mem::forget(self.socket);
    }

    /// Returns whether the kernel has marked the twin's death.
    fn is_dead(&self) -> bool {
        self.line.client().is_marked_dead() == Some(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers requests as a keeper does that dies of so many of them before; tells how many there were.
    fn keep(socket: &OwnedFd, deaths: usize) -> usize {
        let mut count = 0;
        loop {
            connection::wait(socket, PollFlags::IN, Moment::now().after(PATIENCE)).unwrap();
            let Some(arrival) = message::receive_request(socket.as_fd()).unwrap() else { return count };
            count += 1;
            if count > deaths {
                let (line, memory) = CallBuffer::make().unwrap();
                let own = rustix::process::pidfd_open(
                    rustix::process::getpid(),
                    rustix::process::PidfdFlags::empty(),
                );
                let fds = [memory.as_fd(), own.as_ref().unwrap().as_fd()];
                message::try_answer(arrival.answer_to.as_ref().unwrap(), Ok(&[]), &fds).unwrap();
                drop(line);
            }
        }
    }

    /// Returns what becomes of a request to keepers that die of so many, and how many there were.
    fn asked<T>(deaths: usize, ask: impl FnOnce(&Client) -> T) -> (T, usize) {
        let (ours, theirs) = message::pair().unwrap();
        let keeper = std::thread::spawn(move || keep(&theirs, deaths));
        let client = Client::new(ours).unwrap();
        let outcome = ask(&client);
        drop(client);
        (outcome, keeper.join().unwrap())
    }

    #[test]
    fn a_twin_is_asked_for_again_where_keepers_die() {
        let twin = |client: &Client| client.connect(0).map(drop);
        assert_eq!(asked(0, twin), (Ok(()), 1));
        assert_eq!(asked(TRIES - 1, twin), (Ok(()), TRIES));
        assert_eq!(asked(TRIES, twin), (Err(Failure::Gone), TRIES), "not for ever");
    }

    #[test]
    fn what_a_keeper_may_have_died_of_is_asked_once() {
        assert_eq!(asked(1, |client| client.load(b"die").unwrap_err()), (Failure::Gone, 1));
    }
}
