//! Runs targets in processes of their own, two at a time, and saves the inputs at which these end.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result};
use orrery_fuzz::{TARGETS, Target};

use crate::{Run, work};

/// How many targets run at a time.
const AT_A_TIME: usize = 2;
/// Shorter inputs are printed, since the files of a test run may be lost.
const PRINTED: usize = 4 << 10;

/// Runs the targets that `options` names. Returns whether none has failed.
pub(crate) fn run(options: &Run) -> Result<bool> {
    let targets = if options.targets.is_empty() {
        TARGETS.iter().collect()
    } else {
        options
            .targets
            .iter()
            .map(|name| orrery_fuzz::target(name).with_context(|| format!("no fuzz target is called {name}")))
            .collect::<Result<Vec<&Target>>>()?
    };
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..1 << 32));
    println!("{} targets, {} s of CPU time each, seed {seed}", targets.len(), options.seconds);
    let directory = tempfile::tempdir().context("cannot create a temporary directory")?;
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(Vec::new());
    let errors = std::thread::scope(|scope| {
        let one_after_another = || -> Result<()> {
            while let Some(target) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
                if !run_one(options, target, seed, directory.path())? {
                    failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(target.name);
                }
            }
            Ok(())
        };
        let threads: Vec<_> = (0..AT_A_TIME).map(|_| scope.spawn(one_after_another)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| anyhow::bail!("a thread panicked")))
            .collect::<Vec<_>>()
    });
    errors.into_iter().collect::<Result<Vec<()>>>()?;
    let failed = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    if !failed.is_empty() {
        eprintln!("failed: {}", failed.join(" "));
    }
    Ok(failed.is_empty())
}

fn run_one(options: &Run, target: &Target, seed: u64, directory: &Path) -> Result<bool> {
    let current = directory.join(target.name);
    let status = Command::new(std::env::current_exe().context("cannot find this program")?)
        .arg("work")
        .args(["--seconds", &options.seconds.to_string(), "--seed", &seed.to_string()])
        .arg("--corpus")
        .arg(options.corpora.join(target.name))
        .arg("--current")
        .arg(&current)
        .arg(target.name)
        .status()
        .context("cannot start a process for a target")?;
    if status.success() {
        return Ok(true);
    }
    report(options, target, seed, status, work::current(&current))?;
    Ok(false)
}

fn report(
    options: &Run,
    target: &Target,
    seed: u64,
    status: ExitStatus,
    input: Option<Vec<u8>>,
) -> Result<()> {
    let name = target.name;
    let Some(input) = input else {
        eprintln!("{name}: failed ({status}) before its first input");
        return Ok(());
    };
    let path = save(&options.artifacts.join(name), &input)?;
    eprintln!("{name}: failed ({status}), seed {seed}, at the input {}", path.display());
    if input.len() <= PRINTED {
        eprintln!("    {}", input.escape_ascii());
    }
    eprintln!("run it again: make fuzz T={name} INPUT={}", path.display());
    Ok(())
}

fn save(directory: &Path, input: &[u8]) -> Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    input.hash(&mut hasher);
    let path = directory.join(format!("{:016x}", hasher.finish()));
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    fs::write(&path, input).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}
