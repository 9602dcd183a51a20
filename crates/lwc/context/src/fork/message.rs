//! What copies and a new root say to each other ([`crate::fork::context_copy`]).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use orrery_domain::Moment;
use orrery_sys::descriptors;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::fork::rendezvous::PATIENCE;
use crate::peers::socket::is_readable;

/// One message between a copy and the new root, with at most three descriptors.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ForkMessage {
    pub(crate) what: u32,
    pub(crate) context_slot: u32,
    /// A place in a list of the copy's.
    pub(crate) index: u32,
    /// For a link, from which side it is seen.
    pub(crate) side: u32,
    pub(crate) id: [u8; 16],
    pub(crate) link: [u8; 16],
}

pub(crate) const CONNECT: u32 = 1;
pub(crate) const GO: u32 = 2;
pub(crate) const HERE: u32 = 3;
pub(crate) const GRANT: u32 = 4;
pub(crate) const PEER: u32 = 5;
pub(crate) const SHARED: u32 = 6;
pub(crate) const ALL: u32 = 7;
pub(crate) const READY: u32 = 8;
const LENGTH: usize = 48;

impl ForkMessage {
    fn bytes(&self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        for (place, word) in
            bytes.chunks_exact_mut(4).zip([self.what, self.context_slot, self.index, self.side])
        {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes[16..32].copy_from_slice(&self.id);
        bytes[32..].copy_from_slice(&self.link);
        bytes
    }

    fn of(bytes: &[u8; LENGTH]) -> Self {
        let word = |at: usize| bytes[at..].first_chunk().map_or(0, |word| u32::from_ne_bytes(*word));
        let id = |at: usize| bytes[at..].first_chunk().copied().unwrap_or_default();
        Self {
            what: word(0),
            context_slot: word(4),
            index: word(8),
            side: word(12),
            id: id(16),
            link: id(32),
        }
    }

    /// Sends it.
    pub(crate) fn send(&self, to: BorrowedFd<'_>, fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        let bytes = self.bytes();
        let end = Moment::now().after(PATIENCE);
        loop {
            match sendmsg(
                to,
                &[IoSlice::new(&bytes)],
                &mut ancillary,
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            ) {
                // The other side reads before long, or never.
                Err(Errno::AGAIN) if Moment::now() < end => std::thread::sleep(Duration::from_millis(1)),
                Err(Errno::INTR) => {}
                sent => return sent.map(|_| ()),
            }
        }
    }

    /// Receives the next message.
    pub(crate) fn receive(from: BorrowedFd<'_>, until: Moment) -> rustix::io::Result<(Self, Vec<OwnedFd>)> {
        if !is_readable(from, until) {
            return Err(Errno::TIMEDOUT);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; LENGTH];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)?;
        let fds = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        // Out of the way of the numbers that are to be replaced.
        let fds = fds.flatten().map(descriptors::raise).collect();
        if received.bytes != LENGTH { Err(Errno::PIPE) } else { Ok((Self::of(&bytes), fds)) }
    }

    /// The next one, which has to be about this, with so many descriptors.
    pub(crate) fn expect(
        from: BorrowedFd<'_>,
        until: Moment,
        what: u32,
        fds: usize,
    ) -> rustix::io::Result<(Self, Vec<OwnedFd>)> {
        let (note, sent) = Self::receive(from, until)?;
        if note.what == what && sent.len() == fds { Ok((note, sent)) } else { Err(Errno::BADMSG) }
    }
}
