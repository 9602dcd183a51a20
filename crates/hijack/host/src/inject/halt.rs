//! Stops all threads of a process, so that they can be made to run something, and lets them go on as if nothing had been.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use orrery_hijack_image::config::boot;
use orrery_sys::ptrace::{Options, Stop, Tracee};

use super::SIGSYS_BIT;
use super::puppet::{LATE, Puppet};

/// How long the threads may take to stop.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a process gets no executive.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("there is no such process")]
    Absent,
    #[error("process {0} traces it already")]
    Traced(i32),
    #[error(
        "this user may not trace it; use the same user, or root, and see /proc/sys/kernel/yama/ptrace_scope where that exists"
    )]
    Denied,
    #[error("it is stopped; continue it first: kill -CONT {0}")]
    Stopped(libc::pid_t),
    #[error(
        "its thread {0} does not stop: it may wait for a child of vfork(2), or for a device; try again later"
    )]
    Busy(libc::pid_t),
    #[error("its system calls are dispatched already: by an executive, or by an emulator such as Wine")]
    Dispatched,
    #[error(
        "a filter of system calls (seccomp) confines it, which could end it for a call of the executive's"
    )]
    Filtered,
    #[error("it is no 64-bit program")]
    Foreign,
    #[error("it began to act as another user meanwhile; try again")]
    Changed,
    #[error("it acts as a user for whom there is no room left")]
    Crowded,
    #[error(transparent)]
    Failed(#[from] io::Error),
}

/// A thread that stands still.
pub(super) struct Halted {
    pub(super) tracee: Tracee,
    pub(super) registers: libc::user_regs_struct,
    state: Vec<u8>,
    pub(super) mask: u64,
    /// Whether it was made to run something, so that it needs all of this back.
    used: bool,
    /// What the kernel is to know of SIGSYS from now on, and not the executive: the results of [`boot::END`].
    pub(super) sigsys: u64,
    /// Signals that arrived meanwhile.
    pub(super) late: [bool; LATE.len()],
}

fn status_field(process: libc::pid_t, field: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.trim().to_owned())
}

/// Refuses what can be seen from outside.
pub(super) fn look_at(process: libc::pid_t) -> Result<(), Refusal> {
    let field = |name| status_field(process, name).ok_or(Refusal::Absent);
    // A thread's number is none of a process.
    if field("Tgid:")?.parse() != Ok(process) {
        return Err(Refusal::Absent);
    }
    match field("TracerPid:")?.parse() {
        Ok(0) => {}
        Ok(tracer) => return Err(Refusal::Traced(tracer)),
        Err(_) => return Err(Refusal::Absent),
    }
    match field("State:")?.chars().next() {
        Some('T') => return Err(Refusal::Stopped(process)),
        Some('Z' | 'X') => return Err(Refusal::Absent),
        _ => {}
    }
    // Kernels without filters have no such line.
    if status_field(process, "Seccomp:").is_some_and(|mode| mode != "0") {
        return Err(Refusal::Filtered);
    }
    Ok(())
}

/// Returns the threads of a process that have not ended.
fn threads_of(process: libc::pid_t) -> Result<Vec<libc::pid_t>, Refusal> {
    let entries = fs::read_dir(format!("/proc/{process}/task")).map_err(|_| Refusal::Absent)?;
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(numbers
        .filter(
            |thread| !matches!(status_field(*thread, "State:"), Some(state) if state.starts_with(['Z', 'X'])),
        )
        .collect())
}

/// Stops all threads of a process, those that others make meanwhile among them.
pub(super) fn halt(process: libc::pid_t, halted: &mut Vec<Halted>) -> Result<(), Refusal> {
    let deadline = Instant::now() + PATIENCE;
    let mut seized: Vec<libc::pid_t> = Vec::new();
    loop {
        let mut new = Vec::new();
        for thread in threads_of(process)? {
            if seized.contains(&thread) {
                continue;
            }
            match Tracee::seize(thread, Options::TRACE_SYSCALL_GOOD) {
                Ok(tracee) => {
                    // One that ends meanwhile is noticed below.
                    let _ended = tracee.interrupt();
                    new.push(tracee);
                }
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(_) => {
                    let tracer = status_field(process, "TracerPid:").and_then(|tracer| tracer.parse().ok());
                    abandon(new);
                    return Err(match tracer {
                        Some(tracer) if tracer != 0 && tracer != std::process::id().cast_signed() => {
                            Refusal::Traced(tracer)
                        }
                        _ => Refusal::Denied,
                    });
                }
            }
            seized.push(thread);
        }
        if new.is_empty() {
            return if halted.is_empty() { Err(Refusal::Absent) } else { Ok(()) };
        }
        let mut new = new.into_iter();
        while let Some(tracee) = new.next() {
            let refused = match halted_thread(tracee, deadline) {
                Ok(Some(thread)) => {
                    halted.push(thread);
                    continue;
                }
                Ok(None) => continue,
                Err(refused) => refused,
            };
            abandon(new);
            return Err(refused);
        }
    }
}

/// Lets threads go on that may not have stopped yet.
fn abandon(tracees: impl IntoIterator<Item = Tracee>) {
    for tracee in tracees {
        let _ = wait_for_halt(&tracee, Instant::now() + PATIENCE);
        tracee.detach();
    }
}

