//! The checking mode: what a task touches that was not passed is told by name, and nothing else is.

#![expect(clippy::unwrap_used, reason = "tests")]

#[expect(dead_code, reason = "helpers of the other tests")]
mod common;

use std::alloc::Layout;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use common::{address, area, number, number_on_its_page, read};
use orrery_orbit::{Area, AreaVec, Backoff, Call, Finding, Orbit, Reason, Restart, Scratch, Task};

orrery_testing::cases![
    seconds = 120, trackers = orrery_testing::TRACKERS;
    a_stale_global_is_named,
    a_stale_object_of_the_heap_is_named,
    a_new_object_of_the_heap_is_named,
    an_area_that_is_not_passed_is_named,
    freed_memory_of_an_area_is_named,
    what_was_passed_is_not_named,
    what_did_not_change_is_not_named,
    what_the_orbit_has_of_its_own_is_not_named,
    updates_and_faults_are_as_ever,
    a_task_that_forks_is_checked_and_its_child_is_not,
    a_limit_of_memory_holds,
    restarted_orbits_of_programs_with_threads_are_checked,
    the_environment_turns_it_on,
];

static LIMIT: AtomicI64 = AtomicI64::new(10);
static TABLE: [AtomicI64; 1000] = [const { AtomicI64::new(1) }; 1000];

fn checked(entry: impl Fn(&mut Task<'_>) -> i64 + Send + Sync + 'static) -> Orbit {
    Orbit::builder("checked").check(true).entry(entry).create().unwrap()
}

/// The one finding there is.
fn only(orbit: &Orbit) -> Finding {
    let findings = orbit.findings().unwrap();
    assert_eq!(findings.len(), 1, "{findings:#?}");
    findings[0].clone()
}

fn none(orbit: &Orbit) {
    let findings = orbit.findings().unwrap();
    assert!(findings.is_empty(), "{findings:#?}");
}

#[inline(never)]
fn reads_globals(_: &mut Task<'_>) -> i64 {
    LIMIT.load(Ordering::SeqCst) + TABLE[std::hint::black_box(500)].load(Ordering::SeqCst)
}

fn a_stale_global_is_named() {
    let orbit = checked(reads_globals);
    assert_eq!(orbit.call(&Call::new()).unwrap(), 11);
    none(&orbit);
    LIMIT.store(20, Ordering::SeqCst);
    assert_eq!(orbit.call(&Call::new()).unwrap(), 11);
    let found = only(&orbit);
    assert_eq!(
        (found.reason, found.address, found.bytes, found.call),
        (Reason::Stale, LIMIT.as_ptr().addr(), 8, 2)
    );
    assert!(found.place.contains("LIMIT+0x0"), "{found}");
    assert!(found.code.contains("reads_globals"), "{found}");
    assert!(found.to_string().contains("is stale: main has changed it since"), "{found}");
    // The same again is no news; another one is.
    orbit.call(&Call::new()).unwrap();
    only(&orbit);
    TABLE[500].store(2, Ordering::SeqCst);
    orbit.call(&Call::new()).unwrap();
    let findings = orbit.findings().unwrap();
    assert_eq!(findings.len(), 2, "{findings:#?}");
    assert!(findings[1].place.contains("TABLE+0xfa0"), "{}", findings[1]);
    assert_eq!(findings[1].bytes, 8000);
}

fn a_stale_object_of_the_heap_is_named() {
    let mut text = "the user's name, long enough".to_owned();
    let orbit = checked(|task| {
        // SAFETY: as many bytes as main has there.
        let bytes = unsafe { std::slice::from_raw_parts(task.pointer::<u8>().unwrap(), 16) };
        bytes.iter().map(|byte| i64::from(*byte)).sum()
    });
    let place = address(text.as_ptr());
    let before = orbit.call(&Call::new().arguments(&place)).unwrap();
    none(&orbit);
    text.replace_range(..3, "own");
    assert_eq!(orbit.call(&Call::new().arguments(&place)).unwrap(), before, "it is as of the creation");
    let findings = orbit.findings().unwrap();
    assert!(!findings.is_empty());
    for found in findings {
        assert_eq!((found.reason, found.address & !7), (Reason::Stale, text.as_ptr().addr() & !7), "{found}");
        assert!(found.place.contains("[heap]") || found.place.contains("anonymous"), "{found}");
    }
}

fn a_new_object_of_the_heap_is_named() {
    let orbit = checked(read);
    let new = Box::new(AtomicI64::new(6));
    let mut more: Vec<Vec<i64>> = (0..50).map(|size| vec![7; size * 10]).collect();
    more.push(vec![8; 30]);
    let place = address(new.as_ptr());
    let value = orbit.call(&Call::new().arguments(&place)).unwrap();
    if value != 6 {
        let found = only(&orbit);
        assert_eq!((found.reason, found.address), (Reason::Stale, new.as_ptr().addr()), "{found}");
    }
    let last = more.last().unwrap();
    let value = orbit.call(&Call::new().arguments(&address(&raw const last[20]))).unwrap();
    assert_ne!(value, 8, "it is newer than the orbit");
    let findings = orbit.findings().unwrap();
    assert_eq!(findings.last().unwrap().address, (&raw const last[20]).addr(), "{findings:#?}");
}

fn an_area_that_is_not_passed_is_named() {
    let (named, other) = (area(), area());
    let (first, second) = (number(&named), number(&other));
    first.set(1);
    second.set(2);
    let orbit = checked(read);
    let call = |number: common::Number<'_>, areas: &[&Area]| {
        orbit.call(&Call::new().areas(areas).arguments(&number.address())).unwrap()
    };
    assert_eq!(call(second, &[&named, &other]), 2);
    none(&orbit);
    second.set(3);
    assert_eq!(call(second, &[&named]), 2);
    let found = only(&orbit);
    assert_eq!((found.reason, found.address), (Reason::NotPassed, second.pointer().addr()));
    assert!(found.place.contains(&format!("the area at {:#x}", other.base())), "{found}");
    assert!(found.to_string().contains("the call does not name the area"), "{found}");
}

