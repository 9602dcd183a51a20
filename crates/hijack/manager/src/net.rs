//! The packet service manager: shares of packet delivery for the UDP sockets of tracees (`net.share`).
//!
//! While somebody has a share, the queues of all tracees' UDP sockets are looked at each tick, the *monitor*. Where a socket loses
//! packets, or is about to, a *handler* has the kernel drop part of what arrives at sockets with lower shares, the lowest first
//! ([`Steering`]), as it arrives: nobody is woken for it. The *guard* is the class' sum.
//!
//! What drops is one program at the tracee's control group, where the manager has the right to attach one and the tracee had no UDP sockets
//! when it joined (those belong to the group in which they were made); else a filter of each socket.
//!
//! The queue of a tracee with a share is made longer, so that nothing is lost while its threads have to wait for a CPU. The limit is restored
//! with the end of the share, or of the manager; where that is killed, the queue stays as long as it is.
//!
//! Descriptors are copied for the moment of a look only: a copy that stayed would keep ports in use that a program has closed. Filters
//! that programs attach themselves are left alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use orrery_packets::{Load, PacketsError, RaisedLimit, Remote, Steering, may_steer, sockets_of};
use orrery_sys::cgroup_filter::CgroupFilter;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::attributes::{AttributeError, Change, Table, TraceeId};
use crate::cpu::lives;

/// The sockets of each tracee are listed once in so many ticks.
const SCAN: u64 = 50;
/// How many descriptors of a process are looked through, and of a tracee; how many of its sockets are steered, and of all tracees'.
const MOST_DESCRIPTORS: usize = 1024;
const MOST_OF_TRACEE: usize = 4096;
const MOST_SOCKETS: usize = 64;
const MOST_STREAMS: usize = 1024;
/// How many bytes may wait at a socket of a tracee with a share: 120 ms of 44,000 small packets per second.
const ROOM: u32 = 4 << 20;
/// A whole share.
const WHOLE: u32 = 1_000_000;

/// What there is to know of a tracee's packets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketReport {
    /// The number of the tracee.
    pub tracee: u64,
    /// Its share, in millionths.
    pub share: u32,
    /// How many UDP sockets are served; none while nobody has a share.
    pub sockets: usize,
    /// The part that is dropped early now at the socket where that is highest, in thousandths.
    pub dropped: u32,
    /// Sockets that are not served because the program has attached a filter itself.
    pub own_filters: usize,
    /// Why sockets are not served, if the manager has not the right to.
    pub refused: Option<String>,
    /// Whether a program at the tracee's control group drops packets, which counts them; else filters of sockets do.
    pub by_group: bool,
    /// How many packets that program has dropped so far.
    pub packets_dropped: u64,
}

#[derive(Debug)]
struct Served {
    /// The user whose request it was that the tracee is served.
    user: u32,
    share: u32,
    processes: BTreeMap<i32, OwnedFd>,
    /// Sockets with filters of the program.
    own_filters: BTreeSet<u64>,
    /// What drops packets of all its sockets, if one filter does; it is removed with this, and when the manager ends.
    filter: Option<CgroupFilter>,
    refused: Option<String>,
    /// Whether a filter was attached to a socket since it joined.
    touched: bool,
    /// Whether its own filters were reported.
    reported: bool,
}

#[derive(Debug)]
struct Steered {
    tracee: TraceeId,
    pid: i32,
    socket: Remote,
    /// The drops that were counted last.
    drops: u32,
    /// Whether the program has attached a filter to it, by whose drops it does not suffer.
    has_own_filter: bool,
    /// The limit of its queue, if it was raised.
    raised: Option<RaisedLimit>,
}

/// The service.
#[derive(Debug)]
pub(crate) struct NetService {
    class: usize,
    served: BTreeMap<TraceeId, Served>,
    /// In the order of the streams of `steering`.
    streams: Vec<Steered>,
    steering: Steering,
    ticks: u64,
}

impl NetService {
    /// Makes the service.
    ///
    /// # Errors
    /// [`AttributeError::UnknownClass`] where the table has no class `net.share`.
    pub(crate) fn new(table: &Table) -> Result<Self, AttributeError> {
        let (class, _) = table.classes().named("net.share")?;
        let steering = Steering::for_others_only();
        Ok(Self { class, served: BTreeMap::new(), streams: Vec::new(), steering, ticks: 0 })
    }

