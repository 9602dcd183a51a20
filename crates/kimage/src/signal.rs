//! Signals that were sent and not taken yet, and the timers that send them.

use crate::error::Result;
use crate::list;
use crate::object::Object;
use crate::task::Task;

/// What a handler gets with a signal has so many bytes (`SI_MAX_SIZE`).
const INFO: usize = 128;
const SIGNALS: u64 = 64;
const MOST_TIMERS: usize = 1 << 16;
/// `SIGEV_THREAD_ID`.
const TO_THREAD: u32 = 4;
/// `CLOCK_PROCESS_CPUTIME_ID` and `CLOCK_THREAD_CPUTIME_ID`.
const OF_PROCESSOR: [i32; 2] = [2, 3];

/// A timer of a process (`timer_create`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PosixTimer {
    /// The ID of the timer.
    pub id: u32,
    /// The clock that it goes by.
    pub clock: i32,
    /// Of one that goes by processor time: the PID or TID of whose time that is, as its process sees it.
    pub clock_owner: Option<i32>,
    /// Of one that sends its signal to a thread: the thread's number, as its process sees it.
    pub thread: Option<i32>,
    /// How it tells: 0 by a signal to the process, 1 not at all, 4 by a signal to a thread.
    pub notify: u32,
    /// The signal.
    pub signal: u32,
    /// What the program wants to get along with it.
    pub value: u64,
    /// How often it went off without being noticed.
    pub overrun: u32,
    /// Nanoseconds between two times; 0 for once.
    pub interval: u64,
    /// When it goes off next, in nanoseconds of its clock; nothing where it is not set.
    pub expires: Option<u64>,
}

impl Task<'_> {
    /// Returns the signals that wait for this thread, or for its process: what a handler would get, 128 bytes each.
    ///
    /// # Errors
    ///
    /// Those of reading; a queue that is broken is an error, as a lost signal cannot be detected.
    pub fn pending_signals(&self, of_process: bool) -> Result<Vec<Vec<u8>>> {
        let task = self.object();
        let queue = if of_process {
            task.required("signal", "signal_struct")?.embedded("shared_pending", "sigpending")?
        } else {
            task.embedded("pending", "sigpending")?
        };
        let mut set = queue.u64("signal")?;
        let walk = list::members(queue.embedded("list", "list_head")?, "sigqueue", "list");
        if let Some(problem) = walk.problems.into_iter().next() {
            return Err(problem.error);
        }
        let mut found = Vec::new();
        for entry in walk.found {
            let mut info = entry.bytes("info")?;
            info.resize(INFO, 0);
            let signal = info.first().copied().map_or(0, u64::from);
            if (1..=SIGNALS).contains(&signal) {
                set &= !(1 << (signal - 1));
                found.push(info);
            }
        }
        // The kernel could not, or did not want to, remember who sent these.
        for signal in (1..=SIGNALS).filter(|signal| set >> (signal - 1) & 1 != 0) {
            let mut info = vec![0; INFO];
            info[0] = u8::try_from(signal).unwrap_or(0);
            found.push(info);
        }
        Ok(found)
    }

    /// Returns the timers of its process.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn posix_timers(&self) -> Result<Vec<PosixTimer>> {
        let signal = self.object().required("signal", "signal_struct")?;
        let mut found = Vec::new();
        let kernel = signal.kernel();
        // A list of both directions until 6.12, of one since then.
        if kernel.types().field("signal_struct", "posix_timers")?.size == 8 {
            let mut next = kernel.read_u64(signal.address_of("posix_timers")?)?;
            while next != 0 {
                let node = kernel.object("hlist_node", next)?;
                if found.len() >= MOST_TIMERS {
                    return Err(node.corrupt("the list of timers never ends"));
                }
                found.push(timer(node.container("k_itimer", "list")?)?);
                next = node.u64("next")?;
            }
            return Ok(found);
        }
        let walk = list::members(signal.embedded("posix_timers", "list_head")?, "k_itimer", "list");
        if let Some(problem) = walk.problems.into_iter().next() {
            return Err(problem.error);
        }
        walk.found.into_iter().map(timer).collect()
    }
}

