//! Where Orrery's own helper programs are: those that users do not run by themselves.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The environment variable that names the directory of the helper programs.
pub const LIBEXEC_VARIABLE: &str = "ORRERY_LIBEXEC";

/// Finds a helper program: in `$ORRERY_LIBEXEC`, beside the running program (as in a build directory), in the directory above it
/// (where the tests of a build are one level deeper), or in `../libexec/orrery` from it (as `make install` puts it).
///
/// # Errors
///
/// `NotFound` with the directories that were searched.
pub fn find_helper(name: &str) -> io::Result<PathBuf> {
    find_in(&directories(env::var_os(LIBEXEC_VARIABLE).map(PathBuf::from), env::current_exe().ok()), name)
}

/// Executes a helper program with these arguments in place of this process; returns only where that fails, with the reason.
pub fn execute_helper(name: &str, arguments: impl IntoIterator<Item = OsString>) -> io::Error {
    let program = match find_helper(name) {
        Ok(program) => program,
        Err(error) => return error,
    };
    let error = Command::new(&program).args(arguments).exec();
    io::Error::new(error.kind(), format!("cannot execute {}: {error}", program.display()))
}

/// Returns the words of a command line without the names of the commands, each left out once and in this order, which a helper
/// program for the last of them does not have. The values of what may stand before a name, options of the log, are other words.
#[must_use]
pub fn without_commands(words: impl IntoIterator<Item = OsString>, commands: &[&str]) -> Vec<OsString> {
    let mut commands = commands.iter().peekable();
    words
        .into_iter()
        .filter(|word| commands.next_if(|command| word.as_os_str() == **command).is_none())
        .collect()
}

fn directories(libexec: Option<PathBuf>, executable: Option<PathBuf>) -> Vec<PathBuf> {
    let mut directories: Vec<PathBuf> = libexec.into_iter().collect();
    if let Some(own) = executable.as_deref().and_then(Path::parent) {
        directories.push(own.to_owned());
        if let Some(above) = own.parent() {
            directories.push(above.to_owned());
            directories.push(above.join("libexec/orrery"));
        }
    }
    directories
}

fn find_in(directories: &[PathBuf], name: &str) -> io::Result<PathBuf> {
    let found = directories.iter().map(|directory| directory.join(name)).find(|path| path.is_file());
    found.ok_or_else(|| {
        let message = format!(
            "the program {name} is in none of {}: install it, or set {LIBEXEC_VARIABLE} to its directory",
            directories
                .iter()
                .map(|directory| directory.display().to_string())
                .collect::<Vec<_>>()
                .join(", ")
        );
        io::Error::new(io::ErrorKind::NotFound, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_commands_are_left_out_once() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let given = words("--log-level debug warm --log-format json http --script warm --env http");
        assert_eq!(
            without_commands(given, &["warm", "http"]),
            words("--log-level debug --log-format json --script warm --env http")
        );
        let given = words("--log-level debug orc pull orc orc");
        assert_eq!(without_commands(given, &["orc"]), words("--log-level debug pull orc orc"));
    }

    #[test]
    fn a_helper_that_is_not_there_is_an_error() {
        let error = execute_helper("orrery-no-such-helper", []);
        assert!(
            error.kind() == io::ErrorKind::NotFound && error.to_string().contains("orrery-no-such-helper")
        );
    }

    #[test]
    fn helpers_are_found_where_a_build_or_an_installation_has_them() {
        let searched = directories(Some("/opt/helpers".into()), Some("/usr/bin/orrery".into()));
        assert_eq!(
            searched,
            ["/opt/helpers", "/usr/bin", "/usr", "/usr/libexec/orrery"].map(PathBuf::from).to_vec()
        );
        let root = directory();
        let helpers = root.join("libexec/orrery");
        std::fs::create_dir_all(&helpers).unwrap();
        std::fs::write(helpers.join("helper"), "").unwrap();
        let installed = directories(None, Some(root.join("bin/orrery")));
        assert_eq!(find_in(&installed, "helper").unwrap(), helpers.join("helper"));
        let error = find_in(&installed, "other").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(error.to_string().contains("libexec/orrery") && error.to_string().contains("ORRERY_LIBEXEC"));
        std::fs::remove_dir_all(&root).unwrap();
    }

    fn directory() -> PathBuf {
        let path = env::temp_dir().join(format!("orrery-helpers-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        path
    }
}
