//! Everything that a report shows, and where it is read from.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;

use crate::chart::{self, Measure};
use crate::measurement::{Measurements, read_all};
use crate::page;
use crate::promise::{Promise, Verdict, parse};
use crate::record::{Record, read, write_whole};
use crate::series::{Density, Failover};

/// Where a report is read from.
#[derive(Debug, Clone)]
pub struct Sources {
    /// The directory of the benchmarks' records, `target/bench`.
    pub records: PathBuf,
    /// The file of promises, `bench/promises.toml`. Without such a file there are none.
    pub promises: PathBuf,
    /// The directory of what was measured before, `docs/measurements`.
    pub measurements: PathBuf,
}

/// What the benchmarks have left, and how it compares with what is promised and what was measured before.
#[derive(Debug)]
pub struct Report {
    pub(crate) benches: Vec<Bench>,
    pub(crate) promises: Vec<(Promise, Verdict)>,
    pub(crate) history: Vec<Measurements>,
    pub(crate) plots: Vec<Plot>,
}

/// The records of one benchmark.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) name: String,
    pub(crate) written: SystemTime,
    pub(crate) records: Vec<Record>,
}

/// A picture.
#[derive(Debug)]
pub(crate) struct Plot {
    /// Its file's name without `.svg`.
    pub(crate) name: String,
    /// The benchmark that it belongs to.
    pub(crate) bench: String,
    pub(crate) caption: String,
    /// Whether it shows one promise from day to day: such are small and many.
    pub(crate) is_history: bool,
    pub(crate) svg: String,
}

impl Report {
    /// Reads everything, and draws it.
    ///
    /// # Errors
    /// There are no records, or a file is not what its name says.
    pub fn read(sources: &Sources) -> Result<Self> {
        let benches = benches(&sources.records)?;
        let promises = promises(&sources.promises, &benches)?;
        let history = read_all(&sources.measurements)?;
        let mut plots = Vec::new();
        for bench in &benches {
            plots.push(Plot {
                name: bench.name.clone(),
                bench: bench.name.clone(),
                caption: "How many times better ours is than each rival: the median, and the range that half of the rounds are in.".to_owned(),
                is_history: false,
                svg: chart::ratios(&bench.records)?,
            });
        }
        if let Some(failovers) = series::<Vec<Failover>>(&sources.records, "orthros-failover")? {
            plots.push(Plot {
                name: "orthros-failover-steps".to_owned(),
                bench: "orthros-failover".to_owned(),
                caption: "What a client's wait consists of when the kernel of its server dies: medians, in milliseconds.".to_owned(),
                is_history: false,
                svg: chart::steps(&failovers)?,
            });
        }
        for bench in ["orc-density", "orc-transcode"] {
            if let Some(density) = series::<Vec<Density>>(&sources.records, bench)? {
                plots.extend(plots_of_copies(bench, &density)?);
            }
        }
        for (promise, verdict) in &promises {
            let mut values = values_of(promise, &history);
            if let Verdict::Held(value) | Verdict::Broken(value) = verdict {
                values.push(("now".to_owned(), *value));
            }
            if values.len() > 1 {
                plots.push(Plot {
                    name: promise.id.replace('/', "-"),
                    bench: promise.bench.clone(),
                    caption: format!("{} ({}), promised {}", promise.sentence, promise.id, promise.bound),
                    is_history: true,
                    svg: chart::history(&values, &promise.bound)?,
                });
            }
        }
        Ok(Self { benches, promises, history, plots })
    }

    /// Writes `index.html`, and each plot to a file of its own; returns the path of the page, which needs no other file.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, directory: &Path) -> Result<PathBuf> {
        for plot in &self.plots {
            write_whole(&directory.join(format!("{}.svg", plot.name)), &plot.svg)?;
        }
        let index = directory.join("index.html");
        write_whole(&index, &page::html(self))?;
        Ok(index)
    }

    /// Returns how many promises were held, broken and not measured.
    pub fn verdicts(&self) -> (usize, usize, usize) {
        let count =
            |is: fn(&Verdict) -> bool| self.promises.iter().filter(|(_, verdict)| is(verdict)).count();
        (
            count(|verdict| matches!(verdict, Verdict::Held(_))),
            count(|verdict| matches!(verdict, Verdict::Broken(_))),
            count(|verdict| matches!(verdict, Verdict::Unmeasured(_))),
        )
    }
}

/// Reads the records of all benchmarks, in the order of their names.
fn benches(directory: &Path) -> Result<Vec<Bench>> {
    let entries = fs::read_dir(directory).with_context(|| {
        format!("cannot read the records in {}: `make bench` writes some", directory.display())
    })?;
    let mut benches = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("cannot read {}", directory.display()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(name) = name.strip_suffix(".json").filter(|name| !name.ends_with(".series")) else {
            continue;
        };
        let records = read(&path)?;
        let written = fs::metadata(&path).and_then(|file| file.modified());
        let written = written.with_context(|| format!("cannot read {}", path.display()))?;
        if !records.is_empty() {
            benches.push(Bench { name: name.to_owned(), written, records });
        }
    }
    if benches.is_empty() {
        bail!("there are no records in {}: `make bench` writes some", directory.display());
    }
    benches.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(benches)
}

