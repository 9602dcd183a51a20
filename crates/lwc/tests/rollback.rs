//! What a run undoes, and how it ends.
//!
//! Rollback belongs to one thread of one process, so each case is a process of its own: this program runs itself once for
//! each case and tracker.

#![expect(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, reason = "tests of system calls")]

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use orrery_lwc::rollback::{Children, KeptBuffer, Outcome, Rollback, abandon, safe_point};
use orrery_lwc::{Error, Leftover};

orrery_testing::cases![
    seconds = 120, trackers = orrery_testing::TRACKERS;
    memory_comes_back,
    limits_apply_to_work_alone,
    one_of_racing_threads_gets_the_engine,
    what_the_program_does_between_runs_stays,
    a_panic_ends_a_run,
    exit_ends_a_run,
    exit_of_a_thread_ends_a_run,
    a_null_pointer_ends_a_run,
    abort_ends_a_run,
    a_division_ends_a_run,
    an_exhausted_stack_ends_a_run,
    a_fault_of_a_thread_ends_a_run,
    an_endless_loop_ends_in_time,
    a_sleeping_closure_ends_in_time,
    hunger_ends_a_run,
    an_exit_handler_runs_once,
    a_signal_handler_may_abandon,
    mappings_come_back,
    a_replaced_mapping_comes_back,
    dropped_memory_comes_back,
    the_break_comes_back,
    deep_recursion_leaves_no_stack,
    huge_pages_come_back,
    a_loaded_library_goes,
    descriptors_come_back,
    closing_everything_comes_back,
    offsets_come_back,
    output_stays_written,
    an_exempt_descriptor_stays,
    dispositions_and_masks_come_back,
    blocked_signals_do_not_leak,
    timers_come_back,
    directory_umask_and_limits_come_back,
    names_and_priorities_come_back,
    children_are_killed,
    children_may_be_left,
    a_forked_child_leaves_normally,
    threads_end,
    a_deaf_thread_is_fatal,
    parked_threads_go_on,
    running_threads_are_refused,
    floating_point_control_comes_back,
    the_cpu_number_stays_live,
    nesting_is_refused,
    another_thread_is_refused,
    a_forked_process_is_refused,
    a_signal_handler_is_refused,
    kept_memory_stays,
    the_stack_cannot_be_kept,
    a_full_buffer_says_so,
    no_address_space_is_an_error,
    no_descriptors_is_an_error,
    a_full_store_is_an_error,
    a_large_process_is_held,
    hidden_images_work,
    scattered_pages_come_back,
    freed_pages_come_back,
    swapped_pages_come_back,
    merged_pages_come_back,
    a_killed_keeper_is_survived,
    a_killed_holder_is_fatal,
    without_userfaultfd_it_compares,
    without_perf_it_reads_the_layout,
    rounds_begin_alike,
    rounds_end_in_every_way,
    runs_leave_nothing_behind,
];

fn rollback() -> Rollback {
    Rollback::builder().build().unwrap()
}

fn tell(buffer: &KeptBuffer, text: &str) {
    buffer.push(text.as_bytes()).unwrap();
}

fn memory_comes_back() {
    static GLOBAL: AtomicU32 = AtomicU32::new(1);
    let mut heap = vec![1_u8; 3_000_000];
    let mut local = 5_u64;
    let kept = KeptBuffer::with_capacity(100).unwrap();
    let mut rollback = rollback();
    for _ in 0..5 {
        let outcome = rollback.run(|| {
            heap.fill(2);
            heap.push(3);
            local += 1;
            GLOBAL.store(9, Ordering::Relaxed);
            tell(&kept, &format!("{} {local} {}\n", heap.len(), GLOBAL.load(Ordering::Relaxed)));
        });
        assert_eq!(outcome, Ok(Outcome::Returned));
        assert!(heap.iter().all(|&byte| byte == 1) && heap.len() == 3_000_000);
        assert_eq!((local, GLOBAL.load(Ordering::Relaxed)), (5, 1));
    }
    assert_eq!(kept.bytes(), b"3000001 6 9\n".repeat(5));
}

fn what_the_program_does_between_runs_stays() {
    let mut rollback = rollback();
    let mut numbers = Vec::new();
    for number in 0..200_u32 {
        numbers.push(vec![number; 100 + 50 * number as usize]);
        rollback.run(|| numbers.clear()).unwrap();
    }
    for (number, vector) in (0_u32..).zip(&numbers) {
        assert_eq!(*vector, vec![number; 100 + 50 * number as usize]);
    }
    assert_eq!(numbers.len(), 200);
}

fn a_panic_ends_a_run() {
    std::panic::set_hook(Box::new(|_| {}));
    let mut rollback = rollback();
    let mut text = String::from("before");
    for _ in 0..3 {
        let outcome = rollback.run(|| {
            text.push_str(" and after");
            panic!("{text}");
        });
        assert_eq!(outcome, Ok(Outcome::Panicked));
        assert_eq!(text, "before");
    }
    assert!(!std::thread::panicking());
}

fn exit_ends_a_run() {
    let mut rollback = rollback();
    assert_eq!(rollback.run(|| std::process::exit(7)), Ok(Outcome::Exited(7)));
    assert_eq!(rollback.run(|| unsafe { libc::_exit(8) }), Ok(Outcome::Exited(8)));
    unsafe extern "C" {
        fn quick_exit(status: i32) -> !;
    }
    assert_eq!(rollback.run(|| unsafe { quick_exit(9) }), Ok(Outcome::Exited(9)));
}

fn exit_of_a_thread_ends_a_run() {
    let mut rollback = rollback();
    let outcome = rollback.run(|| {
        std::thread::spawn(|| std::process::exit(3));
        loop {
            std::thread::sleep(Duration::from_secs(10));
        }
    });
    assert_eq!(outcome, Ok(Outcome::Exited(3)));
}

fn a_null_pointer_ends_a_run() {
    let mut rollback = rollback();
    for address in [0_usize, 8, 0x7000] {
        let outcome = rollback.run(|| unsafe {
            std::ptr::with_exposed_provenance_mut::<u32>(std::hint::black_box(address)).write_volatile(1);
        });
        assert_eq!(outcome, Ok(Outcome::Signaled { signal: libc::SIGSEGV, address }));
    }
}

fn abort_ends_a_run() {
    let mut rollback = rollback();
    for _ in 0..3 {
        let outcome = rollback.run(|| std::process::abort());
        assert_eq!(outcome, Ok(Outcome::Signaled { signal: libc::SIGABRT, address: 0 }));
    }
}

