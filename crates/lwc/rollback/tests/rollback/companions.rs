//! Children and threads that a run started, and threads that were there before.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use orrery_rollback::Error;
use orrery_rollback::{Children, KeptBuffer, Outcome, Rollback, safe_point};

use super::common::{rollback, tell};

pub(crate) fn children_are_killed() {
    let mut rollback = rollback();
    let (reader, writer) = std::io::pipe().unwrap();
    // SAFETY: the run has one thread, so the children find no lock held; they call what is async-signal-safe.
    let outcome = rollback.run(|| unsafe {
        // A child, a grandchild in a session of its own whose parent is gone, and one that nobody waited for.
        std::mem::forget(Command::new("sleep").arg("1000").spawn().unwrap());
        if libc::fork() == 0 {
            libc::setsid();
            if libc::fork() == 0 {
                libc::sleep(1000);
            }
            libc::_exit(0);
        }
        if libc::fork() == 0 {
            libc::_exit(0);
        }
        std::thread::sleep(Duration::from_millis(50));
    });
    assert_eq!(outcome, Ok(Outcome::Returned));
    drop(writer);
    rollback.release_files().unwrap();
    // Each of them had the pipe's other end: with the last gone, it is at its end.
    let mut nothing = Vec::new();
    std::io::Read::read_to_end(&mut { reader }, &mut nothing).unwrap();
    // SAFETY: no status is asked for.
    assert_eq!(unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) }, -1, "no child is left");
}

/// A closure that gives up taking orphans in does so for itself.
pub(crate) fn orphans_of_later_closures_are_killed() {
    let mut rollback = rollback();
    // SAFETY: takes a number.
    rollback.run(|| unsafe { drop(Box::new(libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 0))) }).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    // SAFETY: the run has one thread, so the children find no lock held; they call what is async-signal-safe.
    let outcome = rollback.run(|| unsafe {
        let child = libc::fork();
        if child == 0 {
            if libc::fork() == 0 {
                libc::sleep(20);
            }
            libc::_exit(0);
        }
        libc::waitpid(child, std::ptr::null_mut(), 0);
    });
    assert_eq!(outcome, Ok(Outcome::Returned));
    drop(writer);
    rollback.release_files().unwrap();
    let start = std::time::Instant::now();
    let mut nothing = Vec::new();
    std::io::Read::read_to_end(&mut { reader }, &mut nothing).unwrap();
    assert!(start.elapsed() < Duration::from_secs(15), "the orphan lived on");
}

pub(crate) fn children_may_be_left() {
    let mut rollback = Rollback::builder().children(Children::Leave).build().unwrap();
    let kept = KeptBuffer::with_capacity(100).unwrap();
    rollback
        .run(|| tell(&kept, &Command::new("sleep").arg("1000").spawn().unwrap().id().to_string()))
        .unwrap();
    let pid: i32 = std::str::from_utf8(kept.bytes()).unwrap().parse().unwrap();
    // SAFETY: takes numbers; the process is this case's own.
    unsafe {
        assert_eq!(libc::kill(pid, 0), 0);
        libc::kill(pid, libc::SIGKILL);
        assert_eq!(libc::waitpid(pid, std::ptr::null_mut(), 0), pid);
    }
}

pub(crate) fn a_forked_child_leaves_normally() {
    let mut rollback = rollback();
    let kept = KeptBuffer::with_capacity(100).unwrap();
    // SAFETY: the run has one thread, so the child finds no lock held; the status lives.
    let status_of = |child: &dyn Fn()| unsafe {
        let pid = libc::fork();
        if pid == 0 {
            child();
            libc::_exit(99);
        }
        let mut status = 0;
        libc::waitpid(pid, &raw mut status, 0);
        status
    };
    let outcome = rollback.run(|| {
        let exited = status_of(&|| std::process::exit(5));
        // SAFETY: nothing is mapped there: the fault ends the child, as is wanted.
        let crashed = status_of(&|| unsafe { std::ptr::null_mut::<u8>().write_volatile(1) });
        let aborted = status_of(&|| std::process::abort());
        tell(
            &kept,
            &format!("{} {} {}", libc::WEXITSTATUS(exited), libc::WTERMSIG(crashed), libc::WTERMSIG(aborted)),
        );
    });
    assert_eq!((outcome, kept.bytes()), (Ok(Outcome::Returned), &b"5 11 6"[..]));
}

