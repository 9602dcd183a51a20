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

/// Registers that compiled code hardly uses: the upper half of those that all processors have, and those of AVX-512.
#[repr(C, align(64))]
struct Vectors {
    sse: [u128; 8],
    avx512: [[u64; 8]; 16],
}

impl Vectors {
    fn read() -> Self {
        let mut all = Self { sse: [0; 8], avx512: [[0; 8]; 16] };
        // SAFETY: writes the 128 bytes.
        unsafe {
            std::arch::asm!(
                "movdqa [{0}], xmm8", "movdqa [{0} + 16], xmm9", "movdqa [{0} + 32], xmm10", "movdqa [{0} + 48], xmm11",
                "movdqa [{0} + 64], xmm12", "movdqa [{0} + 80], xmm13", "movdqa [{0} + 96], xmm14", "movdqa [{0} + 112], xmm15",
                in(reg) &raw mut all.sse, options(nostack),
            );
        }
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: writes the 1,024 bytes; the processor has the registers.
            unsafe {
                std::arch::asm!(
                    "vmovdqu64 [{0}], zmm16", "vmovdqu64 [{0} + 64], zmm17", "vmovdqu64 [{0} + 960], zmm31",
                    in(reg) &raw mut all.avx512, options(nostack),
                );
            }
        }
        all
    }

    /// Puts ones into them.
    fn fill() {
        // SAFETY: changes registers that it names.
        unsafe {
            std::arch::asm!(
                "pcmpeqd xmm8, xmm8", "movdqa xmm9, xmm8", "movdqa xmm10, xmm8", "movdqa xmm11, xmm8", "movdqa xmm12, xmm8",
                "movdqa xmm13, xmm8", "movdqa xmm14, xmm8", "movdqa xmm15, xmm8",
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _, out("xmm12") _, out("xmm13") _, out("xmm14") _,
                out("xmm15") _, options(nomem, nostack),
            );
        }
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: changes registers that code compiled for every x86-64 does not use.
            unsafe {
                std::arch::asm!(
                    "vpternlogd zmm16, zmm16, zmm16, 0xff",
                    "vmovdqa64 zmm17, zmm16",
                    "vmovdqa64 zmm31, zmm16",
                    options(nomem, nostack),
                );
            }
        }
    }

    fn are_clear(&self) -> bool {
        self.sse == [0; 8] && self.avx512 == [[0; 8]; 16]
    }
}

pub(crate) fn registers_hold_nothing_of_the_round_before() {
    let rounds = KeptBuffer::with_capacity(100).unwrap();
    let outcome = rollback().repeat(|_| {
        let found = Vectors::read();
        rounds.push(&[u8::from(found.are_clear())]).unwrap();
        match rounds.bytes().len() {
            1 | 2 => {
                Vectors::fill();
                abandon(1)
            }
            3 => Vectors::fill(),
            _ => return std::ops::ControlFlow::Break(()),
        }
        std::ops::ControlFlow::Continue(())
    });
    assert_eq!(outcome, Ok(Outcome::Returned));
    assert_eq!(rounds.bytes()[1..], [1, 1, 1]);
    Vectors::fill();
    let once = rollback().run(|| {
        Vectors::fill();
        abandon(2)
    });
    assert_eq!((once, Vectors::read().are_clear()), (Ok(Outcome::Abandoned(2)), true));
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
                // SAFETY: a part of the test's own mapping, to which nothing else refers.
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
