//! `orrery run`: a program with an executive under it, and nothing else changed but what a policy says.

mod enforce;
mod services;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use orrery_hijack::policy::Manager;
use orrery_hijack::{Hijack, Options, Policy};

use crate::trace::attached::Attached;
use crate::trace::{self, Extras, Style};

/// Run a program under an executive, through which all its system calls pass
///
/// The program replaces this process: its PID, exit status, signals, terminal and parent are its own. Where a policy logs
/// calls, this process stays as its parent to write them, and exits as the program does.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Apply the rules of this policy to system calls
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,

    /// Write the calls that the policy logs to this file [default: standard error]
    #[arg(long, value_name = "FILE", requires = "policy")]
    log: Option<PathBuf>,

    /// Check the policy without running a program
    #[arg(long, requires = "policy")]
    check: bool,

    /// Enforce the policy against hostile code, by a monitor outside of the program. With --check: list the rules that are
    /// enforced
    #[arg(long, requires = "policy")]
    enforce: bool,

    /// Let run, with a warning, what a policy that denies something cannot be applied to: programs that are traced, gain privileges,
    /// leave no room for the executive, and io_uring and calls newer than this version. By default they are refused
    #[arg(long, requires = "policy")]
    no_strict: bool,

    /// Do not rewrite the program's code: the kernel dispatches every call
    #[arg(long)]
    no_patch: bool,

    #[command(flatten)]
    services: services::Options,

    #[command(flatten)]
    manager: crate::manager::Options,

    /// Put the executive under a process that runs already, for what it and what it starts do from now on, in place of a program; repeatable
    #[arg(short = 'p', long, value_name = "PID,...", value_delimiter = ',', conflicts_with_all = ["command", "enforce", "check"],
        value_parser = clap::value_parser!(i32).range(1..))]
    attach: Vec<i32>,

    /// The program and its arguments
    #[arg(required_unless_present_any = ["check", "attach"], trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Executes the program in place of this one.
///
/// # Errors
/// The program cannot be executed, or the policy is wrong.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let policy = arguments.policy.as_deref().map(read).transpose()?;
    let given = policy.as_ref().map(Policy::services).cloned().unwrap_or_default();
    let services = arguments.services.services().or(given);
    if let Some((inner, outer)) = services.nested() {
        let (inner, outer) = (inner.prefix().display(), outer.prefix().display());
        anyhow::bail!("cannot mount {inner}: it is within {outer}, which is mounted, too; mount one archive");
    }
    let own = std::process::id().cast_signed();
    if arguments.enforce {
        if let Some(mount) = services.mounts.first() {
            anyhow::bail!(
                "cannot enforce rules about what is mounted at {}: its only path leads through the supervisor; unpack the archive, \
                 and have a rule rewrite the path to that directory",
                mount.prefix().display()
            );
        }
        let policy = policy.unwrap_or_default();
        if let Some(program) = arguments.command.first().filter(|_| !arguments.check) {
            arguments.manager.join(own, Path::new(program), policy.manager(), None)?;
        }
        return enforce::run(arguments, policy.with_services(services));
    }
    if arguments.check {
        return Ok(());
    }
    let logs = policy.as_ref().is_some_and(Policy::tells) && !arguments.manager.receives_calls();
    let log = open_log(arguments)?;
    let policy = policy.unwrap_or_default().with_services(services);
    let (manager, stays) = (policy.manager().cloned(), policy.denies());
    let options = Options::default().counted(false).patch(!arguments.no_patch).policy(policy);
    let options = options.strict(!arguments.no_strict);
    let Some((program, rest)) = arguments.command.split_first() else {
        return attach(arguments, options, manager.as_ref(), logs.then_some(log), stays);
    };
    let hijack = Hijack::start(options)?;
    let journal = arguments.manager.receives_calls().then(|| hijack.journal());
    arguments.manager.join(own, Path::new(program), manager.as_ref(), journal)?;
    crate::pipes::restore();
    if !logs {
        return Err(hijack.execute(program, rest).into());
    }
    let status = trace::follow(&hijack, program, rest, log, Style::default(), Extras::default())?;
    trace::end_as(status)
}

/// Puts executives under processes that run. Stays while they do, where the policy logs calls, to write them.
///
/// # Errors
/// None of the processes gets an executive, or a manager refuses one.
fn attach(
    arguments: &Arguments,
    options: Options,
    manager: Option<&Manager>,
    log: Option<Box<dyn Write + Send>>,
    stays: bool,
) -> anyhow::Result<()> {
    let mut processes = Attached::find(&arguments.attach)?;
    let hijack = Hijack::prepare()?;
    let journal = arguments.manager.receives_calls().then(|| hijack.journal());
    for process in &arguments.attach {
        let program = fs::read_link(format!("/proc/{process}/exe")).unwrap_or_default();
        arguments.manager.join(*process, &program, manager, journal)?;
    }
    crate::pipes::restore();
    match log {
        Some(log) => {
            let (style, extras) = (Style::default(), Extras::default());
            trace::follow_running(&hijack, options, processes, log, style, extras, stays)
        }
        None => processes.attach(&hijack, options),
    }
}

/// Opens the file for the calls that the policy logs.
fn open_log(arguments: &Arguments) -> anyhow::Result<Box<dyn Write + Send>> {
    Ok(match &arguments.log {
        Some(path) => {
            Box::new(File::create(path).with_context(|| format!("cannot create {}", path.display()))?)
        }
        None => Box::new(io::stderr()),
    })
}

/// Reads a policy.
///
/// # Errors
/// What is wrong with it, and where.
pub(crate) fn read(path: &Path) -> anyhow::Result<Policy> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Policy::parse(&text, &path.display().to_string())?)
}
