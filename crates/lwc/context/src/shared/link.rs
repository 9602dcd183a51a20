//! A link: memory that two contexts have to themselves, in which one says to the other what it wants.
//!
//! Each side writes one half and reads the other. The kernel keeps everybody else out, so whatever comes over a link
//! comes from the one context at its other end. That one may be hostile: lengths are checked, and bytes copied once.
//!
//! Each logical thread has a part of it to itself, of which only what is used becomes memory.
//!
//! Copies of the process do not have it (MADV_DONTFORK in madvise(2)): what one context says to another is no third
//! one's business, and a program with thousands of contexts forks without thousands of mappings. Only between two sides
//! that are about to be one process each, and for a checkpoint of one's own ([`crate::fork::checkpoint`]), is it there
//! in the copy, too.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use orrery_domain::forked::Creator;
use orrery_sys::PAGE;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::{Error, Result};
use crate::id::Id;
use crate::shared::program::MAX_THREADS;

/// How many bytes a switch carries.
pub const ROOM: usize = 64 << 10;

/// What one logical thread has.
const PART: usize = PAGE + 2 * ROOM;

const LENGTH: usize = MAX_THREADS * PART;

/// What one side says. It has two lines of the cache, for processors fetch them in pairs, and the other half is another
/// CPU's.
#[repr(C, align(128))]
struct Half {
    sent: AtomicU32,
    kind: AtomicU32,
    word: AtomicU64,
    extent: AtomicU64,
    length: AtomicU32,
    /// 1 where its owner, having said this, waits for the answer at this link ([`ReplySlot`]).
    listens: AtomicU32,
    /// Under which number its owner knows the other side. The first logical thread's half says it for all.
    slot: AtomicU32,
    /// Its owner has closed its descriptor of the other side; as above.
    closed: AtomicU32,
}

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Kind {
    /// A switch: control, with its arguments.
    Switch = 1,
    /// "Give me a copy of your memory from `word` on, `extent` bytes".
    Copy,
    /// "Share it with me".
    Share,
    /// "Narrow what I may do to this".
    Restrict,
    /// "Give me your descriptor `word`".
    File,
    /// "Make system call `word`": see [`crate::syscalls::remote`].
    Call,
    /// "Keep a checkpoint of yourself": see [`crate::fork::checkpoint`].
    Keep,
    /// "Give me `extent` bytes of your memory from `word` on": see [`crate::syscalls::target`].
    Read,
    /// "Write these to your memory from `word` on".
    Write,
    /// "Have the descriptor that I sent, which call `word` made".
    Take,
    /// The answer to any of these: an errno, or 0.
    Reply,
}

impl Kind {
    fn of(number: u32) -> Option<Self> {
        // Most are this.
        if number == Self::Switch as u32 {
            return Some(Self::Switch);
        }
        let others = [
            Self::Copy,
            Self::Share,
            Self::Restrict,
            Self::File,
            Self::Call,
            Self::Keep,
            Self::Read,
            Self::Write,
            Self::Take,
            Self::Reply,
        ];
        others.into_iter().find(|kind| *kind as u32 == number)
    }
}

/// A message.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) kind: Kind,
    pub(crate) word: u64,
    pub(crate) extent: u64,
    pub(crate) bytes: Vec<u8>,
    /// Whether who said it waits at the link.
    pub(crate) listens: bool,
}

/// The memory of a link, while it is a link, or a context waits at it.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    /// The process that has it.
    creator: Cell<Creator>,
}

/// One side's view of a link.
#[derive(Debug)]
pub(crate) struct Link {
    start: NonNull<u8>,
    mapping: Rc<Mapping>,
    /// What only the two sides know.
    pub(crate) id: Id,
    /// Which half is ours.
    side: usize,
    /// Up to where each logical thread's messages were taken.
    taken: Vec<u32>,
}

/// What a logical thread that waits at a link listens to: a word that comes in one line of the cache with what is said.
#[derive(Debug)]
pub(crate) struct ReplySlot {
    _mapping: Rc<Mapping>,
    sent: *const AtomicU32,
    taken: u32,
}

/// The same, for the wait itself, which owns nothing. It must not outlive its [`ReplySlot`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawReplySlot {
    sent: *const AtomicU32,
    taken: u32,
}

impl ReplySlot {
    pub(crate) fn raw_reply_slot(&self) -> RawReplySlot {
        RawReplySlot { sent: self.sent, taken: self.taken }
    }
}

