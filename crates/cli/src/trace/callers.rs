//! Where calls were made from, described by what lies where in their processes.
//!
//! What a process has mapped is asked again where that may have changed: after some time, or for an address that was in no file. A
//! process of thousands of mappings (a browser) takes milliseconds to be asked, more than hundreds of its calls.

use std::collections::HashMap;
use std::fs;
use std::time::{Duration, Instant};

use orrery_hijack::{CodeLocations, Event};

use crate::faults::places;

/// How long what a process has mapped is taken for what it has mapped still.
const FRESH: Duration = Duration::from_millis(20);
/// The same for addresses that were in no file then: code that the program makes stays there, libraries come.
const FRESH_ELSEWHERE: Duration = Duration::from_millis(2);

/// Describes callers.
#[derive(Debug, Default)]
pub(super) struct Callers {
    locations: CodeLocations,
    /// The process of each thread.
    processes: HashMap<u32, u32>,
    snapshots: HashMap<u32, Snapshot>,
}

/// What a process had mapped.
#[derive(Debug, Default)]
struct Snapshot {
    maps: Vec<u8>,
    /// When that was asked; `None` where it never was.
    asked: Option<Instant>,
    described: HashMap<u64, String>,
}

impl Callers {
    /// Describes the callers of a call, from the innermost on.
    pub(super) fn describe(&mut self, call: &Event) -> Vec<String> {
        let process = *self.processes.entry(call.thread()).or_insert_with(|| process_of(call.thread()));
        let snapshot = self.snapshots.entry(process).or_default();
        let callers = call.callers().into_iter().filter(|caller| *caller != 0);
        callers.map(|caller| snapshot.describe(&mut self.locations, call.thread(), caller)).collect()
    }

    /// A thread is about to execute another program, or has done so, or has ended.
    pub(super) fn forget(&mut self, thread: u32) {
        if let Some(process) = self.processes.remove(&thread) {
            self.snapshots.remove(&process);
        }
    }
}

impl Snapshot {
    fn describe(&mut self, locations: &mut CodeLocations, thread: u32, address: u64) -> String {
        let age = self.asked.map(|asked| asked.elapsed());
        if age.is_none_or(|age| age > FRESH) {
            self.ask(thread);
        }
        let described = self.look_up(locations, address);
        // As a number: there is no file.
        if !described.starts_with("0x") || age.is_none_or(|age| age < FRESH_ELSEWHERE) {
            return described;
        }
        self.ask(thread);
        self.look_up(locations, address)
    }

    fn look_up(&mut self, locations: &mut CodeLocations, address: u64) -> String {
        let maps = &self.maps;
        self.described.entry(address).or_insert_with(|| locations.describe(maps, address)).clone()
    }

    /// Where the process has ended, what is known stays.
    fn ask(&mut self, thread: u32) {
        let now = places::maps(thread);
        if !now.is_empty() && now != self.maps {
            self.maps = now;
            self.described.clear();
        }
        self.asked = Some(Instant::now());
    }
}

/// The process that a thread belongs to; itself where it has ended.
fn process_of(thread: u32) -> u32 {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    line.and_then(|line| line.trim().parse().ok()).unwrap_or(thread)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_asked_for_again_where_an_address_was_in_no_file() {
        let thread = std::process::id();
        let own = mappings_are_asked_for_again_where_an_address_was_in_no_file as fn() as usize as u64 + 1;
        let mut locations = CodeLocations::default();
        let mut snapshot =
            Snapshot { maps: b"1000-2000 r-xp 00000000 fe:00 1 /n/x\n".to_vec(), ..Snapshot::default() };
        snapshot.asked = Some(Instant::now());
        assert_eq!(snapshot.look_up(&mut locations, 0x1010), "x+0x10");
        assert!(snapshot.look_up(&mut locations, own).starts_with("0x"));
        std::thread::sleep(2 * FRESH_ELSEWHERE);
        let found = snapshot.describe(&mut locations, thread, own);
        assert!(found.contains("mappings_are_asked_for"), "{found}");
        // What was described by other mappings is forgotten.
        assert_eq!(snapshot.look_up(&mut locations, 0x1010), "0x1010");
    }

    #[test]
    fn threads_belong_to_processes() {
        let own = std::process::id();
        let thread = std::thread::spawn(|| {
            process_of(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned())
        });
        assert_eq!((process_of(own), thread.join().unwrap()), (own, own));
        assert_eq!(process_of(0), 0);
    }
}
