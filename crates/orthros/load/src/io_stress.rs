//! A program that moves bytes in every way that calls move them, as fast as it can, and knows each byte: what tests let
//! kernels die under, so that calls are under way when they do.
//!
//! Each stream is the numbers from nothing on, eight bytes each, cut into pieces without regard to that. A byte that was lost or
//! came twice shifts all that follow.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

const BOOT: &str = "/proc/sys/kernel/random/boot_id";
/// Where it appends: on the disk if there is one.
const DIRECTORIES: [&str; 2] = ["/data", "/run"];
/// Where it is spoken to from outside.
const PORT: u16 = 7;
/// A file that has become longer is compared, and begun again.
const LONG: u64 = 1 << 20;
/// The longest piece.
const PIECE: usize = 3000;
/// How many pieces everyone has to move before all is said to be right.
const ENOUGH: u64 = 20;

/// While this is there bytes are moved, and under a new kernel until the verdict. A machine that did nothing else all the time
/// would leave its successor no processor to start on.
const GO: &str = "/run/io-stress";

/// Whether bytes are to be moved now.
static FLOWS: AtomicBool = AtomicBool::new(true);
/// What was wrong first.
static WRONG: Mutex<Option<String>> = Mutex::new(None);

/// A stream: how many pieces have come through it.
type Counter = &'static AtomicU64;

/// Returns the byte at a place of any stream.
fn byte(place: u64) -> u8 {
    (place / 8).to_le_bytes()[usize::try_from(place % 8).unwrap_or(0)]
}

