//! `orrery trace`: what system calls a program makes: each of them, or how often and for how long.

pub(crate) mod attached;
mod callers;
mod clock;
mod forward;
mod inject;
mod line;
mod pending;
mod report;
pub(crate) mod select;
mod start;
mod thread_files;

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, exit};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{ArgAction, ArgGroup, Args};
use orrery_hijack::decode::{Form, Hexadecimal};
use orrery_hijack::policy::{Descriptors, Detail};
use orrery_hijack::{Events, Hijack, Options, Policy, calls};

use attached::Attached;
use clock::Clock;
pub(crate) use line::Style;
pub(crate) use line::Writer;
use pending::Pending;
use start::Start;
use thread_files::ThreadFiles;

/// How often the journal is looked at.
const INTERVAL: Duration = Duration::from_millis(2);
/// How long after a signal calls are shown that have not returned.
const SETTLED: Duration = Duration::from_millis(200);

/// Trace the system calls of a program and its children, or count them (-c)
///
/// Prints each call to standard error, and exits as the program does. Calls that are not selected (--call, --path) are
/// not slowed. Options are named as in strace(1).
#[derive(Args)]
#[group(skip)]
#[command(group = ArgGroup::new("summaries").args(["count", "summary"]))]
pub(crate) struct Arguments {
    /// Count calls, errors and time for each system call, and print a summary when the program ends
    #[arg(short, long)]
    count: bool,

    /// Print each call, and behind all of them the summary of -c
    #[arg(short = 'C', long, conflicts_with = "count")]
    summary: bool,

    /// With -c or -C: count calls only, without errors and time, which is faster
    #[arg(long, requires = "summaries")]
    untimed: bool,

    /// With -c or -C: sort the summary by this column
    #[arg(short = 'S', long, value_name = "COLUMN", requires = "summaries", default_value = "time")]
    sort: report::Column,

    /// With -c or -C: print only these columns of the summary
    #[arg(
        short = 'U',
        long,
        value_name = "COLUMN,...",
        requires = "summaries",
        conflicts_with = "json",
        value_delimiter = ','
    )]
    columns: Vec<report::Column>,

    /// Ignored: the summary always has the time that passed
    #[arg(short = 'w', requires = "summaries", hide = true)]
    wall_clock: bool,

    /// Trace only these calls: names, names with * in them, or %file, %descriptor, %network, %process, %signal, %memory, %ipc, %creds,
    /// %clock, /regular expression/; behind a ! all but these. Also trace=..., signal=SIGNALS, status=failed, status=successful, abbrev=none, decode-fds=path,socket,dev,pidfd;
    /// inject=CALLS:error=ERROR, retval=VALUE, delay_enter=DURATION, :when=FIRST[..LAST][+STEP], and fault=CALLS, which tamper with calls
    #[arg(short = 'e', long, value_name = "CALLS", allow_hyphen_values = true)]
    call: Vec<String>,

    /// Trace only calls that name a path, or a descriptor of a path, that matches: * within a name, ** across slashes
    #[arg(short = 'P', long, value_name = "PATTERN", conflicts_with = "count")]
    path: Vec<String>,

    /// Print only calls that fail
    #[arg(short = 'Z', long, conflicts_with = "count")]
    failed: bool,

    /// Print only calls that succeed
    #[arg(short = 'z', long, conflicts_with_all = ["count", "failed"])]
    successful: bool,

    /// Print only calls that take at least this long, such as 10ms
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, conflicts_with = "count")]
    slower: Option<Duration>,

    /// Prefix each line with the time of day; given twice, with microseconds; given three times, with seconds since 1970
    #[arg(short, long, action = ArgAction::Count, conflicts_with = "count")]
    time: u8,

    /// Prefix each line with the time since the previous call began
    #[arg(short, long, conflicts_with_all = ["count", "time"])]
    relative: bool,

    /// Print the time spent in each call
    #[arg(short = 'T', long, conflicts_with = "count")]
    duration: bool,

    /// Print the number of each system call
    #[arg(short = 'n', long = "number", conflicts_with_all = ["count", "json"])]
    number: bool,

    /// Print the address behind the instruction that makes the call
    #[arg(short = 'i', long = "instruction-pointer", conflicts_with_all = ["count", "json"])]
    address: bool,

    /// Align results at this column
    #[arg(short = 'a', long, value_name = "COLUMN", conflicts_with_all = ["count", "json"], default_value = "0", hide_default_value = true)]
    align: u16,

    /// Print all members of large structures, not only the most important ones
    #[arg(short, long, conflicts_with = "count")]
    verbose: bool,

    /// Print strings that are no text in hexadecimal digits; given twice, all strings
    #[arg(short = 'x', long = "hex", action = ArgAction::Count, conflicts_with_all = ["count", "json"])]
    hexadecimal: u8,

    /// Print paths of file descriptors; given twice, also protocols and addresses of sockets, numbers of devices, and PIDs of pidfds
    #[arg(short = 'y', long, action = ArgAction::Count, conflicts_with = "count")]
    decode_fds: u8,

    /// Print at most this many bytes of buffers, up to 200 [default: 48]
    #[arg(short, long, value_name = "BYTES", conflicts_with = "count", value_parser = string_limit)]
    string_limit: Option<u16>,

    /// Print the call stack of each call: files and offsets, innermost first
    #[arg(short = 'k', long, conflicts_with_all = ["count", "json"])]
    stack_trace: bool,

    /// Apply the rules of this policy, as `orrery run` does
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,

    /// With --policy: let run, with a warning, what a policy that denies something cannot be applied to, as `orrery run` does
    #[arg(long, requires = "policy")]
    no_strict: bool,

    /// Write to this file instead of standard error
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// With --output: append to the file
    #[arg(short = 'A', long, requires = "output")]
    append: bool,

    /// Print JSON: one object for each call, or with -c one in all
    #[arg(long)]
    json: bool,

    /// Do not rewrite the program's code: the kernel dispatches every call
    #[arg(long)]
    no_patch: bool,

    /// Given twice, with --output: write the calls of each thread to FILE.TID. Children are always followed
    #[arg(short, action = ArgAction::Count, hide = true)]
    follow: u8,

    /// Ignored: nothing but calls, signals and the program's end is printed
    #[arg(short, action = ArgAction::Count, hide = true)]
    quiet: u8,

    /// Trace a process that runs already, and what it starts from now on, until it ends or this command is interrupted; repeatable
    #[arg(short = 'p', long, value_name = "PID,...", value_delimiter = ',', conflicts_with = "command",
        value_parser = clap::value_parser!(i32).range(1..))]
    attach: Vec<i32>,

    /// Set this variable for the program, or without a value remove it; repeatable
    #[arg(short = 'E', long = "env", value_name = "NAME[=VALUE]", conflicts_with = "attach")]
    environment: Vec<OsString>,

    /// Run the program as this user, by name or number, with the user's groups
    #[arg(short, long, value_name = "USER", conflicts_with = "attach")]
    user: Option<String>,

    /// The program and its arguments
    #[arg(required_unless_present = "attach", trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Runs the program, prints its calls, and exits as the program does.
