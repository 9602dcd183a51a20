//! TCP connections that nobody had accepted. They cannot be made again: no call puts a connection into a listening socket's
//! queue, and a handshake that were made up for it would begin at a number of the new kernel's choice. Their other sides
//! believe them to be established, though, and one that only listens would wait for ever. So each is told, as soon as the
//! survivor is on the network, that its connection is no more (`RST`), and may try again.
//!
//! A reset counts only if its number is the very one that the other side expects next (RFC 5961): the next that the dead kernel
//! would have sent.

use std::fs;
use std::net::{SocketAddr, SocketAddrV4};
use std::path::Path;

use anyhow::{Context as _, Result};
use orrery_kimage::WaitingConnection;
use rustix::net::{SendFlags, sendto};
use serde::{Deserialize, Serialize};

use crate::nudge::{ACK, Segment, raw_socket};

const IMAGE: &str = "resets.json";
/// `RST`.
const RESET: u8 = 0x04;

/// All of them.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Resets(Vec<Reset>);

#[derive(Debug, Serialize, Deserialize)]
struct Reset {
    local: SocketAddrV4,
    remote: SocketAddrV4,
    next: u32,
    expected: u32,
}

impl Resets {
    /// Adds a connection.
    pub(crate) fn add(&mut self, waiting: WaitingConnection) {
        let WaitingConnection { local, remote, next, expected } = waiting;
        self.0.push(Reset { local, remote, next, expected });
    }

    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        fs::write(folder.join(IMAGE), serde_json::to_vec(self)?).context("cannot write resets")
    }

    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let bytes = fs::read(folder.join(IMAGE)).context("cannot read resets")?;
        serde_json::from_slice(&bytes).context("cannot read resets")
    }

    /// Tells the other side of each.
    ///
    /// # Errors
    ///
    /// Where one cannot be told; those after it are not.
    pub(crate) fn send(&self) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let out = raw_socket()?;
        for reset in &self.0 {
            let to = SocketAddr::V4(reset.remote);
            sendto(&out, &reset.packet(), SendFlags::empty(), &to)
                .with_context(|| format!("cannot send to {to}"))?;
        }
        Ok(())
    }
}

impl Reset {
    fn packet(&self) -> Vec<u8> {
        let &Self { local, remote, next, expected } = self;
        Segment { local, remote, number: next, expected, flags: RESET | ACK, window: 0 }.packet(&[], &[])
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd as _;
    use std::time::Duration;

    use super::*;

    /// The next numbers of a connection's two directions, by `TCP_REPAIR` (`linux/tcp.h`); nothing without the right to it.
    fn numbers(stream: &TcpStream) -> Option<(u32, u32)> {
        const REPAIR: libc::c_int = 19;
        const QUEUE: libc::c_int = 20;
        const NUMBER: libc::c_int = 21;
        let set = |option: libc::c_int, value: libc::c_int| {
            let length = libc::socklen_t::try_from(size_of_val(&value)).ok()?;
            // SAFETY: the value is readable and as long as told.
            let result = unsafe {
                libc::setsockopt(
                    stream.as_raw_fd(),
                    libc::IPPROTO_TCP,
                    option,
                    (&raw const value).cast(),
                    length,
                )
            };
            (result == 0).then_some(())
        };
        let get = || {
            let mut value = 0_u32;
            let mut length = libc::socklen_t::try_from(size_of_val(&value)).ok()?;
            // SAFETY: both are writable, and as long as they say.
            let result = unsafe {
                let into = (&raw mut value).cast();
                libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, NUMBER, into, &raw mut length)
            };
            (result == 0).then_some(value)
        };
        set(REPAIR, 1)?;
        let (expected, next) = (set(QUEUE, 1).and_then(|()| get()), set(QUEUE, 2).and_then(|()| get()));
        // Off without a probe of the window.
        set(REPAIR, -1).or_else(|| set(REPAIR, 0))?;
        Some((expected?, next?))
    }

    fn v4(address: SocketAddr) -> SocketAddrV4 {
        let SocketAddr::V4(address) = address else { panic!("{address} is not of IPv4") };
        address
    }

    #[test]
    fn who_waits_hears_that_nobody_will_come() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let Some((expected, next)) = numbers(&client) else {
            orrery_testing::skipped!("this user may not repair connections");
            return;
        };
        let (local, remote) = (v4(listener.local_addr().unwrap()), v4(client.local_addr().unwrap()));
        client.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let mut resets = Resets::default();
        // What the other side sends next is what this side expects; a number beside it is not believed.
        resets.add(WaitingConnection { local, remote, next: expected.wrapping_add(1 << 30), expected: next });
        if let Err(error) = resets.send() {
            orrery_testing::skipped!("this user may not make packets: {error:#}");
            return;
        }
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        let mut resets = Resets::default();
        resets.add(WaitingConnection { local, remote, next: expected, expected: next });
        let folder = std::env::temp_dir().join(format!("orrery-resets-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        resets.write(&folder).unwrap();
        Resets::read(&folder).unwrap().send().unwrap();
        fs::remove_dir_all(&folder).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}
