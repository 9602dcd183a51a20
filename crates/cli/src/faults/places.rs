//! Places that make system calls, found by running the program undisturbed.

use std::collections::HashSet;
use std::fs;

use anyhow::Context;
use orrery_hijack::decode::Form;
use orrery_hijack::{CodeLocations, Event, Policy};

use super::trial::{Outcome, Trials};

/// A call, and from where it is made.
#[derive(Debug, Clone)]
pub(super) struct CallSite {
    pub(super) number: u32,
    pub(super) call: String,
    pub(super) site: u64,
    /// The first call from there, in words.
    pub(super) example: String,
    /// Files, offsets and functions: the call instruction, then return addresses, nearest first.
    pub(super) frames: Vec<String>,
}

impl CallSite {
    /// Returns whether the dynamic loader of glibc makes the call; musl's is its C library, too.
    pub(super) fn is_loaders(&self) -> bool {
        let first = self.frames.first().map_or("", String::as_str);
        first.starts_with("ld-linux") || first.starts_with("ld-2.")
    }
}

/// Runs the program once: how it ends, and the places, in the order in which they first call.
pub(super) fn explore(trials: &Trials<'_>, calls: Vec<u32>) -> anyhow::Result<(Outcome, Vec<CallSite>)> {
    let policy = Policy::telling(calls, true).then(stay()?);
    let mut seen = HashSet::new();
    let mut places = Vec::new();
    let mut events = None;
    let mut locations = CodeLocations::default();
    let (outcome, _) = trials.run(policy, |hijack| {
        for event in events.get_or_insert_with(|| hijack.events()).by_ref() {
            if event.site() != 0 && seen.insert((event.number(), event.site())) {
                places.push(place(&event, &mut locations));
            }
        }
    })?;
    Ok((outcome, places))
}

/// Returns what ends stays for a moment: until then it can be asked what is where.
pub(crate) fn stay() -> anyhow::Result<Policy> {
    const STAY: &str = "[[rule]]\ncall = ['exit_group', 'execve']\ndelay = '20ms'\n";
    Policy::parse(STAY, "built in").context("the policy for what ends")
}

/// Returns what is where in the process of a thread; empty where it has ended.
pub(crate) fn maps(thread: u32) -> Vec<u8> {
    fs::read(format!("/proc/{thread}/maps")).unwrap_or_default()
}

fn place(event: &Event, locations: &mut CodeLocations) -> CallSite {
    let maps = maps(event.thread());
    let arguments: Vec<String> =
        event.describe(Form::default()).into_iter().map(|argument| argument.text).collect();
    let call = event.name();
    CallSite {
        number: event.number(),
        site: event.site(),
        example: format!("{call}({})", arguments.join(", ")),
        call,
        frames: event
            .callers()
            .into_iter()
            .filter(|caller| *caller != 0)
            .map(|at| locations.describe(&maps, at))
            .collect(),
    }
}

/// Returns the nearest frame outside of the C library and the loader: where the program itself asked for the call.
pub(super) fn own_frame(frames: &[String]) -> &str {
    let library = |frame: &&String| {
        !["libc.so", "libc-", "ld-linux", "libpthread"].iter().any(|name| frame.starts_with(name))
    };
    frames.iter().find(library).or(frames.last()).map_or("", String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_own_frame_is_preferred() {
        let frames = ["libc.so.6+0x1", "libc.so.6+0x2", "x+0x3"].map(str::to_owned);
        assert_eq!(own_frame(&frames), "x+0x3");
        assert_eq!(own_frame(&frames[..2]), "libc.so.6+0x2");
        assert_eq!(own_frame(&[]), "");
    }

    #[test]
    fn all_usual_calls_exist() {
        for name in super::super::USUAL {
            assert!(orrery_hijack::calls::named(name).is_some(), "{name}");
        }
    }
}
