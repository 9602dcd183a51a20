//! Main's side of an orbit: what is under way, what has come back, what to do when the orbit dies.
//!
//! No thread of ours runs in main. A thread that calls, waits or asks also *pumps*: takes in answers and updates,
//! notices death, restarts when it is time. All of that happens under one lock and never waits for the orbit.
//!
//! A call is a [`QueuedCall`] from the moment it is in the queue until the orbit is done with its slot *and* its pages.
//! A cancelled call, and one whose task died, stay queued as *settled*: their outcome is known, but the calls behind
//! them build on their pages, so the orbit (or its successor) still has to put those in place.

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;

use orrery_domain::{
    Channel, Decision, Domain, DomainState, End, Enforcement, History, Moment, Process, Side, StatisticsPage,
};
use orrery_memory::area::{Area, Delta, Mirror};
use rustix::process::Signal;
use rustix::thread::CpuSet;

use crate::check::CheckLog;
use crate::control_block::{Claim, ControlBlock};
use crate::error::{Error, Fault, Result};
use crate::findings::{Findings, Passed};
use crate::protocol::{ANSWER, Answer};
use crate::records::{Kept, Records, UPDATE_OVERHEAD};
use crate::symbol;
use crate::update::{Permissions, Update};
use crate::update_socket::{Arrival, UpdateSocket};

/// How much longer than its limit a task may take before main looks for itself: the kernel's timer in the orbit should
/// have fired.
const GRACE: Duration = Duration::from_millis(300);

/// For how long the mark of the orbit's thread may say that it is gone while its process runs. A process that ends is
/// there for a moment, or longer where much memory is freed; one that became another program is there for good.
const REPLACED: Duration = Duration::from_millis(300);
const ENDING: Duration = Duration::from_secs(10);

/// How many arrivals main takes in one look, and after how many bytes it takes no more: a task may send without end.
const ARRIVALS: usize = 256;
const ARRIVING_BYTES: usize = 16 << 20;
/// How many at most it takes before an answer, to which they belong: more than a socket holds at once.
const ARRIVALS_BEFORE_ANSWER: usize = 1 << 14;

/// A call in the queue.
#[derive(Debug)]
pub(crate) struct QueuedCall {
    /// The message's number.
    pub(crate) number: u32,
    pub(crate) call: u64,
    pub(crate) record: usize,
    pub(crate) delta: Option<Delta>,
    pub(crate) limit: Option<Duration>,
    /// In the checking mode: what the call passed.
    pub(crate) passed: Passed,
    pub(crate) cancellable: bool,
    /// Its outcome is known; only its pages are still needed.
    pub(crate) settled: bool,
    /// When main first saw that the orbit had taken it.
    pub(crate) seen_running: Option<Moment>,
}

/// Whether the orbit lives.
#[derive(Debug)]
pub(crate) enum Phase {
    Up,
    /// Dead; to be restarted then.
    Waiting(Moment),
    /// The orbit is dead and is not restarted.
    Down {
        fault: Fault,
        restarts: u32,
    },
    /// Destroyed by its owner.
    Destroyed,
}

/// Where the orbit runs, as far as main moves it.
#[derive(Debug)]
pub(crate) struct CpuPin {
    /// Where it may run at all.
    pub(crate) allowed: CpuSet,
    /// Where it was last put; `None` for anywhere allowed.
    pub(crate) pinned: Option<u32>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) name: String,
    /// None where it is down for good.
    pub(crate) domain: Option<Domain>,
    /// The process of the last instance.
    pub(crate) pid: u32,
    pub(crate) enforcement: Enforcement,
    /// Keeps what `side` leads to.
    pub(crate) _channel: Arc<Channel>,
    pub(crate) side: Side,
    /// None where it is down for good: it has half a terabyte of addresses.
    pub(crate) mirror: Option<Arc<Mirror>>,
    /// Whether a mirror that was emptied is filled with what all areas hold.
    pub(crate) existing_areas: bool,
    /// In the checking mode: what tasks touch, and what of that they should not have.
    pub(crate) check: Option<(Arc<CheckLog>, Findings)>,
    pub(crate) control: Arc<ControlBlock>,
    /// None where it is down for good.
    pub(crate) update_socket: Option<Arc<UpdateSocket>>,
    pub(crate) received: u32,
    /// Whether a call waited for room in vain, and no task has returned since.
    pub(crate) stalled: bool,
    /// Whether more may be in the socket than the last look took.
    pub(crate) more: bool,
    pub(crate) update_buffer: Vec<u8>,
    pub(crate) largest_update: usize,
    /// How many bytes of updates of one call are kept until the program receives them.
    pub(crate) unreceived: usize,
    pub(crate) permissions: Permissions,
    pub(crate) records: Records,
    pub(crate) queued: VecDeque<QueuedCall>,
    /// How many of them are settled.
    pub(crate) settled: usize,
    pub(crate) next_call: u64,
    pub(crate) history: History,
    pub(crate) phase: Phase,
    /// Since when the kernel's mark says that the orbit's thread is gone, although its process runs.
    pub(crate) marked_since: Option<Moment>,
    pub(crate) cpu: CpuPin,
    pub(crate) memory_limit: Option<u64>,
    pub(crate) memory_kills: u64,
    pub(crate) statistics: StatisticsPage,
    /// What the last instance died of, for later questions.
    pub(crate) last_fault: Option<Fault>,
}

