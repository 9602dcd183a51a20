//! What areas refuse, and what becomes of them in forked children.

use core::alloc::Layout;

use orrery_memory::PAGE;
use orrery_memory::area::{
    Area, AreaArena, AreaBox, AreaOptions, AreaVec, DeltaRef, Error, Mirror, Mode, View, in_orbit,
    without_areas,
};

fn options(capacity: usize) -> AreaOptions {
    let mut options = AreaOptions::default();
    options.capacity = capacity;
    options
}

/// Runs `child` in a forked process and returns its status.
fn forked(fork: impl FnOnce() -> i32, child: impl FnOnce() -> i32) -> i32 {
    let pid = fork();
    if pid == 0 {
        let status = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(101);
        // SAFETY: nothing of the test's process may run in the child any more.
        unsafe { libc::_exit(status) }
    }
    assert!(pid > 0);
    let mut status = 0;
    // SAFETY: a wait for our own child.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "{status:#x}");
    libc::WEXITSTATUS(status)
}

fn plain() -> i32 {
    // SAFETY: `forked` runs the child's work and ends it there; the C library keeps its allocator consistent
    // across fork(2).
    unsafe { libc::fork() }
}

/// Other tests of this process have areas at the same time, so the arena is never empty here.
#[test]
fn a_thousand_areas_of_the_usual_capacity_find_room() {
    let mut areas = Vec::new();
    for number in 0..1000 {
        let area = Area::new(0, &options(0)).unwrap_or_else(|error| panic!("area {number}: {error}"));
        let smallest = if number < 300 { 128 << 20 } else { 4 << 20 };
        assert!(area.capacity() >= smallest, "area {number} has {} bytes", area.capacity());
        areas.push(area);
    }
    assert!(areas[0].capacity() >= 4 << 30);
}

#[test]
fn blocks_are_zero_aligned_and_recycled() {
    let area = Area::new(0, &options(4 << 20)).unwrap();
    let layouts = [(1, 1), (24, 8), (100, 64), (5_000, 4_096), (300_000, 16), (1_000_000, 8_192)]
        .map(|(size, align)| Layout::from_size_align(size, align).unwrap());
    for _ in 0..50 {
        let blocks = layouts.map(|layout| {
            let block = area.allocate(layout).unwrap();
            assert!(block.addr().get().is_multiple_of(layout.align()) && area.contains(block.as_ptr()));
            // SAFETY: the block has as many bytes.
            let bytes = unsafe { core::slice::from_raw_parts_mut(block.as_ptr(), layout.size()) };
            assert!(bytes.iter().all(|byte| *byte == 0));
            bytes.fill(0xa5);
            block
        });
        assert_eq!(area.blocks(), layouts.len());
        for (block, layout) in blocks.into_iter().zip(layouts) {
            // SAFETY: the block was allocated above with this layout, is freed once, and is not used any
            // more.
            unsafe { area.free(block, layout) };
        }
    }
    assert!(area.used() < 3 << 20, "freed memory is used again");
    assert_eq!(area.blocks(), 0);
}

#[test]
fn boxes_and_vectors_live_in_areas() {
    let area = Area::new(4_096, &options(64 << 20)).unwrap();
    let mut numbers: AreaVec<u64> = AreaVec::new_in(area.clone());
    let boxed: AreaBox<[u8; 100]> = AreaBox::new_in([7; 100], area.clone());
    numbers.extend(0..1_000_000);
    assert!(area.contains(numbers.as_ptr()) && area.contains(&raw const *boxed));
    assert!(numbers.iter().copied().eq(0..1_000_000));
    assert_eq!(Area::containing(numbers.as_ptr()).unwrap().base(), area.base());
    drop((numbers, boxed));
    assert_eq!(area.blocks(), 0);
}