    /// Begins to serve a tracee, whose process this is, as `user` asked. `group` is the control group around its processes, if it has one.
    pub(crate) fn join(
        &mut self,
        tracee: TraceeId,
        process: BorrowedFd<'_>,
        user: u32,
        group: Option<&Path>,
        processes: &[i32],
    ) {
        let refused = may_steer(process).err().map(|error| error.to_string());
        let filter = group.filter(|_| refused.is_none()).and_then(|group| at_group(group, user, processes));
        let served = Served {
            user,
            share: 0,
            processes: BTreeMap::new(),
            own_filters: BTreeSet::new(),
            filter,
            refused,
            touched: false,
            reported: false,
        };
        self.served.insert(tracee, served);
    }

    /// Ends the service of a tracee: what its processes have of filters is removed.
    pub(crate) fn leave(&mut self, tracee: TraceeId) {
        for index in 0..self.streams.len() {
            if self.streams[index].tracee == tracee {
                self.set_limit(index, false);
            }
        }
        let Some(served) = self.served.remove(&tracee) else { return };
        while let Some(index) = self.streams.iter().position(|stream| stream.tracee == tracee) {
            self.forget(index);
        }
        if served.touched {
            served.processes.iter().for_each(|(pid, process)| clean(*pid, process.as_fd()));
        }
        if !self.is_needed() {
            self.stop();
        }
    }

    /// Ends the service of all.
    pub(crate) fn leave_all(&mut self) {
        while let Some((tracee, _)) = self.served.first_key_value() {
            let tracee = *tracee;
            self.leave(tracee);
        }
    }

    /// Acts on shares that were set. `processes` are those of a tracee.
    pub(crate) fn apply(
        &mut self,
        changes: &[Change],
        table: &Table,
        processes: impl Fn(TraceeId) -> Vec<i32>,
    ) {
        let was_needed = self.is_needed();
        for change in changes {
            if change.class != self.class {
                continue;
            }
            let share = table.value(change.tracee, self.class).unwrap_or(0);
            let Some(served) = self.served.get_mut(&change.tracee) else { continue };
            served.share = u32::try_from(share).unwrap_or(0).min(WHOLE);
            let (share, most) = (served.share, most_dropped(served.share));
            for index in 0..self.streams.len() {
                if self.streams[index].tracee != change.tracee {
                    continue;
                }
                if self.steering.set(index, share, most) {
                    let _gone = self.set_filter(index);
                }
                self.set_limit(index, share > 0);
            }
        }
        match (was_needed, self.is_needed()) {
            (false, true) => {
                let all: Vec<TraceeId> = self.served.keys().copied().collect();
                all.into_iter().for_each(|tracee| self.scan(tracee, &processes(tracee)));
            }
            (true, false) => self.stop(),
            _ => {}
        }
    }

    /// Returns whether somebody has a share, and ticks are needed.
    #[must_use]
    pub(crate) fn is_needed(&self) -> bool {
        self.served.values().any(|served| served.share > 0)
    }

    /// Does what is to be done each tick.
    pub(crate) fn tick(&mut self, processes: impl Fn(TraceeId) -> Vec<i32>) {
        if !self.is_needed() {
            return;
        }
        self.ticks += 1;
        // Not all in one tick.
        let turn = self.ticks % SCAN;
        let due: Vec<TraceeId> =
            self.served.keys().filter(|tracee| tracee.0 % SCAN == turn).copied().collect();
        due.into_iter().for_each(|tracee| self.scan(tracee, &processes(tracee)));
        let mut loads = Vec::with_capacity(self.streams.len());
        while loads.len() < self.streams.len() {
            let index = loads.len();
            match self.look(index) {
                Some(load) => loads.push(load),
                None => self.forget(index),
            }
        }
        let changed = self.steering.step(&loads);
        // From the last to the first: those that are forgotten move the others.
        for index in changed.into_iter().rev() {
            if !self.set_filter(index) {
                self.forget(index);
            }
        }
    }

