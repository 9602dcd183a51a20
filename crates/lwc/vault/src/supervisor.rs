//! The vault's side: the keeper, its spare, and the twins.
//!
//! The keeper has loaded the secrets. It serves nobody itself, but copies itself (fork(2)) for each client: a twin has
//! all that was loaded until then, serves this client alone, and ends with it. So clients never wait for one another,
//! and one that breaks its twin breaks nobody else's.
//!
//! The spare is a copy of the keeper, too, renewed whenever something was loaded. It sleeps until the keeper dies, and
//! then is the keeper, with a spare of its own. Both have all connections open on which requests arrive, so none is lost
//! but the one that the keeper died of.
//!
//! When the last process of the program is gone, or has closed its end of its connection, keeper and spare end; a twin
//! ends with its client, or when that closes the socket between the two. So nothing of the vault's may have the program's
//! end of a connection open, by whatever way a client passes it.
//!
//! Keeper and spare parse what an attacker sends, with the secrets at hand. They have hardly any capabilities, and a
//! filter of system calls ([`closed::confine_keeper`]), unless loading needs more ([`Loads::Anything`]).

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;
use std::time::Instant;

use orrery_domain::gate::{Face, Partner};
use orrery_domain::watch::{EventSource, Watcher, last_errno};
use orrery_sys::signals;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, getrlimit, pidfd_open, setrlimit};
use rustix::thread::CpuSet;

use super::call_buffer::{ANYWHERE, CallBuffer, ROOM};
use super::connections::{Connections, Family, Peer, is_fair};
use super::message::{self, LOAD_ROOM, Request};
use super::{Loads, VaultService, closed};

/// How many twins one client may have: more than it has any use for.
const TWINS_OF_ONE: usize = 64;
/// How many twins there may be, and how many connections; fewer, where the keeper may not have so many descriptors.
const MOST: usize = 4096;
/// How many descriptors a keeper has beside those of twins and connections, at most.
const OTHER_DESCRIPTORS: usize = 32;
/// After how long a spare that could not be made is tried again, and how long one may take to end.
const SPARE_PATIENCE: Duration = Duration::from_secs(1);
/// How long to wait where the kernel is short of memory or descriptors.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);
/// How long a twin waits where its user has too many descriptors in flight.
const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(2);
/// A spare that lives shorter than this is not replaced at once.
const SHORT_LIFE: Duration = Duration::from_secs(1);

/// Keeps secrets until nobody is left who could ask. `socket` is where requests arrive.
///
/// The process must have one thread, which never returns.
pub(super) fn keep<K: VaultService>(socket: OwnedFd, keeper: &mut K) -> ! {
    let outcome = prepare(&socket, keeper.loads());
    // Whoever made this process waits for it to be closed.
    let greeting = outcome.as_ref().map(|prepared| [u8::from(prepared.locked)]);
    message::answer(Some(&socket), greeting.as_ref().map(|byte| &byte[..]).map_err(|errno| **errno));
    if let Ok(prepared) = outcome {
        let state = State {
            connections: Connections::new(socket, prepared.program_end),
            own: prepared.own,
            most: prepared.most,
            user: rustix::process::geteuid().as_raw(),
            pinned: None,
            spare: None,
            twins: Vec::new(),
        };
        state.serve(keeper);
    }
    exit(0)
}

/// What a keeper knows before it keeps anything.
struct Prepared {
    own: OwnedFd,
    program_end: u64,
    most: usize,
    locked: bool,
}

