//! `make bench B=orc-transcode`: the paper's experiment, N ffmpegs that transcode: throughput and memory over time, and over N.
//!
//! The ways are those of the paper's figures 4 and 5, and ours: copies from trees of their own, as containers have them (plain); KSM as it
//! is set on most machines; KSM as ksmtuned(1) sets it, which looks each minute and scans where less than a fifth of the memory is free;
//! processes that share through a store; and one process with as many instances of ffmpeg, which was built with the pass.
//!
//! Two sizes of program: ffmpeg with some 20 video codecs, built from Debian's sources plainly and with the pass; and Debian's own, with its 200
//! libraries, which is not built with the pass. That a machine is short of memory is an assumption: it is taken to have a seventh more than
//! what the plain copies need, so that less than a fifth is free.
//!
//! Series are written to `target/bench/orc-transcode.series.json`, of which the report draws plots.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use anyhow::Result;
use clap::Parser;
use orrery_bench::ffmpeg::FFMPEG;
use orrery_bench::instances::program;
use orrery_bench::report::Report;
use orrery_bench::transcoding::{film, watch};
use orrery_bench::trees::{Trees, Way};
use orrery_bench::{Options, Skipped, machine};
use orrery_report::record::{Record, write_json};
use orrery_report::series::Density;
use orrery_testing::ffmpeg::{self, Build};

const SMALL: &str = "few codecs";
const LARGE: &str = "Debian's";

/// Throughput and memory of N ffmpegs that transcode
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
    /// No more copies than this: each tree of Debian's ffmpeg takes a quarter of a gigabyte of disk
    #[arg(long, value_name = "COPIES", default_value_t = 32)]
    most: usize,
}

/// A number of copies, and for how many seconds each way is watched.
type Plan = (usize, Vec<(Way, u64)>);

/// Returns what is measured of a program. KSM needs minutes: a tuned one looks each minute.
fn plan(quick: bool, has_instances: bool, most: usize) -> Vec<Plan> {
    let ours = if has_instances { vec![Way::OrcDisk, Way::Instances] } else { vec![Way::OrcDisk] };
    let ways = |before: &[(Way, u64)], seconds: u64| -> Vec<(Way, u64)> {
        before.iter().copied().chain(ours.iter().map(|&way| (way, seconds))).collect()
    };
    if quick {
        return vec![(most.min(16), ways(&[(Way::Plain, 5)], 5))];
    }
    let few = |count| (count, ways(&[(Way::Plain, 6)], 6));
    let all = ways(&[(Way::Plain, 30), (Way::KsmOn, 60), (Way::KsmTuned, 200)], 30);
    let mut plan = vec![(16, all)];
    if has_instances {
        plan.extend([1, 2, 4, 8, 32].map(few));
    }
    plan.retain(|(count, _)| *count <= most);
    plan
}

/// Returns the last memory in MiB, and the mean of frames in a second of processor time.
fn summary(series: &Density) -> (f64, f64) {
    #[expect(clippy::cast_precision_loss, reason = "some seconds")]
    let count = series.points.len().max(1) as f64;
    let frames: f64 = series.points.iter().map(|point| point.frames_per_processor_second).sum();
    (series.points.last().map_or(0.0, |point| point.memory_mib), frames / count)
}

/// Records what one way has beside another.
fn compare(report: &mut Report, ours: &Density, rival: &Density) {
    let ((our_memory, our_rate), (memory, rate)) = (summary(ours), summary(rival));
    let case = format!("{}/{} {}", ours.program, ours.copies, ours.contender);
    let mut add = |what: &str, unit: &str, value: f64, other: f64, more: bool| {
        let record = Record::new(
            "orc-transcode",
            format!("{case}/{what}"),
            unit,
            &rival.contender,
            vec![(value, other)],
            more,
        );
        report.records.push(record);
    };
    add("memory", "MiB", our_memory, memory, false);
    add("frames", "1/s of CPU", our_rate, rate, true);
}

/// Measures one size of program in all ways.
fn measure(name: &str, trees: &Trees, plan: &[Plan], report: &mut Report, all: &mut Vec<Density>) {
    for (count, ways) in plan {
        let mut of_count: Vec<(Way, Density)> = Vec::new();
        for &(way, seconds) in ways {
            let what = format!("{name}: {count} copies, {}", way.name());
            eprintln!("{what}");
            let plain =
                of_count.iter().find(|(way, _)| *way == Way::Plain).map(|(_, plain)| summary(plain).0);
            let memory = plain.map_or(f64::INFINITY, |plain| plain * 8.0 / 7.0);
            let watched = watch(trees, way, *count, seconds, memory);
            let watched = watched.map(|series| Density { program: name.to_owned(), ..series });
            of_count.extend(report.present(&what, watched).map(|series| (way, series)));
        }
        for (way, ours) in &of_count {
            for (_, rival) in of_count.iter().filter(|(rival, _)| rival != way) {
                if matches!(way, Way::OrcDisk | Way::Instances) {
                    compare(report, ours, rival);
                }
            }
        }
        all.extend(of_count.into_iter().map(|(_, series)| series));
    }
}

/// Returns ffmpeg as a program and as a library of instances, which the whole benchmark builds where they are not there.
fn small(quick: bool) -> Result<(PathBuf, PathBuf)> {
    let skipped = |reason: &str| Skipped(reason.to_owned());
    let build = |build| -> Result<PathBuf> {
        if quick && !ffmpeg::is_built(build) {
            return Err(skipped("ffmpeg takes minutes to build, which the whole benchmark does").into());
        }
        let directory =
            ffmpeg::build(build).ok_or_else(|| skipped("ffmpeg cannot be built with the pass here"))?;
        Ok(directory.join("ffmpeg"))
    };
    Ok((build(Build::Plain)?, build(Build::Instances)?))
}

fn main() -> Result<ExitCode> {
    if program::serve()? {
        return Ok(ExitCode::SUCCESS);
    }
    let Arguments { options, most } = Arguments::parse();
    let mut report = Report::default();
    let mut all = Vec::new();
    let start = |command: &mut Command| film(command, &Arc::default());
    let mut run = |name: &str, program: &Path, library: Option<PathBuf>, report: &mut Report| -> Result<()> {
        let plan = plan(options.quick(), library.is_some(), most);
        let count = plan.iter().map(|(count, _)| *count).max().unwrap_or(1);
        let trees = Trees::new(program, count, start)?.with_library(library);
        measure(name, &trees, &plan, report, &mut all);
        Ok(())
    };
    if options.chosen(SMALL)
        && let Some((plain, library)) = report.present(SMALL, small(options.quick()))
    {
        run(SMALL, &plain, Some(library), &mut report)?;
    }
    if options.chosen(LARGE) {
        if Path::new(FFMPEG).exists() {
            run(LARGE, Path::new(FFMPEG), None, &mut report)?;
        } else {
            report.absent(LARGE, &Skipped("ffmpeg is not installed".to_owned()).into());
        }
    }
    let path = machine::record_file("orc-transcode.series")?;
    write_json(&path, &all)?;
    println!("over time: {}", path.display());
    let whole = report.is_whole() && options.all() && most >= 32;
    report.finish("orc-transcode", whole)
}
