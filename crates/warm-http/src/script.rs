//! Running a script on the warm server.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use orrery_warm::client::{Client, Job};
use orrery_warm_http::paths::Found;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::oneshot;

use crate::output::Output;

/// How many bytes of a line of a script's standard error are logged as one message.
const LONGEST_LINE: usize = 8 << 10;
/// How many bytes of a script's standard error are logged.
const MOST_LOGGED: usize = 64 << 10;

/// What is to run, and with what.
#[derive(Debug)]
pub(crate) struct Execution {
    pub(crate) client: Client,
    pub(crate) found: Found,
    pub(crate) input: OwnedFd,
    pub(crate) environment: Vec<(OsString, OsString)>,
    pub(crate) umask: u32,
}

/// A script that runs; it is ended when this is dropped.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) output: Output,
    /// Only dropped.
    _end: EndOnDrop,
}

impl Execution {
    /// Starts the script. Whether the warm server takes it is the first thing that its output tells.
    pub(crate) fn start(self) -> io::Result<Script> {
        let (output, output_end) = pipe()?;
        let (errors, errors_end) = pipe()?;
        let (ending, ended) = oneshot::channel();
        let (done, is_done) = oneshot::channel();
        tokio::spawn(log_errors(errors, self.found.path.clone(), is_done));
        let end = EndOnDrop::default();
        let connection = Arc::clone(&end.0);
        tokio::task::spawn_blocking(move || {
            let job = Job::script(self.found.path.clone())
                .opened_script(self.found.script.as_fd())
                .directory(self.found.directory.as_fd())
                .environment(self.environment)
                .umask(self.umask)
                .streams([Some(self.input.as_fd()), Some(output_end.as_fd()), Some(errors_end.as_fd())]);
            let ended = self.client.run_once(&job, |socket| Connection::note(&connection, socket));
            *lock(&connection) = Connection::Over;
            // Nobody waits for it if the client has gone.
            let _ = ending.send(ended);
            let _ = done.send(());
        });
        Ok(Script { output: Output::new(output, ended), _end: end })
    }
}

/// A pipe whose reading end is the runtime's.
fn pipe() -> io::Result<(Receiver, OwnedFd)> {
    let (reader, writer) = io::pipe()?;
    Ok((Receiver::from_owned_fd(reader.into())?, writer.into()))
}

/// The connection on which a script runs.
#[derive(Debug, Default)]
enum Connection {
    #[default]
    None,
    Open(OwnedFd),
    Over,
    /// There is not to be one.
    Unwanted,
}

impl Connection {
    /// Notes the connection, for who wants to end it.
    fn note(place: &Mutex<Self>, socket: BorrowedFd<'_>) {
        let mut place = lock(place);
        match (&*place, socket.try_clone_to_owned()) {
            (Self::Unwanted, _) => shut(socket),
            (_, Ok(socket)) => *place = Self::Open(socket),
            // It runs to its end even if its client goes.
            (_, Err(error)) => tracing::warn!("cannot duplicate a connection: {error}"),
        }
    }
}

/// Ends a script by ending its connection, as `orrery warm run` does by ending.
#[derive(Debug, Default)]
struct EndOnDrop(Arc<Mutex<Connection>>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        let mut place = lock(&self.0);
        match &*place {
            Connection::None => *place = Connection::Unwanted,
            Connection::Open(socket) => shut(socket.as_fd()),
            Connection::Over | Connection::Unwanted => {}
        }
    }
}

fn lock(place: &Mutex<Connection>) -> std::sync::MutexGuard<'_, Connection> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

fn shut(socket: BorrowedFd<'_>) {
    // The other side has ended it where this fails.
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

/// Logs the lines that a script writes to its standard error, until it has ended.
async fn log_errors(mut errors: Receiver, script: PathBuf, mut is_done: oneshot::Receiver<()>) {
    let (mut line, mut logged) = (Vec::new(), 0);
    let mut piece = [0; 4096];
    loop {
        let count = tokio::select! {
            biased;
            read = errors.read(&mut piece) => read.unwrap_or(0),
            // As for its output: what is in the pipe now is the last.
            _ = &mut is_done => break,
        };
        if count == 0 {
            break;
        }
        take(&piece[..count], &mut line, &mut logged, &script);
    }
    while let Ok(count @ 1..) = rustix::io::read(errors.as_fd(), &mut piece) {
        take(&piece[..count], &mut line, &mut logged, &script);
    }
    if !line.is_empty() {
        log_line(&line, &mut logged, &script);
    }
}

fn take(bytes: &[u8], line: &mut Vec<u8>, logged: &mut usize, script: &std::path::Path) {
    for &byte in bytes {
        if byte == b'\n' || line.len() == LONGEST_LINE {
            log_line(line, logged, script);
            line.clear();
        }
        if byte != b'\n' {
            line.push(byte);
        }
    }
}

/// Logs a line, without what would move a terminal's cursor or look like another message.
fn log_line(line: &[u8], logged: &mut usize, script: &std::path::Path) {
    let before = *logged;
    *logged = before.saturating_add(line.len() + 1);
    if before > MOST_LOGGED {
        return;
    }
    let shown: String = String::from_utf8_lossy(line)
        .chars()
        .map(|letter| if letter.is_control() && letter != '\t' { '\u{fffd}' } else { letter })
        .collect();
    tracing::warn!(script = %script.display(), "{shown}");
    if *logged > MOST_LOGGED {
        tracing::warn!(script = %script.display(), "further lines of this request are not logged");
    }
}
