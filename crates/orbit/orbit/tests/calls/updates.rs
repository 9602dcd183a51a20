//! Updates: how they arrive, what they may change, and who may send them.

use std::alloc::Layout;
use std::sync::atomic::{AtomicU32, Ordering};

use orrery_orbit::{Call, Error, Orbit, Record, Scratch, send};

use crate::common::{area, number};
use crate::orbit;
use crate::queue::busy;

pub(crate) fn updates_arrive_in_order() {
    let orbit = orbit(|task| {
        let mut scratch = Scratch::new();
        for i in 0..5_u8 {
            for j in 0..i {
                scratch.data(&[i, j]);
            }
            task.send(&mut scratch).unwrap();
            assert!(scratch.is_empty());
        }
        9
    });
    let finished = orbit.call_and_receive(&Call::new()).unwrap();
    assert_eq!(finished.result, Ok(9));
    assert_eq!(finished.updates.len(), 5);
    for (i, update) in (0..).zip(&finished.updates) {
        let update = update.as_ref().unwrap();
        assert_eq!((update.call(), update.len()), (finished.call, usize::from(i)));
        for (j, record) in (0..).zip(update.records()) {
            assert_eq!(record, Record::Data(&[i, j]));
        }
    }
    let future = orbit.call_async(&Call::new()).unwrap();
    let mut count = 0;
    while let Some(update) = future.receive().unwrap() {
        assert_eq!(update.len(), count);
        count += 1;
    }
    assert_eq!((count, future.get()), (5, Ok(9)));
}

pub(crate) fn updates_arrive_before_the_end() {
    // That the task has begun is said by an update.
    let (_orbit, running, hold) = busy(Orbit::builder("early"));
    assert_eq!(running.try_get(), Ok(None), "the task still runs");
    hold.release();
    assert_eq!(running.receive(), Ok(None));
    assert_eq!(running.finish().unwrap().result, Ok(0));
}

pub(crate) fn updates_of_queued_calls_are_kept_apart() {
    let orbit = orbit(|task| {
        let byte = task.arguments()[0];
        for i in 0..3 {
            task.send(Scratch::new().data(&[byte, i])).unwrap();
        }
        0
    });
    for _ in 0..20 {
        let futures: Vec<_> =
            (0..50).map(|byte| orbit.call_async(&Call::new().arguments(&[byte])).unwrap()).collect();
        // Main looks when all of them are over, so that all updates are there at once.
        assert_eq!(futures[49].get(), Ok(0));
        for (byte, future) in (0..).zip(futures) {
            let updates = future.finish().unwrap().updates;
            assert_eq!(updates.len(), 3);
            for (i, update) in (0..).zip(&updates) {
                let update = update.as_ref().unwrap();
                assert_eq!(update.records().next(), Some(Record::Data(&[byte, i])));
            }
        }
    }
}

pub(crate) fn large_updates_arrive() {
    let orbit = orbit(|task| {
        let len = task.argument::<usize>().unwrap();
        let bytes: Vec<u8> = (0..len).map(|i| u8::try_from(i % 253).unwrap()).collect();
        task.send(Scratch::new().data(&bytes)).unwrap();
        0
    });
    for len in [0, 1, 30_000, 40_000, 5 << 20, 100 << 20] {
        let finished = orbit.call_and_receive(&Call::new().arguments(&usize::to_ne_bytes(len))).unwrap();
        let update = finished.updates[0].as_ref().unwrap();
        let Some(Record::Data(bytes)) = update.records().next() else { panic!("no data") };
        assert!(bytes.len() == len && (0..len).all(|i| usize::from(bytes[i]) == i % 253));
    }
    let orbit = Orbit::builder("small").largest_update(1000).entry(|task| {
        let first = task.send(Scratch::new().data(&[1; 5000]));
        task.send(Scratch::new().data(&[1; 50])).unwrap();
        i64::from(first.is_ok())
    });
    let finished = orbit.create().unwrap().call_and_receive(&Call::new()).unwrap();
    assert!(matches!(&finished.updates[0], Err(Error::BadUpdate { .. })));
    assert_eq!(finished.updates[1].as_ref().unwrap().len(), 1);
}

