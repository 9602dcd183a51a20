//! A process that is stopped before each of its system calls, whichever thread makes it.

use std::collections::BTreeSet;

use crate::signal;

/// `PTRACE_O_TRACESYSGOOD`, `PTRACE_O_TRACECLONE`, and `PTRACE_O_EXITKILL`: it ends with the thread that traces it.
const OPTIONS: i64 = 1 | 8 | 0x10_0000;
/// What a stop at a system call looks like with these options.
const AT_CALL: i32 = libc::SIGTRAP | 0x80;
/// `PTRACE_EVENT_STOP` in ptrace(2).
const STOPPED: i32 = 128;

fn ptrace(request: u32, pid: i32, data: i64) -> bool {
    // SAFETY: requests that take a number and no memory of ours.
    unsafe { libc::ptrace(request, pid, 0, data) == 0 }
}

/// Returns the number of the system call before which a stopped thread stands; none behind one.
pub(crate) fn call(pid: i32) -> Option<i64> {
    const ENTRY: u8 = 1;
    let mut info = [0_u8; 88];
    // SAFETY: the kernel writes as many bytes as it is told that there are.
    let size = unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, pid, info.len(), info.as_mut_ptr()) };
    let is_entry = size >= 32 && info[0] == ENTRY;
    is_entry.then(|| i64::from_ne_bytes(info[24..32].try_into().unwrap()))
}

/// Traces every thread of a process, those that come while it is looked at included; whether it could.
fn seize(pid: i32) -> bool {
    let (mut known, mut traced) = (BTreeSet::new(), false);
    loop {
        let before = known.len();
        for entry in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let thread: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
            // One that a traced thread has made is traced already.
            if known.insert(thread) && ptrace(libc::PTRACE_SEIZE, thread, OPTIONS) {
                traced |= ptrace(libc::PTRACE_INTERRUPT, thread, 0);
            }
        }
        if known.len() == before {
            return traced;
        }
    }
}

/// Traces the process from here on to its end, which `act` or somebody else has to bring about. `begun` is called once it is traced,
/// `act` before each system call, with its number among all; how many there were. None where it cannot be traced.
pub(crate) fn trace_all(pid: i32, begun: impl FnOnce(), mut act: impl FnMut(usize)) -> Option<usize> {
    if !seize(pid) {
        return None;
    }
    begun();
    let mut calls = 0;
    loop {
        let mut status = 0;
        // SAFETY: waits for what this thread traces alone: other tests' children are theirs to wait for.
        let thread = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
        if thread < 0 {
            return Some(calls);
        }
        if !libc::WIFSTOPPED(status) {
            continue;
        }
        let (by, event) = (libc::WSTOPSIG(status), status >> 16);
        let passed_on = match event {
            0 if by == AT_CALL => {
                if call(thread).is_some() {
                    act(calls);
                    calls += 1;
                }
                0
            }
            0 => by,
            STOPPED if by != libc::SIGTRAP => {
                ptrace(libc::PTRACE_LISTEN, thread, 0);
                continue;
            }
            _ => 0,
        };
        // Where it was killed meanwhile its end is told of next.
        ptrace(libc::PTRACE_SYSCALL, thread, i64::from(passed_on));
    }
}

/// Returns whether processes can be traced here; else says so.
pub(crate) fn can_trace() -> bool {
    let mut child = std::process::Command::new("/bin/sleep").arg("1000").spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    let can = std::thread::spawn(move || trace_all(pid, || signal(pid, libc::SIGKILL), |_| {}).is_some());
    let can = can.join().unwrap();
    if !can {
        orrery_testing::skipped!("processes cannot be traced here");
        signal(pid, libc::SIGKILL);
    }
    // Who traces a child has waited for it, too.
    let _ = child.wait();
    can
}
