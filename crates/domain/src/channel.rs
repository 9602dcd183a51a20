//! A channel: two bounded queues of messages, one each way, and the gate that goes with them.
//!
//! Each side has a block of shared memory that it writes and the other only reads: its [`Face`], then the slots of the
//! messages that it sends. Main makes both before the fork; the domain then gives up its right to write to
//! main's block, so that no stray pointer of the domain reaches what main has sent.
//!
//! Neither side trusts the other. Positions are kept in private memory and only *published* in shared memory; what the
//! other side publishes is checked before use, and lengths and contents are copied out once, then judged.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::gate::{Face, Gate};
use crate::shared::SharedMemory;
use crate::{Error, Result};

/// Where the slots begin in a block, and how they are aligned.
const FACE: usize = 64;
const _: () = assert!(size_of::<Face>() == FACE);
/// A slot's own header: the length of the message.
const HEADER: usize = 8;

/// The shared memory of a channel.
#[derive(Debug)]
pub struct Channel {
    main: SharedMemory,
    domain: SharedMemory,
    bound: u32,
    slots: u32,
    slot: usize,
}

impl Channel {
    /// Makes room for `bound` messages of at most `room` bytes each way. `name` is what `/proc/PID/maps` shows.
    ///
    /// # Errors
    /// [`Error::Setting`] for no messages or more than 2^20, [`Error::System`].
    pub fn new(name: &str, bound: u32, room: usize) -> Result<Self> {
        if bound == 0 || bound > 1 << 20 || room > 1 << 20 {
            return Err(Error::Setting {
                setting: "the bound of a queue",
                value: format!("{bound} messages of {room} bytes"),
                advice: "take 1 to 1048576 messages of at most 1 MiB",
            });
        }
        let slot = (HEADER + room).next_multiple_of(64);
        // A power of two, so that numbers may run over 2^32.
        let slots = bound.next_power_of_two();
        let len = FACE + slot * slots as usize;
        let (main, domain) = (SharedMemory::for_domains(name, len)?, SharedMemory::for_domains(name, len)?);
        Ok(Self { main, domain, bound, slots, slot })
    }

    /// Returns the two blocks, which the domain inherits.
    pub(crate) fn memory(&self) -> [&SharedMemory; 2] {
        [&self.main, &self.domain]
    }

    fn side(&self, own: &SharedMemory, other: &SharedMemory) -> Side {
        let face = |memory: &SharedMemory| memory.start().cast::<Face>();
        let mut side = Side {
            mine: face(own),
            theirs: face(other),
            bound: self.bound,
            slots: self.slots,
            slot: self.slot,
            sent: 0,
            taken: 0,
        };
        // A side that takes over from a dead one goes on where main says that it was.
        side.sent = side.face().sent.load(Ordering::SeqCst);
        side.taken = side.face().taken.load(Ordering::SeqCst);
        side
    }

    /// Returns main's end.
    ///
    /// # Safety
    /// The channel outlives it, and there is one such end.
    pub unsafe fn main(&self) -> Side {
        self.side(&self.main, &self.domain)
    }

    /// Returns the domain's end. It is called in the domain, which loses the right to write to main's block.
    /// Async-signal-safe.
    ///
    /// # Errors
    /// [`Error::System`].
    ///
    /// # Safety
    /// As for [`Channel::main`]; and nothing in this process uses main's end any more.
    pub unsafe fn domain(&self) -> Result<Side> {
        // SAFETY: main's end is not used here any more, as the caller promises.
        unsafe { self.main.forbid_writing()? };
        Ok(self.side(&self.domain, &self.main))
    }

    /// Returns the gate as main sees it, for threads of main that wait while another has main's end.
    pub fn main_gate(&self) -> Gate<'_> {
        // SAFETY: both blocks begin with a face, zeroed, and live as long as `self`; all fields are atomics.
        unsafe {
            Gate::new(self.main.start().cast::<Face>().as_ref(), self.domain.start().cast::<Face>().as_ref())
        }
    }

    /// Returns the gate as the domain sees it.
    pub fn domain_gate(&self) -> Gate<'_> {
        // SAFETY: both blocks begin with a face, zeroed, and live as long as `self`; all fields are atomics.
        unsafe {
            Gate::new(self.domain.start().cast::<Face>().as_ref(), self.main.start().cast::<Face>().as_ref())
        }
    }

    /// Returns how many slots there are, each way: a power of two. Message `number` uses slot `number % slots`.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Returns the mark in the domain's face, for its watcher.
    pub(crate) fn domain_mark(&self) -> *const AtomicU32 {
        // SAFETY: the block begins with a face, zeroed, and lives as long as the channel.
        let face: &Face = unsafe { self.domain.start().cast::<Face>().as_ref() };
        core::ptr::from_ref(face.mark())
    }
}

