//! A program that sets what it can of its sockets, files, memory and itself, and lists everything that the kernel says about these: once, and
//! again when it finds itself under another kernel. What differs is its verdict.

mod files;
mod listing;
mod process;
mod sockets;

use std::fs;
use std::time::Duration;

use anyhow::Result;
use listing::Listing;

const BOOT: &str = "/proc/sys/kernel/random/boot_id";

struct Held {
    sockets: sockets::Sockets,
    files: files::Files,
    process: process::Process,
}

impl Held {
    fn take() -> Result<Self> {
        Ok(Self {
            sockets: sockets::Sockets::take()?,
            files: files::Files::take()?,
            process: process::Process::take()?,
        })
    }

    fn list(&self) -> Result<Listing> {
        let mut listing = Listing::new();
        self.sockets.list(&mut listing)?;
        self.files.list(&mut listing)?;
        self.process.list(&mut listing)?;
        Ok(listing)
    }
}

/// Holds everything for ever, and leaves as a verdict what has changed with each change of kernels.
pub(crate) fn run() -> Result<()> {
    let held = Held::take()?;
    let before = held.list()?;
    let mut boot = fs::read_to_string(BOOT)?;
    fs::write("/run/holding", format!("{}\n", before.len()))?;
    loop {
        std::thread::sleep(Duration::from_millis(20));
        let now = fs::read_to_string(BOOT)?;
        if now != boot {
            boot = now;
            crate::verdict::leave(&difference(&before, &held.list()?))?;
        }
    }
}

/// Returns what differs, a line each.
fn difference(before: &Listing, after: &Listing) -> String {
    let mut lines = String::new();
    let none = String::from("nothing");
    let keys: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
    for key in keys {
        let (old, new) = (before.get(key).unwrap_or(&none), after.get(key).unwrap_or(&none));
        if old != new {
            lines.push_str(&format!("{key}: {old} -> {new}\n"));
        }
    }
    if lines.is_empty() { "nothing differs\n".to_owned() } else { lines }
}
