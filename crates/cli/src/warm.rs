//! `orrery warm`: a server of warm Python interpreters, and its clients.

mod python_arguments;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use orrery_warm::client::{AsPython, Client, Job, Source, become_python, run_as_python};
use orrery_warm::config::{self, Interpreter, Limits, Sandbox, ServerConfig, WorkerConfig};
use orrery_warm::server::{self, Passed};

use self::python_arguments::PythonArguments;
use crate::units;

/// Run Python scripts in interpreters that have started and imported already
///
/// A server holds interpreters that have imported their modules. A script runs in one of them as it would run in
/// python3; then everything that it did to the process is rolled back.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[cfg(test)]
impl Arguments {
    /// Returns the arguments of a client, if it is one.
    pub(crate) fn of_client(self) -> Option<RunArguments> {
        match self.command {
            Command::Run(arguments) => Some(arguments),
            _ => None,
        }
    }
}

#[derive(Subcommand)]
enum Command {
    /// Start a server
    Serve(ServeArguments),
    /// Run a program on a server; works as python3 in a script's first line
    Run(RunArguments),
    /// Serve HTTP: each request runs as a script of a server, by the Common Gateway Interface
    ///
    /// Balancers such as nginx and HAProxy spread requests over several of these. SIGTERM has the server say that it drains, serve
    /// on for a while, and end when its requests have.
    Http(Box<orrery_warm_http::command::Arguments>),
    /// Print the state of a server and its workers
    Status(SocketArgument),
    /// Replace the workers of a server by new ones, which import everything again, without refusing a request
    ///
    /// Returns when the new workers serve. Programs that run, and requests that wait, are finished by the workers of before.
    /// If the new ones cannot start, because a module has an error, say, the server goes on as before.
    Reload(SocketArgument),
}

#[derive(Args, Debug)]
struct SocketArgument {
    /// Unix socket of the server [default: $ORRERY_WARM, else $XDG_RUNTIME_DIR/orrery-warm.socket]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

#[derive(Args)]
struct ServeArguments {
    /// Python interpreter to start; that of a virtual environment has its packages [default: that of $VIRTUAL_ENV, else
    /// /usr/bin/python3]
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true, required = true)]
    #[expect(clippy::option_option, reason = "the option is required, and its value is not")]
    python: Option<Option<PathBuf>>,
    /// Modules to import before the first request
    #[arg(long = "import", value_name = "MODULE,...", value_delimiter = ',')]
    imports: Vec<String>,
    #[command(flatten)]
    socket: SocketArgument,
    /// Number of workers; each runs one script at a time [default: the number of CPUs that the process may use]
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// Time limit of a script, such as 2s or 500ms [default: none]
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    timeout: Option<Duration>,
    /// Memory limit of a script beyond the interpreter's own, such as 256M [default: none]
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    memory: Option<u64>,
    /// Reload when Python files below DIRECTORY change; may be given several times
    #[arg(long, value_name = "DIRECTORY")]
    watch: Vec<PathBuf>,
    /// Number of requests that may wait for a worker; further ones fail as busy
    #[arg(long, value_name = "N", default_value_t = 128)]
    queue: u16,
    /// How a script is separated from the next
    #[arg(long, value_enum, default_value_t = Isolation::Rollback)]
    isolate: Isolation,
    /// Sandbox the workers: system call filter, listed files only, own PID namespace, no network
    #[arg(long)]
    sandbox: bool,
    /// Let sandboxed scripts read and execute files below PATH, besides the system's directories
    #[arg(long, value_name = "PATH", requires = "sandbox")]
    read: Vec<PathBuf>,
    /// Let sandboxed scripts read and change files below PATH
    #[arg(long, value_name = "PATH", requires = "sandbox")]
    write: Vec<PathBuf>,
    /// Let sandboxed scripts use the network
    #[arg(long, requires = "sandbox")]
    net: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Isolation {
    /// The worker runs the script and rolls itself back (fast)
    Rollback,
    /// The worker forks a child for each script (works on every kernel)
    Fork,
}

#[derive(Args, Debug)]
pub(crate) struct RunArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Wait this long for a place in the server's queue, instead of failing when it is full
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    wait: Option<Duration>,
    /// Start the server's interpreter if the server is absent, busy or refuses the program or an option
    #[arg(long)]
    fallback: bool,
    /// Arguments of python3: [-u] [-B] [-P] [-W FILTER] SCRIPT ..., -c TEXT ..., -m MODULE ..., or -
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "PYTHON ARGUMENTS")]
    python: Vec<OsString>,
}

/// The exit status for what only a new interpreter can do.
const REFUSED: i32 = 76;

/// Runs the subcommand. `orrery warm run` ends this process as the program ended.
///
/// # Errors
/// A message for the user.
pub(crate) fn run(arguments: Arguments) -> anyhow::Result<()> {
    match arguments.command {
        Command::Serve(arguments) => serve(arguments),
        Command::Run(arguments) => run_program(arguments),
        // Checked here, served there.
        Command::Http(_checked) => orrery_warm_http::command::execute(std::env::args_os().skip(1)),
        Command::Status(socket) => print_status(&socket),
        Command::Reload(socket) => reload(&socket),
    }
}

impl SocketArgument {
    fn path(&self) -> anyhow::Result<PathBuf> {
        self.socket
            .clone()
            .or_else(default_socket)
            .context("no socket: pass --socket or set ORRERY_WARM (XDG_RUNTIME_DIR is unset)")
    }
}

/// Returns the socket of a server if none is named: `$ORRERY_WARM`, else `$XDG_RUNTIME_DIR/orrery-warm.socket`.
pub(crate) fn default_socket() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("ORRERY_WARM").or_else(|| Some(variable("XDG_RUNTIME_DIR")?.join("orrery-warm.socket")))
}