    /// Reports on all tracees.
    pub(crate) fn report(&self) -> Vec<PacketReport> {
        let report = |(tracee, served): (&TraceeId, &Served)| {
            let own = self.streams.iter().enumerate().filter(|(_, stream)| stream.tracee == *tracee);
            let rates: Vec<u32> = own.map(|(index, _)| self.steering.rate(index)).collect();
            let highest = u64::from(rates.iter().copied().max().unwrap_or(0));
            PacketReport {
                tracee: tracee.0,
                share: served.share,
                sockets: rates.len(),
                dropped: u32::try_from((highest * 1000) >> 32).unwrap_or(0),
                own_filters: served.own_filters.len(),
                refused: served.refused.clone(),
                by_group: served.filter.is_some(),
                packets_dropped: served.filter.as_ref().map_or(0, CgroupFilter::dropped),
            }
        };
        self.served.iter().map(report).collect()
    }

    /// Looks at a socket; `None` where it is not to be served any more.
    fn look(&mut self, index: usize) -> Option<Load> {
        let steered = self.streams.get_mut(index)?;
        let served = self.served.get_mut(&steered.tracee)?;
        let process = served.processes.get(&steered.pid)?;
        let opened = steered.socket.open(process.as_fd()).unwrap_or_else(|error| {
            served.refused = Some(error.to_string());
            None
        });
        let stream = opened?;
        let load = stream.look().ok()?;
        // What a filter of the program drops is no loss.
        let is_new = load.drops != steered.drops && self.steering.rate(index) == 0 && !steered.has_own_filter;
        if is_new && stream.has_own_filter().ok()? {
            if served.filter.is_none() {
                served.has_filter(steered.tracee, steered.socket.cookie());
                return None;
            }
            steered.has_own_filter = true;
        }
        if steered.has_own_filter {
            return Some(Load { drops: steered.drops, ..load });
        }
        steered.drops = load.drops;
        // What a raised limit is for is not to be waited for: packets that wait are as many as without it.
        Some(Load { limit: steered.raised.map_or(load.limit, |raised| raised.before), ..load })
    }

    /// Raises the limit of a socket's queue, or sets it back. Where that is not possible, the queue is as long as ever.
    fn set_limit(&mut self, index: usize, is_raised: bool) {
        let Some(steered) = self.streams.get_mut(index) else { return };
        if steered.raised.is_some() == is_raised {
            return;
        }
        let process = self.served.get(&steered.tracee).and_then(|served| served.processes.get(&steered.pid));
        let Some(Ok(Some(mut stream))) = process.map(|process| steered.socket.open(process.as_fd())) else {
            return;
        };
        match steered.raised.take() {
            None => steered.raised = stream.raise_limit(ROOM).unwrap_or(None),
            Some(raised) => {
                let _gone = stream.restore_limit(raised);
            }
        }
    }

    /// Sets the filter that was decided; returns whether the socket is still to be served.
    fn set_filter(&mut self, index: usize) -> bool {
        let rate = self.steering.rate(index);
        let Some(steered) = self.streams.get(index) else { return false };
        let Some(served) = self.served.get_mut(&steered.tracee) else { return false };
        if let Some(filter) = &served.filter {
            // All its streams have one share, and so one rate.
            filter.set(rate);
            return true;
        }
        let process = served.processes.get(&steered.pid);
        let Some(Ok(Some(mut stream))) = process.map(|process| steered.socket.open(process.as_fd())) else {
            return false;
        };
        served.touched = true;
        match stream.drop_part(rate) {
            Ok(()) => true,
            Err(PacketsError::OwnFilter) => {
                served.has_filter(steered.tracee, steered.socket.cookie());
                false
            }
            Err(_) => false,
        }
    }

    fn forget(&mut self, index: usize) {
        self.set_limit(index, false);
        let tracee = self.streams.remove(index).tracee;
        self.steering.remove(index);
        let filter = self.served.get(&tracee).and_then(|served| served.filter.as_ref());
        if let Some(filter) = filter.filter(|_| self.streams.iter().all(|stream| stream.tracee != tracee)) {
            filter.set(0);
        }
    }

