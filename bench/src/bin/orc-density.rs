//! `make bench B=orc-density`: memory of N copies of a program, each from a file tree of its own, as containers would have.
//!
//! First what the code and read-only data take, of Python with its cryptography and database libraries: the cached pages
//! of the trees' files (mincore(2), each file once, mapped or not), the store's objects, and what each process has relocated.
//! Hard links are the ideal, as then there is one tree; KSM never merges pages of files.
//!
//! Then ffmpeg, if it is there, which encodes all the time: memory and throughput, second by second, into
//! `target/bench/orc-density.series.json`, under KSM, too, as it is set on most machines and as fast as it goes, and from
//! overlays of a content store, as composefs makes them.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;
use orrery_bench::content_store::ContentStore;
use orrery_bench::copies::{
    Ksm, Running, Store, anonymous, cached, copy_in_tree, create_tree, drop_caches, files_of, processor_time,
    relocated, terminate_with_parent,
};
use orrery_bench::ffmpeg::{FFMPEG, encode};
use orrery_bench::report::Report;
use orrery_bench::{Options, Skipped, machine};
use orrery_report::record::{Record, write_json};
use orrery_report::series::{Density, DensityPoint};

const PYTHON: &str = "/usr/bin/python3";
/// What Python loads, and then waits.
const WORK: &str = "import ssl, sqlite3, json, ctypes, decimal, hashlib, lzma, bz2\n\
                    print('ready', flush=True)\nimport sys; sys.stdin.read()";
/// How long a copy may take to start, among all the others.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Memory of N copies from N trees
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
    /// No more copies than this: each of ffmpeg's trees takes a quarter of a gigabyte of disk
    #[arg(long, value_name = "COPIES", default_value_t = 32)]
    most: usize,
}

/// How the trees and the programs are made.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Plain,
    KsmOn,
    KsmTuned,
    HardLinks,
    ContentStore,
    Orc,
    OrcDisk,
}

impl Way {
    const ALL: [Self; 7] = [
        Self::Plain,
        Self::KsmOn,
        Self::KsmTuned,
        Self::HardLinks,
        Self::ContentStore,
        Self::Orc,
        Self::OrcDisk,
    ];
    /// Those whose numbers are promised.
    const FEW: [Self; 2] = [Self::Plain, Self::OrcDisk];

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::KsmOn => "KSM",
            Self::KsmTuned => "KSM, fast",
            Self::HardLinks => "hard links",
            Self::ContentStore => "content store",
            Self::Orc => "ours, without --disk",
            Self::OrcDisk => "ours",
        }
    }

    /// Configures KSM: with the kernel's defaults, or to scan all memory about every second.
    fn ksm(self) -> Result<Option<Ksm>> {
        match self {
            Self::KsmOn => Ksm::at_work(100, 20).map(Some),
            Self::KsmTuned => Ksm::at_work(5000, 10).map(Some),
            _ => Ok(None),
        }
    }
}

/// Trees with copies of a program.
struct Trees {
    directory: tempfile::TempDir,
    files: Vec<PathBuf>,
    program: PathBuf,
    own: Vec<PathBuf>,
}

impl Trees {
    fn new(program: &str, count: usize, start: impl Fn(&mut Command) -> Result<Running>) -> Result<Self> {
        let files = files_of(start(&mut Command::new(program))?.pid())?;
        // Not in /tmp, which may be memory itself.
        let directory = tempfile::tempdir_in(machine::program_directory()?)?;
        let own: Vec<_> = (0..count).map(|number| directory.path().join(format!("own{number}"))).collect();
        for tree in &own {
            create_tree(tree, &files, None)?;
        }
        Ok(Self { directory, files, program: fs::canonicalize(program)?, own })
    }

    /// Returns the trees for `count` copies, and the content store that must live as long as they are used.
    fn of(&self, way: Way, count: usize) -> Result<(Vec<PathBuf>, Option<ContentStore>)> {
        let named = |kind: &str| {
            (0..count).map(|number| self.directory.path().join(format!("{kind}{number}"))).collect()
        };
        Ok(match way {
            Way::HardLinks => {
                let trees: Vec<PathBuf> = named("linked");
                for tree in trees.iter().filter(|tree| !tree.exists()) {
                    create_tree(tree, &self.files, self.own.first().map(PathBuf::as_path))?;
                }
                (trees, None)
            }
            Way::ContentStore => {
                let trees: Vec<PathBuf> = named("overlay");
                let store = ContentStore::create_tree(self.directory.path(), &trees, &self.files)?;
                (trees, Some(store))
            }
            _ => (self.own[..count].to_vec(), None),
        })
    }
}

/// Copies of a program that run.
struct Copies {
    /// Where the bytes of files lie.
    trees: Vec<PathBuf>,
    // In this order they end.
    running: Vec<Running>,
    store: Option<Store>,
    _ksm: Option<Ksm>,
    _content: Option<ContentStore>,
}

impl Copies {
    fn start(
        trees: &Trees,
        way: Way,
        count: usize,
        start: impl Fn(&mut Command) -> Result<Running>,
    ) -> Result<Self> {
        let (roots, content) = trees.of(way, count)?;
        let lie_in = content.as_ref().map_or(roots.clone(), |content| vec![content.store().to_owned()]);
        drop_caches(&lie_in)?;
        let store = match way {
            Way::Orc | Way::OrcDisk => Some(Store::start(way == Way::OrcDisk)?),
            _ => None,
        };
        let mut copies =
            Self { trees: lie_in, running: Vec::new(), store, _ksm: way.ksm()?, _content: content };
        for tree in &roots {
            let program = copy_in_tree(tree, &trees.program);
            let mut command = Command::new(program);
            command.env("LD_LIBRARY_PATH", tree).env("PYTHONPATH", tree).env("PYTHONHOME", "/usr");
            if let Some(store) = &copies.store {
                store.share(&mut command)?;
            }
            if copies._ksm.is_some() {
                Ksm::merge(&mut command);
            }
            copies.running.push(start(&mut command)?);
        }
        Ok(copies)
    }

