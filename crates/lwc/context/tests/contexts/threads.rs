//! Programs with several threads: each is in one context at a time, and keeps a state of its own in each.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread::{JoinHandle, spawn};
use std::time::{Duration, Instant};

use orrery_context::{Calls, Context, Error, Spec, create};
use orrery_domain::End;

use crate::pages::PAGE;
use crate::support::{
    await_end_of, call_number, kill_after, only, own_pid, reap, server, shared_page, shared_words,
};

/// The program's own process.
static ROOT: AtomicU64 = AtomicU64::new(0);
/// In a context: its creator, noted by the thread that created it.
pub(crate) static CREATOR: OnceLock<Context> = OnceLock::new();

pub(crate) fn is_root() -> bool {
    own_pid() == ROOT.load(SeqCst)
}

/// Spins: futexes are each context's own.
pub(crate) fn await_word(word: &AtomicU64, value: u64) {
    let start = Instant::now();
    while word.load(SeqCst) != value {
        assert!(start.elapsed() < Duration::from_secs(50), "nobody says {value}");
        std::thread::yield_now();
    }
}

/// Returns a context whose creating thread notes its creator, and then returns to every caller what it said. It has
/// been there once, so the note is there for others.
pub(crate) fn noting(spec: &Spec) -> Context {
    let context = create(spec, |start| {
        CREATOR.set(start.creator).unwrap();
        let mut arrival = start.arrival;
        loop {
            arrival = arrival.caller.switch(arrival.word, &[]).unwrap();
        }
    })
    .unwrap();
    assert_eq!(context.switch(5, &[]).unwrap().word, 5);
    context
}

/// A thread that waits until `go` is 1, wherever it is, and then runs `there`, in the root and in each context that was
/// created meanwhile.
pub(crate) fn waiting(go: &'static AtomicU64, there: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    ROOT.store(own_pid(), SeqCst);
    let words = shared_words();
    let thread = spawn(move || {
        words[0].store(1, SeqCst);
        await_word(go, 1);
        there();
    });
    await_word(&words[0], 1);
    thread
}

pub(crate) fn a_new_thread_is_refused() {
    let other = create(&Spec::new(), server(|word| word + 1)).unwrap();
    let descriptor = other.descriptor();
    let alone = create(&Spec::new().alone(true), server(|word| word)).unwrap();
    spawn(move || {
        assert_eq!(other.switch(0, &[]).unwrap_err(), Error::NoThread { descriptor });
        // What it creates itself, it may enter.
        let own = create(&Spec::new(), server(|word| word + 2)).unwrap();
        assert_eq!(own.switch(3, &[]).unwrap().word, 5);
        own.close().unwrap();
    })
    .join()
    .unwrap();
    assert_eq!(other.switch(4, &[]).unwrap().word, 5);
    assert_eq!(alone.switch(4, &[]).unwrap().word, 4);
}

pub(crate) fn a_thread_resumes_where_it_was() {
    thread_local! { static SEEN: Cell<u64> = const { Cell::new(7) } }
    let words = shared_words();
    let target: &'static OnceLock<Context> = Box::leak(Box::new(OnceLock::new()));
    let kept = vec![String::from("kept"); 3];
    let thread = waiting(&words[1], move || {
        let mine = kept.concat();
        if is_root() {
            SEEN.set(8);
            let arrival = target.get().unwrap().switch(1, &[]).unwrap();
            assert_eq!((arrival.word, SEEN.get(), mine.as_str()), (70, 8, "keptkeptkept"));
            let arrival = target.get().unwrap().switch(2, &[]).unwrap();
            assert_eq!((arrival.word, SEEN.get()), (71, 8));
        } else {
            // A copy from before the root's thread went on.
            assert_eq!((SEEN.get(), mine.as_str()), (7, "keptkeptkept"));
            words[3].store(u64::from(std::process::id()), SeqCst);
            // SAFETY: takes nothing; the C library reads what the kernel has written for this thread.
            let cpu = unsafe { libc::sched_getcpu() };
            assert!(cpu >= 0);
            let arrival = CREATOR.get().unwrap().switch(SEEN.get() * 10, &[]).unwrap();
            assert_eq!(arrival.word, 2);
            SEEN.set(SEEN.get() + 1);
            // The C library knows the thread: it starts others, and they end.
            let sum = spawn(|| 1).join().unwrap();
            let _ = CREATOR.get().unwrap().switch(70 + sum, &[]);
        }
    });
    target.set(noting(&Spec::new())).unwrap();
    words[1].store(1, SeqCst);
    thread.join().unwrap();
    assert_ne!(words[3].load(SeqCst), own_pid());
    // The first thread is where it was.
    assert_eq!(target.get().unwrap().switch(6, &[]).unwrap().word, 6);
}

