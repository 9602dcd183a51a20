//! The commands `orrery manager ...`. `orrery` and `orrery-manager` have the same; what serves is in the latter only, which `orrery`
//! executes for it.

mod demo;
mod top;

use std::ffi::OsString;
use std::fs;
use std::io::{self, IsTerminal as _, Write as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Args, Subcommand, ValueEnum};

use crate::attributes::{Classes, Permission};
use crate::client::{Client, default_socket};
use crate::cpu::Mechanism;
use crate::extensions::{Package, load};
use crate::join::{Joining, Kept, keep};
use crate::protocol::{ExtensionReport, Reply, Request, Status};
use crate::server::Settings;

/// Serve and inspect attributes of running programs: guaranteed shares of CPU time, and others
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a manager in the foreground
    Serve(ServeArguments),
    /// Print the state of a manager and its tracees
    Status(StatusArguments),
    /// Show tracees as they run: target, used, missed, and the last seconds as bars
    Top(top::Arguments),
    /// Print the attribute classes
    Classes(ClassesArguments),
    /// Print an attribute of a tracee
    Get(GetArguments),
    /// Set attributes of a tracee
    Set(SetArguments),
    /// Load an extension into a manager that runs, until that ends; print its number
    Load(LoadArguments),
    /// Unload an extension
    Unload(UnloadArguments),
    /// List the extensions that this user has loaded
    Extensions(StatusArguments),
    /// Show in 16 seconds what a manager does: three programs with targets beside one that takes all it gets
    Demo(demo::Arguments),
    /// Stay with a tracee; for `orrery run`
    #[command(hide = true)]
    Keep(KeepArguments),
}

#[derive(Debug, Args)]
struct SocketArgument {
    /// Unix socket of the manager [default: $ORRERY_MANAGER, else /run/orrery/manager.socket or
    /// $XDG_RUNTIME_DIR/orrery/manager.socket]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct ServeArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Declare the attribute classes of this file, too
    #[arg(long, value_name = "FILE")]
    classes: Vec<PathBuf>,
    /// Use only these mechanisms for shares of CPU time, best first
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "realtime,group,nice")]
    mechanism: Vec<MechanismName>,
    /// Time between two looks at the tracees' clocks, 1ms to 1s
    #[arg(long, value_name = "TIME", value_parser = tick, default_value = "10ms")]
    tick: Duration,
    /// CPU time that the manager may use in each second
    #[arg(long, value_name = "TIME", value_parser = budget, default_value = "100ms")]
    budget: Duration,
    /// End when the last tracee has
    #[arg(long)]
    until_idle: bool,
    /// Serve in a process that is no child of the one that starts it
    #[arg(long, hide = true)]
    detach: bool,
    /// Leave the manager at normal priority
    #[arg(long)]
    no_realtime: bool,
    /// Run the extension of this manifest in the manager
    #[arg(long, value_name = "MANIFEST")]
    extension: Vec<PathBuf>,
    /// Let each ordinary user load so many extensions, which have the rights of that user's connections
    #[arg(long, value_name = "NUMBER", default_value_t = 0, value_parser = clap::value_parser!(u8).range(..=32))]
    user_extensions: u8,
    /// Ignore /proc/pressure
    #[arg(long)]
    no_pressure: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum MechanismName {
    /// SCHED_FIFO below the target, nice 19 above it
    Realtime,
    /// Weights of control groups
    Group,
    /// Nice -20 below the target, 19 above it
    Nice,
    /// Nothing: measure only
    Measure,
}

#[derive(Debug, Args)]
struct StatusArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Print JSON, with a schema number
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ClassesArguments {
    /// Include the classes of this file, and report what is wrong with it
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
}

#[derive(Debug, Args)]
struct GetArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Number of the tracee, as `orrery manager status` prints it
    tracee: u64,
    /// Name of the class
    class: String,
}

#[derive(Debug, Args)]
struct SetArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Number of the tracee, as `orrery manager status` prints it
    tracee: u64,
    /// Values, all of which are set or none
    #[arg(required = true, value_name = "CLASS=VALUE", value_parser = pair)]
    values: Vec<(String, String)>,
}

#[derive(Debug, Args)]
struct LoadArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Manifest of the extension
    manifest: PathBuf,
}

#[derive(Debug, Args)]
struct UnloadArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Number of the extension, as `orrery manager extensions` prints it
    number: u64,
}

#[derive(Debug, Args)]
struct KeepArguments {
    #[arg(long)]
    socket: PathBuf,
    #[arg(long)]
    pid: i32,
    #[arg(long)]
    name: String,
    #[arg(long)]
    connection: i32,
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    nice: i32,
    #[arg(long, value_parser = pair)]
    set: Vec<(String, String)>,
    #[arg(long)]
    journal: Option<i32>,
    /// Descriptors of a manifest and a module, and the number under which they are loaded
    #[arg(long, value_name = "FD,FD,NUMBER", value_parser = kept)]
    extension: Vec<(i32, i32, u64)>,
    #[arg(long)]
    fork: bool,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (class, value) = text.split_once('=').ok_or("a value is written CLASS=VALUE")?;
    Ok((class.to_owned(), value.to_owned()))
}