fn a_division_ends_a_run() {
    let mut rollback = rollback();
    let outcome = rollback.run(|| unsafe {
        std::arch::asm!("xor edx, edx", "xor eax, eax", "xor ecx, ecx", "div ecx", out("eax") _, out("ecx") _, out("edx") _);
    });
    assert!(matches!(outcome, Ok(Outcome::Signaled { signal: libc::SIGFPE, .. })));
    let outcome = rollback.run(|| unsafe { std::arch::asm!("ud2") });
    assert!(matches!(outcome, Ok(Outcome::Signaled { signal: libc::SIGILL, .. })));
}

#[expect(unconditional_recursion, reason = "the test")]
fn recurse(depth: u64) -> u64 {
    let frame = std::hint::black_box([depth; 64]);
    recurse(depth + 1) + frame[3]
}

fn an_exhausted_stack_ends_a_run() {
    let mut rollback = rollback();
    for _ in 0..2 {
        let outcome = rollback.run(|| {
            recurse(0);
        });
        assert!(matches!(outcome, Ok(Outcome::Signaled { signal: libc::SIGSEGV, .. })), "{outcome:?}");
    }
}

fn a_fault_of_a_thread_ends_a_run() {
    let mut rollback = rollback();
    let outcome = rollback.run(|| {
        let thread = std::thread::spawn(|| unsafe {
            std::ptr::with_exposed_provenance_mut::<u8>(std::hint::black_box(24)).write_volatile(1);
        });
        let _ = thread.join();
    });
    assert_eq!(outcome, Ok(Outcome::Signaled { signal: libc::SIGSEGV, address: 24 }));
}

fn an_endless_loop_ends_in_time() {
    let mut rollback = Rollback::builder().time_limit(Duration::from_millis(30)).build().unwrap();
    let mut counter = 0_u64;
    let begun = Instant::now();
    let outcome = rollback.run(|| {
        loop {
            counter = std::hint::black_box(counter + 1);
        }
    });
    assert_eq!(outcome, Ok(Outcome::TimedOut));
    assert!(begun.elapsed() >= Duration::from_millis(30));
    assert_eq!(counter, 0);
    // The limit is over with the run.
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(rollback.run(|| {}), Ok(Outcome::Returned));
}

fn a_sleeping_closure_ends_in_time() {
    let mut rollback = rollback();
    rollback.set_time_limit(Some(Duration::from_millis(20)));
    assert_eq!(rollback.run(|| std::thread::sleep(Duration::from_secs(100))), Ok(Outcome::TimedOut));
    rollback.set_time_limit(None);
    assert_eq!(rollback.run(|| std::thread::sleep(Duration::from_millis(40))), Ok(Outcome::Returned));
}

fn hunger_ends_a_run() {
    let mut rollback = Rollback::builder().memory_limit(64 << 20).build().unwrap();
    let outcome = rollback.run(|| {
        let mut hoard = Vec::new();
        loop {
            hoard.push(vec![1_u8; 100_000]);
        }
    });
    assert_eq!(outcome, Ok(Outcome::MemoryLimit));
    assert_eq!(rollback.run(|| drop(vec![1_u8; 30 << 20])), Ok(Outcome::Returned));
    rollback.set_memory_limit(None);
    assert_eq!(rollback.run(|| drop(vec![1_u8; 200 << 20])), Ok(Outcome::Returned));
}

static EXITED: AtomicU32 = AtomicU32::new(0);

extern "C" fn at_exit() {
    println!("exit handler ran");
    EXITED.fetch_add(1, Ordering::Relaxed);
}

fn an_exit_handler_runs_once() {
    let mut rollback = rollback();
    let kept = KeptBuffer::with_capacity(100).unwrap();
    let outcome = rollback.run(|| {
        unsafe { libc::atexit(at_exit) };
        tell(&kept, "registered");
        std::process::exit(1);
    });
    assert_eq!((outcome, kept.bytes()), (Ok(Outcome::Exited(1)), &b"registered"[..]));
    assert_eq!(EXITED.load(Ordering::Relaxed), 0, "its count was rolled back with the rest");
}

extern "C" fn give_up(_: i32) {
    abandon(77);
}

fn a_signal_handler_may_abandon() {
    unsafe { libc::signal(libc::SIGUSR1, give_up as *const () as usize) };
    let mut rollback = rollback();
    let outcome = rollback.run(|| {
        unsafe { libc::raise(libc::SIGUSR1) };
        unreachable!();
    });
    assert_eq!(outcome, Ok(Outcome::Abandoned(77)));
    // With nothing running it is a signal like any other.
    unsafe { libc::raise(libc::SIGUSR1) };
}

fn map(length: usize) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let address =
        unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert_ne!(address, libc::MAP_FAILED);
    address.cast()
}

/// The table of mappings, but for the arena's insides and the stack's end, which grows by itself.
fn maps() -> Vec<String> {
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    text.lines()
        .filter(|line| !line.contains("[stack]") && !line.contains("orrery") && !line.contains("perf_event"))
        .map(str::to_owned)
        .collect()
}

