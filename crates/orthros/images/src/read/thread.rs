//! Threads, and what a process has once for all of them: registers, signals, timers, limits, credentials.
//!
//! A restored thread is in no system call; [`super::syscalls`] decides what becomes of the one that it was in.

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{IdKind, Kernel, Object, PosixTimer, Registers, Task};

use super::attributes;
use super::clocks::Clocks;
use super::cpu_registers::CpuRegisters;
use super::io_progress;
use super::remarks::Remarks;
use super::seccomp::FilterTable;
use super::syscalls::{self, Answer, Answers, Outcome, decide};
use crate::model::{Rseq, SignalAction, Thread, TimerLeft, Timers};

/// `__USER_CS` of x86-64.
const CODE_64: u64 = 0x33;
const SYSCALL_LENGTH: u64 = 2;
const ENOSYS: i64 = 38;
/// `ERESTARTSYS` to `ERESTART_RESTARTBLOCK`: the kernel had decided to restart the call.
const RESTARTS: std::ops::RangeInclusive<i64> = 512..=516;
const SIGNALS: u64 = 64;
/// `SIGNAL_GROUP_EXIT` of `include/linux/sched/signal.h`.
const GROUP_EXIT: u32 = 4;
/// The size and signature of an rseq area where the kernel does not keep them.
const RSEQ_SIZE: u32 = 32;
const RSEQ_SIGNATURE: u32 = 0x5305_3053;

/// What the threads of a process are read with.
pub(super) struct Reading<'r> {
    pub(super) kernel: &'r Kernel,
    pub(super) cpus: &'r CpuRegisters,
    /// What the process's program says of its system calls.
    pub(super) answers: Option<&'r Answers>,
}

impl Reading<'_> {
    /// Reads a thread under its TID.
    pub(super) fn thread(
        &self,
        thread: &Task<'_>,
        tid: u32,
        filters: &mut FilterTable,
        remarks: &mut Remarks,
    ) -> Result<Thread> {
        let task = thread.object();
        let (seccomp_mode, seccomp_filter) = filters.add(thread)?;
        if thread.has_landlock_domain()? {
            bail!("it is confined by Landlock, and would not be without its kernel");
        }
        check_tracer(thread, tid, remarks)?;
        let mut registers = match self.cpus.general(self.kernel, thread)? {
            Some(registers) => registers,
            None => thread.registers()?,
        };
        if registers.cs != CODE_64 {
            bail!("it runs code of 32 bits");
        }
        resume(self, thread, &mut registers, remarks)?;
        let rseq = task.u64("rseq").unwrap_or(0);
        Ok(Thread {
            tid,
            name: thread.name()?,
            registers,
            float_state: self.float_state(thread)?,
            clear_tid_address: task.u64("clear_child_tid")?,
            robust_list: task.u64("robust_list")?,
            nice: task.i32("static_prio")? - 120,
            policy: task.u32("policy")?,
            rt_priority: task.u32("rt_priority")?,
            blocked_signals: task.u64("blocked")?,
            signal_stack: (task.u64("sas_ss_sp")?, task.u64("sas_ss_size")?, task.u32("sas_ss_flags")?),
            parent_death_signal: Some(task.u32("pdeath_signal")?).filter(|&signal| signal != 0),
            pending_signals: thread.pending_signals(false)?,
            credentials: thread.credentials()?,
            attributes: attributes::of_thread(thread, tid)?,
            seccomp_mode,
            seccomp_filter,
            rseq: (rseq != 0).then_some(Rseq {
                address: rseq,
                // The kernel keeps the registered length since 6.3; before, it is that of the first version.
                size: task.u32("rseq_len").unwrap_or(RSEQ_SIZE),
                signature: task.u32("rseq_sig").unwrap_or(RSEQ_SIGNATURE),
            }),
        })
    }

    fn float_state(&self, thread: &Task<'_>) -> Result<Vec<u8>> {
        let saved = thread.float_state()?;
        let held = if saved.stale { self.cpus.float(self.kernel, thread)? } else { None };
        match held {
            Some(held) => Ok(held),
            // A thread that is just leaving a processor, or coming onto it: another one has its registers.
            None if !saved.stale || self.cpus.are_known() => Ok(saved.bytes),
            None => bail!("it was on a processor, whose vector registers are not known"),
        }
    }
}

/// Looks for a tracer (ptrace(2)), which a restored thread does not have. One that was to be killed rather than to run without it is not
/// restored.
fn check_tracer(thread: &Task<'_>, tid: u32, remarks: &mut Remarks) -> Result<()> {
    /// `PT_PTRACED`, and where the options begin in the same word.
    const TRACED: u64 = 1;
    const OPTIONS_SHIFT: u32 = 3;
    let state = thread.object().u64("ptrace")?;
    if state & TRACED == 0 {
        return Ok(());
    }
    if state >> OPTIONS_SHIFT & u64::from(libc::PTRACE_O_EXITKILL.cast_unsigned()) != 0 {
        bail!("a tracer had it in its hand, and it must not run without one (PTRACE_O_EXITKILL)");
    }
    remarks.add_loss(format!("thread {tid} is traced no more"));
    Ok(())
}

