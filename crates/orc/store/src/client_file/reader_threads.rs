//! Threads for what may hang on clients' files: each account has a few.
//!
//! A user who can mount file systems can make any call on a file last forever: with FUSE, and even through an overlay, which is
//! [local](crate::client_file::mount) by its name. A thread that hangs ends when the daemon replies or dies; until then its account has
//! one less. Reading files of local file systems has threads of its own, so that files which hang do not keep an account from these; it
//! can hang, too: XFS has no reader while a writer waits for its own memory (userfaultfd(2)). What an account wants closed while its threads hang waits for them, and a client of an account with too much of that
//! is disconnected before anything more is received from it: the kernel releases what is in a socket's queue without a call to
//! the file system that could hang.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use orrery_orc_wire::protocol::Refusal;

use crate::client_file::mount::LocalMounts;
use crate::client_file::received::ClientFile;
use crate::trust_domain::TrustDomain;

/// How many threads of each [`Purpose`] an account has at most, where closing counts as other files.
pub(super) const MAX_THREADS: usize = 4;
/// How many of them may close descriptors, so that some are left for what clients wait for.
const MAX_CLOSERS: usize = 2;
/// How long a request waits for a thread when all of its account are busy.
const SLOT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a thread is at one file before it counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(2);
/// How many descriptors of an account may wait to be closed before its clients are disconnected, if all its threads hang: a message
/// has as many.
const MAX_WAITING: usize = 64;
/// How many may wait if a thread makes progress.
const MAX_QUEUED: usize = 1024;

/// The threads of all accounts.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReaderThreads(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    accounts: Mutex<HashMap<TrustDomain, Account>>,
    /// Notified when a thread has ended.
    ended: Condvar,
    local: LocalMounts,
}

/// An account that has threads, or descriptors to be closed.
#[derive(Debug, Default)]
struct Account {
    /// The threads, and when each began with the file that it is at.
    threads: HashMap<u64, Thread>,
    next_thread: u64,
    to_close: VecDeque<OwnedFd>,
}

/// What a thread is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Files that are [known](ClientFile::is_known_local) to be local.
    Local,
    /// Reading other files.
    Other,
    /// Closing descriptors.
    Close,
}

#[derive(Debug)]
struct Thread {
    began: Instant,
    purpose: Purpose,
}

impl Thread {
    fn is_stuck(&self) -> bool {
        self.began.elapsed() >= STUCK_AFTER
    }
}

impl Account {
    fn is_unused(&self) -> bool {
        self.threads.is_empty() && self.to_close.is_empty()
    }

    fn is_full(&self, purpose: Purpose) -> bool {
        let is_local = |purpose| purpose == Purpose::Local;
        let same = self.threads.values().filter(|thread| is_local(thread.purpose) == is_local(purpose));
        same.count() >= MAX_THREADS
    }

    fn may_receive(&self) -> bool {
        let most = if self.threads.values().all(Thread::is_stuck) { MAX_WAITING } else { MAX_QUEUED };
        self.to_close.len() < most
    }

    fn add(&mut self, purpose: Purpose) -> u64 {
        let number = self.next_thread;
        self.next_thread += 1;
        self.threads.insert(number, Thread { began: Instant::now(), purpose });
        number
    }

    /// Returns whether another thread is to close what waits: those that do have been at one descriptor for long.
    fn needs_closer(&self) -> bool {
        let mut closers = self.threads.values().filter(|thread| thread.purpose == Purpose::Close);
        let is_allowed = !self.is_full(Purpose::Close) && closers.clone().count() < MAX_CLOSERS;
        !self.to_close.is_empty() && is_allowed && closers.all(Thread::is_stuck)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<TrustDomain, Account>> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a thread, unless descriptors of the account wait, of which it gets the next one.
    fn next_to_close(&self, account: &TrustDomain, number: u64) -> Option<OwnedFd> {
        let mut accounts = self.lock();
        let entry = accounts.get_mut(account)?;
        let is_local = entry.threads.get(&number).is_some_and(|thread| thread.purpose == Purpose::Local);
        let is_other_closer =
            |(other, thread): &(&u64, &Thread)| **other != number && thread.purpose == Purpose::Close;
        let may_close = !is_local && entry.threads.iter().filter(is_other_closer).count() < MAX_CLOSERS;
        let next = if may_close { entry.to_close.pop_front() } else { None };
        match &next {
            Some(_) => {
                entry.threads.insert(number, Thread { began: Instant::now(), purpose: Purpose::Close });
            }
            None => {
                entry.threads.remove(&number);
                if entry.is_unused() {
                    accounts.remove(account);
                }
                drop(accounts);
                self.ended.notify_all();
            }
        }
        next
    }

    /// Removes a thread that could not be started.
    fn forget(&self, account: &TrustDomain, number: u64) {
        let mut accounts = self.lock();
        if let Some(entry) = accounts.get_mut(account) {
            entry.threads.remove(&number);
            if entry.is_unused() {
                accounts.remove(account);
            }
        }
        drop(accounts);
        self.ended.notify_all();
    }
}

impl ReaderThreads {
    /// Takes the descriptors that a client of `account` sent.
    pub(crate) fn receive(&self, account: &TrustDomain, fds: Vec<OwnedFd>) -> Vec<ClientFile> {
        fds.into_iter().map(|fd| ClientFile::new(fd, account, self)).collect()
    }

