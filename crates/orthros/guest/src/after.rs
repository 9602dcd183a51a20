//! What criu does not restore, and processes get when they live again: the processors they may run on, `no_new_privs`,
//! ambient capabilities, and word of children that could not be rebuilt.
//!
//! `no_new_privs` and ambient capabilities a thread can only give itself: it is stopped (ptrace), made to call
//! `prctl` at a system call instruction of its own vDSO, and goes on with the registers it had.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};

const NAME: &str = "after.json";
/// As often as a thread is made to go on before it does.
const MOST_STEPS: usize = 8;
/// `syscall`.
const INSTRUCTION: [u8; 2] = [0x0f, 0x05];

/// What is left to do for the processes of a service.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct After {
    pub(crate) threads: Vec<ThreadAfter>,
    /// The parents of processes that count as killed.
    pub(crate) bereaved: Vec<u32>,
    /// The processes that nobody had stopped.
    pub(crate) running: Vec<u32>,
}

/// What is left to do for a thread, by its number in the service.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ThreadAfter {
    pub(crate) thread: u32,
    /// One bit for each processor.
    pub(crate) processors: Vec<u64>,
    pub(crate) no_new_privileges: bool,
    pub(crate) ambient: u64,
}

impl After {
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(NAME);
        fs::write(&path, serde_json::to_vec(self)?)
            .with_context(|| format!("cannot write {}", path.display()))
    }

    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(NAME);
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(serde_json::from_slice(&bytes)?)
    }

    /// Whether some thread must not run before all is done. To a program that is stopped and continued, its parent is told
    /// so (`SIGCHLD`), which it may notice; so it is done only where it must be.
    pub(crate) fn must_stop(&self) -> bool {
        self.threads.iter().any(|thread| thread.no_new_privileges || thread.ambient != 0)
    }

    /// Does it, in the nest whose process 1 is `nest`; what does not work is told in words.
    pub(crate) fn apply(&self, nest: i32) -> Vec<String> {
        let numbers = match numbers(nest) {
            Ok(numbers) => numbers,
            Err(error) => return vec![format!("cannot find the service's threads: {error:#}")],
        };
        let mut failed = Vec::new();
        for thread in &self.threads {
            let Some(&outer) = numbers.get(&thread.thread) else { continue };
            if let Err(error) = thread.apply(outer) {
                failed.push(format!("thread {}: {error:#}", thread.thread));
            }
        }
        let stopped = if self.must_stop() { &*self.running } else { &[] };
        for outer in stopped.iter().filter_map(|process| numbers.get(process)) {
            // SAFETY: no pointers are involved; the process is the service's.
            unsafe { libc::kill(*outer, libc::SIGCONT) };
        }
        for parent in &self.bereaved {
            if let Some(&outer) = numbers.get(parent) {
                // SAFETY: no pointers are involved; the process is the service's.
                unsafe { libc::kill(outer, libc::SIGCHLD) };
            }
        }
        failed
    }
}

impl ThreadAfter {
    fn apply(&self, outer: i32) -> Result<()> {
        let mut set = rustix::thread::CpuSet::new();
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        let allowed =
            |cpu: usize| self.processors.get(cpu / 64).is_some_and(|word| word >> (cpu % 64) & 1 != 0);
        (0..count.min(rustix::thread::CpuSet::MAX_CPU))
            .filter(|&cpu| allowed(cpu))
            .for_each(|cpu| set.set(cpu));
        // One that was bound to processors that this machine lacks runs anywhere, as after their removal.
        if (0..count).any(|cpu| !allowed(cpu)) && set.count() > 0 {
            rustix::thread::sched_setaffinity(rustix::process::Pid::from_raw(outer), &set)
                .context("cannot bind it to its processors")?;
        }
        let mut calls = Vec::new();
        if self.no_new_privileges {
            calls.push([i64::from(libc::PR_SET_NO_NEW_PRIVS), 1, 0, 0]);
        }
        for capability in (0..64).filter(|bit| self.ambient >> bit & 1 != 0) {
            calls.push([
                i64::from(libc::PR_CAP_AMBIENT),
                i64::from(libc::PR_CAP_AMBIENT_RAISE),
                capability,
                0,
            ]);
        }
        if calls.is_empty() {
            return Ok(());
        }
        let traced = Traced::seize(outer)?;
        for call in calls {
            let result = traced.prctl(call)?;
            ensure!(result == 0, "prctl({}) gives {result}", call[0]);
        }
        Ok(())
    }
}

