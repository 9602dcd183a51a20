//! Pairs of machines whose kernels die, and clients that wait for them.

pub mod clients;
pub mod rivals;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use orrery_orthros_host::{
    Cause, DiskConfig, DiskSource, Error, Failover, Fault, Network, NetworkConfig, Pair, PairConfig, Service,
    cache,
};

use crate::contender::Skipped;

/// The timeout of operations that take seconds.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The configuration of a pair.
#[derive(Clone, Debug)]
pub struct PairSpec<'w> {
    /// The service and its arguments.
    pub service: &'w [&'w str],
    /// More programs that it runs.
    pub programs: &'w [&'w str],
    /// Files of this host, and where it expects them.
    pub files: &'w [(&'w str, &'w str)],
    /// Memory of each machine in MiB.
    pub memory: u64,
    /// More for the command line of its kernel.
    pub append: &'w str,
    /// Its disk, in MiB, and a directory whose files that has.
    pub disk: Option<(u64, Option<&'w std::path::Path>)>,
}

/// A running pair, in a network that the calling thread enters.
pub struct Running {
    /// The pair itself.
    pub pair: Pair,
    // Removed when the pair is gone.
    _directory: tempfile::TempDir,
}

/// A death of a kernel and the failover after it.
#[derive(Clone, Debug)]
pub struct Rescue {
    /// How long it took to notice, in seconds.
    pub noticed: f64,
    /// What was done then.
    pub failover: Failover,
}

impl Rescue {
    /// Returns how long a part of it took, in seconds; 0 where there was no such part.
    pub fn step(&self, name: &str) -> f64 {
        self.failover
            .steps
            .iter()
            .filter(|step| step.name == name)
            .map(|step| step.seconds)
            .fold(0.0, |all, one| all + one)
    }
}

impl Running {
    /// Starts it.
    ///
    /// # Errors
    /// [`Skipped`] where this host lacks something; where it does not come up.
    pub fn start(wanted: &PairSpec<'_>) -> Result<Self> {
        let directory = tempfile::tempdir().context("cannot make a directory for a pair")?;
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let files = wanted.files.iter().map(|&(here, there)| (here.into(), there.to_owned())).collect();
        let config = PairConfig {
            directory: directory.path().to_owned(),
            cache: cache(),
            service: Service {
                argv: words(wanted.service),
                programs: words(wanted.programs),
                files,
                ..Service::default()
            },
            memory_mib: wanted.memory,
            cpus: 1,
            silence: Duration::from_secs(1),
            network: Some(NetworkConfig::Own(format!("orrery-{}", std::process::id()))),
            disk: wanted.disk.map(|(mib, content)| DiskConfig {
                source: DiskSource::New(mib << 20),
                mount: "/data".to_owned(),
                content: content.map(Into::into),
            }),
            append: wanted.append.to_owned(),
        };
        let pair = Pair::start(config).map_err(|error| match error {
            Error::Missing { .. } | Error::Rights { .. } | Error::Room { .. } => {
                Skipped(error.to_string()).into()
            }
            other => anyhow::Error::from(other),
        })?;
        pair.network().context("a pair without a network")?.enter()?;
        Ok(Self { pair, _directory: directory })
    }

    /// Lets the kernel die, and the service go on.
    pub fn crash(&mut self, fault: Fault) -> Result<Rescue> {
        let begin = Instant::now();
        self.pair.crash(fault)?;
        let cause = self.pair.watch(TIMEOUT)?.context("the kernel does not die")?;
        let noticed = begin.elapsed().as_secs_f64();
        // Where a machine has no time to run it is silent as well; such a run measures that.
        ensure!(
            fault != Fault::Panic || cause == Cause::Panic,
            "this machine is too busy: silence was noticed first"
        );
        let failover = self.pair.fail_over(cause)?;
        Ok(Rescue { noticed, failover })
    }
}

/// Connects to a port of the service's machine, which may still be starting.
fn connect(port: u16) -> Result<TcpStream> {
    let deadline = Instant::now() + TIMEOUT;
    let stream = loop {
        match TcpStream::connect((Network::SERVICE, port)) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > deadline => {
                return Err(error).with_context(|| format!("nobody answers at port {port}"));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// A service that answers lines with lines, over one connection.
pub struct LineClient {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
}

impl LineClient {
    /// Connects to the service, which may still be starting.
    pub fn connect(port: u16) -> Result<Self> {
        let stream = connect(port)?;
        let reader = BufReader::new(stream.try_clone()?);
        Ok(Self { stream, reader })
    }

    /// Sends a line and returns the first line of the answer.
    pub fn ask(&mut self, what: &str) -> Result<String> {
        self.stream.write_all(what.as_bytes()).context("the connection broke")?;
        let mut line = String::new();
        self.reader.read_line(&mut line).context("the connection broke")?;
        Ok(line.trim_end().to_owned())
    }
}

/// A client that asks a service to count, over one connection, and checks each answer.
pub struct Client {
    counted: Arc<AtomicU64>,
    longest: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    stream: TcpStream,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Client {
    /// Starts it; an answer is a number, behind a colon where it is redis that answers.
    pub fn start(port: u16, question: &str) -> Result<Self> {
        let mut line = LineClient::connect(port)?;
        let question = question.to_owned();
        let stream = line.stream.try_clone()?;
        let (counted, longest, stop) =
            (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default(), Arc::default());
        let (its_count, its_longest, its_stop) =
            (Arc::clone(&counted), Arc::clone(&longest), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let (stop, mut last): (&AtomicBool, u64) = (&its_stop, 0);
            while !stop.load(Ordering::Relaxed) {
                let begin = Instant::now();
                let answer = line.ask(&question)?;
                let number: u64 = answer
                    .trim_start_matches(':')
                    .parse()
                    .with_context(|| format!("{answer:?} is no number"))?;
                ensure!(number == last + 1, "it counted from {last} to {number}");
                last = number;
                its_longest.fetch_max(u64::try_from(begin.elapsed().as_micros())?, Ordering::Relaxed);
                its_count.store(last, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        });
        Ok(Self { counted, longest, stop, stream, thread: Some(thread) })
    }

    /// Returns how far it has counted.
    pub fn counted(&self) -> u64 {
        self.counted.load(Ordering::Relaxed)
    }

    /// Resets its longest wait.
    pub fn reset_longest_wait(&self) {
        self.longest.store(0, Ordering::Relaxed);
    }

    /// Returns its longest wait in seconds, after it has got more answers.
    pub fn longest(&mut self) -> Result<f64> {
        let from = self.counted.load(Ordering::Relaxed);
        let deadline = Instant::now() + TIMEOUT;
        while self.counted.load(Ordering::Relaxed) < from + 10 {
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                self.end()?;
                bail!("a client ended by itself");
            }
            ensure!(Instant::now() < deadline, "no answer for {} s", TIMEOUT.as_secs());
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Duration::from_micros(self.longest.load(Ordering::Relaxed)).as_secs_f64())
    }

    /// Ends it and returns how far it has counted.
    pub fn end(&mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
        }
        Ok(self.counted.load(Ordering::Relaxed))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // It may wait for an answer that never comes.
        let _gone = self.stream.shutdown(Shutdown::Both);
        let _ended = self.end();
    }
}
