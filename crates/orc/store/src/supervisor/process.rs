//! The keeper: a second process, so simple that it has no reason to die, which holds what the store must not lose.
//!
//! A store that is killed leaves nothing behind but what others hold. So whatever it makes it first gives to its keeper, as
//! records with a key, a value and perhaps a descriptor: the sockets it listens on, the memory of the objects, the connections
//! and what is held through each. The keeper understands none of it. When the store's end of the link closes, it starts a
//! new store and gives it everything back; clients keep their connections and notice nothing but a message that tells
//! them to ask again. When the keeper dies, the store starts a new one and gives it everything. Only both at once are the
//! end, or the store before it has given everything to a new keeper; and even then no program loses a page, as mappings need
//! neither.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use orrery_orc_wire::packet;

/// Longest message between the two.
const LONGEST: usize = 128 << 10;
/// How long one waits for the other to read.
const PATIENCE: rustix::net::sockopt::Timeout = rustix::net::sockopt::Timeout::Send;
/// So many deaths of the store within [`SHORT`] are not to be cured by starting it again.
const MOST_DEATHS: usize = 5;
const SHORT: Duration = Duration::from_secs(10);
/// How long a store may take to stop.
const STOPPING: Duration = Duration::from_secs(10);

/// What one tells the other.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Message<'a> {
    /// Keep this, in place of what had the key before; perhaps with a descriptor.
    Put(&'a [u8], &'a [u8]),
    /// Forget this.
    Delete(&'a [u8]),
    /// That was all there is.
    End,
    /// Stop working: the end was asked for.
    Stop,
}

/// The two parts of a running store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The one that answers.
    Server,
    /// The one that holds.
    Keeper,
}

impl Part {
    /// The argument by which a program is told to be this part.
    pub fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Keeper => "keeper",
        }
    }
}

/// How to start a part as a process of its own.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The program.
    pub program: PathBuf,
    /// What it is told first; the part's name follows. It finds its link as standard input.
    pub arguments: Vec<OsString>,
}

impl Launcher {
    /// Starts `part`; gives our end of the link to it.
    pub(crate) fn start(&self, part: Part) -> io::Result<(OwnedFd, Child)> {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).arg(part.name()).stdin(Stdio::from(theirs)).stdout(Stdio::null());
        Ok((prepare(ours)?, command.spawn()?))
    }
}

/// Sees to it that a partner who has stopped reading is taken for dead.
pub(crate) fn prepare(link: OwnedFd) -> io::Result<OwnedFd> {
    rustix::net::sockopt::set_socket_timeout(&link, PATIENCE, Some(Duration::from_secs(5)))?;
    Ok(link)
}

/// Sends a message.
///
/// # Errors
/// `EPIPE` where the other side is gone, `EAGAIN` where it has not read for seconds.
pub(crate) fn tell(
    link: BorrowedFd<'_>,
    message: &Message<'_>,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let bytes = postcard::to_stdvec(message).map_err(io::Error::other)?;
    Ok(packet::send(link, &bytes, fd.as_slice(), SendFlags::empty())?)
}