pub(crate) fn threads_end() {
    let mut rollback = rollback();
    for _ in 0..5 {
        let outcome = rollback.run(|| {
            for number in 0..8_u64 {
                std::thread::spawn(move || {
                    let mut hoard = vec![number; 10_000];
                    loop {
                        if number % 2 == 0 {
                            std::thread::sleep(Duration::from_secs(50));
                        }
                        hoard.push(number);
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(5));
        });
        assert_eq!(outcome, Ok(Outcome::Returned));
        assert_eq!(std::fs::read_dir("/proc/self/task").unwrap().count(), 1);
    }
}

fn spin() -> ! {
    loop {
        std::hint::spin_loop();
    }
}

/// What a thread of libraries may do: it blocks all signals, by way of the C library, and waits, or works.
pub(crate) fn threads_that_block_signals_end() {
    static BLOCKED: AtomicU32 = AtomicU32::new(0);
    let mut rollback = rollback();
    for _ in 0..5 {
        let outcome = rollback.run(|| {
            for number in 0..4 {
                std::thread::spawn(move || {
                    // SAFETY: all-zero is a set, which the calls write and read.
                    unsafe {
                        let mut all: libc::sigset_t = std::mem::zeroed();
                        libc::sigfillset(&raw mut all);
                        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
                    }
                    BLOCKED.fetch_add(1, Ordering::Release);
                    if number % 2 == 0 {
                        spin();
                    }
                    std::thread::sleep(Duration::from_secs(1000));
                });
            }
            while BLOCKED.load(Ordering::Acquire) < 4 {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(outcome, Ok(Outcome::Returned));
        assert_eq!(std::fs::read_dir("/proc/self/task").unwrap().count(), 1);
    }
}

/// The C library has a thread behind such timers, which blocks all signals that it can.
pub(crate) fn threads_of_timers_end() {
    static TICKS: AtomicU32 = AtomicU32::new(0);
    extern "C" fn tick(_: libc::sigval) {
        TICKS.fetch_add(1, Ordering::Release);
    }
    let mut rollback = rollback();
    for _ in 0..5 {
        let outcome = rollback.run(|| {
            // SAFETY: the event, of which zero is a value, is written as sigevent(3type) has it for SIGEV_THREAD: a
            // function and attributes, of which there are none, behind the kind.
            unsafe {
                let mut event: libc::sigevent = std::mem::zeroed();
                event.sigev_notify = libc::SIGEV_THREAD;
                // The value and the number of the signal come first, of 16 bytes.
                let function = (&raw mut event).cast::<extern "C" fn(libc::sigval)>().add(2);
                function.write(tick);
                let mut timer: libc::timer_t = std::mem::zeroed();
                assert_eq!(libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer), 0);
                let mut every: libc::itimerspec = std::mem::zeroed();
                every.it_value.tv_nsec = 1_000_000;
                every.it_interval.tv_nsec = 1_000_000;
                assert_eq!(libc::timer_settime(timer, 0, &raw const every, std::ptr::null_mut()), 0);
            }
            while TICKS.load(Ordering::Acquire) < 3 {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(outcome, Ok(Outcome::Returned));
        assert_eq!(std::fs::read_dir("/proc/self/task").unwrap().count(), 1);
    }
}

/// Changing the user, which the C library does by the signal that ends threads, works in a closure.
pub(crate) fn users_change_in_all_threads_of_a_closure() {
    let mut rollback = rollback();
    let kept = KeptBuffer::with_capacity(100).unwrap();
    for _ in 0..2 {
        let outcome = rollback.run(|| {
            let (sender, receiver) = std::sync::mpsc::channel::<()>();
            let other = std::thread::spawn(move || {
                let _ = receiver.recv();
                // SAFETY: asks for a number.
                unsafe { libc::getuid() }
            });
            // SAFETY: takes numbers; the user becomes the one that it is.
            let answer = unsafe { libc::setresuid(libc::getuid(), libc::geteuid(), libc::geteuid()) };
            drop(sender);
            // SAFETY: asks for a number.
            let same = other.join().unwrap() == unsafe { libc::getuid() };
            tell(&kept, &format!("{answer} {same};"));
        });
        assert_eq!(outcome, Ok(Outcome::Returned));
    }
    assert_eq!(kept.bytes(), b"0 true;0 true;");
}

/// A thread that blocks signals by a system call of its own cannot be ended: the process says which, soon.
pub(crate) fn a_deaf_thread_is_fatal() {
    for works in [false, true] {
        deaf_thread_is_fatal(works);
    }
}

fn deaf_thread_is_fatal(works: bool) {
    static DEAF: AtomicU32 = AtomicU32::new(0);
    let (mut reader, writer) = std::io::pipe().unwrap();
    // SAFETY: the case has one thread, so the child finds no lock held.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: takes numbers; nobody owns descriptor 2.
        unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&writer), 2) };
        let _ = rollback().run(|| {
            std::thread::spawn(move || {
                orrery_sys::signals::block_all();
                DEAF.store(1, Ordering::Release);
                if works {
                    spin();
                }
                std::thread::sleep(Duration::from_secs(100));
            });
            while DEAF.load(Ordering::Acquire) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    drop(writer);
    let mut status = 0;
    // SAFETY: all-zero is a usage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: writes to the status and the usage.
    unsafe { libc::wait4(pid, &raw mut status, 0, &raw mut usage) };
    assert_eq!(libc::WEXITSTATUS(status), orrery_rollback::EXIT_BROKEN);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut reader, &mut said).unwrap();
    assert!(said.contains("does not end: signal 33 is blocked there by rt_sigprocmask(2)"), "{said}");
    // It slept for 50 us at a time, 20,000 times, until it gave up.
    assert!(works || usage.ru_nvcsw < 5_000, "it looked {} times", usage.ru_nvcsw);
}

pub(crate) fn parked_threads_go_on() {
    static STOP: AtomicU32 = AtomicU32::new(0);
    static ROUNDS: AtomicU32 = AtomicU32::new(0);
    let workers: Vec<_> = (0..3)
        .map(|_| {
            std::thread::spawn(|| {
                let mut sum = 0_u64;
                while STOP.load(Ordering::Relaxed) == 0 {
                    sum += 1;
                    ROUNDS.fetch_add(1, Ordering::Relaxed);
                    safe_point();
                    std::thread::sleep(Duration::from_micros(200));
                }
                sum
            })
        })
        .collect();
    let mut rollback = rollback();
    let mut value = 1;
    for _ in 0..20 {
        let before = ROUNDS.load(Ordering::Relaxed);
        assert_eq!(rollback.run(|| value += 1), Ok(Outcome::Returned));
        assert_eq!(value, 1);
        while ROUNDS.load(Ordering::Relaxed) <= before {
            std::thread::yield_now();
        }
    }
    STOP.store(1, Ordering::Relaxed);
    let sum: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
    assert_eq!(sum, u64::from(ROUNDS.load(Ordering::Relaxed)));
}

pub(crate) fn running_threads_are_refused() {
    std::thread::spawn(|| std::thread::sleep(Duration::from_secs(100)));
    let mut ran = false;
    assert_eq!(rollback().run(|| ran = true), Err(Error::Threads { running: 1, parked: 0 }));
    assert!(!ran);
}

pub(crate) fn limits_apply_to_work_alone() {
    let outcomes = KeptBuffer::with_capacity(4096).unwrap();
    let mut rollback = rollback();
    rollback.set_memory_limit(Some(16 << 20));
    rollback.set_time_limit(Some(Duration::from_millis(500)));
    let last = rollback.serve(
        |last| {
            if let Some(last) = last {
                tell(&outcomes, &format!("{last:?} "));
            }
            drop(std::hint::black_box(vec![1_u8; 64 << 20]));
            std::thread::sleep(Duration::from_millis(600));
            match outcomes.bytes().iter().filter(|&&byte| byte == b' ').count() {
                3 => std::ops::ControlFlow::Break(()),
                round => std::ops::ControlFlow::Continue(round),
            }
        },
        |round| match round {
            0 => drop(std::hint::black_box(vec![1_u8; 1 << 20])),
            1 => {
                let mut pieces = Vec::with_capacity(1000);
                loop {
                    pieces.push(vec![1_u8; 100 << 10]);
                }
            }
            _ => loop {
                std::hint::spin_loop();
            },
        },
    );
    assert_eq!(last, Ok(Outcome::Returned));
    assert_eq!(outcomes.bytes(), b"Returned MemoryLimit TimedOut ");
}

pub(crate) fn one_of_racing_threads_gets_the_engine() {
    let start = std::sync::Barrier::new(4);
    let built: u32 = std::thread::scope(|scope| {
        let racers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    match Rollback::builder().build() {
                        Ok(_) => 1,
                        Err(Error::WrongThread { .. }) => 0,
                        Err(error) => panic!("{error}"),
                    }
                })
            })
            .collect();
        racers.into_iter().map(|racer| racer.join().unwrap()).sum()
    });
    assert_eq!(built, 1);
}
