//! Servers of small documents under load: a session for each connection, one memory for all, a process for each.
//!
//! 300 clients ask at the same time, each for several documents on a connection, one after the other, before it opens a
//! new one. A request is 8 bytes: the document's length, and whether the connection is to be closed after it.

mod clients;
mod protocol;
mod servers;

use std::net::TcpListener;

use anyhow::{Context, Result};

use crate::contender::{Contender, Sample};
use crate::footprint::{Backing, Footprint};
use crate::machine;

use clients::Clients;
use protocol::Demand;
pub use servers::Serving;

/// A server and its clients, on two CPUs where there are two.
#[derive(Debug)]
pub struct DocumentServer {
    server: servers::Server,
    clients: Clients,
}

impl DocumentServer {
    /// Starts the server, which holds `memory` bytes besides.
    pub fn start(serving: Serving, memory: usize) -> Result<Self> {
        let footprint = Footprint::anonymous(memory, Backing::Small)?;
        let listener = TcpListener::bind("127.0.0.1:0").context("cannot listen")?;
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
