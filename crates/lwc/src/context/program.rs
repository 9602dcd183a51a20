//! What all contexts of a program share: who has control, and a seat for each context at which it is called.
//!
//! Every context can write all of this. That is why nothing here says *what* is handed over, by whom, or who may do
//! what: a context that writes nonsense can stop the program, as any part of a program can, and no more. Arguments and
//! the identity of callers travel in memory that two contexts have to themselves ([`super::link`]).

use core::sync::atomic::{AtomicU32, Ordering};

use orrery_domain::SharedMemory;
use orrery_domain::gate::Face;

use super::error::{Error, Result};

/// How many contexts a program has at most, the root included.
pub(crate) const SEATS: usize = 4096;
/// The seat of the root.
pub(crate) const ROOT: u32 = 0;
/// The hint of a caller that the called context does not know yet.
pub(crate) const STRANGER: u32 = u32::MAX;

/// Where one context waits.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Seat {
    /// Its note says which of its peers the owner should look at first.
    pub(crate) face: Face,
    /// How often the seat was given up.
    pub(crate) generation: AtomicU32,
    /// The process on it; 0: free; [`Seat::RESERVED`]: about to be taken.
    pub(crate) pid: AtomicU32,
    /// The CPU that the owner is bound to, and 1; 0 while it is not bound.
    pub(crate) pinned: AtomicU32,
    /// 0 while a new context sets itself up, 1 once it waits, else which step failed (upper half) with what (lower).
    pub(crate) settled: AtomicU32,
    /// How the last owner ended, packed.
    pub(crate) end: AtomicU32,
    /// 1 while the owner waits for descriptors as well as for its bell, so that callers must ring both.
    pub(crate) by_descriptor: AtomicU32,
    /// 1 while the owner is stopped in a system call that its parent has not answered.
    pub(crate) stopped: AtomicU32,
}

impl Seat {
    const RESERVED: u32 = u32::MAX;
}

#[repr(C, align(64))]
struct Head {
    control: AtomicU32,
    request: AtomicU32,
    answer: AtomicU32,
    highest: AtomicU32,
}

/// The memory that all contexts of a program share.
#[derive(Debug)]
pub(crate) struct Program {
    memory: SharedMemory,
}

impl Program {
    pub(crate) fn new() -> Result<Self> {
        let memory = SharedMemory::new("orrery-contexts", size_of::<Head>() + SEATS * size_of::<Seat>())?;
        let program = Self { memory };
        program.seat(ROOT).pid.store(rustix::process::getpid().as_raw_pid().unsigned_abs(), Ordering::SeqCst);
        Ok(program)
    }

    fn head(&self) -> &Head {
        // SAFETY: the memory is page-aligned, large enough, zeroed, and holds nothing but atomics.
        unsafe { self.memory.start().cast::<Head>().as_ref() }
    }

    /// The seat of that number; of a number that is none, the root's.
    pub(crate) fn seat(&self, number: u32) -> &Seat {
        let number = if (number as usize) < SEATS { number as usize } else { ROOT as usize };
        // SAFETY: as above; the seats follow the head, and the number is below their count.
        unsafe { self.memory.start().add(size_of::<Head>()).cast::<Seat>().add(number).as_ref() }
    }

    /// The number of the seat that has control.
    pub(crate) fn control(&self) -> &AtomicU32 {
        &self.head().control
    }

    /// What the root is asked to do: see [`super::reaper`].
    pub(crate) fn request(&self) -> &AtomicU32 {
        &self.head().request
    }

    /// What the root answered.
    pub(crate) fn answer(&self) -> &AtomicU32 {
        &self.head().answer
    }

    /// Reserves a free seat.
    pub(crate) fn reserve(&self) -> Result<u32> {
        for number in 1..SEATS {
            let number = u32::try_from(number).unwrap_or(0);
            let seat = self.seat(number);
            if seat.pid.load(Ordering::SeqCst) == 0
                && seat.pid.compare_exchange(0, Seat::RESERVED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
            {
                seat.face.reset(0, 0);
                seat.face.leave(STRANGER);
                seat.pinned.store(0, Ordering::SeqCst);
                seat.settled.store(0, Ordering::SeqCst);
                seat.by_descriptor.store(0, Ordering::SeqCst);
                seat.stopped.store(0, Ordering::SeqCst);
                self.head().highest.fetch_max(number, Ordering::SeqCst);
                return Ok(number);
            }
        }
        Err(Error::Full { most: SEATS })
    }

    /// Gives a reserved seat back that nobody ever took.
    pub(crate) fn vacate(&self, number: u32) {
        let pid = &self.seat(number).pid;
        let _ = pid.compare_exchange(Seat::RESERVED, 0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Gives a seat up.
    pub(crate) fn release(&self, number: u32, end: u32) {
        let seat = self.seat(number);
        seat.end.store(end, Ordering::SeqCst);
        seat.generation.fetch_add(1, Ordering::SeqCst);
        seat.pid.store(0, Ordering::SeqCst);
    }

    /// The process on a seat, if somebody sits there.
    pub(crate) fn pid(&self, number: u32) -> Option<rustix::process::Pid> {
        match self.seat(number).pid.load(Ordering::SeqCst) {
            Seat::RESERVED => None,
            pid => rustix::process::Pid::from_raw(i32::try_from(pid).unwrap_or(0)),
        }
    }

    /// The seats that somebody ever sat on, but the root's.
    pub(crate) fn used(&self) -> impl Iterator<Item = u32> {
        let highest = self.head().highest.load(Ordering::SeqCst).min(u32::try_from(SEATS - 1).unwrap_or(0));
        1..=highest
    }
}
