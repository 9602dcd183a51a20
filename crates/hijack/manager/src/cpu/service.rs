//! The monitor and the handler: reads clocks each tick, and sets who comes first.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

use orrery_sys::scheduling::{self, Policy, Scheduling};
use serde::{Deserialize, Serialize};

use super::account::{Account, Reservation};
use super::admission::Masks;
use super::mechanism::{Group, Mechanism, PREFIX, dissolve};
use super::placement::{Placement, affinity};
use super::plan::{Level, Need, level, places};
use super::starts::Starts;
use super::tree::Tree;
use crate::attributes::{Change, Table, Topic, TraceeId};

/// So many ticks pass between two readings of which processes a tracee has.
const SCAN: u64 = 10;
/// So many seconds pass between two looks at trees in which nothing seems to have started.
const FULL: u64 = 10;
/// How many seconds of history a report has.
const HISTORY: usize = 120;
const SECOND: u64 = 1_000_000_000;

/// The indices of the classes.
#[derive(Debug, Clone, Copy)]
struct Indices {
    target: usize,
    period: usize,
    order: usize,
    used: usize,
    missed: usize,
}

/// A tracee that is served.
#[derive(Debug)]
struct Served {
    pid: i32,
    name: String,
    tree: Tree,
    original: Scheduling,
    mechanism: Mechanism,
    group: Option<Group>,
    /// The group that shows all its processes, if that is another one.
    around: Option<Group>,
    account: Option<Account>,
    level: Level,
    /// The order that somebody decided: it holds until the target is reached, or the period ends.
    order: u32,
    /// Its clock, and when that was read.
    used: u64,
    read: u64,
    /// Its clock when this second began, and the part of a CPU, in thousandths, that it had in seconds before.
    second: u64,
    history: VecDeque<u32>,
    tampered: u64,
    failures: u64,
}

/// What there is to know of a tracee. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuReport {
    /// The number of the tracee.
    pub tracee: u64,
    /// The PID of its first process.
    pub pid: i32,
    /// What it was called by who had it join.
    pub name: String,
    /// Its processes and threads.
    pub threads: usize,
    /// Whether a control group shows all its processes: else one whose parent ended within 100 ms may be missed.
    pub followed: bool,
    /// Its target; 0 without reservation.
    pub target: u64,
    /// Its period; 0 without reservation.
    pub period: u64,
    /// What it used in this period.
    pub used: u64,
    /// Periods that have ended.
    pub periods: u64,
    /// Those in which it missed its target.
    pub missed: u64,
    /// How it is served.
    pub mechanism: Mechanism,
    /// How often somebody else had changed how it is scheduled, which the manager then set again.
    pub tampered: u64,
    /// How often the kernel refused a change.
    pub failures: u64,
    /// The part of a CPU that it had in each of the last seconds, in thousandths, oldest first.
    pub history: Vec<u32>,
}

/// The service.
#[derive(Debug)]
pub(crate) struct CpuService {
    indices: Indices,
    masks: Masks,
    /// Where the manager runs, if it has real-time priority: else it would wait for what is busy there.
    placement: Option<Placement>,
    /// Mechanisms that may be used, best first.
    allowed: Vec<Mechanism>,
    served: BTreeMap<TraceeId, Served>,
    starts: Starts,
    /// How many CPUs there can be.
    cpus: usize,
    ticks: u64,
    /// When this second began, how many there were, and whether anything was started in it.
    second: u64,
    seconds: u64,
    started: bool,
}

