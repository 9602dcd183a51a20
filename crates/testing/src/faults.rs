//! System calls of a running server that fail for want of a resource: the call is not made, and returns an error instead.
//!
//! A server is traced ([ptrace(2)](https://man7.org/linux/man-pages/man2/ptrace.2.html)) from when it is ready, so that its start, which
//! may fail for good, is left alone. What it executes is not traced, nor are processes that it forks.

mod plan;
mod server;

pub use plan::{MEMORY, errors_of};
pub use server::{Attempt, Server, is_thorough};

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize};

use orrery_sys::ptrace::{self, Options, Stop, Tracee};
use syscalls::Sysno;

/// No call's number: nothing is to fail.
const NONE: u64 = u64::MAX;
/// All calls of the chosen number fail.
const ALL: usize = usize::MAX;
/// Numbers of system calls are smaller.
const CALLS: usize = 1024;
/// Threads that can be in calls that are to fail at a time.
const THREADS: usize = 256;

/// Which calls of a number fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The one that comes after so many others.
    After(usize),
    /// All, as where a limit is reached and others do not release anything.
    All,
}

/// What the tracing process shares with this one. Zeros are a valid value.
#[derive(Debug)]
struct State {
    /// Calls since counting began, by their numbers.
    counts: [AtomicUsize; CALLS],
    /// The number of the call that is to fail, or `NONE`.
    call: AtomicU64,
    errno: AtomicI32,
    /// How many others come before it.
    others: AtomicUsize,
    /// How many calls were made to fail.
    failed: AtomicUsize,
    is_attached: AtomicBool,
    has_failed: AtomicBool,
    has_ended: AtomicBool,
}

/// A traced server. Dropping this leaves it alone.
#[derive(Debug)]
pub struct Faults {
    pid: i32,
    state: Shared,
    tracer: libc::pid_t,
}

/// State in memory that a forked process shares.
#[derive(Debug)]
struct Shared(*mut libc::c_void);

// SAFETY: the mapping lives as long as this, and consists of atomics.
unsafe impl Send for Shared {}
// SAFETY: the mapping lives as long as this value, and consists of atomics.
unsafe impl Sync for Shared {}

impl Shared {
    fn new() -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<State>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert!(memory != libc::MAP_FAILED, "cannot map memory: {}", std::io::Error::last_os_error());
        Self(memory)
    }

    fn state(&self) -> &State {
        // SAFETY: mapped until this is dropped, aligned to a page, and zeros are a valid value of atomics.
        unsafe { &*self.0.cast::<State>() }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made, of which no reference outlives this.
        unsafe { libc::munmap(self.0, size_of::<State>()) };
    }
}

impl Faults {
    /// Traces the threads of a process from now on, until this is dropped. `None`, which is reported as skipped: it may not be traced here.
    ///
    /// A process of its own traces: who waits for a child that another thread traces would be given the tracer's stops.
    #[must_use]
    pub fn attach(pid: i32) -> Option<Self> {
        let state = Shared::new();
        state.state().call.store(NONE, SeqCst);
        // SAFETY: the child makes system calls, and allocates, which glibc makes possible after a fork; it never returns from here.
        let tracer = unsafe { libc::fork() };
        if tracer == 0 {
            // SAFETY: system calls. It ends with the process that it works for, of whose descriptors it uses none: a pipe that a test closes
            // shall be closed.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::close_range(3, libc::c_uint::MAX, 0);
            }
            trace(pid, state.state());
            // SAFETY: ends the child at once; exit handlers of the parent do not run.
            unsafe { libc::_exit(0) };
        }
        assert!(tracer > 0, "cannot fork: {}", std::io::Error::last_os_error());
        let this = Self { pid, state, tracer };
        crate::eventually("the server is traced", || {
            this.shared().is_attached.load(SeqCst) || this.shared().has_failed.load(SeqCst)
        });
        if this.shared().has_failed.load(SeqCst) {
            crate::skipped!("process {pid} cannot be traced here");
            return None;
        }
        Some(this)
    }

    fn shared(&self) -> &State {
        self.state.state()
    }

    /// Returns the server's process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    fn clear(&self) {
        self.shared().counts.iter().for_each(|count| count.store(0, SeqCst));
        self.shared().failed.store(0, SeqCst);
    }

    /// Counts the calls that the server makes, by their numbers, while `work` is done.
    pub fn count(&self, work: impl FnOnce()) -> BTreeMap<u64, usize> {
        self.clear();
        work();
        let counts = self.shared().counts.iter().map(|count| count.load(SeqCst));
        (0..).zip(counts).filter(|(_, count)| *count > 0).collect()
    }

    /// Has a call fail while `work` is done, and returns how often it has.
    pub fn fail(&self, call: u64, errno: i32, which: Which, work: impl FnOnce()) -> usize {
        self.clear();
        let state = self.shared();
        state.errno.store(errno, SeqCst);
        state.others.store(if let Which::After(others) = which { others } else { ALL }, SeqCst);
        state.call.store(call, SeqCst);
        work();
        state.call.store(NONE, SeqCst);
        state.failed.load(SeqCst)
    }

    /// Returns whether the server has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.shared().has_ended.load(SeqCst)
    }
}

impl Drop for Faults {
    fn drop(&mut self) {
        // SAFETY: ends and reaps a child of this process, which nobody else waits for.
        unsafe {
            libc::kill(self.tracer, libc::SIGKILL);
            libc::waitpid(self.tracer, std::ptr::null_mut(), 0);
        }
    }
}