    /// Returns whether descriptors may be received from clients of `account`: not if its threads hang and others wait to be
    /// closed.
    pub(crate) fn may_receive(&self, account: &TrustDomain) -> bool {
        self.0.lock().get(account).is_none_or(Account::may_receive)
    }

    /// Returns how many threads of an account, or of all, hang.
    pub(crate) fn stuck(&self, account: Option<&TrustDomain>) -> usize {
        let accounts = self.0.lock();
        let wanted = accounts.iter().filter(|(of, _)| account.is_none_or(|account| *of == account));
        let threads = wanted.flat_map(|(_, entry)| entry.threads.values());
        threads.filter(|thread| thread.is_stuck()).count()
    }

    pub(super) fn local_mounts(&self) -> &LocalMounts {
        &self.0.local
    }

    /// Runs `job` in a thread of the account; returns the result that it sends if that comes within `timeout`. The result of one that
    /// is late is dropped there.
    ///
    /// # Errors
    /// Those that the job sends; [`Refusal::FileSystem`] if it is late, [`Refusal::Busy`] if all threads of the account are busy or hang,
    /// [`Refusal::Exhausted`] if no thread can be started.
    pub(super) fn within<T: Send + 'static>(
        &self,
        account: &TrustDomain,
        purpose: Purpose,
        timeout: Duration,
        job: impl FnOnce(&SyncSender<Result<T, Refusal>>) + Send + 'static,
    ) -> Result<T, Refusal> {
        let results = self.results(account, purpose, 1, job)?;
        results.recv_timeout(timeout).unwrap_or(Err(Refusal::FileSystem))
    }

