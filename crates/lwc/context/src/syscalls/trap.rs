//! Traps: a context's system call that it may not make arrives in its parent, which answers it.
//!
//! The context is filtered (seccomp(2)), and its parent has the filter's listener (seccomp_unotify(2)). The kernel stops
//! the context in the call, with its arguments in registers; what they point to the parent copies once, decides on the
//! copy, and acts on the copy. So it does not matter what else changes in the context's memory meanwhile.
//!
//! # How the parent gets hold of it
//!
//! The listener comes into being with the filter, and with the filter on, the context might no longer be able to send
//! it. Its watcher can: that thread is filtered last. It hands over listener and memory, closes both, and filters itself;
//! only then does the context wait for control. So no code of the program's ever runs in it without a filter, on whatever
//! thread, and nothing in it can answer its own traps.
//!
//! The context's memory is `/proc/PID/mem`, opened by itself before it closes itself to debuggers: the kernel checks who
//! may look into a process when that file is opened.

use core::ffi::c_void;
use core::sync::atomic::{AtomicI32, AtomicU32, Ordering::SeqCst};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use orrery_sys::notify;
use orrery_sys::seccomp::{self, Action, Scope, sock_filter};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::futex;

use crate::error::{Error, Result};
use crate::peers::introduction::send_files;
use crate::rights::Rights;
use crate::spawn::lifetime::Leash;
use crate::state::{Peer, State};
use crate::switch::slow;
use crate::syscalls::filter::Calls;
use crate::types::Arrival;

/// The longest path, with its end.
const PATH: usize = 4096;

/// A system call that a context made, and that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its number (`SYS_open` and so on).
    pub number: u32,
    /// Its arguments, as they were in the registers. Pointers are the context's: [`crate::Context::copy_in`].
    pub arguments: [u64; 6],
}

/// What becomes of a call that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It returns this, or fails with it where it is -4095 to -1, as the kernel's own calls do.
    Returns(i64),
    /// It goes on, unchanged.
    GoesOn,
}

/// The parent's hold of a context whose calls it hears.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) calls: notify::Listener,
    /// Its memory, as long as the right to all of it was not given up.
    pub(crate) memory: Option<OwnedFd>,
    /// What of it is ours to use: the system calls that we may make for it.
    pub(crate) rights: Rights,
    /// The calls that wait for an answer, by strand, and their kernel's numbers.
    pub(crate) pending: Vec<(u32, u64, Call)>,
    /// Calls that strands of ours are to be told of.
    kept: Vec<(u32, u64, Call)>,
    /// Nobody is behind it any more.
    pub(crate) is_over: bool,
}

/// What a new context's thread and its watcher do together to hand the listener out.
#[derive(Debug)]
pub(crate) struct Handing {
    socket: RawFd,
    memory: RawFd,
    starter: RawFd,
    filter: Vec<sock_filter>,
    /// There are other threads, and the filter is spread to them and to the watcher once the listener is out.
    counterparts: bool,
    /// The listener's number; -1 before there is one; -2 where there will be none.
    listener: AtomicI32,
    /// 0 until it is done, then 1, or an errno and 2^16.
    done: AtomicU32,
}

