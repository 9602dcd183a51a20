//! Starting a program under guard, and staying with it until its end.

use std::ffi::{CString, OsStr, OsString};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::listener::{Listener, errno, filter_this_thread};
use crate::log::{Log, Writer};
use crate::mediate::{Decision, Mediation, Request};
use crate::monitor::{Monitor, rules};
use crate::wall::Wall;
use crate::{Error, Policy, blocking};

/// A program to be run under guard.
#[derive(Clone, Debug)]
pub struct Run {
    program: OsString,
    arguments: Vec<OsString>,
    learn: Option<PathBuf>,
    settings: Settings,
}

/// How to guard.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) policy: Policy,
    pub(crate) log: Log,
    pub(crate) landlock: bool,
    pub(crate) mediation: Option<Mediation>,
}

impl Settings {
    /// With both walls. `ORRERY_GUARD_LANDLOCK=off` does without the second, as on a kernel without Landlock.
    pub(crate) fn new(policy: Policy) -> Self {
        let landlock = std::env::var_os("ORRERY_GUARD_LANDLOCK").is_none_or(|word| word != "off");
        Self { policy, log: Log::default(), landlock, mediation: None }
    }
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
    pub(crate) monitor: Arc<Monitor>,
    pub(crate) learn: Option<PathBuf>,
}