/// One end of a channel.
#[derive(Debug)]
pub struct Side {
    mine: NonNull<Face>,
    theirs: NonNull<Face>,
    bound: u32,
    slots: u32,
    slot: usize,
    sent: u32,
    taken: u32,
}

// SAFETY: the pointers lead to shared memory that belongs to no thread; positions are guarded by `&mut`.
unsafe impl Send for Side {}
// SAFETY: through `&Side` only atomics are touched.
unsafe impl Sync for Side {}

impl Side {
    fn face(&self) -> &Face {
        // SAFETY: `Channel` keeps the block mapped for as long as the side lives; all fields are atomics.
        unsafe { self.mine.as_ref() }
    }

    fn other(&self) -> &Face {
        // SAFETY: `Channel` keeps the other block, too, mapped for as long as the side lives; all fields are
        // atomics.
        unsafe { self.theirs.as_ref() }
    }

    /// Returns the gate between the two sides.
    pub fn gate(&self) -> Gate<'_> {
        Gate::new(self.face(), self.other())
    }

    /// Returns how many messages fit.
    pub fn bound(&self) -> u32 {
        self.bound
    }

    /// Returns how many messages were sent, since the beginning (modulo 2^32): also the number that the next one
    /// gets.
    pub fn sent(&self) -> u32 {
        self.sent
    }

    /// Returns how many messages were taken, since the beginning (modulo 2^32): also the number of the next one.
    pub fn taken(&self) -> u32 {
        self.taken
    }

    /// Returns how many sent messages the other side has not taken yet.
    ///
    /// # Errors
    /// [`Error::Corrupted`] where it claims more than was sent.
    pub fn waiting(&self) -> Result<u32> {
        let taken = self.other().taken.load(Ordering::SeqCst);
        let waiting = self.sent.wrapping_sub(taken);
        if waiting > self.bound {
            return Err(Error::Corrupted { what: "the number of messages taken", value: taken.into() });
        }
        Ok(waiting)
    }

    fn slot_of(&self, face: NonNull<Face>, number: u32) -> NonNull<u8> {
        let index = (number & (self.slots - 1)) as usize;
        // SAFETY: `Channel::new` made each block `FACE + slot * slots` bytes large.
        unsafe { face.cast::<u8>().add(FACE + index * self.slot) }
    }

    /// Writes a message made of `parts` into the next slot. The other side sees it, but is woken by [`Gate::ring`] only.
    /// Returns its number.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::TooLong`], [`Error::Corrupted`].
    pub fn send(&mut self, parts: &[&[u8]]) -> Result<u32> {
        if self.waiting()? == self.bound {
            return Err(Error::Full { bound: self.bound });
        }
        let room = self.slot - HEADER;
        let bytes = parts.iter().map(|part| part.len()).sum();
        if bytes > room {
            return Err(Error::TooLong { bytes, room });
        }
        let slot = self.slot_of(self.mine, self.sent);
        // SAFETY: the slot is ours to write until `sent` is published, and `bytes` fit behind its header.
        unsafe {
            slot.cast::<u64>().write(bytes as u64);
            let mut to = slot.add(HEADER);
            for part in parts {
                to.copy_from_nonoverlapping(NonNull::from(*part).cast(), part.len());
                to = to.add(part.len());
            }
        }
        let number = self.sent;
        self.sent = number.wrapping_add(1);
        self.face().sent.store(self.sent, Ordering::SeqCst);
        Ok(number)
    }

    /// Copies the next message into `into` and returns its length; `None` where none has come. It stays the next one
    /// until [`Side::take`].
    ///
    /// # Errors
    /// [`Error::Corrupted`] where positions or length make no sense.
    pub fn peek(&self, into: &mut [u8]) -> Result<Option<usize>> {
        let sent = self.other().sent.load(Ordering::SeqCst);
        let waiting = sent.wrapping_sub(self.taken);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > self.bound {
            return Err(Error::Corrupted { what: "the number of messages sent", value: sent.into() });
        }
        let slot = self.slot_of(self.theirs, self.taken);
        // SAFETY: the slot is in the mapped block. The other side should not write it now; if it does, we get some
        // bytes or others.
        let claimed = unsafe { slot.cast::<u64>().read_volatile() };
        let len = usize::try_from(claimed).unwrap_or(usize::MAX);
        if len > self.slot - HEADER || len > into.len() {
            return Err(Error::Corrupted { what: "the length of a message", value: claimed });
        }
        // SAFETY: `len` was checked against the slot and against `into`.
        unsafe { NonNull::from(into).cast::<u8>().copy_from_nonoverlapping(slot.add(HEADER), len) };
        Ok(Some(len))
    }

    /// Returns the bytes of message `number` that this side sent and the other has not taken yet; nothing otherwise.
    pub fn waiting_message(&self, number: u32) -> &[u8] {
        let waiting = self.waiting().unwrap_or(0);
        let age = self.sent.wrapping_sub(number);
        if age == 0 || age > waiting {
            return &[];
        }
        let slot = self.slot_of(self.mine, number);
        // SAFETY: the slot is in our own block, which only we write, and not through `&self`; the length is bounded by
        // the slot's size.
        unsafe {
            let len = usize::try_from(slot.cast::<u64>().read()).unwrap_or(0).min(self.slot - HEADER);
            core::slice::from_raw_parts(slot.add(HEADER).as_ptr(), len)
        }
    }

    /// Gives the next message's slot back to the sender.
    pub fn take(&mut self) {
        self.taken = self.taken.wrapping_add(1);
        self.face().taken.store(self.taken, Ordering::SeqCst);
    }

    /// At main's end, after the domain's death and before its successor starts: whatever the dead left in its block, the
    /// successor starts with main's view of the positions. Where `discard`, messages not yet taken are forgotten.
    pub fn succeed(&mut self, discard: bool) {
        let taken = self.other().taken.load(Ordering::SeqCst);
        let sane = self.sent.wrapping_sub(taken) <= self.bound;
        let taken = if sane && !discard { taken } else { self.sent };
        // Main's own face stays: other threads of main may be asleep, and are counted there.
        self.other().reset(self.taken, taken);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(bound: u32) -> (Channel, Side, Side) {
        let channel = Channel::new("test", bound, 100).unwrap();
        // SAFETY: the channel is kept by the caller for as long as the ends.
        let (main, domain) = unsafe { (channel.main(), channel.side(&channel.domain, &channel.main)) };
        (channel, main, domain)
    }

    #[test]
    fn messages_come_in_order_and_the_bound_holds() {
        let (_channel, mut main, mut domain) = pair(3);
        let mut buffer = [0; 128];
        for round in 0..50_u8 {
            for i in 0..3 {
                main.send(&[&[round], &[i; 7]]).unwrap();
            }
            assert_eq!(main.send(&[b"x"]).unwrap_err(), Error::Full { bound: 3 });
            for i in 0..3 {
                assert_eq!(domain.peek(&mut buffer).unwrap(), Some(8));
                assert_eq!(buffer[..8], [round, i, i, i, i, i, i, i]);
                domain.take();
            }
            assert_eq!(domain.peek(&mut buffer).unwrap(), None);
        }
        assert!(matches!(main.send(&[&[0; 500]]).unwrap_err(), Error::TooLong { bytes: 500, .. }));
    }

    #[test]
    fn nonsense_is_noticed() {
        let (channel, mut main, mut domain) = pair(4);
        let mut buffer = [0; 128];
        domain.face().taken.store(9, Ordering::SeqCst);
        assert!(matches!(main.send(&[b"x"]), Err(Error::Corrupted { .. })));
        domain.face().taken.store(0, Ordering::SeqCst);
        domain.face().sent.store(77, Ordering::SeqCst);
        assert!(matches!(main.peek(&mut buffer), Err(Error::Corrupted { value: 77, .. })));
        domain.face().sent.store(0, Ordering::SeqCst);
        domain.send(&[b"hello"]).unwrap();
        // SAFETY: the length of the first message in the domain's block.
        unsafe { channel.domain.start().add(FACE).cast::<u64>().write(u64::MAX) };
        assert!(matches!(main.peek(&mut buffer), Err(Error::Corrupted { value: u64::MAX, .. })));
    }

    #[test]
    fn a_successor_goes_on() {
        let (channel, mut main, mut domain) = pair(4);
        let mut buffer = [0; 128];
        main.send(&[b"a"]).unwrap();
        main.send(&[b"b"]).unwrap();
        domain.take();
        domain.face().sent.store(1234, Ordering::SeqCst);
        main.succeed(false);
        let mut second = channel.side(&channel.domain, &channel.main);
        assert_eq!((second.peek(&mut buffer).unwrap(), buffer[0]), (Some(1), b'b'));
        second.send(&[b"c"]).unwrap();
        assert_eq!((main.peek(&mut buffer).unwrap(), buffer[0]), (Some(1), b'c'));
        main.succeed(true);
        let third = channel.side(&channel.domain, &channel.main);
        assert_eq!(third.peek(&mut buffer).unwrap(), None);
    }
}
