//! Signals that no context caused.

use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use orrery_lwc::context::{Spec, create};

use crate::support::{PAGE, mapped, server};

static CAUGHT: AtomicI32 = AtomicI32::new(0);

extern "C" fn count(_signal: i32) {
    CAUGHT.fetch_add(1, Ordering::SeqCst);
}

pub(crate) fn signals_go_to_the_root() {
    unsafe { libc::setpgid(0, 0) };
    unsafe { libc::signal(libc::SIGUSR1, count as extern "C" fn(i32) as usize) };
    let deaf = create(&Spec::new(), server(|_| CAUGHT.load(Ordering::SeqCst).unsigned_abs().into())).unwrap();
    let open = create(
        &Spec::new().shared_signals(true),
        server(|_| CAUGHT.load(Ordering::SeqCst).unsigned_abs().into()),
    )
    .unwrap();
    unsafe { libc::kill(0, libc::SIGUSR1) };
    // To a group a signal comes in no particular order.
    while CAUGHT.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    while open.switch(0, &[]).unwrap().word == 0 {}
    assert_eq!(deaf.switch(0, &[]).unwrap().word, 0);
}

pub(crate) fn what_a_deaf_context_creates_is_deaf() {
    unsafe { libc::setpgid(0, 0) };
    unsafe { libc::signal(libc::SIGUSR1, count as extern "C" fn(i32) as usize) };
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
        unsafe { libc::kill(0, libc::SIGUSR1) };
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
    unsafe { libc::mprotect(page, PAGE, libc::PROT_READ | libc::PROT_WRITE) };
}

pub(crate) fn a_fault_is_handled_where_it_is_made() {
    let page = mapped(1);
    GUARDED.store(page.expose_provenance(), Ordering::SeqCst);
    unsafe { libc::signal(libc::SIGSEGV, unguard as extern "C" fn(i32) as usize) };
    unsafe { libc::mprotect(page.cast(), PAGE, libc::PROT_NONE) };
    let address = page.expose_provenance();
    let write_there =
        move || unsafe { std::ptr::with_exposed_provenance_mut::<u8>(address).write_volatile(1) };
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