impl State {
    /// Takes in what has come. `suspicious`: also ask the kernel whether the orbit lives, for a system call.
    pub(crate) fn pump(&mut self, suspicious: bool) {
        if let Err(what) = self.take_in() {
            self.corrupted(what);
        }
        if matches!(self.phase, Phase::Up) {
            let marked = self.side.gate().is_marked_dead();
            if suspicious || marked != Some(false) {
                let end = self.domain.as_ref().and_then(|domain| domain.process().end());
                match end {
                    Some(end) => self.died(end),
                    None if marked == Some(true) => self.check_replaced(),
                    None => {}
                }
            }
        }
        self.enforce_time_limit();
        if let Phase::Waiting(due) = self.phase
            && Moment::now() >= due
        {
            self.restart();
        }
    }

    /// The orbit's thread is gone and its process is not: kills that, unless it is about to end.
    fn check_replaced(&mut self) {
        let Some(domain) = &self.domain else { return };
        let now = Moment::now();
        let since = now.since(*self.marked_since.get_or_insert(now));
        let process = Arc::clone(domain.process());
        if since < REPLACED || since < ENDING && is_ending(&process) {
            return;
        }
        if let Err(what) = self.take_in() {
            return self.corrupted(what);
        }
        self.end_with(&process, Fault::Replaced);
    }

    /// Kills the orbit for what its task did.
    fn end_with(&mut self, process: &Process, fault: Fault) {
        let _ = process.signal(Signal::KILL);
        await_death(process);
        self.end_instance(fault, End::Killed { signal: libc::SIGKILL });
    }

    /// Answers, updates, and slots that are done with.
    fn take_in(&mut self) -> core::result::Result<(), String> {
        self.receive_updates(ARRIVALS, ARRIVING_BYTES);
        let mut bytes = [0; ANSWER];
        // So many at the front are settled; they stay until all answers are taken in, which may be many.
        let mut settled = 0;
        while let Some(len) = self.side.peek(&mut bytes).map_err(|e| e.to_string())? {
            let answer = Answer::decode(&bytes[..len]).ok_or("an answer of the wrong size")?;
            self.side.take();
            self.stalled = false;
            // Updates of a task are sent before its answer, and are bounded by what is kept of one call.
            self.receive_updates(ARRIVALS_BEFORE_ANSWER, usize::MAX);
            let index = (settled..self.queued.len())
                .find(|index| !self.queued[*index].settled)
                .filter(|index| {
                    let queued_call = &self.queued[*index];
                    queued_call.call == answer.call && self.control.claim(queued_call.number) == Claim::Taken
                })
                .ok_or_else(|| format!("an answer to call {}, which is not running", answer.call))?;
            settled = index + 1;
            if let Some(queued_call) = self.queued.get_mut(index) {
                queued_call.settled = true;
                self.settled += 1;
                let (record, call) = (queued_call.record, queued_call.call);
                if let Some((log, findings)) = &mut self.check {
                    findings.judge(&self.name, call, &queued_call.passed, &log.take());
                }
                if let Some(delta) = queued_call.delta.take() {
                    release(self.mirror.as_deref(), delta);
                }
                self.records.close(record, call, Ok(answer.value));
                self.statistics.returned().fetch_add(1, Ordering::Relaxed);
            }
        }
        self.retire_settled()
    }