    /// Removes all filters: no tracee has a share any more.
    fn stop(&mut self) {
        (0..self.streams.len()).for_each(|index| self.set_limit(index, false));
        self.streams.clear();
        self.steering = Steering::for_others_only();
        for served in self.served.values_mut() {
            if std::mem::take(&mut served.touched) {
                served.processes.iter().for_each(|(pid, process)| clean(*pid, process.as_fd()));
            }
            served.own_filters.clear();
            served.filter.iter().for_each(|filter| filter.set(0));
        }
    }

    /// Finds the sockets of a tracee: those that are new are served.
    fn scan(&mut self, tracee: TraceeId, pids: &[i32]) {
        let Some(served) = self.served.get_mut(&tracee) else { return };
        served.meet(pids);
        let of_tracee = |stream: &Steered| stream.tracee == tracee;
        let mut own = self.streams.iter().filter(|stream| of_tracee(stream)).count();
        // One filter drops of all of them: those that come are dropped of already.
        let rate = match (&served.filter, self.streams.iter().position(of_tracee)) {
            (Some(_), Some(first)) => self.steering.rate(first),
            _ => 0,
        };
        let (mut looked, mut filters) = (0, BTreeSet::new());
        for (pid, process) in &served.processes {
            for fd in sockets_of(*pid, MOST_DESCRIPTORS.min(MOST_OF_TRACEE - looked)).unwrap_or_default() {
                looked += 1;
                let found = Remote::find(process.as_fd(), fd);
                let (socket, mut stream) = match found {
                    Ok(Some(found)) => found,
                    Ok(None) => continue,
                    Err(error) => {
                        served.refused = Some(error.to_string());
                        break;
                    }
                };
                served.refused = None;
                if self.streams.iter().any(|steered| steered.socket.cookie() == socket.cookie()) {
                    continue;
                }
                // A filter that a manager has left which was killed is removed.
                let cleaned = stream.drop_part(0);
                let has_own_filter = matches!(cleaned, Err(PacketsError::OwnFilter));
                match cleaned {
                    Err(PacketsError::OwnFilter) if served.filter.is_none() => {
                        filters.insert(socket.cookie());
                    }
                    Ok(()) | Err(PacketsError::OwnFilter)
                        if own < MOST_SOCKETS && self.streams.len() < MOST_STREAMS =>
                    {
                        let Ok(load) = stream.look() else { continue };
                        own += 1;
                        let most = most_dropped(served.share);
                        self.steering.add_dropping(served.share, most, load.drops, rate);
                        let drops = load.drops;
                        let raised =
                            if served.share > 0 { stream.raise_limit(ROOM).unwrap_or(None) } else { None };
                        let steered = Steered { tracee, pid: *pid, socket, drops, has_own_filter, raised };
                        self.streams.push(steered);
                    }
                    _ => {}
                }
            }
            if looked >= MOST_OF_TRACEE {
                break;
            }
        }
        for filter in &filters {
            served.has_filter(tracee, *filter);
        }
        served.own_filters = filters;
    }
}

impl Served {
    /// Finds out which processes of the tracee there are. Those that its user could not trace, a set-user-ID program for
    /// instance, are left alone, whatever the manager itself could do.
    fn meet(&mut self, pids: &[i32]) {
        self.processes.retain(|pid, _| pids.contains(pid));
        for pid in pids {
            if !self.processes.contains_key(pid)
                && let Some(process) = Pid::from_raw(*pid)
                && let Ok(process) = pidfd_open(process, PidfdFlags::empty())
            {
                self.processes.insert(*pid, process);
            }
        }
        let user = self.user;
        self.processes.retain(|pid, process| user == 0 || belongs_to(*pid, process.as_fd(), user));
    }

    /// Remembers that a socket has a filter of the program, and reports the first.
    fn has_filter(&mut self, tracee: TraceeId, cookie: u64) {
        self.own_filters.insert(cookie);
        if !std::mem::replace(&mut self.reported, true) {
            eprintln!(
                "orrery-manager: tracee {} has attached a filter to a socket, which stays: net.share does not apply to it",
                tracee.0
            );
        }
    }
}

