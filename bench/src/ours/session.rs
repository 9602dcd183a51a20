//! Sessions of a pool, each with one request; and contexts that are made for one switch.

use anyhow::{Result, ensure};
use orrery_context::{Spec, create};
use orrery_sessions::{Connection, Ended, Pool, Step};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use crate::contender::{Contender, Sample, Skipped};
use crate::footprint::Footprint;
use crate::work::Work;

/// A session of a pool: begin it with a connection on which a request waits, answer that, end, be rolled back.
#[derive(Debug)]
pub struct PooledSession {
    pool: Pool,
    client: UnixStream,
    server: UnixStream,
}

impl PooledSession {
    /// Makes a pool whose sessions hold `footprint`.
    pub fn new(footprint: Footprint) -> Result<Self> {
        let footprint = RefCell::new(footprint);
        let pool = Pool::builder().ready(1).spare(1).build(|connection: &mut Connection| {
            let mut request = [0; 16];
            let work = connection.read(&mut request).ok();
            let work = work.and_then(|length| str::from_utf8(&request[..length]).ok()?.parse::<Work>().ok());
            if let Some(work) = work {
                footprint.borrow_mut().perform(work);
                let _ = connection.write_all(work.to_string().as_bytes());
            }
        })?;
        let (client, server) = UnixStream::pair()?;
        Ok(Self { pool, client, server })
    }
}

impl Contender for PooledSession {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let _: Work = work.parse()?;
        let mut answer = [0; 16];
        let sample = Sample::batch(iterations, |_| {
            self.client.write_all(work.as_bytes())?;
            let (_, step) = self.pool.begin(self.server.as_fd())?;
            ensure!(step == Step::Ended(Ended::Returned), "the session is at {step:?}");
            let length = self.client.read(&mut answer)?;
            ensure!(&answer[..length] == work.as_bytes(), "it answered {:?}", &answer[..length]);
            ensure!(self.pool.tidy()?, "the session was rolled back at once");
            Ok(())
        })?;
        let made = self.pool.statistics().made;
        ensure!(made == 1, "{made} contexts were made where one was to be rolled back");
        Ok(sample)
    }
}

/// A context that is created, switched to once, and ended.
#[derive(Debug)]
pub struct ContextLife {
    footprint: Footprint,
}

impl ContextLife {
    /// Copies a process that holds `footprint`.
    pub fn new(footprint: Footprint) -> Self {
        Self { footprint }
    }

    /// Copies a process that holds `footprint` and has `others` other contexts, which wait.
    ///
    /// # Errors
    /// Those of creating them, and [`Skipped`] where the program may not have descriptors for so many.
    pub fn among(footprint: Footprint, others: usize) -> Result<Self> {
        let wanted = u64::try_from(4 * others + 1024)?;
        let mut limit = getrlimit(Resource::Nofile);
        if limit.maximum.is_some_and(|most| most < wanted) {
            let what = format!("{others} contexts take {wanted} descriptors (RLIMIT_NOFILE)");
            return Err(Skipped(what).into());
        }
        limit.current = limit.current.map(|now| now.max(wanted));
        setrlimit(Resource::Nofile, limit)?;
        for _ in 0..others {
            let other = create(&Spec::new(), |start| {
                let mut caller = start.arrival.caller;
                while let Ok(arrival) = caller.switch(7, &[]) {
                    caller = arrival.caller;
                }
                std::process::abort()
            })?;
            let word = other.switch(0, &[])?.word;
            ensure!(word == 7, "it came back with {word}");
        }
        Ok(Self { footprint })
    }
}

impl Contender for ContextLife {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let work: Work = work.parse()?;
        let sample = Sample::batch(iterations, |_| {
            let footprint = &mut self.footprint;
            let context = create(&Spec::new(), |start| {
                footprint.perform(work);
                let _ = start.creator.switch(7, &[]);
                std::process::abort()
            })?;
            let word = context.switch(0, &[])?.word;
            ensure!(word == 7, "it came back with {word}");
            context.close()?;
            Ok(())
        })?;
        self.footprint.check_pristine(work)?;
        Ok(sample)
    }
}
