//! Contexts where the CPUs under them change, and are wanted by others.

use std::time::{Duration, Instant};

use orrery_context::{Context, Spec, create};
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::support::{kill, own_pid, plain_fork, reap, server};

/// How long each of these goes on, and a switch there and back may take at most.
const FOR: Duration = Duration::from_secs(2);
const AT_MOST: Duration = Duration::from_secs(10);

/// Processes that compute as long as this lives.
struct Hogs(Vec<i32>);

impl Hogs {
    fn new(count: usize) -> Self {
        let one = || match plain_fork() {
            0 => {
                let _ = set_parent_process_death_signal(Some(Signal::KILL));
                let mut sum = 0_u64;
                loop {
                    sum = std::hint::black_box(sum.wrapping_add(1));
                }
            }
            pid => pid,
        };
        Self((0..count).map(|_| one()).collect())
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        for pid in &self.0 {
            kill(*pid, Signal::KILL);
            reap(*pid);
        }
    }
}

/// Switches for a while; gives how often.
fn switch_on(other: Context, mut between: impl FnMut(u64)) -> u64 {
    let (start, mut rounds) = (Instant::now(), 0);
    while start.elapsed() < FOR {
        let began = Instant::now();
        assert_eq!(other.switch(rounds, &[]).unwrap().word, rounds + 1);
        assert!(began.elapsed() < AT_MOST, "a switch took {:?}", began.elapsed());
        between(rounds);
        rounds += 1;
    }
    rounds
}

fn cpus() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

fn bind(pid: i32, cpus: impl IntoIterator<Item = usize>) {
    let mut set = rustix::thread::CpuSet::new();
    cpus.into_iter().for_each(|cpu| set.set(cpu));
    // A context may be dead or elsewhere: what counts is that switches go on.
    let _ = rustix::thread::sched_setaffinity(rustix::process::Pid::from_raw(pid), &set);
}

/// Returns how often the calling process went to sleep.
fn sleeps() -> u64 {
    // SAFETY: numbers, for which zero is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `rusage` to `usage`, which outlives the call.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) }, 0);
    u64::try_from(usage.ru_nvcsw).unwrap()
}

/// Others may want the CPU at any moment, and make the two sleep: so it is enough that a row of switches needs none.
pub(crate) fn a_switch_on_one_cpu_needs_no_sleep() {
    let all = cpus();
    bind(0, [all[0]]);
    let other = create(&Spec::new(), server(|_| sleeps())).unwrap();
    let slept = || sleeps() + other.switch(0, &[]).unwrap().word;
    let (began, mut rows) = (Instant::now(), 0);
    loop {
        let before = slept();
        (0..5).for_each(|_| drop(other.switch(0, &[]).unwrap()));
        rows += 1;
        if slept() == before {
            break;
        }
        assert!(began.elapsed() < 3 * AT_MOST, "somebody slept in each of {rows} rows of switches");
    }
    bind(0, all);
}

pub(crate) fn switches_go_on_among_hogs() {
    let other = create(&Spec::new(), server(|word| word + 1)).unwrap();
    let hogs = Hogs::new(2 * cpus().len());
    assert!(switch_on(other, |_| ()) > 0);
    // ... and the hogs get on, too.
    for pid in &hogs.0 {
        let time = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let ticks: u64 =
            time.rsplit(')').next().unwrap().split_whitespace().nth(11).unwrap().parse().unwrap();
        assert!(ticks > 0, "a hog was starved");
    }
}

pub(crate) fn switches_go_on_when_they_are_moved() {
    let asks =
        create(&Spec::new(), server(|word| if word == u64::MAX { own_pid() } else { word + 1 })).unwrap();
    let there = i32::try_from(asks.switch(u64::MAX, &[]).unwrap().word).unwrap();
    let all = cpus();
    let here = i32::try_from(std::process::id()).unwrap();
    let mut seed = 7_u64;
    switch_on(asks, |round| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if round == 0 || seed >> 58 == 0 {
            let cpu = all[usize::try_from(seed >> 33).unwrap() % all.len()];
            bind(if seed & 1 << 20 == 0 { here } else { there }, [cpu]);
        }
    });
    bind(here, all);
}

pub(crate) fn switches_go_on_in_a_set_of_cpus_that_shrinks() {
    let all = cpus();
    let (other, hogs) = (create(&Spec::new(), server(|word| word + 1)).unwrap(), Hogs::new(1));
    // As a cpuset does to everybody in it: all are moved to one CPU, and let out again.
    let mut rounds = 0_usize;
    let here = i32::try_from(std::process::id()).unwrap();
    switch_on(other, |_| {
        rounds += 1;
        if rounds.is_multiple_of(500) {
            let cpu = all[rounds / 500 % all.len()];
            let set = if rounds.is_multiple_of(1000) { all.clone() } else { vec![cpu] };
            hogs.0.iter().copied().chain([here]).for_each(|pid| bind(pid, set.clone()));
        }
    });
}

/// A context that answers with its own scheduling class, as soon as that is the one it is asked for.
fn class_teller() -> Context {
    create(
        &Spec::new(),
        server(|wanted| {
            // SAFETY: the call takes a number only.
            let own = || u64::try_from(unsafe { libc::sched_getscheduler(0) }).unwrap();
            let end = Instant::now() + AT_MOST;
            while own() != wanted && Instant::now() < end {
                // Computes, and sleeps at times: a busy loop of such a class would be in everybody's way.
                (0..10_000).for_each(|number: u64| {
                    std::hint::black_box(number);
                });
                std::thread::sleep(Duration::from_micros(200));
            }
            own()
        }),
    )
    .unwrap()
}

fn set_class(class: i32, priority: i32) -> bool {
    let parameter = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel reads one `sched_param`, which outlives the call.
    unsafe { libc::sched_setscheduler(0, class, &raw const parameter) == 0 }
}

pub(crate) fn a_context_is_as_urgent_as_its_caller() {
    let (fifo, other) = (u64::try_from(libc::SCHED_FIFO).unwrap(), u64::try_from(libc::SCHED_OTHER).unwrap());
    let context = class_teller();
    assert_eq!(context.switch(other, &[]).unwrap().word, other);
    // With others on every CPU, who would run before it; of the class that all have so far.
    let hogs = Hogs::new(cpus().len());
    if !set_class(libc::SCHED_FIFO, 1) {
        return orrery_testing::skipped!("this user may not have SCHED_FIFO");
    }
    assert_eq!(context.switch(fifo, &[]).unwrap().word, fifo, "it was not lent the caller's class");
    assert!(set_class(libc::SCHED_OTHER, 0));
    assert_eq!(context.switch(other, &[]).unwrap().word, other, "the loan was not taken back");
    drop(hogs);
}

pub(crate) fn who_is_called_keeps_what_is_more_than_the_callers() {
    if !set_class(libc::SCHED_FIFO, 1) {
        return orrery_testing::skipped!("this user may not have SCHED_FIFO");
    }
    // Born with its creator's class, which is its own: nobody lent it that.
    let context = class_teller();
    assert!(set_class(libc::SCHED_OTHER, 0));
    let fifo = u64::try_from(libc::SCHED_FIFO).unwrap();
    for _ in 0..3 {
        assert_eq!(context.switch(fifo, &[]).unwrap().word, fifo);
        std::thread::sleep(Duration::from_millis(3));
    }
}