fn mappings_come_back() {
    let (a, b, c) = (map(64 << 10), map(64 << 10), map(64 << 10));
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
            .run(|| unsafe {
                let fresh = map(1 << 20);
                fresh.write_bytes(9, 1 << 20);
                libc::munmap(a.cast(), 64 << 10);
                libc::mprotect(b.cast(), 16 << 10, libc::PROT_NONE);
                libc::mprotect(b.add(32 << 10).cast(), 16 << 10, libc::PROT_READ | libc::PROT_EXEC);
                libc::mremap(c.cast(), 64 << 10, 256 << 10, libc::MREMAP_MAYMOVE);
            })
            .unwrap();
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

fn a_replaced_mapping_comes_back() {
    let a = map(64 << 10);
    unsafe { a.write_bytes(1, 64 << 10) };
    let mut rollback = rollback();
    for _ in 0..3 {
        rollback
            .run(|| unsafe {
                libc::munmap(a.cast(), 64 << 10);
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                libc::mmap(a.cast(), 64 << 10, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
                a.write(5);
            })
            .unwrap();
        assert!(unsafe { std::slice::from_raw_parts(a, 64 << 10) }.iter().all(|&byte| byte == 1));
    }
}

fn dropped_memory_comes_back() {
    let length = 8 << 20;
    let a = map(length);
    unsafe { a.write_bytes(1, length) };
    // The data of the C library and of this program: private mappings of files.
    let mut rollback = rollback();
    for _ in 0..3 {
        let outcome = rollback.run(|| unsafe {
            libc::madvise(a.cast(), length, libc::MADV_DONTNEED);
            for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
                if line.contains("libc.so") && line.contains("rw-p") {
                    let (start, rest) = line.split_once('-').unwrap();
                    let end = rest.split(' ').next().unwrap();
                    let start = usize::from_str_radix(start, 16).unwrap();
                    let end = usize::from_str_radix(end, 16).unwrap();
                    let pointer: *mut c_void = std::ptr::with_exposed_provenance_mut(start);
                    libc::syscall(libc::SYS_madvise, pointer, end - start, libc::MADV_DONTNEED);
                }
            }
        });
        // Without its data the C library may well have crashed.
        assert!(matches!(outcome, Ok(Outcome::Returned | Outcome::Signaled { .. })), "{outcome:?}");
        assert!(unsafe { std::slice::from_raw_parts(a, length) }.iter().all(|&byte| byte == 1));
        assert_eq!(format!("{:5.2}", std::hint::black_box(1.5)), " 1.50");
    }
}

fn the_break_comes_back() {
    let mut rollback = rollback();
    let before = unsafe { libc::sbrk(0) };
    for step in [1 << 20, 40 << 20] {
        rollback
            .run(|| unsafe {
                libc::sbrk(step);
                libc::sbrk(0).cast::<u8>().sub(1).write(1);
            })
            .unwrap();
        assert_eq!(unsafe { libc::sbrk(0) }, before);
    }
    rollback.run(|| unsafe { drop(Box::new(libc::sbrk(-8192))) }).unwrap();
    assert_eq!(unsafe { libc::sbrk(0) }, before);
    drop(vec![1_u8; 100_000]);
}

fn dive(depth: u32) -> u32 {
    let frame = std::hint::black_box([depth; 1024]);
    if depth == 0 { frame[5] } else { dive(depth - 1) + frame[9] }
}

fn deep_recursion_leaves_no_stack() {
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

fn huge_pages_come_back() {
    let length = 16 << 20;
    let a = map(length);
    unsafe {
        libc::madvise(a.cast(), length, libc::MADV_HUGEPAGE);
        a.write_bytes(1, length);
    }
    let mut rollback = rollback();
    for _ in 0..3 {
        rollback
            .run(|| unsafe {
                a.add(5 << 20).write(7);
                a.add(9 << 20).write_bytes(8, 3 << 20);
                libc::madvise(a.cast(), 4 << 20, libc::MADV_DONTNEED);
            })
            .unwrap();
        assert!(unsafe { std::slice::from_raw_parts(a, length) }.iter().all(|&byte| byte == 1));
    }
}

fn a_loaded_library_goes() {
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    for _ in 0..3 {
        let before = total_mapped(&maps());
        let outcome = rollback.run(|| unsafe {
            let library = libc::dlopen(c"libm.so.6".as_ptr(), libc::RTLD_NOW);
            let other = libc::dlopen(c"libresolv.so.2".as_ptr(), libc::RTLD_NOW);
            assert!(!library.is_null() && !other.is_null());
        });
        assert_eq!(outcome, Ok(Outcome::Returned));
        assert_eq!(total_mapped(&maps()), before);
    }
}

fn open_descriptors() -> Vec<(i32, String)> {
    let mut found = Vec::new();
    for number in 0..4096 {
        if unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0 {
            let target = std::fs::read_link(format!("/proc/self/fd/{number}")).unwrap();
            found.push((number, target.to_string_lossy().into_owned()));
        }
    }
    found
}

fn descriptors_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(dir.path().join("a")).unwrap();
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    let before = open_descriptors();
    for _ in 0..3 {
        rollback
            .run(|| unsafe {
                libc::close(file.as_raw_fd());
                for _ in 0..20 {
                    libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
                }
                libc::dup2(0, 500);
                libc::dup2(0, 2);
                libc::fcntl(1, libc::F_SETFL, libc::O_NONBLOCK);
            })
            .unwrap();
        assert_eq!(open_descriptors(), before);
        assert_eq!(unsafe { libc::fcntl(1, libc::F_GETFL) } & libc::O_NONBLOCK, 0);
    }
}

fn closing_everything_comes_back() {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    let before = open_descriptors();
    for _ in 0..3 {
        rollback
            .run(|| unsafe { drop(Box::new(libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0))) })
            .unwrap();
        assert_eq!(open_descriptors(), before);
    }
    // They are the same files: what goes in comes out.
    assert_eq!(rustix::io::write(&writer, b"through").unwrap(), 7);
    let mut text = [0; 7];
    rustix::io::read(&reader, &mut text).unwrap();
    assert_eq!(&text, b"through");
}

fn offsets_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("numbers");
    std::fs::write(&path, "0123456789").unwrap();
    let file: OwnedFd = std::fs::File::open(&path).unwrap().into();
    let mut byte = [0];
    rustix::io::read(&file, &mut byte).unwrap();
    let mut rollback = rollback();
    for _ in 0..3 {
        rollback
            .run(|| {
                let mut rest = [0; 5];
                rustix::io::read(&file, &mut rest).unwrap();
                assert_eq!(&rest, b"12345");
            })
            .map(|outcome| assert_eq!(outcome, Outcome::Returned))
            .unwrap();
    }
    rustix::io::read(&file, &mut byte).unwrap();
    assert_eq!(&byte, b"1");
}

fn output_stays_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("output");
    let file = std::fs::File::create(&path).unwrap();
    let mut rollback = rollback();
    let saved = unsafe { OwnedFd::from_raw_fd(libc::dup(1)) };
    unsafe { libc::dup2(file.as_raw_fd(), 1) };
    for number in 0..3 {
        rollback.run(|| println!("closure {number}")).unwrap();
        println!("program {number}");
    }
    unsafe { libc::dup2(saved.as_raw_fd(), 1) };
    let expected = "closure 0\nprogram 0\nclosure 1\nprogram 1\nclosure 2\nprogram 2\n";
    assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
}

fn an_exempt_descriptor_stays() {
    let mut rollback = rollback();
    rollback.exempt_descriptor(300).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    rollback
        .run(|| {
            unsafe { libc::dup2(writer.as_raw_fd(), 300) };
        })
        .unwrap();
    drop(writer);
    assert_eq!(unsafe { libc::write(300, b"x".as_ptr().cast(), 1) }, 1);
    rollback
        .run(|| {
            unsafe { libc::close(300) };
        })
        .unwrap();
    // The copies of the table that these runs made had both ends.
    rollback.release_files().unwrap();
    let mut text = Vec::new();
    std::io::Read::read_to_end(&mut { reader }, &mut text).unwrap();
    assert_eq!(text, b"x");
}

