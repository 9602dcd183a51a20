//! What all contexts of a program share: which context has each thread's control, and places at which it is called.
//!
//! A context has a *slot*, a thread of the program is a *logical thread*, and each logical thread has a *place* in each
//! context in which it exists. Every context can write all of this. That is why nothing here says *what* is handed
//! over, by whom, or who may do what: a context that writes nonsense can stop the program, as any part of a program
//! can, and no more. Arguments and the identity of callers travel in memory that two contexts have to themselves
//! ([`crate::shared::link`]).
//!
//! It is a quarter of a gigabyte of address space, of which only what is used becomes memory.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

use orrery_domain::SharedMemory;
use orrery_domain::gate::Face;
use rustix::process::Pid;

use crate::error::{Error, Result};
use crate::shared::control::Controller;

/// How many contexts a program has at most, the root included.
pub(crate) const MAX_CONTEXTS: usize = 4096;
/// How many threads of a program can use contexts at a time.
pub(crate) const MAX_THREADS: usize = 256;
/// The slot of the root.
pub(crate) const ROOT: u32 = 0;
/// The hint of a caller that the called context does not know yet.
pub(crate) const UNKNOWN_PEER: u32 = u32::MAX;
/// No hint: what the last one asked for was done.
pub(crate) const NOBODY: u32 = UNKNOWN_PEER - 1;

/// One context.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct ContextSlot {
    /// How often the slot was given up.
    pub(crate) generation: AtomicU32,
    /// The process on it; 0: free; [`ContextSlot::RESERVED`]: about to be taken.
    pub(crate) pid: AtomicU32,
    /// 0 while a new context sets itself up, 1 once it waits, else which step failed (upper half) with what (lower).
    pub(crate) settled: AtomicU32,
    /// How the last owner ended, packed.
    pub(crate) end: AtomicU32,
    /// The process that is to have the slot when its owner is killed; 0 for none. And the one logical thread that it
    /// has.
    pub(crate) checkpoint_pid: AtomicU32,
    pub(crate) spare_strand: AtomicU32,
    /// The logical thread in whose place the kernel marks the context's death: that of its creation.
    pub(crate) marked: AtomicU32,
    /// 1 where the context has stopped because the program was stopped, until the root has it continue.
    pub(crate) halted: AtomicU32,
}

impl ContextSlot {
    const RESERVED: u32 = u32::MAX;
}

/// Where one logical thread waits in one context.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Place {
    /// Its note says which of its peers the owner should look at first.
    pub(crate) face: Face,
    /// The kernel's number of the thread that is the logical thread in this context; 0 where it does not exist there.
    pub(crate) thread: AtomicU32,
    /// The CPU that the owner is bound to, and 1; 0 while it is not bound.
    pub(crate) pinned: AtomicU32,
    /// 1 while the owner waits for descriptors as well as for its bell, so that callers must ring both.
    pub(crate) by_descriptor: AtomicU32,
    /// 1 while the owner is stopped in a system call that its parent has not answered.
    pub(crate) stopped: AtomicU32,
    /// 1 where control had been left here by another context, which died, when the owner came.
    pub(crate) left: AtomicU32,
    /// [`COPY_REQUESTED`] while the owner is asked to make a copy of itself for a forked program, [`DECLINED`] where it
    /// will not.
    pub(crate) copy_requested: AtomicU32,
}

/// See [`Place::copy_requested`].
pub(crate) const COPY_REQUESTED: u32 = 1;
/// See [`Place::copy_requested`].
pub(crate) const DECLINED: u32 = 2;

impl Place {
    fn reset(&self) {
        self.face.reset(0, 0);
        self.thread.store(0, SeqCst);
        self.face.leave(UNKNOWN_PEER);
        self.pinned.store(0, SeqCst);
        self.by_descriptor.store(0, SeqCst);
        self.stopped.store(0, SeqCst);
        self.copy_requested.store(0, SeqCst);
    }
}

/// One thread of the program.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct LogicalThread {
    /// Who has its control: a [`Controller`].
    pub(crate) control: AtomicU32,
    /// What its thread in the root is asked to do: see [`crate::spawn::reaper`].
    pub(crate) request: AtomicU32,
    /// The process whom that is about.
    pub(crate) victim: AtomicU32,
    /// What the root answered.
    pub(crate) answer: AtomicU32,
    /// The slot of the context in which the thread began, and 1; 0 for no thread.
    origin: AtomicU32,
}

