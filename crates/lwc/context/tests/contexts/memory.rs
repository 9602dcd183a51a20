//! What a new context has of its creator: memory.

use std::sync::atomic::{AtomicU64, Ordering};

use orrery_context::{Error, Spec, create};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use crate::pages::{PAGE, Pages, is_mapped};
use crate::support::server;

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
    let memory = Pages::new(4);
    memory.poke(PAGE, 7);
    // The two pages in the middle; those beside stay private.
    let spec = memory.part(1, 2).shared(Spec::new());
    let other = create(&spec, move |start| {
        let mut arrival = start.arrival;
        loop {
            let there = memory.peek(PAGE);
            for page in 0..4 {
                memory.poke(page * PAGE + 1, 9);
            }
            arrival = arrival.caller.switch(u64::from(there), &[]).unwrap();
        }
    })
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 7);
    let seen: Vec<u8> = (0..4).map(|page| memory.peek(page * PAGE + 1)).collect();
    assert_eq!(seen, [0, 9, 9, 0]);
    memory.poke(PAGE, 8);
    assert_eq!(other.switch(0, &[]).unwrap().word, 8);
}

pub(crate) fn unmapped_memory_is_gone() {
    let memory = Pages::new(3);
    memory.fill(1);
    let spec = memory.part(1, 1).unmapped(Spec::new());
    let is_there = move |page| u64::from(is_mapped(memory.byte(usize::try_from(page).unwrap() * PAGE)));
    let other = create(&spec, server(is_there)).unwrap();
    let seen: Vec<u64> = (0..3).map(|page| other.switch(page, &[]).unwrap().word).collect();
    assert_eq!(seen, [1, 0, 1]);
    assert!(is_mapped(memory.byte(PAGE)));
}

pub(crate) fn shared_memory_stays_from_other_contexts() {
    let memory = Pages::new(1);
    let peek = move |_| u64::from(memory.peek(0));
    let insider = create(&memory.shared(Spec::new()), server(peek)).unwrap();
    memory.poke(0, 3);
    let outsider = create(&Spec::new(), server(peek)).unwrap();
    memory.poke(0, 4);
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
    let memory = Pages::new(4);
    // The library's own mappings may come to be at the hole's end.
    let hole = Pages::new(1024);
    hole.remove();
    let nothing = hole.byte(512 * PAGE);
    let on_stack = 0_u8;
    let stack = (&raw const on_stack).map_addr(|address| address & !(PAGE - 1));
    let try_it = |spec: Spec| create(&spec, server(|word| word)).unwrap_err();
    // SAFETY: what is wrong with each of these is found before anything is shared.
    let share = |start: *const u8, length| unsafe { Spec::new().share(start, length) };
    assert!(matches!(try_it(share(memory.byte(1), PAGE)), Error::Unaligned { .. }));
    assert!(matches!(try_it(memory.part(0, 0).unmapped(Spec::new())), Error::Unaligned { .. }));
    assert!(matches!(try_it(Spec::new().may_access(PAGE, 5)), Error::Unaligned { .. }));
    assert!(matches!(try_it(Spec::new().close_descriptors(9, 3)), Error::Unaligned { .. }));
    let twice = memory.part(1, 1).unmapped(memory.part(0, 2).shared(Spec::new()));
    assert!(matches!(try_it(twice), Error::Overlap { .. }));
    assert!(matches!(try_it(share(nothing, PAGE)), Error::Memory { .. }));
    assert!(matches!(try_it(share(stack, PAGE)), Error::Memory { .. }));
    // A context that takes its own ground away dies at once, and alone.
    let here = (senseless_specifications_are_refused as fn() as *const u8).expose_provenance();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let bounds = maps.lines().filter_map(|line| line.split(' ').next().unwrap().split_once('-'));
    let (first, last) = bounds
        .map(|(first, last)| [first, last].map(|text| usize::from_str_radix(text, 16).unwrap()))
        .find_map(|[first, last]| (first <= here && here < last).then_some((first, last)))
        .unwrap();
    let code = std::ptr::with_exposed_provenance::<u8>(first);
    // SAFETY: against the rule, as is the test's purpose: the context needs this code, and faults for want of it before
    // it runs anything of the test's. Nobody else misses it.
    let ground = unsafe { Spec::new().unmap(code, last - first) };
    assert!(matches!(try_it(ground), Error::Birth { .. }));
    let shared = create(&memory.part(0, 2).shared(Spec::new()), server(|word| word)).unwrap();
    assert!(matches!(try_it(memory.part(0, 1).shared(Spec::new())), Error::Memory { .. }));
    assert_eq!(shared.switch(1, &[]).unwrap().word, 1);
}

pub(crate) fn other_memory_takes_the_place_of_what_was_unmapped() {
    let memory = Pages::new(1);
    memory.poke(0, 7);
    let other = create(
        &memory.unmapped(Spec::new()),
        server(move |word| {
            if word == 0 {
                let (flags, there) = (MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE, memory.byte(0).cast());
                // SAFETY: takes the place of nothing, by its flags.
                let got = unsafe { mmap_anonymous(there, PAGE, ProtFlags::READ | ProtFlags::WRITE, flags) };
                assert_eq!(got.unwrap().expose_provenance(), memory.address());
            }
            let before = memory.peek(0);
            memory.poke(0, u8::try_from(word).unwrap());
            before.into()
        }),
    )
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 0, "it is fresh");
    assert_eq!(other.switch(9, &[]).unwrap().word, 0);
    assert_eq!(other.switch(1, &[]).unwrap().word, 9);
    assert_eq!(memory.peek(0), 7);
}
