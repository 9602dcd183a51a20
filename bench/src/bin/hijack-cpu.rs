//! `make bench B=hijack-cpu`: how many periods programs with targets of CPU time miss, beside a program that disturbs them.
//!
//! The experiment of the slides: P1 is to have 40 ms in every 400 ms, P2 100 ms in 500 ms, P3 60 ms in 200 ms. All of them
//! compute all the time, on one CPU, together with a disturbance that computes in bursts, at normal and at real-time priority
//! (96, as on the slides). Gaps are exponential and bursts geometric with a mean of 3 s; the slides' gaps of 10 s would leave a
//! run of some seconds undisturbed, so gaps have a mean of 1 s here (`ORRERY_SLIDES=1`: 10 s).
//!
//! Rivals run within the observer, each 10 ms at the highest priority: nothing is later than ours because of them. `SIGSTOP` is
//! the user-level manager of the slides, which reads `/proc/PID/stat` and stops who had his target. `SCHED_DEADLINE` takes no
//! program that is bound to a CPU, so that with it all, and the disturbance, may run on all CPUs. `quota` gives each program a
//! control group with the highest weight, and with the target as its quota.
//!
//! `CPU time of a tick` is what is done within one. `CPU time of a tick, wake-up included` is the manager's whole CPU time, beside that of a
//! thread which is woken each 10 ms at the same priority and does nothing: what no manager that ticks can do without.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use orrery_bench::report::Report;
use orrery_bench::{Options, Pin, Skipped};
use orrery_manager::PrivateManager;
use orrery_manager::client::Client;
use orrery_manager::experiment::{Bursts, HOG_PRIORITY, Measured, PROGRAMS, Spinner, Watched, observe};
use orrery_manager::join::{Joined, Joining, join};
use orrery_manager::protocol::{Reply, Request, Status};
use orrery_manager::time::now;
use orrery_report::record::Record;
use orrery_sys::scheduling::{self, Policy, Scheduling, process_cpu_time, thread_cpu_time};

const NAME: &str = "hijack-cpu";
const OURS: &str = "manager";
const NOTHING: &str = "nothing";
const STOP: &str = "SIGSTOP";
const PI: &str = "nice, PI";
const DEADLINE: &str = "SCHED_DEADLINE";
const QUOTA: &str = "quota";
/// What a thread is called in the records that is woken and does nothing.
const BARE: &str = "bare timer";
const RIVALS: [&str; 5] = [NOTHING, STOP, PI, DEADLINE, QUOTA];

/// What one run showed.
struct Outcome {
    /// Periods that were met, in percent.
    met: f64,
    /// CPU time of a tick, in microseconds, where there is somebody who ticks.
    tick: Option<f64>,
    /// The same with what it takes to be woken; of a thread that does nothing else, where nobody ticks.
    whole: Option<f64>,
}

