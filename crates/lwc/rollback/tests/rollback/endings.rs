//! How a run ends, whatever its closure does.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use orrery_rollback::{KeptBuffer, Outcome, Rollback};

use super::common::{give_up, rollback, tell};

pub(crate) fn a_panic_ends_a_run() {
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

pub(crate) fn exit_ends_a_run() {
    let mut rollback = rollback();
    assert_eq!(rollback.run(|| std::process::exit(7)), Ok(Outcome::Exited(7)));
    // SAFETY: ends the run, as is wanted.
    assert_eq!(rollback.run(|| unsafe { libc::_exit(8) }), Ok(Outcome::Exited(8)));
    unsafe extern "C" {
        fn quick_exit(status: i32) -> !;
    }
    // SAFETY: ends the run by what the C library registers for quick_exit, which the test wants.
    assert_eq!(rollback.run(|| unsafe { quick_exit(9) }), Ok(Outcome::Exited(9)));
}

pub(crate) fn exit_of_a_thread_ends_a_run() {
    let mut rollback = rollback();
    let outcome = rollback.run(|| {
        std::thread::spawn(|| std::process::exit(3));
        loop {
            std::thread::sleep(Duration::from_secs(10));
        }
    });
    assert_eq!(outcome, Ok(Outcome::Exited(3)));
}

pub(crate) fn a_null_pointer_ends_a_run() {
    let mut rollback = rollback();
    for address in [0_usize, 8, 0x7000] {
        // SAFETY: nothing is mapped there, or nothing that may be written: the fault ends the run, as is wanted.
        let outcome = rollback.run(|| unsafe {
            std::ptr::with_exposed_provenance_mut::<u32>(std::hint::black_box(address)).write_volatile(1);
        });
        assert_eq!(outcome, Ok(Outcome::Signaled { signal: libc::SIGSEGV, address }));
    }
}

pub(crate) fn abort_ends_a_run() {
    let mut rollback = rollback();
    for _ in 0..3 {
        let outcome = rollback.run(|| std::process::abort());
        assert_eq!(outcome, Ok(Outcome::Signaled { signal: libc::SIGABRT, address: 0 }));
    }
}

pub(crate) fn a_division_ends_a_run() {
    let mut rollback = rollback();
    // SAFETY: the fault ends the run, as is wanted.
    let outcome = rollback.run(|| unsafe {
        std::arch::asm!("xor edx, edx", "xor eax, eax", "xor ecx, ecx", "div ecx", out("eax") _, out("ecx") _, out("edx") _);
    });
    assert!(matches!(outcome, Ok(Outcome::Signaled { signal: libc::SIGFPE, .. })));
    // SAFETY: the fault ends the run, which the test wants.
    let outcome = rollback.run(|| unsafe { std::arch::asm!("ud2") });
    assert!(matches!(outcome, Ok(Outcome::Signaled { signal: libc::SIGILL, .. })));
}

#[expect(unconditional_recursion, reason = "the test")]
fn recurse(depth: u64) -> u64 {
    let frame = std::hint::black_box([depth; 64]);
    recurse(depth + 1) + frame[3]
}

pub(crate) fn an_exhausted_stack_ends_a_run() {
    let mut rollback = rollback();
    for _ in 0..2 {
        let outcome = rollback.run(|| {
            recurse(0);
        });
        assert!(matches!(outcome, Ok(Outcome::Signaled { signal: libc::SIGSEGV, .. })), "{outcome:?}");
    }
}

pub(crate) fn a_fault_of_a_thread_ends_a_run() {
    let mut rollback = rollback();
    let outcome = rollback.run(|| {
        // SAFETY: nothing is mapped there: the fault ends the run, as is wanted.
        let thread = std::thread::spawn(|| unsafe {
            std::ptr::with_exposed_provenance_mut::<u8>(std::hint::black_box(24)).write_volatile(1);
        });
        let _ = thread.join();
    });
    assert_eq!(outcome, Ok(Outcome::Signaled { signal: libc::SIGSEGV, address: 24 }));
}

pub(crate) fn an_endless_loop_ends_in_time() {
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

pub(crate) fn a_sleeping_closure_ends_in_time() {
    let mut rollback = rollback();
    rollback.set_time_limit(Some(Duration::from_millis(20)));
    assert_eq!(rollback.run(|| std::thread::sleep(Duration::from_secs(100))), Ok(Outcome::TimedOut));
    rollback.set_time_limit(None);
    assert_eq!(rollback.run(|| std::thread::sleep(Duration::from_millis(40))), Ok(Outcome::Returned));
}

pub(crate) fn hunger_ends_a_run() {
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

pub(crate) fn an_exit_handler_runs_once() {
    let mut rollback = rollback();
    let kept = KeptBuffer::with_capacity(100).unwrap();
    let outcome = rollback.run(|| {
        // SAFETY: a function of that kind, which lives as long as the program.
        unsafe { libc::atexit(at_exit) };
        tell(&kept, "registered");
        std::process::exit(1);
    });
    assert_eq!((outcome, kept.bytes()), (Ok(Outcome::Exited(1)), &b"registered"[..]));
    assert_eq!(EXITED.load(Ordering::Relaxed), 0, "its count was rolled back with the rest");
}

pub(crate) fn a_signal_handler_may_abandon() {
    // SAFETY: the handler is a function of that kind, and abandons the run, in which nothing is held.
    unsafe { libc::signal(libc::SIGUSR1, give_up as *const () as usize) };
    let mut rollback = rollback();
    let outcome = rollback.run(|| {
        // SAFETY: takes numbers.
        unsafe { libc::raise(libc::SIGUSR1) };
        unreachable!();
    });
    assert_eq!(outcome, Ok(Outcome::Abandoned(77)));
    // With nothing running it is a signal like any other.
    // SAFETY: takes numbers.
    unsafe { libc::raise(libc::SIGUSR1) };
}
