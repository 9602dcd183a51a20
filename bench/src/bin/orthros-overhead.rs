//! `make bench B=orthros-overhead`: what it costs a service that a backup watches over it: redis' answers per second with a
//! backup, without one, and while criu looks for changed pages once a second, as checkpoints would.
//!
//! All take turns over the same machine, so that they meet the same afternoon. What the active itself does for its backup, the
//! heartbeats, is measured directly besides: the time that the thread that sends them is on a processor.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use orrery_bench::pairs::{Line, Running, Wanted};
use orrery_bench::record::{self, Record};
use orrery_bench::stats::{interquartile_range, median};
use orrery_bench::{Options, Skipped, machine, significant};
use rustix::process::{Pid, Signal, kill_process};

const PORT: u16 = 6379;
/// Redis' data: so many values of 4 KiB.
const VALUES: u32 = 4000;
/// Nanoseconds that all threads of the guest's first process but the first were on a processor: the one that sends heartbeats.
/// The first answers this question, which takes a while.
const BEATING: &str = "cd /proc/1/task; for thread in *; do [ $thread = 1 ] || cat $thread/schedstat; done | \
    awk '{ sum += $1 } END { print sum }'";

/// What it costs that a backup watches
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Armed,
    Unarmed,
    Checkpoints,
}

struct Scene {
    running: Running,
    answers: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    backup: Pid,
    checkpoints: u32,
}

