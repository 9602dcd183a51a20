//! Ready policies for well-known programs.

use anyhow::{Context as _, Result};
use orrery_monitor::Policy;

/// A policy, and the name by which it is chosen.
struct Profile {
    name: &'static str,
    text: &'static str,
}

const PROFILES: &[Profile] = &[
    Profile { name: "python", text: include_str!("profiles/python.toml") },
    Profile { name: "node", text: include_str!("profiles/node.toml") },
    Profile { name: "git", text: include_str!("profiles/git.toml") },
    Profile { name: "curl", text: include_str!("profiles/curl.toml") },
    Profile { name: "ffmpeg", text: include_str!("profiles/ffmpeg.toml") },
    Profile { name: "compiler", text: include_str!("profiles/compiler.toml") },
];

/// Returns the names of all profiles.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    PROFILES.iter().map(|profile| profile.name)
}

/// Returns the policy of a profile, as its file has it.
///
/// # Errors
/// A name that no profile has.
pub(super) fn text(name: &str) -> Result<&'static str> {
    let profile = PROFILES.iter().find(|profile| profile.name == name);
    profile.map(|profile| profile.text).with_context(|| format!("cannot find the profile {name}"))
}

/// Returns the policy of a profile.
///
/// # Errors
/// A name that no profile has; a variable that the profile names and that is not set, as `HOME`.
pub(super) fn policy(name: &str) -> Result<Policy> {
    Policy::parse(text(name)?).with_context(|| format!("cannot use the profile {name}"))
}
