//! The part that answers: a few threads at one epoll instance.
//!
//! Each descriptor is armed for one event at a time (`EPOLLONESHOT`), so a connection's requests are worked on one after the
//! other, by whichever thread is free. Nothing here waits for a client: sockets do not block, and who does not take an answer
//! is cut off.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};

use crate::client_file::Readers;
use crate::config::Config;
use crate::event_log::Audit;
use crate::objects::cache_dropper::Trimmer;
use crate::objects::huge_pages::Collapser;
use crate::objects::table::Holder;
use crate::server::requests::{Answer, answer};
use crate::state::state::{Connection, Listener, State};
use crate::supervisor::process::{Launcher, Message, hear};
use crate::supervisor::records::ConnectionRecord;
use crate::trust_domain::Realm;
use orrery_orc_wire::packet;
use orrery_orc_wire::protocol::{LONGEST, Refusal, Reply, decode_request};

/// The keeper's place in the epoll instance; listeners are at [`LISTENERS`] and beyond, connections at their numbers.
const KEEPER: u64 = u64::MAX;
const LISTENERS: u64 = 1 << 62;
/// How many connections are taken at one go.
const GO: usize = 64;

/// A running store.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) config: Arc<Config>,
    pub(crate) state: Mutex<State>,
    pub(crate) audit: Arc<Audit>,
    pub(crate) readers: Readers,
    pub(crate) trimmer: Trimmer,
    pub(crate) collapser: Collapser,
    /// How many large objects are being copied.
    pub(crate) large: AtomicUsize,
    listeners: Arc<Vec<Listener>>,
    events: OwnedFd,
    started: Instant,
    /// At which second idle objects were last looked through.
    ticked: AtomicU64,
    stopping: AtomicBool,
}

/// Serves, with what the keeper at the other end of `link` has, until it is told to stop.
///
/// # Errors
/// Where the keeper's records make no sense, or the kernel refuses what no store can do without.
pub(crate) fn serve(link: OwnedFd, launcher: Launcher) -> io::Result<()> {
    die_of_panics();
    crate::descriptor_limit::raise();
    crate::named::directory::ignore_leases();
    let (state, audit) = State::receive(link, launcher)?;
    let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let started = Instant::now();
    let server = Arc::new(Server {
        config: Arc::clone(&state.config),
        listeners: Arc::clone(&state.listeners),
        state: Mutex::new(state),
        audit,
        readers: Readers::default(),
        trimmer: Trimmer::start(started)?,
        collapser: Collapser::start()?,
        large: AtomicUsize::new(0),
        events,
        started,
        ticked: AtomicU64::new(0),
        stopping: AtomicBool::new(false),
    });
    server.take_up()?;
    let others: Vec<_> = (1..server.config.workers.max(2))
        .map(|_| {
            let server = Arc::clone(&server);
            std::thread::Builder::new().name("worker".into()).spawn(move || server.work())
        })
        .collect::<io::Result<_>>()?;
    let result = server.work();
    drop(others);
    result
}

/// A thread that panics may leave a client without its answer, and the others with half a change: the keeper starts anew.
fn die_of_panics() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::abort();
    }));
}

impl Server {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seconds since the store started; what was there before came at 0.
    pub(crate) fn clock(&self) -> u64 {
        self.started.elapsed().as_secs()
    }

    fn arm(&self, fd: BorrowedFd<'_>, number: u64, first: bool) -> rustix::io::Result<()> {
        let events = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT;
        let data = epoll::EventData::new_u64(number);
        if first {
            epoll::add(&self.events, fd, data, events)
        } else {
            epoll::modify(&self.events, fd, data, events)
        }
    }

    /// Listens to everything that there is, and tells clients of a store before this one that they have to ask again.
    fn take_up(&self) -> io::Result<()> {
        for (number, listener) in (LISTENERS..).zip(self.listeners.iter()) {
            self.arm(listener.socket.as_fd(), number, true)?;
        }
        let state = self.lock();
        if let Some(link) = state.link() {
            self.arm(link, KEEPER, true)?;
        }
        let known: Vec<_> = state.connections.iter().map(|(n, c)| (*n, Arc::clone(c))).collect();
        drop(state);
        if !known.is_empty() {
            self.audit.note("restart", None, None, "");
        }
        for (number, connection) in known {
            let told = self.send(&connection, &Reply::Restarted.encode(0), &[]);
            if told.is_err() || self.arm(connection.socket.as_fd(), number, true).is_err() {
                self.lock().disconnect(number, self.clock());
            }
        }
        Ok(())
    }

