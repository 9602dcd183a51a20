//! Kills of either side, at every step of every protocol: nothing hangs, leaks or comes out wrong.
//!
//! The side that is to die is traced, executes so many instructions, and is killed; the number grows from round to round,
//! so that all steps have their turn. Where tracing would change what is tested, kills come at random moments instead.

#![expect(clippy::unwrap_used, reason = "tests")]

#[expect(dead_code, reason = "helpers of the other tests")]
mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Number, address, area, crash, ends, number, number_on_its_page, read};
use orrery_orbit::{
    Area, AreaOptions, Backoff, Builder, Call, Error, Fault, Flags, Mode, Orbit, Restart, Scratch, Task,
};
use rustix::process::{Pid, Signal, WaitOptions, kill_process};

orrery_testing::cases![
    seconds = 120, trackers = orrery_testing::TRACKERS;
    kills_at_any_moment_lose_nothing,
    kills_at_any_instruction_lose_nothing,
    main_killed_at_any_moment_takes_its_orbits_along,
    main_killed_at_any_instruction_takes_its_orbits_along,
    copiers_killed_at_any_moment_lose_nothing,
];

fn restarting(builder: Builder) -> Builder {
    builder.restart(Restart::OnCrash(Backoff { limit: None, longest: Duration::ZERO, ..Backoff::default() }))
}

/// 0 returns, 1 crashes, 3 hangs after it has said that it has begun.
fn obey(task: &mut Task<'_>) -> i64 {
    match task.arguments()[0] {
        1 => crash(),
        3 => {
            task.send(Scratch::new().data(b"begun")).unwrap();
            loop {
                std::hint::spin_loop();
            }
        }
        other => i64::from(other),
    }
}

fn obeying(arguments: &[u8]) -> Call<'_> {
    Call::new().function(obey).arguments(arguments)
}

/// A task that hangs, and has begun to.
fn hanging(orbit: &Orbit) -> orrery_orbit::Future {
    let future = orbit.call_async(&obeying(&[3])).unwrap();
    assert_eq!(future.receive().unwrap().unwrap().len(), 1);
    future
}

fn kills_at_any_moment_lose_nothing() {
    let area = area();
    let numbers: Vec<_> = (0..2_000).map(|_| number(&area)).collect();
    let orbit = restarting(Orbit::builder("target")).entry(read).create().unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut sleep = 1_u64;
            while !done.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_micros((sleep >> 33) % 2_500));
                sleep = sleep.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                if let Ok(pid) = orbit.pid() {
                    let _ = kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL);
                }
            }
        });
        let (mut right, mut died) = (0, 0);
        let areas = [&area];
        let begin = Instant::now();
        let mut value = 0;
        while begin.elapsed() < Duration::from_secs(4) {
            let mut waiting = Vec::new();
            for _ in 0..5 {
                value += 1;
                let index = usize::try_from(value).unwrap() * 37 % numbers.len();
                let number = numbers[index];
                number.set(value);
                let bytes = number.address();
                let future = orbit.call_async(&Call::new().areas(&areas).arguments(&bytes)).unwrap();
                waiting.push((value, future));
            }
            for (expected, future) in waiting {
                match future.get() {
                    Ok(seen) => {
                        assert_eq!(seen, expected);
                        right += 1;
                    }
                    Err(Error::Fault { fault: Fault::Signal { signal: libc::SIGKILL, .. }, .. }) => died += 1,
                    Err(other) => panic!("{other}"),
                }
            }
        }
        done.store(true, Ordering::SeqCst);
        println!("{right} calls returned, {died} died, {} restarts", orbit.restarts().unwrap());
        assert!(right > 0 && orbit.restarts().unwrap() > 0);
    });
}