fn freed_memory_of_an_area_is_named() {
    let area = area();
    let orbit = checked(read);
    let layout = Layout::from_size_align(48, 16).unwrap();
    let (block, other) = (area.allocate(layout).unwrap(), area.allocate(layout).unwrap());
    // SAFETY: the block is fresh, with room for the number, and aligned to 16 bytes.
    unsafe { block.cast::<i64>().write(7) };
    let inside = address(block.as_ptr());
    let areas = [&area];
    let call = Call::new().areas(&areas).arguments(&inside);
    let early = orbit.call_async(&call).unwrap();
    // SAFETY: the block came from there, with this layout. The call has its snapshot.
    unsafe { area.free(block, layout) };
    assert_eq!(early.get().unwrap(), 7);
    none(&orbit);
    orbit.call(&call).unwrap();
    let found = only(&orbit);
    assert_eq!((found.reason, found.address, found.bytes), (Reason::Freed, block.as_ptr().addr(), 48));
    let place = format!("0x0 bytes into a block of the area at {:#x}", area.base());
    assert_eq!(found.place, place);
    // Memory that is in use again is nobody's mistake that could be seen.
    let again = area.allocate(layout).unwrap();
    assert_eq!(again, block);
    orbit.call(&call).unwrap();
    only(&orbit);
    // SAFETY: the block came from this area, with this layout; the call has its own snapshot of it.
    unsafe { area.free(other, layout) };
}

fn what_was_passed_is_not_named() {
    let area = area();
    let mut table = AreaVec::new_in(area.clone());
    let orbit = checked(|task| {
        let (table, count) = task.argument::<[usize; 2]>().map(|[at, count]| (at, count)).unwrap();
        // SAFETY: as many numbers as main has in the area that the call names.
        let table =
            unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<i64>(table), count) };
        table.iter().sum()
    });
    for round in 1..=3 {
        table.extend(0..1000_i64);
        let place = [table.as_ptr().expose_provenance(), table.len()];
        assert_eq!(orbit.call(&Call::new().areas(&[&area]).argument(&place)).unwrap(), round * 499_500);
    }
    none(&orbit);
}

fn what_did_not_change_is_not_named() {
    let kept: BTreeMap<i64, String> = (0..100).map(|number| (number, number.to_string())).collect();
    let captured = kept.clone();
    let orbit =
        checked(move |_| captured.values().map(|text| text.len().cast_signed() as i64).sum::<i64>() + 3);
    for _ in 0..3 {
        assert_eq!(orbit.call(&Call::new()).unwrap(), 193);
        LIMIT.fetch_add(1, Ordering::SeqCst);
    }
    drop(kept);
    none(&orbit);
}

fn what_the_orbit_has_of_its_own_is_not_named() {
    static COUNTER: AtomicI64 = AtomicI64::new(0);
    let orbit = Orbit::builder("checked")
        .check(true)
        .init(|| vec![1_i64; 100])
        .entry(|task| {
            let count = COUNTER.fetch_add(1, Ordering::SeqCst);
            let store = task.store::<Vec<i64>>().unwrap();
            store.push(count);
            let mut own: Vec<String> = (0..200).map(|number| format!("number {number}")).collect();
            own.sort();
            own.concat().len().cast_signed() as i64 + store.iter().sum::<i64>()
        })
        .create()
        .unwrap();
    let mut garbage = Vec::new();
    for round in 0..4_i64 {
        garbage.push(vec![round; 1000]);
        garbage.push(vec![round; 10]);
        let value = orbit.call(&Call::new()).unwrap();
        assert_eq!(value, 1890 + 100 + (0..=round).sum::<i64>());
    }
    none(&orbit);
}