#[test]
fn a_full_area_says_so_and_goes_on() {
    let area = Area::new(0, &options(2 << 20)).unwrap();
    let large = Layout::from_size_align(3 << 20, 8).unwrap();
    let full = Err(Error::AreaFull { base: area.base(), bytes: 3 << 20, capacity: area.capacity() });
    assert_eq!(area.allocate(large), full);
    let block = area.allocate(Layout::new::<u64>()).unwrap();
    // SAFETY: the block is in use, with this layout; after the error it still is.
    assert_eq!(unsafe { area.reallocate(block, Layout::new::<u64>(), 3 << 20) }, full);
    assert_eq!(area.blocks(), 1);
    assert!(area.allocate(Layout::from_size_align(1 << 20, 8).unwrap()).is_ok());
    let huge = Layout::from_size_align(isize::MAX as usize - 4_096, 4_096).unwrap();
    assert!(matches!(area.allocate(huge), Err(Error::AreaFull { .. })));
}

#[test]
fn raw_memory_and_blocks_do_not_mix() {
    let area = Area::new(100, &options(1 << 20)).unwrap();
    let (start, there) = area.raw().unwrap();
    assert_eq!((start.addr().get(), there, area.used()), (area.base(), PAGE, 0));
    area.set_used(10_000).unwrap();
    assert_eq!(area.used(), 10_000);
    // SAFETY: the area has grown to at least 10,000 bytes.
    unsafe { start.add(9_999).write(1) };
    assert!(matches!(area.set_used(usize::MAX), Err(Error::AreaFull { .. })));
    assert_eq!(area.used(), 10_000);
    assert!(matches!(area.allocate(Layout::new::<u8>()), Err(Error::Use { .. })));
    let heap = Area::new(0, &options(1 << 20)).unwrap();
    heap.allocate(Layout::new::<u8>()).unwrap();
    assert!(matches!((heap.raw(), heap.set_used(1)), (Err(Error::Use { .. }), Err(Error::Use { .. }))));
}

#[test]
fn bad_sizes_and_places_are_refused() {
    let arena = AreaArena::get().unwrap();
    assert!(Area::new(2, &options(1)).is_ok(), "both are a page");
    assert!(matches!(Area::new(PAGE + 1, &options(PAGE)), Err(Error::Size { .. })));
    assert!(matches!(Area::new(usize::MAX, &AreaOptions::default()), Err(Error::Size { .. })));
    assert!(matches!(Area::new(0, &options(2 * arena.len())), Err(Error::ArenaFull { .. })));
    let at = |address| {
        let mut options = options(1 << 20);
        options.address = Some(address);
        Area::new(PAGE, &options)
    };
    for wrong in
        [0, 12, usize::MAX & !(PAGE - 1), arena.base() + PAGE, &raw const arena as usize & !(PAGE - 1)]
    {
        assert!(matches!(at(wrong), Err(Error::Address { address, .. }) if address == wrong), "{wrong:#x}");
    }
    let chosen = 0x2000_0000_0000;
    let area = at(chosen).unwrap();
    assert_eq!(area.base(), chosen);
    assert!(matches!(at(chosen), Err(Error::Address { .. })), "taken");
    drop(area);
    assert_eq!(at(chosen).unwrap().base(), chosen, "free again");
    let taken = Area::new(0, &options(2 << 20)).unwrap();
    assert!(matches!(at(taken.base()), Err(Error::Address { .. })));
}

#[test]
fn deltas_go_back_to_their_mirror_only() {
    let area = Area::new(PAGE, &options(1 << 20)).unwrap();
    area.set_used(PAGE).unwrap();
    let (mirror, other) = (Mirror::new().unwrap(), Mirror::new().unwrap());
    let first = mirror.capture(&[&area]).unwrap();
    assert_eq!((first.pages(), first.is_empty()), (1, false));
    assert_eq!(mirror.deliver(&[&area]).unwrap_err(), Error::Busy { deltas: 1 });
    assert_eq!(mirror.reset(), Err(Error::Busy { deltas: 1 }));
    let first = other.withdraw(first).expect_err("another mirror's");
    let second = mirror.capture(&[&area]).unwrap();
    assert!(second.is_empty(), "nothing was written since the first");
    let first = mirror.withdraw(first).expect_err("the second relies on the first");
    mirror.withdraw(second).unwrap();
    mirror.withdraw(first).unwrap();
    assert_eq!(mirror.deliver(&[&area]).unwrap().pages(), 1, "pending again");
    assert_eq!(mirror.memory().deltas, 0);
    assert_eq!(mirror.deliver(&[&area]).unwrap().pages(), 0);
}

