//! The master's control: short conversations of one question and one reply, none of which can hold the master up.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use crate::protocol::{self, Fate, Outcome, Question, Reloaded, Reply, RequestId};

/// Conversations at a time; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 64;
/// A connection that says nothing for so long is sent away.
const PATIENCE: Duration = Duration::from_secs(2);
/// After how long a connection is admitted again that could not be for want of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);
/// Fates remembered; older ones are forgotten.
const MAX_FATES: usize = 4096;

/// A connection at the control socket.
#[derive(Debug)]
struct Connection {
    connection: OwnedFd,
    since: Instant,
    waits_for: Option<Wait>,
}

/// What a connection that has asked waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// The end of this request's worker, which has not been reaped yet.
    Fate(RequestId),
    /// The end of a reload.
    Reload,
}

/// The control.
#[derive(Debug)]
pub(super) struct ControlConnections {
    connections: Vec<Connection>,
    /// Until when no connection is admitted, for want of descriptors or memory.
    closed_until: Option<Instant>,
    fates: VecDeque<(RequestId, Outcome)>,
}

impl ControlConnections {
    pub(super) fn new() -> Self {
        Self { connections: Vec::new(), closed_until: None, fates: VecDeque::new() }
    }

    /// Descriptors that become readable when a connection asks. One that has asked is readable when it ends, of which
    /// nothing follows.
    pub(super) fn poll_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let asking = self.connections.iter().filter(|connection| connection.waits_for.is_none());
        asking.map(|connection| connection.connection.as_fd())
    }

    /// Until when the master may sleep without neglecting a connection.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.connections
            .iter()
            .filter(|connection| connection.waits_for != Some(Wait::Reload))
            .map(|connection| connection.since + PATIENCE)
            .chain(self.closed_until.filter(|until| *until > Instant::now()))
            .min()
    }

    /// Returns whether there is room for another connection.
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

    /// Answers the connections that can be answered.
    ///
    /// `unreaped` returns whether a worker, alive or dead but not reaped, runs a request; `health` describes the
    /// server; `reload` begins a reload, or returns why it does not.
    pub(super) fn work(
        &mut self,
        unreaped: impl Fn(RequestId) -> bool,
        health: impl Fn() -> protocol::Health,
        mut reload: impl FnMut() -> Result<(), String>,
    ) {
        let mut connections = std::mem::take(&mut self.connections);
        connections.retain_mut(|connection| {
            let id = match connection.waits_for {
                Some(Wait::Reload) => return true,
                Some(Wait::Fate(id)) => id,
                None => match read_question(connection) {
                    Input::Asked(Question::Fate(id)) => id,
                    Input::Asked(Question::Health) => {
                        reply(connection, &Reply::Health(health()));
                        return false;
                    }
                    Input::Asked(Question::Reload) => {
                        let begun = reload();
                        match &begun {
                            Ok(()) => connection.waits_for = Some(Wait::Reload),
                            Err(reason) => {
                                reply(connection, &Reply::Reload(Reloaded::Failed(reason.clone())));
                            }
                        }
                        return begun.is_ok();
                    }
                    Input::Nothing => return connection.since.elapsed() < PATIENCE,
                    Input::Invalid => return false,
                },
            };
            if let Some((_, outcome)) = self.fates.iter().find(|(known, _)| *known == id) {
                reply(connection, &Reply::Fate(Fate::Died(outcome.clone())));
            } else if unreaped(id) && connection.since.elapsed() < PATIENCE {
                connection.waits_for = Some(Wait::Fate(id));
                return true;
            } else {
                reply(connection, &Reply::Fate(Fate::NotBegun));
            }
            false
        });
        self.connections = connections;
    }

    /// Answers the connections that wait for the end of a reload.
    pub(super) fn conclude_reload(&mut self, how: &Reloaded) {
        self.connections.retain(|connection| {
            let waits = connection.waits_for == Some(Wait::Reload);
            if waits {
                reply(connection, &Reply::Reload(how.clone()));
            }
            !waits
        });
    }
}

enum Input {
    Asked(Question),
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
        Ok(question) => Input::Asked(question),
        Err(_) => Input::Invalid,
    }
}

fn reply(connection: &Connection, reply: &Reply) {
    if let Ok(frame) = protocol::encode(reply) {
        // A connection that did not wait for the reply does not need it.
        let _ = protocol::send(connection.connection.as_fd(), &frame, &[]);
    }
}
