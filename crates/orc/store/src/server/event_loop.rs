//! The event loop: threads that wait at one epoll instance, receive requests and send replies.
//!
//! Each descriptor is armed for one event at a time (`EPOLLONESHOT`), so the requests of a connection are handled one after
//! the other, by any thread that has a [turn](crate::server::turns) of the client's account for it. No thread waits for a client: sockets
//! are non-blocking, and a client that does not receive its replies is disconnected.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use orrery_orc_wire::protocol::{self, MAX_MESSAGE, Refusal, Reply, decode_request};
use orrery_sys::scm;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, SocketFlags};

use crate::descriptor_limit;
use crate::named::{lease, object_directory};
use crate::objects::table::Holder;
use crate::server::farewell;
use crate::server::peer;
use crate::server::requests::{Response, handle};
use crate::server::service::Service;
use crate::server::turns::{Staffing, Turns};
use crate::state::clients::{Connection, Listener};
use crate::state::transaction::SharedState;
use crate::supervisor::channel::{Message, is_shortage, receive, send as send_to_supervisor};
use crate::supervisor::launcher::Launcher;
use crate::supervisor::records::PeerRecord;
use crate::trust_domain::TrustDomain;

/// The supervisor's number in the epoll instance; listeners have those from [`LISTENERS`] on, connections their own.
const SUPERVISOR: u64 = u64::MAX;
/// The number of what asks for the end.
const STOP: u64 = u64::MAX - 1;
const LISTENERS: u64 = 1 << 62;
/// How long a thread waits where descriptors or memory are short.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(20);
/// How many connections are accepted for one event.
const MAX_ACCEPTED: usize = 64;
/// How many threads there are at least.
const MIN_THREADS: usize = 4;

/// How long a thread goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lifetime {
    /// As long as the process: the first thread, with which the process would end.
    Process,
    /// Until it has nothing to do and enough others wait for events.
    Spare,
}

/// A running server.
#[derive(Debug)]
struct Server {
    service: Service,
    listeners: Arc<Vec<Listener>>,
    events: OwnedFd,
    turns: Turns<(Holder, Arc<Connection>)>,
    started: Instant,
    /// The second in which unused objects were last looked for.
    ticked: AtomicU64,
    is_stopping: AtomicBool,
    /// Whether the end was asked for: then there is no new supervisor.
    is_stop_requested: AtomicBool,
    /// Whether a request was handled since the last tick, and whether any was since memory was returned to the kernel.
    handled: AtomicBool,
    has_garbage: AtomicBool,
    /// How many threads hung at the last tick.
    stuck: AtomicUsize,
    /// Connections that have to be [ended](Server::disconnect) and have no thread for it yet.
    leaving: Mutex<Vec<(Holder, Arc<Connection>)>>,
}

/// Serves clients, with what the supervisor at the other end of `link` has stored, until it is asked to stop, by the supervisor or
/// because `stop` becomes readable or is closed.
///
/// # Errors
/// If the supervisor's records are malformed, or the kernel refuses what no store can do without.
pub(crate) fn serve(link: OwnedFd, launcher: Launcher, stop: BorrowedFd<'_>) -> io::Result<()> {
    abort_on_panic();
    descriptor_limit::raise();
    lease::ignore_signals();
    let started = Instant::now();
    let (state, fixed) = SharedState::restore(link, launcher, started)?;
    let turns = Turns::new(fixed.config.turns, MIN_THREADS);
    let server = Arc::new(Server {
        turns,
        service: Service::start(state, &fixed, started)?,
        listeners: fixed.listeners,
        events: epoll::create(epoll::CreateFlags::CLOEXEC)?,
        started,
        ticked: AtomicU64::new(0),
        is_stopping: AtomicBool::new(false),
        is_stop_requested: AtomicBool::new(false),
        handled: AtomicBool::new(false),
        has_garbage: AtomicBool::new(false),
        stuck: AtomicUsize::new(0),
        leaving: Mutex::default(),
    });
    server.arm_all()?;
    server.arm(stop, STOP, true)?;
    for _ in 1..MIN_THREADS {
        start_worker(&server)?;
    }
    server.work(Lifetime::Process)
}