fn dispositions_and_masks_come_back() {
    unsafe { libc::signal(libc::SIGUSR1, give_up as *const () as usize) };
    let state = || {
        let mut actions = Vec::new();
        for signal in 1..=64 {
            actions.push(orrery_sys::signals::action(signal).ok());
        }
        let mask = orrery_sys::signals::set_mask(0);
        orrery_sys::signals::set_mask(mask);
        (actions, mask, orrery_sys::signals::alternate_stack())
    };
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    let before = state();
    for _ in 0..3 {
        rollback
            .run(|| unsafe {
                for signal in 1..=64 {
                    libc::signal(signal, libc::SIG_IGN);
                }
                libc::signal(libc::SIGUSR1, libc::SIG_DFL);
                orrery_sys::signals::block_all();
                let stack = libc::stack_t { ss_sp: map(1 << 16).cast(), ss_flags: 0, ss_size: 1 << 16 };
                libc::sigaltstack(&raw const stack, std::ptr::null_mut());
            })
            .unwrap();
        assert_eq!(state(), before);
    }
}

fn blocked_signals_do_not_leak() {
    let mut rollback = rollback();
    // Undelivered at the end of the run, any of these would end the process.
    let outcome = rollback.run(|| unsafe {
        orrery_sys::signals::block_all();
        libc::raise(libc::SIGTERM);
        libc::kill(libc::getpid(), libc::SIGUSR2);
        libc::raise(libc::SIGRTMAX());
    });
    assert_eq!(outcome, Ok(Outcome::Returned));
}

fn timers_come_back() {
    let mut rollback = rollback();
    let list = || {
        let mut ids = Vec::new();
        orrery_sys::timers::PosixTimers::open().unwrap().for_each(|id| ids.push(id)).unwrap();
        ids
    };
    let before = list();
    let outcome = rollback.run(|| unsafe {
        libc::alarm(1);
        let mut timer = std::ptr::null_mut();
        libc::timer_create(libc::CLOCK_MONOTONIC, std::ptr::null_mut(), &raw mut timer);
        let soon = libc::itimerspec {
            it_interval: libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 },
            it_value: libc::timespec { tv_sec: 0, tv_nsec: 900_000_000 },
        };
        libc::timer_settime(timer, 0, &raw const soon, std::ptr::null_mut());
    });
    assert_eq!(outcome, Ok(Outcome::Returned));
    assert_eq!(list(), before);
    std::thread::sleep(Duration::from_millis(1200));
    // A timer of the program goes on.
    unsafe { libc::alarm(100) };
    rollback.run(|| unsafe { drop(Box::new(libc::alarm(0))) }).unwrap();
    assert!(unsafe { libc::alarm(0) } > 90);
}

fn directory_umask_and_limits_come_back() {
    let dir = tempfile::tempdir().unwrap();
    std::env::set_current_dir(dir.path()).unwrap();
    unsafe { libc::umask(0o27) };
    let mut rollback = rollback();
    for _ in 0..3 {
        rollback
            .run(|| unsafe {
                std::env::set_current_dir("/proc").unwrap();
                libc::umask(0o777);
                let limit = libc::rlimit { rlim_cur: 5, rlim_max: libc::RLIM_INFINITY };
                libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit);
                libc::setrlimit(libc::RLIMIT_CORE, &raw const limit);
            })
            .unwrap();
        assert_eq!(std::env::current_dir().unwrap(), dir.path().canonicalize().unwrap());
        assert_eq!(unsafe { libc::umask(0o27) }, 0o27);
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
        assert_eq!(limit.rlim_cur, libc::RLIM_INFINITY);
    }
}

fn names_and_priorities_come_back() {
    let mut rollback = rollback();
    let name = || std::fs::read_to_string("/proc/self/comm").unwrap();
    let before = name();
    rollback
        .run(|| unsafe {
            libc::prctl(libc::PR_SET_NAME, c"somebody else".as_ptr());
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGUSR1);
            libc::prctl(libc::PR_SET_TIMERSLACK, 123_456);
            libc::prctl(libc::PR_SET_DUMPABLE, 0);
        })
        .unwrap();
    assert_eq!(name(), before);
    let mut signal = 0;
    unsafe { libc::prctl(libc::PR_GET_PDEATHSIG, &raw mut signal) };
    assert_eq!(signal, 0);
    assert_ne!(unsafe { libc::prctl(libc::PR_GET_TIMERSLACK) }, 123_456);
    assert_eq!(unsafe { libc::prctl(libc::PR_GET_DUMPABLE) }, 1);
}

fn children_are_killed() {
    let mut rollback = rollback();
    let (reader, writer) = std::io::pipe().unwrap();
    let outcome = rollback.run(|| unsafe {
        // A child, a grandchild in a session of its own whose parent is gone, and one that nobody waited for.
        std::mem::forget(Command::new("sleep").arg("1000").spawn().unwrap());
        if libc::fork() == 0 {
            libc::setsid();
            if libc::fork() == 0 {
                libc::sleep(1000);
            }
            libc::_exit(0);
        }
        if libc::fork() == 0 {
            libc::_exit(0);
        }
        std::thread::sleep(Duration::from_millis(50));
    });
    assert_eq!(outcome, Ok(Outcome::Returned));
    drop(writer);
    rollback.release_files().unwrap();
    // Each of them had the pipe's other end: with the last gone, it is at its end.
    let mut nothing = Vec::new();
    std::io::Read::read_to_end(&mut { reader }, &mut nothing).unwrap();
    assert_eq!(unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) }, -1, "no child is left");
}

fn children_may_be_left() {
    let mut rollback = Rollback::builder().children(Children::Leave).build().unwrap();
    let kept = KeptBuffer::with_capacity(100).unwrap();
    rollback
        .run(|| tell(&kept, &Command::new("sleep").arg("1000").spawn().unwrap().id().to_string()))
        .unwrap();
    let pid: i32 = std::str::from_utf8(kept.bytes()).unwrap().parse().unwrap();
    unsafe {
        assert_eq!(libc::kill(pid, 0), 0);
        libc::kill(pid, libc::SIGKILL);
        assert_eq!(libc::waitpid(pid, std::ptr::null_mut(), 0), pid);
    }
}

fn a_forked_child_leaves_normally() {
    let mut rollback = rollback();
    let kept = KeptBuffer::with_capacity(100).unwrap();
    let status_of = |child: &dyn Fn()| unsafe {
        let pid = libc::fork();
        if pid == 0 {
            child();
            libc::_exit(99);
        }
        let mut status = 0;
        libc::waitpid(pid, &raw mut status, 0);
        status
    };
    let outcome = rollback.run(|| {
        let exited = status_of(&|| std::process::exit(5));
        let crashed = status_of(&|| unsafe { std::ptr::null_mut::<u8>().write_volatile(1) });
        let aborted = status_of(&|| std::process::abort());
        tell(
            &kept,
            &format!("{} {} {}", libc::WEXITSTATUS(exited), libc::WTERMSIG(crashed), libc::WTERMSIG(aborted)),
        );
    });
    assert_eq!((outcome, kept.bytes()), (Ok(Outcome::Returned), &b"5 11 6"[..]));
}

