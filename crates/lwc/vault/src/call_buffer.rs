//! The line: memory that one client and its twin share, through which calls go.
//!
//! ```text
//! page 0   the client's face | the twin's face | what is asked: number, length, where the client runs
//!                                              | what is answered: number, length or error
//! from 1   room for the request, then room for the answer
//! ```
//!
//! A process that the client forks does not inherit it: what is asked and answered is none of its business.
//!
//! The twin trusts nothing in it: each word is read once and checked, a request is copied before anybody looks at it.
//! The twin makes the memory, seals its size, and keeps no pointer in it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use orrery_domain::gate::{Face, Gate};
use orrery_sys::PAGE;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// How many bytes a call, or its answer, may have.
pub const ROOM: usize = 1 << 20;
const LENGTH: usize = PAGE + 2 * ROOM;

#[repr(C)]
struct Head {
    client: Face,
    twin: Face,
    /// The number of the call, one more each time.
    asked: AtomicU32,
    asked_length: AtomicU32,
    /// The client's CPU, where its twin is to be; [`ANYWHERE`] where that does not help.
    cpu: AtomicU32,
    /// The number of the call that was answered last.
    answered: AtomicU32,
    /// The length of the answer, or less than 0: an errno.
    outcome: AtomicI64,
}

/// No CPU in particular.
pub(super) const ANYWHERE: u32 = u32::MAX;

/// The mapping.
#[derive(Debug)]
pub(super) struct CallBuffer {
    start: NonNull<u8>,
}

// SAFETY: the mapping is the process'; all words in it are atomic, and bytes are only copied in or out by who has the
// turn.
unsafe impl Send for CallBuffer {}
// SAFETY: all words in the mapping are atomic, and bytes are copied in or out only by the side that has the
// turn.
unsafe impl Sync for CallBuffer {}

impl CallBuffer {
    /// Makes the memory, in the twin.
    pub(super) fn make() -> Result<(Self, OwnedFd), Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("orrery-vault", flags)?;
        rustix::fs::ftruncate(&fd, LENGTH as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let line = Self::map(fd.as_fd())?;
        line.head().client.reset(0, 0);
        line.head().twin.reset(0, 0);
        Ok((line, fd))
    }

    /// Maps what the twin made.
    pub(super) fn map(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        if usize::try_from(rustix::fs::fstat(fd)?.st_size) != Ok(LENGTH)
            || !rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK)
        {
            return Err(Errno::BADMSG);
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces no mapping.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), LENGTH, protection, MapFlags::SHARED, fd, 0) }?;
        let line = NonNull::new(start.cast()).map(|start| Self { start }).ok_or(Errno::NOMEM)?;
        // SAFETY: advice about our own mapping that changes no contents.
        unsafe {
            let _ = rustix::mm::madvise(start, LENGTH, Advice::LinuxDontDump);
            rustix::mm::madvise(start, LENGTH, Advice::LinuxDontFork)?;
        }
        Ok(line)
    }

    fn head(&self) -> &Head {
        // SAFETY: the first page of our mapping, aligned, in which any bytes are valid atomics.
        unsafe { self.start.cast().as_ref() }
    }

    /// Returns the client's view of the gate.
    pub(super) fn client(&self) -> Gate<'_> {
        Gate::new(&self.head().client, &self.head().twin)
    }

    /// Returns the twin's view of the gate.
    pub(super) fn twin(&self) -> Gate<'_> {
        Gate::new(&self.head().twin, &self.head().client)
    }

    /// Returns the word in which the kernel marks the twin's death.
    pub(super) fn mark(&self) -> *const AtomicU32 {
        self.head().twin.mark()
    }

    /// The client asks. Whoever does so has the turn, and rings the gate next.
    pub(super) fn ask(&self, number: u32, request: &[u8], cpu: u32) {
        let head = self.head();
        debug_assert!(request.len() <= ROOM, "checked by the caller");
        // SAFETY: within the room for requests, which the twin does not write; our own slice is elsewhere.
        unsafe {
            let room = self.start.add(PAGE);
            std::ptr::copy_nonoverlapping(request.as_ptr(), room.as_ptr(), request.len().min(ROOM));
        }
        head.asked_length.store(u32::try_from(request.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
        head.cpu.store(cpu, Ordering::Relaxed);
        head.asked.store(number, Ordering::Release);
    }

    /// The twin looks whether there is a call other than `last`; its number, with the request copied into `into`. A
    /// request that says to be too long is an `EMSGSIZE`.
    pub(super) fn asked(&self, last: u32, into: &mut [u8]) -> Option<(u32, Result<usize, Errno>)> {
        let head = self.head();
        let number = head.asked.load(Ordering::Acquire);
        if number == last {
            return None;
        }
        let length = head.asked_length.load(Ordering::Relaxed) as usize;
        if length > ROOM.min(into.len()) {
            return Some((number, Err(Errno::MSGSIZE)));
        }
        // SAFETY: within the room for requests, and within `into`. The client may write meanwhile: the copy is then
        // some mixture of bytes, whose meaning is checked afterwards, on the copy.
        unsafe { std::ptr::copy_nonoverlapping(self.start.add(PAGE).as_ptr(), into.as_mut_ptr(), length) };
        Some((number, Ok(length)))
    }

    /// Returns where the client wants its twin.
    pub(super) fn cpu(&self) -> u32 {
        self.head().cpu.load(Ordering::Relaxed)
    }

    /// The twin answers call `number`, and rings the gate next.
    pub(super) fn answer(&self, number: u32, answer: Result<&[u8], Errno>) {
        let head = self.head();
        let outcome = match answer {
            Ok(bytes) if bytes.len() <= ROOM => {
                // SAFETY: within the room for answers; our own slice is elsewhere.
                unsafe {
                    let room = self.start.add(PAGE + ROOM);
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), room.as_ptr(), bytes.len());
                }
                i64::try_from(bytes.len()).unwrap_or(0)
            }
            Ok(_) => -i64::from(Errno::MSGSIZE.raw_os_error()),
            Err(errno) => -i64::from(errno.raw_os_error()),
        };
        head.outcome.store(outcome, Ordering::Relaxed);
        head.answered.store(number, Ordering::Release);
    }

    /// The client looks whether call `number` was answered, copies the answer out, and wipes it from the line.
    pub(super) fn answered(&self, number: u32, into: &mut [u8]) -> Option<Result<usize, Errno>> {
        let head = self.head();
        if head.answered.load(Ordering::Acquire) != number {
            return None;
        }
        let outcome = head.outcome.load(Ordering::Relaxed);
        let length = match usize::try_from(outcome) {
            Ok(length) => length,
            Err(_) => {
                let number = i32::try_from(outcome.wrapping_neg()).unwrap_or(0);
                let known = (1..4096).contains(&number);
                return Some(Err(if known { Errno::from_raw_os_error(number) } else { Errno::BADMSG }));
            }
        };
        if length > ROOM {
            return Some(Err(Errno::BADMSG));
        }
        // SAFETY: within the room for answers; no more than fits into `into`.
        unsafe {
            let room = self.start.add(PAGE + ROOM).as_ptr();
            std::ptr::copy_nonoverlapping(room, into.as_mut_ptr(), length.min(into.len()));
            std::ptr::write_bytes(room, 0, length);
        }
        Some(if length > into.len() { Err(Errno::MSGSIZE) } else { Ok(length) })
    }
}