/// Receives a message and hands it to `each`; `None` where the other side is gone.
///
/// # Errors
/// Those of recvmsg(2); where the bytes are no message.
pub(crate) fn hear<T>(
    link: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
    each: impl FnOnce(Message<'_>, Option<OwnedFd>) -> T,
) -> io::Result<Option<T>> {
    buffer.resize(LONGEST, 0);
    let packet = match packet::receive(link, buffer, RecvFlags::empty()) {
        Ok(packet) if packet.length == 0 => return Ok(None),
        Err(rustix::io::Errno::CONNRESET) => return Ok(None),
        other => other?,
    };
    if packet.cut {
        return Err(io::Error::other(
            "a record came without its descriptor: the limit of open files is reached",
        ));
    }
    let message = postcard::from_bytes(&buffer[..packet.length]).map_err(io::Error::other)?;
    Ok(Some(each(message, packet.descriptors.into_iter().next())))
}

type Records = BTreeMap<Vec<u8>, (Vec<u8>, Option<OwnedFd>)>;

/// Does the keeper's work until `stop` becomes readable, or closed. Where `link` is given a store is at its other end already,
/// which tells what to keep; else `records` are where it all begins, and a first store is started.
///
/// # Errors
/// Where no store can be started, or each one dies at once; where one that was to tell what to keep died over that.
pub(crate) fn keep(
    launcher: &Launcher,
    link: Option<OwnedFd>,
    mut records: Records,
    stop: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    crate::descriptor_limit::raise();
    let mut deaths: Vec<Instant> = Vec::new();
    let mut whole = link.is_none();
    let mut link = link.map(|link| (link, None));
    loop {
        let (socket, child) = match link.take() {
            Some(known) => known,
            None => {
                let (socket, child) = launcher.start(Part::Server)?;
                // Where it dies over this we hear of it below.
                let _ = give_all(socket.as_fd(), &records);
                (socket, Some(child))
            }
        };
        let asked = listen(socket.as_fd(), &mut records, &mut whole, stop)?;
        if asked {
            dismiss(socket.as_fd());
        }
        drop(socket);
        if let Some(mut child) = child {
            // It may have closed the link and live: two at a time must not be.
            let _ = child.kill();
            let _ = child.wait();
        }
        if asked {
            return Ok(());
        }
        if !whole {
            return Err(io::Error::other(
                "the store died while it was telling its new keeper what to keep, after the former keeper: start it again",
            ));
        }
        let now = Instant::now();
        deaths.retain(|death| now.duration_since(*death) < SHORT);
        deaths.push(now);
        if deaths.len() > MOST_DEATHS {
            return Err(io::Error::other(format!(
                "the store died {} times within {} s: what its last words say on standard error has to be put right",
                deaths.len(),
                SHORT.as_secs()
            )));
        }
    }
}

/// Tells the store to stop, and waits until it has closed the link. Were the link closed from this side, the store could find
/// that out before it has read the message, and take the keeper for dead.
fn dismiss(link: BorrowedFd<'_>) {
    let begin = Instant::now();
    let mut buffer = Vec::new();
    let mut there = tell(link, &Message::Stop, None).is_ok();
    while there && begin.elapsed() < STOPPING {
        let pause = rustix::event::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        let mut waiting = [PollFd::from_borrowed_fd(link, PollFlags::IN)];
        if rustix::event::poll(&mut waiting, Some(&pause)).is_ok_and(|ready| ready > 0) {
            there = matches!(hear(link, &mut buffer, |_, _| ()), Ok(Some(())));
        }
    }
}

/// Gives everything to a new partner.
fn give_all(link: BorrowedFd<'_>, records: &Records) -> io::Result<()> {
    for (key, (value, fd)) in records {
        tell(link, &Message::Put(key, value), fd.as_ref().map(AsFd::as_fd))?;
    }
    tell(link, &Message::End, None)
}

/// Writes down what the store tells until it is gone (`false`) or the end is asked for (`true`). The records become `whole`
/// when it has told all that it had.
fn listen(
    link: BorrowedFd<'_>,
    records: &mut Records,
    whole: &mut bool,
    stop: Option<BorrowedFd<'_>>,
) -> io::Result<bool> {
    let mut buffer = Vec::new();
    loop {
        let mut waiting = vec![PollFd::from_borrowed_fd(link, PollFlags::IN)];
        waiting.extend(stop.map(|stop| PollFd::from_borrowed_fd(stop, PollFlags::IN)));
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut waiting, None))?;
        if waiting.get(1).is_some_and(|stop| !stop.revents().is_empty()) {
            return Ok(true);
        }
        let heard = hear(link, &mut buffer, |message, fd| match message {
            Message::Put(key, value) => drop(records.insert(key.to_vec(), (value.to_vec(), fd))),
            Message::Delete(key) => drop(records.remove(key)),
            Message::End => *whole = true,
            Message::Stop => {}
        });
        // A store that talks nonsense is as good as dead.
        if !matches!(heard, Ok(Some(()))) {
            return Ok(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What becomes of a new keeper when the store at its link is gone that has told this; stores that it starts die at once.
    fn end_of_keeper(told: &[Message<'_>]) -> String {
        let launcher = Launcher { program: "/bin/false".into(), arguments: Vec::new() };
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        for message in told {
            tell(theirs.as_fd(), message, None).unwrap();
        }
        drop(theirs);
        keep(&launcher, Some(ours), Records::new(), None).unwrap_err().to_string()
    }

    #[test]
    fn half_of_the_records_are_none() {
        let half = end_of_keeper(&[Message::Put(b"key", b"value")]);
        assert!(half.contains("telling its new keeper"), "{half}");
        let whole = end_of_keeper(&[Message::Put(b"key", b"value"), Message::End]);
        assert!(whole.contains("the store died 6 times"), "{whole}");
    }
}