impl CpuService {
    /// Makes the service. `allowed` are the mechanisms that it may use, best first; [`Mechanism::Measure`] always is. `placement` is where
    /// the calling thread runs, which ticks, if the service may change that.
    ///
    /// # Errors
    /// [`crate::AttributeError::UnknownClass`] where the table has no classes `cpu.*`.
    pub(crate) fn new(
        table: &Table,
        masks: Masks,
        allowed: &[Mechanism],
        placement: Option<Placement>,
    ) -> Result<Self, crate::AttributeError> {
        let index = |name: &str| table.classes().named(name).map(|(index, _)| index);
        let indices = Indices {
            target: index("cpu.target")?,
            period: index("cpu.period")?,
            order: index("cpu.order")?,
            used: index("cpu.used")?,
            missed: index("cpu.missed")?,
        };
        let mut allowed = allowed.to_vec();
        allowed.push(Mechanism::Measure);
        let (served, starts) = (BTreeMap::new(), Starts::new());
        let (cpus, second) = (scheduling::cpus(), crate::time::now());
        Ok(Self {
            indices,
            masks,
            placement,
            allowed,
            served,
            starts,
            cpus,
            ticks: 0,
            second,
            seconds: 0,
            started: false,
        })
    }

    /// Begins to serve a tracee; returns by which mechanism. `None` where its process has ended. `former_nice` is the nice
    /// value that it had before a manager served it that was killed.
    pub(crate) fn join(
        &mut self,
        tracee: TraceeId,
        pid: i32,
        name: &str,
        former_nice: Option<i32>,
    ) -> Option<Mechanism> {
        let tree = Tree::new(pid)?;
        let found = scheduling::get(pid).ok()?;
        let original = former_nice.map_or(found, |nice| without_manager(found, nice));
        let mut served = Served::new(pid, name, tree, original);
        served.choose(&self.allowed, tracee);
        served.follow(tracee);
        served.set(Level::Free, true);
        self.masks.set(tracee, affinity(pid));
        let mechanism = served.mechanism;
        self.served.insert(tracee, served);
        Some(mechanism)
    }

    /// Ends the service of a tracee: it is scheduled as before.
    pub(crate) fn leave(&mut self, tracee: TraceeId) {
        self.remove(tracee);
        self.place();
        self.decide();
    }

    fn remove(&mut self, tracee: TraceeId) {
        if let Some(mut served) = self.served.remove(&tracee) {
            served.set(Level::Free, true);
        }
        self.masks.remove(tracee);
    }

    /// Ends the service of all.
    pub(crate) fn leave_all(&mut self) {
        while let Some((tracee, _)) = self.served.first_key_value() {
            let tracee = *tracee;
            self.remove(tracee);
        }
    }

    /// Reads the CPUs of all tracees again: before the guard is asked.
    pub(crate) fn refresh(&self) {
        for (tracee, served) in &self.served {
            self.masks.set(*tracee, affinity(served.pid));
        }
    }

    /// Acts on attributes that were set.
    pub(crate) fn apply(&mut self, changes: &[Change], table: &Table) {
        for change in changes.iter().filter(|change| change.class == self.indices.order) {
            if let Some(served) = self.served.get_mut(&change.tracee) {
                served.order = u32::try_from(change.after).unwrap_or(0);
            }
        }
        let about = |change: &&Change| [self.indices.target, self.indices.period].contains(&change.class);
        let mut tracees: Vec<TraceeId> = changes.iter().filter(about).map(|change| change.tracee).collect();
        tracees.dedup();
        for tracee in tracees {
            let value = |class| table.value(tracee, class).ok().and_then(|value| u64::try_from(value).ok());
            let (target, period) = (value(self.indices.target), value(self.indices.period));
            let Some(served) = self.served.get_mut(&tracee) else { continue };
            served.account = match (target, period) {
                (Some(target @ 1..), Some(period @ 1..)) => {
                    let (used, waited) = (served.tree.used(), served.tree.waited());
                    let now = crate::time::now();
                    (served.used, served.read) = (used, now);
                    let new = Account::new(Reservation { target, period }, now, used, waited);
                    Some(match &served.account {
                        Some(former) => new.after(former),
                        None => new,
                    })
                }
                _ => None,
            };
        }
        self.place();
        self.decide();
    }

