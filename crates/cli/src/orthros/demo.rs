//! `orrery orthros demo`: redis, a client that counts, and panics.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use orrery_orthros_host::{DiskConfig, DiskSource, Fault, Pair, PairConfig, Service, cache};

use super::counter::{Counter, PATIENCE, expect_logged};
use super::workspace::Workspace;
use super::{Common, Story};

const DATA: &str = "/data";
/// How many counts redis' log on its disk holds.
const COUNTS: &str = "cat /data/appendonlydir/*.incr.aof | grep -c INCR";

#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    common: Common,
    /// How many panics to survive
    #[arg(long, default_value_t = 2)]
    panics: u32,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let common = &arguments.common;
    let story = Story::new(common.json);
    let workspace = Workspace::new()?;
    let directory = common.directory.clone().unwrap_or_else(|| workspace.directory().to_owned());
    let words =
        ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--dir", DATA, "--appendonly", "yes"];
    let config = PairConfig {
        directory,
        cache: cache(),
        service: Service {
            argv: words.map(str::to_owned).to_vec(),
            programs: Vec::new(),
            ..Service::default()
        },
        memory_mib: common.memory,
        cpus: common.cpus,
        silence: Duration::from_secs_f64(common.silence),
        network: Some(workspace.network()),
        disk: Some(DiskConfig { source: DiskSource::New(64 << 20), mount: DATA.to_owned(), content: None }),
        append: String::new(),
    };
    story.tell("start", None, "two machines start: one with redis, one that looks into its memory")?;
    let mut pair = Pair::start(config)?;
    story.tell("armed", None, "both are up; the backup knows the active's kernel")?;
    let network = pair.network().context("the pair has no network")?;
    network.enter()?;
    let mut counter = Counter::connect("demo")?;
    for panic in 1..=arguments.panics {
        counter.count()?;
        story.tell(
            "counting",
            None,
            format!("a client counts over one TCP connection: {}", counter.last()),
        )?;
        let stop = AtomicBool::new(false);
        let hang_up = counter.line()?;
        let (result, gap) = std::thread::scope(|scope| {
            let client = scope.spawn(|| counter.count_until(&stop));
            std::thread::sleep(Duration::from_millis(300));
            let result = survive(&mut pair, &story);
            if result.is_ok() {
                std::thread::sleep(Duration::from_millis(1500));
            } else {
                // The client would wait for an answer that never comes.
                let _ = hang_up.shutdown(std::net::Shutdown::Both);
            }
            stop.store(true, Ordering::Relaxed);
            (result, client.join())
        });
        result?;
        let gap = gap.map_err(|_| anyhow::anyhow!("the client panicked"))??;
        let text = format!(
            "the same client counts on: {}; it waited {:.0} ms",
            counter.last(),
            gap.as_secs_f64() * 1e3
        );
        story.tell("counted", Some(gap.as_secs_f64()), text)?;
        if panic < arguments.panics {
            let seconds = pair.start_backup()?;
            story.tell("renewed", Some(seconds), format!("a new backup stands by after {seconds:.1} s"))?;
        }
    }
    expect_logged(&mut pair, COUNTS, counter.last())?;
    story.tell("logged", None, format!("redis' log on its disk holds all {} counts", counter.last()))?;
    pair.stop()?;
    story.tell(
        "end",
        None,
        format!("{} panics, no answer lost, no connection lost, no byte lost", arguments.panics),
    )
}

/// One panic, from its cause to the service's life.
fn survive(pair: &mut Pair, story: &Story) -> Result<()> {
    let start = Instant::now();
    pair.crash(Fault::Panic)?;
    let Some(cause) = pair.watch(PATIENCE)? else { bail!("the active did not die") };
    let seconds = start.elapsed().as_secs_f64();
    let text =
        format!("the active's kernel panics, which is noticed {:.0} ms after it was told to", seconds * 1e3);
    story.tell("died", Some(seconds), text)?;
    let failover = pair.fail_over(cause)?;
    story.tell_failover(&failover)
}