///
/// # Errors
/// Where the program could not be started, or nothing be written.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let policy = arguments.policy.as_deref().map(crate::run::read).transpose()?.unwrap_or_default();
    if policy.manager().is_some() {
        anyhow::bail!("cannot honour [manager]: a trace serves no program; orrery run --policy does");
    }
    let selection = select::read(&arguments.call)?;
    let injected = inject::rules(&selection.injections)?;
    let start = Start::new(&arguments.environment, arguments.user.as_deref())?;
    let selected = selection.calls;
    // Before the program runs: it is not to work for nothing.
    let separate = arguments.follow > 1 && !arguments.count;
    let files = arguments.output.as_deref().filter(|_| separate);
    let files = files.map(|path| ThreadFiles::new(path, arguments.append));
    let mut output: Box<dyn Write + Send> = match &arguments.output {
        Some(path) if path.as_os_str().as_encoded_bytes().starts_with(b"|") => {
            anyhow::bail!(
                "cannot write to the command {}: -o takes a file; use a pipe of the shell",
                path.display()
            );
        }
        Some(path) if files.is_none() => {
            let mut file = OpenOptions::new();
            let file = file.create(true).write(true).append(arguments.append).truncate(!arguments.append);
            Box::new(file.open(path).with_context(|| format!("cannot create {}", path.display()))?)
        }
        _ => Box::new(io::stderr()),
    };
    let counted = arguments.count || arguments.summary;
    let timed = counted && !arguments.untimed;
    let options = Options::default().counted(counted).timed(timed).patch(!arguments.no_patch);
    // What it denies is not to be allowed because the trace ends. What is injected is no such rule.
    let stays = policy.denies();
    let options = options.strict(stays && !arguments.no_strict);
    let policy = policy.then(injected);
    let target = match arguments.command.split_first() {
        Some((program, rest)) => Target::Program(program, rest),
        None => Target::Running(Attached::find(&arguments.attach)?),
    };
    let status = if arguments.count {
        let hijack = Hijack::prepare()?;
        let clock = Clock::start();
        let options = options.policy(policy);
        let status = match target {
            Target::Program(program, rest) => {
                hijack.attend(options)?;
                crate::pipes::restore();
                let child = start.spawn(&hijack, program, rest)?;
                forward::to(child.pid());
                Some(child.wait()?)
            }
            Target::Running(mut processes) => {
                processes.attach(&hijack, options)?;
                crate::pipes::restore();
                let running = processes.wait().context("cannot wait for the processes")?;
                attached::leave(&hijack, &running, stays);
                None
            }
        };
        summarize(arguments, &hijack, &clock, &selected, &mut output)?;
        status
    } else {
        let style = Style {
            time: arguments.time,
            relative: arguments.relative,
            duration: arguments.duration,
            json: arguments.json,
            form: Form {
                whole: arguments.verbose || selection.verbose,
                hexadecimal: match arguments.hexadecimal {
                    0 => Hexadecimal::Bytes,
                    1 => Hexadecimal::Binary,
                    _ => Hexadecimal::All,
                },
            },
            failed: arguments.failed || selection.failed,
            successful: arguments.successful || selection.successful,
            slower: arguments.slower,
            stack: arguments.stack_trace,
            end: true,
            number: arguments.number,
            address: arguments.address,
            column: arguments.align.into(),
        };
        let descriptors = selection.descriptors.with(match arguments.decode_fds {
            0 => Descriptors::NONE,
            1 => Descriptors::PATHS,
            _ => Descriptors::ALL,
        });
        let detail = Detail { buffers: arguments.string_limit, descriptors };
        // Whether a call that has not returned is about a path is not looked at.
        let told = selected.clone();
        let watched = if arguments.path.is_empty() { selected.clone() } else { Vec::new() };
        let traced = Policy::telling(selected, arguments.stack_trace)
            .about(&arguments.path)
            .detailed(detail)
            .with_signals(selection.signals);
        // What the policy answers is traced as well.
        let mut all = traced.then(policy);
        // How threads end is told whichever calls are.
        let unseen: Vec<u32> = line::ENDS
            .iter()
            .filter_map(|name| Some(calls::named(name)?.number))
            .filter(|number| !arguments.path.is_empty() || !told.contains(number))
            .collect();
        if !unseen.is_empty() {
            all = all.then(Policy::telling(unseen.clone(), false));
        }
        if arguments.stack_trace {
            all = all.then(crate::faults::places::stay()?);
        }
        let extras = Extras { watched: &watched, files, unseen, ..Extras::default() };
        let clock = Clock::start();
        let (hijack, status) = match target {
            Target::Program(program, rest) => {
                let hijack = Hijack::start(options.policy(all))?;
                crate::pipes::restore();
                let extras = Extras { start, ..extras };
                let status = follow(&hijack, program, rest, output, style, extras)?;
                (hijack, Some(status))
            }
            Target::Running(processes) => {
                let hijack = Hijack::prepare()?;
                crate::pipes::restore();
                follow_running(&hijack, options.policy(all), processes, output, style, extras, stays)?;
                (hijack, None)
            }
        };
        if arguments.summary {
            let mut output: Box<dyn Write> = match &arguments.output {
                Some(path) if !separate => Box::new(
                    OpenOptions::new()
                        .append(true)
                        .open(path)
                        .with_context(|| format!("cannot open {}", path.display()))?,
                ),
                _ => Box::new(io::stderr()),
            };
            summarize(arguments, &hijack, &clock, &told, &mut output)?;
        }
        status
    };
    match status {
        Some(status) => end_as(status),
        None => Ok(()),
    }
}