    /// Returns the processes of a tracee, as far as they were found.
    pub(crate) fn processes(&self, tracee: TraceeId) -> Vec<i32> {
        self.served.get(&tracee).map(|served| served.tree.processes().collect()).unwrap_or_default()
    }

    /// Returns the directory of the control group of version 2 that is around a tracee, if there is one.
    pub(crate) fn group(&self, tracee: TraceeId) -> Option<&Path> {
        let served = self.served.get(&tracee)?;
        served.group.iter().chain(&served.around).find_map(Group::directory)
    }

    /// Returns whether somebody has a reservation, and ticks are needed.
    #[must_use]
    pub(crate) fn is_needed(&self) -> bool {
        self.served.values().any(|served| served.account.is_some())
    }

    /// Records what a tracee has used in its period, which a tick reads only where it decides something.
    pub(crate) fn record_used(&mut self, tracee: TraceeId, table: &mut Table) {
        let Some(served) = self.served.get_mut(&tracee) else { return };
        let used = served.tree.used();
        if let Some(account) = &served.account {
            table.record(tracee, self.indices.used, signed(account.used(used)));
        }
    }

    /// Does what is to be done each tick. Every clock is read if somebody reads attributes while the manager ticks (`is_read`), else
    /// only those that decide something: a tracee that has had its target stays above it until its period ends, and one that has not stays
    /// below it for as long as it would take all its threads to get there.
    pub(crate) fn tick(&mut self, now: u64, table: &mut Table, is_read: bool) {
        self.ticks += 1;
        let second = now.saturating_sub(self.second) >= SECOND;
        // Where nothing was started, every process and thread is known.
        let started = self.ticks.is_multiple_of(SCAN) && self.starts.have_been();
        self.started |= started;
        let full = second && (self.started || self.seconds.is_multiple_of(FULL));
        let mut has_read = false;
        for (tracee, served) in &mut self.served {
            if !(second || started || served.is_due(now, is_read, self.cpus)) {
                continue;
            }
            has_read = true;
            let mut used = served.tree.used();
            if full || (started && served.tree.has_run(used)) {
                if !served.tree.is_unchanged() {
                    served.scan();
                }
                served.tree.settle();
                used = served.tree.used();
            }
            if second {
                served.check();
            }
            (served.used, served.read) = (used, now);
            if second {
                served.end_second(used, now - self.second);
            }
            let Some(account) = &mut served.account else { continue };
            let tree = &served.tree;
            let ended = account.advance(now, used, || tree.waited());
            // Whoever decides the order decides again then; without that, deadlines do.
            if served.order != 0 && (ended.is_some() || !account.is_below(used)) {
                served.order = 0;
                table.record(*tracee, self.indices.order, 0);
            }
            if let Some(ended) = ended
                && ended.missed > 0
            {
                let lack = i64::try_from(ended.lack).unwrap_or(i64::MAX);
                let missed = u32::try_from(ended.missed).unwrap_or(u32::MAX);
                table.publish(Topic::Missed, Some(*tracee), missed, lack);
            }
            table.record(*tracee, self.indices.used, signed(account.used(used)));
            if ended.is_some() {
                table.record(*tracee, self.indices.missed, signed(account.counts().1));
            }
        }
        if second {
            (self.second, self.started) = (now, false);
            self.seconds += 1;
            self.refresh();
            self.place();
        }
        if has_read {
            self.decide();
        }
    }

    /// Has the manager run where those do that have reservations.
    fn place(&mut self) {
        let Some(placement) = &mut self.placement else { return };
        let reserved = self.served.iter().filter(|(_, served)| served.account.is_some());
        placement.choose(reserved.map(|(tracee, _)| self.masks.get(*tracee)));
    }

    /// Sets each tracee's level.
    fn decide(&mut self) {
        let needs: Vec<Need> = self.served.values().map(Served::need).collect();
        // One that leaves the highest level leaves it before another one comes to it.
        for raise in [false, true] {
            for ((served, need), place) in self.served.values_mut().zip(&needs).zip(places(&needs)) {
                let level = level(*need, place, served.level);
                if raise == matches!(level, Level::First | Level::Below) {
                    served.set(level, false);
                }
            }
        }
    }

