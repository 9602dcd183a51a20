//! A page of statistics about a domain, for every process that may inspect the program.
//!
//! The page is a memfd whose name begins with [`NAME`], so `/proc/PID/fd` leads to it: no socket, no file, no thread of
//! the program is involved in reading it. Only main writes it, number by number; a reader may see one of them newer than
//! another.

use core::sync::atomic::{AtomicU64, Ordering};
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::Result;
use crate::shared::SharedMemory;

/// How the name of the memfd begins; the domain's name follows.
pub const NAME: &str = "orrery-domain:";
/// "orrerydm" and the layout's version.
const MAGIC: u64 = 0x6d64_7972_6572_726f;
const VERSION: u64 = 1;
const WORDS: usize = 64;
/// The last fault: its length in bytes, then text.
const FAULT: usize = 24;
const FAULT_BYTES: usize = (WORDS - FAULT - 1) * 8;

/// Whether a domain is alive, as main last noted it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DomainState {
    /// It waits for calls or runs one.
    Up = 1,
    /// It died, and waits to be restarted.
    Restarting = 3,
    /// It is dead, and is not restarted.
    Dead = 4,
}

macro_rules! statistics {
    ($($(#[$doc:meta])* $name:ident = $index:literal),* $(,)?) => {
        /// A copy of the numbers.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Statistics {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Statistics {
            fn of_words(words: &[u64; WORDS]) -> Self {
                Self { $($name: words[$index],)* }
            }
        }

        impl StatisticsPage {
            $($(#[$doc])* pub fn $name(&self) -> &AtomicU64 { self.word($index) })*
        }
    };
}

statistics! {
    /// The program's process id.
    main = 2,
    /// The domain's process id.
    domain = 3,
    /// The domain's [`DomainState`] as a number: see [`Statistics::domain_state`].
    state = 4,
    /// Calls made.
    calls = 5,
    /// Calls that returned.
    returned = 6,
    /// Calls that failed: crashed, timed out, cancelled.
    failed = 7,
    /// How many calls may be under way.
    bound = 9,
    /// Restarts.
    restarts = 10,
    /// Pages that snapshots carried, in all.
    snapshot_pages = 11,
    /// Time that snapshots took of main, in all, in nanoseconds.
    snapshot_nanoseconds = 12,
    /// Pages that the last snapshot carried.
    last_pages = 13,
    /// Time that the last snapshot took, in nanoseconds.
    last_nanoseconds = 14,
    /// The memory limit in bytes; 0 for none.
    memory_limit = 15,
    /// The processor share in percent; 0 for no limit.
    cpu_limit = 16,
    /// The limit of processes; 0 for none.
    process_limit = 17,
    /// When it was created, in nanoseconds of CLOCK_MONOTONIC.
    created = 18,
    /// Updates received.
    updates = 19,
    /// Calls that were not made, because the queue was full.
    dropped = 20,
}

impl Statistics {
    /// Returns the state of the domain; `None` for a number that this version does not know.
    pub fn domain_state(&self) -> Option<DomainState> {
        [DomainState::Up, DomainState::Restarting, DomainState::Dead]
            .into_iter()
            .find(|state| *state as u64 == self.state)
    }

    /// Returns the number of calls that wait or run, as far as main has looked.
    pub fn queued(&self) -> u64 {
        self.calls.saturating_sub(self.returned.saturating_add(self.failed))
    }
}

/// The page, as main has it.
#[derive(Debug)]
pub struct StatisticsPage {
    memory: SharedMemory,
}

impl StatisticsPage {
    /// Creates a page for domain `name`.
    ///
    /// # Errors
    /// [`crate::Error::System`].
    pub fn new(name: &str) -> Result<Self> {
        // The kernel takes up to 249 bytes and no zero.
        let name: String = name.chars().filter(|c| !c.is_control()).take(50).collect();
        let page = Self { memory: SharedMemory::to_be_found(&format!("{NAME}{name}"), WORDS * 8)? };
        page.word(1).store(VERSION, Ordering::Relaxed);
        page.main().store(u64::from(std::process::id()), Ordering::Relaxed);
        page.word(0).store(MAGIC, Ordering::Release);
        Ok(page)
    }

    /// Notes the state of the domain.
    pub fn set_state(&self, state: DomainState) {
        self.state().store(state as u64, Ordering::Relaxed);
    }

    /// Notes what the domain died of last, shortened to 312 bytes.
    pub fn set_last_fault(&self, text: &str) {
        let bytes = &text.as_bytes()[..text.floor_char_boundary(FAULT_BYTES)];
        // Zero while it is written, so that nobody takes half of one text and half of another for a whole.
        self.word(FAULT).store(0, Ordering::SeqCst);
        for (index, chunk) in bytes.chunks(8).enumerate() {
            let mut eight = [0; 8];
            eight[..chunk.len()].copy_from_slice(chunk);
            self.word(FAULT + 1 + index).store(u64::from_ne_bytes(eight), Ordering::Relaxed);
        }
        self.word(FAULT).store(bytes.len() as u64, Ordering::SeqCst);
    }

    /// Returns a copy of the numbers.
    pub fn read(&self) -> Statistics {
        Statistics::of_words(&core::array::from_fn(|index| self.word(index).load(Ordering::Relaxed)))
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < WORDS);
        // SAFETY: the page is mapped for as long as `self` and holds `WORDS` aligned words, used as atomics only.
        unsafe { self.memory.start().cast::<AtomicU64>().add(index).as_ref() }
    }
}

/// A page found in a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The domain's name.
    pub name: String,
    /// The numbers of the domain.
    pub statistics: Statistics,
    /// What it died of last.
    pub last_fault: Option<String>,
}

/// Returns the domains that process `pid` created, found through its descriptors.
///
/// # Errors
/// The process is gone, or may not be looked into.
pub fn of_process(pid: u32) -> io::Result<Vec<Found>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor may be closed while we look.
        let Ok(entry) = entry else { continue };
        if let Some(one) = read(&entry.path())
            // A domain has its program's descriptors too.
            && one.statistics.main == u64::from(pid)
        {
            found.push(one);
        }
    }
    found.sort_by(|a, b| (a.statistics.created, &a.name).cmp(&(b.statistics.created, &b.name)));
    Ok(found)
}