/// A descriptor that names a context, by the number of the socket behind it, for those who got it by ways that the
/// library does not see. What is said here tells nobody anything and opens nothing: to be heard takes the socket.
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
    /// 1 when a context has closed a descriptor of the root, until the root has looked.
    root_was_closed: AtomicU32,
    /// 1 when a context has stopped because the program was, until the root has looked.
    has_halted: AtomicU32,
    /// How many signals the root's wrapped handlers were called for.
    root_signals: AtomicU32,
}

const STRANDS_AT: usize = size_of::<Head>();
const SEATS_AT: usize = STRANDS_AT + MAX_THREADS * size_of::<LogicalThread>();
const PLACES_AT: usize = SEATS_AT + MAX_CONTEXTS * size_of::<ContextSlot>();
const NAMES_AT: usize = PLACES_AT + MAX_THREADS * MAX_CONTEXTS * size_of::<Place>();
const SIGNALS_AT: usize = NAMES_AT + NAMES * size_of::<Name>();
/// Counters of a context's signals, by number, of which there is no 0.
const SIGNALS: usize = orrery_sys::signals::LAST as usize + 1;
const LENGTH: usize = SIGNALS_AT + MAX_CONTEXTS * SIGNALS * size_of::<AtomicU32>();

/// The memory that all contexts of a program share.
#[derive(Debug)]
pub(crate) struct Program {
    memory: SharedMemory,
}

impl Program {
    /// Of the calling process and thread, which are the root and its first logical thread.
    pub(crate) fn new() -> Result<Self> {
        let program = Self { memory: SharedMemory::new("orrery-contexts", LENGTH)? };
        program.context_slot(ROOT).pid.store(rustix::process::getpid().as_raw_pid().unsigned_abs(), SeqCst);
        program.add_thread(ROOT, own_thread());
        Ok(program)
    }

    /// Of the calling process and thread, which are copies of another program's root and of one logical thread of it.
    /// Has no contexts yet, and no slot's generation is one that had a context that is not copied. Also the file, for
    /// others to [`Program::join`].
    pub(crate) fn succeed(former: &Self, logical_thread: u32) -> Result<(Self, OwnedFd)> {
        let (memory, file) = SharedMemory::with_file("orrery-contexts", LENGTH)?;
        let program = Self { memory };
        for context_slot in std::iter::once(ROOT).chain(former.used()) {
            let generation = former.context_slot(context_slot).generation.load(SeqCst);
            program.context_slot(context_slot).generation.store(generation, SeqCst);
            program.context_slot(context_slot).marked.store(logical_thread, SeqCst);
        }
        program.head().highest_seat.store(former.head().highest_seat.load(SeqCst), SeqCst);
        program.head().highest_strand.store(logical_thread, SeqCst);
        program.context_slot(ROOT).pid.store(rustix::process::getpid().as_raw_pid().unsigned_abs(), SeqCst);
        program.logical_thread(logical_thread).origin.store(ROOT + 1, SeqCst);
        program.logical_thread(logical_thread).control.store(program.controller(ROOT).word(), SeqCst);
        program.clear_place(logical_thread, ROOT);
        program.place(logical_thread, ROOT).thread.store(own_thread(), SeqCst);
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
        // SAFETY: nobody in this process uses the program's memory, which is the whole mapping, any more
        // (# Safety).
        let _ = unsafe { rustix::mm::munmap(self.memory.start().as_ptr().cast(), self.memory.len()) };
    }

    /// Notes the process that is now on a slot.
    pub(crate) fn seat_process(&self, context_slot: u32, pid: Pid) {
        self.context_slot(context_slot).settled.store(1, SeqCst);
        self.context_slot(context_slot).pid.store(pid.as_raw_pid().unsigned_abs(), SeqCst);
    }

    fn head(&self) -> &Head {
        // SAFETY: the memory is page-aligned, large enough, zeroed, and holds nothing but atomics.
        unsafe { self.memory.start().cast::<Head>().as_ref() }
    }

    /// Returns whether a context has closed a descriptor of the root: see [`crate::spawn::root_names`].
    pub(crate) fn root_was_closed(&self) -> &AtomicU32 {
        &self.head().root_was_closed
    }

    /// Returns how many signals the root had whose handlers are wrapped: see [`crate::spawn::signal_forwarding`].
    pub(crate) fn root_signals(&self) -> &AtomicU32 {
        &self.head().root_signals
    }