pub(crate) fn a_parked_thread_returns_from_its_switch() {
    let words = shared_words();
    let names: &'static [OnceLock<Context>; 2] = Box::leak(Box::new([OnceLock::new(), OnceLock::new()]));
    let thread = waiting(&words[1], move || {
        if is_root() {
            // The second context is created while this switch lasts.
            let arrival = names[0].get().unwrap().switch(1, &[]).unwrap();
            if !is_root() {
                // In the second one: the same call returns, with whoever switched here.
                let _ = arrival.caller.switch(arrival.word + 100, &[1, 2, 3]);
                unreachable!();
            }
            assert_eq!(arrival.word, 11);
            let arrival = names[1].get().unwrap().switch(2, &[]).unwrap();
            assert_eq!((arrival.word, &arrival.bytes[..]), (102, &[1, 2, 3][..]));
        } else {
            words[2].store(1, SeqCst);
            await_word(&words[3], 1);
            let _ = CREATOR.get().unwrap().switch(11, &[]);
        }
    });
    names[0].set(noting(&Spec::new())).unwrap();
    words[1].store(1, SeqCst);
    await_word(&words[2], 1);
    names[1].set(create(&Spec::new(), server(|word| word)).unwrap()).unwrap();
    words[3].store(1, SeqCst);
    thread.join().unwrap();
}

pub(crate) fn threads_meet_in_one_context() {
    static MET: AtomicU64 = AtomicU64::new(0);
    let words = shared_words();
    let target: &'static OnceLock<Context> = Box::leak(Box::new(OnceLock::new()));
    let there = move || {
        if is_root() {
            assert_eq!(target.get().unwrap().switch(0, &[]).unwrap().word, 3);
            // What they wrote there is not here.
            assert_eq!(MET.load(SeqCst), 0);
        } else {
            MET.fetch_add(1, SeqCst);
            await_word(&MET, 3);
            let _ = CREATOR.get().unwrap().switch(MET.load(SeqCst), &[]);
        }
    };
    let threads: Vec<_> = (0..3).map(|_| waiting(&words[1], there)).collect();
    target.set(noting(&Spec::new())).unwrap();
    words[1].store(1, SeqCst);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// What the walkers of the next test share: how far each is, and how often each was where.
const WALKERS: usize = 4;
const PLACES: usize = 5;
const STEPS: u64 = 1500;

struct Walks {
    step: [AtomicU64; WALKERS],
    from: [AtomicU64; WALKERS],
    visits: [[AtomicU64; PLACES]; WALKERS],
}

fn walks() -> &'static Walks {
    assert!(size_of::<Walks>() <= PAGE);
    // SAFETY: a page is aligned for words, has room for these, and stays; they are zero, and nobody knows them as
    // anything but atomics.
    unsafe { &*shared_page().cast() }
}

static WHERE: AtomicU64 = AtomicU64::new(0);
/// What each context knows of the others; the root's row is copied into those that are created later.
static NAMES: [OnceLock<Context>; PLACES] = [const { OnceLock::new() }; PLACES];

