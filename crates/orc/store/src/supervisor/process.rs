//! The supervisor: a second process, so simple that it has no reason to fail, which holds what the store must not lose.
//!
//! A process that is killed loses all descriptors that only it had. So the server first stores each of them with its
//! supervisor, as records with a key, a value and perhaps a descriptor: the sockets it listens on, the backing files of
//! objects, the connections, and what is held through each. (systemd's file descriptor store does this for services.) The
//! supervisor does not interpret them. When the server's end of the socket closes, it starts a new server and sends it all
//! records; clients keep their connections, and receive a message that asks them to repeat what was not answered yet.
//!
//! The socket of a server that is killed stays open, and the process is there, as long as one of its threads waits in the kernel for a
//! client's file that does not answer (FUSE). So the supervisor also looks each second whether the server is ending, and
//! does not wait for its end without bound. It may start another one meanwhile: SIGKILL is pending for all threads of the old one,
//! so none of them runs a program's instruction any more, and none receives or sends a message. What the old process still has open are
//! copies of descriptors that the supervisor has as well, or of connections that it did not store yet, which are shut down: the next server accepts at the same listening sockets, reads from the same
//! connections, and shuts a connection down rather than closing it alone, so that its client notices the end. What is not shared,
//! as an unfinished copy of a file, no other process has. The locks of the sockets' directories are released when the store stops.
//!
//! When the supervisor dies, the server starts a new one and stores everything there. The store ends only if both die at
//! once, or the server before it has stored everything with a new supervisor. Even then no program loses a page: mappings
//! need neither process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::descriptor_limit;
use crate::supervisor::channel::{Message, is_shortage, receive, send};
use crate::supervisor::launcher::{Launcher, Part};

/// After so many deaths of the server within [`DEATHS_PERIOD`] it is not started again.
const MAX_DEATHS: usize = 5;
const DEATHS_PERIOD: Duration = Duration::from_secs(10);
/// After how long it is tried again to start a server, or to wait for one, which failed for want of descriptors, processes or memory.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// How long a server that has closed its socket may take to end by itself.
const ENDING_PAUSE: Duration = Duration::from_millis(2);
/// How long one that has been asked to stop, and has closed its socket, may take.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long one that was killed may take before another one is started.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
/// How often the supervisor looks whether the server is ending, and at a process for whose end it cannot wait otherwise.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// `PIDFD_THREAD` (pidfd_open(2)): the descriptor is of a thread.
const PIDFD_THREAD: u32 = libc::O_EXCL.cast_unsigned();
const WAIT_STEP: Duration = Duration::from_millis(10);
/// How long the server may take to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Records by their encoded keys.
pub(crate) type Records = BTreeMap<Vec<u8>, (Vec<u8>, Option<OwnedFd>)>;

/// How the work with one server ended.
#[derive(Debug)]
enum Ended {
    /// The server is gone, or has closed its end.
    ServerDied,
    /// What the server sends is no message. It is treated as one that has died.
    Malformed(io::Error),
    /// The store is to stop.
    StopRequested,
}