/// Gives the kernel back what the allocator holds for later (malloc_trim(3)): after a load that may be more than all objects.
fn release_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim locks the allocator itself, and leaves what is in use.
    unsafe {
        libc::malloc_trim(0)
    };
}

fn start_worker(server: &Arc<Server>) -> io::Result<()> {
    let server = Arc::clone(server);
    std::thread::Builder::new().name("worker".into()).spawn(move || server.work(Lifetime::Spare)).map(drop)
}

/// Aborts the process if a thread panics: it may leave a client without a reply, and half a change to the others. The
/// supervisor then starts a new server.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::abort();
    }));
}

impl Server {
    fn arm(&self, fd: BorrowedFd<'_>, number: u64, is_new: bool) -> rustix::io::Result<()> {
        let events = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT;
        let data = epoll::EventData::new_u64(number);
        if is_new {
            epoll::add(&self.events, fd, data, events)
        } else {
            epoll::modify(&self.events, fd, data, events)
        }
    }

    /// Waits for events of all descriptors, and asks clients of the server before this one to repeat their requests.
    fn arm_all(self: &Arc<Self>) -> io::Result<()> {
        for (number, listener) in (LISTENERS..).zip(self.listeners.iter()) {
            self.arm(listener.socket.as_fd(), number, true)?;
        }
        let state = self.service.begin();
        if let Some(link) = state.supervisor_link() {
            self.arm(link, SUPERVISOR, true)?;
        }
        let known: Vec<_> = state.clients().iter().map(|(n, c)| (n, Arc::clone(c))).collect();
        drop(state);
        if !known.is_empty() {
            self.service.event_log.note("restart", None, None, "");
        }
        for (number, connection) in known {
            let sent = send(&connection, &Reply::Restarted.encode(0), &[]);
            if sent.is_err() || self.arm(connection.socket.as_fd(), number, true).is_err() {
                self.disconnect(number, connection);
            }
        }
        Ok(())
    }