impl Run {
    /// A program, by path or by a name that is looked for in `PATH`.
    pub fn new(policy: Policy, program: impl AsRef<OsStr>) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            arguments: Vec::new(),
            learn: None,
            settings: Settings::new(policy),
        }
    }

    /// Its further arguments.
    #[must_use]
    pub fn arguments(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Where refusals are written.
    #[must_use]
    pub fn log(mut self, log: Log) -> Self {
        self.settings.log = log;
        self
    }

    /// Refuses nothing, and writes the policy that allows what was done to this file. Made for [`Policy::learning`].
    #[must_use]
    pub fn learn(mut self, path: impl AsRef<Path>) -> Self {
        self.learn = Some(path.as_ref().to_owned());
        self.settings.policy.learning = true;
        self
    }

    /// Whether to put up the second wall where the kernel has Landlock. It has.
    #[must_use]
    pub fn landlock(mut self, landlock: bool) -> Self {
        self.settings.landlock = landlock;
        self
    }

    /// Has `decide` asked about the calls of these names, before the policy. It runs in threads of this process.
    ///
    /// # Errors
    /// A name that no call has.
    pub fn mediate<'n>(
        mut self,
        calls: impl IntoIterator<Item = &'n str>,
        decide: impl Fn(&Request<'_>) -> Decision + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        self.settings.mediation = Some(Mediation::new(calls, decide)?);
        Ok(self)
    }

    /// Starts the program. The calling process becomes its monitor: it cannot be traced any more, and takes in the orphans
    /// of its descendants. It should do little else, and have no other threads yet.
    ///
    /// # Errors
    /// Whatever kept the program from being started; then nothing of it has run.
    pub fn start(self) -> Result<Guarded, Error> {
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
        let environment: Vec<CString> = std::env::vars_os()
            .filter_map(|(name, value)| {
                CString::new([name.into_vec(), b"=".to_vec(), value.into_vec()].concat()).ok()
            })
            .collect();
        let learn = self.learn.clone();
        let pointers = |texts: &[CString]| -> Vec<*const libc::c_char> {
            texts.iter().map(|text| text.as_ptr()).chain(std::iter::once(core::ptr::null())).collect()
        };
        let (arguments, environment) = (pointers(&arguments), pointers(&environment));
        let execute = |_: &mut Option<OwnedFd>| {
            // SAFETY: all texts end with a zero, both lists with a null pointer.
            let failed =
                unsafe { syscall!(Sysno::execve, path.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
            failed.map_err(errno).err().unwrap_or(Errno::IO)
        };
        let (process, monitor, failure) = guard(self.settings, execute)?;
        if let Some(failure) = failure {
            let _ = rustix::process::waitpid(Some(process), rustix::process::WaitOptions::empty());
            return Err(Error::Execute {
                program: program.display().to_string(),
                source: failure.into(),
                hint: if failure == Errno::ACCESS { " (does the policy list it under execute?)" } else { "" },
            });
        }
        Ok(Guarded { process, monitor, learn })
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

/// What the child tells: the number of its listener, then, if it comes to that, why the program could not start.
fn tell(pipe: Option<&OwnedFd>, number: i32) {
    let _ = pipe.map(|pipe| rustix::io::write(pipe, &number.to_ne_bytes()));
}

fn hear(pipe: &OwnedFd) -> Option<i32> {
    let mut bytes = [0; 4];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::io::read(pipe, &mut bytes[filled..]) {
            Ok(0) => return None,
            Ok(read) => filled += read,
            Err(Errno::INTR) => (),
            Err(_) => return None,
        }
    }
    Some(i32::from_ne_bytes(bytes))
}

/// Forks a process, puts the walls around it, starts the monitor's threads, and lets it do `work`, whose result is an error:
/// work that succeeds does not return, or has taken the pipe through which errors are told. Returns the process, the monitor, and the error, if it came to that before the
/// process ended or executed a program.
pub(crate) fn guard(
    settings: Settings,
    work: impl FnOnce(&mut Option<OwnedFd>) -> Errno,
) -> Result<(rustix::process::Pid, Arc<Monitor>, Option<Errno>), Error> {
    let Settings { policy, log, landlock, mediation } = settings;
    let wall = if landlock { Wall::new(&policy)? } else { Wall::none(&policy) };
    let rules = rules(&policy, wall.processes);
    let mut asked = rules.clone();
    for call in mediation.iter().flat_map(|mediation| &mediation.calls) {
        asked.set(*call, crate::filter::Action::Ask);
    }
    let program = asked.program();
    let log = Writer::new(&log)?;
    let limits = policy.limits;
    let pipe =
        || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(Error::kernel("making a pipe"));
    let (from_child, to_parent) = pipe()?;
    let (from_parent, to_child) = pipe()?;
    // SAFETY: without effects on memory.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
    let parent = rustix::process::getpid();
    // SAFETY: the child makes system calls and calls `work`; it does not return from here.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop((from_child, to_child));
        let mut to_parent = Some(to_parent);
        let failed = become_guarded(&limits, wall.rules.as_ref(), parent)
            .and_then(|()| filter_this_thread(&program))
            .and_then(|listener| {
                tell(to_parent.as_ref(), listener.as_raw_fd());
                let mut go = [0];
                // The monitor keeps the end of the pipe until it is ready; without a monitor there is nothing to do.
                match rustix::io::retry_on_intr(|| rustix::io::read(&from_parent, &mut go)) {
                    Ok(1) => Ok(()),
                    _ => Err(Errno::IO),
                }
            });
        let failure = match failed {
            Ok(()) => work(&mut to_parent),
            Err(errno) => {
                tell(to_parent.as_ref(), -1);
                errno
            }
        };
        tell(to_parent.as_ref(), failure.raw_os_error());
        // SAFETY: ends the child without anything that belongs to the parent.
        unsafe { libc::_exit(126) };
    }
    drop((to_parent, from_parent));
    let process = rustix::process::Pid::from_raw(child)
        .filter(|_| child > 0)
        .ok_or_else(|| Error::Kernel { operation: "fork", source: std::io::Error::last_os_error() })?;
    let abandon = |error: Error| {
        let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
        let _ = rustix::process::waitpid(Some(process), rustix::process::WaitOptions::empty());
        error
    };
    let number = match hear(&from_child) {
        Some(number) if number >= 0 => number,
        _ => {
            let errno = hear(&from_child).map_or(Errno::IO, Errno::from_raw_os_error);
            let operation =
                "installing the filter (seccomp user notification, Linux 5.9; not inside another guard)";
            return Err(abandon(Error::kernel(operation)(errno)));
        }
    };
    let listener = fetch(process, number)
        .map_err(Error::kernel("fetching the filter's listener (pidfd_getfd)"))
        .map_err(&abandon)?;
    // SAFETY: without effects on memory: nobody without CAP_SYS_PTRACE may trace this process from now on.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
    blocking::prepare().map_err(Error::kernel("sigaction")).map_err(&abandon)?;
    let listener = Listener::new(listener);
    let monitor =
        Monitor::new(policy, listener, log, process.as_raw_pid(), wall.executions, mediation, rules)
            .map_err(Error::kernel("reading /proc/self/status"))
            .map_err(&abandon)?;
    let monitor = Arc::new(monitor);
    monitor
        .start()
        .map_err(|source| Error::Kernel { operation: "starting the monitor's threads", source })
        .map_err(&abandon)?;
    rustix::io::write(&to_child, &[1]).map_err(Error::kernel("writing to a pipe")).map_err(&abandon)?;
    drop(to_child);
    let failure = hear(&from_child).map(Errno::from_raw_os_error);
    Ok((process, monitor, failure))
}

/// Between fork and exec: system calls only.
fn become_guarded(
    limits: &crate::policy::Limits,
    rules: Option<&OwnedFd>,
    parent: rustix::process::Pid,
) -> Result<(), Errno> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    // Convenience: a program without a monitor can do nothing of interest anyway.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    if rustix::process::getppid() != Some(parent) {
        return Err(Errno::SRCH);
    }
    // Rust programs ignore it; others expect the default.
    // SAFETY: sets no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    // SAFETY: zero is an empty set of signals.
    let mut none: libc::sigset_t = unsafe { core::mem::zeroed() };
    // SAFETY: the set lives; the result is the old mask, which nobody needs.
    unsafe {
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, core::ptr::null_mut());
    }
    let settings = [
        (Resource::Nproc, limits.processes.map(u64::from)),
        (Resource::As, limits.memory),
        (Resource::Nofile, limits.open_files),
        (Resource::Fsize, limits.file_size),
        (Resource::Cpu, limits.cpu_seconds),
    ];
    for (resource, limit) in settings {
        if limit.is_some() {
            setrlimit(resource, Rlimit { current: limit, maximum: limit })?;
        }
    }
    if let Some(rules) = rules {
        rustix::thread::set_no_new_privs(true)?;
        // SAFETY: the descriptor is one of rules; this concerns the calling thread only.
        unsafe { syscall!(Sysno::landlock_restrict_self, rules.as_raw_fd(), 0) }.map_err(errno)?;
    }
    Ok(())
}

/// Fetches a descriptor of the child's.
fn fetch(process: rustix::process::Pid, number: i32) -> Result<OwnedFd, Errno> {
    let handle = rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty())?;
    // SAFETY: makes a descriptor.
    let fetched = unsafe { syscall!(Sysno::pidfd_getfd, handle.as_raw_fd(), number, 0) }.map_err(errno)?;
    let fetched = i32::try_from(fetched).map_err(|_| Errno::BADF)?;
    // SAFETY: the kernel made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fetched) })
}
