//! What a request does.

use std::collections::HashSet;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use orrery_hijack::Events;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::connections::{Connection, MOST_OF_USER};
use super::state::{Process, State};
use crate::attributes::{AttributeError, ClassSet, Rights, Topic, TraceeId};
use crate::protocol::{Reply, Request, Values};

/// What is to be done with a reply: it is sent, and a connection is added that it brings.
pub(super) struct Outcome {
    pub(super) reply: Reply,
    pub(super) fd: Option<OwnedFd>,
    pub(super) added: Option<(u64, Connection)>,
    pub(super) joined: Option<TraceeId>,
}

impl From<Reply> for Outcome {
    fn from(reply: Reply) -> Self {
        Self { reply, fd: None, added: None, joined: None }
    }
}

/// How many values one request may set, and events it may ask for.
const MOST: usize = 64;

/// Handles a request. What fails has changed nothing.
pub(super) fn handle(
    state: &mut State,
    connection: &mut Connection,
    request: Request,
    fds: Vec<OwnedFd>,
    next: u64,
) -> Outcome {
    match perform(state, connection, request, fds, next) {
        Ok(outcome) => outcome,
        Err(reason) => {
            state.counts.refused += 1;
            Reply::Failed(reason).into()
        }
    }
}

fn perform(
    state: &mut State,
    connection: &mut Connection,
    request: Request,
    mut fds: Vec<OwnedFd>,
    next: u64,
) -> Result<Outcome, String> {
    let text = |error: AttributeError| error.to_string();
    match request {
        Request::Join { name, values, journal, former_nice } => {
            let process = fds.pop().ok_or("cannot join: the message has no pidfd")?;
            // Before anything is changed: it may be another user's.
            let quota = state.journals.quota(connection.uid);
            let events = journal.map(|id| Events::attach(id, connection.uid, &quota)).transpose();
            let events = events.map_err(|error| error.to_string())?;
            let outcome = join(state, connection, process, &name, &values, former_nice)?;
            if let (Some(events), Some(tracee)) = (events, outcome.joined) {
                state
                    .journals
                    .read(events, tracee)
                    .map_err(|error| format!("cannot read the journal: {error}"))?;
            }
            Ok(outcome)
        }
        Request::Get { tracee, class } => {
            let tracee = whose(connection, tracee)?;
            state.cpu.record_used(tracee, &mut state.table);
            let value = state.table.get(&connection.capability, tracee, &class).map_err(text)?;
            let (_, class) = state.table.classes().named(&class).map_err(text)?;
            Ok(Reply::Value(class.kind.format(value)).into())
        }
        Request::Set { tracee, values } => {
            let tracee = whose(connection, tracee)?;
            set(state, connection, tracee, &values)?;
            Ok(Reply::Done.into())
        }
        Request::Delegate { read, write, delegate, load } => {
            let own = state.table.rights(&connection.capability).map_err(text)?;
            let set = |names: &[String]| -> Result<ClassSet, String> {
                let index = |name: &String| state.table.classes().named(name).map(|(index, _)| index);
                Ok(ClassSet::of(names.iter().map(index).collect::<Result<Vec<_>, _>>().map_err(text)?))
            };
            let rights = Rights { read: set(&read)?, write: set(&write)?, delegate, load, ..own };
            let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
            let (ours, theirs) = pair.map_err(|errno| format!("cannot make a connection: {errno}"))?;
            let capability = state.table.derive(&connection.capability, rights).map_err(text)?;
            connection.delegated.insert(next);
            let added = Connection {
                socket: ours,
                capability,
                uid: connection.uid,
                is_delegated: true,
                tracee: connection.tracee,
                heard: None,
                delegated: HashSet::new(),
            };
            let reply = Reply::Delegated { number: next };
            Ok(Outcome { reply, fd: Some(theirs), added: Some((next, added)), joined: None })
        }
        // The event loop has the other connections.
        Request::Revoke { number } => {
            Err(format!("cannot revoke connection {number}: it is none of this one's"))
        }
        Request::Load { .. } | Request::Unload { .. } => {
            Err("cannot change extensions here: the event loop does".to_owned())
        }
        Request::Extensions => {
            // A delegated connection may be another user's.
            if connection.is_delegated {
                return Err("cannot list extensions: a delegated connection has no right to".to_owned());
            }
            let of = (!state.is_privileged(connection.uid)).then_some(connection.uid);
            let reports = state.loaded.as_ref().map(|loaded| loaded.report(of)).unwrap_or_default();
            Ok(Reply::Extensions(reports).into())
        }
        Request::Subscribe { mut topics } => {
            topics.truncate(MOST);
            let heard = state.table.subscribe(&connection.capability, &topics, 1024).map_err(text)?;
            if let Some(former) = connection.heard.replace(heard) {
                state.table.unsubscribe(&former);
            }
            Ok(Reply::Done.into())
        }
        Request::Emit { tracee, number, value } => {
            let tracee = tracee.map(TraceeId);
            state.table.emit(&connection.capability, tracee, number, value).map_err(text)?;
            Ok(Reply::Done.into())
        }
        Request::Status => {
            let mut status = state.status();
            let rights = state.table.rights(&connection.capability).map_err(text)?;
            status.tracees.retain(|tracee| rights.readable.has(TraceeId(tracee.tracee)));
            status.packets.retain(|tracee| rights.readable.has(TraceeId(tracee.tracee)));
            Ok(Reply::Status(Box::new(status)).into())
        }
    }
}

