//! The way from this machine to itself, closed while a service is being rebuilt.
//!
//! A service may have both ends of a TCP connection. criu makes one after the other, and the first one sends what had not been
//! sent as soon as it is there: the other end is not, and whoever listens at its port, or the kernel in his place, answers that
//! there is no such connection (`RST`), which ends it. criu itself would keep packets away by netfilter, where that is loaded.
//! So all that goes to this machine itself is dropped until both ends are there, as if it had been lost on a line: a queue
//! that drops what it is given and says that it was sent (`blackhole`, Linux 4.20) stands before the loopback, put there by
//! rtnetlink(7). TCP repeats it.

use anyhow::{Context as _, Result};

use super::netlink::{self, ANSWER, CREATE, Netlink, REPLACE, REQUEST};

/// The loopback is each network's first device.
const LOOPBACK: i32 = 1;
/// `RTM_NEWQDISC` and `RTM_DELQDISC` of `linux/rtnetlink.h`.
const NEW: u16 = 36;
const DELETE: u16 = 37;
/// `TC_H_ROOT`, and `TCA_KIND`.
const ROOT: u32 = u32::MAX;
const KIND: u16 = 1;
/// What drops everything; of even words.
const DROPPER: &[u8; 12] = b"blackhole\0\0\0";

/// The loopback, closed until [`open`], or until this is dropped.
#[must_use = "the loopback is open again when this is dropped"]
pub(crate) struct Closed(());

/// Closes it.
///
/// # Errors
///
/// Where the kernel refuses.
pub(crate) fn close() -> Result<Closed> {
    ask(NEW, CREATE | REPLACE).context("cannot close the loopback")?;
    Ok(Closed(()))
}

/// Opens it again.
///
/// # Errors
///
/// Where the kernel refuses, as where it is not closed.
pub(crate) fn open() -> Result<()> {
    ask(DELETE, 0).context("cannot open the loopback")
}

impl Drop for Closed {
    fn drop(&mut self) {
        // Where all went well it is open already.
        let _ = open();
    }
}

/// Asks for a change of the queue before the loopback.
fn ask(kind: u16, flags: u16) -> Result<()> {
    // A `tcmsg`: any family, the device, no handle, at its root.
    let mut body = [&[0; 4][..], &LOOPBACK.to_ne_bytes(), &[0; 4], &ROOT.to_ne_bytes(), &[0; 4]].concat();
    if kind == NEW {
        // Without what fills it up to a whole word.
        let length = u16::try_from(4 + DROPPER.len() - 2).unwrap_or(0);
        body.extend(length.to_ne_bytes());
        body.extend(KIND.to_ne_bytes());
        body.extend(DROPPER);
    }
    Netlink::open(None, 0)?.ask(&netlink::message(kind, REQUEST | ANSWER | flags, &body))
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