/// Writes what was counted.
///
/// # Errors
/// Those of writing.
fn summarize(
    arguments: &Arguments,
    hijack: &Hijack,
    clock: &Clock,
    selected: &[u32],
    output: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut counts = hijack.counts();
    counts.calls.retain(|call| {
        arguments.call.is_empty() || call.number.is_some_and(|number| selected.contains(&number))
    });
    let nanoseconds = clock.nanoseconds_per_tick();
    let text = if arguments.json {
        report::json(&counts, nanoseconds, arguments.sort)?
    } else {
        let timed = !arguments.untimed;
        report::table(&counts, nanoseconds, timed, arguments.sort, &arguments.columns)
    };
    output.write_all(text.as_bytes()).and_then(|()| output.flush()).context("cannot write the report")
}

/// What is traced.
enum Target<'a> {
    Program(&'a OsString, &'a [OsString]),
    Running(Attached),
}

/// What a trace has beside the calls that a policy logs.
#[derive(Default)]
pub(crate) struct Extras<'a> {
    /// Calls that are written, too, if they have not returned when the program ends.
    watched: &'a [u32],
    /// Where the lines of each thread go, if not to one output.
    files: Option<ThreadFiles>,
    /// How the program is started.
    start: Start,
    /// Calls that are told only because threads end by them.
    unseen: Vec<u32>,
}

/// The argument of `-s`.
fn string_limit(text: &str) -> Result<u16, String> {
    let most = Detail::MOST;
    match text.parse() {
        Ok(limit) if limit <= most => Ok(limit),
        Ok(_) | Err(_) if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() => {
            Err(format!("at most {most} bytes of a buffer are recorded; for more, use `strace -s {text}`"))
        }
        Ok(_) | Err(_) => Err(format!("it is no number from 0 to {most}")),
    }
}

