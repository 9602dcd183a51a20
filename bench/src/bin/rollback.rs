//! `make bench B=rollback`: what it costs to write to some pages of a process and to have them back.
//!
//! Every case but those named `tracker` and `first` is *all in*: the pages are written, whatever faults that takes, and
//! restored. Each contender holds a footprint in a process of its own, bound to the same CPU as the others.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use orrery_bench::footprint::{Backing, Footprint, PAGE};
use orrery_bench::ours::{
    Captures, CleanScan, FirstCapture, InPython, RestoredMemory, TrackedPages, WholeRun,
};
use orrery_bench::rival::{CopyOnWrite, DontNeed, ForkExitWait, ForkServer};
use orrery_bench::{
    Bench, Case, CommandLine, Contender, Entry, Group, Part, Pin, Quantity, Unit, Work, machine, serve,
};
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
/// The same for pages that differ each time: what the same ones cost is less, once they are known to be hot.
const OTHER_PAGES: [Work; 2] =
    [Work { dirty: 100, read: 0, moving: true }, Work { dirty: 1_000, read: 0, moving: true }];
const READ_WORKS: [Work; 2] =
    [Work { dirty: 1, read: 1_000, moving: false }, Work { dirty: 100, read: 1_000, moving: false }];

/// A way of having memory back, or a part of one.
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

/// All mechanisms, as tables name them and as a contender is told.
const NAMES: [(Mechanism, &str); 15] = [
    (Ours, "memory restored"),
    (Hidden, "memory restored from hidden images"),
    (Run, "whole run"),
    (Repeat, "whole run, repeated"),
    (Fork, "fork + exit + wait"),
    (Server, "fork server + pipe"),
    (Drop, "MADV_DONTNEED"),
    (Tracked(Choice::WpAsync), "wp_async"),
    (Tracked(Choice::Compare), "compare"),
    (Cow, "copy-on-write"),
    (Scan(Choice::WpAsync), "wp_async scan"),
    (Scan(Choice::Compare), "compare scan"),
    (Mechanism::First(First::Auto), "first by size"),
    (Mechanism::First(First::Copy), "copy"),
    (Mechanism::First(First::Fork), "fork a holder"),
];

impl Mechanism {
    fn name(self) -> &'static str {
        NAMES.iter().find(|(mechanism, _)| *mechanism == self).map_or("", |(_, name)| name)
    }

    fn of_name(name: &str) -> Result<Self> {
        let found = NAMES.iter().find(|(_, other)| *other == name);
        found.map(|(mechanism, _)| *mechanism).with_context(|| format!("there is no contender {name:?}"))
    }

    fn start(self, bytes: usize, backing: Backing) -> Result<Box<dyn Contender>> {
        let footprint = move || Footprint::anonymous(bytes, backing);
        Ok(match self {
            Self::Ours => Box::new(RestoredMemory::new(footprint()?, Visibility::Mapped)?),
            Self::Hidden => Box::new(RestoredMemory::new(footprint()?, Visibility::Hidden)?),
            Self::Run => Box::new(WholeRun::new(footprint()?, Captures::Each)?),
            Self::Repeat => Box::new(WholeRun::new(footprint()?, Captures::Once)?),
            Self::Fork => Box::new(ForkExitWait::new(footprint()?)),
            Self::ForkServer => Box::new(ForkServer::start(footprint)?),
            Self::DontNeed => Box::new(DontNeed::new(bytes, backing)?),
            Self::Tracked(choice) => Box::new(TrackedPages::new(footprint()?, choice)?),
            Self::CopyOnWrite => Box::new(CopyOnWrite::new(footprint()?)),
            Self::Scan(choice) => Box::new(CleanScan::new(footprint()?, choice)?),
            Self::First(first) => Box::new(FirstCapture::new(footprint()?, first)?),
        })
    }

    /// How many bytes of memory a footprint of so many takes with it.
    fn memory(self, bytes: usize) -> usize {
        match self {
            Self::Fork | Self::ForkServer | Self::DontNeed | Self::CopyOnWrite => bytes,
            Self::First(First::Fork) => bytes,
            // Copies the footprint, or may.
            Self::Ours
            | Self::Hidden
            | Self::Run
            | Self::Repeat
            | Self::Tracked(_)
            | Self::Scan(_)
            | Self::First(_) => 2 * bytes,
        }
    }
}

/// Footprints of one kind, and who is to hold them.
#[derive(Clone, Copy)]
struct Field {
    bytes: usize,
    backing: Backing,
    pin: Pin,
}