/// Closes all doors, before anything is loaded.
fn prepare(socket: &OwnedFd, loads: Loads) -> Result<Prepared, Errno> {
    closed::close()?;
    closed::reserve_heap();
    let locked = closed::lock_memory(true);
    signals::block_all();
    // SAFETY: no handler is set. Twins and spares are known by their pidfds; nobody waits for them. The alarm is a
    // deadline, which ends the process.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        libc::signal(libc::SIGALRM, libc::SIG_DFL);
    }
    signals::set_mask(!signals::mask_of(&[libc::SIGALRM]));
    // Neither a terminal's signals nor its hang-up are meant for us.
    let _ = rustix::process::setsid();
    let most = (raise_descriptor_limit().saturating_sub(OTHER_DESCRIPTORS) / 2).min(MOST);
    message::name_senders(socket)?;
    let hello = message::receive_request(socket.as_fd())?.and_then(|arrival| arrival.bytes);
    let Some(Request::Hello(program_end)) = hello.as_deref().and_then(Request::decode) else {
        return Err(Errno::PROTO);
    };
    let own = myself()?;
    if loads == Loads::Files {
        closed::drop_most_capabilities();
        closed::confine_keeper();
    }
    Ok(Prepared { own, program_end, most, locked })
}

/// Allows the process as many descriptors as it may allow itself; returns how many.
fn raise_descriptor_limit() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let most = if setrlimit(Resource::Nofile, raised).is_ok() { limit.maximum } else { limit.current };
    most.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX))
}

fn myself() -> Result<OwnedFd, Errno> {
    pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
}

fn exit(status: i32) -> ! {
    // SAFETY: ends the process without running anything of the program's.
    unsafe { libc::_exit(status) }
}

/// Who a process is after it copied itself.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The keeper that it was.
    VaultService,
    /// The copy, when its time has come.
    Successor,
    /// The copy, when there is nobody left to serve.
    Superfluous,
}

struct Twin {
    client: Option<Pid>,
    family: Family,
    pidfd: OwnedFd,
}

struct Spare {
    pidfd: OwnedFd,
    /// Where it hears of new connections, and that it is to end: a keeper that could send signals could send them to
    /// others.
    tell: OwnedFd,
    made: Instant,
}

struct State {
    connections: Connections,
    /// The keeper, as its spare knows it.
    own: OwnedFd,
    /// How many twins there may be, and how many connections.
    most: usize,
    /// Whose process this is: who may have something loaded.
    user: u32,
    /// The first other user who came. Servers change their user once; no third one has a business here.
    pinned: Option<u32>,
    spare: Option<Spare>,
    twins: Vec<Twin>,
}