/// Supervises a store until `stop` becomes readable or is closed. If `link` is given, a server is at its other end already,
/// and sends all records; otherwise a first server is started with `records`.
///
/// # Errors
/// If no server can be started, or each one dies at once; if a server died before it had sent all its records.
pub(crate) fn supervise(
    launcher: &Launcher,
    link: Option<OwnedFd>,
    mut records: Records,
    stop: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    descriptor_limit::raise();
    let mut deaths: Vec<Instant> = Vec::new();
    let mut is_complete = link.is_none();
    let mut link = link.map(|link| (link, None));
    loop {
        let (socket, child) = match link.take() {
            Some(known) => known,
            None => {
                let (socket, child) = match launcher.start(Part::Server) {
                    // Once there was a server, clients wait for the next one, and the records are here only.
                    Err(error) if !deaths.is_empty() => {
                        report(&format!("cannot start the server: {error}; it is tried again"));
                        if is_stop_requested(stop, RETRY_PAUSE) {
                            return Ok(());
                        }
                        continue;
                    }
                    started => started?,
                };
                // If it dies before the end, `receive_records` finds that out.
                let _ = send_records(socket.as_fd(), &records);
                (socket, Some(child))
            }
        };
        let pid = match &child {
            Some(child) => i32::try_from(child.id()).ok(),
            // It has made the pair of sockets, and has not been reaped as long as it has its PID.
            None => orrery_sys::peer::credentials(socket.as_fd()).ok().map(|peer| peer.pid),
        };
        let ended = receive_records(socket.as_fd(), &mut records, &mut is_complete, stop, pid);
        if matches!(ended, Ended::StopRequested) {
            let has_stopped = stop_server(socket.as_fd(), &mut records);
            match child.map(|child| end(child, EXIT_TIMEOUT)) {
                Some(End::Ended(_)) => {}
                Some(End::StillEnding(server)) => {
                    report("the server is still ending: a client's file does not answer");
                    release_all(&records);
                    leave_ending(server, &records);
                }
                None if has_stopped => release_all(&records),
                None => {}
            }
            return Ok(());
        }
        let status = child.map(|child| end(child, ENDING_PAUSE));
        if matches!(ended, Ended::ServerDied) {
            // The socket of one that is still ending has not been closed.
            receive_rest(socket.as_fd(), &mut records, &mut is_complete);
        }
        drop(socket);
        let why = match ended {
            Ended::StopRequested | Ended::ServerDied => "closed its connection or was killed".to_owned(),
            Ended::Malformed(error) => format!("sent what is no message: {error}"),
        };
        let status = match status {
            None => String::new(),
            Some(End::Ended(status)) => format!("; {status}"),
            Some(End::StillEnding(server)) => {
                leave_ending(server, &records);
                "; it was killed and is still ending: a client's file does not answer".to_owned()
            }
        };
        report(&format!("the server {why}{status}; another one is started"));
        if !is_complete {
            return Err(io::Error::other(
                "the server died before it had sent all records to its new supervisor; start the store again",
            ));
        }
        let now = Instant::now();
        deaths.retain(|death| now.duration_since(*death) < DEATHS_PERIOD);
        deaths.push(now);
        if deaths.len() > MAX_DEATHS {
            return Err(io::Error::other(format!(
                "the server died {} times within {} s; see its last messages on standard error",
                deaths.len(),
                DEATHS_PERIOD.as_secs()
            )));
        }
    }
}

/// Writes a line to standard error, if that is possible.
fn report(text: &str) {
    let _ = writeln!(io::stderr(), "orrery orc serve: {text}");
}

/// What has become of a server that was ended.
#[derive(Debug)]
enum End {
    /// It has ended: how.
    Ended(String),
    /// It was killed, so that none of its threads runs any more; but one waits in the kernel.
    StillEnding(Child),
}

/// Ends a server, which may have closed its socket and still run: there must not be two that run. It may take `pause` to end by itself.
fn end(mut server: Child, pause: Duration) -> End {
    // One that ends closes its descriptors a moment before it has ended.
    if let Some(status) = wait_for(&mut server, pause) {
        return End::Ended(status.to_string());
    }
    let was_ending = i32::try_from(server.id()).is_ok_and(is_ending);
    let _ = server.kill();
    match wait_for(&mut server, KILL_TIMEOUT) {
        Some(status) if was_ending => End::Ended(status.to_string()),
        Some(_) => End::Ended("it still ran and was killed".to_owned()),
        None => End::StillEnding(server),
    }
}

/// Leaves a server alone that is still ending, after its connections have ended that nobody else knows.
fn leave_ending(mut server: Child, records: &Records) {
    // As long as it has not been reaped, its PID is no other process's.
    if let Err(error) = end_unrecorded(server.id(), records) {
        report(&format!("cannot look for connections that only the ending server has: {error}"));
    }
    // It must not stay a zombie when the file answers. Without a thread, it does until the supervisor ends.
    let reaper = std::thread::Builder::new().name("reaper".into());
    let _ = reaper.spawn(move || server.wait());
}

/// Shuts down the connections of a server that is still ending which are not in the records: it was killed between the moment when it
/// accepted them and that when it stored them. Their clients would wait for as long as the file does not answer.
///
/// # Errors
/// Its descriptors cannot be looked at: before Linux 6.9, which has no `PIDFD_THREAD`, or for want of the right (ptrace(2)).
fn end_unrecorded(server: u32, records: &Records) -> io::Result<()> {
    let recorded = records.values().filter_map(|(_, fd)| rustix::fs::fstat(fd.as_ref()?).ok());
    let recorded: BTreeSet<u64> = recorded.map(|status| status.st_ino).collect();
    let names: BTreeSet<Vec<u8>> = records.values().filter_map(|(_, fd)| socket_name(fd.as_ref()?)).collect();
    let tasks = PathBuf::from(format!("/proc/{server}/task"));
    for thread in fs::read_dir(&tasks)?.flatten() {
        // Threads that have ended, as the first one, have no descriptors.
        let Ok(descriptors) = fs::read_dir(thread.path().join("fd")) else { continue };
        let number = thread.file_name().to_str().and_then(|number| Pid::from_raw(number.parse().ok()?));
        let Some(number) = number else { continue };
        // A descriptor of the process would be one of its first thread, which has ended.
        let handle = match pidfd_open(number, PidfdFlags::from_bits_retain(PIDFD_THREAD)) {
            // It has ended meanwhile.
            Err(Errno::SRCH) => continue,
            handle => handle?,
        };
        for descriptor in descriptors.flatten() {
            // A copy of a client's file would be closed here, and closing it can wait for whoever serves it.
            let Some(inode) = fs::read_link(descriptor.path()).ok().as_deref().and_then(socket_inode) else {
                continue;
            };
            let number = descriptor.file_name().to_str().and_then(|number| number.parse().ok());
            let Some(number) = number.filter(|_| !recorded.contains(&inode)) else { continue };
            let copy = match pidfd_getfd(&handle, number, PidfdGetfdFlags::empty()) {
                Err(Errno::SRCH | Errno::BADF) => continue,
                copy => copy?,
            };
            // It may have others from the process that started the store, which use them still.
            if socket_name(&copy).is_some_and(|name| names.contains(&name)) {
                let _ = rustix::net::shutdown(&copy, rustix::net::Shutdown::Both);
            }
        }
    }
    Ok(())
}