    /// Reports on all tracees.
    pub(crate) fn report(&mut self) -> Vec<CpuReport> {
        let report = |(tracee, served): (&TraceeId, &mut Served)| {
            let used = served.tree.used();
            let account = served.account.as_ref();
            let (periods, missed) = account.map_or((0, 0), Account::counts);
            let reservation = account.map(Account::reservation);
            CpuReport {
                tracee: tracee.0,
                pid: served.pid,
                name: served.name.clone(),
                threads: served.tree.threads().count(),
                followed: served.tree.is_followed(),
                target: reservation.map_or(0, |reservation| reservation.target),
                period: reservation.map_or(0, |reservation| reservation.period),
                used: account.map_or(0, |account| account.used(used)),
                periods,
                missed,
                mechanism: served.mechanism,
                tampered: served.tampered,
                failures: served.failures,
                history: served.history.iter().copied().collect(),
            }
        };
        self.served.iter_mut().map(report).collect()
    }
}

impl Served {
    /// Makes it without reservation; nothing is changed.
    fn new(pid: i32, name: &str, tree: Tree, original: Scheduling) -> Self {
        Self {
            pid,
            name: name.chars().filter(|letter| !letter.is_control()).take(64).collect(),
            tree,
            original,
            mechanism: Mechanism::Measure,
            group: None,
            around: None,
            account: None,
            level: Level::Free,
            order: 0,
            used: 0,
            read: 0,
            second: 0,
            history: VecDeque::new(),
            tampered: 0,
            failures: 0,
        }
    }

    /// Returns what there is to know of it for who comes first.
    fn need(&self) -> Need {
        match &self.account {
            Some(account) => {
                let below = Some(account.is_below(self.used));
                Need { below, deadline: account.deadline(), order: self.order }
            }
            None => Need { below: None, deadline: 0, order: 0 },
        }
    }

    /// Returns whether its clock is to be read in this tick, on a machine with so many CPUs; `asked` is whether its use is read.
    /// Of a tracee that is below its target, it decides something once that may have been reached since it was read.
    fn is_due(&self, now: u64, asked: bool, cpus: usize) -> bool {
        let at_once = self.tree.threads().take(cpus).count() as u64;
        let most = self.used.saturating_add(now.saturating_sub(self.read).saturating_mul(at_once));
        let reached = |account: &Account| account.is_below(self.used) && !account.is_below(most);
        let decides = |account: &Account| reached(account) || account.is_over(now);
        self.account.as_ref().is_some_and(|account| asked || self.order != 0 || decides(account))
    }

    /// Takes the best mechanism that works for this tracee.
    fn choose(&mut self, allowed: &[Mechanism], tracee: TraceeId) {
        for mechanism in allowed {
            let works = match mechanism {
                Mechanism::Realtime | Mechanism::Nice => mechanism.try_on(self.pid, self.original).is_ok(),
                Mechanism::Group => {
                    let name = format!("{PREFIX}{}-{}", std::process::id(), tracee.0);
                    self.group = Group::new(&name)
                        .and_then(|group| {
                            self.tree.processes().try_for_each(|pid| group.add(pid))?;
                            Ok(group)
                        })
                        .ok();
                    self.group.is_some()
                }
                Mechanism::Measure => true,
            };
            if works {
                self.mechanism = *mechanism;
                return;
            }
        }
    }

    /// Has a control group show which processes there are, where one can be made.
    fn follow(&mut self, tracee: TraceeId) {
        let files = self.group.as_ref().and_then(Group::files).or_else(|| {
            let name = format!("{PREFIX}{}-{}", std::process::id(), tracee.0);
            let group = Group::around(self.pid, &name).ok()?;
            // Those that end meanwhile are no members.
            self.tree.processes().for_each(|pid| drop(group.add(pid)));
            let files = group.files()?;
            self.around = Some(group);
            Some(files)
        });
        if let Some(files) = files {
            self.tree.follow(files);
        }
    }