/// The next piece of a stream from this place on, when there is to be one; lengths differ from piece to piece.
fn piece(place: u64, into: &mut Vec<u8>) {
    while !FLOWS.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let length = 1 + (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % PIECE as u64;
    into.clear();
    into.extend((place..place + length).map(byte));
}

/// Looks at what came at a place.
fn look(place: u64, bytes: &[u8]) -> Result<()> {
    let Some(at) = (place..).zip(bytes).position(|(place, &found)| found != byte(place)) else {
        return Ok(());
    };
    let (wrong, found) = (place + at as u64, &bytes[at..]);
    match place_of(found) {
        Some(other) => {
            bail!("in place of what is at {wrong} comes what is at {other}, {at} bytes after {place}")
        }
        None => bail!("what is at {wrong} is wrong: {found:?}"),
    }
}

/// Returns where in a stream these bytes are, if they are whole numbers that follow each other.
fn place_of(bytes: &[u8]) -> Option<u64> {
    let number = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    (0..8).find_map(|at| {
        let first = number(at)?;
        (number(at + 8)? == first.wrapping_add(1)).then(|| first.wrapping_mul(8).wrapping_sub(at as u64))
    })
}

/// Does it again where a signal came in between, as programs do.
fn again<T>(mut call: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Sends a stream for ever, by `write` and `writev` in turn.
fn send(mut to: impl Write) -> Result<()> {
    let (mut place, mut bytes) = (0, Vec::new());
    loop {
        piece(place, &mut bytes);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (one, other) = rest.split_at(rest.len() / 3);
            let sent = if place % 2 == 0 {
                again(|| to.write(rest))?
            } else {
                again(|| to.write_vectored(&[IoSlice::new(one), IoSlice::new(other)]))?
            };
            rest = &rest[sent..];
            place += sent as u64;
        }
    }
}

/// Receives a stream for ever, by `read` and `readv` in turn.
fn receive(mut from: impl Read, counter: Counter) -> Result<()> {
    let mut place = 0;
    let mut bytes = [0; PIECE];
    loop {
        let count = if place % 2 == 0 {
            again(|| from.read(&mut bytes))?
        } else {
            let (one, other) = bytes.split_at_mut(100);
            again(|| from.read_vectored(&mut [IoSliceMut::new(one), IoSliceMut::new(other)]))?
        };
        ensure!(count > 0, "the stream ended at {place}");
        look(place, &bytes[..count])?;
        place += count as u64;
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// A socket, by the calls that only sockets have: `sendto` and `recvfrom`, `sendmsg` and `recvmsg`.
struct Calls<S>(S, bool);

impl Write for Calls<UnixStream> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.1 = !self.1;
        if self.1 {
            let flags = rustix::net::SendFlags::empty();
            return Ok(rustix::net::send(&self.0, bytes, flags)?);
        }
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> std::io::Result<usize> {
        let mut control = rustix::net::SendAncillaryBuffer::default();
        let flags = rustix::net::SendFlags::empty();
        Ok(rustix::net::sendmsg(&self.0, parts, &mut control, flags)?)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Read for Calls<UnixStream> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.1 = !self.1;
        if self.1 {
            return Ok(rustix::net::recv(&self.0, bytes, rustix::net::RecvFlags::empty())?.0);
        }
        self.read_vectored(&mut [IoSliceMut::new(bytes)])
    }

    fn read_vectored(&mut self, parts: &mut [IoSliceMut<'_>]) -> std::io::Result<usize> {
        let mut control = rustix::net::RecvAncillaryBuffer::default();
        let flags = rustix::net::RecvFlags::empty();
        Ok(rustix::net::recvmsg(&self.0, parts, &mut control, flags)?.bytes)
    }
}

/// Appends a stream to a file, and compares it.
fn append(directory: &str, counter: Counter) -> Result<()> {
    let path = format!("{directory}/appended");
    let mut file = OpenOptions::new().append(true).read(true).create(true).open(&path)?;
    let (mut place, mut bytes) = (0, Vec::new());
    loop {
        piece(place, &mut bytes);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let count = again(|| file.write(rest))?;
            rest = &rest[count..];
            place += count as u64;
        }
        counter.fetch_add(1, Ordering::Relaxed);
        let length = file.metadata()?.len();
        ensure!(length == place, "{path} has {length} bytes where {place} were appended");
        if place > LONG {
            compare(&file, place).with_context(|| path.clone())?;
            file.set_len(0)?;
            place = 0;
        }
    }
}

fn compare(file: &File, length: u64) -> Result<()> {
    let mut bytes = vec![0; usize::try_from(length)?];
    file.read_exact_at(&mut bytes, 0)?;
    look(0, &bytes)
}

/// A thread that goes on until something is wrong.
fn start(name: &'static str, run: impl FnOnce(Counter) -> Result<()> + Send + 'static) -> Counter {
    let counter: Counter = Box::leak(Box::default());
    std::thread::spawn(move || {
        if let Err(error) = run(counter) {
            let mut wrong = WRONG.lock().unwrap_or_else(PoisonError::into_inner);
            wrong.get_or_insert(format!("{name}: {error:#}"));
        }
    });
    counter
}

fn pipe() -> Result<(File, File)> {
    let (from, to): (OwnedFd, OwnedFd) = rustix::pipe::pipe()?;
    Ok((from.into(), to.into()))
}

/// Serves whoever connects with the stream, and looks at the one that comes from there.
fn serve(listener: TcpListener, counter: Counter) -> Result<()> {
    let (stream, _) = again(|| listener.accept())?;
    let other = stream.try_clone()?;
    start("to outside", move |_| send(other));
    receive(stream, counter)
}

/// The addresses at which the service reaches itself: the loopback's, and its own if it has one.
fn own_addresses() -> Vec<IpAddr> {
    let line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let own = line.split_whitespace().find_map(|word| word.strip_prefix("orrery.address="));
    let own = own.and_then(|address| address.split('/').next()?.parse().ok());
    let loopback = [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)];
    loopback.into_iter().chain(own).collect()
}

/// Connects with itself over TCP, and moves a stream each way.
fn talk_to_itself(address: IpAddr) -> Result<[Counter; 2]> {
    let listener = TcpListener::bind((address, 0)).with_context(|| format!("cannot listen at {address}"))?;
    let one = TcpStream::connect(listener.local_addr()?)?;
    let (other, _) = listener.accept()?;
    if address.is_ipv4() {
        // Both with somebody who listens beside them, and without.
        std::mem::forget(listener);
    }
    let stream = |from: &TcpStream, to: &TcpStream| -> Result<Counter> {
        let (from, to) = (from.try_clone()?, to.try_clone()?);
        start("to itself", move |_| send(from));
        Ok(start("from itself", move |counter| receive(to, counter).with_context(|| format!("at {address}"))))
    };
    Ok([stream(&one, &other)?, stream(&other, &one)?])
}

/// Connects to a place of its own where nobody accepts, for ever: it is to hear each time that nobody will. Counts that.
fn knock_in_vain(listener: &TcpListener, counter: Counter) -> Result<()> {
    loop {
        let mut stream = TcpStream::connect(listener.local_addr()?)?;
        match again(|| stream.read(&mut [0])) {
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            other => bail!("a connection that was not accepted gives {other:?}"),
        }
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Moves bytes for ever, and leaves a verdict after each change of kernels.
pub(crate) fn run() -> Result<()> {
    let mut counters = Vec::new();
    for directory in DIRECTORIES.into_iter().filter(|directory| fs::metadata(directory).is_ok()) {
        counters.push(start("appending", move |counter| append(directory, counter)));
    }
    let (from, to) = pipe()?;
    start("to a pipe", move |_| send(to));
    counters.push(start("from a pipe", move |counter| receive(from, counter)));
    let (one, other) = UnixStream::pair()?;
    start("to a Unix socket", move |_| send(Calls(one, false)));
    counters.push(start("from a Unix socket", move |counter| receive(Calls(other, false), counter)));
    for address in own_addresses() {
        counters.extend(talk_to_itself(address)?);
    }
    let listener = TcpListener::bind(("0.0.0.0", PORT))?;
    counters.push(start("from outside", move |counter| serve(listener, counter)));
    let nobody = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let heard = start("to nobody", move |counter| knock_in_vain(&nobody, counter));
    let mut heard_before = 0;
    let mut boot = fs::read_to_string(BOOT)?;
    let mut wanted: Option<Vec<u64>> = None;
    loop {
        std::thread::sleep(Duration::from_millis(20));
        let counts = || counters.iter().map(|counter| counter.load(Ordering::Relaxed));
        let now = fs::read_to_string(BOOT)?;
        if now != boot {
            boot = now;
            wanted = Some(counts().map(|count| count + ENOUGH).collect());
        }
        let flows = wanted.is_some() || fs::metadata(GO).is_ok();
        FLOWS.store(flows, Ordering::Relaxed);
        let Some(least) = &wanted else { continue };
        let wrong = WRONG.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let verdict = match wrong {
            Some(wrong) => format!("wrong: {wrong}\n"),
            None if heard.load(Ordering::Relaxed) > heard_before
                && counts().zip(least).all(|(count, least)| count >= *least) =>
            {
                "right\n".to_owned()
            }
            None => continue,
        };
        wanted = None;
        heard_before = heard.load(Ordering::Relaxed);
        let _ = fs::remove_file(GO);
        crate::verdict::leave(&verdict)?;
    }
}