impl State {
    /// Serves until nobody is left who could ask. No failure of the system's ends it: what cannot be done now may be
    /// possible later, and without a keeper the secrets are gone.
    fn serve<K: VaultService>(mut self, keeper: &mut K) {
        loop {
            if self.spare.is_none() {
                match self.make_spare() {
                    Role::VaultService => {}
                    // It needs a spare of its own before it receives what its predecessor may have died of.
                    Role::Successor => continue,
                    Role::Superfluous => return,
                }
            }
            let mut due = keeper.tidy();
            if due.is_some_and(|due| due.is_zero()) {
                self.end_spare();
                continue;
            }
            if self.spare.is_none() {
                due = Some(due.map_or(SPARE_PATIENCE, |due| due.min(SPARE_PATIENCE)));
            }
            let due = due.and_then(|due| rustix::time::Timespec::try_from(due).ok());
            let (connected, spares) = (self.connections.len(), usize::from(self.spare.is_some()));
            let mut all: Vec<PollFd<'_>> = Vec::with_capacity(connected + spares + self.twins.len());
            all.extend(
                self.connections.sockets().map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)),
            );
            all.extend(self.spare.iter().map(|spare| PollFd::new(&spare.pidfd, PollFlags::IN)));
            all.extend(self.twins.iter().map(|twin| PollFd::new(&twin.pidfd, PollFlags::IN)));
            if rustix::io::retry_on_intr(|| rustix::event::poll(&mut all, due.as_ref())).is_err() {
                // Short of memory.
                std::thread::sleep(SHORTAGE_PAUSE);
                continue;
            }
            let events: Vec<bool> = all.iter().map(|one| !one.revents().is_empty()).collect();
            drop(all);
            let (asked, events) = events.split_at(connected);
            let (spare_died, twins_died) = events.split_at(spares);
            let mut died = twins_died.iter();
            self.twins.retain(|_| died.next() != Some(&true));
            if spare_died.contains(&true)
                && let Some(spare) = self.spare.take()
                && spare.made.elapsed() < SHORT_LIFE
            {
                // Somebody kills them as fast as they are made.
                std::thread::sleep(Duration::from_millis(50));
            }
            for program_end in self.connections.turns(asked) {
                match self.receive(program_end) {
                    Ok(None) => self.connections.remove(program_end),
                    Ok(Some((arrival, family))) => {
                        self.handle_arrival(keeper, &arrival, family);
                        // With an answer socket, what is in its queue is closed.
                        let _deadline = closed::DescriptorsDeadline::begin();
                        drop(arrival);
                    }
                    // Taken by a keeper that we replace, or out of descriptors: then the request is gone, and who sent
                    // it finds its socket closed.
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(_) => std::thread::sleep(Duration::from_millis(10)),
                }
            }
            if self.connections.is_empty() {
                return self.end_spare();
            }
        }
    }

    /// Receives a request over the connection with this end, and of which family it is; an answer socket that is none is
    /// closed.
    fn receive(&self, program_end: u64) -> Result<Option<(message::Arrival, Family)>, Errno> {
        let Some(peer) = self.connections.get(program_end) else { return Err(Errno::AGAIN) };
        let _deadline = closed::DescriptorsDeadline::begin();
        let Some(mut arrival) = message::receive_request(peer.socket.as_fd())? else { return Ok(None) };
        arrival.answer_to = arrival
            .answer_to
            .take()
            .filter(|fd| message::is_answer_socket(fd, |cookie| self.connections.get(cookie).is_some()));
        Ok(Some((arrival, peer.family)))
    }

    fn handle_arrival<K: VaultService>(
        &mut self,
        keeper: &mut K,
        arrival: &message::Arrival,
        family: Family,
    ) {
        let answer_to = arrival.answer_to.as_ref();
        let request = arrival.bytes.as_deref().ok_or(Errno::MSGSIZE);
        let request = request.and_then(|bytes| Request::decode(bytes).ok_or(Errno::BADMSG));
        let done = match (request, arrival.from) {
            (Ok(Request::Load(bytes)), Some((_, user))) if self.may_load(user) => {
                let mut answer = vec![0; LOAD_ROOM];
                let length = closed::with_all_files(|| keeper.load(bytes, &mut answer));
                // The next keeper shall know it, too, and shall be there before anybody relies on it.
                self.end_spare();
                match self.make_spare() {
                    Role::VaultService => {}
                    Role::Successor => return,
                    Role::Superfluous => exit(0),
                }
                length.map(|length| {
                    message::answer(answer_to, Ok(&answer[..length.min(LOAD_ROOM)]));
                })
            }
            (Ok(Request::Twin), Some((client, user))) if self.may_ask(user) => {
                self.make_twin(keeper, client, family, answer_to)
            }
            // Whoever has a connection may have one for its children; as whom these ask is seen when they do.
            (Ok(Request::Connection), Some((_, user))) => self.open_connection(user, family, answer_to),
            (Ok(Request::Hello(_)), _) => Err(Errno::BADMSG),
            (Ok(_), _) => Err(Errno::PERM),
            (Err(errno), _) => Err(errno),
        };
        if let Err(errno) = done {
            message::answer(answer_to, Err(errno));
        }
    }

    fn may_load(&self, user: u32) -> bool {
        user == self.user || user == 0
    }

    fn may_ask(&mut self, user: u32) -> bool {
        self.may_load(user) || *self.pinned.get_or_insert(user) == user
    }

    /// Makes a connection for a process that one of `family` is about to fork.
    fn open_connection(
        &mut self,
        user: u32,
        family: Family,
        answer_to: Option<&OwnedFd>,
    ) -> Result<(), Errno> {
        let answer_to = answer_to.ok_or(Errno::BADMSG)?;
        let family = if self.may_load(user) { self.connections.new_family() } else { family };
        if !is_fair(self.connections.of_family(family), self.connections.len(), self.most) {
            return Err(Errno::USERS);
        }
        let (peer, theirs) = Peer::connect(family)?;
        // Before anybody relies on it, the next keeper has it, too.
        if let Some(spare) = &self.spare
            && tell_spare(&spare.tell, &peer).is_err()
        {
            // It is made again, and has this one, then.
            self.end_spare();
        }
        self.connections.add(peer);
        // Where it cannot be sent, it is closed, and the connection with it; the client is told why.
        message::try_answer(answer_to, Ok(&[]), &[theirs.as_fd()])
    }

    fn make_spare(&mut self) -> Role {
        let Ok((told, tell)) = message::pair() else { return Role::VaultService };
        // SAFETY: the process has one thread, as `keep` demands, so the child finds no lock held by another
        // one.
        match unsafe { libc::fork() } {
            0 => {
                drop(tell);
                self.spare = None;
                closed::lock_memory(true);
                wait_for_my_turn(self, told)
            }
            number => {
                self.spare = Pid::from_raw(number.max(0)).and_then(|pid| {
                    let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else {
                        // One that cannot be watched is none.
                        let _ = message::send(tell.as_fd(), &END, &[], false);
                        return None;
                    };
                    Some(Spare { pidfd, tell, made: Instant::now() })
                });
                Role::VaultService
            }
        }
    }

    fn end_spare(&mut self) {
        if let Some(spare) = self.spare.take() {
            let _ = message::send(spare.tell.as_fd(), &END, &[], false);
            // Dead before there is another one: two would both be keepers. One that somebody stopped ends when it
            // continues.
            let mut one = [PollFd::new(&spare.pidfd, PollFlags::IN)];
            let patience = rustix::time::Timespec::try_from(SPARE_PATIENCE).ok();
            let _ = rustix::io::retry_on_intr(|| rustix::event::poll(&mut one, patience.as_ref()));
        }
    }

    fn make_twin<K: VaultService>(
        &mut self,
        keeper: &mut K,
        client: Option<Pid>,
        family: Family,
        answer_to: Option<&OwnedFd>,
    ) -> Result<(), Errno> {
        let answer_to = answer_to.ok_or(Errno::BADMSG)?;
        let of_client = self.twins.iter().filter(|twin| twin.client == client).count();
        let of_family = self.twins.iter().filter(|twin| twin.family == family).count();
        if of_client >= TWINS_OF_ONE || !is_fair(of_family, self.twins.len(), self.most) {
            return Err(Errno::USERS);
        }
        // SAFETY: the process has one thread, as `keep` demands, so the child finds no lock held by another
        // one.
        match unsafe { libc::fork() } {
            0 => {
                // Whatever else the keeper has open is none of the twin's business; least of all the socket, whose end of
                // file would never come.
                match rustix::io::fcntl_dupfd_cloexec(answer_to, 3).and_then(only) {
                    Ok(socket) => {
                        let Err(errno) = live_as_twin(keeper, client, &socket);
                        message::answer(Some(&socket), Err(errno));
                    }
                    Err(errno) => message::answer(Some(answer_to), Err(errno)),
                }
                exit(0)
            }
            number => {
                let pid = Pid::from_raw(number.max(0)).ok_or_else(last_errno)?;
                // One that is dead by now has said why, or its client sees the end of file.
                if let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) {
                    self.twins.push(Twin { client, family, pidfd });
                }
                Ok(())
            }
        }
    }
}

