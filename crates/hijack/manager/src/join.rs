//! Having a process join a manager, and staying with it: the *keeper*.
//!
//! A keeper is a process of the tracee's user that holds the connection with which the tracee joined. Should the manager end, or be
//! killed at any step, the keeper takes back what the manager may have left (real-time priority, nice values), reports that the
//! tracee goes on without its reservation, and has it join again as soon as a manager listens. Extensions that were loaded for the tracee
//! are with the keeper, in sealed memory: it loads them again, with the rights that the new manager gives.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use orrery_sys::scheduling::{self, Policy, Scheduling};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::client::{Client, ClientError, default_socket};
use crate::cpu::{Mechanism, release};
use crate::extensions::{ExtensionError, Package};
use crate::protocol::{Reply, Request, Values};

/// How long a manager that is started on demand may take to listen.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often a keeper looks for a new manager.
const RETRY: Duration = Duration::from_millis(250);
/// How often a keeper tries to load an extension again: a new manager that many join at once refuses some.
const ATTEMPTS: u32 = 40;

/// What is to join, and where.
#[derive(Debug, Clone)]
pub struct Joining {
    /// The manager's socket; `None` for the default one, at which a manager is started if none listens.
    pub socket: Option<PathBuf>,
    /// What the tracee is called.
    pub name: String,
    /// The attributes that the tracee starts with.
    pub values: Values,
    /// The executive's journal, if the manager is to have the system calls that a policy logs as events.
    pub journal: Option<i32>,
}

/// A tracee that has joined.
#[derive(Debug)]
pub struct Joined {
    /// The number of the tracee.
    pub tracee: u64,
    /// How it is served.
    pub mechanism: Mechanism,
    /// The connection, which has the rights of the tracee's user.
    pub client: Client,
    /// The nice value that the process had before it joined.
    pub nice: i32,
}

/// Has a process join.
///
/// # Errors
/// [`ClientError`]: there is no manager, or it refuses.
pub fn join(joining: &Joining, pid: i32) -> Result<Joined, ClientError> {
    let path = joining.socket.clone().unwrap_or_else(default_socket);
    let client = match Client::connect(&path) {
        Err(ClientError::Connect { .. }) if joining.socket.is_none() => start(&path)?,
        other => other?,
    };
    let process =
        Pid::from_raw(pid).ok_or_else(|| ClientError::Refused("cannot join process 0".to_owned()))?;
    let process = pidfd_open(process, PidfdFlags::empty())
        .map_err(|errno| ClientError::Refused(format!("cannot join process {pid}: {errno}")))?;
    let nice = match scheduling::get(pid) {
        Ok(Scheduling { policy: Policy::Other { nice }, .. }) => nice,
        _ => 0,
    };
    let (tracee, mechanism, client) = join_by(client, &process, joining, None)?;
    Ok(Joined { tracee, mechanism, client, nice })
}

/// Has a process join by this connection; `former_nice` is as in [`Request::Join`].
fn join_by(
    client: Client,
    process: &OwnedFd,
    joining: &Joining,
    former_nice: Option<i32>,
) -> Result<(u64, Mechanism, Client), ClientError> {
    let Joining { name, values, journal, .. } = joining.clone();
    let request = Request::Join { name, values, journal, former_nice };
    match client.ask_with(&request, &[process.as_fd()])? {
        (Reply::Joined { tracee, mechanism }, _) => Ok((tracee, mechanism, client)),
        _ => Err(ClientError::Reply),
    }
}

/// Starts a manager that ends with its last tracee, and connects to it.
fn start(path: &Path) -> Result<Client, ClientError> {
    let refused = |cause| ClientError::Connect { path: path.to_owned(), cause };
    let program = orrery_sys::programs::find_helper("orrery-manager").map_err(refused)?;
    let mut command = Command::new(program);
    command.args(["serve", "--until-idle", "--detach", "--socket"]).arg(path);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
    // SAFETY: setsid is one system call; afterwards the child executes.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(drop).map_err(io::Error::from));
    }
    // What serves is the child of this child; it may lose against another manager that was started at the same time.
    command.spawn().and_then(|mut middle| middle.wait()).map_err(refused)?;
    let begin = Instant::now();
    loop {
        match Client::connect(path) {
            Err(ClientError::Connect { .. }) if begin.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other,
        }
    }
}

/// An extension that was loaded for a tracee.
#[derive(Debug)]
pub struct Kept {
    /// What is loaded again.
    pub package: Package,
    /// Its number in the manager; `None` where that has not loaded it.
    pub number: Option<u64>,
    attempts: u32,
}

impl Kept {
    /// Returns one that was loaded under this number.
    #[must_use]
    pub fn new(package: Package, number: u64) -> Self {
        Self { package, number: Some(number), attempts: 0 }
    }

    fn is_to_be_loaded(&self) -> bool {
        self.number.is_none() && self.attempts < ATTEMPTS
    }
}

