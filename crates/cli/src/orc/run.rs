//! `orrery orc run`: an unmodified program that shares.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use orrery_orc_auditor::environment;
use orrery_orc_client::{Client, default_directory};
use orrery_orc_store::explain;

/// Run a program whose code and read-only data are shared with all programs that have the same bytes.
///
/// The program, and whatever it starts, finds the objects in place of its files' pages. What cannot be shared stays as it is.
#[derive(Args)]
pub(super) struct Arguments {
    /// The store's directory [default: ORRERY_ORC, /run/orrery/orc, or $XDG_RUNTIME_DIR/orrery/orc]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// Say on standard error what is left alone, and why
    #[arg(long)]
    verbose: bool,
    /// Share even where system calls are filtered (seccomp): for filters that allow sockets, as those of containers do
    #[arg(long)]
    filtered: bool,
    /// Leave all libraries at the addresses that the kernel chooses, again for each process; relocated data are then not shared
    #[arg(long)]
    random_places: bool,
    /// Print the variables that make programs share, for `docker run --env-file`, and run nothing
    #[arg(long, conflicts_with = "program")]
    print: bool,
    /// The program and its arguments
    #[arg(required_unless_present = "print", trailing_var_arg = true)]
    program: Vec<OsString>,
}

/// Runs it; returns only where it cannot.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let directory = arguments.directory.clone().unwrap_or_else(default_directory);
    let directory = std::path::absolute(directory).context("cannot find the working directory")?;
    Client::connect_to(&directory)?;
    let auditor = orrery_orc_auditor::find(&directory)
        .context("cannot find the auditor that the store has installed")?;
    let mut variables: Vec<(&str, OsString)> = vec![("ORRERY_ORC", directory.into_os_string())];
    let others = std::env::var_os("LD_AUDIT").unwrap_or_default();
    let auditor = orrery_orc_auditor::path_for_loaders(&auditor);
    variables.push(("LD_AUDIT", environment::audit_list(&others, auditor.as_os_str())));
    variables.push(("GLIBC_TUNABLES", environment::tunables(std::env::var_os("GLIBC_TUNABLES").as_deref())));
    if arguments.verbose {
        variables.push(("ORRERY_ORC_VERBOSE", "1".into()));
    }
    if arguments.filtered {
        variables.push(("ORRERY_ORC_SECCOMP", "share".into()));
    }
    if arguments.random_places {
        variables.push(("ORRERY_ORC_PLACES", "none".into()));
    }
    let Some((program, rest)) = arguments.program.split_first() else {
        let mut output = io::stdout().lock();
        for (name, value) in &variables {
            writeln!(output, "{name}={}", value.display()).context("cannot write to standard output")?;
        }
        return Ok(());
    };
    if arguments.verbose
        && let Some(obstacle) = find(program).and_then(|path| explain::program(&path).ok()?)
    {
        eprintln!("orrery orc: {}: left alone: {obstacle}", program.display());
    }
    let error = Command::new(program).args(rest).envs(variables).exec();
    bail!("run {}: {error}", program.display())
}

/// Returns where the program is.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_encoded_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found() {
        assert!(find(OsStr::new("sh")).unwrap().ends_with("sh"));
        assert_eq!(find(OsStr::new("no program has this name")), None);
    }
}
