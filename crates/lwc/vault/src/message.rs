//! What is said over sockets: requests to the keeper, and its answers.
//!
//! Requests travel over the connection of the process that sends them, whose threads may ask at the same time. Each request
//! therefore brings the end of a fresh socket for its answer (SCM_RIGHTS in unix(7)); and the kernel, not the sender, says
//! who sent it (SCM_CREDENTIALS). Both are `SOCK_SEQPACKET`: one datagram is one message, and the death of either side is
//! an end of file.
//!
//! The first message on the first connection is its maker's, who has it alone as yet: by which number the kernel knows
//! the program's end of it (SO_COOKIE in socket(7)). The keeper makes all others, and knows theirs. Such an end must not
//! come as an answer socket, or the vault would wait for an end of file that it keeps from happening itself.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

/// How many bytes a request to load, or its answer, may have.
pub const LOAD_ROOM: usize = 16_384;
/// The first bytes of each message: whose it is, and which edition of the protocol.
const MAGIC: [u8; 4] = *b"OrV\x03";

/// What may be asked of the keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request<'a> {
    /// A twin for the sender.
    Twin,
    /// To load what these bytes say.
    Load(&'a [u8]),
    /// A connection for a process that the sender is about to fork.
    Connection,
    /// The cookie of the program's end of the socket: the first message, and never another one.
    Hello(u64),
}

impl<'a> Request<'a> {
    pub(super) fn encode(self) -> Vec<u8> {
        let cookie;
        let (kind, body) = match self {
            Self::Twin => (b'T', &[][..]),
            Self::Load(body) => (b'L', body),
            Self::Connection => (b'C', &[][..]),
            Self::Hello(number) => {
                cookie = number.to_le_bytes();
                (b'H', &cookie[..])
            }
        };
        [&MAGIC, &[kind][..], body].concat()
    }

    /// `None` where it is none.
    pub(super) fn decode(message: &'a [u8]) -> Option<Self> {
        match message.strip_prefix(&MAGIC)?.split_first()? {
            (b'T', []) => Some(Self::Twin),
            (b'C', []) => Some(Self::Connection),
            (b'L', body) if body.len() <= LOAD_ROOM => Some(Self::Load(body)),
            (b'H', body) => Some(Self::Hello(u64::from_le_bytes(body.try_into().ok()?))),
            _ => None,
        }
    }
}

/// What the keeper, or the function in it, made of a request.
pub(super) type Answer<'a> = Result<&'a [u8], Errno>;

pub(super) fn encode_answer(answer: Answer<'_>) -> Vec<u8> {
    let (number, body) = match answer {
        Ok(body) => (0, body),
        Err(errno) => (errno.raw_os_error(), &[][..]),
    };
    [&MAGIC, &number.to_le_bytes()[..], body].concat()
}

/// `EBADMSG` where it is no answer.
pub(super) fn decode_answer(message: &[u8]) -> Answer<'_> {
    let rest = message.strip_prefix(&MAGIC).ok_or(Errno::BADMSG)?;
    let (number, body) = rest.split_first_chunk::<4>().ok_or(Errno::BADMSG)?;
    match i32::from_le_bytes(*number) {
        0 => Ok(body),
        number @ 1..4096 if body.is_empty() => Err(Errno::from_raw_os_error(number)),
        _ => Err(Errno::BADMSG),
    }
}

/// Returns a connected pair of sockets for messages.
pub(super) fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Sends a message with descriptors; never with a SIGPIPE.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    wait: bool,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let flags = if wait { SendFlags::NOSIGNAL } else { SendFlags::NOSIGNAL | SendFlags::DONTWAIT };
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags))
        .map(|_| ())
}

/// Receives an answer and its descriptors. Nothing at all is the end of file: the other side is gone.
pub(super) fn receive(socket: BorrowedFd<'_>) -> Result<(Vec<u8>, Vec<OwnedFd>), Errno> {
    let mut bytes = vec![0; LOAD_ROOM + 64];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::io::retry_on_intr(|| {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)
    })?;
    bytes.truncate(got.bytes);
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok((bytes, fds))
}