fn main() -> Result<ExitCode> {
    let options = Options::from_command_line("CPU shares that are guaranteed, beside a disturbance");
    let Pin::Cpu(cpu) = options.pin()? else {
        bail!("the experiment is about one CPU: --pin takes a number")
    };
    let kinds = [("hog at normal priority", None), ("hog at real-time priority", Some(HOG_PRIORITY))];
    let runs = u32::try_from(kinds.len() * (RIVALS.len() + 1)).unwrap_or(1);
    // As many rounds as fit, each of periods enough to count.
    let shortest = Duration::from_secs(if options.quick() { 3 } else { 10 });
    let rounds =
        u32::try_from(options.budget().as_millis() / (shortest * runs).as_millis()).unwrap_or(1).max(1);
    let length = options.budget() / (rounds * runs);
    let mut report = Report::default();
    let fifo = Scheduling { policy: Policy::Fifo { priority: 99 }, reset_on_fork: true };
    if let Err(error) = scheduling::set(0, fifo) {
        println!("SKIPPED all: {error}; the experiment requires real-time priority");
        return Ok(ExitCode::SUCCESS);
    }
    for (kind, priority) in kinds {
        if !options.chosen(kind) {
            continue;
        }
        let mut ours = Vec::new();
        let mut theirs: Vec<Vec<Option<Outcome>>> = RIVALS.map(|_| Vec::new()).into();
        for round in 0..rounds {
            let seed = u64::from(round + 1) * 7919;
            let mut measure = |way: &'static str| {
                let what = format!("{kind}, {way}");
                report.present(&what, run(way, cpu, priority, length, seed))
            };
            ours.push(measure(OURS));
            for (rival, outcomes) in RIVALS.iter().zip(&mut theirs) {
                outcomes.push(measure(rival));
            }
        }
        for (rival, outcomes) in RIVALS.iter().zip(theirs) {
            let pairs = || ours.iter().flatten().zip(outcomes.iter().flatten());
            let met: Vec<_> = pairs().map(|(ours, rival)| (ours.met, rival.met.max(0.1))).collect();
            if !met.is_empty() {
                report.records.push(Record::new(NAME, format!("periods met, {kind}"), "%", rival, met, true));
            }
            let ticks: Vec<_> = pairs().filter_map(|(ours, rival)| Some((ours.tick?, rival.tick?))).collect();
            if !ticks.is_empty() && priority.is_none() {
                report.records.push(Record::new(NAME, "CPU time of a tick", "us", rival, ticks, false));
            }
            let whole: Vec<_> =
                pairs().filter_map(|(ours, rival)| Some((ours.whole?, rival.whole?))).collect();
            if !whole.is_empty() && priority.is_none() {
                let case = "CPU time of a tick, wake-up included";
                report.records.push(Record::new(NAME, case, "us", BARE, whole, false));
            }
        }
    }
    // Cases follow each other.
    report.records.sort_by(|one, other| one.case.cmp(&other.case));
    report.finish(NAME, options.all())
}

/// Runs the experiment once.
fn run(way: &'static str, cpu: usize, priority: Option<u32>, length: Duration, seed: u64) -> Result<Outcome> {
    let place = (way != DEADLINE).then_some(cpu);
    let start = || Spinner::start(place).context("cannot start a program");
    let spinners = [start()?, start()?, start()?];
    let pids = spinners.each_ref().map(Spinner::pid);
    let slides = std::env::var_os("ORRERY_SLIDES").is_some();
    let gap = Duration::from_secs(if slides { 10 } else { 1 });
    let bursts = Bursts { gap, length: Duration::from_secs(3), seed, priority };
    let (mut rival, mut watched) = Rival::start(way, &pids)?;
    let hog = Spinner::disturb(place, bursts).context("cannot start the disturbance")?;
    watched.push(Watched::new(hog.pid(), None).context("cannot observe the disturbance")?);
    let bare = (way == NOTHING).then(BareTimer::start);
    let before = if way == OURS { Some(rival.status()?) } else { None };
    let (mut ticks, mut time) = (0_u32, 0);
    let measured = observe(&mut watched, length, Duration::from_secs(1), || {
        let before = thread_cpu_time();
        rival.tick();
        time += thread_cpu_time() - before;
        ticks += 1;
    })
    .context("cannot observe the programs")?;
    let (tick, whole) = match (before, way) {
        (Some(before), _) => {
            let after = rival.status()?;
            let ticks = (after.ticks - before.ticks).max(1);
            let each =
                |time: fn(&Status) -> u64| Some(micros(time(&after) - time(&before)) / (micros(ticks) * 1e3));
            (each(|status| status.tick_time), each(|status| status.cpu_time))
        }
        (None, STOP | PI) => (Some(micros(time) / f64::from(ticks.max(1))), None),
        _ => (None, bare.map(BareTimer::stop)),
    };
    drop((hog, spinners));
    Ok(Outcome { met: met(&measured), tick, whole })
}

