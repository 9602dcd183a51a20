//! Runs one target in this process, within its bounds.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use orrery_fuzz::Target;
use rustix::time::{ClockId, clock_gettime};

use crate::{Work, mutate};

/// The most CPU time that an input may take.
const MOST_TIME: Duration = Duration::from_secs(10);
/// The processor is taken from targets that wait or that a busy machine slows down after so many times their CPU time.
const WALL_TIMES: u32 = 4;

/// The number of inputs that were begun.
static BEGUN: AtomicU64 = AtomicU64::new(0);

/// Runs a target on its corpus, and then on mutations of it until its time is up. Prints how many inputs it tried.
pub(crate) fn work(options: &Work) -> Result<()> {
    let target = find(&options.target)?;
    watch_time()?;
    let current =
        Current(File::create(&options.current).context("cannot create the file of the current input")?);
    let corpus = read_corpus(target, &options.corpus)?;
    for input in &corpus {
        try_one(target, input, Some(&current))?;
    }
    let mut rng = fastrand::Rng::with_seed(options.seed);
    let limit = Duration::from_secs(options.seconds);
    let (began, mut spent) = (Instant::now(), Duration::ZERO);
    while spent < limit && began.elapsed() < limit * WALL_TIMES {
        for _ in 0..16 {
            let input = mutate::mutate(&corpus, target.longest, &mut rng);
            try_one(target, &input, Some(&current))?;
        }
        spent = cpu_time();
    }
    let inputs = BEGUN.load(Ordering::Relaxed);
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let rate = inputs as f64 / spent.as_secs_f64().max(0.001);
    println!("{:24} {inputs:>9} inputs, {rate:>8.0}/s, {} of the corpus", target.name, corpus.len());
    Ok(())
}

/// Runs a target on the inputs of these files.
pub(crate) fn again(name: &str, inputs: &[PathBuf]) -> Result<()> {
    let target = find(name)?;
    watch_time()?;
    for path in inputs {
        let input = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        try_one(target, &input, None)?;
    }
    println!("{name}: {} inputs, none of which failed", inputs.len());
    Ok(())
}

/// Writes the generated inputs of a target into a directory.
pub(crate) fn write_seeds(name: &str, directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    for (number, seed) in (find(name)?.seeds)().into_iter().enumerate() {
        let path = directory.join(format!("seed-{number}"));
        fs::write(&path, seed).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn find(name: &str) -> Result<&'static Target> {
    orrery_fuzz::target(name)
        .with_context(|| format!("no fuzz target is called {name}; see orrery-fuzz list"))
}

fn read_corpus(target: &Target, directory: &Path) -> Result<Vec<Vec<u8>>> {
    let mut paths = match fs::read_dir(directory) {
        // All of it is generated.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !(target.seeds)().is_empty() => {
            Ok(Vec::new())
        }
        entries => entries
            .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()),
    }
    .with_context(|| format!("cannot list {}", directory.display()))?;
    // The order decides what a seed means.
    paths.sort();
    let mut corpus = (target.seeds)();
    for path in paths {
        corpus.push(fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?);
    }
    Ok(corpus)
}

fn try_one(target: &Target, input: &[u8], current: Option<&Current>) -> Result<()> {
    if let Some(current) = current {
        current.set(input)?;
    }
    BEGUN.fetch_add(1, Ordering::Relaxed);
    (target.run)(input);
    Ok(())
}

/// The file that holds the current input behind its length, for whoever finds this process dead.
struct Current(File);

impl Current {
    fn set(&self, input: &[u8]) -> Result<()> {
        let mut bytes = (input.len() as u64).to_le_bytes().to_vec();
        bytes.extend(input);
        self.0.write_all_at(&bytes, 0).context("cannot write the current input")
    }
}

/// Returns the input that a process was at, if there is one.
pub(crate) fn current(file: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(file).ok()?;
    let (length, rest) = bytes.split_first_chunk()?;
    rest.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?).map(<[u8]>::to_vec)
}

/// Ends the process when one input has taken too much CPU time, or waits for something.
fn watch_time() -> Result<()> {
    std::thread::Builder::new()
        .name("watch".to_owned())
        .spawn(|| {
            let mut watched = Watched { input: 0, cpu: cpu_time(), seen: (Instant::now(), cpu_time()) };
            loop {
                std::thread::sleep(Duration::from_millis(500));
                if let Some(why) = watched.look(BEGUN.load(Ordering::Relaxed), Instant::now(), cpu_time()) {
                    eprintln!("input {}: {why}", watched.input);
                    std::process::abort();
                }
            }
        })
        .context("cannot start the thread that watches the time")?;
    Ok(())
}

/// How long an input may use nearly no CPU time: a process that runs among a hundred others gets more.
const MOST_WAIT: Duration = Duration::from_secs(60);
/// What a process that waits may use meanwhile, for watching itself.
const IDLE: Duration = Duration::from_millis(100);

/// What is known of the current input.
struct Watched {
    /// Its number, counted from 1.
    input: u64,
    /// The process' CPU time when it was first seen.
    cpu: Duration,
    /// When the process was last seen to use CPU time, and how much it had used then.
    seen: (Instant, Duration),
}

impl Watched {
    /// Returns why the process is to end.
    fn look(&mut self, input: u64, now: Instant, cpu: Duration) -> Option<&'static str> {
        if input != self.input {
            *self = Self { input, cpu, seen: (now, cpu) };
        }
        if cpu.saturating_sub(self.seen.1) > IDLE {
            self.seen = (now, cpu);
        }
        if input == 0 {
            None
        } else if cpu.saturating_sub(self.cpu) > MOST_TIME {
            Some("it takes more than 10 s of CPU time")
        } else if now.duration_since(self.seen.0) > MOST_WAIT {
            Some("it waits for something")
        } else {
            None
        }
    }
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_that_run_or_wait_too_long_are_found() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let cpu = Duration::from_millis;
        let mut watched = Watched { input: 0, cpu: cpu(0), seen: (start, cpu(0)) };
        assert_eq!(watched.look(0, at(1000), cpu(20_000)), None);
        assert_eq!(watched.look(1, at(1000), cpu(20_000)), None);
        // On a busy machine: a second of CPU time in half a minute.
        assert_eq!(
            (1..10).find_map(|step| watched.look(1, at(1000 + 30 * step), cpu(20_000 + 1000 * step))),
            None
        );
        assert!(watched.look(1, at(1300), cpu(30_001)).is_some_and(|why| why.contains("CPU")));
        assert_eq!(watched.look(2, at(1300), cpu(30_001)), None);
        assert_eq!(watched.look(2, at(1360), cpu(30_050)), None);
        assert!(watched.look(2, at(1361), cpu(30_050)).is_some_and(|why| why.contains("waits")));
    }
}