/// Makes the registers those of a thread that goes on in user space.
fn resume(
    reading: &Reading<'_>,
    thread: &Task<'_>,
    registers: &mut Registers,
    remarks: &mut Remarks,
) -> Result<()> {
    let call = registers.orig_ax.cast_signed();
    if call < 0 {
        return Ok(());
    }
    let result = registers.ax.cast_signed();
    let restarts = RESTARTS.contains(&-result);
    if result != -ENOSYS && !restarts {
        return Ok(());
    }
    let answer = reading.answers.map_or(Answer::Default, |answers| answers.answer(call));
    let writes_at_position = || syscalls::writes_at_position(thread, registers);
    // What the kernel had decided to begin again has not been done.
    let moved =
        if restarts || answer != Answer::Default { Ok(None) } else { moved(reading, thread, registers) };
    let outcome = match (decide(call, answer, writes_at_position), &moved) {
        (Outcome::Fail(_), _) if restarts && answer == Answer::Default => Outcome::Restart,
        (_, Ok(Some(0))) => Outcome::Restart,
        (_, &Ok(Some(bytes))) => Outcome::Return(bytes),
        (outcome, _) => outcome,
    };
    if let Err(error) = moved {
        remarks.add(format!("thread {}: {error:#}", thread.tid()?));
    }
    match outcome {
        Outcome::Return(bytes) => registers.ax = bytes,
        Outcome::Restart => {
            registers.ax = registers.orig_ax;
            registers.ip -= SYSCALL_LENGTH;
        }
        Outcome::Call(entry) => {
            // A call overwrites `rcx` and `r11`: the library finds the way back in the one.
            registers.ax = registers.orig_ax;
            registers.cx = registers.ip;
            registers.ip = entry;
        }
        Outcome::Fail(error) => {
            let remark = format!(
                "thread {}: system call {call} was under way and fails with error {error}",
                thread.tid()?
            );
            remarks.add(remark);
            registers.ax = (-i64::from(error)).cast_unsigned();
        }
    }
    registers.orig_ax = u64::MAX;
    Ok(())
}

/// Returns how many bytes its call had moved, if it is one that moves bytes.
fn moved(reading: &Reading<'_>, thread: &Task<'_>, registers: &Registers) -> Result<Option<u64>> {
    let standing = reading.cpus.standing(reading.kernel, thread)?;
    io_progress::moved(thread, registers, standing)
}

/// Returns the soft and hard resource limits of a process.
pub(super) fn rlimits(leader: &Task<'_>) -> Result<Vec<(u64, u64)>> {
    let limits = leader.object().required("signal", "signal_struct")?.bytes("rlim")?;
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    Ok(limits.chunks_exact(16).map(|pair| (word(&pair[..8]), word(&pair[8..]))).collect())
}

/// Returns the timers of a process, with what was left of each when the kernel died.
pub(super) fn timers(clocks: Clocks, leader: &Task<'_>) -> Result<Timers> {
    let signal = leader.object().required("signal", "signal_struct")?;
    let (virt, prof) = leader.processor_timers()?;
    let left = |timer: orrery_kimage::ProcessorTimer| TimerLeft {
        interval: timer.interval,
        left: timer.left.unwrap_or(0),
    };
    Ok(Timers {
        real: real_timer(clocks, signal)?,
        virt: left(virt),
        prof: left(prof),
        posix: posix_timers(clocks, leader)?,
    })
}

/// `timer_create`: what was left of each timer when the kernel died.
fn posix_timers(clocks: Clocks, process: &Task<'_>) -> Result<Vec<(PosixTimer, u64)>> {
    let mut found = Vec::new();
    for mut timer in process.posix_timers()? {
        let used = match ProcessorClock::of(timer.clock) {
            None if timer.clock > libc::CLOCK_BOOTTIME => {
                bail!("its timer {} goes by clock {}, which wakes the machine up", timer.id, timer.clock)
            }
            None => None,
            Some(clock) => {
                let owner = timer.clock_owner.unwrap_or(0);
                let used = clock.used(process, owner).with_context(|| format!("its timer {}", timer.id))?;
                timer.clock = clock.id(owner);
                Some(used)
            }
        };
        let left = match (timer.expires, used) {
            (None, _) => 0,
            (Some(expires), Some(used)) => expires.saturating_sub(used).max(1000),
            (Some(expires), None) => clocks.left(timer.clock.cast_unsigned(), expires),
        };
        found.push((timer, left));
    }
    Ok(found)
}

/// A clock that counts processor time, by the number that programs have for it (clock_getcpuclockid(3)): the complement of a PID or
/// TID, and which time of whom in the three lowest bits. 0 in place of the PID is the caller's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessorClock {
    of_thread: bool,
    /// `CPUCLOCK_PROF`, `CPUCLOCK_VIRT` or `CPUCLOCK_SCHED`.
    kind: i32,
}