fn threads_end() {
    let mut rollback = rollback();
    for _ in 0..5 {
        let outcome = rollback.run(|| {
            for number in 0..8_u64 {
                std::thread::spawn(move || {
                    let mut hoard = vec![number; 10_000];
                    loop {
                        if number % 2 == 0 {
                            std::thread::sleep(Duration::from_secs(50));
                        }
                        hoard.push(number);
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(5));
        });
        assert_eq!(outcome, Ok(Outcome::Returned));
        assert_eq!(std::fs::read_dir("/proc/self/task").unwrap().count(), 1);
    }
}

fn a_deaf_thread_is_fatal() {
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        unsafe {
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY);
            libc::dup2(null, 2);
        }
        let _ = rollback().run(|| {
            std::thread::spawn(|| {
                orrery_sys::signals::block_all();
                std::thread::sleep(Duration::from_secs(100));
            });
            std::thread::sleep(Duration::from_millis(10));
        });
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(libc::WEXITSTATUS(status), orrery_lwc::rollback::EXIT_BROKEN);
}

fn parked_threads_go_on() {
    static STOP: AtomicU32 = AtomicU32::new(0);
    static ROUNDS: AtomicU32 = AtomicU32::new(0);
    let workers: Vec<_> = (0..3)
        .map(|_| {
            std::thread::spawn(|| {
                let mut sum = 0_u64;
                while STOP.load(Ordering::Relaxed) == 0 {
                    sum += 1;
                    ROUNDS.fetch_add(1, Ordering::Relaxed);
                    safe_point();
                    std::thread::sleep(Duration::from_micros(200));
                }
                sum
            })
        })
        .collect();
    let mut rollback = rollback();
    let mut value = 1;
    for _ in 0..20 {
        let before = ROUNDS.load(Ordering::Relaxed);
        assert_eq!(rollback.run(|| value += 1), Ok(Outcome::Returned));
        assert_eq!(value, 1);
        while ROUNDS.load(Ordering::Relaxed) <= before {
            std::thread::yield_now();
        }
    }
    STOP.store(1, Ordering::Relaxed);
    let sum: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
    assert_eq!(sum, u64::from(ROUNDS.load(Ordering::Relaxed)));
}

fn running_threads_are_refused() {
    std::thread::spawn(|| std::thread::sleep(Duration::from_secs(100)));
    let mut ran = false;
    assert_eq!(rollback().run(|| ran = true), Err(Error::Threads { running: 1, parked: 0 }));
    assert!(!ran);
}

fn floating_point_control_comes_back() {
    let mut rollback = rollback();
    let control = || {
        let (mut x87, mut sse) = (0_u16, 0_u32);
        unsafe {
            std::arch::asm!("fnstcw [{}]", in(reg) &raw mut x87);
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut sse);
        }
        (x87, sse & 0xffc0)
    };
    let before = control();
    rollback
        .run(|| unsafe {
            let (x87, sse) = (0x0c7f_u16, 0x7f80_u32);
            std::arch::asm!("fldcw [{}]", in(reg) &raw const x87);
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const sse);
            std::arch::asm!("std");
        })
        .unwrap();
    assert_eq!(control(), before);
    let kept: Vec<f64> = (0..50).map(|n| f64::from(n).sqrt()).collect();
    rollback.run(|| unsafe { std::ptr::null_mut::<f64>().write_volatile(kept[3]) }).unwrap();
    assert!((kept[4] - 2.0).abs() < 1e-12);
}

fn the_cpu_number_stays_live() {
    let mut rollback = rollback();
    let pin = |cpu: usize| unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set)
    };
    if pin(1) != 0 {
        orrery_testing::skipped!("one CPU only");
        return;
    }
    for _ in 0..20 {
        pin(0);
        assert_eq!(unsafe { libc::sched_getcpu() }, 0);
        rollback
            .run(|| {
                pin(1);
            })
            .unwrap();
        let mut cpu = 9_u32;
        unsafe { libc::syscall(libc::SYS_getcpu, &raw mut cpu, 0, 0) };
        // sched_getcpu reads what the kernel wrote into this process' memory, which must not be an old note.
        assert_eq!(unsafe { libc::sched_getcpu() }, i32::try_from(cpu).unwrap());
    }
}

fn nesting_is_refused() {
    let kept = KeptBuffer::with_capacity(1000).unwrap();
    let outcome = rollback().run(|| {
        let inner = Rollback::builder().build();
        tell(&kept, &format!("{}", inner.unwrap_err()));
    });
    assert_eq!(outcome, Ok(Outcome::Returned));
    assert_eq!(kept.bytes(), Error::Nested.to_string().as_bytes());
}

fn limits_apply_to_work_alone() {
    let outcomes = KeptBuffer::with_capacity(4096).unwrap();
    let mut rollback = rollback();
    rollback.set_memory_limit(Some(16 << 20));
    rollback.set_time_limit(Some(Duration::from_millis(100)));
    let last = rollback.serve(
        |last| {
            if let Some(last) = last {
                tell(&outcomes, &format!("{last:?} "));
            }
            drop(std::hint::black_box(vec![1_u8; 64 << 20]));
            std::thread::sleep(Duration::from_millis(150));
            match outcomes.bytes().iter().filter(|&&byte| byte == b' ').count() {
                3 => std::ops::ControlFlow::Break(()),
                round => std::ops::ControlFlow::Continue(round),
            }
        },
        |round| match round {
            0 => drop(std::hint::black_box(vec![1_u8; 1 << 20])),
            1 => {
                let mut pieces = Vec::with_capacity(1000);
                loop {
                    pieces.push(vec![1_u8; 100 << 10]);
                }
            }
            _ => loop {
                std::hint::spin_loop();
            },
        },
    );
    assert_eq!(last, Ok(Outcome::Returned));
    assert_eq!(outcomes.bytes(), b"Returned MemoryLimit TimedOut ");
}

fn one_of_racing_threads_gets_the_engine() {
    let start = std::sync::Barrier::new(4);
    let built: u32 = std::thread::scope(|scope| {
        let racers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    match Rollback::builder().build() {
                        Ok(_) => 1,
                        Err(Error::WrongThread { .. }) => 0,
                        Err(error) => panic!("{error}"),
                    }
                })
            })
            .collect();
        racers.into_iter().map(|racer| racer.join().unwrap()).sum()
    });
    assert_eq!(built, 1);
}

fn another_thread_is_refused() {
    let _rollback = rollback();
    let error = std::thread::spawn(|| Rollback::builder().build().map(drop)).join().unwrap().unwrap_err();
    assert!(matches!(error, Error::WrongThread { .. }), "{error}");
}

