//! Contexts that die, stop, or become something else, and what the others are told.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use orrery_context::{Calls, Context, Error, FromCaller, Overlay, Spec, create};
use orrery_domain::End;
use rustix::process::Signal;

use crate::pages::Pages;
use crate::support::{
    await_end_of, become_ordinary, die, in_child, kill, kill_after, own_pid, plain_fork, reap, server,
    shared_words,
};

pub(crate) fn a_killed_context_is_an_error() {
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
    assert_eq!(other.switch(0, &[]).unwrap().word, 0);
    let died = other.switch(1, &[]).unwrap_err();
    let descriptor = other.descriptor();
    assert_eq!(died, Error::Died { descriptor, end: End::Killed { signal: libc::SIGKILL } });
    assert_eq!(other.switch(0, &[]).unwrap_err(), Error::Gone { descriptor });
    other.close().unwrap();
    // Killed while parked.
    let parked = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = parked.switch(0, &[]).unwrap().word;
    kill(i32::try_from(pid).unwrap(), Signal::KILL);
    await_end_of(pid);
    assert!(matches!(parked.switch(0, &[]), Err(Error::Gone { .. } | Error::Died { .. })));
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    assert_eq!(other.switch(3, &[]).unwrap().word, 3, "the program goes on");
}

pub(crate) fn a_fault_is_an_error() {
    let other = create(
        &Spec::new(),
        server(|_| {
            // SAFETY: nothing of this program is at that address. The write faults, as it is meant to; that ends this
            // context, where nothing runs afterwards.
            unsafe { std::ptr::with_exposed_provenance_mut::<u64>(8).write_volatile(1) };
            0
        }),
    )
    .unwrap();
    let died = other.switch(0, &[]).unwrap_err();
    assert!(died.to_string().contains("SIGSEGV"), "{died}");
}

pub(crate) fn contexts_die_at_any_moment() {
    for round in 0..150 {
        let other =
            create(&Spec::new(), server(|word| if word == 0 { own_pid() } else { word + 1 })).unwrap();
        let killer = kill_after(other.switch(0, &[]).unwrap().word, round * 37 % 2_000);
        let error = (1..).find_map(|word| match other.switch(word, &[]) {
            Ok(back) => {
                assert_eq!(back.word, word + 1);
                None
            }
            Err(error) => Some(error),
        });
        assert!(matches!(error, Some(Error::Died { .. } | Error::Gone { .. })), "{error:?}");
        other.close().unwrap();
        reap(killer);
    }
}

pub(crate) fn nested_contexts_die_at_any_moment() {
    for round in 0..12 {
        let words = shared_words();
        let middle = create(&Spec::new(), move |start| {
            let last =
                create(&Spec::new(), server(|word| if word == 0 { own_pid() } else { word + 1 })).unwrap();
            words[0].store(own_pid(), Ordering::SeqCst);
            words[1].store(last.switch(0, &[]).unwrap().word, Ordering::SeqCst);
            let mut arrival = start.arrival;
            loop {
                let word = last.switch(arrival.word, &[]).map_or(0, |back| back.word);
                arrival = start.creator.switch(word, &[]).unwrap();
            }
        })
        .unwrap();
        assert_eq!(middle.switch(1, &[]).unwrap().word, 2);
        let victim = words[usize::from(round % 2 == 1)].load(Ordering::SeqCst);
        let killer = kill_after(victim, round * 171 % 2_000);
        let outcome = (1..).find_map(|word| match middle.switch(word, &[]) {
            Ok(back) if back.word == 0 => Some(None),
            Ok(back) => {
                assert_eq!(back.word, word + 1);
                None
            }
            Err(error) => Some(Some(error)),
        });
        match outcome.unwrap() {
            // The one behind it died, and it told.
            None => assert_eq!(round % 2, 1),
            Some(error) => {
                assert!(
                    matches!(error, Error::Died { .. } | Error::Gone { .. } | Error::Orphaned),
                    "{error}"
                );
            }
        }
        middle.close().unwrap();
        reap(killer);
        await_end_of(words[0].load(Ordering::SeqCst));
        await_end_of(words[1].load(Ordering::SeqCst));
    }
}