impl ProcessorClock {
    const OF_THREAD: i32 = 4;
    const SCHEDULED: i32 = 2;

    /// Returns what a clock counts; `None` if it counts no processor time.
    fn of(clock: i32) -> Option<Self> {
        match clock {
            libc::CLOCK_PROCESS_CPUTIME_ID => Some(Self { of_thread: false, kind: Self::SCHEDULED }),
            libc::CLOCK_THREAD_CPUTIME_ID => Some(Self { of_thread: true, kind: Self::SCHEDULED }),
            0.. => None,
            _ => Some(Self { of_thread: clock & Self::OF_THREAD != 0, kind: clock & 3 }),
        }
    }

    /// Returns the number of the clock. A timer is created again by the first thread: so that of a thread has its TID.
    fn id(self, owner: i32) -> i32 {
        if self.of_thread { !owner << 3 | Self::OF_THREAD | self.kind } else { !0 << 3 | self.kind }
    }

    /// Returns what it showed. The process itself, or one of its threads, must be its owner.
    fn used(self, process: &Task<'_>, owner: i32) -> Result<u64> {
        let number = |task: &Task<'_>, kind| Ok::<_, anyhow::Error>(task.ids(kind)?.last().copied());
        let (user, system, both) = if self.of_thread {
            let threads = process.threads().found;
            let thread = threads
                .iter()
                .find(|thread| number(thread, IdKind::Thread).is_ok_and(|number| number == Some(owner)));
            thread.context("it goes by the processor time of another process's thread")?.thread_time()?
        } else {
            if number(process, IdKind::Process)? != Some(owner) {
                bail!("it goes by the processor time of another process");
            }
            process.processor_time()?
        };
        Ok(match self.kind {
            0 => user.saturating_add(system),
            1 => user,
            _ => both,
        })
    }
}

/// `setitimer(ITIMER_REAL)`: what was left of it when the kernel died.
fn real_timer(clocks: Clocks, signal: Object<'_>) -> Result<TimerLeft> {
    let interval = signal.u64("it_real_incr")?;
    let armed = signal.u32("real_timer.state")? & 1 != 0;
    let left = signal.u64("real_timer.node.expires")?.saturating_sub(clocks.monotonic).max(1000);
    let left = if armed { left } else { 0 };
    Ok(TimerLeft { interval, left })
}

/// Returns the status of a process that has exited, as `wait` returns it.
pub(super) fn exit_status(process: &Task<'_>) -> Result<u32> {
    let task = process.object();
    let signal = task.required("signal", "signal_struct")?;
    if signal.u32("flags")? & GROUP_EXIT != 0 {
        Ok(signal.u32("group_exit_code")?)
    } else {
        Ok(task.u32("exit_code")?)
    }
}

/// Returns the actions of all signals but the two that nobody can change, in order.
pub(super) fn actions(task: Object<'_>) -> Result<Vec<SignalAction>> {
    let hand = task.required("sighand", "sighand_struct")?;
    let kernel = task.kernel();
    let (first, size) = (hand.address_of("action")?, kernel.types().size("k_sigaction")?);
    let mut actions = Vec::new();
    for signal in 1..=SIGNALS {
        if [libc::SIGKILL, libc::SIGSTOP].contains(&i32::try_from(signal)?) {
            continue;
        }
        let action = kernel.object("sigaction", first + (signal - 1) * size)?;
        actions.push(SignalAction {
            handler: action.u64("sa_handler")?,
            flags: action.u64("sa_flags")?,
            restorer: action.u64("sa_restorer")?,
            mask: action.u64("sa_mask")?,
        });
    }
    Ok(actions)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers are those of `pthread_getcpuclockid` and `clock_getcpuclockid`.
    #[test]
    fn clocks_of_processor_time_are_told_apart() {
        // SAFETY: the calls write one number each.
        let (thread, process) = unsafe {
            let (mut thread, mut process) = (0, 0);
            assert_eq!(libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut thread), 0);
            assert_eq!(libc::clock_getcpuclockid(0, &raw mut process), 0);
            (thread, process)
        };
        let clock = ProcessorClock::of(thread).unwrap();
        assert_eq!(clock, ProcessorClock::of(libc::CLOCK_THREAD_CPUTIME_ID).unwrap());
        assert!(clock.of_thread);
        // SAFETY: the call takes nothing.
        let tid = unsafe { libc::gettid() };
        assert_eq!(clock.id(tid), thread);
        let clock = ProcessorClock::of(process).unwrap();
        assert_eq!(clock, ProcessorClock::of(libc::CLOCK_PROCESS_CPUTIME_ID).unwrap());
        assert_eq!((clock.of_thread, clock.id(tid)), (false, process));
        // As the kernel notes a timer by `CLOCK_PROCESS_CPUTIME_ID`.
        assert_eq!(process, -6);
        assert!(ProcessorClock::of(libc::CLOCK_MONOTONIC).is_none());
    }
}
