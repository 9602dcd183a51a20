//! The master's desk: short conversations of one question and one reply, none of which can hold the master up.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;

use crate::protocol::{self, Fate, Outcome, Question, Reply, RequestId};

/// Conversations at a time; more wait in the kernel's queue.
const MOST_CALLERS: usize = 64;
/// A caller that says nothing for so long is sent away.
const PATIENCE: Duration = Duration::from_secs(2);
/// Fates remembered; older ones are forgotten.
const MOST_FATES: usize = 4096;

/// Somebody at the desk.
#[derive(Debug)]
struct Caller {
    connection: OwnedFd,
    since: Instant,
    /// The request asked for, whose worker has not been buried yet.
    waits_for: Option<RequestId>,
}

/// The desk.
#[derive(Debug)]
pub(super) struct Desk {
    callers: Vec<Caller>,
    fates: VecDeque<(RequestId, Outcome)>,
}

impl Desk {
    pub(super) fn new() -> Self {
        Self { callers: Vec::new(), fates: VecDeque::new() }
    }

    /// Descriptors that become readable when a caller speaks.
    pub(super) fn poll_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.callers.iter().map(|caller| caller.connection.as_fd())
    }

    /// Until when the master may sleep without neglecting a caller.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.callers.iter().map(|caller| caller.since + PATIENCE).min()
    }

    /// Whether there is room for another caller.
    pub(super) fn has_room(&self) -> bool {
        self.callers.len() < MOST_CALLERS
    }

    /// Takes the next caller from the (non-blocking) control socket.
    pub(super) fn admit(&mut self, control: BorrowedFd<'_>) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // A caller that left, or a momentary want of descriptors: nobody to answer in either case.
        if let Ok(connection) = rustix::net::accept_with(control, flags) {
            self.callers.push(Caller { connection, since: Instant::now(), waits_for: None });
        }
    }

    /// Notes that a request died with its worker.
    pub(super) fn record(&mut self, id: RequestId, outcome: Outcome) {
        if self.fates.len() == MOST_FATES {
            self.fates.pop_front();
        }
        self.fates.push_back((id, outcome));
    }

    /// Answers whoever can be answered.
    ///
    /// `unburied` tells whether a worker, alive or dead but not reaped, runs a request; `health` describes the
    /// server.
    pub(super) fn work(
        &mut self,
        unburied: impl Fn(RequestId) -> bool,
        health: impl Fn() -> protocol::Health,
    ) {
        let mut callers = std::mem::take(&mut self.callers);
        callers.retain_mut(|caller| {
            let Some(id) = caller.waits_for.or_else(|| match hear(caller) {
                Heard::Fate(id) => Some(id),
                Heard::Health => {
                    reply(caller, &Reply::Health(health()));
                    caller.since = Instant::now() - PATIENCE;
                    None
                }
                Heard::Nothing => None,
                Heard::Nonsense => {
                    caller.since = Instant::now() - PATIENCE;
                    None
                }
            }) else {
                return caller.since.elapsed() < PATIENCE;
            };
            if let Some((_, outcome)) = self.fates.iter().find(|(known, _)| *known == id) {
                reply(caller, &Reply::Fate(Fate::Died(outcome.clone())));
            } else if unburied(id) && caller.since.elapsed() < PATIENCE {
                caller.waits_for = Some(id);
                return true;
            } else {
                reply(caller, &Reply::Fate(Fate::NotBegun));
            }
            false
        });
        self.callers = callers;
    }
}

enum Heard {
    Fate(RequestId),
    Health,
    Nothing,
    Nonsense,
}

fn hear(caller: &Caller) -> Heard {
    let mut poll = [PollFd::new(&caller.connection, PollFlags::IN)];
    if !matches!(rustix::event::poll(&mut poll, Some(&Timespec::default())), Ok(1)) {
        return Heard::Nothing;
    }
    // A question is a few bytes in one piece; one that comes in pieces fails here with EAGAIN and is nonsense.
    let question = protocol::receive(caller.connection.as_fd())
        .and_then(|received| protocol::decode::<Question>(&received.body));
    match question {
        Ok(Question::Fate(id)) => Heard::Fate(id),
        Ok(Question::Health) => Heard::Health,
        Err(_) => Heard::Nonsense,
    }
}

fn reply(caller: &Caller, reply: &Reply) {
    if let Ok(frame) = protocol::encode(reply) {
        // A caller that did not wait for the reply does not need it.
        let _ = protocol::send(caller.connection.as_fd(), &frame, &[]);
    }
}
