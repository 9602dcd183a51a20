//! The master's control: short conversations of one question and one reply, none of which can hold the master up.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use crate::protocol::{self, Fate, Outcome, Question, Reply, RequestId};

/// Conversations at a time; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 64;
/// A connection that says nothing for so long is sent away.
const PATIENCE: Duration = Duration::from_secs(2);
/// After how long somebody is admitted again who could not be for want of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);
/// Fates remembered; older ones are forgotten.
const MAX_FATES: usize = 4096;

/// Somebody at the control.
#[derive(Debug)]
struct Connection {
    connection: OwnedFd,
    since: Instant,
    /// The request asked for, whose worker has not been buried yet.
    waits_for: Option<RequestId>,
}

/// The control.
#[derive(Debug)]
pub(super) struct ControlConnections {
    connections: Vec<Connection>,
    /// Until when nobody is admitted, for want of descriptors or memory.
    closed_until: Option<Instant>,
    fates: VecDeque<(RequestId, Outcome)>,
}

impl ControlConnections {
    pub(super) fn new() -> Self {
        Self { connections: Vec::new(), closed_until: None, fates: VecDeque::new() }
    }

    /// Descriptors that become readable when a connection speaks.
    pub(super) fn poll_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.connections.iter().map(|connection| connection.connection.as_fd())
    }

    /// Until when the master may sleep without neglecting a connection.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.connections
            .iter()
            .map(|connection| connection.since + PATIENCE)
            .chain(self.closed_until.filter(|until| *until > Instant::now()))
            .min()
    }

    /// Whether there is room for another connection.
    pub(super) fn has_room(&self) -> bool {
        let open = self.closed_until.is_none_or(|until| until <= Instant::now());
        open && self.connections.len() < MAX_CONNECTIONS
    }

    /// Takes the next connection from the (non-blocking) control socket.
    pub(super) fn admit(&mut self, control: BorrowedFd<'_>) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(control, flags) {
            Ok(connection) => {
                self.connections.push(Connection { connection, since: Instant::now(), waits_for: None });
            }
            // It stays in the queue, and would be announced again at once.
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                self.closed_until = Some(Instant::now() + PAUSE);
            }
            // One that has left: nobody to answer.
            Err(_) => {}
        }
    }

    /// Notes that a request died with its worker.
    pub(super) fn record(&mut self, id: RequestId, outcome: Outcome) {
        if self.fates.len() == MAX_FATES {
            self.fates.pop_front();
        }
        self.fates.push_back((id, outcome));
    }

    /// Answers whoever can be answered.
    ///
    /// `unreaped` tells whether a worker, alive or dead but not reaped, runs a request; `health` describes the
    /// server.
    pub(super) fn work(
        &mut self,
        unreaped: impl Fn(RequestId) -> bool,
        health: impl Fn() -> protocol::Health,
    ) {
        let mut connections = std::mem::take(&mut self.connections);
        connections.retain_mut(|connection| {
            let Some(id) = connection.waits_for.or_else(|| match read_question(connection) {
                Input::Fate(id) => Some(id),
                Input::Health => {
                    reply(connection, &Reply::Health(health()));
                    connection.since = Instant::now() - PATIENCE;
                    None
                }
                Input::Nothing => None,
                Input::Invalid => {
                    connection.since = Instant::now() - PATIENCE;
                    None
                }
            }) else {
                return connection.since.elapsed() < PATIENCE;
            };
            if let Some((_, outcome)) = self.fates.iter().find(|(known, _)| *known == id) {
                reply(connection, &Reply::Fate(Fate::Died(outcome.clone())));
            } else if unreaped(id) && connection.since.elapsed() < PATIENCE {
                connection.waits_for = Some(id);
                return true;
            } else {
                reply(connection, &Reply::Fate(Fate::NotBegun));
            }
            false
        });
        self.connections = connections;
    }
}

enum Input {
    Fate(RequestId),
    Health,
    Nothing,
    Invalid,
}

fn read_question(connection: &Connection) -> Input {
    let mut poll = [PollFd::new(&connection.connection, PollFlags::IN)];
    if !matches!(rustix::event::poll(&mut poll, Some(&Timespec::default())), Ok(1)) {
        return Input::Nothing;
    }
    // A question is a few bytes in one piece; one that comes in pieces fails here with EAGAIN and is nonsense.
    let question = protocol::receive(connection.connection.as_fd())
        .and_then(|received| protocol::decode::<Question>(&received.body));
    match question {
        Ok(Question::Fate(id)) => Input::Fate(id),
        Ok(Question::Health) => Input::Health,
        Err(_) => Input::Invalid,
    }
}

fn reply(connection: &Connection, reply: &Reply) {
    if let Ok(frame) = protocol::encode(reply) {
        // A connection that did not wait for the reply does not need it.
        let _ = protocol::send(connection.connection.as_fd(), &frame, &[]);
    }
}
