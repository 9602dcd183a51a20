//! Signals that no context caused.

use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use orrery_context::{Spec, create};
use rustix::process::{Signal, kill_current_process_group, setpgid};

use crate::pages::{PAGE, Pages};
use crate::support::{own_pid, plain_fork, server, shared_words};

static CAUGHT: AtomicI32 = AtomicI32::new(0);

extern "C" fn count(_signal: i32) {
    CAUGHT.fetch_add(1, Ordering::SeqCst);
}

/// Makes the case a group of its own, and counts the signals that it gets.
fn count_signals() {
    let _ = setpgid(None, None);
    // SAFETY: the handler touches an atomic only.
    unsafe { libc::signal(libc::SIGUSR1, count as extern "C" fn(i32) as usize) };
}

pub(crate) fn signals_go_to_the_root() {
    count_signals();
    let deaf = create(&Spec::new(), server(|_| CAUGHT.load(Ordering::SeqCst).unsigned_abs().into())).unwrap();
    let open = create(
        &Spec::new().shared_signals(true),
        server(|_| CAUGHT.load(Ordering::SeqCst).unsigned_abs().into()),
    )
    .unwrap();
    kill_current_process_group(Signal::USR1).unwrap();
    // To a group a signal comes in no particular order.
    while CAUGHT.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    while open.switch(0, &[]).unwrap().word == 0 {}
    assert_eq!(deaf.switch(0, &[]).unwrap().word, 0);
}

pub(crate) fn what_a_deaf_context_creates_is_deaf() {
    count_signals();
    // It cannot get these signals itself, so it has none to share.
    let deaf = create(&Spec::new(), |start| {
        let caught = || u64::from(CAUGHT.load(Ordering::SeqCst).unsigned_abs());
        let inner = create(&Spec::new().shared_signals(true), server(move |_| caught())).unwrap();
        let mut arrival = start.arrival;
        loop {
            let there = inner.switch(0, &[]).unwrap().word;
            arrival = arrival.caller.switch(there + caught(), &[]).unwrap();
        }
    })
    .unwrap();
    assert_eq!(deaf.switch(0, &[]).unwrap().word, 0);
    for round in 1..=3 {
        kill_current_process_group(Signal::USR1).unwrap();
        while CAUGHT.load(Ordering::SeqCst) < round {
            std::thread::yield_now();
        }
        assert_eq!(deaf.switch(0, &[]).unwrap().word, 0);
    }
}

/// What is sent to the program's number, and so to the root alone, contexts that share signals get when control next
/// comes there, as often; others never.
pub(crate) fn signals_to_the_program_are_shared() {
    count_signals();
    let caught = |_| u64::from(CAUGHT.load(Ordering::SeqCst).unsigned_abs());
    let deaf = create(&Spec::new(), server(caught)).unwrap();
    let open = create(&Spec::new().shared_signals(true), server(caught)).unwrap();
    let nested = create(&Spec::new().shared_signals(true), move |start| {
        let inner = create(&Spec::new().shared_signals(true), server(caught)).unwrap();
        let mut arrival = start.arrival;
        loop {
            let there = inner.switch(0, &[]).unwrap().word;
            arrival = arrival.caller.switch(there, &[]).unwrap();
        }
    })
    .unwrap();
    for other in [deaf, open, nested] {
        assert_eq!(other.switch(0, &[]).unwrap().word, 0);
    }
    for round in 1..=5 {
        rustix::process::kill_process(rustix::process::getpid(), Signal::USR1).unwrap();
        while CAUGHT.load(Ordering::SeqCst) < round {
            std::thread::yield_now();
        }
        let round = u64::from(round.unsigned_abs());
        assert_eq!(open.switch(0, &[]).unwrap().word, round);
        assert_eq!(open.switch(0, &[]).unwrap().word, round, "once each");
        assert_eq!(nested.switch(0, &[]).unwrap().word, round);
        assert_eq!(deaf.switch(0, &[]).unwrap().word, 0);
    }
    // What goes to the group they have had already.
    for round in 6..=10 {
        kill_current_process_group(Signal::USR1).unwrap();
        while CAUGHT.load(Ordering::SeqCst) < round {
            std::thread::yield_now();
        }
        let round = u64::from(round.unsigned_abs());
        while open.switch(0, &[]).unwrap().word < round {}
    }
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(open.switch(0, &[]).unwrap().word, 10);
    assert_eq!(deaf.switch(0, &[]).unwrap().word, 0);
}

