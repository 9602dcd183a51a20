//! A backup's signs of life, which the host reads where this machine's memory lies: one number for each processor, that goes up
//! once a second while the processor runs programs, and behind them one that goes up with what the backup has done.
//!
//! They come from a process of their own, so that they come in the middle of a rescue, too, in which the first process hears
//! nobody. A rescue takes as long as it takes: where a second number stands still the kernel hangs, and where only the last one
//! does, the rescue is stuck, as when criu waits for something that never comes.
//!
//! What has been done is counted by the kernel: pages that programs have touched for the first time, what was read from disks
//! and written to them, and the first process' time on processors, as it may look through the dead memory for long and
//! touch nothing new. A program that only turns in circles adds nothing to the first two.

use std::fs::{self, File};
use std::io::Read as _;
use std::time::Duration;

use anyhow::{Result, bail};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::beats::{self, Page};

const BEAT: Duration = Duration::from_secs(1);
/// What of `/proc/vmstat` goes up by work.
const WORK: [&str; 3] = ["pgpgin ", "pgpgout ", "pgfault "];
/// Longer than any of the files that are read here.
const LONGEST: usize = 32 << 10;

/// The process that shows that this machine lives.
pub(crate) struct Standby {
    process: i32,
    /// Where in this machine's memory the numbers lie.
    pub(crate) physical: u64,
    pub(crate) cpus: usize,
}

impl Standby {
    /// Begins, while this process has one thread.
    ///
    /// # Errors
    ///
    /// Where the page cannot be had or found, or there can be no process.
    pub(crate) fn begin(processors: &CpuSet) -> Result<Self> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let page = Page::new()?;
        let physical = page.physical()?;
        // SAFETY: this process has one thread, so that the child may go on as it likes; the page is shared with it.
        match unsafe { libc::fork() } {
            0 => live(&page, cpus, processors),
            process if process > 0 => Ok(Self { process, physical, cpus }),
            _ => bail!("cannot fork: {}", std::io::Error::last_os_error()),
        }
    }

    /// Ends it.
    pub(crate) fn end(self) {
        let mut status = 0;
        // SAFETY: the process is a child of this one, and nobody else waits for it; `status` is writable.
        unsafe {
            libc::kill(self.process, libc::SIGKILL);
            libc::waitpid(self.process, &raw mut status, 0);
        }
    }
}

/// The life of that process.
fn live(page: &Page, cpus: usize, processors: &CpuSet) -> ! {
    // If memory runs out, it is not this one that has taken it.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let mut room = vec![0; LONGEST];
    for cpu in (0..cpus).cycle() {
        if beats::go_to(cpu) {
            page.add_one(cpu);
        }
        // Asleep it is bound to none: one that hangs must not keep it from the next.
        let _ = sched_setaffinity(None, processors);
        page.set(cpus, work(&mut room));
        std::thread::sleep(BEAT / u32::try_from(cpus).unwrap_or(1));
    }
    std::process::exit(1)
}

/// What has been done in this machine. What cannot be read counts for nothing.
fn work(room: &mut [u8]) -> u64 {
    let counted = read("/proc/vmstat", room).map_or(0, counted);
    counted.wrapping_add(read("/proc/1/stat", room).map_or(0, time))
}

/// A file, without any memory being taken for it, which would be work.
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

/// The sum of what goes up by work.
fn counted(vmstat: &str) -> u64 {
    let number =
        |line: &str| WORK.iter().find_map(|name| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    vmstat.lines().filter_map(number).fold(0, u64::wrapping_add)
}

/// A process' time on processors, by proc_pid_stat(5).
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