fn kept(text: &str) -> Result<(i32, i32, u64), String> {
    let parse = || {
        let mut parts = text.split(',');
        let mut fd = || parts.next()?.parse::<i32>().ok().filter(|fd| *fd > 2);
        Some((fd()?, fd()?, parts.next()?.parse().ok()?))
    };
    parse().ok_or_else(|| "an extension is passed as FD,FD,NUMBER, without standard streams".to_owned())
}

fn tick(text: &str) -> Result<Duration, String> {
    within(text, Duration::from_millis(1)..=Duration::from_secs(1))
}

fn budget(text: &str) -> Result<Duration, String> {
    within(text, Duration::from_millis(1)..=Duration::from_millis(950))
}

fn within(text: &str, range: std::ops::RangeInclusive<Duration>) -> Result<Duration, String> {
    let time = orrery_policy::values::duration(text)?;
    if range.contains(&time) {
        Ok(time)
    } else {
        Err(format!("the range is {}ms to {}ms", range.start().as_millis(), range.end().as_millis()))
    }
}

/// Parses `TARGET/PERIOD`, the value of `--cpu`, into attributes.
///
/// # Errors
/// What is wrong with it.
pub fn cpu_share(text: &str) -> Result<crate::protocol::Values, String> {
    let (target, period) =
        text.split_once('/').ok_or("a share is written TARGET/PERIOD, 40ms/400ms for instance")?;
    for time in [target, period] {
        orrery_policy::values::duration(time)?;
    }
    Ok(vec![("cpu.target".to_owned(), target.to_owned()), ("cpu.period".to_owned(), period.to_owned())])
}

