//! What a new context has of its creator: memory.

use std::sync::atomic::{AtomicU64, Ordering};

use orrery_lwc::context::{Error, Spec, create};

use crate::support::{PAGE, is_mapped, mapped, server};

pub(crate) fn memory_is_a_copy() {
    static GLOBAL: AtomicU64 = AtomicU64::new(1);
    let mut boxed = Box::new(1_u64);
    let other = create(&Spec::new(), |start| {
        let mut arrival = start.arrival;
        loop {
            GLOBAL.fetch_add(arrival.word, Ordering::SeqCst);
            *boxed += arrival.word;
            arrival = arrival.caller.switch(GLOBAL.load(Ordering::SeqCst) * 1000 + *boxed, &[]).unwrap();
        }
    })
    .unwrap();
    GLOBAL.store(500, Ordering::SeqCst);
    *boxed = 500;
    assert_eq!(other.switch(1, &[]).unwrap().word, 2002);
    assert_eq!(other.switch(1, &[]).unwrap().word, 3003);
    assert_eq!((GLOBAL.load(Ordering::SeqCst), *boxed), (500, 500));
}

pub(crate) fn shared_memory_is_one() {
    let memory = mapped(4);
    unsafe { memory.add(PAGE).write(7) };
    // The two pages in the middle; those beside stay private.
    let spec = unsafe { Spec::new().share(memory.add(PAGE), 2 * PAGE) };
    let address = memory.expose_provenance();
    let other = create(&spec, move |start| {
        let memory = std::ptr::with_exposed_provenance_mut::<u8>(address);
        let mut arrival = start.arrival;
        loop {
            let there = unsafe { memory.add(PAGE).read_volatile() };
            for page in 0..4 {
                unsafe { memory.add(page * PAGE + 1).write_volatile(9) };
            }
            arrival = arrival.caller.switch(u64::from(there), &[]).unwrap();
        }
    })
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 7);
    let seen: Vec<u8> = (0..4).map(|page| unsafe { memory.add(page * PAGE + 1).read_volatile() }).collect();
    assert_eq!(seen, [0, 9, 9, 0]);
    unsafe { memory.add(PAGE).write_volatile(8) };
    assert_eq!(other.switch(0, &[]).unwrap().word, 8);
}

pub(crate) fn unmapped_memory_is_gone() {
    let memory = mapped(3);
    unsafe { memory.write_bytes(1, 3 * PAGE) };
    let spec = unsafe { Spec::new().unmap(memory.add(PAGE), PAGE) };
    let address = memory.expose_provenance();
    let other = create(
        &spec,
        server(move |page| {
            let memory = std::ptr::with_exposed_provenance::<u8>(address);
            u64::from(is_mapped(unsafe { memory.add(usize::try_from(page).unwrap() * PAGE) }))
        }),
    )
    .unwrap();
    let seen: Vec<u64> = (0..3).map(|page| other.switch(page, &[]).unwrap().word).collect();
    assert_eq!(seen, [1, 0, 1]);
    assert!(is_mapped(unsafe { memory.add(PAGE) }));
}

pub(crate) fn shared_memory_stays_from_other_contexts() {
    let memory = mapped(1);
    let address = memory.expose_provenance();
    let peek =
        move |_| u64::from(unsafe { std::ptr::with_exposed_provenance::<u8>(address).read_volatile() });
    let insider = create(&unsafe { Spec::new().share(memory, PAGE) }, server(peek)).unwrap();
    unsafe { memory.write_volatile(3) };
    let outsider = create(&Spec::new(), server(peek)).unwrap();
    unsafe { memory.write_volatile(4) };
    assert_eq!(insider.switch(0, &[]).unwrap().word, 4);
    assert_eq!(outsider.switch(0, &[]).unwrap().word, 3, "a copy as of its creation");
    let files = create(
        &Spec::new(),
        server(|_| {
            let links = std::fs::read_dir("/proc/self/fd").unwrap();
            let shared = |link: &std::path::Path| {
                std::fs::read_link(link).is_ok_and(|to| to.to_string_lossy().contains("orrery-shared"))
            };
            u64::try_from(links.filter(|link| shared(&link.as_ref().unwrap().path())).count()).unwrap()
        }),
    )
    .unwrap();
    assert_eq!(files.switch(0, &[]).unwrap().word, 0, "nor the file behind it");
}

