//! What all contexts of a program share: which context has each thread's control, and places at which it is called.
//!
//! A context has a *seat*, a thread of the program is a *strand*, and each strand has a *place* in each context in which it
//! exists. Every context can write all of this. That is why nothing here says *what* is handed over, by whom, or who may do
//! what: a context that writes nonsense can stop the program, as any part of a program can, and no more. Arguments and
//! the identity of callers travel in memory that two contexts have to themselves ([`crate::shared::link`]).
//!
//! It is a quarter of a gigabyte of address space, of which only what is used becomes memory.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::os::fd::{BorrowedFd, OwnedFd};

use orrery_domain::SharedMemory;
use orrery_domain::gate::Face;
use rustix::process::Pid;

use crate::error::{Error, Result};
use crate::shared::control::Holder;

/// How many contexts a program has at most, the root included.
pub(crate) const SEATS: usize = 4096;
/// How many threads of a program can use contexts at a time.
pub(crate) const STRANDS: usize = 256;
/// The seat of the root.
pub(crate) const ROOT: u32 = 0;
/// The hint of a caller that the called context does not know yet.
pub(crate) const STRANGER: u32 = u32::MAX;
/// No hint: what the last one asked for was done.
pub(crate) const NOBODY: u32 = STRANGER - 1;

/// One context.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Seat {
    /// How often the seat was given up.
    pub(crate) generation: AtomicU32,
    /// The process on it; 0: free; [`Seat::RESERVED`]: about to be taken.
    pub(crate) pid: AtomicU32,
    /// 0 while a new context sets itself up, 1 once it waits, else which step failed (upper half) with what (lower).
    pub(crate) settled: AtomicU32,
    /// How the last owner ended, packed.
    pub(crate) end: AtomicU32,
    /// The process that is to have the seat when its owner is killed; 0 for none. And the one strand that it has.
    pub(crate) spare: AtomicU32,
    pub(crate) spare_strand: AtomicU32,
    /// The strand in whose place the kernel marks the context's death: that of its creation.
    pub(crate) marked: AtomicU32,
}

impl Seat {
    const RESERVED: u32 = u32::MAX;
}

/// Where one strand waits in one context.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Place {
    /// Its note says which of its peers the owner should look at first.
    pub(crate) face: Face,
    /// The kernel's number of the thread that is the strand in this context; 0 where it does not exist there.
    pub(crate) thread: AtomicU32,
    /// The CPU that the owner is bound to, and 1; 0 while it is not bound.
    pub(crate) pinned: AtomicU32,
    /// 1 while the owner waits for descriptors as well as for its bell, so that callers must ring both.
    pub(crate) by_descriptor: AtomicU32,
    /// 1 while the owner is stopped in a system call that its parent has not answered.
    pub(crate) stopped: AtomicU32,
    /// 1 where control had been left here by somebody else, who died, when the owner came.
    pub(crate) left: AtomicU32,
    /// [`DOUBLE`] while the owner is asked to make a copy of itself for a forked program, [`DECLINED`] where it will not.
    pub(crate) asked_to_double: AtomicU32,
}

/// See [`Place::asked_to_double`].
pub(crate) const DOUBLE: u32 = 1;
/// See [`Place::asked_to_double`].
pub(crate) const DECLINED: u32 = 2;

impl Place {
    fn reset(&self) {
        self.face.reset(0, 0);
        self.thread.store(0, SeqCst);
        self.face.leave(STRANGER);
        self.pinned.store(0, SeqCst);
        self.by_descriptor.store(0, SeqCst);
        self.stopped.store(0, SeqCst);
        self.asked_to_double.store(0, SeqCst);
    }
}

/// One thread of the program.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Strand {
    /// Who has its control: a [`Holder`].
    pub(crate) control: AtomicU32,
    /// What its thread in the root is asked to do: see [`crate::spawn::reaper`].
    pub(crate) request: AtomicU32,
    /// The process whom that is about.
    pub(crate) victim: AtomicU32,
    /// What the root answered.
    pub(crate) answer: AtomicU32,
    /// The seat of the context in which the thread began, and 1; 0 for no thread.
    origin: AtomicU32,
}

/// A descriptor that names a context, by the number of the socket behind it, for those who got it by ways that the library
/// does not see. What is said here tells nobody anything and opens nothing: to be heard takes the socket.
#[repr(C)]
struct Name {
    socket: AtomicU64,
    /// Seat, and generation in the upper half.
    owner: AtomicU64,
}

/// How many names are listed.
const NAMES: usize = 1 << 14;
/// How many places a name can have.
const TRIES: usize = 32;

#[repr(C, align(64))]
struct Head {
    highest_seat: AtomicU32,
    highest_strand: AtomicU32,
}

