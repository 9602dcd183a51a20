//! The command line, for `orrery warm` and for `orrery-warm` alike: `clap` structures and what they do.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};

use crate::client::{Client, Job, Source, StandIn, stand_in};
use crate::config::{Interpreter, Isolation, Limits, Sandbox, ServerConfig, WorkerConfig};

/// What `orrery warm` can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a server: interpreters kept warm, every script in a pristine one.
    Serve(ServeArgs),
    /// Run a program there: a stand-in for `python3`, fit for a script's first line.
    Run(RunArgs),
    /// Show how a server is.
    Status(StatusArgs),
}

impl Command {
    /// Does it.
    ///
    /// # Errors
    /// What went wrong, for the user to read.
    pub fn execute(self) -> anyhow::Result<()> {
        match self {
            Self::Serve(arguments) => arguments.execute(),
            Self::Run(arguments) => arguments.execute(),
            Self::Status(arguments) => arguments.execute(),
        }
    }
}

/// Where the server is.
#[derive(Debug, Args)]
pub struct SocketArg {
    /// The server's Unix socket; by default $ORRERY_WARM, else orrery-warm.socket in $XDG_RUNTIME_DIR.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

impl SocketArg {
    /// The path that was given, or the default.
    ///
    /// # Errors
    /// Where there is none.
    pub fn path(&self) -> anyhow::Result<PathBuf> {
        let of = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let default =
            || of("ORRERY_WARM").or_else(|| Some(of("XDG_RUNTIME_DIR")?.join("orrery-warm.socket")));
        self.socket.clone().or_else(default).context(
            "where is the server? Give --socket PATH, or set ORRERY_WARM (there is no XDG_RUNTIME_DIR either)",
        )
    }
}

/// `orrery warm serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Keep CPython warm; with a path, the one of that virtual environment.
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true, required = true,
          default_missing_value = "/usr/bin/python3")]
    pub python: PathBuf,
    /// Modules to import before the first request.
    #[arg(long = "import", value_name = "MODULE,...", value_delimiter = ',')]
    pub imports: Vec<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: SocketArg,
    /// Workers, each of which runs one script at a time.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub workers: usize,
    /// Longest time that a script may run, e.g. 2s or 500ms; no limit without.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub timeout: Option<Duration>,
    /// Most memory that a script may use beyond the warm interpreter's, e.g. 256M; no limit without.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Scripts that may wait for a worker before others are told that the server is busy.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub queue: u16,
    /// How a script is kept from the next.
    #[arg(long, value_enum, default_value_t = Isolation::Rollback)]
    pub isolate: Isolation,
    /// Wall the workers in: system call filter, file access by list, own process ids, no network.
    #[arg(long)]
    pub sandbox: bool,
    /// In the sandbox, let scripts read and execute what is there (the system's own directories are allowed).
    #[arg(long, value_name = "PATH", requires = "sandbox")]
    pub read: Vec<PathBuf>,
    /// In the sandbox, let scripts read and change what is there.
    #[arg(long, value_name = "PATH", requires = "sandbox")]
    pub write: Vec<PathBuf>,
    /// In the sandbox, let scripts use the network.
    #[arg(long, requires = "sandbox")]
    pub net: bool,
}

impl ServeArgs {
    /// Serves until it is told to stop.
    ///
    /// # Errors
    /// Why the server could not start, or ended.
    pub fn execute(self) -> anyhow::Result<()> {
        let socket = self.socket.path()?;
        // The workers' directory is the root, so that the server keeps no file system busy.
        let socket = std::path::absolute(&socket).with_context(|| format!("{}", socket.display()))?;
        let sandbox = self.sandbox.then_some(Sandbox { read: self.read, write: self.write, net: self.net });
        crate::server::serve(&ServerConfig {
            socket,
            workers: self.workers,
            queue: self.queue,
            worker: WorkerConfig {
                interpreter: Interpreter { executable: self.python, imports: self.imports },
                isolation: self.isolate,
                limits: Limits { time: self.timeout.filter(|time| !time.is_zero()), memory: self.memory },
                sandbox,
            },
        })?;
        Ok(())
    }
}

/// `orrery warm run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: SocketArg,
    /// Wait so long for a place in the server's queue instead of failing when it is full.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub wait: Option<Duration>,
    /// Start a python3 of one's own where the server is not there, is busy or cannot do it.
    #[arg(long)]
    pub fallback: bool,
    /// What would follow `python3`: `[-u] [-B] [-P] [-W filter] script.py ...`, `-c text ...`, `-m module ...`, `-`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "PYTHON ARGUMENTS")]
    pub python: Vec<OsString>,
}

impl RunArgs {
    /// Runs the program and ends this process as the program ended.
    ///
    /// # Errors
    /// What is wrong with the command line. Everything else ends the process.
    pub fn execute(self) -> anyhow::Result<()> {
        let socket = self.socket.path()?;
        let line = PythonLine::parse(&self.python)?;
        if matches!(line.source, Source::Stdin { .. }) && io::IsTerminal::is_terminal(&io::stdin()) {
            bail!("an interactive session needs an interpreter of its own: run python3 itself");
        }
        let job = Job::new(line.source)
            .arguments(line.arguments)
            .options(line.unbuffered, line.no_bytecode, line.safe_path, line.warnings)
            .standard_streams();
        let fallback = self.fallback.then(|| std::iter::once("python3".into()).chain(self.python).collect());
        stand_in(StandIn { client: Client::new(socket).wait(self.wait), job, fallback })
    }
}

