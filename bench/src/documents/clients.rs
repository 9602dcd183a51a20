//! The clients: many connections in one event loop, each with one request under way.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use super::protocol::{CLIENTS, Demand, LONGEST, request};
use crate::contender::Sample;

/// A round has at least so many requests, or it would measure how it begins and ends.
const LEAST: u32 = 3000;
/// An answer that takes longer is lost.
const TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Clients {
    address: SocketAddr,
    ready: OwnedFd,
    clients: Vec<Option<Client>>,
    demand: Option<Demand>,
}

#[derive(Debug)]
struct Client {
    stream: TcpStream,
    /// Requests yet to be sent on this connection.
    left: u32,
    /// Bytes yet to come; 0 while nothing is under way.
    missing: usize,
    asked: Instant,
}

impl Clients {
    pub(super) fn new(address: SocketAddr) -> Result<Self> {
        let ready = epoll::create(CreateFlags::CLOEXEC)?;
        Ok(Self { address, ready, clients: (0..CLIENTS).map(|_| None).collect(), demand: None })
    }

    /// Lets all clients ask until `requests` documents were asked for, and waits for the last of them.
    pub(super) fn ask(&mut self, demand: Demand, requests: u32) -> Result<Sample> {
        if self.demand != Some(demand) {
            self.clients.fill_with(|| None);
            self.demand = Some(demand);
        }
        let wanted = requests.max(LEAST);
        let (mut sent, mut done) = (0, 0);
        let mut latencies = Vec::with_capacity(wanted as usize);
        let start = Instant::now();
        for place in 0..self.clients.len() {
            self.next(place, demand)?;
            sent += 1;
        }
        let mut events = Vec::with_capacity(CLIENTS);
        let limit = rustix::time::Timespec { tv_sec: TIMEOUT.as_secs().cast_signed(), tv_nsec: 0 };
        while done < sent {
            events.clear();
            epoll::wait(&self.ready, rustix::buffer::spare_capacity(&mut events), Some(&limit))?;
            ensure!(!events.is_empty(), "{} answers do not come", sent - done);
            for event in &events {
                let place = usize::try_from(event.data.u64())?;
                let Some(client) = &mut self.clients[place] else { continue };
                if !client.receive()? {
                    continue;
                }
                latencies.push(client.asked.elapsed());
                done += 1;
                if sent < wanted {
                    self.next(place, demand)?;
                    sent += 1;
                }
            }
        }
        Ok(Sample { iterations: done, elapsed: start.elapsed(), latencies })
    }

    /// Sends the next request, on a new connection where the old one had all its requests.
    fn next(&mut self, place: usize, demand: Demand) -> Result<()> {
        if self.clients[place].as_ref().is_none_or(|client| client.left == 0) {
            // The old one goes first.
            self.clients[place] = None;
            let stream = TcpStream::connect(self.address).context("cannot connect")?;
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            epoll::add(&self.ready, &stream, EventData::new_u64(place as u64), EventFlags::IN)?;
            self.clients[place] =
                Some(Client { stream, left: demand.requests, missing: 0, asked: Instant::now() });
        }
        let client = self.clients[place].as_mut().context("a client")?;
        client.left -= 1;
        client.asked = Instant::now();
        // The end of a connection is part of its last answer.
        client.missing = demand.document + usize::from(client.left == 0);
        client.stream.write_all(&request(demand, client.left == 0)).context("asking")
    }
}

impl Client {
    /// Reads what has arrived; returns whether the answer is complete.
    fn receive(&mut self) -> Result<bool> {
        let mut buffer = [0; LONGEST];
        while self.missing > 0 {
            match self.stream.read(&mut buffer) {
                Ok(0) if self.missing == 1 && self.left == 0 => {
                    self.missing = 0;
                    return Ok(true);
                }
                Ok(0) => anyhow::bail!("a connection was closed too early"),
                Ok(got) => {
                    ensure!(
                        got <= self.missing && buffer[..got].iter().all(|byte| *byte == b'd'),
                        "not a document"
                    );
                    self.missing -= got;
                    if self.missing == 0 {
                        return Ok(true);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error).context("cannot read an answer"),
            }
        }
        Ok(false)
    }
}
