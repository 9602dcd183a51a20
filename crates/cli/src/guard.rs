//! `orrery guard`: a program whose files, programs, addresses and system calls a policy decides about.

mod oci;
mod profile;
mod settings;
mod suggest;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::process::exit;

use anyhow::{Context as _, Result, bail};
use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use orrery_monitor::{
    Audit, End, Error, Explanation, Guard, Log, Policy, SeccompProfile, Unused, block_signals,
};

/// Run a program of which a policy says what files, programs and addresses it may use.
///
/// The program, all its threads and all that it starts ask a monitor, which they cannot reach, and which performs what the
/// policy allows. Ends as the program ends; 125 where the guard itself failed, 126 or 127 where the program could not be
/// started.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Option<Subcommands>,
    /// The policy, in TOML
    #[arg(long, value_name = "FILE", required_unless_present_any = ["learn", "profile", "settings"])]
    policy: Option<PathBuf>,
    /// A ready policy for programs of this kind, which work in the current directory
    #[arg(long, value_name = "NAME", conflicts_with_all = ["policy", "learn", "settings"])]
    #[arg(value_parser = PossibleValuesParser::new(profile::names()))]
    profile: Option<String>,
    /// The policy that the settings of a sandbox runtime of coding agents mean: JSON with filesystem and network
    #[arg(long, value_name = "FILE", conflicts_with_all = ["policy", "learn"])]
    settings: Option<PathBuf>,
    /// Print the policy of --profile or --settings, and run nothing
    #[arg(long, conflicts_with_all = ["policy", "learn"])]
    print: bool,
    /// Refuse nothing, and add what the program did to the policy in FILE, which is made if it is not there
    #[arg(long, value_name = "FILE", conflicts_with = "policy")]
    learn: Option<PathBuf>,
    /// With --learn, replace what FILE says
    #[arg(long, requires = "learn")]
    force: bool,
    /// Have the program that listens at this Unix socket asked about files and addresses that the policy does not allow
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["learn", "check", "print"])]
    ask: Option<PathBuf>,
    /// Have the kernel refuse what the seccomp profile of a container in FILE refuses, too: the JSON of Docker, Podman or OCI runtimes
    #[arg(long, value_name = "FILE", conflicts_with_all = ["learn", "print"])]
    seccomp: Option<PathBuf>,
    /// Append refusals to this file, one line of JSON each, instead of telling them on standard error
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// At the end, print the lines of a policy that would allow what was refused, instead of each refusal
    #[arg(long, conflicts_with = "learn")]
    suggest: bool,
    /// At the end, print the entries of the policy that allow something which the run did not use
    #[arg(long, requires = "policy", conflicts_with_all = ["profile", "settings", "learn", "check", "explain"])]
    unused: bool,
    /// Say nothing of refusals
    #[arg(long, conflicts_with_all = ["log", "suggest"])]
    quiet: bool,
    /// Do without the second wall, Landlock
    #[arg(long)]
    no_landlock: bool,
    /// Read the policy, tell of its errors, and run nothing
    #[arg(long, conflicts_with = "learn")]
    check: bool,
    /// Tell who decides about which calls under this policy, and why, and run nothing
    #[arg(long, conflicts_with = "learn")]
    explain: bool,
    /// Set a variable of the program's environment
    #[arg(long = "env", value_name = "NAME=VALUE")]
    variables: Vec<OsString>,
    /// The program and its arguments
    #[arg(value_name = "PROGRAM", trailing_var_arg = true, required_unless_present_any = ["check", "explain", "print"])]
    program: Vec<OsString>,
}

#[derive(Subcommand)]
#[command(defer = true)]
enum Subcommands {
    Oci(oci::Arguments),
}

/// What shells return for what they cannot start.
const FAILED: i32 = 125;
const NOT_EXECUTABLE: i32 = 126;
const NOT_FOUND: i32 = 127;

/// Runs the program, and ends this process as it ended.
///
/// # Errors
/// None that concern the program: they end the process with their own status.
pub(crate) fn run(arguments: Arguments) -> Result<()> {
    if let Some(Subcommands::Oci(arguments)) = &arguments.command {
        return oci::run(arguments);
    }
    let checking = arguments.check || arguments.explain || arguments.print;
    match guarded(arguments) {
        Ok(_) if checking => Ok(()),
        end => end_as("guard", end),
    }
}