/// A request as it arrives at the keeper.
#[derive(Debug)]
pub(super) struct Arrival {
    /// The message; `None` where it was too long.
    pub(super) bytes: Option<Vec<u8>>,
    /// Where the answer goes.
    pub(super) answer_to: Option<OwnedFd>,
    /// Who sent it, as the kernel says. The process is `None` where it has no number here.
    pub(super) from: Option<(Option<rustix::process::Pid>, u32)>,
}

/// Lets the kernel name the senders of what arrives at `socket`.
pub(super) fn name_senders(socket: &OwnedFd) -> Result<(), Errno> {
    rustix::net::sockopt::set_socket_passcred(socket, true)
}

/// Returns whether an answer may go to this descriptor of a stranger's: a connected socket of our kind, and not the
/// program's end of a connection, for whose cookie `is_connection` returns true.
///
/// Nothing else is kept or written to. What such a socket has in its queue is kept alive with it, other descriptors
/// included; a twin ends when there is anything in the queue of its own.
pub(super) fn is_answer_socket(fd: &OwnedFd, is_connection: impl FnOnce(u64) -> bool) -> bool {
    use rustix::net::sockopt;
    sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(fd) == Ok(SocketType::SEQPACKET)
        && sockopt::socket_acceptconn(fd) == Ok(false)
        && rustix::net::getpeername(fd).is_ok()
        && sockopt::socket_cookie(fd).is_ok_and(|cookie| !is_connection(cookie))
}

/// Receives a request; `None` at the end of file: nobody is left who could ask. A datagram, even an empty one, has a
/// sender ([`name_senders`]).
///
/// It reads the credentials itself: a sender may have no process number here (0, where it lives in another PID
/// namespace), for which rustix has no value.
pub(super) fn receive_request(socket: BorrowedFd<'_>) -> Result<Option<Arrival>, Errno> {
    #[repr(C, align(8))]
    struct Control([u8; 256]);
    let mut bytes = vec![0_u8; MAGIC.len() + 1 + LOAD_ROOM];
    let mut control = Control([0; 256]);
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: all zeros is a value of the structure.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = control.0.len();
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    // SAFETY: the structure names live buffers with their sizes.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
    let Ok(length) = usize::try_from(got) else { return Err(orrery_domain::watch::last_errno()) };
    let mut arrival = Arrival { bytes: None, answer_to: None, from: None };
    // SAFETY: the kernel filled the control buffer as cmsg(3) tells; it is aligned for its headers.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(&raw const header);
        while !at.is_null() {
            let data = libc::CMSG_DATA(at);
            let size = (*at).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
            match ((*at).cmsg_level, (*at).cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    for one in 0..size / size_of::<i32>() {
                        let fd = OwnedFd::from_raw_fd(i32::from_ne_bytes(
                            data.add(one * 4).cast::<[u8; 4]>().read(),
                        ));
                        arrival.answer_to.get_or_insert(fd);
                    }
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if size >= size_of::<libc::ucred>() => {
                    let who = data.cast::<libc::ucred>().read_unaligned();
                    arrival.from = Some((rustix::process::Pid::from_raw(who.pid.max(0)), who.uid));
                }
                _ => {}
            }
            at = libc::CMSG_NXTHDR(&raw const header, at);
        }
    }
    if length == 0 && arrival.from.is_none() && arrival.answer_to.is_none() {
        return Ok(None);
    }
    if header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) == 0 {
        bytes.truncate(length);
        arrival.bytes = Some(bytes);
    }
    Ok(Some(arrival))
}

/// Answers a request. Whoever does not take its answer at once gets none.
pub(super) fn answer(to: Option<&OwnedFd>, answer: Answer<'_>) {
    if let Some(to) = to {
        let _ = try_answer(to, answer, &[]);
    }
}

