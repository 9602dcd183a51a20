//! How long contexts live, and whom their ends concern.

use std::sync::atomic::Ordering;
use std::time::Duration;

use orrery_context::{Context, Created, Error, Spec, create, create_here};
use rustix::io::Errno;
use rustix::process::{Signal, WaitOptions};

use crate::support::{
    await_end_of, die, end, in_child, is_running, kill, named, own_pid, plain_fork, reap, server,
    shared_words,
};

pub(crate) fn a_closed_context_ends() {
    let other = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = other.switch(0, &[]).unwrap().word;
    assert!(is_running(pid) && pid != own_pid());
    other.close().unwrap();
    await_end_of(pid);
    let unborn = create(&Spec::new(), server(|word| word)).unwrap();
    unborn.close().unwrap();
}

pub(crate) fn a_plain_close_ends_it() {
    let other = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = other.switch(0, &[]).unwrap().word;
    // SAFETY: the name is this test's own, which takes it for closed from here on.
    assert_eq!(unsafe { libc::close(other.descriptor()) }, 0);
    await_end_of(pid);
    assert!(matches!(other.switch(0, &[]), Err(Error::Gone { .. } | Error::NoContext { .. })));
    assert!(matches!(named(other.descriptor()), Err(Error::NoContext { .. })));
}

pub(crate) fn it_lives_while_anybody_holds_it() {
    let held = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = held.switch(0, &[]).unwrap().word;
    let holder = create(
        &Spec::new(),
        server(move |word| match word {
            0 => held.switch(0, &[]).unwrap().word,
            _ => u64::from(held.close().is_ok()),
        }),
    )
    .unwrap();
    held.close().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(holder.switch(0, &[]).unwrap().word, pid, "the other holder's descriptor keeps it");
    assert_eq!(holder.switch(1, &[]).unwrap().word, 1);
    await_end_of(pid);
}

/// A context that is as the calling one is now; returns again in it when somebody switches there (the paper's
/// Algorithm 1).
fn snapshot() -> Context {
    loop {
        match create_here(&Spec::new()).unwrap() {
            Created::Creator(snap) => return snap,
            Created::Context(start) => start.arrival.caller.close().unwrap(),
        }
    }
}

/// Returns how many processes there are that `pid` is the parent of.
fn children_of(pid: u64) -> usize {
    let path = format!("/proc/{pid}/task/{pid}/children");
    std::fs::read_to_string(path).unwrap().split_whitespace().count()
}

/// Algorithm 1 over many requests: a state that was closed ends, the root's part in it, too, which nobody can return
/// to.
pub(crate) fn snapshots_in_a_row_do_not_add_up() {
    let requests = std::env::var("ORRERY_REQUESTS").map_or(2000, |number| number.parse().unwrap());
    let words = shared_words();
    let status = in_child(|| {
        let root = own_pid();
        let snap = snapshot();
        let served = words[0].fetch_add(1, Ordering::SeqCst) + 1;
        if served.is_multiple_of(100) {
            // The root reaps the dead when it looks around, which may take it a while on a busy machine.
            let start = std::time::Instant::now();
            while children_of(root) > 5 && start.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(5));
            }
            let count = u64::try_from(children_of(root)).unwrap();
            words[1].fetch_max(count, Ordering::SeqCst);
            if count > 64 {
                std::process::exit(1);
            }
        }
        if served == requests {
            std::process::exit(17);
        }
        let _ = snap.switch(0, &[]);
        unreachable!();
    });
    assert_eq!(libc::WEXITSTATUS(status), 17);
    assert_eq!(words[0].load(Ordering::SeqCst), requests);
    assert!(words[1].load(Ordering::SeqCst) <= 64, "{words:?}");
}

/// Who lives by the root's names alone, which nobody can use any more, ends; the root itself goes on by its number.
pub(crate) fn an_unnamed_root_holds_nobody() {
    for pause in [Duration::ZERO, Duration::from_millis(100)] {
        leave_root_unnamed(pause);
    }
}