fn met(measured: &[Measured]) -> f64 {
    let sum = |count: fn(&Measured) -> u64| micros(measured.iter().map(count).sum::<u64>());
    (1.0 - sum(|one| one.missed) / sum(|one| one.periods).max(1e-9)) * 100.0
}

/// Thousandths of a small number.
#[expect(clippy::cast_precision_loss, reason = "small numbers")]
fn micros(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e3
}

/// Who looks after the programs.
enum Rival {
    Manager { process: PrivateManager, _joined: Vec<Joined> },
    Nothing,
    Stop { pids: [i32; 3], periods: [Period; 3] },
    Pi { pids: [i32; 3], used: [u64; 3], integral: [f64; 3], nice: [i32; 3] },
    Quota { _groups: Vec<Group> },
}

/// A period as the user-level manager sees it, in milliseconds.
#[derive(Clone, Copy)]
struct Period {
    begin: Instant,
    used: u64,
    stopped: bool,
}

impl Rival {
    /// Starts it, and begins to look at the programs: each period begins when it has its reservation.
    fn start(way: &'static str, pids: &[i32; 3]) -> Result<(Self, Vec<Watched>)> {
        let begin = Instant::now();
        let watch = |(pid, (_, reservation)): (&i32, (_, _))| Watched::new(*pid, Some(reservation));
        let mut watched = Vec::new();
        let rival = match way {
            OURS => {
                let process = PrivateManager::start(&[])?;
                let joined = pids.iter().zip(PROGRAMS).map(|(pid, (name, reservation))| {
                    let value = |class: &str, value: u64| (class.to_owned(), format!("{value}ns"));
                    let values = vec![
                        value("cpu.target", reservation.target),
                        value("cpu.period", reservation.period),
                    ];
                    let joining = Joining {
                        socket: Some(process.socket()),
                        name: name.to_owned(),
                        values,
                        journal: None,
                    };
                    let joined = join(&joining, *pid)?;
                    watched.push(Watched::new(*pid, Some(reservation))?);
                    Ok(joined)
                });
                let _joined = joined.collect::<Result<_>>()?;
                Self::Manager { process, _joined }
            }
            STOP => {
                let period = |pid: &i32| Period { begin, used: stat(*pid), stopped: false };
                Self::Stop { pids: *pids, periods: pids.each_ref().map(period) }
            }
            PI => {
                let used = pids.each_ref().map(|pid| process_cpu_time(*pid).unwrap_or(0));
                Self::Pi { pids: *pids, used, integral: [0.0; 3], nice: [99; 3] }
            }
            DEADLINE => {
                for (pid, (_, reservation)) in pids.iter().zip(PROGRAMS) {
                    let policy = Policy::Deadline { runtime: reservation.target, period: reservation.period };
                    let set = scheduling::set(*pid, Scheduling { policy, reset_on_fork: false });
                    set.map_err(|error| Skipped(error.to_string()))?;
                }
                Self::Nothing
            }
            QUOTA => {
                let groups = pids.iter().zip(PROGRAMS).map(|(pid, (name, reservation))| {
                    Group::start(name, *pid, reservation.target / 1000, reservation.period / 1000)
                });
                Self::Quota {
                    _groups: groups.collect::<io::Result<_>>().map_err(|error| Skipped(error.to_string()))?,
                }
            }
            _ => Self::Nothing,
        };
        if watched.is_empty() {
            watched = pids.iter().zip(PROGRAMS).map(watch).collect::<io::Result<_>>()?;
        }
        Ok((rival, watched))
    }

