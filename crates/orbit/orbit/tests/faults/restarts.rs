//! Whether and how an orbit that died comes back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use orrery_orbit::{Backoff, Call, Error, Fault, Life, Orbit, Restart};
use rustix::process::Pid;

use crate::common::{area, childless, crash, number, number_on_its_page, read};
use crate::support::{fault, hanging, kill, obey, obeying, orbit, restarting};

pub(crate) fn a_dead_orbit_stays_dead_by_policy() {
    let orbit = orbit(obey);
    let first = fault(orbit.call(&obeying(&[1])));
    for _ in 0..3 {
        let error = orbit.call(&obeying(&[4])).unwrap_err();
        assert_eq!(error, Error::Dead { orbit: "test".to_owned(), fault: first.clone(), restarts: 0 });
    }
    assert_eq!(orbit.life(), Ok(Life::Down { fault: first }));
}

pub(crate) fn queued_calls_of_a_dead_orbit_fail() {
    let orbit = orbit(obey);
    let running = hanging(&orbit);
    let waiting: Vec<_> = (0..5).map(|_| orbit.call_async(&obeying(&[4])).unwrap()).collect();
    kill(orbit.pid().unwrap());
    fault(running.get());
    for future in &waiting {
        assert!(matches!(future.get(), Err(Error::NotRun { .. })));
    }
}

pub(crate) fn a_crash_is_followed_by_a_fresh_instance() {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let area = area();
    let number = number(&area);
    let orbit = restarting(Orbit::builder("phoenix"))
        .init(|| SERIAL.fetch_add(1, Ordering::SeqCst))
        .entry(|task| {
            let seen = read(task);
            *task.store::<u64>().unwrap() += 1;
            if seen % 5 == 4 {
                crash()
            } else {
                seen * 100 + i64::try_from(*task.store::<u64>().unwrap()).unwrap()
            }
        })
        .create()
        .unwrap();
    let mut store = 0;
    for i in 0..60 {
        number.set(i);
        let result = orbit.call(&Call::new().areas(&[&area]).arguments(&number.address()));
        if i % 5 == 4 {
            assert!(matches!(fault(result), Fault::Signal { .. }));
            store = 0;
        } else {
            store += 1;
            assert_eq!(result, Ok(i * 100 + store), "a fresh store, and main's state");
        }
    }
    assert_eq!(orbit.restarts(), Ok(12));
}

pub(crate) fn an_exit_is_followed_only_if_always() {
    let quick = Backoff { longest: Duration::ZERO, ..Backoff::default() };
    let orbit = Orbit::builder("exits").restart(Restart::OnCrash(quick)).create().unwrap();
    assert_eq!(fault(orbit.call(&obeying(&[2]))), Fault::Exited { status: 0 });
    assert!(matches!(orbit.call(&obeying(&[7])), Err(Error::Dead { .. })));
    let orbit = Orbit::builder("exits").restart(Restart::Always(quick)).create().unwrap();
    assert_eq!(fault(orbit.call(&obeying(&[2]))), Fault::Exited { status: 0 });
    assert_eq!(orbit.call(&obeying(&[7])), Ok(7));
}

pub(crate) fn calls_that_wait_survive_a_restart() {
    let area = area();
    let number = number(&area);
    let orbit = restarting(Orbit::builder("phoenix")).entry(read).create().unwrap();
    let areas = [&area];
    let bytes = number.address();
    let running = hanging(&orbit);
    let waiting: Vec<_> = (0..30)
        .map(|i| {
            number.set(i);
            let call = Call::new().areas(&areas).arguments(&bytes);
            // Every fourth takes the orbit down again.
            orbit.call_async(&if i % 4 == 3 { call.function(|_| crash()) } else { call }).unwrap()
        })
        .collect();
    number.set(-1);
    kill(orbit.pid().unwrap());
    fault(running.get());
    for (i, future) in (0..).zip(&waiting) {
        if i % 4 == 3 {
            fault(future.get());
        } else {
            assert_eq!(future.get(), Ok(i), "each still sees its own moment");
        }
    }
}

pub(crate) fn the_pages_of_a_crashed_call_are_not_lost() {
    let area = area();
    let (first, second) = (number_on_its_page(&area), number_on_its_page(&area));
    let orbit = restarting(Orbit::builder("phoenix")).entry(read).create().unwrap();
    let areas = [&area];
    let running = hanging(&orbit);
    first.set(1);
    let crashing = orbit.call_async(&Call::new().areas(&areas).function(|_| crash())).unwrap();
    second.set(2);
    // This one's delta has the second page only: the first came with the call that crashes.
    let bytes = first.address();
    let last = orbit.call_async(&Call::new().areas(&areas).arguments(&bytes)).unwrap();
    kill(orbit.pid().unwrap());
    fault(running.get());
    fault(crashing.get());
    assert_eq!(last.get(), Ok(1));
    assert_eq!(orbit.call(&Call::new().areas(&areas).arguments(&second.address())), Ok(2));
}

pub(crate) fn a_crash_of_a_thread_of_the_task_is_told() {
    let orbit = orbit(|_| std::thread::spawn(crash).join().unwrap_or(0));
    assert!(matches!(
        fault(orbit.call(&Call::new())),
        Fault::Signal { signal: libc::SIGSEGV, address: Some(_), .. }
    ));
}

