//! The slides' experiment: programs that compute all the time with targets of CPU time, beside one that disturbs them.
//!
//! P1 is to have 40 ms in every 400 ms, P2 100 ms in 500 ms, P3 60 ms in 200 ms, all on one CPU. The disturbance computes in bursts
//! (an MMPP, a Poisson process modulated by a Markov chain of two states): gaps are exponential with a mean of 10 s, bursts geometric
//! with a mean of 3 s.

use std::io;
use std::time::Duration;

use orrery_sys::scheduling::{self, Policy, Scheduling};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::cpu::{Account, Reservation};
use crate::time::now;

const MS: u64 = 1_000_000;
const TICK: u64 = 10 * MS;

/// The programs of the slides.
pub const PROGRAMS: [(&str, Reservation); 3] = [
    ("P1", Reservation { target: 40 * MS, period: 400 * MS }),
    ("P2", Reservation { target: 100 * MS, period: 500 * MS }),
    ("P3", Reservation { target: 60 * MS, period: 200 * MS }),
];

/// The real-time priority of the slides' disturbance.
pub const HOG_PRIORITY: u32 = 96;

/// A process that was forked and computes, and ends with this.
#[derive(Debug)]
pub struct Spinner {
    pid: i32,
}

/// Bursts of the disturbance.
#[derive(Debug, Clone, Copy)]
pub struct Bursts {
    /// The mean of gaps.
    pub gap: Duration,
    /// The mean length of bursts.
    pub length: Duration,
    /// Where its random numbers begin.
    pub seed: u64,
    /// Its real-time priority, if it has one.
    pub priority: Option<u32>,
}

impl Spinner {
    /// Starts a process that computes all the time, on one CPU; `None`: on all. It is scheduled as its parent, without real-time priority
    /// if that has it with reset-on-fork.
    ///
    /// # Errors
    /// Those of fork(2).
    pub fn start(cpu: Option<usize>) -> io::Result<Self> {
        Self::fork(cpu, || {
            loop {
                std::hint::spin_loop();
            }
        })
    }

    /// Starts the disturbance, which begins with a gap.
    ///
    /// # Errors
    /// Those of fork(2).
    pub fn disturb(cpu: Option<usize>, bursts: Bursts) -> io::Result<Self> {
        Self::fork(cpu, move || disturb(bursts))
    }

    fn fork(cpu: Option<usize>, body: impl FnOnce()) -> io::Result<Self> {
        // SAFETY: the child makes system calls and computes, until it is killed; it takes no lock and allocates nothing.
        let pid = unsafe { libc::fork() };
        if pid < 0 {
            return Err(io::Error::last_os_error());
        }
        if pid == 0 {
            // SAFETY: ends the child with its parent; one system call.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
            body();
            // SAFETY: ends the child, without the exit handlers of its parent.
            unsafe { libc::_exit(0) };
        }
        let spinner = Self { pid };
        // By its parent, so that it is done when this returns.
        if let Some(cpu) = cpu {
            let mut set = CpuSet::new();
            set.set(cpu);
            sched_setaffinity(Pid::from_raw(pid), &set)?;
        }
        Ok(spinner)
    }

    /// Returns its PID.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        let Some(pid) = Pid::from_raw(self.pid) else { return };
        let _ = kill_process(pid, Signal::KILL);
        let _ = waitpid(Some(pid), WaitOptions::empty());
    }
}

fn disturb(bursts: Bursts) {
    if let Some(priority) = bursts.priority {
        let _ = scheduling::set(0, Scheduling { policy: Policy::Fifo { priority }, reset_on_fork: true });
    }
    let mut random = bursts.seed | 1;
    let mut uniform = move || {
        // xorshift64*, whose upper 53 bits are a number from 0 to 1.
        random ^= random >> 12;
        random ^= random << 25;
        random ^= random >> 27;
        #[expect(clippy::cast_precision_loss, reason = "53 bits")]
        let number = (random.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) as f64;
        (number + 1.0) / 9_007_199_254_740_993.0
    };
    loop {
        let gap = bursts.gap.mul_f64(-uniform().ln());
        let pause = rustix::time::Timespec {
            tv_sec: i64::try_from(gap.as_secs()).unwrap_or(1),
            tv_nsec: gap.subsec_nanos().into(),
        };
        // No signal comes but the one that kills.
        let _ = rustix::thread::nanosleep(&pause);
        // So many tenths of a second until the first that ends the burst.
        let tenth = Duration::from_millis(100);
        let ends = tenth.as_secs_f64() / bursts.length.as_secs_f64().max(0.1);
        loop {
            let end = now() + u64::try_from(tenth.as_nanos()).unwrap_or(0);
            while now() < end {
                std::hint::spin_loop();
            }
            if uniform() < ends {
                break;
            }
        }
    }
}

/// What was measured of one program.
#[derive(Debug, Clone)]
pub struct Measured {
    /// The number of periods.
    pub periods: u64,
    /// Those in which it had less than 98 hundredths of its target.
    pub missed: u64,
    /// Its part of a CPU in each step of the picture, in percent.
    pub points: Vec<f64>,
}

/// A process that is looked at.
#[derive(Debug, Clone)]
pub struct Watched {
    pid: i32,
    account: Option<Account>,
    /// Its clock at the last point of the picture.
    last: u64,
}

impl Watched {
    /// Begins to look at a process, whose first period begins now: to be called when it has joined, so that its manager counts the same
    /// periods.
    ///
    /// # Errors
    /// The process has ended.
    pub fn new(pid: i32, reservation: Option<Reservation>) -> io::Result<Self> {
        let last = clock(pid)?;
        let account = reservation.map(|reservation| Account::new(reservation, now(), last, None));
        Ok(Self { pid, account, last })
    }
}

fn clock(pid: i32) -> io::Result<u64> {
    scheduling::process_cpu_time(pid).map_err(|error| io::Error::from(error.errno))
}

/// Looks at processes for `length`, and counts what they missed; `step` is the time between two points of the picture, and `each` is
/// called every 10 ms. The observer is not the manager: it reads the same clocks itself.
///
/// # Errors
/// A process has ended.
pub fn observe(
    watched: &mut [Watched],
    length: Duration,
    step: Duration,
    mut each: impl FnMut(),
) -> io::Result<Vec<Measured>> {
    let begin = now();
    let step = u64::try_from(step.as_nanos()).unwrap_or(u64::MAX).max(TICK);
    let end = begin + u64::try_from(length.as_nanos()).unwrap_or(0);
    let mut measured = vec![Measured { periods: 0, missed: 0, points: Vec::new() }; watched.len()];
    for Watched { pid, last, .. } in watched.iter_mut() {
        *last = clock(*pid)?;
    }
    let (mut tick, mut mark) = (begin, begin);
    while tick < end {
        tick += TICK;
        let rest = tick.saturating_sub(now());
        std::thread::sleep(Duration::from_nanos(rest));
        let time = now();
        let point = time >= mark + step;
        for (Watched { pid, account, last }, measured) in watched.iter_mut().zip(&mut measured) {
            let used = clock(*pid)?;
            if let Some(account) = account {
                account.advance(time, used, || None);
                (measured.periods, measured.missed) = account.counts();
            }
            if point {
                #[expect(clippy::cast_precision_loss, reason = "for display")]
                measured.points.push((used - *last) as f64 / (time - mark) as f64 * 100.0);
                *last = used;
            }
        }
        if point {
            mark = time;
        }
        each();
    }
    Ok(measured)
}
