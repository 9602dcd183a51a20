//! Signals that no context caused.

use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use orrery_context::{Spec, create};
use rustix::process::{Signal, kill_current_process_group, setpgid};

use crate::pages::{PAGE, Pages};
use crate::support::server;

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
