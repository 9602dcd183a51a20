//! What main gets when an orbit crashes, hangs, starves or lies, and that it comes back.

#![expect(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{area, childless, crash, ends, number, number_on_its_page, read};
use orrery_orbit::{
    Area, AreaOptions, Backoff, Builder, Call, Error, Fault, Future, Life, Limits, Means, Orbit, Record,
    Restart, Scratch, Task,
};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::process::{Pid, Signal, kill_process};

orrery_testing::cases![
    seconds = 120, trackers = orrery_testing::TRACKERS;
    a_bad_pointer_is_named,
    a_crash_has_module_symbol_and_memory,
    a_main_without_privileges_ends_its_orbits,
    existing_areas_are_there_before_any_call_names_them,
    every_crash_is_named,
    an_exhausted_stack_is_told,
    a_panic_is_quoted,
    an_exit_is_told,
    a_hang_ends_in_time,
    a_hang_that_nobody_waits_for_ends_in_time,
    a_call_may_have_its_own_limit,
    a_limit_that_is_kept_harms_nothing,
    too_much_memory_is_told,
    what_a_task_sees_is_not_memory_of_its_own,
    a_limit_on_data_leaves_room_for_orbits,
    too_much_processor_time_is_told,
    an_outside_kill_is_told,
    a_kill_while_idle_is_told,
    updates_before_a_crash_arrive,
    a_dead_orbit_stays_dead_by_policy,
    queued_calls_of_a_dead_orbit_fail,
    a_crash_is_followed_by_a_fresh_instance,
    an_exit_is_followed_only_if_always,
    calls_that_wait_survive_a_restart,
    the_pages_of_a_crashed_call_are_not_lost,
    a_crash_of_a_thread_of_the_task_is_told,
    restarts_give_up,
    back_off_is_waited_for,
    a_crashing_init_fails_creation,
    a_hanging_init_fails_creation,
    an_init_that_crashes_later_ends_in_an_error,
    a_dead_spare_ends_in_an_error,
    no_process_for_a_restart_ends_in_an_error,
    no_room_for_files_is_an_error,
    a_core_dump_stays_small,
    many_orbits_live_side_by_side,
    waiting_threads_all_learn_of_a_crash,
    a_stopped_orbit_holds_up_no_call_without_a_value,
    updates_that_nobody_receives_are_bounded,
    dead_orbits_whose_handles_are_kept_take_no_addresses,
    corrupted_memory_is_noticed,
    a_corrupted_orbit_comes_back_clean,
    scribbling_over_all_shared_memory_makes_no_processes,
    an_orbit_cannot_write_to_the_memory_of_another,
    a_killed_orbit_leaves_nothing_behind,
    a_fork_of_the_orbit_may_outlive_its_task,
    a_child_that_returns_from_its_task_is_not_the_orbit,
    what_a_task_forked_ends_with_the_orbit,
    what_a_task_forked_ends_with_main,
];

fn orbit(entry: impl Fn(&mut Task<'_>) -> i64 + Send + Sync + 'static) -> Orbit {
    Orbit::builder("test").entry(entry).create().unwrap()
}

fn restarting(builder: Builder) -> Builder {
    builder.restart(Restart::OnCrash(Backoff { limit: None, longest: Duration::ZERO, ..Backoff::default() }))
}

fn fault(result: Result<i64, Error>) -> Fault {
    match result {
        Err(Error::Fault { fault, .. }) => fault,
        other => panic!("not a fault: {other:?}"),
    }
}

/// 0 returns, 1 crashes, 2 exits with 0, 3 hangs; a task that hangs says before that it has begun.
fn obey(task: &mut Task<'_>) -> i64 {
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

fn obeying(arguments: &[u8]) -> Call<'_> {
    Call::new().function(obey).arguments(arguments)
}

/// A task that hangs, and has begun to.
fn hanging(orbit: &Orbit) -> Future {
    let future = orbit.call_async(&obeying(&[3])).unwrap();
    assert_eq!(future.receive().unwrap().unwrap().len(), 1);
    future
}

fn kill(pid: u32) {
    kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL).unwrap();
}

