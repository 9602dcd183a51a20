//! What happens, and bounded queues of it.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::tracee::TraceeId;

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Topic {
    /// A tick of the manager's timer; the value is its number.
    Timer,
    /// A tracee has joined; the value is its PID.
    Joined,
    /// A tracee has ended; the value is its PID.
    Ended,
    /// A tracee made a system call that its policy logs; the number is the call's, the value its result.
    Call,
    /// A tracee's attribute was set; the number is the class' index, the value the new one.
    Attribute,
    /// A tracee missed a period; the value is the CPU time, in nanoseconds, that it lacks.
    Missed,
    /// Tasks wait for CPUs (`/proc/pressure/cpu`).
    CpuPressure,
    /// Tasks wait for memory (`/proc/pressure/memory`).
    MemoryPressure,
    /// The manager got a signal; the number is the signal's.
    Signal,
    /// Somebody emitted it; number and value are theirs.
    Custom,
}

/// An event of the manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// What it is about.
    pub topic: Topic,
    /// Which tracee, if it is about one.
    pub tracee: Option<TraceeId>,
    /// What the topic says.
    pub number: u32,
    /// What the topic says.
    pub value: i64,
    /// When, in nanoseconds of `CLOCK_MONOTONIC`.
    pub time: u64,
}

/// Events that wait for their receiver. Where there is no room, the newest is dropped and counted.
#[derive(Debug)]
pub(super) struct Queue {
    events: VecDeque<Event>,
    room: usize,
    dropped: u64,
}

impl Queue {
    pub(super) fn new(room: usize) -> Self {
        Self { events: VecDeque::new(), room, dropped: 0 }
    }

    pub(super) fn push(&mut self, event: Event) {
        if self.events.len() < self.room {
            self.events.push_back(event);
        } else {
            self.dropped += 1;
        }
    }

    pub(super) fn pop(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }
}