/// Runs a program as a child, and writes the calls that its policy logs, until it ends.
///
/// # Errors
/// Where it cannot be started, or nothing be written.
pub(crate) fn follow(
    hijack: &Hijack,
    program: &std::ffi::OsStr,
    rest: &[OsString],
    output: Box<dyn Write + Send>,
    style: Style,
    extras: Extras<'_>,
) -> anyhow::Result<ExitStatus> {
    let mut logger = Logger::prepare(hijack, output, style);
    let child = extras.start.spawn(hijack, program, rest)?;
    if let Some(program) = u32::try_from(child.pid()).ok().filter(|_| !extras.watched.is_empty()) {
        logger.writer.watch(Pending::new(program, extras.watched));
    }
    if let Some(files) = extras.files {
        logger.writer.separate(files);
    }
    logger.writer.hide(extras.unseen);
    logger.writer.expect(child.pid());
    forward::to(child.pid());
    let logging = logger.start();
    let pid = child.pid();
    let status = child.wait();
    let mut writer = logging.finish()?;
    if let Ok(status) = &status {
        writer.end(pid, *status).context("cannot write how the program ended")?;
    }
    report_unfollowed(hijack);
    Ok(status?)
}

/// Attaches to processes that run, and writes the calls that the policy logs, until they have ended or this process is interrupted. Then it
/// detaches from those that go on, unless the policy `stays`.
///
/// # Errors
/// Where none of them gets an executive, or nothing can be written.
pub(crate) fn follow_running(
    hijack: &Hijack,
    options: Options,
    mut processes: Attached,
    output: Box<dyn Write + Send>,
    style: Style,
    extras: Extras<'_>,
    stays: bool,
) -> anyhow::Result<()> {
    let mut logger = Logger::prepare(hijack, output, style);
    if let Some(files) = extras.files {
        logger.writer.separate(files);
    }
    logger.writer.hide(extras.unseen);
    processes.attach(hijack, options)?;
    let logging = logger.start();
    let running = processes.wait().context("cannot wait for the processes");
    attached::leave(hijack, running.as_deref().unwrap_or_default(), stays);
    logging.finish()?;
    running?;
    report_unfollowed(hijack);
    Ok(())
}

/// Writes the calls that a policy logs.
pub(crate) struct Logger {
    events: Events,
    writer: Writer,
}

/// A thread that writes them.
pub(crate) struct RunningLogger {
    ended: Arc<AtomicBool>,
    thread: thread::JoinHandle<io::Result<Writer>>,
}

impl Logger {
    /// Prepares to read the journal. Must run before the program starts: programs wait for a reader rather than lose calls.
    pub(crate) fn prepare(hijack: &Hijack, output: Box<dyn Write + Send>, style: Style) -> Self {
        let clock = Clock::start();
        Self { events: hijack.events(), writer: Writer::new(output, style, clock) }
    }

    /// Begins to write.
    pub(crate) fn start(mut self) -> RunningLogger {
        let ended = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&ended);
        let thread = thread::spawn(move || {
            write_events(&mut self.events, &mut self.writer, &stop).map(|()| self.writer)
        });
        RunningLogger { ended, thread }
    }
}

impl RunningLogger {
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
fn write_events(events: &mut Events, writer: &mut Writer, ended: &AtomicBool) -> io::Result<()> {
    let mut interrupted = None;
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
        if !some {
            if forward::was_interrupted() {
                interrupted = Some(Instant::now());
            }
            // The program has the same signal: calls that this interrupts, and that are made again, are settled by then.
            if interrupted.is_some_and(|when| when.elapsed() >= SETTLED) {
                interrupted = None;
                writer.show_pending()?;
            }
            writer.look()?;
        }
        writer.flush()?;
        thread::sleep(INTERVAL);
    }
    writer.finish(events.lost())
}

/// Reports what was not seen.
pub(crate) fn report_unfollowed(hijack: &Hijack) {
    let counts = hijack.counts();
    for (count, reason) in &counts.unfollowed {
        eprintln!("orrery: not followed: {count} (a program was executed, but {reason})");
    }
    if counts.unarmed > 0 {
        eprintln!("orrery: not followed: {} threads that a filter kept from it", counts.unarmed);
    }
    let failures = hijack.handler_failures();
    if failures > 0 {
        eprintln!("orrery: a handler failed: {failures} calls were refused for that, with EPERM");
    }
}

/// Ends this process as the program ended.
pub(crate) fn end_as(status: ExitStatus) -> ! {
    if let Some(signal) = status.signal() {
        forward::die_of(signal);
    }
    exit(status.code().unwrap_or(1))
}