const STRANDS_AT: usize = size_of::<Head>();
const SEATS_AT: usize = STRANDS_AT + STRANDS * size_of::<Strand>();
const PLACES_AT: usize = SEATS_AT + SEATS * size_of::<Seat>();
const NAMES_AT: usize = PLACES_AT + STRANDS * SEATS * size_of::<Place>();
const LENGTH: usize = NAMES_AT + NAMES * size_of::<Name>();

/// The memory that all contexts of a program share.
#[derive(Debug)]
pub(crate) struct Program {
    memory: SharedMemory,
}

impl Program {
    /// Of the calling process and thread, which are the root and its first strand.
    pub(crate) fn new() -> Result<Self> {
        let program = Self { memory: SharedMemory::new("orrery-contexts", LENGTH)? };
        program.seat(ROOT).pid.store(rustix::process::getpid().as_raw_pid().unsigned_abs(), SeqCst);
        program.add_strand(ROOT, own_thread());
        Ok(program)
    }

    /// Of the calling process and thread, which are copies of another program's root and of one strand of it. Has no
    /// contexts yet, and no seat's generation is one that had a context that is not copied. Also the file, for others to
    /// [`Program::join`].
    pub(crate) fn succeed(former: &Self, strand: u32) -> Result<(Self, OwnedFd)> {
        let (memory, file) = SharedMemory::with_file("orrery-contexts", LENGTH)?;
        let program = Self { memory };
        for seat in core::iter::once(ROOT).chain(former.used()) {
            let generation = former.seat(seat).generation.load(SeqCst);
            program.seat(seat).generation.store(generation, SeqCst);
            program.seat(seat).marked.store(strand, SeqCst);
        }
        program.head().highest_seat.store(former.head().highest_seat.load(SeqCst), SeqCst);
        program.head().highest_strand.store(strand, SeqCst);
        program.seat(ROOT).pid.store(rustix::process::getpid().as_raw_pid().unsigned_abs(), SeqCst);
        program.strand(strand).origin.store(ROOT + 1, SeqCst);
        program.strand(strand).control.store(program.holder(ROOT).word(), SeqCst);
        program.clear_place(strand, ROOT);
        program.place(strand, ROOT).thread.store(own_thread(), SeqCst);
        Ok((program, file))
    }

    /// Of another root, which sent its file.
    pub(crate) fn join(file: BorrowedFd<'_>) -> Result<Self> {
        Ok(Self { memory: SharedMemory::join(file, LENGTH)? })
    }

    /// Takes the program's memory from the calling process, which belongs to another program now.
    ///
    /// # Safety
    /// Nobody here uses it any more.
    pub(crate) unsafe fn leave(&self) {
        // SAFETY: the caller's promise.
        let _ = unsafe { rustix::mm::munmap(self.memory.start().as_ptr().cast(), self.memory.len()) };
    }

    /// Notes the process that is now on a seat.
    pub(crate) fn seat_process(&self, seat: u32, pid: Pid) {
        self.seat(seat).settled.store(1, SeqCst);
        self.seat(seat).pid.store(pid.as_raw_pid().unsigned_abs(), SeqCst);
    }

    fn head(&self) -> &Head {
        // SAFETY: the memory is page-aligned, large enough, zeroed, and holds nothing but atomics.
        unsafe { self.memory.start().cast::<Head>().as_ref() }
    }

    /// The strand of that number; of a number that is none, the first one.
    pub(crate) fn strand(&self, number: u32) -> &Strand {
        let number = if (number as usize) < STRANDS { number as usize } else { 0 };
        // SAFETY: as above; the strands follow the head, and the number is below their count.
        unsafe { self.memory.start().add(STRANDS_AT).cast::<Strand>().add(number).as_ref() }
    }

    /// The seat of that number; of a number that is none, the root's.
    pub(crate) fn seat(&self, number: u32) -> &Seat {
        // SAFETY: as above, with the seats behind the strands.
        unsafe { self.memory.start().add(SEATS_AT).cast::<Seat>().add(sound(number)).as_ref() }
    }

    /// The place of a strand in the context of a seat.
    pub(crate) fn place(&self, strand: u32, seat: u32) -> &Place {
        let strand = if (strand as usize) < STRANDS { strand as usize } else { 0 };
        let index = strand * SEATS + sound(seat);
        // SAFETY: as above, with the places behind the seats, as many for each strand.
        unsafe { self.memory.start().add(PLACES_AT).cast::<Place>().add(index).as_ref() }
    }

    /// The context that is on a seat now, as who has control.
    pub(crate) fn holder(&self, seat: u32) -> Holder {
        Holder::new(seat, self.seat(seat).generation.load(SeqCst))
    }