/// Serves one client, until that closes the other end of `socket`, the only descriptor beside the standard ones.
fn live_as_twin<K: VaultService>(
    keeper: &mut K,
    client: Option<Pid>,
    socket: &OwnedFd,
) -> Result<std::convert::Infallible, Errno> {
    signals::block_all();
    let (line, memory) = CallBuffer::make()?;
    let buffers = (vec![0; ROOM], vec![0; ROOM]);
    closed::lock_memory(false);
    closed::drop_capabilities();
    // A client without a number lives in another PID namespace: there is only the socket to tell of its death. One
    // that is dead by now needs no twin.
    let client = client.map(|pid| pidfd_open(pid, PidfdFlags::empty())).transpose()?;
    let heard = line.twin().heard();
    // SAFETY: the mark is in the line's memory, which this process keeps until it ends.
    let watcher = unsafe { Watcher::prepare(client.as_ref().unwrap_or(socket).as_raw_fd(), line.mark()) };
    let mut watcher = watcher.map_err(|_| Errno::NOMEM)?;
    let source =
        EventSource { fd: socket.as_raw_fd(), on_readable: leave, with: std::ptr::null(), on_idle: None };
    // SAFETY: `leave` makes one system call and does not return.
    unsafe { watcher.listen(source) };
    watcher.start()?;
    let own = myself()?;
    // Descriptors in flight are counted by user: others may not have taken yet what vaults of ours have sent them. The
    // watcher ends a twin whose client does not wait any longer.
    while let Err(errno) = message::try_answer(socket, Ok(&[]), &[memory.as_fd(), own.as_fd()]) {
        if errno != Errno::TOOMANYREFS {
            return Err(errno);
        }
        std::thread::sleep(IN_FLIGHT_PAUSE);
    }
    drop((memory, own));
    closed::give_up();
    Server { line, keeper, heard, buffers }.serve()
}

