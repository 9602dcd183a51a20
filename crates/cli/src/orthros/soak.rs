//! `orrery orthros soak`: crash after crash of random kinds at random moments under load, and a table of what became of the
//! service.
//!
//! The service is redis with three clients that count, each over one connection, and a program that changes files as fast as it
//! can and compares them with what it remembers after each crash. A crash ends in one of three ways:
//!
//! - *survived*: every client counts on over its connection, no count lost and none twice, and every file is as it was;
//! - *refused*: what was found in the dead memory could not be carried over exactly, and was said; nothing was rebuilt;
//! - *wrong*: anything else. There must be none.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::net::{Shutdown, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use orrery_orthros_host::{Cause, DiskConfig, DiskSource, Error, Fault, Pair, PairConfig, Service, cache};
use serde::{Deserialize, Serialize};

use super::counter::{Counter, PATIENCE, expect_logged};
use super::workspace::Workspace;
use super::{Common, Story};

const CLIENTS: usize = 3;
const SCRIPT: &str = "mkdir -p /data/redis && { orrery-orthros-load file-stress /data 7 & } && \
    exec redis-server --bind 0.0.0.0 --protected-mode no --dir /data/redis --appendonly yes --save ''";
/// Counts in redis' log, of all clients.
const COUNTS: &str = "cat /data/redis/appendonlydir/*.incr.aof | grep -c INCR";
/// What may tell why a verdict does not come: whether the program is there, how much memory is left, whether it ran out.
const WHY: &str = "busybox ps -o pid,stat,vsz,args | grep -E 'file-stress|redis' | grep -v grep; \
    grep -E 'MemTotal|MemAvailable|Shmem:' /proc/meminfo; busybox dmesg | grep -E 'Out of memory|Killed process' | tail -n 3";
/// What may tell why a client gets no answer: the service's connections, and what redis waits for.
const CONNECTIONS: &str = "cat /proc/net/tcp; for pid in $(busybox pidof redis-server); do \
    cat /proc/$pid/stat /proc/$pid/syscall /proc/$pid/wchan; done; cat /proc/loadavg; busybox dmesg | tail -n 3";
/// How long a pair is under load before it crashes, at most.
const LOAD: u64 = 2000;
/// Silent kernels say why they die only if they get the time.
const LOCKUP: Duration = Duration::from_secs(5);

#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    common: Common,
    /// How many crashes
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    crashes: u32,
    /// What kinds and moments are drawn from; the same seed draws the same ones
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The kinds to draw from, separated by commas [default: all]
    #[arg(long, value_delimiter = ',', value_parser = Fault::parse)]
    kinds: Vec<Fault>,
    /// Fail as well where a crash was not survived, though cleanly
    #[arg(long)]
    strict: bool,
    /// A file that takes one line for each crash; crashes of this seed that it has already are not made again
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

/// What became of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Survived,
    Refused,
    Wrong,
}

/// One crash.
#[derive(Debug, Serialize, Deserialize)]
struct Crash {
    seed: u64,
    number: u32,
    kind: String,
    /// How long the pair had been under load, in milliseconds.
    after: u64,
    outcome: Outcome,
    /// How it was noticed.
    cause: Option<Cause>,
    /// From the failure's notice to the service's life, in seconds.
    rebuilt: Option<f64>,
    /// The longest that a client waited for an answer, in seconds.
    waited: Option<f64>,
    /// Why the first try to rebuild the service failed, if it did.
    first: Option<String>,
    /// What was not survived.
    why: Option<String>,
}