/// Traces every thread of a process, those that come while it is looked at included; whether it could.
fn seize(pid: i32) -> bool {
    let options = Options::TRACE_SYSCALL_GOOD | Options::TRACE_CLONE;
    let (mut known, mut is_traced) = (Vec::new(), false);
    loop {
        let before = known.len();
        for entry in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let Some(thread) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if known.contains(&thread) {
                continue;
            }
            known.push(thread);
            // One that a traced thread has made is traced already.
            if let Ok(tracee) = Tracee::seize(thread, options) {
                is_traced |= tracee.interrupt().is_ok();
            }
        }
        if known.len() == before {
            return is_traced;
        }
    }
}

/// Traces until the process has ended.
fn trace(leader: i32, state: &State) {
    if !seize(leader) {
        return state.has_failed.store(true, SeqCst);
    }
    state.is_attached.store(true, SeqCst);
    // Threads in calls that are to return an error.
    let mut failing = [(0, 0); THREADS];
    while let Some((tracee, stop)) = ptrace::wait_for_any() {
        let passed_on = match stop {
            Stop::Call => {
                at_call(&tracee, state, &mut failing);
                0
            }
            Stop::Signal(signal) => signal,
            Stop::Group => {
                tracee.listen();
                continue;
            }
            Stop::Gone => {
                failing.iter_mut().filter(|(thread, _)| *thread == tracee.pid()).for_each(|one| one.0 = 0);
                if tracee.pid() == leader {
                    state.has_ended.store(true, SeqCst);
                }
                continue;
            }
            Stop::Exec | Stop::Other => 0,
        };
        // Where it was killed meanwhile, its end is reported next.
        let _gone = tracee.resume_to_syscall(passed_on);
    }
    state.has_ended.store(true, SeqCst);
}

/// Has a thread return from its call with an error, where it has made another one instead; counts the call that it enters.
fn at_call(tracee: &Tracee, state: &State, failing: &mut [(i32, i32); THREADS]) {
    let Some(call) = tracee.entered_call() else {
        if let Some(one) = failing.iter_mut().find(|(thread, _)| *thread == tracee.pid())
            && let Ok(mut registers) = tracee.registers()
        {
            one.0 = 0;
            registers.rax = i64::from(-one.1).cast_unsigned();
            let _gone = tracee.set_registers(&registers);
        }
        return;
    };
    let count = usize::try_from(call).ok().and_then(|call| state.counts.get(call));
    let before = count.map_or(0, |count| count.fetch_add(1, SeqCst));
    let others = state.others.load(SeqCst);
    if state.call.load(SeqCst) != call || others != ALL && others != before {
        return;
    }
    if call == u64::from(Sysno::read as u32) && reads_pipe(tracee) {
        return;
    }
    let Some(one) = failing.iter_mut().find(|(thread, _)| *thread == 0) else { return };
    *one = (tracee.pid(), state.errno.load(SeqCst));
    state.failed.fetch_add(1, SeqCst);
    // Not -1, which filters of system calls see, and kill for.
    if let Ok(mut registers) = tracee.registers() {
        registers.orig_rax = u64::from(Sysno::getpid as u32);
        let _gone = tracee.set_registers(&registers);
    }
}

/// Returns whether a thread is about to read from a pipe, which needs no resource. The standard library relies on
/// that where it spawns a process.
fn reads_pipe(tracee: &Tracee) -> bool {
    let Ok(registers) = tracee.registers() else { return false };
    let link = std::fs::read_link(format!("/proc/{}/fd/{}", tracee.pid(), registers.rdi));
    link.is_ok_and(|link| link.to_string_lossy().starts_with("pipe:"))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::process::{Command, Stdio};

    use super::*;

    /// A shell answers each line; its writes fail as they are told to, and its end is left to its parent.
    #[test]
    fn chosen_calls_fail_and_no_others() {
        let script = "while read line; do echo $line || echo failed; done";
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = shell.stderr(Stdio::null()).spawn().expect("a shell");
        let mut input = shell.stdin.take().expect("a pipe");
        let mut output = BufReader::new(shell.stdout.take().expect("a pipe")).lines();
        let attached = Faults::attach(i32::try_from(shell.id()).expect("a PID"));
        let Some(faults) = attached else {
            drop(input);
            shell.wait().expect("the shell's parent waits for it");
            return;
        };
        let mut answer = |line: &str| {
            writeln!(input, "{line}").expect("the shell reads");
            output.next().expect("the shell lives").expect("text")
        };
        let write = u64::from(Sysno::write as u32);
        let counts = faults.count(|| assert_eq!(answer("one"), "one"));
        assert_eq!(counts.get(&write), Some(&1));
        let failed = faults.fail(write, libc::ENOSPC, Which::After(0), || {
            assert_eq!(answer("two"), "failed");
            assert_eq!(answer("three"), "three");
        });
        assert_eq!(failed, 1);
        assert_eq!(faults.fail(write, libc::ENOSPC, Which::After(7), || drop(answer("four"))), 0);
        assert!(!faults.has_ended());
        drop(input);
        let status = shell.wait().expect("the shell's parent waits for it");
        assert!(status.success(), "{status}");
        crate::eventually("the end is noticed", || faults.has_ended());
    }
}