fn a_forked_process_is_refused() {
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // The old handle does not work; a new one does.
        let refused = matches!(rollback.run(|| {}), Err(Error::OtherProcess { .. }));
        let mut number = 1;
        let works = Rollback::builder().build().unwrap().run(|| number = 2) == Ok(Outcome::Returned);
        unsafe { libc::_exit(i32::from(refused && works && number == 1)) };
    }
    let mut status = 0;
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(libc::WEXITSTATUS(status), 1);
    assert_eq!(rollback.run(|| {}), Ok(Outcome::Returned));
}

static REFUSED: AtomicU32 = AtomicU32::new(0);

extern "C" fn try_in_handler(_: i32) {
    if Rollback::builder().build().and_then(|mut rollback| rollback.run(|| {})) == Err(Error::SignalHandler) {
        REFUSED.store(1, Ordering::Relaxed);
    }
}

fn a_signal_handler_is_refused() {
    let _rollback = rollback();
    unsafe {
        let stack = libc::stack_t { ss_sp: map(1 << 18).cast(), ss_flags: 0, ss_size: 1 << 18 };
        libc::sigaltstack(&raw const stack, std::ptr::null_mut());
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = try_in_handler as *const () as usize;
        action.sa_flags = libc::SA_ONSTACK;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
        libc::raise(libc::SIGUSR1);
    }
    assert_eq!(REFUSED.load(Ordering::Relaxed), 1);
}

fn kept_memory_stays() {
    let memory = map(64 << 10);
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    rollback.keep_memory(memory.addr() + 4096, 8192).unwrap();
    for round in 1..4_u8 {
        rollback.run(|| unsafe { memory.write_bytes(round, 64 << 10) }).unwrap();
        let bytes = unsafe { std::slice::from_raw_parts(memory, 64 << 10) };
        assert!(bytes[4096..12288].iter().all(|&byte| byte == round));
        assert!(bytes[..4096].iter().chain(&bytes[12288..]).all(|&byte| byte == 0));
    }
}

fn the_stack_cannot_be_kept() {
    let mut rollback = rollback();
    let local = 0_u8;
    let page = (&raw const local).addr() & !4095;
    for (start, length) in [(page, 4096), (page - 8192, 4096), (page, 100), (4096, 4096)] {
        let error = rollback.keep_memory(start, length).unwrap_err();
        assert!(matches!(error, Error::Memory(orrery_memory::Error::Keep { .. })), "{error}");
    }
    assert_eq!(rollback.run(|| {}), Ok(Outcome::Returned));
}

fn a_full_buffer_says_so() {
    let buffer = KeptBuffer::with_capacity(10).unwrap();
    let room = buffer.capacity();
    assert!(room >= 10);
    let error = buffer.push(&vec![1; room + 1]).unwrap_err();
    assert_eq!((error.capacity, error.needed), (room, room + 1));
    assert!(buffer.bytes().is_empty());
    buffer.push(&vec![1; room]).unwrap();
    assert!(buffer.push(&[1]).is_err());
}

fn no_address_space_is_an_error() {
    let limit = libc::rlimit { rlim_cur: 512 << 20, rlim_max: libc::RLIM_INFINITY };
    unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) };
    let error = Rollback::builder().build().map(drop).unwrap_err();
    assert!(matches!(error, Error::Memory(orrery_memory::Error::AddressSpace { .. })), "{error}");
    // A limit that leaves some room is enough.
    let limit = libc::rlimit { rlim_cur: 8 << 30, rlim_max: libc::RLIM_INFINITY };
    unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) };
    assert_eq!(rollback().run(|| {}), Ok(Outcome::Returned));
}

fn a_full_store_is_an_error() {
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    // The images' file may not grow any more.
    let limit = |bytes| {
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    };
    limit(4096);
    let mut pages = vec![0_u64; 64 << 17];
    for (page, first) in pages.iter_mut().step_by(512).enumerate() {
        *first = page as u64 + 1;
    }
    let mut ran = false;
    let error = rollback.run(|| ran = true).unwrap_err();
    assert!(matches!(error, Error::Memory(orrery_memory::Error::Store { .. })), "{error:?}");
    assert!(!ran && pages[512 * 77] == 78, "it has changed nothing");
    limit(libc::RLIM_INFINITY);
    rollback.run(|| pages.fill(0)).unwrap();
    assert!(pages.iter().step_by(512).enumerate().all(|(page, first)| *first == page as u64 + 1));
}

fn no_descriptors_is_an_error() {
    let limit = libc::rlimit { rlim_cur: 6, rlim_max: 1024 };
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    let error = Rollback::builder().build().map(drop).unwrap_err();
    assert!(error.to_string().contains("open"), "{error}");
    let limit = libc::rlimit { rlim_cur: 64, rlim_max: 1024 };
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert_eq!(rollback().run(|| {}), Ok(Outcome::Returned));
}

fn a_large_process_is_held() {
    let length = 400 << 20;
    let memory = map(length);
    unsafe { memory.write_bytes(1, length) };
    let mut rollback = rollback();
    for round in 0..3_u8 {
        rollback
            .run(|| unsafe {
                for page in (0..length).step_by(1 << 20) {
                    memory.add(page + 4096 * round as usize).write(9);
                }
            })
            .unwrap();
        assert!(unsafe { std::slice::from_raw_parts(memory, length) }.iter().all(|&byte| byte == 1));
    }
    let (statistics, restored) = rollback.statistics().unwrap();
    assert!(restored.copied >= 400);
    if rollback.mechanisms().unwrap().0 == "wp_async" {
        assert!(statistics.image_bytes < 100 << 20, "most pages stay where they are: {statistics:?}");
    }
}

fn hidden_images_work() {
    use orrery_memory::images::Visibility;
    let mut rollback = Rollback::builder().visibility(Visibility::Hidden).build().unwrap();
    let mut heap = vec![1_u8; 1_000_000];
    for _ in 0..3 {
        rollback.run(|| heap.fill(2)).unwrap();
        assert!(heap.iter().all(|&byte| byte == 1));
    }
}

fn scattered_pages_come_back() {
    let length = 64 << 20;
    let memory = map(length);
    unsafe { memory.write_bytes(1, length) };
    let mut rollback = rollback();
    for step in [8192, 12288, 4096] {
        rollback
            .run(|| {
                for at in (0..length).step_by(step) {
                    unsafe { memory.add(at).write(2) };
                }
            })
            .unwrap();
        assert!(unsafe { std::slice::from_raw_parts(memory, length) }.iter().all(|&byte| byte == 1));
    }
}