    /// What is done each 10 ms.
    fn tick(&mut self) {
        match self {
            Self::Stop { pids, periods } => {
                for ((pid, period), (_, reservation)) in pids.iter().zip(periods).zip(PROGRAMS) {
                    let used = stat(*pid);
                    if period.begin.elapsed() + Duration::from_millis(1)
                        >= Duration::from_nanos(reservation.period)
                    {
                        period.begin += Duration::from_nanos(reservation.period);
                        period.used = used;
                    }
                    let stop = (used - period.used) * 1_000_000 >= reservation.target;
                    if stop != period.stopped {
                        // SAFETY: a child of this process that nobody has waited for.
                        unsafe { libc::kill(*pid, if stop { libc::SIGSTOP } else { libc::SIGCONT }) };
                        period.stopped = stop;
                    }
                }
            }
            Self::Pi { pids, used, integral, nice } => {
                for (index, (_, reservation)) in PROGRAMS.iter().enumerate() {
                    let now = process_cpu_time(pids[index]).unwrap_or(0);
                    let share = micros(now - used[index]) / 10_000.0;
                    used[index] = now;
                    let error = micros(reservation.target) / micros(reservation.period) - share;
                    integral[index] += error * 0.010;
                    #[expect(clippy::cast_possible_truncation, reason = "clamped")]
                    let want = (-error * 5.0 - integral[index] * 200.0).clamp(-20.0, 19.0) as i32;
                    if want != nice[index] {
                        let policy = Policy::Other { nice: want };
                        let _ = scheduling::set(pids[index], Scheduling { policy, reset_on_fork: false });
                        nice[index] = want;
                    }
                }
            }
            _ => {}
        }
    }

    fn status(&self) -> Result<Status> {
        let Self::Manager { process, .. } = self else { bail!("there is no manager") };
        match Client::connect(&process.socket())?.ask(&Request::Status)? {
            Reply::Status(status) => Ok(*status),
            _ => bail!("the manager has no status"),
        }
    }
}

/// A thread that is woken each 10 ms, at the priority of its process, and does nothing.
struct BareTimer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<f64>,
}

impl BareTimer {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stops = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            // It is reset when a thread is made.
            let fifo = Policy::Fifo { priority: 99 };
            let _as_the_process = scheduling::set(0, Scheduling { policy: fifo, reset_on_fork: true });
            let (mut ticks, mut next, before) = (0_u32, now(), thread_cpu_time());
            while !stops.load(Ordering::Relaxed) {
                next += 10_000_000;
                std::thread::sleep(Duration::from_nanos(next.saturating_sub(now())));
                ticks += 1;
            }
            micros(thread_cpu_time() - before) / f64::from(ticks.max(1))
        });
        Self { stop, thread }
    }

    /// Ends it; returns the CPU time of each time that it was woken, in microseconds.
    fn stop(self) -> f64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or(0.0)
    }
}

/// The CPU time of a process in milliseconds, as `/proc/PID/stat` has it.
fn stat(pid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
    (ticks(11) + ticks(12)) * 10
}

/// A control group with a quota.
struct Group {
    directory: PathBuf,
    above: PathBuf,
}

impl Group {
    fn start(name: &str, pid: i32, quota: u64, period: u64) -> io::Result<Self> {
        let v1 = orrery_sys::cgroups::own_group(Some("cpu"));
        let unified = v1.is_none();
        let above = v1
            .or_else(|| orrery_sys::cgroups::own_group(None))
            .ok_or_else(|| io::Error::other("there are no control groups"))?;
        let directory = above.join(format!("orrery-bench-{}-{name}", std::process::id()));
        fs::create_dir(&directory)?;
        let group = Self { directory, above };
        let write = |file: &str, text: String| fs::write(group.directory.join(file), text);
        if unified {
            write("cpu.max", format!("{quota} {period}"))?;
            write("cpu.weight", "10000".to_owned())?;
        } else {
            write("cpu.cfs_period_us", period.to_string())?;
            write("cpu.cfs_quota_us", quota.to_string())?;
            write("cpu.shares", "262144".to_owned())?;
        }
        write("cgroup.procs", pid.to_string())?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..50 {
            let members = fs::read_to_string(self.directory.join("cgroup.procs")).unwrap_or_default();
            for member in members.lines() {
                let _ = fs::write(self.above.join("cgroup.procs"), member);
            }
            if fs::remove_dir(&self.directory).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
