//! What a call brings to the task, and what the task brings back.

#![expect(clippy::unwrap_used, reason = "tests")]

#[expect(dead_code, reason = "helpers of the other tests")]
#[path = "../common/mod.rs"]
mod common;
mod queue;
mod updates;

use std::ffi::{c_long, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use common::{address, area, number, read};
use orrery_orbit::{
    ARGUMENTS, Area, AreaOptions, AreaVec, Call, Error, Flags, Life, Orbit, Placement, Reaper, Scratch, Task,
};
use queue::busy;
use rustix::process::{Pid, WaitOptions, wait as wait_for_any};

orrery_testing::cases![
    seconds = 120, trackers = orrery_testing::TRACKERS;
    a_call_returns_what_the_task_returns,
    arguments_arrive,
    oversize_arguments_are_refused,
    a_task_sees_main_as_of_its_call,
    queued_calls_see_their_own_moments,
    what_a_task_writes_is_gone_at_the_next_call,
    areas_made_later_are_seen,
    grown_areas_are_seen,
    untouched_memory_of_an_area_is_not_copied,
    structures_with_pointers_are_seen,
    several_orbits_watch_one_area,
    a_function_may_be_named_by_the_call,
    c_functions_are_called,
    addresses_without_code_are_refused,
    an_orbit_without_entry_needs_a_function,
    the_store_lasts_and_init_comes_first,
    the_orbit_has_what_main_had_at_its_creation,
    threads_call_at_once,
    futures_may_be_taken_in_any_order,
    dropped_futures_leave_nothing,
    no_return_value_keeps_nothing,
    queue::same_arguments_are_skipped,
    queue::any_waiting_call_skips,
    queue::same_arguments_are_cancelled,
    queue::any_cancellable_call_is_cancelled,
    queue::a_future_cancels_its_call,
    queue::cancelled_calls_leave_their_pages_to_the_next,
    queue::a_full_queue_fails,
    queue::a_full_queue_is_waited_for,
    queue::a_full_queue_makes_room,
    queue::a_hundred_thousand_calls_wait_and_are_answered,
    updates::updates_arrive_in_order,
    updates::updates_arrive_before_the_end,
    updates::updates_of_queued_calls_are_kept_apart,
    updates::large_updates_arrive,
    updates::many_updates_of_a_synchronous_call_arrive,
    updates::updates_are_applied_one_by_one,
    updates::bad_updates_are_refused,
    updates::updates_beside_blocks_are_refused,
    updates::sending_outside_of_a_task_is_an_error,
    calls_from_inside_are_errors,
    a_forked_child_of_main_is_told,
    destroying_is_final,
    the_program_may_reap_its_orbit,
    names_are_checked,
    statistics_count,
    every_placement_works,
    a_waiting_time_is_kept,
];

pub(crate) fn orbit(entry: impl Fn(&mut Task<'_>) -> i64 + Send + Sync + 'static) -> Orbit {
    Orbit::builder("test").entry(entry).create().unwrap()
}

fn a_call_returns_what_the_task_returns() {
    let orbit = orbit(|task| i64::from(task.arguments()[0]) * -3);
    for i in 0..200 {
        assert_eq!(orbit.call(&Call::new().arguments(&[i])), Ok(i64::from(i) * -3));
    }
    assert_eq!(orbit.life(), Ok(Life::Up));
}

fn arguments_arrive() {
    let orbit = orbit(|task| task.arguments().iter().map(|b| i64::from(*b)).sum());
    for len in [0, 1, 8, 100, ARGUMENTS - 1, 3, 0] {
        let bytes: Vec<u8> = (0..len).map(|i| u8::try_from(i % 256).unwrap()).collect();
        let sum = bytes.iter().map(|b| i64::from(*b)).sum();
        assert_eq!(orbit.call(&Call::new().arguments(&bytes)), Ok(sum));
    }
}

fn oversize_arguments_are_refused() {
    let orbit = orbit(|_| 1);
    let error = orbit.call(&Call::new().arguments(&[0; ARGUMENTS])).unwrap_err();
    assert_eq!(error, Error::Arguments { bytes: ARGUMENTS });
    assert_eq!(orbit.call(&Call::new()), Ok(1));
}

fn a_task_sees_main_as_of_its_call() {
    let area = area();
    let number = number(&area);
    let orbit = orbit(read);
    let (areas, bytes) = ([&area], number.address());
    let call = Call::new().areas(&areas).arguments(&bytes);
    for i in 0..500 {
        number.set(i);
        let future = orbit.call_async(&call).unwrap();
        number.set(-1);
        assert_eq!(future.get(), Ok(i));
    }
}

fn queued_calls_see_their_own_moments() {
    let area = area();
    let number = number(&area);
    let orbit = orbit(|task| {
        std::thread::sleep(Duration::from_millis(3));
        read(task)
    });
    let (areas, bytes) = ([&area], number.address());
    let call = Call::new().areas(&areas).arguments(&bytes);
    let futures: Vec<_> = (0..40)
        .map(|i| {
            number.set(i);
            orbit.call_async(&call).unwrap()
        })
        .collect();
    number.set(-1);
    for (i, future) in (0..).zip(&futures) {
        assert_eq!(future.get(), Ok(i));
    }
    assert_eq!(orbit.call(&call), Ok(-1));
}

fn what_a_task_writes_is_gone_at_the_next_call() {
    let area = area();
    let number = number(&area);
    number.set(5);
    let orbit = orbit(|task| {
        // SAFETY: the address of a number in an area that the call names; the task's copy of it is the task's alone.
        let number = unsafe { &mut *task.pointer::<i64>().unwrap() };
        *number += 1;
        *number
    });
    let (areas, bytes) = ([&area], number.address());
    let call = Call::new().areas(&areas).arguments(&bytes);
    for _ in 0..50 {
        assert_eq!(orbit.call(&call), Ok(6));
    }
    let futures: Vec<_> = (0..20).map(|_| orbit.call_async(&call).unwrap()).collect();
    assert!(futures.iter().all(|future| future.get() == Ok(6)));
    assert_eq!(number.get(), 5);
}

fn areas_made_later_are_seen() {
    let orbit = orbit(read);
    for i in 0..20 {
        let area = area();
        let number = number(&area);
        number.set(i);
        assert_eq!(orbit.call(&Call::new().areas(&[&area]).arguments(&number.address())), Ok(i));
    }
}

fn grown_areas_are_seen() {
    let area = area();
    let orbit = orbit(read);
    let mut numbers = Vec::new();
    for i in 0..300_000 {
        let number = number(&area);
        number.set(i);
        numbers.push(number);
    }
    for (i, number) in (0..).zip(&numbers).step_by(10_007) {
        assert_eq!(orbit.call(&Call::new().areas(&[&area]).arguments(&number.address())), Ok(i));
    }
}

fn untouched_memory_of_an_area_is_not_copied() {
    const BYTES: usize = 1 << 30;
    const STEP: usize = 64 << 10;
    let mut options = AreaOptions::default();
    options.capacity = BYTES;
    let area = Area::new(BYTES, &options).unwrap();
    let (start, _) = area.raw().unwrap();
    area.set_used(BYTES).unwrap();
    for at in (0..BYTES).step_by(STEP) {
        // SAFETY: the area has so many bytes.
        unsafe { start.add(at).cast::<i64>().write(i64::try_from(at).unwrap()) };
    }
    let orbit = Orbit::builder("test").entry(read).create().unwrap();
    let call = |at: usize| {
        // SAFETY: the area has more than `at` bytes.
        let place = address(unsafe { start.add(at) }.as_ptr());
        orbit.call(&Call::new().areas(&[&area]).arguments(&place)).unwrap()
    };
    for at in [0, STEP, BYTES - STEP] {
        assert_eq!(call(at), i64::try_from(at).unwrap());
    }
    assert_eq!(call(STEP + 4096), 0);
    let copied = orbit.memory().unwrap().mirror;
    assert!(copied <= BYTES / STEP * 4096 * 2, "{copied} bytes copied");
}

fn structures_with_pointers_are_seen() {
    let area = area();
    let mut lists: AreaVec<AreaVec<i64>> = AreaVec::new_in(area.clone());
    let orbit = orbit(|task| {
        // SAFETY: the address of such a list, which is in the area that the call names, as all its lists are.
        let lists = unsafe { &*task.pointer::<AreaVec<AreaVec<i64>>>().unwrap() };
        lists.iter().flatten().sum()
    });
    let place = area.allocate(std::alloc::Layout::new::<AreaVec<AreaVec<i64>>>()).unwrap();
    let place = place.cast::<AreaVec<AreaVec<i64>>>().as_ptr();
    let mut sum = 0;
    for i in 0..100 {
        let mut list = AreaVec::new_in(area.clone());
        list.extend(0..i);
        sum += (0..i).sum::<i64>();
        lists.push(list);
        // SAFETY: the place is the layout's; the copy is looked at by tasks alone, and never dropped.
        unsafe { std::ptr::copy_nonoverlapping(&raw const lists, place, 1) };
        assert_eq!(orbit.call(&Call::new().areas(&[&area]).arguments(&address(place))), Ok(sum));
    }
}

fn several_orbits_watch_one_area() {
    let (first_area, second_area) = (area(), area());
    let (a, b) = (number(&first_area), number(&second_area));
    let orbits = [orbit(read), orbit(read), orbit(read)];
    for i in 0..200_i64 {
        a.set(i);
        b.set(-i);
        for (index, orbit) in orbits.iter().enumerate() {
            if i % (i64::try_from(index).unwrap() + 1) == 0 {
                let areas = [&first_area, &second_area];
                assert_eq!(orbit.call(&Call::new().areas(&areas).arguments(&a.address())), Ok(i));
                assert_eq!(orbit.call(&Call::new().areas(&areas[1..]).arguments(&b.address())), Ok(-i));
            }
        }
    }
}

fn a_function_may_be_named_by_the_call() {
    fn other(task: &mut Task<'_>) -> i64 {
        i64::from(task.arguments()[0]) + 1_000
    }
    let orbit = orbit(|_| 1);
    assert_eq!(orbit.call(&Call::new().function(other).arguments(&[5])), Ok(1_005));
    assert_eq!(orbit.call(&Call::new()), Ok(1));
}

unsafe extern "C" fn c_task(arguments: *mut c_void, store: *mut c_void) -> c_long {
    // SAFETY: called with eight bytes of arguments, aligned as they are in C, and with what `c_init` returned.
    unsafe {
        *store.cast::<c_long>() += 1;
        *arguments.cast::<c_long>() * 100 + *store.cast::<c_long>()
    }
}

unsafe extern "C" fn c_init() -> *mut c_void {
    Box::into_raw(Box::new(7 as c_long)).cast()
}

fn c_functions_are_called() {
    // SAFETY: the function is given the arguments and the store that it expects.
    let orbit = unsafe { Orbit::builder("c").c_entry(c_task).c_init(c_init) }.create().unwrap();
    let three = 3_i64.to_ne_bytes();
    assert_eq!(orbit.call(&Call::new().arguments(&three)), Ok(308));
    // SAFETY: the function is given the arguments that it expects.
    let named = unsafe { Call::new().arguments(&three).c_function(c_task) };
    assert_eq!(orbit.call(&named), Ok(309));
}

fn addresses_without_code_are_refused() {
    static DATA: u64 = 7;
    let wrong: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_long =
        // SAFETY: only the address is used: whoever called it would crash, which is what the orbit is to notice before.
        unsafe { std::mem::transmute(&raw const DATA) };
    let orbit = orbit(|_| 1);
    let address = (&raw const DATA).addr();
    // SAFETY: the pointer is handed over and never called: it is refused before.
    let call = unsafe { Call::new().c_function(wrong) };
    assert_eq!(orbit.call(&call), Err(Error::NoFunction { address }));
    assert_eq!(orbit.call(&Call::new()), Ok(1));
    // SAFETY: the pointer is handed over and never called: it is refused before.
    let error = unsafe { Orbit::builder("wrong").c_entry(wrong) }.create().unwrap_err();
    assert_eq!(error, Error::NoFunction { address });
}

fn an_orbit_without_entry_needs_a_function() {
    let orbit = Orbit::builder("plain").create().unwrap();
    assert_eq!(orbit.call(&Call::new()), Err(Error::NoEntry { orbit: "plain".to_owned() }));
    assert_eq!(orbit.call(&Call::new().function(|_| 4)), Ok(4));
}

fn the_store_lasts_and_init_comes_first() {
    let orbit = Orbit::builder("store")
        .init(|| vec![10_i64])
        .entry(|task| {
            let byte = i64::from(task.arguments()[0]);
            let store = task.store::<Vec<i64>>().unwrap();
            store.push(byte);
            store.iter().sum()
        })
        .create()
        .unwrap();
    let mut sum = 10;
    for i in 0..100 {
        sum += i64::from(i);
        assert_eq!(orbit.call(&Call::new().arguments(&[i])), Ok(sum));
    }
}

static GLOBAL: AtomicI64 = AtomicI64::new(0);

fn the_orbit_has_what_main_had_at_its_creation() {
    GLOBAL.store(5, Ordering::SeqCst);
    let captured = Arc::new(vec![1_i64, 2, 3]);
    let inner = Arc::clone(&captured);
    let orbit = orbit(move |_| inner.iter().sum::<i64>() * 100 + GLOBAL.load(Ordering::SeqCst));
    GLOBAL.store(6, Ordering::SeqCst);
    assert_eq!(orbit.call(&Call::new()), Ok(605));
    assert_eq!(orbit.call(&Call::new()), Ok(605));
    assert_eq!(captured.len(), 3);
}

fn threads_call_at_once() {
    let area = area();
    let orbit = orbit(read);
    std::thread::scope(|scope| {
        for thread in 0..6_i64 {
            let (orbit, area) = (&orbit, &area);
            scope.spawn(move || {
                let number = number(area);
                let (areas, bytes) = ([area], number.address());
                let call = Call::new().areas(&areas).arguments(&bytes);
                for i in 0..300 {
                    let value = thread * 1_000 + i;
                    number.set(value);
                    if i % 3 == 0 {
                        let future = orbit.call_async(&call).unwrap();
                        number.set(-1);
                        assert_eq!(future.get(), Ok(value));
                    } else {
                        assert_eq!(orbit.call(&call), Ok(value));
                    }
                }
            });
        }
    });
}

fn futures_may_be_taken_in_any_order() {
    let orbit = orbit(|task| i64::from(task.arguments()[0]));
    let futures: Vec<_> = (0..30).map(|i| orbit.call_async(&Call::new().arguments(&[i])).unwrap()).collect();
    for (i, future) in futures.iter().enumerate().rev() {
        assert_eq!(future.get(), Ok(i64::try_from(i).unwrap()));
        assert_eq!(future.try_get(), Ok(Some(i64::try_from(i).unwrap())), "it can be asked again");
    }
}

fn dropped_futures_leave_nothing() {
    let orbit = orbit(|task| {
        let mut scratch = Scratch::new();
        task.send(scratch.data(b"nobody reads this")).unwrap();
        1
    });
    for _ in 0..500 {
        drop(orbit.call_async(&Call::new()).unwrap());
    }
    assert_eq!(orbit.call(&Call::new()), Ok(1));
    assert_eq!(orbit.statistics().unwrap().returned, 501);
}

fn no_return_value_keeps_nothing() {
    let orbit = orbit(|_| 1);
    for _ in 0..200 {
        let future = orbit.call_async(&Call::new().flags(Flags::NO_RETURN_VALUE)).unwrap();
        assert_eq!(future.get(), Err(Error::NoValue));
    }
    assert_eq!(orbit.call(&Call::new()), Ok(1));
}

fn calls_from_inside_are_errors() {
    let other = Arc::new(orbit(|_| 1));
    let pending = Arc::new(other.call_async(&Call::new()).unwrap());
    let (inner, future) = (Arc::clone(&other), Arc::clone(&pending));
    let orbit = orbit(move |_| {
        let refused = |result: Result<(), Error>| i64::from(matches!(result, Err(Error::Inside { .. })));
        refused(inner.call(&Call::new()).map(drop))
            + refused(inner.call_async(&Call::new()).map(drop))
            + refused(inner.destroy())
            + refused(future.get().map(drop))
            + refused(future.cancel().map(drop))
            + refused(Orbit::builder("nested").create().map(drop))
            + i64::from(matches!(
                Area::new(1, &orrery_orbit::AreaOptions::default()),
                Err(orrery_orbit::AreaError::InOrbit { .. })
            ))
    });
    assert_eq!(orbit.call(&Call::new()), Ok(7));
    assert_eq!((pending.get(), other.call(&Call::new())), (Ok(1), Ok(1)));
}

fn a_forked_child_of_main_is_told() {
    let area = area();
    let number = number(&area);
    let orbit = orbit(read);
    let (areas, bytes) = ([&area], number.address());
    let call = Call::new().areas(&areas).arguments(&bytes);
    number.set(3);
    let future = orbit.call_async(&call).unwrap();
    // SAFETY: main has no thread that could hold a lock that the child wants.
    match unsafe { libc::fork() } {
        0 => {
            let told = |error: Error| matches!(error, Error::OtherProcess { .. });
            let all = told(orbit.call(&call).unwrap_err())
                && told(orbit.call_async(&call).unwrap_err())
                && told(future.get().unwrap_err())
                && told(orbit.destroy().unwrap_err());
            drop(future);
            drop(orbit);
            // One of its own works, with the areas that it inherited.
            number.set(8);
            let own = Orbit::builder("own").entry(read).create().unwrap();
            let works = own.call(&call) == Ok(8);
            drop(own);
            // SAFETY: ends the child, and nothing of main's is flushed.
            unsafe { libc::_exit(i32::from(!(all && works))) }
        }
        child => {
            let child = Pid::from_raw(child).unwrap();
            let (_, status) = rustix::process::waitpid(Some(child), WaitOptions::empty()).unwrap().unwrap();
            assert_eq!(status.exit_status(), Some(0));
        }
    }
    assert_eq!(future.get(), Ok(3));
    assert_eq!(orbit.call(&call), Ok(3), "the child's writes are the child's");
}

fn destroying_is_final() {
    let (orbit, running, _hold) = busy(Orbit::builder("test"));
    let pid = orbit.pid().unwrap();
    orbit.destroy().unwrap();
    let gone = Error::Destroyed { orbit: "test".to_owned() };
    assert!(common::ends(pid));
    assert_eq!(running.get(), Err(gone.clone()));
    assert_eq!(orbit.call(&Call::new()), Err(gone.clone()));
    assert_eq!(orbit.life(), Err(gone));
    assert_eq!(orbit.destroy(), Ok(()));
    // A thread that waits is told.
    let (orbit, running, _hold) = busy(Orbit::builder("test"));
    let waiter = std::thread::spawn(move || running.get());
    std::thread::sleep(Duration::from_millis(30));
    orbit.destroy().unwrap();
    assert!(matches!(waiter.join().unwrap(), Err(Error::Destroyed { .. })));
}

fn the_program_may_reap_its_orbit() {
    let orbit =
        Orbit::builder("child").reaper(Reaper::Program).entry(|_| std::process::exit(3)).create().unwrap();
    let pid = Pid::from_raw(i32::try_from(orbit.pid().unwrap()).unwrap()).unwrap();
    assert!(wait_for_any(WaitOptions::NOHANG).unwrap().is_none(), "it is a child, and lives");
    assert!(orbit.call(&Call::new()).is_err());
    let (ended, status) = wait_for_any(WaitOptions::empty()).unwrap().unwrap();
    assert_eq!((ended, status.exit_status()), (pid, Some(3)));
    assert!(matches!(orbit.call(&Call::new()), Err(Error::Dead { .. })));
}

fn names_are_checked() {
    for name in ["", "a\0b", &"x".repeat(51)] {
        assert!(matches!(Orbit::builder(name).create(), Err(Error::Name { .. })), "{name:?}");
    }
    let error = Orbit::builder("x").queue(0).create().unwrap_err();
    assert!(error.to_string().contains("the bound of a queue"), "{error}");
    assert_eq!(Orbit::builder("Prüfer 1").entry(|_| 1).create().unwrap().call(&Call::new()), Ok(1));
}

fn statistics_count() {
    let area = area();
    let number = number(&area);
    let orbit = orbit(read);
    for i in 0..10 {
        number.set(i);
        orbit.call(&Call::new().areas(&[&area]).arguments(&number.address())).unwrap();
    }
    let seen = orbit.statistics().unwrap();
    assert_eq!((seen.calls, seen.returned, seen.failed, seen.queued(), seen.bound), (10, 10, 0, 0, 64));
    assert!(seen.snapshot_pages >= 10 && seen.snapshot_nanoseconds > 0, "{seen:?}");
    assert_eq!(seen.domain, u64::from(orbit.pid().unwrap()));
}

fn every_placement_works() {
    let last = rustix::thread::sched_getcpu();
    for placement in [Placement::Auto, Placement::Caller, Placement::Anywhere, Placement::Cpu(last)] {
        let orbit = Orbit::builder("placed").placement(placement).entry(|_| 5).create().unwrap();
        for round in 0..200 {
            assert_eq!(orbit.call(&Call::new()), Ok(5));
            if round % 50 == 0 {
                assert_eq!(orbit.call_async(&Call::new()).unwrap().get(), Ok(5));
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

fn a_waiting_time_is_kept() {
    let (_orbit, running, hold) = busy(Orbit::builder("busy"));
    assert_eq!(running.try_get(), Ok(None));
    let timeout = Duration::from_millis(5);
    assert!(matches!(running.get_within(timeout), Err(Error::TimedOut { .. })));
    assert!(matches!(running.receive_within(timeout), Err(Error::TimedOut { .. })));
    hold.release();
    assert_eq!(running.get(), Ok(0));
}
