//! `orrery orthros demo`: redis, a client that counts, and panics.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use orrery_orthros::{DiskConfig, DiskSource, Fault, Network, Pair, PairConfig, Service, cache};

use super::{Common, Story};

const PORT: u16 = 6379;
const DATA: &str = "/data";
/// How many counts redis' log on its disk holds.
const COUNTS: &str = "cat /data/appendonlydir/*.incr.aof | grep -c INCR";
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    common: Common,
    /// How many panics to survive
    #[arg(long, default_value_t = 2)]
    panics: u32,
}

/// A client that asks redis to count, and believes nothing.
struct Counter {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
    last: u64,
}

impl Counter {
    fn connect() -> Result<Self> {
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
        Ok(Self { stream, reader, last: 0 })
    }

    /// Counts by one, and makes sure that it was one.
    fn count(&mut self) -> Result<()> {
        self.stream.write_all(b"INCR demo\r\n").context("the connection broke")?;
        let mut line = String::new();
        self.reader.read_line(&mut line).context("the connection broke")?;
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
    fn count_until(&mut self, stop: &AtomicBool) -> Result<Duration> {
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

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let common = &arguments.common;
    let story = Story::new(common.json);
    let temporary = tempfile::tempdir()?;
    let folder = common.folder.clone().unwrap_or_else(|| temporary.path().to_owned());
    let words =
        ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--dir", DATA, "--appendonly", "yes"];
    let config = PairConfig {
        folder,
        cache: cache(),
        service: Service { argv: words.map(str::to_owned).to_vec(), programs: Vec::new(), files: Vec::new() },
        memory_mib: common.memory,
        cpus: common.cpus,
        silence: Duration::from_secs_f64(common.silence),
        network: Some(format!("orrery-{}", std::process::id())),
        disk: Some(DiskConfig { source: DiskSource::New(64 << 20), mount: DATA.to_owned(), content: None }),
    };
    story.tell("start", None, "two machines start: one with redis, one that looks into its memory")?;
    let mut pair = Pair::up(config)?;
    story.tell("armed", None, "both are up; the backup knows the active's kernel")?;
    let network = pair.network().context("the pair has no network")?;
    network.enter()?;
    let mut counter = Counter::connect()?;
    for panic in 1..=arguments.panics {
        counter.count()?;
        story.tell("counting", None, format!("a client counts over one TCP connection: {}", counter.last))?;
        let stop = AtomicBool::new(false);
        let hang_up = counter.stream.try_clone()?;
        let (result, gap) = std::thread::scope(|scope| {
            let client = scope.spawn(|| counter.count_until(&stop));
            std::thread::sleep(Duration::from_millis(300));
            let result = survive(&mut pair, &story);
            if result.is_ok() {
                std::thread::sleep(Duration::from_millis(1500));
            } else {
                // The client would wait for an answer that never comes.
                let _ = hang_up.shutdown(std::net::Shutdown::Both);
            }
            stop.store(true, Ordering::Relaxed);
            (result, client.join())
        });
        result?;
        let gap = gap.map_err(|_| anyhow::anyhow!("the client panicked"))??;
        let text = format!(
            "the same client counts on: {}; it waited {:.0} ms",
            counter.last,
            gap.as_secs_f64() * 1e3
        );
        story.tell("counted", Some(gap.as_secs_f64()), text)?;
        if panic < arguments.panics {
            let seconds = pair.renew()?;
            story.tell("renewed", Some(seconds), format!("a new backup stands by after {seconds:.1} s"))?;
        }
    }
    let logged = pair.run(&["sh", "-c", COUNTS])?;
    ensure!(logged.trim() == counter.last.to_string(), "redis' log holds {} counts", logged.trim());
    story.tell("logged", None, format!("redis' log on its disk holds all {} counts", counter.last))?;
    pair.down()?;
    story.tell(
        "end",
        None,
        format!("{} panics, no answer lost, no connection lost, no byte lost", arguments.panics),
    )
}

/// One panic, from its cause to the service's life.
fn survive(pair: &mut Pair, story: &Story) -> Result<()> {
    let start = Instant::now();
    pair.crash(Fault::Panic)?;
    let Some(cause) = pair.watch(PATIENCE)? else { bail!("the active did not die") };
    let seconds = start.elapsed().as_secs_f64();
    let text =
        format!("the active's kernel panics, which is noticed {:.0} ms after it was told to", seconds * 1e3);
    story.tell("died", Some(seconds), text)?;
    let failover = pair.fail_over(cause)?;
    story.tell_failover(&failover)
}