/// Runs the command; `serve` serves.
///
/// # Errors
/// A message for the user.
pub fn run(arguments: Arguments, serve: impl FnOnce(Settings) -> Result<()>) -> Result<()> {
    match arguments.command {
        Command::Serve(arguments) => {
            if arguments.detach && !fork()? {
                return Ok(());
            }
            serve(settings(arguments)?)
        }
        Command::Status(arguments) => print_status(&arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Classes(arguments) => print_classes(&arguments),
        Command::Get(arguments) => {
            let request = Request::Get { tracee: Some(arguments.tracee), class: arguments.class };
            let Reply::Value(value) = connect(&arguments.socket)?.ask(&request)? else {
                bail!("cannot read the reply")
            };
            Ok(writeln!(io::stdout(), "{value}")?)
        }
        Command::Set(arguments) => {
            let request = Request::Set { tracee: Some(arguments.tracee), values: arguments.values };
            connect(&arguments.socket)?.ask(&request)?;
            Ok(())
        }
        Command::Load(arguments) => {
            let number = load(&connect(&arguments.socket)?, &arguments.manifest)?;
            Ok(writeln!(io::stdout(), "{number}")?)
        }
        Command::Unload(arguments) => {
            connect(&arguments.socket)?.ask(&Request::Unload { number: arguments.number })?;
            Ok(())
        }
        Command::Extensions(arguments) => print_extensions(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Keep(arguments) => keep_tracee(arguments),
    }
}

/// Executes `orrery-manager` with these arguments in place of this process; returns only where that fails.
///
/// # Errors
/// Where it is not found or cannot be executed.
pub fn execute_server(arguments: impl IntoIterator<Item = OsString>) -> Result<()> {
    Err(orrery_sys::programs::execute_helper("orrery-manager", arguments).into())
}

fn settings(arguments: ServeArguments) -> Result<Settings> {
    let mechanisms = arguments.mechanism.iter().map(|name| match name {
        MechanismName::Realtime => Mechanism::Realtime,
        MechanismName::Group => Mechanism::Group,
        MechanismName::Nice => Mechanism::Nice,
        MechanismName::Measure => Mechanism::Measure,
    });
    let socket = arguments.socket.socket.unwrap_or_else(default_socket);
    Ok(Settings {
        socket: std::path::absolute(&socket).with_context(|| format!("cannot find {}", socket.display()))?,
        classes: read_classes(&arguments.classes)?,
        mechanisms: mechanisms.collect(),
        tick: arguments.tick,
        budget: arguments.budget,
        until_idle: arguments.until_idle,
        realtime: !arguments.no_realtime,
        pressure: !arguments.no_pressure,
        extensions: arguments.extension,
        user_extensions: arguments.user_extensions.into(),
    })
}

fn read_classes(files: &[PathBuf]) -> Result<Classes> {
    let mut classes = Classes::own()?;
    for file in files {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        classes = classes.with(&text, &file.display().to_string())?;
    }
    Ok(classes)
}

fn connect(socket: &SocketArgument) -> Result<Client> {
    Ok(Client::connect(&socket.socket.clone().unwrap_or_else(default_socket))?)
}

fn status(client: &Client) -> Result<Status> {
    match client.ask(&Request::Status)? {
        Reply::Status(status) => Ok(*status),
        _ => {
            bail!("cannot read the manager's reply: it is of another version of Orrery; restart the manager")
        }
    }
}

fn print_status(arguments: &StatusArguments) -> Result<()> {
    let status = status(&connect(&arguments.socket)?)?;
    let mut out = io::stdout().lock();
    if arguments.json {
        return Ok(writeln!(out, "{}", serde_json::to_string_pretty(&status)?)?);
    }
    write!(out, "{}", top::summary(&status))?;
    Ok(write!(out, "{}", top::table(&status, 20, io::stdout().is_terminal()))?)
}

fn print_extensions(arguments: &StatusArguments) -> Result<()> {
    let Reply::Extensions(all) = connect(&arguments.socket)?.ask(&Request::Extensions)? else {
        bail!("cannot read the reply")
    };
    let mut out = io::stdout().lock();
    if arguments.json {
        let report = serde_json::json!({ "schema": crate::protocol::SCHEMA, "extensions": all });
        return Ok(writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?);
    }
    writeln!(
        out,
        "{:>16} {:<16} {:>8} {:>6} {:>10} {:>8} {:>8}  STATE",
        "NUMBER", "NAME", "USER", "TRACEE", "HANDLED", "FAILURES", "DROPPED"
    )?;
    for ExtensionReport { number, name, uid, tracee, handled, failures, dropped, message, ended, .. } in all {
        let tracee = tracee.map_or_else(|| "-".to_owned(), |tracee| tracee.to_string());
        let name: String = name.chars().take(16).collect();
        let state = match &ended {
            Some(reason) => format!("ended: {reason}"),
            None => format!("runs  {message}"),
        };
        let state = state.trim_end();
        writeln!(
            out,
            "{number:>16} {name:<16} {uid:>8} {tracee:>6} {handled:>10} {failures:>8} {dropped:>8}  {state}"
        )?;
    }
    Ok(())
}

fn print_classes(arguments: &ClassesArguments) -> Result<()> {
    let classes = read_classes(&arguments.files)?;
    let mut out = io::stdout().lock();
    let name = |permission: Permission| match permission {
        Permission::Owner => "owner",
        Permission::Tracee => "tracee",
        Permission::All => "all",
    };
    writeln!(
        out,
        "{:<20} {:>10} {:>24} {:>8} {:>8} {:>8}",
        "CLASS", "DEFAULT", "RANGE", "SUM", "READ", "WRITE"
    )?;
    for class in classes.all() {
        let [lowest, highest, default] =
            [class.lowest, class.highest, class.default].map(|value| class.kind.format(value));
        let sum = class.sum.map_or_else(|| "-".to_owned(), |sum| class.kind.format(sum));
        let range = format!("{lowest}..{highest}");
        let (read, write) = (name(class.read), name(class.write));
        writeln!(out, "{:<20} {default:>10} {range:>24} {sum:>8} {read:>8} {write:>8}", class.name)?;
    }
    Ok(())
}

fn keep_tracee(arguments: KeepArguments) -> Result<()> {
    let pid = arguments.pid;
    if arguments.connection < 3 {
        bail!("cannot use descriptor {}: it is a standard stream", arguments.connection);
    }
    if arguments.fork && !fork()? {
        return Ok(());
    }
    let take = |number: i32| {
        // SAFETY: the process that executes this passes a descriptor under this number, each once, and nothing else here uses it.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
            .with_context(|| format!("cannot use descriptor {number}"))?;
        anyhow::Ok(fd)
    };
    let connection = take(arguments.connection)?;
    let KeepArguments { socket, name, nice, set: values, journal, extension, .. } = arguments;
    let kept = |(manifest, module, number)| {
        anyhow::Ok(Kept::new(Package::from_fds([take(manifest)?, take(module)?]), number))
    };
    let extensions = extension.into_iter().map(kept).collect::<Result<_>>()?;
    let joining = Joining { socket: Some(socket), name, values, journal };
    keep(&joining, pid, nice, Client::from_fd(connection), extensions)
        .with_context(|| format!("cannot stay with process {pid}"))
}

/// Goes on in a child; returns whether this is it. Its parent is to end, so that it is nobody's child that waits for children.
fn fork() -> Result<bool> {
    // SAFETY: this process has one thread, and its child goes on with a copy of all.
    match unsafe { libc::fork() } {
        -1 => bail!("cannot make a process: {}", io::Error::last_os_error()),
        child => Ok(child == 0),
    }
}