impl RawReplySlot {
    /// Returns whether something was said that was not taken yet.
    #[inline]
    pub(crate) fn is_called(self) -> bool {
        // SAFETY: the reply slot keeps the memory mapped.
        unsafe { &*self.sent }.load(Ordering::SeqCst) != self.taken
    }
}

// SAFETY: the mapping belongs to the process; link and reply slots are used by one thread at a time, the one that holds
// the state.
unsafe impl Send for Link {}

impl Link {
    /// Makes one, seen from side 0, and the file by which the other side maps it.
    pub(crate) fn make() -> Result<(Self, OwnedFd)> {
        let fd = rustix::fs::memfd_create("orrery-link", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|e| Error::system("memfd_create", LENGTH, e))?;
        rustix::fs::ftruncate(&fd, LENGTH as u64)
            .and_then(|()| {
                rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            })
            .map_err(|e| Error::system("ftruncate(memfd)", LENGTH, e))?;
        Ok((Self::map(fd.as_fd(), 0, Id::new()?)?, fd))
    }

    /// Maps what another context made, seen from side 1.
    pub(crate) fn accept(fd: BorrowedFd<'_>, id: Id) -> Result<Self> {
        Self::accept_as(fd, 1, id)
    }

    /// Returns the same, seen from a side.
    pub(crate) fn accept_as(fd: BorrowedFd<'_>, side: usize, id: Id) -> Result<Self> {
        let refuse = |errno| Error::system("accept a link", 0, errno);
        // Only a file that cannot shrink under us may be touched.
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(refuse)?;
        let length = rustix::fs::fstat(fd).map_err(refuse)?.st_size;
        if !seals.contains(SealFlags::SHRINK) || usize::try_from(length) != Ok(LENGTH) {
            return Err(refuse(rustix::io::Errno::INVAL));
        }
        Self::map(fd, side, id)
    }

    fn map(fd: BorrowedFd<'_>, side: usize, id: Id) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces no mapping.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), LENGTH, protection, MapFlags::SHARED, fd, 0) }
                .map_err(|e| Error::system("mmap(memfd)", LENGTH, e))?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(Error::system(
            "mmap(memfd)",
            LENGTH,
            rustix::io::Errno::NOMEM,
        ))?;
        let creator = Creator::here();
        Ok(Self {
            start,
            mapping: Rc::new(Mapping { start, creator: Cell::new(creator) }),
            id,
            side,
            taken: Vec::new(),
        })
    }

    /// In a context just created over this mapping: sees it from the other side.
    pub(crate) fn turn(&mut self) {
        self.side = 1 - self.side;
        self.mapping.creator.set(Creator::here());
    }

