//! What is left of an orbit that has ended, and of what it forked.

use std::time::Duration;

use orrery_orbit::{Area, Call, Orbit, Task};

use crate::common::{area, childless, crash, ends, number, read};
use crate::support::{fault, kill, obeying, orbit, restarting};

pub(crate) fn a_killed_orbit_leaves_nothing_behind() {
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let area = area();
    let number = number(&area);
    let round = |area: &Area| {
        let orbit = restarting(Orbit::builder("gone")).entry(read).create().unwrap();
        let areas = [area];
        let bytes = number.address();
        assert!(orbit.call(&Call::new().areas(&areas).arguments(&bytes)).is_ok());
        fault(orbit.call(&obeying(&[1])));
        let waiting: Vec<_> = (0..5)
            .map(|_| {
                number.set(number.get() + 1);
                orbit.call_async(&Call::new().areas(&areas).arguments(&bytes)).unwrap()
            })
            .collect();
        kill(orbit.pid().unwrap());
        drop(orbit);
        drop(waiting);
    };
    for _ in 0..3 {
        round(&area);
    }
    let (files_before, mappings_before) = (files(), mappings());
    for _ in 0..10 {
        round(&area);
    }
    assert_eq!(files(), files_before);
    assert!(mappings() <= mappings_before + 4, "{} and {mappings_before}", mappings());
    assert!(childless(), "no child is left");
}

pub(crate) fn a_fork_of_the_orbit_may_outlive_its_task() {
    let orbit = orbit(|_| {
        // SAFETY: the child sleeps and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            std::thread::sleep(Duration::from_millis(30));
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) }
        }
        i64::from(child)
    });
    for _ in 0..5 {
        assert!(orbit.call(&Call::new()).unwrap() > 0);
    }
}

/// Forks; the child returns, panics or crashes by the argument's first byte, and the task returns its wait status.
fn fork_and_return(task: &mut Task<'_>) -> i64 {
    let way = task.arguments()[0];
    // SAFETY: the child returns as the task would, which is what the case is about.
    let child = unsafe { libc::fork() };
    if child == 0 {
        match way {
            0 => return 1_000_000,
            1 => panic!("in the child"),
            _ => return crash(),
        }
    }
    let mut status = 0;
    // SAFETY: waits for our child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    i64::from(status)
}

pub(crate) fn a_child_that_returns_from_its_task_is_not_the_orbit() {
    let orbit = orbit(fork_and_return);
    let pid = orbit.pid().unwrap();
    for _ in 0..3 {
        for (way, wanted) in [(0, 0), (1, 101 << 8), (2, i64::from(libc::SIGSEGV))] {
            let status = orbit.call(&Call::new().arguments(&[way])).unwrap();
            let core_dumped = 0x80;
            assert_eq!(status & !core_dumped, wanted, "way {way}");
        }
    }
    // What a child noted of its end is not what the orbit dies of.
    kill(pid);
    let error = orbit.call(&Call::new().arguments(&[0])).unwrap_err();
    assert!(error.to_string().contains("SIGKILL"), "{error}");
}

/// Forks a child that sleeps, and spawns a program that does; gives their numbers.
#[expect(clippy::zombie_processes, reason = "who ends it is the case's question")]
fn leave_two_behind(_: &mut Task<'_>) -> i64 {
    // SAFETY: the child sleeps until it is killed.
    let child = unsafe { libc::fork() };
    if child == 0 {
        std::thread::sleep(Duration::from_secs(1000));
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) }
    }
    let program = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    i64::from(child) << 32 | i64::from(program.id())
}

fn two(pids: i64) -> [u32; 2] {
    [u32::try_from(pids >> 32).unwrap(), u32::try_from(pids & i64::from(u32::MAX)).unwrap()]
}

pub(crate) fn what_a_task_forked_ends_with_the_orbit() {
    let orbit = restarting(Orbit::builder("forks")).entry(leave_two_behind).create().unwrap();
    let crashed = two(orbit.call(&Call::new()).unwrap());
    fault(orbit.call(&obeying(&[1])));
    let destroyed = two(orbit.call(&Call::new()).unwrap());
    for pid in crashed {
        assert!(ends(pid), "it outlived a crash and the restart");
    }
    drop(orbit);
    for pid in destroyed {
        assert!(ends(pid), "it outlived the orbit");
    }
}

pub(crate) fn what_a_task_forked_ends_with_main() {
    let (reader, writer) = std::io::pipe().unwrap();
    // SAFETY: this process has one thread.
    let main = unsafe { libc::fork() };
    if main == 0 {
        use std::io::Write as _;
        let orbit = orbit(leave_two_behind);
        let [forked, spawned] = two(orbit.call(&Call::new()).unwrap());
        // Without the orbit's end nobody ends what does not run our fork handlers.
        kill(spawned);
        (&writer).write_all(&forked.to_ne_bytes()).unwrap();
        loop {
            std::thread::park();
        }
    }
    drop(writer);
    let mut forked = [0; 4];
    std::io::Read::read_exact(&mut &reader, &mut forked).unwrap();
    kill(main.cast_unsigned());
    assert!(ends(u32::from_ne_bytes(forked)), "it outlived main");
    assert!(rustix::process::wait(rustix::process::WaitOptions::empty()).is_ok());
}
