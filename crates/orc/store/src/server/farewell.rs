//! Ends connections whose clients have sent messages that nobody receives any more.
//!
//! The kernel discards what is queued at a socket when its last descriptor is closed, and releases the files in it without
//! flushing them. But releasing a file on FUSE that has written pages in memory waits for the daemon (`FUSE_WRITEBACK_CACHE`), in
//! the thread that closed the socket: a worker of the server, or the supervisor, which has all connections as well. So messages are
//! discarded first, by a thread of the client's account.

use std::os::fd::{AsFd as _, OwnedFd};

use orrery_sys::scm;
use rustix::net::{RecvFlags, Shutdown};

/// Shuts a socket down, so that nothing more is queued; returns whether messages are queued.
pub(crate) fn has_messages(socket: &OwnedFd) -> bool {
    // From now on each message comes with the sender's credentials, for which no room is left: so an empty one is told apart from the end.
    let _ = rustix::net::sockopt::set_socket_passcred(socket, true);
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
    // A copy of the message's descriptors is released, which is never the last one.
    receive(socket, RecvFlags::PEEK)
}

/// Discards the messages that are queued at a socket that was [shut down](has_messages). This may never return.
pub(crate) fn discard(socket: &OwnedFd) {
    while receive(socket, RecvFlags::empty()) {}
}

/// Receives one message without its bytes and its descriptors; returns whether there was one.
fn receive(socket: &OwnedFd, flags: RecvFlags) -> bool {
    let received = scm::receive(socket.as_fd(), &mut [0], 0, flags | RecvFlags::DONTWAIT);
    received.is_ok_and(|packet| packet.truncated)
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;

    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, socketpair};

    use super::*;

    #[test]
    fn all_messages_are_discarded() {
        let pair =
            || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let (client, server) = pair();
        let (end, sent) = rustix::pipe::pipe().unwrap();
        for (bytes, fds) in [(&b""[..], vec![]), (b"", vec![sent.as_fd()]), (b"x", vec![]), (b"long", vec![])]
        {
            scm::send(client.as_fd(), &[IoSlice::new(bytes)], &fds, SendFlags::empty()).unwrap();
        }
        drop(sent);
        assert!(has_messages(&server) && has_messages(&server), "none is taken");
        let more = scm::send(client.as_fd(), &[IoSlice::new(b"x")], &[], SendFlags::empty());
        assert_eq!(more, Err(rustix::io::Errno::PIPE));
        discard(&server);
        assert!(!has_messages(&server));
        assert_eq!(rustix::io::read(&end, &mut [0]), Ok(0), "its descriptor was released");
        let (_client, server) = pair();
        assert!(!has_messages(&server));
    }
}
