//! What main gets when a task crashes, exits, hangs or is killed.

use std::time::Duration;

use orrery_orbit::{Area, AreaOptions, Call, Error, Fault, Orbit, Record, Scratch, Task};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{area, childless, crash, ends, number, read};
use crate::support::{fault, hanging, kill, obey, obeying, orbit, restarting};

pub(crate) fn a_bad_pointer_is_named() {
    let orbit = orbit(|_| crash());
    let fault = fault(orbit.call(&Call::new()));
    let Fault::Signal { signal: libc::SIGSEGV, address: Some(0x1234_5000), instruction: Some(at), .. } =
        fault
    else {
        panic!("{fault:?}");
    };
    assert!(at != 0);
}

/// Where a task crashed is told by module, offset and symbol, and what main has at the address by name.
pub(crate) fn a_crash_has_module_symbol_and_memory() {
    #[inline(never)]
    fn reads_what_it_must_not(task: &mut Task<'_>) -> i64 {
        // SAFETY: not at all; it ends the process, as is wanted.
        unsafe { task.pointer::<i64>().unwrap().read_volatile() }
    }
    static READ_ONLY: [u64; 2] = [1, 2];
    let orbit = restarting(Orbit::builder("test")).entry(reads_what_it_must_not).create().unwrap();
    let told = |address: usize| fault(orbit.call(&Call::new().arguments(&address.to_ne_bytes()))).to_string();
    let program = std::env::current_exe().unwrap();
    let program = program.file_name().unwrap().to_string_lossy().into_owned();
    let text = told(8);
    assert!(text.starts_with("SIGSEGV at address 0x8 (a null pointer), in "), "{text}");
    assert!(text.contains(&format!("in {program}+0x")) && text.contains("reads_what_it_must_not"), "{text}");

    // SAFETY: a mapping at a free address.
    let later = unsafe {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        mmap_anonymous(std::ptr::null_mut(), 64 << 10, access, MapFlags::PRIVATE).unwrap()
    };
    let text = told(later.addr());
    assert!(text.contains("memory of main that was not passed: anonymous memory+0x"), "{text}");
    let mut options = AreaOptions::default();
    (options.address, options.capacity) = (Some(0x8_1000_0000), 1 << 20);
    let area = Area::new(1 << 20, &options).unwrap();
    let text = told(area.base() + 0x40);
    assert!(text.contains("0x40 bytes into the area at 0x810000000, which no call has named"), "{text}");
    assert_eq!(READ_ONLY[1], 2);
    // What died of what stays to be asked for.
    let found = orrery_domain::statistics::of_process(std::process::id()).unwrap();
    assert_eq!(found[0].last_fault.as_deref(), Some(text.as_str()));
}

/// A program that was root when it made an orbit, and is not any more, may send it no signal and ends it all the same.
pub(crate) fn a_main_without_privileges_ends_its_orbits() {
    if !rustix::process::geteuid().is_root() {
        return orrery_testing::skipped!("giving up privileges takes some");
    }
    let idle = restarting(Orbit::builder("idle")).entry(obey).create().unwrap();
    let hung = restarting(Orbit::builder("hung")).entry(obey).create().unwrap();
    let _future = hanging(&hung);
    let pids = [idle.pid().unwrap(), hung.pid().unwrap()];
    let children =
        || std::fs::read_to_string(format!("/proc/self/task/{}/children", std::process::id())).unwrap();
    assert_eq!(children().split_whitespace().count(), 4, "two orbits, two spares");
    // SAFETY: plain system calls, of the whole process.
    unsafe {
        assert_eq!(libc::setresgid(65534, 65534, 65534), 0);
        assert_eq!(libc::setresuid(65534, 65534, 65534), 0);
    }
    let refused = kill_process(Pid::from_raw(i32::try_from(pids[0]).unwrap()).unwrap(), Signal::KILL);
    assert_eq!(refused, Err(rustix::io::Errno::PERM));
    idle.destroy().unwrap();
    hung.destroy().unwrap();
    assert!(pids.into_iter().all(ends));
    assert!(childless());
}

/// An orbit has what areas hold as of its creation, where that is asked for, and again when it starts from nothing.
pub(crate) fn existing_areas_are_there_before_any_call_names_them() {
    let area = area();
    let far = {
        let mut options = AreaOptions::default();
        (options.address, options.capacity) = (Some(0x8_2000_0000), 1 << 20);
        Area::new(1 << 20, &options).unwrap()
    };
    let (near, far) = (number(&area), number(&far));
    near.set(5);
    far.set(6);
    let init = {
        let address = near.pointer().expose_provenance();
        move || {
            // SAFETY: a number in an area that the orbit has as of its creation.
            unsafe { std::ptr::with_exposed_provenance::<i64>(address).read_volatile() }
        }
    };
    let add = move |task: &mut Task<'_>| {
        let seen = *task.store::<i64>().unwrap();
        seen * 10 + read(task)
    };
    let orbit = Orbit::builder("test").existing_areas(true).init(init).entry(add).create().unwrap();
    near.set(50);
    far.set(60);
    for (number, value) in [(near, 55), (far, 56)] {
        assert_eq!(orbit.call(&Call::new().arguments(&number.address())).unwrap(), value);
    }
    assert_eq!(orbit.call(&Call::new().areas(&[&area]).arguments(&near.address())).unwrap(), 100);
}

