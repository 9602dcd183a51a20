//! Asking the kernel about its network, netlink(7): a message is 16 bytes that say what it is, and what it is about.

use std::io;

use anyhow::{Context as _, Result, bail};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
};

/// Of `linux/netlink.h`.
pub(crate) const REQUEST: u16 = 1;
pub(crate) const ANSWER: u16 = 4;
pub(crate) const REPLACE: u16 = 0x100;
pub(crate) const CREATE: u16 = 0x400;
const DUMP: u16 = 0x300;
const INTERRUPTED: u16 = 0x10;
const HEADER: usize = 16;
/// `NLMSG_ERROR`, also where nothing went wrong, and `NLMSG_DONE`.
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// More than the kernel says at a time.
const LONGEST: usize = 64 << 10;
/// As often as something is listed again that has changed meanwhile.
const TRIES: usize = 10;

/// A socket to the kernel.
pub(crate) struct Netlink {
    socket: OwnedFd,
    room: Vec<u8>,
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A message.
pub(crate) fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER + body.len()).unwrap_or(0);
    [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), &flags.to_ne_bytes(), &[0; 8], body].concat()
}

/// A message of several that came together.
struct Part<'m> {
    kind: u16,
    flags: u16,
    body: &'m [u8],
}

/// The messages that came together; what is none ends them.
fn parts(mut bytes: &[u8]) -> impl Iterator<Item = Part<'_>> {
    std::iter::from_fn(move || {
        let length = usize::try_from(u32::from_ne_bytes(*bytes.first_chunk()?)).ok()?;
        let short = |at: usize| Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
        let part = Part { kind: short(4)?, flags: short(6)?, body: bytes.get(HEADER..length)? };
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(part)
    })
}

/// What the kernel thinks of a message: 0, or the negative of an error's number.
fn verdict(part: &Part<'_>) -> Option<i32> {
    let number = part.body.first_chunk()?;
    (part.kind == ERROR).then(|| i32::from_ne_bytes(*number))
}

impl Netlink {
    /// Opens one to a part of the kernel, of which none is rtnetlink(7), and hears what it tells these groups.
    ///
    /// # Errors
    ///
    /// Where the kernel has no such part.
    pub(crate) fn open(part: Option<Protocol>, groups: u32) -> Result<Self> {
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, part)?;
        if groups != 0 {
            bind(&socket, &SocketAddrNetlink::new(0, groups))?;
        }
        Ok(Self { socket, room: vec![0; LONGEST] })
    }

    /// Asks for something to be done, by a message with [`ANSWER`].
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub(crate) fn ask(&mut self, message: &[u8]) -> Result<()> {
        send(&self.socket, message, SendFlags::empty())?;
        match parts(self.receive()?).find_map(|part| verdict(&part)) {
            Some(0) => Ok(()),
            Some(error) => Err(io::Error::from_raw_os_error(-error).into()),
            None => bail!("it answers something else than was asked"),
        }
    }

    /// What the kernel answers to a message.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub(crate) fn look_up(&mut self, kind: u16, body: &[u8]) -> Result<Vec<u8>> {
        send(&self.socket, &message(kind, REQUEST, body), SendFlags::empty())?;
        let part = parts(self.receive()?).next().context("it answers nothing")?;
        match verdict(&part) {
            Some(error) => Err(io::Error::from_raw_os_error(-error).into()),
            None => Ok(part.body.to_vec()),
        }
    }

    /// All that there is of a kind.
    ///
    /// # Errors
    ///
    /// What the kernel says; where it has changed again and again meanwhile.
    pub(crate) fn list(&mut self, kind: u16, body: &[u8]) -> Result<Vec<Vec<u8>>> {
        for _ in 0..TRIES {
            if let Some(listed) = self.try_list(kind, body)? {
                return Ok(listed);
            }
        }
        bail!("it changes all the time")
    }

    fn try_list(&mut self, kind: u16, body: &[u8]) -> Result<Option<Vec<Vec<u8>>>> {
        send(&self.socket, &message(kind, REQUEST | DUMP, body), SendFlags::empty())?;
        let (mut listed, mut whole) = (Vec::new(), true);
        loop {
            for part in parts(self.receive()?) {
                whole &= part.flags & INTERRUPTED == 0;
                match (part.kind, verdict(&part)) {
                    (DONE, _) => return Ok(whole.then_some(listed)),
                    (_, Some(error)) => return Err(io::Error::from_raw_os_error(-error).into()),
                    _ => listed.push(part.body.to_vec()),
                }
            }
        }
    }

    fn receive(&mut self) -> Result<&[u8]> {
        let (_, length) = recv(&self.socket, &mut self.room[..], RecvFlags::empty())?;
        Ok(&self.room[..length.min(self.room.len())])
    }

    /// Forgets what was told and not heard.
    pub(crate) fn drain(&mut self) {
        loop {
            match recv(&self.socket, &mut self.room[..], RecvFlags::DONTWAIT) {
                // That some of it was forgotten already (`ENOBUFS`) is told once, too.
                Ok(_) | Err(rustix::io::Errno::NOBUFS | rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}

/// The bytes of an attribute of this kind among those that follow a body's first so many bytes.
pub(crate) fn attribute(body: &[u8], skip: usize, wanted: u16) -> Option<&[u8]> {
    let mut rest = body.get(skip..)?;
    loop {
        let length = usize::from(u16::from_ne_bytes(*rest.first_chunk()?));
        let kind = u16::from_ne_bytes(*rest.get(2..)?.first_chunk()?);
        let bytes = rest.get(4..length)?;
        if kind == wanted {
            return Some(bytes);
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_told_apart_and_what_is_none_ends_them() {
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
    fn attributes_are_found_and_broken_ones_end() {
        let body = [&[9; 8][..], &[5, 0, 1, 0, 7, 0, 0, 0], &[8, 0, 2, 0, 1, 2, 3, 4]].concat();
        assert_eq!(attribute(&body, 8, 1), Some(&[7][..]));
        assert_eq!(attribute(&body, 8, 2), Some(&[1, 2, 3, 4][..]));
        assert_eq!(attribute(&body, 8, 3), None);
        assert_eq!(attribute(&[0; 64], 8, 3), None);
        assert_eq!(attribute(&[255; 64], 8, 3), None);
        assert_eq!(attribute(&[], 8, 3), None);
    }
}