    /// Runs `job`, which sends up to `most` results, in a thread of the account; returns where they arrive.
    ///
    /// # Errors
    /// [`Refusal::Busy`], [`Refusal::Exhausted`], as for [`within`](Self::within).
    pub(super) fn results<T: Send + 'static>(
        &self,
        account: &TrustDomain,
        purpose: Purpose,
        most: usize,
        job: impl FnOnce(&SyncSender<T>) + Send + 'static,
    ) -> Result<Receiver<T>, Refusal> {
        let (sender, results) = sync_channel(most);
        let accounts = self.0.lock();
        let is_full =
            |accounts: &mut HashMap<_, Account>| accounts.get(account).is_some_and(|of| of.is_full(purpose));
        let waited = self.0.ended.wait_timeout_while(accounts, SLOT_TIMEOUT, is_full);
        let (mut accounts, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            return Err(Refusal::Busy);
        }
        let number = accounts.entry(account.clone()).or_default().add(purpose);
        drop(accounts);
        let is_started = self.spawn(account, number, move || job(&sender));
        if is_started { Ok(results) } else { Err(Refusal::Exhausted) }
    }

    /// Runs `job`, which is for other files than local ones, in a thread of the account, if it has one left; otherwise drops it. Returns
    /// whether it runs.
    pub(crate) fn start(&self, account: &TrustDomain, job: impl FnOnce() + Send + 'static) -> bool {
        let mut accounts = self.0.lock();
        let entry = accounts.entry(account.clone()).or_default();
        let number = (!entry.is_full(Purpose::Other)).then(|| entry.add(Purpose::Other));
        // What is dropped with the job may be a file, which asks for a thread.
        drop(accounts);
        number.is_some_and(|number| self.spawn(account, number, job))
    }

    /// Closes a descriptor in a thread of the account, as soon as it has one for that.
    pub(crate) fn close(&self, account: &TrustDomain, fd: OwnedFd) {
        self.0.lock().entry(account.clone()).or_default().to_close.push_back(fd);
        self.start_closer(account);
    }

    /// Sees to it that descriptors which wait to be closed have a thread where there can be one: to be called now and then.
    pub(crate) fn start_closers(&self) {
        let waiting: Vec<_> = self
            .0
            .lock()
            .iter()
            .filter(|(_, entry)| entry.needs_closer())
            .map(|(of, _)| of.clone())
            .collect();
        waiting.iter().for_each(|account| self.start_closer(account));
    }

    fn start_closer(&self, account: &TrustDomain) {
        let mut accounts = self.0.lock();
        let Some(entry) = accounts.get_mut(account).filter(|entry| entry.needs_closer()) else { return };
        let number = entry.add(Purpose::Close);
        drop(accounts);
        self.spawn(account, number, || {});
    }

    /// Starts the thread of this number, which runs `job` and then closes what waits; returns whether that succeeded.
    fn spawn(&self, account: &TrustDomain, number: u64, job: impl FnOnce() + Send + 'static) -> bool {
        let (shared, of) = (Arc::clone(&self.0), account.clone());
        let started = std::thread::Builder::new().name("reader".into()).spawn(move || {
            job();
            while let Some(fd) = shared.next_to_close(&of, number) {
                drop(fd);
            }
        });
        if started.is_err() {
            self.0.forget(account, number);
        }
        started.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use orrery_testing::eventually;

    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    fn run<T: Send + 'static>(
        readers: &ReaderThreads,
        account: &TrustDomain,
        timeout: Duration,
        job: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        readers.within(account, Purpose::Other, timeout, move |sender| drop(sender.send(job())))
    }

    #[test]
    fn readers_that_are_done_do_not_count() {
        let readers = ReaderThreads::default();
        for _ in 0..200 {
            assert_eq!(run(&readers, &TrustDomain::User(1), LONG, || Ok(())), Ok(()));
        }
        eventually("all end", || readers.0.lock().is_empty());
    }

    #[test]
    fn readers_that_hang_cost_their_own_account() {
        let readers = ReaderThreads::default();
        let (hang, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let (bad, good) = (TrustDomain::User(1), TrustDomain::User(2));
        for _ in 0..MAX_THREADS {
            let wait = Arc::clone(&wait);
            let stuck = move || {
                let _ = wait.lock().unwrap().recv();
                Ok(())
            };
            assert_eq!(run(&readers, &bad, Duration::from_millis(1), stuck), Err(Refusal::FileSystem));
        }
        assert_eq!(run(&readers, &bad, LONG, || Ok(())), Err(Refusal::Busy));
        assert_eq!(run(&readers, &good, LONG, || Ok(5)), Ok(5));
        eventually("they count as stuck", || readers.stuck(Some(&bad)) == MAX_THREADS);
        assert_eq!((readers.stuck(Some(&good)), readers.stuck(None)), (0, MAX_THREADS));
        let local = readers.within(&bad, Purpose::Local, LONG, |sender| {
            let _ = sender.send(Ok(6));
        });
        assert_eq!(local, Ok(6), "local files have threads of their own");
        // It ends a moment after it has replied; until then more may wait.
        eventually("only those that hang are left", || {
            readers.0.lock().get(&bad).is_some_and(|account| account.threads.values().all(Thread::is_stuck))
        });
        // What its clients send now waits to be closed, within a bound.
        let mut others = Vec::new();
        while readers.may_receive(&bad) {
            let (other, fd) = rustix::pipe::pipe().unwrap();
            others.push(other);
            drop(readers.receive(&bad, vec![fd]));
        }
        assert_eq!(others.len(), MAX_WAITING);
        assert!(readers.may_receive(&good));
        drop(hang);
        eventually("all end", || readers.0.lock().is_empty());
        for other in others {
            assert_eq!(rustix::io::read(&other, &mut [0]), Ok(0), "the other end was closed");
        }
        assert_eq!(run(&readers, &bad, LONG, || Ok(())), Ok(()));
    }

    #[test]
    fn what_is_late_is_closed_where_it_hung() {
        let readers = ReaderThreads::default();
        let account = TrustDomain::User(1);
        let (other, fd) = rustix::pipe::pipe().unwrap();
        let file = readers.receive(&account, vec![fd]).remove(0);
        let (hang, wait) = mpsc::channel::<()>();
        let late = run(&readers, &account, Duration::from_millis(1), move || {
            let _ = wait.recv();
            Ok(file)
        });
        assert_eq!(late.map(drop), Err(Refusal::FileSystem));
        drop(hang);
        assert_eq!(rustix::io::read(&other, &mut [0]), Ok(0));
        eventually("all end", || readers.0.lock().is_empty());
    }
}