fn serve(arguments: ServeArguments) -> anyhow::Result<()> {
    let passed = passed_sockets(&arguments)?;
    let socket = match &passed {
        Some(passed) => passed.path().to_owned(),
        // The workers' working directory is the root, so that the server keeps no file system busy.
        None => absolute(&arguments.socket.path()?)?,
    };
    let sandbox = arguments.sandbox.then_some(Sandbox {
        read: arguments.read,
        write: arguments.write,
        net: arguments.net,
    });
    let config = ServerConfig {
        socket,
        workers: arguments.workers.unwrap_or_else(usable_cpus),
        queue: arguments.queue,
        watch: arguments.watch.iter().map(|directory| absolute(directory)).collect::<anyhow::Result<_>>()?,
        worker: WorkerConfig {
            interpreter: interpreter(arguments.python.flatten().as_deref(), arguments.imports)?,
            isolation: match arguments.isolate {
                Isolation::Rollback => config::Isolation::Rollback,
                Isolation::Fork => config::Isolation::Fork,
            },
            limits: Limits {
                time: arguments.timeout.filter(|time| !time.is_zero()),
                memory: arguments.memory,
            },
            sandbox,
        },
    };
    Ok(server::serve(&config, passed)?)
}

/// Takes the sockets that the service manager passed to this process, if it passed any.
fn passed_sockets(arguments: &ServeArguments) -> anyhow::Result<Option<Passed>> {
    let passed = orrery_sys::service_manager::passed_descriptors().context(
        "cannot take the sockets that LISTEN_PID and LISTEN_FDS announce; unset these to do without",
    )?;
    if passed.is_empty() {
        return Ok(None);
    }
    if let Some(socket) = &arguments.socket.socket {
        bail!(
            "cannot listen on {}: the service manager passed a socket to listen on; leave --socket out, or start the server \
             without its socket unit",
            socket.display()
        );
    }
    Ok(Some(Passed::new(passed, arguments.queue)?))
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("cannot make {} an absolute path", path.display()))
}

/// Returns the number of CPUs that this process may use: its affinity mask, and the CPU quota of its control group.
fn usable_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Finds the interpreter, and asks it what it is.
fn interpreter(named: Option<&Path>, imports: Vec<String>) -> anyhow::Result<Interpreter> {
    let environment = std::env::var_os("VIRTUAL_ENV").filter(|directory| !directory.is_empty());
    let executable = match (named, environment) {
        (Some(named), _) => find_interpreter(named)?,
        (None, Some(directory)) => Path::new(&directory).join("bin/python3"),
        (None, None) => "/usr/bin/python3".into(),
    };
    let shown = executable.display();
    // Without the user's and the site's modules, which may print something.
    let output = std::process::Command::new(&executable)
        .args(["-I", "-S", "-c", "import sys; sys.stdout.write(sys.version)"])
        .output()
        .with_context(|| format!("cannot start the interpreter {shown}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("cannot start the interpreter {shown}: {}: {}", output.status, said.trim());
    }
    let version = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(Interpreter { executable, version, imports })
}

/// The absolute path of an interpreter; a name without a slash is looked for in `PATH`.
fn find_interpreter(named: &Path) -> anyhow::Result<PathBuf> {
    if named.components().count() > 1 || named.is_absolute() {
        return absolute(named);
    }
    let directories = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&directories)
        .map(|directory| directory.join(named))
        .find(|path| path.is_file());
    found.with_context(|| format!("cannot find the interpreter {} in PATH", named.display()))
}

/// Runs a program on a server, and ends this process as the program ended.
///
/// # Errors
/// A message for the user.
pub(crate) fn run_program(arguments: RunArguments) -> anyhow::Result<()> {
    let socket = arguments.socket.path()?;
    let fallback = arguments.fallback.then(|| {
        let interpreter = server::interpreter_of(&socket).unwrap_or_else(|| "python3".into());
        std::iter::once(interpreter.into_os_string())
            .chain(arguments.python.iter().cloned())
            .collect::<Vec<_>>()
    });
    let parsed = PythonArguments::parse(&arguments.python).and_then(|python| {
        if matches!(python.source, Source::Stdin { .. }) && io::IsTerminal::is_terminal(&io::stdin()) {
            bail!("cannot run an interactive session on a server: run python3, or with --fallback");
        }
        Ok(python)
    });
    let python = match (parsed, fallback.as_ref()) {
        (Ok(python), _) => python,
        (Err(_), Some(command)) => become_python(command),
        (Err(error), None) => {
            eprintln!("orrery: {error:#}");
            std::process::exit(REFUSED);
        }
    };
    let job = Job::new(python.source)
        .arguments(python.arguments)
        .options(python.unbuffered, python.no_bytecode, python.safe_path, python.warnings)
        .standard_streams();
    run_as_python(AsPython { client: Client::new(socket).wait(arguments.wait), job, fallback })
}

fn reload(socket: &SocketArgument) -> anyhow::Result<()> {
    let workers = Client::new(socket.path()?).reload()?;
    println!("{workers} new {}", if workers == 1 { "worker serves" } else { "workers serve" });
    Ok(())
}

fn print_status(socket: &SocketArgument) -> anyhow::Result<()> {
    let health = Client::new(socket.path()?).health()?;
    println!(
        "up {} s, {} requests served, {} workers replaced",
        health.uptime, health.served, health.restarts
    );
    for worker in &health.workers {
        let state = match (worker.ready, worker.busy) {
            (false, _) => "starting",
            (true, false) => "idle",
            (true, true) => "busy",
        };
        println!("worker {}: {state}, {} requests served", worker.pid, worker.served);
    }
    Ok(())
}