/// What tells a spare to end.
const END: [u8; 1] = [0];

/// Has the spare have a connection, too.
fn tell_spare(spare: &OwnedFd, peer: &Peer) -> Result<(), Errno> {
    let Family(family) = peer.family;
    let words = [peer.program_end.to_ne_bytes(), family.to_ne_bytes()].concat();
    message::send(spare.as_fd(), &words, &[peer.socket.as_fd()], false)
}

/// What a spare hears.
enum Told {
    Connection(Peer),
    End,
    /// There is nothing to receive yet.
    Nothing,
    /// The other side is gone, or has sent something else.
    Over,
}

fn hear_keeper(told: &OwnedFd) -> Told {
    match message::receive(told.as_fd()) {
        Ok((words, mut fds)) => match (words.as_chunks::<8>(), fds.pop()) {
            (([program_end, family], []), Some(socket)) => {
                let (program_end, family) = (u64::from_ne_bytes(*program_end), u64::from_ne_bytes(*family));
                Told::Connection(Peer { socket, program_end, family: Family(family) })
            }
            _ if words == END => Told::End,
            _ => Told::Over,
        },
        Err(Errno::AGAIN | Errno::INTR | Errno::NOMEM | Errno::NOBUFS) => Told::Nothing,
        Err(_) => Told::Over,
    }
}

/// In the spare: sleeps until the keeper has died, or there is nobody left to serve, or it is told to end. Meanwhile it
/// learns of new connections.
fn wait_for_my_turn(state: &mut State, told: OwnedFd) -> Role {
    let mut told = Some(told);
    loop {
        let mut all = vec![PollFd::new(&state.own, PollFlags::IN)];
        all.extend(state.connections.sockets().map(|one| PollFd::from_borrowed_fd(one, PollFlags::empty())));
        all.extend(told.as_ref().map(|told| PollFd::new(told, PollFlags::IN)));
        if rustix::io::retry_on_intr(|| rustix::event::poll(&mut all, None)).is_err() {
            std::thread::sleep(SHORTAGE_PAUSE);
            continue;
        }
        let events: Vec<bool> = all.iter().map(|one| !one.revents().is_empty()).collect();
        let (dead, closed) = (events[0], &events[1..=state.connections.len()]);
        state.connections.remove_closed(closed);
        // All that it said, also when it is dead.
        while let Some(socket) = &told {
            match hear_keeper(socket) {
                Told::Connection(peer) => state.connections.add(peer),
                Told::End => return Role::Superfluous,
                Told::Nothing => break,
                // The keeper is dying, and will be dead in a moment.
                Told::Over => told = None,
            }
        }
        if state.connections.is_empty() {
            return Role::Superfluous;
        }
        if dead {
            // Nobody else has the secrets any more: without a descriptor it is tried again.
            match myself() {
                Ok(own) => state.own = own,
                Err(_) => {
                    std::thread::sleep(SHORTAGE_PAUSE);
                    continue;
                }
            }
            return Role::Successor;
        }
    }
}

