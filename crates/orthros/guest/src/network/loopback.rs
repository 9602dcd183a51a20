//! The loopback of this machine, which drops all packets while a service is being rebuilt.
//!
//! A service may have both ends of a TCP connection. criu makes one after the other, and the first sends its unsent bytes at
//! once. The other end does not exist yet, so a listener at its port, or the kernel, would answer with `RST`, which ends the
//! connection. criu itself would block such packets by netfilter, where that is loaded. Here a queueing discipline that
//! drops packets and reports them as sent (`blackhole`, Linux 4.20) is attached to the loopback by rtnetlink(7) until both
//! ends exist. TCP retransmits the packets.

use anyhow::{Context as _, Result};
use orrery_sys::netlink::{CREATE, Netlink, REPLACE};

/// The loopback is the first device of each network namespace.
const LOOPBACK: i32 = 1;
/// `RTM_NEWQDISC` of `linux/rtnetlink.h`.
const NEW: u16 = 36;
/// `RTM_DELQDISC`.
const DELETE: u16 = 37;
/// `TC_H_ROOT`.
const ROOT: u32 = u32::MAX;
/// `TCA_KIND`.
const KIND: u16 = 1;
/// The name of the discipline that drops everything, padded to whole words.
const BLACKHOLE: &[u8; 12] = b"blackhole\0\0\0";

/// The loopback while it drops packets: until [`open`], or until this is dropped.
#[must_use = "the loopback is open again when this is dropped"]
pub(crate) struct Closed(());

/// Makes the loopback drop all packets.
///
/// # Errors
/// The kernel's.
pub(crate) fn close() -> Result<Closed> {
    change(NEW, CREATE | REPLACE).context("cannot close the loopback")?;
    Ok(Closed(()))
}

/// Makes the loopback deliver packets again.
///
/// # Errors
/// The kernel's, for instance if it is not closed.
pub(crate) fn open() -> Result<()> {
    change(DELETE, 0).context("cannot open the loopback")
}

impl Drop for Closed {
    fn drop(&mut self) {
        // After a success it is open already, and this fails.
        let _ = open();
    }
}

/// Changes the queueing discipline of the loopback.
fn change(kind: u16, flags: u16) -> Result<()> {
    // A `tcmsg`: any family, the device, no handle, at its root.
    let mut body = [&[0; 4][..], &LOOPBACK.to_ne_bytes(), &[0; 4], &ROOT.to_ne_bytes(), &[0; 4]].concat();
    if kind == NEW {
        // The length leaves out the padding.
        let length = u16::try_from(4 + BLACKHOLE.len() - 2).unwrap_or(0);
        body.extend(length.to_ne_bytes());
        body.extend(KIND.to_ne_bytes());
        body.extend(BLACKHOLE);
    }
    Ok(Netlink::open(None, 0)?.transact(kind, flags, &body)?)
}

#[cfg(test)]
mod tests {
    use std::io::{self, ErrorKind, Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    /// In a network of its own: this one's loopback is others', too.
    #[test]
    fn what_is_sent_while_it_is_closed_comes_when_it_is_open() {
        let result = std::thread::spawn(|| {
            // SAFETY: no pointers are involved; only this thread's network is another one.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                return Err(io::Error::last_os_error().to_string());
            }
            let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
            if !up.as_ref().is_ok_and(std::process::ExitStatus::success) {
                return Err(format!("ip: {up:?}"));
            }
            for address in ["127.0.0.1:0", "[::1]:0"] {
                let listener = TcpListener::bind(address).unwrap();
                let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                let (mut other, _) = listener.accept().unwrap();
                let closed = close().unwrap();
                one.write_all(b"x").unwrap();
                other.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
                assert_eq!(other.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock, "{address}");
                drop(closed);
                assert!(open().is_err(), "it was not closed");
                other.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                assert_eq!(other.read(&mut [0]).unwrap(), 1, "{address}");
            }
            Ok(())
        });
        if let Err(why) = result.join().unwrap() {
            orrery_testing::skipped!("this user may not make networks: {why}");
        }
    }
}
