//! The command line of `orrery warm http`, which `orrery-warm-http` has, too.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{ArgGroup, Args};
use orrery_policy::values::{duration, size};
use orrery_sys::programs::{execute_helper, without_commands};

use crate::report::PATH;

/// The program that serves.
pub const PROGRAM: &str = "orrery-warm-http";

/// How and what to serve.
#[derive(Args, Clone, Debug)]
#[command(group(ArgGroup::new("scripts").required(true).args(["script", "directory"])))]
pub struct Arguments {
    /// Address to listen on [default: 127.0.0.1:8000]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Unix socket of the warm server [default: $ORRERY_WARM, else $XDG_RUNTIME_DIR/orrery-warm.socket]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Run this script for every request
    #[arg(long, value_name = "FILE")]
    pub script: Option<PathBuf>,
    /// Run the script below this directory that the path of a request names; scripts' names end in .py
    #[arg(long, value_name = "DIRECTORY")]
    pub directory: Option<PathBuf>,
    /// Path of the requests that ask for the state of this server and of the warm server
    #[arg(long, value_name = "PATH", default_value = PATH, value_parser = absolute_path)]
    pub health: String,
    /// Give scripts a variable, with this value or with the one that this server has; may be given several times
    #[arg(long, value_name = "NAME[=VALUE]", value_parser = variable)]
    pub env: Vec<OsString>,
    /// Give scripts the header Authorization of requests, as HTTP_AUTHORIZATION
    #[arg(long)]
    pub authorization: bool,
    /// Number of requests that are served at a time; further ones are answered with status 503
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub requests: u32,
    /// Number of connections that are open at a time; further ones wait
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub connections: u32,
    /// Size of a request's head
    #[arg(long, value_name = "SIZE", default_value = "32K", value_parser = head_size)]
    pub head: usize,
    /// Size of a request's body
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = size)]
    pub body: u64,
    /// Size of the header of a script's answer
    #[arg(long, value_name = "SIZE", default_value = "64K", value_parser = head_size)]
    pub answer_head: usize,
    /// Time in which the head of a request has to arrive, also after the one before it on the same connection
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub head_time: Duration,
    /// Time in which the body of a request has to arrive
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub body_time: Duration,
    /// Time for which a client may take nothing of its answer
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub send_time: Duration,
    /// Time in which the warm server has to reply when it is asked for its health; then requests are given up with status 504
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub reply_time: Duration,
    /// Time for which a server that is to end serves on, while it says that it drains
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    pub drain: Duration,
    /// Time that requests then have to end
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub finish: Duration,
}

fn absolute_path(text: &str) -> Result<String, String> {
    if text.starts_with('/')
        && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'?' && byte != b'#')
    {
        Ok(text.to_owned())
    } else {
        Err(format!("{text:?} is no path of a request: it begins with / and has no spaces, ? or #"))
    }
}

fn variable(text: &str) -> Result<OsString, String> {
    let name = text.split_once('=').map_or(text, |(name, _)| name);
    if name.is_empty() { Err(format!("{text:?} has no name before =")) } else { Ok(text.into()) }
}

/// The HTTP library takes no less than 8 KiB for a head, and heads are held in memory.
fn head_size(text: &str) -> Result<usize, String> {
    let bytes = usize::try_from(size(text)?).unwrap_or(usize::MAX);
    if (8 << 10..=1 << 20).contains(&bytes) {
        Ok(bytes)
    } else {
        Err(format!("{text:?} is not between 8K and 1M"))
    }
}

/// Executes `orrery-warm-http` with the words of the command line `orrery ... warm ... http ...` in place of this process; returns
/// only where that fails.
///
/// # Errors
/// Where it is not found or cannot be executed.
pub fn execute(words: impl IntoIterator<Item = OsString>) -> Result<()> {
    let words = without_commands(words, &["warm", "http"]);
    Err(execute_helper(PROGRAM, words).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_make_no_sense_are_refused() {
        assert!(absolute_path("/-/health").is_ok());
        for path in ["health", "", "/a b", "/a?b", "/a#b"] {
            assert!(absolute_path(path).is_err(), "{path}");
        }
        assert_eq!(head_size("8K"), Ok(8192));
        assert!(head_size("8191").is_err() && head_size("2M").is_err());
        assert!(variable("=x").is_err() && variable("A=x").is_ok() && variable("A").is_ok());
    }
}
