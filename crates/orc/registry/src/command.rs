//! The command lines of `orrery orc push` and `orrery orc pull`, which `orrery-orc-registry` has, too.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use orrery_policy::values::{duration, size};
use orrery_sys::programs::{execute_helper, without_commands};

use crate::manifest::Platform;
use crate::reference::{Reference, is_repository};

/// The program that speaks with registries.
pub const PROGRAM: &str = "orrery-orc-registry";

/// How a registry is spoken with.
#[derive(Args, Clone, Debug)]
pub struct Connection {
    /// Speak HTTP without TLS; passwords are sent to this machine only
    #[arg(long)]
    pub plain_http: bool,
    /// File with the passwords of registries [default: $REGISTRY_AUTH_FILE, else those of Podman and of Docker]
    #[arg(long, value_name = "FILE")]
    pub auth_file: Option<PathBuf>,
    /// Number of requests that are made at a time
    #[arg(long, short, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub jobs: u8,
    /// Time for which the registry may send nothing; blobs have twice as much, and more where they are larger (64 KiB a second)
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = timeout)]
    pub timeout: Duration,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Push a tree of files to an OCI registry: each content that the registry does not have, once
///
/// TREE is any directory, such as one of `orrery orc rootfs` or `orrery orc pull`. Every file that can be read is pushed. Nothing is sent
/// if the registry has the same tree under the tag.
#[derive(Args, Clone, Debug)]
pub struct Push {
    /// The tree
    #[arg(value_name = "TREE")]
    pub tree: PathBuf,
    /// Where it is pushed to: a host, a repository, and a tag or digest.
    #[arg(
        help = "Where it is pushed to: HOST[:PORT]/REPOSITORY[:TAG], with the tag latest if none is named",
        value_name = "REFERENCE"
    )]
    pub reference: Reference,
    /// Have the registry take contents from this repository of its own, where it has them there
    #[arg(long, value_name = "REPOSITORY", value_parser = repository)]
    pub mount_from: Option<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub connection: Connection,
}

/// Pull a tree of files, or an image, from an OCI registry: contents that are not in the store yet
///
/// The tree is made as `orrery orc rootfs` makes it, and removed with `orrery orc rootfs --remove`. Of an ordinary image the layers are
/// fetched, and the tree is its root file system. It is there whole or not at all; what was fetched stays, and is not fetched again.
#[derive(Args, Clone, Debug)]
pub struct Pull {
    /// What is pulled: a host, a repository, and a tag or digest.
    #[arg(
        help = "What is pulled: HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST], with the tag latest if none is named",
        value_name = "REFERENCE"
    )]
    pub reference: Reference,
    /// The tree that is made
    #[arg(value_name = "TREE")]
    pub tree: PathBuf,
    /// The directory of the contents, on ext4, XFS, Btrfs or tmpfs [default: /var/lib/orrery/content]
    #[arg(long, value_name = "DIR", default_value = "/var/lib/orrery/content", hide_default_value = true)]
    pub content: PathBuf,
    /// Let programs write to the tree
    #[arg(long, conflicts_with = "links")]
    pub writable: bool,
    /// Make hard links to immutable files, which need no mount
    #[arg(long)]
    pub links: bool,
    /// Let set-user-ID programs, file capabilities and devices of the tree have their effect
    #[arg(long)]
    pub suid: bool,
    /// Size of all files of the tree
    #[arg(long, value_name = "SIZE", default_value = "64G", value_parser = size)]
    pub limit: u64,
    /// The machine that an image is for, such as linux/arm64 [default: this one]
    #[arg(long, value_name = "OS/ARCHITECTURE[/VARIANT]", value_parser = platform)]
    pub platform: Option<Platform>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub connection: Connection,
}

fn timeout(text: &str) -> Result<Duration, String> {
    let time = duration(text)?;
    match (Duration::from_millis(100)..=Duration::from_secs(86400)).contains(&time) {
        true => Ok(time),
        false => Err(format!("{text:?} is not between 100ms and 24h")),
    }
}

fn repository(text: &str) -> Result<String, String> {
    match is_repository(text) {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "{text:?} is no repository: it has lower-case letters, digits, dots, dashes and slashes"
        )),
    }
}

fn platform(text: &str) -> Result<Platform, String> {
    let mut parts = text.split('/').map(str::to_owned);
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(os), Some(architecture), variant, None) if !os.is_empty() && !architecture.is_empty() => {
            Ok(Platform { os, architecture, variant })
        }
        _ => Err(format!("{text:?} is not OS/ARCHITECTURE or OS/ARCHITECTURE/VARIANT")),
    }
}

/// Executes `orrery-orc-registry` with the words of the command line `orrery ... orc ... push ...` in place of this process; returns only
/// where that fails.
///
/// # Errors
/// Where it is not found or cannot be executed.
pub fn execute(words: impl IntoIterator<Item = OsString>) -> Result<()> {
    let words = without_commands(words, &["orc"]);
    Err(execute_helper(PROGRAM, words).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_make_no_sense_are_refused() {
        assert!(timeout("50ms").is_err() && timeout("1s").is_ok());
        assert!(repository("A").is_err() && repository("a/b").is_ok());
        assert!(platform("linux").is_err() && platform("linux/").is_err() && platform("a/b/c/d").is_err());
        assert_eq!(platform("linux/arm/v7").unwrap().variant.as_deref(), Some("v7"));
    }
}
