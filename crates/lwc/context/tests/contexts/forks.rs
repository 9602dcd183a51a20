//! What becomes of contexts where the program forks.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use orrery_context::{Calls, Context, Error, Spec, create, fork};
use orrery_domain::End;
use rustix::process::{Pid, Signal, geteuid, test_kill_process};

use crate::pages::Pages;
use crate::support::{
    Burial, await_end_of, become_ordinary, end, forked, in_child, is_running, kill, kill_after, named,
    own_pid, pidfds_remember, plain_fork, reap, server, shared_words, status_of, uname, with_orphans,
};

/// Counts its calls, and says how often it was called and by whom; keeps the sum of what it was told.
fn counter() -> Context {
    create(&Spec::new(), |start| {
        let (mut calls, mut sum) = (0, 0);
        let mut arrival = start.arrival;
        loop {
            calls += 1;
            sum += arrival.word;
            let bytes = [calls, own_pid()].map(u64::to_ne_bytes).concat();
            arrival = arrival.caller.switch(sum, &bytes).unwrap();
        }
    })
    .unwrap()
}

/// The sum, the number of calls, the process.
fn ask(counter: Context, word: u64) -> (u64, u64, u64) {
    let arrival = counter.switch(word, &[]).unwrap();
    let number = |at: usize| u64::from_ne_bytes(arrival.bytes[at..at + 8].try_into().unwrap());
    (arrival.word, number(0), number(8))
}

pub(crate) fn a_forked_process_has_its_own() {
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    let status = in_child(|| {
        let own = create(&Spec::new(), server(|word| word * 3)).unwrap();
        assert_eq!(own.switch(5, &[]).unwrap().word, 15);
        assert_eq!(other.switch(5, &[]).unwrap().word, 5);
        end(4);
    });
    assert_eq!(libc::WEXITSTATUS(status), 4);
    assert_eq!(other.switch(2, &[]).unwrap().word, 2);
}

pub(crate) fn a_forked_program_has_copies() {
    let words = shared_words();
    let memory = Pages::new(1);
    let word = memory.word();
    let adder = create(
        &memory.shared(Spec::new()),
        server(|more| {
            words[1].fetch_add(1, SeqCst);
            word.fetch_add(more, SeqCst) + more
        }),
    )
    .unwrap();
    let counter = counter();
    let (_, _, before) = ask(counter, 10);
    assert_eq!(adder.switch(7, &[]).unwrap().word, 7);
    let pid = forked(|| {
        // All goes on from where it was, elsewhere.
        let (sum, calls, process) = ask(counter, 5);
        assert_eq!((sum, calls), (15, 2));
        assert_ne!(process, before);
        assert_eq!(adder.switch(100, &[]).unwrap().word, 107);
        // One memory here,
        assert_eq!(word.load(SeqCst), 107);
        word.store(200, SeqCst);
        assert_eq!(adder.switch(1, &[]).unwrap().word, 201);
        words[0].store(1, SeqCst);
        while words[0].load(SeqCst) != 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(ask(counter, 0), (15, 3, process));
        assert_eq!(named(counter.descriptor()).unwrap(), counter);
        counter.close().unwrap();
        await_end_of(process);
    });
    while words[0].load(SeqCst) != 1 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // another there, while the program's own shared memory is one.
    assert_eq!(word.load(SeqCst), 7);
    assert_eq!(adder.switch(3, &[]).unwrap().word, 10);
    assert_eq!(words[1].load(SeqCst), 4);
    assert_eq!(ask(counter, 1), (11, 2, before));
    words[0].store(2, SeqCst);
    assert_eq!(status_of(pid), 0);
    assert_eq!(ask(counter, 1), (12, 3, before));
}

pub(crate) fn a_plain_fork_has_copies_when_it_asks() {
    let counter = counter();
    let (.., before) = ask(counter, 10);
    let status = in_child(|| {
        let (sum, calls, process) = ask(counter, 1);
        assert_eq!((sum, calls), (11, 2));
        assert_ne!(process, before);
        for round in 0..100 {
            assert_eq!(ask(counter, 1).0, 12 + round);
        }
        end(3);
    });
    assert_eq!(libc::WEXITSTATUS(status), 3);
    assert_eq!(ask(counter, 1), (11, 2, before));
}

pub(crate) fn nested_contexts_are_forked() {
    // A context with one of its own, of which the root knows nothing.
    let outer = create(&Spec::new(), |start| {
        let inner = counter();
        let mut arrival = start.arrival;
        loop {
            let (sum, calls, process) = ask(inner, arrival.word);
            let bytes = [calls, process].map(u64::to_ne_bytes).concat();
            arrival = arrival.caller.switch(sum, &bytes).unwrap();
        }
    })
    .unwrap();
    let (.., before) = ask(outer, 4);
    let pid = forked(|| {
        let (sum, calls, process) = ask(outer, 4);
        assert_eq!((sum, calls), (8, 2));
        assert_ne!(process, before);
        assert_eq!(ask(outer, 4), (12, 3, process));
    });
    assert_eq!(status_of(pid), 0);
    assert_eq!(ask(outer, 1), (5, 2, before));
}

