//! `make bench B=rollback`: writing to some pages of a process and restoring them.
//!
//! Every case but those named `tracker` and `first` includes everything: the pages are written, whatever faults that takes,
//! and restored. Each contender holds a footprint in a process of its own, bound to the same CPU as the others.

use std::process::ExitCode;

use anyhow::Result;
use orrery_bench::footprint::{Backing, Footprint, PAGE};
use orrery_bench::ours::{
    Captures, CleanScan, FirstCapture, InPython, RestoredMemory, TrackedPages, WholeRun,
};
use orrery_bench::rival::{CopyOnWrite, DontNeed, ForkExitWait, ForkServer};
use orrery_bench::{Bench, Case, Contender, Entry, Group, Pin, Unit, Work, machine};
use orrery_memory::images::Visibility;
use orrery_memory::space::First;
use orrery_memory::tracker::Choice;

const MIB: usize = 1 << 20;
const FOOTPRINTS: [usize; 5] = [16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB, 4096 * MIB];
const DIRTY_PAGES: [u32; 5] = [0, 1, 100, 1_000, 10_000];
/// The footprint in which pages are also read: what a rollback unmaps, reading maps again.
const READ_FOOTPRINT: (usize, Backing) = (64 * MIB, Backing::Small);
/// The processes of which everything is rolled back, and how many pages are written there.
const RUNS: [(usize, Backing, &[u32]); 3] = [
    (64 * MIB, Backing::Small, &[0, 1, 100, 1_000]),
    (64 * MIB, Backing::Huge, &[0, 100]),
    (4096 * MIB, Backing::Huge, &[0, 1]),
];
/// Pages that differ each time: the same ones cost less, once they are known to be hot.
const OTHER_PAGES: [Work; 2] =
    [Work { dirty: 100, read: 0, moving: true }, Work { dirty: 1_000, read: 0, moving: true }];
const READ_WORKS: [Work; 2] =
    [Work { dirty: 1, read: 1_000, moving: false }, Work { dirty: 100, read: 1_000, moving: false }];

/// A way to restore memory, or a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mechanism {
    Ours,
    Hidden,
    Run,
    Repeat,
    Fork,
    ForkServer,
    DontNeed,
    Tracked(Choice),
    CopyOnWrite,
    Scan(Choice),
    First(First),
}

use Mechanism::{
    CopyOnWrite as Cow, DontNeed as Drop, Fork, ForkServer as Server, Hidden, Ours, Repeat, Run, Scan,
    Tracked,
};

impl Mechanism {
    fn name(self) -> &'static str {
        match self {
            Ours => "memory restored",
            Hidden => "memory restored from hidden images",
            Run => "whole run",
            Repeat => "whole run, repeated",
            Fork => "fork + exit + wait",
            Server => "fork server + pipe",
            Drop => "MADV_DONTNEED",
            Tracked(Choice::WpAsync) => "wp_async",
            Tracked(_) => "compare",
            Cow => "copy-on-write",
            Scan(Choice::WpAsync) => "wp_async scan",
            Scan(_) => "compare scan",
            Self::First(First::Auto) => "first by size",
            Self::First(First::Copy) => "copy",
            Self::First(First::Fork) => "fork a holder",
        }
    }

    fn start(self, bytes: usize, backing: Backing) -> Result<Box<dyn Contender>> {
        let footprint = move || Footprint::anonymous(bytes, backing);
        Ok(match self {
            Ours => Box::new(RestoredMemory::new(footprint()?, Visibility::Mapped)?),
            Hidden => Box::new(RestoredMemory::new(footprint()?, Visibility::Hidden)?),
            Run => Box::new(WholeRun::new(footprint()?, Captures::Each)?),
            Repeat => Box::new(WholeRun::new(footprint()?, Captures::Once)?),
            Fork => Box::new(ForkExitWait::new(footprint()?)),
            Server => Box::new(ForkServer::start(footprint)?),
            Drop => Box::new(DontNeed::new(bytes, backing)?),
            Tracked(choice) => Box::new(TrackedPages::new(footprint()?, choice)?),
            Cow => Box::new(CopyOnWrite::new(footprint()?)),
            Scan(choice) => Box::new(CleanScan::new(footprint()?, choice)?),
            Self::First(first) => Box::new(FirstCapture::new(footprint()?, first)?),
        })
    }

    /// Returns how much memory a footprint takes; twice its size where it is, or may be, copied.
    fn memory(self, bytes: usize) -> usize {
        match self {
            Fork | Server | Drop | Cow | Self::First(First::Fork) => bytes,
            Ours | Hidden | Run | Repeat | Tracked(_) | Scan(_) | Self::First(_) => 2 * bytes,
        }
    }
}