pub(crate) fn every_crash_is_named() {
    fn raise(task: &mut Task<'_>) -> i64 {
        let signal = i32::from(task.arguments()[0]);
        if signal == libc::SIGABRT {
            std::process::abort();
        }
        // SAFETY: ends the orbit, as is wanted.
        i64::from(unsafe { libc::raise(signal) })
    }
    for signal in
        [libc::SIGABRT, libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGSYS, libc::SIGTERM]
    {
        let orbit = orbit(raise);
        let seen = fault(orbit.call(&Call::new().arguments(&[u8::try_from(signal).unwrap()])));
        assert!(
            matches!(seen, Fault::Signal { signal: other, address: None, .. } if other == signal),
            "{seen:?}"
        );
    }
}

pub(crate) fn an_exhausted_stack_is_told() {
    fn deep(n: u64) -> u64 {
        let large = std::hint::black_box([n; 1000]);
        if n == 0 { 0 } else { deep(n - 1) + large[usize::try_from(n % 1000).unwrap()] }
    }
    let orbit = orbit(|_| i64::try_from(deep(std::hint::black_box(1 << 40)) & 1).unwrap());
    assert!(matches!(
        fault(orbit.call(&Call::new())),
        Fault::Signal { signal: libc::SIGSEGV, address: Some(_), .. }
    ));
}

pub(crate) fn a_panic_is_quoted() {
    let orbit = orbit(|_| panic!("the invariant {} is broken", 7));
    assert_eq!(
        fault(orbit.call(&Call::new())),
        Fault::Panicked { message: "the invariant 7 is broken".to_owned() }
    );
}

pub(crate) fn an_exit_is_told() {
    let orbit = orbit(|_| std::process::exit(42));
    assert_eq!(fault(orbit.call(&Call::new())), Fault::Exited { status: 42 });
}

pub(crate) fn a_hang_ends_in_time() {
    let limit = Duration::from_millis(50);
    let orbit = Orbit::builder("hang").time_limit(limit).create().unwrap();
    assert_eq!(fault(orbit.call(&obeying(&[3]))), Fault::TimeLimit { limit });
}

pub(crate) fn a_hang_that_nobody_waits_for_ends_in_time() {
    let limit = Duration::from_millis(50);
    let orbit = restarting(Orbit::builder("hang").time_limit(limit)).create().unwrap();
    let pid = orbit.pid().unwrap();
    let future = hanging(&orbit);
    assert!(ends(pid), "although main does not look");
    assert_eq!(fault(future.get()), Fault::TimeLimit { limit });
    assert_eq!(orbit.call(&obeying(&[9])), Ok(9));
}

pub(crate) fn a_call_may_have_its_own_limit() {
    let orbit = restarting(Orbit::builder("hang")).create().unwrap();
    for milliseconds in [1, 20, 60] {
        let limit = Duration::from_millis(milliseconds);
        assert_eq!(fault(orbit.call(&obeying(&[3]).time_limit(limit))), Fault::TimeLimit { limit });
    }
}

pub(crate) fn a_limit_that_is_kept_harms_nothing() {
    let orbit = Orbit::builder("quick").time_limit(Duration::from_secs(30)).create().unwrap();
    for i in 10..200 {
        assert_eq!(orbit.call(&obeying(&[i])), Ok(i64::from(i)));
    }
    // An old timer must not hit a later task.
    let short = Duration::from_secs(2);
    assert_eq!(orbit.call(&obeying(&[8]).time_limit(short)), Ok(8));
    let slow = |_: &mut Task<'_>| {
        std::thread::sleep(Duration::from_millis(2_300));
        5
    };
    assert_eq!(orbit.call(&Call::new().function(slow)), Ok(5));
}

pub(crate) fn an_outside_kill_is_told() {
    let orbit = orbit(obey);
    let future = hanging(&orbit);
    kill(orbit.pid().unwrap());
    let seen = fault(future.get());
    assert!(
        matches!(seen, Fault::Signal { signal: libc::SIGKILL, address: None, instruction: None, .. }),
        "{seen:?}"
    );
}

pub(crate) fn a_kill_while_idle_is_told() {
    let orbit = orbit(obey);
    assert_eq!(orbit.call(&obeying(&[4])), Ok(4));
    kill(orbit.pid().unwrap());
    assert!(ends(orbit.pid().unwrap()));
    let error = orbit.call(&obeying(&[4])).unwrap_err();
    // Or it was still dying when the call was made.
    assert!(matches!(error, Error::Dead { .. } | Error::NotRun { .. }), "{error}");
    assert!(error.to_string().contains("SIGKILL"), "{error}");
}

pub(crate) fn updates_before_a_crash_arrive() {
    let orbit = orbit(|task| {
        let mut scratch = Scratch::new();
        task.send(scratch.data(b"first")).unwrap();
        task.send(scratch.data(&[1; 200_000])).unwrap();
        scratch.data(b"never sent");
        crash()
    });
    let finished = orbit.call_and_receive(&Call::new()).unwrap();
    assert!(matches!(fault(finished.result), Fault::Signal { .. }));
    assert_eq!(finished.updates.len(), 2);
    assert_eq!(finished.updates[0].as_ref().unwrap().records().next(), Some(Record::Data(b"first")));
    assert_eq!(finished.updates[1].as_ref().unwrap().records().next(), Some(Record::Data(&[1; 200_000])));
}