    fn work(self: &Arc<Self>, lifetime: Lifetime) -> io::Result<()> {
        let mut buffer = vec![0; MAX_MESSAGE];
        let pause = Timespec { tv_sec: 1, tv_nsec: 0 };
        while !self.is_stopping.load(Ordering::Acquire) {
            let mut event: [epoll::Event; 1] =
                [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
            let count = match epoll::wait(&self.events, &mut event, Some(&pause)) {
                Err(Errno::INTR) => 0,
                Err(Errno::NOMEM) => {
                    std::thread::sleep(SHORTAGE_PAUSE);
                    0
                }
                other => other?,
            };
            // All threads come by each second, and one of them has to do this.
            let now = self.started.elapsed().as_secs();
            let is_second = self.ticked.fetch_max(now, Ordering::AcqRel) < now;
            if count == 0 && !is_second {
                if lifetime == Lifetime::Spare && self.turns.may_end() {
                    return Ok(());
                }
                continue;
            }
            let may_work = self.leave_events_to_another();
            if is_second {
                self.tick();
            }
            let [event] = event;
            match event.data.u64() {
                _ if count == 0 => {}
                SUPERVISOR => self.receive_from_supervisor(),
                STOP => self.request_stop(),
                number if number >= LISTENERS => self.accept(number),
                number => {
                    if let Some(connection) = self.service.begin().clients().get(number) {
                        let account = connection.peer.account.clone();
                        self.turns.add(&account, (number, connection));
                    }
                }
            }
            if may_work {
                self.work_off(&mut buffer);
            }
            self.turns.wait();
        }
        Ok(())
    }

    /// Sees to it that another thread waits for events; returns whether one does.
    fn leave_events_to_another(self: &Arc<Self>) -> bool {
        match self.turns.take_event() {
            Staffing::Enough => true,
            Staffing::Full => false,
            Staffing::Start => {
                let is_started = start_worker(self).is_ok();
                if !is_started {
                    self.turns.thread_failed();
                }
                is_started
            }
        }
    }

    /// Handles requests as long as any account that has some has a turn.
    fn work_off(self: &Arc<Self>, buffer: &mut [u8]) {
        while let Some(turn) = self.turns.next() {
            let (number, connection) = turn.work;
            self.serve_client(number, connection, buffer);
            self.handled.store(true, Ordering::Release);
            self.turns.finish(turn.number);
        }
    }

    /// Evicts unused objects, and starts a new supervisor if there is none.
    fn tick(self: &Arc<Self>) {
        self.turns.replace_overdue(Instant::now());
        self.service.readers.start_closers();
        self.log_stuck();
        let leaving = std::mem::take(&mut *self.leaving.lock().unwrap_or_else(PoisonError::into_inner));
        leaving.into_iter().for_each(|(number, connection)| self.disconnect(number, connection));
        if self.handled.swap(false, Ordering::AcqRel) {
            self.has_garbage.store(true, Ordering::Release);
        } else if self.has_garbage.swap(false, Ordering::AcqRel) {
            release_memory();
        }
        // Once more, should the kernel have refused that: nobody could connect any more.
        for (number, listener) in (LISTENERS..).zip(self.listeners.iter()) {
            let _ = self.arm(listener.socket.as_fd(), number, false);
        }
        let mut state = self.service.begin();
        state.evict_unused_for(self.service.config.keep);
        if self.is_stop_requested.load(Ordering::Acquire) && state.supervisor_link().is_none() {
            self.stop();
        }
        let note = match state.replace_supervisor(&self.listeners) {
            Ok(true) => {
                let armed = state.supervisor_link().map(|link| self.arm(link, SUPERVISOR, true));
                if matches!(armed, Some(Err(_))) {
                    state.lose_supervisor();
                }
                "a new supervisor was started".to_owned()
            }
            Ok(false) => return,
            Err(error) => error.to_string(),
        };
        drop(state);
        self.service.event_log.note("supervisor", None, None, &note);
    }

    /// Logs how many threads hang, when that has changed.
    fn log_stuck(&self) {
        let stuck = self.service.readers.stuck(None);
        if self.stuck.swap(stuck, Ordering::AcqRel) != stuck {
            let note = format!("{stuck} threads wait for files that do not answer");
            self.service.event_log.note("stuck", None, None, &note);
        }
    }

    fn receive_from_supervisor(&self) {
        let mut state = self.service.begin();
        let mut buffer = Vec::new();
        let Some(link) = state.supervisor_link() else { return };
        match receive(link, &mut buffer, |message, _| matches!(message, Message::Stop)) {
            Ok(Some(true)) => {
                // A thread that hangs keeps all descriptors open when the process has ended otherwise.
                self.clear();
                let _ = rustix::net::shutdown(link, Shutdown::Both);
                self.stop();
            }
            Ok(Some(false)) => {
                let _ = self.arm(link, SUPERVISOR, false);
            }
            Err(error) if is_shortage(&error) => {
                let _ = self.arm(link, SUPERVISOR, false);
            }
            // It died: the next tick starts another.
            Ok(None) | Err(_) => state.lose_supervisor(),
        }
    }

    /// Has the supervisor end the store. A service manager asks both processes, but there may be no supervisor just then, or one that
    /// does not listen to signals yet.
    fn request_stop(&self) {
        self.is_stop_requested.store(true, Ordering::Release);
        let mut state = self.service.begin();
        let asked = state.supervisor_link().map(|link| send_to_supervisor(link, &Message::Stop, None));
        match asked {
            Some(Ok(())) => {}
            Some(Err(_)) => state.lose_supervisor(),
            None => self.stop(),
        }
    }

    /// Removes what would stay otherwise.
    fn clear(&self) {
        self.is_stopping.store(true, Ordering::Release);
        object_directory::clear(&self.service.config);
    }

    /// Ends the process.
    fn stop(&self) -> ! {
        self.clear();
        // The other threads may sleep for a second; nothing is left for them to do.
        std::process::exit(0);
    }

    fn accept(&self, number: u64) {
        let index = usize::try_from(number - LISTENERS).unwrap_or(usize::MAX);
        let Some(listener) = self.listeners.get(index) else { return };
        for _ in 0..MAX_ACCEPTED {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(&listener.socket, flags) {
                Ok(socket) => self.connect(socket, listener),
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => {
                    // Clients in the queue have to wait until others disconnect.
                    std::thread::sleep(SHORTAGE_PAUSE);
                    break;
                }
                Err(_) => break,
            }
        }
        let _ = self.arm(listener.socket.as_fd(), number, false);
    }

    fn connect(&self, socket: OwnedFd, listener: &Listener) {
        // The PID is 0 where the store's PID namespace does not have the process.
        let Ok(credentials) = orrery_sys::peer::credentials(socket.as_fd()) else { return };
        let (uid, pid) = (credentials.uid, credentials.pid);
        let domain = listener.domain.clone().map_or(TrustDomain::User(uid), TrustDomain::Named);
        let is_of_host = peer::is_of_host(socket.as_fd(), pid);
        let Some(account) = peer::account(socket.as_fd(), pid, &domain) else {
            return self.refuse(socket, &domain);
        };
        let mut state = self.service.begin();
        state.admit(&domain, &account);
        // One that came before through another user namespace stays in its account.
        let account = state.account(&domain).clone();
        if state.clients().count_of(&account) >= self.service.config.connections
            || !state.may_have_descriptor(&domain)
        {
            drop(state);
            // The client learns it when the socket is closed.
            self.refuse(socket, &account);
            self.service.event_log.note("refuse", Some(&domain), None, "too many connections");
            return;
        }
        let (number, connection) =
            state.connect(socket, PeerRecord { domain, account, uid, pid, is_of_host });
        self.service.event_log.did(&connection.peer, "connect", None, None);
        if self.arm(connection.socket.as_fd(), number, true).is_err() {
            state.disconnect(number);
        }
    }

    /// Closes a connection that has not begun, in a thread of `account` if its client has sent something already.
    fn refuse(&self, socket: OwnedFd, account: &TrustDomain) {
        let readers = &self.service.readers;
        if farewell::has_messages(&socket) && readers.may_receive(account) {
            readers.close(account, socket);
        }
    }

    fn serve_client(self: &Arc<Self>, number: Holder, connection: Arc<Connection>, buffer: &mut [u8]) {
        let is_alive = self.exchange(number, &connection, buffer);
        if !is_alive || self.arm(connection.socket.as_fd(), number, false).is_err() {
            self.disconnect(number, connection);
        }
    }

    /// Ends a connection, which counts for its account until what its client has sent is discarded.
    fn disconnect(self: &Arc<Self>, number: Holder, connection: Arc<Connection>) {
        if !farewell::has_messages(&connection.socket) {
            self.service.begin().disconnect(number);
            return;
        }
        let (server, leaving) = (Arc::clone(self), Arc::clone(&connection));
        let is_started = self.service.readers.start(&connection.peer.account, move || {
            farewell::discard(&leaving.socket);
            server.service.begin().disconnect(number);
        });
        if !is_started {
            // The next tick tries again.
            self.leaving.lock().unwrap_or_else(PoisonError::into_inner).push((number, connection));
        }
    }

    /// Receives one request and replies; returns whether the client may stay connected.
    fn exchange(&self, number: Holder, connection: &Connection, buffer: &mut [u8]) -> bool {
        let Service { readers, event_log, .. } = &self.service;
        let account = &connection.peer.account;
        if !readers.may_receive(account) {
            event_log.did(&connection.peer, "refuse", None, Some("files of the account hang"));
            return false;
        }
        let packet =
            match scm::receive(connection.socket.as_fd(), buffer, protocol::MAX_FDS, RecvFlags::DONTWAIT) {
                Ok(packet) => packet,
                Err(Errno::AGAIN | Errno::INTR) => return true,
                Err(_) => return false,
            };
        // First, because closing one may hang.
        let files = readers.receive(account, packet.fds);
        if packet.length == 0 {
            return false;
        }
        let bytes = buffer.get(..packet.length).unwrap_or_default();
        let (tag, response) = match decode_request(bytes) {
            // This process had no room for the descriptors.
            Ok((tag, _)) if packet.truncated => (tag, Refusal::Exhausted.into()),
            Ok((tag, request)) => (tag, handle(&self.service, number, connection, &request, files)),
            Err(tag) => (tag, Refusal::Malformed.into()),
        };
        let Response { reply, files, attachment } = response;
        let mut descriptors: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.fd.as_fd()).collect();
        descriptors.extend(attachment.as_ref().map(AsFd::as_fd));
        send(connection, &reply.encode(tag), &descriptors).is_ok()
    }
}

fn send(connection: &Connection, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    scm::send(connection.socket.as_fd(), &[IoSlice::new(bytes)], descriptors, SendFlags::DONTWAIT).map(drop)
}