    /// Lets go of the settled calls at the front whose slot the orbit has returned.
    fn retire_settled(&mut self) -> core::result::Result<(), String> {
        if self.queued.is_empty() {
            return Ok(());
        }
        let taken = self.taken()?;
        // The orbit claims a call before it counts it as taken: one that waits by its claim and not by its place is one
        // that nobody will ever run.
        let skipped =
            self.queued.iter().take_while(|queued_call| is_behind(queued_call, taken)).find(|queued_call| {
                !queued_call.settled && self.control.claim(queued_call.number) != Claim::Taken
            });
        if let Some(skipped) = skipped {
            return Err(format!("the claim of call {}, which was taken from the queue", skipped.call));
        }
        while let Some(queued_call) = self.queued.front() {
            if !(queued_call.settled && is_behind(queued_call, taken)) {
                break;
            }
            self.settled -= 1;
            if let Some(QueuedCall { delta: Some(delta), .. }) = self.queued.pop_front() {
                release(self.mirror.as_deref(), delta);
            }
        }
        Ok(())
    }

    /// Returns the number of the next message that the orbit has to take, as far as the orbit says so.
    fn taken(&self) -> core::result::Result<u32, String> {
        let waiting = self.side.waiting().map_err(|e| e.to_string())?;
        Ok(self.side.sent().wrapping_sub(waiting))
    }

    /// Returns whether what the dead orbit left of the queue adds up with what main knows: a successor can go on with it. It
    /// ran one call at a time, in their order, claimed it, and only then counted it as taken.
    fn is_queue_whole(&self) -> bool {
        let Ok(taken) = self.taken() else { return false };
        let oldest = self.queued.front().map_or(self.side.sent(), |queued_call| queued_call.number);
        if taken.wrapping_sub(oldest) > self.side.bound() {
            return false;
        }
        let mut may_have_been_claimed = true;
        self.queued.iter().all(|queued_call| {
            let claim = self.control.claim(queued_call.number);
            let behind = is_behind(queued_call, taken);
            if queued_call.settled {
                // What a cancelled call or one before the successor's says is written again.
                return behind || claim != Claim::Queued;
            }
            let first = core::mem::take(&mut may_have_been_claimed);
            match claim {
                Claim::Queued => !behind,
                Claim::Taken => first,
                Claim::Cancelled | Claim::Nonsense => false,
            }
        })
    }

    /// Returns the call that the orbit runs, or ran when it died: by its claim, or because it is not in the queue any more.
    fn running(&self) -> Option<usize> {
        let index = self.queued.iter().position(|queued_call| !queued_call.settled)?;
        let queued_call = &self.queued[index];
        let is_gone = self.taken().is_ok_and(|taken| is_behind(queued_call, taken));
        (is_gone || self.control.claim(queued_call.number) != Claim::Queued).then_some(index)
    }

    /// Takes in updates until there are no more, or `arrivals` or `bytes` have come.
    fn receive_updates(&mut self, arrivals: usize, bytes: usize) {
        if self.control.updates_sent() == self.received && !self.more {
            return;
        }
        let mut taken = 0_usize;
        for _ in 0..arrivals {
            let (records, queued, largest, unreceived) =
                (&mut self.records, &self.queued, self.largest_update, self.unreceived);
            // What a call may not keep is not even read.
            let room = |call: u64| {
                let queued_call = queued.iter().find(|queued_call| queued_call.call == call);
                let kept = queued_call
                    .and_then(|queued_call| records.get(queued_call.record, call))
                    .map(|record| if record.abandoned { 0 } else { unreceived.saturating_sub(record.kept) });
                largest.min(kept.unwrap_or(0))
            };
            let update_socket = self.update_socket.as_deref();
            let Some(arrival) = update_socket
                .and_then(|update_socket| update_socket.receive(&mut self.update_buffer, largest, room))
            else {
                self.more = false;
                return;
            };
            self.received = self.received.wrapping_add(1);
            if let Arrival::Update { bytes, .. } = &arrival {
                taken = taken.saturating_add(bytes.len());
            }
            self.file(arrival);
            if taken >= bytes {
                break;
            }
        }
        self.more = true;
    }