pub(crate) fn a_killed_caller_leaves_control_to_the_root() {
    let middle = create(&Spec::new(), |_| {
        let pid = std::process::id().cast_signed();
        let last = create(&Spec::new(), move |_| {
            kill(pid, Signal::KILL);
            await_end_of(pid.try_into().unwrap());
            die()
        })
        .unwrap();
        last.switch(0, &[]).unwrap();
        unreachable!();
    })
    .unwrap();
    assert_eq!(middle.switch(0, &[]).unwrap_err(), Error::Orphaned);
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    assert_eq!(other.switch(3, &[]).unwrap().word, 3);
}

pub(crate) fn another_program_is_an_error() {
    let other = create(&Spec::new(), |_| {
        let program = c"/bin/sleep";
        let arguments = [program.as_ptr(), c"100".as_ptr(), std::ptr::null()];
        // SAFETY: a text that ends with 0, and a list of such that ends with a null pointer.
        unsafe { libc::execv(program.as_ptr(), arguments.as_ptr()) };
        unreachable!();
    })
    .unwrap();
    assert!(matches!(other.switch(0, &[]), Err(Error::Died { .. })));
}

pub(crate) fn a_stopped_context_holds_nobody_up() {
    let memory = Pages::new(1);
    let other = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = i32::try_from(other.switch(0, &[]).unwrap().word).unwrap();
    kill(pid, Signal::STOP);
    let silent = Error::Silent { descriptor: other.descriptor() };
    assert_eq!(memory.overlay(other, Overlay::Copy).unwrap_err(), silent);
    // SAFETY: getpid(2) takes nothing and changes nothing.
    assert_eq!(unsafe { other.syscall(FromCaller::default(), 39, [0; 6]) }.unwrap_err(), silent);
    // Once it goes on, its late answer is nobody's, and it can still be switched to.
    kill(pid, Signal::CONT);
    assert_eq!(other.restrict(&[]).unwrap_err(), silent);
    for _ in 0..20 {
        assert_eq!(other.switch(0, &[]).unwrap().word, u64::from(pid.unsigned_abs()));
    }
    kill(pid, Signal::STOP);
    assert_eq!(other.switch_within(0, &[], Duration::from_millis(30)).unwrap_err(), Error::TimedOut);
    await_end_of(pid.unsigned_abs().into());
}

pub(crate) fn orphans_are_told_of() {
    // Whoever has control dies, after the one that waited for it.
    for round in 0..6_u64 {
        let middle = create(&Spec::new(), move |start| {
            let own = std::process::id().cast_signed();
            let last = create(&Spec::new(), move |_| {
                kill(own, Signal::KILL);
                await_end_of(own.unsigned_abs().into());
                std::thread::sleep(Duration::from_millis(round * 13));
                die()
            })
            .unwrap();
            last.switch(0, &[]).unwrap();
            unreachable!("{start:?}");
        })
        .unwrap();
        assert_eq!(middle.switch(0, &[]).unwrap_err(), Error::Orphaned);
        middle.close().unwrap();
    }
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    assert_eq!(other.switch(3, &[]).unwrap().word, 3);
}