    /// Sets the level of all threads, if it is another one; `always` also if not.
    fn set(&mut self, level: Level, always: bool) {
        if level == self.level && !always {
            return;
        }
        self.level = level;
        if let Some(group) = &self.group
            && group.set(level).is_err()
        {
            self.failures += 1;
        }
        let threads: Vec<i32> = self.tree.threads().collect();
        for thread in threads {
            self.apply_to(thread);
        }
    }

    fn apply_to(&mut self, thread: i32) {
        if let Err(error) = self.mechanism.apply(thread, self.level, self.original)
            && error.errno != rustix::io::Errno::SRCH
        {
            self.failures += 1;
        }
    }

    /// Looks for new threads.
    fn scan(&mut self) {
        for thread in self.tree.scan() {
            self.apply_to(thread);
        }
        self.check();
    }

    /// Looks for threads that somebody else has changed.
    fn check(&mut self) {
        if let Some(group) = &self.group {
            // A member's children are members; what was moved away comes back.
            self.failures += self.tree.processes().filter(|pid| group.add(*pid).is_err()).count() as u64;
        }
        let (mechanism, level) = (self.mechanism, self.level);
        let changed: Vec<i32> =
            self.tree.threads().filter(|thread| !mechanism.is_applied(*thread, level)).collect();
        for thread in changed {
            if scheduling::get(thread).is_ok() {
                self.tampered += 1;
                self.apply_to(thread);
            }
        }
    }

    fn end_second(&mut self, used: u64, length: u64) {
        let share = used.saturating_sub(self.second).saturating_mul(1000) / length.max(1);
        self.second = used;
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(u32::try_from(share).unwrap_or(u32::MAX));
    }
}

/// Returns how a thread would be scheduled that a manager has left as `found`, if it had this nice value before: a manager that was
/// killed could not restore it.
fn without_manager(found: Scheduling, nice: i32) -> Scheduling {
    match found {
        Scheduling { policy: Policy::Fifo { .. }, reset_on_fork: true }
        | Scheduling { policy: Policy::Other { nice: 19 | -20 }, .. } => {
            Scheduling { policy: Policy::Other { nice }, reset_on_fork: false }
        }
        own => own,
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Takes from all threads of a process, and of those that it started, what a manager that was killed has left, and filters from their
/// sockets: as far as this process may, which without privilege cannot lower nice values. They get the nice value that the process had when it joined.
pub(crate) fn release(pid: i32, nice: i32) {
    let Some(tree) = Tree::new(pid) else { return };
    crate::net::release(tree.processes());
    dissolve(pid);
    for thread in tree.threads() {
        if let Ok(found) = scheduling::get(thread)
            && found != without_manager(found, nice)
        {
            let _ = scheduling::set(thread, without_manager(found, nice));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_read_once_all_threads_could_have_reached_the_target() {
        const MS: u64 = 1_000_000;
        let due = |pid: i32| {
            let mut served = Served::new(pid, "x", Tree::new(pid).unwrap(), scheduling::get(pid).unwrap());
            let reservation = Reservation { target: 100 * MS, period: 400 * MS };
            served.account = Some(Account::new(reservation, 0, 0, None));
            move |now: u64, cpus: usize| served.is_due(now * MS, false, cpus)
        };
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let one_thread = due(child.id().cast_signed());
        assert!(!one_thread(99, 8) && one_thread(100, 8));
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let another = std::thread::spawn(move || {
            let _ended = stopped.recv();
        });
        // This one, that one, and those of the test program.
        let several = due(std::process::id().cast_signed());
        assert!(!several(49, 2) && several(50, 2));
        assert!(!several(99, 1) && several(100, 1));
        drop(stop);
        another.join().unwrap();
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
}