    /// The places where a socket may be listed.
    fn names(&self, socket: u64) -> impl Iterator<Item = &Name> {
        let spread = socket.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let first = usize::try_from(spread).unwrap_or(0);
        (0..TRIES).map(move |index| {
            let index = first.wrapping_add(index) % NAMES;
            // SAFETY: as above, with the names behind the places.
            unsafe { self.memory.start().add(NAMES_AT).cast::<Name>().add(index).as_ref() }
        })
    }

    /// Lists whose context the descriptor with a socket behind it names. What is found no place for is not listed.
    pub(crate) fn list_name(&self, socket: u64, (seat, generation): (u32, u32)) {
        let is_stale = |name: &&Name| {
            let owner = name.owner.load(SeqCst);
            let seat = u32::try_from(owner & 0xffff_ffff).unwrap_or(0);
            u64::from(self.seat(seat).generation.load(SeqCst)) != owner >> 32
        };
        let taken = |name: &&Name| name.socket.load(SeqCst) == socket;
        let free = |name: &&Name| name.socket.load(SeqCst) == 0;
        let place = self.names(socket).find(taken).or_else(|| self.names(socket).find(free));
        if let Some(name) = place.or_else(|| self.names(socket).find(is_stale)) {
            name.socket.store(0, SeqCst);
            name.owner.store(u64::from(generation) << 32 | u64::from(seat), SeqCst);
            name.socket.store(socket, SeqCst);
        }
    }

    /// Seat and generation of the context that is named by the descriptor with this socket behind it.
    pub(crate) fn named(&self, socket: u64) -> Option<(u32, u32)> {
        let name = self.names(socket).find(|name| name.socket.load(SeqCst) == socket)?;
        let owner = name.owner.load(SeqCst);
        let seat = u32::try_from(owner & 0xffff_ffff).ok().filter(|seat| (*seat as usize) < SEATS)?;
        Some((seat, u32::try_from(owner >> 32).ok()?))
    }

    /// The word that says who has a strand's control.
    pub(crate) fn control(&self, strand: u32) -> &AtomicU32 {
        &self.strand(strand).control
    }

    /// Whether the context of a seat has any strand's control. Neither allocates nor touches thread-local storage.
    pub(crate) fn has_control(&self, seat: u32) -> bool {
        self.strands().any(|strand| {
            Holder::of(self.control(strand)) == self.holder(seat)
                && self.place(strand, seat).thread.load(SeqCst) != 0
        })
    }

    /// The numbers of all strands that there are or were.
    pub(crate) fn strands(&self) -> core::ops::RangeInclusive<u32> {
        let most = u32::try_from(STRANDS - 1).unwrap_or(0);
        0..=self.head().highest_strand.load(SeqCst).min(most)
    }

    /// The strand that a thread is in the context of a seat.
    pub(crate) fn strand_of(&self, seat: u32, thread: u32) -> Option<u32> {
        self.strands().find(|strand| self.place(*strand, seat).thread.load(SeqCst) == thread)
    }

    /// Whether a strand exists in the context of a seat.
    pub(crate) fn exists(&self, strand: u32, seat: u32) -> bool {
        self.place(strand, seat).thread.load(SeqCst) != 0
    }

    /// Whether the thread that is a strand in a context's process lives.
    pub(crate) fn lives(&self, strand: u32, seat: u32) -> bool {
        let thread = self.place(strand, seat).thread.load(SeqCst);
        let (Some(pid), Ok(thread)) = (self.pid(seat), i32::try_from(thread)) else { return false };
        // SAFETY: a signal that is none, to see whether there is somebody.
        let found = unsafe { syscalls::syscall!(syscalls::Sysno::tgkill, pid.as_raw_pid(), thread, 0) };
        thread != 0 && found.map_err(syscalls::Errno::into_raw) != Err(libc::ESRCH)
    }

    /// Whether the thread with which a strand began has ended in a context that goes on: so do then all that it is
    /// elsewhere.
    pub(crate) fn has_ended(&self, strand: u32) -> bool {
        match self.strand(strand).origin.load(SeqCst) {
            0 => false,
            origin => {
                let seat = origin - 1;
                self.exists(strand, seat) && self.pid(seat).is_some() && !self.lives(strand, seat)
            }
        }
    }

    /// Whether there is no such thread, or it does not live where it began.
    fn is_over(&self, strand: u32) -> bool {
        match self.strand(strand).origin.load(SeqCst) {
            0 => true,
            origin => !self.lives(strand, origin - 1),
        }
    }

