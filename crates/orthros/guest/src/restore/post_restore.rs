//! What threads get after criu's restore: their CPU affinity, `no_new_privs` and ambient capabilities, and `SIGCHLD` for children that
//! could not be restored.
//!
//! A thread can set `no_new_privs` and ambient capabilities only for itself: it is stopped (ptrace(2)), executes `prctl` at a system
//! call instruction of its own vDSO, and continues with the registers it had.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result, bail, ensure};
use orrery_orthros_images::{RestoreState, ThreadAttributes};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_setaffinity};

/// How often a thread is stepped before it must have moved.
const MAX_STEPS: usize = 8;
/// `syscall`.
const INSTRUCTION: [u8; 2] = [0x0f, 0x05];

/// Returns whether some thread must not run before its attributes are set. A program that is stopped and continued is reported to
/// its parent (`SIGCHLD`), which may notice; so it is stopped only if it must be.
pub(crate) fn must_stop(state: &RestoreState) -> bool {
    state.threads.iter().any(|thread| thread.no_new_privileges || thread.ambient_capabilities != 0)
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
        if let Err(error) = set_attributes(thread, outer) {
            remarks.push(format!("thread {}: {error:#}", thread.tid));
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

/// Sets the attributes of a thread, by its TID outside of the service's PID namespace.
fn set_attributes(thread: &ThreadAttributes, outer: i32) -> Result<()> {
    let mut set = CpuSet::new();
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let allowed = |cpu: usize| thread.affinity.get(cpu / 64).is_some_and(|word| word >> (cpu % 64) & 1 != 0);
    (0..count.min(CpuSet::MAX_CPU)).filter(|&cpu| allowed(cpu)).for_each(|cpu| set.set(cpu));
    // One that was bound to processors that this machine lacks runs anywhere, as after their removal.
    if (0..count).any(|cpu| !allowed(cpu)) && set.count() > 0 {
        sched_setaffinity(Pid::from_raw(outer), &set).context("cannot set its CPU affinity")?;
    }
    let mut calls = Vec::new();
    if thread.no_new_privileges {
        calls.push([i64::from(libc::PR_SET_NO_NEW_PRIVS), 1, 0, 0]);
    }
    for capability in (0..64).filter(|bit| thread.ambient_capabilities >> bit & 1 != 0) {
        calls.push([i64::from(libc::PR_CAP_AMBIENT), i64::from(libc::PR_CAP_AMBIENT_RAISE), capability, 0]);
    }
    if calls.is_empty() {
        return Ok(());
    }
    let traced = Tracee::seize(outer)?;
    for call in calls {
        let result = traced.prctl(call)?;
        ensure!(result == 0, "prctl({}) returns {result}", call[0]);
    }
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
    thread: i32,
    registers: libc::user_regs_struct,
    instruction: u64,
}

fn traced(request: libc::c_uint, thread: i32, address: usize, data: usize) -> Result<()> {
    // SAFETY: each caller passes the type that the request reads or writes: `data` is an integer, or the address of a live
    // structure of that type.
    let result = unsafe {
        libc::ptrace(
            request,
            thread,
            std::ptr::without_provenance_mut::<libc::c_void>(address),
            std::ptr::without_provenance_mut::<libc::c_void>(data),
        )
    };
    ensure!(result == 0, "ptrace request {request}: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Waits until a traced thread is stopped.
fn wait(thread: i32) -> Result<()> {
    let mut status = 0;
    // SAFETY: `status` is a live integer, which the call writes.
    let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
    ensure!(waited == thread && libc::WIFSTOPPED(status), "it exited while it was traced");
    Ok(())
}

impl Tracee {
    fn seize(thread: i32) -> Result<Self> {
        let instruction = syscall_instruction(thread)?;
        let options = usize::try_from(libc::PTRACE_O_SUSPEND_SECCOMP)?;
        // Its own filters are not meant for what it is made to do here.
        traced(libc::PTRACE_SEIZE, thread, 0, options)
            .or_else(|_| traced(libc::PTRACE_SEIZE, thread, 0, 0))?;
        traced(libc::PTRACE_INTERRUPT, thread, 0, 0)?;
        wait(thread)?;
        let mut registers = std::mem::MaybeUninit::<libc::user_regs_struct>::zeroed();
        traced(libc::PTRACE_GETREGS, thread, 0, registers.as_mut_ptr().expose_provenance())?;
        // SAFETY: the structure was zeroed, which is valid for integers, and PTRACE_GETREGS has filled it in.
        Ok(Self { thread, registers: unsafe { registers.assume_init() }, instruction })
    }

    fn set(&self, registers: &libc::user_regs_struct) -> Result<()> {
        traced(libc::PTRACE_SETREGS, self.thread, 0, std::ptr::from_ref(registers).expose_provenance())
    }

    /// Makes the thread call `prctl`, and returns the result.
    fn prctl(&self, words: [i64; 4]) -> Result<i64> {
        let mut registers = self.registers;
        let [first, second, third, fourth] = words.map(i64::cast_unsigned);
        registers.rip = self.instruction;
        registers.rax = libc::SYS_prctl.cast_unsigned();
        // In no system call: nothing is restarted.
        registers.orig_rax = u64::MAX;
        (registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8) =
            (first, second, third, fourth, 0);
        self.set(&registers)?;
        // A thread that a signal had stopped tells so first.
        for _ in 0..MAX_STEPS {
            traced(libc::PTRACE_SINGLESTEP, self.thread, 0, 0)?;
            wait(self.thread)?;
            let place = std::ptr::from_mut(&mut registers).expose_provenance();
            traced(libc::PTRACE_GETREGS, self.thread, 0, place)?;
            if registers.rip != self.instruction {
                return Ok(registers.rax.cast_signed());
            }
        }
        bail!("it executes nothing")
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        let _ = self.set(&self.registers);
        let _ = traced(libc::PTRACE_DETACH, self.thread, 0, 0);
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
        let attributes =
            ThreadAttributes { tid: 1, affinity: vec![1], no_new_privileges: true, ambient_capabilities: 0 };
        match set_attributes(&attributes, pid) {
            Ok(()) => {
                assert_eq!(field("NoNewPrivs:"), "1");
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
            Err(error) => {
                orrery_testing::skipped!("this machine does not let processes be traced: {error:#}")
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