/// Numbers that look random; splitmix64, by Steele, Lea and Flood (OOPSLA 2014).
fn draw(seed: u64, number: u32, what: u64) -> u64 {
    let mut z = seed.wrapping_add((u64::from(number) << 8 | what).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let story = Story::new(arguments.common.json);
    let kinds: &[Fault] = if arguments.kinds.is_empty() { &Fault::ALL } else { &arguments.kinds };
    let mut crashes = match &arguments.record {
        Some(path) => recorded(path, arguments.seed)?,
        None => Vec::new(),
    };
    let text =
        format!("seed {}; {} of {} crashes are recorded", arguments.seed, crashes.len(), arguments.crashes);
    story.tell("start", None, text)?;
    let workspace = Workspace::new()?;
    let mut scene = None;
    for number in 1..=arguments.crashes {
        if crashes.iter().any(|crash| crash.number == number) {
            continue;
        }
        let choice = draw(arguments.seed, number, 0) % u64::try_from(kinds.len())?;
        let kind = kinds[usize::try_from(choice)?];
        let after = draw(arguments.seed, number, 1) % LOAD;
        let mut current = match scene.take() {
            Some(scene) => scene,
            None => Scene::new(&arguments.common, &workspace)?,
        };
        let mut crash = Crash {
            seed: arguments.seed,
            number,
            kind: kind.name().to_owned(),
            after,
            outcome: Outcome::Survived,
            cause: None,
            rebuilt: None,
            waited: None,
            first: None,
            why: None,
        };
        current.crash(kind, &mut crash)?;
        story.tell("crash", crash.rebuilt, crash.describe())?;
        if let Some(path) = &arguments.record {
            let mut line = serde_json::to_vec(&crash)?;
            line.push(b'\n');
            let file = OpenOptions::new().create(true).append(true).open(path);
            file.and_then(|mut file| file.write_all(&line))
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        // What was not survived leaves nothing to go on with.
        if crash.outcome == Outcome::Survived {
            scene = Some(current);
        }
        crashes.push(crash);
    }
    if let Some(scene) = scene {
        scene.end()?;
    }
    story.tell("table", None, table(&crashes))?;
    let count = |outcome| crashes.iter().filter(|crash| crash.outcome == outcome).count();
    let (wrong, refused) = (count(Outcome::Wrong), count(Outcome::Refused));
    ensure!(wrong == 0, "{wrong} of {} crashes left something wrong behind", crashes.len());
    ensure!(!arguments.strict || refused == 0, "{refused} of {} crashes were not survived", crashes.len());
    Ok(())
}

/// The crashes of a seed that a file has; none where there is no file yet.
fn recorded(path: &Path, seed: u64) -> Result<Vec<Crash>> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let mut crashes = Vec::new();
    for (line, text) in (1..).zip(text.lines()) {
        let crash: Crash = serde_json::from_str(text)
            .with_context(|| format!("{}:{line}: this is no record of a crash", path.display()))?;
        if crash.seed == seed {
            crashes.push(crash);
        }
    }
    Ok(crashes)
}

impl Crash {
    fn describe(&self) -> String {
        let mut text = format!("{:3}  {:7} after {:4} ms: ", self.number, self.kind, self.after);
        match (self.outcome, &self.why) {
            (Outcome::Survived, _) => text.push_str("survived"),
            (Outcome::Refused, why) => {
                text.push_str(&format!("refused: {}", why.as_deref().unwrap_or_default()))
            }
            (Outcome::Wrong, why) => text.push_str(&format!("WRONG: {}", why.as_deref().unwrap_or_default())),
        }
        if let (Some(rebuilt), Some(waited)) = (self.rebuilt, self.waited) {
            text.push_str(&format!(" in {:.0} ms, clients waited {:.0} ms", rebuilt * 1e3, waited * 1e3));
        }
        if let Some(first) = &self.first {
            text.push_str(&format!("; the first try failed: {first}"));
        }
        text
    }
}

/// Returns how many crashes of each kind ended how; what was survived at the second try is counted as survived, too.
fn table(crashes: &[Crash]) -> String {
    let mut kinds: BTreeMap<&str, [usize; 4]> = BTreeMap::new();
    for crash in crashes {
        let column = match crash.outcome {
            Outcome::Survived => 0,
            Outcome::Refused => 1,
            Outcome::Wrong => 2,
        };
        let again = usize::from(crash.outcome == Outcome::Survived && crash.first.is_some());
        for row in [crash.kind.as_str(), "~"] {
            let row = kinds.entry(row).or_default();
            row[column] += 1;
            row[3] += again;
        }
    }
    let mut text = String::from("kind     survived  at the second try  refused  wrong");
    for (kind, [survived, refused, wrong, again]) in kinds {
        let kind = if kind == "~" { "all" } else { kind };
        text.push_str(&format!("\n{kind:7}  {survived:8}  {again:17}  {refused:7}  {wrong:5}"));
    }
    text
}

/// A pair under load.
struct Scene {
    pair: Pair,
    clients: Vec<Client>,
    // Removed when the pair is gone.
    _directory: tempfile::TempDir,
}

/// A client that counts by itself.
struct Client {
    /// How far it has counted.
    count: Arc<AtomicU64>,
    /// Its longest wait, in microseconds.
    waited: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    line: TcpStream,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Client {
    fn start(key: &str) -> Result<Self> {
        let mut counter = Counter::connect(key)?;
        // Until the first answer redis may not have accepted it, and such a connection does not survive.
        counter.count()?;
        let line = counter.line()?;
        let (count, waited, stop) =
            (Arc::new(AtomicU64::new(counter.last())), Arc::<AtomicU64>::default(), Arc::default());
        let (its_count, its_waited, its_stop) = (Arc::clone(&count), Arc::clone(&waited), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let stop: &AtomicBool = &its_stop;
            while !stop.load(Ordering::Relaxed) {
                let begin = Instant::now();
                counter.count()?;
                let took = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
                its_waited.fetch_max(took, Ordering::Relaxed);
                its_count.store(counter.last(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        });
        Ok(Self { count, waited, stop, line, thread: Some(thread) })
    }

    /// Waits until it has counted on by some.
    fn counts_on(&mut self) -> Result<()> {
        let from = self.count.load(Ordering::Relaxed);
        let deadline = Instant::now() + PATIENCE;
        while self.count.load(Ordering::Relaxed) < from + 10 {
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                return self.end().and_then(|_| bail!("a client ended by itself"));
            }
            ensure!(Instant::now() < deadline, "a client has got no answer for {} s", PATIENCE.as_secs());
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Ends it, and gives how far it counted.
    fn end(&mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
        }
        Ok(self.count.load(Ordering::Relaxed))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // It may wait for an answer that never comes.
        let _ = self.line.shutdown(Shutdown::Both);
        let _ = self.end();
    }
}

impl Scene {
    fn new(common: &Common, workspace: &Workspace) -> Result<Self> {
        let directory = tempfile::tempdir_in(workspace.directory())?;
        let words = ["busybox", "sh", "-c", SCRIPT].map(str::to_owned).to_vec();
        let service = Service {
            argv: words,
            programs: ["redis-server", "orrery-orthros-load"].map(str::to_owned).to_vec(),
            ..Service::default()
        };
        let pair = Pair::start(PairConfig {
            directory: common.directory.clone().unwrap_or_else(|| directory.path().to_owned()),
            cache: cache(),
            service,
            memory_mib: common.memory,
            cpus: common.cpus,
            silence: Duration::from_secs_f64(common.silence),
            network: Some(workspace.network()),
            disk: Some(DiskConfig {
                source: DiskSource::New(256 << 20),
                mount: "/data".to_owned(),
                content: None,
            }),
            append: String::new(),
        })?;
        pair.network().context("the pair has no network")?.enter()?;
        let clients =
            (0..CLIENTS).map(|index| Client::start(&format!("count{index}"))).collect::<Result<_>>()?;
        Ok(Self { pair, clients, _directory: directory })
    }

    /// One crash, and what became of it.
    fn crash(&mut self, kind: Fault, crash: &mut Crash) -> Result<()> {
        std::thread::sleep(Duration::from_millis(crash.after));
        for client in &self.clients {
            client.waited.store(0, Ordering::Relaxed);
        }
        self.pair.set_silence_limit((kind == Fault::Lockup).then_some(LOCKUP));
        self.pair.crash(kind)?;
        let Some(cause) = self.pair.watch(PATIENCE)? else {
            bail!("the active did not die of {}", kind.name())
        };
        self.pair.set_silence_limit(None);
        crash.cause = Some(cause);
        let survived = self.pair.fail_over(cause).or_else(|error| {
            let gone = matches!(error, Error::Gone { .. });
            crash.first = Some(error.to_string());
            if gone { Err(error) } else { self.pair.fail_over(cause) }
        });
        let failover = match survived {
            Ok(failover) => failover,
            Err(error) => {
                // What is lost when it had begun to go on was not refused.
                let gone = matches!(error, Error::Gone { .. });
                crash.outcome = if gone { Outcome::Wrong } else { Outcome::Refused };
                crash.why = Some(error.to_string());
                return Ok(());
            }
        };
        crash.rebuilt = Some(failover.seconds);
        let judged = self.judge().and_then(|waited| {
            crash.waited = Some(waited);
            Ok(self.pair.start_backup()?)
        });
        if let Err(error) = judged {
            (crash.outcome, crash.why) = (Outcome::Wrong, Some(format!("{error:#}")));
        }
        Ok(())
    }

    /// Returns whether everything is as it was; the longest wait of a client, in seconds.
    fn judge(&mut self) -> Result<f64> {
        for index in 0..self.clients.len() {
            self.clients[index].counts_on().map_err(|error| self.explain(index, error))?;
        }
        // Under its new kernel the program that changes files first compares all of them.
        let deadline = Instant::now() + PATIENCE;
        let verdict = loop {
            // Told once, and nothing before: what it said after an earlier crash is not taken for this one's.
            let verdict = self.pair.run(&["orrery-orthros-load", "verdict"])?;
            if !verdict.is_empty() {
                break verdict;
            }
            if Instant::now() > deadline {
                let why = self.pair.run(&["sh", "-c", WHY]).unwrap_or_else(|error| error.to_string());
                bail!("the files are not compared; {}", why.trim().replace('\n', "; "));
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        ensure!(verdict.starts_with("right"), "the files: {}", verdict.trim());
        let waits = self.clients.iter().map(|client| client.waited.load(Ordering::Relaxed));
        Ok(Duration::from_micros(waits.max().unwrap_or(0)).as_secs_f64())
    }

    /// Adds to a client's error what both sides know of its connection.
    fn explain(&mut self, index: usize, error: anyhow::Error) -> anyhow::Error {
        let counts: Vec<u64> =
            self.clients.iter().map(|client| client.count.load(Ordering::Relaxed)).collect();
        let inside = self.pair.run(&["sh", "-c", CONNECTIONS]).unwrap_or_else(|error| error.to_string());
        let outside = Command::new("ss").args(["-tino"]).output().map_or_else(
            |error| format!("cannot run ss: {error}"),
            |output| String::from_utf8_lossy(&output.stdout).into_owned(),
        );
        error.context(format!(
            "client {index} of {counts:?}; in the guest:\n{inside}\non the host:\n{outside}\nthe error"
        ))
    }

    /// Ends everything; redis must have logged each count.
    fn end(mut self) -> Result<()> {
        let mut counted = 0;
        for index in 0..self.clients.len() {
            counted += self.clients[index].end().map_err(|error| self.explain(index, error))?;
        }
        expect_logged(&mut self.pair, COUNTS, counted)?;
        Ok(self.pair.stop()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crash(number: u32, kind: &str, outcome: Outcome) -> Crash {
        let (kind, after, why) = (kind.to_owned(), 5, Some("it had to be".to_owned()));
        let (cause, rebuilt, waited, first) = (None, None, None, None);
        Crash { seed: 3, number, kind, after, outcome, cause, rebuilt, waited, first, why }
    }

    #[test]
    fn what_is_drawn_depends_on_seed_and_number_only() {
        assert_eq!(draw(1, 2, 0), draw(1, 2, 0));
        let drawn: std::collections::BTreeSet<u64> = (0..200).map(|number| draw(1, number, 0)).collect();
        assert_eq!(drawn.len(), 200);
        assert_ne!(draw(1, 2, 0), draw(2, 2, 0));
        assert_ne!(draw(1, 2, 0), draw(1, 2, 1));
    }

    #[test]
    fn crashes_that_are_recorded_are_those_of_the_seed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record");
        assert!(recorded(&path, 3).unwrap().is_empty());
        let line = serde_json::to_string(&crash(7, "oops", Outcome::Refused)).unwrap();
        std::fs::write(&path, format!("{line}\n")).unwrap();
        assert_eq!(recorded(&path, 3).unwrap()[0].number, 7);
        assert!(recorded(&path, 4).unwrap().is_empty());
        std::fs::write(&path, format!("{line}\nnonsense\n")).unwrap();
        assert!(recorded(&path, 3).unwrap_err().to_string().contains("record:2"));
    }

    #[test]
    fn the_table_has_a_row_for_each_kind_and_one_for_all() {
        let mut second = crash(4, "oops", Outcome::Survived);
        second.first = Some("the backup died".to_owned());
        let crashes = [
            crash(1, "oops", Outcome::Survived),
            second,
            crash(2, "oops", Outcome::Refused),
            crash(3, "hang", Outcome::Wrong),
        ];
        let rows: Vec<Vec<String>> = table(&crashes)
            .lines()
            .skip(1)
            .map(|row| row.split_whitespace().map(str::to_owned).collect())
            .collect();
        let wanted =
            [["hang", "0", "0", "0", "1"], ["oops", "2", "1", "1", "0"], ["all", "2", "1", "1", "1"]];
        assert_eq!(rows, wanted);
    }

    #[test]
    fn why_a_first_try_failed_is_kept() {
        let mut crash = crash(7, "oops", Outcome::Survived);
        (crash.rebuilt, crash.waited) = (Some(0.5), Some(1.0));
        crash.first = Some("guest1: its kernel has panicked".to_owned());
        let told = crash.describe();
        assert!(told.ends_with("1000 ms; the first try failed: guest1: its kernel has panicked"), "{told}");
        let line = serde_json::to_value(&crash).unwrap();
        assert_eq!((&line["outcome"], &line["first"]), (&"survived".into(), &crash.first.clone().into()));
        // Lines that were written before there was such a field are read.
        let mut old = line;
        old.as_object_mut().unwrap().remove("first");
        assert_eq!(serde_json::from_value::<Crash>(old).unwrap().first, None);
    }
}