pub(crate) fn restarts_give_up() {
    let backoff = Backoff { longest: Duration::ZERO, limit: Some(3), ..Backoff::default() };
    let orbit = Orbit::builder("hopeless").restart(Restart::OnCrash(backoff)).create().unwrap();
    for _ in 0..4 {
        fault(orbit.call(&obeying(&[1])));
    }
    let error = orbit.call(&obeying(&[1])).unwrap_err();
    assert!(matches!(error, Error::Dead { restarts: 3, .. }), "{error}");
    assert!(error.to_string().contains("after 3 restarts"), "{error}");
}

pub(crate) fn back_off_is_waited_for() {
    let backoff = Backoff { first: Duration::from_millis(60), ..Backoff::default() };
    let orbit = Orbit::builder("slow").restart(Restart::OnCrash(backoff)).create().unwrap();
    fault(orbit.call(&obeying(&[1])));
    let begin = Instant::now();
    fault(orbit.call(&obeying(&[1])));
    // The second restart in a row is not before its time, and calls wait for it.
    assert_eq!(orbit.call(&obeying(&[4])), Ok(4));
    assert!(begin.elapsed() >= Duration::from_millis(60), "{:?}", begin.elapsed());
}

pub(crate) fn a_crashing_init_fails_creation() {
    let error = Orbit::builder("bad").init(crash).create().unwrap_err();
    assert!(
        matches!(error, Error::Init { fault: Fault::Signal { signal: libc::SIGSEGV, .. }, .. }),
        "{error}"
    );
    let error = restarting(Orbit::builder("bad")).init(|| panic!("no store")).create().unwrap_err();
    assert!(error.to_string().contains("no store"), "{error}");
    assert!(childless(), "no process is left");
}

pub(crate) fn a_hanging_init_fails_creation() {
    let limit = Duration::from_millis(100);
    let error = Orbit::builder("bad")
        .init(|| std::thread::sleep(Duration::from_secs(100)))
        .init_limit(limit)
        .create()
        .unwrap_err();
    assert_eq!(error, Error::Init { orbit: "bad".to_owned(), fault: Fault::TimeLimit { limit } });
}

pub(crate) fn an_init_that_crashes_later_ends_in_an_error() {
    let shared = orrery_domain::SharedMemory::new("counter", 4096).unwrap();
    let count = move || {
        // SAFETY: it is a page, begins with zeros, and lives as long as the closure has it.
        let counter = unsafe { shared.start().cast::<AtomicU64>().as_ref() };
        counter.fetch_add(1, Ordering::SeqCst)
    };
    let backoff = Backoff { first: Duration::from_millis(1), limit: Some(4), ..Backoff::default() };
    let orbit = Orbit::builder("bad")
        .restart(Restart::Always(backoff))
        .init(move || if count() > 0 { crash() } else { 0 })
        .create()
        .unwrap();
    fault(orbit.call(&obeying(&[1])));
    let error = orbit.call(&obeying(&[4])).unwrap_err();
    assert!(matches!(error, Error::NotRun { .. } | Error::Dead { .. }), "{error}");
}

pub(crate) fn a_dead_spare_ends_in_an_error() {
    let orbit = restarting(Orbit::builder("spare")).create().unwrap();
    let children =
        std::fs::read_to_string(format!("/proc/self/task/{}/children", std::process::id())).unwrap();
    let own = orbit.pid().unwrap().to_string();
    let spare = children.split_whitespace().find(|pid| **pid != own).unwrap().parse().unwrap();
    kill(spare);
    assert_eq!(orbit.call(&obeying(&[4])), Ok(4), "the living need no spare");
    fault(orbit.call(&obeying(&[1])));
    let error = orbit.call(&obeying(&[4])).unwrap_err();
    assert!(matches!(error, Error::Dead { .. } | Error::NotRun { .. }), "{error}");
}

pub(crate) fn no_process_for_a_restart_ends_in_an_error() {
    // Root is exempt from RLIMIT_NPROC, nobody is not.
    let nobody = 65_534;
    // SAFETY: takes numbers; the process is this case's own.
    if unsafe { libc::setresuid(nobody, nobody, nobody) } != 0 {
        orrery_testing::skipped!("not run as root");
        return;
    }
    let backoff = Backoff { first: Duration::from_millis(1), limit: Some(3), ..Backoff::default() };
    let orbit = Orbit::builder("crowded").restart(Restart::Always(backoff)).create().unwrap();
    let children =
        std::fs::read_to_string(format!("/proc/self/task/{}/children", std::process::id())).unwrap();
    for pid in children.split_whitespace() {
        let pid = Pid::from_raw(pid.parse().unwrap());
        let resource = rustix::process::Resource::Nproc;
        let none = rustix::process::Rlimit {
            current: Some(0),
            maximum: rustix::process::getrlimit(resource).maximum,
        };
        rustix::process::prlimit(pid, resource, none).unwrap();
    }
    fault(orbit.call(&obeying(&[1])));
    let error = orbit.call(&obeying(&[4])).unwrap_err();
    assert!(error.to_string().contains("RLIMIT_NPROC") && error.to_string().contains("SIGSEGV"), "{error}");
}
