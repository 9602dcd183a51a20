//! `make bench B=hijack-ipc`: communication between protection domains against the working set of one side.
//!
//! Each operation is one round trip: into the executive beneath a program and back, or to another process and back. Before each,
//! the caller refers to so many pages of data or instructions. What that alone takes is the rival `pages alone`; what a domain of
//! one's own costs is that fewer of them are still in the TLB after the trip.
//!
//! After the usual table, the figures without pages are printed in cycles, beside those of the slides (1.4 GHz Pentium 4, Linux 2.4).

use std::arch::x86_64::_rdtsc;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use orrery_bench::rival::{Between, By, HandOff};
use orrery_bench::working_set::WorkingSet;
use orrery_bench::{Bench, Case, Contender, Group, Pin, Sample, Unit, machine, serve};
use orrery_hijack::{Hijack, Policy};
use orrery_report::record;

/// The argument with which this program serves in a tracee.
const INSIDE: &str = "inside";
/// A rule of the policy answers the call, so that the kernel has no part in it.
const ANSWERED: &str = "executive";
const PASSED_ON: &str = "executive and system call";
const NATIVE: &str = "system call";
const TRACEES: &str = "two tracees, futex";
const TRACEES_PIPE: &str = "two tracees, pipe";
const FUTEX: &str = "two processes, futex";
const PIPE: &str = "two processes, pipe";
const ALONE: &str = "pages alone";
const WAYS: [&str; 8] = [ANSWERED, ALONE, PASSED_ON, NATIVE, TRACEES, TRACEES_PIPE, FUTEX, PIPE];

/// Numbers of pages, and whether a quick run has them. The slides end at 120 and 200; TLBs have grown since.
const DATA: [(usize, bool); 6] =
    [(0, true), (32, false), (64, false), (128, true), (1024, true), (4096, false)];
const INSTRUCTIONS: [(usize, bool); 5] = [(32, false), (64, false), (128, true), (1024, true), (4096, false)];

/// What the slides have for each way, in cycles.
const SLIDES: [(&str, &str, u32); 5] = [
    (NATIVE, "system call", 430),
    (ANSWERED, "RPC from guest to executive to guest", 4482),
    (PASSED_ON, "interposition: RPC and system call", 5094),
    (TRACEES, "RPC between two guests", 13476),
    (PIPE, "RPC between two tasks by pipes", 18661),
];

fn main() -> Result<ExitCode> {
    if let [_, mode, way, pin] = &std::env::args().collect::<Vec<_>>()[..]
        && mode == INSIDE
    {
        let way = WAYS.into_iter().find(|known| known == way).unwrap_or(NATIVE);
        let served = serve_trips(way, pin.parse().map_err(anyhow::Error::msg)?);
        return served.map(|()| ExitCode::SUCCESS);
    }
    let about = "Round trips between protection domains, against the pages that the caller refers to";
    let mut bench = Bench::new("hijack-ipc", about);
    let pin = bench.options().pin()?;
    let [ours, rivals @ ..] = WAYS.map(|way| bench.program(way, || contender(way, pin)));
    let cases = DATA.map(|pages| ("data", pages)).into_iter();
    let cases = cases.chain(INSTRUCTIONS.map(|pages| ("instructions", pages)));
    let cases = cases.map(|(kind, (pages, quick))| {
        Case::mean(format!("{kind} {pages}"), name(kind, pages), Unit::Nanoseconds).quick(quick)
    });
    bench.group(Group::new("trips", ours, rivals).cases(cases));
    let all = bench.options().all();
    let status = bench.run()?;
    if all {
        print_cycles();
    }
    Ok(status)
}

fn name(kind: &str, pages: usize) -> String {
    if pages == 0 { "no pages".to_owned() } else { format!("{pages} pages of {kind}") }
}

fn contender(way: &str, pin: Pin) -> Result<()> {
    let options = orrery_hijack::Options::default().counted(false);
    let options = match way {
        ANSWERED => options.policy(Policy::parse("[[rule]]\ncall = 'getppid'\nreturn = 7\n", "built in")?),
        PASSED_ON | TRACEES | TRACEES_PIPE => options,
        other => return serve_trips(other, pin),
    };
    let program = std::env::current_exe()?;
    let arguments = [INSIDE.into(), way.into(), pin.to_string().into()];
    Err(Hijack::start(options)?.execute(program.as_os_str(), &arguments).into())
}

fn serve_trips(way: &str, pin: Pin) -> Result<()> {
    serve(|| {
        pin.bind()?;
        let other = |by| HandOff::new(Between::Processes, by).map(Box::new).map(Way::Other);
        let way = match way {
            ANSWERED | PASSED_ON | NATIVE => Way::Call(libc::getppid),
            TRACEES | FUTEX => other(By::Futex)?,
            TRACEES_PIPE | PIPE => other(By::Pipe)?,
            ALONE => Way::Nothing,
            unknown => bail!("there is no contender {unknown:?}"),
        };
        Ok(Trips { way, set: None })
    })
}

enum Way {
    Nothing,
    Call(unsafe extern "C" fn() -> libc::pid_t),
    Other(Box<HandOff>),
}

struct Trips {
    way: Way,
    /// The work that the working set is of, and the working set.
    set: Option<(String, WorkingSet)>,
}

impl Contender for Trips {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let set = match self.set.take() {
            Some((known, set)) if known == work => set,
            _ => WorkingSet::new(work)?,
        };
        let start = Instant::now();
        for _ in 0..iterations {
            set.refer();
            match &mut self.way {
                Way::Nothing => {}
                // SAFETY: a call without arguments that cannot fail.
                Way::Call(function) => ensure!(unsafe { function() } > 0, "it has no number"),
                Way::Other(hand_off) => hand_off.trip()?,
            }
        }
        let elapsed = start.elapsed();
        self.set = Some((work.to_owned(), set));
        Ok(Sample { iterations, elapsed, latencies: Vec::new() })
    }
}

fn print_cycles() {
    let records = machine::record_file("hijack-ipc").and_then(|path| record::read(&path));
    let Ok(records) = records else { return };
    let frequency = cycles_per_nanosecond();
    println!("\nRound trips without pages, in cycles of {frequency:.2} GHz, and what the slides have:");
    for (way, slides, cycles) in SLIDES {
        let record = records
            .iter()
            .find(|record| record.case == name("data", 0) && (way == ANSWERED || record.rival_name == way));
        let Some(record) = record else { continue };
        let time = if way == ANSWERED { record.ours } else { record.rival };
        println!("  {way:<28}{:>8.0}{cycles:>8}  {slides}", time * frequency);
    }
}

/// Returns the frequency of the time stamp counter, in GHz.
fn cycles_per_nanosecond() -> f64 {
    const TIME: Duration = Duration::from_millis(50);
    // SAFETY: every processor of this architecture has the counter.
    let (begin, ticks) = (Instant::now(), unsafe { _rdtsc() });
    while begin.elapsed() < TIME {}
    // SAFETY: every processor of this architecture has the counter.
    let ticks = unsafe { _rdtsc() } - ticks;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let frequency = ticks as f64 / begin.elapsed().as_nanos() as f64;
    frequency
}
