//! Orbits and tasks that several of these tests use.

use std::time::Duration;

use orrery_orbit::{Backoff, Builder, Call, Error, Fault, Future, Orbit, Restart, Scratch, Task};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::crash;

pub(crate) fn orbit(entry: impl Fn(&mut Task<'_>) -> i64 + Send + Sync + 'static) -> Orbit {
    Orbit::builder("test").entry(entry).create().unwrap()
}

pub(crate) fn restarting(builder: Builder) -> Builder {
    builder.restart(Restart::OnCrash(Backoff { limit: None, longest: Duration::ZERO, ..Backoff::default() }))
}

pub(crate) fn fault(result: Result<i64, Error>) -> Fault {
    match result {
        Err(Error::Fault { fault, .. }) => fault,
        other => panic!("not a fault: {other:?}"),
    }
}

/// 0 returns, 1 crashes, 2 exits with 0, 3 hangs; a task that hangs says before that it has begun.
pub(crate) fn obey(task: &mut Task<'_>) -> i64 {
    match task.arguments()[0] {
        1 => crash(),
        2 => std::process::exit(0),
        3 => {
            task.send(Scratch::new().data(b"begun")).unwrap();
            loop {
                std::hint::spin_loop();
            }
        }
        other => i64::from(other),
    }
}

pub(crate) fn obeying(arguments: &[u8]) -> Call<'_> {
    Call::new().function(obey).arguments(arguments)
}

/// A task that hangs, and has begun to.
pub(crate) fn hanging(orbit: &Orbit) -> Future {
    let future = orbit.call_async(&obeying(&[3])).unwrap();
    assert_eq!(future.receive().unwrap().unwrap().len(), 1);
    future
}

pub(crate) fn kill(pid: u32) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL).unwrap();
}
