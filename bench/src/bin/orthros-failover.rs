//! `make bench B=orthros-failover`: how long a client waits when the kernel under its service dies, and for what, over memory,
//! cached writes, open files and threads; beside a reboot of the same machine and the service's start, a reboot by kdump, and one
//! after which criu restores a checkpoint of the second before.
//!
//! Each point is a pair that boots and dies once, so that a run takes minutes. The parts of each wait go into
//! `target/bench/orthros-failover.series.json`.

use std::process::ExitCode;

use anyhow::Result;
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use orrery_bench::pairs::rivals::{self, PORT, Waited};
use orrery_bench::pairs::{Client, PairSpec, Rescue, Running};
use orrery_bench::report::Report;
use orrery_bench::{Options, Skipped, machine};
use orrery_orthros_host::Fault;
use orrery_report::record::{Record, write_json};
use orrery_report::series::Failover;
use orrery_report::statistics::median;

/// Parts of a failover, as they follow each other.
const STEPS: [&str; 9] =
    ["fence", "images", "disk", "write-back", "tmpfs", "restore", "network", "resume", "new backup"];
/// How often what the promises are about is measured.
const RUNS: usize = 3;
const REBOOT: &str = "reboot + service start";

/// What the service has when its kernel dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Load {
    memory: u32,
    cache: u32,
    files: u32,
    threads: u32,
}

const LEAST: Load = Load { memory: 1, cache: 0, files: 0, threads: 0 };

impl Load {
    fn name(self) -> String {
        match self {
            Self { cache: 1.., .. } => format!("cached writes/{} MiB", self.cache),
            Self { files: 1.., .. } => format!("files/{}", self.files),
            Self { threads: 1.., .. } => format!("threads/{}", self.threads),
            _ => format!("memory/{} MiB", self.memory),
        }
    }

    fn all(quick: bool) -> Vec<Self> {
        let load = LEAST;
        let sizes: &[u32] = if quick { &[1, 128] } else { &[1, 16, 64, 128, 256, 512, 1024] };
        let mut all: Vec<Self> = sizes.iter().map(|&memory| Self { memory, ..load }).collect();
        let some: [&[u32]; 3] =
            if quick { [&[16], &[100], &[50]] } else { [&[1, 16, 64], &[10, 100, 1000], &[10, 50, 200]] };
        all.extend(some[0].iter().map(|&cache| Self { cache, ..load }));
        all.extend(some[1].iter().map(|&files| Self { files, ..load }));
        all.extend(some[2].iter().map(|&threads| Self { threads, ..load }));
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
        let running = Running::start(&PairSpec {
            service: &["orrery-orthros-load", "ballast", &numbers[0], &numbers[1], &numbers[2]],
            programs: &[],
            files: &[],
            memory,
            append: "",
            disk: Some((512, None)),
        })?;
        Ok((running, Client::start(PORT, "\n")?))
    }
}

/// Makes one kernel die, and returns how long the client waited, in milliseconds.
fn die(load: Load, fault: Fault) -> Result<(Rescue, f64)> {
    let (mut running, mut client) = load.start()?;
    if load.cache > 0 {
        let command = format!("dd if=/dev/urandom of=/data/file bs=1M count={} 2>/dev/null", load.cache);
        running.pair.run(&["sh", "-c", &command])?;
    }
    // A connection that the service has not accepted yet would be lost.
    client.longest()?;
    client.reset_longest_wait();
    let rescue = running.crash(fault)?;
    let waited = client.longest()?;
    client.end()?;
    Ok((rescue, waited * 1e3))
}

fn measure(load: Load, fault: Fault, runs: usize) -> Result<Failover> {
    let deaths = (0..runs).map(|_| die(load, fault)).collect::<Result<Vec<_>>>()?;
    let of = |part: &dyn Fn(&Rescue) -> f64| {
        median(&deaths.iter().map(|(it, _)| part(it) * 1e3).collect::<Vec<_>>())
    };
    let steps: Vec<(String, f64)> =
        STEPS.iter().map(|&name| (name.to_owned(), of(&|rescue| rescue.step(name)))).collect();
    let all: Vec<f64> = deaths.iter().map(|&(_, waited)| waited).collect();
    let (waited, noticed) = (median(&all), of(&|rescue| rescue.noticed));
    let answer = (waited - noticed - of(&|rescue| rescue.failover.seconds)).max(0.0);
    let case = if fault == Fault::Panic { load.name() } else { format!("{}/{}", load.name(), fault.name()) };
    Ok(Failover { case, noticed, steps, answer, waited, all })
}

