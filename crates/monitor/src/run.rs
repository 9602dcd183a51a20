//! Starting a program under guard, and staying with it until its end.

use std::ffi::{CString, OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::Error;
use crate::audit::Usage;
use crate::guard::Guard;
use crate::learning::Learning;
use crate::spawn::spawn;
use crate::state::State;
use orrery_sys::errno;

/// A program to be run under guard: see [`Guard::program`].
#[derive(Clone, Debug)]
pub struct Run {
    guard: Guard,
    program: OsString,
    arguments: Vec<OsString>,
    variables: Vec<(OsString, OsString)>,
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this status.
    Exited(i32),
    /// By this signal.
    Killed(i32),
}

/// A program that runs.
#[derive(Debug)]
pub struct Guarded {
    pub(crate) process: rustix::process::Pid,
    pub(crate) state: Arc<State>,
    pub(crate) learning: Option<Learning>,
}

impl Guarded {
    /// Returns what the policy allows to the program, which goes on being recorded, if [`Guard::audit`] asked for that.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage(Arc::clone(&self.state))
    }
}

impl Run {
    /// Its further arguments.
    #[must_use]
    pub fn arguments(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Sets a variable of its environment, which it otherwise has from the calling process.
    #[must_use]
    pub fn variable(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.variables.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Starts the program. The calling process becomes its monitor: it cannot be traced any more, and takes in the
    /// orphans of its descendants. It should do little else, and have no other threads yet.
    ///
    /// # Errors
    /// What kept the program from being started; then nothing of it has run.
    pub fn start(mut self) -> Result<Guarded, Error> {
        let program = found(&self.program).map_err(|source| Error::Execute {
            program: self.program.to_string_lossy().into_owned(),
            source,
            hint: "",
        })?;
        let text = |text: &OsStr| {
            CString::new(text.as_bytes()).map_err(|_| Error::Execute {
                program: self.program.to_string_lossy().into_owned(),
                source: Errno::INVAL.into(),
                hint: " (an argument contains a zero byte)",
            })
        };
        let path = text(program.as_os_str())?;
        let mut arguments = vec![text(&self.program)?];
        for argument in &self.arguments {
            arguments.push(text(argument)?);
        }
        let is_set = |name: &OsString| self.variables.iter().any(|(set, _)| set == name);
        let environment: Vec<CString> = std::env::vars_os()
            .filter(|(name, _)| !is_set(name))
            .chain(self.variables.iter().cloned())
            .filter_map(|(name, value)| {
                CString::new([name.into_vec(), b"=".to_vec(), value.into_vec()].concat()).ok()
            })
            .collect();
        let pointers = |texts: &[CString]| -> Vec<*const libc::c_char> {
            texts.iter().map(|text| text.as_ptr()).chain(std::iter::once(std::ptr::null())).collect()
        };
        let (arguments, environment) = (pointers(&arguments), pointers(&environment));
        let execute = |_: &mut Option<OwnedFd>| {
            // SAFETY: all texts end with a zero, both lists with a null pointer.
            let failed =
                unsafe { syscall!(Sysno::execve, path.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
            failed.map_err(errno).err().unwrap_or(Errno::IO)
        };
        let learning = self.guard.learning()?;
        let has_profile = !self.guard.policy.profiles.is_empty();
        let (process, state, failure) = spawn(self.guard, execute)?;
        if let Some(failure) = failure {
            let _ = rustix::process::waitpid(Some(process), rustix::process::WaitOptions::empty());
            return Err(Error::Execute {
                program: program.display().to_string(),
                source: failure.into(),
                hint: match failure {
                    Errno::ACCESS => " (does the policy list it under execute?)",
                    _ if has_profile => " (does the seccomp profile allow execve?)",
                    _ => "",
                },
            });
        }
        Ok(Guarded { process, state, learning })
    }
}

impl Guard {
    /// A program to run, by path or by a name that is looked for in `PATH`.
    #[must_use]
    pub fn program(self, program: impl AsRef<OsStr>) -> Run {
        Run {
            guard: self,
            program: program.as_ref().to_owned(),
            arguments: Vec::new(),
            variables: Vec::new(),
        }
    }

    /// Starts a process in which `execute` executes a program: the calling process becomes its monitor, as with
    /// [`Run::start`]. `execute` runs under guard, in a copy of this process with one thread, and returns only why it
    /// could not.
    ///
    /// # Errors
    /// As of [`Run::start`].
    pub fn start_by(
        mut self,
        program: &OsStr,
        execute: impl FnOnce() -> std::io::Error,
    ) -> Result<Guarded, Error> {
        let learning = self.learning()?;
        let execute = |_: &mut Option<OwnedFd>| Errno::from_io_error(&execute()).unwrap_or(Errno::IO);
        let (process, state, failure) = spawn(self, execute)?;
        match failure {
            None => Ok(Guarded { process, state, learning }),
            Some(failure) => {
                let _ = rustix::process::waitpid(Some(process), rustix::process::WaitOptions::empty());
                let program = program.to_string_lossy().into_owned();
                Err(Error::Execute { program, source: failure.into(), hint: "" })
            }
        }
    }
}

/// Looks for a program as execvp(3) does.
fn found(program: &OsStr) -> std::io::Result<PathBuf> {
    if program.is_empty() {
        return Err(Errno::NOENT.into());
    }
    if program.as_bytes().contains(&b'/') {
        return Ok(PathBuf::from(program));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&path)
        .map(|directory| directory.join(program))
        .find(|path| path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok())
        .ok_or_else(|| std::io::Error::new(std::io::ErrorKind::NotFound, "not found in PATH"))
}
