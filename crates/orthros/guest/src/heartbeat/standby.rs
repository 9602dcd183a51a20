//! The heartbeats of a backup: one counter for each processor, incremented once a second while the processor runs programs, and
//! behind them one that goes up with the work that the backup does.
//!
//! A process of its own counts them, also during a restore, in which init answers no requests. A restore may take long: if the
//! counter of a processor stops, the kernel hangs; if only the last counter stops, the restore is stuck, as when criu waits for
//! something that never happens.
//!
//! The kernel counts work: first touches of pages, reads from disks and writes to them, and the CPU time of init, which may search
//! the dead memory for long without touching new pages. A program in an endless loop adds nothing to the first two.

use std::fs::{self, File};
use std::io::Read as _;
use std::time::Duration;

use anyhow::{Result, bail};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::{CounterPage, go_to};

const INTERVAL: Duration = Duration::from_secs(1);
/// The counters of `/proc/vmstat` that go up with work.
const WORK: [&str; 3] = ["pgpgin ", "pgpgout ", "pgfault "];
/// Longer than any of the files that are read here.
const LONGEST: usize = 32 << 10;

/// The process that counts the heartbeats of a backup.
pub(crate) struct StandbyHeartbeat {
    process: i32,
    /// The guest-physical address of the counters.
    pub(crate) physical: u64,
    pub(crate) cpus: usize,
}

impl StandbyHeartbeat {
    /// Starts the process, while this one has one thread.
    ///
    /// # Errors
    ///
    /// The page cannot be allocated, its address cannot be read, or the process cannot be forked.
    pub(crate) fn start(processors: &CpuSet) -> Result<Self> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let page = CounterPage::new()?;
        let physical = page.physical()?;
        // SAFETY: this process has one thread, so that the child may do more than async-signal-safe calls.
        match unsafe { libc::fork() } {
            0 => run(&page, cpus, processors),
            process if process > 0 => Ok(Self { process, physical, cpus }),
            _ => bail!("cannot fork: {}", std::io::Error::last_os_error()),
        }
    }

    /// Stops the heartbeats.
    pub(crate) fn stop(self) {
        let mut status = 0;
        // SAFETY: the process is a child that nobody else waits for, so that its PID is not reused; `status` is a live integer.
        unsafe {
            libc::kill(self.process, libc::SIGKILL);
            libc::waitpid(self.process, &raw mut status, 0);
        }
    }
}

/// Counts heartbeats and work until the process is killed.
fn run(page: &CounterPage, cpus: usize, processors: &CpuSet) -> ! {
    // If memory runs out, it is not this one that has taken it.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let mut room = vec![0; LONGEST];
    for cpu in (0..cpus).cycle() {
        if go_to(cpu) {
            page.add_one(cpu);
        }
        // Asleep it is bound to none: one that hangs must not keep it from the next.
        let _ = sched_setaffinity(None, processors);
        page.set(cpus, work(&mut room));
        std::thread::sleep(INTERVAL / u32::try_from(cpus).unwrap_or(1));
    }
    std::process::exit(1)
}

/// Returns how much work was done in this machine. What cannot be read counts as none.
fn work(room: &mut [u8]) -> u64 {
    let counted = read("/proc/vmstat", room).map_or(0, counted);
    counted.wrapping_add(read("/proc/1/stat", room).map_or(0, time))
}

/// Reads a file without allocating memory, which would be work.
fn read<'r>(path: &str, room: &'r mut [u8]) -> Option<&'r str> {
    let mut file = File::open(path).ok()?;
    let mut length = 0;
    while length < room.len() {
        match file.read(&mut room[length..]) {
            Ok(0) => break,
            Ok(more) => length += more,
            Err(_) => return None,
        }
    }
    std::str::from_utf8(&room[..length]).ok()
}

/// Returns the sum of the counters of work.
fn counted(vmstat: &str) -> u64 {
    let number =
        |line: &str| WORK.iter().find_map(|name| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    vmstat.lines().filter_map(number).fold(0, u64::wrapping_add)
}

/// Returns the CPU time of a process, by proc_pid_stat(5).
fn time(stat: &str) -> u64 {
    let Some((_, words)) = stat.rsplit_once(')') else { return 0 };
    words.split_whitespace().skip(11).take(2).filter_map(|word| word.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_counted_and_looking_at_it_is_none() {
        let text = "nr_free_pages 7\npgpgin 100\npgpgout 20\npgpgoutx 9\npgfault 3\npgmajfault 5\n";
        assert_eq!(counted(text), 123);
        assert_eq!(time("1 (a ) b) S 0 1 1 0 -1 4 5 6 7 8 20 3 0 0 20 0"), 23);
        assert_eq!((time("garbage"), counted("pgfault x\n")), (0, 0));
        let mut room = vec![1; LONGEST];
        let own = |room: &mut Vec<u8>| {
            let stat = read("/proc/thread-self/stat", room).unwrap();
            stat.rsplit_once(')').unwrap().1.split_whitespace().nth(7).unwrap().parse::<u64>().unwrap()
        };
        let mut faults = || {
            work(&mut room);
            own(&mut room)
        };
        faults();
        assert_eq!(faults(), faults());
    }
}