    /// Files an update under its call, which the orbit must have taken. That need not be the oldest one: its successor
    /// may have begun before main took in the answer.
    fn file(&mut self, arrival: Arrival) {
        self.statistics.updates().fetch_add(1, Ordering::Relaxed);
        let call = match &arrival {
            Arrival::Update { call, .. } | Arrival::Refused { call, .. } | Arrival::NoRoom { call } => *call,
        };
        let taken = |queued_call: &&QueuedCall| {
            queued_call.call == call
                && !queued_call.settled
                && self.control.claim(queued_call.number) == Claim::Taken
        };
        let Some(queued_call) = self.queued.iter().find(taken) else { return };
        let Some(record) = self.records.get(queued_call.record, call) else { return };
        if record.abandoned {
            return;
        }
        let (checked, kept) = match arrival {
            Arrival::Update { bytes, .. } => {
                let kept = bytes.len() + UPDATE_OVERHEAD;
                (Update::check(call, bytes, &self.permissions), kept)
            }
            Arrival::Refused { reason, .. } => (Err(reason), UPDATE_OVERHEAD),
            // Said once, until there is room again.
            Arrival::NoRoom { .. } if record.overflowed => return,
            Arrival::NoRoom { .. } => {
                record.overflowed = true;
                let reason = format!(
                    "the call has as many updates that were not received as are kept, {} bytes; receive them \
                     while the task runs, or raise the bound",
                    self.unreceived
                );
                (Err(reason), 0)
            }
        };
        record.kept = record.kept.saturating_add(kept);
        record.updates.push_back(Kept {
            update: checked.map_err(|reason| Error::BadUpdate { call, reason }),
            bytes: kept,
        });
    }

    /// The orbit is dead.
    fn died(&mut self, end: End) {
        // What it sent before it died counts.
        if let Err(what) = self.take_in() {
            return self.corrupted(what);
        }
        let fault = self.fault_of(end);
        if let Fault::Snapshot { .. } | Fault::Corrupted { .. } = fault {
            return self.lost(fault, end);
        }
        self.end_instance(fault, end);
    }

    /// The instance is dead: a successor goes on with the queue, or with none where it does not add up.
    fn end_instance(&mut self, fault: Fault, end: End) {
        if !self.is_queue_whole() {
            return self.lost(fault, end);
        }
        self.fail_running(&fault);
        self.decide(fault, end);
    }

    /// Returns what it died of.
    fn fault_of(&mut self, end: End) -> Fault {
        let kills = self.domain.as_ref().map_or(0, Domain::memory_kills);
        let starved = kills > self.memory_kills;
        self.memory_kills = kills;
        match end {
            End::Killed { signal: libc::SIGKILL } => {
                if let (true, Some(bytes)) = (starved, self.memory_limit) {
                    return Fault::MemoryLimit { bytes };
                }
                let now = Moment::now();
                let running = self.running().map(|index| &self.queued[index]);
                // One that was killed before its limit was killed by another process.
                if let Some(QueuedCall { limit: Some(limit), .. }) = running
                    && now.since(Moment(self.control.started())) >= *limit
                {
                    return Fault::TimeLimit { limit: *limit };
                }
                Fault::of_end(end)
            }
            End::Killed { signal } => match self.control.crash_record() {
                Some(Fault::Signal { signal: noted, address, instruction, .. }) if noted == signal => {
                    let code = instruction.and_then(symbol::of_code).map(String::into_boxed_str);
                    let memory = address.and_then(symbol::of_memory).map(String::into_boxed_str);
                    Fault::Signal { signal, address, instruction, code, memory }
                }
                _ => Fault::of_end(end),
            },
            End::Exited { .. } | End::Unknown => match self.control.crash_record() {
                Some(Fault::Signal { .. }) | None => Fault::of_end(end),
                Some(noted) => noted,
            },
        }
    }

