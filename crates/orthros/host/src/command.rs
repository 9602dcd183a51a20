//! Programs of the system that are run to their end.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Result};

/// Returns where a program is, looked for as a shell would and then where administrators' programs are.
#[must_use]
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(more)
        .map(|directory| directory.join(program))
        .find(|path| path.is_file())
}

/// The same, where its absence is an error that names the package to install.
///
/// # Errors
///
/// [`Error::Missing`].
pub fn require(program: &str, package: &'static str) -> Result<PathBuf> {
    find(program).ok_or_else(|| Error::Missing { program: program.to_owned(), package })
}

/// Runs a program to its end and gives what it printed, which is text.
pub(crate) fn run<S: AsRef<OsStr>>(program: &Path, arguments: &[S], within: Option<&Path>) -> Result<String> {
    Ok(String::from_utf8_lossy(&output_of(program, arguments, within)?).into_owned())
}

/// Runs a program to its end and gives what it printed.
pub(crate) fn output_of<S: AsRef<OsStr>>(
    program: &Path,
    arguments: &[S],
    within: Option<&Path>,
) -> Result<Vec<u8>> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    if let Some(directory) = within {
        command.current_dir(directory);
    }
    let shown = || {
        let words = arguments.iter().map(|word| word.as_ref().to_string_lossy().into_owned());
        std::iter::once(program.display().to_string()).chain(words).collect::<Vec<_>>().join(" ")
    };
    let failed = |why: String| Error::Command { command: shown(), why };
    let output = command.output().map_err(|error: io::Error| failed(error.to_string()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(failed(format!("{}: {}", output.status, said.trim())));
    }
    Ok(output.stdout)
}
