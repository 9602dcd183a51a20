//! `orrery faults`: a program once for each place that makes a system call, with that call failing.

pub(crate) mod places;
mod report;
mod trial;

use std::ffi::OsString;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use orrery_hijack::calls;
use orrery_hijack::decode::error_number;

use places::CallSite;
use trial::{Fault, Outcome, Trials};

/// Calls that fail in practice.
const USUAL: [&str; 46] = [
    "open",
    "openat",
    "creat",
    "read",
    "pread64",
    "readv",
    "write",
    "pwrite64",
    "writev",
    "close",
    "fsync",
    "fdatasync",
    "ftruncate",
    "fallocate",
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "symlink",
    "symlinkat",
    "unlink",
    "unlinkat",
    "mkdir",
    "mkdirat",
    "getdents64",
    "mmap",
    "brk",
    "fork",
    "vfork",
    "clone",
    "clone3",
    "execve",
    "pipe",
    "pipe2",
    "dup",
    "dup2",
    "socket",
    "connect",
    "bind",
    "listen",
    "accept4",
    "sendto",
    "recvfrom",
    "sendmsg",
    "recvmsg",
];

/// Run a program again and again, each time with another system call failing, and tell how it takes that
///
/// First the program runs undisturbed, to find the places that make system calls: the call, and the nearest return addresses.
/// Then it runs once for each, and the first call from there fails. A program may report the error or do without; that it
/// crashes, hangs or leaves a state that --check rejects is told, and is this command's exit status.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Only these calls: names, or %file, %descriptor, %network, as for `orrery trace` [default: those that fail in practice]
    #[arg(short = 'e', long, value_name = "CALLS")]
    call: Vec<String>,

    /// The error to return [default: one that fits the call]
    #[arg(long, value_name = "NAME")]
    errno: Option<String>,

    /// Instead of failing, have reads and writes transfer so many bytes at most: a disk that is nearly full, a slow pipe
    #[arg(long, value_name = "BYTES", conflicts_with = "errno")]
    short: Option<u32>,

    /// Have all calls from a place fail, not only the first
    #[arg(long)]
    always: bool,

    /// A shell command that runs before each run, to prepare the state that it works on
    #[arg(long, value_name = "COMMAND")]
    before: Option<String>,

    /// A shell command that runs after each run: if it fails, the state is inconsistent
    #[arg(long, value_name = "COMMAND")]
    check: Option<String>,

    /// How long a run may take before it counts as hanging
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "10s")]
    timeout: Duration,

    /// Try so many places at most
    #[arg(long, value_name = "COUNT")]
    limit: Option<usize>,

    /// Tell as JSON
    #[arg(long)]
    json: bool,

    /// The program, and its arguments; its input is empty, and its output is dropped
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Explores, tries, reports.
///
/// # Errors
/// Where the program cannot be run undisturbed; and where it did not take a failure well.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let errno = match &arguments.errno {
        Some(name) => {
            Some(error_number(name).with_context(|| format!("no error is called {name:?}: see errno(3)"))?)
        }
        None => None,
    };
    let usual = USUAL.map(str::to_owned);
    let chosen = if arguments.call.is_empty() { &usual[..] } else { &arguments.call };
    let mut selected = crate::trace::select::read(chosen)?.calls;
    if arguments.short.is_some() {
        let transfers = |number: &u32| calls::numbered(*number).is_some_and(calls::Signature::transfers);
        selected.retain(transfers);
        ensure!(!selected.is_empty(), "--short is about calls that read or write bytes, and none was named");
    }
    let trials = Trials {
        command: &arguments.command,
        before: arguments.before.as_deref(),
        check: arguments.check.as_deref(),
        timeout: arguments.timeout,
    };
    trial::prepare()?;
    let (expected, mut found) = places::explore(&trials, selected)?;
    if !matches!(expected, Outcome::Exited(_)) {
        bail!("undisturbed, the program {expected}: that has to be mended first");
    }
    if let Some(limit) = arguments.limit {
        found.truncate(limit);
    }
    let mut rows = Vec::new();
    for place in found {
        let fault = match arguments.short {
            Some(bytes) => Fault::Short(bytes),
            None => Fault::Error(errno.unwrap_or_else(|| fitting(place.name()))),
        };
        let outcome = trials.fail(&place, fault, u32::from(!arguments.always))?;
        rows.push(report::Row { place, fault, outcome });
    }
    let text = if arguments.json { report::json(&rows, &expected)? } else { report::table(&rows, &expected) };
    print!("{text}");
    let bad = rows.iter().filter(|row| row.outcome.is_bad()).count();
    if bad > 0 {
        bail!("{bad} of {} failing calls were not taken well", rows.len());
    }
    Ok(())
}

/// The error that a call is most likely to meet.
fn fitting(call: &str) -> i32 {
    match call {
        "write" | "pwrite64" | "writev" | "fallocate" | "ftruncate" | "mkdir" | "mkdirat" | "link"
        | "linkat" | "symlink" | "symlinkat" | "creat" | "rename" | "renameat" | "renameat2" => libc::ENOSPC,
        "open" | "openat" => libc::EMFILE,
        "mmap" | "brk" => libc::ENOMEM,
        "fork" | "vfork" | "clone" | "clone3" => libc::EAGAIN,
        "pipe" | "pipe2" | "dup" | "dup2" | "socket" | "accept4" => libc::EMFILE,
        "connect" => libc::ECONNREFUSED,
        "sendto" | "recvfrom" | "sendmsg" | "recvmsg" => libc::ECONNRESET,
        "unlink" | "unlinkat" | "execve" | "bind" | "listen" => libc::EACCES,
        _ => libc::EIO,
    }
}

impl CallSite {
    fn name(&self) -> &str {
        &self.call
    }
}
