//! Servers of small documents under load: a session for each connection, one memory for all, a process for each.
//!
//! 300 clients ask at the same time, each for so many documents on a connection, one after the other, before it makes a new
//! one. A request is 8 bytes: the document's length, and whether the connection is to be closed after it.

mod clients;
mod servers;

use std::net::TcpListener;

use anyhow::{Context, Result};

use crate::contender::{Contender, Sample};
use crate::footprint::{Backing, Footprint};
use crate::machine;

use clients::Clients;

/// How many clients ask at the same time.
const CLIENTS: usize = 300;

/// How connections are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serving {
    /// In sessions of a pool.
    Sessions,
    /// In an event loop.
    EventLoop,
    /// In a forked process each.
    Fork,
}

/// A request, or what a case asks for: `45*16` is 16 documents of 45 bytes on each connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Demand {
    document: usize,
    requests: u32,
}

impl core::str::FromStr for Demand {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let parsed = text.split_once('*').and_then(|(document, requests)| {
            Some(Self { document: document.parse().ok()?, requests: requests.parse().ok()? })
        });
        parsed
            .filter(|demand| demand.document <= servers::LONGEST && demand.requests > 0)
            .with_context(|| format!("{text:?} is no demand: DOCUMENT*REQUESTS is, as 45*16"))
    }
}

/// A server and its clients, on two CPUs where there are two.
#[derive(Debug)]
pub struct DocumentServer {
    server: servers::Server,
    clients: Clients,
}

impl DocumentServer {
    /// Starts the server, which holds so many bytes of memory besides.
    pub fn start(serving: Serving, memory: usize) -> Result<Self> {
        let footprint = Footprint::anonymous(memory, Backing::Small)?;
        let listener = TcpListener::bind("127.0.0.1:0").context("listening")?;
        let address = listener.local_addr()?;
        let cpu = machine::last_cpu()?;
        let server = servers::Server::start(serving, listener, cpu)?;
        drop(footprint);
        if cpu != 0 {
            machine::pin(0)?;
        }
        Ok(Self { server, clients: Clients::new(address)? })
    }
}

impl Contender for DocumentServer {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let demand: Demand = work.parse()?;
        let measured = self.clients.ask(demand, iterations);
        self.server.check()?;
        measured
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_server_serves() {
        for serving in [Serving::Sessions, Serving::EventLoop, Serving::Fork] {
            let mut server = DocumentServer::start(serving, 2 << 20).unwrap();
            for demand in ["45*1", "900*3"] {
                let sample = server.measure(demand, 700).unwrap_or_else(|e| panic!("{serving:?}: {e:#}"));
                assert!(sample.iterations >= 700, "{serving:?}: {sample:?}");
            }
            assert!(server.measure("45", 1).is_err() && server.measure("x*1", 1).is_err());
        }
    }
}
