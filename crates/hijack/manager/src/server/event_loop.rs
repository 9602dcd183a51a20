//! Waits, and dispatches.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd as _, OwnedFd};

use orrery_extension::{Manifest, Module};
use orrery_sys::scheduling::thread_cpu_time;
use orrery_sys::{peer, pressure, signals};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::connections::{Connection, MOST, MOST_OF_USER, Sent};
use super::journal::Journals;
use super::loading::{Compiled, Compiler, Loaded, Loader, refuse_more};
use super::privilege::Privilege;
use super::requests::{Outcome, handle};
use super::settings::{Handler, Listener, ServeError, Settings, listen};
use super::sources::{Ticker, Ticks};
use super::state::State;
use super::upcalls;
use crate::attributes::{Capability, Rights, Topic, TraceeId};
use crate::cpu::OwnCpus;
use crate::protocol::{Reply, Request};

/// What a descriptor is, in the numbers of epoll. Tracees and connections have their own numbers above.
const SIGNAL: u64 = 1;
const CPU_PRESSURE: u64 = 2;
const MEMORY_PRESSURE: u64 = 3;
const CLIENTS: u64 = 4;
const WAKE: u64 = 5;
const LISTENER: u64 = 6;
const CALLS: u64 = 7;
const COMPILED: u64 = 8;
const TRACEES: u64 = 1 << 40;

/// How many requests of one connection are handled at a time.
const BATCH: usize = 16;
/// How many events a handler gets at a time.
const EVENTS: usize = 64;

/// How often it looks whether it is idle, if it is to end then.
const SECOND: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

struct Server {
    state: State,
    settings: Settings,
    listener: Listener,
    /// All that serves tracees, and `clients`.
    first: OwnedFd,
    /// The listener and the connections.
    clients: OwnedFd,
    clients_wait: bool,
    ticks: Ticks,
    /// Ends the wait of clients when there is a new budget.
    wake: Ticker,
    signals: OwnedFd,
    pressure: [Option<OwnedFd>; 2],
    connections: HashMap<u64, Connection>,
    /// The rights of connections that were closed, with those that they delegated and that are open.
    closed: Vec<(Capability, HashSet<u64>)>,
    next: u64,
    /// Compiles modules, since the first one came.
    compiler: Option<Compiler>,
}

/// Serves until SIGTERM, SIGINT or SIGHUP comes, or until it is idle if it is to end then; `handlers` run within it.
///
/// # Errors
/// What the kernel refuses, and a socket that another manager has.
pub fn serve(settings: Settings, handlers: Vec<Box<dyn Handler>>) -> Result<(), ServeError> {
    let failed = |what| move |errno: Errno| ServeError::System { what, cause: errno.into() };
    let listener = listen(&settings.socket)?;
    let signals = signals::descriptor(signals::mask_of(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP]))
        .map_err(|error| failed("wait for signals")(error.errno))?;
    let privilege = Privilege::take(settings.realtime);
    let cpus = OwnCpus::read();
    let journals = Journals::new(privilege.realtime, cpus)
        .map_err(|cause| ServeError::System { what: "make an event descriptor", cause })?;
    let state = State::new(&settings, handlers, privilege, journals, cpus)?;
    let open = || epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("make an epoll instance"));
    let timer = |length| Ticker::new(length).map_err(failed("make a timer"));
    let watched = |path| settings.pressure.then(|| pressure::watch(path).ok()).flatten();
    let mut server = Server {
        state,
        listener,
        first: open()?,
        clients: open()?,
        clients_wait: false,
        ticks: Ticks::new(settings.tick),
        wake: timer(std::time::Duration::from_millis(50))?,
        signals,
        pressure: [watched(pressure::CPU), watched(pressure::MEMORY)],
        connections: HashMap::new(),
        closed: Vec::new(),
        next: TRACEES << 1,
        compiler: None,
        settings,
    };
    server.register().map_err(failed("watch descriptors"))?;
    eprintln!("orrery-manager: listening at {}", server.settings.socket.display());
    if server.settings.pressure && server.pressure.iter().any(Option::is_none) {
        eprintln!("orrery-manager: no pressure events: /proc/pressure is absent or closed to this user");
    }
    orrery_sys::service_manager::ready();
    let result = server.run().map_err(failed("wait for events"));
    orrery_sys::service_manager::stopping();
    result
}