fn a_bad_pointer_is_named() {
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
fn a_crash_has_module_symbol_and_memory() {
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
fn a_main_without_privileges_ends_its_orbits() {
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
fn existing_areas_are_there_before_any_call_names_them() {
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

fn every_crash_is_named() {
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

fn an_exhausted_stack_is_told() {
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

fn a_panic_is_quoted() {
    let orbit = orbit(|_| panic!("the invariant {} is broken", 7));
    assert_eq!(
        fault(orbit.call(&Call::new())),
        Fault::Panicked { message: "the invariant 7 is broken".to_owned() }
    );
}

fn an_exit_is_told() {
    let orbit = orbit(|_| std::process::exit(42));
    assert_eq!(fault(orbit.call(&Call::new())), Fault::Exited { status: 42 });
}

fn a_hang_ends_in_time() {
    let limit = Duration::from_millis(50);
    let orbit = Orbit::builder("hang").time_limit(limit).create().unwrap();
    assert_eq!(fault(orbit.call(&obeying(&[3]))), Fault::TimeLimit { limit });
}

fn a_hang_that_nobody_waits_for_ends_in_time() {
    let limit = Duration::from_millis(50);
    let orbit = restarting(Orbit::builder("hang").time_limit(limit)).create().unwrap();
    let pid = orbit.pid().unwrap();
    let future = hanging(&orbit);
    assert!(ends(pid), "although main does not look");
    assert_eq!(fault(future.get()), Fault::TimeLimit { limit });
    assert_eq!(orbit.call(&obeying(&[9])), Ok(9));
}

fn a_call_may_have_its_own_limit() {
    let orbit = restarting(Orbit::builder("hang")).create().unwrap();
    for milliseconds in [1, 20, 60] {
        let limit = Duration::from_millis(milliseconds);
        assert_eq!(fault(orbit.call(&obeying(&[3]).time_limit(limit))), Fault::TimeLimit { limit });
    }
}

fn a_limit_that_is_kept_harms_nothing() {
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

fn eat(_: &mut Task<'_>) -> i64 {
    let mut kept = Vec::new();
    loop {
        let mut block = vec![0_u8; 8 << 20];
        block.chunks_mut(4096).for_each(|page| page[0] = 1);
        kept.push(block);
    }
}

fn too_much_memory_is_told() {
    let bytes = 48 << 20;
    let mut limits = Limits::default();
    limits.memory = Some(bytes);
    let orbit = restarting(Orbit::builder("hungry").limits(limits)).create().unwrap();
    let held = orbit.enforcement().unwrap().memory;
    for _ in 0..3 {
        let seen = fault(orbit.call(&Call::new().function(eat)));
        match held {
            Means::Version1 | Means::Version2 => assert_eq!(seen, Fault::MemoryLimit { bytes }),
            _ => {
                orrery_testing::skipped!("the group: held by {held}");
                assert!(matches!(seen, Fault::Signal { .. }), "{seen:?}");
            }
        }
        assert_eq!(orbit.call(&obeying(&[6])), Ok(6));
    }
}

/// How many MiB the task gets.
fn grab(_: &mut Task<'_>) -> i64 {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: fresh mappings at addresses of the kernel's choice take nothing from anybody.
    let grab = || unsafe { mmap_anonymous(std::ptr::null_mut(), 1 << 20, access, MapFlags::PRIVATE) };
    let got: Vec<_> = std::iter::from_fn(|| grab().ok()).take(1 << 20).collect();
    for &start in &got {
        // SAFETY: mapped above.
        unsafe { munmap(start, 1 << 20) }.unwrap();
    }
    i64::try_from(got.len()).unwrap()
}

/// A user who may make no groups.
fn become_nobody() {
    let nobody = 65_534;
    // SAFETY: takes numbers; the process is this case's own.
    let _ = unsafe { libc::setresuid(nobody, nobody, nobody) };
    assert_ne!(rustix::process::geteuid().as_raw(), 0);
    // The change of users closed the process' own files in /proc to it.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::Dumpable).unwrap();
}

fn what_a_task_sees_is_not_memory_of_its_own() {
    become_nobody();
    let large = area();
    large.allocate(core::alloc::Layout::new::<[u8; 64 << 20]>()).unwrap();
    let mut limits = Limits::default();
    limits.memory = Some(48 << 20);
    let orbit = restarting(Orbit::builder("hungry").limits(limits)).entry(read).create().unwrap();
    if orbit.enforcement().unwrap().memory != Means::ProcessLimit {
        orrery_testing::skipped!("the process limit: this user may make groups");
        return;
    }
    let mut options = AreaOptions::default();
    options.capacity = 1 << 30;
    let gets = || orbit.call(&Call::new().function(grab)).unwrap();
    for round in 0..12_u8 {
        assert!((40..=48).contains(&gets()), "{}", gets());
        // An area that is made later, where there was none, or another.
        options.address = Some(0x2000_0000_0000 + (usize::from(round % 2) << 32));
        let elsewhere = Area::new(0, &options).unwrap();
        let number = number(&elsewhere);
        number.set(round.into());
        let areas = [&elsewhere, &large];
        assert_eq!(orbit.call(&Call::new().areas(&areas).arguments(&number.address())), Ok(round.into()));
        assert!((40..=48).contains(&gets()), "{}", gets());
        if round % 4 == 3 {
            fault(orbit.call(&Call::new().function(eat)));
        }
    }
}

fn a_limit_on_data_leaves_room_for_orbits() {
    let most = Some(4 << 30);
    let resource = rustix::process::Resource::Data;
    rustix::process::setrlimit(resource, rustix::process::Rlimit { current: most, maximum: most }).unwrap();
    let area = area();
    let number = number(&area);
    number.set(5);
    let orbit = orbit(read);
    assert_eq!(orbit.call(&Call::new().areas(&[&area]).arguments(&number.address())), Ok(5));
}

fn too_much_processor_time_is_told() {
    let mut limits = Limits::default();
    limits.cpu_time = Some(Duration::from_secs(1));
    let orbit = Orbit::builder("busy").limits(limits).create().unwrap();
    let seen = fault(orbit.call(&obeying(&[3])));
    assert!(matches!(seen, Fault::CpuLimit | Fault::Signal { signal: libc::SIGKILL, .. }), "{seen:?}");
}

fn an_outside_kill_is_told() {
    let orbit = orbit(obey);
    let future = hanging(&orbit);
    kill(orbit.pid().unwrap());
    let seen = fault(future.get());
    assert!(
        matches!(seen, Fault::Signal { signal: libc::SIGKILL, address: None, instruction: None, .. }),
        "{seen:?}"
    );
}

fn a_kill_while_idle_is_told() {
    let orbit = orbit(obey);
    assert_eq!(orbit.call(&obeying(&[4])), Ok(4));
    kill(orbit.pid().unwrap());
    assert!(ends(orbit.pid().unwrap()));
    let error = orbit.call(&obeying(&[4])).unwrap_err();
    // Or it was still dying when the call was made.
    assert!(matches!(error, Error::Dead { .. } | Error::NotRun { .. }), "{error}");
    assert!(error.to_string().contains("SIGKILL"), "{error}");
}

fn updates_before_a_crash_arrive() {
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

fn a_dead_orbit_stays_dead_by_policy() {
    let orbit = orbit(obey);
    let first = fault(orbit.call(&obeying(&[1])));
    for _ in 0..3 {
        let error = orbit.call(&obeying(&[4])).unwrap_err();
        assert_eq!(error, Error::Dead { orbit: "test".to_owned(), fault: first.clone(), restarts: 0 });
    }
    assert_eq!(orbit.life(), Ok(Life::Down { fault: first }));
}

fn queued_calls_of_a_dead_orbit_fail() {
    let orbit = orbit(obey);
    let running = hanging(&orbit);
    let waiting: Vec<_> = (0..5).map(|_| orbit.call_async(&obeying(&[4])).unwrap()).collect();
    kill(orbit.pid().unwrap());
    fault(running.get());
    for future in &waiting {
        assert!(matches!(future.get(), Err(Error::NotRun { .. })));
    }
}

fn a_crash_is_followed_by_a_fresh_instance() {
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

fn an_exit_is_followed_only_if_always() {
    let quick = Backoff { longest: Duration::ZERO, ..Backoff::default() };
    let orbit = Orbit::builder("exits").restart(Restart::OnCrash(quick)).create().unwrap();
    assert_eq!(fault(orbit.call(&obeying(&[2]))), Fault::Exited { status: 0 });
    assert!(matches!(orbit.call(&obeying(&[7])), Err(Error::Dead { .. })));
    let orbit = Orbit::builder("exits").restart(Restart::Always(quick)).create().unwrap();
    assert_eq!(fault(orbit.call(&obeying(&[2]))), Fault::Exited { status: 0 });
    assert_eq!(orbit.call(&obeying(&[7])), Ok(7));
}

fn calls_that_wait_survive_a_restart() {
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

fn the_pages_of_a_crashed_call_are_not_lost() {
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

fn a_crash_of_a_thread_of_the_task_is_told() {
    let orbit = orbit(|_| std::thread::spawn(crash).join().unwrap_or(0));
    assert!(matches!(
        fault(orbit.call(&Call::new())),
        Fault::Signal { signal: libc::SIGSEGV, address: Some(_), .. }
    ));
}

fn restarts_give_up() {
    let backoff = Backoff { longest: Duration::ZERO, limit: Some(3), ..Backoff::default() };
    let orbit = Orbit::builder("hopeless").restart(Restart::OnCrash(backoff)).create().unwrap();
    for _ in 0..4 {
        fault(orbit.call(&obeying(&[1])));
    }
    let error = orbit.call(&obeying(&[1])).unwrap_err();
    assert!(matches!(error, Error::Dead { restarts: 3, .. }), "{error}");
    assert!(error.to_string().contains("after 3 restarts"), "{error}");
}

fn back_off_is_waited_for() {
    let backoff = Backoff { first: Duration::from_millis(60), ..Backoff::default() };
    let orbit = Orbit::builder("slow").restart(Restart::OnCrash(backoff)).create().unwrap();
    fault(orbit.call(&obeying(&[1])));
    let begin = Instant::now();
    fault(orbit.call(&obeying(&[1])));
    // The second restart in a row is not before its time, and calls wait for it.
    assert_eq!(orbit.call(&obeying(&[4])), Ok(4));
    assert!(begin.elapsed() >= Duration::from_millis(60), "{:?}", begin.elapsed());
}

fn a_crashing_init_fails_creation() {
    let error = Orbit::builder("bad").init(crash).create().unwrap_err();
    assert!(
        matches!(error, Error::Init { fault: Fault::Signal { signal: libc::SIGSEGV, .. }, .. }),
        "{error}"
    );
    let error = restarting(Orbit::builder("bad")).init(|| panic!("no store")).create().unwrap_err();
    assert!(error.to_string().contains("no store"), "{error}");
    assert!(childless(), "no process is left");
}

fn a_hanging_init_fails_creation() {
    let limit = Duration::from_millis(100);
    let error = Orbit::builder("bad")
        .init(|| std::thread::sleep(Duration::from_secs(100)))
        .init_limit(limit)
        .create()
        .unwrap_err();
    assert_eq!(error, Error::Init { orbit: "bad".to_owned(), fault: Fault::TimeLimit { limit } });
}

fn an_init_that_crashes_later_ends_in_an_error() {
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

fn a_dead_spare_ends_in_an_error() {
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

fn no_process_for_a_restart_ends_in_an_error() {
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

fn no_room_for_files_is_an_error() {
    let resource = rustix::process::Resource::Fsize;
    let limit = |current| {
        let maximum = rustix::process::getrlimit(resource).maximum;
        rustix::process::setrlimit(resource, rustix::process::Rlimit { current, maximum }).unwrap();
    };
    // Not only refused: beyond the limit the kernel sends SIGXFSZ.
    limit(Some(1 << 20));
    let error = Orbit::builder("large").create().unwrap_err();
    assert!(error.to_string().contains("RLIMIT_FSIZE"), "{error}");
    limit(None);
    let area = area();
    let number = number(&area);
    let reader = orbit(read);
    let areas = [&area];
    let bytes = number.address();
    let call = Call::new().areas(&areas).arguments(&bytes);
    number.set(7);
    assert_eq!(reader.call(&call).unwrap(), 7);
    limit(Some(4096));
    let more = area.allocate(core::alloc::Layout::new::<[u8; 1 << 20]>()).unwrap();
    // SAFETY: as many bytes as its layout has.
    unsafe { more.as_ptr().write_bytes(1, 1 << 20) };
    let error = reader.call(&call).unwrap_err();
    assert!(error.to_string().contains("RLIMIT_FSIZE"), "{error}");
    limit(None);
    number.set(8);
    assert_eq!(reader.call(&call).unwrap(), 8);
}

fn a_core_dump_stays_small() {
    let place = std::env::temp_dir().join(format!("orrery-core-{}", std::process::id()));
    std::fs::create_dir(&place).unwrap();
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if pattern.starts_with(['|', '/']) {
        orrery_testing::skipped!("core dumps go to {pattern}");
        return;
    }
    let most = 4 << 30;
    let resource = rustix::process::Resource::Core;
    let maximum = rustix::process::getrlimit(resource).maximum;
    rustix::process::setrlimit(resource, rustix::process::Rlimit { current: Some(most), maximum }).unwrap();
    let area = area();
    let number = number(&area);
    let inner = place.clone();
    let orbit = orbit(move |task| {
        std::env::set_current_dir(&inner).unwrap();
        // SAFETY: the address of a number in an area that the call names; the task's copy of it is the task's alone.
        unsafe { *task.pointer::<i64>().unwrap() += 1 };
        crash()
    });
    fault(orbit.call(&Call::new().areas(&[&area]).arguments(&number.address())));
    let sizes: Vec<u64> =
        std::fs::read_dir(&place).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).collect();
    std::fs::remove_dir_all(&place).unwrap();
    assert!(sizes.len() == 1 && sizes[0] < 1 << 30, "{sizes:?}");
}

fn many_orbits_live_side_by_side() {
    let area = area();
    let number = number(&area);
    let areas = [&area];
    let bytes = number.address();
    let call = Call::new().areas(&areas).arguments(&bytes);
    let orbits: Vec<_> =
        (0..40).map(|_| restarting(Orbit::builder("one of many")).entry(read).create().unwrap()).collect();
    for round in 0..3 {
        number.set(round);
        let futures: Vec<_> = orbits.iter().map(|orbit| orbit.call_async(&call).unwrap()).collect();
        number.set(-1);
        assert!(futures.iter().all(|future| future.get() == Ok(round)));
        for orbit in orbits.iter().step_by(7) {
            fault(orbit.call(&obeying(&[1])));
        }
    }
}

fn waiting_threads_all_learn_of_a_crash() {
    let orbit = orbit(obey);
    let running = hanging(&orbit);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| orbit.call(&obeying(&[4])))).collect();
        std::thread::sleep(Duration::from_millis(50));
        kill(orbit.pid().unwrap());
        for thread in threads {
            let error = thread.join().unwrap().unwrap_err();
            assert!(matches!(error, Error::NotRun { .. } | Error::Dead { .. }), "{error}");
        }
    });
    fault(running.get());
}

/// The memory that this process can write and shares with others, found as a stray or hostile task would: by looking.
fn shared_mappings() -> Vec<(usize, usize)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        rest.starts_with("rw-s").then(|| (number(start), number(end)))
    };
    maps.lines().filter_map(line).collect()
}

/// Overwrites what the orbit shares with main: with the argument's byte, or at random.
fn vandalise(task: &mut Task<'_>) -> i64 {
    let byte = task.arguments()[0];
    let mut random = (u64::from(byte) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for (start, end) in shared_mappings() {
        for at in (start..end).step_by(8) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let value = if byte < 128 { random } else { u64::from_ne_bytes([byte; 8]) };
            // SAFETY: mapped and writable; what becomes of the orbit by that is the case's question.
            unsafe { std::ptr::without_provenance_mut::<u64>(at).write_volatile(value) };
        }
    }
    0
}

fn corrupted_memory_is_noticed() {
    for byte in (0..40).chain([128, 200, 255]) {
        let orbit = orbit(vandalise);
        let begin = Instant::now();
        let result = orbit.call(&Call::new().arguments(&[byte]).time_limit(Duration::from_secs(2)));
        // It may crash by itself first; it never answers with a value, and main is neither harmed nor stuck.
        let seen = fault(result);
        assert!(
            matches!(
                seen,
                Fault::Corrupted { .. }
                    | Fault::Signal { .. }
                    | Fault::Exited { .. }
                    | Fault::TimeLimit { .. }
            ),
            "{byte}: {seen:?}"
        );
        assert!(begin.elapsed() < Duration::from_secs(20));
        assert!(ends(orbit.pid().unwrap()));
    }
}

fn a_corrupted_orbit_comes_back_clean() {
    let area = area();
    let number = number(&area);
    let orbit = restarting(Orbit::builder("vandal")).entry(read).create().unwrap();
    let areas = [&area];
    let bytes = number.address();
    let call = Call::new().areas(&areas).arguments(&bytes);
    for i in 0..20 {
        number.set(i);
        assert_eq!(orbit.call(&call), Ok(i));
        let byte = [u8::try_from(i).unwrap()];
        let limited = Call::new().function(vandalise).arguments(&byte).time_limit(Duration::from_secs(2));
        assert!(orbit.call(&limited).is_err());
    }
    assert_eq!(orbit.call(&call), Ok(19));
}

/// Writes the argument's word over all shared memory (a random one each time for `u32::MAX`), then crashes.
fn scribble(task: &mut Task<'_>) -> i64 {
    let word: u32 = task.argument().unwrap();
    let mut random = 0x9e37_79b9_u32 ^ std::process::id();
    for (start, end) in shared_mappings() {
        for at in (start..end).step_by(4) {
            random ^= random << 13;
            random ^= random >> 17;
            random ^= random << 5;
            let value = if word == u32::MAX { random } else { word };
            // SAFETY: mapped and writable; what becomes of the orbit by that is the case's question.
            unsafe { std::ptr::without_provenance_mut::<u32>(at).write_volatile(value) };
        }
    }
    std::process::abort()
}

/// How many children of this process live.
fn living_children() -> usize {
    let own = std::process::id().to_string();
    let is_child = |stat: &str| {
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        !matches!(fields.next(), Some("Z" | "X") | None) && fields.next() == Some(own.as_str())
    };
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| std::fs::read_to_string(entry.unwrap().path().join("stat")).ok())
        .filter(|stat| is_child(stat))
        .count()
}

/// Bounds what a spare out of control can do to the machine: as a user of this case's own, where that is possible.
fn bound_processes() {
    if rustix::process::getuid().is_root() {
        let nobody_else = 70_000 + std::process::id() % 10_000_000;
        // SAFETY: changes who this process, which is the case's alone, is.
        assert_eq!(unsafe { libc::setresuid(nobody_else, nobody_else, nobody_else) }, 0);
        // SAFETY: an integer; /proc/self belongs to root otherwise.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) };
    } else {
        orrery_testing::skipped!("a bound on processes of the case's own: only root can become another user");
        return;
    }
    let resource = rustix::process::Resource::Nproc;
    let limit = rustix::process::Rlimit { current: Some(100), maximum: Some(100) };
    rustix::process::setrlimit(resource, limit).unwrap();
}

fn scribbling_over_all_shared_memory_makes_no_processes() {
    bound_processes();
    for word in (0..16).chain([50, 100, 1000, 1 << 31, u32::MAX, u32::MAX]) {
        let orbit = restarting(Orbit::builder("scribbler")).entry(|_| 7).create().unwrap();
        let bytes = word.to_ne_bytes();
        let limited = Call::new().function(scribble).arguments(&bytes).time_limit(Duration::from_secs(20));
        for round in 0..3 {
            assert!(orbit.call(&limited).is_err(), "{word}");
            assert_eq!(orbit.call(&Call::new()), Ok(7), "{word}, round {round}");
            let children = living_children();
            assert!(children <= 2, "{children} children after {word}, round {round}");
        }
        drop(orbit);
        assert!(childless(), "{} are left after {word}", living_children());
    }
}

fn an_orbit_cannot_write_to_the_memory_of_another() {
    bound_processes();
    let bystander = restarting(Orbit::builder("bystander")).entry(|_| 8).create().unwrap();
    let pid = bystander.pid().unwrap();
    let waiting = bystander.call_async(&Call::new()).unwrap();
    for word in [0, 1, 100, u32::MAX] {
        let orbit = restarting(Orbit::builder("scribbler")).entry(|_| 7).create().unwrap();
        let seen = orbit.call(&Call::new().function(|_| i64::try_from(shared_mappings().len()).unwrap()));
        // Its own queue (of which it can write its own side only) and control block.
        assert_eq!(seen, Ok(2));
        let bytes: [u8; 4] = u32::to_ne_bytes(word);
        assert!(orbit.call(&Call::new().function(scribble).arguments(&bytes)).is_err());
        assert_eq!(orbit.call(&Call::new()), Ok(7));
        assert_eq!(bystander.call(&Call::new()), Ok(8));
    }
    assert_eq!(waiting.get(), Ok(8));
    assert_eq!((bystander.pid().unwrap(), bystander.restarts().unwrap()), (pid, 0));
}

fn a_killed_orbit_leaves_nothing_behind() {
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

fn a_fork_of_the_orbit_may_outlive_its_task() {
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

fn a_child_that_returns_from_its_task_is_not_the_orbit() {
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

fn what_a_task_forked_ends_with_the_orbit() {
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

fn what_a_task_forked_ends_with_main() {
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

fn a_stopped_orbit_holds_up_no_call_without_a_value() {
    let orbit = Orbit::builder("stopped").queue(16).entry(|_| 1).create().unwrap();
    let pid = Pid::from_raw(orbit.pid().unwrap().cast_signed()).unwrap();
    assert_eq!(orbit.call(&Call::new()), Ok(1));
    kill_process(pid, Signal::STOP).unwrap();
    let call = Call::new().flags(orrery_orbit::Flags::NO_RETURN_VALUE);
    let begin = Instant::now();
    let results: Vec<_> = (0..1000).map(|_| orbit.call_async(&call).map(drop)).collect();
    // By default the others would wait for a second each.
    assert!(begin.elapsed() < Duration::from_secs(100));
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 16);
    assert!(results[16..].iter().all(|result| matches!(result, Err(Error::QueueFull { .. }))));
    assert_eq!(orbit.statistics().unwrap().dropped, 984);
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(orbit.call(&Call::new()), Ok(1));
}

fn updates_that_nobody_receives_are_bounded() {
    const BOUND: usize = 1 << 20;
    for size in [1, 1000, 30_000, 100_000] {
        let orbit = Orbit::builder("sender")
            .unreceived_updates(BOUND)
            .entry(move |task| {
                let mut scratch = Scratch::new();
                for _ in 0..4 * BOUND / (size + 64) {
                    scratch.data(&vec![1; size]);
                    task.send(&mut scratch).unwrap();
                }
                5
            })
            .create()
            .unwrap();
        for _ in 0..2 {
            let finished = orbit.call_and_receive(&Call::new()).unwrap();
            assert_eq!(finished.result, Ok(5));
            let good = finished.updates.iter().filter(|update| update.is_ok()).count();
            assert!(good * size <= BOUND && good > 0, "{good} of {size} bytes");
            let refused: Vec<_> =
                finished.updates.iter().filter_map(|update| update.as_ref().err()).collect();
            assert_eq!(refused.len(), 1, "{refused:?}");
            assert!(refused[0].to_string().contains("1048576 bytes"), "{}", refused[0]);
        }
    }
    // A task that sends without end does not keep main from its deadlines.
    let orbit = Orbit::builder("flood")
        .entry(|task| {
            let bytes = vec![1; 100_000];
            loop {
                task.send(Scratch::new().data(&bytes)).unwrap();
            }
        })
        .create()
        .unwrap();
    let future = orbit.call_async(&Call::new()).unwrap();
    for _ in 0..20 {
        assert!(matches!(future.get_within(Duration::from_millis(20)), Err(Error::TimedOut { .. })));
    }
}

fn dead_orbits_whose_handles_are_kept_take_no_addresses() {
    let area = area();
    let number = number(&area);
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let files_before = files();
    let orbits: Vec<_> = (0..400)
        .map(|i| {
            let orbit = orbit(read);
            number.set(i);
            assert_eq!(orbit.call(&Call::new().areas(&[&area]).arguments(&number.address())), Ok(i));
            fault(orbit.call(&obeying(&[1])));
            orbit
        })
        .collect();
    assert!(childless());
    // The page of statistics is all that is left.
    assert!(files() <= files_before + 400 + 10, "{}", files() - files_before);
    // At first each dead orbit had half a terabyte, of which a process has 128.
    let error = orbits[0].call(&obeying(&[0])).unwrap_err();
    assert!(matches!(error, Error::Dead { .. }), "{error}");
}
