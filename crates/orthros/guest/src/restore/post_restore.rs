//! What threads get after criu's restore: their CPU affinity and I/O priority, what they had set by prctl(2) and its like, and `SIGCHLD` for
//! children that could not be restored.
//!
//! Most of it a thread can set only for itself: it is stopped (ptrace(2)), executes the system calls at an instruction of its own vDSO, and
//! continues with the registers it had. A process that would be less confined without one of them is killed if that fails.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result, bail, ensure};
use orrery_orthros_images::{RestoreState, ThreadAttributes, ThreadCall};
use orrery_sys::ptrace::{self, Options, Stop};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use rustix::thread::{CpuSet, sched_setaffinity};

/// How often a thread is stepped before it must have moved.
const MAX_STEPS: usize = 8;
/// `syscall`.
const INSTRUCTION: [u8; 2] = [0x0f, 0x05];
/// `IOPRIO_WHO_PROCESS` of ioprio_set(2).
const IOPRIO_WHO_PROCESS: libc::c_int = 1;

/// Returns whether some thread must not run before its attributes are set. A program that is stopped and continued is reported to
/// its parent (`SIGCHLD`), which may notice; so it is stopped only if it must be.
pub(crate) fn must_stop(state: &RestoreState) -> bool {
    !state.file_size_limits.is_empty() || state.threads.iter().any(|thread| !thread.calls.is_empty())
}

/// Completes the service in the PID namespace with the init process `init`, and returns remarks about what does not work.
pub(crate) fn complete(state: &RestoreState, init: i32) -> Vec<String> {
    let tids = match outer_tids(init) {
        Ok(tids) => tids,
        Err(error) => return vec![format!("cannot find the service's threads: {error:#}")],
    };
    let mut remarks = Vec::new();
    for thread in &state.threads {
        let Some(&outer) = tids.get(&thread.tid) else { continue };
        if set_attributes(thread, outer, &mut remarks) == Outcome::LessConfined {
            let killed = tids.get(&thread.pid).and_then(|&pid| Pid::from_raw(pid));
            // One that has exited since need not be killed.
            let _ = killed.map(|pid| kill_process(pid, Signal::KILL));
            remarks.push(format!("process {} is killed: it would be less confined than it was", thread.pid));
        }
    }
    for limit in &state.file_size_limits {
        let Some(pid) = tids.get(&limit.pid).and_then(|&pid| Pid::from_raw(pid)) else { continue };
        let bounded = |size: u64| Some(size).filter(|&size| size != u64::MAX);
        let limits = Rlimit { current: bounded(limit.soft), maximum: bounded(limit.hard) };
        if let Err(error) = prlimit(Some(pid), Resource::Fsize, limits) {
            // One that has exited since needs no limit.
            let _ = kill_process(pid, Signal::KILL);
            remarks.push(format!("process {} is killed: its RLIMIT_FSIZE is lost: {error}", limit.pid));
        }
    }
    let stopped = if must_stop(state) { &*state.running } else { &[] };
    let to_pids =
        |pids: &[u32]| pids.iter().filter_map(|pid| Pid::from_raw(*tids.get(pid)?)).collect::<Vec<_>>();
    for (pids, signal) in [(stopped, Signal::CONT), (&state.bereaved_parents, Signal::CHILD)] {
        for pid in to_pids(pids) {
            // A process that has exited since needs no signal.
            let _ = kill_process(pid, signal);
        }
    }
    remarks
}

/// Whether a thread may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    AsConfined,
    LessConfined,
}

/// Sets the attributes of a thread, by its TID outside of the service's PID namespace, and adds remarks about those that cannot be set.
fn set_attributes(thread: &ThreadAttributes, outer: i32, remarks: &mut Vec<String>) -> Outcome {
    let mut remark = |error: anyhow::Error| remarks.push(format!("thread {}: {error:#}", thread.tid));
    if let Err(error) = set_affinity(thread, outer) {
        remark(error);
    }
    if thread.resets_on_fork
        && let Err(error) = set_reset_on_fork(outer)
    {
        remark(error);
    }
    if thread.io_priority != 0
        && let Err(error) = set_io_priority(outer, thread.io_priority)
    {
        remark(error);
    }
    for (name, value) in &thread.proc_files {
        let path = format!("/proc/{outer}/{name}");
        if let Err(error) = fs::write(&path, value) {
            remark(anyhow::anyhow!("cannot write {value} to {path}: {error}"));
        }
    }
    if thread.calls.is_empty() {
        return Outcome::AsConfined;
    }
    let is_confined = thread.calls.iter().any(|call| call.is_restriction);
    let traced = match Tracee::seize(outer) {
        Ok(traced) => traced,
        Err(error) => {
            remark(error.context("cannot make it execute system calls"));
            return if is_confined { Outcome::LessConfined } else { Outcome::AsConfined };
        }
    };
    let mut outcome = Outcome::AsConfined;
    for call in &thread.calls {
        if let Err(error) = traced.execute(call) {
            remark(error.context(format!("{} is lost", call.name)));
            if call.is_restriction {
                outcome = Outcome::LessConfined;
            }
        }
    }
    outcome
}