#[test]
fn a_damaged_delta_is_refused() {
    let mirror = Mirror::new().unwrap();
    let child = || {
        // SAFETY: this is a fresh child that refers to no area.
        let mut view = unsafe { View::attach(&mirror) }.unwrap();
        for bits in [1, 1 << 32, u64::MAX, u64::MAX << 32, u64::from(u32::MAX), (1 << 32) | 400] {
            let delta = DeltaRef::from_bits(bits);
            assert_eq!(delta.to_bits(), bits);
            // A list of frames that are all zero asks for nothing; everything else is refused.
            assert!(matches!(view.apply(&delta), Err(Error::BadDelta { .. }) | Ok(())), "{bits:#x}");
        }
        assert!(view.apply(&DeltaRef::from_bits(u64::MAX)).is_err());
        view.apply(&DeltaRef::EMPTY).unwrap();
        0
    };
    assert_eq!(forked(|| without_areas(plain).unwrap(), child), 0);
}

#[test]
fn an_orbit_cannot_do_what_main_does() {
    let area = Area::new(PAGE, &options(1 << 20)).unwrap();
    let block = area.allocate(Layout::new::<u64>()).unwrap();
    let mirror = Mirror::new().unwrap();
    let delta = mirror.deliver(&[&area]).unwrap();
    let child = || {
        // SAFETY: this is a fresh child that does not look at `block` before the view is there.
        let mut view = unsafe { View::attach(&mirror) }.unwrap();
        view.apply(&delta.reference()).unwrap();
        let in_orbit_error = |error| matches!(error, Error::InOrbit { .. });
        assert!(in_orbit());
        assert!(in_orbit_error(Area::new(0, &AreaOptions::default()).unwrap_err()));
        assert!(in_orbit_error(area.allocate(Layout::new::<u8>()).unwrap_err()));
        assert!(in_orbit_error(mirror.deliver(&[&area]).unwrap_err()));
        assert!(in_orbit_error(mirror.capture(&[&area]).unwrap_err()));
        assert!(in_orbit_error(mirror.reset().unwrap_err()));
        assert!(in_orbit_error(Mirror::new().unwrap_err()));
        // SAFETY: allocated by main; here it does nothing.
        unsafe { area.free(block, Layout::new::<u64>()) };
        0
    };
    assert_eq!(forked(|| without_areas(plain).unwrap(), child), 0);
    assert!(!in_orbit());
    assert_eq!(area.blocks(), 1);
}

/// A web server's master makes areas, and its workers orbits.
#[test]
fn a_worker_inherits_areas_but_not_mirrors() {
    let area = Area::new(PAGE, &options(8 << 20)).unwrap();
    let numbers = area.allocate(Layout::array::<u64>(100_000).unwrap()).unwrap().cast::<u64>();
    let mirror = Mirror::new().unwrap();
    // SAFETY: the block has room for a hundred thousand numbers, and nobody else uses it.
    unsafe { (0..100_000).for_each(|n| numbers.add(n).write(n as u64)) };
    assert!(mirror.deliver(&[&area]).unwrap().pages() > 190);
    let worker = || {
        assert_eq!(mirror.deliver(&[&area]).unwrap_err(), Error::Foreign);
        assert_eq!(mirror.capture(&[&area]).unwrap_err(), Error::Foreign);
        // SAFETY: the area was given a block of a hundred thousand numbers.
        unsafe { numbers.add(5).write(55) };
        area.allocate(Layout::new::<[u8; 5_000]>()).unwrap();
        let mine = Mirror::new().unwrap();
        assert!(mine.deliver(&[&area]).unwrap().pages() > 190, "everything is pending for a new mirror");
        // SAFETY: the area was given a block of a hundred thousand numbers.
        unsafe { numbers.add(6).write(66) };
        let delta = mine.deliver(&[&area]).unwrap();
        assert_eq!(delta.pages(), 1, "writes are tracked in the worker too");
        let companion = || {
            // SAFETY: this is a fresh child of the one that made the mirror, with one thread and no reference
            // into the area.
            let mut view = unsafe { View::attach(&mine) }.unwrap();
            view.apply(&delta.reference()).unwrap();
            // SAFETY: the block of a hundred thousand numbers is mapped in the child, too.
            let seen = unsafe { [5, 6, 7, 99_999].map(|n| numbers.add(n).read()) };
            i32::from(seen != [55, 66, 7, 99_999])
        };
        forked(|| without_areas(plain).unwrap(), companion)
    };
    assert_eq!(forked(plain, worker), 0);
    // SAFETY: the block has a hundred thousand numbers, and only this thread uses it.
    assert_eq!(unsafe { numbers.add(5).read() }, 5);
    // SAFETY: the block has a hundred thousand numbers, and only this thread uses it.
    unsafe { numbers.add(7).write(77) };
    assert_eq!(mirror.deliver(&[&area]).unwrap().pages(), 1, "and in the master still");
}