fn promises(path: &Path, benches: &[Bench]) -> Result<Vec<(Promise, Verdict)>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let promises = parse(&text).with_context(|| path.display().to_string())?;
    let judge = |promise: Promise| {
        let records = benches.iter().find(|bench| bench.name == promise.bench);
        let verdict = promise.judge(records.map_or(&[], |bench| &bench.records));
        (promise, verdict)
    };
    Ok(promises.into_iter().map(judge).collect())
}

/// Reads `NAME.series.json`; `None`: there is no such file.
fn series<T: DeserializeOwned>(directory: &Path, bench: &str) -> Result<Option<T>> {
    let path = directory.join(format!("{bench}.series.json"));
    if !path.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let series = serde_json::from_str(&text);
    Ok(Some(series.with_context(|| format!("{} holds no series of {bench}", path.display()))?))
}

/// Returns what was measured for a promise before, with the dates.
fn values_of(promise: &Promise, history: &[Measurements]) -> Vec<(String, f64)> {
    let of_day = |day: &Measurements| {
        let row = day.values.iter().find(|row| row.id == promise.id && row.unit == promise.bound.unit())?;
        Some((day.date.clone(), row.value))
    };
    history.iter().filter_map(of_day).collect()
}

/// Draws copies of programs: memory over time; with throughput, and over their number, where several programs or numbers are compared.
fn plots_of_copies(bench: &str, density: &[Density]) -> Result<Vec<Plot>> {
    let mut plots = Vec::new();
    let mut add = |name: String, caption: String, svg: String| {
        plots.push(Plot { name, bench: bench.to_owned(), caption, is_history: false, svg });
    };
    let file_name = |program: &str| -> String {
        let parts = program.split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| !part.is_empty());
        parts.fold(bench.to_owned(), |name, part| format!("{name}-{}", part.to_lowercase()))
    };
    let of_program = |program: &str| match program {
        "" => "a program".to_owned(),
        name => format!("a program ({name})"),
    };
    let found = chart::programs_and_copies(density);
    for &(program, copies) in &found {
        let name = format!("{}-{copies}", file_name(program));
        let what = format!("{copies} copies of {}", of_program(program));
        let svg = chart::over_time(density, (program, copies), Measure::Memory)?;
        add(name.clone(), format!("The memory of {what} over time, in MiB."), svg);
        if !program.is_empty() {
            let svg = chart::over_time(density, (program, copies), Measure::Throughput)?;
            add(format!("{name}-throughput"), format!("The frames in a second of {what} over time."), svg);
        }
    }
    let mut programs: Vec<&str> =
        found.iter().map(|(program, _)| *program).filter(|name| !name.is_empty()).collect();
    programs.dedup();
    for program in programs {
        for (measure, suffix, what) in [
            (Measure::Memory, "memory", "memory in MiB"),
            (Measure::Throughput, "throughput", "frames in a second"),
        ] {
            if let Some(svg) = chart::over_copies(density, program, measure)? {
                let caption = format!("The {what} of {}, over the number of copies.", of_program(program));
                add(format!("{}-{suffix}", file_name(program)), caption, svg);
            }
        }
    }
    Ok(plots)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::write_json;

    struct Files(tempfile::TempDir);

    impl Files {
        fn new() -> Self {
            let files = Self(tempfile::tempdir().unwrap());
            let record = |case: &str, ours, rival: &str, theirs| {
                Record::new("rollback", case, "us", rival, vec![(ours, theirs)], false)
            };
            let records =
                [record("1 <page>", 10.0, "fork", 500.0), record("1 <page>", 10.0, "MADV_DONTNEED", 5.0)];
            write_json(&files.sources().records.join("rollback.json"), &records).unwrap();
            files
        }

        fn sources(&self) -> Sources {
            let path = |name| self.0.path().join(name);
            Sources { records: path("bench"), promises: path("promises.toml"), measurements: path("days") }
        }

        fn write(&self, name: &str, text: &str) {
            write_whole(&self.0.path().join(name), text).unwrap();
        }

        fn promise(&self, bound: &str) {
            self.write(
                "promises.toml",
                &format!(
                    "[[promise]]\nid = \"rollback/page\"\nsystem = \"rollback\"\nsentence = \"a page\"\nbench = \"rollback\"\n\
                     case = \"1 <page>\"\nbound = \"{bound}\"\n"
                ),
            );
        }
    }

    fn day(value: &str) -> String {
        format!(
            "{}\n|---|---|---|---|\n| `rollback/page` | <= 25 us | {value} | held |\n",
            crate::measurement::HEADER
        )
    }

    fn names(report: &Report) -> Vec<&str> {
        report.plots.iter().map(|plot| plot.name.as_str()).collect()
    }

    #[test]
    fn records_alone_are_enough() {
        let files = Files::new();
        let report = Report::read(&files.sources()).unwrap();
        assert_eq!(names(&report), ["rollback"]);
        assert_eq!(report.verdicts(), (0, 0, 0));
        let page = report.write(&files.0.path().join("out/report")).unwrap();
        let text = fs::read_to_string(page).unwrap();
        assert!(text.contains("1 &lt;page&gt;") && !text.contains("1 <page>"), "{text}");
        assert!(text.contains("MADV_DONTNEED") && text.contains("50.0x"), "{text}");
    }

    #[test]
    fn pages_load_nothing_and_pictures_are_whole() {
        let files = Files::new();
        files.promise("<= 25 us");
        files.write("days/2026-11-22.md", &day("15.8 us"));
        files.write(
            "bench/orthros-failover.series.json",
            "[{\"case\": \"memory/1 MiB\", \"noticed\": 11, \"steps\": [[\"fence\", 36], [\"restore\", 307]], \"answer\": 0, \
             \"waited\": 354, \"all\": [354]}]",
        );
        files.write(
            "bench/orc-density.series.json",
            "[{\"contender\": \"plain\", \"copies\": 5, \"points\": [{\"second\": 0, \"memory_mib\": 10, \"frames_per_second\": 1, \
             \"frames_per_processor_second\": 1}, {\"second\": 9, \"memory_mib\": 50, \"frames_per_second\": 1, \
             \"frames_per_processor_second\": 1}]}]",
        );
        let point = "{\"second\": 3, \"memory_mib\": 1, \"frames_per_second\": 1, \"frames_per_processor_second\": 1}";
        let copies = |number| {
            format!(
                "{{\"program\": \"Few codecs\", \"contender\": \"x\", \"copies\": {number}, \"points\": [{point}, {point}]}}"
            )
        };
        files.write("bench/orc-transcode.series.json", &format!("[{}, {}]", copies(2), copies(4)));
        let report = Report::read(&files.sources()).unwrap();
        let transcode = |name: &&str| name.starts_with("orc-transcode");
        assert_eq!(
            names(&report).into_iter().filter(|name| !transcode(name)).collect::<Vec<_>>(),
            ["rollback", "orthros-failover-steps", "orc-density-5", "rollback-page"]
        );
        assert_eq!(
            names(&report).into_iter().filter(transcode).collect::<Vec<_>>(),
            [
                "orc-transcode-few-codecs-2",
                "orc-transcode-few-codecs-2-throughput",
                "orc-transcode-few-codecs-4",
                "orc-transcode-few-codecs-4-throughput",
                "orc-transcode-few-codecs-memory",
                "orc-transcode-few-codecs-throughput"
            ]
        );
        let out = files.0.path().join("out");
        let text = fs::read_to_string(report.write(&out).unwrap()).unwrap();
        // But for the name of the language that the pictures are written in.
        let addresses = text.replace("http://www.w3.org/2000/svg", "");
        assert!(!addresses.contains("http") && !addresses.contains("src="), "{addresses}");
        for name in names(&report) {
            let svg = fs::read_to_string(out.join(format!("{name}.svg"))).unwrap();
            let document = roxmltree::Document::parse(&svg).unwrap();
            assert_eq!(document.root_element().tag_name().name(), "svg");
            assert!(svg.contains("<text"), "{name}: {svg}");
        }
    }

    #[test]
    fn promises_are_judged_by_these_records() {
        let files = Files::new();
        files.promise("<= 25 us");
        assert_eq!(Report::read(&files.sources()).unwrap().verdicts(), (1, 0, 0));
        files.promise("<= 5 us");
        let report = Report::read(&files.sources()).unwrap();
        assert_eq!(report.verdicts(), (0, 1, 0));
        let text = page::html(&report);
        assert!(text.contains("broken") && text.contains("10.0 us"), "{text}");
    }

    #[test]
    fn a_promise_has_a_picture_where_it_was_measured_twice() {
        let files = Files::new();
        files.promise("<= 25 us");
        assert_eq!(names(&Report::read(&files.sources()).unwrap()), ["rollback"]);
        files.write("days/2026-11-22.md", &day("15.8 us"));
        assert_eq!(names(&Report::read(&files.sources()).unwrap()), ["rollback", "rollback-page"]);
        // In another unit it is another value.
        files.write("days/2026-11-22.md", &day("15.8 ms"));
        assert_eq!(names(&Report::read(&files.sources()).unwrap()), ["rollback"]);
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let files = Files::new();
        let error = |sources: &Sources| format!("{:#}", Report::read(sources).unwrap_err());
        let nowhere = Sources { records: "/nonexistent".into(), ..files.sources() };
        assert!(
            error(&nowhere).contains("cannot read the records in /nonexistent: `make bench` writes some")
        );
        let empty = tempfile::tempdir().unwrap();
        let none = Sources { records: empty.path().to_owned(), ..files.sources() };
        assert!(error(&none).contains("there are no records in"));
        files.write("bench/broken.json", "{}");
        assert!(error(&files.sources()).contains("broken.json holds no list of benchmark records"));
        files.write("bench/broken.json", "[]");
        files.write("bench/orthros-failover.series.json", "[{}]");
        assert!(error(&files.sources()).contains("holds no series of orthros-failover"));
    }
}