/// Footprints of one kind, and the processes that hold them.
#[derive(Clone, Copy)]
struct Processes<'b> {
    bench: &'b Bench,
    pin: Pin,
    bytes: usize,
    backing: Backing,
}

impl Processes<'_> {
    fn entry(self, mechanism: Mechanism) -> Entry {
        let start = || mechanism.start(self.bytes, self.backing);
        self.bench.process(mechanism.name(), self.pin, start).memory(mechanism.memory(self.bytes))
    }

    fn group(self, name: &str, ours: Mechanism, rivals: &[Mechanism]) -> Group {
        // Before the rivals: the order in which contenders are made is the order of their processes.
        let ours = self.entry(ours);
        Group::new(name, ours, rivals.iter().map(|rival| self.entry(*rival)))
    }

    fn name(self) -> String {
        format!("{}/{}", size(self.bytes), self.backing)
    }

    /// Compares writing and restoring pages.
    fn rollbacks(self) -> Group {
        let name = self.name();
        let mut works: Vec<_> = DIRTY_PAGES.map(same_pages).into();
        if (self.bytes, self.backing) == READ_FOOTPRINT {
            works.extend(READ_WORKS);
            works.extend(OTHER_PAGES);
        }
        works.retain(|work| work.dirty as usize <= self.bytes / PAGE);
        let cases = works.into_iter().map(|work| case(&name, work).quick(self.is_quick(work)));
        self.group(&name, Ours, &[Fork, Server, Drop]).cases(cases)
    }

    /// Compares images that no stray read of the program can reach with visible ones.
    fn hidden_images(self) -> Group {
        let name = format!("visible images/{}", self.name());
        let cases = DIRTY_PAGES.map(|dirty| case(&name, same_pages(dirty)).quick(dirty == 100));
        self.group(&name, Ours, &[Hidden]).cases(cases)
    }

    /// Compares writing and restoring pages with the whole process, not its memory alone.
    fn runs(self, name: &str, ours: Mechanism, dirty: &[u32]) -> Group {
        let name = format!("{name}/{}", self.name());
        let cases = dirty.iter().map(|&dirty| {
            let quick = (self.bytes, self.backing) == READ_FOOTPRINT && (ours == Run || dirty == 0);
            case(&name, same_pages(dirty)).quick(quick)
        });
        self.group(&name, ours, &[Fork, Server]).cases(cases)
    }

    /// Compares the parts of tracking: the first write to a page, the restore of one page of a thousand, a scan where nothing was
    /// written.
    fn trackers(self) -> [Group; 3] {
        let group = |what: &str, work: &str, ours, rivals: &[Mechanism], unit| {
            let name = format!("tracker/{}/{what}", self.backing);
            self.group(&name, ours, rivals).case(Case::mean(work, &name, unit))
        };
        let (ours, rival) = (Tracked(Choice::WpAsync), Tracked(Choice::Compare));
        let scan = format!("scan of {}", size(self.bytes));
        let rivals = [Scan(Choice::Compare)];
        [
            group("first write to a page", "fault", ours, &[rival, Cow], Unit::Nanoseconds),
            group("page of 1000 restored", "restore", ours, &[rival], Unit::Nanoseconds),
            group(&scan, "scan", Scan(Choice::WpAsync), &rivals, Unit::Microseconds),
        ]
    }

    /// Compares the first capture of a process: copying its pages, or forking a process that holds them.
    fn first_captures(self) -> Group {
        let name = format!("first/{}", size(self.bytes));
        let cases = [("capture", "capture"), ("rollback", "capture, then 1000 pages")]
            .map(|(work, what)| Case::mean(work, format!("{name}/{what}"), Unit::Microseconds));
        let [auto, copy, fork] = [First::Auto, First::Copy, First::Fork].map(Mechanism::First);
        self.group(&name, auto, &[copy, fork]).cases(cases)
    }

    /// Returns whether a quick run has this case: those of SPECIFICATION.md and few others.
    fn is_quick(self, work: Work) -> bool {
        match (self.bytes / MIB, self.backing) {
            (64, Backing::Small) => work.dirty <= 1_000,
            (64, Backing::Huge) => work.dirty == 100,
            (4096, Backing::Huge) => work.dirty <= 1,
            _ => false,
        }
    }
}

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("rollback", "Rollback beside its rivals");
    for group in groups(&bench, bench.options().pin()?) {
        bench.group(group);
    }
    bench.run()
}