/// One round of [`an_unnamed_root_holds_nobody`]; the first context pauses after it has closed the only name of the
/// root.
fn leave_root_unnamed(pause: Duration) {
    let held = create(&Spec::new(), move |start| {
        start.arrival.caller.close().unwrap();
        // The root, which is parked, looks in this time, or only later.
        std::thread::sleep(pause);
        let root = orrery_context::root().unwrap();
        loop {
            root.switch(own_pid(), &[]).unwrap();
        }
    })
    .unwrap();
    let first = held.switch(0, &[]).unwrap();
    let pid = first.word;
    if !pause.is_zero() {
        assert!(matches!(held.switch(0, &[]), Err(Error::NoContext { .. })));
    }
    let other = create(&Spec::new(), move |start| {
        let caller = start.arrival.caller;
        assert!(is_running(pid));
        // Copies of names are names, and it has introduced itself by a second one. The first is gone where the root has
        // looked before that.
        assert!(matches!(held.close(), Ok(()) | Err(Error::NoContext { .. })));
        first.caller.close().unwrap();
        caller.close().unwrap();
        await_end_of(pid);
        let root = orrery_context::root().unwrap();
        loop {
            root.switch(7, &[]).unwrap();
        }
    })
    .unwrap();
    let arrival = other.switch(0, &[]).unwrap();
    assert_eq!(arrival.word, 7);
    assert!(matches!(held.switch(0, &[]), Err(Error::NoContext { .. } | Error::Gone { .. })));
    assert!(matches!(other.switch(0, &[]), Err(Error::NoContext { .. })));
    // Whoever came has introduced itself.
    assert_eq!(arrival.caller.switch(0, &[]).unwrap().word, 7);
    arrival.caller.close().unwrap();
}

/// A root that anybody still names keeps what it holds.
pub(crate) fn a_named_root_keeps_its_names() {
    let held = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = held.switch(0, &[]).unwrap().word;
    let other = create(&Spec::new(), move |start| {
        let caller = start.arrival.caller;
        held.close().unwrap();
        std::thread::sleep(Duration::from_millis(1200));
        loop {
            caller.switch(0, &[]).unwrap();
        }
    })
    .unwrap();
    other.switch(0, &[]).unwrap();
    assert_eq!(held.switch(0, &[]).unwrap().word, pid);
}

/// The paper's Algorithm 1: the first state is closed by the second, that one by the third, and so on.
pub(crate) fn the_root_may_be_closed() {
    let words = shared_words();
    let status = in_child(|| {
        let mut state = 0;
        let snap = snapshot();
        state += 1;
        let round = words[0].fetch_add(1, Ordering::SeqCst);
        words[1].fetch_add(state, Ordering::SeqCst);
        if round == 20 {
            std::process::exit(17);
        }
        let _ = snap.switch(0, &[]);
        unreachable!();
    });
    assert_eq!(libc::WEXITSTATUS(status), 17);
    assert_eq!((words[0].load(Ordering::SeqCst), words[1].load(Ordering::SeqCst)), (21, 21));
}

pub(crate) fn exit_ends_the_program() {
    for status in [0, 7] {
        let got = in_child(|| {
            let other = create(&Spec::new(), move |_| std::process::exit(status)).unwrap();
            let _ = other.switch(0, &[]);
            end(98);
        });
        assert!(libc::WIFEXITED(got) && libc::WEXITSTATUS(got) == status, "{got:#x}");
    }
}

pub(crate) fn exit_of_a_nested_context_ends_the_program() {
    let words = shared_words();
    let got = in_child(|| {
        let other = create(&Spec::new(), |_| {
            words[0].store(own_pid(), Ordering::SeqCst);
            let inner = create(&Spec::new(), |_| std::process::exit(5)).unwrap();
            let _ = inner.switch(0, &[]);
            end(97);
        })
        .unwrap();
        let _ = other.switch(0, &[]);
        end(98);
    });
    assert_eq!(libc::WEXITSTATUS(got), 5);
    await_end_of(words[0].load(Ordering::SeqCst));
}

pub(crate) fn the_roots_death_ends_all() {
    let words = shared_words();
    let pid = plain_fork();
    if pid == 0 {
        let first = create(&Spec::new(), server(|_| own_pid())).unwrap();
        words[0].store(first.switch(0, &[]).unwrap().word, Ordering::SeqCst);
        let second = create(&Spec::new(), |_| {
            words[1].store(own_pid(), Ordering::SeqCst);
            words[2].store(1, Ordering::SeqCst);
            loop {
                std::hint::spin_loop();
            }
        })
        .unwrap();
        let _ = second.switch(0, &[]);
        unreachable!();
    }
    while words[2].load(Ordering::SeqCst) == 0 {
        std::thread::sleep(Duration::from_millis(2));
    }
    kill(pid, Signal::KILL);
    await_end_of(words[0].load(Ordering::SeqCst));
    await_end_of(words[1].load(Ordering::SeqCst));
    reap(pid);
}

pub(crate) fn wait_sees_no_context() {
    let other = create(
        &Spec::new(),
        server(|word| {
            if word == 1 {
                die();
            }
            word
        }),
    )
    .unwrap();
    let nothing = || rustix::process::wait(WaitOptions::empty()).is_err_and(|error| error == Errno::CHILD);
    assert!(nothing());
    other.switch(0, &[]).unwrap();
    assert!(nothing());
    other.switch(1, &[]).unwrap_err();
    assert!(nothing());
}