    /// Whether copies of the process that are made from now on have it, too.
    pub(crate) fn set_copied(&self, copied: bool) {
        let advice = if copied { Advice::LinuxDoFork } else { Advice::LinuxDontFork };
        // SAFETY: our own mapping; no copy uses it that does not know that it is there.
        let _ = unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), LENGTH, advice) };
    }

    /// In a copy that has it ([`Link::set_copied`]): it is the copy's.
    pub(crate) fn inherit(&mut self) {
        self.mapping.creator.set(Creator::here());
    }

    /// Returns whether the calling process has it.
    pub(crate) fn is_here(&self) -> bool {
        self.mapping.is_here()
    }

    /// Returns where a logical thread's part begins.
    #[inline]
    fn part(&self, logical_thread: u32) -> NonNull<u8> {
        let logical_thread =
            if (logical_thread as usize) < MAX_THREADS { logical_thread as usize } else { 0 };
        // SAFETY: the mapping holds so many parts.
        unsafe { self.start.add(logical_thread * PART) }
    }

    /// From which side it is seen.
    pub(crate) fn side(&self) -> usize {
        self.side
    }

    #[inline]
    fn half(&self, side: usize, logical_thread: u32) -> &Half {
        // SAFETY: a part is page-aligned and holds two halves of atomics in its first page.
        unsafe { self.part(logical_thread).cast::<Half>().add(side).as_ref() }
    }

    #[inline]
    fn mine(&self, logical_thread: u32) -> &Half {
        self.half(self.side, logical_thread)
    }

    #[inline]
    fn theirs(&self, logical_thread: u32) -> &Half {
        self.half(1 - self.side, logical_thread)
    }

    #[inline(always)]
    fn taken(&mut self, logical_thread: u32) -> &mut u32 {
        let logical_thread = logical_thread as usize;
        if self.taken.len() <= logical_thread {
            self.add_call_state(logical_thread);
        }
        &mut self.taken[logical_thread]
    }

    #[cold]
    fn add_call_state(&mut self, logical_thread: usize) {
        self.taken.resize(logical_thread + 1, 0);
    }

    /// Returns the number under which the other side knows us.
    pub(crate) fn their_slot(&self) -> u32 {
        self.theirs(0).slot.load(Ordering::Relaxed)
    }

    /// Says under which number we know the other side.
    pub(crate) fn set_slot(&self, slot: usize) {
        self.mine(0).slot.store(u32::try_from(slot).unwrap_or(u32::MAX), Ordering::SeqCst);
    }

    /// Says that our descriptor of the other side is closed.
    pub(crate) fn set_closed(&self) {
        self.mine(0).closed.store(1, Ordering::SeqCst);
    }

    /// Returns whether the other side has closed its descriptor of us.
    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        self.theirs(0).closed.load(Ordering::SeqCst) != 0
    }

    /// By which a logical thread waits for what the other side says next.
    pub(crate) fn reply_slot(&mut self, logical_thread: u32) -> ReplySlot {
        let taken = *self.taken(logical_thread);
        ReplySlot { _mapping: self.mapping.clone(), sent: &raw const self.theirs(logical_thread).sent, taken }
    }

    /// Writes a message that the other side does not see before [`Link::publish`]; at most [`ROOM`] bytes of `bytes`.
    #[inline]
    pub(crate) fn stage(&mut self, logical_thread: u32, kind: Kind, word: u64, extent: u64, bytes: &[u8]) {
        let length = bytes.len().min(ROOM);
        let mine = self.mine(logical_thread);
        mine.listens.store(u32::from(kind == Kind::Switch), Ordering::Relaxed);
        mine.kind.store(kind as u32, Ordering::Relaxed);
        mine.word.store(word, Ordering::Relaxed);
        mine.extent.store(extent, Ordering::Relaxed);
        mine.length.store(u32::try_from(length).unwrap_or(0), Ordering::Relaxed);
        if length == 0 {
            return;
        }
        // SAFETY: our half of the bytes is ROOM long and written by us alone.
        unsafe {
            let to = self.part(logical_thread).as_ptr().add(PAGE + self.side * ROOM);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, length);
        }
    }

    /// Sends what was staged. It may be followed by a look for sleepers: all its accesses come before.
    pub(crate) fn publish(&mut self, logical_thread: u32) {
        self.send(logical_thread, Ordering::SeqCst);
    }

    /// The same without a fence: a look for sleepers may come too early. Gives what tells of an answer.
    #[inline(always)]
    pub(crate) fn publish_at_ease(&mut self, logical_thread: u32) -> RawReplySlot {
        self.send(logical_thread, Ordering::Release);
        let taken = *self.taken(logical_thread);
        RawReplySlot { sent: &raw const self.theirs(logical_thread).sent, taken }
    }

    #[inline(always)]
    fn send(&self, logical_thread: u32, order: Ordering) {
        // Nobody else writes it.
        let sent = &self.mine(logical_thread).sent;
        sent.store(sent.load(Ordering::Relaxed).wrapping_add(1), order);
    }

    #[inline(never)]
    fn take_long_switch(&mut self, logical_thread: u32) -> Option<(u64, Vec<u8>, bool)> {
        let message = self.take(logical_thread)?;
        (message.kind == Kind::Switch).then_some((message.word, message.bytes, message.listens))
    }

    /// Takes the other side's message, which is there, if it is control: the argument that is a value, the one that is
    /// a buffer, and whether who said it waits at the link. Anything else is left for [`Link::take`].
    #[inline(always)]
    pub(crate) fn take_switch(&mut self, logical_thread: u32) -> Option<(u64, Vec<u8>, bool)> {
        let theirs = self.theirs(logical_thread);
        if theirs.kind.load(Ordering::Relaxed) != Kind::Switch as u32 {
            return None;
        }
        if theirs.length.load(Ordering::Relaxed) != 0 {
            return self.take_long_switch(logical_thread);
        }
        let (sent, word) = (theirs.sent.load(Ordering::SeqCst), theirs.word.load(Ordering::Relaxed));
        let listens = theirs.listens.load(Ordering::Relaxed) != 0;
        *self.taken(logical_thread) = sent;
        Some((word, Vec::new(), listens))
    }

    /// Takes what the other side has sent so far as taken, and what we have closed since as never closed.
    pub(crate) fn catch_up(&mut self, logical_thread: u32) {
        *self.taken(logical_thread) = self.theirs(logical_thread).sent.load(Ordering::SeqCst);
        self.mine(0).closed.store(0, Ordering::SeqCst);
    }

    /// Takes the other side's message, if there is a new one. What makes no sense is dropped.
    pub(crate) fn take(&mut self, logical_thread: u32) -> Option<Message> {
        let sent = self.theirs(logical_thread).sent.load(Ordering::SeqCst);
        if sent == *self.taken(logical_thread) {
            return None;
        }
        *self.taken(logical_thread) = sent;
        let theirs = self.theirs(logical_thread);
        let kind = Kind::of(theirs.kind.load(Ordering::Relaxed));
        let (word, extent) = (theirs.word.load(Ordering::Relaxed), theirs.extent.load(Ordering::Relaxed));
        let length = (theirs.length.load(Ordering::Relaxed) as usize).min(ROOM);
        let listens = theirs.listens.load(Ordering::Relaxed) != 0;
        if length == 0 {
            return Some(Message { kind: kind?, word, extent, bytes: Vec::new(), listens });
        }
        let mut bytes = Vec::with_capacity(length);
        // SAFETY: the other half of the bytes is ROOM long, and so many bytes were reserved. Should a hostile other
        // side write meanwhile, we get a mixture, which is as good as anything else it could have sent.
        unsafe {
            let from = self.part(logical_thread).as_ptr().add(PAGE + (1 - self.side) * ROOM);
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), length);
            bytes.set_len(length);
        }
        Some(Message { kind: kind?, word, extent, bytes, listens })
    }
}

