//! `make bench B=lwc-tls`: TLS sessions per second of the distribution's nginx, with its private keys in a vault and without.
//!
//! Each session is one connection with a full handshake and one short answer, so that the signature weighs as much as it
//! ever will. A client of TLS works about as hard as a server, and with P-256 harder: where both share a machine, sessions
//! per second of the clock show how fast the clients are. So the number to go by is sessions per second *of processor
//! time*, of nginx and vault together: what a server gets out of a CPU that it has to itself. By the clock we measure too:
//! there the waiting for one another would show that is no work.
//!
//! A vault signs with AWS-LC, nginx with the distribution's OpenSSL. `openssl` is a vault that signs with that, too: what
//! remains is what the vault itself costs. `floor` is the least that this can be: a child that each worker forks for signatures, unguarded,
//! which waits for nothing else, with OpenSSL; beside nginx as it is, and beside that vault.

use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::tls::{KEYS, Server, Signs};
use orrery_bench::{Bench, Case, Entry, Group, Pin, Quantity};

const CPU: &str = "sessions per second of CPU";

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("lwc-tls", "TLS sessions of nginx with a vault and without");
    let cpu = match bench.options().pin()? {
        Pin::Cpu(cpu) => Some(cpu),
        Pin::None => None,
    };
    let entry = |name: &str, signs| Entry::new(name, move || Server::start(signs, cpu)).memory(64 << 20);
    let plain = || entry("nginx", Signs::Itself);
    let by_openssl = || entry("nginx, keys in a vault that signs with OpenSSL", Signs::InVaultByOpenSsl);
    let mut group = Group::new("lwc-tls", entry("nginx, keys in a vault", Signs::InVault), [plain()]);
    for (key, _) in KEYS {
        for (clock, name) in [("cpu", CPU), ("time", "sessions per second")] {
            let case = Case::new(format!("{key} {clock}")).quantity(format!("{key}/{name}"), Quantity::Rate);
            group = group.case(case.quick(clock == "cpu"));
        }
    }
    bench.group(group);
    let child = entry("nginx, a child signs", Signs::InChild);
    let others = [
        ("openssl", Group::new("openssl", by_openssl(), [plain()])),
        ("floor", Group::new("floor", child, [plain(), by_openssl()])),
    ];
    for (title, group) in others {
        bench.group(group.cases(KEYS.map(|(key, _)| {
            Case::new(format!("{key} cpu")).quantity(format!("{title}/{key}/{CPU}"), Quantity::Rate)
        })));
    }
    bench.run()
}