    /// Returns how many of a signal the context of a slot had; of a number that is none, of 0.
    pub(crate) fn signals(&self, context_slot: u32, signal: i32) -> &AtomicU32 {
        let signal = usize::try_from(signal).ok().filter(|signal| *signal < SIGNALS).unwrap_or(0);
        let index = sound(context_slot) * SIGNALS + signal;
        // SAFETY: as for the head, with the counters behind the names, as many for each slot.
        unsafe { self.memory.start().add(SIGNALS_AT).cast::<AtomicU32>().add(index).as_ref() }
    }

    /// Returns whether any context has stopped because the program was: see [`crate::spawn::job_control`].
    pub(crate) fn has_halted(&self) -> &AtomicU32 {
        &self.head().has_halted
    }

    /// The logical thread of that number; of a number that is none, the first one.
    pub(crate) fn logical_thread(&self, number: u32) -> &LogicalThread {
        let number = if (number as usize) < MAX_THREADS { number as usize } else { 0 };
        // SAFETY: the mapping is never unmapped; the logical threads follow the head, and the number is below
        // their count.
        unsafe { self.memory.start().add(STRANDS_AT).cast::<LogicalThread>().add(number).as_ref() }
    }

    /// The slot of that number; of a number that is none, the root's.
    pub(crate) fn context_slot(&self, number: u32) -> &ContextSlot {
        // SAFETY: the mapping is never unmapped; the slots follow the logical threads, and `sound` bounds the
        // number.
        unsafe { self.memory.start().add(SEATS_AT).cast::<ContextSlot>().add(sound(number)).as_ref() }
    }

    /// Returns the place of a logical thread in the context of a slot.
    pub(crate) fn place(&self, logical_thread: u32, context_slot: u32) -> &Place {
        let logical_thread =
            if (logical_thread as usize) < MAX_THREADS { logical_thread as usize } else { 0 };
        let index = logical_thread * MAX_CONTEXTS + sound(context_slot);
        // SAFETY: the mapping is never unmapped; the places follow the slots, as many for each logical
        // thread, and the index is within them.
        unsafe { self.memory.start().add(PLACES_AT).cast::<Place>().add(index).as_ref() }
    }

    /// The context that is on a slot now, as who has control.
    pub(crate) fn controller(&self, context_slot: u32) -> Controller {
        Controller::new(context_slot, self.context_slot(context_slot).generation.load(SeqCst))
    }

    /// The places where a socket may be listed.
    fn names(&self, socket: u64) -> impl Iterator<Item = &Name> {
        let spread = socket.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let first = usize::try_from(spread).unwrap_or(0);
        (0..TRIES).map(move |index| {
            let index = first.wrapping_add(index) % NAMES;
            // SAFETY: the mapping is never unmapped; the names follow the places, and the index is below
            // their count.
            unsafe { self.memory.start().add(NAMES_AT).cast::<Name>().add(index).as_ref() }
        })
    }

    /// Lists whose context the descriptor with a socket behind it names. What is found no place for is not listed.
    pub(crate) fn list_name(&self, socket: u64, (context_slot, generation): (u32, u32)) {
        let is_stale = |name: &&Name| {
            let owner = name.owner.load(SeqCst);
            let context_slot = u32::try_from(owner & 0xffff_ffff).unwrap_or(0);
            u64::from(self.context_slot(context_slot).generation.load(SeqCst)) != owner >> 32
        };
        let taken = |name: &&Name| name.socket.load(SeqCst) == socket;
        let free = |name: &&Name| name.socket.load(SeqCst) == 0;
        let place = self.names(socket).find(taken).or_else(|| self.names(socket).find(free));
        if let Some(name) = place.or_else(|| self.names(socket).find(is_stale)) {
            name.socket.store(0, SeqCst);
            name.owner.store(u64::from(generation) << 32 | u64::from(context_slot), SeqCst);
            name.socket.store(socket, SeqCst);
        }
    }

    /// Seat and generation of the context that is named by the descriptor with this socket behind it.
    pub(crate) fn named(&self, socket: u64) -> Option<(u32, u32)> {
        let name = self.names(socket).find(|name| name.socket.load(SeqCst) == socket)?;
        let owner = name.owner.load(SeqCst);
        let context_slot = u32::try_from(owner & 0xffff_ffff)
            .ok()
            .filter(|context_slot| (*context_slot as usize) < MAX_CONTEXTS)?;
        Some((context_slot, u32::try_from(owner >> 32).ok()?))
    }

