//! Memory of another context in place of one's own, by right.

use orrery_context::{Context, Error, Overlay, Spec, create};

use crate::pages::{PAGE, Pages, is_mapped};
use crate::support::server;

pub(crate) fn memory_is_overlaid_by_copy() {
    let memory = Pages::new(2);
    memory.poke(0, 5);
    // The first of them.
    let page = memory.part(0, 1);
    let spec = Spec::new().may_access(0, usize::MAX & !(PAGE - 1));
    let other = create(&spec, move |start| {
        let mut arrival = start.arrival;
        loop {
            page.overlay(arrival.caller, Overlay::Copy).unwrap();
            let seen = page.peek(0);
            page.poke(0, 77);
            page.remove_overlay().unwrap();
            assert!(!is_mapped(page.byte(0)));
            assert!(matches!(page.remove_overlay(), Err(Error::Memory { .. })));
            arrival = arrival.caller.switch(u64::from(seen), &[]).unwrap();
        }
    })
    .unwrap();
    for value in [6, 7] {
        page.poke(0, value);
        assert_eq!(other.switch(0, &[]).unwrap().word, u64::from(value));
        assert_eq!(page.peek(0), value, "writes stay with the copy");
    }
    // The creator has every right to its context.
    let theirs = create(&Spec::new(), move |start| {
        page.poke(0, 99);
        start.creator.switch(0, &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    theirs.switch(0, &[]).unwrap();
    page.overlay(theirs, Overlay::Copy).unwrap();
    assert_eq!(page.peek(0), 99);
}

pub(crate) fn memory_is_overlaid_by_sharing() {
    let memory = Pages::new(2);
    let page = memory.part(0, 1);
    let spec = Spec::new().may_access(memory.address(), 2 * PAGE);
    let other = create(&spec, move |start| {
        let mut arrival = start.arrival;
        loop {
            page.overlay(arrival.caller, Overlay::Share).unwrap();
            page.poke(0, page.peek(0) + 1);
            page.remove_overlay().unwrap();
            arrival = arrival.caller.switch(0, &[]).unwrap();
        }
    })
    .unwrap();
    for round in 0..50 {
        memory.poke(0, round);
        memory.poke(PAGE, round);
        other.switch(0, &[]).unwrap();
        assert_eq!(memory.peek(0), round + 1);
        assert_eq!(memory.peek(PAGE), round);
    }
    // What was given out is still no other context's.
    let outsider = create(&Spec::new(), server(move |_| u64::from(memory.peek(0)))).unwrap();
    memory.poke(0, 200);
    assert_eq!(outsider.switch(0, &[]).unwrap().word, 50);
}

pub(crate) fn overlays_need_rights() {
    let memory = Pages::new(3);
    // The page in the middle.
    let spec = Spec::new().may_access(memory.address() + PAGE, PAGE);
    let other = create(&spec, move |start| {
        let attempts = [(0, 1), (0, 2), (1, 2), (2, 1), (0, 3), (1, 1)];
        let mut allowed = 0;
        for (index, (page, count)) in attempts.into_iter().enumerate() {
            for how in [Overlay::Copy, Overlay::Share] {
                match memory.part(page, count).overlay(start.creator, how) {
                    Ok(()) => allowed |= 1 << index,
                    Err(Error::Denied { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
        start.creator.switch(allowed, &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 1 << 5);
    let page = memory.part(0, 1);
    let plain = create(&Spec::new(), move |start| {
        let denied = page.overlay(start.creator, Overlay::Copy);
        start.creator.switch(u64::from(matches!(denied, Err(Error::Denied { .. }))), &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(plain.switch(0, &[]).unwrap().word, 1);
    // With every right, what is not there still is not.
    page.remove();
    let gone = create(&Spec::new(), server(|word| word)).unwrap();
    assert!(matches!(page.overlay(gone, Overlay::Copy), Err(Error::Memory { .. })));
    assert!(matches!(page.overlay(gone, Overlay::Share), Err(Error::Memory { .. })));
    assert_eq!(gone.switch(1, &[]).unwrap().word, 1);
}

pub(crate) fn rights_only_narrow() {
    let memory = Pages::new(3);
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    let copy = |page| memory.part(page, 1).overlay(other, Overlay::Copy);
    let start = memory.address();
    copy(0).unwrap();
    other.restrict(&[(start + PAGE, 2 * PAGE)]).unwrap();
    assert!(matches!(copy(0), Err(Error::Denied { .. })));
    copy(1).unwrap();
    other.restrict(&[(start, 2 * PAGE)]).unwrap();
    assert!(matches!(copy(0), Err(Error::Denied { .. })), "what was given up stays given up");
    copy(1).unwrap();
    assert!(matches!(copy(2), Err(Error::Denied { .. })));
    other.restrict(&[]).unwrap();
    assert!(matches!(copy(1), Err(Error::Denied { .. })));
    assert!(matches!(other.restrict(&[(1, 2)]), Err(Error::Unaligned { .. })));
    assert_eq!(other.switch(1, &[]).unwrap().word, 1);
}

/// Ranges of whatever size are shared one after the other, at one address; what somebody still has stays one memory.
pub(crate) fn overlays_of_varying_sizes_are_shared() {
    let memory = Pages::new(16);
    let spec = Spec::new().may_access(memory.address(), 16 * PAGE);
    let sharer = |spec: &Spec| {
        create(spec, move |start| {
            let mut arrival = start.arrival;
            loop {
                let [count, first, ..] = arrival.word.to_le_bytes().map(usize::from);
                let keeps = arrival.word >> 16 != 0;
                let part = memory.part(first, count);
                let shared = part.overlay(arrival.caller, Overlay::Share);
                if shared.is_ok() {
                    part.poke(0, part.peek(0) + 1);
                    part.poke(count * PAGE - 1, part.peek(count * PAGE - 1) + 1);
                    if !keeps {
                        part.remove_overlay().unwrap();
                    }
                }
                arrival = arrival.caller.switch(u64::from(shared.is_ok()), &[]).unwrap();
            }
        })
        .unwrap()
    };
    // Whoever is created later has a name of the one before, by which that one lives.
    let second = sharer(&spec);
    let first = sharer(&spec);
    let mut expected = vec![0_u8; 16 * PAGE];
    let share = |expected: &mut Vec<u8>, other: Context, from: usize, count: usize, keeps: u64| {
        let done = other.switch(keeps << 16 | (from << 8 | count) as u64, &[]).unwrap().word == 1;
        if done {
            expected[from * PAGE] += 1;
            expected[(from + count) * PAGE - 1] += 1;
        }
        assert!((0..16 * PAGE).all(|at| memory.peek(at) == expected[at]), "{from} {count}");
        done
    };
    for (from, count) in [(0, 2), (0, 1), (0, 2), (0, 4), (0, 16), (1, 3), (3, 8), (0, 16), (15, 1)] {
        for other in [first, second] {
            assert!(share(&mut expected, other, from, count, 0), "{count} pages from page {from} on");
        }
    }
    // As long as one has a range, no other one is cut from it, but the same range is shared with all.
    assert!(share(&mut expected, first, 4, 4, 1));
    for (from, count) in [(4, 2), (0, 16), (6, 4)] {
        assert!(!share(&mut expected, second, from, count, 0));
    }
    assert!(share(&mut expected, second, 4, 4, 0) && share(&mut expected, second, 8, 4, 0));
    memory.poke(5 * PAGE, 77);
    expected[5 * PAGE] = 77;
    // It ends with whoever had it.
    first.close().unwrap();
    let start = std::time::Instant::now();
    while !share(&mut expected, second, 0, 16, 0) {
        assert!(start.elapsed() < std::time::Duration::from_secs(20));
    }
}