/// Ends this process as the program ended, or as shells do where it could not be started.
pub(crate) fn end_as(command: &str, end: Result<End>) -> ! {
    match end {
        Ok(End::Exited(status)) => exit(status),
        Ok(End::Killed(signal)) => die_of(signal),
        Err(error) => {
            match error.downcast_ref::<Error>() {
                // These tell their causes themselves.
                Some(error) => eprintln!("orrery {command}: {error}"),
                None => eprintln!("orrery {command}: {error:#}"),
            }
            exit(match error.downcast_ref() {
                Some(Error::Execute { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                    NOT_FOUND
                }
                Some(Error::Execute { .. }) => NOT_EXECUTABLE,
                _ => FAILED,
            });
        }
    }
}

fn guarded(arguments: Arguments) -> Result<End> {
    if arguments.print {
        match (&arguments.profile, &arguments.settings) {
            (Some(name), _) => print!("{}", profile::text(name)?),
            (None, Some(path)) => print!("{}", settings::text(path)?),
            (None, None) => bail!("cannot print a policy: name one by --profile or --settings"),
        }
        return Ok(End::Exited(0));
    }
    let policy = match (&arguments.policy, &arguments.profile, &arguments.settings) {
        (Some(path), ..) => Policy::load(path)?,
        (None, Some(name), _) => profile::policy(name)?,
        (None, None, Some(path)) => settings::policy(path)?,
        (None, None, None) => Policy::learning(),
    };
    let policy = match &arguments.seccomp {
        Some(path) => policy.with_seccomp_profile(SeccompProfile::load(path)?),
        None => policy,
    };
    let runs = !arguments.check && !arguments.explain;
    let suggests = arguments.suggest && runs;
    let audit = arguments.policy.as_ref().filter(|_| arguments.unused);
    let audit = audit.map(|path| Ok::<_, Error>((path, Audit::load(path)?))).transpose()?;
    let record = suggests.then(|| suggest::Record::new(arguments.log.as_deref())).transpose()?;
    let log = match (&record, arguments.log) {
        (Some(record), _) => Log::JsonLines(record.path().to_owned()),
        (None, Some(path)) => Log::JsonLines(path),
        (None, None) if arguments.quiet => Log::Nowhere,
        (None, None) => Log::Words,
    };
    let mut guard = Guard::new(policy.clone()).log(log);
    if arguments.no_landlock {
        guard = guard.landlock(false);
    }
    if let Some(socket) = &arguments.ask {
        guard = guard.ask(socket);
    }
    if audit.is_some() {
        guard = guard.audit();
    }
    if let Some(path) = &arguments.learn {
        guard = guard.learn(path).forget(arguments.force);
    }
    if !runs {
        let held = guard.explain()?;
        if arguments.explain {
            print!("{}", table(&held));
        }
        return Ok(End::Exited(0));
    }
    let Some((program, rest)) = arguments.program.split_first() else { bail!("name a program after --") };
    let mut run = guard.program(program).arguments(rest);
    for variable in &arguments.variables {
        let (name, value) = name_and_value(variable)
            .with_context(|| format!("cannot set {}: write NAME=VALUE", variable.display()))?;
        run = run.variable(name, value);
    }
    block_signals();
    let mut usage = None;
    let end = run.start().and_then(|guarded| {
        usage = Some(guarded.usage());
        guarded.supervise()
    });
    if let (Some((path, audit)), Some(usage)) = (&audit, &usage) {
        eprint!("orrery guard: {}", unused(&path.display().to_string(), &audit.unused(usage)));
    }
    if let Some(record) = record {
        match record.suggestion(&policy)? {
            Some(text) => eprint!("orrery guard: {text}"),
            None if end.is_ok() => eprintln!("orrery guard: nothing was refused"),
            None => (),
        }
    }
    Ok(end?)
}

/// Returns the report of an audit of the policy in the file `name`.
fn unused(name: &str, unused: &[Unused]) -> String {
    if unused.is_empty() {
        return format!("the run used all that {name} allows\n");
    }
    let mut text = format!("the run did not use {} of the entries of {name}:\n", unused.len());
    for one in unused {
        let entry = toml::Value::String(one.entry.clone());
        text.push_str(&format!(
            "{name}:{}:{}: [{}] {} = {entry}\n",
            one.line, one.column, one.section, one.key
        ));
    }
    text
}

/// Splits a variable at its first `=`.
fn name_and_value(variable: &OsStr) -> Option<(&OsStr, &OsStr)> {
    let bytes = variable.as_bytes();
    let at = bytes.iter().position(|&byte| byte == b'=').filter(|&at| at > 0)?;
    Some((OsStr::from_bytes(&bytes[..at]), OsStr::from_bytes(&bytes[at + 1..])))
}

/// Who decides about what, a line each.
fn table(held: &[Explanation]) -> String {
    let width =
        |column: fn(&Explanation) -> &str| held.iter().map(|held| column(held).len()).max().unwrap_or(0);
    let (calls, by) = (width(|held| held.calls), width(|held| held.by));
    held.iter().map(|held| format!("{:calls$}  {:by$}  {}\n", held.calls, held.by, held.because)).collect()
}

/// Ends this process as the program ended, so that a shell sees the same.
fn die_of(signal: i32) -> ! {
    // SAFETY: no memory is concerned: no core is dumped, the default action is set, and the signal sent to this process.
    unsafe {
        libc::setrlimit(libc::RLIMIT_CORE, &libc::rlimit { rlim_cur: 0, rlim_max: 0 });
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
    exit(128 + signal)
}