pub(crate) fn senseless_specifications_are_refused() {
    let memory = mapped(4);
    // The library's own mappings may come to lie at the hole's end.
    let hole = mapped(1024);
    unsafe { libc::munmap(hole.cast(), 1024 * PAGE) };
    let nothing = hole.wrapping_add(512 * PAGE);
    let on_stack = 0_u8;
    let stack = (&raw const on_stack).map_addr(|address| address & !(PAGE - 1));
    let try_it = |spec: Spec| create(&spec, server(|word| word)).unwrap_err();
    assert!(matches!(try_it(unsafe { Spec::new().share(memory.add(1), PAGE) }), Error::Unaligned { .. }));
    assert!(matches!(try_it(unsafe { Spec::new().unmap(memory, 0) }), Error::Unaligned { .. }));
    assert!(matches!(try_it(Spec::new().may_access(PAGE, 5)), Error::Unaligned { .. }));
    assert!(matches!(try_it(Spec::new().close_descriptors(9, 3)), Error::Unaligned { .. }));
    let twice = unsafe { Spec::new().share(memory, 2 * PAGE).unmap(memory.add(PAGE), PAGE) };
    assert!(matches!(try_it(twice), Error::Overlap { .. }));
    assert!(matches!(try_it(unsafe { Spec::new().share(nothing, PAGE) }), Error::Memory { .. }));
    assert!(matches!(try_it(unsafe { Spec::new().share(stack, PAGE) }), Error::Memory { .. }));
    // A context that takes its own ground away dies at once, and alone.
    let here = (senseless_specifications_are_refused as fn() as *const u8).expose_provenance();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let bounds = maps.lines().filter_map(|line| line.split(' ').next().unwrap().split_once('-'));
    let (first, last) = bounds
        .map(|(first, last)| [first, last].map(|text| usize::from_str_radix(text, 16).unwrap()))
        .find_map(|[first, last]| (first <= here && here < last).then_some((first, last)))
        .unwrap();
    let code = std::ptr::with_exposed_provenance::<u8>(first);
    let ground = unsafe { Spec::new().unmap(code, last - first) };
    assert!(matches!(try_it(ground), Error::Birth { .. }));
    let shared = create(&unsafe { Spec::new().share(memory, 2 * PAGE) }, server(|word| word)).unwrap();
    assert!(matches!(try_it(unsafe { Spec::new().share(memory, PAGE) }), Error::Memory { .. }));
    assert_eq!(shared.switch(1, &[]).unwrap().word, 1);
}

pub(crate) fn other_memory_takes_the_place_of_what_was_unmapped() {
    let memory = mapped(1);
    unsafe { memory.write(7) };
    let address = memory.expose_provenance();
    let other = create(
        &unsafe { Spec::new().unmap(memory, PAGE) },
        server(move |word| {
            let there = std::ptr::with_exposed_provenance_mut::<u8>(address);
            if word == 0 {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
                let protection = libc::PROT_READ | libc::PROT_WRITE;
                let got = unsafe { libc::mmap(there.cast(), PAGE, protection, flags, -1, 0) };
                assert_eq!(got, there.cast());
            }
            let before = unsafe { there.read() };
            unsafe { there.write(u8::try_from(word).unwrap()) };
            before.into()
        }),
    )
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 0, "it is fresh");
    assert_eq!(other.switch(9, &[]).unwrap().word, 0);
    assert_eq!(other.switch(1, &[]).unwrap().word, 9);
    assert_eq!(unsafe { memory.read() }, 7);
}