/// Starts the keeper of a tracee, as a process of its own.
///
/// # Errors
/// Where the program is not found, or cannot be executed.
pub fn start_keeper(joined: Joined, joining: &Joining, pid: i32, extensions: &[Kept]) -> io::Result<()> {
    let program = orrery_sys::programs::find_helper("orrery-manager")?;
    let path = joining.socket.clone().unwrap_or_else(default_socket);
    let connection = OwnedFd::from(joined.client);
    let mut command = Command::new(program);
    command.arg("keep").arg("--socket").arg(std::path::absolute(path)?).arg("--pid").arg(pid.to_string());
    command.arg("--name").arg(&joining.name).arg("--connection").arg(connection.as_raw_fd().to_string());
    command.arg(format!("--nice={}", joined.nice));
    if let Some(journal) = joining.journal {
        command.arg("--journal").arg(journal.to_string());
    }
    for (class, value) in &joining.values {
        command.arg("--set").arg(format!("{class}={value}"));
    }
    let mut passed = vec![connection.as_raw_fd()];
    for Kept { package, number, .. } in extensions {
        let [manifest, module] = package.fds().map(|fd| fd.as_raw_fd());
        command.arg("--extension").arg(format!("{manifest},{module},{}", number.unwrap_or(0)));
        passed.extend([manifest, module]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null());
    // SAFETY: setsid and fcntl are system calls; the descriptors are open in the child, a copy of this process.
    unsafe {
        command.pre_exec(move || {
            rustix::process::setsid()?;
            for fd in &passed {
                rustix::io::fcntl_setfd(BorrowedFd::borrow_raw(*fd), rustix::io::FdFlags::empty())?;
            }
            Ok(())
        });
    }
    // The keeper is no child that the program would find: its parent ends at once.
    let mut middle = command;
    middle.arg("--fork").spawn()?.wait().map(drop)
}

/// Keeps a tracee, until its process ends; `nice` is the nice value that it had before it joined, `extensions` were loaded for it.
///
/// # Errors
/// Where the process cannot be watched.
pub fn keep(
    joining: &Joining,
    pid: i32,
    nice: i32,
    client: Client,
    mut extensions: Vec<Kept>,
) -> io::Result<()> {
    let process = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    let process = match pidfd_open(process, PidfdFlags::empty()) {
        // It has ended before this process came to stay with it.
        Err(Errno::SRCH) => return Ok(()),
        process => process?,
    };
    let path = joining.socket.clone().unwrap_or_else(default_socket);
    let mut client = Some(client);
    loop {
        let is_readable = match &client {
            Some(client) => {
                let most = extensions.iter().any(Kept::is_to_be_loaded).then_some(RETRY);
                wait(&[client.as_fd(), process.as_fd()], most)?
            }
            None => wait(&[process.as_fd()], Some(RETRY))?,
        };
        if ended(&process)? {
            return Ok(());
        }
        if let Some(manager) = &client {
            if is_readable && !is_there(manager, &mut extensions) {
                client = None;
                extensions
                    .iter_mut()
                    .for_each(|extension| (extension.number, extension.attempts) = (None, 0));
                release(pid, nice);
                report(joining, pid, &path);
            } else {
                load_again(manager, &mut extensions, pid);
            }
        }
        if client.is_none()
            && let Ok(new) = Client::connect(&path)
        {
            match join_by(new, &process, joining, Some(nice)) {
                Ok((.., joined)) => {
                    eprintln!("orrery: a new manager serves process {pid} ({})", joining.name);
                    load_again(&joined, &mut extensions, pid);
                    client = Some(joined);
                }
                Err(ClientError::Refused(reason)) => {
                    eprintln!(
                        "orrery: process {pid} ({}) stays without its reservation: {reason}",
                        joining.name
                    );
                    return Ok(());
                }
                // It ended meanwhile, too, at whatever step.
                Err(_) => release(pid, nice),
            }
        }
    }
}

/// Receives what the manager sends by itself, that an extension has ended: it is not loaded again. Returns whether there is still a manager.
fn is_there(client: &Client, extensions: &mut Vec<Kept>) -> bool {
    match client.receive() {
        Ok((Reply::Ended { number }, _)) => {
            extensions.retain(|extension| extension.number != Some(number));
            true
        }
        Ok(_) => true,
        Err(_) => false,
    }
}

/// Loads what the manager has not loaded yet. Where it has ended meanwhile, too, the connection shows it.
fn load_again(client: &Client, extensions: &mut [Kept], pid: i32) {
    for extension in extensions.iter_mut().filter(|extension| extension.is_to_be_loaded()) {
        extension.attempts += 1;
        match extension.package.load(client) {
            Ok(number) => {
                extension.number = Some(number);
                eprintln!(
                    "orrery: extension {:?} of process {pid} is loaded again",
                    extension.package.name()
                );
            }
            Err(ExtensionError::Manager(ClientError::Refused(reason))) => {
                if extension.attempts == ATTEMPTS {
                    let name = extension.package.name();
                    eprintln!("orrery: process {pid} goes on without its extension {name:?}: {reason}");
                }
            }
            Err(_) => return,
        }
    }
}

fn report(joining: &Joining, pid: i32, path: &Path) {
    let values: Vec<String> =
        joining.values.iter().map(|(class, value)| format!("{class} = {value}")).collect();
    eprintln!(
        "orrery: the manager has ended; process {pid} ({}) goes on without {}, until a manager listens at {}",
        joining.name,
        if values.is_empty() { "it".to_owned() } else { values.join(", ") },
        path.display()
    );
}

fn wait(fds: &[BorrowedFd<'_>], most: Option<Duration>) -> io::Result<bool> {
    let mut polled: Vec<PollFd<'_>> =
        fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let most = most.map(|most| Timespec {
        tv_sec: i64::try_from(most.as_secs()).unwrap_or(1),
        tv_nsec: most.subsec_nanos().into(),
    });
    match poll(&mut polled, most.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    Ok(polled.first().is_some_and(|first| !first.revents().is_empty()))
}

fn ended(process: &OwnedFd) -> io::Result<bool> {
    wait(&[process.as_fd()], Some(Duration::ZERO))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_has_ended_already_is_no_failure() {
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let (connection, _manager) = std::os::unix::net::UnixStream::pair().unwrap();
        let joining = Joining { socket: None, name: "true".into(), values: Values::default(), journal: None };
        keep(&joining, i32::try_from(child.id()).unwrap(), 0, Client::from_fd(connection.into()), Vec::new())
            .unwrap();
    }
}