/// Returns the name of a Unix socket: an accepted one has that of the socket which listens (unix(7)). Returns `None` for one that has
/// no name, and for what is no Unix socket.
fn socket_name(file: &OwnedFd) -> Option<Vec<u8>> {
    let address = SocketAddrUnix::try_from(rustix::net::getsockname(file).ok()?).ok()?;
    let name = address.path_bytes().or_else(|| address.abstract_name())?;
    (!name.is_empty()).then(|| name.to_vec())
}

/// Returns the number of a socket's inode, from what /proc/PID/fd/NUMBER leads to.
fn socket_inode(path: &Path) -> Option<u64> {
    path.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// Waits until a process has ended; returns how, or `None` if it has not within `timeout`.
fn wait_for(process: &mut Child, timeout: Duration) -> Option<ExitStatus> {
    let begin = Instant::now();
    let pid = rustix::process::Pid::from_child(process);
    let handle = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok();
    loop {
        if let Ok(Some(status)) = process.try_wait() {
            return Some(status);
        }
        let left = timeout.checked_sub(begin.elapsed()).filter(|left| !left.is_zero())?;
        let polled = handle.as_ref().and_then(|handle| {
            let mut waiting = [PollFd::new(handle, PollFlags::IN)];
            rustix::event::poll(&mut waiting, rustix::time::Timespec::try_from(left).ok().as_ref()).ok()
        });
        // Before Linux 5.3, and where there is no memory.
        if polled.is_none() {
            std::thread::sleep(left.min(WAIT_STEP));
        }
    }
}

/// Returns whether no thread of a process will ever run again: its first thread has ended or is to be killed, which kills all. The
/// process has not been reaped, or `pid` may be another's.
fn is_ending(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    let is_killed = |name| {
        let pending = field(name).and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0);
        pending & 1 << (libc::SIGKILL - 1) != 0
    };
    field("State").is_some_and(|state| state.starts_with(['Z', 'X']))
        || is_killed("SigPnd")
        || is_killed("ShdPnd")
        || field("CoreDumping") == Some("1")
}

/// Shuts down all sockets, with the connections that were not accepted yet, and releases all locks (flock(2)): a process that is
/// still ending has them open, too. Does nothing to other files.
fn release_all(records: &Records) {
    for fd in records.values().filter_map(|(_, fd)| fd.as_ref()) {
        let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
        // Nothing is added to the queue of a listening socket that was shut down; for others this fails at once.
        while rustix::net::accept_with(fd, rustix::net::SocketFlags::CLOEXEC).is_ok() {}
        let _ = rustix::fs::flock(fd, rustix::fs::FlockOperation::Unlock);
    }
}

/// Waits, and returns whether the store is to stop.
fn is_stop_requested(stop: Option<BorrowedFd<'_>>, pause: Duration) -> bool {
    let Some(stop) = stop else {
        std::thread::sleep(pause);
        return false;
    };
    let mut waiting = [PollFd::from_borrowed_fd(stop, PollFlags::IN)];
    match rustix::event::poll(&mut waiting, rustix::time::Timespec::try_from(pause).ok().as_ref()) {
        Ok(ready) => ready > 0,
        Err(_) => {
            std::thread::sleep(pause);
            false
        }
    }
}