/// Lets process `pid` execute so many instructions, then kills it; gives up when `done` is set.
fn kill_after(pid: i32, instructions: u64, traced: &AtomicBool, done: &AtomicBool) {
    // SAFETY: these requests take numbers only.
    let ptrace = |request, data: usize| unsafe { libc::ptrace(request, pid, 0, data) };
    let stopped = || {
        while !done.load(Ordering::SeqCst) {
            // Stops alone: how it ends is for the library to see.
            // SAFETY: of numbers and pointers, for which zero is a value.
            let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
            let flags = libc::WSTOPPED | libc::WNOHANG | libc::__WALL;
            let child = libc::id_t::try_from(pid).unwrap();
            // SAFETY: the kernel writes one `siginfo_t` to `info`, which outlives the call.
            let asked = unsafe { libc::waitid(libc::P_PID, child, &raw mut info, flags) };
            if asked != 0 {
                return false;
            }
            // SAFETY: waitid filled it in, or left it at zero.
            if unsafe { info.si_pid() } == pid {
                return true;
            }
            std::thread::yield_now();
        }
        false
    };
    // The last round's kill may have come so late that nobody has noticed yet; then this round has none.
    if ptrace(libc::PTRACE_SEIZE, 0) != 0 {
        traced.store(true, Ordering::SeqCst);
        return;
    }
    ptrace(libc::PTRACE_INTERRUPT, 0);
    let mut left = instructions;
    while stopped() {
        traced.store(true, Ordering::SeqCst);
        if left == 0 {
            break;
        }
        left -= 1;
        ptrace(libc::PTRACE_SINGLESTEP, 0);
    }
    traced.store(true, Ordering::SeqCst);
    // SAFETY: the call takes numbers only.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

fn kills_at_any_instruction_lose_nothing() {
    let area = area();
    let pages: Vec<_> = (0..4).map(|_| number_on_its_page(&area)).collect();
    let orbit = restarting(Orbit::builder("stepped"))
        .entry(|task| {
            let value = read(task);
            task.send(Scratch::new().data(&value.to_ne_bytes())).unwrap();
            value
        })
        .create()
        .unwrap();
    let areas = [&area];
    let (mut value, mut returned, mut died) = (0, 0, 0);
    for round in 0..100 {
        let (traced, done) = (AtomicBool::new(false), AtomicBool::new(false));
        let pid = i32::try_from(orbit.pid().unwrap()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| kill_after(pid, round * 61, &traced, &done));
            while !traced.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            // The first finds an idle orbit and goes straight into the mirror, the others wait with their pages.
            let futures: Vec<_> = pages
                .iter()
                .map(|page| {
                    value += 1;
                    page.set(value);
                    let bytes = page.address();
                    (value, orbit.call_async(&Call::new().areas(&areas).arguments(&bytes)).unwrap())
                })
                .collect();
            for (expected, future) in futures {
                let updates = std::iter::from_fn(|| future.receive().unwrap()).count();
                match future.get() {
                    Ok(seen) => {
                        assert_eq!((seen, updates), (expected, 1), "round {round}");
                        returned += 1;
                    }
                    Err(Error::Fault { fault: Fault::Signal { signal: libc::SIGKILL, .. }, .. }) => {
                        assert!(updates <= 1);
                        died += 1;
                    }
                    Err(other) => panic!("round {round}: {other}"),
                }
            }
            done.store(true, Ordering::SeqCst);
        });
    }
    println!("{returned} calls returned, {died} died");
    assert!(returned > 0 && died > 0 && died <= 100);
    // With nothing under way no page copies may be left waiting.
    while orbit.call(&obeying(&[5])) != Ok(5) {}
    assert_eq!(orbit.memory().unwrap().deltas, 0);
}

fn main_killed_at_any_moment_takes_its_orbits_along() {
    for round in 0..25_u64 {
        let (read_end, write_end) = rustix::pipe::pipe().unwrap();
        // SAFETY: main has no thread that could hold a lock that the child wants.
        match unsafe { libc::fork() } {
            0 => {
                drop(read_end);
                let orbit = restarting(Orbit::builder("left")).entry(obey).create().unwrap();
                rustix::io::write(&write_end, &orbit.pid().unwrap().to_ne_bytes()).unwrap();
                if round % 2 == 0 {
                    let _running = hanging(&orbit);
                    loop {
                        std::hint::spin_loop();
                    }
                }
                loop {
                    let _ = orbit.call(&obeying(&[u8::from(round % 5 == 1)]));
                }
            }
            child => {
                drop(write_end);
                let mut pid = [0; 4];
                assert_eq!(rustix::io::read(&read_end, &mut pid), Ok(4));
                std::thread::sleep(Duration::from_micros(round * 631 % 7_000));
                let descendants = descendants_of(child);
                let child = Pid::from_raw(child).unwrap();
                kill_process(child, Signal::KILL).unwrap();
                rustix::process::waitpid(Some(child), WaitOptions::empty()).unwrap();
                assert!(ends(u32::from_ne_bytes(pid)), "round {round}");
                for pid in descendants {
                    assert!(ends(pid), "round {round}: {pid}");
                }
            }
        }
    }
}

