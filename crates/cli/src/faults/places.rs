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

/// How long what ends stays when places are looked for: on a busy machine, where the first is too short to ask what is where in it, the program
/// runs once more.
const STAYS: [&str; 2] = ["20ms", "400ms"];

/// Runs the program: how it ends, and the places, in the order in which they first call.
pub(super) fn explore(trials: &Trials<'_>, calls: &[u32]) -> anyhow::Result<(Outcome, Vec<CallSite>)> {
    let (outcome, places, all_known) = explore_once(trials, calls, STAYS[0])?;
    if !all_known {
        // What waits for so long may count as hanging; it did not before.
        let (again, found, _) = explore_once(trials, calls, STAYS[1])?;
        if again == outcome {
            return Ok((again, found));
        }
    }
    Ok((outcome, places))
}

/// Runs the program once: how it ends, the places, and whether of each was known what is where.
fn explore_once(
    trials: &Trials<'_>,
    calls: &[u32],
    stay: &str,
) -> anyhow::Result<(Outcome, Vec<CallSite>, bool)> {
    let policy = Policy::telling(calls.to_vec(), true).then(staying(stay)?);
    let mut all_known = true;
    let mut seen = HashSet::new();
    let mut places = Vec::new();
    let mut events = None;
    let mut locations = CodeLocations::default();
    let (outcome, _) = trials.run(policy, |hijack| {
        for event in events.get_or_insert_with(|| hijack.events()).by_ref() {
            if event.site() != 0 && seen.insert((event.number(), event.site())) {
                let maps = maps(event.thread());
                all_known &= !maps.is_empty();
                places.push(place(&event, &maps, &mut locations));
            }
        }
    })?;
    Ok((outcome, places, all_known))
}

/// Has what ends stay for a moment: until then it can be asked what is where.
pub(crate) fn stay() -> anyhow::Result<Policy> {
    staying(STAYS[0])
}

fn staying(time: &str) -> anyhow::Result<Policy> {
    let rules = format!("[[rule]]\ncall = ['exit_group', 'execve']\ndelay = '{time}'\n");
    Policy::parse(&rules, "built in").context("the policy for what ends")
}

/// Returns what is where in the process of a thread; empty where it has ended.
pub(crate) fn maps(thread: u32) -> Vec<u8> {
    fs::read(format!("/proc/{thread}/maps")).unwrap_or_default()
}

fn place(event: &Event, maps: &[u8], locations: &mut CodeLocations) -> CallSite {
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
            .map(|at| locations.describe(maps, at))
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
