//! `orrery trace`: what system calls a program makes: each of them, or how often and for how long.

mod clock;
mod forward;
mod line;
mod report;
pub(crate) mod select;

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, exit};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use clap::{ArgAction, Args};
use orrery_hijack::policy::Detail;
use orrery_hijack::{Events, Hijack, Options, Policy};

use clock::Clock;
pub(crate) use line::Style;
pub(crate) use line::Writer;

/// How often the journal is looked at.
const INTERVAL: Duration = Duration::from_millis(2);

/// Run a program and tell each system call that it and its children make, or (-c) how many and how long
///
/// What is told goes to standard error; status and signal are the program's. Calls that are not asked for (--call,
/// --path) cost what they cost under `orrery run`. Options are strace's where it has them.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Instead of each call, tell at the end how often each was made, its errors, and how long it took
    #[arg(short, long)]
    count: bool,

    /// With -c: count only, which is cheaper: no errors, no durations
    #[arg(long, requires = "count")]
    untimed: bool,

    /// With -c: in which order
    #[arg(short = 'S', long, value_name = "COLUMN", requires = "count", default_value = "time")]
    sort: report::Column,

    /// Only these calls: names, names with * in them, or %file, %descriptor, %network, %process, %signal, %memory, %ipc, %creds,
    /// %clock; behind a ! all but these. Also trace=..., status=failed, status=successful, abbrev=none, decode-fds=path
    #[arg(short = 'e', long, value_name = "CALLS", allow_hyphen_values = true)]
    call: Vec<String>,

    /// Only calls with a path, or on a descriptor of a path, that matches: * within a name, ** across slashes
    #[arg(short = 'P', long, value_name = "PATTERN", conflicts_with = "count")]
    path: Vec<String>,

    /// Only calls that fail
    #[arg(short = 'Z', long, conflicts_with = "count")]
    failed: bool,

    /// Only calls that succeed
    #[arg(short = 'z', long, conflicts_with_all = ["count", "failed"])]
    successful: bool,

    /// Only calls that take so long, 10ms for instance
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, conflicts_with = "count")]
    slower: Option<Duration>,

    /// Begin each line with the time of day; given three times, with seconds since 1970
    #[arg(short, long, action = ArgAction::Count, conflicts_with = "count")]
    time: u8,

    /// Begin each line with the time since the call before it began
    #[arg(short, long, conflicts_with_all = ["count", "time"])]
    relative: bool,

    /// End each line with how long the call took
    #[arg(short = 'T', long, conflicts_with = "count")]
    duration: bool,

    /// Tell all members of large structures, not only those that say most
    #[arg(short, long, conflicts_with = "count")]
    verbose: bool,

    /// Tell where descriptors lead
    #[arg(short = 'y', long, action = ArgAction::Count, conflicts_with = "count")]
    decode_fds: u8,

    /// Tell so many bytes of buffers, 200 at most [default: 48]
    #[arg(short, long, value_name = "BYTES", conflicts_with = "count")]
    string_limit: Option<u16>,

    /// Tell behind each call from where it was made: files and offsets, nearest first
    #[arg(short = 'k', long, conflicts_with_all = ["count", "json"])]
    stack_trace: bool,

    /// Rules about system calls, as for `orrery run`
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,

    /// Write to a file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// With --output: add to the file, should there be one
    #[arg(short = 'A', long, requires = "output")]
    append: bool,

    /// Tell as JSON: one object for each line, or with -c one for all
    #[arg(long)]
    json: bool,

    /// Leave the program's code as it is: every call is dispatched by the kernel
    #[arg(long)]
    no_patch: bool,

    /// Nothing: children are followed anyway, and told of by thread
    #[arg(short, action = ArgAction::Count, hide = true)]
    follow: u8,

    /// Nothing: there is no more to say than the calls
    #[arg(short, action = ArgAction::Count, hide = true)]
    quiet: u8,

    /// Not possible: executives are there from a program's first instruction on, or not at all
    #[arg(short = 'p', value_name = "PID", hide = true)]
    attach: Option<String>,

    /// The program, and its arguments
    #[arg(
        required_unless_present = "attach",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    command: Vec<OsString>,
}