/// One walker in one context: it goes wherever chance sends it, and counts on its stack how often it came.
fn walk(walker: usize, all: &Walks) {
    thread_local! { static CAME: Cell<u64> = const { Cell::new(0) } }
    let mut names: [Option<Context>; PLACES] = [const { None }; PLACES];
    let mut came = 0;
    let here = usize::try_from(WHERE.load(SeqCst)).unwrap();
    for (name, known) in names.iter_mut().zip(&NAMES) {
        *name = known.get().copied();
    }
    if here != 0 {
        names[0] = CREATOR.get().copied();
    }
    names[here] = None;
    loop {
        let step = all.step[walker].load(SeqCst);
        came += 1;
        CAME.set(CAME.get() + 1);
        // A stretch of memory of its own, so that allocators are at work in all of them.
        let kept: Vec<u8> =
            vec![u8::try_from(step % 251).unwrap(); 100 + usize::try_from(step % 5000).unwrap()];
        assert_eq!((came, CAME.get()), (all.visits[walker][here].fetch_add(1, SeqCst) + 1, came));
        if step >= STEPS && here == 0 {
            return;
        }
        let random = (step + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 + walker as u64 * 2) >> 33;
        let known: Vec<usize> = (0..PLACES).filter(|place| names[*place].is_some()).collect();
        let next = if step >= STEPS { 0 } else { known[usize::try_from(random).unwrap() % known.len()] };
        all.step[walker].store(step + 1, SeqCst);
        all.from[walker].store(here as u64, SeqCst);
        let arrival = names[next].unwrap().switch(step + 1, &step.to_ne_bytes()).unwrap();
        let now = all.step[walker].load(SeqCst);
        assert_eq!((arrival.word, &arrival.bytes[..]), (now, &(now - 1).to_ne_bytes()[..]));
        assert!(kept.iter().all(|byte| u64::from(*byte) == step % 251));
        let from = usize::try_from(all.from[walker].load(SeqCst)).unwrap();
        names[from] = Some(arrival.caller);
    }
}

pub(crate) fn threads_switch_at_random() {
    let (words, all) = (shared_words(), walks());
    let walkers: Vec<_> = (0..WALKERS).map(|walker| waiting(&words[1], move || walk(walker, all))).collect();
    for (place, name) in NAMES.iter().enumerate().skip(1) {
        WHERE.store(place as u64, SeqCst);
        let context = noting(&Spec::new());
        WHERE.store(0, SeqCst);
        name.set(context).unwrap();
    }
    words[1].store(1, SeqCst);
    walkers.into_iter().for_each(|thread| thread.join().unwrap());
    for walker in 0..WALKERS {
        let visits: u64 = all.visits[walker].iter().map(|visits| visits.load(SeqCst)).sum();
        assert_eq!(visits, all.step[walker].load(SeqCst) + 1);
        assert!(all.visits[walker].iter().all(|visits| visits.load(SeqCst) > STEPS / 100));
    }
}

