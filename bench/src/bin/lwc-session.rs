//! `make bench B=lwc-session`: a server of small documents to 300 clients, with a session for each connection.
//!
//! Beside it the same server as an event loop, where all connections share one memory, and with a forked process for each
//! connection. All hold 64 MiB. Server and clients have a CPU each. The number of requests on a connection is the length of
//! a session: Figures 4 and 5 of the paper.

use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::documents::{DocumentServer, Serving};
use orrery_bench::{Bench, Case, Group, Pin, Quantity, Unit};

const MEMORY: usize = 64 << 20;
const DOCUMENTS: [usize; 2] = [45, 900];
const LENGTHS: [u32; 3] = [1, 16, 256];

/// Ours first.
const SERVERS: [(&str, Serving); 3] = [
    ("sessions", Serving::Sessions),
    ("event loop", Serving::EventLoop),
    ("fork per connection", Serving::Fork),
];

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("lwc-session", "Sessions beside an event loop and forks");
    let [ours, rivals @ ..] = SERVERS.map(|(name, serving)| {
        bench.process(name, Pin::None, || DocumentServer::start(serving, MEMORY)).memory(512 << 20)
    });
    let mut group = Group::new("lwc-session", ours, rivals);
    for document in DOCUMENTS {
        for length in LENGTHS {
            let name = format!("{document} bytes, {length} a connection");
            let case = Case::new(format!("{document}*{length}"))
                .quantity(format!("{name}/requests"), Quantity::Rate)
                .quantity(format!("{name}/p99"), Quantity::Percentile(99.0, Unit::Microseconds));
            group = group.case(case.quick(document == 45));
        }
    }
    bench.group(group);
    bench.run()
}