/// An alternative to a pair.
struct Rival {
    name: &'static str,
    measure: fn() -> Result<Waited>,
}

const RIVALS: [Rival; 3] = [
    Rival { name: REBOOT, measure: rivals::reboot },
    Rival { name: "kdump + reboot + service start", measure: rivals::kdump },
    Rival { name: "reboot + criu restore of the last second", measure: rivals::checkpoints },
];

/// Makes a record of our median over `runs` and one wait of a rival.
fn record(case: &str, ours: f64, runs: usize, rival: (&str, f64)) -> Record {
    Record { runs, ..Record::new("orthros-failover", case, "ms", rival.0, vec![(ours, rival.1)], false) }
}

/// Formats the parts of each wait.
fn table(points: &[Failover]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    let head = ["case", "noticed"].into_iter().chain(STEPS).chain(["answer", "client waited"]);
    table.set_header(head.collect::<Vec<_>>());
    for point in points {
        let steps = point.steps.iter().map(|step| step.1);
        let numbers = std::iter::once(point.noticed).chain(steps).chain([point.answer, point.waited]);
        let cells = std::iter::once(point.case.clone()).chain(numbers.map(|number| format!("{number:.0}")));
        table.add_row(cells.collect::<Vec<_>>());
    }
    table
}

fn main() -> Result<ExitCode> {
    let options =
        Options::from_command_line("How long a client waits when the kernel under its service dies");
    let mut report = Report::default();
    let mut waits = Vec::new();
    for rival in RIVALS.iter().filter(|rival| options.chosen(rival.name) || rival.name == REBOOT) {
        let measured = (rival.measure)();
        let machines_start = !measured.as_ref().is_err_and(|error| error.is::<Skipped>());
        if let Some(Waited { seconds, lost }) = report.present(rival.name, measured) {
            println!("{}: {:.0} ms, {lost} answers lost, and the connection", rival.name, seconds * 1e3);
            waits.push((rival.name, seconds * 1e3));
        } else if rival.name == REBOOT && !machines_start {
            return report.finish("orthros-failover", false);
        }
    }
    let mut points = Vec::new();
    let loads = Load::all(options.quick()).into_iter().map(|load| (load, Fault::Panic));
    for (load, fault) in loads.chain([(LEAST, Fault::Hang)]).filter(|(load, _)| options.chosen(&load.name()))
    {
        let promised = load == LEAST || load.memory >= 1024;
        let runs = if promised && !options.quick() { RUNS } else { 1 };
        let what = format!("{}, {}", load.name(), fault.name());
        if let Some(point) = report.present(&what, measure(load, fault, runs)) {
            println!("{}: {:.0} ms, nothing lost", point.case, point.waited);
            points.push(point);
        }
    }
    for &rival in &waits {
        let compared = points.iter().filter(|point| rival.0 == REBOOT || point.case == LEAST.name());
        report
            .records
            .extend(compared.map(|point| record(&point.case, point.waited, point.all.len(), rival)));
    }
    // What a further GiB costs, from two sizes.
    let wait = |memory: u32| {
        let name = Load { memory, ..LEAST }.name();
        points.iter().find(|point| point.case == name).map(|point| point.waited)
    };
    let largest = [1024, 512, 256, 128].into_iter().find_map(|memory| Some((memory, wait(memory)?)));
    if let (Some(small), Some((memory, large)), Some(&rival)) = (wait(1), largest, waits.first()) {
        let further = (large - small) * 1024.0 / f64::from(memory - 1);
        report.records.push(record("memory/further GiB", further, 1, rival));
    }
    println!("\nmilliseconds\n{}", table(&points).trim_fmt());
    if options.all() {
        let series = machine::record_file("orthros-failover.series")?;
        write_json(&series, &points)?;
        println!("parts: {}", series.display());
    }
    report.finish("orthros-failover", options.all())
}
