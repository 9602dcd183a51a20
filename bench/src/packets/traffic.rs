//! The sender: four streams at a steady rate.

use std::io::{BufRead, stdin};
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::time::Duration;

use anyhow::{Context, Result};

use super::network::{RECEIVERS, configure_sender, leave};
use super::{PACKET, RATE, STREAMS, WINDOW, WINDOWS, now, take_priority};
use crate::machine;

/// How often packets are sent.
const TICK: u64 = 250_000;
/// How many of each stream then.
const BURST: usize = (RATE * TICK / 1_000_000_000) as usize;
/// Above all receivers, so that the rate is the same for all ways.
const PRIORITY: i32 = 60;

/// Runs the sender: waits for its network and the receivers' ports on standard input, sends, prints how long that took in
/// nanoseconds.
///
/// # Errors
/// What the kernel refuses.
pub fn run_sender() -> Result<()> {
    leave()?;
    println!("ready");
    let mut lines = stdin().lock().lines();
    let ports = lines.next().context("no ports")??;
    configure_sender()?;
    let connected = |port: &str| -> Result<UdpSocket> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect((RECEIVERS, port.parse()?))?;
        Ok(socket)
    };
    let sockets = ports.split(' ').map(connected).collect::<Result<Vec<_>>>()?;
    machine::pin(machine::last_cpu()?)?;
    take_priority(PRIORITY)?;
    let start = now();
    let ticks = (WINDOWS + 1) * WINDOW / BURST as u64 + 100;
    for tick in 0..ticks {
        let due = start + tick * TICK;
        let wait = due.saturating_sub(now());
        if wait > 0 {
            std::thread::sleep(Duration::from_nanos(wait));
        }
        for socket in sockets.iter().take(STREAMS) {
            burst(socket, tick * BURST as u64)?;
        }
    }
    println!("{}", now() - start);
    Ok(())
}

/// Sends a burst whose first packet has this number.
fn burst(socket: &UdpSocket, first: u64) -> Result<()> {
    let mut packets = [[0_u8; PACKET]; BURST];
    let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: PACKET }; BURST];
    for (index, packet) in packets.iter_mut().enumerate() {
        packet[..8].copy_from_slice(&(first + index as u64).to_le_bytes());
        packet[8..16].copy_from_slice(&now().to_le_bytes());
        parts[index].iov_base = packet.as_mut_ptr().cast();
    }
    // SAFETY: zeros are messages without address, parts and control data.
    let mut messages: [libc::mmsghdr; BURST] = unsafe { std::mem::zeroed() };
    for (message, part) in messages.iter_mut().zip(&mut parts) {
        message.msg_hdr.msg_iov = part;
        message.msg_hdr.msg_iovlen = 1;
    }
    let count = u32::try_from(BURST)?;
    // SAFETY: each message points to one part, which points to one packet; all live until the call returns.
    let sent = unsafe { libc::sendmmsg(socket.as_raw_fd(), messages.as_mut_ptr(), count, 0) };
    anyhow::ensure!(sent > 0, "sendmmsg: {}", std::io::Error::last_os_error());
    Ok(())
}