impl Field {
    /// In a process of its own.
    fn entry(self, mechanism: Mechanism) -> Result<Entry> {
        let part =
            Part::new(mechanism.name(), self.pin).with([self.bytes.to_string(), self.backing.to_string()]);
        Ok(part.entry().memory(u64::try_from(mechanism.memory(self.bytes))?))
    }

    /// What the process of such an entry is told, and holds then.
    fn of(part: &Part) -> Result<Self> {
        let [bytes, backing] = part.words.as_slice() else { bail!("{:?} is no footprint", part.words) };
        let backing = backing.parse().map_err(anyhow::Error::msg)?;
        Ok(Self { bytes: bytes.parse()?, backing, pin: part.pin })
    }

    fn group(self, name: &str, ours: Mechanism, rivals: &[Mechanism]) -> Result<Group> {
        let mut group = Group::new(name, self.entry(ours)?);
        for rival in rivals {
            group = group.against(self.entry(*rival)?);
        }
        Ok(group)
    }

    fn name(self) -> String {
        format!("{}/{}", size(self.bytes), self.backing)
    }
}

fn main() -> Result<ExitCode> {
    let CommandLine { options, part } = CommandLine::read("Rollback beside its rivals");
    if let Some(part) = part {
        return Ok(serve(|| {
            part.pin.bind()?;
            let field = Field::of(&part)?;
            Mechanism::of_name(&part.name)?.start(field.bytes, field.backing)
        }));
    }
    let pin = options.pin_or(Pin::Cpu(machine::last_cpu()?));
    let mut bench = Bench::new("rollback", options);
    for bytes in FOOTPRINTS {
        for backing in [Backing::Small, Backing::Huge] {
            bench.group(rollbacks(Field { bytes, backing, pin })?);
        }
    }
    bench.group(hidden_images(Field { bytes: READ_FOOTPRINT.0, backing: READ_FOOTPRINT.1, pin })?);
    for (bytes, backing, dirty) in RUNS {
        for (name, ours) in [("run", Run), ("repeat", Repeat)] {
            bench.group(runs(Field { bytes, backing, pin }, name, ours, dirty)?);
        }
    }
    bench.group(runs_in_python(pin));
    for backing in [Backing::Small, Backing::Huge] {
        let field = Field { bytes: 64 * MIB, backing, pin };
        bench.group(first_writes(field)?);
        bench.group(restored_pages(field)?);
        bench.group(clean_scans(field)?);
    }
    for bytes in FOOTPRINTS {
        bench.group(first_captures(Field { bytes, backing: Backing::Small, pin })?);
    }
    bench.run()
}

/// Pages written and had back.
fn rollbacks(field: Field) -> Result<Group> {
    let name = field.name();
    let mut group = field.group(&name, Ours, &[Fork, Server, Drop])?;
    let mut works: Vec<_> = DIRTY_PAGES.map(|dirty| Work { dirty, read: 0, moving: false }).into();
    if (field.bytes, field.backing) == READ_FOOTPRINT {
        works.extend(READ_WORKS);
        works.extend(OTHER_PAGES);
    }
    for work in works {
        if usize::try_from(work.dirty)? <= field.bytes / PAGE {
            let case = Case::new(work.to_string())
                .quantity(format!("{name}/{}", in_words(work)), Quantity::Mean(Unit::Microseconds))
                .quick(is_quick(field.bytes, field.backing, work));
            group = group.case(case);
        }
    }
    Ok(group)
}

/// What it costs that no stray read of the program can meet another state's pages.
fn hidden_images(field: Field) -> Result<Group> {
    let name = format!("visible images/{}", field.name());
    let mut group = field.group(&name, Ours, &[Hidden])?;
    for work in DIRTY_PAGES.map(|dirty| Work { dirty, read: 0, moving: false }) {
        let case = Case::new(work.to_string())
            .quantity(format!("{name}/{}", in_words(work)), Quantity::Mean(Unit::Microseconds));
        group = group.case(case.quick(work.dirty == 100));
    }
    Ok(group)
}

/// The same, of the whole process and not of its memory alone.
fn runs(field: Field, name: &str, ours: Mechanism, dirty: &[u32]) -> Result<Group> {
    let name = format!("{name}/{}", field.name());
    let mut group = field.group(&name, ours, &[Fork, Server])?;
    for &dirty in dirty {
        let work = Work { dirty, read: 0, moving: false };
        let case = Case::new(work.to_string())
            .quantity(format!("{name}/{}", in_words(work)), Quantity::Mean(Unit::Microseconds));
        let quick = (field.bytes, field.backing) == READ_FOOTPRINT && (ours == Run || dirty == 0);
        group = group.case(case.quick(quick));
    }
    Ok(group)
}

