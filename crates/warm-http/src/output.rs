//! What a script writes, and how it ends.

use std::io;
use std::os::fd::AsFd as _;

use bytes::{Bytes, BytesMut};
use orrery_warm::client::Error;
use orrery_warm::protocol::Answer;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::oneshot;

/// How much is read at once: what a pipe holds.
const PIECE: usize = 64 << 10;

/// How a script ended, as the client of the warm server has it.
pub(crate) type Ending = Result<Answer, Error>;

/// What comes from a script.
#[derive(Debug)]
pub(crate) enum Event {
    /// Bytes of its output.
    Data(Bytes),
    /// It has ended, and all of its output was read before.
    End(Ending),
}

/// The output of a script that runs.
#[derive(Debug)]
pub(crate) struct Output {
    pipe: Receiver,
    /// Whether there are writers no more.
    closed: bool,
    ending: oneshot::Receiver<Ending>,
    ended: Option<Ending>,
}

impl Output {
    pub(crate) fn new(pipe: Receiver, ending: oneshot::Receiver<Ending>) -> Self {
        Self { pipe, closed: false, ending, ended: None }
    }

    /// Waits for what comes next. After [`Event::End`] there is nothing more.
    ///
    /// The end is the warm server's word, and not that of the pipe, which the script may have closed long before, or left open in
    /// another process for long. Nothing is lost when the future is dropped.
    pub(crate) async fn next(&mut self) -> io::Result<Event> {
        loop {
            if self.ended.is_some() {
                return self.rest();
            }
            let mut piece = BytesMut::with_capacity(PIECE);
            tokio::select! {
                biased;
                read = self.pipe.read_buf(&mut piece), if !self.closed => match read? {
                    0 => self.closed = true,
                    _ => return Ok(Event::Data(piece.freeze())),
                },
                ended = &mut self.ending => self.ended = Some(ended.unwrap_or(Err(Error::ServerLost))),
            }
        }
    }

    /// What is in the pipe now; the end if there is nothing. It is read past the runtime, which may not know yet what has come.
    fn rest(&mut self) -> io::Result<Event> {
        let mut piece = vec![0; PIECE];
        loop {
            match rustix::io::read(self.pipe.as_fd(), &mut piece) {
                Ok(0) | Err(rustix::io::Errno::AGAIN) => {
                    return Ok(Event::End(self.ended.take().unwrap_or(Err(Error::ServerLost))));
                }
                Ok(count) => {
                    piece.truncate(count);
                    return Ok(Event::Data(piece.into()));
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}