impl Scene {
    fn start() -> Result<Self> {
        let mut running = Running::start(&Wanted {
            service: &[
                "redis-server",
                "--bind",
                "0.0.0.0",
                "--protected-mode",
                "no",
                "--save",
                "",
                "--enable-debug-command",
                "yes",
            ],
            programs: &[],
            files: &[],
            memory: 512,
            append: "",
            disk: None,
        })?;
        let filled = Line::connect(PORT)?.ask(&format!("DEBUG POPULATE {VALUES} value 4096\r\n"))?;
        ensure!(filled == "+OK", "redis answers {filled:?}");
        let backup = running.pair.status().backup.context("no backup")?.pid;
        let backup = Pid::from_raw(i32::try_from(backup)?).context("no backup")?;
        let (answers, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (counted, ended) = (Arc::clone(&answers), Arc::clone(&stop));
        let mut line = Line::connect(PORT)?;
        std::thread::spawn(move || -> Result<()> {
            for number in 0_u32.. {
                if ended.load(Ordering::Relaxed) {
                    break;
                }
                line.ask(&format!(
                    "SETRANGE value:{} 0 {number}\r\n",
                    number.wrapping_mul(2_654_435_761) % VALUES
                ))?;
                counted.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        Ok(Self { running, answers, stop, backup, checkpoints: 0 })
    }

    /// Answers per second for a while.
    fn slice(&mut self, way: Way, length: Duration) -> Result<f64> {
        kill_process(self.backup, if way == Way::Armed { Signal::CONT } else { Signal::STOP })?;
        std::thread::sleep(Duration::from_millis(200));
        let (begin, before) = (Instant::now(), self.answers.load(Ordering::Relaxed));
        while begin.elapsed() < length {
            if way == Way::Checkpoints {
                self.checkpoint()?;
            }
            let next = length.saturating_sub(begin.elapsed()).min(Duration::from_secs(1));
            std::thread::sleep(next);
        }
        let answers = self.answers.load(Ordering::Relaxed) - before;
        ensure!(answers > 0, "redis has not answered for {} s", length.as_secs());
        #[expect(clippy::cast_precision_loss, reason = "answers of a few seconds")]
        let rate = answers as f64 / begin.elapsed().as_secs_f64();
        Ok(rate)
    }

    /// One pre-dump of what has changed since the last, within the service's namespaces.
    fn checkpoint(&mut self) -> Result<()> {
        let number = self.checkpoints;
        let parent =
            number.checked_sub(1).map(|last| format!("--prev-images-dir ../{last}")).unwrap_or_default();
        let remove = number.checked_sub(2).map(|old| format!("; rm -r /run/dumps/{old}")).unwrap_or_default();
        let command = format!(
            "mkdir -p /run/dumps/{number} && nsenter -t $(pidof redis-server) -m -p criu pre-dump -t {number_within} --track-mem \
             --tcp-established -D /run/dumps/{number} {parent} -o log{remove}",
            number_within = "$(awk '/^NSpid/ { print $3 }' /proc/$(pidof redis-server)/status)",
        );
        let done = self.running.pair.run(&["sh", "-c", &command]);
        if done.is_err() {
            let log = self.running.pair.run(&["tail", "-n", "5", &format!("/run/dumps/{number}/log")]);
            done.with_context(|| log.unwrap_or_default())?;
        }
        self.checkpoints += 1;
        Ok(())
    }
}

fn main() -> Result<ExitCode> {
    let options = Arguments::parse().options;
    let (rounds, length) =
        if options.quick() { (5, Duration::from_secs(3)) } else { (15, Duration::from_secs(5)) };
    let mut scene = match Scene::start() {
        Err(error) if error.is::<Skipped>() => {
            println!("SKIPPED {error}");
            return Ok(ExitCode::SUCCESS);
        }
        other => other?,
    };
    // criu is part of what a pair needs: where it fails, that is a failure and no lack.
    scene.checkpoint().context("the first checkpoint")?;
    let mut rates: [Vec<f64>; 3] = Default::default();
    for round in 0..rounds {
        let mut ways = [Way::Armed, Way::Unarmed, Way::Checkpoints];
        ways.rotate_left(round % 3);
        for way in ways {
            rates[way as usize].push(scene.slice(way, length).with_context(|| format!("{way:?}"))?);
        }
    }
    // What heartbeats take of a processor, without anything else in the way.
    kill_process(scene.backup, Signal::CONT)?;
    let beating = |scene: &mut Scene| -> Result<f64> {
        Ok(scene.running.pair.run(&["sh", "-c", BEATING])?.trim().parse::<f64>()? / 1e9)
    };
    let (begin, before) = (Instant::now(), beating(&mut scene)?);
    std::thread::sleep(Duration::from_secs(if options.quick() { 10 } else { 30 }));
    let used = (beating(&mut scene)? - before) / begin.elapsed().as_secs_f64();
    ensure!(used > 0.0, "no thread sends heartbeats");
    scene.stop.store(true, Ordering::Relaxed);
    let record =
        |case: &str, unit: &str, ours: f64, rival: (&str, f64), ratio: f64, spread: f64, runs| Record {
            bench: "orthros-overhead".to_owned(),
            case: case.to_owned(),
            unit: unit.to_owned(),
            ours,
            rival_name: rival.0.to_owned(),
            rival: rival.1,
            ratio,
            spread,
            runs,
        };
    let mut records = Vec::new();
    let armed = median(&rates[0]);
    for (name, others) in [("without a backup", &rates[1]), ("criu pre-dump each second", &rates[2])] {
        let ratios: Vec<f64> = rates[0].iter().zip(others).map(|(ours, other)| ours / other).collect();
        let (ratio, spread) = (median(&ratios), interquartile_range(&ratios));
        records.push(record("redis", "1/s", armed, (name, median(others)), ratio, spread, ratios.len()));
    }
    let idle = 1.0 - used;
    records.push(record("time left beside heartbeats", "1", idle, ("no heartbeats", 1.0), idle, 0.0, 1));
    for record in &records {
        println!(
            "{}: {} {}, {}: {}, ratio {} (spread {})",
            record.case,
            significant(record.ours),
            record.unit,
            record.rival_name,
            significant(record.rival),
            record.ratio,
            significant(record.spread)
        );
    }
    if options.only().is_none() {
        let path = machine::record_file("orthros-overhead")?;
        record::write(&path, &records)?;
        println!("records: {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}