impl Drop for CallBuffer {
    fn drop(&mut self) {
        // SAFETY: our own mapping; with the handle goes the last use of it.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), LENGTH) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn calls_pass(
            calls in proptest::collection::vec(
                (proptest::collection::vec(any::<u8>(), 0..5000), any::<u32>(), 1..4096_i32, any::<bool>()), 1..8)
        ) {
            let (twin, fd) = CallBuffer::make().unwrap();
            let client = CallBuffer::map(fd.as_fd()).unwrap();
            let (mut last, mut seen, mut back) = (0, vec![0; ROOM], vec![1; ROOM]);
            for (request, cpu, errno, fails) in calls {
                let number = last + 1;
                prop_assert_eq!(twin.asked(last, &mut seen), None);
                prop_assert_eq!(client.answered(number, &mut back), None);
                client.ask(number, &request, cpu);
                prop_assert_eq!(twin.asked(last, &mut seen), Some((number, Ok(request.len()))));
                prop_assert_eq!((&seen[..request.len()], twin.cpu()), (&request[..], cpu));
                let errno = Errno::from_raw_os_error(errno);
                twin.answer(number, if fails { Err(errno) } else { Ok(&request) });
                let expected = if fails { Err(errno) } else { Ok(request.len()) };
                prop_assert_eq!(client.answered(number, &mut back), Some(expected));
                if !fails {
                    prop_assert_eq!(&back[..request.len()], &request[..]);
                }
                last = number;
            }
        }

        #[test]
        fn whatever_stands_in_it_is_survived(
            noise in proptest::collection::vec(any::<u8>(), size_of::<Head>()), number in any::<u32>(),
        ) {
            let (line, _fd) = CallBuffer::make().unwrap();
            // SAFETY: the head is within the mapping and is made of atomics, for which any bytes will do.
            unsafe { std::ptr::copy_nonoverlapping(noise.as_ptr(), line.start.as_ptr(), noise.len()) };
            let mut small = [0; 100];
            if let Some((_, Ok(length))) = line.asked(number, &mut small) {
                prop_assert!(length <= small.len());
            }
            let number = line.head().answered.load(Ordering::Relaxed);
            if let Some(Ok(length)) = line.answered(number, &mut small) {
                prop_assert!(length <= small.len());
            }
        }
    }

    #[test]
    fn answers_do_not_stay() {
        let (line, _fd) = CallBuffer::make().unwrap();
        line.answer(1, Ok(b"premaster secret"));
        let mut back = [0; 16];
        assert_eq!(line.answered(1, &mut back), Some(Ok(16)));
        assert_eq!(&back, b"premaster secret");
        line.answered(1, &mut back);
        assert_eq!(back, [0; 16]);
        line.answer(2, Ok(&[1; 20]));
        assert_eq!(line.answered(2, &mut back), Some(Err(Errno::MSGSIZE)));
    }

    #[test]
    fn only_lines_are_mapped() {
        let other = rustix::fs::memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(CallBuffer::map(other.as_fd()).unwrap_err(), Errno::BADMSG);
    }
}
