//! `make bench B=lwc-create`: the cost of a session, and of a context that is created for it.
//!
//! `session`: a connection with a request on it is passed to a session of a pool, which answers it, ends and is rolled back;
//! beside it a server that forks for each connection. `create`: a context is created, switched to once and closed, as in
//! section 6.2 of the paper; beside it a fork that exits. The pages are written by the session, the context or the child.
//! `among`: the same in a program that has many other contexts, beside one that has none: each of them has a mapping and
//! three descriptors in the creator, which the kernel walks for each copy.

use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::footprint::{Backing, Footprint};
use orrery_bench::ours::{ContextLife, PooledSession};
use orrery_bench::rival::{ForkExitWait, ForkPerSession};
use orrery_bench::{Bench, Case, Group, Unit};

const MIB: usize = 1 << 20;
const FOOTPRINTS: [usize; 3] = [2, 64, 512];
const PAGES: [u32; 4] = [0, 10, 100, 1000];
const CONTEXT: &str = "context";

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("lwc-create", "Sessions beside forks");
    let pin = bench.options().pin()?;
    let memory = |mib: usize| Footprint::anonymous(mib * MIB, Backing::Small);
    for kind in ["session", "create"] {
        for mib in FOOTPRINTS {
            let [ours, rival] = if kind == "session" {
                [
                    bench.process("pool + rollback", pin, || PooledSession::new(memory(mib)?)),
                    bench.process("fork per session", pin, || ForkPerSession::new(memory(mib)?)),
                ]
            } else {
                [
                    bench.process(CONTEXT, pin, || Ok(ContextLife::new(memory(mib)?))),
                    bench.process("fork + exit + wait", pin, || Ok(ForkExitWait::new(memory(mib)?))),
                ]
            }
            .map(|entry| entry.memory(2 * mib * MIB));
            let name = format!("{kind}/{mib}MiB");
            let pages = PAGES.into_iter().filter(|pages| *pages as usize * 4096 < mib * MIB);
            let cases = pages.map(|pages| {
                Case::mean(pages.to_string(), format!("{name}/{pages} pages"), Unit::Microseconds)
                    .quick(mib == 64 && pages < 1000)
            });
            bench.group(Group::new(&name, ours, [rival]).cases(cases));
        }
    }
    for others in [100, 1000] {
        let name = format!("among/{others}");
        let ours = format!("{CONTEXT} among {others}");
        let ours = bench.process(ours, pin, || ContextLife::among(memory(FOOTPRINTS[0])?, others));
        let alone = bench.process(CONTEXT, pin, || Ok(ContextLife::new(memory(FOOTPRINTS[0])?)));
        let [ours, alone] = [ours, alone].map(|entry| entry.memory(2 * FOOTPRINTS[0] * MIB));
        let case = Case::mean("0", &name, Unit::Microseconds).quick(others == 100);
        bench.group(Group::new(&name, ours, [alone]).case(case));
    }
    bench.run()
}
