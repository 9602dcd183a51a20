//! Signals that no context caused.

use std::sync::atomic::{AtomicI32, Ordering};

use orrery_lwc::context::{Spec, create};

use crate::support::server;

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
