//! `make bench B=orthros-overhead`: the overhead of a backup for a service: redis' answers per second with a
//! backup, without one, and while criu looks for changed pages once a second, as checkpoints would.
//!
//! All take turns over the same machine, so that they meet the same state of the machine. What the active itself does for its backup, the
//! heartbeats, is measured directly besides: the time that the thread that sends them is on a processor.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use orrery_bench::pairs::{LineClient, PairSpec, Running};
use orrery_bench::report::Report;
use orrery_bench::{Options, Skipped};
use orrery_report::record::Record;
use rustix::process::{Pid, Signal, kill_process};

const PORT: u16 = 6379;
/// Redis' data: so many values of 4 KiB.
const VALUES: u32 = 4000;
/// Nanoseconds that all threads of the guest's first process but the first were on a processor: the one that sends heartbeats.
/// The first answers this question, which takes a while.
const BEATING: &str = "cd /proc/1/task; for thread in *; do [ $thread = 1 ] || cat $thread/schedstat; done | \
    awk '{ sum += $1 } END { print sum }'";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Armed,
    Unarmed,
    Checkpoints,
}

struct Watched {
    running: Running,
    answers: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    backup: Pid,
    checkpoints: u32,
}

impl Watched {
    fn start() -> Result<Self> {
        let mut running = Running::start(&PairSpec {
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
        let filled = LineClient::connect(PORT)?.ask(&format!("DEBUG POPULATE {VALUES} value 4096\r\n"))?;
        ensure!(filled == "+OK", "redis answers {filled:?}");
        let backup = running.pair.status().backup.context("no backup")?.pid;
        let backup = Pid::from_raw(i32::try_from(backup)?).context("no backup")?;
        let (answers, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (counted, ended) = (Arc::clone(&answers), Arc::clone(&stop));
        let mut line = LineClient::connect(PORT)?;
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

    /// Measures answers per second for `length`.
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

    /// Makes one pre-dump of what has changed since the last, within the service's namespaces.
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
    let options = Options::from_command_line("The overhead of a backup that watches over a service");
    let mut report = Report::default();
    let (rounds, length) =
        if options.quick() { (5, Duration::from_secs(3)) } else { (15, Duration::from_secs(5)) };
    let mut watched = match Watched::start() {
        Err(error) if error.is::<Skipped>() => {
            report.absent("all", &error);
            return report.finish("orthros-overhead", options.all());
        }
        other => other?,
    };
    // criu is part of what a pair needs: where it fails, that is a failure and no lack.
    watched.checkpoint().context("the first checkpoint")?;
    let mut rates: [Vec<f64>; 3] = Default::default();
    for round in 0..rounds {
        let mut ways = [Way::Armed, Way::Unarmed, Way::Checkpoints];
        ways.rotate_left(round % 3);
        for way in ways {
            rates[way as usize].push(watched.slice(way, length).with_context(|| format!("{way:?}"))?);
        }
    }
    // What heartbeats take of a processor, without anything else in the way.
    kill_process(watched.backup, Signal::CONT)?;
    let beating = |watched: &mut Watched| -> Result<f64> {
        Ok(watched.running.pair.run(&["sh", "-c", BEATING])?.trim().parse::<f64>()? / 1e9)
    };
    let (begin, before) = (Instant::now(), beating(&mut watched)?);
    std::thread::sleep(Duration::from_secs(if options.quick() { 10 } else { 30 }));
    let used = (beating(&mut watched)? - before) / begin.elapsed().as_secs_f64();
    ensure!(used > 0.0, "no thread sends heartbeats");
    watched.stop.store(true, Ordering::Relaxed);
    let [armed, unarmed, checkpoints] = rates;
    for (rival, others) in [("without a backup", unarmed), ("criu pre-dump each second", checkpoints)] {
        let pairs = armed.iter().copied().zip(others).collect();
        report.records.push(Record::new("orthros-overhead", "redis", "1/s", rival, pairs, true));
    }
    let (case, pairs) = ("time left beside heartbeats", vec![(1.0 - used, 1.0)]);
    report.records.push(Record::new("orthros-overhead", case, "1", "no heartbeats", pairs, true));
    report.finish("orthros-overhead", options.all())
}