    /// Returns the bytes of code and read-only data, after the store has freed what no process needs.
    fn read_only(&self) -> Result<u64> {
        if self.store.is_some() {
            std::thread::sleep(Duration::from_secs(5));
        }
        let own: u64 = self.running.iter().map(|copy| relocated(copy.pid())).sum::<Result<_>>()?;
        Ok(self.files()? + own)
    }

    /// Returns the bytes of everything.
    fn everything(&self) -> Result<u64> {
        let own: u64 = self.running.iter().map(|copy| anonymous(copy.pid())).sum::<Result<_>>()?;
        Ok(self.files()? + own)
    }

    /// Returns the seconds of CPU time of all copies together.
    fn processor_time(&self) -> Result<f64> {
        self.running.iter().map(|copy| processor_time(copy.pid())).sum()
    }

    fn files(&self) -> Result<u64> {
        Ok(cached(&self.trees)? + self.store.as_ref().map_or(Ok(0), Store::bytes)?)
    }
}

#[expect(clippy::cast_precision_loss, reason = "sizes for people")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / 1_048_576.0
}

/// Makes a record of one run; of bytes, less is better.
fn record(case: String, unit: &str, ours: f64, (rival, value): (&str, f64)) -> Record {
    Record::new("orc-density", case, unit, rival, vec![(ours, value)], unit != "MiB")
}

/// Measures code and read-only data of idle copies.
fn density(counts: &[usize], report: &mut Report) -> Result<()> {
    let start = |command: &mut Command| Running::start(command.args(["-c", WORK]), "ready");
    let trees = Trees::new(PYTHON, counts.iter().copied().max().unwrap_or(1), start)?;
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

/// A measurement at one time.
/// Starts ffmpeg, whose frames are counted.
fn film(command: &mut Command, frames: &Arc<AtomicU64>) -> Result<Running> {
    // For ever.
    command.args(encode("size=320x180:rate=30", &["mpeg4"])).stdin(Stdio::null()).stdout(Stdio::piped());
    terminate_with_parent(command);
    let mut child = Running(command.spawn().with_context(|| format!("cannot start {command:?}"))?);
    let mut lines = BufReader::new(child.0.stdout.take().context("no output")?).lines();
    let frames = Arc::clone(frames);
    let (ready, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut before = 0;
        while let Some(Ok(line)) = lines.next() {
            let Some(now) = line.strip_prefix("frame=").and_then(|text| text.trim().parse::<u64>().ok())
            else {
                continue;
            };
            frames.fetch_add(now.saturating_sub(before), Ordering::Relaxed);
            before = now;
            let _ = ready.send(());
        }
    });
    wait.recv_timeout(TIMEOUT).context("ffmpeg encodes nothing")?;
    Ok(child)
}

fn watch(trees: &Trees, way: Way, count: usize, seconds: u64) -> Result<Density> {
    let frames = Arc::new(AtomicU64::new(0));
    let copies = Copies::start(trees, way, count, |command| film(command, &frames))?;
    let mut points = Vec::new();
    let begin = Instant::now();
    let (mut last, mut counted) = (begin, frames.load(Ordering::Relaxed));
    let mut had = copies.processor_time()?;
    while begin.elapsed() < Duration::from_secs(seconds) {
        std::thread::sleep(Duration::from_secs(1));
        let now = frames.load(Ordering::Relaxed);
        let have = copies.processor_time()?;
        #[expect(clippy::cast_precision_loss, reason = "frames of some seconds")]
        let done = (now - counted) as f64;
        let (rate, of_processor) = (done / last.elapsed().as_secs_f64(), done / (have - had).max(0.01));
        (last, counted, had) = (Instant::now(), now, have);
        let memory = mib(copies.everything()?);
        points.push(DensityPoint {
            second: begin.elapsed().as_secs_f64(),
            memory_mib: memory,
            frames_per_second: rate,
            frames_per_processor_second: of_processor,
        });
    }
    Ok(Density { contender: way.name().to_owned(), copies: count, points })
}

/// Measures memory and throughput over time, for numbers of copies, ways and seconds.
fn over_time(plan: &[(usize, &[Way], u64)], report: &mut Report) -> Result<()> {
    let most = plan.iter().map(|(count, ..)| *count).max().unwrap_or(1);
    let trees = Trees::new(FFMPEG, most, |command| film(command, &Arc::default()))?;
    let mut all = Vec::new();
    for &(count, ways, seconds) in plan {
        for &way in ways {
            eprintln!("ffmpeg: {count} copies, {}", way.name());
            let what = format!("{count} copies, {}", way.name());
            all.extend(report.present(&what, watch(&trees, way, count, seconds)));
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
    if ffmpeg {
        let mut plan: Vec<(usize, &[Way], u64)> = if options.quick() {
            vec![(16, &Way::FEW, 5)]
        } else {
            // Every number of copies, and all ways for a few copies and for many, within some minutes.
            vec![
                (1, &Way::FEW, 5),
                (2, &Way::ALL, 8),
                (4, &Way::FEW, 5),
                (8, &Way::FEW, 5),
                (16, &Way::ALL, 20),
                (32, &Way::FEW, 8),
            ]
        };
        plan.retain(|(count, ..)| *count <= most);
        over_time(&plan, &mut report)?;
    }
    // What was left out would be missing from the records.
    let whole = report.is_whole() && options.all() && most >= 32;
    report.finish("orc-density", whole)
}