/// In a new context, before it is closed to debuggers: what it will be looked into by.
pub(crate) fn open_memory() -> rustix::io::Result<OwnedFd> {
    rustix::fs::open("/proc/self/mem", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map(orrery_sys::descriptors::raise)
}

/// In a new context, whose watcher runs, and that gave up gaining privileges before (`no_new_privs` in prctl(2), which is
/// each thread's): takes calls away, on both threads, and on its `counterparts` of the creator's other
/// threads. With `memory` they are trapped: listener and memory go out over `socket`.
pub(crate) fn filter(
    leash: &'static Leash,
    calls: &Calls,
    socket: &OwnedFd,
    memory: Option<OwnedFd>,
    counterparts: bool,
) -> rustix::io::Result<()> {
    let own = rustix::process::getpid().as_raw_pid().unsigned_abs();
    let trapped = memory.is_some();
    let action = if trapped { Action::Notify } else { Action::Fail(Errno::PERM) };
    let starter = eventfd(1, EventfdFlags::CLOEXEC)?;
    let handing: &'static Handing = Box::leak(Box::new(Handing {
        socket: socket.as_raw_fd(),
        memory: memory.map_or(-1, IntoRawFd::into_raw_fd),
        starter: starter.as_raw_fd(),
        filter: calls.filter(action, own),
        counterparts,
        listener: AtomicI32::new(-1),
        done: AtomicU32::new(0),
    }));
    leash.hand_out(handing, &starter)?;
    let _ = starter.into_raw_fd();
    let scope = if trapped { Scope::ThreadWithListener } else { Scope::Thread };
    let (number, outcome) = match seccomp::install(&handing.filter, scope) {
        Ok(listener) => (listener.map_or(-2, IntoRawFd::into_raw_fd), Ok(())),
        Err(errno) => (-2, Err(errno)),
    };
    handing.listener.store(number, SeqCst);
    let word = AtomicU32::from_ptr_of(&handing.listener);
    let _ = futex::wake(word, futex::Flags::empty(), 1);
    while handing.done.load(SeqCst) == 0 {
        let _ = futex::wait(&handing.done, futex::Flags::empty(), 0, None);
    }
    match handing.done.load(SeqCst) {
        1 if counterparts => outcome.and_then(|()| crate::threads::stop_threads::spread_filter()),
        1 => outcome,
        errno => Err(Errno::from_raw_os_error(i32::try_from(errno & 0xfff).unwrap_or(libc::EIO))),
    }
}

/// A view of a signed word, for futex(2), which knows unsigned ones.
trait Word {
    fn from_ptr_of(signed: &AtomicI32) -> &AtomicU32;
}

impl Word for AtomicU32 {
    fn from_ptr_of(signed: &AtomicI32) -> &AtomicU32 {
        // SAFETY: same size and alignment, and both are atomic.
        unsafe { AtomicU32::from_ptr(signed.as_ptr().cast()) }
    }
}

/// On the watcher's thread, bound by its rules: hands out what there is, then filters itself.
pub(crate) fn hand_over(handing: &Handing) {
    let word = AtomicU32::from_ptr_of(&handing.listener);
    while handing.listener.load(SeqCst) == -1 {
        let _ = futex::wait(word, futex::Flags::empty(), u32::MAX, None);
    }
    let listener = handing.listener.load(SeqCst);
    let mut outcome = Ok(());
    if listener >= 0 {
        // SAFETY: both are open, in a table that only this context has, whose other thread waits for us.
        let (listener, memory, socket) = unsafe {
            (
                OwnedFd::from_raw_fd(listener),
                BorrowedFd::borrow_raw(handing.memory),
                BorrowedFd::borrow_raw(handing.socket),
            )
        };
        outcome = send_files(socket, &[listener.as_fd(), memory]);
    }
    for number in [handing.memory, handing.starter] {
        if number >= 0 {
            // SAFETY: both were left to us.
            unsafe { rustix::io::close(number) };
        }
    }
    // Without a listener of its own, what is trapped elsewhere fails here.
    let outcome = match outcome {
        Ok(()) if !handing.counterparts => seccomp::install(&handing.filter, Scope::Thread).map(drop),
        other => other,
    };
    let done = match outcome {
        Ok(()) => 1,
        Err(errno) => 1 << 16 | errno.raw_os_error().unsigned_abs(),
    };
    handing.done.store(done, SeqCst);
    let _ = futex::wake(&handing.done, futex::Flags::empty(), 1);
}

impl Listener {
    pub(crate) fn new(fd: OwnedFd, memory: OwnedFd) -> Self {
        Self {
            calls: notify::Listener::new(fd),
            memory: Some(memory),
            rights: Rights::all(),
            pending: Vec::new(),
            kept: Vec::new(),
            is_over: false,
        }
    }

