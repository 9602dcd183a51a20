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

pub(crate) fn a_deaf_thread_is_fatal() {
    static DEAF: AtomicU32 = AtomicU32::new(0);
    // SAFETY: the case has one thread, so the child finds no lock held.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: the string ends with a zero; nobody owns descriptor 2.
        unsafe {
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY);
            libc::dup2(null, 2);
        }
        let _ = rollback().run(|| {
            std::thread::spawn(|| {
                orrery_sys::signals::block_all();
                DEAF.store(1, Ordering::Release);
                std::thread::sleep(Duration::from_secs(100));
            });
            while DEAF.load(Ordering::Acquire) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: writes to the status.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(libc::WEXITSTATUS(status), orrery_rollback::EXIT_BROKEN);
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
