//! The store of `orrery orc`, run as its users run it, with friendly clients and hostile ones.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

mod audit;
mod confidential;
mod containers;
mod deaths;
mod debuggers;
mod fairness;
mod files;
mod filters;
mod guest;
mod hostile;
mod identity;
mod image;
mod kills;
mod liars;
mod names;
mod noexec;
mod odd;
mod promises;
mod publish;
mod registry;
mod relocated;
mod rootfs;
mod seeing;
mod sharing;
mod silent;
mod steps;
mod stuck_files;
mod timing;
mod tracer;
mod unmodified;
mod virtual_machines;

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use orrery_orc_client::{Client, Error, Refusal};
use tempfile::TempDir;

/// A store of the test's own, ended with it.
struct Store {
    directory: TempDir,
    supervisor: Child,
}

impl Store {
    fn new(options: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        // Other users' clients come by here, too.
        std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        let supervisor = start(directory.path(), options);
        Self { directory, supervisor }
    }

    /// One whose processes have these variables in their environment.
    fn with_variables(variables: &[(&str, &str)], options: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut command = command(directory.path(), options);
        let supervisor = command.envs(variables.iter().copied()).spawn().unwrap();
        Self { directory, supervisor }
    }

    /// One that may open so many files only.
    fn with_descriptors(most: u64, options: &[&str]) -> Self {
        use std::os::unix::process::CommandExt as _;

        let directory = tempfile::tempdir().unwrap();
        let mut command = command(directory.path(), options);
        let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        let set = move || {
            // SAFETY: a system call on this process alone.
            let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
            if set == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: nothing but a system call happens between fork and exec.
        unsafe { command.pre_exec(set) };
        Self { directory, supervisor: command.spawn().unwrap() }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn client(&self) -> Client {
        connect(self.path())
    }

    /// Returns the process that answers.
    fn server(&self) -> i32 {
        i32::try_from(self.client().report().unwrap().pid).unwrap()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Whoever keeps now: the first supervisor may be dead.
        let server = Client::connect_to(self.path()).and_then(|client| client.report()).ok();
        if matches!(self.supervisor.try_wait(), Ok(None)) {
            signal(i32::try_from(self.supervisor.id()).unwrap(), libc::SIGTERM);
        }
        let _ = self.supervisor.wait();
        if let Some(server) = server {
            let pid = i32::try_from(server.pid).unwrap();
            eventually("the store ends", || {
                for supervisor in children(pid).into_iter().chain(supervisor_above(pid)) {
                    signal(supervisor, libc::SIGTERM);
                }
                !Path::new(&format!("/proc/{pid}")).exists() || zombie(pid)
            });
        }
        sweep(self.path());
        let _ = std::fs::remove_file(secret(self.path()));
    }
}

/// Returns where the store of this directory has its secret.
fn secret(directory: &Path) -> std::path::PathBuf {
    let mut path = directory.as_os_str().to_owned();
    path.push(".secret");
    path.into()
}

/// Removes the objects that stores have left that were killed: nobody may, as long as they are immutable.
fn sweep(directory: &Path) {
    for domain in std::fs::read_dir(directory.join("objects")).into_iter().flatten().flatten() {
        for entry in std::fs::read_dir(domain.path()).into_iter().flatten().flatten() {
            let flags = rustix::fs::OFlags::RDONLY;
            if let Ok(fd) = rustix::fs::open(entry.path(), flags, rustix::fs::Mode::empty()) {
                let _ = rustix::fs::ioctl_setflags(&fd, rustix::fs::IFlags::empty());
            }
        }
    }
}

fn start(directory: &Path, options: &[&str]) -> Child {
    command(directory, options).spawn().unwrap()
}

fn command(directory: &Path, options: &[&str]) -> Command {
    command_by(Path::new(env!("CARGO_BIN_EXE_orrery")), directory, options)
}

fn command_by(orrery: &Path, directory: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(orrery);
    command.args(["orc", "serve", "--directory"]).arg(directory).args(options);
    let signal = Some(rustix::process::Signal::TERM);
    let end_with_test = move || Ok(rustix::process::set_parent_process_death_signal(signal)?);
    // What a store leaves that is killed with its test nobody could remove.
    // SAFETY: nothing but a system call happens between fork and exec.
    unsafe { std::os::unix::process::CommandExt::pre_exec(&mut command, end_with_test) };
    command
}

fn connect(path: &Path) -> Client {
    let mut client = None;
    eventually("the store answers", || {
        client = Client::connect_to(path).ok();
        client.is_some()
    });
    client.unwrap()
}

/// Waits for what must come, for a long time.
fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(30), "{what}: not in 30 s");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: a signal to a process that this test started.
    unsafe { libc::kill(pid, signal) };
}

/// The supervisor that has started a server.
fn supervisor_above(server: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{server}/stat")).ok()?;
    let parent = stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()?;
    let name = std::fs::read_to_string(format!("/proc/{parent}/comm")).ok()?;
    (name == "orc-supervisor\n").then_some(parent)
}

fn children(pid: i32) -> Vec<i32> {
    let mut found = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let text = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        found.extend(text.split_whitespace().filter_map(|word| word.parse::<i32>().ok()));
    }
    found
}

fn zombie(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'))
}

fn refusal<T>(result: Result<T, Error>) -> Refusal {
    match result {
        Err(Error::Refused { refusal, .. }) => refusal,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was allowed"),
    }
}

/// Bytes that no other test has.
fn bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut state = 2 * seed + 1;
    let mut out = Vec::with_capacity(length + 8);
    while out.len() < length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        out.extend((state >> 16).to_le_bytes());
    }
    out.truncate(length);
    out
}
