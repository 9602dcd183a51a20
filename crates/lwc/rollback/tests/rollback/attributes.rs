//! What else the kernel keeps for a process: signals, timers, limits, names, registers.

use std::time::Duration;

use orrery_rollback::{Error, Leftover, Outcome};

use super::common::{give_up, map, rollback};

pub(crate) fn dispositions_and_masks_come_back() {
    // SAFETY: the handler is a function of that kind, and calls what it may call there.
    unsafe { libc::signal(libc::SIGUSR1, give_up as *const () as usize) };
    let state = || {
        let mut actions = Vec::new();
        for signal in 1..=64 {
            actions.push(orrery_sys::signals::action(signal).ok());
        }
        let mask = orrery_sys::signals::set_mask(0);
        orrery_sys::signals::set_mask(mask);
        (actions, mask, orrery_sys::signals::alternate_stack())
    };
    let mut rollback = rollback();
    rollback.run(|| {}).unwrap();
    let before = state();
    for _ in 0..3 {
        rollback
            // SAFETY: takes numbers; what the run does to actions and mask is undone.
            .run(|| unsafe {
                for signal in 1..=64 {
                    libc::signal(signal, libc::SIG_IGN);
                }
                libc::signal(libc::SIGUSR1, libc::SIG_DFL);
                orrery_sys::signals::block_all();
                let stack = libc::stack_t { ss_sp: map(1 << 16).cast(), ss_flags: 0, ss_size: 1 << 16 };
                libc::sigaltstack(&raw const stack, std::ptr::null_mut());
            })
            .unwrap();
        assert_eq!(state(), before);
    }
}

/// Each disposition changes alone, so that nothing else gives the change away: between default, ignored and caught, from
/// one handler to another, and in what counts beside the handler.
pub(crate) fn each_disposition_comes_back_alone() {
    use orrery_sys::signals::{Action, action, set_action};
    extern "C" fn other(_: i32) {}
    const RESTORER: usize = 0x0400_0000;
    let usual = |handler: usize| Action {
        handler,
        flags: RESTORER | libc::SA_RESTART.cast_unsigned() as usize,
        restorer: orrery_sys::signals::restorer as *const () as usize,
        mask: 0,
    };
    let (handler, other) = (give_up as *const () as usize, other as *const () as usize);
    let signals = || {
        (1..=64).filter(|signal| {
            ![libc::SIGKILL, libc::SIGSTOP, orrery_rollback::CONTROL_SIGNAL].contains(signal)
        })
    };
    for at_first in [libc::SIG_DFL, libc::SIG_IGN, handler] {
        for signal in signals() {
            // SAFETY: the handlers are functions of that kind, and call what they may call there.
            unsafe { set_action(signal, &usual(at_first)) }.unwrap();
        }
        let state = || signals().map(|signal| action(signal).unwrap()).collect::<Vec<_>>();
        let before = state();
        let mut rollback = rollback();
        for signal in signals() {
            let mut changes = vec![usual(libc::SIG_DFL), usual(libc::SIG_IGN), usual(handler), usual(other)];
            if at_first == handler {
                let wanted = usual(handler);
                changes
                    .push(Action { flags: RESTORER | libc::SA_NODEFER.cast_unsigned() as usize, ..wanted });
                changes.push(Action { mask: 1 << 9, ..wanted });
            }
            if signal == libc::SIGCHLD {
                for flag in [libc::SA_NOCLDWAIT, libc::SA_NOCLDSTOP] {
                    let wanted = usual(at_first);
                    changes.push(Action { flags: wanted.flags | flag.cast_unsigned() as usize, ..wanted });
                }
            }
            for change in changes {
                // SAFETY: as before.
                rollback.run(|| unsafe { set_action(signal, &change) }.unwrap()).unwrap();
                assert_eq!(action(signal), Ok(usual(at_first)), "signal {signal}, {change:x?}");
            }
        }
        assert_eq!(state(), before);
    }
}

