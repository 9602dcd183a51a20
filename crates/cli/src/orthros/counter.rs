//! A client of redis that counts over one connection, and believes nothing.

use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use orrery_orthros_host::{Network, Pair};

const PORT: u16 = 6379;
/// How long anything may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// How long after a reply redis may write its log: it waits while the disk is busy with what it wrote before.
const LOG_DELAY: Duration = Duration::from_secs(10);

/// Waits until redis has logged so many counts, by a command that counts them in the guest.
///
/// # Errors
/// It has logged another number of them.
pub(super) fn expect_logged(pair: &mut Pair, command: &str, counted: u64) -> Result<()> {
    let deadline = Instant::now() + LOG_DELAY;
    loop {
        let logged = pair.run(&["sh", "-c", command])?;
        let logged: u64 = logged.trim().parse().with_context(|| format!("redis' log holds {logged:?}"))?;
        if logged == counted {
            return Ok(());
        }
        ensure!(
            logged < counted && Instant::now() < deadline,
            "clients counted {counted}, and redis logged {logged}"
        );
        thread::sleep(LOG_DELAY / 50);
    }
}

/// The client. Its thread must be in the service's network.
pub(super) struct Counter {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
    key: String,
    last: u64,
}

impl Counter {
    /// Connects, and will count in this key, which nobody else does.
    pub(super) fn connect(key: &str) -> Result<Self> {
        let deadline = Instant::now() + PATIENCE;
        let stream = loop {
            match TcpStream::connect((Network::SERVICE, PORT)) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => return Err(error).context("cannot reach redis"),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let reader = BufReader::new(stream.try_clone()?);
        Ok(Self { stream, reader, key: key.to_owned(), last: 0 })
    }

    /// Returns how far it has counted.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// Returns its connection, for someone who would end it.
    pub(super) fn line(&self) -> Result<TcpStream> {
        Ok(self.stream.try_clone()?)
    }

    /// Counts by one, and makes sure that it was one.
    pub(super) fn count(&mut self) -> Result<()> {
        write!(self.stream, "INCR {}\r\n", self.key).context("cannot send a request to redis")?;
        let mut line = String::new();
        self.reader.read_line(&mut line).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => {
                anyhow!("redis has not answered for {} s after count {}", PATIENCE.as_secs(), self.last)
            }
            _ => anyhow::Error::new(error).context("cannot read an answer of redis"),
        })?;
        let number: u64 = line
            .trim()
            .strip_prefix(':')
            .unwrap_or_default()
            .parse()
            .with_context(|| format!("redis answered {line:?} and not a number"))?;
        ensure!(number == self.last + 1, "redis counted from {} to {number}", self.last);
        self.last = number;
        Ok(())
    }

    /// Counts until told to stop; gives the longest time between two answers.
    pub(super) fn count_until(&mut self, stop: &AtomicBool) -> Result<Duration> {
        let mut longest = Duration::ZERO;
        let mut last = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            self.count()?;
            longest = longest.max(last.elapsed());
            last = Instant::now();
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(longest)
    }
}