/// Closes all descriptors but the standard ones and `fd`, which moves.
fn only(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    // Descriptors that handles elsewhere in memory still name are closed here, too; none of those is used or dropped
    // again.
    if fd.as_raw_fd() != 3 {
        // SAFETY: number 3 is replaced, which nothing uses any more; `OwnedFd` then owns it alone.
        let moved = unsafe { libc::dup3(fd.as_raw_fd(), 3, libc::O_CLOEXEC) };
        if moved < 0 {
            return Err(last_errno());
        }
    }
    std::mem::forget(fd);
    // SAFETY: nothing uses descriptors above 3 any more in this process. close_range(2) cannot fail where it
    // exists (Linux 5.9).
    if unsafe { libc::syscall(libc::SYS_close_range, 4, u32::MAX, 0) } < 0 {
        for number in 4..1024 {
            // SAFETY: nothing uses descriptors above 3 any more in this process.
            unsafe { libc::close(number) };
        }
    }
    // SAFETY: just made, owned by nobody else.
    Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(3) })
}

/// On the twin's watcher: the client has closed its end.
unsafe extern "C" fn leave(_: *const c_void) {
    // SAFETY: ends the process; touches no thread-local storage.
    let _ = unsafe { syscalls::syscall!(syscalls::Sysno::exit_group, 0) };
}

/// A twin at work.
struct Server<'a, K> {
    line: CallBuffer,
    keeper: &'a mut K,
    heard: u32,
    /// For a request and its answer, in memory that is locked.
    buffers: (Vec<u8>, Vec<u8>),
}

impl<K: VaultService> Server<'_, K> {
    fn serve(mut self) -> ! {
        let (mut request, mut answer) = std::mem::take(&mut self.buffers);
        let (mut last, mut at) = (0, ANYWHERE);
        loop {
            while let Some((number, length)) = self.line.asked(last, &mut request) {
                last = number;
                let served = length.and_then(|length| self.keeper.serve(&request[..length], &mut answer));
                match served {
                    Ok(length) => {
                        let length = length.min(ROOM);
                        self.line.answer(number, Ok(&answer[..length]));
                        answer[..length].fill(0);
                    }
                    Err(errno) => self.line.answer(number, Err(errno)),
                }
                self.line.twin().ring();
                follow(&mut at, self.line.cpu());
            }
            let heard = self.heard;
            // Clients do other things between two calls, and are not to be interrupted in them.
            self.line.twin().wait_asleep(heard, None, Partner::Watched);
            self.heard = self.line.twin().heard();
        }
    }
}

/// Goes where the client runs: on its CPU the hand-over is cheapest, since nobody has to be woken up elsewhere.
fn follow(at: &mut u32, wanted: u32) {
    if *at == wanted {
        return;
    }
    *at = wanted;
    let mut cpus = CpuSet::new();
    if wanted == ANYWHERE {
        (0..CpuSet::MAX_CPU).for_each(|cpu| cpus.set(cpu));
    } else {
        let wanted = wanted as usize;
        if wanted >= CpuSet::MAX_CPU {
            return;
        }
        cpus.set(wanted);
    }
    // A CPU that it may not use is refused, and it stays where it is.
    let _ = rustix::thread::sched_setaffinity(None, &cpus);
}

const _: () = assert!(size_of::<Face>() == 64, "a face has a line of the cache for itself");
