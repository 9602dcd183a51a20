//! `make bench B=hijack-packets`: what becomes of four streams of packets on a processor that cannot process them all: with shares,
//! with early drop alone, with real-time priorities alone, and with nothing. The floor is what a wake-up costs: a task at the highest priority that does
//! nothing with its packets, beside three as with nothing.
//!
//! A task that lost nothing counts as one that lost one packet, so that there are ratios.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use orrery_bench::Bench;
use orrery_bench::packets::{
    Outcome, POLLING_TASK, Way, measure, run_experiment, run_polling_task, run_sender, run_task,
};

/// The tasks: their name, and the streams that are theirs.
const TASKS: [(&str, &[usize]); 3] = [("highest", &[0]), ("intermediate", &[1]), ("best effort", &[2, 3])];

/// Experiments that were run: each is, once.
static RUN: Mutex<BTreeMap<Way, Vec<Outcome>>> = Mutex::new(BTreeMap::new());

fn main() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let part = match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["experiment", way] => Some(run_experiment(way)),
        ["send"] => Some(run_sender()),
        ["task", scheduling, work] => Some(run_task(scheduling, work.parse()?)),
        [POLLING_TASK, scheduling, work] => Some(run_polling_task(scheduling, work)),
        _ => None,
    };
    if let Some(result) = part {
        return result.map(|()| ExitCode::SUCCESS);
    }
    let about = "Four streams of 44,000 packets per second on one processor: with shares, and with what else there is";
    let mut bench = Bench::new("hijack-packets", about);
    for (task, streams) in TASKS {
        let value = |name: &'static str, unit, of: fn(&Outcome) -> f64| {
            let mean = move |way| {
                let outcomes = outcomes(way)?;
                let chosen = streams.iter().filter_map(|index| outcomes.get(*index)).map(of);
                #[expect(clippy::cast_precision_loss, reason = "one or two")]
                let count = streams.len() as f64;
                Ok(chosen.sum::<f64>() / count)
            };
            (format!("{task}, {name}"), unit, mean)
        };
        let (case, unit, mean) = value("packets lost of 30000", "packets", |outcome| outcome.lost.max(1.0));
        bench.single_value(case, unit, Way::ALL.map(Way::name), mean);
        let (case, unit, mean) = value("jitter", "us", |outcome| outcome.jitter.max(0.001));
        bench.single_value(case, unit, Way::ALL.map(Way::name), mean);
    }
    let jitter = |way| {
        let outcomes = outcomes(way)?;
        Ok(outcomes.first().context("no outcome")?.jitter.max(0.001))
    };
    let beside = [Way::Shares, Way::Floor].map(Way::name);
    bench.single_value("highest, jitter beside the floor", "us", beside, jitter);
    bench.run()
}

fn outcomes(name: &str) -> Result<Vec<Outcome>> {
    let way = Way::named(name).context("no such way")?;
    let mut run = RUN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(outcomes) = run.get(&way) {
        return Ok(outcomes.clone());
    }
    let outcomes = measure(way)?;
    run.insert(way, outcomes.clone());
    Ok(outcomes)
}