fn whose(connection: &Connection, named: Option<u64>) -> Result<TraceeId, String> {
    let named = named.map(TraceeId).or(connection.tracee);
    named.ok_or_else(|| "cannot find the tracee: the connection has none of its own; name one".to_owned())
}

fn set(state: &mut State, connection: &Connection, tracee: TraceeId, values: &Values) -> Result<(), String> {
    if values.len() > MOST {
        return Err(format!("cannot set {} values at once: {MOST} are the most", values.len()));
    }
    let parsed = values.iter().map(|(name, value)| {
        let (_, class) = state.table.classes().named(name)?;
        Ok((name.as_str(), class.parse(value)?))
    });
    let parsed = parsed.collect::<Result<Vec<_>, AttributeError>>().map_err(|error| error.to_string())?;
    state.cpu.refresh();
    state.table.set(&connection.capability, tracee, &parsed).map_err(|error| error.to_string())
}

fn join(
    state: &mut State,
    connection: &mut Connection,
    pidfd: OwnedFd,
    name: &str,
    values: &Values,
    former_nice: Option<i32>,
) -> Result<Outcome, String> {
    let pid = process_of(&pidfd).ok_or("cannot join: the descriptor is no pidfd of a process that runs")?;
    let uid = user_of(pid).ok_or("cannot join: the process has ended")?;
    if connection.uid != 0 && connection.uid != uid {
        return Err(format!("cannot join process {pid}: it is another user's"));
    }
    if let Some(tracee) = connection.tracee {
        return Err(format!("cannot join process {pid}: this connection has tracee {} already", tracee.0));
    }
    if let Some((tracee, _)) = state.processes.iter().find(|(_, process)| process.pid == pid) {
        return Err(format!("cannot join process {pid}: it is tracee {} already", tracee.0));
    }
    if connection.is_delegated {
        return Err(format!("cannot join process {pid}: a delegated connection has no right to"));
    }
    let own = state.processes.values().filter(|process| process.uid == uid).count();
    if uid != 0 && own >= MOST_OF_USER {
        return Err(format!("cannot join process {pid}: user {uid} has {own} tracees, and more are refused"));
    }
    let text = |error: AttributeError| error.to_string();
    let tracee = state.table.add_tracee().map_err(text)?;
    // The manager restores it by its own privileges: a false claim must not gain what setpriority(2) would refuse.
    let least = if connection.uid == 0 { -20 } else { 0 };
    let former_nice = former_nice.map(|nice| nice.clamp(least, 19));
    let Some(mechanism) = state.cpu.join(tracee, pid, name, former_nice) else {
        state.remove(tracee);
        return Err(format!("cannot join process {pid}: it has ended"));
    };
    let (group, processes) = (state.cpu.group(tracee), state.cpu.processes(tracee));
    state.net.join(tracee, pidfd.as_fd(), connection.uid, group, &processes);
    let own = Rights::of_user(state.table.classes(), connection.uid, state.owner, Some(tracee));
    let capability = match state.table.grant(own) {
        Ok(capability) => capability,
        Err(error) => {
            state.remove(tracee);
            return Err(text(error));
        }
    };
    let former = std::mem::replace(&mut connection.capability, capability);
    if let Err(reason) = set(state, connection, tracee, values) {
        let capability = std::mem::replace(&mut connection.capability, former);
        state.table.revoke(&capability);
        state.remove(tracee);
        return Err(reason);
    }
    state.table.revoke(&former);
    connection.heard = None;
    connection.tracee = Some(tracee);
    state.processes.insert(tracee, Process { pidfd, pid, uid });
    state.counts.joined += 1;
    state.table.publish(Topic::Joined, Some(tracee), 0, pid.into());
    let reply = Reply::Joined { tracee: tracee.0, mechanism };
    Ok(Outcome { joined: Some(tracee), ..reply.into() })
}

/// The process of a pidfd, as `/proc/self/fdinfo` has it (pidfd_open(2)); `None` where it has ended.
pub(super) fn process_of(pidfd: &OwnedFd) -> Option<i32> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let pid = text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()?;
    (pid > 0).then_some(pid)
}

/// Returns the real user ID of a process.
fn user_of(pid: i32) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().next()?.parse().ok()
}