pub(crate) fn orphans_are_told_to_the_next_in_the_row() {
    for (round, middle_first) in [(0, true), (1, true), (2, false)] {
        let words = shared_words();
        // Root, outer, middle, last: outer lives, and is told.
        let outer = create(&Spec::new(), move |start| {
            let middle = create(&Spec::new(), move |_| {
                let own = std::process::id().cast_signed();
                let last = create(&Spec::new(), move |_| {
                    if middle_first {
                        kill(own, Signal::KILL);
                        await_end_of(own.unsigned_abs().into());
                    }
                    std::thread::sleep(Duration::from_millis(round * 30));
                    die()
                })
                .unwrap();
                let told = last.switch(0, &[]).unwrap_err();
                assert!(matches!(told, Error::Died { .. }), "{told}");
                words[0].store(1, Ordering::SeqCst);
                die()
            })
            .unwrap();
            let told = middle.switch(0, &[]).unwrap_err();
            let right =
                if middle_first { told == Error::Orphaned } else { matches!(told, Error::Died { .. }) };
            let _ = start.arrival.caller.switch(u64::from(right), &[]);
            unreachable!()
        })
        .unwrap();
        assert_eq!(outer.switch(0, &[]).unwrap().word, 1);
        assert_eq!(words[0].load(Ordering::SeqCst), u64::from(!middle_first));
        outer.close().unwrap();
    }
}

/// A context that waits for a dead one has control next, however long it takes it to notice: the root, which sees the
/// death, too, does not take control from it.
pub(crate) fn a_slow_context_in_the_row_learns_of_a_death_first() {
    let hogs: Vec<i32> = (0..2 * std::thread::available_parallelism().unwrap().get())
        .map(|_| match plain_fork() {
            0 => loop {
                std::hint::spin_loop();
            },
            pid => pid,
        })
        .collect();
    let mut reported = Vec::new();
    for _ in 0..4 {
        let middle = create(&Spec::new(), |start| {
            let last = create(&Spec::new(), |_| die()).unwrap();
            // SAFETY: changes a number of the calling process. It gets the processor rarely from here on.
            assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) }, 0);
            let error = last.switch(0, &[]).unwrap_err();
            start.creator.switch(u64::from(matches!(error, Error::Died { .. })), &[]).unwrap();
            unreachable!();
        })
        .unwrap();
        reported.push(middle.switch(0, &[]).map(|arrival| arrival.word));
        middle.close().unwrap();
    }
    for hog in hogs {
        kill(hog, Signal::KILL);
        reap(hog);
    }
    assert_eq!(reported, vec![Ok(1); 4]);
}

/// Adds up what it is told; dies of 13. Says the sum, and its process.
fn mortal() -> Context {
    create(&Spec::new(), |start| {
        let mut sum = 0;
        let mut arrival = start.arrival;
        loop {
            match arrival.word {
                13 => die(),
                14 => loop {
                    std::thread::yield_now();
                },
                word => sum += word,
            }
            arrival = arrival.caller.switch(sum, &own_pid().to_ne_bytes()).unwrap();
        }
    })
    .unwrap()
}

/// Returns the sum, and the process.
fn add(mortal: Context, word: u64) -> (u64, u64) {
    let arrival = mortal.switch(word, &[]).unwrap();
    (arrival.word, u64::from_ne_bytes(arrival.bytes[..].try_into().unwrap()))
}

/// To ordinary users the kernel may not tell how a spare ended: that it was killed is not taken for an exit.
pub(crate) fn ordinary_programs_go_on_from_good_states() {
    assert!(become_ordinary());
    a_killed_context_goes_on_from_a_good_state();
}

