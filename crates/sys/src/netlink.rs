//! netlink(7): requests to a subsystem of the kernel, its dumps, and the notifications of its groups.
//!
//! A message is a header of 16 bytes (length, type, flags, sequence number, port) and a body, whose layout depends on the
//! subsystem. Bodies are bytes here; [`attribute`] finds the attributes that follow a body's fixed part.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
};

use crate::{Error, Result};

/// `NLM_F_REQUEST`: the message is a request.
pub const REQUEST: u16 = 1;
/// `NLM_F_ACK`: the kernel acknowledges the request.
pub const ACK: u16 = 4;
/// `NLM_F_REPLACE`: an existing object is replaced.
pub const REPLACE: u16 = 0x100;
/// `NLM_F_CREATE`: an object is created if there is none.
pub const CREATE: u16 = 0x400;
/// `NLM_F_DUMP`.
const DUMP: u16 = 0x300;
/// `NLM_F_DUMP_INTR`: the dump is inconsistent, because something changed meanwhile.
const INTERRUPTED: u16 = 0x10;
/// `NLMSG_HDRLEN`.
const HEADER: usize = 16;
/// `NLMSG_ERROR`, which also acknowledges.
const ERROR: u16 = 2;
/// `NLMSG_DONE`.
const DONE: u16 = 3;
/// The size of the receive buffer, more than the kernel sends at a time.
const BUFFER: usize = 64 << 10;
/// How often an interrupted dump is tried.
const TRIES: usize = 10;

/// A netlink socket that is connected to the kernel.
#[derive(Debug)]
pub struct Netlink {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Returns the bytes of a message of type `kind`.
#[must_use]
pub fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER + body.len()).unwrap_or(0);
    [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), &flags.to_ne_bytes(), &[0; 8], body].concat()
}

/// A message of several that were received together.
struct Part<'m> {
    kind: u16,
    flags: u16,
    body: &'m [u8],
}

/// Returns the messages that were received together, up to the first that is malformed.
fn parts(mut bytes: &[u8]) -> impl Iterator<Item = Part<'_>> {
    std::iter::from_fn(move || {
        let length = usize::try_from(u32::from_ne_bytes(*bytes.first_chunk()?)).ok()?;
        let short = |at: usize| Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
        let part = Part { kind: short(4)?, flags: short(6)?, body: bytes.get(HEADER..length)? };
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(part)
    })
}

/// Returns the error number of an `NLMSG_ERROR` message: 0 or negative.
fn verdict(part: &Part<'_>) -> Option<i32> {
    let number = part.body.first_chunk()?;
    (part.kind == ERROR).then(|| i32::from_ne_bytes(*number))
}

fn failed(kind: u16, errno: Errno) -> Error {
    Error::new("netlink", kind.into(), errno)
}

