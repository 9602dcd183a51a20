//! Kernels that die while calls are under way that move bytes: none is lost, and none comes twice. SKIPPED where QEMU, criu, a
//! kernel or root are absent.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "orthros/pairs.rs"]
mod pairs;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pairs::{ONE_PAIR, Up, connect, missing};

/// The byte at a place of a stream, as `orrery-orthros-load io-stress` has it.
fn byte(place: u64) -> u8 {
    (place / 8).to_le_bytes()[usize::try_from(place % 8).unwrap()]
}

/// Sends a stream for ever; it ends with the other side.
fn send(mut stream: TcpStream) {
    let mut place = 0;
    loop {
        let piece: Vec<u8> = (place..place + 1 + place % 1999).map(byte).collect();
        if stream.write_all(&piece).is_err() {
            return;
        }
        place += piece.len() as u64;
    }
}

/// Compares a stream for ever, and counts what was right; `u64::MAX` where something was not.
fn receive(mut stream: TcpStream, right: &AtomicU64) {
    let (mut place, mut bytes) = (0, [0; 4096]);
    while let Ok(count @ 1..) = stream.read(&mut bytes) {
        if (place..).zip(&bytes[..count]).any(|(place, &found)| found != byte(place)) {
            right.store(u64::MAX, Ordering::Relaxed);
            return;
        }
        place += count as u64;
        right.store(place, Ordering::Relaxed);
    }
}

/// Kernels are stopped wherever they are, under a program that does nothing but move bytes: to a file's end, through a pipe and a
/// Unix socket, from and to another machine, and over TCP to itself: by the loopback, its own address and IPv6. `ORRERY_TRANSFERS` says how many kernels die; two otherwise.
#[test]
fn no_byte_is_lost_or_comes_twice_wherever_a_call_was() {
    let rounds = std::env::var("ORRERY_TRANSFERS").map_or(2, |rounds| rounds.parse::<usize>().unwrap());
    if let Some(why) = missing(&[("ip", "iproute2"), ("mkfs.ext4", "e2fsprogs")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let network = format!("orrery-transfer-{}", std::process::id());
    let options = ["--network", &network, "--cpus", "2", "--disk", "64M", "--silence", "60"];
    let mut up = Up::start(&options, &["orrery-orthros-load", "io-stress"]);
    up.expect("help");
    let stream = connect(&network, 7);
    let right = Arc::new(AtomicU64::new(0));
    let (other, counter) = (stream.try_clone().unwrap(), Arc::clone(&right));
    std::thread::spawn(move || send(other));
    std::thread::spawn(move || receive(stream, &counter));
    for round in 0..rounds {
        let way = ["nmi", "panic"][round % 2];
        up.say("run busybox touch /run/io-stress");
        up.expect("ran");
        let before = right.load(Ordering::Relaxed);
        while right.load(Ordering::Relaxed) == before {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let before = right.load(Ordering::Relaxed);
        up.say(&format!("crash {way}"));
        let survived = up.expect("survived");
        assert_eq!(up.verdict().trim(), "right", "round {round}: {survived}");
        // Both ends of three with itself, one that nobody accepts, and the one from here.
        assert_eq!(survived["failover"]["summary"]["connections"], 8, "{survived}");
        while right.load(Ordering::Relaxed) == before {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_ne!(right.load(Ordering::Relaxed), u64::MAX, "round {round}: {survived}");
        up.expect("renewed");
    }
    up.say("quit");
    up.expect("end");
}