/// The numbers outside of the threads in a nest, by those inside.
fn numbers(nest: i32) -> Result<HashMap<u32, i32>> {
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid"));
    let own = namespace(&nest.to_string())?;
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

/// A thread that stands still while this lives.
struct Traced {
    thread: i32,
    registers: libc::user_regs_struct,
    instruction: u64,
}

fn traced(request: libc::c_uint, thread: i32, address: usize, data: usize) -> Result<()> {
    // SAFETY: the callers pass what each request wants; `data` is a number, or leads to a live structure.
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

/// Waits until a traced thread stands still.
fn wait(thread: i32) -> Result<()> {
    let mut status = 0;
    // SAFETY: `status` is writable.
    let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
    ensure!(waited == thread && libc::WIFSTOPPED(status), "it ended while it was looked at");
    Ok(())
}

impl Traced {
    fn seize(thread: i32) -> Result<Self> {
        let instruction = instruction(thread)?;
        let options = usize::try_from(libc::PTRACE_O_SUSPEND_SECCOMP)?;
        // Its own filters are not meant for what it is made to do here.
        traced(libc::PTRACE_SEIZE, thread, 0, options)
            .or_else(|_| traced(libc::PTRACE_SEIZE, thread, 0, 0))?;
        traced(libc::PTRACE_INTERRUPT, thread, 0, 0)?;
        wait(thread)?;
        let mut registers = std::mem::MaybeUninit::<libc::user_regs_struct>::zeroed();
        traced(libc::PTRACE_GETREGS, thread, 0, registers.as_mut_ptr().expose_provenance())?;
        // SAFETY: zeros are registers, and the call has filled them in.
        Ok(Self { thread, registers: unsafe { registers.assume_init() }, instruction })
    }

    fn set(&self, registers: &libc::user_regs_struct) -> Result<()> {
        traced(libc::PTRACE_SETREGS, self.thread, 0, std::ptr::from_ref(registers).expose_provenance())
    }

    /// Makes the thread call `prctl`, and gives what the kernel answered.
    fn prctl(&self, words: [i64; 4]) -> Result<i64> {
        let mut registers = self.registers;
        let [first, second, third, fourth] = words.map(i64::cast_unsigned);
        registers.rip = self.instruction;
        registers.rax = libc::SYS_prctl.cast_unsigned();
        // In no system call: nothing is begun again.
        registers.orig_rax = u64::MAX;
        (registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8) =
            (first, second, third, fourth, 0);
        self.set(&registers)?;
        // A thread that a signal had stopped tells so first.
        for _ in 0..MOST_STEPS {
            traced(libc::PTRACE_SINGLESTEP, self.thread, 0, 0)?;
            wait(self.thread)?;
            let place = std::ptr::from_mut(&mut registers).expose_provenance();
            traced(libc::PTRACE_GETREGS, self.thread, 0, place)?;
            if registers.rip != self.instruction {
                return Ok(registers.rax.cast_signed());
            }
        }
        bail!("it does not move")
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let _ = self.set(&self.registers);
        let _ = traced(libc::PTRACE_DETACH, self.thread, 0, 0);
    }
}

/// Where a thread's vDSO has a system call instruction.
fn instruction(thread: i32) -> Result<u64> {
    let maps = fs::read_to_string(format!("/proc/{thread}/maps"))?;
    let line = maps.lines().find(|line| line.ends_with("[vdso]")).context("it has no vDSO")?;
    let (start, end) =
        line.split_whitespace().next().and_then(|range| range.split_once('-')).context("no range")?;
    let (start, end) = (u64::from_str_radix(start, 16)?, u64::from_str_radix(end, 16)?);
    let mut bytes = vec![0; usize::try_from(end.saturating_sub(start).min(1 << 20))?];
    File::open(format!("/proc/{thread}/mem"))?.read_exact_at(&mut bytes, start)?;
    let at = bytes.windows(2).position(|window| window == INSTRUCTION);
    let Some(at) = at else { bail!("its vDSO calls nothing") };
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
            // SAFETY: no pointers are involved; the child is ours.
            unsafe { libc::kill(pid, libc::SIGSTOP) };
            while !field("State:").starts_with('T') {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
        let after = ThreadAfter { thread: 1, processors: vec![1], no_new_privileges: true, ambient: 0 };
        match after.apply(pid) {
            Ok(()) => {
                assert_eq!(field("NoNewPrivs:"), "1");
                assert_eq!(field("Cpus_allowed_list:"), "0");
                if stopped {
                    // On its way back to where it was stopped; it does not sleep on before.
                    while !field("State:").starts_with('T') {
                        assert!(!field("State:").starts_with('S'), "it goes on");
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                    // SAFETY: as above.
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
