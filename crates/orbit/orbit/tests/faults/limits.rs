//! Limits on memory, processor time, files and processes, and what keeps several orbits apart.

use std::time::{Duration, Instant};

use orrery_orbit::{Area, AreaOptions, Call, Error, Fault, Limits, Means, Orbit, Scratch, Task};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{area, childless, crash, number, read};
use crate::support::{fault, hanging, kill, obey, obeying, orbit, restarting};

fn eat(_: &mut Task<'_>) -> i64 {
    let mut kept = Vec::new();
    loop {
        let mut block = vec![0_u8; 8 << 20];
        block.chunks_mut(4096).for_each(|page| page[0] = 1);
        kept.push(block);
    }
}

pub(crate) fn too_much_memory_is_told() {
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

/// Returns how many MiB the task gets.
fn grab(_: &mut Task<'_>) -> i64 {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: fresh mappings at addresses of the kernel's choice take nothing from anybody.
    let grab = || unsafe { mmap_anonymous(std::ptr::null_mut(), 1 << 20, access, MapFlags::PRIVATE) };
    let got: Vec<_> = std::iter::from_fn(|| grab().ok()).take(1 << 20).collect();
    for &start in &got {
        // SAFETY: the mapping was made above, and nothing refers to it.
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

pub(crate) fn what_a_task_sees_is_not_memory_of_its_own() {
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

pub(crate) fn a_limit_on_data_leaves_room_for_orbits() {
    let most = Some(4 << 30);
    let resource = rustix::process::Resource::Data;
    rustix::process::setrlimit(resource, rustix::process::Rlimit { current: most, maximum: most }).unwrap();
    let area = area();
    let number = number(&area);
    number.set(5);
    let orbit = orbit(read);
    assert_eq!(orbit.call(&Call::new().areas(&[&area]).arguments(&number.address())), Ok(5));
}

pub(crate) fn too_much_processor_time_is_told() {
    let mut limits = Limits::default();
    limits.cpu_time = Some(Duration::from_secs(1));
    let orbit = Orbit::builder("busy").limits(limits).create().unwrap();
    let seen = fault(orbit.call(&obeying(&[3])));
    assert!(matches!(seen, Fault::CpuLimit | Fault::Signal { signal: libc::SIGKILL, .. }), "{seen:?}");
}

pub(crate) fn no_room_for_files_is_an_error() {
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

pub(crate) fn a_core_dump_stays_small() {
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

pub(crate) fn many_orbits_live_side_by_side() {
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

pub(crate) fn waiting_threads_all_learn_of_a_crash() {
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

pub(crate) fn a_stopped_orbit_holds_up_no_call_without_a_value() {
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

pub(crate) fn updates_that_nobody_receives_are_bounded() {
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

pub(crate) fn dead_orbits_whose_handles_are_kept_take_no_addresses() {
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
