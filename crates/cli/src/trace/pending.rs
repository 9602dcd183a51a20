//! Calls that have not returned: what threads wait in when the program ends, or when the user interrupts.
//!
//! Executives report calls that have returned. So threads are looked at now and then, as long as they live: what one was last seen in,
//! and has not returned from since, it never returned from.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::time::{Duration, Instant};

use orrery_hijack::{Event, calls};

use super::clock;

/// How often threads are looked at. A look takes some 20 us for each.
const INTERVAL: Duration = Duration::from_millis(100);
/// Calls from which nobody returns.
const ENDS: [&str; 2] = ["exit", "exit_group"];

/// Looks at the threads of a program and of all that it starts.
pub(super) struct Pending {
    /// Processes that were seen, and whether their numbers are the same for themselves: in another PID namespace they are not, and
    /// events cannot be assigned to them.
    processes: BTreeMap<u32, bool>,
    calls: HashSet<u32>,
    waiting: BTreeMap<u32, Waiting>,
    last: Option<Instant>,
}

/// A thread that was seen in a call.
struct Waiting {
    call: Event,
    /// When it was seen there for the first and the last time, by the time stamp counter.
    since: u64,
    seen: u64,
    /// It was in another call at the last look.
    left: bool,
    /// When the thread ended it had not returned.
    ended: bool,
    shown: bool,
}

/// A call that has not returned.
pub(super) struct Unfinished {
    pub(super) call: Event,
    /// When it was seen for the first time, by the time stamp counter.
    pub(super) since: u64,
}

impl Pending {
    /// Will look at a program, and at these calls only.
    pub(super) fn new(program: u32, selected: &[u32]) -> Self {
        let ends: Vec<_> = ENDS.iter().filter_map(|name| Some(calls::named(name)?.number)).collect();
        let calls = selected.iter().copied().filter(|number| !ends.contains(number)).collect();
        let processes = BTreeMap::from([(program, has_own_number(program))]);
        Self { processes, calls, waiting: BTreeMap::new(), last: None }
    }

    /// Learns from an event that a thread has gone on.
    pub(super) fn heard(&mut self, event: &Event) {
        let goes_on = |waiting: &Waiting| event.start().saturating_add(event.ticks()) >= waiting.seen;
        if self.waiting.get(&event.thread()).is_some_and(goes_on) {
            self.waiting.remove(&event.thread());
        }
    }

    /// Looks at all threads, if that is due. All events that there are must have been heard before. Returns what threads were in that
    /// have ended.
    pub(super) fn look(&mut self) -> Vec<Unfinished> {
        if self.last.is_some_and(|last| last.elapsed() < INTERVAL) {
            return Vec::new();
        }
        self.last = Some(Instant::now());
        // Those that were found to have ended at the last look have reported everything since.
        let ended: Vec<u32> =
            self.waiting.iter().filter(|(_, waiting)| waiting.ended).map(|(thread, _)| *thread).collect();
        let ended =
            ended.into_iter().filter_map(|thread| self.waiting.remove(&thread)).filter_map(Waiting::show);
        let ended = ended.collect();
        let threads = self.threads();
        for thread in &threads {
            self.look_at(*thread);
        }
        for (thread, waiting) in &mut self.waiting {
            waiting.ended = !threads.contains(thread);
        }
        ended
    }

    /// What threads are in now, or were in when they ended, and was not shown yet.
    pub(super) fn all(&mut self) -> Vec<Unfinished> {
        self.last = None;
        let mut all = self.look();
        all.extend(self.waiting.values_mut().filter_map(|waiting| {
            let shown = std::mem::replace(&mut waiting.shown, true);
            (!shown).then(|| Unfinished { call: waiting.call.clone(), since: waiting.since })
        }));
        all
    }

    fn look_at(&mut self, thread: u32) {
        let seen = clock::ticks();
        // One that runs may be about to end, by a signal that it was sent in a call. Else an event will say that it has returned.
        let Some(call) = Event::of_waiting_thread(thread) else { return };
        if !self.calls.contains(&call.number()) {
            // Its end may begin like that, so once is not enough.
            if self.waiting.get_mut(&thread).is_some_and(|waiting| std::mem::replace(&mut waiting.left, true))
            {
                self.waiting.remove(&thread);
            }
            return;
        }
        let same = |waiting: &&Waiting| {
            (waiting.call.number(), waiting.call.arguments()) == (call.number(), call.arguments())
        };
        let (since, shown) = match self.waiting.get(&thread).filter(same) {
            Some(waiting) => (waiting.since, waiting.shown),
            None => (seen, false),
        };
        self.waiting.insert(thread, Waiting { call, since, seen, left: false, ended: false, shown });
    }

    /// The threads of all processes, of which some may be new.
    fn threads(&mut self) -> BTreeSet<u32> {
        let mut threads = BTreeSet::new();
        let mut unseen: Vec<u32> = self.processes.keys().copied().collect();
        while let Some(process) = unseen.pop() {
            let tasks: Vec<_> = tasks(process).collect();
            if tasks.is_empty() {
                self.processes.remove(&process);
                continue;
            }
            for task in &tasks {
                for child in children(process, *task) {
                    if let Entry::Vacant(place) = self.processes.entry(child) {
                        place.insert(has_own_number(child));
                        unseen.push(child);
                    }
                }
            }
            if self.processes.get(&process) == Some(&true) {
                threads.extend(tasks);
            }
        }
        threads
    }
}

impl Waiting {
    fn show(self) -> Option<Unfinished> {
        (!self.shown).then_some(Unfinished { call: self.call, since: self.since })
    }
}

fn tasks(process: u32) -> impl Iterator<Item = u32> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    tasks.filter_map(|task| task.file_name().to_str()?.parse().ok())
}

fn children(process: u32, task: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{process}/task/{task}/children")).unwrap_or_default();
    text.split_ascii_whitespace().filter_map(|number| number.parse().ok()).collect()
}

/// Whether a process has the same number here and in its own PID namespace.
fn has_own_number(process: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    // Kernels without namespaces have no such line.
    numbers.is_none_or(|numbers| numbers.split_ascii_whitespace().count() <= 1)
}
