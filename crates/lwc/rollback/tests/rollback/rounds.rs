//! Many runs: rounds of `repeat`, and what piles up.

use std::time::Duration;

use orrery_rollback::{KeptBuffer, Outcome, Rollback, abandon};

use super::common::{map, maps, open_descriptors, rollback, tell};

pub(crate) fn rounds_begin_alike() {
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
        // SAFETY: takes numbers.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_IGN) };
        std::env::set_current_dir("/").unwrap();
        if rounds.bytes().len() == 1000 {
            std::ops::ControlFlow::Break(())
        } else {
            std::ops::ControlFlow::Continue(())
        }
    });
    assert_eq!((outcome, rounds.bytes().len(), local), (Ok(Outcome::Returned), 1000, 0));
    assert!(open_descriptors().len() <= descriptors + 13, "those of the engine");
}

pub(crate) fn rounds_end_in_every_way() {
    let story = KeptBuffer::with_capacity(10_000).unwrap();
    let count = KeptBuffer::with_capacity(100).unwrap();
    std::panic::set_hook(Box::new(|_| {}));
    let mut rollback = Rollback::builder().time_limit(Duration::from_millis(20)).build().unwrap();
    let outcome = rollback.repeat(|last| {
        tell(&story, &format!("{last:?} "));
        count.push(&[1]).unwrap();
        match count.bytes().len() {
            1 => std::process::exit(3),
            // SAFETY: nothing is mapped there: the fault ends the round, as is wanted.
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
    assert_eq!(orrery_sys::signals::action(orrery_rollback::CONTROL_SIGNAL).unwrap().handler, libc::SIG_DFL);
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

pub(crate) fn runs_leave_nothing_behind() {
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
                // SAFETY: within the mapping.
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