fn set_affinity(thread: &ThreadAttributes, outer: i32) -> Result<()> {
    let mut set = CpuSet::new();
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let allowed = |cpu: usize| thread.affinity.get(cpu / 64).is_some_and(|word| word >> (cpu % 64) & 1 != 0);
    (0..count.min(CpuSet::MAX_CPU)).filter(|&cpu| allowed(cpu)).for_each(|cpu| set.set(cpu));
    // One that was bound to processors that this machine lacks runs anywhere, as after their removal.
    if (0..count).any(|cpu| !allowed(cpu)) && set.count() > 0 {
        sched_setaffinity(Pid::from_raw(outer), &set).context("cannot set its CPU affinity")?;
    }
    Ok(())
}

fn set_reset_on_fork(thread: i32) -> Result<()> {
    // SAFETY: zeros are a `struct sched_param`; the calls read and write that one.
    let result = unsafe {
        let mut parameters: libc::sched_param = std::mem::zeroed();
        let policy = libc::sched_getscheduler(thread) | libc::SCHED_RESET_ON_FORK;
        libc::sched_getparam(thread, &raw mut parameters);
        libc::sched_setscheduler(thread, policy, &raw const parameters)
    };
    ensure!(result == 0, "cannot set SCHED_RESET_ON_FORK: {}", std::io::Error::last_os_error());
    Ok(())
}

fn set_io_priority(thread: i32, priority: u16) -> Result<()> {
    // SAFETY: the call takes numbers only.
    let result = unsafe {
        libc::syscall(libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, thread, libc::c_int::from(priority))
    };
    ensure!(result == 0, "cannot set its I/O priority {priority:#x}: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Returns the TIDs outside of the service's PID namespace, by those inside.
fn outer_tids(init: i32) -> Result<HashMap<u32, i32>> {
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid"));
    let own = namespace(&init.to_string())?;
    let mut found = HashMap::new();
    for process in fs::read_dir("/proc")?.flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().filter(|name| name.parse::<i32>().is_ok()) else { continue };
        if !namespace(pid).is_ok_and(|space| space == own) {
            continue;
        }
        let Ok(threads) = fs::read_dir(process.path().join("task")) else { continue };
        for thread in threads.flatten() {
            let Ok(status) = fs::read_to_string(thread.path().join("status")) else { continue };
            let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
            let mut words = line.unwrap_or_default().split_whitespace();
            if let (Some(Ok(outer)), Some(Ok(inner))) =
                (words.next().map(str::parse), words.last().map(str::parse))
            {
                found.insert(inner, outer);
            }
        }
    }
    Ok(found)
}

/// A thread that is stopped until this is dropped.
struct Tracee {
    thread: ptrace::Tracee,
    registers: libc::user_regs_struct,
    instruction: u64,
}

impl Tracee {
    fn seize(thread: i32) -> Result<Self> {
        let instruction = syscall_instruction(thread)?;
        // Its own filters are not meant for what it is made to do here.
        let traced = ptrace::Tracee::seize(thread, Options::SUSPEND_SECCOMP)
            .or_else(|_| ptrace::Tracee::seize(thread, Options::empty()))
            .context("cannot trace it")?;
        traced.interrupt().context("cannot stop it")?;
        ensure!(traced.wait() != Stop::Gone, "it exited while it was traced");
        let registers = traced.registers().context("cannot read its registers")?;
        Ok(Self { thread: traced, registers, instruction })
    }

    /// Makes the thread execute a system call, which must succeed.
    fn execute(&self, call: &ThreadCall) -> Result<()> {
        let mut registers = self.registers;
        registers.rip = self.instruction;
        registers.rax = call.number.cast_unsigned();
        // In no system call: nothing is restarted.
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8] = call.arguments;
        registers.r9 = 0;
        self.thread.set_registers(&registers).context("cannot set its registers")?;
        // A thread that a signal had stopped reports that first.
        for _ in 0..MAX_STEPS {
            self.thread.step().context("cannot step it")?;
            ensure!(self.thread.wait() != Stop::Gone, "it exited while it was traced");
            let now = self.thread.registers().context("cannot read its registers")?;
            if now.rip != self.instruction {
                return check(call.number, now.rax.cast_signed());
            }
        }
        bail!("it executes nothing")
    }
}