/// Asks the server to stop, and waits until it has closed the socket. If this side closed it, the server could notice that
/// before it has read the message, and take the supervisor for dead. Returns whether it has closed the socket.
fn stop_server(link: BorrowedFd<'_>, records: &mut Records) -> bool {
    let begin = Instant::now();
    let mut buffer = Vec::new();
    let mut is_open = send(link, &Message::Stop, None).is_ok();
    while is_open && begin.elapsed() < STOP_TIMEOUT {
        let pause = rustix::event::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        let mut waiting = [PollFd::from_borrowed_fd(link, PollFlags::IN)];
        if rustix::event::poll(&mut waiting, Some(&pause)).is_ok_and(|ready| ready > 0) {
            // What it stores until then may have to be released.
            let received = receive_record(link, &mut buffer, records, &mut false);
            is_open = matches!(received, Ok(Received::Record | Received::StopRequest));
        }
    }
    !is_open
}

fn send_records(link: BorrowedFd<'_>, records: &Records) -> io::Result<()> {
    for (key, (value, fd)) in records {
        send(link, &Message::Put(key, value), fd.as_ref().map(AsFd::as_fd))?;
    }
    send(link, &Message::End, None)
}

/// Stores what the server, which has the PID `pid`, sends until it is gone or ending, or the store is to stop. The records become
/// complete when the server has sent all that it had.
fn receive_records(
    link: BorrowedFd<'_>,
    records: &mut Records,
    is_complete: &mut bool,
    stop: Option<BorrowedFd<'_>>,
    pid: Option<i32>,
) -> Ended {
    let mut buffer = Vec::new();
    let period = rustix::time::Timespec::try_from(LOOK_PERIOD).ok();
    loop {
        let mut waiting = vec![PollFd::from_borrowed_fd(link, PollFlags::IN)];
        waiting.extend(stop.map(|stop| PollFd::from_borrowed_fd(stop, PollFlags::IN)));
        match rustix::event::poll(&mut waiting, period.as_ref()) {
            Ok(0) if pid.is_some_and(is_ending) => return Ended::ServerDied,
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            // Short of memory.
            Err(_) => {
                std::thread::sleep(RETRY_PAUSE);
                continue;
            }
        }
        if waiting.get(1).is_some_and(|stop| !stop.revents().is_empty()) {
            return Ended::StopRequested;
        }
        match receive_record(link, &mut buffer, records, is_complete) {
            Ok(Received::Record) => {}
            Ok(Received::StopRequest) => return Ended::StopRequested,
            // The message is still there.
            Err(error) if is_shortage(&error) => std::thread::sleep(RETRY_PAUSE),
            Ok(Received::Nothing) => return Ended::ServerDied,
            Err(error) => return Ended::Malformed(error),
        }
    }
}

/// Stores what a server that does not run any more has sent.
fn receive_rest(link: BorrowedFd<'_>, records: &mut Records, is_complete: &mut bool) {
    let mut buffer = Vec::new();
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        let mut waiting = [PollFd::from_borrowed_fd(link, PollFlags::IN)];
        match rustix::event::poll(&mut waiting, Some(&now)) {
            Ok(0) => return,
            Ok(_) => {}
            Err(_) => {
                std::thread::sleep(RETRY_PAUSE);
                continue;
            }
        }
        match receive_record(link, &mut buffer, records, is_complete) {
            Ok(Received::Record | Received::StopRequest) => {}
            Err(error) if is_shortage(&error) => std::thread::sleep(RETRY_PAUSE),
            Ok(Received::Nothing) | Err(_) => return,
        }
    }
}

/// What was received from a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Received {
    /// A record, which was stored or deleted.
    Record,
    /// The server was asked to end, as by a service manager that asks all processes of a service.
    StopRequest,
    /// The server is gone.
    Nothing,
}

/// Receives one message.
fn receive_record(
    link: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
    records: &mut Records,
    is_complete: &mut bool,
) -> io::Result<Received> {
    let received = receive(link, buffer, |message, fd| {
        match message {
            Message::Put(key, value) => drop(records.insert(key.to_vec(), (value.to_vec(), fd))),
            Message::Delete(key) => drop(records.remove(key)),
            Message::End => *is_complete = true,
            Message::Stop => return Received::StopRequest,
        }
        Received::Record
    });
    received.map(|received| received.unwrap_or(Received::Nothing))
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    /// Returns the error of a new supervisor whose server has died after these messages; servers that it starts die at once.
    fn error_after(messages: &[Message<'_>]) -> String {
        let launcher = Launcher { program: "/bin/false".into(), arguments: Vec::new() };
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        for message in messages {
            send(theirs.as_fd(), message, None).unwrap();
        }
        drop(theirs);
        supervise(&launcher, Some(ours), Records::new(), None).unwrap_err().to_string()
    }

    #[test]
    fn no_server_is_started_with_half_of_the_records() {
        let half = error_after(&[Message::Put(b"key", b"value")]);
        assert!(half.contains("before it had sent all records"), "{half}");
        let whole = error_after(&[Message::Put(b"key", b"value"), Message::End]);
        assert!(whole.contains("the server died 6 times"), "{whole}");
    }
}