/// Waits for a thread that was interrupted; `None`: it has ended.
fn wait_for_halt(tracee: &Tracee, deadline: Instant) -> Result<Option<()>, Refusal> {
    loop {
        match tracee.wait_until(deadline) {
            Some(Stop::Gone) => return Ok(None),
            Some(Stop::Other) => return Ok(Some(())),
            Some(Stop::Group) => return Err(Refusal::Stopped(tracee.pid())),
            Some(Stop::Signal(signal)) => tracee.resume(signal),
            Some(Stop::Call | Stop::Exec) => tracee.resume(0),
            None => return Err(Refusal::Busy(tracee.pid())),
        }
    }
}

/// Waits for a thread that was interrupted, and that has taken the signal of a call that is dispatched: the kernel stops it before it
/// delivers one, when the call is not made any more, and its handler has not begun.
///
/// One that is interrupted again where it stands stops there once more, and takes no signal in between (ptrace(2), `PTRACE_INTERRUPT`; the
/// kernel looks for stops before it looks for signals). So it is let go without, stops at the signal, and is interrupted there.
fn wait_for_halt_at_rest(tracee: &Tracee, deadline: Instant) -> Result<Option<()>, Refusal> {
    let mut halted = wait_for_halt(tracee, deadline)?;
    while halted.is_some() && has_signal(tracee) {
        tracee.resume(0);
        let signal = match tracee.wait_until(deadline) {
            Some(Stop::Signal(signal)) => signal,
            Some(Stop::Other | Stop::Call | Stop::Exec) => 0,
            Some(Stop::Group) => return Err(Refusal::Stopped(tracee.pid())),
            Some(Stop::Gone) => return Ok(None),
            None => return Err(Refusal::Busy(tracee.pid())),
        };
        // One that ends meanwhile is noticed below.
        let _ended = tracee.interrupt();
        tracee.resume(signal);
        halted = wait_for_halt(tracee, deadline)?;
    }
    Ok(halted)
}

/// Returns whether a thread is about to take a SIGSYS.
fn has_signal(tracee: &Tracee) -> bool {
    let pending = status_field(tracee.pid(), "SigPnd:");
    let pending = pending.and_then(|set| u64::from_str_radix(&set, 16).ok()).unwrap_or(0);
    pending & SIGSYS_BIT != 0 && tracee.mask().is_ok_and(|mask| mask & SIGSYS_BIT == 0)
}

/// Waits for a thread that was interrupted, and reads what it needs back afterwards; `None`: it has ended.
fn halted_thread(tracee: Tracee, deadline: Instant) -> Result<Option<Halted>, Refusal> {
    match wait_for_halt_at_rest(&tracee, deadline) {
        Ok(Some(())) => {}
        Ok(None) => return Ok(None),
        Err(refused) => {
            // Where it has not stopped, the kernel detaches it when this thread ends.
            tracee.detach();
            return Err(refused);
        }
    }
    let read = || Ok((tracee.registers()?, tracee.extended_state()?, tracee.mask()?));
    match read() {
        Ok((registers, state, mask)) => Ok(Some(Halted {
            tracee,
            registers,
            state,
            mask,
            used: false,
            sigsys: 0,
            late: [false; LATE.len()],
        })),
        Err(error) => {
            tracee.detach();
            Err(Refusal::Failed(error))
        }
    }
}

impl Halted {
    /// Makes it run something.
    ///
    /// # Errors
    /// It has ended.
    pub(super) fn puppet(&mut self) -> io::Result<Puppet<'_>> {
        self.used = true;
        self.tracee.set_mask(!SIGSYS_BIT)?;
        let mut registers = self.registers;
        registers.orig_rax = u64::MAX;
        Ok(Puppet {
            tracee: &mut self.tracee,
            registers,
            gadget: 0,
            stack: None,
            covered: None,
            mask: self.mask,
            forcible: false,
            late: [false; LATE.len()],
        })
    }

    /// Lets it go on where it was.
    pub(super) fn release(self, process: libc::pid_t) {
        if self.used {
            // What is sent to it now comes when it is where it was.
            let _gone = self.tracee.set_mask(u64::MAX);
            // Only a thread that is on its way to a signal makes a call again.
            let stopped = self.tracee.interrupt().map(|()| self.tracee.resume(0));
            let stopped = stopped.is_ok() && wait_for_halt(&self.tracee, Instant::now() + PATIENCE).is_ok();
            if stopped {
                let _gone = self.tracee.set_registers(&self.registers);
                let _gone = self.tracee.set_extended_state(&self.state);
                let blocked = if self.sigsys & boot::SIGSYS_IS_BLOCKED == 0 { 0 } else { SIGSYS_BIT };
                let _gone = self.tracee.set_mask(self.mask & !SIGSYS_BIT | blocked);
            }
        }
        let thread = self.tracee.pid();
        let send = |signal: libc::c_int| {
            // SAFETY: sends a thread what it was sent.
            unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) };
        };
        // Before it runs: the signals are there then as if they had come while it stood still.
        if self.sigsys & boot::SIGSYS_IS_PENDING != 0 {
            send(libc::SIGSYS);
        }
        for (signal, late) in LATE.into_iter().zip(self.late) {
            if late {
                send(signal);
            }
        }
        self.tracee.detach();
    }
}