/// A command line of `python3`, as far as a warm interpreter can follow it.
#[derive(Debug, PartialEq, Eq)]
struct PythonLine {
    unbuffered: bool,
    no_bytecode: bool,
    safe_path: bool,
    warnings: Vec<OsString>,
    source: Source,
    arguments: Vec<OsString>,
}

impl PythonLine {
    /// Parses options as `python3` does: letters may be joined, a value may follow its letter at once or as the next
    /// word, and `-c` and `-m` end the options.
    fn parse(words: &[OsString]) -> anyhow::Result<Self> {
        let mut line = Self {
            unbuffered: false,
            no_bytecode: false,
            safe_path: false,
            warnings: Vec::new(),
            source: Source::Stdin { dash: false },
            arguments: Vec::new(),
        };
        let mut words = words.iter().cloned();
        while let Some(word) = words.next() {
            let letters = match word.as_bytes() {
                b"-" => {
                    line.source = Source::Stdin { dash: true };
                    break;
                }
                b"--" => {
                    line.source = words.next().map_or(line.source, Source::Script);
                    break;
                }
                [b'-', letters @ ..] => letters,
                _ => {
                    line.source = Source::Script(word);
                    break;
                }
            };
            for (index, letter) in letters.iter().enumerate() {
                let rest = &letters[index + 1..];
                let mut value = || {
                    let attached = (!rest.is_empty()).then(|| OsStr::from_bytes(rest).to_owned());
                    let value = attached.or_else(|| words.next());
                    value
                        .with_context(|| format!("argument expected for the -{} option", char::from(*letter)))
                };
                match letter {
                    b'u' => line.unbuffered = true,
                    b'B' => line.no_bytecode = true,
                    b'P' => line.safe_path = true,
                    b'W' => {
                        line.warnings.push(value()?);
                        break;
                    }
                    b'c' => {
                        line.source = Source::Command(value()?);
                        line.arguments = words.collect();
                        return Ok(line);
                    }
                    b'm' => {
                        line.source = Source::Module(value()?);
                        line.arguments = words.collect();
                        return Ok(line);
                    }
                    _ => bail!(
                        "{} is no option of a warm interpreter (-u -B -P -W -c -m are): run python3 itself",
                        word.display()
                    ),
                }
            }
        }
        line.arguments = words.collect();
        Ok(line)
    }
}

/// `orrery warm status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: SocketArg,
}

impl StatusArgs {
    /// Prints how the server is.
    ///
    /// # Errors
    /// Where there is none.
    pub fn execute(self) -> anyhow::Result<()> {
        let health = Client::new(self.socket.path()?).health()?;
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
}

/// A time with a unit: `2s`, `500ms`, `1.5m`; seconds without.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let factor = match &text[digits.len()..] {
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        unit => return Err(format!("{unit:?} is no unit of time: use ms, s, m or h")),
    };
    let number: f64 = digits.parse().map_err(|_| format!("{digits:?} is no number"))?;
    Duration::try_from_secs_f64(number * factor).map_err(|error| error.to_string())
}

/// A size with a unit: `256M`, `1G`, `65536`; bytes without, powers of 1024 with.
fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match text[digits.len()..].trim_end_matches(['B', 'b', 'i']) {
        "" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        unit => return Err(format!("{unit:?} is no unit of size: use K, M, G or T")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{digits:?} is no whole number"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is more than there is"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_as_python3_reads_them() {
        let parse = |words: &[&str]| {
            let words: Vec<_> = words.iter().map(OsString::from).collect();
            PythonLine::parse(&words)
        };
        let line = parse(&["-uBWerror", "-W", "ignore", "-c", "pass", "-u", "x"]).unwrap();
        assert!(line.unbuffered && line.no_bytecode && !line.safe_path);
        assert_eq!(line.warnings, ["error", "ignore"]);
        assert_eq!(
            (line.source, line.arguments),
            (Source::Command("pass".into()), vec!["-u".into(), "x".into()])
        );
        let line = parse(&["-P", "--", "-odd-name.py", "-c"]).unwrap();
        assert_eq!((line.source, line.arguments), (Source::Script("-odd-name.py".into()), vec!["-c".into()]));
        assert_eq!(parse(&["-mjson.tool"]).unwrap().source, Source::Module("json.tool".into()));
        assert_eq!(parse(&[]).unwrap().source, Source::Stdin { dash: false });
        assert_eq!(parse(&["-", "x"]).unwrap().source, Source::Stdin { dash: true });
        assert!(parse(&["-c"]).is_err() && parse(&["-i", "x.py"]).is_err() && parse(&["--version"]).is_err());
    }

    #[test]
    fn times_and_sizes_are_read_with_their_units() {
        assert_eq!(parse_duration("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("1.5"), Ok(Duration::from_millis(1500)));
        assert!(parse_duration("2 fortnights").is_err() && parse_duration("-1s").is_err());
        assert_eq!(parse_size("256M"), Ok(256 << 20));
        assert_eq!(parse_size("1GiB"), Ok(1 << 30));
        assert_eq!(parse_size("4096"), Ok(4096));
        assert!(parse_size("99999999999T").is_err() && parse_size("many").is_err());
    }
}
