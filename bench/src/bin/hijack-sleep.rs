//! `make bench B=hijack-sleep`: how late sleeps end, with and without other processes on the CPUs, and the CPU time of that.
//!
//! Each contender sleeps in a process of its own, through the C library's `nanosleep`, beside as many processes that never
//! sleep as the case says, on all CPUs. Recorded is how much later than asked for each sleep ended, or how much time
//! of a CPU it took. The floor is a thread that never sleeps, but reads the clock at real-time priority: nothing on this machine
//! is earlier.

use std::io;
use std::mem::zeroed;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use orrery_bench::{Bench, Case, Contender, Group, Quantity, Sample, Skipped, Unit, serve};
use orrery_hijack::policy::Sleep;
use orrery_hijack::{Hijack, Policy, Services};

/// The argument with which this program serves under an executive.
const INSIDE: &str = "inside";
/// What the work begins with where CPU time is measured.
const CPU_TIME: &str = "CPU time of ";
const PRECISE: &str = "executive";
const REALTIME: &str = "executive, real-time";
const NATIVE: &str = "native";
const NO_SLACK: &str = "native, timer slack 1 ns";
const FIFO: &str = "native, SCHED_FIFO";
const FLOOR: &str = "floor (SCHED_FIFO, never sleeps)";

/// Cases: their name, the length of sleeps in microseconds, the number of hogs, whether a quick run has them.
const CASES: [(&str, u64, usize, bool); 7] = [
    ("1 ms, alone", 1000, 0, true),
    ("1 ms, 1 hog", 1000, 1, false),
    ("1 ms, 2 hogs", 1000, 2, false),
    ("1 ms, 3 hogs", 1000, 3, false),
    ("1 ms, 4 hogs", 1000, 4, true),
    ("100 us, 4 hogs", 100, 4, false),
    ("10 ms, 4 hogs", 10_000, 4, false),
];

fn main() -> Result<ExitCode> {
    if std::env::args().nth(1).is_some_and(|argument| argument == INSIDE) {
        return serve_sleeps(NATIVE).map(|()| ExitCode::SUCCESS);
    }
    let about = "How late sleeps end under an executive that takes care of it, and without";
    let mut bench = Bench::new("hijack-sleep", about);
    let entry = |way| bench.program(way, || contender(way));
    let ours = entry(PRECISE);
    let rivals = [NATIVE, NO_SLACK, REALTIME, FIFO, FLOOR].map(entry);
    let late = Group::new("late", ours, rivals).cases(CASES.map(|(name, _, _, quick)| {
        [50.0, 99.0, 99.9].into_iter().fold(Case::new(name).quick(quick), |case, percent| {
            let quantity = Quantity::Percentile(percent, Unit::Microseconds);
            case.quantity(format!("{name}, p{percent}"), quantity)
        })
    }));
    let cases = [CASES[0], CASES[4], CASES[5], CASES[6]].map(|(name, _, _, quick)| {
        let quantity = Quantity::Percentile(50.0, Unit::Microseconds);
        Case::new(format!("{CPU_TIME}{name}")).quantity(format!("CPU for {name}"), quantity).quick(quick)
    });
    let ours = entry(PRECISE);
    let cost = Group::new("cost", ours, [NATIVE, REALTIME].map(entry)).cases(cases);
    bench.group(late);
    bench.group(cost);
    bench.run()
}

fn contender(way: &str) -> Result<()> {
    let sleep = match way {
        PRECISE => Sleep::Precise,
        REALTIME => Sleep::Realtime,
        _ => return serve_sleeps(way),
    };
    let services = Services { sleep: Some(sleep), ..Services::default() };
    let policy = Policy::default().with_services(services);
    let program = std::env::current_exe()?;
    let hijack = Hijack::start(orrery_hijack::Options::default().policy(policy))?;
    Err(hijack.execute(program.as_os_str(), &[INSIDE.into()]).into())
}

fn serve_sleeps(way: &str) -> Result<()> {
    serve(|| {
        if way == NO_SLACK {
            // SAFETY: changes how late this thread's timers may be.
            unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1, 0, 0, 0) };
        }
        if [FIFO, FLOOR].contains(&way) {
            take_realtime_priority()?;
        }
        Ok(Sleeper { spins: way == FLOOR, hogs: Vec::new() })
    })
}

/// Takes real-time priority, which children do not inherit.
fn take_realtime_priority() -> Result<()> {
    let parameters = libc::sched_param { sched_priority: 1 };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the kernel reads one `sched_param`, which outlives the call.
    if unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) } != 0 {
        return Err(Skipped(format!("SCHED_FIFO: {}", io::Error::last_os_error())).into());
    }
    Ok(())
}

struct Sleeper {
    spins: bool,
    hogs: Vec<libc::pid_t>,
}

impl Sleeper {
    /// Runs `hogs` processes that never sleep beside this one.
    fn among(&mut self, hogs: usize) -> Result<()> {
        while self.hogs.len() > hogs {
            let hog = self.hogs.pop().unwrap_or(0);
            // SAFETY: the calls take numbers and a null pointer, and the process is a child that was not
            // waited for.
            unsafe {
                libc::kill(hog, libc::SIGKILL);
                libc::waitpid(hog, std::ptr::null_mut(), 0);
            }
        }
        while self.hogs.len() < hogs {
            // SAFETY: the child does nothing but compute, for as long as its parent lives.
            let hog = unsafe { libc::fork() };
            ensure!(hog >= 0, "fork: {}", io::Error::last_os_error());
            if hog == 0 {
                // SAFETY: prctl takes numbers, and only changes what happens to the child when its parent
                // ends.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
                loop {
                    std::hint::spin_loop();
                }
            }
            self.hogs.push(hog);
        }
        Ok(())
    }

    fn sleep(&self, length: Duration) -> Result<()> {
        if self.spins {
            let start = Instant::now();
            while start.elapsed() < length {}
            return Ok(());
        }
        let request = libc::timespec { tv_sec: 0, tv_nsec: length.subsec_nanos().into() };
        // SAFETY: the kernel reads one `timespec`, which outlives the call, and the null pointer asks for no
        // rest.
        let result = unsafe { libc::nanosleep(&raw const request, std::ptr::null_mut()) };
        ensure!(result == 0, "nanosleep: {}", io::Error::last_os_error());
        Ok(())
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _gone = self.among(0);
    }
}

fn cpu_time() -> Duration {
    // SAFETY: the structure is integers, and written by the call.
    unsafe {
        let mut time: libc::timespec = zeroed();
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time);
        Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
    }
}

impl Contender for Sleeper {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let (name, cost) = match work.strip_prefix(CPU_TIME) {
            Some(name) => (name, true),
            None => (work, false),
        };
        let case = CASES.iter().find(|case| case.0 == name).context("no such case")?;
        let length = Duration::from_micros(case.1);
        if case.1 >= 1_000_000 {
            bail!("sleeps are shorter than a second");
        }
        self.among(case.2)?;
        // So that a service has adapted to these sleeps.
        for _ in 0..20 {
            self.sleep(length)?;
        }
        let mut latencies = Vec::new();
        for _ in 0..iterations {
            if cost {
                let used = cpu_time();
                self.sleep(length)?;
                latencies.push(cpu_time().saturating_sub(used));
            } else {
                let begin = Instant::now();
                self.sleep(length)?;
                latencies.push(begin.elapsed().saturating_sub(length));
            }
        }
        self.among(0)?;
        Sample::of_latencies(latencies)
    }
}
