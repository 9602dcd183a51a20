//! Sudden deaths at every step of a program's start: a tracer stops the program at each of its system calls, and kills it, or
//! the store.

use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use crate::tracer::{call, can_trace};
use crate::{Store, eventually, signal};

/// Most steps at which a store is killed, and a program.
const STORES: usize = 12;
const PROGRAMS: usize = 40;

/// Returns a program that starts by itself, under a tracer.
fn program(store: &Store) -> Command {
    let printed = Command::new(env!("CARGO_BIN_EXE_orrery"))
        .args(["orc", "run", "--print", "--directory"])
        .arg(store.path())
        .output()
        .unwrap();
    assert!(printed.status.success(), "{printed:?}");
    let text = String::from_utf8(printed.stdout).unwrap();
    let mut command = Command::new("/bin/echo");
    command.arg("hello").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    command.envs(text.lines().filter_map(|line| line.split_once('=')));
    // SAFETY: one system call between fork and exec.
    unsafe {
        command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    command
}

fn pid(child: &Child) -> i32 {
    i32::try_from(child.id()).unwrap()
}

/// Runs the program from stop to stop until `act` says that it is enough, then lets it go; its calls, and what it said.
#[expect(clippy::zombie_processes, reason = "it is waited for by waitpid, which tells of its stops, too")]
fn trace(mut command: Command, mut act: impl FnMut(usize, i32) -> bool) -> (Vec<Option<i64>>, String, bool) {
    let mut child = command.spawn().unwrap();
    let pid = pid(&child);
    let mut calls = Vec::new();
    let mut status = 0;
    loop {
        // SAFETY: a child of this thread, which traces it.
        let ended = unsafe {
            assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
            !libc::WIFSTOPPED(status)
        };
        if ended {
            break;
        }
        calls.push(call(pid));
        let request = if act(calls.len() - 1, pid) { libc::PTRACE_DETACH } else { libc::PTRACE_SYSCALL };
        // SAFETY: a child of this thread, which traces it; if it was killed meanwhile, waitpid reports that.
        unsafe { libc::ptrace(request, pid, 0, 0) };
    }
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    let success = libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
    (calls, said, success)
}

/// At most `most` of the steps from `first` on, the same distance apart; all of them where the environment wants it
/// (`ORRERY_STEPS=1`, as `make soak` has it).
pub(crate) fn some(first: usize, last: usize, most: usize) -> impl Iterator<Item = usize> {
    let most = if std::env::var_os("ORRERY_STEPS").is_some() { last } else { most };
    (first..last).step_by((last - first).div_ceil(most).max(1))
}

/// Both processes of a store, with nobody left to start either again.
fn kill_store(store: &mut Store, server: i32) {
    signal(server, libc::SIGSTOP);
    store.supervisor.kill().unwrap();
    store.supervisor.wait().unwrap();
    signal(server, libc::SIGKILL);
}

#[test]
fn a_program_starts_whenever_the_store_dies() {
    if !can_trace() {
        return;
    }
    for warm in [false, true] {
        let prepared = || {
            let store = Store::new(&[]);
            let _ = store.client();
            if warm {
                assert!(trace(program(&store), |_, _| true).2);
            }
            store
        };
        let store = prepared();
        let (calls, said, success) = trace(program(&store), |_, _| false);
        assert!(success && said == "hello\n");
        drop(store);
        // From the first word to the store, where there is one.
        let connect = calls.iter().position(|call| *call == Some(libc::SYS_connect));
        let first = connect.unwrap_or(calls.len() / 2);
        for step in some(first, calls.len(), STORES) {
            let mut store = prepared();
            let server = store.server();
            let (_, said, success) = trace(program(&store), |at, _| {
                let is_now = at == step;
                if is_now {
                    kill_store(&mut store, server);
                }
                is_now
            });
            assert!(success && said == "hello\n", "warm {warm}, step {step} of {}", calls.len());
        }
    }
}

#[test]
fn the_store_lives_whenever_a_program_dies() {
    if !can_trace() {
        return;
    }
    let store = Store::new(&["--keep", "0"]);
    let client = store.client();
    let server = store.server();
    // With nothing kept from one to the next, each start is the first.
    let (calls, ..) = trace(program(&store), |_, _| false);
    for step in some(0, calls.len(), PROGRAMS) {
        let (_, said, _) = trace(program(&store), |at, pid| {
            if at == step {
                signal(pid, libc::SIGKILL);
            }
            false
        });
        assert!(said.is_empty() || said == "hello\n", "step {step}: {said}");
    }
    assert_eq!(i32::try_from(client.report().unwrap().pid).unwrap(), server);
    eventually("nobody holds anything", || {
        client.report().unwrap().objects.iter().all(|object| object.holders.is_empty())
    });
    assert_eq!(trace(program(&store), |_, _| true).1, "hello\n");
}