pub(crate) fn each_program_ends_for_itself() {
    // Root may look into the dead.
    with_orphans(if geteuid().is_root() { Burial::Late } else { Burial::AtOnce }, programs_end);
}

pub(crate) fn ordinary_programs_end_for_themselves() {
    assert!(become_ordinary());
    with_orphans(Burial::AtOnce, programs_end);
}

fn programs_end() {
    let words = shared_words();
    let counter = counter();
    let (.., before) = ask(counter, 1);
    // The child's context dies: the child is told, the parent is not concerned.
    let pid = forked(|| {
        let (.., process) = ask(counter, 1);
        reap(kill_after(process, 0));
        await_end_of(process);
        let told = counter.switch(0, &[]).unwrap_err();
        assert!(matches!(told, Error::Gone { .. } | Error::Died { .. }), "{told}");
        let own = create(&Spec::new(), server(|word| word)).unwrap();
        assert_eq!(own.switch(1, &[]).unwrap().word, 1);
    });
    assert_eq!(status_of(pid), 0);
    assert_eq!(ask(counter, 1), (2, 2, before));
    // The child ends, and with it all of its contexts.
    let pid = forked(|| {
        words[0].store(ask(counter, 1).2, SeqCst);
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    });
    while words[0].load(SeqCst) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(is_running(words[0].load(SeqCst)));
    kill(pid, Signal::KILL);
    status_of(pid);
    await_end_of(words[0].load(SeqCst));
    // The parent's context dies: the child goes on.
    let pid = forked(|| {
        while words[1].load(SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(ask(counter, 1).0, 3);
    });
    reap(kill_after(before, 0));
    await_end_of(before);
    assert!(counter.switch(0, &[]).is_err());
    words[1].store(1, SeqCst);
    assert_eq!(status_of(pid), 0);
    // An exit in a copy ends its program with that status, as far as the kernel remembers it.
    let leaver = create(&Spec::new(), |start| {
        std::process::exit(i32::try_from(start.arrival.word).unwrap());
    })
    .unwrap();
    let is_known = geteuid().is_root() || pidfds_remember();
    let pid = forked(|| {
        let told = leaver.switch(17, &[]).unwrap_err();
        assert!(!is_known && matches!(told, Error::Died { end: End::Unknown, .. }), "{told}");
        orrery_testing::skipped!("the kernel does not tell how a process ended that is not a child");
        end(17);
    });
    assert_eq!(libc::WEXITSTATUS(status_of(pid)), 17);
}

pub(crate) fn filtered_contexts_stay_behind() {
    let filtered = create(&Spec::new().withhold(&Calls::global()), server(|word| word)).unwrap();
    let trapped = create(&Spec::new().trap(true), server(|word| word)).unwrap();
    let plain = create(&Spec::new(), server(|word| word)).unwrap();
    let pid = forked(|| {
        assert!(matches!(filtered.switch(1, &[]), Err(Error::Gone { .. })));
        assert!(matches!(trapped.switch(1, &[]), Err(Error::Gone { .. })));
        assert_eq!(plain.switch(2, &[]).unwrap().word, 2);
    });
    assert_eq!(status_of(pid), 0);
    assert_eq!(filtered.switch(1, &[]).unwrap().word, 1);
    assert_eq!(trapped.switch(1, &[]).unwrap().word, 1);
    let refusing = create(&Spec::new(), |start| {
        // SAFETY: refused, so that there is no child.
        let told = unsafe { fork() }.unwrap_err();
        let _ = start.arrival.caller.switch(u64::from(told == Error::NotTheRoot), &[]);
        unreachable!()
    })
    .unwrap();
    assert_eq!(refusing.switch(0, &[]).unwrap().word, 1);
}

/// Checks copies that were made eagerly and lazily.
fn has_copies(context: Context, unchanged: impl Fn(u64)) {
    let before = context.switch(1, &[]).unwrap().word;
    let pid = forked(|| unchanged(context.switch(1, &[]).unwrap().word));
    assert_eq!(status_of(pid), 0);
    let status = in_child(|| {
        unchanged(context.switch(1, &[]).unwrap().word);
        // A copy of a copy.
        let pid = forked(|| unchanged(context.switch(1, &[]).unwrap().word));
        assert_eq!(status_of(pid), 0);
        end(0);
    });
    assert_eq!(status, 0);
    assert_eq!(context.switch(1, &[]).unwrap().word, before);
}

pub(crate) fn isolated_contexts_are_forked() {
    let root = plain_fork();
    if root == 0 {
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    // What it can do to processes that are not its own, in its original and its copies; and those to their original.
    let original = Cell::new(0);
    let isolated = create(
        &Spec::new().isolate(true),
        server(move |word| {
            let own = std::process::id().cast_signed();
            if original.get() == 0 {
                original.set(own);
            }
            let limits = |pid| {
                let mut limit = MaybeUninit::uninit();
                // SAFETY: reads nothing, and writes a limit, for which there is room.
                unsafe { libc::prlimit(pid, libc::RLIMIT_CORE, std::ptr::null(), limit.as_mut_ptr()) == 0 }
            };
            assert!(limits(0), "its own are its own");
            let signals = test_kill_process(Pid::from_raw(root).unwrap()).is_ok();
            let limits = limits(if own == original.get() { root } else { original.get() });
            word + 2 * u64::from(signals) + 4 * u64::from(limits)
        }),
    );
    match isolated {
        Ok(isolated) => has_copies(isolated, |answer| assert_eq!(answer, 1, "it is isolated")),
        Err(Error::Birth { step, errno }) if step.contains("isolated") => {
            orrery_testing::skipped!("no isolation here ({errno})");
        }
        Err(odd) => panic!("{odd}"),
    }
    kill(root, Signal::KILL);
    status_of(root);
}

pub(crate) fn contexts_with_fewer_calls_are_forked() {
    let withheld = Spec::new().withhold(&crate::support::only(libc::SYS_uname));
    let fewer = create(&withheld, server(|word| word + 2 * u64::from(uname().is_ok()))).unwrap();
    has_copies(fewer, |answer| assert_eq!(answer, 1, "the call is withheld from it"));
}

/// Why contexts that are trapped have no copies: those inherit the filter, whose traps go to the old program, and the
/// kernel takes no second listener.
pub(crate) fn a_trapped_process_has_one_listener_for_good() {
    let status = in_child(|| {
        rustix::thread::set_no_new_privs(true).unwrap();
        let allow = libc::sock_filter { code: 6, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW };
        let program = libc::sock_fprog { len: 1, filter: (&raw const allow).cast_mut() };
        let listen = || {
            let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
            let mode = libc::SECCOMP_SET_MODE_FILTER;
            // SAFETY: reads a program of one instruction, which lets all calls pass.
            unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) }
        };
        assert!(listen() >= 0);
        let copy = in_child(|| {
            let refused = listen() == -1 && crate::support::errno() == libc::EBUSY;
            end(i32::from(!refused));
        });
        assert_eq!(copy, 0);
        end(0);
    });
    assert_eq!(status, 0);
}