pub(crate) fn many_updates_of_a_synchronous_call_arrive() {
    // More than any socket holds: main has to take them in while it waits.
    let orbit = orbit(|task| {
        let mut scratch = Scratch::new();
        for i in 0..3_000_u32 {
            task.send(scratch.data(&i.to_ne_bytes()).data(&[7; 3_000])).unwrap();
        }
        3_000
    });
    let finished = orbit.call_and_receive(&Call::new()).unwrap();
    assert_eq!((finished.result.unwrap(), finished.updates.len()), (3_000, 3_000));
    for (i, update) in (0_u32..).zip(finished.updates) {
        assert_eq!(update.unwrap().records().next(), Some(Record::Data(&i.to_ne_bytes())));
    }
}

static APPLIED: AtomicU32 = AtomicU32::new(0);

extern "C" fn operation(count: usize, arguments: *mut usize) -> usize {
    APPLIED.fetch_add(1, Ordering::SeqCst);
    // SAFETY: an operation is given as many arguments as it is told.
    unsafe { std::slice::from_raw_parts(arguments, count) }.iter().sum()
}

pub(crate) fn updates_are_applied_one_by_one() {
    let area = area();
    let (first, second) = (number(&area), number(&area));
    let orbit = orbit(|task| {
        let [first, second] =
            task.argument::<[usize; 2]>().unwrap().map(std::ptr::with_exposed_provenance_mut::<i64>);
        // SAFETY: of numbers in an area that the call names; the task's copy of them is the task's alone.
        let sum = unsafe {
            *first += 1;
            *first
        };
        let mut scratch = Scratch::new();
        scratch
            .modify(first, &sum.to_ne_bytes())
            .modify(second, &77_i64.to_ne_bytes())
            .operation(operation, &[1, 20, 300]);
        task.send(&mut scratch).unwrap();
        0
    });
    first.set(10);
    let mut arguments = first.address().to_vec();
    arguments.extend(second.address());
    let areas = [&area];
    let call = Call::new().areas(&areas).arguments(&arguments);
    let finished = orbit.call_and_receive(&call).unwrap();
    let update = finished.updates[0].as_ref().unwrap();
    assert_eq!((first.get(), second.get()), (10, 0), "nothing is applied by itself");
    let records: Vec<_> = update.records().collect();
    // SAFETY: nobody else uses the numbers, and the task meant them.
    unsafe { records[0].apply() }.unwrap();
    assert_eq!((first.get(), second.get()), (11, 0), "the second is skipped");
    // SAFETY: `operation` may be called with any numbers.
    let applied = unsafe { records[2].apply() };
    assert_eq!(applied, Ok(321));
    assert_eq!(orbit.call(&call), Ok(0));
    let finished = orbit.call_and_receive(&call).unwrap();
    // SAFETY: nobody else uses the numbers, the task meant them, and `operation` may be called with any
    // numbers.
    unsafe { finished.updates[0].as_ref().unwrap().apply() }.unwrap();
    assert_eq!((first.get(), second.get()), (12, 77));
    assert_eq!(APPLIED.load(Ordering::SeqCst), 2);
}