/// Puts this process into a control group of its own whose memory can be squeezed, or says why not.
fn squeeze(bytes: u64) -> Result<impl Drop, String> {
    struct Group(std::path::PathBuf);
    impl Drop for Group {
        fn drop(&mut self) {
            let _ =
                std::fs::write(self.0.parent().unwrap().join("cgroup.procs"), std::process::id().to_string());
            let _ = std::fs::remove_dir(&self.0);
        }
    }
    let group = std::path::PathBuf::from(format!("/sys/fs/cgroup/memory/orrery-test-{}", std::process::id()));
    std::fs::create_dir(&group).map_err(|error| format!("no control group: {error}"))?;
    let made = Group(group.clone());
    let write = |file: &str, text: String| {
        std::fs::write(group.join(file), text).map_err(|error| format!("{file}: {error}"))
    };
    write("cgroup.procs", std::process::id().to_string())?;
    write("memory.limit_in_bytes", bytes.to_string())?;
    Ok(made)
}

fn freed_pages_come_back() {
    let length = 32 << 20;
    let memory = map(length);
    unsafe { memory.write_bytes(1, length) };
    let mut rollback = rollback();
    rollback.run(|| assert_eq!(unsafe { libc::madvise(memory.cast(), length, libc::MADV_FREE) }, 0)).unwrap();
    // Pages that are still marked would be taken now.
    match squeeze(256 << 20) {
        Ok(_group) => {
            let pressure = map(400 << 20);
            for at in (0..400 << 20).step_by(4096) {
                unsafe {
                    pressure.add(at).write(1);
                    if at % (64 << 20) == 0 && at > 0 {
                        libc::madvise(pressure.add(at - (64 << 20)).cast(), 64 << 20, libc::MADV_DONTNEED);
                    }
                }
            }
        }
        Err(reason) => orrery_testing::skipped!("pressure: {reason}"),
    }
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let marked = rollup.lines().find_map(|line| line.strip_prefix("LazyFree:")).unwrap().trim().to_owned();
    assert_eq!(marked, "0 kB");
    assert!(unsafe { std::slice::from_raw_parts(memory, length) }.iter().all(|&byte| byte == 1));
    assert_eq!(rollback.run(|| {}), Ok(Outcome::Returned));
    assert!(unsafe { std::slice::from_raw_parts(memory, length) }.iter().all(|&byte| byte == 1));
}

fn swapped_pages_come_back() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("swap");
    let made = Command::new("sh")
        .arg("-c")
        .arg(format!(
            "dd if=/dev/zero of={0} bs=1M count=48 && chmod 600 {0} && mkswap {0} && swapon {0}",
            path.display()
        ))
        .output()
        .unwrap();
    if !made.status.success() {
        orrery_testing::skipped!("no swap: {}", String::from_utf8_lossy(&made.stderr));
        return;
    }
    let length = 24 << 20;
    let memory = map(length);
    unsafe { memory.write_bytes(1, length) };
    let mut rollback = rollback();
    let out = |from: usize, length: usize| unsafe {
        libc::madvise(memory.add(from).cast(), length, libc::MADV_PAGEOUT)
    };
    rollback.run(|| {}).unwrap();
    // Clean pages go out and come back as they were; dirty ones go out dirty and are put back all the same.
    out(0, 8 << 20);
    let run = rollback.run(|| {
        unsafe { memory.add(4 << 20).write_bytes(2, 12 << 20) };
        out(4 << 20, 12 << 20);
        out(20 << 20, 2 << 20);
    });
    let swapped = std::fs::read_to_string("/proc/swaps").unwrap();
    let same = unsafe { std::slice::from_raw_parts(memory, length) }.iter().all(|&byte| byte == 1);
    let again = rollback.run(|| {});
    let _ = Command::new("swapoff").arg(&path).status();
    println!("{swapped}");
    assert_eq!((run, same, again), (Ok(Outcome::Returned), true, Ok(Outcome::Returned)));
}

fn merged_pages_come_back() {
    let Ok(before) = std::fs::read_to_string("/sys/kernel/mm/ksm/run") else {
        orrery_testing::skipped!("no KSM here");
        return;
    };
    let ksm = |file: &str, text: &str| std::fs::write(format!("/sys/kernel/mm/ksm/{file}"), text);
    let pages_before = std::fs::read_to_string("/sys/kernel/mm/ksm/pages_to_scan").unwrap();
    if ksm("pages_to_scan", "20000").and_then(|()| ksm("run", "1")).is_err() {
        orrery_testing::skipped!("KSM may not be switched on");
        return;
    }
    let length = 8 << 20;
    let memory = map(length);
    unsafe {
        memory.write_bytes(1, length);
        libc::madvise(memory.cast(), length, libc::MADV_MERGEABLE);
    }
    let mut rollback = rollback();
    for _ in 0..10 {
        rollback
            .run(|| {
                std::thread::sleep(Duration::from_millis(60));
                unsafe { memory.add(1 << 20).write_bytes(2, 1 << 20) };
            })
            .unwrap();
        assert!(unsafe { std::slice::from_raw_parts(memory, length) }.iter().all(|&byte| byte == 1));
    }
    println!("merged: {}", std::fs::read_to_string("/sys/kernel/mm/ksm/pages_sharing").unwrap());
    let _ = ksm("run", before.trim()).and_then(|()| ksm("pages_to_scan", pages_before.trim()));
}

/// Kills every sleeper of this process: what a hostile closure might do.
fn kill_sleepers() {
    let me = std::process::id();
    for entry in std::fs::read_to_string(format!("/proc/self/task/{me}/children")).unwrap().split_whitespace()
    {
        let pid: i32 = entry.parse().unwrap();
        unsafe {
            libc::kill(pid, libc::SIGKILL);
            // Until it is dead, but leaving its body.
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let how = libc::WEXITED | libc::WNOWAIT | libc::__WALL;
            libc::waitid(libc::P_PID, pid.unsigned_abs(), &raw mut info, how);
        }
    }
}

fn a_killed_keeper_is_survived() {
    let mut rollback = rollback();
    let file = std::fs::File::open("/dev/null").unwrap();
    rollback.run(|| {}).unwrap();
    let before = open_descriptors();
    assert_eq!(rollback.run(kill_sleepers), Ok(Outcome::Returned));
    assert_eq!(open_descriptors(), before);
    // A file that only the keeper knew is lost, which is said; the next run has a new keeper.
    let lost = rollback.run(|| {
        kill_sleepers();
        unsafe { libc::close(file.as_raw_fd()) };
    });
    assert_eq!(lost, Err(Error::NotUndone(Leftover::Descriptor(file.as_raw_fd()))));
    std::mem::forget(file);
    assert_eq!(rollback.run(|| drop(std::fs::File::open("/dev/zero"))), Ok(Outcome::Returned));
}

fn a_killed_holder_is_fatal() {
    if std::env::var("ORRERY_TRACKER").as_deref() == Ok("compare") {
        orrery_testing::skipped!("nothing is held when contents are compared");
        return;
    }
    let length = 64 << 20;
    let memory = map(length);
    unsafe { memory.write_bytes(1, length) };
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        unsafe { libc::dup2(libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY), 2) };
        let _ = rollback().run(|| {
            kill_sleepers();
            unsafe { memory.write(2) };
        });
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(libc::WEXITSTATUS(status), orrery_lwc::rollback::EXIT_BROKEN);
}