/// The same with descriptors. Where they cannot be sent, no answer is.
pub(super) fn try_answer(to: &OwnedFd, answer: Answer<'_>, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    send(to.as_fd(), &encode_answer(answer), fds, false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn requests_come_back(body in proptest::collection::vec(any::<u8>(), 0..LOAD_ROOM)) {
            let message = Request::Load(&body).encode();
            prop_assert_eq!(Request::decode(&message), Some(Request::Load(&body)));
        }

        #[test]
        fn answers_come_back(body in proptest::collection::vec(any::<u8>(), 0..1000), number in 1..4096_i32) {
            let message = encode_answer(Ok(&body));
            prop_assert_eq!(decode_answer(&message), Ok(&body[..]));
            let errno = Errno::from_raw_os_error(number);
            let message = encode_answer(Err(errno));
            prop_assert_eq!(decode_answer(&message), Err(errno));
        }

        #[test]
        fn noise_is_nothing(mut noise in proptest::collection::vec(any::<u8>(), 0..64)) {
            prop_assume!(!noise.starts_with(&MAGIC));
            prop_assert_eq!(Request::decode(&noise), None);
            prop_assert_eq!(decode_answer(&noise), Err(Errno::BADMSG));
            // With the magic it may be something, but is never more than was sent.
            noise.splice(0..0, MAGIC);
            if let Some(Request::Load(body)) = Request::decode(&noise) {
                prop_assert_eq!(body.len() + 5, noise.len());
            }
        }
    }

    #[test]
    fn an_empty_datagram_is_no_end_of_file() {
        let (ours, theirs) = pair().unwrap();
        name_senders(&theirs).unwrap();
        send(ours.as_fd(), &[], &[], true).unwrap();
        let arrival = receive_request(theirs.as_fd()).unwrap().expect("a datagram");
        assert_eq!(arrival.bytes.as_deref(), Some(&[][..]));
        drop(ours);
        assert!(receive_request(theirs.as_fd()).unwrap().is_none());
    }

    #[test]
    fn answers_go_to_connected_sockets_of_our_kind() {
        let (one, other) = pair().unwrap();
        let cookie = rustix::net::sockopt::socket_cookie(&one).unwrap();
        let is_connection = |other: u64| other == cookie;
        assert!(is_answer_socket(&other, is_connection) && !is_answer_socket(&one, is_connection));
        let stream =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        assert!(!is_answer_socket(&stream.unwrap().0, is_connection));
        let lone = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        assert!(!is_answer_socket(&lone, is_connection));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(!is_answer_socket(&file.into(), is_connection));
    }

    #[test]
    fn senders_are_named_and_bring_an_answering_machine() {
        let (ours, theirs) = pair().unwrap();
        name_senders(&theirs).unwrap();
        assert_eq!(receive_request(theirs.as_fd()).unwrap_err(), Errno::AGAIN);
        let (hear, say) = pair().unwrap();
        send(ours.as_fd(), &Request::Twin.encode(), &[say.as_fd()], true).unwrap();
        drop(say);
        let arrival = receive_request(theirs.as_fd()).unwrap().unwrap();
        assert_eq!(Request::decode(&arrival.bytes.unwrap()), Some(Request::Twin));
        assert_eq!(
            arrival.from.unwrap(),
            (Some(rustix::process::getpid()), rustix::process::getuid().as_raw())
        );
        answer(arrival.answer_to.as_ref(), Ok(b"yes"));
        assert_eq!(decode_answer(&receive(hear.as_fd()).unwrap().0), Ok(&b"yes"[..]));
        drop(arrival.answer_to);
        assert!(receive(hear.as_fd()).unwrap().0.is_empty(), "the end of file");
        drop(ours);
        assert!(receive_request(theirs.as_fd()).unwrap().is_none());
    }

    #[test]
    fn what_is_too_long_is_told_apart() {
        let (ours, theirs) = pair().unwrap();
        send(ours.as_fd(), &vec![0; LOAD_ROOM + 100], &[], true).unwrap();
        assert!(receive_request(theirs.as_fd()).unwrap().unwrap().bytes.is_none());
    }
}
