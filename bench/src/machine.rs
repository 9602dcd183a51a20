//! What the harness asks of the machine it runs on.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Binds the calling thread, and what it starts from now on, to one CPU
/// ([sched_setaffinity(2)](https://man7.org/linux/man-pages/man2/sched_setaffinity.2.html)).
pub fn pin(cpu: usize) -> Result<()> {
    pin_thread(None, cpu)
}

/// Does something while the calling thread is bound to one CPU; what it starts meanwhile stays bound.
pub fn while_pinned<T>(cpu: usize, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = sched_getaffinity(None).context("cannot ask for the CPUs of this thread")?;
    pin(cpu)?;
    let done = work();
    sched_setaffinity(None, &before).context("having back the CPUs of this thread")?;
    done
}

/// Binds a process of one thread to one CPU.
pub fn pin_process(pid: u32, cpu: usize) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pin_thread(Some(pid.context("a process without an id")?), cpu)
}

/// Binds the calling thread to all CPUs that this process may use but one; to that, where there is no other.
pub fn avoid(cpu: usize) -> Result<()> {
    let allowed = sched_getaffinity(None).context("cannot ask for the CPUs of this thread")?;
    let mut set = CpuSet::new();
    (0..CpuSet::MAX_CPU)
        .filter(|&other| other != cpu && allowed.is_set(other))
        .for_each(|other| set.set(other));
    if set.count() > 0 {
        sched_setaffinity(None, &set).context("leaving a CPU to the server")?;
    }
    Ok(())
}

fn pin_thread(thread: Option<Pid>, cpu: usize) -> Result<()> {
    ensure!(cpu < CpuSet::MAX_CPU, "cannot pin to CPU {cpu}: CPUs are numbered below {}", CpuSet::MAX_CPU);
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(thread, &set)
        .with_context(|| format!("cannot pin to CPU {cpu}; choose another with --pin, or --pin none"))
}

/// Returns the highest-numbered CPU that this process may run on: the lowest usually serves the most interrupts.
pub fn last_cpu() -> Result<usize> {
    let allowed = sched_getaffinity(None).context("cannot ask for the CPUs of this process")?;
    (0..CpuSet::MAX_CPU).rev().find(|&cpu| allowed.is_set(cpu)).context("this process may run on no CPU")
}

/// Returns the last two CPUs that this process may run on, the last one first.
///
/// # Errors
/// [`Skipped`](crate::contender::Skipped) where there is but one; where the kernel does not report them.
pub fn two_cpus() -> Result<(usize, usize)> {
    let allowed = sched_getaffinity(None).context("cannot ask for the CPUs of this process")?;
    let mut cpus = (0..CpuSet::MAX_CPU).rev().filter(|&cpu| allowed.is_set(cpu));
    match (cpus.next(), cpus.next()) {
        (Some(last), Some(other)) => Ok((last, other)),
        _ => Err(crate::contender::Skipped("this takes two CPUs".to_owned()).into()),
    }
}

/// Returns how many bytes can be allocated without swapping, as `MemAvailable` of /proc/meminfo estimates it
/// ([proc_meminfo(5)](https://man7.org/linux/man-pages/man5/proc_meminfo.5.html)).
pub fn available_memory() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    kibibytes(&text, "MemAvailable:").context("/proc/meminfo has no MemAvailable")
}

/// Returns the value in bytes of the line `name  NUMBER kB` of a file such as /proc/meminfo or /proc/self/smaps.
pub(crate) fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let number: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    number.checked_mul(1024)
}

/// Returns the directory of this program's build profile, `target/release` as a rule: other programs of the workspace
/// are there.
pub fn program_directory() -> Result<PathBuf> {
    let program = env::current_exe().context("cannot find this program's own file")?;
    Ok(program.parent().context("this program's file is in no directory")?.to_owned())
}

/// Returns the file of a benchmark's records: `target/bench/NAME.json`.
pub fn record_file(bench: &str) -> Result<PathBuf> {
    let target =
        program_directory()?.parent().context("this program lies outside of a target directory")?.to_owned();
    Ok(target.join("bench").join(format!("{bench}.json")))
}

/// Returns the root of the source tree that this program was built from.
pub fn source_root() -> &'static Path {
    let bench = Path::new(env!("CARGO_MANIFEST_DIR"));
    bench.parent().unwrap_or(bench)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_proc_files_are_read_in_bytes() {
        let text = "MemTotal:       100 kB\nMemAvailable:    64 kB\nHugePages_Total:   3\n";
        assert_eq!(kibibytes(text, "MemAvailable:"), Some(65536));
        assert_eq!(kibibytes(text, "HugePages_Total:"), None);
        assert_eq!(kibibytes(text, "Absent:"), None);
    }

    #[test]
    fn pinning_where_one_may_not_run_is_an_error() {
        let message = format!("{:#}", pin(usize::MAX).unwrap_err());
        assert!(message.contains("numbered below"), "{message}");
        assert!(available_memory().unwrap() > 0);
        last_cpu().unwrap();
    }

    #[test]
    fn the_source_root_holds_the_workspace() {
        assert!(source_root().join("SPECIFICATION.md").is_file());
    }
}
