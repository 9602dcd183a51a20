//! A forked child for every session.

use anyhow::{Result, ensure};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::fork_exit_wait;
use crate::contender::{Contender, Sample};
use crate::footprint::Footprint;
use crate::work::Work;

/// Forks for each connection: the child reads the request, works, answers and ends.
#[derive(Debug)]
pub struct ForkPerSession {
    footprint: Footprint,
    client: UnixStream,
    server: UnixStream,
}

impl ForkPerSession {
    /// Forks a process that holds `footprint`.
    pub fn new(footprint: Footprint) -> Result<Self> {
        let (client, server) = UnixStream::pair()?;
        Ok(Self { footprint, client, server })
    }
}

impl Contender for ForkPerSession {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let parsed: Work = work.parse()?;
        let mut answer = [0; 16];
        let sample = Sample::batch(iterations, |_| {
            self.client.write_all(work.as_bytes())?;
            let (footprint, server) = (&mut self.footprint, &mut self.server);
            fork_exit_wait(|| {
                let mut request = [0; 16];
                let Ok(length) = server.read(&mut request) else { return false };
                footprint.perform(parsed);
                server.write_all(&request[..length]).is_ok()
            })?;
            let length = self.client.read(&mut answer)?;
            ensure!(&answer[..length] == work.as_bytes(), "it answered {:?}", &answer[..length]);
            Ok(())
        })?;
        self.footprint.check_pristine(parsed)?;
        Ok(sample)
    }
}