pub(crate) fn bad_updates_are_refused() {
    let area = area();
    let inside = number(&area);
    let orbit = orbit(|task| {
        let target = task.pointer::<i64>().unwrap();
        let local = 0_u64;
        let mut scratch = Scratch::new();
        // A good record before a bad one does not save it.
        let _ = task.send(scratch.modify(target, &[0; 8]).modify(&raw const local, &[0; 8]));
        let _ = task.send(scratch.modify(target, &vec![0; 1 << 30 >> 4]));
        let _ = task.send(scratch.modify(std::ptr::null::<u8>(), &[1]));
        let bytes = scratch.data(b"whole").bytes().to_vec();
        let _ = orrery_orbit::send_bytes(&bytes[..bytes.len() - 3]);
        let _ = orrery_orbit::send_bytes(&[0xff; 64]);
        // SAFETY: only the address is used: main has to refuse it.
        let data: orrery_orbit::Operation = unsafe { std::mem::transmute(target) };
        scratch.clear();
        let _ = task.send(scratch.operation(data, &[]));
        let _ = task.send(scratch.modify(target, &5_i64.to_ne_bytes()));
        0
    });
    let areas = [&area];
    let bytes = inside.address();
    let finished = orbit.call_and_receive(&Call::new().areas(&areas).arguments(&bytes)).unwrap();
    assert_eq!(finished.result, Ok(0));
    let (good, bad) = finished.updates.split_last().unwrap();
    assert_eq!(bad.len(), 6);
    for update in bad {
        assert!(matches!(update, Err(Error::BadUpdate { .. })), "{update:?}");
    }
    // SAFETY: nobody else uses the number, which the task meant.
    unsafe { good.as_ref().unwrap().apply() }.unwrap();
    assert_eq!(inside.get(), 5);
}

/// What an update may write is blocks: what is between them and in freed ones is the allocator's of main's.
pub(crate) fn updates_beside_blocks_are_refused() {
    let area = area();
    let layout = Layout::array::<u64>(5).unwrap();
    let allocate = || area.allocate(layout).unwrap();
    let [live, freed, later, last] = [allocate(), allocate(), allocate(), allocate()];
    // SAFETY: the block was allocated above with this layout, and nobody uses it any more.
    unsafe { area.free(freed, layout) };
    let orbit = orbit(|task| {
        let [live, freed, later] =
            task.argument::<[usize; 3]>().unwrap().map(std::ptr::with_exposed_provenance::<u8>);
        let word = 7_u64.to_ne_bytes();
        let mut scratch = Scratch::new();
        for target in [freed, freed.wrapping_add(8), live.wrapping_add(36), live.wrapping_add(40)] {
            let _ = task.send(scratch.modify(target, &word));
        }
        let _ = task.send(scratch.modify(live, &[7; 80]));
        let _ = task.send(scratch.modify(live, &[7; 40]));
        let _ = task.send(scratch.modify(later, &word));
        0
    });
    let mut arguments = Vec::new();
    for block in [live, freed, later] {
        arguments.extend(block.addr().get().to_ne_bytes());
    }
    let areas = [&area];
    let finished = orbit.call_and_receive(&Call::new().areas(&areas).arguments(&arguments)).unwrap();
    assert_eq!(finished.updates.len(), 7);
    for update in &finished.updates[..5] {
        assert!(matches!(update, Err(Error::BadUpdate { .. })), "{update:?}");
    }
    // One that was good as it arrived is looked at again.
    // SAFETY: the block was allocated above with this layout, and nobody uses it any more.
    unsafe { area.free(later, layout) };
    // SAFETY: the block is the test's, and the task meant it.
    let applied = |update: usize| unsafe { finished.updates[update].as_ref().unwrap().apply() };
    assert_eq!(applied(5), Ok(()));
    assert!(applied(6).is_err());
    // The allocator is whole.
    // SAFETY: the block was allocated above with this layout, and nobody uses it any more.
    unsafe { area.free(last, layout) };
    for size in [8, 40, 100, 4000] {
        assert!(area.allocate(Layout::from_size_align(size, 8).unwrap()).is_ok());
    }
}

pub(crate) fn sending_outside_of_a_task_is_an_error() {
    let mut scratch = Scratch::new();
    scratch.data(b"x");
    assert!(matches!(send(&mut scratch), Err(Error::Outside { .. })));
    assert_eq!(scratch.len(), 1, "nothing is lost");
    let orbit = Orbit::builder("init")
        .init(|| matches!(send(Scratch::new().data(b"x")), Err(Error::Outside { .. })))
        .entry(|task| i64::from(*task.store::<bool>().unwrap()))
        .create()
        .unwrap();
    assert_eq!(orbit.call(&Call::new()), Ok(1));
}
