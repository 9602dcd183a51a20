//! `make bench B=orc-density`: memory of N copies of a program, each from a file tree of its own, as containers would have.
//!
//! First what the code and read-only data take, of Python with its cryptography and database libraries: the cached pages
//! of the trees' files (mincore(2), each file once, mapped or not), the store's objects, and what each process has relocated.
//! Hard links are the ideal, as then there is one tree; KSM never merges pages of files.
//!
//! Then all that Python, Java and LibreOffice take, each copy from a tree with all the files that it reads: from trees of their own, from trees that
//! `orrery orc rootfs` has made of these, and from one common tree, which is all that can be had.
//!
//! Then ffmpeg, if it is there, which encodes all the time: memory and throughput, second by second, into
//! `target/bench/orc-density.series.json`, under KSM, too, as it is set on most machines and as fast as it goes, and from
//! overlays of a content store, as composefs makes them.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;

use anyhow::Result;
use clap::Parser;
use orrery_bench::copies::Running;
use orrery_bench::ffmpeg::FFMPEG;
use orrery_bench::report::Report;
use orrery_bench::roots::{Application, Root, Roots};
use orrery_bench::transcoding::{film, watch};
use orrery_bench::trees::{Copies, Trees, Way, mib};
use orrery_bench::{Options, Skipped, machine};
use orrery_report::record::{Record, write_json};
use orrery_report::series::Density;

const PYTHON: &str = "/usr/bin/python3";
/// What Python loads, and then waits.
const WORK: &str = "import ssl, sqlite3, json, ctypes, decimal, hashlib, lzma, bz2\n\
                    print('ready', flush=True)\nimport sys; sys.stdin.read()";
/// All ways to have copies of a program.
const ALL: [Way; 7] =
    [Way::Plain, Way::KsmOn, Way::KsmFast, Way::HardLinks, Way::ContentStore, Way::Orc, Way::OrcDisk];
/// Those whose numbers are promised.
const FEW: [Way; 2] = [Way::Plain, Way::OrcDisk];

/// Memory of N copies from N trees
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
    /// No more copies than this: each of ffmpeg's trees takes a quarter of a gigabyte of disk
    #[arg(long, value_name = "COPIES", default_value_t = 32)]
    most: usize,
}

/// Makes a record of one run; of bytes, less is better.
fn record(case: String, unit: &str, ours: f64, (rival, value): (&str, f64)) -> Record {
    Record::new("orc-density", case, unit, rival, vec![(ours, value)], unit != "MiB")
}

/// Measures code and read-only data of idle copies.
fn density(counts: &[usize], report: &mut Report) -> Result<()> {
    let start = |command: &mut Command| Running::start(command.args(["-c", WORK]), "ready");
    let trees = Trees::new(Path::new(PYTHON), counts.iter().copied().max().unwrap_or(1), start)?;
    for &count in counts {
        let memory = |way| -> Result<f64> { Ok(mib(Copies::start(&trees, way, count, start)?.read_only()?)) };
        let (plain, ideal) = (memory(Way::Plain)?, memory(Way::HardLinks)?);
        let (whole, ours) = (memory(Way::Orc)?, memory(Way::OrcDisk)?);
        let case = format!("python/{count} copies");
        for (rival, bytes) in [("plain", plain), ("hard links", ideal), (Way::Orc.name(), whole)] {
            report.records.push(record(format!("{case}/memory"), "MiB", ours, (rival, bytes)));
        }
        // Of a single copy's bytes all others are duplicates.
        #[expect(clippy::cast_precision_loss, reason = "a few copies")]
        let duplicates = plain - plain / count as f64;
        let gone = (plain - ours) / duplicates;
        if count > 1 {
            report.records.push(record(format!("{case}/duplicates gone"), "1", gone, ("all of them", 1.0)));
        }
    }
    Ok(())
}