/// A closure that does nothing, in a Python interpreter.
fn runs_in_python(pin: Pin) -> Group {
    let name = "run/python 64MiB";
    let entry = |mechanism: Mechanism, what: InPython| {
        Entry::new(mechanism.name(), move || {
            let started = what.start();
            if let (Ok(worker), Pin::Cpu(cpu)) = (&started, pin) {
                machine::pin_process(worker.pid(), cpu)?;
            }
            started
        })
    };
    let case = Case::new("nothing").quantity(format!("{name}/0 pages"), Quantity::Mean(Unit::Microseconds));
    Group::new(name, entry(Run, InPython::Run)).against(entry(Fork, InPython::Fork)).case(case.quick(true))
}

/// The cases that SPECIFICATION.md promises something about, and few others.
fn is_quick(bytes: usize, backing: Backing, work: Work) -> bool {
    match (bytes / MIB, backing) {
        (64, Backing::Small) => work.dirty <= 1_000,
        (64, Backing::Huge) => work.dirty == 100,
        (4096, Backing::Huge) => work.dirty <= 1,
        _ => false,
    }
}

/// What the first write to a page costs under a tracker, and after a fork.
fn first_writes(field: Field) -> Result<Group> {
    let name = format!("tracker/{}/first write to a page", field.backing);
    let group = field.group(&name, Tracked(Choice::WpAsync), &[Tracked(Choice::Compare), Cow])?;
    Ok(group.case(Case::new("fault").quantity(&name, Quantity::Mean(Unit::Nanoseconds))))
}

/// What it costs to put back one page of a thousand.
fn restored_pages(field: Field) -> Result<Group> {
    let name = format!("tracker/{}/page of 1000 restored", field.backing);
    let group = field.group(&name, Tracked(Choice::WpAsync), &[Tracked(Choice::Compare)])?;
    Ok(group.case(Case::new("restore").quantity(&name, Quantity::Mean(Unit::Nanoseconds))))
}

/// What asking a tracker costs where nothing was written.
fn clean_scans(field: Field) -> Result<Group> {
    let name = format!("tracker/{}/scan of {}", field.backing, size(field.bytes));
    let group = field.group(&name, Scan(Choice::WpAsync), &[Scan(Choice::Compare)])?;
    Ok(group.case(Case::new("scan").quantity(&name, Quantity::Mean(Unit::Microseconds))))
}

/// The first capture of a process: copy it, or fork a holder of its pages?
fn first_captures(field: Field) -> Result<Group> {
    let name = format!("first/{}", size(field.bytes));
    let by = Mechanism::First;
    let group = field.group(&name, by(First::Auto), &[by(First::Copy), by(First::Fork)])?;
    let case = |work: &str, what: &str| {
        Case::new(work).quantity(format!("{name}/{what}"), Quantity::Mean(Unit::Microseconds))
    };
    Ok(group.case(case("capture", "capture")).case(case("rollback", "capture, then 1000 pages")))
}

fn in_words(work: Work) -> String {
    let dirty = match work.dirty {
        1 => "1 page".to_owned(),
        dirty => format!("{dirty} pages"),
    };
    match work {
        Work { moving: true, .. } => format!("{dirty}, others each time"),
        Work { read: 0, .. } => dirty,
        Work { read, .. } => format!("{dirty}, {read} read"),
    }
}

fn size(bytes: usize) -> String {
    match bytes / MIB {
        mib if mib >= 1024 => format!("{}GiB", mib / 1024),
        mib => format!("{mib}MiB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mechanisms_are_known_by_their_names() {
        for (mechanism, name) in NAMES {
            assert_eq!(mechanism.name(), name);
            assert_eq!(Mechanism::of_name(name).unwrap(), mechanism);
        }
        assert!(Mechanism::of_name("").is_err());
    }

    #[test]
    fn footprints_arrive_as_they_were_sent() {
        let part = |words: &[&str]| Part::new("x", Pin::Cpu(1)).with(words);
        let field = Field::of(&part(&["4096", "huge"])).unwrap();
        assert_eq!((field.bytes, field.backing, field.pin), (4096, Backing::Huge, Pin::Cpu(1)));
        for words in [["4096", "large"], ["x", "4k"]] {
            assert!(Field::of(&part(&words)).is_err());
        }
        assert!(Field::of(&part(&["4096"])).is_err());
    }
}