pub(crate) fn workers_have_contexts_of_their_own() {
    let counter = counter();
    let workers: Vec<i32> = (1..=6)
        .map(|worker| match plain_fork() {
            0 => {
                let mut expected = 0;
                for round in 0..200 {
                    expected += round * worker;
                    assert_eq!(ask(counter, round * worker).0, expected);
                }
                end(0)
            }
            pid => pid,
        })
        .collect();
    workers.into_iter().for_each(|pid| assert_eq!(status_of(pid), 0));
    assert_eq!(ask(counter, 9).0, 9);
}

pub(crate) fn forks_of_forks_have_copies() {
    let counter = counter();
    assert_eq!(ask(counter, 1).0, 1);
    let pid = forked(|| {
        assert_eq!(ask(counter, 1).0, 2);
        let pid = forked(|| assert_eq!(ask(counter, 1).0, 3));
        assert_eq!(status_of(pid), 0);
        let status = in_child(|| {
            assert_eq!(ask(counter, 2).0, 4);
            end(0);
        });
        assert_eq!(status, 0);
        assert_eq!(ask(counter, 1).0, 3);
    });
    assert_eq!(status_of(pid), 0);
    assert_eq!(ask(counter, 1).0, 2);
}

pub(crate) fn a_thread_forks_what_it_has() {
    let counter = counter();
    assert_eq!(ask(counter, 1).0, 1);
    let descriptor = counter.descriptor();
    std::thread::spawn(move || {
        let own = create(&Spec::new(), server(|word| word + 1)).unwrap();
        assert_eq!(own.switch(1, &[]).unwrap().word, 2);
        let pid = forked(|| {
            assert_eq!(own.switch(2, &[]).unwrap().word, 3);
            let told = counter.switch(1, &[]).unwrap_err();
            assert_eq!(told, Error::Gone { descriptor });
        });
        assert_eq!(status_of(pid), 0);
        assert_eq!(own.switch(3, &[]).unwrap().word, 4);
    })
    .join()
    .unwrap();
    assert_eq!(ask(counter, 1).0, 2);
}