fn groups(bench: &Bench, pin: Pin) -> Vec<Group> {
    let processes = |bytes, backing| Processes { bench, pin, bytes, backing };
    let mut groups = Vec::new();
    for bytes in FOOTPRINTS {
        groups.extend([Backing::Small, Backing::Huge].map(|backing| processes(bytes, backing).rollbacks()));
    }
    groups.push(processes(READ_FOOTPRINT.0, READ_FOOTPRINT.1).hidden_images());
    for (bytes, backing, dirty) in RUNS {
        let runs = |(name, ours)| processes(bytes, backing).runs(name, ours, dirty);
        groups.extend([("run", Run), ("repeat", Repeat)].map(runs));
    }
    groups.push(runs_in_python(pin));
    for backing in [Backing::Small, Backing::Huge] {
        groups.extend(processes(64 * MIB, backing).trackers());
    }
    groups.extend(FOOTPRINTS.map(|bytes| processes(bytes, Backing::Small).first_captures()));
    groups
}

/// Compares a closure that does nothing, in a Python interpreter.
fn runs_in_python(pin: Pin) -> Group {
    let name = "run/python 64MiB";
    let entry = |mechanism: Mechanism, what: InPython| {
        Entry::new(mechanism.name(), move || {
            let worker = what.start()?;
            if let Pin::Cpu(cpu) = pin {
                machine::pin_process(worker.pid(), cpu)?;
            }
            Ok(worker)
        })
    };
    let case = Case::mean("nothing", format!("{name}/0 pages"), Unit::Microseconds).quick(true);
    Group::new(name, entry(Run, InPython::Run), [entry(Fork, InPython::Fork)]).case(case)
}

fn same_pages(dirty: u32) -> Work {
    Work { dirty, read: 0, moving: false }
}

fn case(group: &str, work: Work) -> Case {
    let dirty = match work.dirty {
        1 => "1 page".to_owned(),
        dirty => format!("{dirty} pages"),
    };
    let name = match work {
        Work { moving: true, .. } => format!("{group}/{dirty}, others each time"),
        Work { read: 0, .. } => format!("{group}/{dirty}"),
        Work { read, .. } => format!("{group}/{dirty}, {read} read"),
    };
    Case::mean(work.to_string(), name, Unit::Microseconds)
}

fn size(bytes: usize) -> String {
    match bytes / MIB {
        mib if mib >= 1024 => format!("{}GiB", mib / 1024),
        mib => format!("{mib}MiB"),
    }
}