/// Makes system call `number` fail with EPERM in this process from now on.
fn forbid(number: i64) {
    let statement =
        |code: u32, jt, jf, k| libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k };
    let number = u32::try_from(number).unwrap();
    let mut program = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, number),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs()),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: 4, filter: program.as_mut_ptr() };
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter), 0);
    }
}

fn without_userfaultfd_it_compares() {
    unsafe { std::env::remove_var("ORRERY_TRACKER") };
    forbid(libc::SYS_userfaultfd);
    let mut rollback = rollback();
    assert_eq!(rollback.mechanisms(), Ok(("compare", false)));
    let mut heap = vec![1_u8; 1_000_000];
    rollback.run(|| heap.fill(2)).unwrap();
    assert!(heap.iter().all(|&byte| byte == 1));
    let by_name = Rollback::builder().tracker(orrery_memory::tracker::Choice::WpAsync);
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let error = by_name.build().map(drop).unwrap_err();
        unsafe { libc::_exit(i32::from(error.to_string().contains("tracker wp_async does not work here"))) };
    }
    let mut status = 0;
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(libc::WEXITSTATUS(status), 1);
}

fn without_perf_it_reads_the_layout() {
    forbid(libc::SYS_perf_event_open);
    let mut rollback = rollback();
    assert!(!rollback.mechanisms().unwrap().1);
    let memory = map(1 << 20);
    for _ in 0..3 {
        rollback
            .run(|| unsafe {
                map(1 << 20).write(1);
                libc::mprotect(memory.cast(), 4096, libc::PROT_NONE);
            })
            .unwrap();
        unsafe { memory.write(1) };
    }
}

fn rounds_begin_alike() {
    let rounds = KeptBuffer::with_capacity(10_000).unwrap();
    let mut heap = vec![0_u32; 100_000];
    let mut local = 0;
    let descriptors = open_descriptors().len();
    let outcome = rollback().repeat(|last| {
        rounds.push(&[1]).unwrap();
        assert!(heap.iter().all(|&number| number == 0) && local == 0);
        assert_eq!(last.is_none(), rounds.bytes().len() == 1);
        heap.fill(7);
        local += 1;
        std::mem::forget(std::fs::File::open("/dev/null").unwrap());
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_IGN) };
        std::env::set_current_dir("/").unwrap();
        if rounds.bytes().len() == 1000 {
            std::ops::ControlFlow::Break(())
        } else {
            std::ops::ControlFlow::Continue(())
        }
    });
    assert_eq!((outcome, rounds.bytes().len(), local), (Ok(Outcome::Returned), 1000, 0));
    assert!(open_descriptors().len() <= descriptors + 12, "those of the engine");
}

fn rounds_end_in_every_way() {
    let story = KeptBuffer::with_capacity(10_000).unwrap();
    let count = KeptBuffer::with_capacity(100).unwrap();
    std::panic::set_hook(Box::new(|_| {}));
    let mut rollback = Rollback::builder().time_limit(Duration::from_millis(20)).build().unwrap();
    let outcome = rollback.repeat(|last| {
        tell(&story, &format!("{last:?} "));
        count.push(&[1]).unwrap();
        match count.bytes().len() {
            1 => std::process::exit(3),
            2 => unsafe { std::ptr::null_mut::<u8>().write_volatile(1) },
            3 => panic!("round three"),
            4 => loop {
                std::thread::sleep(Duration::from_secs(1));
            },
            5 => abandon(5),
            6 => std::process::abort(),
            _ => return std::ops::ControlFlow::Break(()),
        }
        std::ops::ControlFlow::Continue(())
    });
    assert_eq!(outcome, Ok(Outcome::Returned));
    let expected = "None Some(Exited(3)) Some(Signaled { signal: 11, address: 0 }) Some(Panicked) Some(TimedOut) \
                    Some(Abandoned(5)) Some(Signaled { signal: 6, address: 0 }) ";
    assert_eq!(std::str::from_utf8(story.bytes()).unwrap(), expected);
    // Nothing of the engine is left in the process' dispositions.
    assert_eq!(orrery_sys::signals::action(orrery_lwc::CONTROL_SIGNAL).unwrap().handler, libc::SIG_DFL);
}

/// What piles up if a rollback forgets something.
#[derive(Debug, PartialEq)]
struct Footprint {
    descriptors: usize,
    mappings: usize,
    threads: usize,
}

fn footprint() -> Footprint {
    Footprint {
        descriptors: open_descriptors().len(),
        mappings: maps().len(),
        threads: std::fs::read_dir("/proc/self/task").unwrap().count(),
    }
}

fn resident() -> usize {
    orrery_sys::process::Statm::open().unwrap().read().unwrap().resident * 4096
}

fn runs_leave_nothing_behind() {
    let fast = std::env::var("ORRERY_TRACKER").as_deref() != Ok("compare");
    let default = if fast { 20_000 } else { 500 };
    let runs: u32 = std::env::var("ORRERY_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(default);
    let mut rollback = rollback();
    let once = |rollback: &mut Rollback, number: u32| {
        let outcome = rollback.run(|| {
            let hoard: Vec<Vec<u8>> = (0..20).map(|n| vec![1; 1000 * n]).collect();
            std::mem::forget(hoard);
            if number.is_multiple_of(16) {
                let fresh = map(1 << 20);
                unsafe { fresh.write_bytes(1, 1 << 18) };
                std::mem::forget(std::fs::File::open("/dev/null").unwrap());
            }
            if number.is_multiple_of(512) {
                std::thread::spawn(|| std::thread::sleep(Duration::from_secs(9)));
            }
        });
        assert_eq!(outcome, Ok(Outcome::Returned));
    };
    for number in 0..1024.min(runs / 4) {
        once(&mut rollback, number);
    }
    let images = |rollback: &Rollback| rollback.statistics().unwrap().0.images;
    let (before, memory, stored) = (footprint(), resident(), images(&rollback));
    for number in 0..runs {
        once(&mut rollback, number);
    }
    assert_eq!(footprint(), before);
    let more = images(&rollback).saturating_sub(stored);
    assert!(more < 100, "{more} page images more after {runs} runs");
    let grown = resident().saturating_sub(memory);
    assert!(grown < 8 << 20, "resident memory grew by {grown} bytes in {runs} runs");
    println!("{runs} runs: {before:?}, resident memory +{grown}");
}

/// Named so that a leftover can be told apart in the errors of this file.
const _: fn(&Leftover) -> bool = |leftover| matches!(leftover, Leftover::Descriptor(_));