impl Netlink {
    /// Opens a socket to a subsystem of the kernel, by default rtnetlink(7), and subscribes to the groups of the bit mask
    /// `groups`.
    ///
    /// # Errors
    /// `EPROTONOSUPPORT` if the kernel lacks the subsystem, and those of socket(2) and bind(2).
    pub fn open(subsystem: Option<Protocol>, groups: u32) -> Result<Self> {
        let opened = |errno| Error::new("socket(AF_NETLINK)", groups as usize, errno);
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, subsystem)
            .map_err(opened)?;
        if groups != 0 {
            bind(&socket, &SocketAddrNetlink::new(0, groups)).map_err(opened)?;
        }
        Ok(Self { socket, buffer: vec![0; BUFFER] })
    }

    /// Sends a request with [`ACK`], and waits for the acknowledgement.
    ///
    /// # Errors
    /// The kernel's error; `EBADMSG` if it does not acknowledge.
    pub fn transact(&mut self, kind: u16, flags: u16, body: &[u8]) -> Result<()> {
        self.send(kind, REQUEST | ACK | flags, body)?;
        match parts(self.receive(kind)?).find_map(|part| verdict(&part)) {
            Some(0) => Ok(()),
            Some(error) => Err(failed(kind, Errno::from_raw_os_error(-error))),
            None => Err(failed(kind, Errno::BADMSG)),
        }
    }

    /// Sends a request and returns the body of the reply.
    ///
    /// # Errors
    /// The kernel's error; `EBADMSG` for a malformed reply.
    pub fn get(&mut self, kind: u16, body: &[u8]) -> Result<Vec<u8>> {
        self.send(kind, REQUEST, body)?;
        let part = parts(self.receive(kind)?).next().ok_or(failed(kind, Errno::BADMSG))?;
        match verdict(&part) {
            Some(error) => Err(failed(kind, Errno::from_raw_os_error(-error))),
            None => Ok(part.body.to_vec()),
        }
    }

    /// Returns the bodies of all objects that match a request.
    ///
    /// # Errors
    /// The kernel's error; `EAGAIN` if the objects changed during each of ten tries.
    pub fn dump(&mut self, kind: u16, body: &[u8]) -> Result<Vec<Vec<u8>>> {
        for _ in 0..TRIES {
            if let Some(bodies) = self.try_dump(kind, body)? {
                return Ok(bodies);
            }
        }
        Err(failed(kind, Errno::AGAIN))
    }

    fn try_dump(&mut self, kind: u16, body: &[u8]) -> Result<Option<Vec<Vec<u8>>>> {
        self.send(kind, REQUEST | DUMP, body)?;
        let (mut bodies, mut consistent) = (Vec::new(), true);
        loop {
            let mut received = 0;
            for part in parts(self.receive(kind)?) {
                received += 1;
                consistent &= part.flags & INTERRUPTED == 0;
                match (part.kind, verdict(&part)) {
                    (DONE, _) => return Ok(consistent.then_some(bodies)),
                    (_, Some(error)) => return Err(failed(kind, Errno::from_raw_os_error(-error))),
                    _ => bodies.push(part.body.to_vec()),
                }
            }
            if received == 0 {
                return Err(failed(kind, Errno::BADMSG));
            }
        }
    }

    fn send(&self, kind: u16, flags: u16, body: &[u8]) -> Result<()> {
        let sent = send(&self.socket, &message(kind, flags, body), SendFlags::empty());
        sent.map(drop).map_err(|errno| failed(kind, errno))
    }

    fn receive(&mut self, kind: u16) -> Result<&[u8]> {
        let (_, length) = recv(&self.socket, &mut self.buffer[..], RecvFlags::empty())
            .map_err(|errno| failed(kind, errno))?;
        Ok(&self.buffer[..length.min(self.buffer.len())])
    }

    /// Discards all notifications that have arrived.
    pub fn drain(&mut self) {
        loop {
            match recv(&self.socket, &mut self.buffer[..], RecvFlags::DONTWAIT) {
                // ENOBUFS reports once that the kernel has discarded some itself.
                Ok(_) | Err(Errno::NOBUFS | Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}

/// Returns the payload of the first attribute of type `kind` behind the first `skip` bytes of a body.
#[must_use]
pub fn attribute(body: &[u8], skip: usize, kind: u16) -> Option<&[u8]> {
    let mut rest = body.get(skip..)?;
    loop {
        let length = usize::from(u16::from_ne_bytes(*rest.first_chunk()?));
        let found = u16::from_ne_bytes(*rest.get(2..)?.first_chunk()?);
        let payload = rest.get(4..length)?;
        if found == kind {
            return Some(payload);
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_split_and_a_malformed_one_ends_them() {
        assert_eq!(parts(&[]).count(), 0);
        // Lengths that lead nowhere, or in circles.
        for length in [0_u32, 15, 17, u32::MAX] {
            let broken = [&length.to_ne_bytes()[..], &[0; 12]].concat();
            assert_eq!(parts(&broken).count(), 0, "{length}");
        }
        let refused = message(ERROR, 0, &(-2_i32).to_ne_bytes());
        let both = [message(7, 3, b"12345678"), refused].concat();
        let found: Vec<_> = parts(&both).map(|part| (part.kind, part.flags, verdict(&part))).collect();
        assert_eq!(found, [(7, 3, None), (ERROR, 0, Some(-2))]);
    }

    #[test]
    fn attributes_are_found_and_malformed_ones_end() {
        let body = [&[9; 8][..], &[5, 0, 1, 0, 7, 0, 0, 0], &[8, 0, 2, 0, 1, 2, 3, 4]].concat();
        assert_eq!(attribute(&body, 8, 1), Some(&[7][..]));
        assert_eq!(attribute(&body, 8, 2), Some(&[1, 2, 3, 4][..]));
        assert_eq!(attribute(&body, 8, 3), None);
        assert_eq!(attribute(&[0; 64], 8, 3), None);
        assert_eq!(attribute(&[255; 64], 8, 3), None);
        assert_eq!(attribute(&[], 8, 3), None);
    }
}
