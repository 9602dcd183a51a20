//! The manager's side: puts upcalls into a program's queue, and sends the signal.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use orrery_hijack_image::upcall::{ENTRIES, Queue, SIGNAL, State};
use rustix::process::{Signal, pidfd_send_signal};

use crate::shared::Shared;

#[expect(clippy::cast_possible_truncation, reason = "signals have small numbers")]
const NUMBER: i32 = SIGNAL as i32;

/// Why an upcall is not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotSent {
    /// The program has no function registered, has ended, or has become another user's.
    Gone,
    /// As many wait as there is room for.
    Full,
}

/// Where upcalls of one program go.
#[derive(Debug)]
pub struct Sender {
    queue: Shared<Queue>,
    state: Shared<State>,
    process: OwnedFd,
}

impl Sender {
    /// Makes a queue for the process of this pidfd. The program gets both descriptors, the queue's first.
    ///
    /// # Errors
    /// Those of memfd_create(2) and mmap(2).
    pub fn new(process: OwnedFd) -> io::Result<(Self, [OwnedFd; 2])> {
        let (queue, to_read) = Shared::new("orrery-upcalls", true)?;
        let (state, to_write) = Shared::new("orrery-upcall-state", false)?;
        Ok((Self { queue, state, process }, [to_read, to_write]))
    }

    /// Has the function called. Does not wait for it.
    ///
    /// # Errors
    /// [`NotSent`].
    pub fn send(&self, number: u32, value: i64) -> Result<(), NotSent> {
        let (queue, state) = (self.queue.get(), self.state.get());
        // From here on the program does not execute another one, which would get the signal.
        queue.sending.store(1, SeqCst);
        let result =
            if state.open.load(SeqCst) == 0 { Err(NotSent::Gone) } else { self.put(number.into(), value) };
        queue.sending.store(0, SeqCst);
        result
    }

    fn put(&self, number: i64, value: i64) -> Result<(), NotSent> {
        let (queue, state) = (self.queue.get(), self.state.get());
        let head = queue.head.load(Relaxed);
        // What the program claims to have taken may be nonsense.
        let waiting = head.wrapping_sub(state.tail.load(SeqCst));
        if waiting >= ENTRIES as u64 {
            queue.dropped.fetch_add(1, Relaxed);
            // Should the signal have been lost: the kernel keeps a limited number for each user.
            self.signal()?;
            return Err(NotSent::Full);
        }
        let index = usize::try_from(head % ENTRIES as u64).unwrap_or(0);
        if let Some(entry) = queue.entries.get(index) {
            entry.number.store(number, Relaxed);
            entry.value.store(value, Relaxed);
        }
        queue.head.store(head.wrapping_add(1), SeqCst);
        // Who has not taken all of those before looks for this one, too.
        if state.tail.load(SeqCst) == head { self.signal() } else { Ok(()) }
    }

    fn signal(&self) -> Result<(), NotSent> {
        // SAFETY: the last real-time signal of the kernel; it goes to another process, and not to a handler of this one.
        let signal = unsafe { Signal::from_raw_unchecked(NUMBER) };
        pidfd_send_signal(&self.process, signal).map_err(|_| NotSent::Gone)
    }
}

#[cfg(test)]
mod tests {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    use super::*;

    fn sender() -> (Sender, [OwnedFd; 2]) {
        Sender::new(pidfd_open(getpid(), PidfdFlags::empty()).unwrap()).unwrap()
    }

    #[test]
    fn nothing_is_sent_to_who_has_not_opened() {
        let (sender, _fds) = sender();
        assert_eq!(sender.send(1, 2), Err(NotSent::Gone));
        let queue = sender.queue.get();
        assert_eq!((queue.head.load(Relaxed), queue.sending.load(Relaxed)), (0, 0));
    }

    /// Nobody is signalled while others wait, so this process is not either.
    #[test]
    fn upcalls_wait_up_to_a_bound_whatever_the_program_claims() {
        let (sender, _fds) = sender();
        let (queue, state) = (sender.queue.get(), sender.state.get());
        state.open.store(1, SeqCst);
        // As if one was there.
        queue.head.store(1, SeqCst);
        for number in 1..64 {
            assert_eq!(sender.send(number, -i64::from(number)), Ok(()));
        }
        let last = &queue.entries[ENTRIES - 1];
        assert_eq!((last.number.load(Relaxed), last.value.load(Relaxed)), (63, -63));
        state.tail.store(2, SeqCst);
        assert_eq!((sender.send(64, 0), sender.send(65, 0)), (Ok(()), Ok(())));
        assert_eq!((queue.entries[0].number.load(Relaxed), queue.entries[1].number.load(Relaxed)), (64, 65));
    }

    #[test]
    fn the_program_can_neither_write_to_the_queue_nor_cut_it_off() {
        let (_sender, [queue, state]) = sender();
        let map = |fd: &OwnedFd, access| {
            // SAFETY: the kernel chooses a free address.
            unsafe { mmap(std::ptr::null_mut(), 4096, access, MapFlags::SHARED, fd, 0) }
        };
        assert!(map(&queue, ProtFlags::READ).is_ok());
        assert!(map(&queue, ProtFlags::READ | ProtFlags::WRITE).is_err());
        assert!(rustix::io::pwrite(&queue, b"x", 0).is_err());
        // Nor by opening it again.
        let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&queue));
        let again = std::fs::OpenOptions::new().read(true).write(true).open(again).unwrap();
        assert!(map(&again.into(), ProtFlags::READ | ProtFlags::WRITE).is_err());
        for fd in [&queue, &state] {
            assert!(rustix::fs::ftruncate(fd, 0).is_err());
        }
    }
}