impl Mapping {
    fn is_here(&self) -> bool {
        self.creator.get().is_here()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Shared memory without a name cannot be mapped again: what a rollback may bring back stays.
        // Where a copy of the process does not have it, something else may be there.
        if orrery_rollback::may_roll_back() || !self.is_here() {
            return;
        }
        // SAFETY: our own mapping, with whose last handle its last use goes.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), LENGTH) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAST: u32 = 255;

    fn a_id() -> Id {
        Id::new().unwrap()
    }

    #[test]
    fn messages_pass_once_and_whole() {
        let (mut a, fd) = Link::make().unwrap();
        let mut b = Link::accept(fd.as_fd(), a_id()).unwrap();
        assert!(b.take(3).is_none());
        a.stage(3, Kind::Switch, 7, 9, b"hello");
        assert!(b.take(3).is_none(), "staged is not sent");
        a.publish(3);
        let message = b.take(3).unwrap();
        assert_eq!((message.kind, message.word, message.extent), (Kind::Switch, 7, 9));
        assert_eq!(message.bytes, b"hello");
        assert!(b.take(3).is_none() && a.take(3).is_none());
        assert_eq!(LAST as usize + 1, MAX_THREADS);
        a.stage(LAST, Kind::Switch, 8, 0, &[1; ROOM]);
        a.publish(LAST);
        assert!(b.take(3).is_none() && b.take(0).is_none(), "another thread's");
        assert_eq!(b.take(LAST).unwrap().bytes.len(), ROOM);
    }

    #[test]
    fn nonsense_is_dropped() {
        let (mut a, fd) = Link::make().unwrap();
        let mut b = Link::accept(fd.as_fd(), a_id()).unwrap();
        a.stage(3, Kind::Switch, 0, 0, &[1; 8]);
        a.mine(3).kind.store(99, Ordering::SeqCst);
        a.publish(3);
        assert!(b.take(3).is_none());
        a.stage(3, Kind::Switch, 0, 0, &[1; 8]);
        a.mine(3).length.store(u32::MAX, Ordering::SeqCst);
        a.publish(3);
        assert_eq!(b.take(3).unwrap().bytes.len(), ROOM);
    }

    #[test]
    fn other_files_are_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(Link::accept(file.as_fd(), a_id()).is_err());
        let fd = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, LENGTH as u64).unwrap();
        assert!(Link::accept(fd.as_fd(), a_id()).is_err());
    }
}