/// Checks the result of a system call, of which personality(2) returns what was there before.
fn check(call: i64, result: i64) -> Result<()> {
    if result < 0 {
        let error = i32::try_from(-result).unwrap_or(0);
        bail!("{}", std::io::Error::from_raw_os_error(error));
    }
    ensure!(result == 0 || call == libc::SYS_personality, "the system call returns {result}");
    Ok(())
}

impl Drop for Tracee {
    fn drop(&mut self) {
        // The kernel detaches from a thread that has exited by itself, and from all others when this one ends.
        let _ = self.thread.set_registers(&self.registers);
        let _ = self.thread.detach();
    }
}

/// Returns the address of a system call instruction in a thread's vDSO.
fn syscall_instruction(thread: i32) -> Result<u64> {
    let maps = fs::read(format!("/proc/{thread}/maps"))?;
    let vdso =
        orrery_sys::maps::entries(&maps).find(|entry| entry.name == b"[vdso]").context("it has no vDSO")?;
    let (start, end) = (vdso.range.start as u64, vdso.range.end as u64);
    let mut bytes = vec![0; usize::try_from(end.saturating_sub(start).min(1 << 20))?];
    File::open(format!("/proc/{thread}/mem"))?.read_exact_at(&mut bytes, start)?;
    let at = bytes.windows(2).position(|window| window == INSTRUCTION);
    let Some(at) = at else { bail!("its vDSO has no system call instruction") };
    Ok(start + at as u64)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_thread_is_made_to_call_prctl_and_goes_on() {
        is_made_to_call_prctl(false);
    }

    #[test]
    fn so_is_one_that_is_stopped() {
        is_made_to_call_prctl(true);
    }

    /// A child that sleeps is given what only it could give itself, and sleeps on.
    fn is_made_to_call_prctl(stopped: bool) {
        let mut child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let field = |name: &str| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned()
        };
        while !field("State:").starts_with('S') || field("Name:") != "sleep" {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(field("NoNewPrivs:"), "0");
        if stopped {
            // SAFETY: kill takes no pointers; the PID is that of a child that was not waited for.
            unsafe { libc::kill(pid, libc::SIGSTOP) };
            while !field("State:").starts_with('T') {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
        let call = |name: &str, option: i32, value, is_restriction| ThreadCall {
            name: name.to_owned(),
            number: libc::SYS_prctl,
            arguments: [u64::from(option.cast_unsigned()), value, 0, 0, 0],
            is_restriction,
        };
        let calls = vec![
            call("no_new_privs", libc::PR_SET_NO_NEW_PRIVS, 1, true),
            call("nonsense", 9999, 1, false),
            call("timer slack", libc::PR_SET_TIMERSLACK, 77_777, false),
        ];
        let proc_files = vec![("coredump_filter".to_owned(), "0x7f".to_owned())];
        let attributes = ThreadAttributes {
            tid: 1,
            affinity: vec![1],
            io_priority: 2 << 13 | 6,
            proc_files,
            calls,
            ..ThreadAttributes::default()
        };
        let mut remarks = Vec::new();
        assert_eq!(set_attributes(&attributes, pid, &mut remarks), Outcome::AsConfined, "{remarks:?}");
        match remarks.iter().find(|remark| remark.contains("execute system calls")) {
            None => {
                assert!(remarks.len() == 1 && remarks[0].contains("nonsense"), "{remarks:?}");
                assert_eq!(field("NoNewPrivs:"), "1");
                let read = |name| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap();
                assert_eq!(read("coredump_filter").trim(), "0000007f");
                assert_eq!(read("timerslack_ns").trim(), "77777");
                assert_eq!(field("Cpus_allowed_list:"), "0");
                if stopped {
                    // On its way back to where it was stopped; it does not sleep on before.
                    while !field("State:").starts_with('T') {
                        assert!(!field("State:").starts_with('S'), "it goes on");
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                    // SAFETY: kill takes no pointers; the PID is that of a child that was not waited for.
                    unsafe { libc::kill(pid, libc::SIGCONT) };
                }
                while !field("State:").starts_with('S') {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
            }
            Some(why) => orrery_testing::skipped!("this machine does not let processes be traced: {why}"),
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