    /// The word that says who has a logical thread's control.
    pub(crate) fn control(&self, logical_thread: u32) -> &AtomicU32 {
        &self.logical_thread(logical_thread).control
    }

    /// Returns whether the context of a slot has any logical thread's control. Neither allocates nor touches
    /// thread-local storage.
    pub(crate) fn has_control(&self, context_slot: u32) -> bool {
        self.logical_threads().any(|logical_thread| {
            Controller::of(self.control(logical_thread)) == self.controller(context_slot)
                && self.place(logical_thread, context_slot).thread.load(SeqCst) != 0
        })
    }

    /// The numbers of all logical threads that there are or were.
    pub(crate) fn logical_threads(&self) -> std::ops::RangeInclusive<u32> {
        let most = u32::try_from(MAX_THREADS - 1).unwrap_or(0);
        0..=self.head().highest_strand.load(SeqCst).min(most)
    }

    /// The logical thread that a thread is in the context of a slot.
    pub(crate) fn thread_with_tid(&self, context_slot: u32, thread: u32) -> Option<u32> {
        self.logical_threads()
            .find(|logical_thread| self.place(*logical_thread, context_slot).thread.load(SeqCst) == thread)
    }

    /// Returns whether a logical thread exists in the context of a slot.
    pub(crate) fn exists(&self, logical_thread: u32, context_slot: u32) -> bool {
        self.place(logical_thread, context_slot).thread.load(SeqCst) != 0
    }

    /// Returns whether the thread that is a logical thread in a context's process lives.
    pub(crate) fn lives(&self, logical_thread: u32, context_slot: u32) -> bool {
        let thread = self.place(logical_thread, context_slot).thread.load(SeqCst);
        let (Some(pid), Ok(thread)) = (self.pid(context_slot), i32::try_from(thread)) else { return false };
        // SAFETY: signal 0 only asks whether the process exists.
        let found = unsafe { syscalls::syscall!(syscalls::Sysno::tgkill, pid.as_raw_pid(), thread, 0) };
        thread != 0 && found.map_err(syscalls::Errno::into_raw) != Err(libc::ESRCH)
    }

    /// Returns whether the thread with which a logical thread began has ended in a context that goes on: so do then
    /// all that it is elsewhere.
    pub(crate) fn has_ended(&self, logical_thread: u32) -> bool {
        match self.logical_thread(logical_thread).origin.load(SeqCst) {
            0 => false,
            origin => {
                let context_slot = origin - 1;
                self.exists(logical_thread, context_slot)
                    && self.pid(context_slot).is_some()
                    && !self.lives(logical_thread, context_slot)
            }
        }
    }

    /// Returns whether there is no such thread, or it does not live where it began.
    fn is_over(&self, logical_thread: u32) -> bool {
        match self.logical_thread(logical_thread).origin.load(SeqCst) {
            0 => true,
            origin => !self.lives(logical_thread, origin - 1),
        }
    }

    /// A new logical thread, of a thread that begins in the context of a slot and has control there.
    pub(crate) fn add_thread(&self, context_slot: u32, thread: u32) -> Option<u32> {
        let most = u32::try_from(MAX_THREADS).unwrap_or(0);
        for number in 0..most {
            let logical_thread = self.logical_thread(number);
            if logical_thread.origin.load(SeqCst) != 0 && self.is_over(number) && !self.is_anywhere(number) {
                logical_thread.origin.store(0, SeqCst);
            }
            if logical_thread.origin.load(SeqCst) == 0
                && logical_thread.origin.compare_exchange(0, context_slot + 1, SeqCst, SeqCst).is_ok()
            {
                logical_thread.request.store(0, SeqCst);
                logical_thread.control.store(self.controller(context_slot).word(), SeqCst);
                let place = self.place(number, context_slot);
                place.reset();
                place.thread.store(thread, SeqCst);
                self.head().highest_strand.fetch_max(number, SeqCst);
                return Some(number);
            }
        }
        None
    }

    /// Returns whether a logical thread lives on in any context.
    fn is_anywhere(&self, logical_thread: u32) -> bool {
        std::iter::once(ROOT).chain(self.used()).any(|context_slot| self.lives(logical_thread, context_slot))
    }

