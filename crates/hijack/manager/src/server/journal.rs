//! System calls of tracees as events: a thread reads each executive's journal, sleeping until an executive wakes it.
//!
//! Who writes a journal can be in it, and write without end: entries go into a bounded queue, and the thread rests in proportion to
//! what it worked.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use orrery_hijack::{Events, JournalQuota};
use orrery_sys::scheduling::{self, Policy, Scheduling, thread_cpu_time};
use rustix::event::{EventfdFlags, eventfd};

use crate::attributes::TraceeId;
use crate::cpu::OwnCpus;

/// How many calls may wait for the manager, of all tracees.
const MOST: usize = 4096;
/// After so many in a row a thread rests, nineteen times as long as it worked.
const BATCH: usize = 256;
/// Journals of further identities that are read of one of root's runs, and of all runs of others: they are memory that is locked.
const FURTHER: usize = 63;
/// How long a thread sleeps if nobody wakes it: then it looks whether the tracee is left.
const LONGEST: Duration = Duration::from_millis(500);

/// A system call of a tracee.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub(super) tracee: TraceeId,
    pub(super) number: u32,
    pub(super) result: i64,
}

#[derive(Debug, Default)]
struct Queue {
    calls: VecDeque<Call>,
    dropped: u64,
}

/// The threads' end, and the manager's.
#[derive(Debug)]
pub(super) struct Journals {
    queue: Arc<Mutex<Queue>>,
    doorbell: Arc<OwnedFd>,
    /// For each thread whether it is to end.
    stop: HashMap<TraceeId, Arc<AtomicBool>>,
    realtime: bool,
    cpus: OwnCpus,
    /// For journals of further identities in runs of ordinary users.
    quota: JournalQuota,
}

impl Journals {
    /// Makes none yet. `realtime` is whether threads take real-time priority, `cpus` where they run.
    pub(super) fn new(realtime: bool, cpus: OwnCpus) -> io::Result<Self> {
        let doorbell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Self {
            queue: Arc::default(),
            doorbell,
            stop: HashMap::new(),
            realtime,
            cpus,
            quota: JournalQuota::new(FURTHER),
        })
    }

    /// Returns a descriptor that is readable while calls wait.
    pub(super) fn doorbell(&self) -> &OwnedFd {
        &self.doorbell
    }

    /// Returns the quota of journals of further identities in a run of this user.
    pub(super) fn quota(&self, user: u32) -> JournalQuota {
        if user == 0 { JournalQuota::new(FURTHER) } else { self.quota.clone() }
    }

    /// Reads a run's journals from now on, until the tracee is [gone](Self::stop): as long as somebody is attached to the segment, the
    /// tracees' supervisor waits.
    pub(super) fn read(&mut self, mut events: Events, tracee: TraceeId) -> io::Result<()> {
        let (queue, doorbell) = (Arc::clone(&self.queue), Arc::clone(&self.doorbell));
        let (stop, realtime, cpus) = (Arc::new(AtomicBool::new(false)), self.realtime, self.cpus);
        self.stop.insert(tracee, Arc::clone(&stop));
        let body = move || {
            cpus.take();
            if realtime {
                let fifo = Policy::Fifo { priority: 98 };
                // Without it events come later, which the manager has reported about itself.
                let _ = scheduling::set(0, Scheduling { policy: fifo, reset_on_fork: true });
            }
            loop {
                // What was written before is read yet; who still writes is no tracee any more.
                let last = stop.load(Relaxed);
                let most = if last { MOST } else { BATCH };
                let begin = thread_cpu_time();
                let batch: Vec<Call> = events
                    .by_ref()
                    .take(most)
                    .map(|event| Call { tracee, number: event.number(), result: event.result() })
                    .collect();
                if batch.is_empty() && !last {
                    events.wait(LONGEST);
                    continue;
                }
                let full = batch.len() == most;
                let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
                for call in batch {
                    if queue.calls.len() < MOST {
                        queue.calls.push_back(call);
                    } else {
                        queue.dropped += 1;
                    }
                }
                drop(queue);
                let _ = rustix::io::write(&doorbell, &1_u64.to_ne_bytes());
                if last {
                    return;
                }
                if full {
                    thread::sleep(Duration::from_nanos(thread_cpu_time().saturating_sub(begin) * 19));
                }
            }
        };
        thread::Builder::new().name("journal".into()).stack_size(256 * 1024).spawn(body).map(drop)
    }

    /// Ends the reading of a tracee's journal.
    pub(super) fn stop(&mut self, tracee: TraceeId) {
        if let Some(stop) = self.stop.remove(&tracee) {
            stop.store(true, Relaxed);
        }
    }

    /// Takes the calls that wait, and how many were dropped so far.
    pub(super) fn take(&self) -> (VecDeque<Call>, u64) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.doorbell, &mut count);
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        (std::mem::take(&mut queue.calls), queue.dropped)
    }
}