    /// Ends the call whose task was running.
    fn fail_running(&mut self, fault: &Fault) {
        if let Some(index) = self.running() {
            let queued_call = &mut self.queued[index];
            queued_call.settled = true;
            self.settled += 1;
            let (record, call) = (queued_call.record, queued_call.call);
            if let Some((log, findings)) = &mut self.check {
                findings.judge(&self.name, call, &queued_call.passed, &log.take());
            }
            let error = Error::Fault { orbit: self.name.clone(), call, fault: fault.clone() };
            self.records.close(record, call, Err(error));
            self.statistics.failed().fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Decides whether to restart, and when.
    fn decide(&mut self, fault: Fault, end: End) {
        self.last_fault = Some(fault.clone());
        self.statistics.set_last_fault(&fault.to_string());
        if let Some(domain) = &self.domain {
            domain.process().reap();
        }
        match self.history.decide(end, Moment::now()) {
            Decision::NotBefore(due) => {
                self.phase = Phase::Waiting(due);
                self.statistics.set_state(DomainState::Restarting);
            }
            Decision::StayDown => self.go_down(fault, 0),
            Decision::GiveUp { restarts } => self.go_down(fault, restarts),
        }
    }

    fn go_down(&mut self, fault: Fault, restarts: u32) {
        self.fail_queued(&fault);
        // The handle may live on, in a program that makes a new orbit for each that died.
        self.domain = None;
        self.mirror = None;
        self.update_socket = None;
        self.phase = Phase::Down { fault, restarts };
        self.statistics.set_state(DomainState::Dead);
    }

    /// All that is under way will never run.
    fn fail_queued(&mut self, fault: &Fault) {
        self.settled = 0;
        for queued_call in self.queued.drain(..) {
            if let Some(delta) = queued_call.delta {
                release(self.mirror.as_deref(), delta);
            }
            if !queued_call.settled {
                let call = queued_call.call;
                let error = Error::NotRun { orbit: self.name.clone(), call, fault: fault.clone() };
                self.records.close(queued_call.record, call, Err(error));
                self.statistics.failed().fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// The orbit wrote what it must not: nothing of what it shares with main can be relied on.
    fn corrupted(&mut self, what: String) {
        if let Some(domain) = &self.domain
            && matches!(self.phase, Phase::Up)
        {
            let _ = domain.process().signal(Signal::KILL);
            await_death(domain.process());
            self.lost(Fault::Corrupted { what }, End::Killed { signal: libc::SIGKILL });
        }
    }

    /// It is dead, and neither queue nor mirror can be relied on: a successor starts from nothing.
    fn lost(&mut self, fault: Fault, end: End) {
        self.fail_running(&fault);
        self.fail_queued(&fault);
        self.side.succeed(true);
        let mut buffer = core::mem::take(&mut self.update_buffer);
        if let Some(update_socket) = &self.update_socket {
            while update_socket.receive(&mut buffer, self.largest_update, |_| 0).is_some() {}
        }
        self.more = false;
        self.update_buffer = buffer;
        self.received = self.control.updates_sent();
        let existing_areas = self.existing_areas;
        let refill = |mirror: &Arc<Mirror>| {
            mirror.reset()?;
            if existing_areas { mirror.show(&Area::all()) } else { Ok(()) }
        };
        match self.mirror.as_ref().map_or(Ok(()), refill) {
            Ok(()) => self.decide(fault, end),
            Err(error) => {
                self.go_down(Fault::Snapshot { reason: error.to_string() }, 0);
            }
        }
    }

    fn restart(&mut self) {
        let Some(domain) = &mut self.domain else { return };
        self.side.succeed(false);
        self.control.forget();
        for queued_call in self.queued.iter().filter(|queued_call| queued_call.settled) {
            self.control.close(queued_call.number);
        }
        let now = Moment::now();
        self.history.restarted(now);
        self.statistics.restarts().fetch_add(1, Ordering::Relaxed);
        match domain.relaunch() {
            Ok(()) => {
                self.phase = Phase::Up;
                self.marked_since = None;
                self.stalled = false;
                self.cpu.pinned = None;
                let pid = domain.process().pid().as_raw_pid().unsigned_abs();
                self.pid = pid;
                self.statistics.domain().store(pid.into(), Ordering::Relaxed);
                self.statistics.set_state(DomainState::Up);
                for queued_call in &mut self.queued {
                    queued_call.seen_running = None;
                }
                // The threads that wait looked at the predecessor.
                self.side.gate().stir();
            }
            Err(error) => {
                let for_good = matches!(error, orrery_domain::Error::SpareGone { .. });
                let died_of = match self.last_fault.take() {
                    Some(Fault::NoRestart { died_of, .. }) => died_of,
                    other => Box::new(other.unwrap_or(Fault::Unknown)),
                };
                let fault = Fault::NoRestart { reason: error.to_string(), died_of };
                if for_good {
                    self.go_down(fault, 0);
                } else {
                    // No room for a process now, perhaps later: by the same policy as after a crash.
                    self.decide(fault, End::Killed { signal: libc::SIGKILL });
                }
            }
        }
    }

    /// Kills a task that is over its limit although the timer in the orbit should have done so.
    fn enforce_time_limit(&mut self) {
        if !matches!(self.phase, Phase::Up) {
            return;
        }
        let next = self.queued.iter().find(|queued_call| !queued_call.settled);
        let Some(limit) = next.and_then(|queued_call| queued_call.limit) else { return };
        let Some(index) = self.running() else { return };
        let queued_call = &mut self.queued[index];
        let now = Moment::now();
        let seen = *queued_call.seen_running.get_or_insert(now);
        if now.since(seen) >= limit + GRACE
            && let Some(domain) = &self.domain
        {
            let process = Arc::clone(domain.process());
            self.end_with(&process, Fault::TimeLimit { limit });
        }
    }

    /// Returns when pumping will have something to do by itself.
    pub(crate) fn next_look(&self) -> Option<Moment> {
        match self.phase {
            Phase::Waiting(due) => Some(due),
            Phase::Up if self.marked_since.is_some() => Some(Moment::now().after(REPLACED)),
            Phase::Up => {
                let queued_call = self.queued.iter().find(|queued_call| !queued_call.settled)?;
                let limit = queued_call.limit? + GRACE;
                Some(queued_call.seen_running.unwrap_or_else(Moment::now).after(limit))
            }
            _ => None,
        }
    }

    /// Returns who to watch while waiting; `None` where nobody lives.
    pub(crate) fn partner(&self) -> Option<Arc<Process>> {
        match self.phase {
            Phase::Up => self.domain.as_ref().map(|domain| Arc::clone(domain.process())),
            _ => None,
        }
    }

    /// Kills the orbit for good.
    pub(crate) fn destroy(&mut self) {
        if matches!(self.phase, Phase::Destroyed) {
            return;
        }
        if let Some(domain) = self.domain.take() {
            domain.kill();
            // What it sent while it lived.
            let _ = self.take_in();
            drop(domain);
        }
        self.settled = 0;
        for queued_call in self.queued.drain(..) {
            if let Some(delta) = queued_call.delta {
                release(self.mirror.as_deref(), delta);
            }
        }
        self.mirror = None;
        let name = self.name.clone();
        self.records.close_all(|_| Error::Destroyed { orbit: name.clone() });
        self.phase = Phase::Destroyed;
        self.statistics.set_state(DomainState::Dead);
        self.side.gate().stir();
    }

    /// Refuses where no call can be made.
    pub(crate) fn check_up(&self) -> Result<()> {
        match &self.phase {
            Phase::Up | Phase::Waiting(_) => Ok(()),
            Phase::Down { fault, restarts } => {
                Err(Error::Dead { orbit: self.name.clone(), fault: fault.clone(), restarts: *restarts })
            }
            Phase::Destroyed => Err(Error::Destroyed { orbit: self.name.clone() }),
        }
    }
}

/// Returns whether a call's message is no longer in the queue, of which the message `taken` is the next one.
fn is_behind(queued_call: &QueuedCall, taken: u32) -> bool {
    taken.wrapping_sub(queued_call.number).wrapping_sub(1) < u32::MAX / 2
}

/// Releases a delta; it went with its mirror where there is none.
fn release(mirror: Option<&Mirror>, delta: Delta) {
    if let Some(mirror) = mirror {
        mirror.release(delta);
    }
}

/// Returns whether the first thread of a process is being ended by the kernel (`PF_EXITING`), as far as /proc says so.
fn is_ending(process: &Process) -> bool {
    const EXITING: u64 = 4;
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid().as_raw_pid()));
    // The fields behind the name, which may hold blanks: state, four numbers of processes, terminal's group, flags.
    let flags =
        stat.ok().and_then(|stat| stat.rsplit_once(')')?.1.split_whitespace().nth(6)?.parse::<u64>().ok());
    flags.is_none_or(|flags| flags & EXITING != 0)
}

/// Waits until a killed process is dead, which takes the kernel a moment.
fn await_death(process: &Process) {
    let mut one = [rustix::event::PollFd::from_borrowed_fd(process.as_fd(), rustix::event::PollFlags::IN)];
    let timeout = rustix::time::Timespec { tv_sec: 2, tv_nsec: 0 };
    let _ = rustix::io::retry_on_intr(|| rustix::event::poll(&mut one, Some(&timeout)));
}
