//! Messages with file descriptors over a Unix socket (`SCM_RIGHTS` in unix(7)).
//!
//! One function sends, one receives. Both restart after a signal, never raise SIGPIPE, and mark what arrives
//! close-on-exec. [`send`] does not allocate; [`receive`] allocates only if descriptors arrive.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The most descriptors that one message can carry: the kernel's `SCM_MAX_FD`.
pub const MAX_FDS: usize = 253;

const ROOM: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// A received message.
#[derive(Debug)]
pub struct Received {
    /// The number of bytes that were written to the caller's buffer; 0 at the end of the stream.
    pub length: usize,
    /// The descriptors, in the order in which they were sent.
    pub fds: Vec<OwnedFd>,
    /// Whether bytes or descriptors of the message were lost, because the buffer, the bound on descriptors or this
    /// process' limit of open files was too small.
    pub truncated: bool,
}

/// Sends `parts` as one message, with `fds`, and returns how many bytes were sent: all of them, except on a stream socket.
///
/// # Errors
/// `EPIPE` if the other end is closed, `EAGAIN` with [`SendFlags::DONTWAIT`] if there is no room, `EINVAL` for more than
/// [`MAX_FDS`] descriptors, `ETOOMANYREFS` if too many are in flight, and those of sendmsg(2).
pub fn send(
    socket: BorrowedFd<'_>,
    parts: &[IoSlice<'_>],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> rustix::io::Result<usize> {
    let mut room = [MaybeUninit::uninit(); ROOM];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    retry_on_intr(|| sendmsg(socket, parts, &mut control, flags | SendFlags::NOSIGNAL))
}

/// Receives one message into `buffer`, with at most `most_fds` descriptors; the kernel closes those beyond.
///
/// # Errors
/// `EAGAIN` with [`RecvFlags::DONTWAIT`] if nothing has arrived, and those of recvmsg(2).
pub fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    most_fds: usize,
    flags: RecvFlags,
) -> rustix::io::Result<Received> {
    let mut room = [MaybeUninit::uninit(); ROOM];
    let room = match most_fds.min(MAX_FDS) {
        0 => &mut room[..0],
        most => &mut room[..rustix::cmsg_space!(ScmRights(most))],
    };
    let mut control = RecvAncillaryBuffer::new(room);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let message = retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags))?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    // The space is rounded up for alignment, so one or two descriptors more may have found room.
    let excess = fds.len() > most_fds;
    fds.truncate(most_fds);
    let truncated = excess || message.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC);
    Ok(Received { length: message.bytes, fds, truncated })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::fs::File;
    use std::os::fd::AsFd;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    fn inode(fd: impl AsFd) -> u64 {
        rustix::fs::fstat(fd).unwrap().st_ino
    }

    #[test]
    fn bytes_and_descriptors_arrive_in_order() {
        let (a, b) = pair();
        let files = [File::open("/").unwrap(), File::open("/proc/self/status").unwrap()];
        let parts = [IoSlice::new(b"one"), IoSlice::new(b"two")];
        let fds = files.each_ref().map(AsFd::as_fd);
        assert_eq!(send(a.as_fd(), &parts, &fds, SendFlags::empty()), Ok(6));
        let mut buffer = [0; 16];
        let received = receive(b.as_fd(), &mut buffer, 2, RecvFlags::empty()).unwrap();
        assert_eq!(&buffer[..received.length], b"onetwo");
        assert!(!received.truncated);
        assert_eq!(
            received.fds.iter().map(inode).collect::<Vec<_>>(),
            files.iter().map(inode).collect::<Vec<_>>()
        );
        let flags = rustix::io::fcntl_getfd(&received.fds[0]).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn what_is_beyond_a_bound_is_reported_and_closed() {
        let (a, b) = pair();
        let file = File::open("/").unwrap();
        for (sent, taken) in [(1, 0), (2, 1), (3, 2), (MAX_FDS, 1)] {
            let fds = vec![file.as_fd(); sent];
            send(a.as_fd(), &[IoSlice::new(b"x")], &fds, SendFlags::empty()).unwrap();
            let received = receive(b.as_fd(), &mut [0; 4], taken, RecvFlags::empty()).unwrap();
            assert!(received.truncated && received.fds.len() == taken, "{sent} sent, {taken} taken");
        }
        send(a.as_fd(), &[IoSlice::new(b"long")], &[], SendFlags::empty()).unwrap();
        assert!(receive(b.as_fd(), &mut [0; 3], 0, RecvFlags::empty()).unwrap().truncated);
        let fds = vec![file.as_fd(); MAX_FDS + 1];
        let sent = send(a.as_fd(), &[IoSlice::new(b"x")], &fds, SendFlags::empty());
        assert_eq!(sent, Err(Errno::INVAL));
    }

    #[test]
    fn a_closed_peer_is_an_error_for_the_sender_and_the_end_for_the_receiver() {
        let (a, b) = pair();
        let nothing = receive(b.as_fd(), &mut [0; 4], 0, RecvFlags::DONTWAIT);
        assert_eq!(nothing.unwrap_err(), Errno::AGAIN);
        drop(a);
        assert_eq!(receive(b.as_fd(), &mut [0; 4], 0, RecvFlags::empty()).unwrap().length, 0);
        assert_eq!(send(b.as_fd(), &[IoSlice::new(b"x")], &[], SendFlags::empty()), Err(Errno::PIPE));
    }
}