pub(crate) fn a_killed_context_goes_on_from_a_good_state() {
    let is_kill = |end| {
        end == End::Killed { signal: 9 } || end == End::Unknown && !rustix::process::geteuid().is_root()
    };
    let mortal = mortal();
    let (sum, first) = add(mortal, 100);
    assert_eq!(sum, 100);
    mortal.checkpoint().unwrap();
    assert_eq!(add(mortal, 5), (105, first));
    // With control,
    let told = mortal.switch(13, &[]).unwrap_err();
    assert!(matches!(told, Error::Died { end, .. } if is_kill(end)), "{told}");
    let (sum, second) = add(mortal, 1);
    assert_eq!(sum, 101);
    assert_ne!(second, first);
    // parked,
    mortal.checkpoint().unwrap();
    reap(kill_after(second, 0));
    await_end_of(second);
    let told = mortal.switch(1, &[]).unwrap_err();
    assert!(matches!(told, Error::Died { end, .. } if is_kill(end)), "{told}");
    let (sum, third) = add(mortal, 1);
    assert_eq!(sum, 102);
    // or when its time is up.
    mortal.checkpoint().unwrap();
    let told = mortal.switch_within(14, &[], Duration::from_millis(50)).unwrap_err();
    assert_eq!(told, Error::TimedOut);
    let (sum, last) = add(mortal, 2);
    assert_eq!(sum, 104);
    assert_ne!(last, third);
    // It has no such state now.
    assert!(matches!(mortal.switch(13, &[]), Err(Error::Died { .. })));
    assert!(matches!(mortal.switch(1, &[]), Err(Error::Gone { .. })));
    mortal.close().unwrap();
    // One that exits ends the program, whatever was kept.
    let status = in_child(|| {
        let leaver = create(&Spec::new(), |start| {
            let _ = start.arrival.caller.switch(0, &[]);
            std::process::exit(21)
        })
        .unwrap();
        leaver.switch(0, &[]).unwrap();
        leaver.checkpoint().unwrap();
        let _ = leaver.switch(0, &[]);
    });
    assert_eq!(libc::WEXITSTATUS(status), 21);
}

pub(crate) fn a_good_state_outlives_many_deaths() {
    let mortal = mortal();
    let mut sum = 0;
    for round in 0..40_u64 {
        let (before, process) = add(mortal, 1);
        sum += 1;
        assert_eq!(before, sum);
        mortal.checkpoint().unwrap();
        let killer = kill_after(process, round * 40);
        // It dies anywhere in here; what it was told since is lost.
        let told = loop {
            match mortal.switch(1000, &[]) {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert!(matches!(told, Error::Died { .. }), "{told}");
        reap(killer);
    }
    assert_eq!(add(mortal, 1).0, sum + 1);
}

pub(crate) fn a_good_state_is_the_newest_one() {
    let mortal = mortal();
    for round in 1..=20 {
        assert_eq!(add(mortal, 1).0, round);
        mortal.checkpoint().unwrap();
    }
    assert_eq!(add(mortal, 500).0, 520);
    assert!(mortal.switch(13, &[]).is_err());
    assert_eq!(add(mortal, 1).0, 21);
    // Another context that holds it finds it, too.
    mortal.checkpoint().unwrap();
    let other = create(
        &Spec::new(),
        server(move |word| match mortal.switch(word, &[]) {
            Ok(arrival) => arrival.word,
            Err(Error::Died { .. }) => 7777,
            Err(error) => panic!("{error}"),
        }),
    )
    .unwrap();
    assert_eq!(other.switch(13, &[]).unwrap().word, 7777);
    assert_eq!(add(mortal, 1).0, 22);
}

pub(crate) fn good_states_end_with_their_contexts() {
    let children = || {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let name = std::fs::read_link("/proc/self/exe").unwrap();
        all.filter(|entry| std::fs::read_link(entry.path().join("exe")).is_ok_and(|exe| exe == name))
            .filter_map(|entry| std::fs::read_to_string(entry.path().join("environ")).ok())
            .filter(|environ| environ.contains("good_states_end_with_their_contexts"))
            .count()
    };
    let before = children();
    let mortal = mortal();
    add(mortal, 1);
    mortal.checkpoint().unwrap();
    mortal.checkpoint().unwrap();
    mortal.close().unwrap();
    let start = Instant::now();
    while children() != before {
        assert!(start.elapsed() < Duration::from_secs(20), "{} processes", children());
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn good_states_need_rights() {
    let mortal = mortal();
    mortal.restrict(&[]).unwrap();
    assert!(matches!(mortal.checkpoint(), Err(Error::Denied { .. })));
    let filtered = create(&Spec::new().withhold(&Calls::global()), server(|word| word));
    assert!(matches!(filtered.unwrap().checkpoint(), Err(Error::Denied { .. })));
}