    /// Makes a place ready for a thread that begins to exist there.
    pub(crate) fn clear_place(&self, logical_thread: u32, context_slot: u32) {
        let place = self.place(logical_thread, context_slot);
        place.reset();
        let left = Controller::of(self.control(logical_thread)) == self.controller(context_slot);
        place.left.store(u32::from(left), SeqCst);
    }

    /// Reserves a free slot, in whose context `logical_thread` will be the first to exist.
    pub(crate) fn reserve(&self, logical_thread: u32) -> Result<u32> {
        for number in 1..MAX_CONTEXTS {
            let number = u32::try_from(number).unwrap_or(0);
            let context_slot = self.context_slot(number);
            if context_slot.pid.load(SeqCst) == 0
                && context_slot.pid.compare_exchange(0, ContextSlot::RESERVED, SeqCst, SeqCst).is_ok()
            {
                for other in self
                    .logical_threads()
                    .filter(|other| *other == logical_thread || self.exists(*other, number))
                {
                    self.clear_place(other, number);
                }
                context_slot.settled.store(0, SeqCst);
                context_slot.checkpoint_pid.store(0, SeqCst);
                context_slot.halted.store(0, SeqCst);
                context_slot.marked.store(logical_thread, SeqCst);
                self.head().highest_seat.fetch_max(number, SeqCst);
                return Ok(number);
            }
        }
        Err(Error::Full { most: MAX_CONTEXTS })
    }

    /// Gives a reserved slot back that nobody ever took.
    pub(crate) fn vacate(&self, number: u32) {
        let pid = &self.context_slot(number).pid;
        let _ = pid.compare_exchange(ContextSlot::RESERVED, 0, SeqCst, SeqCst);
    }

    /// Gives a slot to the checkpoint of its owner, who is dead.
    pub(crate) fn replace_with_checkpoint(&self, number: u32, pid: Pid, end: u32) {
        let context_slot = self.context_slot(number);
        let successor = context_slot.spare_strand.load(SeqCst);
        context_slot.end.store(end, SeqCst);
        context_slot.settled.store(0, SeqCst);
        for logical_thread in self
            .logical_threads()
            .filter(|logical_thread| *logical_thread == successor || self.exists(*logical_thread, number))
        {
            self.clear_place(logical_thread, number);
        }
        context_slot.marked.store(successor, SeqCst);
        context_slot.checkpoint_pid.store(0, SeqCst);
        context_slot.pid.store(pid.as_raw_pid().unsigned_abs(), SeqCst);
        let _ = rustix::thread::futex::wake(
            &context_slot.pid,
            rustix::thread::futex::Flags::empty(),
            u32::MAX >> 1,
        );
    }

    /// Gives a slot up.
    pub(crate) fn release(&self, number: u32, end: u32) {
        let context_slot = self.context_slot(number);
        context_slot.end.store(end, SeqCst);
        context_slot.generation.fetch_add(1, SeqCst);
        for logical_thread in
            self.logical_threads().filter(|logical_thread| self.exists(*logical_thread, number))
        {
            self.place(logical_thread, number).thread.store(0, SeqCst);
        }
        context_slot.pid.store(0, SeqCst);
    }

    /// Returns whether the kernel has marked the death of the context of a slot.
    pub(crate) fn is_marked_dead(&self, context_slot: u32) -> bool {
        self.place(self.context_slot(context_slot).marked.load(SeqCst), context_slot).face.is_marked_dead()
    }

    /// The process of the context on a slot, if there is one.
    pub(crate) fn pid(&self, number: u32) -> Option<Pid> {
        match self.context_slot(number).pid.load(SeqCst) {
            ContextSlot::RESERVED => None,
            pid => Pid::from_raw(i32::try_from(pid).unwrap_or(0)),
        }
    }

    /// The slots that were ever used, without the root's.
    pub(crate) fn used(&self) -> impl Iterator<Item = u32> {
        let highest = self.head().highest_seat.load(SeqCst).min(u32::try_from(MAX_CONTEXTS - 1).unwrap_or(0));
        1..=highest
    }
}

fn sound(context_slot: u32) -> usize {
    if (context_slot as usize) < MAX_CONTEXTS { context_slot as usize } else { ROOT as usize }
}

/// Returns the kernel's number of the calling thread.
pub(crate) fn own_thread() -> u32 {
    rustix::thread::gettid().as_raw_pid().unsigned_abs()
}