/// Measures all that copies take which run from trees with all their files.
fn whole_trees(name: &str, application: Result<Application>, counts: &[usize], report: &mut Report) {
    let measure = || -> Result<Vec<Record>> {
        let application = application?;
        let roots = Roots::new(&application, counts.iter().copied().max().unwrap_or(1))?;
        let mut records = Vec::new();
        for &count in counts {
            eprintln!("{name}: {count} copies, whole trees");
            let memory = |root| -> Result<f64> { Ok(mib(roots.memory(root, count)?)) };
            let (plain, ours, common) = (memory(Root::Own)?, memory(Root::Shared)?, memory(Root::Common)?);
            let case = format!("{name}/{count} copies, whole trees");
            for (rival, bytes) in [("plain", plain), ("one tree", common)] {
                records.push(record(format!("{case}/memory"), "MiB", ours, (rival, bytes)));
            }
            let part = (plain - ours) / (plain - common);
            records.push(record(format!("{case}/saved"), "1", part, ("one tree", 1.0)));
        }
        Ok(records)
    };
    match measure() {
        Ok(records) => report.records.extend(records),
        Err(error) => report.absent(name, &error),
    }
}

/// Measures memory and throughput over time, for numbers of copies, ways and seconds.
fn over_time(plan: &[(usize, &[Way], u64)], report: &mut Report) -> Result<()> {
    let most = plan.iter().map(|(count, ..)| *count).max().unwrap_or(1);
    let trees = Trees::new(Path::new(FFMPEG), most, |command| film(command, &Arc::default()))?;
    let mut all = Vec::new();
    for &(count, ways, seconds) in plan {
        for &way in ways {
            eprintln!("ffmpeg: {count} copies, {}", way.name());
            let what = format!("{count} copies, {}", way.name());
            all.extend(report.present(&what, watch(&trees, way, count, seconds, f64::INFINITY)));
        }
        let of_count: Vec<_> = all.iter().filter(|series| series.copies == count).collect();
        #[expect(clippy::cast_precision_loss, reason = "some seconds")]
        let summary = |series: &Density| {
            let last = series.points.last().map_or(0.0, |point| point.memory_mib);
            let rates = series.points.iter().map(|point| point.frames_per_processor_second);
            (last, rates.sum::<f64>() / series.points.len().max(1) as f64)
        };
        let Some(ours) = of_count.iter().find(|series| series.contender == Way::OrcDisk.name()) else {
            continue;
        };
        let (our_memory, our_rate) = summary(ours);
        for series in of_count.iter().filter(|series| series.contender != Way::OrcDisk.name()) {
            let (memory, rate) = summary(series);
            let (case, rival) = (format!("ffmpeg/{count} copies"), series.contender.as_str());
            report.records.push(record(format!("{case}/memory"), "MiB", our_memory, (rival, memory)));
            report.records.push(record(format!("{case}/frames"), "1/s of CPU", our_rate, (rival, rate)));
        }
    }
    let path = machine::record_file("orc-density.series")?;
    write_json(&path, &all)?;
    println!("over time: {}", path.display());
    Ok(())
}

fn main() -> Result<ExitCode> {
    let Arguments { options, most } = Arguments::parse();
    let mut report = Report::default();
    let mut is_to_run = |program: &str| {
        let is_there = Path::new(program).exists();
        if options.chosen(program) && !is_there {
            report.absent(program, &Skipped("it is not installed".to_owned()).into());
        }
        options.chosen(program) && is_there
    };
    let [python, ffmpeg] = [PYTHON, FFMPEG].map(&mut is_to_run);
    if python {
        let mut counts = if options.quick() { vec![16] } else { vec![1, 2, 4, 8, 16, 32] };
        counts.retain(|count| *count <= most);
        density(&counts, &mut report)?;
    }
    type Find = fn() -> Result<Application>;
    let applications: [(&str, Find); 3] = [
        ("python", Application::python),
        ("java", Application::java),
        ("libreoffice", Application::libreoffice),
    ];
    for (name, find) in applications {
        if options.chosen(&format!("{name}, whole trees")) {
            let mut counts = if options.quick() { vec![16] } else { vec![2, 4, 8, 16] };
            counts.retain(|count| *count <= most);
            whole_trees(name, find(), &counts, &mut report);
        }
    }
    if ffmpeg {
        let mut plan: Vec<(usize, &[Way], u64)> = if options.quick() {
            vec![(16, &FEW, 5)]
        } else {
            // Every number of copies, and all ways for a few copies and for many, within some minutes.
            vec![(1, &FEW, 5), (2, &ALL, 8), (4, &FEW, 5), (8, &FEW, 5), (16, &ALL, 20), (32, &FEW, 8)]
        };
        plan.retain(|(count, ..)| *count <= most);
        over_time(&plan, &mut report)?;
    }
    // What was left out would be missing from the records.
    let whole = report.is_whole() && options.all() && most >= 32;
    report.finish("orc-density", whole)
}
