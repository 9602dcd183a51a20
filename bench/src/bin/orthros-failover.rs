//! `make bench B=orthros-failover`: how long a client waits when the kernel under its service dies, and for what, over memory,
//! cached writes, open files and threads; beside a reboot of the same machine and the service's start.
//!
//! Each point is a pair that boots and dies once, so that a run takes minutes. The parts of each wait go into
//! `target/bench/orthros-failover.series.json`.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use orrery_bench::pairs::{Client, Line, Running, Wanted};
use orrery_bench::record::{self, Record};
use orrery_bench::{Options, Skipped, machine};
use orrery_orthros::Fault;
use serde::Serialize;

/// The port of `orrery-guest burden`.
const PORT: u16 = 7;
const STEPS: [&str; 8] =
    ["fence", "images", "disk", "write-back", "restore", "network", "resume", "new backup"];

/// How long a client waits when the kernel under its service dies
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

/// What the service has when its kernel dies.
#[derive(Clone, Copy, Debug, Default)]
struct Burden {
    memory: u32,
    cache: u32,
    files: u32,
    threads: u32,
}

impl Burden {
    fn name(self) -> String {
        match self {
            Self { cache: 1.., .. } => format!("cached writes/{} MiB", self.cache),
            Self { files: 1.., .. } => format!("files/{}", self.files),
            Self { threads: 1.., .. } => format!("threads/{}", self.threads),
            _ => format!("memory/{} MiB", self.memory),
        }
    }

    fn all(quick: bool) -> Vec<Self> {
        let burden = Self { memory: 1, ..Self::default() };
        let sizes: &[u32] = if quick { &[1, 128] } else { &[1, 16, 64, 128, 256, 512, 1024] };
        let mut all: Vec<Self> = sizes.iter().map(|&memory| Self { memory, ..burden }).collect();
        let some: [&[u32]; 3] =
            if quick { [&[16], &[100], &[50]] } else { [&[1, 16, 64], &[10, 100, 1000], &[10, 50, 200]] };
        all.extend(some[0].iter().map(|&cache| Self { cache, ..burden }));
        all.extend(some[1].iter().map(|&files| Self { files, ..burden }));
        all.extend(some[2].iter().map(|&threads| Self { threads, ..burden }));
        all
    }

    fn start(self) -> Result<(Running, Client)> {
        let numbers = [self.memory, self.files, self.threads].map(|number| number.to_string());
        // Half of a backup's memory holds the images while the other half becomes the service.
        let memory = if self.memory > 512 {
            2048
        } else {
            (u64::from(self.memory) * 3).next_power_of_two().clamp(256, 2048)
        };
        let running = Running::start(&Wanted {
            service: &["orrery-guest", "burden", &numbers[0], &numbers[1], &numbers[2]],
            programs: &[],
            files: &[],
            memory,
            disk: Some((512, None)),
        })?;
        Ok((running, Client::start(PORT, "\n")?))
    }
}

/// One death: the parts of the wait, in milliseconds.
#[derive(Serialize)]
struct Point {
    case: String,
    noticed: f64,
    steps: Vec<(String, f64)>,
    waited: f64,
}

fn measure(burden: Burden, fault: Fault) -> Result<Point> {
    let (mut running, mut client) = burden.start()?;
    if burden.cache > 0 {
        let command = format!("dd if=/dev/urandom of=/data/file bs=1M count={} 2>/dev/null", burden.cache);
        running.pair.run(&["sh", "-c", &command])?;
    }
    client.forget();
    let rescue = running.crash(fault)?;
    let waited = client.longest()?;
    client.end()?;
    let steps = STEPS.iter().map(|&name| (name.to_owned(), rescue.step(name) * 1e3)).collect();
    let case =
        if fault == Fault::Panic { burden.name() } else { format!("{}/{}", burden.name(), fault.name()) };
    Ok(Point { case, noticed: rescue.noticed * 1e3, steps, waited: waited * 1e3 })
}

/// From the death of a machine without a backup to the first answer of the service that was started anew, in ms.
fn reboot(burden: Burden) -> Result<f64> {
    let (mut running, mut client) = burden.start()?;
    client.end()?;
    let begin = Instant::now();
    running.pair.reboot()?;
    Line::connect(PORT)?.ask("\n")?;
    Ok(begin.elapsed().as_secs_f64() * 1e3)
}

fn main() -> Result<ExitCode> {
    let options = Arguments::parse().options;
    let quick = options.quick();
    let chosen = |name: &str| options.only().is_none_or(|only| name.contains(only));
    let mut points = Vec::new();
    let mut records = Vec::new();
    let booted = match reboot(Burden { memory: 1, ..Burden::default() }) {
        Err(error) if error.is::<Skipped>() => {
            println!("SKIPPED {error}");
            return Ok(ExitCode::SUCCESS);
        }
        other => other.context("a reboot")?,
    };
    let mut wanted: Vec<(Burden, Fault)> =
        Burden::all(quick).into_iter().map(|burden| (burden, Fault::Panic)).collect();
    wanted.push((Burden { memory: 1, ..Burden::default() }, Fault::Hang));
    let mut failed = false;
    for (burden, fault) in wanted.into_iter().filter(|(burden, _)| chosen(&burden.name())) {
        match measure(burden, fault) {
            Ok(point) => {
                println!("{}: {:.0} ms", point.case, point.waited);
                records.push(Record {
                    bench: "orthros-failover".to_owned(),
                    case: point.case.clone(),
                    unit: "ms".to_owned(),
                    ours: point.waited,
                    rival_name: "reboot + service start".to_owned(),
                    rival: booted,
                    ratio: booted / point.waited,
                    spread: 0.0,
                    runs: 1,
                });
                points.push(point);
            }
            Err(error) => {
                failed = true;
                println!("FAILED {}: {error:#}", burden.name());
            }
        }
    }
    // Of two sizes, what a GiB more would cost.
    let wait = |memory: u32| {
        points.iter().find(|point| point.case == format!("memory/{memory} MiB")).map(|p| p.waited)
    };
    let largest = [1024, 512, 256, 128].into_iter().find_map(|memory| Some((memory, wait(memory)?)));
    if let (Some(small), Some((memory, large))) = (wait(1), largest) {
        let further = (large - small) * 1024.0 / f64::from(memory - 1);
        records.push(Record {
            bench: "orthros-failover".to_owned(),
            case: "memory/further GiB".to_owned(),
            unit: "ms".to_owned(),
            ours: further,
            rival_name: "reboot + service start".to_owned(),
            rival: booted,
            ratio: booted / further,
            spread: 0.0,
            runs: 1,
        });
    }
    let mut table = Table::new();
    table.load_style(NOTHING);
    let head: Vec<&str> = ["case", "noticed"].into_iter().chain(STEPS).chain(["client waited"]).collect();
    table.set_header(head);
    for point in &points {
        let numbers =
            std::iter::once(point.noticed).chain(point.steps.iter().map(|step| step.1)).chain([point.waited]);
        let cells = std::iter::once(point.case.clone()).chain(numbers.map(|number| format!("{number:.0}")));
        table.add_row(cells.collect::<Vec<_>>());
    }
    println!("\nmilliseconds; a reboot and the service's start take {booted:.0}");
    println!("{}", table.trim_fmt());
    if options.only().is_none() {
        let series = machine::record_file("orthros-failover.series")?;
        let path = machine::record_file("orthros-failover")?;
        record::write(&path, &records)?;
        std::fs::write(&series, serde_json::to_string_pretty(&points)?)?;
        println!("records: {}, parts: {}", path.display(), series.display());
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
