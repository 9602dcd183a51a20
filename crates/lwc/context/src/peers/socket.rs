//! Sockets between contexts: what names a context is one end of a pair, and files travel over it (SCM_RIGHTS in
//! unix(7)).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use orrery_domain::Moment;
use orrery_sys::descriptors;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::PidfdFlags;

use crate::error::{Error, Result};
use crate::id::Id;

/// A pair of ends: the context's own, out of the program's way, and the descriptor for others.
pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd, Id)> {
    let (theirs, own) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|e| Error::system("socketpair", 0, e))?;
    Ok((descriptors::raise(own), theirs, Id::new()?))
}

/// Returns a pidfd of the calling process, out of the way of the program's descriptors.
pub(crate) fn own_pidfd() -> Result<OwnedFd> {
    rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
        .map(descriptors::raise)
        .map_err(|e| Error::system("pidfd_open(self)", 0, e))
}

/// One message with descriptors, if there is one.
pub(crate) fn receive_on(socket: &OwnedFd, words: &mut [u8]) -> Option<Vec<OwnedFd>> {
    receive_counted(socket, words).map(|(_, fds)| fds)
}

/// The same, with the length of its words.
pub(crate) fn receive_counted(socket: &OwnedFd, words: &mut [u8]) -> Option<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(words)], &mut ancillary, flags).ok()?;
    let fds: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    // The end of the stream looks like an empty message.
    (received.bytes != 0).then_some((received.bytes, fds))
}

/// The words of a message by which one descriptor is sent without any.
pub(crate) const NO_WORDS: [u8; 1] = [1];

/// Sends one descriptor.
pub(crate) fn send_file(socket: &OwnedFd, file: BorrowedFd<'_>) -> rustix::io::Result<()> {
    send_files(std::os::fd::AsFd::as_fd(socket), &[file])
}

/// Sends at most three descriptors. Neither allocates nor touches thread-local storage.
pub(crate) fn send_files(socket: BorrowedFd<'_>, fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    send(socket, &NO_WORDS, fds)
}

/// Sends `words` with at most three descriptors.
pub(crate) fn send(socket: BorrowedFd<'_>, words: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(fds));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(words)], &mut ancillary, flags).map(|_| ())
}

/// Returns the inode behind a descriptor.
pub(crate) fn inode(fd: RawFd) -> Option<u64> {
    // SAFETY: fstat of a number that may be none fails; nothing is closed.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    rustix::fs::fstat(fd).ok().map(|status| status.st_ino)
}

/// Returns whether the other end of a socket is closed by all who had it.
pub(crate) fn is_hung_up(socket: &OwnedFd) -> bool {
    let mut one = [PollFd::new(socket, PollFlags::empty())];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut one, Some(&now)), Ok(ready) if ready > 0)
        && one[0].revents().contains(PollFlags::HUP)
}

/// Returns whether a descriptor is readable.
pub(crate) fn is_ready(fd: BorrowedFd<'_>) -> bool {
    let mut one = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut one, Some(&now)), Ok(ready) if ready > 0) && one[0].revents().contains(PollFlags::IN)
}

/// Waits until a socket has something to read, or was closed; false at the end of the time.
pub(crate) fn is_readable(socket: BorrowedFd<'_>, until: Moment) -> bool {
    loop {
        let now = Moment::now();
        if now >= until {
            return false;
        }
        let left = rustix::time::Timespec::try_from(until.since(now)).ok();
        let mut one = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
        match poll(&mut one, left.as_ref()) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return true,
            Err(_) => return false,
        }
    }
}
