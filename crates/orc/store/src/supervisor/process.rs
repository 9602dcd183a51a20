//! The supervisor: a second process, so simple that it has no reason to fail, which holds what the store must not lose.
//!
//! A process that is killed loses all descriptors that only it had. So the server first stores each of them with its
//! supervisor, as records with a key, a value and perhaps a descriptor: the sockets it listens on, the backing files of
//! objects, the connections, and what is held through each. (systemd's file descriptor store does this for services.) The
//! supervisor does not interpret them. When the server's end of the socket closes, it starts a new server and sends it all
//! records; clients keep their connections, and receive a message that asks them to repeat what was not answered yet.
//!
//! When the supervisor dies, the server starts a new one and stores everything there. The store ends only if both die at
//! once, or the server before it has stored everything with a new supervisor. Even then no program loses a page: mappings
//! need neither process.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

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
        let ended = receive_records(socket.as_fd(), &mut records, &mut is_complete, stop);
        if matches!(ended, Ended::StopRequested) {
            stop_server(socket.as_fd());
        }
        drop(socket);
        let status = child.map(end);
        let why = match ended {
            Ended::StopRequested => return Ok(()),
            Ended::ServerDied => "closed its connection".to_owned(),
            Ended::Malformed(error) => format!("sent what is no message: {error}"),
        };
        let status = status.map_or(String::new(), |status| format!("; {status}"));
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

/// Ends a server, which may have closed its socket and still run: there must not be two. Returns how it had ended by itself, if it had.
fn end(mut server: Child) -> String {
    // One that ends closes its descriptors a moment before it has ended.
    std::thread::sleep(ENDING_PAUSE);
    let ended = server.try_wait();
    let _ = server.kill();
    let _ = server.wait();
    match ended {
        Ok(Some(status)) => status.to_string(),
        _ => "it still ran and was killed".to_owned(),
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
/// before it has read the message, and take the supervisor for dead.
fn stop_server(link: BorrowedFd<'_>) {
    let begin = Instant::now();
    let mut buffer = Vec::new();
    let mut is_open = send(link, &Message::Stop, None).is_ok();
    while is_open && begin.elapsed() < STOP_TIMEOUT {
        let pause = rustix::event::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        let mut waiting = [PollFd::from_borrowed_fd(link, PollFlags::IN)];
        if rustix::event::poll(&mut waiting, Some(&pause)).is_ok_and(|ready| ready > 0) {
            is_open = matches!(receive(link, &mut buffer, |_, _| ()), Ok(Some(())));
        }
    }
}

fn send_records(link: BorrowedFd<'_>, records: &Records) -> io::Result<()> {
    for (key, (value, fd)) in records {
        send(link, &Message::Put(key, value), fd.as_ref().map(AsFd::as_fd))?;
    }
    send(link, &Message::End, None)
}

/// Stores what the server sends, until it is gone or the store is to stop. The records become complete when the server has
/// sent all that it had.
fn receive_records(
    link: BorrowedFd<'_>,
    records: &mut Records,
    is_complete: &mut bool,
    stop: Option<BorrowedFd<'_>>,
) -> Ended {
    let mut buffer = Vec::new();
    loop {
        let mut waiting = vec![PollFd::from_borrowed_fd(link, PollFlags::IN)];
        waiting.extend(stop.map(|stop| PollFd::from_borrowed_fd(stop, PollFlags::IN)));
        match rustix::event::poll(&mut waiting, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            // Short of memory.
            Err(_) => {
                std::thread::sleep(RETRY_PAUSE);
                continue;
            }
        }
        if waiting.get(1).is_some_and(|stop| !stop.revents().is_empty()) {
            return Ended::StopRequested;
        }
        let received = receive(link, &mut buffer, |message, fd| match message {
            Message::Put(key, value) => drop(records.insert(key.to_vec(), (value.to_vec(), fd))),
            Message::Delete(key) => drop(records.remove(key)),
            Message::End => *is_complete = true,
            Message::Stop => {}
        });
        match received {
            Ok(Some(())) => {}
            // The message is still there.
            Err(error) if is_shortage(&error) => std::thread::sleep(RETRY_PAUSE),
            Ok(None) => return Ended::ServerDied,
            Err(error) => return Ended::Malformed(error),
        }
    }
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