/// What an earlier run found is not what a later one puts back, where the program has changed it meanwhile.
pub(crate) fn what_the_program_changes_between_runs_comes_back() {
    use orrery_sys::signals::{Action, action, set_action};
    extern "C" fn other(_: i32) {}
    const RESTORER: usize = 0x0400_0000;
    let usual = |handler: usize| Action {
        handler,
        flags: RESTORER,
        restorer: orrery_sys::signals::restorer as *const () as usize,
        mask: 0,
    };
    let (handler, other) = (give_up as *const () as usize, other as *const () as usize);
    let wanted = |handler| Action { mask: 1 << 9, ..usual(handler) };
    let mut rollback = rollback();
    let states = [libc::SIG_DFL, libc::SIG_IGN, handler, other];
    for signal in [libc::SIGUSR1, libc::SIGCHLD, libc::SIGRTMAX()] {
        for (at_first, then) in states.into_iter().flat_map(|one| states.map(|then| (one, then))) {
            for state in [at_first, then] {
                // SAFETY: the handlers are functions of that kind, and call what they may call there.
                unsafe { set_action(signal, &wanted(state)) }.unwrap();
                for change in states {
                    // SAFETY: as before.
                    rollback.run(|| unsafe { set_action(signal, &usual(change)) }.unwrap()).unwrap();
                    let now = action(signal).unwrap();
                    assert_eq!(now.handler, state, "signal {signal}, {at_first:x}, {then:x}, {change:x}");
                    if state != libc::SIG_DFL && state != libc::SIG_IGN {
                        assert_eq!(now, wanted(state));
                    }
                }
            }
        }
    }
    for soft in [1 << 30, (1 << 30) - 1, 1 << 30] {
        let set = |soft| {
            let limit = libc::rlimit { rlim_cur: soft, rlim_max: libc::RLIM_INFINITY };
            // SAFETY: reads the limit.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
        };
        set(soft);
        rollback.run(|| set(7)).unwrap();
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: writes to the limit.
        unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
        assert_eq!(limit.rlim_cur, soft);
    }
}

/// Each limit changes alone; so do the mask for new files and the name, which are shown among many other things.
pub(crate) fn each_limit_umask_and_name_come_back_alone() {
    let limit = |which: u32| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: writes to the limit.
        assert_eq!(unsafe { libc::getrlimit(which, &raw mut limit) }, 0);
        (limit.rlim_cur, limit.rlim_max)
    };
    let mut rollback = rollback();
    for which in 0..16 {
        let (soft, hard) = limit(which);
        // One less is a change that no unit and no rounding hides.
        let mut change = |soft, hard| {
            let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
            // SAFETY: reads the limit.
            rollback.run(|| assert_eq!(unsafe { libc::setrlimit(which, &raw const limit) }, 0))
        };
        if hard > 0 {
            change(if soft == 0 { 1 } else { (soft - 1).min(1 << 40) }, hard).unwrap();
            assert_eq!(limit(which), (soft, hard), "limit {which}");
            // Raising it again takes a privilege, without which it is named.
            let lower = hard.min(1 << 40) - 1;
            match change(soft.min(lower), lower) {
                Ok(_) => assert_eq!(limit(which), (soft, hard), "limit {which}"),
                Err(error) => {
                    let named = Error::NotUndone(Leftover::Limit(i32::try_from(which).unwrap()));
                    assert_eq!(error, named);
                }
            }
        }
    }
    for mask in [0, 0o1, 0o20, 0o777] {
        // SAFETY: takes numbers.
        unsafe { libc::umask(0o22) };
        // SAFETY: takes numbers.
        rollback.run(|| drop(Box::new(unsafe { libc::umask(mask) }))).unwrap();
        // SAFETY: takes numbers.
        assert_eq!(unsafe { libc::umask(0o22) }, 0o22, "{mask:o}");
    }
    let name = || {
        let mut name = [0_u8; 16];
        // SAFETY: writes 16 bytes.
        unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
        name
    };
    let names =
        [c"a", c"a ", c" a", c"a\n", c"a\\n", c"a\t", c"", c"fifteen letters", c"\x01\x02\x03\xff\xff\xff"];
    for at_first in names {
        for other in names {
            // SAFETY: the names end with a zero.
            unsafe { libc::prctl(libc::PR_SET_NAME, at_first.as_ptr()) };
            let before = name();
            // SAFETY: the names end with a zero.
            rollback
                .run(|| unsafe { drop(Box::new(libc::prctl(libc::PR_SET_NAME, other.as_ptr()))) })
                .unwrap();
            assert_eq!(name(), before, "{at_first:?} after {other:?}");
        }
    }
}

pub(crate) fn blocked_signals_do_not_leak() {
    let mut rollback = rollback();
    // Undelivered at the end of the run, any of these would end the process.
    // SAFETY: takes numbers.
    let outcome = rollback.run(|| unsafe {
        orrery_sys::signals::block_all();
        libc::raise(libc::SIGTERM);
        libc::kill(libc::getpid(), libc::SIGUSR2);
        libc::raise(libc::SIGRTMAX());
    });
    assert_eq!(outcome, Ok(Outcome::Returned));
}

pub(crate) fn timers_come_back() {
    let mut rollback = rollback();
    let list = || {
        let mut ids = Vec::new();
        orrery_sys::timers::PosixTimers::open().unwrap().for_each(|id| ids.push(id)).unwrap();
        ids
    };
    let before = list();
    // SAFETY: reads and writes structures that live; the timer ends with the run.
    let outcome = rollback.run(|| unsafe {
        libc::alarm(1);
        let mut timer = std::ptr::null_mut();
        libc::timer_create(libc::CLOCK_MONOTONIC, std::ptr::null_mut(), &raw mut timer);
        let soon = libc::itimerspec {
            it_interval: libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 },
            it_value: libc::timespec { tv_sec: 0, tv_nsec: 900_000_000 },
        };
        libc::timer_settime(timer, 0, &raw const soon, std::ptr::null_mut());
    });
    assert_eq!(outcome, Ok(Outcome::Returned));
    assert_eq!(list(), before);
    std::thread::sleep(Duration::from_millis(1200));
    // A timer of the program goes on.
    // SAFETY: takes numbers.
    unsafe { libc::alarm(100) };
    // SAFETY: takes numbers.
    rollback.run(|| unsafe { drop(Box::new(libc::alarm(0))) }).unwrap();
    // SAFETY: takes numbers.
    assert!(unsafe { libc::alarm(0) } > 90);
}