pub(crate) fn a_death_is_told_to_each_thread_inside() {
    let words = shared_words();
    let target: &'static OnceLock<Context> = Box::leak(Box::new(OnceLock::new()));
    let there = move || {
        if is_root() {
            let told = target.get().unwrap().switch(0, &[]).unwrap_err();
            assert!(matches!(told, Error::Died { end: End::Killed { signal: 9 }, .. }), "{told}");
            assert!(matches!(target.get().unwrap().switch(0, &[]), Err(Error::Gone { .. })));
        } else {
            words[2].store(own_pid(), SeqCst);
            words[3].fetch_add(1, SeqCst);
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
    };
    let threads: Vec<_> = (0..3).map(|_| waiting(&words[1], there)).collect();
    target.set(noting(&Spec::new())).unwrap();
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    words[1].store(1, SeqCst);
    await_word(&words[3], 3);
    reap(kill_after(words[2].load(SeqCst), 0));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(other.switch(9, &[]).unwrap().word, 9);
}

pub(crate) fn a_good_state_outlives_all_who_mourn() {
    let words = shared_words();
    let target: &'static OnceLock<Context> = Box::leak(Box::new(OnceLock::new()));
    let there = move || {
        if is_root() {
            let told = target.get().unwrap().switch(0, &[]).unwrap_err();
            assert!(matches!(told, Error::Died { end: End::Killed { signal: 9 }, .. }), "{told}");
            // The thread that had the state kept is the only one in it.
            let told = target.get().unwrap().switch(0, &[]).unwrap_err();
            assert!(matches!(told, Error::NoThread { .. }), "{told}");
        } else {
            words[2].store(own_pid(), SeqCst);
            words[3].fetch_add(1, SeqCst);
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
    };
    let threads: Vec<_> = (0..3).map(|_| waiting(&words[1], there)).collect();
    let context = noting(&Spec::new());
    context.checkpoint().unwrap();
    target.set(context).unwrap();
    words[1].store(1, SeqCst);
    await_word(&words[3], 3);
    reap(kill_after(words[2].load(SeqCst), 0));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(context.switch(9, &[]).unwrap().word, 9);
    assert_eq!(context.switch(8, &[]).unwrap().word, 8);
}

pub(crate) fn a_thread_that_ends_inside_is_told_of() {
    let words = shared_words();
    let target: &'static OnceLock<Context> = Box::leak(Box::new(OnceLock::new()));
    let thread = waiting(&words[1], move || {
        if is_root() {
            let context = *target.get().unwrap();
            let descriptor = context.descriptor();
            let told = context.switch(0, &[]).unwrap_err();
            assert_eq!(told, Error::ThreadEnded { descriptor });
            assert_eq!(context.switch(0, &[]).unwrap_err(), Error::NoThread { descriptor });
        }
    });
    target.set(noting(&Spec::new())).unwrap();
    words[1].store(1, SeqCst);
    thread.join().unwrap();
    // The context itself goes on.
    assert_eq!(target.get().unwrap().switch(9, &[]).unwrap().word, 9);
}

fn threads_of(pid: u64) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

pub(crate) fn counterparts_end_with_their_thread() {
    let words = shared_words();
    let thread = waiting(&words[1], || ());
    let context = create(&Spec::new(), |start| {
        let mut arrival = start.arrival;
        loop {
            arrival = arrival.caller.switch(own_pid(), &[]).unwrap();
        }
    })
    .unwrap();
    let pid = context.switch(0, &[]).unwrap().word;
    let before = threads_of(pid);
    words[1].store(1, SeqCst);
    thread.join().unwrap();
    let start = Instant::now();
    while threads_of(pid) != before - 1 {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(5));
    }
    // Numbers come back: more threads come and go than there can be at a time.
    for _ in 0..400 {
        spawn(|| assert!(create(&Spec::new(), server(|word| word)).unwrap().close().is_ok())).join().unwrap();
    }
    assert_eq!(context.switch(0, &[]).unwrap().word, pid);
}

pub(crate) fn limits_are_a_threads_own() {
    let words = shared_words();
    let names: &'static [OnceLock<Context>; 2] = Box::leak(Box::new([OnceLock::new(), OnceLock::new()]));
    let thread = waiting(&words[1], move || {
        if is_root() {
            let limit = Duration::from_millis(50);
            assert!(matches!(names[0].get().unwrap().switch_within(0, &[], limit), Err(Error::TimedOut)));
        } else {
            loop {
                std::thread::yield_now();
            }
        }
    });
    names[0].set(noting(&Spec::new())).unwrap();
    names[1].set(create(&Spec::new(), server(|word| word)).unwrap()).unwrap();
    words[1].store(1, SeqCst);
    let other = names[1].get().unwrap();
    for word in 0..200 {
        assert_eq!(other.switch_within(word, &[], Duration::from_secs(30)).unwrap().word, word);
    }
    thread.join().unwrap();
    assert!(matches!(names[0].get().unwrap().switch(0, &[]), Err(Error::Gone { .. } | Error::Died { .. })));
    assert_eq!(other.switch(1, &[]).unwrap().word, 1);
}

/// Makes a call that is trapped in a context.
fn uname() -> i64 {
    crate::support::uname().map_or_else(|errno| -i64::from(errno), |name| i64::from(name.sysname[0]))
}

pub(crate) fn threads_are_trapped_one_by_one() {
    const ROUNDS: i64 = 50;
    let words = shared_words();
    let target: &'static OnceLock<Context> = Box::leak(Box::new(OnceLock::new()));
    let there = move || {
        if is_root() {
            let context = *target.get().unwrap();
            let own = i64::from(rustix::thread::gettid().as_raw_pid() % 1000) + 100;
            let mut arrival = context.switch(0, &[]).unwrap();
            for _ in 0..ROUNDS {
                assert_eq!(arrival.call.unwrap().number, call_number(libc::SYS_uname));
                arrival = context.switch((-own).cast_unsigned(), &[]).unwrap();
            }
            assert_eq!((arrival.call, arrival.word.cast_signed()), (None, own * ROUNDS));
        } else {
            let sum: i64 = (0..ROUNDS).map(|_| -uname()).sum();
            let _ = CREATOR.get().unwrap().switch(sum.cast_unsigned(), &[]);
        }
    };
    let threads: Vec<_> = (0..3).map(|_| waiting(&words[1], there)).collect();
    target.set(noting(&Spec::new().trap(true).withhold(&only(libc::SYS_uname)))).unwrap();
    // All calls but the essential ones: threads are under the filter, too.
    let strict = create(&Spec::new().trap(true).withhold(&Calls::all()), server(|word| word)).unwrap();
    words[1].store(1, SeqCst);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(target.get().unwrap().switch(9, &[]).unwrap().word, 9);
    strict.close().unwrap();
}

pub(crate) fn a_thread_without_counterpart_is_not_answered() {
    let spec = Spec::new().trap(true).withhold(&only(libc::SYS_uname));
    let context = create(&spec, |start| {
        let mut arrival = start.arrival;
        loop {
            let answer = spawn(uname).join().unwrap();
            arrival = arrival.caller.switch(answer.cast_unsigned(), &[]).unwrap();
        }
    })
    .unwrap();
    let arrival = context.switch(0, &[]).unwrap();
    assert_eq!((arrival.call, arrival.word.cast_signed()), (None, -i64::from(libc::EPERM)));
}

pub(crate) fn a_busy_program_has_contexts() {
    static OVER: AtomicU64 = AtomicU64::new(0);
    // Threads that hold the allocator's and other locks as often as not.
    let busy: Vec<_> = (0..3_usize)
        .map(|index| {
            spawn(move || {
                let mut kept = Vec::new();
                while OVER.load(SeqCst) == 0 {
                    kept.push(vec![1_u8; 1000 + 3000 * index]);
                    if kept.len() > 50 {
                        kept.clear();
                        let _ = std::fs::read_to_string("/proc/self/stat");
                    }
                }
            })
        })
        .collect();
    for round in 0..30 {
        let spec = Spec::new().alone(round % 2 == 0);
        let context = create(&spec, server(|word| vec![word; 10_000].iter().sum::<u64>() / 10_000)).unwrap();
        assert_eq!(context.switch(round, &[]).unwrap().word, round);
        context.close().unwrap();
    }
    OVER.store(1, SeqCst);
    busy.into_iter().for_each(|thread| thread.join().unwrap());
}

pub(crate) fn deaths_among_threads_at_any_moment() {
    for round in 0..12 {
        let words = shared_words();
        let target: &'static OnceLock<Context> = Box::leak(Box::new(OnceLock::new()));
        let name: &'static OnceLock<Context> = Box::leak(Box::new(OnceLock::new()));
        let there = move || {
            if is_root() {
                let context = *target.get().unwrap();
                let mut switched = 0;
                let told = loop {
                    match context.switch(switched, &[]) {
                        Ok(_) => switched += 1,
                        Err(error) => break error,
                    }
                };
                assert!(matches!(told, Error::Died { .. } | Error::Gone { .. }), "{told}");
            } else {
                loop {
                    let _ = name.get().unwrap().switch(1, &[]);
                }
            }
        };
        let threads: Vec<_> = (0..2).map(|_| waiting(&words[1], there)).collect();
        let context = create(&Spec::new(), |start| {
            name.set(start.creator).unwrap();
            let mut arrival = start.arrival;
            loop {
                arrival = arrival.caller.switch(own_pid(), &[]).unwrap();
            }
        })
        .unwrap();
        let pid = context.switch(0, &[]).unwrap().word;
        target.set(context).unwrap();
        words[1].store(1, SeqCst);
        let killer = kill_after(pid, 300 * round);
        let told = loop {
            match context.switch(0, &[]) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert!(matches!(told, Error::Died { .. } | Error::Gone { .. }), "{told}");
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        reap(killer);
        await_end_of(pid);
        context.close().unwrap();
    }
}