fn read(link: &Path) -> Option<Found> {
    let target = fs::read_link(link).ok()?;
    let name = target.to_str()?.strip_prefix("/memfd:")?.strip_prefix(NAME)?;
    let name = name.strip_suffix(" (deleted)").unwrap_or(name).to_owned();
    let mut bytes = [0; WORDS * 8];
    fs::File::open(link).ok()?.read_exact_at(&mut bytes, 0).ok()?;
    let mut words = [0; WORDS];
    for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(chunk.try_into().ok()?);
    }
    (words[0] == MAGIC && words[1] == VERSION).then(|| Found {
        name,
        statistics: Statistics::of_words(&words),
        last_fault: fault(&words),
    })
}

fn fault(words: &[u64; WORDS]) -> Option<String> {
    let length = usize::try_from(words[FAULT]).ok().filter(|length| (1..=FAULT_BYTES).contains(length))?;
    let bytes: Vec<u8> = words[FAULT + 1..].iter().flat_map(|word| word.to_ne_bytes()).take(length).collect();
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_found_and_read() {
        let page = StatisticsPage::new("a checker").unwrap();
        page.calls().store(42, Ordering::Relaxed);
        assert_eq!(page.read().domain_state(), None);
        page.set_state(DomainState::Restarting);
        let found = of_process(std::process::id()).unwrap();
        let one = found.iter().find(|found| found.name == "a checker").unwrap();
        assert_eq!(one.statistics.domain_state(), Some(DomainState::Restarting));
        assert_eq!((one.statistics.calls, one.statistics.main), (42, std::process::id().into()));
        assert_eq!(one.last_fault, None);
        page.set_last_fault(&"\u{e4}".repeat(400));
        let found = of_process(std::process::id()).unwrap();
        let one = found.iter().find(|found| found.name == "a checker").unwrap();
        assert_eq!(one.last_fault, Some("\u{e4}".repeat(156)));
        assert!(of_process(u32::MAX).is_err());
    }
}