    fn work(&self) -> io::Result<()> {
        let mut buffer = vec![0; LONGEST];
        let pause = Timespec { tv_sec: 1, tv_nsec: 0 };
        while !self.stopping.load(Ordering::Acquire) {
            let mut event: [epoll::Event; 1] =
                [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
            let count = match epoll::wait(&self.events, &mut event, Some(&pause)) {
                Err(Errno::INTR) => 0,
                other => other?,
            };
            // All threads come by each second, and one of them has to.
            let now = self.clock();
            if self.ticked.fetch_max(now, Ordering::AcqRel) < now {
                self.tick();
            }
            let [event] = event;
            match event.data.u64() {
                _ if count == 0 => {}
                KEEPER => self.hear_keeper(),
                number if number >= LISTENERS => self.accept(number),
                number => self.serve_one(number, &mut buffer),
            }
        }
        Ok(())
    }

    /// Evicts what nobody wants any more, and sees that there is a keeper.
    fn tick(&self) {
        let mut state = self.lock();
        state.note_opened(self.clock());
        if let Some(before) = self.clock().checked_sub(self.config.keep) {
            state.spare_used(before, self.clock());
            state.table.expire(before);
            state.settle();
        }
        match state.replace_keeper() {
            Ok(true) => {
                let armed = state.link().map(|link| self.arm(link, KEEPER, true));
                if matches!(armed, Some(Err(_))) {
                    state.lose_keeper();
                }
                drop(state);
                self.audit.note("keeper", None, None, "a new keeper was started");
            }
            Ok(false) => {}
            Err(error) => {
                drop(state);
                self.audit.note("keeper", None, None, &error.to_string());
            }
        }
    }

    fn hear_keeper(&self) {
        let mut state = self.lock();
        let mut buffer = Vec::new();
        let Some(link) = state.link() else { return };
        let heard = hear(link, &mut buffer, |message, _| matches!(message, Message::Stop));
        match heard {
            Ok(Some(true)) => {
                self.stopping.store(true, Ordering::Release);
                crate::named::directory::clear(&self.config);
                // The others sleep for a second at most; nobody needs them.
                std::process::exit(0);
            }
            Ok(Some(false)) => {
                let _ = self.arm(link, KEEPER, false);
            }
            // It died: the next tick starts another.
            Ok(None) | Err(_) => state.lose_keeper(),
        }
    }

    fn accept(&self, number: u64) {
        let index = usize::try_from(number - LISTENERS).unwrap_or(usize::MAX);
        let Some(listener) = self.listeners.get(index) else { return };
        for _ in 0..GO {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(&listener.socket, flags) {
                Ok(socket) => self.welcome(socket, listener),
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => {
                    // Whoever waits has to wait until somebody leaves.
                    std::thread::sleep(Duration::from_millis(20));
                    break;
                }
                Err(_) => break,
            }
        }
        let _ = self.arm(listener.socket.as_fd(), number, false);
    }

    fn welcome(&self, socket: OwnedFd, listener: &Listener) {
        let Ok(peer) = rustix::net::sockopt::socket_peercred(&socket) else { return };
        let (uid, pid) = (peer.uid.as_raw(), peer.pid.as_raw_pid());
        let realm = listener.tenant.clone().map_or(Realm::User(uid), Realm::Tenant);
        let mut state = self.lock();
        let of_realm = state.connections.values().filter(|other| other.peer.realm == realm).count();
        if of_realm >= self.config.connections || !state.may_have_descriptor(&realm) {
            drop(state);
            // Closing tells enough.
            self.audit.note("refuse", Some(&realm), None, "too many connections");
            return;
        }
        let (number, connection) = state.connect(socket, ConnectionRecord { realm, uid, pid });
        self.audit.did(&connection.peer, "connect", None, None);
        if self.arm(connection.socket.as_fd(), number, true).is_err() {
            state.disconnect(number, self.clock());
        }
    }

    fn serve_one(&self, number: Holder, buffer: &mut [u8]) {
        let Some(connection) = self.lock().connections.get(&number).cloned() else { return };
        let keep = self.exchange(number, &connection, buffer);
        if !keep || self.arm(connection.socket.as_fd(), number, false).is_err() {
            self.lock().disconnect(number, self.clock());
        }
    }

    /// Takes one request and answers; whether the client may stay.
    fn exchange(&self, number: Holder, connection: &Connection, buffer: &mut [u8]) -> bool {
        let packet = match packet::receive(connection.socket.as_fd(), buffer, RecvFlags::DONTWAIT) {
            Ok(packet) if packet.length == 0 => return false,
            Ok(packet) => packet,
            Err(Errno::AGAIN | Errno::INTR) => return true,
            Err(_) => return false,
        };
        let bytes = buffer.get(..packet.length).unwrap_or_default();
        let (tag, answer) = match decode_request(bytes) {
            // Descriptors that this process has no room for are the store's trouble.
            Ok((tag, _)) if packet.cut => (tag, Refusal::Exhausted.into()),
            Ok((tag, request)) => (tag, answer(self, number, connection, &request, packet.descriptors)),
            Err(tag) => (tag, Refusal::Malformed.into()),
        };
        let Answer { reply, memories, report } = answer;
        let mut descriptors: Vec<BorrowedFd<'_>> = memories.iter().map(|memory| memory.fd.as_fd()).collect();
        descriptors.extend(report.as_ref().map(AsFd::as_fd));
        self.send(connection, &reply.encode(tag), &descriptors).is_ok()
    }

    fn send(
        &self,
        connection: &Connection,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> rustix::io::Result<()> {
        packet::send(connection.socket.as_fd(), bytes, descriptors, SendFlags::DONTWAIT)
    }
}