fn descendants_of(pid: i32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// What a main that is to be killed has.
struct World {
    orbit: Orbit,
    /// Never dropped: the pages are its.
    area: &'static Area,
    pages: Vec<Number<'static>>,
    large: Area,
    words: *mut i64,
}

const WORDS: usize = 1 << 18;

impl World {
    fn new() -> Self {
        let area: &'static Area = Box::leak(Box::new(area()));
        let pages = (0..6).map(|_| number_on_its_page(area)).collect();
        let mut options = AreaOptions::default();
        options.mode = Mode::Cow;
        let large = Area::new(0, &options).unwrap();
        let words = large.allocate(std::alloc::Layout::array::<i64>(WORDS).unwrap()).unwrap().cast().as_ptr();
        let orbit = restarting(Orbit::builder("left")).entry(read).create().unwrap();
        Self { orbit, area, pages, large, words }
    }

    /// Writes `value` to every `step`th word of the large area.
    fn fill(&self, step: usize, value: i64) {
        for word in (0..WORDS).step_by(step) {
            // SAFETY: within the block, which main alone writes to; tasks have copies.
            unsafe { self.words.add(word).write(value) };
        }
    }

    /// Changes every page, and calls; the task returns what it read on the first.
    fn call(&self, value: i64, flags: Flags) -> orrery_orbit::Future {
        self.pages.iter().for_each(|page| page.set(value));
        let (areas, bytes) = ([self.area], self.pages[0].address());
        self.orbit.call_async(&Call::new().areas(&areas).arguments(&bytes).flags(flags)).unwrap()
    }
}

/// A protocol's name, and how main goes through it.
type Protocol = (&'static str, fn(&World));

const PROTOCOLS: [Protocol; 8] = [
    ("a synchronous call", |world| {
        let (areas, bytes) = ([world.area], world.pages[0].address());
        world.pages[0].set(5);
        assert_eq!(world.orbit.call(&Call::new().areas(&areas).arguments(&bytes)), Ok(5));
    }),
    ("queued calls", |world| {
        let futures: Vec<_> = (0..4).map(|value| (value, world.call(value, Flags::NONE))).collect();
        futures.into_iter().for_each(|(value, future)| assert_eq!(future.get(), Ok(value)));
    }),
    ("cancelled calls", |world| {
        let _running = world.call(1, Flags::NONE);
        let waits = world.call(2, Flags::CANCELLABLE);
        let _ = waits.cancel();
        let _ = world.call(3, Flags::CANCEL_ANY).get();
    }),
    ("updates", |world| {
        for size in [8, 1 << 20] {
            let bytes = usize::to_ne_bytes(size);
            let send = |task: &mut Task<'_>| {
                let size = task.argument::<usize>().unwrap();
                i64::from(task.send(Scratch::new().data(&vec![7; size])).is_ok())
            };
            let future = world.orbit.call_async(&Call::new().function(send).arguments(&bytes)).unwrap();
            assert_eq!(future.receive().unwrap().unwrap().len(), 1);
            assert_eq!(future.get(), Ok(1));
        }
    }),
    ("a crash and a restart", |world| {
        assert!(world.orbit.call(&obeying(&[1])).is_err());
        assert_eq!(world.orbit.call(&obeying(&[4])), Ok(4));
    }),
    ("an orbit's beginning and end", |_| {
        let orbit = restarting(Orbit::builder("another")).entry(read).create().unwrap();
        assert_eq!(orbit.call(&obeying(&[4])), Ok(4));
    }),
    ("an area's beginning and end", |world| {
        let area = area();
        let (number, areas) = (number(&area), [&area]);
        number.set(6);
        let bytes = number.address();
        assert_eq!(world.orbit.call(&Call::new().areas(&areas).arguments(&bytes)), Ok(6));
    }),
    ("a copier", |world| {
        world.fill(64, 8);
        let (areas, bytes) = ([&world.large], address(world.words));
        assert_eq!(world.orbit.call(&Call::new().areas(&areas).arguments(&bytes)), Ok(8));
    }),
];

fn main_killed_at_any_instruction_takes_its_orbits_along() {
    // Whoever loses its parent becomes our child, so that we see whether any is left.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    for round in 0..9 * PROTOCOLS.len() {
        let (name, protocol) = PROTOCOLS[round % PROTOCOLS.len()];
        let (ready, tell) = rustix::pipe::pipe().unwrap();
        let (go, start) = rustix::pipe::pipe().unwrap();
        // SAFETY: no thread of the rounds before is left that could hold a lock that the child wants.
        let main = unsafe { libc::fork() };
        if main == 0 {
            let world = World::new();
            rustix::io::write(&tell, b"!").unwrap();
            rustix::io::read(&go, &mut [0; 1]).unwrap();
            protocol(&world);
            // Whoever comes too late to die within it finds it done.
            loop {
                std::hint::spin_loop();
            }
        }
        assert_eq!(rustix::io::read(&ready, &mut [0; 1]), Ok(1), "{name}");
        let (traced, done) = (AtomicBool::new(false), AtomicBool::new(false));
        // More and more of the protocol, in steps that have nothing in common with loops.
        let instructions = u64::try_from(round / PROTOCOLS.len() * 1_009 + round * 7).unwrap();
        std::thread::scope(|scope| {
            let killer = scope.spawn(|| kill_after(main, instructions, &traced, &done));
            while !traced.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            rustix::io::write(&start, b"!").unwrap();
            // It may stop where it waits for an orbit, which is a place to die at as well.
            let begin = Instant::now();
            while !killer.is_finished() && begin.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_micros(200));
            }
            done.store(true, Ordering::SeqCst);
        });
        // SAFETY: takes numbers. It may be gone.
        unsafe { libc::kill(main, libc::SIGKILL) };
        let begin = Instant::now();
        loop {
            // SAFETY: the null pointer asks for no status.
            match unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG | libc::__WALL) } {
                0 => {
                    let left = descendants_of(i32::try_from(std::process::id()).unwrap());
                    let late = begin.elapsed() > Duration::from_secs(30);
                    assert!(!late, "{name}, {instructions} instructions: {left:?} are left");
                    std::thread::sleep(Duration::from_micros(500));
                }
                -1 => break,
                _ => {}
            }
        }
    }
}