/// Runs the program, tells what it does, and ends as the program ended.
///
/// # Errors
/// Where the program could not be started, or nothing be written.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if let Some(process) = &arguments.attach {
        anyhow::bail!(
            "cannot attach to process {process}: an executive is put under a program when it is executed; start the program with \
             `orrery trace`, or use `strace -p {process}`"
        );
    }
    let Some((program, rest)) = arguments.command.split_first() else {
        anyhow::bail!("no program given");
    };
    let policy = arguments.policy.as_deref().map(crate::run::read).transpose()?.unwrap_or_default();
    let selection = select::read(&arguments.call)?;
    let selected = selection.calls;
    // Before the program runs: it is not to work for nothing.
    let mut output: Box<dyn Write + Send> = match &arguments.output {
        Some(path) => {
            let mut file = OpenOptions::new();
            let file = file.create(true).write(true).append(arguments.append).truncate(!arguments.append);
            Box::new(file.open(path).with_context(|| format!("cannot create {}", path.display()))?)
        }
        None => Box::new(io::stderr()),
    };
    let timed = arguments.count && !arguments.untimed;
    let options = Options::default().counted(arguments.count).timed(timed).patch(!arguments.no_patch);
    let status = if arguments.count {
        let hijack = Hijack::start(options.policy(policy))?;
        crate::pipes::restore();
        let clock = Clock::start();
        let child = hijack.spawn(program, rest)?;
        forward::to(child.pid());
        let status = child.wait()?;
        let mut counts = hijack.counts();
        counts.calls.retain(|call| {
            arguments.call.is_empty() || call.number.is_some_and(|number| selected.contains(&number))
        });
        let nanoseconds = clock.nanoseconds_per_tick();
        let text = if arguments.json {
            report::json(&counts, nanoseconds, arguments.sort)?
        } else {
            report::table(&counts, nanoseconds, timed, arguments.sort)
        };
        output.write_all(text.as_bytes()).and_then(|()| output.flush()).context("cannot write the report")?;
        status
    } else {
        let style = Style {
            time: arguments.time,
            relative: arguments.relative,
            duration: arguments.duration,
            json: arguments.json,
            verbose: arguments.verbose || selection.verbose,
            failed: arguments.failed || selection.failed,
            successful: arguments.successful || selection.successful,
            slower: arguments.slower,
            stack: arguments.stack_trace,
            end: true,
        };
        let descriptors = arguments.decode_fds > 0 || selection.descriptors;
        let detail = Detail { buffers: arguments.string_limit, descriptors };
        let telling =
            Policy::telling(selected, arguments.stack_trace).about(&arguments.path).detailed(detail);
        // What the policy answers is to be told as well.
        let mut all = telling.then(policy);
        if arguments.stack_trace {
            all = all.then(crate::faults::places::stay()?);
        }
        let hijack = Hijack::start(options.policy(all))?;
        crate::pipes::restore();
        follow(&hijack, program, rest, output, style)?
    };
    end_as(status)
}

/// Runs a program as a child, and writes what rules of its policy tell, until it ends.
///
/// # Errors
/// Where it cannot be started, or nothing be written.
pub(crate) fn follow(
    hijack: &Hijack,
    program: &std::ffi::OsStr,
    rest: &[OsString],
    output: Box<dyn Write + Send>,
    style: Style,
) -> anyhow::Result<ExitStatus> {
    let teller = Teller::prepare(hijack, output, style);
    let child = hijack.spawn(program, rest)?;
    forward::to(child.pid());
    let telling = teller.start();
    let pid = child.pid();
    let status = child.wait();
    let mut writer = telling.finish()?;
    if let Ok(status) = &status {
        writer.end(pid, *status).context("cannot write how the program ended")?;
    }
    tell_unfollowed(hijack);
    Ok(status?)
}

/// Writes what rules of a policy tell.
pub(crate) struct Teller {
    events: Events,
    writer: Writer,
}

/// A thread that does so.
pub(crate) struct Telling {
    ended: Arc<AtomicBool>,
    thread: thread::JoinHandle<io::Result<Writer>>,
}

impl Teller {
    /// To be called before the program starts: programs wait for who reads, rather than have their calls untold.
    pub(crate) fn prepare(hijack: &Hijack, output: Box<dyn Write + Send>, style: Style) -> Self {
        let clock = Clock::start();
        Self { events: hijack.events(), writer: Writer::new(output, style, clock) }
    }

    /// Begins to write.
    pub(crate) fn start(mut self) -> Telling {
        let ended = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&ended);
        let thread =
            thread::spawn(move || tell(&mut self.events, &mut self.writer, &told).map(|()| self.writer));
        Telling { ended, thread }
    }
}

impl Telling {
    /// Writes what is left, when the program has ended.
    ///
    /// # Errors
    /// Where nothing could be written.
    pub(crate) fn finish(self) -> anyhow::Result<Writer> {
        self.ended.store(true, Relaxed);
        match self.thread.join() {
            Ok(written) => written.context("cannot write the trace"),
            Err(_) => anyhow::bail!("the thread that writes the trace has failed"),
        }
    }
}

/// Writes events as they come, until the program has ended and nothing is left.
fn tell(events: &mut Events, writer: &mut Writer, ended: &AtomicBool) -> io::Result<()> {
    loop {
        let last = ended.load(Relaxed);
        let mut some = false;
        for event in events.by_ref() {
            some = true;
            writer.event(event)?;
        }
        if last && !some {
            break;
        }
        writer.flush()?;
        thread::sleep(INTERVAL);
    }
    writer.finish(events.lost())
}

/// Says what was not seen.
pub(crate) fn tell_unfollowed(hijack: &Hijack) {
    let counts = hijack.counts();
    for (count, reason) in &counts.unfollowed {
        eprintln!("orrery: not followed: {count} (a program was executed, but {reason})");
    }
    if counts.unarmed > 0 {
        eprintln!("orrery: not followed: {} threads that a filter kept from it", counts.unarmed);
    }
}

/// Ends this process as the program ended.
pub(crate) fn end_as(status: ExitStatus) -> ! {
    if let Some(signal) = status.signal() {
        forward::die_of(signal);
    }
    exit(status.code().unwrap_or(1))
}