pub(crate) fn directory_umask_and_limits_come_back() {
    let dir = tempfile::tempdir().unwrap();
    std::env::set_current_dir(dir.path()).unwrap();
    // SAFETY: takes numbers.
    unsafe { libc::umask(0o27) };
    let mut rollback = rollback();
    for _ in 0..3 {
        rollback
            // SAFETY: takes numbers, and reads a limit that lives.
            .run(|| unsafe {
                std::env::set_current_dir("/proc").unwrap();
                libc::umask(0o777);
                let limit = libc::rlimit { rlim_cur: 5, rlim_max: libc::RLIM_INFINITY };
                libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit);
                libc::setrlimit(libc::RLIMIT_CORE, &raw const limit);
            })
            .unwrap();
        assert_eq!(std::env::current_dir().unwrap(), dir.path().canonicalize().unwrap());
        // SAFETY: takes numbers.
        assert_eq!(unsafe { libc::umask(0o27) }, 0o27);
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: writes to the limit.
        unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
        assert_eq!(limit.rlim_cur, libc::RLIM_INFINITY);
    }
}

pub(crate) fn names_and_priorities_come_back() {
    let mut rollback = rollback();
    let name = || std::fs::read_to_string("/proc/self/comm").unwrap();
    let before = name();
    rollback
        // SAFETY: the name ends with a zero, and numbers are taken otherwise.
        .run(|| unsafe {
            libc::prctl(libc::PR_SET_NAME, c"somebody else".as_ptr());
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGUSR1);
            libc::prctl(libc::PR_SET_TIMERSLACK, 123_456);
            libc::prctl(libc::PR_SET_DUMPABLE, 0);
        })
        .unwrap();
    assert_eq!(name(), before);
    let mut signal = 0;
    // SAFETY: writes to the number.
    unsafe { libc::prctl(libc::PR_GET_PDEATHSIG, &raw mut signal) };
    assert_eq!(signal, 0);
    // SAFETY: takes numbers.
    assert_ne!(unsafe { libc::prctl(libc::PR_GET_TIMERSLACK) }, 123_456);
    // SAFETY: takes numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_GET_DUMPABLE) }, 1);
}

pub(crate) fn floating_point_control_comes_back() {
    let mut rollback = rollback();
    let control = || {
        let (mut x87, mut sse) = (0_u16, 0_u32);
        // SAFETY: the two instructions write to numbers that are as long as they are.
        unsafe {
            std::arch::asm!("fnstcw [{}]", in(reg) &raw mut x87);
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut sse);
        }
        (x87, sse & 0xffc0)
    };
    let before = control();
    rollback
        // SAFETY: the two instructions read numbers that are as long as they are; the run's control words are undone.
        .run(|| unsafe {
            let (x87, sse) = (0x0c7f_u16, 0x7f80_u32);
            std::arch::asm!("fldcw [{}]", in(reg) &raw const x87);
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const sse);
            std::arch::asm!("std");
        })
        .unwrap();
    assert_eq!(control(), before);
    let kept: Vec<f64> = (0..50).map(|n| f64::from(n).sqrt()).collect();
    // SAFETY: nothing is mapped there: the fault ends the run, as is wanted.
    rollback.run(|| unsafe { std::ptr::null_mut::<f64>().write_volatile(kept[3]) }).unwrap();
    assert!((kept[4] - 2.0).abs() < 1e-12);
}

pub(crate) fn the_cpu_number_stays_live() {
    let mut rollback = rollback();
    // SAFETY: the set is one of numbers, for which zero is a value, and is read within its size.
    let pin = |cpu: usize| unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set)
    };
    if pin(1) != 0 {
        orrery_testing::skipped!("one CPU only");
        return;
    }
    for _ in 0..20 {
        pin(0);
        // SAFETY: takes nothing.
        assert_eq!(unsafe { libc::sched_getcpu() }, 0);
        rollback
            .run(|| {
                pin(1);
            })
            .unwrap();
        let mut cpu = 9_u32;
        // SAFETY: writes to the number.
        unsafe { libc::syscall(libc::SYS_getcpu, &raw mut cpu, 0, 0) };
        // sched_getcpu reads what the kernel wrote into this process' memory, which must not be an old note.
        // SAFETY: takes nothing.
        assert_eq!(unsafe { libc::sched_getcpu() }, i32::try_from(cpu).unwrap());
    }
}
