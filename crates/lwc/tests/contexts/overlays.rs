//! Memory of another context in place of one's own, by right.

use orrery_lwc::context::{Error, Overlay, Spec, create, remove_overlay};

use crate::support::{PAGE, is_mapped, mapped, server};

pub(crate) fn memory_is_overlaid_by_copy() {
    let memory = mapped(2);
    unsafe { memory.write(5) };
    let address = memory.expose_provenance();
    let spec = Spec::new().may_access(0, usize::MAX & !(PAGE - 1));
    let other = create(&spec, move |start| {
        let memory = std::ptr::with_exposed_provenance_mut::<u8>(address);
        let mut arrival = start.arrival;
        loop {
            unsafe { arrival.caller.overlay(memory, PAGE, Overlay::Copy).unwrap() };
            let seen = unsafe { memory.read_volatile() };
            unsafe { memory.write_volatile(77) };
            unsafe { remove_overlay(memory, PAGE).unwrap() };
            assert!(!is_mapped(memory));
            assert!(matches!(unsafe { remove_overlay(memory, PAGE) }, Err(Error::Memory { .. })));
            arrival = arrival.caller.switch(u64::from(seen), &[]).unwrap();
        }
    })
    .unwrap();
    for value in [6, 7] {
        unsafe { memory.write_volatile(value) };
        assert_eq!(other.switch(0, &[]).unwrap().word, u64::from(value));
        assert_eq!(unsafe { memory.read_volatile() }, value, "writes stay with the copy");
    }
    // The creator has every right to its context.
    let theirs = create(&Spec::new(), move |start| {
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(address).write_volatile(99) };
        start.creator.switch(0, &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    theirs.switch(0, &[]).unwrap();
    unsafe { theirs.overlay(memory, PAGE, Overlay::Copy).unwrap() };
    assert_eq!(unsafe { memory.read_volatile() }, 99);
}

pub(crate) fn memory_is_overlaid_by_sharing() {
    let memory = mapped(2);
    let address = memory.expose_provenance();
    let spec = Spec::new().may_access(address, 2 * PAGE);
    let other = create(&spec, move |start| {
        let memory = std::ptr::with_exposed_provenance_mut::<u8>(address);
        let mut arrival = start.arrival;
        loop {
            unsafe { arrival.caller.overlay(memory, PAGE, Overlay::Share).unwrap() };
            unsafe { memory.write_volatile(memory.read_volatile() + 1) };
            unsafe { remove_overlay(memory, PAGE).unwrap() };
            arrival = arrival.caller.switch(0, &[]).unwrap();
        }
    })
    .unwrap();
    for round in 0..50 {
        unsafe { memory.write_volatile(round) };
        unsafe { memory.add(PAGE).write_volatile(round) };
        other.switch(0, &[]).unwrap();
        assert_eq!(unsafe { memory.read_volatile() }, round + 1);
        assert_eq!(unsafe { memory.add(PAGE).read_volatile() }, round);
    }
    // What was given out is still no other context's.
    let outsider = create(
        &Spec::new(),
        server(move |_| {
            u64::from(unsafe { std::ptr::with_exposed_provenance::<u8>(address).read_volatile() })
        }),
    )
    .unwrap();
    unsafe { memory.write_volatile(200) };
    assert_eq!(outsider.switch(0, &[]).unwrap().word, 50);
}

pub(crate) fn overlays_need_rights() {
    let memory = mapped(3);
    let address = memory.expose_provenance();
    // The page in the middle.
    let spec = Spec::new().may_access(address + PAGE, PAGE);
    let other = create(&spec, move |start| {
        let memory = std::ptr::with_exposed_provenance_mut::<u8>(address);
        let attempts = [(0, 1), (0, 2), (1, 2), (2, 1), (0, 3), (1, 1)];
        let mut allowed = 0;
        for (index, (page, count)) in attempts.into_iter().enumerate() {
            for how in [Overlay::Copy, Overlay::Share] {
                match unsafe { start.creator.overlay(memory.add(page * PAGE), count * PAGE, how) } {
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
    let plain = create(&Spec::new(), move |start| {
        let memory = std::ptr::with_exposed_provenance_mut::<u8>(address);
        let denied = unsafe { start.creator.overlay(memory, PAGE, Overlay::Copy) };
        start.creator.switch(u64::from(matches!(denied, Err(Error::Denied { .. }))), &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(plain.switch(0, &[]).unwrap().word, 1);
    // With every right, what is not there still is not.
    unsafe { libc::munmap(memory.cast(), PAGE) };
    let gone = create(&Spec::new(), server(|word| word)).unwrap();
    assert!(matches!(unsafe { gone.overlay(memory, PAGE, Overlay::Copy) }, Err(Error::Memory { .. })));
    assert!(matches!(unsafe { gone.overlay(memory, PAGE, Overlay::Share) }, Err(Error::Memory { .. })));
    assert_eq!(gone.switch(1, &[]).unwrap().word, 1);
}

pub(crate) fn rights_only_narrow() {
    let memory = mapped(3);
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    let copy = |page: usize| unsafe { other.overlay(memory.add(page * PAGE), PAGE, Overlay::Copy) };
    let start = memory.addr();
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
