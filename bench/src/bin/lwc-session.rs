//! `make bench B=lwc-session`: a server of small documents to 300 clients, with a session for each connection.
//!
//! Beside it the same server as an event loop, where all connections share one memory, and with a forked process for each
//! connection. All hold 64 MiB. Server and clients have a CPU each. The number of requests on a connection is the length of
//! a session: Figures 4 and 5 of the paper.

use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::documents::{DocumentServer, Serving};
use orrery_bench::{Bench, Case, CommandLine, Entry, Group, Part, Pin, Quantity, Unit, serve};

const MEMORY: usize = 64 << 20;
const DOCUMENTS: [usize; 2] = [45, 900];
const LENGTHS: [u32; 3] = [1, 16, 256];

const SERVERS: [(&str, Serving); 3] = [
    ("sessions", Serving::Sessions),
    ("event loop", Serving::EventLoop),
    ("fork per connection", Serving::Fork),
];

fn start(name: &str) -> Result<DocumentServer> {
    match SERVERS.iter().find(|(server, _)| *server == name) {
        Some((_, serving)) => DocumentServer::start(*serving, MEMORY),
        None => anyhow::bail!("there is no contender {name:?}"),
    }
}

fn entry(name: &'static str) -> Entry {
    Part::new(name, Pin::None).entry().memory(512 << 20)
}

fn main() -> Result<ExitCode> {
    let CommandLine { options, part } = CommandLine::read("Sessions beside an event loop and forks");
    if let Some(part) = part {
        return Ok(serve(|| Ok(Box::new(start(&part.name)?))));
    }
    let mut bench = Bench::new("lwc-session", options);
    let [ours, rivals @ ..] = SERVERS.map(|(name, _)| entry(name));
    let mut group = Group::new("lwc-session", ours);
    for rival in rivals {
        group = group.against(rival);
    }
    for document in DOCUMENTS {
        for length in LENGTHS {
            let name = format!("{document} bytes, {length} a connection");
            let case = Case::new(format!("{document}*{length}"))
                .quantity(format!("{name}/requests"), Quantity::Rate)
                .quantity(format!("{name}/p99"), Quantity::Percentile(99, Unit::Microseconds));
            group = group.case(case.quick(document == 45));
        }
    }
    bench.group(group);
    bench.run()
}