impl Server {
    fn register(&self) -> Result<(), Errno> {
        let add = |epoll: &OwnedFd, fd: &OwnedFd, number| {
            epoll::add(epoll, fd, EventData::new_u64(number), EventFlags::IN)
        };
        add(&self.first, &self.wake.fd, WAKE)?;
        add(&self.first, &self.signals, SIGNAL)?;
        add(&self.first, self.state.journals.doorbell(), CALLS)?;
        add(&self.first, &self.clients, CLIENTS)?;
        add(&self.clients, &self.listener.socket, LISTENER)?;
        for (file, number) in self.pressure.iter().zip([CPU_PRESSURE, MEMORY_PRESSURE]) {
            if let Some(file) = file {
                epoll::add(&self.first, file, EventData::new_u64(number), EventFlags::PRI)?;
            }
        }
        Ok(())
    }

    fn run(&mut self) -> Result<(), Errno> {
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 64];
        let mut numbers: Vec<u64> = Vec::new();
        loop {
            numbers.clear();
            if self.wait()? {
                match epoll::wait(&self.first, &mut events, Some(&AT_ONCE)) {
                    Err(Errno::INTR) => {}
                    other => numbers.extend(other?.0.iter().map(|event| event.data.u64())),
                }
            }
            // The tick first, clients last.
            numbers.sort_unstable_by_key(|number| if *number == CLIENTS { u64::MAX } else { *number });
            let now = crate::time::now();
            if self.ticks.is_due(now) {
                self.tick(now);
            }
            for &number in &numbers {
                match number {
                    WAKE => drop(self.wake.has_fired()),
                    SIGNAL => {
                        if let Some(signal) = self.signal() {
                            self.end(signal);
                            return Ok(());
                        }
                    }
                    CPU_PRESSURE => self.state.table.publish(Topic::CpuPressure, None, 0, 0),
                    MEMORY_PRESSURE => self.state.table.publish(Topic::MemoryPressure, None, 0, 0),
                    CALLS => self.calls(),
                    COMPILED => self.load_compiled(),
                    CLIENTS => self.serve_clients()?,
                    tracee => self.tracee_ended(TraceeId(tracee - TRACEES)),
                }
            }
            self.after(!numbers.is_empty());
            if self.settings.until_idle && self.state.is_idle() {
                return Ok(());
            }
        }
    }

    /// Waits until a descriptor is ready or a tick is due; returns whether a descriptor is.
    fn wait(&self) -> Result<bool, Errno> {
        let idle = self.settings.until_idle.then_some(SECOND);
        let most = match (self.ticks.rest(), idle) {
            (Some(rest), Some(idle)) => Some(rest.min(idle)),
            (rest, idle) => rest.or(idle),
        };
        match poll(&mut [PollFd::new(&self.first, PollFlags::IN)], most.as_ref()) {
            Err(Errno::INTR) => Ok(false),
            other => Ok(other? > 0),
        }
    }

    fn tick(&mut self, now: u64) {
        let before = thread_cpu_time();
        let is_read = self.has_handlers();
        let State { cpu, net, table, counts, .. } = &mut self.state;
        counts.ticks += 1;
        cpu.tick(now, table, is_read);
        net.tick(|tracee| cpu.processes(tracee));
        let number = i64::try_from(counts.ticks).unwrap_or(0);
        table.publish(Topic::Timer, None, 0, number);
        self.state.counts.tick_time += thread_cpu_time().saturating_sub(before);
    }

    /// Acts on what was set, runs handlers, and sends events. `has_worked` is whether more than a tick has happened.
    fn after(&mut self, has_worked: bool) {
        for handler in 0..self.state.handlers.len() {
            let mut handled = 0;
            while handled < EVENTS && !self.state.budget.is_used_up() {
                let registered = &mut self.state.handlers[handler];
                let Some(event) = self.state.table.next_event(&registered.heard) else { break };
                registered.handler.handle(&event, &mut self.state.table);
                handled += 1;
            }
        }
        self.run_loaded();
        let changes = self.state.table.take_changes();
        if !changes.is_empty() {
            let State { cpu, net, table, .. } = &mut self.state;
            cpu.apply(&changes, table);
            net.apply(&changes, table, |tracee| cpu.processes(tracee));
        }
        let needed = self.state.cpu.is_needed() || self.state.net.is_needed();
        self.ticks.run(needed || self.has_listeners());
        let table = &mut self.state.table;
        let gone: Vec<u64> = self
            .connections
            .iter()
            .filter(|(_, connection)| !connection.send_events(table))
            .map(|(number, _)| *number)
            .collect();
        gone.into_iter().for_each(|number| self.disconnect(number));
        // Ticks alone use up no budget: its clock need not be read.
        if !has_worked && !self.has_handlers() && !self.clients_wait {
            return;
        }
        let used_up = self.state.budget.is_used_up();
        if used_up != self.clients_wait {
            let flags = if used_up { EventFlags::empty() } else { EventFlags::IN };
            if epoll::modify(&self.first, &self.clients, EventData::new_u64(CLIENTS), flags).is_ok() {
                self.clients_wait = used_up;
                self.wake.run(used_up);
            }
        }
    }

    /// Returns whether there is code in the manager that handles events, and reads attributes then.
    fn has_handlers(&self) -> bool {
        !self.state.handlers.is_empty() || self.state.loaded.as_ref().is_some_and(Loaded::is_active)
    }

    /// Returns whether somebody waits for the timer, or for what only ticks find out.
    fn has_listeners(&self) -> bool {
        self.has_handlers() || self.connections.values().any(|connection| connection.heard.is_some())
    }

    fn calls(&mut self) {
        let (calls, dropped) = self.state.journals.take();
        self.state.counts.dropped_calls = dropped;
        for call in calls {
            self.state.table.publish(Topic::Call, Some(call.tracee), call.number, call.result);
        }
    }

    fn signal(&mut self) -> Option<i32> {
        let mut record = [0; size_of::<libc::signalfd_siginfo>()];
        rustix::io::read(&self.signals, &mut record).ok()?;
        let signal = i32::from(record[0]);
        self.state.table.publish(Topic::Signal, None, signal.cast_unsigned(), 0);
        Some(signal)
    }

    fn end(&mut self, signal: i32) {
        self.state.net.leave_all();
        self.state.cpu.leave_all();
        let (tracees, name) = (self.state.processes.len(), signal_name(signal));
        eprintln!("orrery-manager: ended by {name}; {tracees} tracees go on without it");
    }

    fn tracee_ended(&mut self, tracee: TraceeId) {
        let Some(process) = self.state.processes.get(&tracee) else { return };
        let pid = process.pid;
        let _ = epoll::delete(&self.first, &process.pidfd);
        self.state.table.publish(Topic::Ended, Some(tracee), 0, pid.into());
        self.state.remove(tracee);
    }

    fn serve_clients(&mut self) -> Result<(), Errno> {
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 32];
        let (ready, _) = match epoll::wait(&self.clients, &mut events, Some(&AT_ONCE)) {
            Err(Errno::INTR) => return Ok(()),
            other => other?,
        };
        for number in ready.iter().map(|event| event.data.u64()).collect::<Vec<_>>() {
            if number == LISTENER {
                self.accept();
            } else if !self.receive(number) {
                self.disconnect(number);
            }
            if self.state.budget.is_used_up() {
                break;
            }
        }
        Ok(())
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = accept_with(&self.listener.socket, flags) else { return };
        let Ok(credentials) = peer::credentials(socket.as_fd()) else { return };
        let uid = credentials.uid;
        let own = self.connections.values().filter(|connection| connection.uid == uid).count();
        if self.connections.len() >= MOST || (own >= MOST_OF_USER && uid != 0) {
            // Closed at once: the client's next message fails.
            self.state.counts.refused += 1;
            return;
        }
        let rights = Rights::of_user(self.state.table.classes(), uid, self.state.owner, None);
        let Ok(capability) = self.state.table.grant(rights) else { return };
        let connection = Connection {
            socket,
            capability,
            uid,
            tracee: None,
            heard: None,
            is_delegated: false,
            delegated: HashSet::new(),
        };
        self.add(None, connection);
    }

    fn add(&mut self, number: Option<u64>, connection: Connection) {
        let number = number.unwrap_or_else(|| self.take_number());
        let data = EventData::new_u64(number);
        if epoll::add(&self.clients, &connection.socket, data, EventFlags::IN).is_ok() {
            self.connections.insert(number, connection);
        } else {
            self.state.table.revoke(&connection.capability);
        }
        self.state.connections = self.connections.len();
    }

    fn take_number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn disconnect(&mut self, number: u64) {
        let Some(connection) = self.connections.remove(&number) else { return };
        let _ = epoll::delete(&self.clients, &connection.socket);
        // What it has delegated stays, as a descriptor that was passed on does, and so must what that was derived from.
        let heirs = connection.delegated.clone();
        self.closed.push((connection.capability, connection.delegated));
        self.replace_number(number, &heirs);
        self.state.connections = self.connections.len();
    }

    /// Has `heirs` take the place of a connection or an extension among what was delegated; ends closed connections' rights on which
    /// nothing stands any more.
    fn replace_number(&mut self, number: u64, heirs: &HashSet<u64>) {
        let open = self.connections.values_mut().map(|connection| &mut connection.delegated);
        let closed = self.closed.iter_mut().map(|(_, delegated)| delegated);
        for delegated in open.chain(closed) {
            if delegated.remove(&number) {
                delegated.extend(heirs);
            }
        }
        let table = &mut self.state.table;
        self.closed.retain(|(capability, delegated)| {
            if delegated.is_empty() {
                table.revoke(capability);
            }
            !delegated.is_empty()
        });
    }

    /// Runs extensions that connections have loaded, and ends those that are to end.
    fn run_loaded(&mut self) {
        let State { loaded, table, budget, .. } = &mut self.state;
        let Some(loaded) = loaded else { return };
        let mut handled = 0;
        while handled < EVENTS && !budget.is_used_up() && loaded.handle_next(table) {
            handled += 1;
        }
        for number in loaded.sweep(table) {
            self.report_end(number, None);
            self.replace_number(number, &HashSet::new());
        }
    }

    /// Begins to load an extension: its module is compiled, and the reply comes then.
    fn begin_to_load(&mut self, number: u64, manifest: String, fds: Vec<OwnedFd>) -> Result<(), String> {
        let uid = self.connections.get(&number).map_or(u32::MAX, |connection| connection.uid);
        let module = fds.into_iter().next().ok_or("cannot load an extension: its module is missing")?;
        self.may_load(number)?;
        if self.compiler.is_none() {
            let compiler = Compiler::start(self.state.cpus)?;
            epoll::add(&self.first, compiler.doorbell(), EventData::new_u64(COMPILED), EventFlags::IN)
                .map_err(|errno| format!("cannot load an extension: {errno}"))?;
            self.compiler = Some(compiler);
        }
        let compiler = self.compiler.as_mut().ok_or("cannot load an extension")?;
        compiler.compile(number, uid, manifest, module)
    }

    /// Returns who loads an extension by a connection, if that may.
    fn may_load(&self, number: u64) -> Result<Loader, String> {
        let connection = self.connections.get(&number).ok_or("the connection was closed")?;
        let rights = self.state.table.rights(&connection.capability).map_err(|error| error.to_string())?;
        if !rights.load {
            return Err("cannot load an extension: the connection's rights do not include it".to_owned());
        }
        let uid = connection.uid;
        let most = (!self.state.is_privileged(uid)).then_some(self.state.user_extensions);
        if let Some(most) = most {
            let own = self.state.loaded.as_ref().map_or(0, |loaded| loaded.count(uid));
            refuse_more(own, most, uid)?;
        }
        Ok(Loader { uid, most, tracee: connection.tracee })
    }

    /// Loads what was compiled, and replies.
    fn load_compiled(&mut self) {
        let all = self.compiler.as_mut().map(Compiler::take).unwrap_or_default();
        for Compiled { connection, result } in all {
            // Who has closed the connection does not wait for it any more.
            if !self.connections.contains_key(&connection) {
                continue;
            }
            let number = self.take_number();
            let reply = match result.and_then(|compiled| self.load(connection, number, &compiled)) {
                Ok(()) => Reply::Loaded { number },
                Err(reason) => {
                    self.state.counts.refused += 1;
                    Reply::Failed(reason)
                }
            };
            if !self.reply(connection, reply.into()) {
                self.disconnect(connection);
            }
        }
    }

    fn load(&mut self, by: u64, number: u64, compiled: &(Manifest, Module)) -> Result<(), String> {
        let loader = self.may_load(by)?;
        self.state.loaded()?;
        let State { loaded, table, .. } = &mut self.state;
        let (Some(loaded), Some(connection)) = (loaded, self.connections.get_mut(&by)) else {
            return Err("cannot load an extension: the connection was closed".to_owned());
        };
        loaded.load(number, compiled, &connection.capability, loader, table)?;
        connection.delegated.insert(number);
        Ok(())
    }

    /// Unloads an extension: of the connection, of its user, or any for those who may do everything.
    fn unload(&mut self, by: u64, number: u64) -> Result<Reply, String> {
        let unknown =
            || format!("cannot unload extension {number}: there is none of this number that is yours");
        let connection = self.connections.get(&by).ok_or_else(unknown)?;
        let own = connection.delegated.contains(&number);
        let (uid, delegated) = (connection.uid, connection.is_delegated);
        let State { loaded, table, owner, .. } = &mut self.state;
        let loaded = loaded.as_mut().ok_or_else(unknown)?;
        let user = loaded.user(number).ok_or_else(unknown)?;
        // A delegated connection may have been passed to another user.
        if !own && (delegated || (user != uid && uid != 0 && uid != *owner)) {
            return Err(unknown());
        }
        loaded.unload(number, table);
        self.report_end(number, Some(by));
        self.replace_number(number, &HashSet::new());
        Ok(Reply::Done)
    }

    /// Reports to the connection that has loaded an extension that it has ended: else it would be loaded again into the next manager.
    fn report_end(&self, number: u64, by: Option<u64>) {
        let mut others = self.connections.iter().filter(|(connection, _)| Some(**connection) != by);
        if let Some((_, connection)) = others.find(|(_, connection)| connection.delegated.contains(&number)) {
            // Who does not receive does not wait for it either.
            let _sent = connection.send(&Reply::Ended { number }, None);
        }
    }

    /// Handles requests of a connection; returns whether it goes on.
    fn receive(&mut self, number: u64) -> bool {
        for _ in 0..BATCH {
            let Some(connection) = self.connections.get_mut(&number) else { return true };
            let (bytes, fds) = match connection.receive() {
                Ok(Some(message)) => message,
                Ok(None) => return true,
                Err(Errno::PIPE | Errno::CONNRESET) => return false,
                Err(_) => {
                    self.state.counts.refused += 1;
                    return false;
                }
            };
            if bytes == orrery_upcall::wire::REGISTER {
                if !upcalls::register(&mut self.state, connection) {
                    return false;
                }
                continue;
            }
            let outcome = match postcard::from_bytes::<Request>(&bytes) {
                Ok(Request::Revoke { number: other }) => self.revoke(number, other).into(),
                Ok(Request::Load { manifest }) => match self.begin_to_load(number, manifest, fds) {
                    Ok(()) => return true,
                    Err(reason) => {
                        self.state.counts.refused += 1;
                        Reply::Failed(reason).into()
                    }
                },
                Ok(Request::Unload { number: other }) => self
                    .unload(number, other)
                    .unwrap_or_else(|reason| {
                        self.state.counts.refused += 1;
                        Reply::Failed(reason)
                    })
                    .into(),
                Ok(request) => {
                    self.next += 1;
                    let next = self.next;
                    handle(&mut self.state, connection, request, fds, next)
                }
                Err(_) => {
                    self.state.counts.refused += 1;
                    Reply::Failed(
                        "cannot read the request: it is of another version, or malformed".to_owned(),
                    )
                    .into()
                }
            };
            if !self.reply(number, outcome) {
                return false;
            }
            if self.state.budget.is_used_up() {
                return true;
            }
        }
        true
    }

    fn reply(&mut self, number: u64, outcome: Outcome) -> bool {
        let Outcome { reply, fd, added, joined } = outcome;
        if let Some((number, connection)) = added {
            self.add(Some(number), connection);
        }
        if let Some(tracee) = joined
            && let Some(process) = self.state.processes.get(&tracee)
        {
            let data = EventData::new_u64(TRACEES + tracee.0);
            let _ = epoll::add(&self.first, &process.pidfd, data, EventFlags::IN);
        }
        let Some(connection) = self.connections.get(&number) else { return false };
        matches!(connection.send(&reply, fd.as_ref()), Sent::Done)
    }

    /// Ends the rights of a connection that `by` delegated.
    fn revoke(&mut self, by: u64, number: u64) -> Reply {
        let owns = self.connections.get(&by).is_some_and(|own| own.delegated.contains(&number));
        if !owns {
            self.state.counts.refused += 1;
            return Reply::Failed(format!("cannot revoke connection {number}: this one did not delegate it"));
        }
        if let Some(connection) = self.connections.get(&number) {
            self.state.table.revoke(&connection.capability);
        } else if let Some(loaded) = &mut self.state.loaded {
            loaded.unload(number, &mut self.state.table);
        }
        if let Some(own) = self.connections.get_mut(&by) {
            own.delegated.remove(&number);
        }
        Reply::Done
    }
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGTERM => "SIGTERM",
        libc::SIGINT => "SIGINT",
        _ => "SIGHUP",
    }
}