/// Waits until a count goes on, or does not for a third of a second.
fn await_count(count: &AtomicU64, goes_on: bool, what: &str) {
    let start = Instant::now();
    loop {
        let before = count.load(Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(if goes_on { 10 } else { 333 }));
        if (count.load(Ordering::SeqCst) != before) == goes_on {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{what}: it should go on: {goes_on}");
    }
}

/// A program that is stopped, by its terminal or by its number, stops in whichever context, and continues there.
pub(crate) fn a_stopped_program_stops_in_whichever_context() {
    let specs = [Spec::new(), Spec::new().shared_signals(true), Spec::new().isolate(false)];
    for (depth, spec) in [(1, &specs[0]), (1, &specs[1]), (1, &specs[2]), (2, &specs[0])] {
        let words = shared_words();
        let program = plain_fork();
        if program == 0 {
            setpgid(None, None).unwrap();
            enter(spec, depth, &words[0]);
            unreachable!();
        }
        let send = |whom: i32, signal: i32| {
            // SAFETY: our child, which is not reaped, or the group that it leads.
            assert_eq!(unsafe { libc::kill(whom, signal) }, 0);
        };
        let is_told = || {
            let mut status = 0;
            // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
            assert_eq!(unsafe { libc::waitpid(program, &raw mut status, libc::WUNTRACED) }, program);
            assert!(libc::WIFSTOPPED(status), "{status:x}");
        };
        await_count(&words[0], true, "the program");
        let (group, alone) = (-program, program);
        for (whom, signal, to_continue) in [
            (group, libc::SIGTSTP, group),
            (alone, libc::SIGSTOP, alone),
            (group, libc::SIGTSTP, alone),
            (group, libc::SIGTTOU, group),
            (alone, libc::SIGSTOP, group),
            (alone, libc::SIGTSTP, alone),
            (group, libc::SIGSTOP, group),
        ]
        .into_iter()
        .take(if std::ptr::eq(spec, &specs[0]) && depth == 1 { 7 } else { 3 })
        {
            let what =
                format!("{depth} deep, signal {signal} to {}", if whom < 0 { "the group" } else { "it" });
            send(whom, signal);
            is_told();
            await_count(&words[0], false, &what);
            send(to_continue, libc::SIGCONT);
            await_count(&words[0], true, &what);
        }
        send(program, libc::SIGKILL);
        // SAFETY: the null pointer asks for no status.
        assert_eq!(unsafe { libc::waitpid(program, std::ptr::null_mut(), 0) }, program);
    }
}

/// Counts for ever, in a context that deep.
fn enter(spec: &Spec, depth: u32, count: &'static AtomicU64) {
    let spec = spec.clone();
    let inner = create(&spec.clone(), move |_| {
        if depth > 1 {
            enter(&spec, depth - 1, count);
        }
        loop {
            count.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
        }
    })
    .unwrap();
    let _ = inner.switch(0, &[]);
}

/// A program that handles what its terminal sends decides for itself, and its contexts go on with it.
pub(crate) fn a_program_that_handles_stops_goes_on() {
    let words = shared_words();
    let program = plain_fork();
    if program == 0 {
        setpgid(None, None).unwrap();
        // SAFETY: the handler touches an atomic only.
        unsafe { libc::signal(libc::SIGTSTP, count as extern "C" fn(i32) as usize) };
        words[1].store(own_pid(), Ordering::SeqCst);
        enter(&Spec::new(), 1, &words[0]);
        unreachable!();
    }
    await_count(&words[0], true, "the program");
    for _ in 0..3 {
        // SAFETY: the group of our child, which is not reaped.
        assert_eq!(unsafe { libc::kill(-program, libc::SIGTSTP) }, 0);
        std::thread::sleep(Duration::from_millis(200));
        await_count(&words[0], true, "a program that handles SIGTSTP");
    }
    // SAFETY: our child, which is not reaped.
    unsafe { libc::kill(program, libc::SIGKILL) };
    crate::support::reap(program);
}

static GUARDED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn unguard(_signal: i32) {
    CAUGHT.fetch_add(1, Ordering::SeqCst);
    let page = std::ptr::with_exposed_provenance_mut(GUARDED.load(Ordering::SeqCst));
    // SAFETY: the one page of the test, which allows less until then; mprotect(2) is a mere system call, fit for a
    // handler.
    unsafe { libc::mprotect(page, PAGE, libc::PROT_READ | libc::PROT_WRITE) };
}

pub(crate) fn a_fault_is_handled_where_it_is_made() {
    let page = Pages::new(1);
    GUARDED.store(page.address(), Ordering::SeqCst);
    // SAFETY: the handler touches atomics, and makes a system call.
    unsafe { libc::signal(libc::SIGSEGV, unguard as extern "C" fn(i32) as usize) };
    // SAFETY: our own page, to which no reference leads.
    unsafe { libc::mprotect(page.byte(0).cast(), PAGE, libc::PROT_NONE) };
    // The first write faults; the handler lets it be made once more.
    let write_there = move || page.poke(0, 1);
    let other = create(
        &Spec::new(),
        server(move |_| {
            write_there();
            CAUGHT.load(Ordering::SeqCst).unsigned_abs().into()
        }),
    )
    .unwrap();
    assert_eq!(other.switch(0, &[]).unwrap().word, 1, "its handler has run there");
    assert_eq!(CAUGHT.load(Ordering::SeqCst), 0, "and nowhere else");
    write_there();
    assert_eq!(CAUGHT.load(Ordering::SeqCst), 1);
    assert_eq!(other.switch(0, &[]).unwrap().word, 1);
}
