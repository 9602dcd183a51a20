//! A server that forks a child for every request, as fuzzers and prefork servers do.

use std::fs::File;
use std::io::{Read, Write};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rustix::pipe::{PipeFlags, pipe_with};

use super::fork::{in_child, wait_for};
use crate::contender::{Contender, Sample, Skipped};
use crate::footprint::Footprint;
use crate::work::Work;

/// The server's greeting: its memory is built.
const READY: u8 = b'r';
/// The server's greeting where its memory is not to be had; the reason follows.
const SKIPPED: u8 = b's';
/// The server's greeting where something failed; the error follows.
const FAILED: u8 = b'f';
/// Answer: the pages are dirtied, or are as they were at first.
const DONE: u8 = b'd';
/// Answer: they are not as they were.
const NOT_PRISTINE: u8 = b'n';

/// A request: to do the work in a child, or to check whether it has left a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    Perform(Work),
    Check(Work),
}

impl Request {
    const BYTES: usize = 9;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let (kind, work) = match self {
            Self::Perform(work) => (0, work),
            Self::Check(work) => (1, work),
        };
        let ([a, b, c, d], [e, f, g, h]) = (work.dirty.to_ne_bytes(), work.read.to_ne_bytes());
        [kind, a, b, c, d, e, f, g, h]
    }

    fn from_bytes([kind, a, b, c, d, e, f, g, h]: [u8; Self::BYTES]) -> Self {
        let work = Work {
            dirty: u32::from_ne_bytes([a, b, c, d]),
            read: u32::from_ne_bytes([e, f, g, h]),
            moving: false,
        };
        if kind == 0 { Self::Perform(work) } else { Self::Check(work) }
    }
}

/// A server process holds the memory. A request over a pipe makes it fork a child, which dirties the pages,
/// answers over another pipe and ends; the server reaps it and reads the next request.
pub struct ForkServer {
    server: libc::pid_t,
    // None once it is closed, which ends the server.
    requests: Option<File>,
    answers: File,
}

impl ForkServer {
    /// Starts a server that builds its memory with `footprint`.
    pub fn start(footprint: impl FnOnce() -> Result<Footprint>) -> Result<Self> {
        let pipe = || pipe_with(PipeFlags::CLOEXEC).context("cannot make a pipe");
        let ((requests_out, requests_in), (answers_out, answers_in)) = (pipe()?, pipe()?);
        let mut client_ends = Some((File::from(requests_in), File::from(answers_out)));
        let mut server_ends = Some((File::from(requests_out), File::from(answers_in)));
        let server = in_child(|| {
            // What is dropped here is dropped in the child. Holding the other end of its own requests, the
            // server would never see them end.
            drop(client_ends.take());
            server_ends.take().is_some_and(|(requests, answers)| serve(footprint, requests, answers).is_ok())
        })?;
        drop(server_ends);
        let (requests, answers) = client_ends.context("the client's ends are gone")?;
        let mut client = Self { server, requests: Some(requests), answers };
        client.greet()?;
        Ok(client)
    }

    fn greet(&mut self) -> Result<()> {
        let greeting = self.answer()?;
        if greeting == READY {
            return Ok(());
        }
        let mut reason = String::new();
        self.answers.read_to_string(&mut reason).context("cannot read why the fork server did not start")?;
        match greeting {
            SKIPPED => Err(Skipped(reason).into()),
            _ => bail!("{reason}"),
        }
    }

    fn ask(&mut self, request: Request) -> Result<u8> {
        let requests = self.requests.as_mut().context("the fork server has been ended")?;
        requests.write_all(&request.to_bytes()).context("asking the fork server")?;
        self.answer()
    }

    fn answer(&mut self) -> Result<u8> {
        let mut answer = [0];
        self.answers.read_exact(&mut answer).context("cannot read the fork server's answer")?;
        Ok(answer[0])
    }
}

impl Contender for ForkServer {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let work: Work = work.parse()?;
        let start = Instant::now();
        for _ in 0..iterations {
            let answer = self.ask(Request::Perform(work))?;
            ensure!(answer == DONE, "the fork server's child answered {answer:?}");
        }
        // The last child answered, but the work is over when the server has reaped it and listens again, as
        // it was for all others. It listens to this.
        self.ask(Request::Check(Work { dirty: 0, read: 0, moving: false }))?;
        let elapsed = start.elapsed();
        ensure!(self.ask(Request::Check(work))? == DONE, "the fork server's memory was not restored");
        Ok(Sample { iterations, elapsed, latencies: Vec::new() })
    }
}

impl Drop for ForkServer {
    fn drop(&mut self) {
        drop(self.requests.take());
        if let Err(error) = wait_for(self.server) {
            eprintln!("fork server: {error:#}");
        }
    }
}

/// Runs the server until its requests end.
fn serve(footprint: impl FnOnce() -> Result<Footprint>, mut requests: File, mut answers: File) -> Result<()> {
    let mut footprint = match footprint() {
        Ok(footprint) => footprint,
        Err(error) => {
            let (greeting, reason) = match error.downcast_ref::<Skipped>() {
                Some(Skipped(reason)) => (SKIPPED, reason.clone()),
                None => (FAILED, format!("{error:#}")),
            };
            answers.write_all(&[&[greeting], reason.as_bytes()].concat())?;
            return Ok(());
        }
    };
    answers.write_all(&[READY])?;
    let mut request = [0; Request::BYTES];
    // An error is the end of the requests.
    while requests.read_exact(&mut request).is_ok() {
        match Request::from_bytes(request) {
            Request::Check(work) => {
                let answer = if footprint.check_pristine(work).is_ok() { DONE } else { NOT_PRISTINE };
                answers.write_all(&[answer])?;
            }
            Request::Perform(work) => wait_for(in_child(|| {
                footprint.perform(work);
                answers.write_all(&[DONE]).is_ok()
            })?)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_without_memory_says_why() {
        let skipped = ForkServer::start(|| Err(Skipped("no such pages".into()).into())).err().unwrap();
        assert_eq!(skipped.downcast_ref::<Skipped>().unwrap().0, "no such pages");
        let failed = ForkServer::start(|| bail!("mmap failed")).err().unwrap();
        assert_eq!(failed.to_string(), "mmap failed");
    }
}
