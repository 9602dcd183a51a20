//! `examples/locks`: transactions under a lock manager, whose deadlock detector is this or that.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::c_example::build;
use crate::contender::{Contender, Sample};

/// For how long the program works in one round, in milliseconds.
const ROUND: u32 = 400;

/// The lock manager with one kind of detector.
pub struct LockManager {
    program: PathBuf,
    detector: &'static str,
    threads: u32,
    accounts: u32,
    work: u32,
    // Holds the program; removed at the end.
    _directory: TempDir,
}

impl LockManager {
    /// Makes one with a detector as `--detect` names it, and transactions whose four steps compute for `work` microseconds each.
    pub fn new(detector: &'static str, threads: u32, accounts: u32, work: u32) -> Result<Self> {
        let directory = tempfile::tempdir().context("cannot make a directory for a program")?;
        Ok(Self {
            program: build("locks", directory.path())?,
            detector,
            threads,
            accounts,
            work,
            _directory: directory,
        })
    }
}

impl Contender for LockManager {
    /// `commit` counts transactions, `search` the searches for deadlocks and the time that they hold the lock manager up.
    fn measure(&mut self, work: &str, _: u32) -> Result<Sample> {
        let mut command = Command::new(&self.program);
        let options = [
            ("--detect", self.detector.to_owned()),
            ("--threads", self.threads.to_string()),
            ("--accounts", self.accounts.to_string()),
            ("--work", self.work.to_string()),
            ("--milliseconds", ROUND.to_string()),
        ];
        for (name, value) in options {
            command.args([name, &value]);
        }
        let output = command.stdin(Stdio::null()).output().context("cannot start the lock manager")?;
        let text = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "{command:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
        read(&text, work).with_context(|| format!("cannot read {text:?}"))
    }
}

/// Parses what the program reports about `work`.
fn read(output: &str, work: &str) -> Result<Sample> {
    let line = |name: &str| {
        output.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no line {name:?}"))
    };
    let (iterations, elapsed) = match work {
        // "transactions: 22444 in 0.50 s, 44552/s"
        "commit" => {
            let line = line("transactions: ")?;
            let (count, rest) = line.split_once(" in ").context("no count")?;
            let rate =
                rest.split_once("s, ").and_then(|(_, rate)| rate.strip_suffix("/s")).context("no rate")?;
            let (count, rate): (u32, f64) = (count.parse()?, rate.parse()?);
            (count, Duration::from_secs_f64(f64::from(count) / rate.max(1.0)))
        }
        // "searches: 21872 (2.247 us of the lock manager's time each)"
        "search" => {
            let (count, rest) = line("searches: ")?.split_once(" (").context("no count")?;
            let each: f64 = rest.split_once(" us").context("no time")?.0.parse()?;
            let count: u32 = count.parse()?;
            (count, Duration::from_secs_f64(each * f64::from(count) / 1e6))
        }
        other => anyhow::bail!("{other:?} is no work: commit and search are"),
    };
    ensure!(iterations > 0, "nothing was done");
    Ok(Sample { iterations, elapsed, latencies: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_read() {
        let output = "8 threads, detector: async\ntransactions: 2000 in 0.50 s, 4000/s\n\
                    searches: 100 (2.500 us of the lock manager's time each)\n";
        let commits = read(output, "commit").unwrap();
        assert_eq!((commits.iterations, commits.elapsed), (2000, Duration::from_millis(500)));
        let searches = read(output, "search").unwrap();
        assert_eq!((searches.iterations, searches.elapsed), (100, Duration::from_micros(250)));
        assert!(read("transactions: 0 in 0.50 s, 0/s\n", "commit").is_err());
        assert!(read("", "commit").is_err() && read(output, "rest").is_err());
    }
}
