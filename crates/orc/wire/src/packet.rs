//! Packets with descriptors beside them (unix(7), `SCM_RIGHTS`).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::protocol::MAX_FDS;

/// A packet as it came.
#[derive(Debug)]
pub struct Packet {
    /// How many bytes of the buffer it filled; 0 where the other side has gone.
    pub length: usize,
    /// Its descriptors, close-on-exec.
    pub descriptors: Vec<OwnedFd>,
    /// Whether bytes or descriptors were cut off.
    pub cut: bool,
}

/// Sends one packet. `more` are flags such as [`SendFlags::DONTWAIT`]; a peer that has gone is `EPIPE`, never a signal.
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    more: SendFlags,
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::TOOMANYREFS);
    }
    let flags = SendFlags::NOSIGNAL | more;
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags))
        .map(|_| ())
}

/// Receives one packet into `buffer`.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8], more: RecvFlags) -> rustix::io::Result<Packet> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | more;
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut ancillary, flags)
    })?;
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let cut = received.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC);
    Ok(Packet { length: received.bytes, descriptors, cut })
}