    /// A new strand, of a thread that begins in the context of a seat and has control there.
    pub(crate) fn add_strand(&self, seat: u32, thread: u32) -> Option<u32> {
        let most = u32::try_from(STRANDS).unwrap_or(0);
        for number in 0..most {
            let strand = self.strand(number);
            if strand.origin.load(SeqCst) != 0 && self.is_over(number) && !self.is_anywhere(number) {
                strand.origin.store(0, SeqCst);
            }
            if strand.origin.load(SeqCst) == 0
                && strand.origin.compare_exchange(0, seat + 1, SeqCst, SeqCst).is_ok()
            {
                strand.request.store(0, SeqCst);
                strand.control.store(self.holder(seat).word(), SeqCst);
                let place = self.place(number, seat);
                place.reset();
                place.thread.store(thread, SeqCst);
                self.head().highest_strand.fetch_max(number, SeqCst);
                return Some(number);
            }
        }
        None
    }

    /// Whether a strand lives on in any context.
    fn is_anywhere(&self, strand: u32) -> bool {
        core::iter::once(ROOT).chain(self.used()).any(|seat| self.lives(strand, seat))
    }

    /// Makes a place ready for a thread that begins to exist there.
    pub(crate) fn clear_place(&self, strand: u32, seat: u32) {
        let place = self.place(strand, seat);
        place.reset();
        let left = Holder::of(self.control(strand)) == self.holder(seat);
        place.left.store(u32::from(left), SeqCst);
    }

    /// Reserves a free seat, in whose context `strand` will be the first to exist.
    pub(crate) fn reserve(&self, strand: u32) -> Result<u32> {
        for number in 1..SEATS {
            let number = u32::try_from(number).unwrap_or(0);
            let seat = self.seat(number);
            if seat.pid.load(SeqCst) == 0
                && seat.pid.compare_exchange(0, Seat::RESERVED, SeqCst, SeqCst).is_ok()
            {
                for other in self.strands().filter(|other| *other == strand || self.exists(*other, number)) {
                    self.clear_place(other, number);
                }
                seat.settled.store(0, SeqCst);
                seat.spare.store(0, SeqCst);
                seat.marked.store(strand, SeqCst);
                self.head().highest_seat.fetch_max(number, SeqCst);
                return Ok(number);
            }
        }
        Err(Error::Full { most: SEATS })
    }

    /// Gives a reserved seat back that nobody ever took.
    pub(crate) fn vacate(&self, number: u32) {
        let pid = &self.seat(number).pid;
        let _ = pid.compare_exchange(Seat::RESERVED, 0, SeqCst, SeqCst);
    }

    /// Gives a seat to the spare of its owner, who is dead.
    pub(crate) fn bequeath(&self, number: u32, pid: Pid, end: u32) {
        let seat = self.seat(number);
        let heir = seat.spare_strand.load(SeqCst);
        seat.end.store(end, SeqCst);
        seat.settled.store(0, SeqCst);
        for strand in self.strands().filter(|strand| *strand == heir || self.exists(*strand, number)) {
            self.clear_place(strand, number);
        }
        seat.marked.store(heir, SeqCst);
        seat.spare.store(0, SeqCst);
        seat.pid.store(pid.as_raw_pid().unsigned_abs(), SeqCst);
        let _ = rustix::thread::futex::wake(&seat.pid, rustix::thread::futex::Flags::empty(), u32::MAX >> 1);
    }

    /// Gives a seat up.
    pub(crate) fn release(&self, number: u32, end: u32) {
        let seat = self.seat(number);
        seat.end.store(end, SeqCst);
        seat.generation.fetch_add(1, SeqCst);
        for strand in self.strands().filter(|strand| self.exists(*strand, number)) {
            self.place(strand, number).thread.store(0, SeqCst);
        }
        seat.pid.store(0, SeqCst);
    }

    /// Whether the kernel has marked the death of the context of a seat.
    pub(crate) fn is_marked_dead(&self, seat: u32) -> bool {
        self.place(self.seat(seat).marked.load(SeqCst), seat).face.is_marked_dead()
    }

    /// The process on a seat, if somebody sits there.
    pub(crate) fn pid(&self, number: u32) -> Option<Pid> {
        match self.seat(number).pid.load(SeqCst) {
            Seat::RESERVED => None,
            pid => Pid::from_raw(i32::try_from(pid).unwrap_or(0)),
        }
    }

    /// The seats that somebody ever sat on, but the root's.
    pub(crate) fn used(&self) -> impl Iterator<Item = u32> {
        let highest = self.head().highest_seat.load(SeqCst).min(u32::try_from(SEATS - 1).unwrap_or(0));
        1..=highest
    }
}

fn sound(seat: u32) -> usize {
    if (seat as usize) < SEATS { seat as usize } else { ROOT as usize }
}

/// The kernel's number of the calling thread.
pub(crate) fn own_thread() -> u32 {
    rustix::thread::gettid().as_raw_pid().unsigned_abs()
}
