//! `orrery faults`: a program once for each place that makes a system call, with that call failing.

pub(crate) mod places;
mod progress;
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
/// crashes, hangs or leaves a state that --check rejects is reported, with what it wrote to standard error, and is this command's exit
/// status. What the dynamic loader calls is left out, unless --loader is given.
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

    /// Try only these: numbers of rows, as a report has them, or parts of a call or of where it comes from, such as main+; repeatable
    #[arg(long, value_name = "ROW,...", value_delimiter = ',')]
    only: Vec<String>,

    /// Try calls of the dynamic loader, too: glibc's crashes if its first ones fail
    #[arg(long)]
    loader: bool,

    /// Tell as JSON
    #[arg(long)]
    json: bool,

    /// The program, and its arguments; its input is empty, its output is dropped, and its errors are shown where it fails
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
    let (expected, found) = places::explore(&trials, &selected)?;
    if !matches!(expected, Outcome::Exited(_)) {
        bail!("undisturbed, the program {expected}: that has to be mended first");
    }
    let (mut chosen, skipped) = choose(found, &arguments.only, arguments.loader)?;
    if let Some(limit) = arguments.limit {
        chosen.truncate(limit);
    }
    let mut rows = Vec::new();
    let mut progress = progress::Progress::new(chosen.len());
    for (number, place) in chosen {
        progress.show(rows.len(), &place.example);
        let fault = match arguments.short {
            Some(bytes) => Fault::Short(bytes),
            None => Fault::Error(errno.unwrap_or_else(|| fitting(place.name()))),
        };
        let (outcome, errors) = trials.fail(&place, fault, u32::from(!arguments.always))?;
        rows.push(report::Row { number, place, fault, outcome, errors });
    }
    drop(progress);
    let text = if arguments.json {
        report::json(&rows, &expected, skipped)?
    } else {
        report::table(&rows, &expected, skipped)
    };
    print!("{text}");
    let bad = rows.iter().filter(|row| row.outcome.is_bad()).count();
    if bad > 0 {
        bail!("{bad} of {} failing calls were not taken well", rows.len());
    }
    Ok(())
}

/// Returns the places to try, with the numbers that they have among all, and how many of the loader's are left out.
///
/// # Errors
/// Where what is asked for by name or number is not there.
fn choose(
    found: Vec<CallSite>,
    only: &[String],
    loader: bool,
) -> anyhow::Result<(Vec<(usize, CallSite)>, usize)> {
    let count = found.len();
    let numbered: Vec<_> = (1..).zip(found).collect();
    if only.is_empty() {
        let (skipped, chosen): (Vec<_>, Vec<_>) =
            numbered.into_iter().partition(|(_, place)| !loader && place.is_loaders());
        return Ok((chosen, skipped.len()));
    }
    let means = |word: &str, number: usize, place: &CallSite| match word.parse::<usize>() {
        Ok(wanted) => wanted == number,
        Err(_) => place.example.contains(word) || place.frames.iter().any(|frame| frame.contains(word)),
    };
    for word in only {
        ensure!(
            !word.is_empty() && numbered.iter().any(|(number, place)| means(word, *number, place)),
            "cannot try only {word:?}: there are {count} places, and none has this number or this in its call or its callers; run without --only to see them"
        );
    }
    let chosen =
        numbered.into_iter().filter(|(number, place)| only.iter().any(|word| means(word, *number, place)));
    Ok((chosen.collect(), 0))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn place(call: &str, frame: &str) -> CallSite {
        let (call, frames) = (call.to_owned(), vec![frame.to_owned(), "libc.so.6+0x1 (start)".to_owned()]);
        CallSite { number: 0, site: 1, example: format!("{call}(\"/etc\")"), call, frames }
    }

    fn chosen(only: &[&str], loader: bool) -> anyhow::Result<(Vec<usize>, usize)> {
        let found = vec![
            place("mmap", "ld-linux-x86-64.so.2+0x2 (map)"),
            place("openat", "libc.so.6+0x9 (open)"),
            place("read", "tool+0x3 (main+0x54)"),
        ];
        let only: Vec<String> = only.iter().map(|word| (*word).to_owned()).collect();
        let (chosen, skipped) = choose(found, &only, loader)?;
        Ok((chosen.into_iter().map(|(number, _)| number).collect(), skipped))
    }

    #[test]
    fn rows_are_chosen_by_number_call_and_caller() {
        assert_eq!(chosen(&[], false).unwrap(), (vec![2, 3], 1));
        assert_eq!(chosen(&[], true).unwrap(), (vec![1, 2, 3], 0));
        assert_eq!(chosen(&["1"], false).unwrap(), (vec![1], 0));
        assert_eq!(chosen(&["main+", "openat("], false).unwrap(), (vec![2, 3], 0));
        for nothing in ["4", "0", "write", ""] {
            let error = chosen(&["2", nothing], true).unwrap_err().to_string();
            assert!(
                error.contains("there are 3 places") && error.contains(&format!("{nothing:?}")),
                "{error}"
            );
        }
    }
}