    fn answer(&self, id: u64, answer: Answer) {
        // It fails where the context is dead by now, as whoever waits for it will notice.
        let _ = match answer {
            Answer::Returns(error @ -4095..=-1) => {
                let errno = i32::try_from(-error).map_or(Errno::IO, Errno::from_raw_os_error);
                self.calls.answer(id, Err(errno))
            }
            Answer::Returns(value) => self.calls.answer(id, Ok(value)),
            Answer::GoesOn => self.calls.proceed(id),
        };
    }
}

/// In the parent: takes the call that the calling strand made in a context, with control. One that another strand made
/// is kept for that; one that is made out of turn, or by a strand that does not exist here, is refused.
pub(crate) fn take(state: &mut State, slot: usize) -> Option<Arrival> {
    let program = state.program;
    let (me, own, us) = (state.me, state.strand, state.own_holder());
    loop {
        let peer = state.peers.get_mut(slot)?.as_mut()?;
        let (seat, them) = (peer.seat, peer.holder());
        let listener = peer.listener.as_mut()?;
        if !slow::is_ready(listener.calls.as_fd()) {
            return None;
        }
        let notice = listener.calls.receive().ok()?;
        // Threads and processes that the context made have no counterpart here.
        let strand = program
            .strand_of(seat, notice.thread.unsigned_abs())
            .filter(|strand| program.exists(*strand, me));
        let Some(strand) = strand.filter(|strand| them.gives_way(program.control(*strand), us).is_ok())
        else {
            listener.answer(notice.id, Answer::Returns(-i64::from(libc::EPERM)));
            continue;
        };
        let call = Call { number: notice.number.unsigned_abs(), arguments: notice.arguments };
        listener.kept.push((strand, notice.id, call));
        if strand == own {
            return take_from(state, slot);
        }
        state.kick(strand);
    }
}

/// In the parent: the call that another thread has taken and kept for the calling one.
pub(crate) fn take_kept(state: &mut State) -> Option<Arrival> {
    (0..state.peers.len()).find_map(|slot| take_from(state, slot))
}

fn take_from(state: &mut State, slot: usize) -> Option<Arrival> {
    let strand = state.strand;
    let peer = state.peers.get_mut(slot)?.as_mut()?;
    let seat = peer.seat;
    let listener = peer.listener.as_mut()?;
    let index = listener.kept.iter().position(|(whose, ..)| *whose == strand)?;
    let (_, id, call) = listener.kept.swap_remove(index);
    listener.pending.push((strand, id, call));
    state.program.place(strand, seat).stopped.store(1, SeqCst);
    let word = u64::from(call.number);
    Some(Arrival { caller: state.handle(slot), word, bytes: Vec::new(), call: Some(call) })
}

/// While a context is asked for something that its library does: whatever call it makes for that is refused.
pub(crate) fn refuse_all(peer: &Peer) {
    let Some(listener) = &peer.listener else { return };
    while slow::is_ready(listener.calls.as_fd()) {
        match listener.calls.receive().ok() {
            Some(notice) => listener.answer(notice.id, Answer::Returns(-i64::from(libc::EPERM))),
            None => return,
        }
    }
}

/// Nobody will ever be heard there again.
pub(crate) fn end(state: &mut State, slot: usize) {
    if let Some(Some(peer)) = state.peers.get_mut(slot)
        && let Some(listener) = &mut peer.listener
    {
        listener.is_over = true;
    }
}

/// The call of a peer that waits for an answer of the calling strand.
pub(crate) fn pending(state: &State, slot: usize) -> Option<(u64, Call)> {
    let listener = state.peers.get(slot)?.as_ref()?.listener.as_ref()?;
    listener.pending.iter().find(|(strand, ..)| *strand == state.strand).map(|(_, id, call)| (*id, *call))
}

