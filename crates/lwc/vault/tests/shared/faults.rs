//! A keeper, and its spare, whose system calls fail for want of a resource.

use std::time::Duration;

use orrery_testing::faults::{Faults, Server, Which};
use syscalls::Sysno;

use super::{call, in_child, kill, number, vault};

/// Does something in a process of its own, which has a new twin, and ends it after so many seconds: a request waits in the socket as long as
/// the keeper cannot receive it.
fn in_new_client(seconds: u32, work: impl FnOnce() -> bool) -> bool {
    in_child(|| {
        // SAFETY: a system call without pointers; the signal ends this child.
        unsafe { libc::alarm(seconds) };
        work()
    })
}

pub(super) fn keepers_survive_each_failing_call() {
    let vault = vault();
    vault.load(b"key").unwrap();
    let keeper = number(vault.load(b"pid").unwrap());
    let Some(faults) = Faults::attach(keeper) else { return };
    let reached = Server {
        faults: &faults,
        work: &mut || {
            // Either may fail, and says so.
            in_new_client(1, || call(&vault, b"x").is_ok());
            in_new_client(1, || vault.load(b"pid").is_ok());
        },
        serves: &mut || {
            orrery_testing::eventually("a new client is answered", || {
                in_new_client(60, || call(&vault, b"x").is_ok_and(|answer| answer == b"keyx"))
            });
            orrery_testing::eventually("the same keeper loads", || {
                in_new_client(60, || vault.load(b"pid").is_ok_and(|pid| number(pid) == keeper))
            });
        },
        spared: &[],
        log: &String::new,
    }
    .survives_each_failure();
    assert!(reached >= 4, "{reached}");
}

/// Descriptors are short at the moment at which a keeper dies: its spare has the secrets, and nobody else.
pub(super) fn a_spare_waits_for_a_descriptor() {
    let vault = vault();
    vault.load(b"key").unwrap();
    let keeper = number(vault.load(b"pid").unwrap());
    let children = std::fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).unwrap();
    let spare: i32 = children.trim().parse().unwrap();
    let Some(faults) = Faults::attach(spare) else { return };
    for (call_number, errno) in [(Sysno::pidfd_open, libc::EMFILE), (Sysno::poll, libc::ENOMEM)] {
        let die = call_number == Sysno::pidfd_open;
        let failed = faults.fail(u64::from(call_number as u32), errno, Which::All, || {
            if die {
                kill(keeper);
            }
            std::thread::sleep(Duration::from_millis(400));
        });
        assert!(failed > 0 || !die, "{call_number} was not called");
        assert!(!faults.has_ended(), "the secrets are gone");
    }
    assert_eq!(call(&vault, b"x").unwrap(), b"keyx");
    assert_eq!(number(vault.load(b"pid").unwrap()), spare);
}