fn updates_and_faults_are_as_ever() {
    let area = area();
    let place = number_on_its_page(&area);
    place.set(4);
    let areas = [&area];
    let orbit = checked(|task| {
        let value = read(task);
        let bytes = vec![u8::try_from(value).unwrap(); 100_000];
        task.send(Scratch::new().data(&bytes)).unwrap();
        if value == 5 { common::crash() } else { value }
    });
    let arguments = place.address();
    let call = Call::new().areas(&areas).arguments(&arguments);
    let finished = orbit.call_and_receive(&call).unwrap();
    assert_eq!((finished.result.unwrap(), finished.updates.len()), (4, 1));
    place.set(5);
    let finished = orbit.call_and_receive(&call).unwrap();
    assert_eq!(finished.updates.len(), 1);
    let text = finished.result.unwrap_err().to_string();
    assert!(text.contains("SIGSEGV at address 0x12345000") && text.contains("common::crash+"), "{text}");
    none(&orbit);
}

/// Forks a child that reads main's memory and returns from the task, and reads it too.
fn forks_and_reads(_: &mut Task<'_>) -> i64 {
    // SAFETY: the child returns as the task would.
    let child = unsafe { libc::fork() };
    let mut status = 0;
    // SAFETY: waits for our child, of which there is one.
    if child > 0 && unsafe { libc::waitpid(child, &raw mut status, 0) } != child {
        return -1;
    }
    LIMIT.load(Ordering::SeqCst) * 1000 + i64::from(status)
}

fn a_task_that_forks_is_checked_and_its_child_is_not() {
    let orbit = checked(forks_and_reads);
    for call in 1..4 {
        LIMIT.store(10 + call, Ordering::SeqCst);
        assert_eq!(orbit.call(&Call::new()), Ok(10_000), "the child ends well");
        let found = only(&orbit);
        assert_eq!((found.reason, found.address), (Reason::Stale, LIMIT.as_ptr().addr()));
    }
}

/// Returns how many MiB a task gets, in pieces of one.
fn grabs(_: &mut Task<'_>) -> i64 {
    let access = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
    let flags = rustix::mm::MapFlags::PRIVATE;
    // SAFETY: new mappings, which nobody uses, and which end with the orbit.
    let piece = || unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), 1 << 20, access, flags) };
    (0..1000).take_while(|_| piece().is_ok()).count().try_into().unwrap()
}

fn a_limit_of_memory_holds() {
    if rustix::process::geteuid().is_root() {
        // Only an ordinary user's orbits are bound by the process limit, not by a group.
        // SAFETY: changes who this process, which is the case's alone, is.
        assert_eq!(unsafe { libc::setresuid(65534, 65534, 65534) }, 0);
        rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::Dumpable).unwrap();
    }
    let mut limits = orrery_orbit::Limits::default();
    limits.memory = Some(48 << 20);
    let area = area();
    let number = number(&area);
    number.set(5);
    let orbit = Orbit::builder("bound").check(true).limits(limits).entry(read).create().unwrap();
    if orbit.enforcement().unwrap().memory != orrery_orbit::Means::ProcessLimit {
        orrery_testing::skipped!("the process limit: this user may make groups");
        return;
    }
    let got = orbit.call(&Call::new().function(grabs)).unwrap();
    assert!((40..=48).contains(&got), "{got} MiB");
    assert_eq!(orbit.call(&Call::new().areas(&[&area]).arguments(&number.address())), Ok(5), "it goes on");
    none(&orbit);
}

fn restarted_orbits_of_programs_with_threads_are_checked() {
    let stop = AtomicI64::new(0);
    let backoff = Backoff { limit: None, longest: Duration::ZERO, ..Backoff::default() };
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while stop.load(Ordering::SeqCst) == 0 {
                    std::hint::black_box((0..100_u64).map(|number| vec![number; 20]).collect::<Vec<_>>());
                }
            });
        }
        let orbit = Orbit::builder("checked")
            .check(true)
            .restart(Restart::OnCrash(backoff))
            .entry(|task| if task.arguments().is_empty() { reads_globals(task) } else { common::crash() })
            .create()
            .unwrap();
        for round in 0..20 {
            assert_eq!(orbit.call(&Call::new()).unwrap(), 11, "{round}");
            LIMIT.fetch_add(1, Ordering::SeqCst);
            orbit.call(&Call::new().arguments(&[1])).unwrap_err();
        }
        stop.store(1, Ordering::SeqCst);
        let found = only(&orbit);
        assert_eq!((found.reason, found.address), (Reason::Stale, LIMIT.as_ptr().addr()));
        assert!(orbit.restarts().unwrap() >= 19);
    });
}

fn the_environment_turns_it_on() {
    // SAFETY: a case is a process of its own with one thread.
    unsafe { std::env::set_var("ORRERY_ORBIT_CHECK", "1") };
    let orbit = Orbit::builder("checked").entry(reads_globals).create().unwrap();
    LIMIT.store(21, Ordering::SeqCst);
    orbit.call(&Call::new()).unwrap();
    assert_eq!(only(&orbit).reason, Reason::Stale);
    let off = Orbit::builder("unchecked").check(false).entry(reads_globals).create().unwrap();
    LIMIT.store(22, Ordering::SeqCst);
    assert_eq!(off.call(&Call::new()).unwrap(), 22);
    none(&off);
}
