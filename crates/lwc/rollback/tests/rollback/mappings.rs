//! Mappings come back: new, replaced, grown, and loaded ones.

use orrery_rollback::Outcome;

use super::common::{map, maps, rollback};

pub(crate) fn mappings_come_back() {
    let (a, b, c) = (map(64 << 10), map(64 << 10), map(64 << 10));
    // SAFETY: within the mappings, which are this case's own.
    unsafe {
        a.write_bytes(1, 64 << 10);
        b.write_bytes(2, 64 << 10);
        c.write_bytes(3, 64 << 10);
    }
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    let before = maps();
    for _ in 0..3 {
        rollback
            // SAFETY: within the mappings, in which nothing lives; they are not used in the run after that.
            .run(|| unsafe {
                let fresh = map(1 << 20);
                fresh.write_bytes(9, 1 << 20);
                libc::munmap(a.cast(), 64 << 10);
                libc::mprotect(b.cast(), 16 << 10, libc::PROT_NONE);
                libc::mprotect(b.add(32 << 10).cast(), 16 << 10, libc::PROT_READ | libc::PROT_EXEC);
                libc::mremap(c.cast(), 64 << 10, 256 << 10, libc::MREMAP_MAYMOVE);
            })
            .unwrap();
        // SAFETY: within the mappings, which are there again.
        unsafe {
            for (pointer, byte) in [(a, 1), (b, 2), (c, 3)] {
                assert!(std::slice::from_raw_parts(pointer, 64 << 10).iter().all(|&found| found == byte));
                pointer.write_volatile(byte);
            }
        }
        assert_eq!(total_mapped(&maps()), total_mapped(&before));
    }
}

fn total_mapped(maps: &[String]) -> usize {
    maps.iter()
        .map(|line| {
            let (start, rest) = line.split_once('-').unwrap();
            let end = rest.split(' ').next().unwrap();
            usize::from_str_radix(end, 16).unwrap() - usize::from_str_radix(start, 16).unwrap()
        })
        .sum()
}

pub(crate) fn a_replaced_mapping_comes_back() {
    let a = map(64 << 10);
    // SAFETY: a part of the test's own mapping, to which nothing else refers.
    unsafe { a.write_bytes(1, 64 << 10) };
    let mut rollback = rollback();
    for _ in 0..3 {
        rollback
            // SAFETY: nothing lives in the mapping, which is taken away and replaced as a whole.
            .run(|| unsafe {
                libc::munmap(a.cast(), 64 << 10);
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                libc::mmap(a.cast(), 64 << 10, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
                a.write(5);
            })
            .unwrap();
        // SAFETY: within the mapping, which is there again.
        assert!(unsafe { std::slice::from_raw_parts(a, 64 << 10) }.iter().all(|&byte| byte == 1));
    }
}

pub(crate) fn the_break_comes_back() {
    let mut rollback = rollback();
    // SAFETY: takes a number, and moves nothing.
    let before = unsafe { libc::sbrk(0) };
    for step in [1 << 20, 40 << 20] {
        rollback
            // SAFETY: what is written to was just added, and nobody else adds any meanwhile.
            .run(|| unsafe {
                libc::sbrk(step);
                libc::sbrk(0).cast::<u8>().sub(1).write(1);
            })
            .unwrap();
        // SAFETY: takes a number, and moves nothing.
        assert_eq!(unsafe { libc::sbrk(0) }, before);
    }
    // SAFETY: nothing lives at the end of it that the rest of the run uses.
    rollback.run(|| unsafe { drop(Box::new(libc::sbrk(-8192))) }).unwrap();
    // SAFETY: takes a number, and moves nothing.
    assert_eq!(unsafe { libc::sbrk(0) }, before);
    drop(vec![1_u8; 100_000]);
}

fn dive(depth: u32) -> u32 {
    let frame = std::hint::black_box([depth; 1024]);
    if depth == 0 { frame[5] } else { dive(depth - 1) + frame[9] }
}

pub(crate) fn deep_recursion_leaves_no_stack() {
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    let before = stack_size();
    rollback
        .run(|| {
            dive(1000);
        })
        .unwrap();
    assert_eq!(stack_size(), before);
    dive(1000);
    rollback
        .run(|| {
            dive(1200);
        })
        .unwrap();
}

fn stack_size() -> usize {
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    total_mapped(&text.lines().filter(|line| line.contains("[stack]")).map(str::to_owned).collect::<Vec<_>>())
}

pub(crate) fn a_loaded_library_goes() {
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    for _ in 0..3 {
        let before = total_mapped(&maps());
        // SAFETY: names end with a zero; what the libraries do at their start harms nobody.
        let outcome = rollback.run(|| unsafe {
            let library = libc::dlopen(c"libm.so.6".as_ptr(), libc::RTLD_NOW);
            let other = libc::dlopen(c"libresolv.so.2".as_ptr(), libc::RTLD_NOW);
            assert!(!library.is_null() && !other.is_null());
        });
        assert_eq!(outcome, Ok(Outcome::Returned));
        assert_eq!(total_mapped(&maps()), before);
    }
}
