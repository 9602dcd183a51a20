//! Heartbeats, as the host sees them: numbers in a page of the machine's memory, one for each processor, that go up while
//! the processors live, and behind them, of a backup, one that goes up while it does something. Reading them takes nothing from
//! the machine.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use orrery_kimage::{Layout, MappedMemory, PhysicalMemory as _};

use crate::error::{Error, Result, file};

/// Processors whose numbers have room on a page, with one more.
const MOST: usize = 511;

/// The heartbeats of a machine.
pub(crate) struct Heartbeats {
    path: PathBuf,
    memory: File,
    offset: u64,
    /// Each processor's number, and when it last changed; then what was done.
    seen: Vec<(u64, Instant)>,
}

impl Heartbeats {
    /// The heartbeats that a machine leaves at a place of its memory, which is a file.
    pub(crate) fn find(machine: &str, memory: &Path, physical: u64, cpus: usize) -> Result<Self> {
        let strange = |why: String| Error::Guest { machine: machine.to_owned(), why };
        if !(1..=MOST).contains(&cpus) {
            return Err(strange(format!("it says that it has {cpus} processors")));
        }
        let mapped = MappedMemory::open(memory, Layout::Q35).map_err(|error| strange(error.to_string()))?;
        let segment =
            mapped.segments().iter().find(|s| (s.physical..s.physical + s.length).contains(&physical));
        let segment = segment.ok_or_else(|| {
            strange(format!("it says that its heartbeats are at {physical:#x}, where no memory is"))
        })?;
        let offset = physical - segment.physical + segment.offset;
        let mut heartbeats = Self {
            path: memory.to_owned(),
            memory: File::open(memory).map_err(file("open", memory))?,
            offset,
            seen: vec![(0, Instant::now()); cpus + 1],
        };
        heartbeats.sample()?;
        Ok(heartbeats)
    }

    /// Reads the numbers.
    fn sample(&mut self) -> Result<()> {
        let mut bytes = vec![0; self.seen.len() * 8];
        self.memory.read_exact_at(&mut bytes, self.offset).map_err(file("read", &self.path))?;
        let now = Instant::now();
        for ((number, at), bytes) in self.seen.iter_mut().zip(bytes.chunks_exact(8)) {
            let read = bytes.try_into().map_or(0, u64::from_le_bytes);
            if *number != read {
                (*number, *at) = (read, now);
            }
        }
        Ok(())
    }

    /// Returns how long the processor that was silent longest has been so, as far as was looked, and which it is.
    ///
    /// # Errors
    ///
    /// Where the memory cannot be read.
    pub(crate) fn silence(&mut self) -> Result<(Duration, usize)> {
        self.sample()?;
        let processors = self.seen.split_last().map_or(&[][..], |(_, processors)| processors);
        let longest = processors.iter().map(|(_, at)| at.elapsed()).zip(0..).max();
        Ok(longest.unwrap_or_default())
    }

    /// Returns how long nothing has been done, as far as was looked, and at most since that was
    /// [begun](Self::reset_stall).
    pub(crate) fn stall(&self) -> Duration {
        self.seen.last().map(|(_, at)| at.elapsed()).unwrap_or_default()
    }

    /// From now on something is to be done.
    pub(crate) fn reset_stall(&mut self) {
        if let Some((_, at)) = self.seen.last_mut() {
            *at = Instant::now();
        }
    }

    /// Forgets how long processors have been silent.
    pub(crate) fn reset(&mut self) {
        for (_, at) in &mut self.seen {
            *at = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_that_is_silent_longest_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let memory = directory.path().join("ram");
        let file = std::fs::File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&memory)
            .unwrap();
        file.set_len(64 << 20).unwrap();
        let place: u64 = 5 * 4096;
        let mut heartbeats = Heartbeats::find("it", &memory, place, 2).unwrap();
        std::thread::sleep(Duration::from_millis(30));
        file.write_all_at(&1_u64.to_le_bytes(), place).unwrap();
        let (silence, cpu) = heartbeats.silence().unwrap();
        assert!(cpu == 1 && silence >= Duration::from_millis(30), "{silence:?} of {cpu}");
        heartbeats.reset();
        std::thread::sleep(Duration::from_millis(5));
        file.write_all_at(&7_u64.to_le_bytes(), place + 8).unwrap();
        assert_eq!(heartbeats.silence().unwrap().1, 0);
        // What is done has nothing to do with that.
        std::thread::sleep(Duration::from_millis(30));
        let idle = heartbeats.stall();
        file.write_all_at(&1_u64.to_le_bytes(), place + 16).unwrap();
        assert_eq!(heartbeats.silence().unwrap().1, 0);
        assert!(idle >= Duration::from_millis(30) && heartbeats.stall() < idle);
        std::thread::sleep(Duration::from_millis(30));
        let idle = heartbeats.stall();
        heartbeats.reset_stall();
        assert!(idle >= Duration::from_millis(30) && heartbeats.stall() < idle);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let memory = directory.path().join("ram");
        std::fs::File::create(&memory).unwrap().set_len(64 << 20).unwrap();
        let refused =
            |physical, cpus| Heartbeats::find("it", &memory, physical, cpus).err().unwrap().to_string();
        assert!(refused(1 << 40, 1).contains("no memory"));
        assert!(refused(0, 0).contains("0 processors"));
        assert!(refused(0, 100_000).contains("processors"));
    }
}
