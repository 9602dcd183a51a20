//! Contexts that die, stop, or become something else, and what the others are told.

use std::sync::atomic::Ordering;
use std::time::Duration;

use orrery_domain::End;
use orrery_lwc::context::{Error, Overlay, Own, Spec, create};

use crate::support::{PAGE, await_end_of, kill_after, mapped, own_pid, reap, server, shared_words};

pub(crate) fn a_killed_context_is_an_error() {
    let other = create(
        &Spec::new(),
        server(|word| {
            if word == 1 {
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
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
    unsafe { libc::kill(i32::try_from(pid).unwrap(), libc::SIGKILL) };
    await_end_of(pid);
    assert!(matches!(parked.switch(0, &[]), Err(Error::Gone { .. } | Error::Died { .. })));
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    assert_eq!(other.switch(3, &[]).unwrap().word, 3, "the program goes on");
}

pub(crate) fn a_fault_is_an_error() {
    let other = create(
        &Spec::new(),
        server(|_| {
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
        let pid = unsafe { libc::getpid() };
        let last = create(&Spec::new(), move |_| {
            unsafe { libc::kill(pid, libc::SIGKILL) };
            await_end_of(pid.try_into().unwrap());
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            unreachable!();
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
        unsafe { libc::execv(program.as_ptr(), arguments.as_ptr()) };
        unreachable!();
    })
    .unwrap();
    assert!(matches!(other.switch(0, &[]), Err(Error::Died { .. })));
}

pub(crate) fn a_stopped_context_holds_nobody_up() {
    let memory = mapped(1);
    let other = create(&Spec::new(), server(|_| own_pid())).unwrap();
    let pid = i32::try_from(other.switch(0, &[]).unwrap().word).unwrap();
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    let silent = Error::Silent { descriptor: other.descriptor() };
    assert_eq!(unsafe { other.overlay(memory, PAGE, Overlay::Copy) }.unwrap_err(), silent);
    assert_eq!(unsafe { other.syscall(Own::default(), 39, [0; 6]) }.unwrap_err(), silent);
    // Once it goes on, its late answer is nobody's, and it can still be switched to.
    unsafe { libc::kill(pid, libc::SIGCONT) };
    assert_eq!(other.restrict(&[]).unwrap_err(), silent);
    for _ in 0..20 {
        assert_eq!(other.switch(0, &[]).unwrap().word, u64::from(pid.unsigned_abs()));
    }
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    assert_eq!(other.switch_within(0, &[], Duration::from_millis(30)).unwrap_err(), Error::TimedOut);
    await_end_of(pid.unsigned_abs().into());
}

pub(crate) fn orphans_are_told_of() {
    // Whoever has control dies, after the one that waited for it.
    for round in 0..6_u64 {
        let middle = create(&Spec::new(), move |start| {
            let own = unsafe { libc::getpid() };
            let last = create(&Spec::new(), move |_| {
                unsafe { libc::kill(own, libc::SIGKILL) };
                await_end_of(own.unsigned_abs().into());
                std::thread::sleep(Duration::from_millis(round * 13));
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
                unreachable!();
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
