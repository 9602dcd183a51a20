//! The sender: four streams at a steady rate.

use std::io::{BufRead, stdin};
use std::net::UdpSocket;

use anyhow::{Context, Result};

use super::network::{RECEIVERS, configure_sender, leave};
use super::{PACKET, RATE, STREAMS, Scheduling, WINDOW, WINDOWS, now};
use crate::machine;

/// When the next packet of each stream is due. They come one by one: of packets that are sent together, each waits for the processing of those
/// before it, and that would be most of what is measured as jitter.
const GAP: u64 = 1_000_000_000 / RATE;
/// A sender that was kept from running for longer than this does not make up for it: nothing is lost because it sent too fast.
const LATE: u64 = 10 * GAP;
/// Above all receivers, so that the rate is the same for all ways.
const PRIORITY: Scheduling = Scheduling::Fifo(60);

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
    PRIORITY.apply()?;
    let start = now();
    let mut due = start;
    for number in 0..(WINDOWS + 1) * WINDOW + 1000 {
        // Sleeping takes longer than the time that there is.
        while now() < due {
            std::hint::spin_loop();
        }
        for socket in sockets.iter().take(STREAMS) {
            let mut packet = [0_u8; PACKET];
            packet[..8].copy_from_slice(&number.to_le_bytes());
            packet[8..16].copy_from_slice(&now().to_le_bytes());
            socket.send(&packet).context("cannot send")?;
        }
        due += GAP;
        let late = now().saturating_sub(due);
        if late > LATE {
            due += late;
        }
    }
    println!("{}", now() - start);
    Ok(())
}