/// Attaches a filter to the group of a tracee, if the kernel permits it, and if the tracee has no UDP sockets yet: those that there are belong
/// to the group in which they were made. Sockets of other users, those of set-user-ID programs, are left alone.
fn at_group(group: &Path, user: u32, processes: &[i32]) -> Option<CgroupFilter> {
    for pid in processes {
        let process = pidfd_open(Pid::from_raw(*pid)?, PidfdFlags::empty()).ok()?;
        for fd in sockets_of(*pid, MOST_DESCRIPTORS).ok()? {
            if Remote::find(process.as_fd(), fd).ok()?.is_some() {
                return None;
            }
        }
    }
    let directory = fs::File::open(group).ok()?;
    CgroupFilter::attach(directory.as_fd(), (user != 0).then_some(user)).ok()
}

/// Returns whether all user IDs of a process are this one.
fn belongs_to(pid: i32, process: BorrowedFd<'_>, user: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    let same = !ids.is_empty() && ids.split_whitespace().all(|id| id.parse() == Ok(user));
    // What was read is about this process only if it has not ended since.
    same && lives(process)
}

/// The most that is dropped of a stream, of 2^32: what is not its share.
fn most_dropped(share: u32) -> u32 {
    let rest = u64::from(WHOLE - share.min(WHOLE));
    u32::try_from((rest << 32) / u64::from(WHOLE)).unwrap_or(u32::MAX)
}

/// Removes what managers have attached to the sockets of a process.
fn clean(pid: i32, process: BorrowedFd<'_>) {
    for fd in sockets_of(pid, MOST_OF_TRACEE).unwrap_or_default() {
        if let Ok(Some((_, mut stream))) = Remote::find(process, fd) {
            // A filter of the program's own stays.
            let _own = stream.drop_part(0);
        }
    }
}

/// Removes what a manager has attached that was killed, of these processes, as far as this process may.
pub(crate) fn release(pids: impl Iterator<Item = i32>) {
    for pid in pids {
        let process = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        if let Some(process) = process {
            clean(pid, process.as_fd());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::attributes::{Classes, Rights};

    #[test]
    fn a_share_bounds_what_is_dropped() {
        assert_eq!([0, WHOLE / 2, WHOLE, u32::MAX].map(most_dropped), [u32::MAX, 1 << 31, 0, 0]);
    }

    #[test]
    fn a_process_belongs_to_the_user_of_all_its_ids() {
        let me = rustix::process::getpid();
        let process = pidfd_open(me, PidfdFlags::empty()).unwrap();
        let user = rustix::process::geteuid().as_raw();
        assert!(belongs_to(me.as_raw_nonzero().get(), process.as_fd(), user));
        assert!(!belongs_to(me.as_raw_nonzero().get(), process.as_fd(), user + 1));
        assert!(!belongs_to(i32::MAX, process.as_fd(), user));
    }

    /// One process in the place of two tracees: sockets belong to the first that is scanned.
    #[test]
    fn queues_decide_and_everything_is_removed() {
        let mut table = Table::new(Classes::own().unwrap());
        let all = table.grant(Rights::ALL).unwrap();
        let mut service = NetService::new(&table).unwrap();
        let tracee = table.add_tracee().unwrap();
        let me = rustix::process::getpid().as_raw_nonzero().get();
        let process = pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
        service.join(tracee, process.as_fd(), rustix::process::geteuid().as_raw(), None, &[me]);
        let processes = |_| vec![me];
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        // Nobody has a share: nothing is looked at.
        service.tick(processes);
        assert!(!service.is_needed() && service.report()[0].sockets == 0);
        let mut set = |service: &mut NetService, share: i64| {
            table.set(&all, tracee, &[("net.share", share)]).unwrap();
            service.apply(&table.take_changes(), &table, processes);
        };
        set(&mut service, 500_000);
        assert!(service.is_needed() && service.report()[0].sockets >= 1);
        let own = service
            .streams
            .iter()
            .position(|stream| stream.socket.fd() == std::os::fd::AsRawFd::as_raw_fd(&socket));
        assert!(own.is_some());
        service.tick(processes);
        // A socket that is closed is forgotten with the next tick.
        let before = service.report()[0].sockets;
        drop(socket);
        service.tick(processes);
        assert!(service.report()[0].sockets < before);
        set(&mut service, 0);
        assert!(!service.is_needed() && service.report()[0].sockets == 0);
    }
}