/// Adds up the area and says so only if it is as one call left it.
fn whole(task: &mut Task<'_>) -> i64 {
    let start = task.pointer::<i64>().unwrap();
    // SAFETY: as many as there are; the task's copy of them is the task's alone.
    let words = unsafe { std::slice::from_raw_parts(start, WORDS) };
    let first = words[0];
    if words.iter().step_by(512).all(|word| *word == first) { first } else { -1 }
}

/// Ends other threads' loops, however this one ends.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn copiers_killed_at_any_moment_lose_nothing() {
    let world = World::new();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut sleep = 1_u64;
            while !done.load(Ordering::SeqCst) {
                for pid in children_of_all_threads() {
                    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                    if name.trim() == "orrery-copier" {
                        std::thread::sleep(Duration::from_micros((sleep >> 33) % 700));
                        sleep = sleep
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1_442_695_040_888_963_407);
                        let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
                    }
                }
                std::thread::yield_now();
            }
        });
        let _over = Over(&done);
        let (areas, bytes) = ([&world.large], address(world.words));
        let call = Call::new().areas(&areas).arguments(&bytes).function(whole);
        let (mut returned, mut failed, mut value) = (0, 0, 0);
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(3) {
            let futures: Vec<_> = (0..3)
                .map(|_| {
                    value += 1;
                    world.fill(512, value);
                    (value, world.orbit.call_async(&call).unwrap())
                })
                .collect();
            for (expected, future) in futures {
                match future.get() {
                    Ok(seen) => {
                        assert_eq!(seen, expected);
                        returned += 1;
                    }
                    // Those behind it lack what it should have brought.
                    Err(
                        Error::Fault { fault: Fault::Snapshot { reason }, .. }
                        | Error::NotRun { fault: Fault::Snapshot { reason }, .. },
                    ) => {
                        assert!(reason.contains("copying a call's pages"), "{reason}");
                        failed += 1;
                    }
                    Err(other) => panic!("{other}"),
                }
            }
        }
        println!("{returned} calls returned, {failed} failed");
        assert!(returned > 0 && failed > 0);
    });
    let (areas, bytes) = ([&world.large], address(world.words));
    let call = Call::new().areas(&areas).arguments(&bytes).function(whole);
    world.fill(512, 77);
    // A copier may just have been killed.
    while world.orbit.call(&call) != Ok(77) {}
}

fn children_of_all_threads() -> Vec<i32> {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let children = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("children")).ok();
    let lists: Vec<String> = threads.flatten().filter_map(children).collect();
    lists.iter().flat_map(|list| list.split_whitespace()).filter_map(|pid| pid.parse().ok()).collect()
}