fn timer(timer: Object<'_>) -> Result<PosixTimer> {
    // Behind a pointer until 6.12, within the timer since then.
    let queue = if timer.has("sigq.info") {
        timer.embedded("sigq", "sigqueue")?
    } else {
        timer.required("sigq", "sigqueue")?
    };
    let (clock, notify) = (timer.i32("it_clock")?, timer.u32("it_sigev_notify")?);
    let by_processor = clock < 0 || OF_PROCESSOR.contains(&clock);
    let expires = if by_processor {
        if timer.u64("it.cpu.head")? != 0 { Some(timer.u64("it.cpu.node.expires")?) } else { None }
    } else if timer.u32("it.real.timer.state")? & 1 != 0 {
        Some(timer.u64("it.real.timer.node.expires")?)
    } else {
        None
    };
    let clock_owner = if by_processor { Some(number(timer.required("it.cpu.pid", "pid")?)?) } else { None };
    let thread = if notify == TO_THREAD { Some(number(timer.required("it_pid", "pid")?)?) } else { None };
    Ok(PosixTimer {
        id: timer.u32("it_id")?,
        clock,
        clock_owner,
        thread,
        notify,
        signal: queue.u32("info.si_signo")?,
        value: queue.u64("info._sifields._timer._sigval.sival_ptr")?,
        overrun: timer.u32("it_overrun_last")?,
        interval: timer.u64("it_interval")?,
        expires,
    })
}

/// Returns the innermost of a number's meanings.
fn number(pid: Object<'_>) -> Result<i32> {
    let level = u64::from(pid.u32("level")?).min(32);
    let first = pid.address_of("numbers")?.wrapping_add(level * pid.kernel().types().size("upid")?);
    pid.kernel().object("upid", first)?.i32("nr")
}

/// An interval timer that goes by processor time (`setitimer`): nanoseconds between two times, and until the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessorTimer {
    /// Nanoseconds between two times; 0 for once.
    pub interval: u64,
    /// What is left until it goes off; nothing where it is not set.
    pub left: Option<u64>,
}

impl Task<'_> {
    /// The processor time that its process has used, as timers count it: in user space, in the kernel, and both as the
    /// scheduler measures it, in nanoseconds. Counted only while some timer of the process wants it.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn processor_time(&self) -> Result<(u64, u64, u64)> {
        let signal = self.object().required("signal", "signal_struct")?;
        let part = |path| signal.u64(path);
        Ok((
            part("cputimer.cputime_atomic.utime.counter")?,
            part("cputimer.cputime_atomic.stime.counter")?,
            part("cputimer.cputime_atomic.sum_exec_runtime.counter")?,
        ))
    }

    /// The processor time that this thread has used: in user space, in the kernel, and both as the scheduler measures
    /// it, in nanoseconds.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn thread_time(&self) -> Result<(u64, u64, u64)> {
        let task = self.object();
        Ok((task.u64("utime")?, task.u64("stime")?, task.u64("se.sum_exec_runtime")?))
    }

    /// `ITIMER_VIRTUAL` and `ITIMER_PROF`.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn processor_timers(&self) -> Result<(ProcessorTimer, ProcessorTimer)> {
        let signal = self.object().required("signal", "signal_struct")?;
        let kernel = signal.kernel();
        let (first, size) = (signal.address_of("it")?, kernel.types().size("cpu_itimer")?);
        let (user, system, _) = self.processor_time()?;
        let timer = |index: u64, now: u64| -> Result<ProcessorTimer> {
            let timer = kernel.object("cpu_itimer", first.wrapping_add(index * size))?;
            let expires = timer.u64("expires")?;
            let left = (expires != 0).then(|| expires.saturating_sub(now).max(1000));
            Ok(ProcessorTimer { interval: timer.u64("incr")?, left })
        };
        // CPUCLOCK_PROF is 0, CPUCLOCK_VIRT 1.
        Ok((timer(1, user)?, timer(0, user.wrapping_add(system))?))
    }
}