/// Answers; control must have been handed over before.
pub(crate) fn reply(state: &mut State, slot: usize, answer: Answer) {
    let (program, strand) = (state.program, state.strand);
    let Some(Some(peer)) = state.peers.get_mut(slot) else { return };
    let seat = peer.seat;
    let Some(listener) = &mut peer.listener else { return };
    if let Some(index) = listener.pending.iter().position(|(whose, ..)| *whose == strand) {
        let (_, id, _) = listener.pending.swap_remove(index);
        program.place(strand, seat).stopped.store(0, SeqCst);
        listener.answer(id, answer);
    }
}

/// Puts a descriptor of ours into the context whose call waits; gives its number there.
pub(crate) fn give(state: &State, slot: usize, fd: BorrowedFd<'_>, close_on_exec: bool) -> Result<RawFd> {
    let peer = state.peer(slot)?;
    let descriptor = peer.fd.as_raw_fd();
    let (Some((id, _)), Some(listener)) = (pending(state, slot), &peer.listener) else {
        return Err(Error::NoCall { descriptor });
    };
    listener.calls.add_descriptor(id, fd, close_on_exec).map_err(|errno| {
        Error::system("put a descriptor into a context", fd.as_raw_fd().unsigned_abs() as usize, errno)
    })
}

fn memory_of(state: &State, slot: usize) -> Result<&OwnedFd> {
    let peer = state.peer(slot)?;
    let descriptor = peer.fd.as_raw_fd();
    let listener = peer.listener.as_ref().ok_or(Error::NoCall { descriptor })?;
    listener.memory.as_ref().ok_or(Error::Denied { descriptor, start: 0, length: usize::MAX })
}

/// Copies memory of a context whose calls are trapped.
pub(crate) fn copy_in(state: &State, slot: usize, address: u64, buffer: &mut [u8]) -> Result<usize> {
    let memory = memory_of(state, slot)?;
    let mut done = 0;
    while done < buffer.len() {
        match rustix::io::pread(memory, &mut buffer[done..], address.saturating_add(done as u64)) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(Errno::INTR) => {}
            // The part that is there.
            Err(_) if done > 0 => break,
            Err(errno) => return Err(absent(address, errno)),
        }
    }
    if done == 0 && !buffer.is_empty() {
        return Err(absent(address, Errno::IO));
    }
    Ok(done)
}

/// The text at `address`, up to its end.
pub(crate) fn copy_path(state: &State, slot: usize, address: u64) -> Result<CString> {
    let mut bytes = vec![0; PATH];
    let there = copy_in(state, slot, address, &mut bytes)?;
    bytes.truncate(there);
    match bytes.iter().position(|byte| *byte == 0) {
        Some(end) => {
            bytes.truncate(end);
            CString::new(bytes).map_err(|_| absent(address, Errno::INVAL))
        }
        None => Err(Error::system("read a path of a context", PATH, Errno::NAMETOOLONG)),
    }
}

/// Writes into a context's memory.
pub(crate) fn copy_out(state: &State, slot: usize, address: u64, bytes: &[u8]) -> Result<()> {
    let memory = memory_of(state, slot)?;
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(memory, &bytes[done..], address.saturating_add(done as u64)) {
            Ok(0) => return Err(absent(address, Errno::IO)),
            Ok(wrote) => done += wrote,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(absent(address, errno)),
        }
    }
    Ok(())
}

fn absent(address: u64, errno: Errno) -> Error {
    // EIO is what the file says where nothing is mapped.
    if errno == Errno::IO {
        let address = usize::try_from(address).unwrap_or(usize::MAX);
        return Error::Memory { address, what: "copied", why: "the context has none there" };
    }
    Error::system("copy memory of a context", usize::try_from(address).unwrap_or(usize::MAX), errno)
}

/// Called by [`Leash`] with what [`filter`] gave it.
///
/// # Safety
/// `with` is a [`Handing`] that is never freed.
pub(crate) unsafe fn heed(with: *const c_void) {
    // SAFETY: the caller's promise.
    hand_over(unsafe { &*with.cast::<Handing>() });
}
