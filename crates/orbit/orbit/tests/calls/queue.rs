//! Calls that wait for an orbit: which are skipped, cancelled, or refused.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use orrery_orbit::{BackPressure, Call, Error, Flags, Orbit, Scratch, Task};

use crate::common::{area, number_on_its_page, read};

/// Says that it has begun, then waits for a byte from the pipe that the argument names.
pub(crate) fn wait(task: &mut Task<'_>) -> i64 {
    task.send(Scratch::new().data(b"begun")).unwrap();
    // SAFETY: its callers pass the end of a pipe that is open in main, so that the orbit has it since its creation.
    let pipe = unsafe { BorrowedFd::borrow_raw(task.argument::<i32>().unwrap()) };
    i64::from(rustix::io::read(pipe, &mut [0; 1]) != Ok(1))
}

/// An orbit that is busy until it is released, so that calls behind wait.
pub(crate) fn busy(builder: orrery_orbit::Builder) -> (Orbit, orrery_orbit::Future, Hold) {
    let (read, write) = rustix::pipe::pipe().unwrap();
    let orbit = builder.entry(|task| i64::from(task.arguments()[0])).create().unwrap();
    let pipe = read.as_raw_fd().to_ne_bytes();
    let future = orbit.call_async(&Call::new().function(wait).arguments(&pipe)).unwrap();
    // Until the orbit has taken it, it counts as waiting.
    assert_eq!(future.receive().unwrap().unwrap().len(), 1);
    (orbit, future, Hold(write))
}

/// Keeps an orbit busy.
pub(crate) struct Hold(OwnedFd);

impl Hold {
    pub(crate) fn release(self) {
        assert_eq!(rustix::io::write(&self.0, b"x"), Ok(1));
    }
}

pub(crate) fn same_arguments_are_skipped() {
    let (orbit, _running, hold) = busy(Orbit::builder("busy"));
    let once = orbit.call_async(&Call::new().arguments(&[1])).unwrap();
    let same = Call::new().arguments(&[1]).flags(Flags::SKIP_SAME_ARGUMENT);
    assert_eq!(orbit.call_async(&same).unwrap_err(), Error::Skipped { waiting: once.call() });
    let other = Call::new().arguments(&[2]).flags(Flags::SKIP_SAME_ARGUMENT);
    let other = orbit.call_async(&other).unwrap();
    let function = Call::new().arguments(&[1]).function(|_| 77).flags(Flags::SKIP_SAME_ARGUMENT);
    let function = orbit.call_async(&function).unwrap();
    hold.release();
    assert_eq!((once.get(), other.get(), function.get()), (Ok(1), Ok(2), Ok(77)));
    assert_eq!(orbit.call(&same), Ok(1), "nothing waits any more");
}

pub(crate) fn any_waiting_call_skips() {
    let (orbit, running, hold) = busy(Orbit::builder("busy"));
    let skip = Call::new().arguments(&[2]).flags(Flags::SKIP_ANY);
    let first = orbit.call_async(&skip).unwrap();
    assert_eq!(orbit.call_async(&skip).unwrap_err(), Error::Skipped { waiting: first.call() });
    hold.release();
    assert_eq!((running.get(), first.get()), (Ok(0), Ok(2)));
}

pub(crate) fn same_arguments_are_cancelled() {
    let (orbit, _running, hold) = busy(Orbit::builder("busy"));
    let cancellable =
        |byte| orbit.call_async(&Call::new().arguments(&[byte]).flags(Flags::CANCELLABLE)).unwrap();
    let (one, two) = (cancellable(1), cancellable(2));
    let firm = orbit.call_async(&Call::new().arguments(&[1])).unwrap();
    let last = orbit.call_async(&Call::new().arguments(&[1]).flags(Flags::CANCEL_SAME_ARGUMENT)).unwrap();
    assert_eq!(one.get(), Err(Error::Cancelled { call: one.call() }));
    hold.release();
    assert_eq!((two.get(), firm.get(), last.get()), (Ok(2), Ok(1), Ok(1)));
}

pub(crate) fn any_cancellable_call_is_cancelled() {
    let (orbit, running, hold) = busy(Orbit::builder("busy"));
    let waiting: Vec<_> = (1..10)
        .map(|byte| orbit.call_async(&Call::new().arguments(&[byte]).flags(Flags::CANCELLABLE)).unwrap())
        .collect();
    let last = orbit.call_async(&Call::new().arguments(&[50]).flags(Flags::CANCEL_ANY)).unwrap();
    for future in &waiting {
        assert_eq!(future.get(), Err(Error::Cancelled { call: future.call() }));
    }
    hold.release();
    assert_eq!((running.get(), last.get()), (Ok(0), Ok(50)));
}

