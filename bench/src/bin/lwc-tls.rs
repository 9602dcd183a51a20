//! `make bench B=lwc-tls`: TLS sessions per second of the distribution's nginx, with its private keys in a vault and without.
//!
//! Each session is one connection with a full handshake and one short answer, so that the signature weighs as much as it
//! ever will. A client of TLS works about as hard as a server, and with P-256 harder: where both share a machine, sessions
//! per second of the clock tell how fast the clients are. So the number to go by is sessions per second *of processor
//! time*, of nginx and vault together: what a server gets out of a CPU that it has to itself. By the clock we measure too:
//! there the waiting for one another would show that is no work.
//!
//! `floor` is the least that a signature in another process can cost: a child that each worker forks for it, unguarded, which
//! waits for nothing else; beside nginx as it is, and beside the vault.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use orrery_bench::tls::{KEYS, Server, Signs};
use orrery_bench::{Bench, Case, Entry, Group, Options, Pin, Quantity, machine};

/// TLS sessions of nginx with a vault and without
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let cpu = match arguments.options.pin_or(Pin::Cpu(machine::last_cpu()?)) {
        Pin::Cpu(cpu) => Some(cpu),
        Pin::None => None,
    };
    let mut bench = Bench::new("lwc-tls", arguments.options);
    let entry = |name: &str, signs| Entry::new(name, move || Server::start(signs, cpu)).memory(64 << 20);
    let (vault, plain) =
        (|| entry("nginx, keys in a vault", Signs::InVault), || entry("nginx", Signs::Itself));
    let mut group = Group::new("lwc-tls", vault()).against(plain());
    for (key, _) in KEYS {
        for (clock, name) in [("cpu", "sessions per second of CPU"), ("time", "sessions per second")] {
            let case = Case::new(format!("{key} {clock}")).quantity(format!("{key}/{name}"), Quantity::Rate);
            group = group.case(case.quick(clock == "cpu"));
        }
    }
    bench.group(group);
    let mut floor =
        Group::new("floor", entry("nginx, a child signs", Signs::InChild)).against(plain()).against(vault());
    for (key, _) in KEYS {
        let name = format!("floor/{key}/sessions per second of CPU");
        floor = floor.case(Case::new(format!("{key} cpu")).quantity(name, Quantity::Rate));
    }
    bench.group(floor);
    bench.run()
}
