//! Inside of a session: serve a connection, be rolled back, serve the next one.

use std::convert::Infallible;
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use super::protocol::{Ended, Interest, Order, Report};
use orrery_context::{self as context, Arrival, Context};
use orrery_rollback::{self as rollback, Outcome, Rollback};

/// A session's connection. Reading and writing wait, and meanwhile other sessions go on.
///
/// The descriptor is in non-blocking mode. It is closed when the session ends.
#[derive(Debug)]
pub struct Connection {
    descriptor: RawFd,
    root: Context,
}

impl Connection {
    /// Lets other sessions go on until the connection is ready, or seems so: try again, and wait again.
    ///
    /// It does not return where the root ends the session.
    pub fn wait(&self, interest: Interest) {
        match order(tell(self.root, Report::Waits(interest))) {
            Some(Order::Resume) => {}
            _ => rollback::abandon(0),
        }
    }

    fn again<T>(
        &self,
        interest: Interest,
        mut attempt: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match attempt(self.as_fd()) {
                Err(rustix::io::Errno::AGAIN) => self.wait(interest),
                Err(rustix::io::Errno::INTR) => {}
                other => return other.map_err(io::Error::from),
            }
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open for as long as the connection lives, unless the program closed it: then the kernel says so.
        unsafe { BorrowedFd::borrow_raw(self.descriptor) }
    }
}

impl AsRawFd for Connection {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor
    }
}

impl Read for Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.again(Interest::Readable, |fd| rustix::io::read(fd, &mut *buffer))
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.again(Interest::Writable, |fd| rustix::io::write(fd, bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // A program in C may have closed it, and that is no harm.
        // SAFETY: the session's own descriptor; nothing of the session runs any more.
        unsafe { libc::close(self.descriptor) };
    }
}

/// Returns a session's life.
///
/// `open`: the program is open to debuggers, so what was there before any connection need not be closed to them.
pub(crate) fn session<F: Fn(&mut Connection)>(
    root: Context,
    open: bool,
    memory: Option<u64>,
    serve: &F,
) -> Infallible {
    tell(root, Report::Made);
    if open {
        // Only then can an ordinary user read what it holds for a rollback; `wait` closes it.
        let _ = set_dumpable_behavior(DumpableBehavior::Dumpable);
    }
    let mut builder = Rollback::builder();
    if let Some(bytes) = memory {
        builder = builder.memory_limit(bytes);
    }
    let failed = match builder.build() {
        Ok(mut rollback) => {
            let ended = rollback.serve(
                |last| ControlFlow::<(), _>::Continue(wait(root, last)),
                |connection| work(root, connection, serve),
            );
            match ended {
                Ok(outcome) => format!("it stopped by itself ({outcome:?})"),
                Err(error) => error.to_string(),
            }
        }
        Err(error) => error.to_string(),
    };
    let _ = root.switch(Report::Failed.word(), cut(failed.as_bytes()));
    context::kill_self()
}

/// As it was made: waits for a connection.
fn wait(root: Context, last: Option<Outcome>) -> OwnedFd {
    // It was open to them when it was captured, so that it could look at itself.
    let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    // One that returned has said so before.
    let last = last.filter(|outcome| *outcome != Outcome::Returned).map(Ended::from);
    let mut report = Report::Clean(last);
    loop {
        let arrival = tell(root, report);
        report = match Order::of(arrival.word) {
            Some(Order::Begin) => match arrival.caller.passed() {
                Ok(Some(connection)) => return connection,
                _ => Report::Unconnected,
            },
            _ => Report::Clean(None),
        };
    }
}

/// Serves a connection.
fn work<F: Fn(&mut Connection)>(root: Context, connection: OwnedFd, serve: &F) {
    let mut connection = Connection { descriptor: connection.into_raw_fd(), root };
    serve(&mut connection);
    drop(connection);
    while order(tell(root, Report::Finished)) != Some(Order::Clean) {}
}

fn tell(root: Context, report: Report) -> Arrival {
    match root.switch(report.word(), &[]) {
        Ok(arrival) => arrival,
        Err(_) => context::kill_self(),
    }
}

fn order(arrival: Arrival) -> Option<Order> {
    Order::of(arrival.word)
}

pub(crate) fn cut(text: &[u8]) -> &[u8] {
    &text[..text.len().min(context::ROOM)]
}
