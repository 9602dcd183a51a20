//! The body of the compiler's program: a module from standard input, a reply to standard output.

use std::io::{self, Read, Write};

use orrery_compiled_handler::{LARGEST_REPLY, LARGEST_TEXT, Reply, encode};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::compile;

/// The most CPU time that the largest module may take, in seconds: it takes less than one.
const CPU_SECONDS: u64 = 60;

/// Reads a module, compiles it, and writes a [`Reply`]; limits this process first.
///
/// # Errors
/// The module could not be read, or the reply not written.
pub fn serve(input: impl Read, mut output: impl Write) -> io::Result<()> {
    limit(Resource::Cpu, CPU_SECONDS)?;
    limit(Resource::Fsize, LARGEST_REPLY as u64)?;
    let mut source = Vec::new();
    input.take(LARGEST_TEXT as u64 + 1).read_to_end(&mut source)?;
    let reply = match compile(&source) {
        Ok(handler) => Reply::Compiled(handler),
        Err(fault) => Reply::Refused(fault.to_string()),
    };
    output.write_all(&encode(&reply).map_err(io::Error::other)?)?;
    output.flush()
}

/// Lowers a limit of this process; one that is lower stays.
fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let now = rustix::process::getrlimit(resource);
    let lower = |limit: Option<u64>| Some(limit.unwrap_or(u64::MAX).min(most));
    Ok(setrlimit(resource, Rlimit { current: lower(now.current), maximum: lower(now.maximum) })?)
}