#[test]
fn a_copier_that_dies_loses_nothing() {
    let mut chosen = options(64 << 20);
    chosen.mode = Mode::Cow;
    let area = Area::new(64 << 20, &chosen).unwrap();
    let (start, len) = area.raw().unwrap();
    area.set_used(len).unwrap();
    // SAFETY: the area has `len` bytes in use from `start` on, to which nothing refers.
    unsafe { start.write_bytes(3, len) };
    let mirror = Mirror::new().unwrap();
    let delta = mirror.deliver(&[&area]).unwrap();
    assert_eq!((delta.pages(), delta.is_empty()), (len / PAGE, false));
    assert_eq!(mirror.deliver(&[&area]).unwrap_err(), Error::Busy { deltas: 1 });
    // Nobody waited for the copier, so it is at work, or ended early.
    mirror.release(delta);
    let delta = mirror.deliver(&[&area]).unwrap();
    // SAFETY: the area has `len` bytes in use from `start` on, to which nothing refers.
    unsafe { start.write_bytes(4, len) };
    let reference = delta.reference();
    let child = || {
        // SAFETY: this is a fresh child of the one that made the mirror, with one thread and no reference
        // into the area.
        let mut view = unsafe { View::attach(&mirror) }.unwrap();
        view.apply(&reference).unwrap();
        // SAFETY: the area's memory, as the call had it.
        let seen = unsafe { core::slice::from_raw_parts(start.as_ptr(), len) };
        i32::from(seen.iter().any(|byte| *byte != 3))
    };
    let status = forked(|| without_areas(plain).unwrap(), child);
    mirror.release(delta);
    assert_eq!(status, 0);
}

#[test]
fn threads_allocate_while_others_fork_and_call() {
    let area = Area::new(0, &options(64 << 20)).unwrap();
    let mirror = Mirror::new().unwrap();
    std::thread::scope(|scope| {
        for size in [16, 200, 3_000] {
            let area = &area;
            scope.spawn(move || {
                for round in 0..3_000_usize {
                    let layout = Layout::from_size_align(size + round % 50, 8).unwrap();
                    let block = area.allocate(layout).unwrap();
                    // SAFETY: the block has at least eight bytes, and is freed once.
                    unsafe {
                        block.cast::<usize>().write(round);
                        assert_eq!(block.cast::<usize>().read(), round);
                        area.free(block, layout);
                    }
                }
            });
        }
        for round in 0..20 {
            let delta = mirror.deliver(&[&area]).unwrap();
            mirror.release(delta);
            let child = || {
                // Every lock has to be free here.
                let fine = area.allocate(Layout::new::<u64>()).is_ok();
                i32::from(!fine)
            };
            if round % 2 == 0 {
                assert_eq!(forked(plain, child), 0);
            } else {
                assert_eq!(forked(|| without_areas(plain).unwrap(), || 0), 0);
            }
        }
    });
    assert_eq!(area.blocks(), 0);
}