pub(crate) fn a_future_cancels_its_call() {
    let (orbit, running, hold) = busy(Orbit::builder("busy"));
    let waiting = orbit.call_async(&Call::new().arguments(&[1])).unwrap();
    assert_eq!(running.cancel(), Ok(false), "it runs");
    assert_eq!(waiting.cancel(), Ok(true));
    assert_eq!(waiting.cancel(), Ok(false), "it is cancelled already");
    assert_eq!(waiting.get(), Err(Error::Cancelled { call: waiting.call() }));
    hold.release();
    assert_eq!(running.get(), Ok(0));
    assert_eq!(running.cancel(), Ok(false), "it is over");
}

pub(crate) fn cancelled_calls_leave_their_pages_to_the_next() {
    let area = area();
    let numbers: Vec<_> = (0..8).map(|_| number_on_its_page(&area)).collect();
    let (orbit, _running, hold) = busy(Orbit::builder("busy"));
    let areas = [&area];
    let mut futures = Vec::new();
    for (i, number) in (0..).zip(&numbers) {
        number.set(i + 1);
        let bytes = numbers[0].address();
        futures.push(orbit.call_async(&Call::new().areas(&areas).arguments(&bytes).function(read)).unwrap());
    }
    // Only the first and the last stay; the last sees what the cancelled ones brought.
    for future in &futures[1..7] {
        assert_eq!(future.cancel(), Ok(true));
    }
    hold.release();
    for (i, number) in (0..).zip(&numbers) {
        let bytes = number.address();
        let seen = orbit.call_async(&Call::new().areas(&areas).arguments(&bytes).function(read)).unwrap();
        assert_eq!(seen.get(), Ok(i + 1));
    }
    assert_eq!((futures[0].get(), futures[7].get()), (Ok(1), Ok(1)));
}

pub(crate) fn a_full_queue_fails() {
    let builder = Orbit::builder("full").queue(3).back_pressure(BackPressure::Fail);
    let (orbit, running, hold) = busy(builder);
    let waiting = [(); 2].map(|()| orbit.call_async(&Call::new().arguments(&[1])).unwrap());
    let full = Error::QueueFull { orbit: "full".to_owned(), bound: 3 };
    assert_eq!(orbit.call_async(&Call::new().arguments(&[1])).unwrap_err(), full);
    assert_eq!(orbit.call(&Call::new().arguments(&[1])), Err(full));
    hold.release();
    assert_eq!(running.get(), Ok(0));
    assert!(waiting.iter().all(|future| future.get() == Ok(1)));
}

pub(crate) fn a_full_queue_is_waited_for() {
    let (orbit, _running, hold) = busy(Orbit::builder("full").queue(1).back_pressure(BackPressure::Wait));
    let releaser = std::thread::spawn(|| {
        std::thread::sleep(Duration::from_millis(30));
        hold.release();
    });
    for i in 0..20 {
        let future = orbit.call_async(&Call::new().arguments(&[i])).unwrap();
        drop(future);
    }
    assert_eq!(orbit.call(&Call::new().arguments(&[9])), Ok(9));
    releaser.join().unwrap();
    let timeout = BackPressure::WaitAtMost(Duration::from_millis(30));
    let (orbit, running, hold) = busy(Orbit::builder("full").queue(1).back_pressure(timeout));
    assert!(matches!(orbit.call(&Call::new().arguments(&[1])), Err(Error::QueueFull { .. })));
    hold.release();
    assert_eq!(running.get(), Ok(0));
}

pub(crate) fn a_full_queue_makes_room() {
    let (orbit, _running, hold) =
        busy(Orbit::builder("full").queue(3).back_pressure(BackPressure::CancelOldest));
    let call = |byte| orbit.call_async(&Call::new().arguments(&[byte]).flags(Flags::CANCELLABLE)).unwrap();
    let (oldest, old, new) = (call(1), call(2), call(3));
    assert_eq!(oldest.get(), Err(Error::Cancelled { call: oldest.call() }));
    hold.release();
    assert_eq!((old.get(), new.get()), (Ok(2), Ok(3)));
}

/// Returns the processor time of this process so far.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap())
}

/// Their cost does not grow with how many there are: some microseconds each, not half a millisecond.
pub(crate) fn a_hundred_thousand_calls_wait_and_are_answered() {
    const CALLS: usize = 100_000;
    let (orbit, running, hold) = busy(Orbit::builder("busy").queue(1 << 17));
    let begin = processor_time();
    let calls: Vec<_> = (0..CALLS).map(|_| orbit.call_async(&Call::new().arguments(&[3])).unwrap()).collect();
    hold.release();
    assert_eq!(running.get(), Ok(0));
    assert!(calls.iter().all(|call| call.get() == Ok(3)));
    let took = processor_time() - begin;
    assert!(took < Duration::from_secs(15), "{took:?}");
}
