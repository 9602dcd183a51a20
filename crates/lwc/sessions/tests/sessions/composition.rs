//! Rollback inside contexts, and contexts beside the rollback of their root.

use std::cell::Cell;
use std::ops::ControlFlow;

use orrery_context::{Spec, create};
use orrery_rollback::{Outcome, Rollback};

/// Becomes an ordinary user.
pub(crate) fn drop_privileges() {
    // SAFETY: takes numbers, and no group of a list of none.
    unsafe {
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setresgid(65_534, 65_534, 65_534), 0);
        assert_eq!(libc::setresuid(65_534, 65_534, 65_534), 0);
        // What changing the user took away.
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1), 0);
    }
}

pub(crate) fn is_superuser() -> bool {
    // SAFETY: the call takes nothing.
    unsafe { libc::geteuid() == 0 }
}

pub(crate) fn rollback_works_in_a_context() {
    rolls_back_in_a_context();
}

pub(crate) fn rollback_works_in_a_context_of_an_ordinary_user() {
    if is_superuser() {
        drop_privileges();
    }
    rolls_back_in_a_context();
}

/// A context that adds its arguments up in a closure that is rolled back returns each alone, however often control
/// went back and forth meanwhile.
fn rolls_back_in_a_context() {
    let ballast = vec![7_u8; 40 << 20];
    let adder = create(&Spec::new(), move |start| {
        let root = start.creator;
        let sum = Cell::new(start.arrival.word);
        let result = Rollback::builder().build().unwrap().serve(
            |last| {
                assert!(matches!(last, None | Some(Outcome::Returned | Outcome::Exited(3))), "{last:?}");
                ControlFlow::Continue(root.switch(sum.get(), &[]).unwrap().word)
            },
            |word| {
                sum.set(sum.get() + word);
                let mut memory = ballast.clone();
                memory[0] = 1;
                std::thread::spawn(|| std::thread::sleep(std::time::Duration::from_secs(1000)));
                let file = std::fs::File::open("/dev/null").unwrap();
                std::mem::forget(file);
                for round in 0..5 {
                    sum.set(sum.get() + root.switch(sum.get() + round, &[]).unwrap().word);
                }
                if word % 2 == 0 {
                    std::process::exit(3);
                }
            },
        );
        panic!("{result:?}")
    })
    .unwrap();
    assert_eq!(adder.switch(100, &[]).unwrap().word, 100);
    for round in 1..20 {
        for step in 0..5 {
            assert_eq!(adder.switch(round, &[]).unwrap().word, 100 + round * (1 + step) + step);
        }
        assert_eq!(adder.switch(round, &[]).unwrap().word, 100);
    }
    adder.close().unwrap();
}

/// Rolled back, the root finds its contexts as they are now, and those that were made meanwhile gone.
pub(crate) fn contexts_outlive_rollbacks_of_the_root() {
    let count = create(&Spec::new(), |start| {
        let mut arrival = start.arrival;
        let mut calls = 0;
        loop {
            calls += 1;
            arrival = arrival.caller.switch(calls, &[]).unwrap();
        }
    })
    .unwrap();
    let mut rollback = Rollback::builder().build().unwrap();
    let mut expected = 0;
    for round in 0..5 {
        let made = Cell::new(0);
        let outcome = rollback
            .run(|| {
                for call in 1..=3 {
                    assert_eq!(count.switch(0, &[]).unwrap().word, expected + call);
                }
                let other = create(&Spec::new(), |start| {
                    let mut arrival = start.arrival;
                    loop {
                        arrival = arrival.caller.switch(arrival.word + 1, &[]).unwrap();
                    }
                })
                .unwrap();
                made.set(other.descriptor());
                assert_eq!(other.switch(41, &[]).unwrap().word, 42);
                if round == 3 {
                    count.close().unwrap();
                }
            })
            .unwrap();
        assert_eq!(outcome, Outcome::Returned);
        assert_eq!(made.get(), 0, "memory is put back");
        expected += 3;
        expected += 1;
        assert_eq!(count.switch(0, &[]).unwrap().word, expected);
    }
    let mut status = 0;
    // SAFETY: the kernel writes at most one `int` to `status`, which outlives the call.
    assert_eq!(unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) }, -1, "no plain child is left");
}
